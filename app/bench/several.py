"""Several real routers on a real Kafka beside one: do they agree, and how often do they collide?

    load (this process) ──► requests ──► one router, then several ──► workers (simulated engines)
        ▲   reads ledger and kv-events; asks every router for /metrics now and then

Prompts share their beginnings. They come one by one, and then as many at once as there are lanes,
so that every router has some of each burst; each phase has beginnings of its own, so that none
finds caches filled by another. Between phases it is quiet: everything is over and read by all.

What routers say of load and caches is held against the log (`views.py`); which decisions met is
told from the ledger alone (`app/audit/collisions.py`). Times to the first token are the broker's:
from the Request to the PrefillDone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import aiohttp

from app.audit.collisions import Met, meetings
from app.bench.bursts import IN_BURSTS, ONE_BY_ONE, Asked, Requests
from app.bench.ground import BenchFailed, Ground, Said, ground
from app.bench.herd import Herd, Part
from app.bench.report import Bar, Report
from app.bench.samples import percentile
from app.bench.sockets import free_port
from app.bench.views import Difference, Truth, View, differences, disagreements, view_of
from app.routing.index import Index
from app.routing.load import Load
from app.settings import Settings
from streams.follow import Follower
from streams.outbox import Outbox
from streams.ports import Partition
from streams.records import Assigned, Fact, PrefillDone, Request
from streams.topics import KV_EVENTS, LEDGER, REQUESTS, lane_of

PACE = {"engine_speedup": 0.25}
"""Slow enough for two cores to play all of it: a token every 16 ms, and a tenth of a second for a
prompt that no cache has."""
LOOK_S = 0.5
"""How often all routers are asked for their views."""
LOOK_TIMEOUT_S = 5.0
START_S, OVER_S, AGREE_S = 60.0, 90.0, 15.0
"""What this process gets to begin to read, the requests of a phase to be over, and then the routers
to have read that."""
MOST_BURSTS = 40
"""In which every router must have decided something."""
SHOWN = 5


class Form(NamedTuple):
    """How much is done. `rate`: requests a second; `phase_s`: of each way in which they come.

    `bursts`: at least so many come before it counts.
    """

    routers: int = 3
    workers: int = 6
    rate: float = 16.0
    phase_s: float = 30.0
    lanes: int = 24
    bursts: int = 4


QUICK = Form()
FULL = Form(phase_s=90.0)


class Phase(NamedTuple):
    """What one way of coming led to with so many routers. Times to the first token in ms.

    `views`: how many were compared with the log, `wrong`: what was different. `at_end`: what the
    routers said when it was over. `left`: requests without an end.
    """

    routers: int
    arrivals: str
    ttft_ms: list[float]
    met: Met
    deciders: frozenset[str]
    views: int
    wrong: list[Difference]
    at_end: list[View]
    left: int

    @property
    def disagreements(self) -> list[Difference]:
        """Of the routers from each other when it was over."""
        return list(disagreements(self.at_end))


async def several(
    settings: Settings, form: Form, said: Said, progress: Callable[[float], None]
) -> Report:
    """Measure. `progress` hears of shares of the whole. Raises BenchFailed, BrokerUnavailable."""
    settings = settings.model_copy(update={"lanes": form.lanes})
    ports = {f"router-{n}": free_port() for n in range(1, form.routers + 1)}
    routers = [Part(name, "router", {"router_port": port}) for name, port in ports.items()]
    workers = [Part(f"worker-{n}", "worker") for n in range(1, form.workers + 1)]
    counts = sorted({1, form.routers})
    phases: list[Phase] = []
    async with ground(settings, said) as on:
        herd = Herd(on, [*routers, *workers], PACE)
        herd.start(*(worker.name for worker in workers))
        async with _bench(on, herd, form) as bench:
            for count in counts:
                names = list(ports)[:count]
                herd.start(*(name for name in names if name not in herd.children))
                await herd.ready(*herd.children)
                bench.pages = {name: f"http://127.0.0.1:{ports[name]}/metrics" for name in names}
                await bench.warm()
                for arrivals in (ONE_BY_ONE, IN_BURSTS):
                    phases.append(await bench.play(arrivals))
                    for each in (*phases[-1].wrong, *phases[-1].disagreements)[:SHOWN]:
                        said(f"{each.router} knows of {each.about}: {each.known}, not {each.true}")
                    progress(1 / (2 * len(counts)))
    return report(phases)


class Bench:
    """Asks, reads the log, and asks the routers what they know."""

    def __init__(self, on: Ground, herd: Herd, form: Form, http: aiohttp.ClientSession) -> None:
        self._clock = on.clock
        self._herd = herd
        self._form = form
        self._http = http
        self._requests = Requests(on.clock, on.settings.model, form.lanes, form.rate)
        self._outbox = Outbox(on.log, on.clock)
        self._secret = on.settings.key_secret()
        self._window_ms = int(on.settings.dedup_window_s * 1000)
        self._load = Load(self._window_ms)
        self._records: dict[Partition, list[Fact]] = {}
        self._ledger: list[Fact] = []
        """Of the present phase."""
        self._truths: dict[str, Truth] = {}
        self.pages: dict[str, str] = {}
        """Where routers tell their figures, by name."""
        self.followers = [
            Follower(on.log, fold, [topic], on.clock, on_applied=self._applied)
            for fold, topic in ((self._load, LEDGER), (Index(self._secret), KV_EVENTS))
        ]

    def _applied(self, source: Partition, facts: Sequence[Fact]) -> None:
        self._records.setdefault(source, []).extend(facts)
        if source.topic == LEDGER:
            self._ledger += facts

    async def warm(self) -> None:
        """Bursts until every router decides. Raises BenchFailed when one never does."""
        deciders: frozenset[str] = frozenset()
        for number in range(MOST_BURSTS):
            if number >= self._form.bursts and deciders >= self.pages.keys():
                return
            self._ledger = []
            await self._ask(self._requests.burst())
            deciders = self._deciders()
        missing = ", ".join(sorted(self.pages.keys() - deciders))
        raise BenchFailed(f"{missing}: no decision in {MOST_BURSTS} bursts on all lanes")

    async def play(self, arrivals: str) -> Phase:
        """Requests for as long as the form says, and what became of them."""
        asked = self._requests.coming(arrivals, self._form.phase_s)
        self._ledger = []
        views: list[View] = []
        looking = asyncio.create_task(self._look_on(views))
        try:
            began_ms, left = await self._ask(asked)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
        at_end = await self._agreed()
        wrong: list[Difference] = []
        for name in self.pages:
            own = [view for view in (*views, *at_end) if view.router == name]
            wrong += differences(own, self._truth(name))
        first_ms: dict[str, int] = {}
        for fact in self._ledger:
            if isinstance(fact.record, PrefillDone) and fact.record.id in began_ms:
                first_ms.setdefault(fact.record.id, fact.timestamp_ms)
        return Phase(
            routers=len(self.pages),
            arrivals=arrivals,
            ttft_ms=[float(at - began_ms[name]) for name, at in first_ms.items()],
            met=meetings(self._ledger),
            deciders=self._deciders(),
            views=len(views) + len(at_end),
            wrong=wrong,
            at_end=at_end,
            left=len(left),
        )

    def _deciders(self) -> frozenset[str]:
        decided = (fact.record for fact in self._ledger)
        return frozenset(each.router for each in decided if isinstance(each, Assigned))

    def _truth(self, router: str) -> Truth:
        if router not in self._truths:
            folds = Load(self._window_ms), Index(self._secret)
            self._truths[router] = Truth(self._records, *folds)
        return self._truths[router]

    # --- asking ----------------------------------------------------------------------------------

    async def _ask(self, asked: Sequence[Asked]) -> tuple[dict[str, int], set[str]]:
        """Ask in time, and wait for all ends: append times by id, and what has no end."""
        began = self._clock.now()
        sends: list[asyncio.Task[tuple[str, int]]] = []
        for after_s, request in asked:
            if (early_s := began + after_s - self._clock.now()) > 0:
                await self._clock.sleep(early_s)
            sends.append(asyncio.create_task(self._send(request)))
        began_ms = dict(await asyncio.gather(*sends))
        left, until = set(began_ms), self._clock.now() + OVER_S
        while left and self._clock.now() < until:
            await self._clock.sleep(0.05)
            self._check()
            left -= {name for name in left if self._is_over(name)}
        return began_ms, left

    async def _send(self, request: Request) -> tuple[str, int]:
        appended = await self._outbox.persist(REQUESTS, request.id, request)
        return request.id, appended.timestamp_ms

    def _is_over(self, request_id: str) -> bool:
        return request_id in self._load.lane(lane_of(request_id, self._form.lanes)).outcomes

    def _check(self) -> None:
        """Raises BenchFailed when a process has ended."""
        for child in self._herd.children.values():
            child.check()

    # --- looking ---------------------------------------------------------------------------------

    async def _look_on(self, views: list[View]) -> None:
        """Note what the routers know, until cancelled."""
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                views += await self._look()
            await self._clock.sleep(LOOK_S)

    async def _look(self) -> list[View]:
        pages = await asyncio.gather(*(self._page(url) for url in self.pages.values()))
        return [view_of(name, page) for name, page in zip(self.pages, pages, strict=True)]

    async def _page(self, url: str) -> str:
        async with self._http.get(url) as answer:
            return await answer.text()

    async def _agreed(self) -> list[View]:
        """What the routers know as soon as all have read the same and nothing is under way, or when
        that takes too long.

        Heartbeats go on, so that they are rarely at the same position for longer than a moment.
        """
        until = self._clock.now() + AGREE_S
        while True:
            views = await self._look()
            have_read = all(view.positions == views[0].positions for view in views)
            if (have_read and all(view.is_idle for view in views)) or self._clock.now() > until:
                break
            await self._clock.sleep(0.1)
        async with asyncio.timeout(AGREE_S):
            for follower in self.followers:
                for source in follower.sources:
                    read_to = max(view.positions[source] for view in views)
                    await follower.wait_for(source, read_to)
        return views


@asynccontextmanager
async def _bench(on: Ground, herd: Herd, form: Form) -> AsyncIterator[Bench]:
    """A bench that reads the log for as long as this is open."""
    timeout = aiohttp.ClientTimeout(total=LOOK_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        bench = Bench(on, herd, form, http)
        following = [asyncio.create_task(each.run()) for each in bench.followers]
        try:
            for each in bench.followers:
                async with asyncio.timeout(START_S):
                    await each.wait_caught_up()
            yield bench
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)


def report(phases: Sequence[Phase]) -> Report:
    """A row for each phase, and the bars."""
    wrong = sum(len(phase.wrong) for phase in phases)
    unlike = sum(len(phase.disagreements) for phase in phases)
    busy = sum(not view.is_idle for phase in phases for view in phase.at_end)
    left = sum(phase.left for phase in phases)
    idle = sum(phase.routers - len(phase.deciders) for phase in phases)
    bars = [
        Bar("what routers know unlike the log, at the same positions", wrong, "", "0", not wrong),
        Bar("unlike each other, when all was over", unlike, "", "0", not unlike),
        Bar("views with something open, when all was over", busy, "", "0", not busy),
        Bar("requests without an end", left, "", "0", not left),
        Bar("routers that decided nothing", idle, "", "0", not idle),
    ]
    for arrivals in (ONE_BY_ONE, IN_BURSTS):
        means = [_mean(phase.ttft_ms) for phase in phases if phase.arrivals == arrivals]
        name = f"1 -> {phases[-1].routers} routers, {arrivals}: mean TTFT"
        bars.append(Bar(name, means[-1] / means[0], "x", "", met=True))
    return Report("routers kafka", [_row(phase) for phase in phases], bars)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _row(phase: Phase) -> dict[str, object]:
    met, unread_ms = phase.met, phase.met.unread_ms
    return {
        "routers": phase.routers,
        "arrivals": phase.arrivals,
        "requests": len(phase.ttft_ms),
        "ttft_ms": {
            "mean": _mean(phase.ttft_ms),
            "p50": percentile(phase.ttft_ms, 0.5),
            "p99": percentile(phase.ttft_ms, 0.99),
        },
        "met %": 100 * met.met / max(met.decisions, 1),
        "collided %": 100 * met.collided / max(met.decisions, 1),
        "unread_ms": {"p50": percentile(unread_ms, 0.5), "p99": percentile(unread_ms, 0.99)},
        "views": phase.views,
        "unlike the log": len(phase.wrong),
        "unlike each other": len(phase.disagreements),
    }
