"""Tests of the router: one on the log in memory, and a worker whose every word the test chooses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from app.lifetime import Lifetime
from app.router import Router
from app.settings import Settings
from indexer.events import CLEARED, Event, Kind
from indexer.events import encode as encode_events
from indexer.hashing import local_hashes
from indexer.keys import prompt_keys
from streams.clock import Clock
from streams.codecs import AnyRecord, decode, pack_tokens
from streams.records import (
    Assignment,
    Blocks,
    Chunk,
    EngineConfig,
    Finished,
    Heartbeat,
    Origin,
    Request,
    RunProgress,
    Started,
    WorkerCard,
    WorkerState,
)
from streams.topics import (
    ASSIGNMENTS,
    KV_EVENTS,
    LEDGER,
    REGISTRY,
    lane_of,
    partition_of,
)
from tests.worlds import World

R = TypeVar("R", bound=AnyRecord)

PROMPT = Request(id="a", model="demo", token_ids=pack_tokens([7, 8, 9]), deadline_s=100)


class Hand:
    """A worker that says what the test says; it only beats by itself."""

    def __init__(
        self,
        world: World,
        name: str = "w1",
        model: str = "demo",
        block_size: int | None = None,
        max_runs: int | None = None,
        **engine: Any,
    ) -> None:
        self.world, self.name = world, name
        self.running: list[RunProgress] = []
        self.slot_offset = 0
        self.state: WorkerState = "ready"
        config = EngineConfig(model=model, kv_cache_block_size=block_size, **engine)
        card = {"id": name, "slot": 0, "model": model, "config": config, "max_runs": max_runs}
        self.epoch = world.append(REGISTRY, 0, WorkerCard(**card), key=f"worker/{name}")
        world.append(REGISTRY, 0, WorkerCard(**card, epoch=self.epoch), key=f"worker/{name}")
        self.beating = world.spawn(self._beat())

    async def _beat(self) -> None:
        while True:
            self.beat()
            await self.world.sleep(1.0)

    def beat(self) -> None:
        beat = Heartbeat(
            worker=self.name, epoch=self.epoch, slot_offset=self.slot_offset,
            state=self.state, running=tuple(self.running),
        )  # fmt: skip
        self.world.append(KV_EVENTS, self._partition(KV_EVENTS), beat, key=self.name)

    def holds(self, tokens: Sequence[int], block_size: int, first_event_id: int = 0) -> None:
        """Say that the blocks of these tokens are in the cache."""
        secret = Settings(_env_file=None).key_secret()
        keys = prompt_keys(local_hashes(tokens, block_size), secret).tolist()
        columns = encode_events([CLEARED, Event(Kind.STORED, keys=tuple(keys))])
        blocks = Blocks(
            worker=self.name, epoch=self.epoch, first_event_id=first_event_id,
            hash_fingerprint=secret.fingerprint, **columns._asdict(),
        )  # fmt: skip
        self.world.append(KV_EVENTS, self._partition(KV_EVENTS), blocks, key=self.name)

    def _partition(self, topic: str) -> int:
        return partition_of(self.name.encode(), self.world.broker.partitions[topic])

    def told(self, kind: type[R]) -> list[R]:
        """What was put into this worker's slot."""
        records = [decode(r) for r in self.world.records(ASSIGNMENTS, self._partition(ASSIGNMENTS))]
        return [r for r in records if isinstance(r, kind) and r.worker == self.name]

    def start(self, assignment: Assignment) -> dict[str, Any]:
        """Take an assignment: Started, and it is listed from now on."""
        run = {"id": assignment.request.id, "attempt": assignment.attempt, "phase": "aggregated"}
        self.slot_offset = len(self.world.records(ASSIGNMENTS, self._partition(ASSIGNMENTS)))
        self.running.append(RunProgress(**run))
        run |= {"worker": self.name, "epoch": self.epoch}
        started = Started(
            run=1, origin=assignment.origin, responses_from=assignment.responses_from,
            deadline_ms=assignment.deadline_ms, **run,
        )  # fmt: skip
        write(self.world, LEDGER, started)
        return run

    def refuse(self, assignment: Assignment) -> None:
        """Say that there is no room."""
        refused = Finished(
            id=assignment.request.id, attempt=assignment.attempt, phase="aggregated",
            worker=self.name, epoch=self.epoch, code="worker_full", retryable=True,
        )  # fmt: skip
        write(self.world, LEDGER, refused)

    async def work(self, room: int) -> None:
        """Start what comes while there is room, and refuse the rest."""
        seen = 0
        while True:
            for assignment in self.told(Assignment)[seen:]:
                seen += 1
                if len(self.running) < room:
                    self.start(assignment)
                else:
                    self.refuse(assignment)
            await self.world.sleep(0.01)

    def finish(self, run: dict[str, Any], code: Any, **over: Any) -> None:
        self.running = [r for r in self.running if r.id != run["id"]]
        write(self.world, LEDGER, Finished(code=code, **run, **over))


def write(world: World, topic: str, record: Any) -> int:
    """Append to the lane of a record's id."""
    return world.append(topic, lane_of(record.id, world.lanes), record, key=record.id)


def read(world: World, topic: str, kind: type[R], key: str = "a") -> list[R]:
    records = [decode(r) for r in world.records(topic, key=key) if r.key == key.encode()]
    return [r for r in records if isinstance(r, kind)]


def chunk(index: int, *tokens: int, attempt: int = 0, seq: int = 0, **over: Any) -> Chunk:
    return Chunk(id="a", attempt=attempt, run="1", seq=seq, index=index, token_ids=tokens, **over)


async def route(world: World, name: str = "r1", clock: Clock | None = None, **over: Any) -> Router:
    """A router that has started."""
    settings = Settings(_env_file=None, **({"router_id": name, "worker_id": "-"} | over))
    life = Lifetime(name, clock or world.clock, random.Random(name))
    router = Router(await world.connect(name), settings, life)
    await router.start()
    return router


async def never_read(_: Origin) -> Request:
    """Instead of a look-up: nothing comes back."""
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


async def some(world: World, question: Callable[[], list[R]], count: int = 1) -> list[R]:
    """The answer, once it has `count` items."""
    await world.until(lambda: len(question()) >= count)
    return question()
