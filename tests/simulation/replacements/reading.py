"""Rules of results, and of resumed answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from app.results import lane_results, result_writer
from streams.responses import reply_stream
from tests.simulation.replacements import Replacement


def results_are_written_unseen() -> Iterator[Replacement]:
    yield lane_results.LaneResults, "_is_finished", lambda *_: False


def results_of_others_are_not_looked_for() -> Iterator[Replacement]:
    async def read_results(*_: Any) -> dict[str, Any]:
        return {}

    yield result_writer.ResultWriter, "_read_results", read_results


def pieces_merge_across_positions() -> Iterator[Replacement]:
    yield reply_stream.Reply, "_is_known", lambda *_: False
