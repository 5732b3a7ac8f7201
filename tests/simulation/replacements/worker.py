"""Rules of workers, of time and outages, and of snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import msgspec

from kvlane.app import worker
from kvlane.app.http.openai import active_streams
from kvlane.app.serving import chunk_writer, registration, run_executor, run_queue
from kvlane.app.text import answer_parts, parsed_stream
from kvlane.streams.clock import BrokerClock
from kvlane.streams.errors import AppendFailed
from kvlane.streams.ports import Appended, Partition
from kvlane.streams.reading import range_reader
from kvlane.streams.views import snapshot_writer
from tests.simulation.replacements import Replacement

# --- workers -------------------------------------------------------------------------------------


def finished_before_the_last_ack() -> Iterator[Replacement]:
    abandon = chunk_writer.ChunkStream.discard

    async def finish(
        self: Any, last: chunk_writer.FinalChunk, text: str = "", data: Sequence[Any] = ()
    ) -> None:
        if data:
            self._add_data(data)
        self._text += text
        self._last = last
        self.sent_off = True
        if self._released:
            self._writer.wake(self)

    def keep(self: Any) -> None:
        if not hasattr(self, "sent_off"):
            abandon(self)

    yield chunk_writer.ChunkStream, "finish", finish
    yield chunk_writer.ChunkStream, "discard", keep


def go_on_after_a_lost_chunk() -> Iterator[Replacement]:
    on_end = chunk_writer.ChunkWriter._on_end

    def on_any_end(self: Any, lane: int, batch: Any, appended: Any) -> None:
        if not appended.cancelled() and isinstance(appended.exception(), AppendFailed):
            appended = asyncio.get_running_loop().create_future()
            appended.set_result(Appended(lane, 0, 0))
        on_end(self, lane, batch, appended)

    yield chunk_writer.ChunkWriter, "_on_end", on_any_end


def records_are_written_when_lost() -> Iterator[Replacement]:
    def drop(self: Any) -> None:
        for run in self._open.values():
            run.context.cancel()

    yield run_queue.RunQueue, "discard_all", drop


def card_before_slot_position() -> Iterator[Replacement]:
    begin = worker.Worker._start_epoch

    async def start_epoch(self: Any, until: float | None = None) -> None:
        await begin(self, until)
        if not self._loops:  # the first life: the slot is not read yet
            self._slot_offset = await worker.end_offset_of(self._log, self._clock, self._slot)

    yield worker.Worker, "_start_epoch", start_epoch


def epoch_used_again() -> Iterator[Replacement]:
    original = registration.Registration.begin_epoch

    async def begin(self: Any, until: float | None = None) -> int:
        if self.card.epoch is None:
            return await original(self, until)
        await self.rewrite_card(until)
        return self.epoch  # type: ignore[no-any-return]

    yield registration.Registration, "begin_epoch", begin


# --- time and outages ----------------------------------------------------------------------------


def own_clock() -> Iterator[Replacement]:
    def now_ms(self: Any) -> int:
        return self._clock.wall_ms()  # type: ignore[no-any-return]

    yield BrokerClock, "now_ms", now_ms


def reads_are_not_retried() -> Iterator[Replacement]:
    async def send(_: Any, question: Any, *__: Any, **___: Any) -> Any:
        return await question()

    for asker in (range_reader, active_streams):
        yield asker, "retry_while_unavailable", send


# --- caches --------------------------------------------------------------------------------------


def snapshot_ahead_of_its_state() -> Iterator[Replacement]:
    original: Any = vars(snapshot_writer)["capture"]

    def capture_shifted(view: Any, source: Partition) -> Any:
        taken = original(view, source)
        position = taken.header.position + 5
        return taken._replace(header=msgspec.structs.replace(taken.header, position=position))

    yield snapshot_writer, "capture", capture_shifted


# --- answers of agents ---------------------------------------------------------------------------


def grammar_is_not_advanced() -> Iterator[Replacement]:
    request_of = run_executor.RunExecutor._request

    def begin_at_the_root(self: Any, run: Any) -> Any:
        request = request_of(self, run)
        run.context.taken_tokens = 0
        return request

    yield run_executor.RunExecutor, "_request", begin_at_the_root


def ids_of_calls_are_drawn() -> Iterator[Replacement]:
    numbers = count()

    def draw(_request_id: str, _number: int) -> str:
        return f"call_{next(numbers)}"

    yield answer_parts, "call_id", draw


def replay_drops_a_delta() -> Iterator[Replacement]:
    feed = parsed_stream.ParsedStream.feed

    def drop_the_next(self: Any, token_ids: Sequence[int]) -> Any:
        is_replay = not hasattr(self, "replayed")
        piece = feed(self, token_ids)
        if is_replay:
            self.replayed = bool(token_ids)
        elif self.replayed and piece.data:
            self.replayed = False
            return piece._replace(data=piece.data[1:])
        return piece

    yield parsed_stream.ParsedStream, "feed", drop_the_next


def replay_shows_its_data_again() -> Iterator[Replacement]:
    feed = parsed_stream.ParsedStream.feed

    def show_again(self: Any, token_ids: Sequence[int]) -> Any:
        is_replay = not hasattr(self, "replayed")
        piece = feed(self, token_ids)
        if is_replay:
            self.replayed = tuple(d._replace(at=0) for d in piece.data)
            return piece
        again, self.replayed = self.replayed, ()
        return piece._replace(data=(*again, *piece.data))

    yield parsed_stream.ParsedStream, "feed", show_again
