"""Tests of positions of prompts: committed as prompts are acknowledged, and never lower than
before."""

from __future__ import annotations

from functools import partial

import pytest

from kvlane.app.preprocessor import Preprocessor
from kvlane.app.prompts.prompt_source import PromptSource
from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.ports import Entry
from kvlane.streams.prompt import with_append_time
from kvlane.streams.records import Refused
from kvlane.streams.request import Request
from kvlane.streams.topics import BATCH, DEAD_LETTERS, PROMPT_READABLE_MS, PROMPTS, partition_of
from tests.flows.test_batch_prompts import report
from tests.flows.test_preprocessor import begin, publish, sent
from tests.harness.memory_world import MemoryWorld, scenario_test

GROUPS = {PROMPTS: "preprocessor", BATCH: "preprocessor-batch"}
KEY = b"all"
"""The key of the records: they are in one partition."""


def ask(world: MemoryWorld, topic: str, *ids: str) -> None:
    """Publish prompts to one partition."""
    for name in ids:
        value = b'{"id":"%s","body":{"messages":[{"role":"user","content":"hi"}]}}' % name.encode()
        partition = partition_of(KEY, world.broker.partitions[topic])
        world.append_raw(topic, partition, Entry(KEY, value))


def committed(world: MemoryWorld, topic: str) -> int:
    partition = partition_of(KEY, world.broker.partitions[topic])
    found: int = world.broker.group(topic, GROUPS[topic]).committed.get(partition, 0)
    return found


def source_of(preprocessor: Preprocessor, topic: str) -> PromptSource:
    return preprocessor.prompts if topic == PROMPTS else preprocessor._batch


async def hold(world: MemoryWorld, topic: str, *, of: int = 6, room: int = 2) -> Preprocessor:
    """A preprocessor that has read `of` prompts, of which routers have room for `room`."""
    report(world, batch_requests=room, requests=room, read=0)
    ask(world, topic, *(f"r{n}" for n in range(of)))
    preprocessor, _ = await begin(world)
    await world.wait_until(lambda: len(sent(world, Request)) == room)
    return preprocessor


@pytest.mark.parametrize("topic", [PROMPTS, BATCH])
@partial(scenario_test, lanes=1)
async def test_published_prompts_are_committed_while_others_wait(
    world: MemoryWorld, topic: str
) -> None:
    await hold(world, topic)
    await world.wait_until(lambda: committed(world, topic) == 2, within_s=1)
    report(world, batch_requests=1, requests=1, read=2)
    await world.wait_until(lambda: committed(world, topic) == 3, within_s=1)


@pytest.mark.parametrize("topic", [PROMPTS, BATCH])
@partial(scenario_test, lanes=1)
async def test_stop_commits_what_is_published_and_nothing_else(
    world: MemoryWorld, topic: str
) -> None:
    preprocessor = await hold(world, topic)
    world.faults.slow["append"] = 0.5
    report(world, batch_requests=2, requests=2, read=2)
    await world.sleep(0.1)  # two more are on their way
    await preprocessor.stop()
    assert len(sent(world, Request)) == 4
    assert committed(world, topic) == 4


@pytest.mark.parametrize("topic", [PROMPTS, BATCH])
@partial(scenario_test, lanes=1)
async def test_partition_that_comes_back_during_a_batch_is_committed_by_its_new_claim_alone(
    world: MemoryWorld, topic: str
) -> None:
    preprocessor = await hold(world, topic)
    await world.sleep(1)
    world.faults.slow["append"] = 1.0
    report(world, batch_requests=2, requests=2, read=2)
    await world.sleep(0.1)  # two more are on their way
    source, partition = source_of(preprocessor, topic), partition_of(KEY, 16)
    source.revoked(frozenset({partition}))
    world.broker.group(topic, GROUPS[topic]).committed[partition] = 6  # by the owner in between
    source.assigned({partition: 6})
    marks = []
    commit = source._opened.commit

    async def observed(offsets: dict[int, int]) -> None:
        marks.append(dict(offsets))
        await commit(offsets)

    source._opened.commit = observed  # type: ignore[method-assign, assignment]
    await world.sleep(5)
    await preprocessor.stop()
    assert marks == []
    assert committed(world, topic) == 6
    assert len(sent(world, Request)) == 4, "the others are left to their owner"


@scenario_test
async def test_bad_prompt_is_done_when_its_answer_and_its_dead_letter_are_written(
    world: MemoryWorld,
) -> None:
    world.faults.next_fates(DEAD_LETTERS, *[AppendFate.LOST] * 10_000)
    await begin(world)
    publish(world, KEY, b"not json")
    await world.sleep(5)
    assert len(sent(world, Refused)) == 1
    assert not committed(world, PROMPTS)
    world.faults.fates.clear()
    await world.wait_until(lambda: committed(world, PROMPTS) == 1)
    assert len(world.all_records(DEAD_LETTERS)) == 1


@scenario_test
async def test_commit_without_an_answer_is_repeated(world: MemoryWorld) -> None:
    await begin(world)
    world.faults.unanswered = {"commit"}
    ask(world, PROMPTS, "a")
    await world.wait_until(lambda: bool(sent(world, Request)))
    await world.sleep(5.0)
    assert not committed(world, PROMPTS)
    world.faults.unanswered = set()
    await world.wait_until(lambda: committed(world, PROMPTS) == 1)


@pytest.mark.parametrize("topic", [PROMPTS, BATCH])
@partial(scenario_test, lanes=1)
async def test_member_that_waits_for_room_commits_and_keeps_its_partitions(
    world: MemoryWorld, topic: str
) -> None:
    preprocessor = await hold(world, topic, room=1)
    read = 0

    async def report_again() -> None:
        while True:
            report(world, batch_requests=1, requests=1, read=read)
            await world.sleep(1)

    world.spawn(report_again())
    for read in range(1, 5):
        await world.sleep(60)  # ten session time-outs
        assert committed(world, topic) == read + 1
    assert len(source_of(preprocessor, topic)._claims) == world.broker.partitions[topic]
    assert [r.id for r in sent(world, Request)] == [f"r{n}" for n in range(5)]


@pytest.mark.parametrize("topic", [PROMPTS, BATCH])
@partial(scenario_test, lanes=1)
async def test_prompt_that_is_older_than_the_memory_of_ids_counts_as_deleted(
    world: MemoryWorld, topic: str
) -> None:
    """Brokers delete whole segments, so it may be read long after its retention."""
    ask(world, topic, "new")
    since_ms = world.clock.wall_ms() - PROMPT_READABLE_MS
    old = Entry(KEY, b'{"id":"old"}', with_append_time((), since_ms))
    world.append_raw(topic, partition_of(KEY, 16), old)
    preprocessor, _ = await begin(world)
    report(world, batch_requests=9, requests=9, read=0)
    await world.wait_until(lambda: committed(world, topic) == 2)
    assert [r.id for r in sent(world, Request)] == ["new"]
    assert not sent(world, Refused)
    page = (await preprocessor._metrics.page()).decode()
    assert 'kvlane_preprocessor_prompts_total{outcome="deleted"} 1.0' in page
