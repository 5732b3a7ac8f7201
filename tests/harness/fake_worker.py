"""A router on the log in memory, and a fake worker whose records the test chooses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.indexer.block_hashes import local_hashes, prompt_keys
from kvlane.indexer.events import CLEARED, CacheEvent, EventKind, encode_events
from kvlane.streams.clock import Clock
from kvlane.streams.codecs import AnyRecord, decode, pack_tokens
from kvlane.streams.records import (
    Assignment,
    Blocks,
    Chunk,
    EngineConfig,
    Finished,
    Heartbeat,
    PrefillDone,
    RequestOffset,
    Role,
    RunProgress,
    Started,
    WorkerCard,
    WorkerState,
)
from kvlane.streams.request import Request
from kvlane.streams.topics import (
    ASSIGNMENTS,
    KV_EVENTS,
    LEDGER,
    REGISTRY,
    REQUESTS,
    lane_of,
    partition_of,
)
from tests.harness.memory_world import MemoryWorld

R = TypeVar("R", bound=AnyRecord)

PROMPT = Request(id="a", model="demo", token_ids=pack_tokens([7, 8, 9]), deadline_s=100)


class FakeWorker:
    """A fake worker: heartbeats by itself, all else by the test."""

    def __init__(
        self,
        world: MemoryWorld,
        name: str = "w1",
        model: str = "demo",
        block_size: int | None = None,
        max_runs: int | None = None,
        state: WorkerState = "ready",
        role: Role = "aggregated",
        taints: tuple[str, ...] = (),
        *,
        ranks: int = 1,
        **engine: Any,
    ) -> None:
        self.world, self.name = world, name
        self.running: list[RunProgress] = []
        self.slot_offset = 0
        self.state = state
        if role != "aggregated":
            engine.setdefault("transfer_lease_s", 30.0)
        config = EngineConfig(model=model, kv_cache_block_size=block_size, **engine)
        card = {
            "id": name, "slot": 0, "model": model, "config": config, "max_runs": max_runs,
            "role": role, "taints": taints, "ranks": ranks,
        }  # fmt: skip
        self.epoch = world.append(REGISTRY, 0, WorkerCard(**card), key=f"worker/{name}")
        world.append(REGISTRY, 0, WorkerCard(**card, epoch=self.epoch), key=f"worker/{name}")
        self.heartbeat_task = world.spawn(self._beat())

    async def _beat(self) -> None:
        while True:
            self.send_heartbeat()
            await self.world.sleep(1.0)

    def send_heartbeat(self) -> None:
        beat = Heartbeat(
            worker=self.name, epoch=self.epoch, slot_offset=self.slot_offset,
            state=self.state, running=tuple(self.running),
        )  # fmt: skip
        self.world.append(KV_EVENTS, self._partition(KV_EVENTS), beat, key=self.name)

    def publish_blocks(
        self, tokens: Sequence[int], block_size: int, first_event_id: int = 0
    ) -> None:
        """Publish that the blocks of these tokens are in the cache."""
        secret = Settings(_env_file=None).block_key_secret()
        keys = prompt_keys(local_hashes(tokens, block_size), secret).tolist()
        columns = encode_events([CLEARED, CacheEvent(EventKind.STORED, keys=tuple(keys))])
        blocks = Blocks(
            worker=self.name, epoch=self.epoch, first_event_id=first_event_id,
            hash_fingerprint=secret.fingerprint, **columns._asdict(),
        )  # fmt: skip
        self.world.append(KV_EVENTS, self._partition(KV_EVENTS), blocks, key=self.name)

    def _partition(self, topic: str) -> int:
        return partition_of(self.name.encode(), self.world.broker.partitions[topic])

    def received(self, kind: type[R]) -> list[R]:
        """The records in this worker's slot."""
        records = [decode(r) for r in self.world.records(ASSIGNMENTS, self._partition(ASSIGNMENTS))]
        return [r for r in records if isinstance(r, kind) and r.worker == self.name]

    def start(self, assignment: Assignment) -> dict[str, Any]:
        """Accept an assignment: write Started, and list it in heartbeats."""
        run = {
            "id": assignment.request.id,
            "attempt": assignment.attempt,
            "phase": assignment.phase,
        }
        self.slot_offset = len(self.world.records(ASSIGNMENTS, self._partition(ASSIGNMENTS)))
        self.running.append(RunProgress(**run))
        run |= {"worker": self.name, "epoch": self.epoch}
        started = Started(
            run=1, origin=assignment.origin, responses_from=assignment.responses_from,
            deadline_ms=assignment.deadline_ms, **run,
        )  # fmt: skip
        append_record(self.world, LEDGER, started)
        return run

    def reject(self, assignment: Assignment, *, retryable: bool = True) -> None:
        """Reject an assignment as `worker_full`; not `retryable`: its hand-over has expired."""
        refused = Finished(
            id=assignment.request.id, attempt=assignment.attempt, phase=assignment.phase,
            worker=self.name, epoch=self.epoch, code="worker_full", retryable=retryable,
        )  # fmt: skip
        append_record(self.world, LEDGER, refused)

    async def serve(self, room: int) -> None:
        """Start assignments while there are fewer than `room` runs, and reject the rest."""
        seen = 0
        while True:
            for assignment in self.received(Assignment)[seen:]:
                seen += 1
                if len(self.running) < room:
                    self.start(assignment)
                else:
                    self.reject(assignment)
            await self.world.sleep(0.01)

    def hand_over(self, assignment: Assignment, params: bytes = b"{}", **over: Any) -> None:
        """Compute the prompt of an assignment of phase prefill, and hold it for decode."""
        run = self.start(assignment)
        append_record(self.world, LEDGER, PrefillDone(run=1, handoff=params, **run, **over))
        self.finish(run, "handed_off")

    def finish(self, run: dict[str, Any], code: Any, **over: Any) -> None:
        self.running = [r for r in self.running if r.id != run["id"]]
        append_record(self.world, LEDGER, Finished(code=code, **run, **over))


def append_record(world: MemoryWorld, topic: str, record: Any) -> int:
    """Append to the lane of a record's id."""
    return world.append(topic, lane_of(record.id, world.lanes), record, key=record.id)


def read_records(world: MemoryWorld, topic: str, kind: type[R], key: str = "a") -> list[R]:
    records = [decode(r) for r in world.records(topic, key=key) if r.key == key.encode()]
    return [r for r in records if isinstance(r, kind)]


def chunk(index: int, *tokens: int, attempt: int = 0, seq: int = 0, **over: Any) -> Chunk:
    return Chunk(id="a", attempt=attempt, run="1", seq=seq, index=index, token_ids=tokens, **over)


async def start_router(
    world: MemoryWorld, name: str = "r1", clock: Clock | None = None, **over: Any
) -> Router:
    fields = {"router_id": name, "worker_id": "-", "status_port": None} | over
    settings = Settings(_env_file=None, **fields)
    ctx = ProcessContext(name, clock or world.clock, random.Random(name))
    router = Router(await world.connect(name), settings, ctx)
    await router.start()
    return router


async def never_read(_: RequestOffset) -> Request:
    """A look-up that never returns."""
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


async def wait_for_items(
    world: MemoryWorld, question: Callable[[], list[R]], count: int = 1
) -> list[R]:
    """The items, once there are `count`."""
    await world.wait_until(lambda: len(question()) >= count)
    return question()


class Begun(NamedTuple):
    worker: FakeWorker
    router: Router
    run: dict[str, Any]


async def begin_run(world: MemoryWorld, **over: Any) -> Begun:
    """A router with these settings whose only worker runs `PROMPT`."""
    worker = FakeWorker(world)
    router = await start_router(world, **over)
    append_record(world, REQUESTS, PROMPT)
    (assignment,) = await wait_for_items(world, lambda: worker.received(Assignment))
    return Begun(worker, router, worker.start(assignment))
