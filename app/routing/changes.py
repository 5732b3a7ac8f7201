"""What of a state has changed since somebody looked last, for who keeps a copy in columns."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

REMEMBERED = 1024
"""Changes between two looks, at least. Beyond, all is read anew, which takes as long as a few
hundred do."""

K = TypeVar("K", bound=Hashable)


class Changes(Generic[K]):
    """The last changes, in their order. `count`: of all that there were."""

    def __init__(self) -> None:
        self.count = 0
        self._last: list[K] = []

    def note(self, key: K) -> None:
        """Something about this key is another now."""
        self.count += 1
        self._last.append(key)
        if len(self._last) >= 2 * REMEMBERED:
            del self._last[:REMEMBERED]

    def since(self, count: int) -> Sequence[K] | None:
        """Those that changed since there were so many changes; None where that is too long ago."""
        new = self.count - count
        if not new:
            return ()
        if not 0 < new <= len(self._last):
            return None
        return self._last[-new:]


class Noted(dict[str, float]):
    """Numbers by name, with their changes."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = Changes[str]()

    def __setitem__(self, key: str, value: float) -> None:
        if self.get(key) != value:
            super().__setitem__(key, value)
            self.changes.note(key)

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        self.changes.note(key)

    def forget(self, key: str) -> None:
        """Delete it, if it is there."""
        if key in self:
            del self[key]
