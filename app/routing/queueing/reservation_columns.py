"""Reservations of waiting requests as columns, in the order of arrival; owned by `pending.py`.

A decision counts in the reservations of all others. The columns change by one row with each
reservation, and kernels read them as they are, so thousands of reservations cost a decision little.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec
import numpy as np

from kvlane.app.routing.selection.cost_kernels import Ints
from kvlane.app.routing.selection.decision import PlannedReservations, Reservation
from kvlane.app.routing.state.fleet import WorkerRank

NO_NUMBER = -1
"""The place of a request without a reservation."""
MIN_ROWS = 64
"""Rows, and places, below which nothing is reclaimed."""


class JoinedColumns(msgspec.Struct, frozen=True, gc=False):
    """Copies of the columns with a row for each request of a batch, at `positions`."""

    reservations: PlannedReservations
    positions: Ints


class ReservationColumns:
    """The reservations, by number of arrival. A row without a reservation stays, as one for no
    place, until such rows are half of all."""

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
