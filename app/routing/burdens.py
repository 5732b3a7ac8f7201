"""What lies on workers: sums over open runs, kept up to date run by run.

Owns the sums and nothing else: which runs are open is `load.py`'s, and what a router has decided
and not read back is `app/lanes/context.py`'s; both use these.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from app.routing.changes import Changes
from app.routing.policies import Place


class Burden(msgspec.Struct, frozen=True, gc=False):
    """What open runs add up to, on one rank of one epoch of a worker.

    `tokens` of prompts, and of answers when they began; `prefill_tokens` are those of them that
    are neither computed nor expected in the cache. `prefill_runs` are the runs without a first
    token yet, `prefill_since_ms` the sum of the times (of the broker) at which they came there.
    """

    runs: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    prefill_runs: int = 0
    prefill_since_ms: int = 0

    def plus(self, other: Burden) -> Burden:
        """Both together."""
        return Burden(
            self.runs + other.runs,
            self.tokens + other.tokens,
            self.prefill_tokens + other.prefill_tokens,
            self.prefill_runs + other.prefill_runs,
            self.prefill_since_ms + other.prefill_since_ms,
        )

    def less(self, other: Burden) -> Burden:
        """This without the other."""
        return Burden(
            self.runs - other.runs,
            self.tokens - other.tokens,
            self.prefill_tokens - other.prefill_tokens,
            self.prefill_runs - other.prefill_runs,
            self.prefill_since_ms - other.prefill_since_ms,
        )


NOTHING = Burden()


class Burdens:
    """Burdens by worker and epoch, and by rank, kept up to date run by run.

    `changes`: of ranks, for boards that keep them in columns. Theirs to read, too: `by_place`, what
    lies on those that have something, and `prefilled_ms`, when a run there had its first token
    last, of those since it was idle.
    """

    def __init__(self) -> None:
        self.changes = Changes[Place]()
        self.by_place: dict[Place, Burden] = {}
        self.prefilled_ms: dict[Place, int] = {}
        self._ranks: dict[tuple[str, int], dict[Place, None]] = {}
        """By epoch, the places that have something."""
        self._by_adapter: dict[str, dict[Place, int]] = {}

    def __bool__(self) -> bool:
        return bool(self.by_place)

    def of(self, worker: str, epoch: int) -> Burden:
        """What lies on an epoch of a worker, over all ranks."""
        total = NOTHING
        for place in self._ranks.get((worker, epoch), ()):
            total = total.plus(self.by_place[place])
        return total

    def by_worker(self) -> dict[str, Burden]:
        """What lies on each worker that has something, over all epochs and ranks."""
        found: dict[str, Burden] = {}
        for place, burden in self.by_place.items():
            found[place.worker] = found.get(place.worker, NOTHING).plus(burden)
        return found

    def at(self, places: Iterable[Place]) -> list[Burden]:
        """What lies on each of these places."""
        by_place = self.by_place
        return [by_place.get(place, NOTHING) for place in places]

    def there(self, place: Place) -> Burden:
        """What lies on a place."""
        return self.by_place.get(place, NOTHING)

    def adapter_runs(self, adapter: str) -> int:
        """Open runs of an adapter, over all places."""
        return sum(self._by_adapter.get(adapter, {}).values())

    def adapters_at(self, place: Place) -> dict[str, int]:
        """Open runs of each adapter at a place."""
        return {name: runs[place] for name, runs in self._by_adapter.items() if place in runs}

    def add(self, place: Place, burden: Burden, adapter: str = "") -> None:
        """Count something in, of requests for an adapter."""
        if adapter and burden.runs:
            self._count(place, adapter, burden.runs)
        self._put(place, self.there(place).plus(burden))

    def remove(self, place: Place, burden: Burden, adapter: str = "") -> None:
        """Count something out that was counted in."""
        if adapter and burden.runs:
            self._count(place, adapter, -burden.runs)
        self._put(place, self.there(place).less(burden))

    def prefilled(self, place: Place, at_ms: int) -> None:
        """A run there had its first token; of several such times the last one counts."""
        if place in self.by_place:
            self.prefilled_ms[place] = max(at_ms, self.prefilled_ms.get(place, 0))
            self.changes.note(place)

    def _put(self, place: Place, total: Burden) -> None:
        self.changes.note(place)
        if total != NOTHING:
            if place not in self.by_place:
                self._ranks.setdefault(place[:2], {})[place] = None
            self.by_place[place] = total
        elif self.by_place.pop(place, None) is not None:
            self.prefilled_ms.pop(place, None)
            ranks = self._ranks[place[:2]]
            del ranks[place]
            if not ranks:
                del self._ranks[place[:2]]

    def _count(self, place: Place, adapter: str, more: int) -> None:
        runs = self._by_adapter.setdefault(adapter, {})
        runs[place] = runs.get(place, 0) + more
        if not runs[place]:
            del runs[place]
        if not runs:
            del self._by_adapter[adapter]
