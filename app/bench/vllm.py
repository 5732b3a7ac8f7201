"""What kvlane costs a real vLLM: tokens a second beside `AsyncLLM` alone, and a step's events.

    direct   eight streams of AsyncLLM.generate, with text, read to their ends
    memory   eight runs of a worker around the same engine, on the log in memory
    kafka    the same, on a real Kafka; its broker takes what it needs from the same cores, so
             that this one says more of the machine than of the worker

All take turns in the same run on the same engine, a tiny model on this machine's CPU. What a step
pays for publishing is measured with the publisher of the engine's cores, in a loop of steps that
compute in between, as a scheduler does.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from app.bench.ground import BenchFailed, Said, ground
from app.bench.report import Bar, Report
from app.bench.samples import percentile, spread
from app.demo import tiny_model
from app.engine.contract import (
    BlocksListener,
    Engine,
    EngineError,
    EngineOutput,
    GenerateContext,
)
from app.engine.vllm.engine import VllmEngine
from app.engine.vllm.plugin import SCHEME
from app.engine.vllm.versions import check_plugin, installed
from app.lifetime import Lifetime
from app.preprocess.modelfolder import read_folder
from app.serving.offer import Offer
from app.settings import Settings
from app.worker import Worker
from streams.clock import SystemClock
from streams.codecs import decode, pack_tokens
from streams.memory.broker import MemoryBroker
from streams.outbox import Outbox
from streams.ports import Log, Partition
from streams.records import (
    Assignment,
    EngineConfig,
    Finished,
    Origin,
    Request,
    SamplingOptions,
    StopConditions,
)
from streams.topics import ASSIGNMENTS, LEDGER, REQUESTS

STREAMS = 8
PROMPT_TOKENS = 96
OVERHEAD = 0.05
STEP_US = 50.0
STEP_BUSY_S = 0.001
"""What a step of the loop does besides; those of engines take longer."""
STEPS = 2000
BLOCKS_A_STEP = 8
"""Every stream fills one: many more than in a real step, where one in sixteen does."""
ROUND_S = 120.0


class Form(NamedTuple):
    """How much is measured: tokens an answer, and rounds of each side."""

    tokens: int
    rounds: int


QUICK = Form(tokens=300, rounds=11)
FULL = Form(tokens=900, rounds=15)


class Lent(Engine):
    """An engine that runs already, and goes on when its worker ends."""

    def __init__(self, engine: VllmEngine, config: EngineConfig) -> None:
        self._engine = engine
        self._config = config
        self.listener: BlocksListener | None = None

    def listen(self, listener: BlocksListener) -> None:
        """Hears of the cache as long as its worker is the one that works."""
        self.listener = listener

    async def start(self, worker_id: str) -> EngineConfig:
        """It was started, under whatever name."""
        assert worker_id
        return self._config

    def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """Its stream."""
        return self._engine.generate(request, context)

    async def cleanup(self) -> None:
        """Others use it."""


class Side:
    """A worker around the engine, on one log."""

    def __init__(self, name: str, log: Log, settings: Settings, engine: Lent, model: Path) -> None:
        self._name = name
        self._log = log
        self._clock = SystemClock()
        self.life = Lifetime(name, self._clock)
        self._outbox = Outbox(log, self._clock)
        self._engine = engine
        offer = Offer(log, settings, self.life, read_folder(model))
        self._worker = Worker(log, settings, self.life, engine, worker_id=name, offer=offer)
        self._asked = 0

    @property
    def listener(self) -> BlocksListener | None:
        """Who hears of the cache."""
        return self._engine.listener

    async def start(self) -> None:
        """Register the worker."""
        await self._worker.start()

    async def stop(self) -> None:
        """End it."""
        await self._worker.stop()
        await self.life.end()

    async def round(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Answer the prompts; seconds until the last of them has ended in the ledger."""
        lanes = await self._log.partitions(LEDGER)
        ends = await self._log.end_offsets(LEDGER, range(lanes))
        reader = self._log.reader()
        reader.assign({Partition(LEDGER, lane): end for lane, end in ends.items()})
        assignments = [self._assignment(prompt, tokens) for prompt in prompts]
        began_at = self._clock.now()
        try:
            await asyncio.gather(
                *(self._outbox.persist(ASSIGNMENTS, self._name, each) for each in assignments)
            )
            left, until = {a.request.id for a in assignments}, began_at + ROUND_S
            while left:
                if self._clock.now() > until:
                    raise BenchFailed(f"{self._name}: {len(left)} answers are not over")
                for records in (await reader.poll(1.0)).values():
                    ended = [r for r in map(decode, records) if isinstance(r, Finished)]
                    if any(r.code != "length" for r in ended):
                        raise BenchFailed(f"{self._name}: an answer ended as {ended[0].code}")
                    left -= {r.id for r in ended}
            return self._clock.now() - began_at
        finally:
            await reader.close()

    def _assignment(self, prompt: Sequence[int], tokens: int) -> Assignment:
        self._asked += 1
        request = Request(
            id=f"{self._name}-{self._asked}",
            token_ids=pack_tokens(prompt),
            stop=StopConditions(max_tokens=tokens, ignore_eos=True),
            sampling=SamplingOptions(temperature=0.0),
        )
        assert self._worker.epoch is not None
        return Assignment(
            worker=self._name, epoch=self._worker.epoch, attempt=0, phase="aggregated",
            request=request, origin=Origin(topic=REQUESTS, partition=0, offset=0),
            responses_from=0, deadline_ms=self._clock.wall_ms() + int(ROUND_S * 1000),
            budget_s=ROUND_S,
        )  # fmt: skip


async def vllm(
    settings: Settings, form: Form, said: Said, progress: Callable[[float], None]
) -> Report:
    """Measure. `progress` hears of shares of the whole. Raises BenchFailed, BrokerUnavailable."""
    os.environ.update(tiny_model.environment())
    try:
        said(f"vLLM {installed()}")
        check_plugin()
    except EngineError as e:
        raise BenchFailed(str(e)) from e
    with tempfile.TemporaryDirectory(prefix="kvlane-bench-") as scratch:
        steps = _publishing(Path(scratch))
        progress(0.1)
        model = tiny_model.make_model(Path(scratch) / "model")
        async with ground(settings, said) as on:
            speeds = await _speeds(on.log, settings, model, form, progress)
    return _report(speeds, steps)


async def _speeds(
    kafka: Log, settings: Settings, model: Path, form: Form, progress: Callable[[float], None]
) -> dict[str, list[float]]:
    """Tokens a second of each side, round by round."""
    clock = SystemClock()
    engine = VllmEngine(clock, str(model), model="tiny", arguments=tiny_model.arguments(512))
    hearing: list[BlocksListener | None] = [None]
    engine.listen(lambda events, rank=0: hearing[0](events, rank) if hearing[0] else None)
    try:
        config = await engine.start("bench")
        memory = MemoryBroker(clock, lanes=settings.lanes).connect("bench")
        await memory.start()
        logs: dict[str, Log] = {"memory": memory, "kafka": kafka}
        sides = {
            name: Side(name, log, settings, Lent(engine, config), model)
            for name, log in logs.items()
        }
        for side in sides.values():
            await side.start()
        speeds: dict[str, list[float]] = {"direct": [], "memory": [], "kafka": []}
        rng = random.Random(1)
        for number in range(-1, form.rounds):  # the first one warms up
            order = list(speeds)
            rng.shuffle(order)
            for name in order:
                prompts = [
                    rng.choices(range(16, tiny_model.VOCABULARY), k=PROMPT_TOKENS)
                    for _ in range(STREAMS)
                ]
                if name == "direct":
                    hearing[0] = None
                    took_s = await _direct(engine, prompts, form.tokens)
                else:
                    hearing[0] = sides[name].listener
                    took_s = await sides[name].round(prompts, form.tokens)
                if number >= 0:
                    speeds[name].append(STREAMS * form.tokens / took_s)
            progress(0.9 / (form.rounds + 1))
        for side in sides.values():
            await side.stop()
        await memory.close()
        return speeds
    finally:
        await engine.cleanup()


async def _direct(engine: VllmEngine, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """The same answers from vLLM alone; seconds."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    llm = engine.llm
    params = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )

    async def read(number: int, prompt: Sequence[int]) -> int:
        made = 0
        async for output in llm.generate(tokens_input(list(prompt)), params, f"direct-{number}"):
            made += len(output.outputs[0].token_ids)
        return made

    began_at = perf_counter()
    made = await asyncio.gather(*(read(n, prompt) for n, prompt in enumerate(prompts)))
    took_s = perf_counter() - began_at
    if sum(made) != STREAMS * tokens:
        raise BenchFailed(f"vLLM made {sum(made)} tokens, not {STREAMS * tokens}")
    return took_s


# --- publishing ----------------------------------------------------------------------------------


class Steps(NamedTuple):
    """Microseconds that a step spends on publishing. It is all of it: no thread takes part."""

    p50_us: float
    p99_us: float


def _publishing(scratch: Path) -> Steps:
    """Publish from a loop of steps that compute in between, to a reader that is there."""
    import zmq

    from app.engine.vllm.publisher import Publisher

    endpoint = f"ipc://{scratch / 'events'}"
    work = range(_work_of(STEP_BUSY_S))
    with zmq.Context() as context, context.socket(zmq.SUB) as reader:
        reader.subscribe(b"")
        reader.set_hwm(0)
        reader.bind(endpoint)
        publisher = Publisher(0, SCHEME + endpoint)
        calls_us: list[float] = []
        try:
            for batch in _batches():
                sum(work)
                calls_us.append(_published(publisher, batch) * 1e6)
        finally:
            publisher.shutdown()
    return Steps(median(calls_us), percentile(calls_us, 0.99))


def _work_of(seconds: float) -> int:
    began_at = perf_counter()
    sum(range(1_000_000))
    return int(1_000_000 * seconds / (perf_counter() - began_at))


def _batches() -> list[Any]:
    """What each step stores."""
    from vllm.distributed.kv_events import BlockStored, KVEventBatch

    return [
        KVEventBatch(
            ts=float(step),
            events=[
                BlockStored([step * 100 + n], None, list(range(16)), 16, None, "GPU", None)
                for n in range(BLOCKS_A_STEP)
            ],
        )
        for step in range(STEPS)
    ]


def _published(publisher: Any, batch: object) -> float:
    """Publish it; seconds that the call took."""
    began_at = perf_counter()
    publisher.publish(batch)
    return perf_counter() - began_at


def _report(speeds: dict[str, list[float]], steps: Steps) -> Report:
    rows: list[dict[str, Any]] = [
        {"side": name, "tokens/s": str(spread(each)), "rounds": len(each)}
        for name, each in speeds.items()
    ]
    # Of sides of one round, which ran one after the other: a machine is not always equally fast.
    pairs = zip(speeds["memory"], speeds["direct"], strict=True)
    overhead = 1 - median(worker / direct for worker, direct in pairs)
    bars = [
        Bar("overhead of the worker", round(overhead * 100, 2), "%", f"<= {OVERHEAD:.0%}",
            overhead <= OVERHEAD)
    ]  # fmt: skip
    bars.append(
        Bar("publishing, p50 of a step", round(steps.p50_us, 1), "us",
            f"<= {STEP_US:g}; p99 is {steps.p99_us:.0f}", steps.p50_us <= STEP_US)
    )  # fmt: skip
    return Report("vllm", rows, bars)
