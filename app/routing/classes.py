"""Classes of requests: how they share the workers while they wait, and how much of each may wait.

A request names its class, or is in that of its tenant; whatever is in none of those that are set
makes one with weight 1 and no bounds. Of those that wait for a model, after strict priority, the
class goes first that was given least: prompt tokens, divided by its weight. So while all of them
wait, classes get tokens in proportion to their weights, however much each asks for (start-time fair
queueing, Goyal, Vin and Cheng 1996). A class that begins to wait stands where the one stood that
was served last: nobody saves turns up, and what was given while nobody waited is held against
nobody.

What is given counts when a place is found, also if the worker refuses then. A class of which all
that waits fits nowhere, being pinned perhaps, falls behind, and has more turns for it afterwards.

Owns what each class was given and what of it waits, in this router alone. Never here: the order
within a class.
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

from streams.records import Request

K = TypeVar("K", bound=Hashable)

OTHERS = ""
"""The class of whatever is in no other."""
NO_BOUND = 1 << 62


class Queue(NamedTuple):
    """Where a request waits: with those of its class who want the same model."""

    model: str = ""
    of: str = OTHERS


class Claim(msgspec.Struct, frozen=True, gc=False):
    """What a request takes of its class's share when it goes to a worker: its prompt's tokens."""

    queue: Queue = Queue()
    tokens: int = 0


NO_CLAIM = Claim()


class Turn(msgspec.Struct, Generic[K], frozen=True, gc=False):
    """Whose turn it is, beside classes: who has less `strict` goes first, then less `rank`.

    No two ranks are alike.
    """

    key: K
    claim: Claim
    strict: int
    rank: tuple[float, ...]


class Share(NamedTuple):
    """What a class gets of the workers, and how much of it may wait in one router."""

    weight: float = 1.0
    held_requests: int = NO_BOUND
    held_tokens: int = NO_BOUND


@dataclass(slots=True)
class _Line:
    """Those who wait for one model: what their classes were `given`, prompt tokens by weight.

    `served`: what the class was given before that went last. There while anybody waits.
    """

    given: dict[str, float] = field(default_factory=dict)
    waiting: Counter[str] = field(default_factory=Counter)
    served: float = 0.0


class Classes:
    """The classes of one router."""

    def __init__(self, shares: Mapping[str, Share] | None = None) -> None:
        self._shares = {OTHERS: Share(), **(shares or {})}
        self._requests, self._tokens = Counter[str](), Counter[str]()
        """That wait, by class; of the tokens those that no cache has."""
        self._lines: dict[str, _Line] = {}

    def of(self, request: Request) -> Queue:
        """Where a request waits, if it has to."""
        for name in (request.hints.queue_class, request.tenant):
            if name in self._shares:
                return Queue(request.model, name)
        return Queue(request.model)

    def queues(self, *models: str) -> list[Queue]:
        """Those of these models in which somebody waits."""
        lines = [(model, self._lines[model]) for model in models if model in self._lines]
        return [Queue(model, of) for model, line in lines for of in line.waiting]

    def given(self, queue: Queue) -> float:
        """Who has less goes first."""
        line = self._lines.get(queue.model)
        if line is None:
            return 0.0
        given = line.given.get(queue.of, 0.0)
        return given if queue.of in line.waiting else max(given, line.served)

    def give(self, claim: Claim) -> None:
        """A request goes to a worker."""
        line = self._lines.get(claim.queue.model)
        if line is not None:
            before = self.given(claim.queue)
            line.served = max(line.served, before)
            line.given[claim.queue.of] = before + self._cost(claim)

    def in_turn(self, turns: Iterable[Turn[K]]) -> Iterator[K]:
        """Who waits, in the order in which they go if nobody else comes."""
        given: dict[Queue, float] = {}
        for _, alike in groupby(sorted(turns, key=_within_class), key=_strictness):
            lines: dict[Queue, deque[Turn[K]]] = {}
            for turn in alike:
                lines.setdefault(turn.claim.queue, deque()).append(turn)
            for queue in lines:
                given.setdefault(queue, self.given(queue))
            if len(lines) == 1:
                (line,) = lines.values()
                given[queue] += sum(self._cost(turn.claim) for turn in line)
                yield from (turn.key for turn in line)
                continue
            heads = [(given[queue], line[0].rank, queue) for queue, line in lines.items()]
            heapify(heads)
            while heads:
                _, _, queue = heads[0]
                turn = lines[queue].popleft()
                given[queue] += self._cost(turn.claim)
                if lines[queue]:
                    heapreplace(heads, (given[queue], lines[queue][0].rank, queue))
                else:
                    heappop(heads)
                yield turn.key

    def is_crowded(self, queue: Queue) -> bool:
        """Whether one more would be too many of this class to wait."""
        share, of = self._shares[queue.of], queue.of
        return self._requests[of] >= share.held_requests or self._tokens[of] >= share.held_tokens

    def wait(self, queue: Queue, uncached_tokens: int) -> None:
        """A request begins to wait."""
        line = self._lines.setdefault(queue.model, _Line())
        line.given[queue.of] = self.given(queue)
        line.waiting[queue.of] += 1
        self._requests[queue.of] += 1
        self._tokens[queue.of] += uncached_tokens

    def leave(self, queue: Queue, uncached_tokens: int) -> None:
        """A request waits no more; `uncached_tokens` as it began."""
        waiting = self._lines[queue.model].waiting
        waiting[queue.of] -= 1
        if not waiting[queue.of]:
            del waiting[queue.of]
        if not waiting:
            del self._lines[queue.model]
        self._requests[queue.of] -= 1
        self._tokens[queue.of] -= uncached_tokens

    def _cost(self, claim: Claim) -> float:
        return claim.tokens / self._shares[claim.queue.of].weight


_within_class = attrgetter("strict", "rank")
_strictness = attrgetter("strict")
