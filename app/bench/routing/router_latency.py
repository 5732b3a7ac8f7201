"""Latency and CPU time of the router: from a `requests` record to its readable assignment.

    load (this process) ──► requests ──► router ──► ledger, assignments ──► load: latency
                                   └───► echo   ──► assignments         ──► the same: the shortest
                                                                            possible path

Open loop: records are due at fixed times, independently of the answers, and latency counts from the
due time. The router and a bare aiokafka echo (`echo.py`) take turns on the same broker, each on
topics of its own, with the same records from the same load generator. 64 workers exist as cards and
heartbeats; assigned runs are reported as started and finished, so that load comes and goes.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable
from contextlib import aclosing
from statistics import median
from typing import Any, NamedTuple

from app.bench.bench_environment import (
    BenchEnvironment,
    PrintLine,
    bench_environment,
    create_topics,
)
from app.bench.report import Report, Threshold
from app.bench.statistics import spread
from app.local.processes import ManagedProcess, process_command
from app.percentiles import percentile
from app.settings import Settings
from streams.clock import SystemClock
from streams.codecs import decode, encode, pack_tokens, token_count, type_of
from streams.ids import RequestIds
from streams.kafka.kafka_log import KafkaLog
from streams.ports import Entry, Partition, Record
from streams.reading.range_reader import tail
from streams.record_publisher import RecordPublisher
from streams.records import Assignment, EngineConfig, Finished, Heartbeat, Started, WorkerCard
from streams.request import Request, StopConditions
from streams.topics import ASSIGNMENTS, KV_EVENTS, LEDGER, REQUESTS, lane_of

WORKERS = 64
PROMPT_TOKENS = 2000
SHARED_TOKENS = 1000
"""The first half of a prompt is one of WORKERS prefixes, like a system prompt."""
HEARTBEAT_S = 1.0
DRAIN_TIMEOUT_S = 20.0
"""Timeout of the last assignments; those that are missing after it count as lost."""
IDLE_MEASUREMENT_S = 4.0
WARM_UP_RATE, WARM_UP_S = 200, 20.0
"""The JIT compiler of the broker's JVM has done most of its work after 4000 records per side."""
P50_FACTOR, P99_FACTOR, CPU_LIMIT_US = 1.5, 1.5, 300
SIDES = ("echo", "router")
MODEL = "bench"


class RouterLatencyScale(NamedTuple):
    """Amount of work: rates in requests/s, rounds, and seconds per round."""

    rates: tuple[int, ...]
    rounds: int
    round_s: float
    warm_up_s: float = WARM_UP_S


QUICK = RouterLatencyScale(rates=(100,), rounds=3, round_s=8.0)
FULL = RouterLatencyScale(rates=(100, 500, 1000), rounds=5, round_s=20.0)


class RouterLatencyRound(NamedTuple):
    """Figures of one side at one rate. Times in ms, CPU of its process in us per request."""

    side: str
    rate: int
    p50_ms: float
    p99_ms: float
    cpu_us: float
    throughput_per_s: float
    lost: int


class RouterLatencySide:
    """The router or the echo: its topics and its process."""

    def __init__(self, name: str, log: KafkaLog, child: ManagedProcess) -> None:
        self.name = name
        self.process = child
        self._log = log
        self._clock = SystemClock()
        self._due: dict[bytes, float] = {}
        self._took: list[float] = []
        self.assigned: asyncio.Queue[Assignment] | None = None
        """Assignments for `RegisteredWorkers.finish_runs`. Bounded by the requests in flight in a
        round.
        """

    async def read_assignments(self) -> None:
        """Measure the latency of assignments, until cancelled."""
        numbers = range(await self._log.partitions(ASSIGNMENTS))
        ends = await self._log.end_offsets(ASSIGNMENTS, list(numbers))
        positions = {Partition(ASSIGNMENTS, n): ends[n] for n in numbers}
        async with aclosing(tail(self._log, positions, moving=True)) as batches:
            async for records in batches:
                now = self._clock.now()
                for record in records:
                    if (due := self._due.pop(self._id_of(record), None)) is not None:
                        self._took.append(now - due)

    def _id_of(self, record: Record) -> bytes:
        """The request id of a record; an assignment is also queued for its worker."""
        assignment = decode(record) if type_of(record) == b"Assignment" else None
        if not isinstance(assignment, Assignment):
            return record.key or b""
        if self.assigned is not None:
            self.assigned.put_nowait(assignment)
        return assignment.request.id.encode()

    async def idle_cpu(self) -> float:
        """The share of a core that the idle process takes."""
        cpu_s = self.process.cpu_s
        await self._clock.sleep(IDLE_MEASUREMENT_S)
        return (self.process.cpu_s - cpu_s) / IDLE_MEASUREMENT_S

    async def play_round(self, entries: list[Entry], rate: int) -> RouterLatencyRound:
        """Send entries at a rate; the figures of the round."""
        self._took, self._due = [], {}
        cpu_s, began = self.process.cpu_s, self._clock.now()
        sends = []
        for number, entry in enumerate(entries):
            due = began + number / rate
            if (early := due - self._clock.now()) > 0:
                await self._clock.sleep(early)
            assert entry.key is not None
            self._due[entry.key] = due
            sends.append(asyncio.create_task(self._log.append(REQUESTS, entry)))
        await asyncio.gather(*sends)
        until = self._clock.now() + DRAIN_TIMEOUT_S
        while self._due and self._clock.now() < until:
            self.process.check()
            await self._clock.sleep(0.01)
        lasted = self._clock.now() - began
        took_ms = [1000 * t for t in self._took]
        return RouterLatencyRound(
            self.name,
            rate,
            percentile(took_ms, 0.5),
            percentile(took_ms, 0.99),
            (self.process.cpu_s - cpu_s) / len(entries) * 1e6,
            len(took_ms) / lasted,
            len(self._due),
        )


class RegisteredWorkers:
    """Workers that consist of registry cards and heartbeats only."""

    def __init__(self, on: BenchEnvironment, cards: list[WorkerCard]) -> None:
        self._on = on
        self._cards = cards
        self._outbox = RecordPublisher(on.log, on.clock)
        self._rng = random.Random(1)

    async def send_heartbeats(self) -> None:
        """Send a heartbeat of each worker every second, until cancelled."""
        while True:
            for card in self._cards:
                assert card.epoch is not None
                beat = Heartbeat(worker=card.id, epoch=card.epoch, slot_offset=0)
                await self._outbox.publish_once(KV_EVENTS, card.id, beat)
                await self._on.clock.sleep(HEARTBEAT_S / len(self._cards))

    async def finish_runs(self, assigned: asyncio.Queue[Assignment]) -> None:
        """Report assigned runs as started and finished, in batches, until cancelled."""
        while True:
            lanes: dict[int, list[tuple[str, Started | Finished]]] = defaultdict(list)
            came = [await assigned.get()]
            while not assigned.empty():
                came.append(assigned.get_nowait())
            for assignment in came:
                lane = lane_of(assignment.request.id, self._on.settings.lanes)
                lanes[lane] += [
                    (assignment.request.id, fact) for fact in self._run_records(assignment)
                ]
            for lane, facts in lanes.items():
                await self._outbox.publish_batch_once(LEDGER, lane, facts)

    def _run_records(self, assignment: Assignment) -> tuple[Started, Finished]:
        run = self._rng.getrandbits(64)
        named: dict[str, Any] = {
            "id": assignment.request.id,
            "attempt": assignment.attempt,
            "phase": assignment.phase,
            "worker": assignment.worker,
            "epoch": assignment.epoch,
            "run": run,
        }
        started = Started(
            **named,
            origin=assignment.origin,
            responses_from=assignment.responses_from,
            deadline_ms=assignment.deadline_ms,
            prompt_tokens=token_count(assignment.request.token_ids),
        )
        return started, Finished(**named, code="stop", output_tokens=1)


class SharedPrefixPrompts:
    """Generator of prompts: half of each is a shared prefix, half is unique."""

    def __init__(self) -> None:
        self._rng = random.Random(17)
        self._ids = RequestIds(SystemClock(), self._rng)
        self._shared = [self._tokens(SHARED_TOKENS) for _ in range(WORKERS)]

    def entries(self, count: int) -> list[Entry]:
        """Log entries of new requests."""
        return [self._entry() for _ in range(count)]

    def _entry(self) -> Entry:
        tokens = self._rng.choice(self._shared) + self._tokens(PROMPT_TOKENS - SHARED_TOKENS)
        request = Request(
            id=self._ids.new(),
            model=MODEL,
            token_ids=tokens,
            received_ms=SystemClock().wall_ms(),
            stop=StopConditions(max_tokens=100),
        )
        return encode(request, request.id)

    def _tokens(self, count: int) -> bytes:
        return pack_tokens([self._rng.randrange(100_000) for _ in range(count)])


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
        echo_log = KafkaLog(
            echo_settings.kafka_connection("bench"), prefix=echo_settings.topic_prefix
        )
        await echo_log.start()
        tasks: list[asyncio.Task[Any]] = []
        try:
            await create_topics(echo_log, echo_settings)
            sides = await _sides(on, echo_log, echo_settings, tasks)
            playing = asyncio.create_task(_play(sides, scale, print_line, progress))
            tasks.append(playing)
            # Background tasks never return: if one ends, its error is the result.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {playing}:
                task.result()
            return playing.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            on.stop_all()
            await echo_log.close()


async def _sides(
    on: BenchEnvironment,
    echo_log: KafkaLog,
    echo_settings: Settings,
    tasks: list[asyncio.Task[Any]],
) -> list[RouterLatencySide]:
    """Both sides, ready; their background tasks are added to `tasks`."""
    config = EngineConfig(
        model=MODEL, context_length=131_072, kv_cache_block_size=16, total_kv_blocks=100_000,
        max_num_seqs=256,
    )  # fmt: skip
    workers = RegisteredWorkers(
        on, [await on.register_worker(f"bench-{n}", config) for n in range(WORKERS)]
    )
    prefix = echo_settings.topic_prefix
    echo = on.launch("echo", "app.bench.routing.baseline_kafka", topic_prefix=prefix)
    router = on.launch("router", *process_command("router"), log_level="INFO")
    sides = [RouterLatencySide("echo", echo_log, echo), RouterLatencySide("router", on.log, router)]
    assigned: asyncio.Queue[Assignment] = asyncio.Queue(1_000_000)
    sides[1].assigned = assigned
    beside = (
        workers.send_heartbeats(),
        workers.finish_runs(assigned),
        *(side.read_assignments() for side in sides),
    )
    tasks += [asyncio.create_task(work) for work in beside]
    await on.wait_until(lambda: "ready" in echo.output, echo)
    return sides


async def _play(
    sides: list[RouterLatencySide],
    form: RouterLatencyScale,
    print_line: PrintLine,
    progress: Callable[[float], None],
) -> Report:
    prompts = SharedPrefixPrompts()
    warm = int(WARM_UP_RATE * form.warm_up_s)
    whole = len(sides) * (warm / WARM_UP_RATE + form.rounds * form.round_s * len(form.rates))
    for side in sides:
        warmed = await side.play_round(prompts.entries(warm), WARM_UP_RATE)
        print_line(f"warm: {side.name} p50 {warmed.p50_ms:.1f} ms, {warmed.lost} lost")
        progress(warm / WARM_UP_RATE / whole)
    idle = {side.name: await side.idle_cpu() for side in sides}
    rounds: list[RouterLatencyRound] = []
    for rate in form.rates:
        for number in range(form.rounds):
            # In alternating order, so that other load on the machine affects both sides.
            for side in sides if number % 2 == 0 else sides[::-1]:
                rounds.append(
                    await side.play_round(prompts.entries(int(rate * form.round_s)), rate)
                )
                progress(form.round_s / whole)
    return _report(rounds, idle, form)


def _report(
    rounds: list[RouterLatencyRound], idle: dict[str, float], form: RouterLatencyScale
) -> Report:
    rows: list[dict[str, Any]] = []
    bars: list[Threshold] = []
    for rate in form.rates:
        sides = {s: [r for r in rounds if (r.side, r.rate) == (s, rate)] for s in SIDES}
        rows += [_row(rate, own, idle[side]) for side, own in sides.items()]
        p50 = _ratio(sides, lambda r: r.p50_ms)
        p99 = _ratio(sides, lambda r: r.p99_ms)
        cpu_us = {s: median(r.cpu_us for r in own) for s, own in sides.items()}
        extra_us = cpu_us["router"] - cpu_us["echo"]
        lost = sum(r.lost for r in sides["router"])
        bars += [
            Threshold(f"p50 to echo at {rate}/s", p50, "x", f"<= {P50_FACTOR}", p50 <= P50_FACTOR),
            Threshold(f"p99 to echo at {rate}/s", p99, "x", f"<= {P99_FACTOR}", p99 <= P99_FACTOR),
            Threshold(f"CPU beyond echo at {rate}/s", extra_us, "us/req", f"<= {CPU_LIMIT_US}",
                extra_us <= CPU_LIMIT_US),
            Threshold(f"lost at {rate}/s", lost, "requests", "0", not lost),
        ]  # fmt: skip
    return Report("hop", rows, bars)


def _row(rate: int, own: list[RouterLatencyRound], idle: float) -> dict[str, Any]:
    return {
        "side": own[0].side,
        "req/s": rate,
        "p50 ms": str(spread([r.p50_ms for r in own])),
        "p99 ms": str(spread([r.p99_ms for r in own])),
        "CPU us/req": str(spread([r.cpu_us for r in own])),
        "idle CPU %": 100 * idle,
        "answered/s": median(r.throughput_per_s for r in own),
        "lost": sum(r.lost for r in own),
        "rounds": len(own),
    }


def _ratio(
    sides: dict[str, list[RouterLatencyRound]], of: Callable[[RouterLatencyRound], float]
) -> float:
    """Ratio of the router to the echo, of their median rounds."""
    router, echo = (median(map(of, sides[side])) for side in ("router", "echo"))
    return router / echo
