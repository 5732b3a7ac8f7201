"""Tests of copies of results in topics of clients, on the log in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from kvlane.app.results import reply_sender
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.errors import AccessDenied, AppendFailed, StreamError
from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.ports import Appended, Entry
from kvlane.streams.request import ReplyAddress
from kvlane.streams.topics import REQUESTS, RESULTS, partition_of
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.results_harness import ResultsHarness

HOUR_MS = 3_600_000


async def collector(world: MemoryWorld, **settings: Any) -> ResultsHarness:
    results = ResultsHarness(world, **settings)
    await results.start()
    return results


def ids_of_lane(results: ResultsHarness, count: int) -> list[str]:
    names = (f"r{number}" for number in range(1000))
    return [name for name in names if results.lane(name) == 0][:count]


def ask(results: ResultsHarness, names: Sequence[str], topic: str) -> None:
    """Requests that are answered, with copies of their results in a topic."""
    for name in names:
        results.ask(name, reply=ReplyAddress(topic=topic))
        results.answer(name, "x")


def replies(world: MemoryWorld, topic: str = "replies", partition: int = 0) -> list[str]:
    return [(record.key or b"").decode() for record in world.records(topic, partition)]


async def undelivered(results: ResultsHarness, reason: str, collector: str = "c1") -> int:
    page = (await results.running[collector][2]._context.metrics.page()).decode()
    name = f'kvlane_collector_undelivered_replies_total{{reason="{reason}"}}'
    [line] = [line for line in page.splitlines() if line.startswith(name)]
    return int(float(line.split()[-1]))


def committed(world: MemoryWorld, lane: int = 0) -> int:
    return world.broker.group(REQUESTS, "collector").committed.get(lane, 0)


@scenario_test
async def test_reply_has_the_result_and_the_headers_of_its_request(world: MemoryWorld) -> None:
    results = await collector(world)
    world.broker.create_topic("replies", 3, HOUR_MS)
    address = ReplyAddress(topic="replies", headers=(("correlation_id", b"\x00\xff"),), partition=2)
    results.ask("a", reply=address)
    results.answer("a", "x")
    await results.only()
    [reply] = world.records("replies", 2)
    [result] = world.records(RESULTS, results.lane("a"))
    assert (reply.key, reply.value) == (b"a", result.value)
    assert ("correlation_id", b"\x00\xff") in reply.headers
    assert json.loads(reply.value or b"")["t"] == "Result"


@pytest.mark.parametrize("partition", [None, 5])
@scenario_test
async def test_reply_that_cannot_be_delivered_leaves_the_result(
    world: MemoryWorld, partition: int | None
) -> None:
    results = await collector(world)
    if partition is not None:
        world.broker.create_topic("replies", 3, HOUR_MS)
    results.ask("a", reply=ReplyAddress(topic="replies", partition=partition))
    results.answer("a", "x")
    await results.only()
    assert await undelivered(results, "no_topic") == 1
    await world.wait_until(lambda: committed(world, results.lane("a")) == 1)


@scenario_test
async def test_topic_that_is_created_later_gets_later_replies(world: MemoryWorld) -> None:
    results = await collector(world)
    names = ids_of_lane(results, 4)
    ask(results, names[:2], "replies")
    await results.wait_results(2)
    world.broker.create_topic("replies", 1, HOUR_MS)
    ask(results, names[2:], "replies")
    await results.wait_results(4)
    assert replies(world) == names[2:]


# --- topics that take no records ------------------------------------------------------------------


class RefusingTopics:
    """Appends to `places` (topic, partition) fail with `error`, after five seconds."""

    def __init__(self) -> None:
        self.places: dict[tuple[str, int], type[StreamError]] = {}
        self.failures = 0
        self._append = MemoryLog.append_batch

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        async def append(
            log: MemoryLog, topic: str, partition: int, entries: Sequence[Entry]
        ) -> Appended:
            if (error := self.places.get((topic, partition))) is not None:
                self.failures += 1
                await log.broker.clock.sleep(5)
                raise error(topic)
            return await self._append(log, topic, partition, entries)

        patch.setattr(MemoryLog, "append_batch", append)


@pytest.mark.parametrize("error", [AccessDenied, AppendFailed])
@scenario_test
async def test_topic_that_takes_no_records_delays_no_result_and_no_other_reply(
    world: MemoryWorld, error: type[StreamError]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        refusing = RefusingTopics()
        refusing.patch(patch)
        refusing.places["refusing", 0] = refusing.places["replies", 1] = error
        results = await collector(world)
        world.broker.create_topic("replies", 3, HOUR_MS)
        world.broker.create_topic("refusing", 1, HOUR_MS)
        names = ids_of_lane(results, 20)
        ask(results, names[:4], "refusing")
        ask(results, names[4:16], "replies")
        ask(results, names[16:], "refusing")
        await results.wait_results(20, within_s=1.0)
        places = {name: partition_of(name.encode(), 3) for name in names[4:16]}
        for partition in (0, 2):
            assert replies(world, "replies", partition) == [
                name for name, place in places.items() if place == partition
            ]
        await world.sleep(240)
        assert world.records("refusing", 0) == world.records("replies", 1) == []
        left_out = sum(place == 1 for place in places.values())
        assert await undelivered(results, "failed") == 8 + left_out > 8
        assert committed(world) == 20
        assert results.running["c1"][1].error is None


@scenario_test
async def test_replies_to_a_topic_that_takes_records_again_are_sent(world: MemoryWorld) -> None:
    with pytest.MonkeyPatch.context() as patch:
        refusing = RefusingTopics()
        refusing.patch(patch)
        refusing.places["replies", 0] = AppendFailed
        results = await collector(world)
        world.broker.create_topic("replies", 1, HOUR_MS)
        names = ids_of_lane(results, 6)
        ask(results, names[:3], "replies")
        await results.wait_results(3)
        await world.sleep(30)
        assert committed(world) == 0  # the next owner of the lane would send them
        refusing.places.clear()
        ask(results, names[3:], "replies")
        await results.wait_results(6)
        await world.sleep(30)
        assert replies(world) == names
        assert await undelivered(results, "failed") == 0
        assert committed(world) == 6


@scenario_test
async def test_replies_of_the_topic_that_has_waited_longest_are_left_out_beyond_the_bound(
    world: MemoryWorld,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reply_sender, "MAX_WAITING", 3)
        refusing = RefusingTopics()
        refusing.patch(patch)
        refusing.places["refusing", 0] = AppendFailed
        results = await collector(world)
        for topic in ("replies", "refusing"):
            world.broker.create_topic(topic, 1, HOUR_MS)
        names = ids_of_lane(results, 12)
        for name in names[:6]:
            ask(results, [name], "refusing")
            await world.sleep(0.2)
        for name in names[6:]:
            ask(results, [name], "replies")
            await world.sleep(0.2)
        await results.wait_results(12)
        assert replies(world) == names[6:]
        assert await undelivered(results, "failed") >= 3


@scenario_test
async def test_outage_of_the_broker_leaves_no_reply_out(world: MemoryWorld) -> None:
    with pytest.MonkeyPatch.context() as patch:
        answers = property(lambda _: world.broker.available)
        patch.setattr(ProcessContext, "broker_answers", answers)
        results = await collector(world)
        world.broker.create_topic("replies", 1, HOUR_MS)
        world.faults.next_fates("replies", *[AppendFate.LOST] * 3)
        ask(results, ["a"], "replies")
        await results.only()
        world.broker.available = False
        await world.sleep(600)
        world.broker.available = True
        await world.sleep(60)
        assert replies(world) == ["a"]
        assert await undelivered(results, "failed") == 0


# --- once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", [AppendFate.UNREPORTED, AppendFate.LOST])
@scenario_test
async def test_reply_whose_append_has_no_known_end_is_there_once(
    world: MemoryWorld, fate: AppendFate
) -> None:
    results = await collector(world)
    world.broker.create_topic("replies", 1, HOUR_MS)
    world.faults.next_fates("replies", fate)
    ask(results, ["a"], "replies")
    await results.only()
    await world.sleep(30)
    assert replies(world) == ["a"]


@pytest.mark.parametrize("is_sent", [False, True])
@scenario_test
async def test_next_collector_sends_the_replies_that_a_killed_one_has_not(
    world: MemoryWorld, is_sent: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        refusing = RefusingTopics()
        refusing.patch(patch)
        results = await collector(world)
        world.broker.create_topic("replies", 1, HOUR_MS)
        world.faults.slow["commit"] = 1000.0  # of the group's position
        if not is_sent:
            refusing.places["replies", 0] = AppendFailed
        ask(results, ["a", "b"], "replies")
        await results.wait_results(2)
        await results.kill()
        refusing.places.clear()
        world.faults.slow.clear()
        await results.start("c2")
        await world.sleep(60)
        assert sorted(replies(world)) == ["a", "b"]
        assert len(results.results()) == 2
        assert [committed(world, lane) for lane in range(world.lanes)] == [
            len(world.records(REQUESTS, lane)) for lane in range(world.lanes)
        ]


@scenario_test
async def test_denied_results_end_the_process(world: MemoryWorld) -> None:
    with pytest.MonkeyPatch.context() as patch:

        async def refuse(*_: object) -> None:
            raise AccessDenied(RESULTS)

        patch.setattr("kvlane.streams.memory.memory_writes.MemoryTransactionalWriter.write", refuse)
        results = await collector(world)
        ask(results, ["a"], "replies")
        ctx = results.running["c1"][1]
        await world.wait_until(lambda: ctx.error is not None, within_s=120)
        assert isinstance(ctx.error, AccessDenied)
