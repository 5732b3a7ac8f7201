"""Selection of a worker: filter the eligible places, compute the cost of each, choose one.

`select_worker` is a function of its arguments: the state by the views and by this router's own
undelivered decisions, the settings, and the request's own seed. Its result holds the inputs of the
decision, so that `recompute_choice` reaches the same result from the record in the ledger alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvlane.app.routing.policy_names import MAX_WEIGHT, adds_load, has_forecast
from kvlane.app.routing.selection import cost_kernels
from kvlane.app.routing.selection.candidate_table import (
    NO_ROW,
    CandidateRow,
    CandidateTable,
    TableInputs,
)
from kvlane.app.routing.selection.candidates import (
    NO_RESERVATIONS,
    Candidates,
    RequestFeatures,
    Reservations,
    cost_settings,
    expected_output_tokens,
    invalid_weight,
    latency_targets,
)
from kvlane.app.routing.selection.choice import Costs, apply_affinity, choose
from kvlane.app.routing.selection.cost_kernels import Floats
from kvlane.app.routing.selection.decision import (
    Decision,
    Forecast,
    Placement,
    PlannedReservations,
    Rejection,
    RoutingState,
    Wait,
    forecast,
    wait_for_rank,
)
from kvlane.app.routing.selection.decision_record import candidates_from_record, record_decision
from kvlane.app.routing.selection.eligibility import CandidatePool, NotEligible, filter_eligible
from kvlane.app.routing.selection.policies.policy import Scores
from kvlane.app.routing.selection.policies.registry import POLICIES, RECORDED
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.routing.selection.routing_config import RoutingConfig, recorded_config
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.app.routing.state.performance import EngineProfile, recorded_profile
from kvlane.streams.records import Assigned, EngineConfig, Phase
from kvlane.streams.request import Request, RouterConfigOverride

_PARTS: Mapping[Phase, int] = {
    "aggregated": cost_kernels.WHOLE,
    "prefill": cost_kernels.PREFILL_PART,
    "decode": cost_kernels.DECODE_PART,
}
DEFAULT_BYTES_PER_TOKEN = 131_072
"""Of the KV cache of a token, for engines that report none: 16-bit keys and values of 32 layers
with 8 heads of 128 numbers."""


class Reconstructed(NamedTuple):
    """The candidates of a recorded decision, in their order, with their scores."""

    options: Candidates
    scores: Scores


def select_worker(
    prompt: PromptHashes,
    state: RoutingState,
    config: RoutingConfig,
    *,
    seed: int,
    phase: Phase = "aggregated",
    dispatched_count: int = 0,
    excluded: Collection[str] = (),
    full_workers: Collection[tuple[str, int]] = (),
    queued_since_ms: float | None = None,
    deadline_ms: float | None = None,
    session_rank: WorkerRank | None = None,
) -> Decision:
    """Decide about a phase of a request. `dispatched_count`: how many requests this router has
    dispatched; `excluded`: workers on which it failed; `full_workers`: with their epochs.
    `queued_since_ms`: when it was planned first, if before. `session_rank`: that of its session."""
    request, policy = prompt.request, POLICIES[config.policy]
    pinned_phase = policy.pinned_phase(phase)
    if fault := policy.fault(request, pinned_phase):
        return Rejection("invalid", fault)
    # Of a decode, the router has set the credit of its overlap.
    if phase != "decode" and not policy.has_cost_settings and (unused := cost_settings(request)):
        name = f"router_config_override.{unused[0]}"
        return Rejection("invalid", f"{name}: policy {policy.name} has none; leave it out")
    if fault := invalid_weight(request):
        return Rejection("invalid", f"{fault} must be a number up to {MAX_WEIGHT:g}")
    pool = state.pools.pool(request.model, phase)
    rows = filter_eligible(
        request, phase, pool, state.fleet, excluded=excluded, full=full_workers,
        loads=(state.committed, state.unconfirmed), pin_phase=pinned_phase,
        has_output=prompt.has_output,
    )  # fmt: skip
    if isinstance(rows, NotEligible):
        return not_eligible(rows)
    override = request.router_config_override
    config = _for_phase(config, pinned_phase, pool).overridden(override)
    transfer_ms = _transfer_ms(prompt, state, config) if phase == "decode" else 0.0
    features = features_for(
        prompt, state, pool.block_size, seed, dispatched_count, part_of(phase), transfer_ms
    )
    options = options_for(pinned_phase, pool, rows, state, prompt)
    features = policy.features(features, options, config)
    scores = policy.score(features, options, config)
    params = policy.params(features, config, scores) | _informing(override)
    chosen = _best(scores, options, seed, params)
    assert chosen is not None, "a policy considers some option"
    if session_rank is not None and session_rank in options.worker_ranks:
        own = options.worker_ranks.index(session_rank)
        slack = _session_slack(features, config, rows[own].profile)
        params["session_allowance"] = slack
        chosen = apply_affinity(own, chosen, scores.costs, slack)
    else:
        session_rank = None
    outlook = Forecast()
    if scores.results is not None:
        since_ms = state.now_ms if queued_since_ms is None else queued_since_ms
        result: list[float] = scores.results[chosen].tolist()
        itl_ms = _itl_ms(result, features, state, options.worker_ranks[chosen].worker)
        outlook = forecast(
            result, options, chosen, state.now_ms, since_ms, config, deadline_ms, itl_ms
        )
        if (wait := wait_for_rank(outlook, state.now_ms)) is not None:
            return wait
    overlap_blocks = int(sum(options.blocks[chosen].tolist()))
    cached = min(overlap_blocks * pool.block_size, prompt.tokens)
    if phase != "decode" and (
        estimated := pool.table.estimated_blocks.get(options.worker_ranks[chosen])
    ):
        params["estimated_tokens"] = float(min(estimated * pool.block_size, cached))
    return Placement(
        worker_rank=options.worker_ranks[chosen],
        tokens=prompt.tokens,
        cached_tokens=cached,
        prefill_tokens=added_prefill(config.policy, params, prompt.tokens, cached),
        block_size=pool.block_size,
        policy=config.policy,
        params=params,
        seed=seed,
        record=record_decision(options, scores.costs, chosen, scores.results),
        at_ms=state.now_ms,
        forecast=outlook,
        session_rank=session_rank,
        overlap_blocks=overlap_blocks,
        phase=phase,
    )


def _session_slack(
    features: RequestFeatures, config: RoutingConfig, profile: EngineProfile
) -> float:
    """By how much the cost of a session's own place, with this profile, may exceed the least. A
    tolerance of 0 is 0 for policies whose own is infinite, too: 0 * inf is no number."""
    tolerance = config.session_affinity_tolerance
    return tolerance and (
        tolerance * POLICIES[config.policy].session_tolerance(features, config, profile)
    )


def added_prefill(policy: str, params: Mapping[str, float], tokens: int, cached: int) -> int:
    if not (adds_load(policy) and params.get("track_prefill_tokens", 1.0)):
        return 0
    return tokens - cached if params.get("assume_kv_reuse", 1.0) else tokens


def _itl_ms(
    found: Sequence[float], features: RequestFeatures, state: RoutingState, worker: str
) -> float:
    """Expected mean time between tokens: a step of decode, with the prefill of others beside it."""
    itl_ms = found[cost_kernels.DECODE] / max(features.output_tokens, 1.0)
    if features.part == cost_kernels.WHOLE and state.step_shares is not None:
        itl_ms /= 1.0 - state.step_shares.share(worker, state.now_ms)
    return itl_ms


def part_of(phase: Phase) -> int:
    return _PARTS[phase]


def _transfer_ms(prompt: PromptHashes, state: RoutingState, config: RoutingConfig) -> float:
    """Expected time of the transfer of a prompt from its prefill worker."""
    worker = state.fleet.members.get(prompt.request.hints.prefill_worker_id or "")
    engine = None if worker is None else worker.card.config
    return expected_transfer_ms(prompt.tokens, engine, state, config)


def expected_transfer_ms(
    tokens: int, engine: EngineConfig | None, state: RoutingState, config: RoutingConfig
) -> float:
    """Expected time of the transfer of a prompt from a worker with this engine: as measured, else
    by the size of its blocks and the speed by the settings."""
    if state.transfer_token_ms is not None:
        return tokens * state.transfer_token_ms
    size = None if engine is None else engine.transfer_bytes_per_token
    size = DEFAULT_BYTES_PER_TOKEN if size is None else size
    speed = config.transfer_speed
    return speed.latency_ms + 1000 * tokens * size / speed.bytes_per_s


def _for_phase(config: RoutingConfig, phase: Phase, pool: CandidatePool) -> RoutingConfig:
    """The settings for a phase: among workers of role decode, decode goes to the one with the
    shortest steps. With the usual weight the slowest steps are slower."""
    if phase != "decode" or not pool.has_decode_role:
        return config
    weights = config.predictive_weights._replace(decode_weight=0.0)
    return config._replace(predictive_weights=weights)


def not_eligible(cause: NotEligible) -> Wait | Rejection:
    """The decision for a request that no worker may take now."""
    if cause.retry == "none":
        return Rejection(cause.code, cause.reason)
    return Wait(cause.reason, code=cause.code, needs_new_worker=cause.retry == "news")


def recompute_choice(decision: Assigned, session: str = "") -> WorkerRank | None:
    """The place by the inputs that a decision records; None where it records none. `session`: the
    request's, for policies that use it. Costs that depend on values that are not recorded are taken
    from the record (`RecordedPolicy.recomputes_costs`)."""
    recalled = reconstruct(decision, session)
    if recalled is None:
        return None
    places, costs = recalled.options.worker_ranks, recalled.scores.costs
    chosen = _best(recalled.scores, recalled.options, decision.seed, decision.params)
    if chosen is None:
        return None
    use, slack = decision.session, decision.params.get("session_allowance")
    if use is not None and slack is not None:
        bound = WorkerRank(use.bound_worker, use.bound_epoch, use.bound_rank)
        if bound in places:
            chosen = apply_affinity(places.index(bound), chosen, costs, slack)
    return places[chosen]


class OtherChoice(NamedTuple):
    """The choice by other settings: its position among the recorded candidates, and their costs."""

    position: int
    costs: Costs


def choose_otherwise(decision: Assigned, config: RoutingConfig) -> OtherChoice | None:
    """The choice by other settings among the candidates of a recorded decision; None where it does
    not record the inputs of their policy. Not for policies that use sessions or turns."""
    rows, policy = decision.candidate_rows, POLICIES[config.policy]
    if rows is None or not rows.places or (has_forecast(config.policy) and not rows.is_timed):
        return None
    candidates = decision.candidates
    options = candidates_from_record(candidates)
    features = policy.features(recorded_features(decision), options, config)
    scores = policy.score(features, options, config)
    params = policy.params(features, config, scores)
    chosen = _best(scores, options, decision.seed, params)
    if chosen is None:
        return None
    if (use := decision.session) is not None:
        bound = WorkerRank(use.bound_worker, use.bound_epoch, use.bound_rank)
        if bound in options.worker_ranks:
            own = options.worker_ranks.index(bound)
            slack = _session_slack(features, config, recorded_profile(candidates[own]))
            chosen = apply_affinity(own, chosen, scores.costs, slack)
    return OtherChoice(chosen, scores.costs)


def reconstruct(decision: Assigned, session: str = "") -> Reconstructed | None:
    """The candidates of a recorded decision with their scores, as for `recompute_choice`."""
    candidates, policy, params = decision.candidates, decision.policy, decision.params
    if not candidates:
        return None
    options = candidates_from_record(candidates)
    if not RECORDED[policy].recomputes_costs:
        return Reconstructed(options, Scores(np.array([c.cost for c in candidates])))
    config, features = recorded_config(policy, params), recorded_features(decision, session)
    return Reconstructed(options, POLICIES[policy].score(features, options, config))


def recorded_features(decision: Assigned, session: str = "") -> RequestFeatures:
    params = decision.params
    return RequestFeatures(
        id=decision.id, prompt_tokens=decision.prompt_tokens + decision.base_tokens,
        block_size=decision.block_size, seed=decision.seed, session=session,
        least_prefill_tokens=int(params.get("least_prefill_tokens", 0)),
        output_tokens=params.get("output_tokens", 0.0),
        mean_output_tokens=params.get("mean_output_tokens", 0.0),
        most_cached_tokens=params.get("most_held_tokens", 0.0),
        least_runs=params.get("least_runs", math.inf),
        expected_followups=params.get("leads_to", 1.0),
        ttft_target_ms=params.get("ttft_target_ms", math.inf),
        itl_target_ms=params.get("itl_target_ms", math.inf),
        part=int(params.get("part", cost_kernels.WHOLE)),
        transfer_ms=params.get("transfer_ms", 0.0),
    )  # fmt: skip


def features_for(
    prompt: PromptHashes, state: RoutingState, block_size: int, seed: int,
    dispatched_count: int = 0, part: int = cost_kernels.WHOLE, transfer_ms: float = 0.0,
) -> RequestFeatures:  # fmt: skip
    """The features of a request that do not depend on its options."""
    request = prompt.request
    session = request.hints.session_control
    ttft_target_ms, itl_target_ms = latency_targets(request)
    least_prefill_tokens = 0
    return RequestFeatures(
        request.id, prompt.tokens, block_size, seed, dispatched_count,
        session.session_id if session else "",
        least_prefill_tokens, expected_output_tokens(request, state.mean_output_tokens),
        state.mean_output_tokens, cost_kernels.UNKNOWN, cost_kernels.UNKNOWN,
        state.expected_followups, ttft_target_ms,
        itl_target_ms, part, transfer_ms,
    )  # fmt: skip


def options_for(
    phase: Phase,
    pool: CandidatePool,
    rows: Sequence[CandidateRow],
    state: RoutingState,
    prompt: PromptHashes,
) -> Candidates:
    table = refreshed_table(pool, state)
    if phase == "decode":  # the whole prompt comes from the prefill worker, with the cached part
        blocks = np.zeros((len(pool.rows), 3))
        blocks[:, 0] = -(-prompt.tokens // pool.block_size)
    else:
        blocks = table.overlap_blocks(state.kv_index, prompt.local_hashes(pool.block_size))
    return table.select(
        None if rows is pool.rows else [row.worker_rank for row in rows],
        blocks,
        _taint_weights(prompt.request, pool.rows),
        reservation_rows(table, state.reservations),
    )


def reservation_rows(table: CandidateTable, planned: PlannedReservations) -> Reservations:
    """Reservations by the rows of a table, in memory of their own as to the rows."""
    if not len(planned.numbers):
        return NO_RESERVATIONS
    rows = table.rows_of_reserved(planned.worker_ranks)[planned.numbers]
    if planned.own >= 0:
        rows[planned.own] = NO_ROW
    return Reservations(rows, planned.prefill_ms)


def refreshed_table(pool: CandidatePool, state: RoutingState) -> CandidateTable:
    sources = TableInputs(
        state.committed, state.unconfirmed, state.fleet.heartbeats, state.fleet.changed_heartbeats,
        state.count_output_tokens,
        state.slowdown, state.stagger_ms, state.curves, state.routed, state.usual_load,
    )  # fmt: skip
    pool.table.refresh(sources, state.now_ms)
    if pool.has_transfers and pool.has_curves and state.prefill_shares is not None:
        pool.table.update_prefill_shares(state.prefill_shares, state.now_ms)
    if state.batch_runs is not None:
        pool.table.update_batch_steps(state.batch_runs, state.mean_output_tokens)
    return pool.table


def _taint_weights(request: Request, rows: Sequence[CandidateRow]) -> Floats | None:
    constraints = request.hints.routing_constraints
    if constraints is None or not constraints.preferred_taints:
        return None
    preferred = constraints.preferred_taints
    return np.array([
        sum(weight for taint, weight in preferred.items() if taint in row.taints) for row in rows
    ], np.float64)  # fmt: skip


def _informing(override: RouterConfigOverride | None) -> dict[str, float]:
    """The settings of a request that no cost depends on, as recorded."""
    names = ("assume_kv_reuse", "track_prefill_tokens", "shared_cache_multiplier")
    values = {name: getattr(override, name) for name in names if override is not None}
    return {name: float(value) for name, value in values.items() if value is not None}


def _best(
    scores: Scores, options: Candidates, seed: int, params: Mapping[str, float]
) -> int | None:
    """The policy's choice, before session affinity."""
    if scores.results is not None:
        return scores.best
    noise = params.get("temperature", 0.0) * params.get("span", 0.0)
    return choose(scores.costs, options.hashes, seed, noise)
