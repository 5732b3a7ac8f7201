"""Turns at work that a process does in a bounded amount at a time, by tenant in rotation."""

from __future__ import annotations

import asyncio
from collections import deque

QueuePlace = asyncio.Future[None]


class FairTurns:
    """At most `most` turns at a time. The next one goes to the tenant that has waited longest since
    its last turn."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._waiting: dict[str, deque[QueuePlace]] = {}

    @property
    def is_wanted(self) -> bool:
        return bool(self._waiting)

    def enter(self, tenant: str) -> QueuePlace:
        """Queue for a turn; `leave` ends it, or the wait for it."""
        place: QueuePlace = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        self._grant()
        return place

    def leave(self, tenant: str, place: QueuePlace) -> None:
        if place.done():
            self._free += 1
        else:
            self._waiting[tenant].remove(place)
            if not self._waiting[tenant]:
                del self._waiting[tenant]
        self._grant()

    def _grant(self) -> None:
        while self._free and self._waiting:
            tenant, places = next(iter(self._waiting.items()))
            del self._waiting[tenant]
            places.popleft().set_result(None)
            if places:
                self._waiting[tenant] = places  # behind the others
            self._free -= 1
