"""The cost of looking at a fleet: `kvlane top` and a page of the console, beside 64 workers under
load.

    load (this process) ──► requests ──► router ──► ledger, assignments
                                                         ├──► gateway with the console ◄── page
                                                         └──► kvlane top, on a terminal of its own

The rounds take turns: the router alone, and with both observers. `page` asks for the data of four
views once a second, as a browser asks for those of one. Then the memory of both is measured, once
the parts that are kept by number are full (`FILL_S`; the quick form does not wait for that).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from statistics import median
from typing import Any, NamedTuple

import httpx

from kvlane.app.http.console.console_endpoint import console_files
from kvlane.app.local.processes import free_port, process_command
from kvlane.app.settings import Settings
from workbench.bench.bench_environment import BenchEnvironment, PrintLine, bench_environment
from workbench.bench.process_usage import ChildProcess, cpu_time_s, resident_bytes
from workbench.bench.report import Report, Threshold, at_most, figure, none_of
from workbench.bench.routing.router_latency import WARM_UP_RATE
from workbench.bench.routing.router_load import (
    RouterLatencyRound,
    RouterLatencySide,
    SharedPrefixPrompts,
    play_beside,
    register_workers,
)
from workbench.bench.streaming.baseline_kafka import BareProducer

RATE = 500
MAX_EXTRA_CPU, MAX_PAGE_KB, MAX_GROWTH_MB = 0.03, 200, 3
VIEWS = ("fleet", "requests?shown=open", "decisions", "queue")
ALONE, OBSERVED = "alone", "observed"
FILL_S = 150.0
"""Time in which the bounds of `request_facts.py` and `drift.py` in number are reached at RATE."""


class ObserversScale(NamedTuple):
    """Amount of work: rounds of each kind, seconds of a round, and seconds that the observers run
    before their memory counts, and while it does."""

    rounds: int
    round_s: float
    fill_s: float
    open_s: float


QUICK = ObserversScale(1, 8.0, 20.0, 12.0)
FULL = ObserversScale(3, 15.0, FILL_S, 60.0)


class MemoryUse(NamedTuple):
    """Resident bytes of a process: the medians of the first and the last sixth of some time."""

    begin_bytes: float
    end_bytes: float


class ObserversFigures(NamedTuple):
    """`cpu_shares`: of a core, by observer, in each round beside both. `memory`: by observer, in
    `scale.open_s`."""

    rounds: dict[str, list[RouterLatencyRound]]
    cpu_shares: dict[str, list[float]]
    memory: dict[str, MemoryUse]
    scale: ObserversScale
    failed_answers: int
    screen_bytes: int


async def bench_observers(
    settings: Settings,
    scale: ObserversScale,
    print_line: PrintLine,
    progress: Callable[[float], None],
) -> Report:
    """Run it; `progress` gets shares of the whole. Raises BenchFailed, BrokerUnavailable."""
    async with bench_environment(settings, print_line) as on:
        producer = BareProducer(on.settings, "load")
        tasks: list[asyncio.Task[Any]] = []
        try:
            await producer.start()
            bench = await _prepare(on, producer, tasks)
            figures = await play_beside(tasks, bench.run(scale, print_line, progress))
            return observers_report(figures)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await on.stop_all()
            await producer.close()


async def _prepare(
    on: BenchEnvironment, producer: BareProducer, tasks: list[asyncio.Task[Any]]
) -> ObserversBench:
    workers = await register_workers(on, producer)
    router = on.launch("router", *process_command("router"))
    side = RouterLatencySide("router", on.log, producer, router)
    side.assigned = asyncio.Queue(1_000_000)
    beside = (
        workers.send_heartbeats(), workers.finish_runs(side.assigned), side.read_assignments(),
    )  # fmt: skip
    tasks += [asyncio.create_task(work) for work in beside]
    await on.wait_ready(router)
    return ObserversBench(on, side)


class ObserversBench:
    def __init__(self, on: BenchEnvironment, side: RouterLatencySide) -> None:
        self._on = on
        self._side = side
        self._prompts = SharedPrefixPrompts(on.settings.lanes)
        self._screen_bytes = 0

    async def run(
        self, scale: ObserversScale, print_line: PrintLine, progress: Callable[[float], None]
    ) -> ObserversFigures:
        """Play all rounds; `progress` gets shares of the whole."""
        steps = 2 * scale.rounds + 2
        await self._play(scale.open_s, WARM_UP_RATE)
        progress(1 / steps)
        rounds: dict[str, list[RouterLatencyRound]] = {ALONE: [], OBSERVED: []}
        cpu_shares: dict[str, list[float]] = {}
        for _ in range(scale.rounds):
            rounds[ALONE].append(await self._play(scale.round_s))
            progress(1 / steps)
            async with self._observers() as page:
                await page.use(5.0)  # each starts, and reads the log up to now
                before, began_s = page.cpu_s(), time.monotonic()
                rounds[OBSERVED].append(await self._with(page, scale.round_s))
                for name, cpu_s in page.cpu_s().items():
                    share = (cpu_s - before[name]) / (time.monotonic() - began_s)
                    cpu_shares.setdefault(name, []).append(share)
            progress(1 / steps)
        async with self._observers() as page:
            await self._with(page, scale.fill_s)
            page.resident.clear()
            await self._with(page, scale.open_s)
        progress(1 / steps)
        print_line(f"{page.answers} answers of the console, {self._screen_bytes} bytes of top")
        return ObserversFigures(
            rounds, cpu_shares, page.memory(), scale, page.failed, self._screen_bytes
        )

    async def _play(self, seconds: float, rate: float = RATE) -> RouterLatencyRound:
        return await self._side.play_round(self._prompts.requests(int(rate * seconds)), rate)

    async def _with(self, page: ConsolePage, seconds: float) -> RouterLatencyRound:
        using = asyncio.create_task(page.use(seconds))
        try:
            return await self._play(seconds)
        finally:
            await using

    @asynccontextmanager
    async def _observers(self) -> AsyncIterator[ConsolePage]:
        """A gateway with the console, and `kvlane top`, both of which read the whole log."""
        port = free_port()
        gateway = self._on.launch(
            "gateway", *process_command("gateway"), http_port=port, console=True
        )
        await self._on.wait_ready(gateway)
        screen, terminal = pty.openpty()
        top = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvlane.app", "top",
            stdin=terminal, stdout=terminal, stderr=terminal,
            env=os.environ | {
                "TERM": "xterm-256color",
                "KVLANE_BOOTSTRAP_SERVERS": self._on.settings.bootstrap_servers,
                "KVLANE_TOPIC_PREFIX": self._on.settings.topic_prefix,
                "KVLANE_LANES": str(self._on.settings.lanes),
            },
        )  # fmt: skip
        os.close(terminal)
        reading = asyncio.create_task(asyncio.to_thread(self._read_screen, screen))
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                yield ConsolePage(client, {"gateway": gateway, "top": top})
                if top.returncode is not None:
                    raise RuntimeError(f"kvlane top ended with {top.returncode}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                top.terminate()
            await top.wait()
            await reading
            await asyncio.to_thread(self._on.stop_process, gateway)

    def _read_screen(self, screen: int) -> None:
        with contextlib.suppress(OSError), open(screen, "rb", buffering=0) as stream:
            while data := stream.read(65_536):
                self._screen_bytes += len(data)


class ConsolePage:
    """A page that stays open: it asks for VIEWS once a second. `resident`: the memory of all
    observers, by name, each time."""

    def __init__(self, client: httpx.AsyncClient, observers: dict[str, ChildProcess]) -> None:
        self._client = client
        self._observers = observers
        self.answers = 0
        self.failed = 0
        self.resident: list[dict[str, int]] = []

    def cpu_s(self) -> dict[str, float]:
        return {name: cpu_time_s(each) for name, each in self._observers.items()}

    def memory(self) -> dict[str, MemoryUse]:
        part = max(1, len(self.resident) // 6)
        first, last = self.resident[:part], self.resident[-part:]
        return {
            name: MemoryUse(median(r[name] for r in first), median(r[name] for r in last))
            for name in self._observers
        }

    async def use(self, seconds: float) -> None:
        until = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until:
            for view in VIEWS:
                answer = await self._client.get(f"/console/api/{view}", timeout=30.0)
                self.answers += 1
                self.failed += not answer.is_success
            self.resident.append(
                {name: resident_bytes(each) for name, each in self._observers.items()}
            )
            await asyncio.sleep(1.0)


def observers_report(figures: ObserversFigures) -> Report:
    """A row for each kind of round, then the thresholds."""
    rows = [
        {
            "rounds": name,
            "requests/s": median(r.sent_per_s for r in rounds),
            "CPU us/req": median(r.cpu_us for r in rounds),
            "p50 ms": median(r.p50_ms for r in rounds),
            "p99 ms": median(r.p99_ms for r in rounds),
            "unassigned": sum(r.lost for r in rounds),
        }
        for name, rounds in figures.rounds.items()
    ]
    alone, observed = (median(r.cpu_us for r in rounds) for rounds in figures.rounds.values())
    page_kb = sum(len(content) for content, _ in console_files().values()) / 1000
    thresholds = [
        at_most("CPU of the router beside observers, more", observed / alone - 1, "x",
            MAX_EXTRA_CPU),
        at_most("files of the console", page_kb, "kB", MAX_PAGE_KB),
        *(growth_of(name, use, figures.scale) for name, use in figures.memory.items()),
        *(
            figure(f"memory of {name}", use.end_bytes / 1e6, "MB")
            for name, use in figures.memory.items()
        ),
        *(
            figure(f"CPU of {name}", median(shares), "of a core")
            for name, shares in figures.cpu_shares.items()
        ),
        figure("output of top", figures.screen_bytes / 1000, "kB"),
        none_of("failed answers of the console", figures.failed_answers, "answers"),
    ]  # fmt: skip
    return Report("observers", rows, thresholds)


def growth_of(name: str, use: MemoryUse, scale: ObserversScale) -> Threshold:
    """With a limit only after the time in which what is kept by number is full."""
    what = f"memory of {name}, growth in {scale.open_s:g} s"
    growth_mb = (use.end_bytes - use.begin_bytes) / 1e6
    if scale.fill_s < FILL_S:
        return figure(f"{what} while it fills", growth_mb, "MB")
    return at_most(what, growth_mb, "MB", MAX_GROWTH_MB)
