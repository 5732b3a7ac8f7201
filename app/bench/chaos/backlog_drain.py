"""Backlog: prompts that are in the log before any worker starts, and are drained under faults.

All prompts are published to `batch`, each with a result asked for. Then a deployment starts. It
drains a third of them without faults, a third while its processes are killed, stopped and paused at
random, and a third beside interactive requests over HTTP as well. A reader of committed records
counts the results of each id and compares every text with the engine's.

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
from itertools import cycle
from statistics import median
from typing import Any, NamedTuple

from app.bench.bench_environment import BenchEnvironment, PrintLine, bench_environment
from app.bench.chaos.broker_links import BrokerLink, BrokerLinks, links_between
from app.bench.chaos.chaos_run import (
    CLUSTER_BROKERS,
    CLUSTER_LANES,
    MODEL_READY_TIMEOUT_S,
    PROCESS_FAULTS,
    deployment_processes,
)
from app.bench.chaos.fault_injection import RESTARTS, FaultInjector, InjectedFault, draw_faults
from app.bench.chaos.impact import ROUND_S
from app.bench.chaos.load_generator import LoadGenerator
from app.bench.process_group import PROCESS_KINDS, ProcessGroup
from app.commands.simulation.report import Report, Threshold, at_least, at_most, none_of
from app.demo.expected_answers import AnswerOracle
from app.engine.simulated.batch import BatchSequence, BatchState, EngineLimits
from app.engine.simulated.step import add_sequence, run_step
from app.local.processes import free_port
from app.percentiles import percentile
from app.settings import Settings
from streams.client import Client
from streams.clock import Clock
from streams.codecs import decode
from streams.ports import Partition
from streams.prompt import Prompt
from streams.records import Result
from streams.topics import RESULTS

WORKERS, MAX_SEQS = 3, 8
ENGINE_SPEEDUP = 0.3
PROCESS_SETTINGS: dict[str, Any] = {
    "engine_speedup": ENGINE_SPEEDUP,
    "max_num_seqs": MAX_SEQS,
    "max_attempts": 10,
    "batch_max_slowdown": 10.0,
    "batch_max_blocked_share": 1.0,
}
"""Engines that are slower than two cores with all processes, so that the engines are the limit, and
a fleet set for throughput: by default two of three workers are kept free for interactive prompts,
and their steps free of batch runs.
"""
TOKENS, TOKENS_SPREAD = 32, 7
"""Shortest answer, and number of lengths: equal ones would begin and end in step."""
PROMPT_TOKENS = 48
"""About the length of the prompts, for the capacity."""
CAPACITY_REQUESTS = 4000
INTERACTIVE_RATE = 2.0
"""Requests a second over HTTP, beside the last third."""
PUBLISHED_TOGETHER = 500
QUIET, FAULTS, BESIDE = "no faults", "faults", "faults, beside HTTP"
PHASES = (QUIET, FAULTS, BESIDE)
WAITING = "preprocessors and collectors restart"
CUT = "links are cut"
CUT_S, PAUSE_S = 12.0, 3.0
"""Time for which a link is cut, longer than a session of a group, and time until the next cut."""
PROMPTS_PER_CUT = 400
PROMPTS_PER_KILL = 100
"""Prompts for each kill or stop that has to come while they wait."""
SAMPLE_INTERVAL_S = POLL_S = 1.0
STALL_S = 120.0
"""Without any result for this time the rest counts as lost. Longer than any takeover."""
SETTLE_S = 15.0
"""Time for results of requests that have one already: longer than a takeover by a collector."""
HEAD_REQUESTS = 2 * WORKERS * MAX_SEQS
"""The first results: all engines begin with full batches at the same time."""
TAIL_REQUESTS = 4 * WORKERS * MAX_SEQS
"""The last results, among which the engines are not full, do not count as throughput."""
THROUGHPUT_SHARE, GROWTH_LIMIT = 0.9, 0.1
MB = 1024 * 1024


class BacklogScale(NamedTuple):
    """Number of prompts, seed of the faults, and warm-up of the memory of a process.

    `window_s`: if set, ended ids are kept for so long, much less than prompts wait here, and one
    phase with faults of preprocessors and collectors alone takes the place of the three.
    `cuts_links`: the one phase has three brokers, and cuts each process off from one in turn.
    """

    prompts: int = 20_000
    seed: int = 1
    warm_up_s: float = 60.0
    window_s: float | None = None
    cuts_links: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it has the three phases."""
        return self.window_s is None and not self.cuts_links

    @property
    def process_settings(self) -> dict[str, Any]:
        """Settings of all processes."""
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


class PhaseFigures(NamedTuple):
    """A phase of the drain. `results`: records over `seconds` of the clock; `capacity`: requests
    that the engines had taken meanwhile; `ttft_s`: of interactive requests."""

    name: str
    seconds: float
    results: int
    interactive: int
    capacity: float
    faults: int
    ttft_s: Sequence[float] = ()


class MemorySeries(NamedTuple):
    """Resident memory of one start of a process under one load, a sample a second, in bytes."""

    process: str
    rss_bytes: Sequence[int]


@dataclass
class BacklogResult:
    """Result of the drain. `results_of`: number of results, by prompt; `verdicts`: of the
    interactive requests."""

    phases: list[PhaseFigures]
    results_of: Sequence[int]
    wrong: int
    unknown: int
    verdicts: Counter[str]
    memory: list[MemorySeries]
    warm_up_s: float
    crashes: list[str]


async def bench_backlog(
    settings: Settings,
    scale: BacklogScale,
    print_line: PrintLine,
    progress: Callable[[float], None],
) -> Report:
    """Run it; `progress` gets shares of the whole. Raises BenchFailed, BrokerUnavailable."""
    ports = {f"gateway-{n}": free_port() for n in (1, 2)}
    parts = deployment_processes(WORKERS, ports, collectors=2)
    brokers = CLUSTER_BROKERS if scale.cuts_links else 0
    if brokers:
        settings = settings.model_copy(update={"lanes": CLUSTER_LANES})
    async with (
        bench_environment(settings, print_line, brokers=brokers, links=len(parts)) as on,
        links_between(parts, on) as links,
    ):
        oracle = AnswerOracle(on.settings, on.clock)
        await oracle.load()
        ids = await publish_prompts(on, scale.prompts)
        print_line(f"{scale.prompts} prompts are in the log; the processes start")
        if links is not None:
            parts = [links.through_links(part) for part in parts]
        processes = ProcessGroup(on, parts, scale.process_settings)
        results = ResultCounter(on, oracle, ids)
        processes.start()
        async with Client(on.log, on.clock) as client:
            load = LoadGenerator(
                {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}, client,
                oracle, on.clock, rate=INTERACTIVE_RATE, tokens=TOKENS, on_kafka=0,
                rng=random.Random(scale.seed),
            )  # fmt: skip
            drain = BacklogDrain(on, processes, load, results, scale, progress, links)
            watching = (processes.restart_crashed(), results.run(), drain.sample_memory())
            try:
                async with background(*watching):
                    await processes.wait_ready()
                    await load.wait_until_served(MODEL_READY_TIMEOUT_S)
                    await drain.run()
            finally:
                await load.close()
    for crash in processes.crashes:
        print_line(f"{crash.name} ended with {crash.status}:\n{crash.tail}")
    found = drain.result()
    if scale.is_plain:
        return backlog_report(found)
    return waiting_report(found, PROMPTS_PER_CUT if scale.cuts_links else PROMPTS_PER_KILL)


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


async def publish_prompts(on: BenchEnvironment, count: int) -> list[str]:
    """Publish prompts of class batch; returns their ids. Raises BrokerUnavailable."""
    async with Client(on.log, on.clock) as client:
        ids = [client.new_request_id() for _ in range(count)]
        for first in range(0, count, PUBLISHED_TOGETHER):
            prompts = [backlog_prompt(n, ids[n]) for n in range(count)[first:][:PUBLISHED_TOGETHER]]
            await asyncio.gather(*(client.publish(p, subscribe=False) for p in prompts))
    return ids


def backlog_prompt(number: int, request_id: str) -> Prompt:
    """A prompt by its number, which is also its `custom_id`."""
    return Prompt(
        id=request_id, kind="chat", body=chat_body(number), service_class="batch", result=True,
        deadline_s=24 * 3600, custom_id=str(number),
    )  # fmt: skip


def chat_body(number: int) -> dict[str, Any]:
    """The body of a prompt by its number."""
    text = f"The {number}th letter: what does it say of the river, and of the harbour?"
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": TOKENS + number % TOKENS_SPREAD,
        "ignore_eos": True,
    }


def engine_requests_per_s() -> float:
    """Requests a second of one engine that always has requests waiting."""
    state = BatchState(EngineLimits(16, 16_384, max_sequences=MAX_SEQS))
    added = done = 0
    duration_ms = 0.0
    while done < CAPACITY_REQUESTS:
        while state.waiting_count < MAX_SEQS:
            tokens = TOKENS + added % TOKENS_SPREAD
            add_sequence(state, BatchSequence(added, PROMPT_TOKENS, tokens))
            added += 1
        step = run_step(state)
        assert step is not None, "there are requests"
        duration_ms += step.duration_ms
        done += len(step.finished)
    return 1000 * ENGINE_SPEEDUP * done / duration_ms


class ResultCounter:
    """Reads `results` from its beginning, and counts the records of each prompt."""

    def __init__(self, on: BenchEnvironment, oracle: AnswerOracle, ids: Sequence[str]) -> None:
        self._on = on
        self._oracle = oracle
        self._ids = ids
        self.counts = [0] * len(ids)
        self.received = 0
        """Prompts with a result."""
        self.wrong = 0
        self.unknown = 0
        """Results of other requests."""

    async def run(self) -> None:
        """Read until cancelled; raises the errors of the reader."""
        numbers = range(await self._on.log.partitions(RESULTS))
        reader = self._on.log.reader(moving=False)
        reader.assign({Partition(RESULTS, n): 0 for n in numbers})
        try:
            while True:
                for records in (await reader.poll(POLL_S)).values():
                    for record in records:
                        result = decode(record)
                        assert isinstance(result, Result), "results has no other records"
                        await self._count(result)
        finally:
            await reader.close()

    async def _count(self, result: Result) -> None:
        number = int(result.custom_id or -1)
        if not 0 <= number < len(self._ids) or self._ids[number] != result.id:
            self.unknown += 1
            return
        self.counts[number] += 1
        self.received += self.counts[number] == 1
        expected = await self._oracle.expect_answer(result.id, "chat", chat_body(number))
        choices = (result.body or {}).get("choices", ())
        texts = [choice["message"]["content"] for choice in choices]
        self.wrong += texts != [expected.expected.text]


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
        on: BenchEnvironment,
        processes: ProcessGroup,
        load: LoadGenerator,
        results: ResultCounter,
        scale: BacklogScale,
        progress: Callable[[float], None],
        links: BrokerLinks | None = None,
    ) -> None:
        self._links = links
        self._clock: Clock = on.clock
        self._processes = processes
        self._load = load
        self._results = results
        self._scale = scale
        self._progress = progress
        self._injector = FaultInjector(processes, None, on.log, on.clock)
        self._round = 0
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
        await self._wait_received(self._scale.prompts)
        await self._clock.sleep(SETTLE_S)

    async def _run_phase(self, name: str, until: int) -> None:
        self._is_beside = name == BESIDE
        phase = _Phase(name, self._clock.now(), self._results.received)
        stop = asyncio.Event()
        inject = self._inject if self._links is None else self._cut_links
        injecting = asyncio.create_task(inject(phase, stop)) if name != QUIET else None
        sending = [self._load.run()] if name == BESIDE else []
        try:
            async with background(*sending):
                # The last results come while engines are no longer full.
                counted = min(until, self._scale.prompts - TAIL_REQUESTS)
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
                len(phase.faults),
                [c.expected.ttft_s for c in answered],
            )
        )

    async def _wait_received(self, count: int) -> None:
        """Wait for a number of results; returns also when there are no more for STALL_S."""
        changed_at = self._clock.now()
        while self._results.received < count and self._clock.now() < changed_at + STALL_S:
            await self._clock.sleep(POLL_S / 10)
            if (more := self._results.received - self._shown) > 0:
                self._progress(more / self._scale.prompts)
                self._shown += more
                changed_at = self._clock.now()

    async def _inject(self, phase: _Phase, stop: asyncio.Event) -> None:
        """Rounds of faults until `stop`; all targets have recovered at the end."""
        names = {kind: self._processes.names_of_kind(kind) for kind in PROCESS_KINDS}
        while not stop.is_set():
            began = self._clock.now()
            faults = draw_faults(self._scale.seed, self._round, self._scale.fault_kinds, names, 0)
            self._round += 1
            phase.faults += await self._injector.inject(faults, lambda: None)
            while not stop.is_set() and self._clock.now() < began + ROUND_S:
                await self._clock.sleep(POLL_S / 10)

    async def _cut_links(self, phase: _Phase, stop: asyncio.Event) -> None:
        """Cut each process off from each broker in turn, until `stop`."""
        assert self._links is not None
        for (process, broker), link in cycle(sorted(self._links.links.items(), key=_by_broker)):
            at = self._clock.now()
            link.cut()
            await self._unless(stop, CUT_S)
            link.restore()
            fault = InjectedFault("link", f"{process} to broker {broker}", at, self._clock.now())
            phase.faults.append(fault)
            await self._unless(stop, PAUSE_S)
            if stop.is_set():
                return

    async def _unless(self, stop: asyncio.Event, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await stop.wait()

    async def sample_memory(self) -> None:
        """Sample the memory of every process until cancelled."""
        while True:
            for name, process in self._processes.processes.items():
                if rss_bytes := process.rss_bytes:
                    self._memory.setdefault((name, process.pid, self._is_beside), []).append(
                        rss_bytes
                    )
            await self._clock.sleep(SAMPLE_INTERVAL_S)

    def result(self) -> BacklogResult:
        results = self._results
        return BacklogResult(
            self._phases, results.counts, results.wrong, results.unknown,
            Counter(chat.verdict for chat in self._load.conversations),
            [MemorySeries(name, rss) for (name, _, _), rss in self._memory.items()],
            self._scale.warm_up_s, [crash.name for crash in self._processes.crashes],
        )  # fmt: skip


def _by_broker(link: tuple[tuple[str, int], BrokerLink]) -> tuple[int, str]:
    (process, broker), _ = link
    return broker, process


def memory_growth(series: Iterable[MemorySeries], warm_up_s: float) -> dict[str, float]:
    """By process, by which part of itself one start of it grew at most, from the first third after
    the warm-up to the last. Starts that ended before twice the warm-up are left out."""
    growth: dict[str, float] = {}
    for name, rss_bytes in series:
        steady = rss_bytes[int(warm_up_s / SAMPLE_INTERVAL_S) :]
        if len(steady) * SAMPLE_INTERVAL_S < warm_up_s:
            continue
        third = len(steady) // 3 or 1
        grown = median(steady[-third:]) / median(steady[:third]) - 1
        growth[name] = max(grown, growth.get(name, grown), key=abs)
    return growth


def backlog_report(found: BacklogResult) -> Report:
    """A row for each phase, and the bars."""
    growth = memory_growth(found.memory, found.warm_up_s)
    grown, part = max(((abs(v), name) for name, v in growth.items()), default=(0.0, "none"))
    wrong = found.verdicts.total() - found.verdicts["right"]
    bars = [
        *_results_bars(found),
        none_of("interactive answers lost, repeated or wrong", wrong),
        _some("interactive answers", found.verdicts.total()),
        *(
            _some(f"kills and stops, {phase.name}", phase.faults)
            for phase in found.phases
            if phase.name != QUIET
        ),
        *(
            at_least(f"throughput, {phase.name}, of the engines' capacity",
                (phase.results + phase.interactive) / phase.capacity, "x", THROUGHPUT_SHARE)
            for phase in found.phases
        ),
        at_most(f"memory changed after warm-up, most of all {part}", grown, "x", GROWTH_LIMIT),
        _some("processes whose memory was compared", len(growth)),
        none_of("processes that ended by themselves", len(found.crashes)),
    ]  # fmt: skip
    sizes: dict[str, float] = {}
    for name, rss_bytes in found.memory:
        kind = name.partition("-")[0]
        sizes[kind] = max(sizes.get(kind, 0.0), max(rss_bytes) / MB)
    shown = ", ".join(f"{kind} {mb:.0f}" for kind, mb in sizes.items())
    rows = [_row(phase) for phase in found.phases]
    return Report("backlog", rows, bars, lines=[f"largest memory, MB: {shown}"])


def waiting_report(found: BacklogResult, prompts_per_fault: int) -> Report:
    """The report of a backlog with one phase of faults of one kind."""
    kills = sum(phase.faults for phase in found.phases)
    wanted = max(1, len(found.results_of) // prompts_per_fault)
    bars = [
        *_results_bars(found),
        at_least("kills and stops", kills, "", wanted),
        none_of("processes that ended by themselves", len(found.crashes)),
    ]
    return Report("backlog", [_row(phase) for phase in found.phases], bars)


def _results_bars(found: BacklogResult) -> list[Threshold]:
    return [
        none_of("prompts without a result", found.results_of.count(0)),
        none_of("prompts with several results", sum(count > 1 for count in found.results_of)),
        none_of("results with a wrong text", found.wrong),
        none_of("results of unknown requests", found.unknown),
    ]


def _some(name: str, count: int) -> Threshold:
    """A number without which the other figures show nothing."""
    return at_least(name, count, "", 1)


def _row(phase: PhaseFigures) -> dict[str, Any]:
    return {
        "phase": phase.name,
        "s": phase.seconds,
        "kills and stops": phase.faults,
        "results": phase.results,
        "results/s": phase.results / phase.seconds,
        "HTTP answers": phase.interactive,
        "capacity/s": phase.capacity / phase.seconds,
        "first text ms, HTTP": {
            "p50": 1000 * percentile(phase.ttft_s, 0.5),
            "p99": 1000 * percentile(phase.ttft_s, 0.99),
        },
    }
