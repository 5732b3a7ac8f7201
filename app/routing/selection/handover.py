"""Hand-over of a prompt from a prefill worker to a decode worker: when, and with which requests.

Workers of role prefill compute prompts, those of role decode the rest; an aggregated worker does
both. With prefill workers in the fleet a request has two decisions: phase `prefill`, a copy of the
request with one token, and after its end phase `decode`, with the limits of the request. Without
them, or where a hand-over does not pay, one worker gets all of it: phase `aggregated`.

A hand-over belongs to one attempt and is used once. Whatever goes wrong with it (an expired lease,
a full decode worker, the death of a router between the phases) begins the next attempt. Its prefill
finds the prompt in the cache of the worker that has computed it, so it costs little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from app.routing.selection.decision import RoutingState
from app.routing.selection.prompt_hashes import PromptHashes
from app.routing.selection.select import refreshed_table
from app.routing.worker_rank import WorkerRank
from indexer.events import Tier
from streams.records import Phase
from streams.request import (
    PrefillResult,
    Request,
    RouterConfigOverride,
    RoutingConstraints,
)

PREFERRED_DOMAIN_WEIGHT = 1.0
"""Weight of the preferred taint of a transfer domain, unless the request gives it another one."""


class HandOverRules(NamedTuple):
    """When a prompt is handed over, by the settings.

    A request stays whole if fewer than `min_tokens` of its prompt, and less than `min_share`, are
    not cached at a decode worker. `is_enforced`: it is handed over always, or not served.
    `domain`: topology domain within which caches are transferred, "" for any;
    `is_domain_required`: else it is only preferred.
    """

    min_tokens: int = 2048
    min_share: float = 0.7
    is_enforced: bool = False
    domain: str = ""
    is_domain_required: bool = False


DEFAULT_RULES = HandOverRules()


def first_phase(
    prompt: PromptHashes, state: RoutingState, rules: HandOverRules, *, stays_whole: bool
) -> Phase:
    """The phase that a request, or the rest of one, begins with.

    `stays_whole`: it is not handed over, but where that is enforced: it has failed on a worker, so
    that a fault of the transfer does not end it.
    """
    request = prompt.request
    if request.kind != "tokens" or request.service_class == "batch" or request.is_probe:
        return "aggregated"
    pool = state.pools.pool(request.model, "decode", state.now_ms)
    if not pool.rows:  # a prompt that is computed now would wait in vain
        return "aggregated"
    if rules.is_enforced:
        return "prefill"
    if stays_whole or request.stop.max_tokens == 0 or _is_pinned_whole(request):
        return "aggregated"
    if not state.pools.pool(request.model, "prefill", state.now_ms).rows:
        return "aggregated"
    hashes = prompt.local_hashes(pool.block_size)
    cached = refreshed_table(pool, state).overlap_blocks(state.kv_index, hashes)
    uncached = prompt.tokens - int(cached[:, Tier.DEVICE].max(initial=0)) * pool.block_size
    is_short = uncached < rules.min_tokens and uncached < rules.min_share * prompt.tokens
    return "aggregated" if is_short else "prefill"


def _is_pinned_whole(request: Request) -> bool:
    """Whether a request names one worker for all of it."""
    hints = request.hints
    return hints.backend_instance_id is not None and hints.prefill_worker_id is None


def prefill_request(request: Request, worker: WorkerRank, emitted_tokens: int) -> Request:
    """The copy for a prefill worker: one more token, and the worker and rank that were chosen."""
    stop = replace(request.stop, max_tokens=emitted_tokens + 1, min_tokens=0)
    hints = replace(
        request.hints,
        prefill_worker_id=worker.worker,
        prefill_dp_rank=worker.rank,
        dp_rank=worker.rank,
    )
    return replace(request, stop=stop, hints=hints)


def decode_request(request: Request, prefill_worker: str, params: bytes) -> Request:
    """The request for a decode worker: with the transfer parameters, which are opaque, and without
    credit for what is cached there. Everything else is as the client has asked."""
    override = replace(
        request.router_config_override or RouterConfigOverride(),
        overlap_score_credit=0.0,
        assume_kv_reuse=False,
        track_prefill_tokens=False,
    )
    return replace(
        request,
        hints=replace(request.hints, prefill_worker_id=prefill_worker),
        router_config_override=override,
        prefill_result=PrefillResult(disaggregated_params=params),
    )


def domain_taint(taints: Sequence[str], domain: str) -> str | None:
    """The taint of a worker in a topology domain, such as topology/zone=a."""
    return next((taint for taint in taints if taint.startswith(f"topology/{domain}=")), None)


def within_domain(request: Request, taint: str | None, rules: HandOverRules) -> Request:
    """The request with the constraint that decode is in the domain of the prefill worker, which has
    this taint; the request as it is without a domain."""
    if taint is None:
        return request
    asked = request.hints.routing_constraints or RoutingConstraints()
    if rules.is_domain_required:
        required = tuple(dict.fromkeys((*asked.required_taints, taint)))
        merged = replace(asked, required_taints=required)
    else:
        preferred = {**asked.preferred_taints, taint: PREFERRED_DOMAIN_WEIGHT}
        merged = replace(asked, preferred_taints=preferred)
    return replace(request, hints=replace(request.hints, routing_constraints=merged))
