"""Pending requests of a router, with the place reserved for each, and the order among them.

Requests are planned in arrival order, each with the reservations of the others
(`reservations_of_others`), so that no two claim the same place. They are dispatched in another
order (`in_dispatch_order`): by strict priority, highest first, by the virtual times of their
classes (`fair_share.py`), and then by one of

    sjf         the shortest prefill first, which minimizes the mean wait; each millisecond of
                waiting makes a request `AGING_RATE` milliseconds shorter, so that none starves
    fcfs        in the order of arrival
    wspt        as sjf, but each prefill divided by 1 + priority_jump
    edf         the earliest deadline first, of all classes: arrival and the target of the time to
                a first token, of the request, its class, or `NO_TARGET_MS`. A request whose prefill
                would end past its deadline comes after all that can meet theirs

A `priority_jump` counts as waiting time in all orders. Requests that look for a place at one
moment are all planned before one goes (`joint_planning.py`): otherwise the shortest would wait
behind the one that was read first. `select.py` decides whether a request may go.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from kvlane.app.routing.policy_names import QueueOrder
from kvlane.app.routing.queueing.fair_share import (
    NO_COST,
    FairQueue,
    QueueEntry,
    QueueKey,
    ShareCost,
)
from kvlane.app.routing.selection.cost_kernels import Ints
from kvlane.app.routing.selection.decision import PlannedReservations, Reservation, Wait
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.streams.records import Phase

NO_NUMBER = -1
"""The place of a request without a reservation."""
MIN_ROWS = 64
"""Rows, and places, below which nothing is reclaimed."""


class JoinedColumns(msgspec.Struct, frozen=True, gc=False):
    """Copies of the columns with a row for each request of a batch, at `positions`."""

    reservations: PlannedReservations
    positions: Ints


class ReservationColumns:
    """The reservations, by number of arrival. They change by one row with each reservation, and
    kernels read them as they are, so thousands of them cost a decision little. A row without a
    reservation stays, as one for no place, until such rows are half of all."""

    def __init__(self) -> None:
        self._arrivals = np.empty(MIN_ROWS, np.int64)
        self._numbers = np.empty(MIN_ROWS, np.int64)
        self._prefill_ms = np.empty(MIN_ROWS)
        self._size = self._live = 0
        self._ranks: list[WorkerRank] = []
        self._number_of: dict[WorkerRank, int] = {}

    def set(self, arrival: int, reservation: Reservation) -> None:
        at = self._position(arrival)
        if at == self._size or self._arrivals[at] != arrival:
            self._insert(at, arrival)
        place = reservation.worker_rank
        number = self._number_of.get(place)
        if number is None:
            number = self._number_of[place] = len(self._ranks)
            self._ranks.append(place)
        self._live += self._numbers.item(at) == NO_NUMBER
        self._numbers[at], self._prefill_ms[at] = number, reservation.prefill_ms

    def clear(self, arrival: int) -> None:
        self._numbers[self._position(arrival)] = NO_NUMBER
        self._live -= 1
        if self._size > 2 * self._live + MIN_ROWS:
            self._reclaim()

    def others(self, arrival: int | None) -> PlannedReservations:
        """All but that of one request. Valid until the next change."""
        size, own = self._size, NO_NUMBER
        if arrival is not None:
            at = self._position(arrival)
            if at < size and self._arrivals[at] == arrival:
                own = at
        return PlannedReservations(self._ranks, self._numbers[:size], self._prefill_ms[:size], own)

    def joined(self, arrivals: Sequence[int]) -> JoinedColumns:
        """All of them, with the requests that arrived as `arrivals`, in ascending order."""
        wanted, size = np.array(arrivals, np.int64), self._size
        at = np.searchsorted(self._arrivals[:size], wanted)
        is_new = np.ones(len(wanted), bool)
        there = at < size
        is_new[there] = self._arrivals[at[there]] != wanted[there]
        positions = at + np.cumsum(is_new) - is_new
        is_old = np.ones(size + np.count_nonzero(is_new), bool)
        is_old[positions[is_new]] = False
        numbers, prefill_ms = np.full(len(is_old), NO_NUMBER), np.zeros(len(is_old))
        numbers[is_old], prefill_ms[is_old] = self._numbers[:size], self._prefill_ms[:size]
        return JoinedColumns(PlannedReservations(self._ranks, numbers, prefill_ms), positions)

    def _position(self, arrival: int) -> int:
        size = self._size
        if not size or arrival > self._arrivals.item(size - 1):
            return size  # most often: the latest request
        return bisect_left(self._arrivals.data, arrival, 0, size)  # a fifth of searchsorted

    def _insert(self, at: int, arrival: int) -> None:
        size = self._size
        if size == len(self._arrivals):
            self._arrivals = np.resize(self._arrivals, 2 * size)
            self._numbers = np.resize(self._numbers, 2 * size)
            self._prefill_ms = np.resize(self._prefill_ms, 2 * size)
        if at < size:
            for column in (self._arrivals, self._numbers, self._prefill_ms):
                column[at + 1 : size + 1] = column[at:size]
        self._arrivals[at], self._numbers[at] = arrival, NO_NUMBER
        self._size = size + 1

    def _reclaim(self) -> None:
        """Drop rows without a reservation, and places without a row if they are the most."""
        kept = np.flatnonzero(self._numbers[: self._size] != NO_NUMBER)
        self._size = len(kept)
        for column in (self._arrivals, self._numbers, self._prefill_ms):
            column[: self._size] = column[kept]
        if len(self._ranks) > 2 * self._size + MIN_ROWS:
            used, numbers = np.unique(self._numbers[: self._size], return_inverse=True)
            self._numbers[: self._size] = numbers
            self._ranks = [self._ranks[number] for number in used.tolist()]
            self._number_of = {place: number for number, place in enumerate(self._ranks)}


AGING_RATE = 0.05
"""A request that has waited for a second goes before one that is 50 ms shorter."""

NO_TARGET_MS = 10_000.0
"""edf: the target of a request that has none; so long a request is queued at most, by default."""
LATE_MS = 1e15
"""edf: added to the deadline of a request that cannot meet it any more."""

MIN_STARTS = 64
"""edf: remembered times below which those of requests that have gone are not dropped."""

MAX_WAKEUPS = 16
"""Requests that retry after one record, and in a router after all records of one turn of its event
loop, besides the next request of each place: planning them takes a few milliseconds."""

K = TypeVar("K", bound=Hashable)


class RequestKey(NamedTuple):
    lane: int
    id: str


class PendingRequest(msgspec.Struct, Generic[K], frozen=True, gc=False):
    """A request that needs a worker. `arrival`: its position in the order of arrival here.
    `excluded`: workers on which it failed. `queue_key`: its queue while it waits. `phase`: the part
    of it that the worker is for. Times are the broker's."""

    key: K
    arrival: int
    prompt: PromptHashes
    seed: int
    since_ms: int
    deadline_ms: float | None = None
    excluded: Collection[str] = ()
    queue_key: QueueKey = NO_COST.queue
    phase: Phase = "aggregated"

    @property
    def is_batch(self) -> bool:
        """Whether it takes only the capacity that interactive requests leave."""
        return self.prompt.request.service_class == "batch"

    @property
    def priority(self) -> tuple[int, float]:
        """Lower goes first: strict priority before all else, then the older request.
        `priority_jump` makes a request older, in seconds."""
        hints = self.prompt.request.hints
        return -(hints.strict_priority or 0), self.since_ms - 1000 * (hints.priority_jump or 0)

    @property
    def cost(self) -> ShareCost:
        return ShareCost(self.queue_key, self.prompt.tokens)


LaneRequest: TypeAlias = PendingRequest[RequestKey]


class PendingEntry(msgspec.Struct, frozen=True, gc=False):
    """A request with a reservation. The lowest `negated_priority` goes first; then, within a class,
    the lowest `order`. All requests age at the same rate, so it changes only where a deadline can
    no longer be met (`pass_time`)."""

    arrival: int
    reservation: Reservation
    negated_priority: int
    order: float
    cost: ShareCost


_Heap: TypeAlias = list[tuple[float, int, K]]
"""Requests for one place of one class and priority: order, arrival and key, ascending."""
_Lines: TypeAlias = dict[tuple[int, QueueKey], _Heap[K]]
"""The requests for one place, by priority and queue."""


class ReservedRequests(Generic[K]):
    """Requests with a reservation, by keys of the router's choice. All queued requests are in
    `WaitingRequests`."""

    def __init__(self, order: QueueOrder = "sjf", classes: FairQueue | None = None) -> None:
        self._queue_order = order
        self._classes = classes or FairQueue()
        self._entries: dict[K, PendingEntry] = {}
        self._columns = ReservationColumns()
        self._now_ms = 0.0
        self._latest_starts: list[tuple[float, int, K]] = []
        """edf: a heap of the times until which requests have to begin, with arrival and key."""
        self._by_worker: dict[str, dict[WorkerRank, _Lines[K]]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def dispatch_order(self, looking: Iterable[PendingRequest[K]]) -> list[K]:
        """The order in which some requests go: the planned ones, then the others by precedence."""
        entries, looking = self._entries, list(looking)
        order = list(self._in_turn([each.key for each in looking if each.key in entries]))
        others = [self._turn_of(wanted) for wanted in looking if wanted.key not in entries]
        order += self._classes.in_dispatch_order(others)
        return order

    def joined(self, looking: Iterable[PendingRequest[K]]) -> JoinedColumns:
        """The reservations of all pending requests, with rows for the `looking` ones, which are in
        the order of arrival."""
        return self._columns.joined([wanted.arrival for wanted in looking])

    def reserve(self, wanted: PendingRequest[K], planned: Reservation | None) -> Sequence[K]:
        """Set or clear the reservation of a request; returns the requests that must retry for it.
        These are, at each place concerned, the request that is first now and the one that was."""
        key = wanted.key
        before = self._entries.get(key)
        if planned == (before and before.reservation):
            return ()
        places = [each.worker_rank for each in (before and before.reservation, planned) if each]
        firsts = {place: self.next_for(place) for place in places}
        if planned is None:
            self.remove(key)
        else:
            strict, since_ms = wanted.priority
            jump_s = (wanted.since_ms - since_ms) / 1000
            since_ms, cost = self._due(wanted, since_ms)
            self.add(key, wanted.arrival, since_ms, planned, strict, jump_s, cost)
        woken: list[K] = []
        for place, first in firsts.items():
            if (now_first := self.next_for(place)) != first:
                woken += [each for each in (now_first, first) if each not in (None, key)]
        return woken

    def next_retry_ms(self, key: K, planned: Wait) -> int | None:
        """When a pending request retries by itself; None: only on records, and now and then. Of the
        requests for one place the next in order retries when the place is predicted free."""
        if (
            planned.reservation is not None
            and self.next_for(planned.reservation.worker_rank) != key
        ):
            return planned.reservation.hold_until_ms
        return planned.retry_at_ms

    def to_wake(self, worker: str, most: int = MAX_WAKEUPS) -> Sequence[K]:
        """Requests to retry after a record of a worker, in order: those for it; all, if few. At
        most `most`, but always the next request of each of its places."""
        if len(self._entries) <= most:
            return self.in_dispatch_order()
        places = self._by_worker.get(worker, {})
        lines = (line for place in places.values() for line in place.values())
        first = [key for line in lines for _, _, key in line[:most]]
        next_of_each = [key for place in places if (key := self.next_for(place)) is not None]
        return list(dict.fromkeys([*islice(self._in_turn(first), most), *next_of_each]))

    def add(
        self, key: K, arrival: int, since_ms: float, planned: Reservation,
        negated_priority: int = 0, jump_s: float = 0.0, cost: ShareCost = NO_COST,
    ) -> None:  # fmt: skip
        """Replace the reservation of a request. `since_ms`: when it counts as arrived, with the
        jump, or its deadline with edf."""
        self.remove(key)
        turn = planned.prefill_ms + AGING_RATE * since_ms
        if self._queue_order == "fcfs":
            turn = since_ms
        elif self._queue_order == "wspt":
            turn += planned.prefill_ms / (1 + max(jump_s, 0.0)) - planned.prefill_ms
        elif self._queue_order == "edf":
            turn, latest_start_ms = since_ms, since_ms - planned.prefill_ms
            if latest_start_ms < self._now_ms:
                turn += LATE_MS
            else:
                self._remember_start(latest_start_ms, arrival, key)
        self._insert(key, PendingEntry(arrival, planned, negated_priority, turn, cost))

    def _insert(self, key: K, entry: PendingEntry) -> None:
        self._entries[key] = entry
        self._columns.set(entry.arrival, entry.reservation)
        place = entry.reservation.worker_rank
        lines = self._by_worker.setdefault(place.worker, {}).setdefault(place, {})
        line = lines.setdefault((entry.negated_priority, entry.cost.queue), [])
        insort(line, (entry.order, entry.arrival, key))

    def _remember_start(self, latest_start_ms: float, arrival: int, key: K) -> None:
        if len(self._latest_starts) > 2 * len(self._entries) + MIN_STARTS:
            self._latest_starts = sorted(
                (entry.order - entry.reservation.prefill_ms, entry.arrival, each)
                for each, entry in self._entries.items()
                if entry.order < LATE_MS
            )
        heappush(self._latest_starts, (latest_start_ms, arrival, key))

    def pass_time(self, now_ms: float) -> Sequence[K]:
        """Let requests that can no longer meet their deadlines go behind those that can; returns
        those that are first now at their places, and were not."""
        self._now_ms = now_ms
        woken: list[K] = []
        while self._latest_starts and self._latest_starts[0][0] < now_ms:
            latest_start_ms, _, key = heappop(self._latest_starts)
            entry = self._entries.get(key)
            if entry is None or entry.order - entry.reservation.prefill_ms != latest_start_ms:
                continue  # it went, or was planned again since
            place = entry.reservation.worker_rank
            first = self.next_for(place)
            self.remove(key)
            self._insert(key, replace(entry, order=entry.order + LATE_MS))
            if (now_first := self.next_for(place)) not in (None, first):
                woken.append(now_first)
        return woken

    def _due(self, wanted: PendingRequest[K], since_ms: float) -> tuple[float, ShareCost]:
        """The time by which a request is ordered, and its line: with edf its deadline, in one line
        for all classes."""
        cost = wanted.cost
        if self._queue_order != "edf":
            return since_ms, cost
        wishes = wanted.prompt.request.router
        target_ms = None if wishes is None else wishes.ttft_target
        if target_ms is None:
            target_ms = self._classes.ttft_target_ms(wanted.queue_key)
        due_ms = since_ms + (NO_TARGET_MS if target_ms is None else target_ms)
        return due_ms, replace(cost, queue=QueueKey(cost.queue.model))

    def remove(self, key: K) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._columns.clear(entry.arrival)
        place, queue = entry.reservation.worker_rank, (entry.negated_priority, entry.cost.queue)
        places = self._by_worker[place.worker]
        line = places[place][queue]
        del line[bisect_left(line, (entry.order, entry.arrival, key))]
        if not line:
            del places[place][queue]
            if not places[place]:
                del places[place]
                if not places:
                    del self._by_worker[place.worker]

    def reservations_of_others(self, key: K) -> PlannedReservations:
        """The reservations of all other requests. Valid until the next change."""
        entry = self._entries.get(key)
        return self._columns.others(None if entry is None else entry.arrival)

    def ranks_with_reservations(self) -> set[WorkerRank]:
        return {place for places in self._by_worker.values() for place in places}

    def has_reservations(self, places: Iterable[WorkerRank]) -> bool:
        return all(place in self._by_worker.get(place.worker, ()) for place in places)

    def reserved_rank(self, key: K) -> WorkerRank | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.reservation.worker_rank

    def next_for(self, place: WorkerRank) -> K | None:
        lines = self._by_worker.get(place.worker, {}).get(place)
        if lines is None:
            return None
        if len(lines) == 1:
            (line,) = lines.values()
            return line[0][-1]
        virtual_time = self._classes.virtual_time
        firsts = [(strict, virtual_time(queue), line[0]) for (strict, queue), line in lines.items()]
        return min(firsts)[-1][-1]

    def in_dispatch_order(self, places: Iterable[WorkerRank] | None = None) -> list[K]:
        """The requests for these places, or for any, in the order of dispatch."""
        if places is None:
            return list(self._in_turn(self._entries))
        lines = [self._by_worker.get(place.worker, {}).get(place, {}) for place in places]
        return list(
            self._in_turn(key for each in lines for line in each.values() for _, _, key in line)
        )

    def _in_turn(self, keys: Iterable[K]) -> Iterator[K]:
        entries = ((key, self._entries[key]) for key in keys)
        return self._classes.in_dispatch_order(
            QueueEntry(key, entry.cost, entry.negated_priority, (entry.order, entry.arrival))
            for key, entry in entries
        )

    def _turn_of(self, wanted: PendingRequest[K]) -> QueueEntry[K]:
        strict, since_ms = wanted.priority
        since_ms, cost = self._due(wanted, since_ms)
        return QueueEntry(wanted.key, cost, strict, (since_ms, wanted.arrival))
