"""Decisions of several routers that met: what each would have done, had it read of the other.

    A decides for w ── Assigned ──► ledger ──► every router has read it, and counts it on w
                  B decides for w: it has not, since A stands behind `known_ms` of B

Two decisions of different routers *meet* when they chose the same place and neither was read yet
where the other was taken. They *collide* when moreover each would have gone elsewhere: taken again
from its own record, with the other one's burden added to what its router knew of that place.
Others that meet were right to: the place was the best for both, such as for what it has cached.

What is unread is told from the ledger alone. A record of the same millisecond as the youngest that
was read counts as read, so of those that met within one millisecond a few are missed. Each of two
is taken again with nothing but the other one added. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from app.audit.recompute import has_inputs
from app.routing.plan import replan
from app.routing.policies import Place
from streams.records import Assigned, Candidate, Fact


class Met(NamedTuple):
    """Counts of decisions: all that were looked at, those that met one, and that collided with one.

    `unread_ms`: of each decision whose router had not read some decision of another one: since when
    the oldest of these stood in the log. So long it takes, at least, to hear of one another.
    """

    decisions: int = 0
    met: int = 0
    collided: int = 0
    unread_ms: tuple[int, ...] = ()


class _Taken(NamedTuple):
    """A decision, and when it was appended."""

    at_ms: int
    decision: Assigned

    @property
    def place(self) -> Place:
        each = self.decision
        return Place(each.worker, each.epoch, each.rank)


def meetings(ledger: Iterable[Fact]) -> Met:
    """Of the decisions in these records, of all lanes together, in any order.

    Those that do not say what was known are left out: no inputs, or nothing read yet.
    """
    taken = [
        _Taken(fact.timestamp_ms, fact.record)
        for fact in ledger
        if isinstance(fact.record, Assigned) and fact.record.known_ms and has_inputs(fact.record)
    ]
    taken.sort(key=lambda each: each.at_ms)
    met: set[int] = set()
    collided: set[int] = set()
    unread_ms: list[int] = []
    for number, each in enumerate(taken):
        unread = _unread(taken, number)
        if unread:
            unread_ms.append(each.at_ms - taken[unread[-1]].at_ms)
        for other in unread:
            if taken[other].place == each.place and taken[other].decision.known_ms < each.at_ms:
                met |= {number, other}
                if _both_go_elsewhere(each.decision, taken[other].decision):
                    collided |= {number, other}
    return Met(len(taken), len(met), len(collided), tuple(unread_ms))


def _unread(taken: Sequence[_Taken], number: int) -> list[int]:
    """Decisions of other routers that stood in the log before one, unread by its router."""
    each, found = taken[number].decision, []
    for before in range(number - 1, -1, -1):
        if taken[before].at_ms <= each.known_ms:
            break
        if taken[before].decision.router != each.router:
            found.append(before)
    return found


def _both_go_elsewhere(one: Assigned, other: Assigned) -> bool:
    return _goes_elsewhere(one, other) and _goes_elsewhere(other, one)


def _goes_elsewhere(decision: Assigned, other: Assigned) -> bool:
    """Whether a decision would have been another one with one more on the place that it chose."""
    place = Place(decision.worker, decision.epoch, decision.rank)
    candidates = tuple(
        _burdened(each, other) if (each.worker, each.epoch, each.rank) == place else each
        for each in decision.candidates
    )
    return replan(replace(decision, candidates=candidates)) != place


def _burdened(candidate: Candidate, other: Assigned) -> Candidate:
    """A candidate with a decision more on it. It has just come: for how long the place has been at
    its prompts does not change by it."""
    tokens = (other.prompt_tokens + other.base_tokens) * (other.policy != "direct")
    return replace(
        candidate,
        open_runs=candidate.open_runs + 1,
        open_tokens=candidate.open_tokens + tokens,
        prompt_tokens=candidate.prompt_tokens + tokens,
        prefill_runs=candidate.prefill_runs + 1,
        prefill_tokens=candidate.prefill_tokens + other.prefill_tokens,
    )
