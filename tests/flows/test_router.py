"""The router on the log in memory, with a worker whose every word the test chooses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, TypeVar

from app.lifetime import Lifetime
from app.router import Router
from app.settings import Settings
from streams.codecs import AnyRecord, decode, pack_tokens, unpack_tokens
from streams.memory.broker import Fate
from streams.ports import Partition
from streams.records import (
    Assigned,
    Assignment,
    Cancel,
    CancelRun,
    Chunk,
    End,
    Ended,
    EngineConfig,
    Fence,
    Fencing,
    Finished,
    Heartbeat,
    Lost,
    Refused,
    Request,
    RunProgress,
    Started,
    StopConditions,
    Tombstone,
    Usage,
    WorkerCard,
)
from streams.topics import (
    ASSIGNMENTS,
    KV_EVENTS,
    LEDGER,
    REGISTRY,
    REQUESTS,
    RESPONSES,
    lane_of,
    partition_of,
)
from tests.worlds import World, in_world

R = TypeVar("R", bound=AnyRecord)

PROMPT = Request(id="a", model="demo", token_ids=pack_tokens([7, 8, 9]), deadline_s=100)


class Hand:
    """A worker that says what the test says; it only beats by itself."""

    def __init__(self, world: World, name: str = "w1") -> None:
        self.world, self.name = world, name
        self.running: list[RunProgress] = []
        self.slot_offset = 0
        card = {"id": name, "slot": 0, "model": "demo", "config": EngineConfig(model="demo")}
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
            running=tuple(self.running),
        )  # fmt: skip
        self.world.append(KV_EVENTS, self._partition(KV_EVENTS), beat, key=self.name)

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


async def route(world: World, name: str = "r1", **over: Any) -> Router:
    settings = Settings(_env_file=None, **({"router_id": name, "worker_id": "-"} | over))
    life = Lifetime(name, world.clock, random.Random(name))
    router = Router(await world.connect(name), settings, life)
    await router.start()
    return router


async def some(world: World, question: Callable[[], list[R]], count: int = 1) -> list[R]:
    """The answer, once it has `count` items."""
    await world.until(lambda: len(question()) >= count)
    return question()


@in_world
async def test_a_request_is_assigned_and_the_decision_stands_in_the_ledger(world: World) -> None:
    worker = Hand(world)
    await route(world)
    write(world, REQUESTS, PROMPT)
    (assignment,) = await some(world, lambda: worker.told(Assignment))
    (decision,) = read(world, LEDGER, Assigned)
    assert assignment.request == PROMPT
    assert assignment.epoch == decision.epoch == worker.epoch
    assert decision.origin == assignment.origin
    assert decision.origin.offset == 0
    assert 99 < assignment.budget_s <= 100
    assert [c.worker for c in decision.candidates] == ["w1"]
    assert decision.prompt_tokens == 3


@in_world
async def test_requests_spread_over_the_workers_at_once(world: World) -> None:
    workers = [Hand(world, f"w{n}") for n in range(4)]
    await route(world)
    for n in range(8):
        write(world, REQUESTS, Request(id=f"a{n}", model="demo", token_ids=PROMPT.token_ids))
    await world.until(lambda: sum(len(w.told(Assignment)) for w in workers) == 8)
    assert [len(w.told(Assignment)) for w in workers] == [2, 2, 2, 2]


@in_world
async def test_an_id_that_comes_again_is_not_run_again(world: World) -> None:
    worker = Hand(world)
    await route(world)
    write(world, REQUESTS, PROMPT)
    write(world, REQUESTS, PROMPT)
    worker.start((await some(world, lambda: worker.told(Assignment)))[0])
    write(world, REQUESTS, PROMPT)
    await world.sleep(5)
    assert len(worker.told(Assignment)) == 1
    assert read(world, RESPONSES, End) == []


@in_world
async def test_a_request_waits_for_a_worker(world: World) -> None:
    await route(world)
    write(world, REQUESTS, PROMPT)
    await world.sleep(10)
    worker = Hand(world)
    await some(world, lambda: worker.told(Assignment))


@in_world
async def test_a_request_that_no_worker_takes_is_ended_at_its_deadline(world: World) -> None:
    await route(world)
    write(world, REQUESTS, Request(id="a", deadline_s=5))
    await world.sleep(4.5)
    assert read(world, RESPONSES, End) == []
    (end,) = await some(world, lambda: read(world, RESPONSES, End))
    assert end.code == "no_workers"
    assert [e.code for e in await some(world, lambda: read(world, LEDGER, Ended))] == ["no_workers"]


@in_world
async def test_a_request_read_past_its_deadline_is_never_run(world: World) -> None:
    worker = Hand(world)
    write(world, REQUESTS, Request(id="a", model="demo", deadline_s=5))
    await world.sleep(6)
    await route(world)
    (end,) = await some(world, lambda: read(world, RESPONSES, End))
    assert end.code == "deadline"
    assert worker.told(Assignment) == []


@in_world
async def test_beyond_its_bound_the_router_refuses_at_once(world: World) -> None:
    await route(world, held_requests=1)
    write(world, REQUESTS, PROMPT)
    await world.sleep(1)
    write(world, REQUESTS, Request(id="b", model="demo"))
    (end,) = await some(world, lambda: read(world, RESPONSES, End, "b"))
    assert end.code == "queue_full"
    assert end.retry_after_s
    assert read(world, RESPONSES, End) == []


@in_world
async def test_a_held_request_can_be_cancelled(world: World) -> None:
    await route(world)
    write(world, REQUESTS, PROMPT)
    await world.sleep(1)
    write(world, REQUESTS, Cancel(id="a"))
    (end,) = await some(world, lambda: read(world, RESPONSES, End))
    assert end.code == "cancelled"
    worker = Hand(world)
    await world.sleep(3)
    assert worker.told(Assignment) == []


@in_world
async def test_two_cancels_at_once_of_a_held_request_are_both_done(world: World) -> None:
    await route(world)
    offset = write(world, REQUESTS, PROMPT)
    await world.sleep(1)
    for _ in range(2):
        write(world, REQUESTS, Cancel(id="a"))
    await some(world, lambda: read(world, LEDGER, Ended))
    group = world.broker.group(REQUESTS, "router")
    await world.until(lambda: group.committed.get(lane_of("a", world.lanes)) == offset + 3)


@in_world
async def test_a_running_request_is_cancelled_for_reader_worker_and_ledger(world: World) -> None:
    worker = Hand(world)
    await route(world)
    write(world, REQUESTS, PROMPT)
    worker.start((await some(world, lambda: worker.told(Assignment)))[0])
    write(world, REQUESTS, Cancel(id="a"))
    await some(world, lambda: read(world, LEDGER, Ended))
    assert [e.code for e in read(world, RESPONSES, End)] == ["cancelled"]
    assert next((c.id, c.attempt) for c in worker.told(CancelRun)) == ("a", 0)


@in_world
async def test_a_cancel_of_an_unknown_id_leaves_no_trace(world: World) -> None:
    await route(world)
    write(world, REQUESTS, Cancel(id="a"))
    await world.sleep(3)
    assert read(world, RESPONSES, End) == []
    assert read(world, LEDGER, Ended) == []


@in_world
async def test_a_refused_prompt_is_ended_visibly_unless_its_id_is_known(world: World) -> None:
    worker = Hand(world)
    await route(world)
    write(world, REQUESTS, Refused(id="b", code="invalid", message="messages: is empty"))
    (end,) = await some(world, lambda: read(world, RESPONSES, End, "b"))
    assert (end.code, end.message) == ("invalid", "messages: is empty")
    write(world, REQUESTS, PROMPT)
    await some(world, lambda: worker.told(Assignment))
    write(world, REQUESTS, Refused(id="a", code="invalid"))
    await world.sleep(1)
    assert read(world, RESPONSES, End) == []


@in_world
async def test_a_lost_worker_is_declared_and_its_stream_goes_on_elsewhere(world: World) -> None:
    first = Hand(world, "w1")
    await route(world)
    write(world, REQUESTS, PROMPT)
    (assignment,) = await some(world, lambda: first.told(Assignment))
    first.start(assignment)
    write(world, RESPONSES, chunk(0, 7, 8, text="ab", chars=2))
    second = Hand(world, "w2")
    first.beating.cancel()
    (again,) = await some(world, lambda: second.told(Assignment))
    assert list(unpack_tokens(again.taken)) == [7, 8]
    assert again.taken_chars == 2
    assert again.attempt == 1
    assert again.deadline_ms == assignment.deadline_ms
    (lost,) = first.told(Lost)
    assert lost.epoch == first.epoch
    assert lost.silent_ms > 5000
    assert [f.attempt for f in read(world, RESPONSES, Fence)] == [1]
    assert [f.reason for f in read(world, LEDGER, Fencing)] == ["lost"]
    cards = [decode(r) for r in world.records(REGISTRY, 0)]
    assert Tombstone(key="worker/w1", epoch=first.epoch) in cards


@in_world
async def test_chunks_after_the_fence_are_not_carried_over(world: World) -> None:
    first = Hand(world, "w1")
    await route(world)
    write(world, REQUESTS, PROMPT)
    run = first.start((await some(world, lambda: first.told(Assignment)))[0])
    write(world, RESPONSES, chunk(0, 7))
    write(world, RESPONSES, Fence(id="a", attempt=1))
    write(world, RESPONSES, chunk(1, 8, seq=1))
    second = Hand(world, "w2")
    first.finish(run, "broken")
    (again,) = await some(world, lambda: second.told(Assignment))
    assert list(unpack_tokens(again.taken)) == [7]


@in_world
async def test_a_stream_that_had_ended_before_the_fence_is_closed_as_seen(world: World) -> None:
    worker = Hand(world)
    await route(world)
    write(world, REQUESTS, PROMPT)
    worker.start((await some(world, lambda: worker.told(Assignment)))[0])
    write(world, RESPONSES, chunk(0, 7, finish_reason="stop"))
    worker.beating.cancel()
    assert [e.code for e in await some(world, lambda: read(world, LEDGER, Ended))] == ["seen"]
    assert read(world, RESPONSES, End) == []
    assert len(worker.told(Assignment)) == 1


@in_world
async def test_an_answer_that_was_whole_but_for_its_last_chunk_ends_as_length(world: World) -> None:
    worker = Hand(world)
    await route(world)
    limited = Request(
        id="a", model="demo", token_ids=PROMPT.token_ids, stop=StopConditions(max_tokens=2)
    )
    write(world, REQUESTS, limited)
    run = worker.start((await some(world, lambda: worker.told(Assignment)))[0])
    write(world, RESPONSES, chunk(0, 7, 8))
    worker.finish(run, "broken")
    (end,) = await some(world, lambda: read(world, RESPONSES, End))
    assert end.code == "length"
    assert end.usage == Usage(prompt_tokens=3, completion_tokens=2)
    assert len(worker.told(Assignment)) == 1


@in_world
async def test_a_full_worker_is_asked_again_and_costs_no_attempt(world: World) -> None:
    worker = Hand(world)
    await route(world, max_attempts=1)
    write(world, REQUESTS, PROMPT)
    for n in range(4):
        assignments = await some(world, lambda: worker.told(Assignment), n + 1)
        run = {"id": "a", "attempt": n, "phase": "aggregated", "worker": "w1"}
        worker.finish(run | {"epoch": worker.epoch}, "worker_full", retryable=True)
    assert [a.attempt for a in assignments] == [0, 1, 2, 3]
    assert read(world, RESPONSES, End) == []


@in_world
async def test_a_refusal_without_a_decision_does_not_make_an_id_known(world: World) -> None:
    """The router before this one died after the Assignment and before its Assigned."""
    worker = Hand(world)
    run = {"id": "a", "attempt": 0, "phase": "aggregated", "worker": "w1", "epoch": worker.epoch}
    write(world, LEDGER, Finished(code="worker_full", retryable=True, **run))
    write(world, REQUESTS, PROMPT)
    await route(world)
    assert await some(world, lambda: worker.told(Assignment))


@in_world
async def test_a_request_that_fails_on_every_worker_ends_with_attempts(world: World) -> None:
    worker = Hand(world)
    await route(world, max_attempts=2)
    write(world, REQUESTS, PROMPT)
    for n in range(2):
        run = worker.start((await some(world, lambda: worker.told(Assignment), n + 1))[n])
        worker.finish(run, "broken")
    (end,) = await some(world, lambda: read(world, RESPONSES, End))
    assert end.code == "attempts"
    assert len(worker.told(Assignment)) == 2


@in_world
async def test_an_assignment_that_got_lost_is_found_and_made_again(world: World) -> None:
    worker = Hand(world)
    await route(world)
    write(world, REQUESTS, PROMPT)
    (_assignment,) = await some(world, lambda: worker.told(Assignment))
    worker.slot_offset = 1  # read past it, and never took it
    await some(world, lambda: worker.told(Assignment), 2)
    assert [f.reason for f in read(world, LEDGER, Fencing)] == ["not_started"]


@in_world
async def test_a_run_that_is_listed_but_slow_to_start_is_left_alone(world: World) -> None:
    worker = Hand(world)
    await route(world)
    write(world, REQUESTS, PROMPT)
    await some(world, lambda: worker.told(Assignment))
    worker.running = [RunProgress(id="a", attempt=0, phase="aggregated")]
    worker.slot_offset = 1
    await world.sleep(20)
    assert len(worker.told(Assignment)) == 1


@in_world
async def test_a_run_that_its_worker_forgot_is_restarted(world: World) -> None:
    worker = Hand(world)
    await route(world)
    write(world, REQUESTS, PROMPT)
    worker.start((await some(world, lambda: worker.told(Assignment)))[0])
    await world.sleep(3)
    worker.running = []
    await some(world, lambda: worker.told(Assignment), 2)
    assert [f.reason for f in read(world, LEDGER, Fencing)] == ["broken"]


@in_world
async def test_a_superseded_run_that_goes_on_is_cancelled_and_an_unknown_one_is_not(
    world: World,
) -> None:
    first, second = Hand(world, "w1"), Hand(world, "w2")
    await route(world)
    write(world, REQUESTS, PROMPT)
    await world.until(lambda: len(first.told(Assignment)) + len(second.told(Assignment)) == 1)
    worker = first if first.told(Assignment) else second
    run = worker.start(worker.told(Assignment)[0])
    worker.finish(run, "broken")
    worker.running = [
        RunProgress(id="a", attempt=0, phase="aggregated"),
        RunProgress(id="strange", attempt=0, phase="aggregated"),
    ]
    cancels = await some(world, lambda: worker.told(CancelRun), 2)
    assert {(c.id, c.attempt) for c in cancels} == {("a", 0)}


@in_world
async def test_a_lost_epoch_that_still_beats_is_told_again(world: World) -> None:
    worker = Hand(world)
    await route(world)
    worker.beating.cancel()
    await some(world, lambda: worker.told(Lost))
    worker.beat()
    await some(world, lambda: worker.told(Lost), 2)


@in_world
async def test_an_outage_of_the_broker_kills_nobody(world: World) -> None:
    worker = Hand(world)
    await route(world)
    await world.sleep(3)
    worker.beating.cancel()
    world.broker.available = False
    await world.sleep(30)
    world.broker.available = True
    worker.beating = world.spawn(worker._beat())
    await world.sleep(20)
    assert worker.told(Lost) == []


@in_world
async def test_another_router_takes_over_where_the_first_one_died(world: World) -> None:
    """Between Assigned and Assignment: only the ledger knows of the decision."""
    worker = Hand(world)
    first = await route(world, "r1")
    world.faults.next_fates(ASSIGNMENTS, *[Fate.LOST] * 1000)
    write(world, REQUESTS, PROMPT)
    await some(world, lambda: read(world, LEDGER, Assigned))
    await first.stop()
    await first._life.end()
    world.faults.fates.clear()
    worker.slot_offset = 0
    await route(world, "r2")
    (assignment,) = await some(world, lambda: worker.told(Assignment))
    assert assignment.attempt == 1
    assert assignment.request == PROMPT


@in_world
async def test_held_requests_of_a_dead_router_come_back(world: World) -> None:
    first = await route(world, "r1")
    write(world, REQUESTS, PROMPT)
    await world.sleep(2)
    first._log.cut()  # type: ignore[attr-defined]
    await asyncio.wait_for(first._life.end(), 5)
    await route(world, "r2")
    worker = Hand(world)
    await some(world, lambda: worker.told(Assignment))


@in_world
async def test_routers_that_have_read_the_same_hold_the_same(world: World) -> None:
    workers = [Hand(world, f"w{n}") for n in range(3)]
    routers = [await route(world, f"r{n}") for n in range(3)]
    for n in range(20):
        write(world, REQUESTS, Request(id=f"a{n}", model="demo", token_ids=PROMPT.token_ids))
    await world.until(lambda: sum(len(w.told(Assignment)) for w in workers) == 20)
    workers[0].beating.cancel()
    await world.sleep(20)
    for lane in range(world.lanes):
        source = Partition(LEDGER, lane)
        assert len({r._load.position(source) for r in routers}) == 1
        assert len({r._load.state_hash(source) for r in routers}) == 1
    assert all(not r._context._undelivered for r in routers)
