"""What a replay comes to, in the figures by which others publish theirs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from app.simulation.replay import Life


class Figures(NamedTuple):
    """Of all requests of a replay. Times in ms; percentiles are interpolated.

    `reuse`: the share of all prompt tokens that a cache had. `ttft`: from arrival to first token,
    waiting in the router included. `itl`: from token to token, over all tokens but the first ones.
    `e2e`: from arrival to last token.
    """

    requests: int
    reuse: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    itl_mean: float
    e2e_mean: float
    e2e_p99: float


def figures(lives: Sequence[Life]) -> Figures:
    """Of one request or more."""
    prompt = np.array([life.request.prompt.tokens for life in lives])
    cached = np.array([life.cached_tokens for life in lives])
    output = np.array([life.request.output_tokens for life in lives])
    arrived = np.array([life.arrived_ms for life in lives])
    first = np.array([life.first_token_ms for life in lives])
    last = np.array([life.last_token_ms for life in lives])
    ttft, e2e = first - arrived, last - arrived
    ttft_p50, ttft_p99 = np.percentile(ttft, (50, 99)).tolist()
    between = int((output - 1).sum())
    return Figures(
        requests=len(lives),
        reuse=float(cached.sum() / prompt.sum()),
        ttft_mean=float(ttft.mean()),
        ttft_p50=ttft_p50,
        ttft_p99=ttft_p99,
        itl_mean=float((last - first).sum() / between) if between else 0.0,
        e2e_mean=float(e2e.mean()),
        e2e_p99=float(np.percentile(e2e, 99)),
    )
