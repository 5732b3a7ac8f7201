"""The costs of policies predictive and dynamo once more, plainly: one candidate at a time.

By the formulas of `app/routing/predictive.py` and `app/routing/policies.py`, from what a decision
records, and with the paces' own methods instead of the kernels. The operations come in the same
order, so the results are the same to the bit. Slow, and never used but for comparison.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from app.routing.kernels import DISK_SHARE, END_WAIT, FOLLOWER_STEPS, HOST_SHARE, MISSED_MS
from app.routing.paces import pace_told
from app.routing.policies import Ask, DynamoWeights
from streams.records import Candidate


class Expected(NamedTuple):
    """What is expected at a candidate, in ms: `hold_ms` below 0 when it took longer already."""

    cost_ms: float
    ttft_ms: float
    alone_ms: float
    hold_ms: float


def predicted(c: Candidate, ask: Ask, decode_weight: float) -> Expected:
    """What policy predictive expects of a request at a candidate."""
    pace, prompt = pace_told(c), ask.prompt_tokens
    blocks = c.overlap_blocks + (HOST_SHARE * c.host_blocks + DISK_SHARE * c.disk_blocks)
    held = min(blocks * ask.block_size, prompt)
    tokens = max(float(prompt - held), 1.0)
    context = c.prompt_tokens + c.open_runs * ask.mean_output_tokens / 2
    step_ms = pace.decode_ms(context) if c.open_runs else 0.0
    alone_ms = pace.prefill_ms(tokens)
    left_ms = pace.prefill_ms(c.prefill_tokens, step_ms) - c.busy_ms if c.prefill_runs else 0.0
    wait_ms = max(left_ms, step_ms / 2) + c.later_ms
    is_bounded = bool(c.open_runs and c.capacity_tokens)
    added = prompt - min(c.overlap_blocks * ask.block_size, prompt)
    excess = context + added + ask.mean_output_tokens - c.capacity_tokens
    if is_bounded and excess > 0:
        wait_ms += excess / max(context, 1.0) * ask.mean_output_tokens * END_WAIT * step_ms
    planned_ms = 0.0
    for other_ms in c.ahead_ms:
        planned_ms += min(alone_ms, other_ms) + decode_weight * max(alone_ms, other_ms)
    wait_ms += planned_ms
    later_ms = pace.decode_ms(context + prompt + ask.output_tokens / 2)
    replication_ms = (ask.most_held_tokens - held) * (
        pace.prefill_ms(pace.chunk_tokens) / pace.chunk_tokens
    )
    slower_ms = c.open_runs * ask.mean_output_tokens / 2 * (later_ms - step_ms)
    own_ms = ask.output_tokens * later_ms
    decode_ms = c.open_runs * alone_ms + slower_ms + ask.leads_to * own_ms
    ttft_ms = wait_ms + pace.prefill_ms(tokens, step_ms)
    cost_ms = ttft_ms + decode_weight * decode_ms
    cost_ms += (ask.leads_to - 1.0) * FOLLOWER_STEPS * later_ms + replication_ms / ask.leads_to
    cost_ms *= math.exp(-math.tanh(c.taint_weight))
    if ttft_ms > ask.ttft_target_ms or later_ms > ask.itl_target_ms:
        cost_ms += MISSED_MS
    _, b, fixed_ms = pace.curves.prefill
    shares = pace.slowness * (b * tokens - fixed_ms) <= step_ms
    hold_ms = 0.0 if shares else left_ms
    if is_bounded and c.prompt_tokens + added + ask.output_tokens > c.capacity_tokens:
        hold_ms = math.inf
    return Expected(cost_ms, ttft_ms, alone_ms, hold_ms)


def dynamo(c: Candidate, ask: Ask, weights: DynamoWeights) -> float:
    """What policy dynamo makes of a candidate."""
    device = weights.overlap_score_credit * c.overlap_blocks
    if weights.overlap_decay:
        excess = c.prefill_tokens - ask.least_prefill_tokens
        device /= 1.0 + weights.overlap_decay / max(ask.prompt_tokens, 1) * excess
    credit = device + weights.host_weight * c.host_blocks + weights.disk_weight * c.disk_blocks
    prefill = (c.prefill_tokens + ask.prompt_tokens) / ask.block_size
    cost = weights.prefill_load_scale * max(prefill - credit, 0.0)
    cost += -(-c.open_tokens // ask.block_size)
    cost += weights.active_request_weight * c.open_runs
    return cost * math.exp(-math.tanh(c.taint_weight))
