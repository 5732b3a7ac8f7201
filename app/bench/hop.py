"""What a hop through the router costs: a `requests` record in, its assignment readable.

    load (this process) ──► requests ──► router ──► ledger, assignments ──► load: the time it took
                                   └───► echo   ──► assignments         ──► the same, for the least
                                                                            that a hop can be

Open loop: records are due at fixed times whatever the answers take, and the time counts from when
a record was due. The router and a bare aiokafka echo (`echo.py`) take turns on the same broker,
each on topics of its own, fed with the same records by the same program. 64 workers exist as cards
and heartbeats; what is assigned is reported as started and finished, so that load comes and goes.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from app.bench.ground import Child, Ground, Said, ground, topics
from app.bench.report import Bar, Report
from app.bench.samples import percentile, spread
from app.settings import Settings
from streams.clock import SystemClock
from streams.codecs import decode, encode, pack_tokens, token_count, type_of
from streams.ids import RequestIds
from streams.kafka.log import KafkaLog
from streams.outbox import Outbox
from streams.ports import Entry, Partition, Record
from streams.records import (
    Assignment,
    EngineConfig,
    Finished,
    Heartbeat,
    Request,
    Started,
    StopConditions,
    WorkerCard,
)
from streams.topics import ASSIGNMENTS, KV_EVENTS, LEDGER, REQUESTS, lane_of

WORKERS = 64
PROMPT_TOKENS = 2000
SHARED_TOKENS = 1000
"""The first half of a prompt is one of WORKERS beginnings, as those of system prompts are."""
HEARTBEAT_S = 1.0
DRAIN_S = 20.0
"""What the last assignments get to become readable; what is still missing then counts as lost."""
IDLE_S = 4.0
WARM_RATE, WARM_S = 200, 20.0
"""The compiler of the broker's JVM has done most of its work after 4000 records on either side."""
P50_FACTOR, P99_FACTOR, CPU_US = 1.5, 1.5, 300
SIDES = ("echo", "router")
MODEL = "bench"


class Form(NamedTuple):
    """How much is measured: requests a second, rounds, seconds a round."""

    rates: tuple[int, ...]
    rounds: int
    round_s: float
    warm_s: float = WARM_S


QUICK = Form(rates=(100,), rounds=3, round_s=8.0)
FULL = Form(rates=(100, 500, 1000), rounds=5, round_s=20.0)


class Round(NamedTuple):
    """One side at one rate. Times in milliseconds, CPU of its process in microseconds."""

    side: str
    rate: int
    p50_ms: float
    p99_ms: float
    cpu_us: float
    per_s: float
    lost: int


class Side:
    """One of the two that are compared: its topics, and the process that serves them."""

    def __init__(self, name: str, log: KafkaLog, child: Child) -> None:
        self.name = name
        self.child = child
        self._log = log
        self._clock = SystemClock()
        self._due: dict[bytes, float] = {}
        self._took: list[float] = []
        self.assigned: asyncio.Queue[Assignment] | None = None
        """What was read, for workers that answer. Bound: what may be under way in a round."""

    async def read(self) -> None:
        """Take the time of what comes out, until cancelled."""
        numbers = range(await self._log.partitions(ASSIGNMENTS))
        ends = await self._log.end_offsets(ASSIGNMENTS, list(numbers))
        reader = self._log.reader()
        reader.assign({Partition(ASSIGNMENTS, n): ends[n] for n in numbers})
        while True:
            batches = await reader.poll(0.5)
            now = self._clock.now()
            for records in batches.values():
                for record in records:
                    if (due := self._due.pop(self._id_of(record), None)) is not None:
                        self._took.append(now - due)

    def _id_of(self, record: Record) -> bytes:
        """The request that a record is about; an assignment is handed on to its worker."""
        said = decode(record) if type_of(record) == b"Assignment" else None
        if not isinstance(said, Assignment):
            return record.key or b""
        if self.assigned is not None:
            self.assigned.put_nowait(said)
        return said.request.id.encode()

    async def idle(self) -> float:
        """The share of a core that its process takes while nothing is asked of it."""
        cpu_s = self.child.cpu_s
        await self._clock.sleep(IDLE_S)
        return (self.child.cpu_s - cpu_s) / IDLE_S

    async def play(self, entries: list[Entry], rate: int) -> Round:
        """Send entries at a rate; what became of them."""
        self._took, self._due = [], {}
        cpu_s, began = self.child.cpu_s, self._clock.now()
        sends = []
        for number, entry in enumerate(entries):
            due = began + number / rate
            if (early := due - self._clock.now()) > 0:
                await self._clock.sleep(early)
            assert entry.key is not None
            self._due[entry.key] = due
            sends.append(asyncio.create_task(self._log.append(REQUESTS, entry)))
        await asyncio.gather(*sends)
        until = self._clock.now() + DRAIN_S
        while self._due and self._clock.now() < until:
            self.child.check()
            await self._clock.sleep(0.01)
        lasted = self._clock.now() - began
        took_ms = [1000 * t for t in self._took]
        return Round(
            self.name,
            rate,
            percentile(took_ms, 0.5),
            percentile(took_ms, 0.99),
            (self.child.cpu_s - cpu_s) / len(entries) * 1e6,
            len(took_ms) / lasted,
            len(self._due),
        )


class Workers:
    """Workers that are nothing but records."""

    def __init__(self, on: Ground, cards: list[WorkerCard]) -> None:
        self._on = on
        self._cards = cards
        self._outbox = Outbox(on.log, on.clock)
        self._rng = random.Random(1)

    async def beat(self) -> None:
        """A heartbeat of each, every second, until cancelled."""
        while True:
            for card in self._cards:
                assert card.epoch is not None
                beat = Heartbeat(worker=card.id, epoch=card.epoch, slot_offset=0)
                await self._outbox.send(KV_EVENTS, card.id, beat)
                await self._on.clock.sleep(HEARTBEAT_S / len(self._cards))

    async def answer(self, assigned: asyncio.Queue[Assignment]) -> None:
        """Report what was assigned as started and finished, in batches, until cancelled."""
        while True:
            lanes: dict[int, list[tuple[str, Started | Finished]]] = defaultdict(list)
            came = [await assigned.get()]
            while not assigned.empty():
                came.append(assigned.get_nowait())
            for said in came:
                lane = lane_of(said.request.id, self._on.settings.lanes)
                lanes[lane] += [(said.request.id, fact) for fact in self._life(said)]
            for lane, facts in lanes.items():
                await self._outbox.send_batch(LEDGER, lane, facts)

    def _life(self, said: Assignment) -> tuple[Started, Finished]:
        run = self._rng.getrandbits(64)
        named: dict[str, Any] = {
            "id": said.request.id,
            "attempt": said.attempt,
            "phase": said.phase,
            "worker": said.worker,
            "epoch": said.epoch,
            "run": run,
        }
        started = Started(
            **named, origin=said.origin, responses_from=said.responses_from,
            deadline_ms=said.deadline_ms, prompt_tokens=token_count(said.request.token_ids),
        )  # fmt: skip
        return started, Finished(**named, code="stop", output_tokens=1)


class Prompts:
    """Requests of a shape that is common: half a beginning that many share, half their own."""

    def __init__(self) -> None:
        self._rng = random.Random(17)
        self._ids = RequestIds(SystemClock(), self._rng)
        self._shared = [self._tokens(SHARED_TOKENS) for _ in range(WORKERS)]

    def entries(self, count: int) -> list[Entry]:
        """Log entries of that many new requests."""
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


async def hop(
    settings: Settings, form: Form, said: Said, progress: Callable[[float], None]
) -> Report:
    """Measure. `progress` hears of shares of the whole. Raises BenchFailed, BrokerUnavailable."""
    async with ground(settings, said) as on:
        echo_settings = on.settings.model_copy(
            update={"topic_prefix": f"{on.settings.topic_prefix}echo."}
        )
        echo_log = KafkaLog(echo_settings.connection("bench"), prefix=echo_settings.topic_prefix)
        await echo_log.start()
        tasks: list[asyncio.Task[Any]] = []
        try:
            await topics(echo_log, echo_settings)
            sides = await _sides(on, echo_log, echo_settings, tasks)
            playing = asyncio.create_task(_play(sides, form, said, progress))
            tasks.append(playing)
            # What runs beside the play has no end: if it ends, its error is the result.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {playing}:
                task.result()
            return playing.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            on.stop()
            await echo_log.close()


async def _sides(
    on: Ground, echo_log: KafkaLog, echo_settings: Settings, tasks: list[asyncio.Task[Any]]
) -> list[Side]:
    """Both sides, ready; what runs beside them is added to `tasks`."""
    config = EngineConfig(
        model=MODEL, context_length=131_072, kv_cache_block_size=16, total_kv_blocks=100_000,
        max_num_seqs=256,
    )  # fmt: skip
    workers = Workers(on, [await on.register(f"bench-{n}", config) for n in range(WORKERS)])
    prefix = echo_settings.topic_prefix
    echo = on.launch("echo", "app.bench.echo", topic_prefix=prefix)
    router = on.launch("router", "faststream", "run", "app.router:app", log_level="INFO")
    sides = [Side("echo", echo_log, echo), Side("router", on.log, router)]
    assigned: asyncio.Queue[Assignment] = asyncio.Queue(1_000_000)
    sides[1].assigned = assigned
    beside = (workers.beat(), workers.answer(assigned), *(side.read() for side in sides))
    tasks += [asyncio.create_task(work) for work in beside]
    await on.until(lambda: "ready" in echo.output, echo)
    return sides


async def _play(
    sides: list[Side], form: Form, said: Said, progress: Callable[[float], None]
) -> Report:
    prompts = Prompts()
    warm = int(WARM_RATE * form.warm_s)
    whole = len(sides) * (warm / WARM_RATE + form.rounds * form.round_s * len(form.rates))
    for side in sides:
        warmed = await side.play(prompts.entries(warm), WARM_RATE)
        said(f"warm: {side.name} p50 {warmed.p50_ms:.1f} ms, {warmed.lost} lost")
        progress(warm / WARM_RATE / whole)
    idle = {side.name: await side.idle() for side in sides}
    rounds: list[Round] = []
    for rate in form.rates:
        for number in range(form.rounds):
            # Alternating, and not always the same one first: what else the machine does hits both.
            for side in sides if number % 2 == 0 else sides[::-1]:
                rounds.append(await side.play(prompts.entries(int(rate * form.round_s)), rate))
                progress(form.round_s / whole)
    return _report(rounds, idle, form)


def _report(rounds: list[Round], idle: dict[str, float], form: Form) -> Report:
    rows: list[dict[str, Any]] = []
    bars: list[Bar] = []
    for rate in form.rates:
        sides = {s: [r for r in rounds if (r.side, r.rate) == (s, rate)] for s in SIDES}
        rows += [_row(rate, own, idle[side]) for side, own in sides.items()]
        p50 = _ratio(sides, lambda r: r.p50_ms)
        p99 = _ratio(sides, lambda r: r.p99_ms)
        cpu_us = {s: median(r.cpu_us for r in own) for s, own in sides.items()}
        extra_us = cpu_us["router"] - cpu_us["echo"]
        lost = sum(r.lost for r in sides["router"])
        bars += [
            Bar(f"p50 to echo at {rate}/s", p50, "x", f"<= {P50_FACTOR}", p50 <= P50_FACTOR),
            Bar(f"p99 to echo at {rate}/s", p99, "x", f"<= {P99_FACTOR}", p99 <= P99_FACTOR),
            Bar(f"CPU beyond echo at {rate}/s", extra_us, "us/req", f"<= {CPU_US}",
                extra_us <= CPU_US),
            Bar(f"lost at {rate}/s", lost, "requests", "0", not lost),
        ]  # fmt: skip
    return Report("hop", rows, bars)


def _row(rate: int, own: list[Round], idle: float) -> dict[str, Any]:
    return {
        "side": own[0].side,
        "req/s": rate,
        "p50 ms": str(spread([r.p50_ms for r in own])),
        "p99 ms": str(spread([r.p99_ms for r in own])),
        "CPU us/req": str(spread([r.cpu_us for r in own])),
        "idle CPU %": 100 * idle,
        "answered/s": median(r.per_s for r in own),
        "lost": sum(r.lost for r in own),
        "rounds": len(own),
    }


def _ratio(sides: dict[str, list[Round]], of: Callable[[Round], float]) -> float:
    """Router to echo, each by its median round."""
    router, echo = (median(map(of, sides[side])) for side in ("router", "echo"))
    return router / echo
