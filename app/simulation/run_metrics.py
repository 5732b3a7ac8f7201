"""Metrics of a simulated run: cache hit rate, TTFT, ITL and end-to-end latency. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvlane.app.routing.selection.candidates import latency_targets
from kvlane.app.simulation.simulated_worker import SimulatedWorker
from kvlane.app.simulation.trace_requests import SimulatedRequest


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
    """Percentile of the time between tokens, in ms; None without any."""
    found = [worker.token_gaps() for worker in workers]
    gaps = np.concatenate([[], *(gaps for gaps, _ in found)])
    counts = np.concatenate([[], *(counts for _, counts in found)])
    if not len(gaps):
        return None
    order = gaps.argsort()
    up_to = counts[order].cumsum()
    return float(gaps[order][up_to.searchsorted(percent / 100 * up_to[-1])])
