"""Tests of prompts that clients publish in transactions, on the log in memory."""

from __future__ import annotations

import json

import pytest

from kvlane.app.preprocessor import Preprocessor
from kvlane.app.prompts.prompt_source import PromptSource
from kvlane.streams.ports import Entry
from kvlane.streams.records import Refused, RouterCapacity
from kvlane.streams.request import Request
from kvlane.streams.topics import BATCH, CAPACITY, PROMPTS, partition_of
from tests.flows.test_preprocessor import begin, sent
from tests.harness.client_transactions import ClientTransaction
from tests.harness.memory_world import MemoryWorld, scenario_test


async def serving(world: MemoryWorld) -> Preprocessor:
    """A preprocessor, beside a router that has room."""
    room = RouterCapacity(
        router="r", positions=dict.fromkeys(range(world.lanes), 0),
        requests=10**6, tokens=10**9, bytes=10**9, batch_requests=10**6,
    )  # fmt: skip

    async def report() -> None:
        while True:
            world.append(CAPACITY, 0, room, key="r")
            await world.sleep(1)

    world.spawn(report())
    preprocessor, _ = await begin(world)
    return preprocessor


def publish(
    world: MemoryWorld, request_id: str, topic: str, transaction: ClientTransaction | None = None
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    entry = Entry(request_id.encode(), json.dumps({"id": request_id, "body": body}).encode())
    partition = partition_of(request_id.encode(), world.broker.partitions[topic])
    if transaction is None:
        world.append_raw(topic, partition, entry)
    else:
        transaction.append(topic, partition, entry)


def ids(world: MemoryWorld) -> list[str]:
    assert sent(world, Refused) == []
    return sorted(request.id for request in sent(world, Request))


def source(preprocessor: Preprocessor, topic: str) -> PromptSource:
    return preprocessor.prompts if topic == PROMPTS else preprocessor._batch


@pytest.mark.parametrize("topic", [PROMPTS, BATCH])
@scenario_test
async def test_only_prompts_of_committed_transactions_run(world: MemoryWorld, topic: str) -> None:
    await serving(world)
    committed, aborted, left_open = (ClientTransaction(world.broker) for _ in range(3))
    for number in range(20):
        publish(world, f"plain-{number}", topic)
        publish(world, f"committed-{number}", topic, committed)
        publish(world, f"aborted-{number}", topic, aborted)
    await world.sleep(10)
    committed.end(is_committed=True)
    aborted.end(is_committed=False)
    await world.sleep(10)
    expected = sorted(f"{kind}-{n}" for kind in ("plain", "committed") for n in range(20))
    assert ids(world) == expected
    publish(world, "open", topic, left_open)
    await world.sleep(60)
    assert ids(world) == expected
    left_open.end(is_committed=True)
    await world.sleep(10)
    assert ids(world) == ["committed-0", *expected[1:20], "open", *expected[20:]]


@pytest.mark.parametrize("topic", [PROMPTS, BATCH])
@scenario_test
async def test_id_of_an_aborted_prompt_is_free(world: MemoryWorld, topic: str) -> None:
    await serving(world)
    aborted = ClientTransaction(world.broker)
    publish(world, "a", topic, aborted)
    publish(world, "a", topic)
    await world.sleep(10)
    assert ids(world) == []
    aborted.end(is_committed=False)
    await world.sleep(10)
    assert ids(world) == ["a"]


@pytest.mark.parametrize("topic", [PROMPTS, BATCH])
@scenario_test
async def test_ended_transactions_leave_no_backlog_and_no_lag(
    world: MemoryWorld, topic: str
) -> None:
    preprocessor = await serving(world)
    for number in range(8):
        transaction = ClientTransaction(world.broker)
        publish(world, f"r{number}", topic, transaction)
        transaction.end(is_committed=number % 2 == 0)
    await world.sleep(20)
    assert len(ids(world)) == 4
    backlog = await source(preprocessor, topic).backlog.measure()
    assert backlog is not None
    assert (backlog.records, backlog.oldest_s) == (0, 0.0)
    group = world.broker.group(topic, "preprocessor" + "-batch" * (topic == BATCH))
    for partition, committed in group.committed.items():
        assert committed == world.broker.log(topic, partition).end
    left_open = ClientTransaction(world.broker)
    publish(world, "open", topic, left_open)
    await world.sleep(20)
    backlog = await source(preprocessor, topic).backlog.measure()
    assert backlog is not None
    assert backlog.records == 0
