"""A worker harness: the test acts as the router of one worker and reads all its records."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, TypeVar

from kvlane.app.engine.echo import EchoEngine
from kvlane.app.engine.interface import Engine, EngineOutput, GenerateContext
from kvlane.app.engine.validator import ValidatingEngine
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.app.text.byte_level import ASSISTANT, USER
from kvlane.app.worker import Worker
from kvlane.streams.codecs import AnyRecord, decode, pack_tokens
from kvlane.streams.ports import Appended, Entry
from kvlane.streams.records import (
    Assignment,
    CancelRun,
    Chunk,
    EngineConfig,
    Finished,
    Heartbeat,
    RequestOffset,
    RunProgress,
)
from kvlane.streams.request import Request, StopConditions
from kvlane.streams.responses.transcript import Transcript
from kvlane.streams.topics import (
    ASSIGNMENTS,
    KV_EVENTS,
    LEDGER,
    REQUESTS,
    RESPONSES,
    lane_of,
    partition_of,
)
from tests.harness.memory_world import MemoryWorld

R = TypeVar("R", bound=AnyRecord)

PROMPT = [USER, *"naïve €uro".encode(), ASSISTANT]
STEP_S = 0.1


class WorkerHarness:
    """A worker and the router's side of its slot."""

    def __init__(self, world: MemoryWorld, name: str = "w") -> None:
        self.world, self.name = world, name
        self.slot = partition_of(name.encode(), world.broker.partitions[ASSIGNMENTS])
        self.worker: Worker
        self.ctx: ProcessContext

    async def start(self, engine: Engine | None = None, seed: int = 1, **over: Any) -> Worker:
        fields = {"worker_id": self.name, "router_id": "-", "status_port": None} | over
        settings = Settings(**fields)
        self.ctx = ProcessContext(self.name, self.world.clock, random.Random(seed))
        engine = engine or ValidatingEngine(
            EchoEngine(self.world.clock, STEP_S, max_num_seqs=settings.max_num_seqs)
        )
        log = await self.world.connect(f"{self.name}{seed}")
        self.worker = Worker(log, settings, self.ctx, engine)
        await self.worker.start()
        return self.worker

    @staticmethod
    async def started(world: MemoryWorld, *args: Any, **over: Any) -> WorkerHarness:
        """A harness whose worker has started, with these arguments of `start`."""
        harness = WorkerHarness(world)
        await harness.start(*args, **over)
        return harness

    @property
    def epoch(self) -> int:
        epoch = self.worker.epoch
        assert epoch is not None
        return epoch

    def assign(self, request_id: str = "a", **over: Any) -> Assignment:
        stop = StopConditions(max_tokens=over.pop("max_tokens", 20))
        prompt = over.pop("prompt", PROMPT)
        request = Request(id=request_id, token_ids=pack_tokens(prompt), stop=stop)
        fields: dict[str, Any] = {
            "worker": self.name, "epoch": self.worker.epoch, "attempt": 0, "phase": "aggregated",
            "request": request, "origin": RequestOffset(topic=REQUESTS, partition=0, offset=7),
            "responses_from": 3, "budget_s": 60.0,
            "deadline_ms": self.world.broker.now_ms() + 60_000,
        }  # fmt: skip
        assignment = Assignment(**(fields | over))
        self.send(assignment)
        return assignment

    def cancel(self, request_id: str = "a", attempt: int = 0) -> None:
        self.send(
            CancelRun(
                worker=self.name, epoch=self.epoch, id=request_id, attempt=attempt,
                phase="aggregated",
            )
        )  # fmt: skip

    def send(self, order: AnyRecord) -> None:
        self.world.append(ASSIGNMENTS, self.slot, order, key=self.name)

    def lane_records(self, topic: str, kind: type[R], request_id: str = "a") -> list[R]:
        records = self.world.records(topic, lane_of(request_id, self.world.lanes))
        found = [decode(r) for r in records if r.key == request_id.encode()]
        return [r for r in found if isinstance(r, kind)]

    def records_of(self, topic: str, kind: type[R]) -> list[R]:
        return [r for r in map(decode, self.world.all_records(topic)) if isinstance(r, kind)]

    def chunks(self, request_id: str = "a") -> list[Chunk]:
        return self.lane_records(RESPONSES, Chunk, request_id)

    async def wait_finished(self, request_id: str = "a") -> Finished:
        await self.world.wait_until(lambda: bool(self.lane_records(LEDGER, Finished, request_id)))
        return self.lane_records(LEDGER, Finished, request_id)[-1]

    def heartbeats(self) -> list[Heartbeat]:
        return self.records_of(KV_EVENTS, Heartbeat)


def visible(chunks: list[Chunk]) -> Transcript:
    transcript = Transcript("a")
    for chunk in chunks:
        transcript.apply(chunk)
    return transcript


def count_batches(harness: WorkerHarness) -> list[int]:
    """The sizes of the batches that this worker appends from now on."""
    sizes: list[int] = []
    log = harness.worker._log
    append_many = log.append_many

    def counted(
        topic: str, batches: Mapping[int, Sequence[Entry]]
    ) -> Mapping[int, asyncio.Future[Appended]]:
        sizes.extend(len(entries) for entries in batches.values())
        return append_many(topic, batches)

    log.append_many = counted  # type: ignore[method-assign]
    return sizes


async def next_running_runs(harness: WorkerHarness) -> tuple[RunProgress, ...]:
    await harness.world.wait_until(lambda: bool(harness.heartbeats()[-1].running))
    return harness.heartbeats()[-1].running


class ScriptedEngine(Engine):
    """An engine that follows a script of outputs, waits in seconds, and errors."""

    def __init__(self, world: MemoryWorld, *script: EngineOutput | float | Exception) -> None:
        self.world, self.script = world, script
        self.calls: list[str] = []
        self.requests: list[Request] = []
        self.is_closed = False

    async def start(self, worker_id: str) -> EngineConfig:
        self.calls.append("start")
        return EngineConfig(model="m")

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        if request.is_probe:
            yield EngineOutput.stop().with_tokens([65])
            return
        self.requests.append(request)
        try:
            for item in self.script:
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, EngineOutput):
                    yield item
                else:
                    await self.world.sleep(item)
        finally:
            self.is_closed = True

    async def abort(self, context: GenerateContext) -> None:
        self.calls.append("abort")

    async def drain(self) -> None:
        self.calls.append("drain")

    async def cleanup(self) -> None:
        self.calls.append("cleanup")


TOKEN = EngineOutput.token(65)
