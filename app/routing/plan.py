"""Where a request goes: who may take it, what each would cost, which one it is.

`plan` is a function of its arguments: the view that the folds and this router's own undelivered
decisions give, the settings, and the request's own seed. Its result says with what inputs it was
decided, so that `replan` comes to the same from the record in the ledger alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from msgspec.structs import replace

from app.routing import predictive
from app.routing.burdens import Burden, Burdens
from app.routing.eligibility import NoPlace, Pools, Row, eligible, pin_of
from app.routing.fleet import Fleet
from app.routing.index import Index
from app.routing.paces import OUTPUT_TOKENS, PUBLISHED, Spot, spot_of
from app.routing.policies import (
    NEVER,
    POLICIES,
    Ask,
    Costs,
    DynamoWeights,
    Options,
    Place,
    pick,
    span,
)
from app.routing.predictive import Prediction, PredictiveWeights
from app.routing.prompt import Prompt
from indexer.lives import Holder, Overlap
from streams.records import Assigned, Candidate, EndCode, Phase, Request, RouterConfigOverride

RECORDED = 16
"""How many candidates a decision records: the best ones, and the chosen one if it is none."""

LARGEST_WEIGHT = 1e6
"""Of what a request may set: costs stay finite, so that there is always a least one."""

_NO_OVERLAP = Overlap()
_NOTHING: Mapping[Any, Any] = MappingProxyType({})


class View(NamedTuple):
    """What is known when a request is planned. `told`: burdens by the ledger, `own`: those of
    decisions that were taken here and not read back. `now_ms`: broker time.

    Of the rest only policy predictive knows. `output_tokens`: the mean answer's; `slowness`: of
    workers, see `Pace`. `ahead_ms`: the prefill, computed alone, of each request that is held here,
    came before the one in question, and is planned for a place.
    """

    fleet: Fleet
    pools: Pools
    caches: Index
    told: Burdens
    own: Burdens
    now_ms: int
    output_tokens: float = OUTPUT_TOKENS
    slowness: Mapping[str, float] = _NOTHING
    ahead_ms: Mapping[Place, Sequence[float]] = _NOTHING


class Tuning(NamedTuple):
    """The policy of a deployment, and its settings."""

    policy: str = "dynamo"
    weights: DynamoWeights = DynamoWeights()
    predictive: PredictiveWeights = PredictiveWeights()

    @property
    def holds(self) -> bool:
        """Whether requests are held for a place, and so planned before they go."""
        return self.policy == "predictive"


class Planned(NamedTuple):
    """Where a request is to go. `prefill_ms`: its own there, computed alone.

    `until_ms`: when it is held no longer, whatever is there.
    """

    place: Place
    prefill_ms: float
    until_ms: int


class Outlook(NamedTuple):
    """What policy predictive expects. `left_ms`: for how long the request is better held, from now;
    `held_ms`: how long it was, `ttft_ms`: time to its first token if it goes now.
    """

    planned: Planned | None = None
    left_ms: int = 0
    held_ms: int = 0
    ttft_ms: float = 0.0


class Chosen(NamedTuple):
    """The decision. `prefill_tokens`: what it adds to the prefill of its place; with the other
    fields, all that was not in the request and went into the costs. `at_ms`: when it was taken.
    """

    place: Place
    tokens: int
    cached_tokens: int
    prefill_tokens: int
    block_size: int
    policy: str
    params: dict[str, float]
    seed: int
    candidates: tuple[Candidate, ...]
    at_ms: int = 0
    outlook: Outlook = Outlook()

    @property
    def burden(self) -> Burden:
        """What it adds to the load of its place until it is read back."""
        return Burden(1, self.tokens, self.prefill_tokens, 1, self.at_ms)


class Hold(NamedTuple):
    """Nobody may take it now, or it had better wait; somebody may later, by what is known at
    `wake_at_ms` if not before.

    `wake_at_ms`: time of the broker; None where only news can help. Looking again earlier or later
    is never wrong. `planned` is what policy predictive has in mind for it.
    """

    reason: str
    wake_at_ms: int | None = None
    planned: Planned | None = None


class Refuse(NamedTuple):
    """It asks for what cannot be."""

    code: EndCode
    message: str


Plan: TypeAlias = Chosen | Hold | Refuse


def intention(planned: Plan) -> Planned | None:
    """What policy predictive has in mind for a request, whether it may go now or is held."""
    if isinstance(planned, Chosen):
        return planned.outlook.planned
    return planned.planned if isinstance(planned, Hold) else None


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
) -> Plan:
    """Decide about a phase of a request.

    `turn`: how many requests this router has dispatched; `excluded`: workers on which it failed;
    `full`: those that take no more, with their epochs. `since_ms`: when it was planned first, if
    that was before; `deadline_ms`: when its time is up.
    """
    request = prompt.request
    if tuning.policy == "direct":
        phase = "decode" if phase == "aggregated" else phase
        if pin_of(request.hints, phase) is None:
            return Refuse("invalid", "policy direct needs decode_worker_id or backend_instance_id")
    if fault := _faulty_numbers(request):
        return Refuse("invalid", f"{fault} must be a number up to {LARGEST_WEIGHT:g}")
    pool = view.pools.pool(request.model, phase, view.now_ms)
    rows = eligible(request, phase, pool, view.fleet, excluded=excluded, full=full)
    if isinstance(rows, NoPlace):
        return Refuse(rows.code, rows.reason) if rows.code else Hold(rows.reason)
    overlaps = view.caches.overlaps(prompt.local(pool.block_size))
    options = _options(request, rows, view, overlaps)
    weights = _overridden(tuning.weights, request.router_config_override)
    session = request.hints.session_control
    ask = Ask(
        id=request.id, prompt_tokens=prompt.tokens, block_size=pool.block_size, seed=seed,
        turn=turn, session=session.session_id if session else "",
        least_prefill_tokens=min(options.prefill_tokens),
    )  # fmt: skip
    prediction: Prediction | None = None
    if tuning.policy == "predictive":
        options = options._replace(spots=_spots(options, rows, view))
        ask = _predicted(ask, request, options, view)
        prediction = predictive.predict(ask, options, tuning.predictive)
        costs: Costs = predictive.costs(options, prediction, tuning.predictive)
    else:
        costs = POLICIES[tuning.policy](ask, options, weights)
    params = _params(tuning, ask, weights, costs, request.router_config_override)
    chosen = pick(costs, options.places, seed, _noise(params))
    assert chosen is not None, "a policy considers some option"
    outlook = Outlook()
    if prediction is not None:
        since_ms = view.now_ms if since_ms is None else since_ms
        until_ms = since_ms + tuning.predictive.max_hold_ms
        outlook = _outlook(
            prediction, options, chosen, view.now_ms, since_ms, until_ms, deadline_ms
        )
        if outlook.left_ms > 0:
            return Hold("its worker is busy", view.now_ms + outlook.left_ms, outlook.planned)
    held = sum(column[chosen] for column in options[1:4]) * pool.block_size
    cached = min(held, prompt.tokens)
    tracked = params.get("track_prefill_tokens", 1.0)
    return Chosen(
        place=options.places[chosen],
        tokens=prompt.tokens,
        cached_tokens=cached,
        prefill_tokens=prompt.tokens - cached if tracked else 0,
        block_size=pool.block_size,
        policy=tuning.policy,
        params=params,
        seed=seed,
        candidates=_candidates(options, costs, chosen),
        at_ms=view.now_ms,
        outlook=outlook,
    )


def replan(decision: Assigned, session: str = "") -> Place | None:
    """The place by the inputs that a decision records; None where it records none.

    `session`: the request's, which only session_hash looks at. A turn is recorded as the cost that
    it led to, since it depends on places that need not be recorded.
    """
    recalled = recall(decision, session)
    if recalled is None:
        return None
    places = recalled.options.places
    chosen = pick(recalled.costs, places, decision.seed, _noise(decision.params))
    return None if chosen is None else places[chosen]


def recall(decision: Assigned, session: str = "") -> Recalled | None:
    """The costs by the inputs that a decision records, and what they are made of; see `replan`."""
    candidates = decision.candidates
    if not candidates:
        return None
    options = Options(
        [Place(c.worker, c.epoch, c.rank) for c in candidates],
        overlap_blocks=[c.overlap_blocks for c in candidates],
        host_blocks=[c.host_blocks for c in candidates],
        disk_blocks=[c.disk_blocks for c in candidates],
        prefill_tokens=[c.prefill_tokens for c in candidates],
        open_tokens=[c.open_tokens for c in candidates],
        open_runs=[c.open_runs for c in candidates],
        taint_weights=[c.taint_weight for c in candidates],
        spots=[spot_of(c) for c in candidates] if decision.policy == "predictive" else (),
    )
    params = decision.params
    ask = Ask(
        id=decision.id, prompt_tokens=decision.prompt_tokens + decision.base_tokens,
        block_size=decision.block_size, seed=decision.seed, session=session,
        least_prefill_tokens=int(params.get("least_prefill_tokens", 0)),
        output_tokens=params.get("output_tokens", 0.0),
        mean_output_tokens=params.get("mean_output_tokens", 0.0),
        most_held_tokens=params.get("most_held_tokens", 0.0),
    )  # fmt: skip
    if decision.policy == "round_robin":
        return Recalled(options, [c.cost for c in candidates])
    if decision.policy == "predictive":
        known = {name: params[name] for name in PredictiveWeights._fields if name in params}
        predicting = PredictiveWeights(**known)
        prediction = predictive.predict(ask, options, predicting)
        return Recalled(options, predictive.costs(options, prediction, predicting), prediction)
    names = DynamoWeights._fields
    weights = DynamoWeights(**{name: params[name] for name in names if name in params})
    return Recalled(options, POLICIES[decision.policy](ask, options, weights))


def _outlook(
    prediction: Prediction,
    options: Options,
    chosen: int,
    now_ms: int,
    since_ms: float,
    until_ms: float,
    deadline_ms: float | None,
) -> Outlook:
    terms = prediction.terms
    if deadline_ms is not None:
        until_ms = min(until_ms, deadline_ms - float(terms.prefill_ms[chosen]))
    alone_ms = float(prediction.alone_ms[chosen])
    planned = Planned(options.places[chosen], alone_ms, math.floor(until_ms))
    left_ms = min(float(prediction.hold_ms[chosen]), planned.until_ms - now_ms)
    ttft_ms = float(terms.ttft_ms[chosen])
    return Outlook(planned, max(math.ceil(left_ms), 0), int(now_ms - since_ms), ttft_ms)


def _predicted(ask: Ask, request: Request, options: Options, view: View) -> Ask:
    """The request with what is expected of it."""
    expected: float | None = request.hints.expected_output_tokens
    expected = view.output_tokens if expected is None else max(expected, 1)
    limit = request.stop.max_tokens
    return ask._replace(
        output_tokens=float(expected if limit is None else min(expected, max(limit, 1))),
        mean_output_tokens=view.output_tokens,
        most_held_tokens=float(predictive.held_tokens(ask, options).max()),
    )


def _spots(options: Options, rows: Sequence[Row], view: View) -> list[Spot]:
    slowness, now_ms = view.slowness, view.now_ms
    spots = []
    for row, told, own in zip(
        rows, view.told.at(options.places), view.own.at(options.places), strict=True
    ):
        runs, busy_ms = told.prefill_runs + own.prefill_runs, 0.0
        if runs:  # at those that are there now, since the last one before them was done
            since_ms = (told.prefill_since_ms + own.prefill_since_ms) / runs
            busy_ms = max(now_ms - max(since_ms, view.told.prefilled_ms(row.place)), 0.0)
        pace, factor = row.pace, slowness.get(row.place.worker, 1.0)
        if factor != 1.0:
            pace = pace._replace(slowness=factor)
        ahead_ms = tuple(view.ahead_ms.get(row.place, ()))
        spots.append(Spot(pace, told.tokens + own.tokens, runs, busy_ms, ahead_ms))
    return spots


def _options(
    request: Request, rows: Sequence[Row], view: View, overlaps: Mapping[Holder, Overlap]
) -> Options:
    places = [row.place for row in rows]
    burdens = view.told.at(places)
    if view.own:
        burdens = [a.plus(b) for a, b in zip(burdens, view.own.at(places), strict=True)]
    open_runs, tokens, prefill_tokens, *_ = zip(*burdens, strict=True)
    beats = view.fleet.beats
    none: Sequence[int] = [0] * len(rows)
    device, host, disk = none, none, none
    if overlaps:
        held = [
            overlaps.get(row.holder, _NO_OVERLAP) if row.shows_blocks else _NO_OVERLAP
            for row in rows
        ]
        device, host, disk, _ = zip(*held, strict=True)
    return Options(
        places=places,
        overlap_blocks=device,
        host_blocks=host,
        disk_blocks=disk,
        prefill_tokens=prefill_tokens,
        open_tokens=[
            prompts + beats[row.holder.worker].output_tokens // row.ranks
            for prompts, row in zip(tokens, rows, strict=True)
        ],
        open_runs=open_runs,
        taint_weights=_taint_weights(request, rows),
    )


def _taint_weights(request: Request, rows: Sequence[Row]) -> Sequence[float]:
    constraints = request.hints.routing_constraints
    if constraints is None or not constraints.preferred_taints:
        return [0.0] * len(rows)
    preferred = constraints.preferred_taints
    return [
        sum(weight for taint, weight in preferred.items() if taint in row.taints) for row in rows
    ]


def _faulty_numbers(request: Request) -> str:
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
    override: RouterConfigOverride | None,
) -> dict[str, float]:
    """The settings in force, as they are recorded, those of the request that only inform, too."""
    params: dict[str, float] = {}
    if tuning.policy == "predictive":
        params |= tuning.predictive._asdict()
        for name in ("output_tokens", "mean_output_tokens", "most_held_tokens"):
            params[name] = getattr(ask, name)
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


def _candidates(options: Options, costs: Costs, chosen: int) -> tuple[Candidate, ...]:
    """The best options that were considered, and the chosen one."""
    best = sorted(range(len(costs)), key=costs.__getitem__)[:RECORDED]
    if chosen not in best:
        best.append(chosen)
    return tuple(_candidate(options, i, costs[i]) for i in best if costs[i] != NEVER)


def _candidate(options: Options, i: int, cost: float) -> Candidate:
    at = options.places[i]
    spot = options.spots[i] if options.spots else None
    candidate = Candidate(
        worker=at.worker,
        epoch=at.epoch,
        rank=at.rank,
        cost=float(cost),
        open_runs=options.open_runs[i],
        open_tokens=options.open_tokens[i],
        overlap_blocks=options.overlap_blocks[i],
        host_blocks=options.host_blocks[i],
        disk_blocks=options.disk_blocks[i],
        prefill_tokens=options.prefill_tokens[i],
        taint_weight=options.taint_weights[i],
    )
    if spot is None:
        return candidate
    pace = spot.pace
    return replace(
        candidate,
        prompt_tokens=spot.prompt_tokens,
        prefill_runs=spot.prefill_runs,
        busy_ms=spot.busy_ms,
        ahead_ms=spot.ahead_ms,
        slowness=pace.slowness,
        chunk_tokens=pace.chunk_tokens,
        capacity_tokens=pace.capacity_tokens,
        curve=() if pace.curves == PUBLISHED else pace.curves.numbers(),
    )
