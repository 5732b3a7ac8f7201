"""The cost of looking at a fleet: `kvlane top` and a page of the console, beside 64 workers under
load.

    load (this process) ──► requests ──► router ──► ledger, assignments
                                                         ├──► gateway with the console ◄── page
                                                         └──► kvlane top, on a terminal of its own

The rounds take turns: the router alone, and with both observers. `page` asks for the data of four
views once a second, as a browser asks for those of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from statistics import median
from typing import Any, NamedTuple

import httpx

from kvlane.app.http.console.console_endpoint import console_files
from kvlane.app.local.processes import ManagedProcess, free_port, process_command
from kvlane.app.settings import Settings
from workbench.bench.bench_environment import BenchEnvironment, PrintLine, bench_environment
from workbench.bench.process_usage import resident_bytes
from workbench.bench.report import Report, at_most, figure, none_of
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
MAX_EXTRA_CPU, MAX_PAGE_KB, MAX_GROWTH_MB = 0.03, 200, 5
VIEWS = ("fleet", "requests?shown=open", "decisions", "queue")
ALONE, OBSERVED = "alone", "observed"


class ObserversScale(NamedTuple):
    """Amount of work: rounds of each kind, seconds of a round, and seconds that the page is open
    before its gateway's memory counts, and while it does."""

    rounds: int
    round_s: float
    open_s: float


QUICK = ObserversScale(1, 8.0, 10.0)
FULL = ObserversScale(3, 15.0, 60.0)


class PageUse(NamedTuple):
    """Answers of the console, and the resident bytes of its gateway at the begin and the end."""

    answers: int
    failed: int
    begin_bytes: int
    end_bytes: int


class ObserversFigures(NamedTuple):
    rounds: dict[str, list[RouterLatencyRound]]
    page: PageUse
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
        for _ in range(scale.rounds):
            rounds[ALONE].append(await self._play(scale.round_s))
            progress(1 / steps)
            async with self._observers() as page:
                await page.use(5.0)  # each starts, and reads the log up to now
                rounds[OBSERVED].append(await self._with(page, scale.round_s))
            progress(1 / steps)
        async with self._observers() as page:
            await self._with(page, scale.open_s)
            begin_bytes = resident_bytes(page.gateway)
            answers = page.answers
            await self._with(page, scale.open_s)
            used = PageUse(
                page.answers - answers, page.failed, begin_bytes, resident_bytes(page.gateway)
            )
        progress(1 / steps)
        print_line(f"{used.answers} answers of the console, {self._screen_bytes} bytes of top")
        return ObserversFigures(rounds, used, self._screen_bytes)

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
                yield ConsolePage(client, gateway)
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
    """A page that stays open: it asks for VIEWS once a second."""

    def __init__(self, client: httpx.AsyncClient, gateway: ManagedProcess) -> None:
        self._client = client
        self.gateway = gateway
        self.answers = 0
        self.failed = 0

    async def use(self, seconds: float) -> None:
        until = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until:
            for view in VIEWS:
                answer = await self._client.get(f"/console/api/{view}", timeout=30.0)
                self.answers += 1
                self.failed += not answer.is_success
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
    growth_mb = (figures.page.end_bytes - figures.page.begin_bytes) / 1e6
    thresholds = [
        at_most("CPU of the router beside observers, more", observed / alone - 1, "x",
            MAX_EXTRA_CPU),
        at_most("files of the console", page_kb, "kB", MAX_PAGE_KB),
        at_most("memory of its gateway, growth", growth_mb, "MB", MAX_GROWTH_MB),
        figure("memory of its gateway", figures.page.end_bytes / 1e6, "MB"),
        figure("output of top", figures.screen_bytes / 1000, "kB"),
        none_of("failed answers of the console", figures.page.failed, "answers"),
    ]  # fmt: skip
    return Report("observers", rows, thresholds)
