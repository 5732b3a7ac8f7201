"""Tests of the bounds of a router's queue: requests wait only when they must."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from kvlane.app.lanes.lane_backpressure import MAX_APPENDING_BYTES
from kvlane.app.routing.queueing.fair_share import ClassConfig
from kvlane.streams.codecs import decode
from kvlane.streams.memory.memory_broker import AppendFate, BrokerFaults
from kvlane.streams.ports import Partition
from kvlane.streams.records import (
    Assigned,
    Assignment,
    End,
    Ended,
    Finished,
    Lost,
    ModelCard,
    Tombstone,
)
from kvlane.streams.request import Hints, OpenAiBody, Request
from kvlane.streams.topics import LEDGER, REGISTRY, REQUESTS, RESPONSES, lane_of
from tests.harness.fake_worker import (
    PROMPT,
    FakeWorker,
    append_record,
    read_records,
    start_router,
    wait_for_items,
)
from tests.harness.memory_world import MemoryWorld, scenario_test

FATES = (Assigned, Ended)


def send(world: MemoryWorld, *ids: str, **over: Any) -> None:
    for name in ids:
        append_record(
            world, REQUESTS, Request(**({"id": name, "model": "demo", "deadline_s": 100} | over))
        )


def ended(world: MemoryWorld, *ids: str) -> dict[str, str]:
    return {name: end.code for name in ids for end in read_records(world, RESPONSES, End, name)}


def refusals(world: MemoryWorld, *ids: str) -> int:
    finished = (f for name in ids for f in read_records(world, LEDGER, Finished, name))
    return sum(f.code == "worker_full" for f in finished)


@scenario_test
async def test_request_with_a_free_worker_is_not_refused_for_others_that_wait(
    world: MemoryWorld,
) -> None:
    worker, other = FakeWorker(world), FakeWorker(world, "w2", model="big")
    other.state = "draining"
    await start_router(world, max_queued_requests=1)
    send(world, "a", "b", model="big")
    await world.wait_until(lambda: ended(world, "a", "b") == {"b": "queue_full"})
    send(world, "c")
    assert await wait_for_items(world, lambda: worker.received(Assignment))


@scenario_test
async def test_without_a_queue_a_free_worker_is_enough(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    await start_router(world, max_queued_requests=0)
    send(world, "a")
    assert await wait_for_items(world, lambda: worker.received(Assignment))


@scenario_test
async def test_queue_is_also_bounded_in_uncached_tokens(world: MemoryWorld) -> None:
    worker = FakeWorker(world, state="draining")
    await start_router(world, max_queued_tokens=5000)
    send(world, "a", "b", "c", token_ids=b"1234" * 3000)
    await world.wait_until(lambda: ended(world, "a", "b", "c") == {"c": "queue_full"}, within_s=5)
    (end,) = read_records(world, RESPONSES, End, "c")
    assert end.retry_after_s
    worker.state = "ready"
    worker.send_heartbeat()
    await wait_for_items(world, lambda: worker.received(Assignment))
    send(world, "d", token_ids=b"1234" * 3000)
    await world.wait_until(lambda: len(worker.received(Assignment)) == 3, within_s=30)


@scenario_test
async def test_queue_is_bounded_in_bytes_for_any_number_of_tokens(world: MemoryWorld) -> None:
    worker = FakeWorker(world, kind="chat", state="draining")
    await start_router(world, max_queued_bytes=150_000)
    image = OpenAiBody(kind="chat", json=b"." * 100_000, prompt_tokens=1000)
    send(world, "a", "b", "c", body=image)
    await world.wait_until(lambda: ended(world, "a", "b", "c") == {"c": "queue_full"}, within_s=5)
    (end,) = read_records(world, RESPONSES, End, "c")
    assert end.retry_after_s
    worker.state = "ready"
    worker.send_heartbeat()
    await world.wait_until(
        lambda: {a.request.id for a in worker.received(Assignment)} == {"a", "b"}
    )
    worker.state = "draining"
    worker.send_heartbeat()
    send(world, "d", body=image)
    await world.sleep(5)
    assert ended(world, "d") == {}


class Outage(BrokerFaults):
    """Appends to these partitions are lost until it is over; tries are counted."""

    def __init__(self, *partitions: Partition) -> None:
        self.partitions = set(partitions)
        self.tries = 0

    def fate(self, client: str, topic: str, partition: int, entries: int) -> AppendFate:
        if Partition(topic, partition) not in self.partitions:
            return AppendFate.KEPT
        self.tries += 1
        return AppendFate.LOST


@pytest.mark.parametrize("topic", [RESPONSES, LEDGER])
@partial(scenario_test, lanes=1)
async def test_memory_of_a_router_is_bounded_while_a_lane_takes_no_appends(
    world: MemoryWorld, topic: str
) -> None:
    worker = FakeWorker(world, max_runs=1)
    router = await start_router(world, max_queued_requests=10)
    world.broker.faults = outage = Outage(Partition(topic, 0))
    names = [f"r{n}" for n in range(1000)]
    send(world, *names)
    await world.sleep(20)
    (owner,) = router._owners.values()
    assert len(owner._jobs) < 200
    assert owner._backpressure.prompt_bytes <= 200 * 100
    outage.tries = 0
    await world.sleep(60)
    assert outage.tries < 60 + 5 * len(owner._jobs), "one try a second for each request"
    assert len(owner._jobs) < 200
    outage.partitions.clear()
    world.spawn(worker.serve(1))
    await world.sleep(130)
    known = {r.id for r in map(decode, world.all_records(LEDGER)) if isinstance(r, FATES)}
    assert known == set(names)
    assert owner._backpressure.prompt_bytes == 0
    group = world.broker.group(REQUESTS, "router")
    await world.wait_until(lambda: group.committed.get(0) == len(names))


@scenario_test
async def test_other_lanes_are_served_beside_one_that_takes_no_appends(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    await start_router(world)
    world.broker.faults = Outage(Partition(RESPONSES, 0), Partition(LEDGER, 0))
    names = [f"r{n}" for n in range(2000)]
    send(world, *names)
    others = {name for name in names if lane_of(name, world.lanes) == 1}
    await world.wait_until(
        lambda: {a.request.id for a in worker.received(Assignment)} >= others, within_s=5
    )
    send(world, *(f"s{n}" for n in range(100)))
    later = {f"s{n}" for n in range(100) if lane_of(f"s{n}", world.lanes) == 1}
    await world.wait_until(
        lambda: {a.request.id for a in worker.received(Assignment)} >= later, within_s=2
    )


@scenario_test
async def test_memory_of_a_lane_is_also_bounded_in_bytes(world: MemoryWorld) -> None:
    FakeWorker(world)
    router = await start_router(world)
    world.broker.faults = outage = Outage(Partition(LEDGER, 0))
    image = OpenAiBody(kind="chat", json=b"." * 4_000_000, prompt_tokens=1000)
    names = [name for n in range(100) if lane_of(name := f"r{n}", world.lanes) == 0]
    send(world, *names, model="none", body=image)
    await world.wait_until(lambda: 0 in router._owners and router._owners[0].claim.is_paused)
    owner = router._owners[0]
    await world.sleep(10)
    assert owner._backpressure.prompt_bytes < MAX_APPENDING_BYTES + 4_000_001
    outage.partitions.clear()
    await world.wait_until(lambda: len(ended(world, *names)) == len(names), within_s=30)
    await world.sleep(1)
    assert not owner.claim.is_paused
    assert owner._backpressure.prompt_bytes == 0


@scenario_test
async def test_class_has_bounds_of_its_own(world: MemoryWorld) -> None:
    worker = FakeWorker(world, state="draining")
    classes = {
        "batch": ClassConfig(max_queued_requests=2),
        "t": ClassConfig(max_queued_tokens=1000),
    }
    await start_router(world, queue_classes=classes)
    batch, tenants = ("a", "b", "c"), ("d", "e")
    send(world, *batch, hints=Hints(queue_class="batch"))
    send(world, *tenants, tenant="t", token_ids=b"1234" * 2000)
    send(world, "f", "g", "h")
    await world.sleep(5)
    refused = ended(world, *"abcdefgh")
    assert set(refused.values()) == {"queue_full"}
    assert sorted(name in tenants for name in refused) == [False, True]
    assert len(refused.keys() & set(batch)) == 1
    worker.state = "ready"
    worker.send_heartbeat()
    await world.wait_until(lambda: len(worker.received(Assignment)) == 6, within_s=30)
    send(world, "i", hints=Hints(queue_class="batch"))
    await world.wait_until(lambda: len(worker.received(Assignment)) == 7, within_s=30)


@pytest.mark.parametrize("policy", ["predictive", "dynamo"])
@scenario_test
async def test_waiting_classes_share_a_worker_by_weight(world: MemoryWorld, policy: str) -> None:
    worker = FakeWorker(world, state="draining")
    await start_router(world, queue_classes={"batch": ClassConfig(weight=0.25)}, policy=policy)
    batch = Hints(queue_class="batch")
    send(world, *[f"b{n}" for n in range(8)], hints=batch, token_ids=PROMPT.token_ids)
    await world.sleep(0.1)
    send(world, *[f"o{n}" for n in range(8)], token_ids=PROMPT.token_ids)
    await world.sleep(0.1)
    world.spawn(worker.serve(room=1))
    worker.state = "ready"
    worker.send_heartbeat()
    await world.wait_until(lambda: len(worker.received(Assignment)) >= 10, within_s=60)
    first_ten = [assignment.request.id[0] for assignment in worker.received(Assignment)[:10]]
    assert first_ten.count("b") == 2, "one of five"


@scenario_test
async def test_refused_requests_count_as_waiting(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    router = await start_router(world, max_queued_requests=2)
    world.spawn(worker.serve(room=1))
    names = [f"a{n}" for n in range(10)]
    send(world, *names)
    await world.wait_until(lambda: len(ended(world, *names)) == 7, within_s=5)
    assert set(ended(world, *names).values()) == {"queue_full"}
    assert all(e.retry_after_s for n in names for e in read_records(world, RESPONSES, End, n))
    send(world, "late")
    await world.wait_until(lambda: ended(world, "late") == {"late": "queue_full"}, within_s=1)
    assert len(router._context.queue.waiting.keys) <= 2


@scenario_test
async def test_request_is_not_sent_to_a_worker_that_was_full_a_moment_ago(
    world: MemoryWorld,
) -> None:
    full, free = FakeWorker(world, "w1"), FakeWorker(world, "w2")
    free.state = "draining"
    await start_router(world)
    world.spawn(full.serve(room=0))
    send(world, "a")
    await world.wait_until(lambda: refusals(world, "a") == 1)
    free.state = "ready"
    free.send_heartbeat()
    await wait_for_items(world, lambda: free.received(Assignment))
    free.start(free.received(Assignment)[0])
    send(world, "b", token_ids=b"1234" * 1000)
    send(world, "c")  # by load alone it would go to the full one
    await wait_for_items(world, lambda: free.received(Assignment), 3)
    assert refusals(world, "a", "b", "c") <= 2  # once a second it may be asked again


@scenario_test
async def test_full_worker_is_not_retried_at_once(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    await start_router(world)
    world.spawn(worker.serve(room=3))
    names = [f"a{n}" for n in range(40)]
    send(world, *names)
    await world.wait_until(lambda: len(worker.running) == 3)
    await world.sleep(2)
    before = refusals(world, *names)
    await world.sleep(10)
    assert refusals(world, *names) - before <= 10


@scenario_test
async def test_no_worker_gets_more_than_the_capacity_of_its_card(world: MemoryWorld) -> None:
    worker = FakeWorker(world, max_runs=3)
    await start_router(world)
    world.spawn(worker.serve(room=3))
    names = [f"a{n}" for n in range(12)]
    send(world, *names)
    await world.wait_until(lambda: len(worker.running) == 3)
    await world.sleep(5)
    assert len(worker.running) == 3
    run = worker.running[0]
    key = {"id": run.id, "attempt": run.attempt, "phase": run.phase}
    worker.finish(key | {"worker": worker.name, "epoch": worker.epoch}, "stop")
    await world.wait_until(lambda: len(worker.received(Assignment)) == 4, within_s=0.5)
    assert refusals(world, *names) == 0


@scenario_test
async def test_capacity_is_filled_as_it_becomes_free(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    await start_router(world)
    world.spawn(worker.serve(room=3))
    names = [f"a{n}" for n in range(40)]
    send(world, *names)
    await world.wait_until(lambda: len(worker.running) == 3)
    await world.sleep(2)
    began_at = world.clock.now()
    done = 0
    while done < 40:
        await world.wait_until(lambda: bool(worker.running), within_s=2)
        for run in list(worker.running):
            key = {"id": run.id, "attempt": run.attempt, "phase": run.phase}
            worker.finish(key | {"worker": "w1", "epoch": worker.epoch}, "stop")
            done += 1
    assert world.clock.now() - began_at < 5
    assert ended(world, *names) == {}


@scenario_test
async def test_underestimated_capacity_is_corrected(world: MemoryWorld) -> None:
    """The worker was busy with runs that the ledger did not know."""
    worker = FakeWorker(world)
    await start_router(world)
    refusing = world.spawn(worker.serve(room=0))
    send(world, "a")
    await world.wait_until(lambda: refusals(world, "a") == 2)
    refusing.cancel()
    world.spawn(worker.serve(room=4))
    send(world, *[f"b{n}" for n in range(4)])
    await world.wait_until(lambda: len(worker.running) == 4, within_s=5)


@scenario_test
async def test_request_for_an_unserved_model_does_not_wait(world: MemoryWorld) -> None:
    FakeWorker(world)
    await start_router(world, max_queued_requests=1)
    await world.sleep(1)
    send(world, "a", "b", model="other")
    await world.wait_until(lambda: len(ended(world, "a", "b")) == 2, within_s=2)
    assert ended(world, "a", "b") == {"a": "model_not_found", "b": "model_not_found"}
    (end,) = read_records(world, RESPONSES, End, "a")
    assert end.message.endswith("serves the model: 'other'")


@scenario_test
async def test_request_waits_for_any_model_while_there_are_no_workers(world: MemoryWorld) -> None:
    await start_router(world)
    send(world, "a", model="other")
    await world.sleep(10)
    assert ended(world, "a") == {}
    worker = FakeWorker(world, model="other")
    assert await wait_for_items(world, lambda: worker.received(Assignment))


@scenario_test
async def test_request_waits_for_a_model_whose_last_worker_died(world: MemoryWorld) -> None:
    for first in ("r1", "r2"):  # the second reads of the death in the log
        FakeWorker(world, f"demo-{first}")
        worker = FakeWorker(world, f"big-{first}", model="big")
        await start_router(world, first)
        await world.sleep(1)
        worker.heartbeat_task.cancel()
        await wait_for_items(world, lambda w=worker: w.received(Lost))  # type: ignore[misc]
        await world.sleep(1)
        send(world, first, model="big")
        await world.sleep(10)
        assert ended(world, first) == {}


@scenario_test
async def test_request_waits_for_a_model_with_a_card(world: MemoryWorld) -> None:
    FakeWorker(world)
    world.append(REGISTRY, 0, ModelCard(name="big"), key="model/big")
    await start_router(world)
    await world.sleep(1)
    send(world, "a", model="big")
    await world.sleep(10)
    assert ended(world, "a") == {}


@scenario_test
async def test_requests_for_a_model_whose_last_worker_left_end_soon(world: MemoryWorld) -> None:
    FakeWorker(world)
    await start_router(world, no_worker_timeout_s=60)
    await world.sleep(100)
    world.append(REGISTRY, 0, Tombstone(key="worker/w1"), key="worker/w1")
    await world.sleep(1)
    send(world, "early", deadline_s=600)
    await world.sleep(50)
    assert ended(world, "early") == {}
    await world.sleep(20)
    send(world, "late", deadline_s=600)
    await world.sleep(0.5)
    assert ended(world, "early", "late") == {"early": "no_workers", "late": "no_workers"}
    ends = read_records(world, RESPONSES, End, "early") + read_records(
        world, RESPONSES, End, "late"
    )
    assert {end.retry_after_s for end in ends} == {10.0}
    fresh = FakeWorker(world, "w2")
    send(world, "new", deadline_s=600)
    await wait_for_items(world, lambda: fresh.received(Assignment))


@scenario_test
async def test_started_request_waits_for_a_worker_until_its_deadline(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    await start_router(world, no_worker_timeout_s=10)
    send(world, "a", deadline_s=600)
    worker.start((await wait_for_items(world, lambda: worker.received(Assignment)))[0])
    worker.heartbeat_task.cancel()
    await world.sleep(60)
    assert ended(world, "a") == {}
    fresh = FakeWorker(world, "w2")
    await wait_for_items(world, lambda: fresh.received(Assignment))


@pytest.mark.parametrize(
    ("model", "deadline_s", "code"), [("demo", 5, "deadline"), ("big", 600, "no_workers")]
)
@scenario_test
async def test_wait_of_many_requests_ends_in_time(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch, model: str, deadline_s: int, code: str
) -> None:
    """Each of them retries every 10 s, and its wait ends after 5."""
    monkeypatch.setattr("kvlane.app.routing.queueing.router_queue.MAX_FREQUENT_RETRIES", 10)
    FakeWorker(world, state="draining")
    world.append(REGISTRY, 0, ModelCard(name="big"), key="model/big")
    await start_router(world, no_worker_timeout_s=5)
    await world.sleep(1)
    names = [f"a{n}" for n in range(100)]
    send(world, *names, model=model, deadline_s=deadline_s)
    await world.sleep(4.9)
    assert ended(world, *names) == {}
    await world.sleep(0.3)
    assert ended(world, *names) == dict.fromkeys(names, code)


@scenario_test
async def test_expired_request_reports_whether_its_model_had_workers(world: MemoryWorld) -> None:
    FakeWorker(world)
    world.append(REGISTRY, 0, ModelCard(name="big"), key="model/big")
    await start_router(world)
    send(world, "a", model="big", deadline_s=5)
    await world.wait_until(lambda: ended(world, "a") == {"a": "no_workers"})


@scenario_test
async def test_refused_and_requeued_request_is_taken_by_a_new_worker(world: MemoryWorld) -> None:
    full = FakeWorker(world)
    await start_router(world)
    world.spawn(full.serve(room=0))
    append_record(world, REQUESTS, PROMPT)
    await world.wait_until(lambda: refusals(world, "a") == 1)
    await world.sleep(0.5)
    fresh = FakeWorker(world, "w2")
    sent_at = world.clock.now()
    await wait_for_items(world, lambda: fresh.received(Assignment))
    assert world.clock.now() - sent_at < 0.5
