"""Metrics of a simulated run: cache hit rate, TTFT, ITL and end-to-end latency. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from app.simulation.simulator import SimulatedRequest


class RunMetrics(NamedTuple):
    """Metrics over all requests of a run. Times in ms; percentiles are interpolated.

    `reuse`: cache hit rate, as a share of all prompt tokens. `ttft`: time to first token since
    arrival, queueing included. `inter_token_latency`: inter-token latency, over all tokens but the
    first ones. `e2e`: time from arrival to last token.
    """

    requests: int
    reuse: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    itl_mean: float
    e2e_mean: float
    e2e_p99: float


def metrics_of(lives: Sequence[SimulatedRequest]) -> RunMetrics:
    """Metrics of at least one request."""
    prompt = np.array([life.request.prompt.tokens for life in lives])
    cached = np.array([life.cached_tokens for life in lives])
    output = np.array([life.request.output_tokens for life in lives])
    arrived = np.array([life.arrived_ms for life in lives])
    first = np.array([life.first_token_ms for life in lives])
    last = np.array([life.last_token_ms for life in lives])
    ttft, e2e = first - arrived, last - arrived
    ttft_p50, ttft_p99 = np.percentile(ttft, (50, 99)).tolist()
    between = int((output - 1).sum())
    return RunMetrics(
        requests=len(lives),
        reuse=float(cached.sum() / prompt.sum()),
        ttft_mean=float(ttft.mean()),
        ttft_p50=ttft_p50,
        ttft_p99=ttft_p99,
        itl_mean=float((last - first).sum() / between) if between else 0.0,
        e2e_mean=float(e2e.mean()),
        e2e_p99=float(np.percentile(e2e, 99)),
    )
