"""The router's side of one worker: a test says every word to it and reads all it says."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeVar

from app.engine.contract import (
    Engine,
    EngineOutput,
    GenerateContext,
)
from app.engine.echo import EchoEngine
from app.engine.validator import ValidatedEngine
from app.lifetime import Lifetime
from app.preprocess.byte_level import ASSISTANT, USER
from app.settings import Settings
from app.worker import Worker
from streams.codecs import AnyRecord, decode, pack_tokens
from streams.ports import Appended, Entry
from streams.records import (
    Assignment,
    CancelRun,
    Chunk,
    EngineConfig,
    Finished,
    Heartbeat,
    Origin,
    Request,
    RunProgress,
    StopConditions,
)
from streams.topics import (
    ASSIGNMENTS,
    KV_EVENTS,
    LEDGER,
    REQUESTS,
    RESPONSES,
    lane_of,
    partition_of,
)
from streams.transcript import Transcript
from tests.worlds import World

R = TypeVar("R", bound=AnyRecord)

PROMPT = [USER, *"naïve €uro".encode(), ASSISTANT]
STEP_S = 0.1


class Desk:
    """A worker and the router's side of its slot."""

    def __init__(self, world: World, name: str = "w") -> None:
        self.world, self.name = world, name
        self.slot = partition_of(name.encode(), world.broker.partitions[ASSIGNMENTS])
        self.worker: Worker
        self.life: Lifetime

    async def start(self, engine: Engine | None = None, seed: int = 1, **over: Any) -> Worker:
        settings = Settings(**({"worker_id": self.name, "router_id": "-"} | over))
        self.life = Lifetime(self.name, self.world.clock, random.Random(seed))
        engine = engine or ValidatedEngine(
            EchoEngine(self.world.clock, STEP_S, max_num_seqs=settings.max_num_seqs)
        )
        log = await self.world.connect(f"{self.name}{seed}")
        self.worker = Worker(log, settings, self.life, engine)
        await self.worker.start()
        return self.worker

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
            "request": request, "origin": Origin(topic=REQUESTS, partition=0, offset=7),
            "responses_from": 3, "budget_s": 60.0,
            "deadline_ms": self.world.broker.now_ms() + 60_000,
        }  # fmt: skip
        assignment = Assignment(**(fields | over))
        self.tell(assignment)
        return assignment

    def cancel(self, request_id: str = "a", attempt: int = 0) -> None:
        self.tell(
            CancelRun(
                worker=self.name, epoch=self.epoch, id=request_id, attempt=attempt,
                phase="aggregated",
            )
        )  # fmt: skip

    def tell(self, order: AnyRecord) -> None:
        self.world.append(ASSIGNMENTS, self.slot, order, key=self.name)

    def lane(self, topic: str, kind: type[R], request_id: str = "a") -> list[R]:
        records = self.world.records(topic, lane_of(request_id, self.world.lanes))
        found = [decode(r) for r in records if r.key == request_id.encode()]
        return [r for r in found if isinstance(r, kind)]

    def said(self, topic: str, kind: type[R]) -> list[R]:
        return [r for r in map(decode, self.world.everywhere(topic)) if isinstance(r, kind)]

    def chunks(self, request_id: str = "a") -> list[Chunk]:
        return self.lane(RESPONSES, Chunk, request_id)

    async def finished(self, request_id: str = "a") -> Finished:
        await self.world.until(lambda: bool(self.lane(LEDGER, Finished, request_id)))
        return self.lane(LEDGER, Finished, request_id)[-1]

    def beats(self) -> list[Heartbeat]:
        return self.said(KV_EVENTS, Heartbeat)


def visible(chunks: list[Chunk]) -> Transcript:
    transcript = Transcript("a")
    for chunk in chunks:
        transcript.feed(chunk)
    return transcript


def count_batches(desk: Desk) -> list[int]:
    """From now on: the sizes of the batches that this worker appends."""
    sizes: list[int] = []
    log = desk.worker._log
    append_batch = log.append_batch

    async def counted(topic: str, partition: int, entries: Sequence[Entry]) -> Appended:
        sizes.append(len(entries))
        return await append_batch(topic, partition, entries)

    log.append_batch = counted  # type: ignore[method-assign]
    return sizes


async def next_running(desk: Desk) -> tuple[RunProgress, ...]:
    await desk.world.until(lambda: bool(desk.beats()[-1].running))
    return desk.beats()[-1].running


class Scripted(Engine):
    """Yields what it is given: outputs, waits in seconds, errors."""

    def __init__(self, world: World, *script: EngineOutput | float | Exception) -> None:
        self.world, self.script = world, script
        self.calls: list[str] = []
        self.requests: list[Request] = []
        self.left = False

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
            self.left = True

    async def abort(self, context: GenerateContext) -> None:
        self.calls.append("abort")

    async def drain(self) -> None:
        self.calls.append("drain")

    async def cleanup(self) -> None:
        self.calls.append("cleanup")


TOKEN = EngineOutput.token(65)
