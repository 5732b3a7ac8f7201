"""Load for a router without workers: requests, and the records of workers that take them at once.

A cheap client, so that the router on the same machine is measured and not the client: records are
encoded before a round begins, and sent by the bare client without a task for each. A request costs
it about a tenth of the router's cost.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kvlane.app.local.processes import ManagedProcess
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import decode, encode, token_count, type_of
from kvlane.streams.ids import RequestIds
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.ports import Entry, Partition, Record
from kvlane.streams.reading.range_reader import tail
from kvlane.streams.records import (
    Assignment,
    EngineConfig,
    Finished,
    Heartbeat,
    Started,
    WorkerCard,
)
from kvlane.streams.request import Request, StopConditions
from kvlane.streams.topics import ASSIGNMENTS, KV_EVENTS, LEDGER, REQUESTS, lane_of
from workbench.bench.bench_environment import BenchEnvironment
from workbench.bench.process_usage import cpu_time_s
from workbench.bench.statistics import percentile
from workbench.bench.streaming.baseline_kafka import BareProducer

WORKERS = 64
PROMPT_TOKENS = 2000
SHARED_TOKENS = 1000
"""The first half of a prompt is one of WORKERS prefixes, like a system prompt."""
HEARTBEAT_S = 1.0
DRAIN_TIMEOUT_S = 20.0
"""Timeout of the last assignments; those that are missing after it count as lost."""
IDLE_MEASUREMENT_S = 4.0
IN_FLIGHT, MANY_IN_FLIGHT = 256, 1024
"""Requests in flight while the capacity is measured, and while most of them wait in the router."""
MODEL = "bench"

Figures = TypeVar("Figures")


class PreparedRequest(NamedTuple):
    """A request as a record, and the number of its lane."""

    lane: int
    entry: Entry


class RouterLatencyRound(NamedTuple):
    """Figures of one side in one round. Times in ms; CPU time in us per request.

    `answered_per_s`: assignments that came while requests were sent; `beyond_idle_us`: the CPU time
    without the idle cost of the processes; `client_us`: that of this process.
    """

    side: str
    rate: float
    p50_ms: float
    p99_ms: float
    cpu_us: float
    beyond_idle_us: float
    client_us: float
    sent_per_s: float
    answered_per_s: float
    lost: int


class SharedPrefixPrompts:
    """Generator of prompts: half of each is a shared prefix, half is unique."""

    def __init__(self, lanes: int, model: str = MODEL) -> None:
        self._lanes, self._model = lanes, model
        self._rng = np.random.default_rng(17)
        self._ids = RequestIds(SystemClock(), random.Random(17))
        self._shared = [self._tokens(SHARED_TOKENS) for _ in range(WORKERS)]

    def requests(self, count: int) -> list[PreparedRequest]:
        return [self._request() for _ in range(count)]

    def _request(self) -> PreparedRequest:
        shared = self._shared[int(self._rng.integers(WORKERS))]
        request = Request(
            id=self._ids.new(),
            model=self._model,
            token_ids=shared + self._tokens(PROMPT_TOKENS - SHARED_TOKENS),
            received_ms=SystemClock().wall_ms(),
            stop=StopConditions(max_tokens=100),
        )
        return PreparedRequest(lane_of(request.id, self._lanes), encode(request, request.id))

    def _tokens(self, count: int) -> bytes:
        return self._rng.integers(100_000, size=count, dtype="<u4").tobytes()


class RouterLatencySide:
    """The router or the echo: its topics and its processes."""

    def __init__(
        self, name: str, log: KafkaLog, producer: BareProducer, *processes: ManagedProcess
    ) -> None:
        self.name = name
        self.processes = list(processes)
        self.idle_share = 0.0
        """Share of a core that the processes take without requests; see `measure_idle`."""
        self._log = log
        self._producer = producer
        self._clock = SystemClock()
        self._due: dict[bytes, float] = {}
        self._took: list[float] = []
        self._free = asyncio.Semaphore(0)
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
                        self._free.release()

    def _id_of(self, record: Record) -> bytes:
        """The request id of a record; an assignment is also queued for its worker."""
        assignment = decode(record) if type_of(record) == b"Assignment" else None
        if not isinstance(assignment, Assignment):
            return record.key or b""
        if self.assigned is not None:
            self.assigned.put_nowait(assignment)
        return assignment.request.id.encode()

    async def measure_idle(self) -> None:
        """Measure the share of a core that the processes take without requests."""
        cpu_s = self._cpu_s
        await self._clock.sleep(IDLE_MEASUREMENT_S)
        self.idle_share = (self._cpu_s - cpu_s) / IDLE_MEASUREMENT_S

    async def play_round(
        self, requests: Sequence[PreparedRequest], rate: float, burst_s: float = 0.0
    ) -> RouterLatencyRound:
        """Send requests at a rate, independently of the answers.

        Those that are due within `burst_s` are sent together, when the last of them is due.
        """
        began = self._begin()
        for number, request in enumerate(requests):
            due = began.at + number / rate
            if (early := due - self._clock.now()) > 0:
                await self._clock.sleep(max(early, burst_s))
            await self._send(request, due)
        return await self._end(began, len(requests), rate)

    async def play_saturated(
        self, requests: Sequence[PreparedRequest], in_flight: int = IN_FLIGHT
    ) -> RouterLatencyRound:
        """Send requests as fast as they are answered, with a fixed number in flight."""
        self._free = asyncio.Semaphore(in_flight)
        began = self._begin()
        for request in requests:
            await self._free.acquire()
            await self._send(request, self._clock.now())
        return await self._end(began, len(requests), float("nan"))

    async def _send(self, request: PreparedRequest, due: float) -> None:
        assert request.entry.key is not None
        self._due[request.entry.key] = due
        await self._producer.send(REQUESTS, request.lane, (request.entry,))

    @property
    def _cpu_s(self) -> float:
        return sum(map(cpu_time_s, self.processes))

    def _begin(self) -> RoundStart:
        self._took, self._due = [], {}
        return RoundStart(self._clock.now(), self._cpu_s, time.process_time())

    async def _end(self, began: RoundStart, count: int, rate: float) -> RouterLatencyRound:
        """Wait for the answers; the figures of the round."""
        sent_at, answered = self._clock.now(), len(self._took)
        while self._due and self._clock.now() < sent_at + DRAIN_TIMEOUT_S:
            for process in self.processes:
                process.check()
            await self._clock.sleep(0.01)
        lasted_s = self._clock.now() - began.at
        cpu_s = self._cpu_s - began.cpu_s
        took_ms = [1000 * t for t in self._took]
        return RouterLatencyRound(
            self.name,
            rate,
            percentile(took_ms, 0.5),
            percentile(took_ms, 0.99),
            cpu_s / count * 1e6,
            (cpu_s - self.idle_share * lasted_s) / count * 1e6,
            (time.process_time() - began.own_cpu_s) / count * 1e6,
            count / (sent_at - began.at),
            answered / (sent_at - began.at),
            len(self._due),
        )


class RoundStart(NamedTuple):
    """The start of a round: the time, and the CPU time of the processes and of this one so far."""

    at: float
    cpu_s: float
    own_cpu_s: float


class RegisteredWorkers:
    """Workers that consist of registry cards and heartbeats only."""

    def __init__(self, producer: BareProducer, cards: Iterable[WorkerCard]) -> None:
        self._producer = producer
        self._beats = [
            encode(Heartbeat(worker=card.id, epoch=card.epoch, slot_offset=0), card.id)
            for card in cards
            if card.epoch is not None
        ]
        self._rng = random.Random(1)

    async def send_heartbeats(self) -> None:
        """Send a heartbeat of each worker every second, until cancelled."""
        while True:
            for beat in self._beats:
                await self._producer.send(KV_EVENTS, None, (beat,))
                await asyncio.sleep(HEARTBEAT_S / len(self._beats))

    async def finish_runs(self, assigned: asyncio.Queue[Assignment]) -> None:
        """Report assigned runs as started and finished, until cancelled."""
        while True:
            lanes: dict[int, list[Entry]] = defaultdict(list)
            waiting = [await assigned.get()]
            while not assigned.empty():
                waiting.append(assigned.get_nowait())
            for assignment in waiting:
                lanes[assignment.origin.partition] += self._run_records(assignment)
            for lane, entries in lanes.items():
                await self._producer.send(LEDGER, lane, entries)

    def _run_records(self, assignment: Assignment) -> tuple[Entry, Entry]:
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
        finished = Finished(**named, code="stop", output_tokens=1)
        return encode(started, assignment.request.id), encode(finished, assignment.request.id)


async def register_workers(on: BenchEnvironment, producer: BareProducer) -> RegisteredWorkers:
    """Register WORKERS workers of MODEL."""
    config = EngineConfig(
        model=MODEL, context_length=131_072, kv_cache_block_size=16, total_kv_blocks=100_000,
        max_num_seqs=256,
    )  # fmt: skip
    cards = [await on.register_worker(f"bench-{n}", config) for n in range(WORKERS)]
    return RegisteredWorkers(producer, cards)


async def play_beside(
    tasks: list[asyncio.Task[Any]], rounds: Coroutine[Any, Any, Figures]
) -> Figures:
    """The figures of all rounds, which are added to the background tasks. These never return: if
    one ends, its error is raised."""
    playing = asyncio.create_task(rounds)
    tasks.append(playing)
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done - {playing}:
        task.result()
    return playing.result()
