"""Overhead of kvlane on a real vLLM: tokens/s compared with `AsyncLLM` alone, and cost of KV
events.

    direct   streams of AsyncLLM.generate, with text, read to their ends
    memory   as many runs of a worker around the same engine, on the log in memory
    kafka    the same, on a real Kafka; its broker runs on the same cores, so
             that this one measures the machine more than the worker

All take turns in the same run on the same engine: eight streams of a tiny model on this machine's
CPU, or, with `KVLANE_MODEL_PATH` and `KVLANE_ENGINE_ARGS`, 8 and 64 of another model as a worker
with these settings runs it, such as one on a GPU. The cost of publishing the events of a step is
measured with the publisher of the engine's cores, in a loop of steps that compute in between, as a
scheduler does.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from kvlane.app.demo import tiny_model
from kvlane.app.engine.interface import (
    Engine,
    EngineError,
    EngineOutput,
    GenerateContext,
    KvEventListener,
)
from kvlane.app.engine.vllm.async_llm import VllmEngine
from kvlane.app.engine.vllm.versions import check_plugin, installed_version
from kvlane.app.preprocess.models.model_folder import read_folder
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.serving.worker_model import ModelPublisher
from kvlane.app.settings import Settings
from kvlane.app.worker import Worker
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import decode, pack_tokens
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.ports import Log, Partition
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Assignment, EngineConfig, Finished, RequestOffset
from kvlane.streams.request import Request, SamplingOptions, StopConditions
from kvlane.streams.topics import ASSIGNMENTS, LEDGER, REQUESTS
from workbench.bench.bench_environment import BenchFailed, PrintLine, bench_environment
from workbench.bench.report import Report, Threshold
from workbench.bench.statistics import percentile, spread

TINY_STREAMS = (8,)
STREAMS = (8, 64)
"""With a given model."""
CACHE_BLOCKS = 512
"""Of the tiny model."""
PROMPT_TOKENS = 96
OVERHEAD_LIMIT = 0.05
STEP_LIMIT_US = 50.0
STEP_BUSY_S = 0.001
"""Other work of a step of the loop; steps of engines take longer."""
STEPS = 2000
BLOCKS_PER_STEP = 8
"""Every stream fills a block: many more than in a real step, where one in sixteen does."""
ROUND_TIMEOUT_S = 120.0


Speeds = dict[tuple[int, str], list[float]]
"""Tokens/s in each round, by number of streams and side."""


class Subject(NamedTuple):
    """The model of a run, its engine's arguments, and the numbers of streams."""

    folder: Path
    arguments: Mapping[str, Any]
    streams: Sequence[int]


class VllmScale(NamedTuple):
    """Amount of work: tokens per answer, and rounds of each side."""

    tokens: int
    rounds: int


QUICK = VllmScale(tokens=300, rounds=11)
FULL = VllmScale(tokens=900, rounds=15)


class BorrowedEngine(Engine):
    """A running engine that outlives its worker."""

    def __init__(self, engine: VllmEngine, config: EngineConfig) -> None:
        self._engine = engine
        self._config = config
        self.listener: KvEventListener | None = None

    def set_kv_event_listener(self, listener: KvEventListener) -> None:
        self.listener = listener

    async def start(self, worker_id: str) -> EngineConfig:
        """Return the configuration; the engine was started before."""
        assert worker_id
        return self._config

    def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        return self._engine.generate(request, context)

    async def cleanup(self) -> None:
        """Keep the engine running for the other sides."""


class VllmWorkerSide:
    """A worker around the engine, on one log."""

    def __init__(
        self, name: str, log: Log, settings: Settings, engine: BorrowedEngine, model: Path
    ) -> None:
        self._name = name
        self._log = log
        self._clock = SystemClock()
        self.context = ProcessContext(name, self._clock)
        self._publisher = RecordPublisher(log, self._clock)
        self._engine = engine
        offer = ModelPublisher(log, settings, self.context, read_folder(model))
        self._worker = Worker(log, settings, self.context, engine, worker_id=name, offer=offer)
        self._sent = 0

    @property
    def listener(self) -> KvEventListener | None:
        """The listener of this worker for cache events."""
        return self._engine.listener

    async def start(self) -> None:
        await self._worker.start()

    async def stop(self) -> None:
        await self._worker.stop()
        await self.context.cancel_tasks()

    async def run_round(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Run the prompts; seconds until the last one has ended in the ledger."""
        lanes = await self._log.partitions(LEDGER)
        ends = await self._log.end_offsets(LEDGER, range(lanes))
        reader = self._log.reader()
        reader.assign({Partition(LEDGER, lane): end for lane, end in ends.items()})
        assignments = [self._assignment(prompt, tokens) for prompt in prompts]
        began_at = self._clock.now()
        try:
            await asyncio.gather(
                *(self._publisher.publish(ASSIGNMENTS, self._name, each) for each in assignments)
            )
            left, until = {a.request.id for a in assignments}, began_at + ROUND_TIMEOUT_S
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
        self._sent += 1
        request = Request(
            id=f"{self._name}-{self._sent}",
            token_ids=pack_tokens(prompt),
            stop=StopConditions(max_tokens=tokens, ignore_eos=True),
            sampling=SamplingOptions(temperature=0.0),
        )
        assert self._worker.epoch is not None
        return Assignment(
            worker=self._name, epoch=self._worker.epoch, attempt=0, phase="aggregated",
            request=request, origin=RequestOffset(topic=REQUESTS, partition=0, offset=0),
            responses_from=0, deadline_ms=self._clock.wall_ms() + int(ROUND_TIMEOUT_S * 1000),
            budget_s=ROUND_TIMEOUT_S,
        )  # fmt: skip


async def bench_vllm(
    settings: Settings, scale: VllmScale, print_line: PrintLine, progress: Callable[[float], None]
) -> Report:
    """Run it; `progress` gets shares of the whole. Raises BenchFailed, BrokerUnavailable."""
    if settings.model_path is None:
        os.environ.update(tiny_model.environment())
    try:
        print_line(f"vLLM {installed_version()}")
        check_plugin()
    except EngineError as e:
        raise BenchFailed(str(e)) from e
    with tempfile.TemporaryDirectory(prefix="kvlane-bench-") as scratch:
        steps = _publishing(Path(scratch))
        progress(0.1)
        if settings.model_path is None:
            folder = tiny_model.make_model(Path(scratch) / "model")
            subject = Subject(folder, tiny_model.engine_arguments(CACHE_BLOCKS), TINY_STREAMS)
        else:
            subject = Subject(settings.model_path, settings.engine_args, STREAMS)
        async with bench_environment(settings, print_line) as on:
            speeds = await _speeds(on.log, settings, subject, scale, progress)
    return _report(speeds, steps)


async def _speeds(
    kafka: Log,
    settings: Settings,
    subject: Subject,
    form: VllmScale,
    progress: Callable[[float], None],
) -> Speeds:
    clock, model = SystemClock(), subject.folder
    engine = VllmEngine(clock, str(model), model="tiny", arguments=subject.arguments)
    hearing: list[KvEventListener | None] = [None]
    engine.set_kv_event_listener(
        lambda events, rank=0: hearing[0](events, rank) if hearing[0] else None
    )
    try:
        config = await engine.start("bench")
        memory = MemoryLog(MemoryBroker(clock, lanes=settings.lanes), "bench")
        await memory.start()
        logs: dict[str, Log] = {"memory": memory, "kafka": kafka}
        sides = {
            name: VllmWorkerSide(name, log, settings, BorrowedEngine(engine, config), model)
            for name, log in logs.items()
        }
        for side in sides.values():
            await side.start()
        speeds: Speeds = {(n, name): [] for n in subject.streams for name in ("direct", *logs)}
        rng = random.Random(1)
        for number in range(-1, form.rounds):  # the first one warms up
            order = list(speeds)
            rng.shuffle(order)
            for streams, name in order:
                prompts = [
                    rng.choices(range(16, tiny_model.VOCABULARY_SIZE), k=PROMPT_TOKENS)
                    for _ in range(streams)
                ]
                if name == "direct":
                    hearing[0] = None
                    took_s = await _direct(engine, prompts, form.tokens)
                else:
                    hearing[0] = sides[name].listener
                    took_s = await sides[name].run_round(prompts, form.tokens)
                if number >= 0:
                    speeds[streams, name].append(streams * form.tokens / took_s)
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
    if sum(made) != len(prompts) * tokens:
        raise BenchFailed(f"vLLM made {sum(made)} tokens, not {len(prompts) * tokens}")
    return took_s


# --- publishing ----------------------------------------------------------------------------------


class PublishTimes(NamedTuple):
    """Microseconds of a step for publishing; all of it, since no thread takes part."""

    p50_us: float
    p99_us: float


def _publishing(scratch: Path) -> PublishTimes:
    """Publish from a loop of steps that compute in between, with a connected reader."""
    import zmq

    from kvlane.app.engine.vllm.zmq_publisher import NonBlockingPublisher

    endpoint = f"ipc://{scratch / 'events'}"
    work = range(_work_of(STEP_BUSY_S))
    with zmq.Context() as context, context.socket(zmq.SUB) as reader:
        reader.subscribe(b"")
        reader.set_hwm(0)
        reader.bind(endpoint)
        publisher = NonBlockingPublisher(0, endpoint)
        calls_us: list[float] = []
        try:
            for batch in _batches():
                sum(work)
                calls_us.append(_published(publisher, batch) * 1e6)
        finally:
            publisher.shutdown()
    return PublishTimes(median(calls_us), percentile(calls_us, 0.99))


def _work_of(seconds: float) -> int:
    began_at = perf_counter()
    sum(range(1_000_000))
    return int(1_000_000 * seconds / (perf_counter() - began_at))


def _batches() -> list[Any]:
    """The events of each step."""
    from vllm.distributed.kv_events import BlockStored, KVEventBatch

    return [
        KVEventBatch(
            ts=float(step),
            events=[
                BlockStored([step * 100 + n], None, list(range(16)), 16, None, "GPU", None)
                for n in range(BLOCKS_PER_STEP)
            ],
        )
        for step in range(STEPS)
    ]


def _published(publisher: Any, batch: object) -> float:
    """Publish it; seconds that the call took."""
    began_at = perf_counter()
    publisher.publish(batch)
    return perf_counter() - began_at


def _report(speeds: Speeds, steps: PublishTimes) -> Report:
    rows: list[dict[str, Any]] = [
        {"streams": streams, "side": name, "tokens/s": str(spread(each)), "rounds": len(each)}
        for (streams, name), each in speeds.items()
    ]
    thresholds = []
    for streams in dict.fromkeys(streams for streams, _ in speeds):
        # Of sides of one round, which ran in turn: a machine is not always equally fast.
        pairs = zip(speeds[streams, "memory"], speeds[streams, "direct"], strict=True)
        overhead = 1 - median(worker / direct for worker, direct in pairs)
        thresholds.append(
            Threshold(f"overhead of the worker, {streams} streams", round(overhead * 100, 2), "%",
                f"<= {OVERHEAD_LIMIT:.0%}", overhead <= OVERHEAD_LIMIT)
        )  # fmt: skip
    thresholds.append(
        Threshold("publishing, p50 of a step", round(steps.p50_us, 1), "us",
            f"<= {STEP_LIMIT_US:g}; p99 is {steps.p99_us:.0f}", steps.p50_us <= STEP_LIMIT_US)
    )  # fmt: skip
    return Report("vllm", rows, thresholds)
