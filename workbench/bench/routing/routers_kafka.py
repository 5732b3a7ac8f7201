"""State agreement and concurrent decisions of several real routers on Kafka, and of one router.

    load (this process) ──► requests ──► one router, then several ──► workers (simulated engines)
        ▲   reads ledger and kv-events; scrapes /metrics of every router

Prompts share prefixes. They arrive singly in one phase, and in the next in bursts of one request
per lane, so that every router gets some of each burst. Each phase has prefixes of its own, so that
none finds caches filled by another. A phase ends when all requests have ended and all routers have
read that.

The load and cache state of routers is compared with the log (`router_views.py`); concurrent
decisions are found in the ledger alone (`collisions.py`). Times to the first token come from
broker timestamps: from the Request to the PrefillDone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import aiohttp

from kvlane.app.local.deployment import DeploymentPart
from kvlane.app.local.processes import free_port
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.app.routing.state.ledger import LedgerState
from kvlane.app.settings import Settings
from kvlane.streams.ports import Partition
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Assigned, LogRecord, PrefillDone
from kvlane.streams.request import Request
from kvlane.streams.topics import KV_EVENTS, LEDGER, REQUESTS, lane_of
from kvlane.streams.views.follower import Follower
from workbench.bench.bench_environment import (
    BenchEnvironment,
    BenchFailed,
    PrintLine,
    bench_environment,
)
from workbench.bench.bursty_workload import (
    BURST_ARRIVALS,
    SINGLE_ARRIVALS,
    BurstyWorkload,
    TimedRequest,
)
from workbench.bench.collisions import ConcurrentDecisions, find_concurrent
from workbench.bench.process_group import ProcessGroup
from workbench.bench.report import Report, figure, none_of
from workbench.bench.routing.router_views import (
    ReferenceState,
    RouterView,
    StateDifference,
    differences,
    disagreements,
    parse_view,
)
from workbench.bench.statistics import percentile

ENGINE_SETTINGS = {"engine_speedup": 0.25}
"""Slow enough for all processes to run on two cores: a token every 16 ms, and a tenth of a second
for an uncached prompt."""
VIEW_INTERVAL_S = 0.5
"""Interval between scrapes of all routers."""
VIEW_TIMEOUT_S = 5.0
FOLLOW_TIMEOUT_S, PHASE_TIMEOUT_S, AGREEMENT_TIMEOUT_S = 60.0, 90.0, 15.0
"""Timeouts: of this process to start reading, of the requests of a phase, and of the routers to
read their ends."""
MAX_BURSTS = 40
"""Bursts within which every router must have made a decision."""
SHOWN_DIFFERENCES = 5


class RouterScale(NamedTuple):
    """Amount of work. `rate`: requests/s; `phase_s`: duration of each arrival pattern.

    `bursts`: the least number of warm-up bursts.
    """

    routers: int = 3
    workers: int = 6
    rate: float = 16.0
    phase_s: float = 30.0
    lanes: int = 24
    bursts: int = 4


QUICK = RouterScale()
FULL = RouterScale(phase_s=90.0)


class RouterPhase(NamedTuple):
    """Results of one arrival pattern and number of routers. Times to the first token in ms.

    `views`: number of router states that were compared with the log; `log_differences`: their
    differences. `final_views`: the states after the last request. `unfinished`: requests without an
    end.
    """

    routers: int
    arrivals: str
    ttft_ms: list[float]
    concurrent: ConcurrentDecisions
    deciders: frozenset[str]
    views: int
    log_differences: list[StateDifference]
    final_views: list[RouterView]
    unfinished: int

    @property
    def disagreements(self) -> list[StateDifference]:
        """Differences between the routers at the end."""
        return list(disagreements(self.final_views))


async def bench_kafka_routers(
    settings: Settings, scale: RouterScale, print_line: PrintLine, progress: Callable[[float], None]
) -> Report:
    """Run it; `progress` gets shares of the whole. Raises BenchFailed, BrokerUnavailable."""
    settings = settings.model_copy(update={"lanes": scale.lanes})
    ports = {f"router-{n}": free_port() for n in range(1, scale.routers + 1)}
    routers = [DeploymentPart(n, "router", {"status_port": port}) for n, port in ports.items()]
    workers = [DeploymentPart(f"worker-{n}", "worker") for n in range(1, scale.workers + 1)]
    counts = sorted({1, scale.routers})
    phases: list[RouterPhase] = []
    async with bench_environment(settings, print_line) as on:
        processes = on.deployment([*routers, *workers], ENGINE_SETTINGS)
        await processes.start(*(worker.name for worker in workers))
        async with _bench(on, processes, scale) as bench:
            for count in counts:
                names = list(ports)[:count]
                processes.launch(*(name for name in names if name not in processes.processes))
                await processes.wait_ready(*processes.processes)
                bench.metrics_urls = {
                    name: f"http://127.0.0.1:{ports[name]}/metrics" for name in names
                }
                await bench.warm_up()
                for arrivals in (SINGLE_ARRIVALS, BURST_ARRIVALS):
                    phases.append(await bench.run_phase(arrivals))
                    for each in (*phases[-1].log_differences, *phases[-1].disagreements)[
                        :SHOWN_DIFFERENCES
                    ]:
                        print_line(
                            f"{each.router} has {each.actual} for {each.key}, not {each.expected}"
                        )
                    progress(1 / (2 * len(counts)))
    return routers_report(phases)


class RouterBench:
    """Load generator that follows the log and scrapes the state of the routers."""

    def __init__(
        self,
        on: BenchEnvironment,
        processes: ProcessGroup,
        form: RouterScale,
        http: aiohttp.ClientSession,
    ) -> None:
        self._clock = on.clock
        self._processes = processes
        self._form = form
        self._http = http
        self._requests = BurstyWorkload(on.clock, on.settings.model, form.lanes, form.rate)
        self._publisher = RecordPublisher(on.log, on.clock)
        self._secret = on.settings.block_key_secret()
        self._window_ms = int(on.settings.dedup_window_s * 1000)
        self._load = LedgerState(self._window_ms)
        self._records: dict[Partition, list[LogRecord]] = {}
        self._ledger: list[LogRecord] = []
        """Ledger records of the current phase."""
        self._references: dict[str, ReferenceState] = {}
        self.metrics_urls: dict[str, str] = {}
        """Metrics URLs of the routers, by name."""
        self.followers = [
            Follower(on.log, view, [topic], on.clock, on_applied=self._applied)
            for view, topic in ((self._load, LEDGER), (KvIndexView(self._secret), KV_EVENTS))
        ]

    def _applied(self, source: Partition, log_records: Sequence[LogRecord]) -> None:
        self._records.setdefault(source, []).extend(log_records)
        if source.topic == LEDGER:
            self._ledger += log_records

    async def warm_up(self) -> None:
        """Send bursts until every router has made a decision. Raises BenchFailed otherwise."""
        deciders: frozenset[str] = frozenset()
        for number in range(MAX_BURSTS):
            if number >= self._form.bursts and deciders >= self.metrics_urls.keys():
                return
            self._ledger = []
            await self._publish_all(self._requests.one_burst())
            deciders = self._deciders()
        missing = ", ".join(sorted(self.metrics_urls.keys() - deciders))
        raise BenchFailed(f"{missing}: no decision in {MAX_BURSTS} bursts on all lanes")

    async def run_phase(self, arrivals: str) -> RouterPhase:
        """Send requests for the duration of a phase; their results."""
        requests = self._requests.requests_for(arrivals, self._form.phase_s)
        self._ledger = []
        views: list[RouterView] = []
        looking = asyncio.create_task(self._sample_views(views))
        try:
            began_ms, left = await self._publish_all(requests)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
        at_end = await self._agreed()
        wrong: list[StateDifference] = []
        for name in self.metrics_urls:
            own = [view for view in (*views, *at_end) if view.router == name]
            wrong += differences(own, self._reference(name))
        first_ms: dict[str, int] = {}
        for log_record in self._ledger:
            if isinstance(log_record.record, PrefillDone) and log_record.record.id in began_ms:
                first_ms.setdefault(log_record.record.id, log_record.timestamp_ms)
        return RouterPhase(
            routers=len(self.metrics_urls),
            arrivals=arrivals,
            ttft_ms=[float(at - began_ms[name]) for name, at in first_ms.items()],
            concurrent=find_concurrent(self._ledger),
            deciders=self._deciders(),
            views=len(views) + len(at_end),
            log_differences=wrong,
            final_views=at_end,
            unfinished=len(left),
        )

    def _deciders(self) -> frozenset[str]:
        decided = (r.record for r in self._ledger)
        return frozenset(each.router for each in decided if isinstance(each, Assigned))

    def _reference(self, router: str) -> ReferenceState:
        if router not in self._references:
            views = LedgerState(self._window_ms), KvIndexView(self._secret)
            self._references[router] = ReferenceState(self._records, *views)
        return self._references[router]

    # --- requests --------------------------------------------------------------------------------

    async def _publish_all(
        self, requests: Sequence[TimedRequest]
    ) -> tuple[dict[str, int], set[str]]:
        """Send requests when due, wait for their ends: append times by id, ids without an end."""
        began = self._clock.now()
        sends: list[asyncio.Task[tuple[str, int]]] = []
        for after_s, request in requests:
            if (early_s := began + after_s - self._clock.now()) > 0:
                await self._clock.sleep(early_s)
            sends.append(asyncio.create_task(self._send(request)))
        began_ms = dict(await asyncio.gather(*sends))
        left, until = set(began_ms), self._clock.now() + PHASE_TIMEOUT_S
        while left and self._clock.now() < until:
            await self._clock.sleep(0.05)
            self._check()
            left -= {name for name in left if self._is_over(name)}
        return began_ms, left

    async def _send(self, request: Request) -> tuple[str, int]:
        appended = await self._publisher.publish(REQUESTS, request.id, request)
        return request.id, appended.timestamp_ms

    def _is_over(self, request_id: str) -> bool:
        return request_id in self._load.lane(lane_of(request_id, self._form.lanes)).finished

    def _check(self) -> None:
        """Raises BenchFailed when a process has ended."""
        self._processes.check()

    # --- router state ----------------------------------------------------------------------------

    async def _sample_views(self, views: list[RouterView]) -> None:
        """Collect the state of the routers, until cancelled."""
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                views += await self._look()
            await self._clock.sleep(VIEW_INTERVAL_S)

    async def _look(self) -> list[RouterView]:
        pages = await asyncio.gather(*(self._page(url) for url in self.metrics_urls.values()))
        return [parse_view(name, page) for name, page in zip(self.metrics_urls, pages, strict=True)]

    async def _page(self, url: str) -> str:
        async with self._http.get(url) as answer:
            return await answer.text()

    async def _agreed(self) -> list[RouterView]:
        """States of the routers when all are idle at the same positions, or after a timeout.

        Heartbeats continue, so that they are rarely at the same position for longer than a moment.
        """
        until = self._clock.now() + AGREEMENT_TIMEOUT_S
        while True:
            views = await self._look()
            have_read = all(view.positions == views[0].positions for view in views)
            if (have_read and all(view.is_idle for view in views)) or self._clock.now() > until:
                break
            await self._clock.sleep(0.1)
        async with asyncio.timeout(AGREEMENT_TIMEOUT_S):
            for follower in self.followers:
                for source in follower.sources:
                    read_to = max(view.positions[source] for view in views)
                    await follower.wait_for(source, read_to)
        return views


@asynccontextmanager
async def _bench(
    on: BenchEnvironment, processes: ProcessGroup, form: RouterScale
) -> AsyncIterator[RouterBench]:
    """A bench that follows the log while the context is open."""
    timeout = aiohttp.ClientTimeout(total=VIEW_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        bench = RouterBench(on, processes, form, http)
        following = [asyncio.create_task(each.run()) for each in bench.followers]
        try:
            for each in bench.followers:
                async with asyncio.timeout(FOLLOW_TIMEOUT_S):
                    await each.wait_caught_up()
            yield bench
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)


def routers_report(phases: Sequence[RouterPhase]) -> Report:
    """A row for each phase, and the thresholds."""
    wrong = sum(len(phase.log_differences) for phase in phases)
    unlike = sum(len(phase.disagreements) for phase in phases)
    busy = sum(not view.is_idle for phase in phases for view in phase.final_views)
    left = sum(phase.unfinished for phase in phases)
    idle = sum(phase.routers - len(phase.deciders) for phase in phases)
    thresholds = [
        none_of("differences between views and log, at equal positions", wrong),
        none_of("differences between views, at the end", unlike),
        none_of("views with open requests, at the end", busy),
        none_of("requests without an end", left),
        none_of("routers that decided nothing", idle),
    ]
    for arrivals in (SINGLE_ARRIVALS, BURST_ARRIVALS):
        means = [_mean(phase.ttft_ms) for phase in phases if phase.arrivals == arrivals]
        name = f"1 -> {phases[-1].routers} routers, {arrivals}: mean TTFT"
        thresholds.append(figure(name, means[-1] / means[0], "x"))
    return Report("routers kafka", [_row(phase) for phase in phases], thresholds)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _row(phase: RouterPhase) -> dict[str, object]:
    met, unread_ms = phase.concurrent, phase.concurrent.unread_ms
    return {
        "routers": phase.routers,
        "arrivals": phase.arrivals,
        "requests": len(phase.ttft_ms),
        "ttft_ms": {
            "mean": _mean(phase.ttft_ms),
            "p50": percentile(phase.ttft_ms, 0.5),
            "p99": percentile(phase.ttft_ms, 0.99),
        },
        "met %": 100 * met.concurrent / max(met.decisions, 1),
        "collided %": 100 * met.collided / max(met.decisions, 1),
        "unread_ms": {"p50": percentile(unread_ms, 0.5), "p99": percentile(unread_ms, 0.99)},
        "views": phase.views,
        "unlike the log": len(phase.log_differences),
        "unlike each other": len(phase.disagreements),
    }
