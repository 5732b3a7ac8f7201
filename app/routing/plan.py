"""Where a request goes: who may take it, what each would cost, which one it is.

`plan` is a function of its arguments: the view that the folds and this router's own undelivered
decisions give, the settings, and the request's own seed. Its result says with what inputs it was
decided, so that `replan` comes to the same from the record in the ledger alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from app.routing import kernels, predictive
from app.routing.board import Board, Sources
from app.routing.decisions import (
    Chosen,
    Hold,
    Outlook,
    Plan,
    Planned,
    Refuse,
    Tuning,
    View,
)
from app.routing.eligibility import NoPlace, Pool, Row, eligible, pin_of
from app.routing.kernels import Floats
from app.routing.policies import (
    NOBODY,
    POLICIES,
    Ask,
    Costs,
    DynamoWeights,
    Options,
    Others,
    Place,
    pick,
    span,
)
from app.routing.predictive import Prediction, PredictiveWeights
from app.routing.prompt import Prompt
from app.routing.recorded import inputs_of, options_of
from app.routing.sessions import allowance, kept
from streams.records import (
    Assigned,
    Phase,
    Request,
    RouterConfigOverride,
)

LARGEST_WEIGHT = 1e6
"""Of what a request may set: costs stay finite, so that there is always a least one."""


class Recalled(NamedTuple):
    """What a recorded decision was made of: its candidates, in their order, and their costs.

    `prediction`: of policy predictive.
    """

    options: Options
    costs: Costs
    prediction: Prediction | None = None


def plan(
    prompt: Prompt,
    view: View,
    tuning: Tuning,
    *,
    seed: int,
    phase: Phase = "aggregated",
    turn: int = 0,
    excluded: Collection[str] = (),
    full: Collection[tuple[str, int]] = (),
    since_ms: float | None = None,
    deadline_ms: float | None = None,
    bound: Place | None = None,
) -> Plan:
    """Decide about a phase of a request.

    `turn`: how many requests this router has dispatched; `excluded`: workers on which it failed;
    `full`: those that take no more, with their epochs. `since_ms`: when it was planned first, if
    that was before; `deadline_ms`: when its time is up. `bound`: where its session is at home.
    """
    request = prompt.request
    if tuning.policy == "direct":
        phase = "decode" if phase == "aggregated" else phase
        if pin_of(request.hints, phase) is None:
            return Refuse("invalid", "policy direct needs decode_worker_id or backend_instance_id")
    if fault := fault_of(request):
        return Refuse("invalid", f"{fault} must be a number up to {LARGEST_WEIGHT:g}")
    pool = view.pools.pool(request.model, phase, view.now_ms)
    rows = eligible(
        request, phase, pool, view.fleet,
        excluded=excluded, full=full, burdens=(view.told, view.own),
    )  # fmt: skip
    if isinstance(rows, NoPlace):
        return _without_place(rows)
    options = _options(request, pool, rows, view, prompt)
    weights = _overridden(tuning.weights, request.router_config_override)
    ask = _ask(prompt, view, pool.block_size, seed, turn)
    prediction: Prediction | None = None
    if tuning.policy == "predictive":
        prediction = predictive.predict(ask, options, tuning.predictive)
        costs = prediction.costs
    else:
        if weights.overlap_decay:
            least = int(options.spots[:, kernels.PREFILL_TOKENS].min())
            ask = replace(ask, least_prefill_tokens=least)
        costs = POLICIES[tuning.policy](ask, options, weights)
    params = _params(tuning, ask, weights, costs, prediction, request.router_config_override)
    chosen = prediction.best if prediction else pick(costs, options.tags, seed, _noise(params))
    assert chosen is not None, "a policy considers some option"
    if bound is not None and bound in options.places:
        at = options.places.index(bound)
        slack = tuning.session_slack * allowance(tuning.policy, ask, weights, rows[at].pace)
        params["session_allowance"] = slack
        chosen = kept(at, chosen, costs, slack)
    else:
        bound = None
    outlook = Outlook()
    if prediction is not None:
        since_ms = view.now_ms if since_ms is None else since_ms
        found: list[float] = prediction.found[chosen].tolist()
        outlook = outlook_of(found, options, chosen, view.now_ms, since_ms, tuning, deadline_ms)
        if (hold := hold_of(outlook, view.now_ms)) is not None:
            return hold
    device, host, disk = options.blocks[chosen].tolist()
    cached = min(int(device + host + disk) * pool.block_size, prompt.tokens)
    tracked = tuning.policy != "direct" and params.get("track_prefill_tokens", 1.0)
    reuse = params.get("assume_kv_reuse", 1.0)
    return Chosen(
        place=options.places[chosen],
        tokens=prompt.tokens,
        cached_tokens=cached,
        prefill_tokens=(prompt.tokens - cached if reuse else prompt.tokens) if tracked else 0,
        block_size=pool.block_size,
        policy=tuning.policy,
        params=params,
        seed=seed,
        inputs=inputs_of(options, costs, chosen, is_timed=prediction is not None),
        at_ms=view.now_ms,
        outlook=outlook,
        bound=bound,
    )


def _without_place(found: NoPlace) -> Hold | Refuse:
    if found.hope == "none":
        return Refuse(found.code, found.reason)
    return Hold(found.reason, code=found.code, is_hopeless=found.hope == "news")


def replan(decision: Assigned, session: str = "") -> Place | None:
    """The place by the inputs that a decision records; None where it records none.

    `session`: the request's, which only session_hash looks at. A turn is recorded as the cost that
    it led to, since it depends on places that need not be recorded.
    """
    recalled = recall(decision, session)
    if recalled is None:
        return None
    places = recalled.options.places
    noise = _noise(decision.params)
    chosen = pick(recalled.costs, recalled.options.tags, decision.seed, noise)
    if chosen is None:
        return None
    use, slack = decision.session, decision.params.get("session_allowance")
    if use is not None and slack is not None:
        bound = Place(use.bound_worker, use.bound_epoch, use.bound_rank)
        if bound in places:
            chosen = kept(places.index(bound), chosen, recalled.costs, slack)
    return places[chosen]


def recall(decision: Assigned, session: str = "") -> Recalled | None:
    """The costs by the inputs that a decision records, and what they are made of; see `replan`."""
    candidates = decision.candidates
    if not candidates:
        return None
    options = options_of(candidates)
    params, ask = decision.params, recorded_ask(decision, session)
    if decision.policy == "round_robin":
        return Recalled(options, np.array([c.cost for c in candidates]))
    if decision.policy == "predictive":
        known = {name: params[name] for name in PredictiveWeights._fields if name in params}
        predicting = PredictiveWeights(**known)
        prediction = predictive.predict(ask, options, predicting)
        return Recalled(options, prediction.costs, prediction)
    names = DynamoWeights._fields
    weights = DynamoWeights(**{name: params[name] for name in names if name in params})
    return Recalled(options, POLICIES[decision.policy](ask, options, weights))


def recorded_ask(decision: Assigned, session: str = "") -> Ask:
    """The request, as a decision records it."""
    params = decision.params
    return Ask(
        id=decision.id, prompt_tokens=decision.prompt_tokens + decision.base_tokens,
        block_size=decision.block_size, seed=decision.seed, session=session,
        least_prefill_tokens=int(params.get("least_prefill_tokens", 0)),
        output_tokens=params.get("output_tokens", 0.0),
        mean_output_tokens=params.get("mean_output_tokens", 0.0),
        most_held_tokens=params.get("most_held_tokens", 0.0),
        leads_to=params.get("leads_to", 1.0),
        ttft_target_ms=params.get("ttft_target_ms", math.inf),
        itl_target_ms=params.get("itl_target_ms", math.inf),
    )  # fmt: skip


def outlook_of(
    found: Sequence[float],
    among: Board | Options,
    chosen: int,
    now_ms: int,
    since_ms: float,
    tuning: Tuning,
    deadline_ms: float | None,
) -> Outlook:
    """What is expected of a request at the chosen place, where this was `found`; see `Prediction`.

    Its turn there comes `later_ms` after the place is free, or after the request itself came.
    """
    until_ms = since_ms + tuning.predictive.max_hold_ms
    if deadline_ms is not None:
        until_ms = min(until_ms, deadline_ms - found[kernels.PREFILL])
    planned = Planned(among.places[chosen], found[kernels.ALONE], math.floor(until_ms))
    left_ms, spots = found[kernels.HOLD], among.spots
    if later_ms := spots.item(chosen, kernels.LATER_MS):
        if spots.item(chosen, kernels.PREFILL_RUNS):
            left_ms += later_ms if left_ms else 0.0
        else:
            left_ms = max(since_ms, spots.item(chosen, kernels.PREFILLED_MS)) + later_ms - now_ms
    left_ms = min(left_ms, planned.until_ms - now_ms)
    ttft_ms = found[kernels.WAIT] + found[kernels.PREFILL]
    return Outlook(planned, max(math.ceil(left_ms), 0), int(now_ms - since_ms), ttft_ms)


def hold_of(outlook: Outlook, now_ms: int) -> Hold | None:
    """Whether a request is better held, and until when."""
    if outlook.left_ms <= 0:
        return None
    return Hold("its worker is busy", now_ms + outlook.left_ms, outlook.planned)


def _ask(prompt: Prompt, view: View, block_size: int, seed: int, turn: int) -> Ask:
    """What policies may know of a request, but for what depends on its options."""
    request = prompt.request
    session = request.hints.session_control
    ttft_target_ms, itl_target_ms = targets_of(request)
    least_prefill_tokens = 0
    return Ask(
        request.id, prompt.tokens, block_size, seed, turn, session.session_id if session else "",
        least_prefill_tokens, expected_output_tokens(request, view.output_tokens),
        view.output_tokens, kernels.UNKNOWN, view.leads_to, ttft_target_ms, itl_target_ms,
    )  # fmt: skip


def expected_output_tokens(request: Request, mean: float) -> float:
    """How long its answer is expected to be, when others are so long in the mean."""
    expected: float | None = request.hints.expected_output_tokens
    expected, limit = mean if expected is None else max(expected, 1), request.stop.max_tokens
    return float(expected if limit is None else min(expected, max(limit, 1)))


def targets_of(request: Request) -> tuple[float, float]:
    """The times that it asks for, to the first token and from token to token, in ms."""
    wishes = request.router
    if wishes is None:
        return math.inf, math.inf
    ttft_ms, itl_ms = wishes.ttft_target, wishes.itl_target
    return math.inf if ttft_ms is None else ttft_ms, math.inf if itl_ms is None else itl_ms


def _options(
    request: Request, pool: Pool, rows: Sequence[Row], view: View, prompt: Prompt
) -> Options:
    board = board_of(pool, view)
    every = Options(
        board.places, board.tags, board.curves, board.spots,
        board.blocks(view.caches, prompt.local(pool.block_size)),
        _taint_weights(request, pool.rows), _others(board, view.others),
    )  # fmt: skip
    return every if rows is pool.rows else every.only(board.rows_at([row.place for row in rows]))


def _others(board: Board, planned: Sequence[Planned]) -> Others:
    if not planned:
        return NOBODY
    at = board.rows_at([each.place for each in planned])
    return Others(at, np.array([each.prefill_ms for each in planned], np.float64))


def board_of(pool: Pool, view: View) -> Board:
    """The pool in columns, as of now."""
    sources = Sources(
        view.told, view.own, view.fleet.beats, view.fleet.beaten, view.counts_output,
        view.slowness, view.later_ms,
    )  # fmt: skip
    pool.board.refresh(sources, view.now_ms)
    return pool.board


def _taint_weights(request: Request, rows: Sequence[Row]) -> Floats | None:
    constraints = request.hints.routing_constraints
    if constraints is None or not constraints.preferred_taints:
        return None
    preferred = constraints.preferred_taints
    return np.array([
        sum(weight for taint, weight in preferred.items() if taint in row.taints) for row in rows
    ], np.float64)  # fmt: skip


def fault_of(request: Request) -> str:
    """The name of a number in the request with which costs cannot be compared; mostly empty."""
    override, constraints = request.router_config_override, request.hints.routing_constraints
    if override is not None:
        for name in ("overlap_score_credit", "prefill_load_scale", "router_temperature"):
            value = getattr(override, name)
            if value is not None and not 0 <= value <= LARGEST_WEIGHT:  # nor is it NaN
                return name
    if constraints is not None:
        for taint, weight in constraints.preferred_taints.items():
            if not abs(weight) <= LARGEST_WEIGHT:
                return f"the weight of preferred taint {taint}"
    return ""


def _overridden(weights: DynamoWeights, override: RouterConfigOverride | None) -> DynamoWeights:
    if override is None:
        return weights
    asked = {
        "overlap_score_credit": override.overlap_score_credit,
        "prefill_load_scale": override.prefill_load_scale,
        "temperature": override.router_temperature,
    }
    return weights._replace(**{name: x for name, x in asked.items() if x is not None})


def _params(
    tuning: Tuning,
    ask: Ask,
    weights: DynamoWeights,
    costs: Costs,
    prediction: Prediction | None,
    override: RouterConfigOverride | None,
) -> dict[str, float]:
    """The settings in force, as they are recorded, those of the request that only inform, too."""
    params: dict[str, float] = {}
    if prediction is not None:
        params = {
            "decode_weight": tuning.predictive.decode_weight,
            "max_hold_ms": tuning.predictive.max_hold_ms,
            "output_tokens": ask.output_tokens,
            "mean_output_tokens": ask.mean_output_tokens,
            "most_held_tokens": prediction.most_held_tokens,
            "leads_to": ask.leads_to,
        }
        if ask.ttft_target_ms < math.inf:
            params["ttft_target_ms"] = ask.ttft_target_ms
        if ask.itl_target_ms < math.inf:
            params["itl_target_ms"] = ask.itl_target_ms
    if tuning.policy == "dynamo":
        params |= weights._asdict()
        if weights.overlap_decay:
            params["least_prefill_tokens"] = ask.least_prefill_tokens
        if weights.temperature:
            params["span"] = span(costs)
    if override is not None:
        for name in ("assume_kv_reuse", "track_prefill_tokens", "shared_cache_multiplier"):
            if (value := getattr(override, name)) is not None:
                params[name] = float(value)
    return params


def _noise(params: Mapping[str, float]) -> float:
    return params.get("temperature", 0.0) * params.get("span", 0.0)
