"""Taking recorded decisions again, from nothing but their own records, to the last bit. Pure.

What is compared: the place, the cost of every candidate, how much of the prompt was expected in its
cache, what the decision adds to the prefill there, and the expected time to the first token. How
long a request was held is no part of it: that is what happened, not what was decided.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from app.captured import AnyLine, Asked, Decided
from app.routing.plan import recall, replan
from app.routing.policies import POLICIES, Place
from streams.records import Assigned


@dataclass
class Recomputed:
    """Decisions that were taken again, line by line of a capture.

    `first`: the first one that came out otherwise, and how. `without_inputs`: records that
    cannot be taken again, see `has_inputs`; `without_session`: those of policy session_hash whose
    request is not in the capture.
    """

    decisions: int = 0
    same: int = 0
    differ: int = 0
    without_inputs: int = 0
    without_session: int = 0
    first: str = ""
    policies: Counter[str] = field(default_factory=Counter)
    _sessions: dict[str, str] = field(default_factory=dict)

    def take(self, line: AnyLine) -> None:
        """One line more."""
        if isinstance(line, Asked):
            self._sessions[line.id] = line.session
        elif isinstance(line, Decided):
            self._decide(line)

    def _decide(self, line: Decided) -> None:
        decision = line.decision
        session = self._sessions.get(decision.id)
        self.decisions += 1
        self.policies[decision.policy or "none"] += 1
        if not has_inputs(decision):
            self.without_inputs += 1
        elif decision.policy == "session_hash" and session is None:
            self.without_session += 1
        elif difference := difference_of(decision, session or ""):
            self.differ += 1
            where = f"ledger/{line.lane}:{line.offset}"
            self.first = self.first or f"{decision.id} at {where}: {difference}"
        else:
            self.same += 1


def has_inputs(decision: Assigned) -> bool:
    """Whether a record says what was decided on, by a policy that this version knows."""
    return bool(decision.candidates) and decision.policy in ("predictive", *POLICIES)


def difference_of(decision: Assigned, session: str = "") -> str:
    """What comes out otherwise when a decision with inputs is taken again; "" for nothing."""
    recalled, place = recall(decision, session), replan(decision, session)
    assert recalled is not None, "it has inputs"
    recorded = Place(decision.worker, decision.epoch, decision.rank)
    if place != recorded:
        return f"the place is {place}, and was {recorded}"
    for candidate, cost in zip(decision.candidates, recalled.costs, strict=True):
        if float(cost) != candidate.cost:
            return f"the cost of {candidate.worker} is {float(cost)!r}, and was {candidate.cost!r}"
    chosen = recalled.options.places.index(recorded)
    each = decision.candidates[chosen]
    tokens = decision.prompt_tokens + decision.base_tokens
    blocks = each.overlap_blocks + each.host_blocks + each.disk_blocks
    cached = min(blocks * decision.block_size, tokens)
    tracked, reuse = (
        decision.params.get(name, 1.0) for name in ("track_prefill_tokens", "assume_kv_reuse")
    )
    is_counted = tracked and decision.policy != "direct"
    added = (tokens - cached if reuse else tokens) if is_counted else 0
    expected: dict[str, tuple[float, float]] = {
        "cached_tokens_predicted": (cached, decision.cached_tokens_predicted),
        "prefill_tokens": (added, decision.prefill_tokens),
    }
    if recalled.prediction is not None:
        ttft_ms = float(recalled.prediction.terms.ttft_ms[chosen])
        expected["ttft_ms_predicted"] = ttft_ms, decision.ttft_ms_predicted
    for name, (now, before) in expected.items():
        if now != before:
            return f"{name} is {now!r}, and was {before!r}"
    return ""
