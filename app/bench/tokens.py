"""What a token costs between engine and client, and how late it comes.

    feeder ──► responses ──► gateway ──► SSE ──► clients (this process)
    bare                            ──► SSE ──► the same clients: what HTTP alone costs

Counts the CPU time of worker side and gateway together for each token, and the time from the making
of a step to its reading. The bare server makes the same events in its own process, with no log
between; both take turns in the same run, at the same pace, with as many streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from app.bench.ground import BenchFailed, Child, Ground, Said, ground
from app.bench.report import Bar, Report
from app.bench.samples import percentile, spread
from app.bench.sockets import free_port, listen, listening, request_of
from app.settings import Settings
from streams.records import EngineConfig

STREAMS = 100
TOKENS_PER_S = 5000
MODEL = "bench"
CPU_US = {1: 20.0, 8: 10.0}
"""By tokens a step: what a token may cost, in microseconds of CPU time."""
ADDED_MS = 10.0
WARM_TOKENS = 200
CHAT = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "hi"}]}


class Form(NamedTuple):
    """How much is measured: tokens an answer (those of all streams pass at once), and rounds."""

    tokens: int
    rounds: int


QUICK = Form(tokens=400, rounds=3)
FULL = Form(tokens=2000, rounds=5)


class Round(NamedTuple):
    """One side, once. CPU in microseconds a token, of the processes by their names."""

    side: str
    step: int
    cpu_us: dict[str, float]
    p50_ms: float
    p99_ms: float
    tokens: int
    events: int

    @property
    def all_us(self) -> float:
        """CPU of all its processes."""
        return sum(self.cpu_us.values())


async def tokens(
    settings: Settings, form: Form, said: Said, progress: Callable[[float], None]
) -> Report:
    """Measure. `progress` hears of shares of the whole. Raises BenchFailed, BrokerUnavailable."""
    rounds: list[Round] = []
    async with ground(settings, said) as on:
        port = free_port()
        gateway = on.launch("gateway", "faststream", "run", "app.gateway:app", http_port=port)
        await on.register("bench-1", EngineConfig(model=MODEL, context_length=131_072))
        await listening(port, on.clock, gateway.check)
        await _round(on, "kvlane", 1, WARM_TOKENS, gateway, port)
        for number in range(form.rounds):
            for step in CPU_US:
                sides = ["bare", "kvlane"] if number % 2 == 0 else ["kvlane", "bare"]
                for side in sides:
                    rounds.append(await _round(on, side, step, form.tokens, gateway, port))
                    progress(1 / (form.rounds * len(CPU_US) * 2))
    return _report(rounds)


async def _round(on: Ground, side: str, step: int, count: int, gateway: Child, port: int) -> Round:
    steps_per_s = TOKENS_PER_S / STREAMS / step
    pace = [str(count), str(step), str(steps_per_s), str(STREAMS)]
    if side == "bare":
        port = free_port()
        measured = [on.launch(side, "app.bench.bare", str(port), *pace)]
        await listening(port, on.clock, measured[0].check)
    else:
        feeder = on.launch("feeder", "app.bench.feeder", *pace)
        await on.until(lambda: "ready" in feeder.output, feeder)
        measured = [gateway, feeder]
    try:
        before = {child.name: child.cpu_s for child in measured}
        request = request_of("/v1/chat/completions", CHAT)
        seconds = count / step / steps_per_s
        async with asyncio.timeout(60 + 2 * seconds):
            streams = await asyncio.gather(
                *(listen(port, request, on.clock) for _ in range(STREAMS))
            )
        after = {child.name: child.cpu_s for child in measured}
    finally:
        on.end(measured[-1])
    got = sum(stream.tokens for stream in streams)
    if got != STREAMS * count or not all(stream.whole for stream in streams):
        raise BenchFailed(f"{side}: {got} of {STREAMS * count} tokens arrived")
    late_ms = [1000 * late for stream in streams for late in stream.late_s]
    return Round(
        side,
        step,
        {name: (after[name] - before[name]) / got * 1e6 for name in before},
        percentile(late_ms, 0.5),
        percentile(late_ms, 0.99),
        got,
        sum(stream.events for stream in streams),
    )


def _report(rounds: list[Round]) -> Report:
    rows: list[dict[str, Any]] = []
    bars: list[Bar] = []
    for step, bar_us in CPU_US.items():
        sides = {
            side: [r for r in rounds if (r.side, r.step) == (side, step)]
            for side in ("bare", "kvlane")
        }
        for side, own in sides.items():
            parts = {name: median(r.cpu_us[name] for r in own) for name in own[0].cpu_us}
            rows.append(
                {
                    "side": side,
                    "tokens/step": step,
                    "CPU us/token": str(spread([r.all_us for r in own])),
                    "of it": ", ".join(f"{name} {us:.1f}" for name, us in parts.items()),
                    "p50 ms": str(spread([r.p50_ms for r in own])),
                    "p99 ms": str(spread([r.p99_ms for r in own])),
                    "tokens": own[0].tokens,
                    "events": own[0].events,
                    "rounds": len(own),
                }
            )
        cpu_us = median(r.all_us for r in sides["kvlane"])
        added_ms = median(r.p99_ms for r in sides["kvlane"]) - median(
            r.p99_ms for r in sides["bare"]
        )
        bars += [
            Bar(f"CPU at {step} a step", cpu_us, "us/token", f"<= {bar_us:g}", cpu_us <= bar_us),
            Bar(f"p99 added at {step} a step", added_ms, "ms", f"<= {ADDED_MS:g}",
                added_ms <= ADDED_MS),
        ]  # fmt: skip
    return Report("tokens", rows, bars)
