"""Fair queueing: how classes of requests share the workers, and how much of each may wait.

A request names its class, or belongs to the class of its tenant; all others form one class with
weight 1 and no bounds. Among the requests that wait for a model, after strict priority, the class
with the lowest virtual time goes first: prompt tokens served, divided by its weight (start-time
fair queueing, Goyal, Vin and Cheng 1996). A class that becomes backlogged starts at the current
virtual time: idle classes accumulate no credit, and nothing that was served without a queue counts.

A class is charged when a place is found, also if the worker refuses then. A class whose waiting
requests fit nowhere falls behind, and is preferred afterwards. In this router alone;
`pending.py` has the order within a class.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import groupby
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

import msgspec

from kvlane.streams.request import Request

K = TypeVar("K", bound=Hashable)

DEFAULT_CLASS = ""
"""The class of requests that are in no other."""
UNBOUNDED = 1 << 62


class QueueKey(NamedTuple):
    """The queue of a request: one for each model and class."""

    model: str = ""
    class_name: str = DEFAULT_CLASS


class ShareCost(msgspec.Struct, frozen=True, gc=False):
    """The cost of a request to its class when it goes to a worker: the tokens of its prompt."""

    queue: QueueKey = QueueKey()
    tokens: int = 0


NO_COST = ShareCost()


class QueueEntry(msgspec.Struct, Generic[K], frozen=True, gc=False):
    """A request in the order of dispatch: the lowest `negated_priority` goes first, then the lowest
    `order`, which is unique."""

    key: K
    cost: ShareCost
    negated_priority: int
    order: tuple[float, ...]


class ClassConfig(NamedTuple):
    """The weight of a class, how much of it may wait in one router, and the target of the time to a
    first token, by which it goes with queue order edf."""

    weight: float = 1.0
    max_queued_requests: int = UNBOUNDED
    max_queued_tokens: int = UNBOUNDED
    ttft_target_ms: float | None = None


@dataclass(slots=True)
class _Line:
    """The queue of one model, kept while requests wait: the virtual times `given` of its classes.
    `served`: the virtual time of the class that went last, before that."""

    given: dict[str, float] = field(default_factory=dict)
    waiting: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    served: float = 0.0


class FairQueue:
    def __init__(self, shares: Mapping[str, ClassConfig] | None = None) -> None:
        self.set_shares(shares)
        self._requests, self._tokens = Counter[str](), Counter[str]()
        """Waiting requests by class, and their tokens that no cache has."""
        self._lines: dict[str, _Line] = {}

    def set_shares(self, shares: Mapping[str, ClassConfig] | None) -> None:
        """Use other classes from now on. Requests of one that is gone stay in it, with the weight
        of the default class and without bounds."""
        self._shares = {DEFAULT_CLASS: ClassConfig(), **(shares or {})}

    def _share(self, class_name: str) -> ClassConfig:
        return self._shares.get(class_name) or self._shares[DEFAULT_CLASS]

    def classify(self, request: Request) -> QueueKey:
        for name in (request.hints.queue_class, request.tenant):
            if name in self._shares:
                return QueueKey(request.model, name)
        return QueueKey(request.model)

    def ttft_target_ms(self, queue: QueueKey) -> float | None:
        return self._share(queue.class_name).ttft_target_ms

    def waiting_queues(self, *models: str) -> list[QueueKey]:
        lines = [(model, self._lines[model]) for model in models if model in self._lines]
        return [QueueKey(model, of) for model, line in lines for of in line.waiting]

    def size_by_model(self) -> dict[str, tuple[int, int]]:
        """Waiting requests of each model, and their tokens that no cache has."""
        return {name: (line.waiting.total(), line.tokens) for name, line in self._lines.items()}

    def virtual_time(self, queue: QueueKey) -> float:
        """The virtual time of a queue; the lowest goes first."""
        line = self._lines.get(queue.model)
        if line is None:
            return 0.0
        given = line.given.get(queue.class_name, 0.0)
        return given if queue.class_name in line.waiting else max(given, line.served)

    def charge(self, claim: ShareCost) -> None:
        line = self._lines.get(claim.queue.model)
        if line is not None:
            before = self.virtual_time(claim.queue)
            line.served = max(line.served, before)
            line.given[claim.queue.class_name] = before + self._cost(claim)

    def in_dispatch_order(self, turns: Iterable[QueueEntry[K]]) -> Iterator[K]:
        """The waiting requests in the order of dispatch if no others arrive."""
        given: dict[QueueKey, float] = {}
        for _, alike in groupby(sorted(turns, key=_within_class), key=_strictness):
            lines: dict[QueueKey, deque[QueueEntry[K]]] = {}
            for turn in alike:
                lines.setdefault(turn.cost.queue, deque()).append(turn)
            for queue in lines:
                given.setdefault(queue, self.virtual_time(queue))
            if len(lines) == 1:
                (line,) = lines.values()
                given[queue] += sum(self._cost(turn.cost) for turn in line)
                yield from (turn.key for turn in line)
                continue
            heads = [(given[queue], line[0].order, queue) for queue, line in lines.items()]
            heapify(heads)
            while heads:
                _, _, queue = heads[0]
                turn = lines[queue].popleft()
                given[queue] += self._cost(turn.cost)
                if lines[queue]:
                    heapreplace(heads, (given[queue], lines[queue][0].order, queue))
                else:
                    heappop(heads)
                yield turn.key

    def is_full(self, queue: QueueKey, reserved: int = 0) -> bool:
        """Whether the bounds of the class leave no room for one more, with `reserved` requests."""
        share, of = self._share(queue.class_name), queue.class_name
        requests = self._requests[of] + reserved
        return requests >= share.max_queued_requests or self._tokens[of] >= share.max_queued_tokens

    def add_waiting(self, queue: QueueKey, uncached_tokens: int) -> None:
        line = self._lines.setdefault(queue.model, _Line())
        line.given[queue.class_name] = self.virtual_time(queue)
        line.waiting[queue.class_name] += 1
        line.tokens += uncached_tokens
        self._requests[queue.class_name] += 1
        self._tokens[queue.class_name] += uncached_tokens

    def remove_waiting(self, queue: QueueKey, uncached_tokens: int) -> None:
        """A request waits no longer; `uncached_tokens` as at the beginning."""
        line = self._lines[queue.model]
        line.tokens -= uncached_tokens
        waiting = line.waiting
        waiting[queue.class_name] -= 1
        if not waiting[queue.class_name]:
            del waiting[queue.class_name]
        if not waiting:
            del self._lines[queue.model]
        self._requests[queue.class_name] -= 1
        self._tokens[queue.class_name] -= uncached_tokens

    def _cost(self, claim: ShareCost) -> float:
        return claim.tokens / self._share(claim.queue.class_name).weight


_within_class = attrgetter("negated_priority", "order")
_strictness = attrgetter("negated_priority")
