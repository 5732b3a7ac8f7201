"""Tests of reservations as columns: always equal to a plain list of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.app.routing.queueing.fair_share import ClassConfig, FairQueue, QueueKey, ShareCost
from kvlane.app.routing.queueing.pending import (
    MAX_WAKEUPS,
    MIN_ROWS,
    PendingRequest,
    ReservationColumns,
    ReservedRequests,
)
from kvlane.app.routing.selection.candidate_table import NO_ROW, CandidateTable
from kvlane.app.routing.selection.decision import Reservation
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.streams.request import Request
from tests.harness.routing_harness import reserved

PLACES = [WorkerRank(f"w{n // 2}", 0, n % 2) for n in range(6)]
CLASSES = {"": ClassConfig(), "batch": ClassConfig(weight=0.5)}


@dataclass
class PlainQueue:
    """All held requests in a list: place, prefill, arrival, priority, order, and class of each."""

    rows: dict[int, tuple[WorkerRank, float, int, float, str]] = field(default_factory=dict)

    def others(self, key: int) -> list[tuple[WorkerRank, float]]:
        return [self.rows[each][:2] for each in sorted(self.rows) if each != key]

    def next_for(self, place: WorkerRank, classes: FairQueue) -> int | None:
        there = [
            (strict, classes.virtual_time(QueueKey("m", name)), order, key)
            for key, (at, _, strict, order, name) in self.rows.items()
            if at == place
        ]
        return min(there)[-1] if there else None


OPERATIONS = st.lists(
    st.tuples(
        st.integers(0, 40), st.sampled_from([None, *PLACES]), st.floats(0, 1e4),
        st.sampled_from([0, 0, -1]), st.sampled_from(["", "batch"]), st.booleans(),
    ), max_size=120,
)  # fmt: skip


@settings(deadline=None)
@given(OPERATIONS, st.lists(st.integers(0, 50), unique=True, max_size=8))
def test_columns_equal_a_plain_list_of_reservations(
    operations: list[tuple[int, WorkerRank | None, float, int, str, bool]], looking: list[int]
) -> None:
    classes = FairQueue(CLASSES)
    for name in CLASSES:
        classes.add_waiting(QueueKey("m", name), 0)
    held, plain = ReservedRequests[int]("fcfs", classes), PlainQueue()
    for key, place, prefill_ms, strict, name, charged in operations:
        if place is None:
            held.remove(key)
            plain.rows.pop(key, None)
        else:
            cost = ShareCost(QueueKey("m", name), 7)
            held.add(key, key, 10.0 * key, Reservation(place, prefill_ms, 0), strict, cost=cost)
            plain.rows[key] = (place, prefill_ms, strict, 10.0 * key, name)
        if charged:
            classes.charge(ShareCost(QueueKey("m", name), 7))
        assert len(held) == len(plain.rows)
        assert reserved(held.reservations_of_others(key)) == plain.others(key)
        for each in PLACES:
            assert held.next_for(each) == plain.next_for(each, classes)
    sent = [PendingRequest(n, n, PromptHashes(Request(id=f"{n}")), 0, 0) for n in sorted(looking)]
    joined = held.joined(sent)
    assert reserved(joined.reservations) == plain.others(-1)
    has_reservation = (joined.reservations.numbers >= 0).tolist()
    for n, at in zip(sorted(looking), joined.positions.tolist(), strict=True):
        assert (sum(has_reservation[:at]), has_reservation[at]) == (
            sum(key < n for key in plain.rows),
            n in plain.rows,
        )
    assert len({*joined.positions.tolist()}) == len(looking)
    for worker in ("w0", "w1", "w2"):
        places = [place for place in PLACES if place.worker == worker]
        every = held.in_dispatch_order(None if len(held) <= MAX_WAKEUPS else places)
        next_of_each = [held.next_for(place) for place in places]
        assert held.to_wake(worker)[:MAX_WAKEUPS] == every[:MAX_WAKEUPS]
        assert {*held.to_wake(worker)} == {*every[:MAX_WAKEUPS], *next_of_each} - {None}


def test_rows_and_ranks_of_removed_requests_are_reclaimed() -> None:
    columns = ReservationColumns()
    for n in range(20 * MIN_ROWS):
        columns.set(n, Reservation(WorkerRank("w", n), float(n), 0))
        if n >= 5:
            columns.clear(n - 5)
    left = columns.others(None)
    assert reserved(left) == [
        (WorkerRank("w", n), float(n)) for n in range(20 * MIN_ROWS - 5, 20 * MIN_ROWS)
    ]
    assert max(len(left.numbers), len(left.worker_ranks)) <= 3 * MIN_ROWS


def test_late_reservation_has_its_row_by_arrival() -> None:
    columns = ReservationColumns()
    for n in (3, 1, 2, 0):
        columns.set(n, Reservation(PLACES[n], float(n), 0))
    assert reserved(columns.others(2)) == [(PLACES[n], float(n)) for n in (0, 1, 3)]


def test_table_follows_the_ranks_of_reservations() -> None:
    table, columns = CandidateTable([]), ReservationColumns()
    table._row_of = {place: n for n, place in enumerate(PLACES)}
    elsewhere = [WorkerRank(f"x{n}", 0, 0) for n in range(2 * MIN_ROWS)]
    for arrival, place in enumerate([*PLACES, *elsewhere, *PLACES]):
        columns.set(arrival, Reservation(place, 1.0, 0))
        if arrival >= len(PLACES):
            columns.clear(arrival - len(PLACES))
        places = columns.others(None).worker_ranks
        assert table.rows_of_reserved(places).tolist() == [*table.rows_of(places).tolist(), NO_ROW]
    assert len(places) < len(elsewhere), "the places were replaced meanwhile"
