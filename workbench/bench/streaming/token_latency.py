"""CPU time and added latency of a token between engine and client.

    feeder ──► responses ──► gateway ──► SSE ──► clients (this process)
    bare                            ──► SSE ──► the same clients: the cost of HTTP alone

Measures the CPU time of worker side and gateway together per token, and the time from the creation
of a step to its receipt. The bare server creates the same events in its own process, without a log
in between; both take turns in the same run, at the same rate, with the same number of streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

from kvlane.app.local.processes import ManagedProcess, free_port
from kvlane.app.settings import Settings
from workbench.bench.bench_environment import (
    BenchEnvironment,
    BenchFailed,
    PrintLine,
    bench_environment,
)
from workbench.bench.process_usage import cpu_time_s
from workbench.bench.report import Report, Threshold, at_most
from workbench.bench.statistics import percentile, spread
from workbench.bench.streaming.raw_http import http_request, read_stream, wait_listening

STREAMS = 100
TOKENS_PER_S = 5000
MODEL = "bench"
CPU_LIMITS_US = {1: 40.0, 8: 11.0}
"""Limits of the CPU time of a token in microseconds, by tokens per step."""
ADDED_LATENCY_LIMIT_MS = 10.0
PARSER_LIMIT = 1.3
"""Limit of the CPU time of a token with parsers, as a multiple of one without."""
WARM_UP_TOKENS = 200
CHAT = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "hi"}]}


class TokenScale(NamedTuple):
    """Amount of work: tokens per answer (all streams run at once), and rounds."""

    tokens: int
    rounds: int


QUICK = TokenScale(tokens=400, rounds=3)
FULL = TokenScale(tokens=2000, rounds=5)


class TokenRound(NamedTuple):
    """Figures of one side. CPU in microseconds per token, by process."""

    side: str
    tokens_per_step: int
    cpu_us: dict[str, float]
    p50_ms: float
    p99_ms: float
    tokens: int
    events: int

    @property
    def total_cpu_us(self) -> float:
        return sum(self.cpu_us.values())


async def bench_tokens(
    settings: Settings, scale: TokenScale, print_line: PrintLine, progress: Callable[[float], None]
) -> Report:
    """Run it; `progress` gets shares of the whole. Raises BenchFailed, BrokerUnavailable."""
    rounds: list[TokenRound] = []
    async with bench_environment(settings, print_line) as on:
        gateway, port = await on.start_gateway(MODEL, 131_072)
        await token_round(on, "kvlane", 1, WARM_UP_TOKENS, gateway, port)
        for number in range(scale.rounds):
            for step in CPU_LIMITS_US:
                sides = ["bare", "kvlane"] if number % 2 == 0 else ["kvlane", "bare"]
                for side in sides:
                    rounds.append(await token_round(on, side, step, scale.tokens, gateway, port))
                    progress(1 / (scale.rounds * len(CPU_LIMITS_US) * 2))
    return _report(rounds)


async def bench_parser(
    settings: Settings, scale: TokenScale, print_line: PrintLine, progress: Callable[[float], None]
) -> Report:
    """CPU time of a token of a call, beside one of plain text. Arguments as for `bench_tokens`."""
    rounds: list[TokenRound] = []
    async with bench_environment(settings, print_line) as on:
        gateway, port = await on.start_gateway(MODEL, 131_072)
        await token_round(on, "text", 1, WARM_UP_TOKENS, gateway, port)
        for number in range(scale.rounds):
            for step in CPU_LIMITS_US:
                for side in ("text", "calls") if number % 2 == 0 else ("calls", "text"):
                    rounds.append(await token_round(on, side, step, scale.tokens, gateway, port))
                    progress(1 / (scale.rounds * len(CPU_LIMITS_US) * 2))
    rows, thresholds = list[dict[str, Any]](), list[Threshold]()
    for step in CPU_LIMITS_US:
        cpu_us = {}
        for side in ("text", "calls"):
            own = [r for r in rounds if (r.side, r.tokens_per_step) == (side, step)]
            rows.append(_row(side, step, own))
            cpu_us[side] = median(r.total_cpu_us for r in own)
        ratio = cpu_us["calls"] / cpu_us["text"]
        thresholds.append(at_most(f"calls at {step} a step", ratio, "x", PARSER_LIMIT))
    return Report("parser", rows, thresholds)


async def token_round(
    on: BenchEnvironment,
    side: str,
    step: int,
    count: int,
    gateway: ManagedProcess,
    port: int,
    streams: int = STREAMS,
) -> TokenRound:
    """Open `streams` streams of `count` tokens, `step` at a time. Raises BenchFailed."""
    steps_per_s = TOKENS_PER_S / streams / step
    pace = [str(count), str(step), str(steps_per_s), str(streams)]
    if side == "bare":
        port = free_port()
        measured = [on.launch(side, "workbench.bench.streaming.baseline_http", str(port), *pace)]
        await wait_listening(port, on.clock, measured[0].check)
    else:
        form = () if side == "kvlane" else (side,)
        measured = [gateway, await on.start_feeder(*pace, *form)]
    try:
        before = {child.name: cpu_time_s(child) for child in measured}
        request = http_request("/v1/chat/completions", CHAT)
        seconds = count / step / steps_per_s
        async with asyncio.timeout(60 + 2 * seconds):
            answers = await asyncio.gather(
                *(read_stream(port, request, on.clock) for _ in range(streams))
            )
        after = {child.name: cpu_time_s(child) for child in measured}
    finally:
        on.stop_process(measured[-1])
    got = sum(answer.tokens for answer in answers)
    if got != streams * count or not all(answer.is_complete for answer in answers):
        raise BenchFailed(f"{side}: {got} of {streams * count} tokens arrived")
    late_ms = [1000 * late for answer in answers for late in answer.latencies_s]
    return TokenRound(
        side,
        step,
        {name: (after[name] - before[name]) / got * 1e6 for name in before},
        percentile(late_ms, 0.5),
        percentile(late_ms, 0.99),
        got,
        sum(answer.events for answer in answers),
    )


def _report(rounds: list[TokenRound]) -> Report:
    rows: list[dict[str, Any]] = []
    thresholds: list[Threshold] = []
    for step, bar_us in CPU_LIMITS_US.items():
        sides = {
            side: [r for r in rounds if (r.side, r.tokens_per_step) == (side, step)]
            for side in ("bare", "kvlane")
        }
        for side, own in sides.items():
            rows.append(_row(side, step, own))
        cpu_us = median(r.total_cpu_us for r in sides["kvlane"])
        added_ms = median(r.p99_ms for r in sides["kvlane"]) - median(
            r.p99_ms for r in sides["bare"]
        )
        thresholds += [
            at_most(f"CPU at {step} a step", cpu_us, "us/token", bar_us),
            at_most(f"p99 added at {step} a step", added_ms, "ms", ADDED_LATENCY_LIMIT_MS),
        ]
    return Report("tokens", rows, thresholds)


def _row(side: str, step: int, own: Sequence[TokenRound]) -> dict[str, Any]:
    parts = {name: median(r.cpu_us[name] for r in own) for name in own[0].cpu_us}
    return {
        "side": side,
        "tokens/step": step,
        "CPU us/token": str(spread([r.total_cpu_us for r in own])),
        "of it": ", ".join(f"{name} {us:.1f}" for name, us in parts.items()),
        "p50 ms": str(spread([r.p50_ms for r in own])),
        "p99 ms": str(spread([r.p99_ms for r in own])),
        "tokens": own[0].tokens,
        "events": own[0].events,
        "rounds": len(own),
    }
