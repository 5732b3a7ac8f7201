"""Deferred requests: prompts from Kafka that wait without their bodies, by reference to the log.

Where the share of the queue for prompts is full, further prompts from Kafka, which are not refused
for load, wait here in the order of their arrival. When there is room, the next of them gets a
reservation until its fetched request is queued or goes to a worker. Few wait here: preprocessors
publish no more than routers report to have room for (`app/prompts/prompt_credit.py`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from kvlane.app.routing.queueing.fair_share import QueueKey

K = TypeVar("K", bound=Hashable)

MAX_CONCURRENT_FETCHES = 32
"""Bodies that are fetched at the same time, at most."""


class QueueSize(NamedTuple):
    requests: int = 0
    tokens: int = 0
    bytes: int = 0

    def plus(self, other: QueueSize, sign: int = 1) -> QueueSize:
        """The sum, or with `sign` -1 the difference."""
        return QueueSize(
            self.requests + sign * other.requests,
            self.tokens + sign * other.tokens,
            self.bytes + sign * other.bytes,
        )

    def has_room_below(self, bound: QueueSize) -> bool:
        """Whether one more may come; its own size does not matter, so that any size can pass."""
        return (
            self.requests < bound.requests
            and self.tokens < bound.tokens
            and self.bytes < bound.bytes
        )


@dataclass(eq=False, slots=True)
class _DeferredEntry:
    number: int
    queue: QueueKey
    size: QueueSize
    on_room: Callable[[], None]


class DeferredPrompts(Generic[K]):
    """The deferred requests of one router. `fits`: whether one more of a class may be queued."""

    def __init__(self, fits: Callable[[QueueKey], bool]) -> None:
        self._fits = fits
        self._waiting: dict[str, OrderedDict[K, _DeferredEntry]] = {}
        """By class, the oldest first."""
        self._reserved: dict[K, tuple[QueueKey, QueueSize]] = {}
        self._by_class: Counter[str] = Counter()
        self._arrived = 0
        self.size = QueueSize()
        """Of the waiting prompts."""
        self.granted = QueueSize()
        """Of the prompts with a reservation."""

    def has_waiting(self, queue: QueueKey) -> bool:
        return queue.class_name in self._waiting

    def granted_in_class(self, queue: QueueKey) -> int:
        return self._by_class[queue.class_name]

    def add(self, key: K, queue: QueueKey, size: QueueSize, on_room: Callable[[], None]) -> None:
        """Let a prompt wait for a reservation; `on_room` is called with it, perhaps at once."""
        self._arrived += 1
        entry = _DeferredEntry(self._arrived, queue, size, on_room)
        self._waiting.setdefault(queue.class_name, OrderedDict())[key] = entry
        self.size = self.size.plus(size)
        self.grant_next()

    def grant_next(self) -> None:
        """Give reservations to those that have waited longest, as far as there is room."""
        while self._waiting and len(self._reserved) < MAX_CONCURRENT_FETCHES:
            heads = [next(iter(line.items())) for line in self._waiting.values()]
            fitting = [(w.number, key, w) for key, w in heads if self._fits(w.queue)]
            if not fitting:
                return
            _, key, waiter = min(fitting, key=lambda head: head[0])
            self.discard(key, waiter.queue)
            self._reserved[key] = (waiter.queue, waiter.size)
            self._by_class[waiter.queue.class_name] += 1
            self.granted = self.granted.plus(waiter.size)
            waiter.on_room()

    def release(self, key: K) -> bool:
        """End the reservation of a request; whether it had one."""
        if (reservation := self._reserved.pop(key, None)) is None:
            return False
        queue, size = reservation
        self._by_class[queue.class_name] -= 1
        self.granted = self.granted.plus(size, -1)
        return True

    def discard(self, key: K, queue: QueueKey) -> None:
        """Let a prompt of a queue wait no longer, if it does."""
        line = self._waiting.get(queue.class_name)
        if line is None or (waiter := line.pop(key, None)) is None:
            return
        self.size = self.size.plus(waiter.size, -1)
        if not line:
            del self._waiting[queue.class_name]
