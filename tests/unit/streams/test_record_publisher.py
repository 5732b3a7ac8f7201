"""Tests of publishing: one try, or repetition of errors that a retry can cure."""

from __future__ import annotations

import asyncio
import math
from itertools import pairwise

import pytest

from kvlane.streams.clock import MAX_BACKOFF_S, BrokerClock
from kvlane.streams.codecs import decode
from kvlane.streams.errors import AppendFailed, LogClosed, RecordTooLarge
from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.record_publisher import OutgoingRecord, RecordPublisher
from kvlane.streams.records import Cancel, Fencing
from kvlane.streams.request import Request
from kvlane.streams.topics import LEDGER, REQUESTS
from tests.harness.memory_world import MemoryWorld, scenario_test

FENCING = Fencing(id="a", attempt=1)


@scenario_test
async def test_send_tries_once(world: MemoryWorld) -> None:
    publisher = RecordPublisher(await world.connect(), world.clock)
    world.faults.next_fates(LEDGER, AppendFate.LOST)
    with pytest.raises(AppendFailed):
        await publisher.publish_once(LEDGER, "a", FENCING)
    assert world.all_records(LEDGER) == []


@scenario_test
async def test_record_goes_to_the_partition_of_its_key(world: MemoryWorld) -> None:
    publisher = RecordPublisher(await world.connect(), world.clock)
    appended = await publisher.publish_once(LEDGER, "a", FENCING)
    (record,) = world.records(LEDGER, key="a")
    assert (record.partition, record.offset) == appended[:2]
    assert decode(record) == FENCING


@scenario_test
async def test_given_partition_wins_over_the_key(world: MemoryWorld) -> None:
    publisher = RecordPublisher(await world.connect(), world.clock)
    for partition in range(world.lanes):
        await publisher.publish_once(LEDGER, "a", FENCING, partition)
        assert len(world.records(LEDGER, partition)) == 1


@scenario_test
async def test_persist_repeats_until_acknowledged(world: MemoryWorld) -> None:
    publisher = RecordPublisher(await world.connect(), world.clock)
    world.faults.next_fates(LEDGER, *[AppendFate.LOST] * 20)
    appended = await publisher.publish(LEDGER, "a", FENCING)
    assert [r.offset for r in world.records(LEDGER, key="a")] == [appended.offset]


@scenario_test
async def test_persist_may_store_a_record_twice(world: MemoryWorld) -> None:
    publisher = RecordPublisher(await world.connect(), world.clock)
    world.faults.next_fates(LEDGER, AppendFate.UNREPORTED)
    appended = await publisher.publish(LEDGER, "a", FENCING)
    assert [r.offset for r in world.records(LEDGER, key="a")] == [0, 1]
    assert appended.offset == 1


class Out:
    """Instead of a list of fates: every append is lost, until it is over."""

    def __init__(self) -> None:
        self.tries = 0
        self.over = False

    def __bool__(self) -> bool:
        return not self.over

    def popleft(self) -> AppendFate:
        self.tries += 1
        return AppendFate.LOST


@scenario_test
async def test_one_of_many_failing_records_is_repeated_per_partition(world: MemoryWorld) -> None:
    publisher, out = RecordPublisher(await world.connect(), world.clock), Out()
    world.faults.fates[LEDGER] = out  # type: ignore[assignment]
    waiting = [
        world.spawn(publisher.publish(LEDGER, f"r{n}", Fencing(id=f"r{n}", attempt=1), 0))
        for n in range(100)
    ]
    await world.sleep(60)
    # Each one's first try, one a second, and each one by itself every 15 s.
    assert 200 < out.tries < 100 + 60 + 10 + 4 * 100
    out.over = True
    await world.sleep(MAX_BACKOFF_S)
    assert all(task.done() for task in waiting)
    assert len(world.records(LEDGER, 0)) == 100


@scenario_test
async def test_cancelled_repeat_is_taken_over_by_another(world: MemoryWorld) -> None:
    publisher, out = RecordPublisher(await world.connect(), world.clock), Out()
    world.faults.fates[LEDGER] = out  # type: ignore[assignment]
    first = world.spawn(publisher.publish(LEDGER, "a", FENCING, 0))
    await world.sleep(5)
    second = world.spawn(publisher.publish(LEDGER, "b", Fencing(id="b", attempt=1), 0))
    await world.sleep(1)
    first.cancel()
    await world.sleep(0.5)
    out.over = True
    await world.sleep(MAX_BACKOFF_S)
    assert second.done()
    assert [r.key for r in world.records(LEDGER, 0)] == [b"b"]


@scenario_test
async def test_pauses_double_up_to_a_cap(world: MemoryWorld) -> None:
    publisher = RecordPublisher(await world.connect(), world.clock)
    tries: list[float] = []
    send_entry = publisher.publish_entry_once

    async def timed(*args: object) -> object:
        tries.append(world.clock.now())
        return await send_entry(*args)  # type: ignore[arg-type]

    publisher.publish_entry_once = timed  # type: ignore[assignment, method-assign]
    world.faults.next_fates(LEDGER, *[AppendFate.LOST] * 8)
    await publisher.publish(LEDGER, "a", FENCING)
    pauses = [round(b - a, 3) for a, b in pairwise(tries)]
    assert pauses[:5] == [0.05, 0.1, 0.2, 0.4, 0.8]
    assert pauses[5:] == [MAX_BACKOFF_S] * 3


@scenario_test
async def test_persist_ends_at_its_deadline(world: MemoryWorld) -> None:
    publisher = RecordPublisher(await world.connect(), world.clock)
    world.broker.available = False
    until = world.clock.now() + 3.3
    with pytest.raises(AppendFailed):
        await publisher.publish(LEDGER, "a", FENCING, until=until)
    assert world.clock.now() == pytest.approx(until)


@scenario_test
async def test_record_that_is_too_large_is_not_repeated(world: MemoryWorld) -> None:
    publisher = RecordPublisher(await world.connect(), world.clock)
    large = Request(id="a", token_ids=bytes(9 << 20))
    with pytest.raises(RecordTooLarge):
        await publisher.publish(REQUESTS, "a", large)
    assert world.clock.now() == 0.0


@scenario_test
async def test_closed_log_is_not_tried_again(world: MemoryWorld) -> None:
    log = await world.connect()
    publisher = RecordPublisher(log, world.clock)
    world.faults.next_fates(LEDGER, *[AppendFate.LOST] * 1000)
    sending = world.spawn(publisher.publish(LEDGER, "a", FENCING))
    await world.sleep(5)
    await log.close()
    with pytest.raises(LogClosed):
        await asyncio.wait_for(sending, 2)


@scenario_test
async def test_persist_can_be_cancelled(world: MemoryWorld) -> None:
    publisher = RecordPublisher(await world.connect(), world.clock)
    world.broker.available = False
    sending = world.spawn(publisher.publish(LEDGER, "a", FENCING))
    await world.sleep(5)
    sending.cancel()
    await asyncio.wait([sending])
    world.broker.available = True
    await world.sleep(5)
    assert world.all_records(LEDGER) == []


@scenario_test
async def test_records_published_together_are_each_repeated(world: MemoryWorld) -> None:
    outbox = RecordPublisher(await world.connect(), world.clock)
    world.faults.next_fates(LEDGER, *[AppendFate.LOST] * 3)
    world.faults.next_fates(REQUESTS, AppendFate.LOST)
    cancel = Cancel(id="b")
    first, second = await outbox.publish_together(
        OutgoingRecord(LEDGER, 1, "a", FENCING), OutgoingRecord(REQUESTS, 0, "b", cancel)
    )
    (fencing,), (cancelled,) = world.records(LEDGER, 1), world.records(REQUESTS, 0)
    assert (fencing.offset, decode(fencing)) == (first.offset, FENCING)
    assert (cancelled.offset, decode(cancelled)) == (second.offset, cancel)


@scenario_test
async def test_records_published_together_are_in_flight_at_the_same_time(
    world: MemoryWorld,
) -> None:
    world.faults.slow["append"] = 1.0  # there, and back
    outbox = RecordPublisher(await world.connect(), world.clock)
    began_at = world.clock.now()
    await outbox.publish_together(
        OutgoingRecord(LEDGER, 0, "a", FENCING), OutgoingRecord(REQUESTS, 0, "b", Cancel(id="b"))
    )
    assert world.clock.now() - began_at < 2.5


@pytest.mark.parametrize("large", [0, 1])
@scenario_test
async def test_of_records_published_together_one_may_be_too_large(
    world: MemoryWorld, large: int
) -> None:
    outbox = RecordPublisher(await world.connect(), world.clock)
    records = [OutgoingRecord(REQUESTS, p, "a", Cancel(id="a")) for p in (0, 1)]
    request = Request(id="a", model="m", token_ids=bytes(9 * 1024 * 1024))
    records[large] = OutgoingRecord(REQUESTS, large, "a", request)
    with pytest.raises(RecordTooLarge):
        await outbox.publish_together(*records)
    await world.sleep(1)
    assert request not in [decode(r) for r in world.all_records(REQUESTS)]


@scenario_test
async def test_batch_is_in_order_in_one_partition(world: MemoryWorld) -> None:
    publisher = RecordPublisher(await world.connect(), world.clock)
    sent = [(f"k{i}", Cancel(id=f"k{i}")) for i in range(50)]
    appended = await publisher.publish_batch_once(REQUESTS, 1, sent)
    assert appended[:2] == (1, 0)
    assert [(str(r.key, "ascii"), decode(r)) for r in world.records(REQUESTS, 1)] == sent


@scenario_test
async def test_batches_of_many_partitions_end_independently(world: MemoryWorld) -> None:
    publisher = RecordPublisher(await world.connect(), world.clock)
    world.faults.next_fates(LEDGER, AppendFate.LOST)
    appending = publisher.publish_many_once(LEDGER, {0: [("a", FENCING)], 1: [("b", FENCING)] * 2})
    with pytest.raises(AppendFailed):
        await appending[0]
    assert (await appending[1])[:2] == (1, 0)
    assert [decode(r) for r in world.records(LEDGER, 1)] == [FENCING] * 2


@pytest.mark.parametrize(
    "how", ["publish_once", "publish", "publish_batch_once", "publish_many_once"]
)
@scenario_test
async def test_acknowledged_append_times_set_the_broker_clock(world: MemoryWorld, how: str) -> None:
    broker_clock = BrokerClock(world.clock)
    publisher = RecordPublisher(await world.connect(), world.clock, broker_clock)
    await world.sleep(100)
    assert broker_clock.now_ms() == 0
    if how == "publish_batch_once":
        await publisher.publish_batch_once(LEDGER, 0, [("a", FENCING)])
    elif how == "publish_many_once":
        await publisher.publish_many_once(LEDGER, {0: [("a", FENCING)]})[0]
    else:
        await getattr(publisher, how)(LEDGER, "a", FENCING)
    assert broker_clock.now_ms() == world.broker.now_ms()


@scenario_test
async def test_slow_appends_are_reported_while_they_last_and_afterwards(world: MemoryWorld) -> None:
    clock = BrokerClock(world.clock)
    publisher = RecordPublisher(await world.connect(), world.clock, clock)
    await publisher.publish_once(LEDGER, "a", FENCING)
    await world.sleep(10)
    assert publisher.slow_until_s == -math.inf
    world.faults.slow["append"] = 4.0
    slow = world.spawn(publisher.publish_once(LEDGER, "a", FENCING))
    await world.sleep(0.5)
    quick = world.spawn(publisher.publish_once(LEDGER, "b", FENCING))
    assert publisher.slow_until_s == -math.inf
    await world.sleep(1.5)
    assert publisher.slow_until_s == world.clock.now()
    await slow
    await quick
    ended_s = world.clock.now()
    world.faults.slow.clear()
    await world.sleep(10)
    await publisher.publish_once(LEDGER, "a", FENCING)
    assert publisher.slow_until_s == ended_s


@scenario_test
async def test_slow_batch_of_many_is_reported_while_it_lasts(world: MemoryWorld) -> None:
    clock = BrokerClock(world.clock)
    publisher = RecordPublisher(await world.connect(), world.clock, clock)
    await publisher.publish_once(LEDGER, "a", FENCING)
    world.faults.slow["append"] = 4.0
    appending = publisher.publish_many_once(LEDGER, {0: [("a", FENCING)]})
    await world.sleep(2)
    assert publisher.slow_until_s == world.clock.now()
    await appending[0]
    ended_s = world.clock.now()
    await world.sleep(10)
    assert publisher.slow_until_s == ended_s


@scenario_test
async def test_appends_that_fail_late_are_slow_too(world: MemoryWorld) -> None:
    clock = BrokerClock(world.clock)
    publisher = RecordPublisher(await world.connect(), world.clock, clock)
    await publisher.publish_once(LEDGER, "a", FENCING)
    world.faults.slow["append"] = 4.0
    world.faults.next_fates(LEDGER, AppendFate.LOST)
    with pytest.raises(AppendFailed):
        await publisher.publish_once(LEDGER, "a", FENCING)
    assert publisher.slow_until_s == world.clock.now()
