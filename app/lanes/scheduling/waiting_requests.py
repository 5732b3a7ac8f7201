"""Waiting requests: the queue of a scheduler, with its size, its bounds and its wake-ups.

A request waits as the work that is left of it: `RemainingWork` is ready to be dispatched, a
`DeferredRequest` waits in the log until there is room.

One more request than the bound is refused (`is_full`) or, where it can be read again, deferred
(`must_defer`): it waits in the log (`deferred_prompts.py`) and comes when there is room.

Never here: the order of the requests, and their workers (`scheduler.py`, `batch_scheduler.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from app.lanes.scheduling.deferred_prompts import DeferredPrompts, QueueSize
from app.routing.queueing.fair_share import FairQueue, QueueKey
from app.routing.queueing.pending import PendingRequest
from app.routing.selection.prompt_hashes import PromptHashes
from app.wait_queue import Priority, QueueName, WaitQueue
from streams.clock import BrokerClock
from streams.record_base import ServiceClass
from streams.records import Phase, RequestOffset
from streams.request import Request

RETRY_INTERVAL_S = 1.0
"""How often a waiting request retries without being woken, since a wake-up may have gone to one
that could not use it."""


class RequestKey(NamedTuple):
    """A request, by its lane and its id."""

    lane: int
    id: str


LaneRequest = PendingRequest[RequestKey]


class RemainingWork(NamedTuple):
    """The remaining work of a request: all of it, or the rest after the tokens already emitted."""

    request: Request
    attempt: int
    origin: RequestOffset
    responses_from: int
    deadline_ms: int
    excluded: frozenset[str] = frozenset()
    """Workers on which it failed."""
    emitted: Sequence[int] = ()
    """Token ids that readers have; `emitted_chars`: the length of their text."""
    emitted_chars: int = 0
    renewal_ms: float = math.inf
    """Broker time at which it is appended again, if no worker has begun it."""

    @property
    def has_begun(self) -> bool:
        """Whether a worker has worked on it, successfully or not."""
        return bool(self.emitted or self.emitted_chars or self.excluded)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt, in tokens."""
        return self.request.prompt_tokens


class DeferredRequest(NamedTuple):
    """A `RemainingWork` without emitted tokens and without its request, which is in the log."""

    id: str
    attempt: int
    origin: RequestOffset
    responses_from: int
    deadline_ms: int
    excluded: frozenset[str]
    queue_key: QueueKey
    size: QueueSize
    service_class: ServiceClass
    renewal_ms: float


def wait_queue_name(queue: QueueKey, phase: Phase) -> QueueName:
    """The name under which requests wait for workers of the same roles: those of phase prefill
    apart, since no other worker serves them."""
    return (*queue, "prefill" if phase == "prefill" else "decode")


class WaitingRequests:
    """The queue of one scheduler. `classes`: the classes in it, each with a bound of its own.

    `bound`: of the queue; `deferrable_bound`: of the part for requests that can wait in the log.
    `max_frequent_retries`: the number of requests beyond which each retries less often.
    """

    def __init__(
        self,
        classes: FairQueue,
        broker_clock: BrokerClock,
        bound: QueueSize,
        deferrable_bound: QueueSize,
        max_frequent_retries: int,
    ) -> None:
        self.keys: set[RequestKey] = set()
        """The requests that wait: for a worker, or backing off after a refusal."""
        self.deferred = DeferredPrompts[RequestKey](self._has_room_for)
        """Requests beyond `deferrable_bound`, which wait in the log."""
        self.changed = WaitQueue()
        """Notified when a worker may have capacity."""
        self._classes = classes
        self._broker_clock = broker_clock
        self._bound = bound
        self._deferrable_bound = deferrable_bound
        self._max_frequent_retries = max_frequent_retries
        self._arrived = 0
        self._sizes: dict[RequestKey, QueueSize] = {}
        self._size = QueueSize()
        """The sum of `_sizes`, where a request that backs off has none."""
        self._lane_bytes = Counter[int]()
        self._decodes = Counter[str]()
        """Requests of phase decode, by model."""

    # --- size ------------------------------------------------------------------------------------

    @property
    def queued_requests(self) -> int:
        """Number of waiting requests, without deferred ones."""
        return len(self.keys)

    @property
    def queued_tokens(self) -> int:
        """Tokens of waiting requests, as given when the wait began."""
        return self._size.tokens

    @property
    def queued_bytes(self) -> int:
        """Bytes of waiting prompts, which is the memory they take here."""
        return self._size.bytes

    @property
    def deferred_requests(self) -> int:
        """Number of requests that were read and wait in the log."""
        return self.deferred.size.requests

    def queued_bytes_of_lane(self, lane: int) -> int:
        """Bytes of the prompts that wait in one lane."""
        return self._lane_bytes[lane]

    def has_decodes(self, model: str) -> bool:
        """Whether requests of phase decode wait for workers of this model."""
        return self._decodes[model] > 0

    # --- bounds ----------------------------------------------------------------------------------

    def is_full(self, queue: QueueKey, planned: int = 0) -> bool:
        """Whether the queue or its part for a class is at its bound.

        `planned`: requests that may join before that one.
        """
        size = self._reserved_size()
        size = size._replace(requests=size.requests + planned)
        return not size.has_room_below(self._bound) or self._is_class_full(queue)

    def must_defer(self, wanted: LaneRequest) -> bool:
        """Whether a request that finds no worker has to wait in the log."""
        is_its_turn = self.deferred.release(wanted.key) or not self.deferred.has_waiting(
            wanted.queue_key
        )
        return not (is_its_turn and self._has_room_for(wanted.queue_key))

    def remaining_capacity(self, admitted: int) -> QueueSize:
        """The room for requests that can wait in the log, with `admitted` not yet assigned."""
        size, bound = self._reserved_size().plus(self.deferred.size), self._deferrable_bound
        return QueueSize(
            max(0, bound.requests - max(size.requests, admitted)),
            max(0, bound.tokens - size.tokens),
            max(0, bound.bytes - size.bytes),
        )

    def _has_room_for(self, queue: QueueKey) -> bool:
        size = self._reserved_size()
        return size.has_room_below(self._deferrable_bound) and not self._is_class_full(queue)

    def _reserved_size(self) -> QueueSize:
        """Of the requests that wait and those that have a reservation."""
        return self._size._replace(requests=len(self.keys)).plus(self.deferred.granted)

    def _is_class_full(self, queue: QueueKey) -> bool:
        return self._classes.is_full(queue, self.deferred.granted_in_class(queue))

    # --- requests --------------------------------------------------------------------------------

    def new_request(
        self,
        key: RequestKey,
        prompt: PromptHashes,
        seed: int,
        deadline_ms: int,
        excluded: Collection[str],
    ) -> LaneRequest:
        """A request that begins to look for a worker."""
        self._arrived += 1
        now_ms = self._broker_clock.now_ms()
        queue = self._classes.classify(prompt.request)
        return LaneRequest(key, self._arrived, prompt, seed, now_ms, deadline_ms, excluded, queue)

    def add(self, wanted: LaneRequest, tokens: int) -> None:
        """Add a request that found no worker at once. `tokens`: its part of the bound."""
        self.keys.add(wanted.key)
        self._subtract(wanted)
        size = self._sizes[wanted.key] = QueueSize(1, tokens, wanted.prompt.request.prompt_bytes)
        self._size = self._size.plus(size)
        self._lane_bytes[wanted.key.lane] += size.bytes
        self._count_decode(wanted, 1)
        self._classes.add_waiting(wanted.queue_key, tokens)

    def remove(self, wanted: LaneRequest) -> None:
        """Remove a request that has a worker, or that ended; its room is for a deferred one."""
        self.keys.discard(wanted.key)
        self._subtract(wanted)
        self.deferred.release(wanted.key)
        self.deferred.grant_next()

    def _subtract(self, wanted: LaneRequest) -> None:
        size = self._sizes.pop(wanted.key, None)
        if size is not None:
            self._size = self._size.plus(size, -1)
            self._lane_bytes[wanted.key.lane] -= size.bytes
            self._count_decode(wanted, -1)
            self._classes.remove_waiting(wanted.queue_key, size.tokens)

    def _count_decode(self, wanted: LaneRequest, change: int) -> None:
        if wanted.phase == "decode":
            model = wanted.prompt.request.model
            self._decodes[model] += change
            if not self._decodes[model]:
                del self._decodes[model]

    def max_wait_s(self, until_ms: float) -> float:
        """The time in seconds until a request retries that is not woken; its wait ends at the
        broker time `until_ms`."""
        interval_s = RETRY_INTERVAL_S * max(1, len(self.keys) / self._max_frequent_retries)
        return min(interval_s, (until_ms + 1 - self._broker_clock.now_ms()) / 1000)

    async def wait_for_change(self, name: QueueName, rank: Priority, until_ms: float) -> None:
        """Wait until a worker may have capacity; under a name the lowest rank is woken first."""
        await self.changed.wait(self.max_wait_s(until_ms), name, rank)
