"""Copies of results in topics of clients, on the log in memory."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from app.results.result_writer import REFUSING_S
from streams.errors import AccessDenied, AppendFailed, StreamError
from streams.memory.memory_log import MemoryLog
from streams.memory.memory_transactions import MemoryTransactionalWriter
from streams.ports import TopicEntry
from streams.request import ReplyAddress
from streams.topics import RESULTS, partition_of
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.results_harness import ResultsHarness


async def collector(world: MemoryWorld, **settings: Any) -> ResultsHarness:
    results = ResultsHarness(world, **settings)
    await results.start()
    return results


def ids_of_lane(results: ResultsHarness, count: int) -> list[str]:
    names = (f"r{number}" for number in range(1000))
    return [name for name in names if results.lane(name) == 0][:count]


async def undelivered(results: ResultsHarness, reason: str) -> int:
    page = (await results.running["c1"][2]._context.metrics.page()).decode()
    name = f'kvlane_collector_undelivered_replies_total{{reason="{reason}"}}'
    [line] = [line for line in page.splitlines() if line.startswith(name)]
    return int(float(line.split()[-1]))


@scenario_test
async def test_reply_has_the_result_and_the_headers_of_its_request(world: MemoryWorld) -> None:
    results = await collector(world)
    world.broker.create_topic("replies", 3, 3_600_000)
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
        world.broker.create_topic("replies", 3, 3_600_000)
    results.ask("a", reply=ReplyAddress(topic="replies", partition=partition))
    results.answer("a", "x")
    await results.only()
    assert await undelivered(results, "no_topic") == 1


@scenario_test
async def test_all_topics_of_replies_of_a_transaction_are_looked_up_at_once(
    world: MemoryWorld,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        looked_up: list[set[str]] = []
        partitions = MemoryLog.foreign_partitions

        async def look_up(log: MemoryLog, topics: Collection[str]) -> dict[str, int]:
            looked_up.append(set(topics))
            return await partitions(log, topics)

        patch.setattr(MemoryLog, "foreign_partitions", look_up)
        results = await collector(world)
        names = ids_of_lane(results, 12)
        for first in (0, 6):
            for name, topic in zip(names[first:][:6], ("replies", "others", None) * 2, strict=True):
                results.ask(name, reply=None if topic is None else ReplyAddress(topic=topic))
                results.answer(name, "x")
            await results.wait_results(first + 6)
            if not first:
                world.broker.create_topic("replies", 1, 3_600_000)
        assert looked_up == [{"replies", "others"}] * 2
        assert [(r.key or b"").decode() for r in world.records("replies", 0)] == names[6::3]


# --- topics that take no records ------------------------------------------------------------------


class RefusingTopics:
    """Transactions with a record for one of `places` (topic, partition) fail with `error`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: type[StreamError]) -> None:
        self.places: set[tuple[str, int | None]] = set()
        self.failures = 0
        write = MemoryTransactionalWriter.write

        async def refuse(writer: MemoryTransactionalWriter, entries: Sequence[TopicEntry]) -> None:
            for topic, _, partition, _ in entries:
                if (topic, partition) in self.places or (topic, None) in self.places:
                    self.failures += 1
                    writer._epoch = None
                    await writer._connection.broker.clock.sleep(5)
                    raise error(topic)
            await write(writer, entries)

        monkeypatch.setattr(MemoryTransactionalWriter, "write", refuse)


@pytest.mark.parametrize("error", [AccessDenied, AppendFailed])
@scenario_test
async def test_unwritable_topic_delays_only_its_replies(
    world: MemoryWorld, error: type[StreamError]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        refusing = RefusingTopics(patch, error)
        refusing.places.add(("refusing", None))
        results = await collector(world)
        for topic in ("replies", "refusing"):
            world.broker.create_topic(topic, 1, 3_600_000)
        names = ids_of_lane(results, 9)
        for name, topic in zip(names, ("replies", "refusing", None) * 3, strict=True):
            results.ask(name, reply=None if topic is None else ReplyAddress(topic=topic))
            results.answer(name, "x")
        found = await results.wait_results(9, within_s=120)
        assert {result.id for result in found} == set(names)
        replies = [(record.key or b"").decode() for record in world.records("replies", 0)]
        assert replies == names[::3]
        assert world.records("refusing", 0) == []
        assert await undelivered(results, "failed") == 3
        # The batch, and two of the three alone.
        assert refusing.failures <= 3 + 2
        assert results.running["c1"][1].error is None


@scenario_test
async def test_unwritable_topic_is_skipped_for_a_while(
    world: MemoryWorld, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        refusing = RefusingTopics(patch, AppendFailed)
        refusing.places.add(("refusing", None))
        results = await collector(world)
        world.broker.create_topic("refusing", 1, 3_600_000)
        names = ids_of_lane(results, 9)

        def ask(some: Sequence[str]) -> None:
            for name in some:
                results.ask(name, reply=ReplyAddress(topic="refusing"))
                results.answer(name, "x")

        ask(names[:3])
        await results.wait_results(3, within_s=120)
        failures = refusing.failures
        ask(names[3:6])
        await results.wait_results(6, within_s=5)
        assert refusing.failures == failures
        assert await undelivered(results, "failed") == 6
        assert caplog.text.count("replies to refusing are left out") == 1
        refusing.places.clear()
        await world.sleep(REFUSING_S)
        ask(names[6:])
        await results.wait_results(9, within_s=5)
        replies = [(record.key or b"").decode() for record in world.records("refusing", 0)]
        assert replies == names[6:]


@scenario_test
async def test_other_partitions_of_a_topic_get_their_replies(world: MemoryWorld) -> None:
    with pytest.MonkeyPatch.context() as patch:
        refusing = RefusingTopics(patch, AppendFailed)
        refusing.places.add(("replies", 0))
        results = await collector(world)
        world.broker.create_topic("replies", 2, 3_600_000)
        names = ids_of_lane(results, 12)
        for name in names:
            results.ask(name, reply=ReplyAddress(topic="replies"))
            results.answer(name, "x")
        await results.wait_results(12, within_s=120)
        due = [name for name in names if partition_of(name.encode(), 2) == 1]
        assert [(r.key or b"").decode() for r in world.records("replies", 1)] == due
        assert await undelivered(results, "failed") == 12 - len(due) > 0


@scenario_test
async def test_outage_of_results_does_not_delay_replies(world: MemoryWorld) -> None:
    with pytest.MonkeyPatch.context() as patch:
        refusing = RefusingTopics(patch, AppendFailed)
        refusing.places.add((RESULTS, None))
        results = await collector(world)
        world.broker.create_topic("replies", 1, 3_600_000)
        results.ask("a", reply=ReplyAddress(topic="replies"))
        results.answer("a", "x")
        # Twice: three times, alone, and without its reply.
        await world.wait_until(lambda: refusing.failures == 2 * (3 + 2), within_s=200)
        refusing.places.clear()
        await results.only()
        assert len(world.records("replies", 0)) == 1
        assert await undelivered(results, "failed") == 0


@scenario_test
async def test_denied_results_end_the_process(world: MemoryWorld) -> None:
    with pytest.MonkeyPatch.context() as patch:
        RefusingTopics(patch, AccessDenied).places.add((RESULTS, None))
        results = await collector(world)
        world.broker.create_topic("replies", 1, 3_600_000)
        results.ask("a", reply=ReplyAddress(topic="replies"))
        results.answer("a", "x")
        ctx = results.running["c1"][1]
        await world.wait_until(lambda: ctx.error is not None, within_s=120)
        assert isinstance(ctx.error, AccessDenied)
