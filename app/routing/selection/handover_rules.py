"""Rules of hand-overs from prefill to decode workers: when, and with which requests.

With workers of role prefill in the fleet a request has two decisions: phase `prefill`, a copy of
the request with one token, and phase `decode`, after the end of the prefill, or beside it where its
engine has a bootstrap endpoint. Else one worker gets all of it: phase `aggregated`. A hand-over
belongs to one attempt and is used once: every failure of it begins the next attempt, whose prefill
finds the prompt in a cache.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from kvlane.app.routing.selection import cost_kernels
from kvlane.app.routing.selection.decision import RoutingState
from kvlane.app.routing.selection.decision_record import candidates_from_record, record_decision
from kvlane.app.routing.selection.eligibility import NotEligible, domain_taint, filter_eligible
from kvlane.app.routing.selection.policies.predictive import recorded_params
from kvlane.app.routing.selection.policies.registry import POLICIES
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.routing.selection.routing_config import RoutingConfig, recorded_config
from kvlane.app.routing.selection.select import (
    expected_transfer_ms,
    features_for,
    options_for,
    part_of,
    recorded_features,
    refreshed_table,
)
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.indexer.events import Tier
from kvlane.streams.records import Assigned, Candidate, HandOverChoice, Phase
from kvlane.streams.request import (
    BootstrapInfo,
    PrefillResult,
    PromptTokensDetails,
    Request,
    RouterConfigOverride,
    RoutingConstraints,
)

NO_HASHES = np.empty(0, np.uint64)
PREFERRED_DOMAIN_WEIGHT = 1.0
"""Weight of the preferred taint of a transfer domain, unless the request gives it another one."""


class HandOverRules(NamedTuple):
    """When a prompt is handed over, by the settings. A request stays whole if fewer than
    `min_tokens` of its prompt, and less than `min_share`, are not cached at a decode worker.
    `is_enforced`: it is handed over always, or not served. `domain`: topology domain within which
    caches are transferred, "" for any; `is_domain_required`: else only preferred; then a prefill
    worker takes prompts only while its domain has a decode worker. `preferred_domain`: another one,
    preferred within it.
    """

    min_tokens: int = 2048
    min_share: float = 0.7
    is_enforced: bool = False
    domain: str = ""
    is_domain_required: bool = False
    preferred_domain: str = ""


DEFAULT_RULES = HandOverRules()


class FirstPhase(NamedTuple):
    """The phase that a request begins with; `choice`: with the costs, where they decided."""

    phase: Phase
    choice: HandOverChoice | None = None


WHOLE = FirstPhase("aggregated")


def first_phase(
    prompt: PromptHashes,
    state: RoutingState,
    config: RoutingConfig,
    rules: HandOverRules,
    *,
    seed: int,
    stays_whole: bool,
    full_workers: Collection[tuple[str, int]] = (),
) -> FirstPhase:
    """The phase that a request, or the rest of one, begins with. `stays_whole`: do not hand it
    over, unless enforced: it failed on a worker, possibly in the transfer."""
    request = prompt.request
    has_decode_worker = state.pools.pool(request.model, "decode").rows
    if not (can_be_split(request) and has_decode_worker):
        return WHOLE  # without it a prompt that is computed would wait in vain
    if rules.is_enforced:
        return FirstPhase("prefill")
    if stays_whole or not _has_prefill_worker(request, state):
        return WHOLE
    if (request.hints.prefill_worker_id, request.hints.decode_worker_id) != (None, None):
        return FirstPhase("prefill")
    pool = state.pools.pool(request.model, "prefill")
    if config.queues_for_places and pool.has_curves and not pool.has_prefill_role:
        choice = _choose(prompt, state, config, rules, seed, full_workers)
        if choice is not None:
            return FirstPhase("prefill" if is_handed_over(choice) else "aggregated", choice)
    stays = not pool.has_prefill_role or _is_short(prompt, state, rules)
    return WHOLE if stays or _is_prefill_busier(request, state) else FirstPhase("prefill")


def is_handed_over(choice: HandOverChoice) -> bool:
    return choice.prefill.cost + choice.decode.cost < choice.whole.cost


def recompute_choice_costs(decision: Assigned) -> tuple[float, float, float] | None:
    """The costs of a recorded choice by its inputs: of a whole request, prefill and decode."""
    choice = decision.choice
    if choice is None:
        return None
    policy, params = POLICIES[decision.policy], choice.params
    features = recorded_features(replace(decision, params=params))
    config = recorded_config(decision.policy, params)
    most_cached = params["most_held_tokens_prefill"]
    parts = (
        (choice.whole, replace(features, part=cost_kernels.COMPARED)),
        (
            choice.prefill,
            replace(features, part=cost_kernels.PREFILL_PART, most_cached_tokens=most_cached),
        ),
        (choice.decode, replace(features, part=cost_kernels.DECODE_PART)),
    )
    whole, prefill, decode = (
        float(policy.score(part, candidates_from_record((candidate,)), config).costs[0])
        for candidate, part in parts
    )
    return whole, prefill, decode


class _Best(NamedTuple):
    """The option with the least cost for a part of a request, as it is recorded."""

    candidate: Candidate
    most_cached_tokens: float


def _choose(
    prompt: PromptHashes,
    state: RoutingState,
    config: RoutingConfig,
    rules: HandOverRules,
    seed: int,
    full_workers: Collection[tuple[str, int]],
) -> HandOverChoice | None:
    """The costs of one worker and of two; None if either has no eligible worker now."""
    policy = POLICIES[config.policy]

    def best(prompt: PromptHashes, phase: Phase, transfer_ms: float = 0.0) -> _Best | None:
        request = prompt.request
        pool = state.pools.pool(request.model, phase)
        rows = filter_eligible(
            request, phase, pool, state.fleet,
            full=full_workers, loads=(state.committed, state.unconfirmed),
            has_output=prompt.has_output,
        )  # fmt: skip
        if isinstance(rows, NotEligible):
            return None
        part = part_of(phase)
        features = features_for(prompt, state, pool.block_size, seed, 0, part, transfer_ms)
        options = options_for(phase, pool, rows, state, prompt)
        scores = compared = policy.score(features, options, config)
        if scores.best is None:
            return None
        if part == cost_kernels.WHOLE:  # at the place that it gets as a whole
            compared = policy.score(replace(features, part=cost_kernels.COMPARED), options, config)
        record = record_decision(options, compared.costs, scores.best, compared.results)
        candidate = record.candidate(options.worker_ranks[scores.best])
        assert candidate is not None, "the chosen option is recorded"
        return _Best(candidate, scores.most_cached_tokens)

    whole, prefill = best(prompt, "aggregated"), best(prompt, "prefill")
    if whole is None or prefill is None:
        return None
    card = state.fleet.members[prefill.candidate.worker].card
    transfer_ms = expected_transfer_ms(prompt.tokens, card.config, state, config)
    request = decode_request(prompt.request, prefill.candidate.worker, b"", 0)
    decoded = PromptHashes.from_hashes(
        within_domains(request, card.taints, rules), prompt.tokens, NO_HASHES, 1
    )
    decode = best(decoded, "decode", transfer_ms)
    if decode is None:
        return None
    features = features_for(prompt, state, 0, seed, part=part_of("decode"), transfer_ms=transfer_ms)
    params = recorded_params(features, config.predictive_weights) | {
        "most_held_tokens": whole.most_cached_tokens,
        "most_held_tokens_prefill": prefill.most_cached_tokens,
    }
    return HandOverChoice(whole.candidate, prefill.candidate, decode.candidate, params)


def _is_prefill_busier(request: Request, state: RoutingState) -> bool:
    """Whether a prompt begins at every prefill worker more than one step later than at some worker
    that would take all of it."""

    def waiting_tokens(phase: Phase, steps: int) -> float:
        features = refreshed_table(state.pools.pool(request.model, phase), state).features
        tokens = features[:, cost_kernels.PREFILL_TOKENS]
        tokens = tokens + steps * features[:, cost_kernels.CHUNK_TOKENS_COLUMN]
        return float(tokens.min(initial=math.inf))

    return waiting_tokens("prefill", 0) > waiting_tokens("aggregated", 1)


def _has_prefill_worker(request: Request, state: RoutingState) -> bool:
    """Whether a prefill worker may take a request, now or when it has room."""
    hints = request.hints
    if hints.prefill_worker_id is not None:
        return True  # where that is none, the request ends with the reason
    if hints.backend_instance_id is not None or request.stop.max_tokens == 0:
        return False  # one worker is named for all of it; or there is nothing to decode
    pool = state.pools.pool(request.model, "prefill")
    found = filter_eligible(request, "prefill", pool, state.fleet)
    may_wait = not isinstance(found, NotEligible) or found.retry == "wait"
    return bool(pool.rows) and may_wait


def _is_short(prompt: PromptHashes, state: RoutingState, rules: HandOverRules) -> bool:
    """Whether a decode worker computes the part of a prompt that it has not cached."""
    pool = state.pools.pool(prompt.request.model, "decode")
    hashes = prompt.local_hashes(pool.block_size)
    cached = refreshed_table(pool, state).overlap_blocks(state.kv_index, hashes)
    uncached = prompt.tokens - int(cached[:, Tier.DEVICE].max(initial=0)) * pool.block_size
    return uncached < rules.min_tokens and uncached < rules.min_share * prompt.tokens


def can_be_split(request: Request) -> bool:
    """Whether two workers can share a request: it has a prompt of tokens, and names its model."""
    return (
        request.kind == "tokens"
        and request.service_class != "batch"
        and not request.is_probe
        and request.prompt_embeds is None
        and bool(request.model)
    )


def prefill_request(
    request: Request, rank: WorkerRank, emitted_tokens: int, bootstrap: BootstrapInfo | None
) -> Request:
    """The copy for a prefill worker: one more token, the worker and rank that were chosen, and the
    room where a decode worker waits for its blocks."""
    stop = replace(request.stop, max_tokens=emitted_tokens + 1, min_tokens=0)
    hints = replace(
        request.hints, prefill_worker_id=rank.worker, prefill_dp_rank=rank.rank, dp_rank=rank.rank
    )
    return replace(request, stop=stop, hints=hints, bootstrap_info=bootstrap)


def decode_request(
    request: Request, prefill_worker: str, transfer: bytes | BootstrapInfo, cached_tokens: int
) -> Request:
    """The request for a decode worker: with the opaque transfer parameters, or the room where it
    waits for the blocks, and without credit for the blocks cached there. `cached_tokens`: of the
    prompt, at the prefill worker, if it has ended."""
    override = replace(
        request.router_config_override or RouterConfigOverride(),
        overlap_score_credit=0.0,
        assume_kv_reuse=False,
        track_prefill_tokens=False,
    )
    request = replace(
        request,
        hints=replace(request.hints, prefill_worker_id=prefill_worker),
        router_config_override=override,
    )
    if isinstance(transfer, BootstrapInfo):
        return replace(request, bootstrap_info=transfer)
    details = PromptTokensDetails(cached_tokens=cached_tokens)
    result = PrefillResult(disaggregated_params=transfer, prompt_tokens_details=details)
    return replace(request, prefill_result=result)


def within_domains(request: Request, taints: Sequence[str], rules: HandOverRules) -> Request:
    """The request with the constraints that decode is near the prefill worker, which has these
    taints: in its domain, and rather in its preferred one; as it is without either."""
    taint = domain_taint(taints, rules.domain) if rules.domain else None
    nearer = domain_taint(taints, rules.preferred_domain) if rules.preferred_domain else None
    asked = request.hints.routing_constraints or RoutingConstraints()
    required, preferred = asked.required_taints, asked.preferred_taints
    if taint is not None and rules.is_domain_required:
        required = tuple(dict.fromkeys((*required, taint)))
    elif taint is not None:
        preferred = {**preferred, taint: PREFERRED_DOMAIN_WEIGHT}
    if nearer is not None:
        preferred = {**preferred, nearer: PREFERRED_DOMAIN_WEIGHT}
    if taint is None and nearer is None:
        return request
    merged = replace(asked, required_taints=required, preferred_taints=preferred)
    return replace(request, hints=replace(request.hints, routing_constraints=merged))
