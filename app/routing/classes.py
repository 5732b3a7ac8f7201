"""Classes of requests: how they share the workers while they wait, and how much of each may wait.

A request names its class, or is in that of its tenant; whatever is in none of those that are set
makes one with weight 1 and no bounds. Of those that wait, after strict priority, the class goes
first that was given least: prompt tokens, divided by its weight. So while all of them wait, classes
get tokens in proportion to their weights, however much each asks for (fair queueing by virtual
time, Demers, Keshav and Shenker 1989). One that had nobody waiting begins where the last of those
that wait stands: nobody saves turns up.

Owns what each class was given and what of it waits, in this router alone. Never here: the order
within a class.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

from streams.records import Request

K = TypeVar("K", bound=Hashable)

OTHERS = ""
"""The class of whatever is in no other."""
NO_BOUND = 1 << 62


class Claim(NamedTuple):
    """What a request takes of a share when it goes to a worker: its prompt's tokens."""

    of: str = OTHERS
    tokens: int = 0


NO_CLAIM = Claim()


class Turn(NamedTuple, Generic[K]):
    """Whose turn it is, beside classes: who has less `strict` goes first, then less `rank`."""

    key: K
    claim: Claim
    strict: int
    rank: tuple[float, ...]


class Share(NamedTuple):
    """What a class gets of the workers, and how much of it may wait in one router."""

    weight: float = 1.0
    held_requests: int = NO_BOUND
    held_tokens: int = NO_BOUND


_within_class = attrgetter("strict", "rank")
_strictness = attrgetter("strict")


@dataclass(slots=True)
class _Account:
    """`given`: prompt tokens divided by the weight. `tokens`: of those that wait, the uncached."""

    given: float = 0.0
    requests: int = 0
    tokens: int = 0


class Classes:
    """The classes of one router."""

    def __init__(self, shares: Mapping[str, Share] | None = None) -> None:
        self._shares = {OTHERS: Share(), **(shares or {})}
        self._accounts = {name: _Account() for name in self._shares}

    @property
    def names(self) -> Collection[str]:
        """Of all classes."""
        return self._shares.keys()

    def of(self, request: Request) -> str:
        """The class of a request."""
        for name in (request.hints.queue_class, request.tenant):
            if name in self._shares:
                return name
        return OTHERS

    def given(self, name: str) -> float:
        """Who has less goes first."""
        account = self._accounts[name]
        if account.requests:
            return account.given
        waiting = [each.given for each in self._accounts.values() if each.requests]
        return max(account.given, min(waiting, default=0.0))

    def give(self, claim: Claim) -> None:
        """A request goes to a worker."""
        of = claim.of
        self._accounts[of].given = self.given(of) + claim.tokens / self._shares[of].weight

    def in_turn(self, turns: Iterable[Turn[K]]) -> list[K]:
        """Who waits, in the order in which they go if nobody else comes."""
        ordered = sorted(turns, key=_within_class)
        if len({turn.claim.of for turn in ordered}) < 2:
            return [turn.key for turn in ordered]
        keys: list[K] = []
        given = {name: self.given(name) for name in self._accounts}
        for _, alike in groupby(ordered, key=_strictness):
            queues: dict[str, deque[Turn[K]]] = {}
            for turn in alike:
                queues.setdefault(turn.claim.of, deque()).append(turn)
            while queues:
                of = min(queues, key=lambda name: (given[name], queues[name][0].rank))
                turn = queues[of].popleft()
                keys.append(turn.key)
                given[of] += turn.claim.tokens / self._shares[of].weight
                if not queues[of]:
                    del queues[of]
        return keys

    def is_crowded(self, name: str) -> bool:
        """Whether one more would be too many of this class to wait."""
        share, account = self._shares[name], self._accounts[name]
        return account.requests >= share.held_requests or account.tokens >= share.held_tokens

    def wait(self, name: str, uncached_tokens: int) -> None:
        """A request begins to wait."""
        account = self._accounts[name]
        account.given = self.given(name)
        account.requests += 1
        account.tokens += uncached_tokens

    def leave(self, name: str, uncached_tokens: int) -> None:
        """A request waits no more; `uncached_tokens` as it began."""
        account = self._accounts[name]
        account.requests -= 1
        account.tokens -= uncached_tokens
