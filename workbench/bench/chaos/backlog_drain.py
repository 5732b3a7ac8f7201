"""Backlog: prompts that are in the log before any worker starts, and are drained under faults.

All prompts are published to `batch`, each with a result asked for. Then a deployment starts. It
drains a third of them without faults, a third while its processes are killed, stopped and paused at
random, and a third beside interactive requests over HTTP as well. A reader of committed records
counts the results of each id and compares every text with the engine's.

Two other forms have one phase with a number of faults, beside interactive requests: kills and
restarts of preprocessors and collectors, or cuts of every link between a process and a broker; with
both, the cuts come first. As
long as faults are to come, more prompts are published when few are left, so the number of faults
does not depend on the speed of the machine, and each of them meets a backlog.

The capacity of the fleet is that of its simulated engines alone, always with requests waiting, for
as long as workers are not hit. The memory of a process is that of one start, with or without
requests over HTTP, which no gateway has before the last third: after a warm-up, the last third of
the samples is compared with the first.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from kvlane.app.demo.expected_answers import AnswerOracle
from kvlane.app.local.processes import free_port
from kvlane.app.settings import Settings
from kvlane.streams.client import Client
from kvlane.streams.clock import Clock
from kvlane.streams.ports import POLL_S
from workbench.bench.bench_environment import BenchEnvironment, PrintLine, bench_environment
from workbench.bench.chaos.backlog_prompts import (
    ENGINE_SPEEDUP,
    MAX_SEQS,
    RETRIED_CODES,
    TOKENS,
    ResultCounter,
    engine_requests_per_s,
    publish_prompts,
)
from workbench.bench.chaos.backlog_report import (
    RETRY,
    SAMPLE_INTERVAL_S,
    BacklogResult,
    MemorySeries,
    PhaseFigures,
    backlog_report,
    waiting_report,
)
from workbench.bench.chaos.broker_links import BrokerLinks, LinkEnds, links_between
from workbench.bench.chaos.chaos_run import (
    CLUSTER_BROKERS,
    CLUSTER_LANES,
    MODEL_READY_TIMEOUT_S,
    PROCESS_FAULTS,
    deployment_processes,
)
from workbench.bench.chaos.fault_injection import (
    RESTARTS,
    FaultInjector,
    InjectedFault,
    draw_faults,
)
from workbench.bench.chaos.impact import ROUND_S
from workbench.bench.chaos.load_generator import Conversation, LoadGenerator
from workbench.bench.process_group import PROCESS_KINDS, ProcessGroup
from workbench.bench.process_usage import resident_bytes
from workbench.bench.report import Report

WORKERS, AGENT_WORKERS = 3, 1
"""Requests of agents are beside kills and cut links: in the phases they would have a share of the
throughput."""
PROCESS_SETTINGS: dict[str, Any] = {
    "engine_speedup": ENGINE_SPEEDUP,
    "max_num_seqs": MAX_SEQS,
    "max_attempts": 10,
}
"""Engines that are slower than two cores with all processes, so that the engines are the limit."""
THROUGHPUT_SETTINGS: dict[str, Any] = {"batch_max_slowdown": 10.0, "batch_max_blocked_share": 1.0}
"""A fleet set for throughput: by default two of three workers are kept free for interactive
prompts, and their steps free of batch runs. These preempt no run then, which they would prolong
beyond the limits of a short window.
"""
INTERACTIVE_RATE = 2.0
"""Requests a second over HTTP, beside the last phase."""
QUIET, FAULTS, BESIDE = "no faults", "faults", "faults, beside HTTP"
PHASES = (QUIET, FAULTS, BESIDE)
WAITING = "preprocessors and collectors restart"
CUT = "links are cut"
CUT_S, PAUSE_S = 12.0, 3.0
"""Time for which a link is cut, longer than a session of a group, and time until the next cut."""
FAULT_TIMEOUT_S = 30.0
"""Time for a fault on average. Later the run ends, and lacks faults."""
REFILL = 300
"""Waiting prompts below which as many are published. The engines take at least 15 s for them, which
is longer than the readers of prompts are away, and than ended ids are known in a short window."""
LINE_INTERVAL_S, WRONG_SHOWN = 30.0, 5
STALL_S = 120.0
"""Without any result for this time the rest counts as lost. Longer than any takeover."""
HEAD_REQUESTS = 2 * WORKERS * MAX_SEQS
"""The first results: all engines begin with full batches at the same time."""
TAIL_REQUESTS = 4 * WORKERS * MAX_SEQS
"""The last results, among which the engines are not full, do not count as throughput."""


class BacklogScale(NamedTuple):
    """Number of prompts, seed of the faults, and warm-up of the memory of a process.

    `window_s`: if set, ended ids are kept for so long, much less than prompts wait here, and one
    phase with faults of preprocessors and collectors alone takes the place of the three.
    `cuts_links`: the one phase has three brokers, and cuts each process off from each in turn, with
    `together` the first process of each kind at once, each from another broker. `kills`: number of
    kills and restarts in the phase with a window. `round_s`: time of a round of them; `settle_s`:
    for second results at the end, by default longer than a takeover by a collector.
    """

    prompts: int = 20_000
    seed: int = 1
    warm_up_s: float = 60.0
    window_s: float | None = None
    cuts_links: bool = False
    together: bool = False
    kills: int = 200
    round_s: float = ROUND_S
    settle_s: float = 15.0

    @property
    def is_plain(self) -> bool:
        """Whether it has the three phases."""
        return self.window_s is None and not self.cuts_links

    @property
    def process_settings(self) -> dict[str, Any]:
        """Settings of all processes."""
        if self.is_plain:
            return PROCESS_SETTINGS | THROUGHPUT_SETTINGS
        if self.window_s is None:
            return PROCESS_SETTINGS
        limits = ("dedup_window_s", "max_lifetime_s", "deadline_s")
        return PROCESS_SETTINGS | dict.fromkeys(limits, self.window_s)

    @property
    def phases(self) -> tuple[str, ...]:
        """The names of the phases."""
        if self.is_plain:
            return PHASES
        return (CUT,) if self.cuts_links else (WAITING,)

    @property
    def fault_kinds(self) -> tuple[str, ...]:
        """The kinds of faults."""
        return PROCESS_FAULTS if self.window_s is None else ("preprocessor", "collector", *RESTARTS)


QUICK, DEFAULT = BacklogScale(2000, warm_up_s=20.0), BacklogScale()
FULL = BacklogScale(200_000)


async def bench_backlog(
    settings: Settings,
    scale: BacklogScale,
    print_line: PrintLine,
    progress: Callable[[float], None],
) -> Report:
    """Run it; `progress` gets shares of the whole. Raises BenchFailed, BrokerUnavailable."""
    ports = {f"gateway-{n}": free_port() for n in (1, 2)}
    agent_workers = 0 if scale.is_plain else AGENT_WORKERS
    parts = deployment_processes(WORKERS, ports, collectors=2, agent_workers=agent_workers)
    brokers = CLUSTER_BROKERS if scale.cuts_links else 0
    if brokers:
        settings = settings.model_copy(update={"lanes": CLUSTER_LANES})
    async with (
        bench_environment(settings, print_line, brokers=brokers, links=len(parts)) as on,
        links_between(parts, on) as links,
    ):
        oracle = AnswerOracle(on.settings, on.clock)
        await oracle.load()
        if links is not None:
            parts = [links.through_links(part) for part in parts]
        processes = on.deployment(parts, scale.process_settings)
        results = ResultCounter(on, oracle)
        async with Client(on.log, on.clock) as client:
            await publish_prompts(client, results, scale.prompts)
            print_line(f"{scale.prompts} prompts are in the log; the processes start")
            agents = [part.name for part in parts if part.name.startswith("agent-")]
            others = [part.name for part in parts if part.name not in agents]
            await processes.start(*others)
            load = LoadGenerator(
                {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}, client,
                oracle, on.clock, rate=INTERACTIVE_RATE, tokens=TOKENS, on_kafka=0,
                rng=random.Random(scale.seed), has_agents=agent_workers > 0,
            )  # fmt: skip
            faults: list[FaultSource] = []
            if links is not None:
                faults.append(_LinkCuts(on.clock, links, scale))
            if not scale.cuts_links or scale.window_s is not None:
                faults.append(_Kills(on, processes, scale))
            drain = BacklogDrain(
                on.clock, processes, load, results, scale, faults, client=client,
                progress=progress, print_line=print_line,
            )  # fmt: skip
            watching = (processes.restart_crashed(), results.run(), drain.sample_memory())
            try:
                async with background(*watching):
                    await processes.wait_ready(*others)
                    await load.wait_until_served(MODEL_READY_TIMEOUT_S, with_agents=False)
                    if agents:
                        # Not before: where another model has a worker, prompts for one that had
                        # none yet are refused.
                        await processes.start(*agents)
                        await processes.wait_ready(*agents)
                        await load.wait_until_served(MODEL_READY_TIMEOUT_S)
                    await drain.run()
            finally:
                await load.close()
    for crash in processes.crashes:
        print_line(f"{crash.name} ended with {crash.status}:\n{crash.tail}")
    for result in results.wrong[:WRONG_SHOWN]:
        print_line(f"wrong: {msgspec.json.encode(result).decode()}")
    for line in _wrong_answers(load):
        print_line(line)
    found = drain.result()
    if scale.is_plain:
        return backlog_report(found)
    return waiting_report(found, sum(source.count for source in faults))


@asynccontextmanager
async def background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Tasks that run beside the block, and end with it; the first error of any of them ends it."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


class FaultSource(Protocol):
    """The faults of a phase, in rounds. `count`: their number in a phase of their own."""

    count: int

    @property
    def is_done(self) -> bool: ...

    async def inject(self, stop: asyncio.Event) -> list[InjectedFault]:
        """The next round and its time, which `stop` ends early; the targets have recovered."""


class _Kills:
    """Faults of processes."""

    def __init__(self, on: BenchEnvironment, processes: ProcessGroup, scale: BacklogScale) -> None:
        self.count = scale.kills
        self._left: int | None = None if scale.is_plain else self.count
        self._scale = scale
        self._round = 0
        self._names = {kind: processes.names_of_kind(kind) for kind in PROCESS_KINDS}
        self._injector = FaultInjector(processes, None, on.log, on.clock)
        self._clock = on.clock

    @property
    def is_done(self) -> bool:
        return self._left == 0

    async def inject(self, stop: asyncio.Event) -> list[InjectedFault]:
        began = self._clock.now()
        kinds, seed = self._scale.fault_kinds, self._scale.seed
        faults = draw_faults(seed, self._round, kinds, self._names, 0)[: self._left]
        self._round += 1
        if self._left is not None:
            self._left -= len(faults)
        injected = await self._injector.inject(faults, lambda: None)
        await _unless(stop, began + self._scale.round_s - self._clock.now())
        return injected


class _LinkCuts:
    """Cuts of links."""

    def __init__(self, clock: Clock, links: BrokerLinks, scale: BacklogScale) -> None:
        self._clock = clock
        self._links = links.links
        self._left = cut_rounds(self._links, together=scale.together)
        self.count = sum(map(len, self._left))

    @property
    def is_done(self) -> bool:
        return not self._left

    async def inject(self, stop: asyncio.Event) -> list[InjectedFault]:
        ends, at = self._left.pop(0), self._clock.now()
        for each in ends:
            self._links[each].cut()
        await _unless(stop, CUT_S)
        for each in ends:
            self._links[each].restore()
        now = self._clock.now()
        await _unless(stop, PAUSE_S)
        return [InjectedFault("link", f"{name} to broker {n}", at, now) for name, n in ends]


def cut_rounds(links: Iterable[LinkEnds], *, together: bool) -> list[list[LinkEnds]]:
    """The links that are cut at the same time, in order: each alone, broker by broker, or
    `together` one of the first process of each kind, to the brokers in turn."""
    links = sorted(links, key=lambda ends: (ends[1], ends[0]))
    if not together:
        return [[ends] for ends in links]
    brokers = sorted({number for _, number in links})
    names = {name.partition("-")[0]: name for name, _ in reversed(links)}
    return [[(name, brokers[n % len(brokers)]) for n, name in enumerate(sorted(names.values()))]]


async def _unless(stop: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, seconds)):
            await stop.wait()


@dataclass
class _Phase:
    """A phase that is not over. Seconds of the clock."""

    name: str
    began: float
    received: int
    faults: list[InjectedFault] = field(default_factory=list)


class BacklogDrain:
    """Runs the phases; `sample_memory` must be running."""

    def __init__(
        self,
        clock: Clock,
        processes: ProcessGroup,
        load: LoadGenerator,
        results: ResultCounter,
        scale: BacklogScale,
        faults: Sequence[FaultSource],
        *,
        client: Client,
        progress: Callable[[float], None],
        print_line: PrintLine,
    ) -> None:
        self._clock = clock
        self._processes = processes
        self._load = load
        self._results = results
        self._scale = scale
        self._faults = faults
        self._client = client
        self._progress = progress
        self._print_line = print_line
        self._shown = 0
        """Results that `progress` got."""
        self._capacity = engine_requests_per_s()
        self._phases: list[PhaseFigures] = []
        self._memory: dict[tuple[str, int, bool], list[int]] = {}
        """By process, pid, and whether there are requests over HTTP."""
        self._is_beside = False

    async def run(self) -> None:
        """Drain the backlog. Raises BenchFailed."""
        await self._wait_received(HEAD_REQUESTS)
        phases = self._scale.phases
        for number, name in enumerate(phases, 1):
            await self._run_phase(name, self._scale.prompts * number // len(phases))
        await self._load.drain()
        await self._wait_received(len(self._results.counts))
        await self._clock.sleep(self._scale.settle_s)

    async def _run_phase(self, name: str, until: int) -> None:
        self._is_beside = name not in (QUIET, FAULTS)
        phase = _Phase(name, self._clock.now(), self._results.received)
        stop = asyncio.Event()
        injecting = asyncio.create_task(self._inject(phase, stop)) if name != QUIET else None
        sending = [self._load.run()] if self._is_beside else []
        try:
            async with background(*sending):
                if injecting is not None and not self._scale.is_plain:
                    await self._keep_waiting(phase, injecting)
                    until = len(self._results.counts)
                # The last results come while engines are no longer full.
                counted = min(until, len(self._results.counts) - TAIL_REQUESTS)
                await self._wait_received(max(counted, phase.received + 1))
                ended, received = self._clock.now(), self._results.received
                answered = [c for c in self._load.conversations if c.ended_at is not None]
                await self._wait_received(until)
        finally:
            stop.set()
            if injecting is not None:
                await injecting
        down_s = sum(
            max(0.0, min(hit.recovered_at, ended) - hit.at)
            for hit in phase.faults
            if hit.target.startswith("worker-")
        )
        seconds = ended - phase.began
        self._phases.append(
            PhaseFigures(
                name,
                seconds,
                received - phase.received,
                len(answered),
                self._capacity * (WORKERS * seconds - down_s),
                len(phase.faults) if injecting is not None else None,
                [c.expected.ttft_s for c in answered],
            )
        )

    async def _inject(self, phase: _Phase, stop: asyncio.Event) -> None:
        """Rounds of faults until `stop`, in a phase of their own until all are done."""
        for source in self._faults:
            while not (stop.is_set() or source.is_done):
                phase.faults += await source.inject(stop)

    async def _keep_waiting(self, phase: _Phase, injecting: asyncio.Task[None]) -> None:
        """Publish prompts where few are left, until all faults are done or late."""
        results, count = self._results, sum(source.count for source in self._faults)
        until = self._clock.now() + FAULT_TIMEOUT_S * count
        shown, line_at = 0, self._clock.now()
        while not injecting.done() and self._clock.now() < until:
            if len(results.counts) - results.received < REFILL:
                await publish_prompts(self._client, results, REFILL)
            if self._clock.now() >= line_at:
                self._print_line(
                    f"{len(phase.faults)} of {count} faults, "
                    f"{results.received} of {len(results.counts)} results"
                )
                line_at += LINE_INTERVAL_S
            self._progress((len(phase.faults) - shown) / count)
            shown = len(phase.faults)
            await asyncio.wait({injecting}, timeout=POLL_S)
        self._progress((len(phase.faults) - shown) / count)
        if injecting.done():
            injecting.result()

    async def _wait_received(self, count: int) -> None:
        """Wait for a number of results; returns also when there are no more for STALL_S."""
        changed_at = self._clock.now()
        while self._results.received < count and self._clock.now() < changed_at + STALL_S:
            await self._clock.sleep(POLL_S / 10)
            if (more := self._results.received - self._shown) > 0:
                if self._scale.is_plain:
                    self._progress(more / self._scale.prompts)
                self._shown += more
                changed_at = self._clock.now()

    async def sample_memory(self) -> None:
        """Sample the memory of every process until cancelled."""
        while True:
            for name, process in self._processes.processes.items():
                if rss_bytes := resident_bytes(process):
                    self._memory.setdefault((name, process.pid, self._is_beside), []).append(
                        rss_bytes
                    )
            await self._clock.sleep(SAMPLE_INTERVAL_S)

    def result(self) -> BacklogResult:
        results = self._results
        return BacklogResult(
            self._phases, results.counts, len(results.wrong), results.refused, results.unknown,
            Counter(map(_verdict, self._load.conversations)),
            [MemorySeries(name, rss) for (name, _, _), rss in self._memory.items()],
            self._scale.warm_up_s, [crash.name for crash in self._processes.crashes],
        )  # fmt: skip


def _wrong_answers(load: LoadGenerator) -> list[str]:
    verdicts = ((_verdict(chat), chat) for chat in load.conversations)
    wrong = [f"{verdict}: {chat}" for verdict, chat in verdicts if verdict not in ("right", RETRY)]
    return wrong[:WRONG_SHOWN]


def _verdict(chat: Conversation) -> str:
    """The verdict on an answer; RETRY if an error after a part of it asks for that."""
    is_refused = chat.verdict == "lost" and chat.expected.finish_reason in RETRIED_CODES
    return RETRY if is_refused else chat.verdict
