"""Tests of batch prompts: their topic decides the class, and their credit is their own."""

from __future__ import annotations

import json
from functools import partial

from kvlane.streams.codecs import decode
from kvlane.streams.ports import Entry
from kvlane.streams.prompt import APPENDED_HEADER
from kvlane.streams.records import Cancel, End, RouterCapacity
from kvlane.streams.request import Request
from kvlane.streams.topics import (
    BATCH,
    CAPACITY,
    PROMPTS,
    REQUESTS,
    RESPONSES,
    lane_of,
    partition_of,
)
from tests.flows.test_preprocessor import begin, send, sent
from tests.harness.memory_world import MemoryWorld, scenario_test


def ask_batch(world: MemoryWorld, request_id: str, **fields: object) -> None:
    """Publish a prompt to `batch`."""
    key = request_id.encode()
    prompt = {"id": request_id, "body": {"messages": [{"role": "user", "content": "hi"}]}} | fields
    partition = partition_of(key, world.broker.partitions[BATCH])
    world.append_raw(BATCH, partition, Entry(key, json.dumps(prompt).encode()))


def report(world: MemoryWorld, batch_requests: int, read: int, requests: int = 100) -> None:
    """A router of the only lane, that has read so many of its records."""
    capacity = RouterCapacity(
        router="r1", requests=requests, tokens=10**6, bytes=10**6, positions={0: read},
        batch_requests=batch_requests,
    )  # fmt: skip
    world.append(CAPACITY, 0, capacity, key="r1")


def published(world: MemoryWorld, service_class: str) -> list[str]:
    return [r.id for r in sent(world, Request) if r.service_class == service_class]


@partial(scenario_test, lanes=1)
async def test_topic_of_a_prompt_decides_its_class(world: MemoryWorld) -> None:
    await begin(world)
    report(world, batch_requests=10, read=0)
    send(world, "now")
    ask_batch(world, "later")
    ask_batch(world, "later-2", service_class="interactive")
    await world.wait_until(lambda: len(sent(world, Request)) == 3)
    assert published(world, "interactive") == ["now"]
    assert sorted(published(world, "batch")) == ["later", "later-2"]


@partial(scenario_test, lanes=1)
async def test_batch_prompt_in_prompts_is_moved(world: MemoryWorld) -> None:
    preprocessor, _ = await begin(world)
    report(world, batch_requests=10, read=0)
    send(world, "later", service_class="batch")
    await world.wait_until(lambda: len(sent(world, Request)) == 1)
    assert published(world, "batch") == ["later"]
    (moved,) = world.all_records(BATCH)
    assert (moved.key, moved.value) == (b"later", world.all_records(PROMPTS)[0].value)
    page = (await preprocessor._metrics.page()).decode()
    assert 'kvlane_preprocessor_prompts_total{outcome="moved_to_batch"} 1.0' in page


@partial(scenario_test, lanes=1)
async def test_moved_batch_prompt_keeps_its_headers_and_its_time(world: MemoryWorld) -> None:
    headers = (("reply_to", b"answers"), ("correlation_id", b"7"), ("traceparent", None))
    body = {"messages": [{"role": "user", "content": "hi"}]}
    value = json.dumps({"id": "a", "body": body, "service_class": "batch"}).encode()
    world.append_raw(PROMPTS, 0, Entry(b"a", value, headers))
    await world.sleep(1800)
    await begin(world, reply_topic_prefixes="answers")
    await world.wait_until(lambda: bool(world.all_records(BATCH)))
    moved, prompt = world.all_records(BATCH)[0], world.all_records(PROMPTS)[0]
    assert tuple(moved.headers) == (*headers, (APPENDED_HEADER, str(prompt.timestamp).encode()))


@partial(scenario_test, lanes=1)
async def test_batch_prompts_wait_for_their_own_credit_and_block_no_others(
    world: MemoryWorld,
) -> None:
    await begin(world)
    for n in range(50):
        ask_batch(world, f"b{n}")
    report(world, batch_requests=4, read=0)
    await world.wait_until(lambda: len(published(world, "batch")) == 4)
    report(world, batch_requests=4, read=0)  # it has not read them: no room was freed
    send(world, "now")
    await world.wait_until(lambda: published(world, "interactive") == ["now"])
    await world.sleep(3)
    assert len(published(world, "batch")) == 4
    report(world, batch_requests=3, read=5)
    await world.wait_until(lambda: len(published(world, "batch")) == 7)


@partial(scenario_test, lanes=1)
async def test_batch_prompt_waits_while_no_router_reports(world: MemoryWorld) -> None:
    await begin(world)
    ask_batch(world, "later")
    await world.sleep(30)
    assert not sent(world, Request)
    report(world, batch_requests=1, read=0)
    await world.wait_until(lambda: published(world, "batch") == ["later"])


@partial(scenario_test, lanes=1)
async def test_batch_prompt_may_wait_longer_than_an_interactive_one(world: MemoryWorld) -> None:
    await begin(world)
    ask_batch(world, "long", deadline_s=100_000)
    ask_batch(world, "short", deadline_s=1000)
    await world.sleep(2000)
    report(world, batch_requests=2, read=0)
    await world.wait_until(lambda: published(world, "batch") == ["long"])
    assert lane_of("short", 1) == 0
    assert not [r for r in map(decode, world.all_records(RESPONSES)) if isinstance(r, End)]


@partial(scenario_test, lanes=1)
async def test_cancel_in_batch_follows_its_prompt(world: MemoryWorld) -> None:
    await begin(world)
    ask_batch(world, "a")
    ask_batch(world, "b")
    ask_batch(world, "a", kind="cancel", body={})
    await world.sleep(10)
    assert sent(world, Cancel) == []
    report(world, batch_requests=2, read=0)
    await world.wait_until(lambda: len(sent(world, Cancel)) == 1)
    records = [decode(record) for record in world.all_records(REQUESTS)]
    assert [type(r) for r in records if isinstance(r, Request | Cancel) and r.id == "a"] == [
        Request,
        Cancel,
    ]
