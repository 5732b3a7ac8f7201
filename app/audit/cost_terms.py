"""Reasons of a recorded decision: the cost of each candidate by term, and the runner-up.

Recomputed from the record (`app/routing/selection/select.py`). The terms are weighted, in the unit
of the costs: their sum is the cost. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from kvlane.app.audit.recompute import find_difference, has_inputs
from kvlane.app.routing.selection.handover_rules import is_handed_over
from kvlane.app.routing.selection.policies.policy import MISSED_TARGET
from kvlane.app.routing.selection.policies.registry import RECORDED
from kvlane.app.routing.selection.select import Reconstructed, reconstruct
from kvlane.streams.records import Assigned, Candidate


class ScoredCandidate(msgspec.Struct, frozen=True):
    """A candidate: its cost, the terms of the cost, its cached prompt tokens, and all inputs."""

    worker: str
    epoch: int
    rank: int
    cost: float
    terms: dict[str, float]
    cached_tokens: int
    inputs: Candidate


class DecisionReasons(msgspec.Struct, frozen=True):
    """Why `chosen` was chosen. `others`: the other candidates, the cheapest first.

    `lost_by`: cost of the first of these minus that of the chosen one; `lost_in`: the term with the
    largest difference, "" if costs have no terms. `difference`: the first one between the record
    and the recomputed decision, "" for none. `choice`: why the request was handed over or stayed
    whole, "" where costs did not decide.
    """

    policy: str
    unit: str
    chosen: ScoredCandidate
    others: list[ScoredCandidate]
    lost_by: float
    lost_in: str
    words: str
    difference: str
    choice: str = ""


def reasons_for(decision: Assigned, session: str | None = None) -> DecisionReasons | None:
    """Reasons of a decision; None without inputs. `session`: its session id, None if unknown."""
    recalled = reconstruct(decision, session or "") if has_inputs(decision) else None
    if recalled is None:
        return None
    candidates = decision.candidates
    terms = _terms(decision, candidates, recalled)
    weighed = [
        ScoredCandidate(
            each.worker, each.epoch, each.rank, each.cost, terms[i], _cached(decision, each), each
        )
        for i, each in enumerate(candidates)
    ]
    place = (decision.worker, decision.epoch, decision.rank)
    chosen = next((w for w in weighed if (w.worker, w.epoch, w.rank) == place), None)
    if chosen is None:
        return None
    others = sorted((w for w in weighed if w is not chosen), key=lambda w: w.cost)
    policy = RECORDED[decision.policy]
    unknown = policy.uses_sessions and session is None
    lost_by, lost_in = 0.0, ""
    if others:
        lost_by, lost_in = others[0].cost - chosen.cost, _lost_in(chosen, others[0])
    return DecisionReasons(
        policy=decision.policy, unit=policy.unit, chosen=chosen, others=others,
        lost_by=lost_by, lost_in=lost_in, words=_words(decision, chosen, others, lost_by, lost_in),
        difference="" if unknown else find_difference(decision, session or ""),
        choice=_choice_words(decision),
    )  # fmt: skip


def _words(  # noqa: PLR0911 - one for each kind of reason
    decision: Assigned, chosen: ScoredCandidate, others: Sequence[ScoredCandidate],
    lost_by: float, lost_in: str,
) -> str:  # fmt: skip
    if not others:
        return "the only candidate"
    policy = RECORDED[decision.policy]
    if policy.reason:
        return policy.reason
    name, unit = others[0].worker, policy.unit
    if lost_by < 0:
        use = decision.session
        is_home = use is not None and use.bound_worker == decision.worker
        why = "its session is bound to this worker" if is_home else "drawn at its temperature"
        return f"{why}, though {name} cost {-lost_by:.4g} {unit} less"
    if math.isinf(lost_by):  # of a batch request
        return "no other worker has capacity that interactive requests leave"
    if lost_by == 0:
        if chosen.inputs.usual_tokens < others[0].inputs.usual_tokens:
            return f"the same cost as {name}, whose load of the last seconds was more"
        return f"the same cost as {name}; the request's seed decided"
    if lost_in == MISSED_TARGET:
        return f"the least cost of those that meet its targets; {name} came next and would miss one"
    mostly = f", mostly {lost_in}" if lost_in else ""
    return f"the least cost: {name} came next with {lost_by:.4g} {unit} more{mostly}"


def _choice_words(decision: Assigned) -> str:
    """Why a request was handed over or stayed whole."""
    choice = decision.choice
    if choice is None:
        return ""
    whole, prefill, decode = choice.whole, choice.prefill, choice.decode
    both = f"{prefill.cost + decode.cost:.1f} ms handed over from {prefill.worker}"
    detail = f"{decode.worker} ({choice.params['transfer_ms']:.1f} ms of it the transfer)"
    alone = f"{whole.cost:.1f} ms whole on {whole.worker}"
    if is_handed_over(choice):
        return f"handed over: {both} to {detail}, {alone}"
    return f"stayed whole: {alone}, {both} to {detail}"


def _lost_in(chosen: ScoredCandidate, other: ScoredCandidate) -> str:
    more = {name: other.terms[name] - chosen.terms[name] for name in chosen.terms}
    return max(more, key=more.__getitem__, default="")


def _cached(decision: Assigned, candidate: Candidate) -> int:
    blocks = candidate.overlap_blocks + candidate.host_blocks + candidate.disk_blocks
    return min(blocks * decision.block_size, decision.prompt_tokens + decision.base_tokens)


def _terms(
    decision: Assigned, candidates: Sequence[Candidate], recalled: Reconstructed
) -> list[dict[str, float]]:
    """Terms of each candidate, without terms that are 0 for all candidates."""
    policy, scores = RECORDED[decision.policy], recalled.scores
    each = [policy.terms(decision, c, scores, row) for row, c in enumerate(candidates)]
    names = dict.fromkeys(name for terms in each for name in terms)
    some = [name for name in names if any(terms.get(name) for terms in each)]
    return [{name: terms.get(name, 0.0) for name in some} for terms in each]
