"""Recomputation of recorded decisions, from their own records alone, to the last bit. Pure.

Compares the choice of a hand-over, the chosen rank, the cost of every candidate, the predicted
cached tokens, the added prefill tokens, and the predicted time to first token. The queueing time is
no decision. `Shadow` compares them with the choices of other settings from the same inputs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from kvlane.app.routing.policy_names import RECORDED_POLICIES
from kvlane.app.routing.queueing.objective import DecodeWeight
from kvlane.app.routing.selection.handover_rules import is_handed_over, recompute_choice_costs
from kvlane.app.routing.selection.policies.registry import POLICIES, RECORDED
from kvlane.app.routing.selection.routing_config import RoutingConfig
from kvlane.app.routing.selection.select import (
    added_prefill,
    choose_otherwise,
    recompute_choice,
    reconstruct,
)
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.app.traces.capture_format import AnyCaptureLine, CapturedDecision, CapturedRequest
from kvlane.streams.records import Assigned, LogRecord


@dataclass
class RecomputeReport:
    """Counts of recomputed decisions of a capture.

    `first`: the first difference, with its decision. `without_inputs`: decisions that cannot be
    recomputed, see `has_inputs`; `without_session`: by a session that is not in the capture.
    """

    decisions: int = 0
    same: int = 0
    differ: int = 0
    without_inputs: int = 0
    without_session: int = 0
    first: str = ""
    policies: Counter[str] = field(default_factory=Counter)
    _sessions: dict[str, str] = field(default_factory=dict)

    def add_line(self, line: AnyCaptureLine) -> None:
        """Apply the next line of the capture."""
        if isinstance(line, CapturedRequest):
            self._sessions[line.id] = line.session
        elif isinstance(line, CapturedDecision):
            self._decide(line)

    def _decide(self, line: CapturedDecision) -> None:
        decision = line.decision
        session = self._sessions.get(decision.id)
        self.decisions += 1
        self.policies[decision.policy or "none"] += 1
        if not has_inputs(decision):
            self.without_inputs += 1
        elif session is None and RECORDED[decision.policy].uses_sessions:
            self.without_session += 1
        elif difference := find_difference(decision, session or ""):
            self.differ += 1
            where = f"ledger/{line.lane}:{line.offset}"
            self.first = self.first or f"{decision.id} at {where}: {difference}"
        else:
            self.same += 1


SHADOWED = ("predictive", "dynamo", "least_loaded")
"""Policies whose choice follows from recorded inputs alone, by costs that are amounts."""


class ShadowRow(msgspec.Struct):
    """The decisions for a model by a policy, `others` of which go to another worker by the settings
    of the shadow. `regret`: mean cost of the taken place, by the shadow, above that of its own
    choice; `extra_cost`: of the shadow's choice, by the router, above the taken place; None where
    costs are no amounts. `unknown`: decisions without the inputs of the shadow's policy."""

    model: str
    policy: str
    decisions: int = 0
    others: int = 0
    unknown: int = 0
    regret: float = 0.0
    extra_cost: float | None = None


class Shadow:
    """The choices of other settings beside the decisions of routers, by model and policy."""

    def __init__(self, config: RoutingConfig) -> None:
        self._config = config
        self._decode_weight = DecodeWeight(config.objective)
        self._rows: dict[tuple[str, str], ShadowRow] = {}

    @property
    def rows(self) -> list[ShadowRow]:
        return [self._rows[key] for key in sorted(self._rows)]

    def add(self, log_record: LogRecord) -> None:
        """Apply the next record of the ledger."""
        decision = log_record.record
        self._decode_weight.on_record(log_record)
        if (
            isinstance(decision, Assigned)
            and decision.phase != "decode"
            and decision.policy in POLICIES
        ):
            self._compare(decision)

    def _compare(self, decision: Assigned) -> None:
        model = "" if decision.account is None else decision.account.model
        key = model, decision.policy
        if (row := self._rows.get(key)) is None:
            row = self._rows[key] = ShadowRow(*key)
        weights = self._config.predictive_weights._replace(decode_weight=self._decode_weight.value)
        choice = choose_otherwise(decision, self._config._replace(predictive_weights=weights))
        candidates, place = decision.candidates, (decision.worker, decision.epoch, decision.rank)
        taken = [i for i, c in enumerate(candidates) if (c.worker, c.epoch, c.rank) == place]
        if choice is None or not taken:
            row.unknown += 1
            return
        row.decisions += 1
        row.others += choice.position != taken[0]
        regret = float(choice.costs[taken[0]] - choice.costs[choice.position])
        row.regret += (regret - row.regret) / row.decisions
        if decision.policy in SHADOWED:
            extra, before = (
                candidates[choice.position].cost - candidates[taken[0]].cost,
                row.extra_cost or 0.0,
            )
            row.extra_cost = before + (extra - before) / row.decisions


def has_inputs(decision: Assigned) -> bool:
    """Whether a record has the inputs of its decision, by a policy of this version."""
    return decision.policy in RECORDED_POLICIES and bool(decision.candidate_workers)


def find_difference(decision: Assigned, session: str = "") -> str:
    """First difference of a recomputed decision from its record; "" for none."""
    recalled, place = reconstruct(decision, session), recompute_choice(decision, session)
    assert recalled is not None, "it has inputs"
    recorded = WorkerRank(decision.worker, decision.epoch, decision.rank)
    candidates = decision.candidates
    if place != recorded:
        return f"the place is {place}, and was {recorded}"
    for candidate, cost in zip(candidates, recalled.scores.costs, strict=True):
        if float(cost) != candidate.cost:
            return f"the cost of {candidate.worker} is {float(cost)!r}, and was {candidate.cost!r}"
    chosen = recalled.options.worker_ranks.index(recorded)
    each = candidates[chosen]
    tokens = decision.prompt_tokens + decision.base_tokens
    blocks = each.overlap_blocks + each.host_blocks + each.disk_blocks
    cached = min(blocks * decision.block_size, tokens)
    added = added_prefill(decision.policy, decision.params, tokens, cached)
    expected: dict[str, tuple[float, float]] = {
        "cached_tokens_predicted": (cached, decision.cached_tokens_predicted),
        "prefill_tokens": (added, decision.prefill_tokens),
    }
    if recalled.scores.results is not None:
        expected["ttft_ms_predicted"] = recalled.scores.ttft_ms(chosen), decision.ttft_ms_predicted
    for name, (now, before) in expected.items():
        if now != before:
            return f"{name} is {now!r}, and was {before!r}"
    return _choice_difference(decision)


def _choice_difference(decision: Assigned) -> str:
    choice, costs = decision.choice, recompute_choice_costs(decision)
    if choice is None or costs is None:
        return ""
    names = ("a whole request", "prefill", "decode")
    parts = (choice.whole, choice.prefill, choice.decode)
    for name, part, cost in zip(names, parts, costs, strict=True):
        if cost != part.cost:
            return f"the cost of {name} is {cost!r}, and was {part.cost!r}"
    if is_handed_over(choice) != (decision.phase == "prefill"):
        return f"phase {decision.phase} costs more"
    return ""
