"""Comparison of two routing policies on one production trace: cache hits, latency, decisions.

Equal ids of chunks give equal tokens, so prompts share the prefixes that they shared in production.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from kvlane.app.demo.expected_answers import DemoAnswer
from kvlane.app.demo.ledger_reader import LedgerDecisions
from kvlane.app.traces.mooncake_trace import BUNDLED_TRACE, CHUNK_TOKENS, read_trace
from kvlane.streams.records import Assigned, Candidate


class TracePrompt(NamedTuple):
    """One request. `arrival_s` is relative to the start of the trace."""

    arrival_s: float
    token_ids: list[int]
    output_tokens: int


def bundled_prompts(vocabulary: Sequence[int]) -> list[TracePrompt]:
    """The 300 requests that ship with kvlane, in tokens of this vocabulary."""
    return [
        TracePrompt(
            row.timestamp / 1000,
            chunk_tokens(row.hash_ids, row.input_length, vocabulary),
            row.output_length,
        )
        for row in read_trace(BUNDLED_TRACE)
    ]


def chunk_tokens(
    hash_ids: Sequence[int],
    length: int,
    vocabulary: Sequence[int],
    chunk_tokens: int = CHUNK_TOKENS,
) -> list[int]:
    tokens: list[int] = []
    for chunk in hash_ids:
        tokens += random.Random(chunk).choices(vocabulary, k=chunk_tokens)
    return tokens[:length]


RunTraceRequest = Callable[[TracePrompt], Coroutine[Any, Any, DemoAnswer]]


class PolicyRun(NamedTuple):
    """The results of one policy, or of one way to serve. Shares are fractions of 1."""

    policy: str
    answers: Sequence[DemoAnswer]
    duration_s: float
    cached_share: float
    busiest_worker_share: float
    prediction_errors: Mapping[str, Sequence[float]]
    """By name, errors of predicted times as shares of the measured ones; empty without any."""


def comparison_table(runs: Sequence[PolicyRun]) -> Table:
    shown = Table(box=None, pad_edge=False)
    shown.add_column("policy")
    heads = ("prompt tokens cached", "TTFT mean", "p50", "p99", "busiest worker", "took")
    for head in heads:
        shown.add_column(head, justify="right")
    for s in runs:
        ttft_ms = [a.ttft_s * 1000 for a in s.answers]
        p50, p99 = np.percentile(ttft_ms, (50, 99), method="inverted_cdf")
        shown.add_row(
            s.policy,
            f"{s.cached_share:.1%}",
            f"{sum(ttft_ms) / len(ttft_ms):.0f} ms",
            f"{p50:.0f} ms",
            f"{p99:.0f} ms",
            f"{s.busiest_worker_share:.0%}",
            f"{s.duration_s:.0f} s",
        )
    return shown


def prediction_lines(runs: Sequence[PolicyRun]) -> list[str]:
    lines = []
    for run in runs:
        shown = [
            "{} {:.0%} (median), {:.0%} (p90)".format(
                name, *np.percentile(errors, (50, 90), method="inverted_cdf")
            )
            for name, errors in run.prediction_errors.items()
            if errors
        ]
        if shown:
            lines.append(f"{run.policy}: error of the prediction, {'; '.join(shown)}")
    return lines


def explain_decisions(run: PolicyRun, decisions: LedgerDecisions) -> list[str]:
    """Three decisions explained: to the cache, away from it, and to the least loaded worker."""
    made = [d for a in run.answers for d in decisions.decisions(a.id)[:1] if d.chosen]
    by_cache = max(made, key=lambda d: _chosen(d).overlap_blocks, default=None)
    away = max(made, key=lambda d: _best(d) - _chosen(d).overlap_blocks, default=None)
    new = next((d for d in made if _best(d) == 0), None)
    picked = [d for d in (by_cache, away, new) if d is not None]
    return [_why(d) for d in {d.id: d for d in picked}.values()]


def _why(decision: Assigned) -> str:
    chosen = _chosen(decision)
    others = sorted((c for c in decision.candidates if c != chosen), key=lambda c: c.cost)
    blocks = -(-decision.prompt_tokens // max(decision.block_size, 1))
    lines = [f"{decision.id}, {decision.prompt_tokens} tokens in {blocks} blocks"]
    lines += [
        f"  {'→' if c is chosen else ' '} {c.worker}  cost {c.cost:6.0f}: holds "
        f"{c.overlap_blocks:4} blocks, {c.prefill_tokens:6} tokens before it, {c.open_runs} open"
        for c in (chosen, *others)
    ]
    return "\n".join(lines)


def _chosen(decision: Assigned) -> Candidate:
    assert decision.chosen is not None, "others are left out"
    return decision.chosen


def _best(decision: Assigned) -> int:
    return max(c.overlap_blocks for c in decision.candidates)
