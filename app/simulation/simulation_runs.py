"""Simulation runs: a policy by name, on a fleet, at a speed; their metrics, and rows of tables."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvlane.app.engine.simulated.batch import EngineLimits
from kvlane.app.perf_curves import PerfCurves
from kvlane.app.routing.policy_names import Objective, QueueOrder
from kvlane.app.routing.selection.candidates import latency_targets
from kvlane.app.routing.selection.handover_rules import HandOverRules
from kvlane.app.routing.selection.policies.registry import SIMULATED
from kvlane.app.routing.selection.routing_config import DynamoWeights, RoutingConfig
from kvlane.app.simulation.simulated_router import DEFAULT_CONDITIONS, NetworkConditions
from kvlane.app.simulation.simulated_worker import SimulatedWorker
from kvlane.app.simulation.simulator import Simulator, new_simulator
from kvlane.app.simulation.trace_requests import (
    ArrivalRate,
    SimulatedRequest,
    TraceRequest,
    schedule_arrivals,
    trace_requests,
    uses_sessions,
)
from kvlane.app.traces.mooncake_trace import CHUNK_TOKENS, TraceRow


class RunMetrics(NamedTuple):
    """Metrics over all requests of a run, in ms; percentiles are interpolated, but for `itl_p99`.

    `reuse`: cached share of all prompt tokens. `ttft`: since arrival, queueing included. `itl_p99`:
    of all steps of the workers. `e2e`: from arrival to last token. `on_time`: share that met its
    target of the time to a first token. Errors: |predicted - measured| / measured. None: unknown.
    """

    requests: int
    reuse: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    itl_mean: float
    e2e_mean: float
    e2e_p99: float
    itl_p99: float | None = None
    on_time: float | None = None
    ttft_error_p50: float | None = None
    ttft_error_p90: float | None = None
    itl_error_p50: float | None = None
    itl_error_p90: float | None = None


def metrics_of(
    requests: Sequence[SimulatedRequest], workers: Sequence[SimulatedWorker] = ()
) -> RunMetrics:
    """Metrics of at least one request. `workers`: of the run, for `itl_p99`."""
    prompt = np.array([simulated.request.prompt.tokens for simulated in requests])
    cached = np.array([simulated.cached_tokens for simulated in requests])
    output = np.array([simulated.request.output_tokens for simulated in requests])
    arrived = np.array([simulated.arrived_ms for simulated in requests])
    first = np.array([simulated.first_token_ms for simulated in requests])
    last = np.array([simulated.last_token_ms for simulated in requests])
    ttft, e2e = first - arrived, last - arrived
    ttft_p50, ttft_p99 = np.percentile(ttft, (50, 99)).tolist()
    between = int((output - 1).sum())
    return RunMetrics(
        requests=len(requests),
        reuse=float(cached.sum() / prompt.sum()),
        ttft_mean=float(ttft.mean()),
        ttft_p50=ttft_p50,
        ttft_p99=ttft_p99,
        itl_mean=float((last - first).sum() / between) if between else 0.0,
        e2e_mean=float(e2e.mean()),
        e2e_p99=float(np.percentile(e2e, 99)),
        itl_p99=_gap_percentile(workers, 99) if between else None,
        on_time=_on_time(requests, ttft.tolist()),
        **_errors(requests),
    )


def _on_time(requests: Sequence[SimulatedRequest], ttfts_ms: Sequence[float]) -> float | None:
    targets = [latency_targets(each.request.prompt.request)[0] for each in requests]
    met = [
        ttft_ms <= target_ms
        for target_ms, ttft_ms in zip(targets, ttfts_ms, strict=True)
        if target_ms < math.inf
    ]
    return sum(met) / len(met) if met else None


def _errors(requests: Sequence[SimulatedRequest]) -> dict[str, float]:
    ttft = [(r.predicted_ttft_ms, r.first_token_ms - r.sent_ms) for r in requests]
    itl = [
        (r.predicted_itl_ms, (r.last_token_ms - r.first_token_ms) / (r.request.output_tokens - 1))
        for r in requests
        if r.request.output_tokens > 1
    ]
    found: dict[str, float] = {}
    for name, pairs in (("ttft", ttft), ("itl", itl)):
        errors = [abs(a - b) / b for a, b in pairs if a and b > 0]
        if errors:
            p50, p90 = np.percentile(errors, (50, 90)).tolist()
            found |= {f"{name}_error_p50": p50, f"{name}_error_p90": p90}
    return found


def _gap_percentile(workers: Sequence[SimulatedWorker], percent: float) -> float | None:
    found = [worker.token_gaps() for worker in workers]
    gaps = np.concatenate([[], *(gaps for gaps, _ in found)])
    counts = np.concatenate([[], *(counts for _, counts in found)])
    if not len(gaps):
        return None
    order = gaps.argsort()
    up_to = counts[order].cumsum()
    return float(gaps[order][up_to.searchsorted(percent / 100 * up_to[-1])])


DEFAULT_CACHE_BLOCKS = 2048
"""Cache size of a worker: a million tokens, as in the published set-ups."""
MAX_PREFILL_LOAD_SCALE = 1e6


class UnknownPolicy(Exception):
    """Unknown policy; the message lists those that can be simulated."""


class SimulationRun(NamedTuple):
    """Parameters of one run. `policy` as for `parse_policy`, `cache_blocks`: of each worker.

    `warmup_requests`: leading requests that are not in the figures. `prefill_workers`: compute
    prompts alone, the others only decode; 0: each does both. `handover_rules`: None: never, or with
    such workers always. `later_curves`: of all engines from the arrival in the middle on; None: as
    before.
    """

    policy: str
    workers: int
    pace: ArrivalRate = ArrivalRate()
    seed: int = 0
    cache_blocks: int = DEFAULT_CACHE_BLOCKS
    conditions: NetworkConditions = DEFAULT_CONDITIONS
    curves: PerfCurves = PerfCurves()
    warmup_requests: int = 0
    prefill_workers: int = 0
    handover_rules: HandOverRules | None = None
    objective: Objective = "balanced"
    queue_order: QueueOrder = "sjf"
    later_curves: PerfCurves | None = None


class PreparedTrace:
    def __init__(self, rows: Sequence[TraceRow], ttft_targets_ms: Sequence[float] = ()) -> None:
        """`ttft_targets_ms`: targets of the time to a first token, of the requests in turn."""
        self.rows = rows
        self._targets_ms = ttft_targets_ms
        self._requests = {False: trace_requests(rows, ttft_targets_ms=ttft_targets_ms)}

    def requests_for(self, policy: str) -> list[TraceRequest]:
        in_sessions = uses_sessions(policy)
        if in_sessions not in self._requests:
            self._requests[in_sessions] = trace_requests(
                self.rows, with_sessions=in_sessions, ttft_targets_ms=self._targets_ms
            )
        return self._requests[in_sessions]

    @property
    def duration_s(self) -> float:
        return (self.rows[-1].timestamp - self.rows[0].timestamp) / 1000


def parse_policy(policy: str) -> RoutingConfig:
    """Parse a policy: a name, or `dynamo:64` with a prefill_load_scale. Raises UnknownPolicy."""
    name, _, scale = policy.partition(":")
    if name not in SIMULATED:
        raise UnknownPolicy(f"policy {name!r}: one of {', '.join(SIMULATED)}")
    if not scale:
        return RoutingConfig(name)
    try:
        weights = DynamoWeights(prefill_load_scale=float(scale))
    except ValueError:
        weights = None
    if (
        name != "dynamo"
        or weights is None
        or not 0 <= weights.prefill_load_scale <= MAX_PREFILL_LOAD_SCALE
    ):
        raise UnknownPolicy(
            f"policy {policy!r}: only dynamo takes a number, its prefill_load_scale, from 0 to "
            f"{MAX_PREFILL_LOAD_SCALE:g}"
        )
    return RoutingConfig(name, weights)


def run_requests(trace: PreparedTrace, run: SimulationRun) -> list[SimulatedRequest]:
    """The requests after `warmup_requests`, in order of arrival. Raises as `new_simulator` does."""
    return _simulator(trace, run, lambda _: None).run()[run.warmup_requests :]


def _simulator(
    trace: PreparedTrace, run: SimulationRun, progress: Callable[[int], None]
) -> Simulator:
    tuning = parse_policy(run.policy)._replace(objective=run.objective)
    coming = schedule_arrivals(trace.rows, trace.requests_for(tuning.policy), run.pace, run.seed)
    shape = EngineLimits(CHUNK_TOKENS, run.cache_blocks, curves=run.curves)
    simulator = new_simulator(
        coming, run.workers, shape, tuning, run.seed, progress, run.conditions,
        prefill_workers=run.prefill_workers, handover_rules=run.handover_rules,
        queue_order=run.queue_order,
    )  # fmt: skip
    if run.later_curves is not None:
        simulator.change_engines(coming[len(coming) // 2].at_ms, run.later_curves)
    return simulator


def run_metrics(
    trace: PreparedTrace, run: SimulationRun, progress: Callable[[int], None] = lambda _: None
) -> RunMetrics:
    replay = _simulator(trace, run, progress)
    requests = replay.run()[run.warmup_requests :]
    return metrics_of(requests, () if run.warmup_requests else replay.workers)


class TimedRun(NamedTuple):
    run: SimulationRun
    figures: RunMetrics
    wall_s: float


def run_timed(
    trace: PreparedTrace, run: SimulationRun, progress: Callable[[int], None] = lambda _: None
) -> TimedRun:
    began = time.perf_counter()
    found = run_metrics(trace, run, progress)
    return TimedRun(run, found, time.perf_counter() - began)


def result_row(run: SimulationRun, found: RunMetrics, wall_s: float) -> dict[str, Any]:
    return {
        "policy": run.policy,
        "seed": run.seed,
        "workers": run.workers,
        "speed": run.pace.speed,
        "jitter_s": run.pace.jitter_s,
        "conditions": ", ".join(_circumstances(run)),
        "requests": found.requests,
        "reuse": found.reuse,
        "ttft_ms": {"mean": found.ttft_mean, "p50": found.ttft_p50, "p99": found.ttft_p99},
        "itl_ms": {"mean": found.itl_mean, "p99": found.itl_p99},
        "e2e_ms": {"mean": found.e2e_mean, "p99": found.e2e_p99},
        "on_time": found.on_time,
        "prediction_error": {
            "ttft_p50": found.ttft_error_p50,
            "ttft_p90": found.ttft_error_p90,
            "itl_p50": found.itl_error_p50,
            "itl_p90": found.itl_error_p90,
        },
        "wall_s": wall_s,
    }


def _circumstances(run: SimulationRun) -> Iterator[str]:
    usual = SimulationRun("", 0)
    if run.handover_rules is not None:
        yield "free roles"
    if run.objective != usual.objective:
        yield f"objective {run.objective}"
    if run.queue_order != usual.queue_order:
        yield f"queue order {run.queue_order}"
    if run.prefill_workers:
        yield f"{run.prefill_workers} prefill + {run.workers - run.prefill_workers} decode"
    if run.cache_blocks != usual.cache_blocks:
        yield f"{run.cache_blocks} blocks"
    yield from _network(run.conditions)
    if run.curves != usual.curves:
        a, b, c = run.curves.prefill
        yield f"prefill {a:.3g} n^2 + {b:.3g} n + {c:.3g} ms"
    if run.later_curves is not None:
        yield "other curves from the middle on"
    if not run.conditions.publishes_curves:
        yield "curves unknown"
    if run.warmup_requests:
        yield f"after {run.warmup_requests}"


def _network(there: NetworkConditions) -> Iterator[str]:
    if there.routers > 1:
        yield f"{there.routers} routers"
        if not there.shares_ledger:
            yield "apart"
    if there.transfer is not None:
        yield f"transfers at {there.transfer.bytes_per_s / 1e9:g} GB/s"
    if there.ledger_lag_ms:
        yield f"lag {there.ledger_lag_ms:g} ms"
        if not there.staggers_routers:
            yield "not staggered"
    if there.dispatch_delay_ms:
        yield f"hop {there.dispatch_delay_ms:g} ms"
    if there.event_delay_ms:
        yield f"notices {there.event_delay_ms:g} ms"
