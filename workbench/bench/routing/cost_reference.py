"""Reference implementation of the costs of policies predictive and dynamo, per candidate.

The formulas of `predictive.py` and `dynamo.py` in `app/routing/selection/policies/`, from a
decision's record, with the engine profile's own methods instead of the kernels. The operations
have the same order, so the results are equal to the bit. Slow, and used only for comparison.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kvlane.app.routing.selection.candidates import RequestFeatures
from kvlane.app.routing.selection.cost_kernels import (
    BALANCE_SHARE,
    DECODE_PART,
    DISK_SHARE,
    FOLLOWUP_STEPS,
    FULL_CACHE_WAIT,
    HOST_SHARE,
    JOIN_STEPS,
    LASTING_FOLLOWUPS,
    MISSED_TARGET_MS,
    PREFILL_PART,
    SECOND_COPY,
    STALL_SHARE,
    WHOLE,
)
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
    steps = wait_for_steps(candidate, tokens, alone_ms, step_ms, shares=shares)
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
    lasting = features.expected_followups
    if candidate.shares_steps:
        lasting = min(lasting, LASTING_FOLLOWUPS)
    slower_ms = _slower_ms(candidate, features, lasting, later_ms - step_ms)
    own_ms = features.output_tokens * later_ms
    if features.part != WHOLE:
        own_ms /= 1.0 - candidate.prefill_share
    stall_ms, delay_ms = _stall_ms(candidate, steps.added_ms), steps.delay_ms
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
    decode_ms = stall_ms + slower_ms + lasting * own_ms + _usual_ms(candidate, features)
    ttft_ms = wait_ms + prefill_ms
    next_ms = followups * FOLLOWUP_STEPS * later_ms + replication_ms / features.expected_followups
    cost_ms = ttft_ms + decode_weight * decode_ms + next_ms + delay_ms
    if features.part == WHOLE:
        cost_ms += _balance_ms(candidate, features.least_runs, step_ms)
    cost_ms *= math.exp(-math.tanh(candidate.taint_weight))
    if ttft_ms > features.ttft_target_ms or later_ms > features.itl_target_ms:
        cost_ms += MISSED_TARGET_MS
    needed = candidate.prompt_tokens + added + features.output_tokens
    is_full = is_bounded and needed > candidate.capacity_tokens
    hold_ms = math.inf if is_full else (0.0 if shares else steps.left_ms)
    return ReferenceForecast(cost_ms, ttft_ms, alone_ms, hold_ms)


def _stall_ms(candidate: Candidate, added_ms: float) -> float:
    """The stall of the others' decode by steps that take `added_ms` more."""
    return candidate.open_runs * added_ms * (STALL_SHARE if candidate.shares_steps else 1.0)


def _slower_ms(
    candidate: Candidate, features: RequestFeatures, lasting: float, longer_ms: float
) -> float:
    """The time of the others' decode by steps that take `longer_ms` more."""
    runs = candidate.open_runs
    if candidate.shares_steps:
        return lasting * (runs * features.output_tokens) * longer_ms
    return runs * features.mean_output_tokens / 2 * longer_ms


def _usual_ms(candidate: Candidate, features: RequestFeatures) -> float:
    """The part of later requests' decode that is due to the usual load."""
    if features.part != WHOLE:
        return 0.0
    pace, own = recorded_profile(candidate), features.prompt_tokens + features.output_tokens / 2
    longer_ms = pace.decode_ms(candidate.usual_tokens + own) - pace.decode_ms(own)
    return (features.expected_followups - 1.0) * (features.output_tokens * longer_ms)


def _balance_ms(candidate: Candidate, least_runs: float, step_ms: float) -> float:
    """The cost of more runs than there are at another candidate."""
    if candidate.open_runs <= least_runs:
        return 0.0
    excess = min((candidate.open_runs - least_runs) / (1.0 + least_runs / 10.0), 1.0)
    pace = recorded_profile(candidate)
    return BALANCE_SHARE * excess * (pace.slowdown * pace.curves.prefill[2] + step_ms)


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
    """See `StepWait` in cost_kernels.py."""

    wait_ms: float
    left_ms: float
    added_ms: float
    delay_ms: float = 0.0


def wait_for_steps(
    candidate: Candidate, tokens: float, alone_ms: float, step_ms: float, *, shares: bool
) -> ReferenceSteps:
    """The steps at a candidate before and with a prompt."""
    pace, joining = recorded_profile(candidate), candidate.joining_tokens
    rest_ms = step_ms / 2 if candidate.open_runs > candidate.prefill_runs else 0.0
    begun = candidate.prefill_tokens - joining

    def after(begun_ms: float) -> ReferenceSteps:
        if candidate.joining_runs <= 0:
            return ReferenceSteps(begun_ms, begun_ms, alone_ms)
        joining_ms = pace.prefill_ms(joining, step_ms)
        left_ms = begun_ms + joining_ms
        if not shares:
            return ReferenceSteps(left_ms, left_ms, alone_ms)
        joint_ms = pace.prefill_ms(joining + tokens, step_ms)
        return ReferenceSteps(
            begun_ms + (joint_ms - pace.prefill_ms(tokens, step_ms)),
            left_ms,
            joint_ms - joining_ms,
            _delay_ms(candidate, tokens),
        )

    if candidate.prefill_runs > candidate.joining_runs:
        left_ms = pace.prefill_ms(begun, step_ms) - candidate.busy_ms
        steps = after(max(left_ms, step_ms / 2))
        return steps if candidate.joining_runs > 0 else steps._replace(left_ms=left_ms)
    if candidate.joining_runs <= 0:
        return ReferenceSteps(rest_ms, 0.0, alone_ms)
    age_ms, found_ms = float(candidate.joining_ms), 2 * rest_ms
    if age_ms <= 0:
        return after(rest_ms)
    has_begun = min(age_ms / found_ms, 1.0) if found_ms > 0 else 1.0
    since_ms = age_ms - found_ms / 2 if has_begun >= 1 else age_ms / 2
    left_ms = pace.prefill_ms(joining, step_ms) - since_ms
    begun_steps = ReferenceSteps(max(left_ms, step_ms / 2), left_ms, alone_ms)
    if has_begun >= 1:
        return begun_steps
    waits = 1.0 - has_begun
    later = after((found_ms - age_ms) / 2)
    return ReferenceSteps(
        has_begun * begun_steps.wait_ms + waits * later.wait_ms,
        has_begun * begun_steps.left_ms + waits * later.left_ms,
        has_begun * begun_steps.added_ms + waits * later.added_ms,
        waits * later.delay_ms,
    )


def _delay_ms(candidate: Candidate, tokens: float) -> float:
    """By how much a prompt makes the last step of those that join longer, summed over them."""
    pace, joining = recorded_profile(candidate), candidate.joining_tokens
    chunk = float(pace.chunk_tokens)
    last = joining - math.floor(joining / chunk) * chunk
    if not last > 0:
        return 0.0
    a, b, c = pace.curves.prefill
    longer_ms = _quadratic(a, b, c, min(last + tokens, chunk)) - _quadratic(a, b, c, last)
    return candidate.joining_runs * (last / joining) * (pace.slowdown * longer_ms)


def _quadratic(a: float, b: float, c: float, tokens: float) -> float:
    return (a * tokens + b) * tokens + c


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
