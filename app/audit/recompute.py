"""Recomputation of recorded decisions, from their own records alone, to the last bit. Pure.

Compares the choice of a hand-over, the chosen rank, the cost of every candidate, the predicted
cached tokens, the added prefill tokens, and the predicted time to first token. The queueing time is
no decision.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvlane.app.routing.policy_names import RECORDED_POLICIES
from kvlane.app.routing.selection.handover_rules import is_handed_over, recompute_choice_costs
from kvlane.app.routing.selection.policies.registry import RECORDED
from kvlane.app.routing.selection.select import added_prefill, recompute_choice, reconstruct
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.app.traces.capture_format import AnyCaptureLine, CapturedDecision, CapturedRequest
from kvlane.streams.records import Assigned


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
