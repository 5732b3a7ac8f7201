"""Reference implementation of the costs of policies predictive and dynamo, per candidate.

The formulas of `predictive.py` and `dynamo.py` in `app/routing/selection/policies/`, from a
decision's record, with the engine profile's own methods instead of the kernels. The operations
have the same order, so the results are equal to the bit. Slow, and used only for comparison.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kvlane.app.routing.selection.cost_kernels import (
    DECODE_PART,
    DISK_SHARE,
    FOLLOWUP_STEPS,
    FULL_CACHE_WAIT,
    HOST_SHARE,
    JOIN_STEPS,
    MISSED_TARGET_MS,
    PREFILL_PART,
    SECOND_COPY,
    WHOLE,
)
from kvlane.app.routing.selection.request_features import RequestFeatures
from kvlane.app.routing.selection.routing_config import DynamoWeights
from kvlane.app.routing.state.performance import recorded_profile
from kvlane.streams.records import Candidate


class ReferenceForecast(NamedTuple):
    """Forecast for a candidate, in ms; `hold_ms` is below 0 when it is overdue."""

    cost_ms: float
    ttft_ms: float
    alone_ms: float
    hold_ms: float


def predictive_cost(
    candidate: Candidate, features: RequestFeatures, decode_weight: float
) -> ReferenceForecast:
    """The forecast of policy predictive for a request at a candidate."""
    pace, prompt = recorded_profile(candidate), features.prompt_tokens
    blocks = candidate.overlap_blocks + (
        HOST_SHARE * candidate.host_blocks + DISK_SHARE * candidate.disk_blocks
    )
    held = min(blocks * features.block_size, prompt)
    tokens = max(float(prompt - held), 1.0)
    context = candidate.prompt_tokens + candidate.open_runs * features.mean_output_tokens / 2
    step_ms = pace.decode_ms(context) if candidate.open_runs else 0.0
    alone_ms = pace.prefill_ms(tokens)
    _, b, fixed_ms = pace.curves.prefill
    shares = pace.slowdown * (b * tokens - fixed_ms) <= step_ms
    steps = wait_for_steps(candidate, tokens, step_ms, shares=shares)
    wait_ms = steps.wait_ms + candidate.later_ms + candidate.batch_ms
    is_bounded = bool(candidate.open_runs and candidate.capacity_tokens)
    added = prompt - min(candidate.overlap_blocks * features.block_size, prompt)
    excess = context + added + features.mean_output_tokens - candidate.capacity_tokens
    if is_bounded and excess > 0:
        wait_ms += (
            excess / max(context, 1.0) * features.mean_output_tokens * FULL_CACHE_WAIT * step_ms
        )
    wait_ms += _wait_for_reservations(candidate, alone_ms, decode_weight)
    later_ms = pace.decode_ms(context + prompt + features.output_tokens / 2)
    replication_ms = (features.most_cached_tokens - held) * (
        pace.prefill_ms(pace.chunk_tokens) / pace.chunk_tokens
    )
    slower_ms = candidate.open_runs * features.mean_output_tokens / 2 * (later_ms - step_ms)
    own_ms = features.output_tokens * later_ms
    if features.part != WHOLE:
        own_ms /= 1.0 - candidate.prefill_share
    stall_ms = candidate.open_runs * (alone_ms if steps.added_ms is None else steps.added_ms)
    delay_ms = candidate.joining_runs * (steps.added_ms or 0.0)
    followups, prefill_ms = features.expected_followups - 1.0, pace.prefill_ms(tokens, step_ms)
    if features.part == PREFILL_PART:
        slower_ms = own_ms = 0.0
    elif features.part == DECODE_PART:
        token_ms = pace.prefill_ms(pace.chunk_tokens) / pace.chunk_tokens
        join_ms = JOIN_STEPS * candidate.prefill_share * pace.prefill_ms(pace.chunk_tokens)
        delay_ms = 0.0
        stall_ms, prefill_ms = 0.0, features.transfer_ms + later_ms + join_ms
        replication_ms = SECOND_COPY * followups * prompt * token_ms
        followups = 0.0
    decode_ms = stall_ms + slower_ms + features.expected_followups * own_ms
    ttft_ms = wait_ms + prefill_ms
    cost_ms = ttft_ms + decode_weight * decode_ms
    cost_ms += followups * FOLLOWUP_STEPS * later_ms + replication_ms / features.expected_followups
    cost_ms += delay_ms
    cost_ms *= math.exp(-math.tanh(candidate.taint_weight))
    if ttft_ms > features.ttft_target_ms or later_ms > features.itl_target_ms:
        cost_ms += MISSED_TARGET_MS
    hold_ms = 0.0 if shares else steps.left_ms
    if (
        is_bounded
        and candidate.prompt_tokens + added + features.output_tokens > candidate.capacity_tokens
    ):
        hold_ms = math.inf
    return ReferenceForecast(cost_ms, ttft_ms, alone_ms, hold_ms)


def _wait_for_reservations(candidate: Candidate, own_ms: float, decode_weight: float) -> float:
    pace, wait_ms = recorded_profile(candidate), candidate.planned_ms or 0.0
    fixed_ms = pace.slowdown * pace.curves.prefill[2]
    for other_ms in candidate.ahead_ms:
        delay_ms = min(own_ms, other_ms) + decode_weight * max(own_ms, other_ms)
        if candidate.shares_steps:
            delay_ms = min(delay_ms, own_ms - fixed_ms + max(other_ms - fixed_ms, 0.0))
        wait_ms += delay_ms
    return wait_ms


class ReferenceSteps(NamedTuple):
    """See `StepWait` in cost_kernels.py; `added_ms` None with steps of its own."""

    wait_ms: float
    left_ms: float
    added_ms: float | None = None


def wait_for_steps(
    candidate: Candidate, tokens: float, step_ms: float, *, shares: bool
) -> ReferenceSteps:
    """The steps at a candidate before and with a prompt."""
    pace, is_decoding = recorded_profile(candidate), candidate.open_runs > candidate.prefill_runs
    joining, busy_ms = (candidate.joining_runs, candidate.joining_tokens), candidate.busy_ms
    begun = (candidate.prefill_runs - joining[0], candidate.prefill_tokens - joining[1])
    found_ms = step_ms if is_decoding else 0.0
    if joining[0] > 0 and begun[0] <= 0 and candidate.joining_ms > found_ms:
        begun, joining, busy_ms = joining, (0, 0), candidate.joining_ms - found_ms / 2
    left_ms = pace.prefill_ms(begun[1], step_ms) - busy_ms if begun[0] > 0 else 0.0
    wait_ms = max(left_ms, step_ms / 2) if begun[0] > 0 or is_decoding else 0.0
    if joining[0] <= 0:
        return ReferenceSteps(wait_ms, left_ms)
    joining_ms = pace.prefill_ms(joining[1], step_ms)
    if not shares:
        return ReferenceSteps(wait_ms + joining_ms, wait_ms + joining_ms)
    joint_ms = pace.prefill_ms(joining[1] + tokens, step_ms)
    return ReferenceSteps(
        wait_ms + (joint_ms - pace.prefill_ms(tokens, step_ms)),
        wait_ms + joining_ms,
        joint_ms - joining_ms,
    )


def dynamo_cost(candidate: Candidate, features: RequestFeatures, weights: DynamoWeights) -> float:
    """The cost of a candidate under policy dynamo."""
    device = weights.overlap_score_credit * candidate.overlap_blocks
    if weights.overlap_decay:
        excess = candidate.prefill_tokens - features.least_prefill_tokens
        device /= 1.0 + weights.overlap_decay / max(features.prompt_tokens, 1) * excess
    credit = (
        device
        + weights.host_weight * candidate.host_blocks
        + weights.disk_weight * candidate.disk_blocks
    )
    prefill = (candidate.prefill_tokens + features.prompt_tokens) / features.block_size
    cost = weights.prefill_load_scale * max(prefill - credit, 0.0)
    cost += -(-candidate.open_tokens // features.block_size)
    cost += weights.active_request_weight * candidate.open_runs
    return cost * math.exp(-math.tanh(candidate.taint_weight))
