"""Why a recorded decision fell as it did: each candidate's cost in its terms, and who came next.

Pure. Everything is taken again from the record (`app/routing/plan.py`), so what is told is what was
computed. Terms are in the unit of the costs, weights and all: they add up to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from app.audit.recompute import difference_of, has_inputs
from app.routing.kernels import MISSED_MS
from app.routing.plan import Recalled, recall
from app.routing.policies import DynamoWeights
from app.routing.predictive import PredictiveWeights
from streams.records import Assigned, Candidate

UNITS = {
    "predictive": "ms",
    "dynamo": "blocks",
    "least_loaded": "tokens",
    "power_of_two": "tokens",
    "direct": "tokens",
    "round_robin": "turns",
}
"""Of the costs of each policy; draws have none."""
_WORDS = {
    "round_robin": "it was its turn",
    "random": "drawn at random, by the request's seed",
    "session_hash": "the place of its session, or of its id without one",
    "direct": "the request says so",
}


class Weighed(msgspec.Struct, frozen=True):
    """A candidate: its cost, the terms of it, what it held of the prompt, and all inputs."""

    worker: str
    epoch: int
    rank: int
    cost: float
    terms: dict[str, float]
    cached_tokens: int
    inputs: Candidate


class Reasons(msgspec.Struct, frozen=True):
    """Why it was `chosen`. `others` are the other candidates, the cheapest first.

    `lost_by`: what the first of these cost more, negative if chance decided against it; `lost_in`:
    the term in which it lost most, "" where costs have no terms. `difference`: what comes out
    otherwise when the decision is taken again, "" for nothing.
    """

    policy: str
    unit: str
    chosen: Weighed
    others: list[Weighed]
    lost_by: float
    lost_in: str
    words: str
    difference: str


def reasons(decision: Assigned, session: str | None = None) -> Reasons | None:
    """None for a decision without inputs. `session`: the request's, None if it is not known."""
    recalled = recall(decision, session or "") if has_inputs(decision) else None
    if recalled is None:
        return None
    terms = _terms(decision, recalled)
    weighed = [
        Weighed(
            each.worker, each.epoch, each.rank, each.cost, terms[i], _cached(decision, each), each
        )
        for i, each in enumerate(decision.candidates)
    ]
    place = (decision.worker, decision.epoch, decision.rank)
    chosen = next((w for w in weighed if (w.worker, w.epoch, w.rank) == place), None)
    if chosen is None:
        return None
    others = sorted((w for w in weighed if w is not chosen), key=lambda w: w.cost)
    unknown = decision.policy == "session_hash" and session is None
    lost_by, lost_in = 0.0, ""
    if others:
        lost_by, lost_in = others[0].cost - chosen.cost, _lost_in(chosen, others[0])
    return Reasons(
        policy=decision.policy, unit=UNITS.get(decision.policy, ""), chosen=chosen, others=others,
        lost_by=lost_by, lost_in=lost_in, words=_words(decision, others, lost_by, lost_in),
        difference="" if unknown else difference_of(decision, session or ""),
    )  # fmt: skip


def _words(decision: Assigned, others: Sequence[Weighed], lost_by: float, lost_in: str) -> str:
    if not others:
        return "no other place was considered"
    if decision.policy in _WORDS:
        return _WORDS[decision.policy]
    name, unit = others[0].worker, UNITS.get(decision.policy, "")
    if lost_by < 0:
        use = decision.session
        is_home = use is not None and use.bound_worker == decision.worker
        why = "its session is at home there" if is_home else "drawn at its temperature"
        return f"{why}, though {name} cost {-lost_by:.4g} {unit} less"
    if lost_by == 0:
        return f"no dearer than {name}; the request's seed decided"
    if lost_by > MISSED_MS / 2 and decision.policy == "predictive":
        return f"the least cost of those that meet its targets; {name} came next and would miss one"
    mostly = f", mostly {lost_in}" if lost_in else ""
    return f"the least cost: {name} came next with {lost_by:.4g} {unit} more{mostly}"


def _lost_in(chosen: Weighed, other: Weighed) -> str:
    more = {name: other.terms[name] - chosen.terms[name] for name in chosen.terms}
    return max(more, key=more.__getitem__, default="")


def _cached(decision: Assigned, candidate: Candidate) -> int:
    blocks = candidate.overlap_blocks + candidate.host_blocks + candidate.disk_blocks
    return min(blocks * decision.block_size, decision.prompt_tokens + decision.base_tokens)


def _terms(decision: Assigned, recalled: Recalled) -> list[dict[str, float]]:
    """One for each candidate; those that nobody has are left out."""
    each = [_terms_of(decision, recalled, i) for i in range(len(decision.candidates))]
    if decision.policy in ("predictive", "dynamo"):
        for candidate, terms in zip(decision.candidates, each, strict=True):
            rest = candidate.cost - sum(terms.values())
            if decision.policy == "predictive" and rest > MISSED_MS / 2:
                terms["missed target"] = MISSED_MS
                rest -= MISSED_MS
            if candidate.taint_weight:
                terms["taints"] = rest
    names = dict.fromkeys(name for terms in each for name in terms)
    some = [name for name in names if any(terms.get(name) for terms in each)]
    return [{name: terms.get(name, 0.0) for name in some} for terms in each]


def _terms_of(decision: Assigned, recalled: Recalled, i: int) -> dict[str, float]:
    candidate, size = decision.candidates[i], decision.block_size
    if recalled.prediction is not None:
        weight = decision.params.get("decode_weight", PredictiveWeights().decode_weight)
        terms = recalled.prediction.terms
        weights = {"stall_ms": weight, "slower_ms": weight, "decode_ms": weight}
        return {
            name.removesuffix("_ms"): float(getattr(terms, name)[i]) * weights.get(name, 1.0)
            for name in terms._fields
        }
    if decision.policy == "dynamo":
        params = DynamoWeights()._asdict() | decision.params
        decode = float(-(-candidate.open_tokens // size))
        requests = params["active_request_weight"] * candidate.open_runs
        taints = _taints_factor(candidate)
        waiting = params["prefill_load_scale"] * candidate.prefill_tokens / size
        own = candidate.cost / taints - decode - requests - waiting
        return {"waiting prefill": waiting, "own prefill": own, "decode": decode, "runs": requests}
    if decision.policy in ("least_loaded", "power_of_two"):
        return {"open tokens": float(candidate.open_tokens)}
    return {}


def _taints_factor(candidate: Candidate) -> float:
    """What preferred taints multiply a cost by."""
    return math.exp(-math.tanh(candidate.taint_weight)) if candidate.taint_weight else 1.0
