"""Concurrent decisions of several routers, and the choice of each with knowledge of the other.

    A chooses w ── Assigned ──► ledger ──► every router has read it, and adds its load to w
                  B chooses w: not read yet, since A is newer than `known_ms` of B

Two decisions of different routers *meet* when they chose the same worker rank and neither router
had read the other decision. They *collide* when in addition each would have chosen another rank:
each is recomputed from its own record, with the load of the other added to the chosen rank.
Meeting without a collision is right: the rank was the best for both, such as for its cache.

Whether a decision was read follows from the ledger alone. A record of the same millisecond as the
newest read one counts as read, so a few meetings within one millisecond are missed. A decision is
recomputed with only the other one added. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from kvlane.app.audit.recompute import has_inputs
from kvlane.app.routing.policy_names import adds_load
from kvlane.app.routing.selection.select import recompute_choice
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.streams.records import Assigned, Candidate, LogRecord


class ConcurrentDecisions(NamedTuple):
    """Numbers of decisions: examined ones, those that met another, and those that collided.

    `unread_ms`: for each decision whose router had not read a decision of another router, the age
    of the oldest such decision. A lower bound of the delay between routers.
    """

    decisions: int = 0
    concurrent: int = 0
    collided: int = 0
    unread_ms: tuple[int, ...] = ()


class _Timed(NamedTuple):
    """A decision, and the time it was appended."""

    at_ms: int
    decision: Assigned

    @property
    def place(self) -> WorkerRank:
        each = self.decision
        return WorkerRank(each.worker, each.epoch, each.rank)


def find_concurrent(ledger: Iterable[LogRecord]) -> ConcurrentDecisions:
    """Find meetings and collisions among the decisions of all lanes, given in any order.

    Decisions without recorded inputs, or without a read position, are ignored.
    """
    decisions = [
        _Timed(r.timestamp_ms, r.record)
        for r in ledger
        if isinstance(r.record, Assigned) and r.record.known_ms and has_inputs(r.record)
    ]
    decisions.sort(key=lambda each: each.at_ms)
    met: set[int] = set()
    collided: set[int] = set()
    unread_ms: list[int] = []
    for number, each in enumerate(decisions):
        unread = _unread(decisions, number)
        if unread:
            unread_ms.append(each.at_ms - decisions[unread[-1]].at_ms)
        for other in unread:
            if (
                decisions[other].place == each.place
                and decisions[other].decision.known_ms < each.at_ms
            ):
                met |= {number, other}
                if _both_go_elsewhere(each.decision, decisions[other].decision):
                    collided |= {number, other}
    return ConcurrentDecisions(len(decisions), len(met), len(collided), tuple(unread_ms))


def _unread(decisions: Sequence[_Timed], number: int) -> list[int]:
    """Indices of earlier decisions of other routers that the router of one had not read."""
    each, found = decisions[number].decision, []
    for before in range(number - 1, -1, -1):
        if decisions[before].at_ms <= each.known_ms:
            break
        if decisions[before].decision.router != each.router:
            found.append(before)
    return found


def _both_go_elsewhere(one: Assigned, other: Assigned) -> bool:
    return _goes_elsewhere(one, other) and _goes_elsewhere(other, one)


def _goes_elsewhere(decision: Assigned, other: Assigned) -> bool:
    """Whether a decision changes with the load of the other added to the chosen rank."""
    place = WorkerRank(decision.worker, decision.epoch, decision.rank)
    candidates = [
        _with_load(each, other) if (each.worker, each.epoch, each.rank) == place else each
        for each in decision.candidates
    ]
    return recompute_choice(decision.with_candidates(candidates)) != place


def _with_load(candidate: Candidate, other: Assigned) -> Candidate:
    """A candidate with the load of one more decision. The decision is new, so the time since the
    rank began its current prompts does not change."""
    tokens = (other.prompt_tokens + other.base_tokens) * adds_load(other.policy)
    return replace(
        candidate,
        open_runs=candidate.open_runs + 1,
        open_tokens=candidate.open_tokens + tokens,
        prompt_tokens=candidate.prompt_tokens + tokens,
        prefill_runs=candidate.prefill_runs + 1,
        prefill_tokens=candidate.prefill_tokens + other.prefill_tokens,
    )
