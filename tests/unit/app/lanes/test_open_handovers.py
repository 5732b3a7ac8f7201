"""Tests of hand-overs that the owner of a lane has begun: each is of one attempt, and is used
there."""

from __future__ import annotations

import pytest

from kvlane.app.lanes.handovers import LEASE_SHARE, HandOver, HandOvers
from kvlane.app.lanes.remaining_work import RemainingWork
from kvlane.app.routing.state.request_state import RunId
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import Finished, LogRecord, PrefillDone, RequestOffset
from kvlane.streams.request import BootstrapInfo, Request

TIMEOUT_MS = 5_000
BROKER_MS = 1_790_000_000_000
"""Append time of the records, far from any clock of this process."""


class Begun:
    def __init__(self) -> None:
        self.awaited = 0
        self.handovers = HandOvers(TIMEOUT_MS, self._count)

    def _count(self, change: int) -> None:
        self.awaited += change

    def begin(self, attempt: int = 0, room: BootstrapInfo | None = None) -> HandOver:
        request = Request(id="a", token_ids=pack_tokens(range(9)))
        rest = RemainingWork(request, attempt, RequestOffset("requests", 0, 0), 0, 0, frozenset())
        run = RunId(attempt, "prefill", "p", 1)
        return self.handovers.begin(rest, run, BROKER_MS, room, 250.0)

    def done(
        self, attempt: int = 0, at_ms: int = BROKER_MS, lag_ms: int = 0, **fields: object
    ) -> None:
        named = {
            "id": "a",
            "attempt": attempt,
            "phase": "prefill",
            "worker": "p",
            "epoch": 1,
            "run": 1,
        }
        record = PrefillDone(**(named | {"handoff": b"{}"} | fields))  # type: ignore[arg-type]
        self.handovers.on_record(LogRecord(0, at_ms, record), lag_ms)


def test_hand_over_is_usable_by_its_own_attempt_alone() -> None:
    begun = Begun()
    begun.begin(0)
    begun.done(0)
    assert begun.handovers.usable("a", 0) is not None
    assert begun.handovers.usable("a", 1) is None
    assert begun.handovers.usable("b", 0) is None


@pytest.mark.parametrize(
    "other", [{"attempt": 1}, {"worker": "q"}, {"epoch": 2}, {"id": "b"}, {"phase": "decode"}]
)
def test_end_of_another_run_makes_no_hand_over_usable(other: dict[str, object]) -> None:
    begun = Begun()
    begun.begin(0)
    begun.done(**other)  # type: ignore[arg-type]
    assert begun.handovers.usable("a", 0) is None
    assert begun.handovers.usable("a", 1) is None
    assert begun.awaited == 1


def test_room_of_an_earlier_attempt_is_none_of_the_next() -> None:
    begun = Begun()
    begun.begin(0, BootstrapInfo("h", 1, 2))
    assert begun.handovers.has_bootstrap("a", 0)
    assert not begun.handovers.has_bootstrap("a", 1)
    assert begun.handovers.usable("a", 1) is None


def test_next_attempt_drops_the_hand_over_before_it_with_its_bytes_and_its_wait() -> None:
    begun = Begun()
    begun.begin(0)
    begun.handovers.drop_others("a", 0)
    assert (begun.handovers.open_count, begun.awaited) == (1, 1)
    begun.handovers.drop_others("a", 1)
    assert (begun.handovers.open_count, begun.awaited) == (0, 0)
    begun.begin(1)
    begun.begin(2)
    assert (begun.handovers.open_count, begun.awaited) == (1, 1)


def test_time_of_a_hand_over_counts_from_the_append_of_its_end() -> None:
    begun = Begun()
    begun.begin(0)
    begun.done(at_ms=BROKER_MS + 700)
    known = begun.handovers.usable("a", 0)
    assert known is not None
    assert known.until_ms == BROKER_MS + 700 + TIMEOUT_MS
    begun.done(at_ms=BROKER_MS + 700, lease_until_ms=BROKER_MS + 1700)
    known = begun.handovers.usable("a", 0)
    assert known is not None
    assert known.until_ms == BROKER_MS + 700 + LEASE_SHARE * 1000
    slow_ms = BROKER_MS + 700 - 20_000  # its leader's clock is behind that of the lease
    begun.done(at_ms=slow_ms, lag_ms=20_000, lease_until_ms=BROKER_MS + 1700)
    assert begun.handovers.usable("a", 0) == known


def test_hand_over_that_was_given_up_is_not_usable() -> None:
    begun = Begun()
    begun.begin(0)
    begun.done(0)
    begun.handovers.give_up("a")
    assert begun.handovers.usable("a", 0) is None


def test_other_records_of_the_ledger_change_no_hand_over() -> None:
    begun = Begun()
    begun.begin(0)
    record = Finished(id="a", attempt=0, phase="prefill", worker="p", epoch=1, code="error")
    begun.handovers.on_record(LogRecord(0, BROKER_MS, record))
    assert begun.handovers.usable("a", 0) is None
    assert begun.awaited == 1
