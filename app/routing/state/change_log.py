"""A bounded change log, so that columnar copies can be updated incrementally."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

MIN_REMEMBERED_CHANGES = 1024
"""Changes that are kept at least. A reader that missed more reads all state again, which takes as
long as a few hundred changes."""

K = TypeVar("K", bound=Hashable)


class ChangeLog(Generic[K]):
    """The last changes, in order. `count`: the number of all changes so far."""

    def __init__(self) -> None:
        self.count = 0
        self._last: list[K] = []

    def record(self, key: K) -> None:
        self.count += 1
        self._last.append(key)
        if len(self._last) >= 2 * MIN_REMEMBERED_CHANGES:
            del self._last[:MIN_REMEMBERED_CHANGES]

    def since(self, count: int) -> Sequence[K] | None:
        """The keys changed since there were `count` changes; None if that is too long ago."""
        new = self.count - count
        if not new:
            return ()
        if not 0 < new <= len(self._last):
            return None
        return self._last[-new:]


class TrackedDict(dict[str, float]):
    """Numbers by name, with a log of their changes."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = ChangeLog[str]()

    def __setitem__(self, key: str, value: float) -> None:
        if self.get(key) != value:
            super().__setitem__(key, value)
            self.changes.record(key)

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        self.changes.record(key)

    def discard(self, key: str) -> None:
        if key in self:
            del self[key]
