"""Rules of results, of replies, and of resumed answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvlane.app.results import lane_results, reply_sender, result_writer
from kvlane.streams.responses import reply_stream
from tests.simulation.replacements import Replacement


def results_are_written_unseen() -> Iterator[Replacement]:
    yield lane_results.LaneResults, "_is_finished", lambda *_: False


def results_of_others_are_not_looked_for() -> Iterator[Replacement]:
    async def read_results(*_: Any) -> dict[str, Any]:
        return {}

    yield result_writer.ResultWriter, "_read_results", read_results


def results_wait_for_replies() -> Iterator[Replacement]:
    original = result_writer.ResultWriter._write

    async def write(self: Any, batch: Any) -> None:
        await original(self, batch)
        while self._context.replies._waiting:
            await self._context.ctx.clock.sleep(0.5)

    yield result_writer.ResultWriter, "_write", write


def requests_are_done_before_their_replies() -> Iterator[Replacement]:
    original = reply_sender.ReplySender.send

    def send(self: Any, reply: Any) -> None:
        reply.claim.mark_done(reply.offset)
        original(self, reply)

    yield reply_sender.ReplySender, "send", send


def replies_are_not_looked_for() -> Iterator[Replacement]:
    async def search(_: Any, __: Any, ___: Any, replies: Any) -> None:
        for reply in replies:
            reply.is_doubtful = False

    yield reply_sender.ReplySender, "_search", search


def pieces_merge_across_positions() -> Iterator[Replacement]:
    yield reply_stream.Reply, "_is_known", lambda *_: False
