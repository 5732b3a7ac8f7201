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
from msgspec.structs import replace

from app.routing.selection import cost_kernels, predictive
from app.routing.selection.candidate_table import NO_ROW, CandidateTable, TableInputs
from app.routing.selection.cost_kernels import Floats
from app.routing.selection.decision import (
    Decision,
    Forecast,
    Placement,
    PlannedReservations,
    Rejection,
    RoutingConfig,
    RoutingState,
    Wait,
    forecast,
    wait_for_rank,
)
from app.routing.selection.decision_record import candidates_from_record, record_decision
from app.routing.selection.eligibility import (
    CandidatePool,
    CandidateRow,
    NotEligible,
    filter_eligible,
    pinned_worker,
)
from app.routing.selection.policies import (
    NO_RESERVATIONS,
    POLICIES,
    Candidates,
    Costs,
    DynamoWeights,
    RequestFeatures,
    Reservations,
    choose,
    cost_range,
)
from app.routing.selection.predictive import Prediction, PredictiveWeights
from app.routing.selection.prompt_hashes import PromptHashes
from app.routing.selection.request_features import (
    MAX_WEIGHT,
    expected_output_tokens,
    invalid_weight,
    latency_targets,
)
from app.routing.selection.session_preference import affinity_tolerance, apply_affinity
from app.routing.worker_rank import WorkerRank
from streams.records import Assigned, EngineConfig, Phase
from streams.request import Request, RouterConfigOverride

_PARTS: Mapping[Phase, int] = {
    "aggregated": cost_kernels.WHOLE,
    "prefill": cost_kernels.PREFILL_PART,
    "decode": cost_kernels.DECODE_PART,
}
DEFAULT_BYTES_PER_TOKEN = 131_072
"""Of the KV cache of a token, for engines that report none: 16-bit keys and values of 32 layers
with 8 heads of 128 numbers."""


class Reconstructed(NamedTuple):
    """The inputs of a recorded decision: its candidates, in their order, and their costs.

    `prediction`: of policy predictive.
    """

    candidates: Candidates
    costs: Costs
    prediction: Prediction | None = None


def select_worker(
    prompt: PromptHashes,
    view: RoutingState,
    tuning: RoutingConfig,
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
    """Decide about a phase of a request.

    `dispatched_count`: how many requests this router has dispatched; `excluded`: workers on which
    it failed; `full_workers`: full workers, with their epochs. `queued_since_ms`: when it was
    planned first, if before; `deadline_ms`: when its time is up. `session_rank`: the place of its
    session.
    """
    request, part = prompt.request, phase
    if tuning.policy == "direct":
        phase = "decode" if phase == "aggregated" else phase
        if pinned_worker(request.hints, phase) is None:
            return Rejection(
                "invalid", f"policy direct needs {phase}_worker_id or backend_instance_id"
            )
    if fault := invalid_weight(request):
        return Rejection("invalid", f"{fault} must be a number up to {MAX_WEIGHT:g}")
    pool = view.pools.pool(request.model, part)
    rows = filter_eligible(
        request, part, pool, view.fleet, excluded=excluded, full=full_workers,
        loads=(view.committed, view.unconfirmed), pin_phase=phase,
    )  # fmt: skip
    if isinstance(rows, NotEligible):
        return _not_eligible(rows)
    tuning = _for_phase(tuning, phase, pool)
    options = options_for(phase, pool, rows, view, prompt)
    weights = _overridden(tuning.weights, request.router_config_override)
    features = features_for(
        prompt, view, pool.block_size, seed, dispatched_count, part_of(part),
        _transfer_ms(prompt, view, tuning) if part == "decode" else 0.0,
    )  # fmt: skip
    prediction: Prediction | None = None
    if tuning.policy == "predictive":
        prediction = predictive.predict(features, options, tuning.predictive_weights)
        costs = prediction.costs
    else:
        if weights.overlap_decay:
            least = int(options.features[:, cost_kernels.PREFILL_TOKENS].min())
            features = replace(features, least_prefill_tokens=least)
        costs = POLICIES[tuning.policy](features, options, weights)
    params = _params(tuning, features, weights, costs, prediction, request.router_config_override)
    chosen = prediction.best if prediction else choose(costs, options.hashes, seed, _noise(params))
    assert chosen is not None, "a policy considers some option"
    if session_rank is not None and session_rank in options.worker_ranks:
        at = options.worker_ranks.index(session_rank)
        # 0 stays 0 for policies whose tolerance is infinite: 0 * inf is no number.
        slack = tuning.session_affinity_tolerance and (
            tuning.session_affinity_tolerance
            * affinity_tolerance(tuning.policy, features, weights, rows[at].profile)
        )
        params["session_allowance"] = slack
        chosen = apply_affinity(at, chosen, costs, slack)
    else:
        session_rank = None
    outlook = Forecast()
    if prediction is not None:
        queued_since_ms = view.now_ms if queued_since_ms is None else queued_since_ms
        found: list[float] = prediction.results[chosen].tolist()
        outlook = forecast(
            found, options, chosen, view.now_ms, queued_since_ms, tuning, deadline_ms
        )
        if (wait := wait_for_rank(outlook, view.now_ms)) is not None:
            return wait
    device, host, disk = options.blocks[chosen].tolist()
    overlap_blocks = int(device + host + disk)
    cached = min(overlap_blocks * pool.block_size, prompt.tokens)
    tracked = tuning.policy != "direct" and params.get("track_prefill_tokens", 1.0)
    reuse = params.get("assume_kv_reuse", 1.0)
    return Placement(
        worker_rank=options.worker_ranks[chosen],
        tokens=prompt.tokens,
        cached_tokens=cached,
        prefill_tokens=(prompt.tokens - cached if reuse else prompt.tokens) if tracked else 0,
        block_size=pool.block_size,
        policy=tuning.policy,
        params=params,
        seed=seed,
        record=record_decision(options, costs, chosen, prediction.results if prediction else None),
        at_ms=view.now_ms,
        forecast=outlook,
        session_rank=session_rank,
        overlap_blocks=overlap_blocks,
        phase=part,
    )


def part_of(phase: Phase) -> int:
    """The part of a request that a phase is, as kernels take it."""
    return _PARTS[phase]


def _transfer_ms(prompt: PromptHashes, view: RoutingState, tuning: RoutingConfig) -> float:
    """Expected time of the transfer of a prompt from its prefill worker."""
    source = view.fleet.members.get(prompt.request.hints.prefill_worker_id or "")
    config = None if source is None else source.card.config
    return expected_transfer_ms(prompt.tokens, config, view, tuning)


def expected_transfer_ms(
    tokens: int, config: EngineConfig | None, view: RoutingState, tuning: RoutingConfig
) -> float:
    """Expected time of the transfer of a prompt from a worker with this config: as measured, else
    by the size of its blocks and the speed by the settings."""
    if view.transfer_token_ms is not None:
        return tokens * view.transfer_token_ms
    size = None if config is None else config.transfer_bytes_per_token
    size = DEFAULT_BYTES_PER_TOKEN if size is None else size
    speed = tuning.transfer_speed
    return speed.latency_ms + 1000 * tokens * size / speed.bytes_per_s


def _for_phase(tuning: RoutingConfig, phase: Phase, pool: CandidatePool) -> RoutingConfig:
    """The settings for a phase: among workers of role decode, decode goes to the one with the
    shortest steps.

    With the usual weight the mean is less, but the slowest steps are slower: 5 prefill and 3 decode
    workers, conversation trace at 4 times its speed: mean ITL 22.8 for 26.6 ms, p99 33.9 for 31.4.
    """
    if phase != "decode" or not pool.has_decode_role:
        return tuning
    weights = tuning.predictive_weights._replace(decode_weight=0.0)
    return tuning._replace(predictive_weights=weights)


def _not_eligible(found: NotEligible) -> Wait | Rejection:
    if found.retry == "none":
        return Rejection(found.code, found.reason)
    return Wait(found.reason, code=found.code, needs_new_worker=found.retry == "news")


def recompute_choice(decision: Assigned, session: str = "") -> WorkerRank | None:
    """The place by the inputs that a decision records; None where it records none.

    `session`: the request's, which only session_hash looks at. A turn, or the place of a batch
    request, is recorded as the cost that it led to, since it depends on values that are not
    recorded.
    """
    recalled = reconstruct(decision, session)
    if recalled is None:
        return None
    places = recalled.candidates.worker_ranks
    noise = _noise(decision.params)
    chosen = choose(recalled.costs, recalled.candidates.hashes, decision.seed, noise)
    if chosen is None:
        return None
    use, slack = decision.session, decision.params.get("session_allowance")
    if use is not None and slack is not None:
        bound = WorkerRank(use.bound_worker, use.bound_epoch, use.bound_rank)
        if bound in places:
            chosen = apply_affinity(places.index(bound), chosen, recalled.costs, slack)
    return places[chosen]


def reconstruct(decision: Assigned, session: str = "") -> Reconstructed | None:
    """The costs by the inputs that a decision records, and their terms; see
    `recompute_choice`.
    """
    candidates = decision.candidates
    if not candidates:
        return None
    options = candidates_from_record(candidates)
    params, features = decision.params, recorded_features(decision, session)
    if decision.policy in ("round_robin", "batch"):
        return Reconstructed(options, np.array([c.cost for c in candidates]))
    if decision.policy == "predictive":
        prediction = predictive.predict(features, options, recorded_weights(params))
        return Reconstructed(options, prediction.costs, prediction)
    names = DynamoWeights._fields
    weights = DynamoWeights(**{name: params[name] for name in names if name in params})
    return Reconstructed(options, POLICIES[decision.policy](features, options, weights))


def recorded_weights(params: Mapping[str, float]) -> PredictiveWeights:
    known = {name: params[name] for name in PredictiveWeights._fields if name in params}
    return PredictiveWeights(**known)


def recorded_features(decision: Assigned, session: str = "") -> RequestFeatures:
    params = decision.params
    return RequestFeatures(
        id=decision.id, prompt_tokens=decision.prompt_tokens + decision.base_tokens,
        block_size=decision.block_size, seed=decision.seed, session=session,
        least_prefill_tokens=int(params.get("least_prefill_tokens", 0)),
        output_tokens=params.get("output_tokens", 0.0),
        mean_output_tokens=params.get("mean_output_tokens", 0.0),
        most_cached_tokens=params.get("most_held_tokens", 0.0),
        expected_followups=params.get("leads_to", 1.0),
        ttft_target_ms=params.get("ttft_target_ms", math.inf),
        itl_target_ms=params.get("itl_target_ms", math.inf),
        part=int(params.get("part", cost_kernels.WHOLE)),
        transfer_ms=params.get("transfer_ms", 0.0),
    )  # fmt: skip


def features_for(
    prompt: PromptHashes, view: RoutingState, block_size: int, seed: int, turn: int = 0,
    part: int = cost_kernels.WHOLE, transfer_ms: float = 0.0,
) -> RequestFeatures:  # fmt: skip
    """The features of a request that do not depend on its options."""
    request = prompt.request
    session = request.hints.session_control
    ttft_target_ms, itl_target_ms = latency_targets(request)
    least_prefill_tokens = 0
    return RequestFeatures(
        request.id, prompt.tokens, block_size, seed, turn, session.session_id if session else "",
        least_prefill_tokens, expected_output_tokens(request, view.mean_output_tokens),
        view.mean_output_tokens, cost_kernels.UNKNOWN, view.expected_followups, ttft_target_ms,
        itl_target_ms, part, transfer_ms,
    )  # fmt: skip


def options_for(
    phase: Phase,
    pool: CandidatePool,
    rows: Sequence[CandidateRow],
    view: RoutingState,
    prompt: PromptHashes,
) -> Candidates:
    """The candidates for a phase of a request, at these rows of a pool."""
    board = refreshed_table(pool, view)
    if phase == "decode":  # the whole prompt comes from the prefill worker, with the cached part
        blocks = np.zeros((len(pool.rows), 3))
        blocks[:, 0] = -(-prompt.tokens // pool.block_size)
    else:
        blocks = board.overlap_blocks(view.kv_index, prompt.local_hashes(pool.block_size))
    return board.select(
        None if rows is pool.rows else [row.worker_rank for row in rows],
        blocks,
        _taint_weights(prompt.request, pool.rows),
        reservation_rows(board, view.reservations),
    )


def reservation_rows(table: CandidateTable, planned: PlannedReservations) -> Reservations:
    """Reservations by the rows of a table, in memory of their own as to the rows."""
    if not len(planned.numbers):
        return NO_RESERVATIONS
    rows = table.rows_of_reserved(planned.worker_ranks)[planned.numbers]
    if planned.own >= 0:
        rows[planned.own] = NO_ROW
    return Reservations(rows, planned.prefill_ms)


def refreshed_table(pool: CandidatePool, view: RoutingState) -> CandidateTable:
    """The table of a pool, brought up to date."""
    sources = TableInputs(
        view.committed, view.unconfirmed, view.fleet.heartbeats, view.fleet.changed_heartbeats,
        view.count_output_tokens,
        view.slowdown, view.stagger_ms,
    )  # fmt: skip
    pool.table.refresh(sources, view.now_ms)
    if pool.has_transfers and pool.has_curves and view.prefill_shares is not None:
        pool.table.update_prefill_shares(view.prefill_shares, view.now_ms)
    if view.batch_runs is not None:
        pool.table.update_batch_steps(view.batch_runs, view.mean_output_tokens)
    return pool.table


def _taint_weights(request: Request, rows: Sequence[CandidateRow]) -> Floats | None:
    constraints = request.hints.routing_constraints
    if constraints is None or not constraints.preferred_taints:
        return None
    preferred = constraints.preferred_taints
    return np.array([
        sum(weight for taint, weight in preferred.items() if taint in row.taints) for row in rows
    ], np.float64)  # fmt: skip


def _overridden(weights: DynamoWeights, override: RouterConfigOverride | None) -> DynamoWeights:
    if override is None:
        return weights
    asked = {
        "overlap_score_credit": override.overlap_score_credit,
        "prefill_load_scale": override.prefill_load_scale,
        "temperature": override.router_temperature,
    }
    return weights._replace(**{name: x for name, x in asked.items() if x is not None})


def predictive_params(features: RequestFeatures, weights: PredictiveWeights) -> dict[str, float]:
    """The settings and estimates that costs of policy predictive depend on, as recorded."""
    params: dict[str, float] = {
        "decode_weight": weights.decode_weight,
        "max_hold_ms": weights.max_hold_ms,
        "output_tokens": features.output_tokens,
        "mean_output_tokens": features.mean_output_tokens,
        "leads_to": features.expected_followups,
    }
    if features.part != cost_kernels.WHOLE:
        params["part"] = features.part
    if features.part == cost_kernels.DECODE_PART:
        params["transfer_ms"] = features.transfer_ms
    if features.ttft_target_ms < math.inf:
        params["ttft_target_ms"] = features.ttft_target_ms
    if features.itl_target_ms < math.inf:
        params["itl_target_ms"] = features.itl_target_ms
    return params


def _params(
    tuning: RoutingConfig,
    features: RequestFeatures,
    weights: DynamoWeights,
    costs: Costs,
    prediction: Prediction | None,
    override: RouterConfigOverride | None,
) -> dict[str, float]:
    """The settings in force, as recorded, with those of the request that only inform."""
    params: dict[str, float] = {}
    if prediction is not None:
        params = predictive_params(features, tuning.predictive_weights)
        params["most_held_tokens"] = prediction.most_cached_tokens
    if tuning.policy == "dynamo":
        params |= weights._asdict()
        if weights.overlap_decay:
            params["least_prefill_tokens"] = features.least_prefill_tokens
        if weights.temperature:
            params["span"] = cost_range(costs)
    if override is not None:
        for name in ("assume_kv_reuse", "track_prefill_tokens", "shared_cache_multiplier"):
            if (value := getattr(override, name)) is not None:
                params[name] = float(value)
    return params


def _noise(params: Mapping[str, float]) -> float:
    return params.get("temperature", 0.0) * params.get("span", 0.0)
