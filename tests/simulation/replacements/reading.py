"""Rules of batch jobs, their files, and resumed answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from app.batches import batch_view, file_store
from app.results import lane_results
from streams.responses import reply_stream
from tests.simulation.replacements import Replacement


def the_last_record_of_a_job_counts() -> Iterator[Replacement]:
    yield batch_view.BatchView, "_is_later", lambda *_: True


def parts_count_by_arrival() -> Iterator[Replacement]:
    original = file_store.PartOrder.accept

    def accept(self: Any, record: Any) -> bool:
        due, beyond, number = self._complete_to, set(self._beyond), self.number
        counts = original(self, record)
        if counts and self.number != due:
            self._complete_to, self._beyond, self.number = due, beyond, number
            return False
        return counts

    yield file_store.PartOrder, "accept", accept


def results_are_written_unseen() -> Iterator[Replacement]:
    yield lane_results.LaneResults, "_is_finished", lambda *_: False


def pieces_merge_across_positions() -> Iterator[Replacement]:
    yield reply_stream.Reply, "_is_known", lambda *_: False
