"""One production trace under two policies: what each makes of the caches, and why.

Plays the requests of the trace at their times, straight through Kafka, and reckons from what the
engines and the client saw: the policies are not asked how good they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from app.demo.asked import Asked, percentile
from app.demo.ledger import Decisions
from app.demo.trace import TraceRequest
from streams.clock import Clock
from streams.records import Assigned, Candidate

SPEED = 60.0
"""How much faster than in production requests come, to a share of them (see app/data/NOTICE)."""

Ask = Callable[[TraceRequest], Awaitable[Asked]]
"""Publishes a request of the trace and returns when its answer is whole."""


class Showing(NamedTuple):
    """The trace under one policy. Shares are of 1."""

    policy: str
    asked: Sequence[Asked]
    took_s: float
    cached_share: float
    busiest_share: float
    """Of the requests, those of the worker that had the most."""


async def play(
    policy: str,
    trace: Sequence[TraceRequest],
    ask: Ask,
    decisions: Decisions,
    clock: Clock,
    console: Console,
    speed: float = SPEED,
) -> Showing:
    """Play the trace once, with a progress bar; `speed` times as fast as it was recorded."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console,
    ) as progress:  # fmt: skip
        bar = progress.add_task(f"{policy:12}", total=len(trace))
        async with asyncio.TaskGroup() as requests:
            began = clock.now()
            tasks = []
            for request in trace:
                due = began + (request.arrival_s - trace[0].arrival_s) / speed
                await clock.sleep(max(0.0, due - clock.now()))
                task = requests.create_task(_awaited(ask(request)))
                task.add_done_callback(lambda _: progress.advance(bar))
                tasks.append(task)
    asked = [task.result() for task in tasks]
    took_s = clock.now() - began
    cached = sum(decisions.cached(a.id) or 0 for a in asked)
    where = [decisions.workers(a.id)[-1:] for a in asked]
    busiest = max(where.count(w) for w in where)
    prompts = sum(a.prompt_tokens for a in asked)
    return Showing(policy, asked, took_s, cached / prompts, busiest / len(asked))


async def _awaited(answer: Awaitable[Asked]) -> Asked:
    return await answer


def table(showings: Sequence[Showing]) -> Table:
    """The showings side by side."""
    shown = Table(box=None, pad_edge=False)
    shown.add_column("policy")
    heads = ("prompt tokens cached", "TTFT mean", "p50", "p99", "busiest worker", "took")
    for head in heads:
        shown.add_column(head, justify="right")
    for s in showings:
        ttft_ms = [a.ttft_s * 1000 for a in s.asked]
        shown.add_row(
            s.policy,
            f"{s.cached_share:.1%}",
            f"{sum(ttft_ms) / len(ttft_ms):.0f} ms",
            f"{percentile(ttft_ms, 0.5):.0f} ms",
            f"{percentile(ttft_ms, 0.99):.0f} ms",
            f"{s.busiest_share:.0%}",
            f"{s.took_s:.0f} s",
        )
    return shown


def telling(showing: Showing, decisions: Decisions) -> list[str]:
    """Why three requests went where they went: to the cache, away from it, and to the idlest."""
    made = [d for a in showing.asked for d in decisions.of(a.id)[:1] if d.candidates]
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
    return next(c for c in decision.candidates if c.worker == decision.worker)


def _best(decision: Assigned) -> int:
    return max(c.overlap_blocks for c in decision.candidates)
