"""Waiting requests: those of one queue, with their size, its bounds and their wake-ups.

One more request than the bound is refused (`is_full`) or, where it can be read again, deferred
(`must_defer`): it waits in the log (`deferred_prompts.py`). `router_queue.py` has their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from kvlane.app.routing.queueing.deferred_prompts import DeferredPrompts, QueueSize
from kvlane.app.routing.queueing.fair_share import FairQueue, QueueKey
from kvlane.app.routing.queueing.pending import LaneRequest, RequestKey
from kvlane.app.routing.queueing.wake_ups import MIN_WAIT_MS, WakeUps
from kvlane.app.routing.selection.prompt_hashes import PromptHashes

RETRY_INTERVAL_MS = 1000
"""How often a waiting request retries without being woken, since a wake-up may have gone to one
that could not use it."""


class WaitingRequests:
    """The waiting requests of a queue. `classes`: the classes in it, each with a bound of its own.
    `bound`: of the queue; `deferrable_bound`: of the part for requests that can wait in the log.
    `max_frequent_retries`: requests beyond which each retries less often."""

    def __init__(
        self,
        classes: FairQueue,
        bound: QueueSize,
        deferrable_bound: QueueSize,
        max_frequent_retries: int,
        wake_ups: WakeUps[RequestKey],
    ) -> None:
        self.keys: set[RequestKey] = set()
        """The requests that wait: for a worker, or backing off after a refusal."""
        self.deferred = DeferredPrompts[RequestKey](self._has_room_for)
        """Requests beyond `deferrable_bound`, which wait in the log."""
        self._wake_ups = wake_ups
        self._classes = classes
        self.set_bounds(bound, deferrable_bound)
        self._max_frequent_retries = max_frequent_retries
        self._arrived = 0
        self._sizes: dict[RequestKey, QueueSize] = {}
        self._size = QueueSize()
        """The sum of `_sizes`, where a request that backs off has none."""
        self._lane_bytes = Counter[int]()
        self._decodes = Counter[str]()
        """Requests of phase decode, by model."""

    def set_bounds(self, bound: QueueSize, deferrable_bound: QueueSize) -> None:
        """Bound the queue otherwise from now on; requests beyond a lower bound wait on."""
        self._bound = bound
        self._deferrable_bound = deferrable_bound

    # --- size ------------------------------------------------------------------------------------

    @property
    def queued_requests(self) -> int:
        return len(self.keys)

    def size_by_model(self) -> dict[str, tuple[int, int]]:
        """Waiting requests of each model, and their tokens as given when the wait began."""
        return self._classes.size_by_model()

    @property
    def queued_bytes(self) -> int:
        """Bytes of waiting prompts, which is the memory they take here."""
        return self._size.bytes

    @property
    def deferred_requests(self) -> int:
        return self.deferred.size.requests

    def queued_bytes_of_lane(self, lane: int) -> int:
        return self._lane_bytes[lane]

    def has_decodes(self, model: str) -> bool:
        return self._decodes[model] > 0

    # --- bounds ----------------------------------------------------------------------------------

    def is_full(self, queue: QueueKey, planned: int = 0) -> bool:
        """Whether the queue or its part for a class is at its bound. `planned`: requests that may
        join before that one."""
        size = self._reserved_size()
        size = size._replace(requests=size.requests + planned)
        return not size.has_room_below(self._bound) or self._is_class_full(queue)

    def must_defer(self, request: LaneRequest) -> bool:
        """Whether a request that finds no worker has to wait in the log."""
        is_its_turn = self.deferred.release(request.key) or not self.deferred.has_waiting(
            request.queue_key
        )
        return not (is_its_turn and self._has_room_for(request.queue_key))

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
        now_ms: int,
        deadline_ms: float | None = None,
        excluded: Collection[str] = (),
    ) -> LaneRequest:
        self._arrived += 1
        queue = self._classes.classify(prompt.request)
        return LaneRequest(key, self._arrived, prompt, seed, now_ms, deadline_ms, excluded, queue)

    def add(self, request: LaneRequest, tokens: int) -> None:
        """Add a request that found no worker at once. `tokens`: its part of the bound."""
        self.keys.add(request.key)
        self._subtract(request)
        size = self._sizes[request.key] = QueueSize(1, tokens, request.prompt.request.prompt_bytes)
        self._size = self._size.plus(size)
        self._lane_bytes[request.key.lane] += size.bytes
        self._count_decode(request, 1)
        self._classes.add_waiting(request.queue_key, tokens)

    def remove(self, request: LaneRequest) -> None:
        """Remove a request that has a worker, or that ended; its room is for a deferred one."""
        self.keys.discard(request.key)
        self._wake_ups.discard(request.key)
        self._subtract(request)
        self.deferred.release(request.key)
        self.deferred.grant_next()

    def _subtract(self, request: LaneRequest) -> None:
        size = self._sizes.pop(request.key, None)
        if size is not None:
            self._size = self._size.plus(size, -1)
            self._lane_bytes[request.key.lane] -= size.bytes
            self._count_decode(request, -1)
            self._classes.remove_waiting(request.queue_key, size.tokens)

    def _count_decode(self, request: LaneRequest, change: int) -> None:
        if request.phase == "decode":
            model = request.prompt.request.model
            self._decodes[model] += change
            if not self._decodes[model]:
                del self._decodes[model]

    def retry_ms(self, now_ms: float, until_ms: float) -> float:
        """The time at which a request retries that is not woken; its wait ends at `until_ms`."""
        interval_ms = RETRY_INTERVAL_MS * max(1, len(self.keys) / self._max_frequent_retries)
        return max(min(now_ms + interval_ms, until_ms + 1), now_ms + MIN_WAIT_MS)
