"""Latency, CPU time and capacity of the router: from a `requests` record to its assignment.

    load (this process) ──► requests ──► router ──► ledger, assignments ──► load: latency
                                   └───► echo   ──► assignments         ──► the same: the shortest
                                                                            possible path

Open loop: records are due at fixed times, independently of the answers, and latency counts from the
due time. The router and a bare aiokafka echo (`baseline_kafka.py`) take turns on the same broker,
each on topics of its own, with the same records from the same load generator (`router_load.py`). 64
workers exist as cards and heartbeats; assigned runs are reported as started and finished, so that
load comes and goes.

The capacity is measured with IN_FLIGHT and with MANY_IN_FLIGHT requests in flight, then
OVERLOAD_FACTOR times as many requests are sent as it is, in bursts, as they are sent while the
capacity is measured: one by one, the load generator and the broker take twice as much CPU time, and
on two cores the router gets less than one. For the same reason one router and two are compared with
a limited share of a core for each (`cpu_limit.py`), and with IN_FLIGHT requests in flight for each:
in turns, of which the best count, since other load on a machine only takes away from either.
The parts of the CPU time come from rounds of their own, in which the router is sampled
(`cpu_profile.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from kvlane.app.local.processes import ManagedProcess, process_command
from kvlane.app.runtime.process import open_log
from kvlane.app.settings import Settings
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.kafka.provision import create_topics
from kvlane.streams.records import Assignment
from workbench.bench.bench_environment import BenchEnvironment, PrintLine, bench_environment
from workbench.bench.cpu_limit import limit_cpu
from workbench.bench.cpu_profile import ProfiledProcess
from workbench.bench.report import Report, Threshold, at_least, at_most, figure, none_of
from workbench.bench.routing.router_load import (
    IN_FLIGHT,
    MANY_IN_FLIGHT,
    WORKERS,
    RouterLatencyRound,
    RouterLatencySide,
    SharedPrefixPrompts,
    play_beside,
    register_workers,
)
from workbench.bench.statistics import spread
from workbench.bench.streaming.baseline_kafka import BareProducer

WARM_UP_RATE, WARM_UP_S = 200, 20.0
"""The JIT compiler of the broker's JVM has done most of its work after 4000 records per side."""
SATURATED_REQUESTS = 10_000
OVERLOAD_FACTOR = 1.5
OVERLOAD_BURST_S = 0.02
P50_FACTOR, P99_FACTOR = 1.3, 1.6
CPU_LIMITS_MS = {100: 1.0, 500: 0.5}
"""Limits of the CPU time of a request beyond the echo's, by requests/s."""
P50_LIMITS_MS = {1000: 25.0}
IDLE_LIMIT = 4.0
CAPACITY_LIMIT, OVERLOAD_SHARE, TWO_ROUTERS_FACTOR = 1300, 0.95, 1.8
MANY_FACTOR = 3
"""Times as many requests with MANY_IN_FLIGHT: those in flight at the end do not count as
answered."""
ECHO, ROUTER, SECOND_ROUTER = "echo", "router", "router 2"
LIMITED_CPU = 0.4
"""The share of a core of each router while one and two are compared."""
LIMITED_WARM_UP, LIMITED_REQUESTS = 3000, 5000
"""Requests after a router has its limit and its lanes, then those of which the time is taken."""


class RouterLatencyScale(NamedTuple):
    """Amount of work: rates in requests/s, rounds, and seconds per round.

    `has_overload`: with rounds beyond the capacity, and with two routers.
    """

    rates: tuple[int, ...]
    rounds: int
    round_s: float
    has_overload: bool
    warm_up_s: float = WARM_UP_S
    saturated_requests: int = SATURATED_REQUESTS


QUICK = RouterLatencyScale((100, 500), 2, 6.0, False, 10.0, 4000)
FULL = RouterLatencyScale((100, 500, 1000), 3, 15.0, True)


class RouterLatencyFigures(NamedTuple):
    """All rounds, and the shares of the router's CPU time by rate. `limited`: those with a limited
    share of a core for each router, by the number of routers."""

    rounds: list[RouterLatencyRound]
    capacity: list[RouterLatencyRound]
    many: RouterLatencyRound
    overload: list[RouterLatencyRound]
    limited: dict[int, list[RouterLatencyRound]]
    idle_percent: dict[str, float]
    parts: dict[int, dict[str, float]]


async def bench_router_latency(
    settings: Settings,
    scale: RouterLatencyScale,
    print_line: PrintLine,
    progress: Callable[[float], None],
) -> Report:
    """Run it; `progress` gets shares of the whole. Raises BenchFailed, BrokerUnavailable."""
    async with bench_environment(settings, print_line) as on:
        echo_settings = on.settings.model_copy(
            update={"topic_prefix": f"{on.settings.topic_prefix}echo."}
        )
        echo_log = open_log(echo_settings, "bench")
        producers = [BareProducer(each, "load") for each in (echo_settings, on.settings)]
        await echo_log.start()
        tasks: list[asyncio.Task[Any]] = []
        try:
            await create_topics(echo_log, **echo_settings.topic_options())
            for producer in producers:
                await producer.start()
            bench = await _prepare(on, echo_log, echo_settings, producers, tasks)
            figures = await play_beside(tasks, bench.run(scale, print_line, progress))
            return latency_report(figures)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await on.stop_all()
            for producer in producers:
                await producer.close()
            await echo_log.close()


async def _prepare(
    on: BenchEnvironment,
    echo_log: KafkaLog,
    echo_settings: Settings,
    producers: list[BareProducer],
    tasks: list[asyncio.Task[Any]],
) -> RouterLatencyBench:
    """Both sides, ready; their background tasks are added to `tasks`."""
    workers = await register_workers(on, producers[1])
    prefix = echo_settings.topic_prefix
    echo = on.launch(ECHO, "workbench.bench.streaming.baseline_kafka", topic_prefix=prefix)
    samples = on.output_folder / "router.samples"
    command = ProfiledProcess.command(samples, *process_command("router"))
    router = on.launch(ROUTER, *command)
    sides = [
        RouterLatencySide(ECHO, echo_log, producers[0], echo),
        RouterLatencySide(ROUTER, on.log, producers[1], router),
    ]
    assigned: asyncio.Queue[Assignment] = asyncio.Queue(1_000_000)
    sides[1].assigned = assigned
    beside = (
        workers.send_heartbeats(),
        workers.finish_runs(assigned),
        *(side.read_assignments() for side in sides),
    )
    tasks += [asyncio.create_task(work) for work in beside]
    await on.wait_until(lambda: "ready" in echo.output, echo)
    await on.wait_ready(router)
    return RouterLatencyBench(on, sides, ProfiledProcess(router, samples, on.clock))


class RouterLatencyBench:
    def __init__(
        self, on: BenchEnvironment, sides: list[RouterLatencySide], profiled: ProfiledProcess
    ) -> None:
        self._on = on
        self._sides = sides
        self._router = sides[1]
        self._profiled = profiled
        self._prompts = SharedPrefixPrompts(on.settings.lanes)

    async def run(
        self, form: RouterLatencyScale, print_line: PrintLine, progress: Callable[[float], None]
    ) -> RouterLatencyFigures:
        """Play all rounds; `progress` gets shares of the whole."""
        steps = 5 + len(form.rates) * (2 * form.rounds + 1)
        if form.has_overload:
            steps += 1 + 2 * form.rounds
        for side in self._sides:
            warm = self._prompts.requests(int(WARM_UP_RATE * form.warm_up_s))
            warmed = await side.play_round(warm, WARM_UP_RATE)
            print_line(f"warm: {side.name} p50 {warmed.p50_ms:.1f} ms, {warmed.lost} lost")
            await side.measure_idle()
            progress(1 / steps)
        rounds: list[RouterLatencyRound] = []
        parts: dict[int, dict[str, float]] = {}
        for rate in form.rates:
            for number in range(form.rounds):
                # In alternating order, so that other load on the machine affects both sides.
                for side in self._sides if number % 2 == 0 else self._sides[::-1]:
                    rounds.append(await self._play(side, rate, form.round_s))
                    progress(1 / steps)
            self._profiled.start()
            await self._play(self._router, rate, form.round_s)
            parts[rate] = await self._profiled.end()
            progress(1 / steps)
        idle_percent = {side.name: 100 * side.idle_share for side in self._sides}
        capacity = []
        for side in self._sides:
            requests = self._prompts.requests(form.saturated_requests)
            capacity.append(await side.play_saturated(requests))
            progress(1 / steps)
        many = await self._play_saturated(MANY_FACTOR * form.saturated_requests, MANY_IN_FLIGHT)
        progress(1 / steps)
        overload: list[RouterLatencyRound] = []
        limited: dict[int, list[RouterLatencyRound]] = {}
        if form.has_overload:
            offered = OVERLOAD_FACTOR * capacity[-1].answered_per_s
            overload.append(await self._play(self._router, offered, form.round_s, OVERLOAD_BURST_S))
            progress(1 / steps)
            for _ in range(form.rounds):
                limited.setdefault(1, []).append(await self._play_limited())
                progress(1 / steps)
                second = await self._add_router()
                limited.setdefault(2, []).append(await self._play_limited())
                progress(1 / steps)
                self._router.processes.remove(second)
                # In a thread: the heartbeats of the workers go on.
                await asyncio.to_thread(self._on.stop_process, second)
        return RouterLatencyFigures(rounds, capacity, many, overload, limited, idle_percent, parts)

    async def _play(
        self, side: RouterLatencySide, rate: float, seconds: float, burst_s: float = 0.0
    ) -> RouterLatencyRound:
        return await side.play_round(self._prompts.requests(int(rate * seconds)), rate, burst_s)

    async def _add_router(self) -> ManagedProcess:
        """Start a second router, which takes half of the lanes over."""
        second = self._on.launch(SECOND_ROUTER, *process_command("router"))
        await self._on.wait_ready(second)
        self._router.processes.append(second)
        return second

    async def _play_limited(self) -> RouterLatencyRound:
        """The capacity of the routers with LIMITED_CPU for each."""
        routers = self._router.processes
        limits = [
            asyncio.create_task(limit_cpu(router, LIMITED_CPU, self._on.clock))
            for router in routers
        ]
        try:
            await self._play_saturated(LIMITED_WARM_UP, IN_FLIGHT * len(routers))
            played = await self._play_saturated(
                LIMITED_REQUESTS * len(routers), IN_FLIGHT * len(routers)
            )
            for limit in limits:
                if limit.done():  # it failed: the figure would be that of a router without a limit
                    limit.result()
            return played
        finally:
            for limit in limits:
                limit.cancel()
            await asyncio.gather(*limits, return_exceptions=True)

    async def _play_saturated(self, count: int, in_flight: int) -> RouterLatencyRound:
        return await self._router.play_saturated(self._prompts.requests(count), in_flight)


def latency_report(figures: RouterLatencyFigures) -> Report:
    """A row for each side and rate, the thresholds, then the parts of the CPU time."""
    rows: list[dict[str, Any]] = []
    thresholds: list[Threshold] = []
    for rate in dict.fromkeys(int(each.rate) for each in figures.rounds):
        sides = {
            side: [r for r in figures.rounds if (r.side, r.rate) == (side, rate)]
            for side in (ECHO, ROUTER)
        }
        rows += [_row(f"{rate}/s", own) for own in sides.values()]
        thresholds += _rate_thresholds(rate, sides)
    echo, router = figures.capacity
    rows += [_row("saturated", [echo]), _row("saturated", [router])]
    rows.append(_row(f"{MANY_IN_FLIGHT} in flight", [figures.many]))
    thresholds += [
        at_most(f"idle, {WORKERS} workers", figures.idle_percent[ROUTER], "% of a core",
            IDLE_LIMIT),
        at_least("one router carries", router.answered_per_s, "requests/s", CAPACITY_LIMIT),
        at_least(f"one router carries, {MANY_IN_FLIGHT} in flight", figures.many.answered_per_s,
            "requests/s", CAPACITY_LIMIT),
    ]  # fmt: skip
    for over in figures.overload:
        rows.append(_row(f"{OVERLOAD_FACTOR:g} x capacity", [over]))
        share = over.answered_per_s / router.answered_per_s
        name = f"answered at {OVERLOAD_FACTOR:g} x capacity, to the capacity"
        thresholds.append(at_least(name, share, "x", OVERLOAD_SHARE))
    if figures.limited:
        rows += [
            _row(f"{LIMITED_CPU:g} of a core: {name}", figures.limited[count])
            for count, name in ((1, "one"), (2, "two"))
        ]
        one, two = (max(r.answered_per_s for r in figures.limited[count]) for count in (1, 2))
        one_us, two_us = (min(r.cpu_us for r in figures.limited[count]) for count in (1, 2))
        thresholds += [
            at_least("two routers carry, to one", two / one, "x", TWO_ROUTERS_FACTOR),
            figure("CPU of a request by two routers, to one", two_us / one_us, "x"),
        ]
    for rate, parts in figures.parts.items():
        cpu_us = median(r.cpu_us for r in figures.rounds if (r.side, r.rate) == (ROUTER, rate))
        thresholds += [
            figure(f"CPU at {rate}/s: {part}", round(share * cpu_us), "us/request")
            for part, share in parts.items()
        ]
    return Report("router-latency", rows, thresholds)


def _rate_thresholds(rate: int, sides: dict[str, list[RouterLatencyRound]]) -> list[Threshold]:
    def middle(side: str, of: Callable[[RouterLatencyRound], float]) -> float:
        return median(map(of, sides[side]))

    thresholds = []
    if rate in CPU_LIMITS_MS:
        extra_ms = (middle(ROUTER, lambda r: r.cpu_us) - middle(ECHO, lambda r: r.cpu_us)) / 1000
        thresholds.append(
            at_most(f"CPU beyond echo at {rate}/s", extra_ms, "ms/request", CPU_LIMITS_MS[rate])
        )
    if rate == min(CPU_LIMITS_MS):
        p50, p99 = (
            middle(ROUTER, of) / middle(ECHO, of) for of in (lambda r: r.p50_ms, lambda r: r.p99_ms)
        )
        thresholds += [
            at_most(f"p50 to echo at {rate}/s", p50, "x", P50_FACTOR),
            at_most(f"p99 to echo at {rate}/s", p99, "x", P99_FACTOR),
        ]
    if rate in P50_LIMITS_MS:
        p50_ms = middle(ROUTER, lambda r: r.p50_ms)
        thresholds.append(at_most(f"p50 at {rate}/s", p50_ms, "ms", P50_LIMITS_MS[rate]))
    lost = sum(r.lost for r in sides[ROUTER])
    thresholds.append(none_of(f"lost at {rate}/s", lost, "requests"))
    return thresholds


def _row(load: str, own: list[RouterLatencyRound]) -> dict[str, Any]:
    return {
        "load": load,
        "side": own[0].side,
        "p50 ms": str(spread([r.p50_ms for r in own])),
        "p99 ms": str(spread([r.p99_ms for r in own])),
        "CPU us/req": str(spread([r.cpu_us for r in own])),
        "less idle": median(r.beyond_idle_us for r in own),
        "client": median(r.client_us for r in own),
        "sent/s": median(r.sent_per_s for r in own),
        "answered/s": median(r.answered_per_s for r in own),
        "unassigned": sum(r.lost for r in own),
    }
