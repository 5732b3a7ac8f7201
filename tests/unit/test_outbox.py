"""Sending: one try or as many as it takes, and nothing repeated that repeating cannot cure."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from streams.clock import BrokerClock
from streams.codecs import decode
from streams.errors import AppendFailed, LogClosed, RecordTooLarge
from streams.memory.broker import Fate
from streams.outbox import Outbox
from streams.patience import LONGEST_PAUSE_S
from streams.records import Cancel, Fencing, Request
from streams.topics import LEDGER, REQUESTS
from tests.worlds import World, in_world, play

FENCING = Fencing(id="a", attempt=1)


@in_world
async def test_send_tries_once(world: World) -> None:
    outbox = Outbox(await world.connect(), world.clock)
    world.faults.next_fates(LEDGER, Fate.LOST)
    with pytest.raises(AppendFailed):
        await outbox.send(LEDGER, "a", FENCING)
    assert world.everywhere(LEDGER) == []


@in_world
async def test_a_record_goes_to_the_partition_of_its_key(world: World) -> None:
    outbox = Outbox(await world.connect(), world.clock)
    appended = await outbox.send(LEDGER, "a", FENCING)
    (record,) = world.records(LEDGER, key="a")
    assert (record.partition, record.offset) == appended[:2]
    assert decode(record) == FENCING


@in_world
async def test_a_given_partition_wins_over_the_key(world: World) -> None:
    outbox = Outbox(await world.connect(), world.clock)
    for partition in range(world.lanes):
        await outbox.send(LEDGER, "a", FENCING, partition)
        assert len(world.records(LEDGER, partition)) == 1


@in_world
async def test_persist_repeats_until_acknowledged(world: World) -> None:
    outbox = Outbox(await world.connect(), world.clock)
    world.faults.next_fates(LEDGER, *[Fate.LOST] * 20)
    appended = await outbox.persist(LEDGER, "a", FENCING)
    assert [r.offset for r in world.records(LEDGER, key="a")] == [appended.offset]


@in_world
async def test_persist_may_let_a_record_stand_twice(world: World) -> None:
    outbox = Outbox(await world.connect(), world.clock)
    world.faults.next_fates(LEDGER, Fate.UNREPORTED)
    appended = await outbox.persist(LEDGER, "a", FENCING)
    assert [r.offset for r in world.records(LEDGER, key="a")] == [0, 1]
    assert appended.offset == 1


@in_world
async def test_pauses_double_up_to_a_cap(world: World) -> None:
    outbox = Outbox(await world.connect(), world.clock)
    tries: list[float] = []
    send_entry = outbox.send_entry

    async def timed(*args: object) -> object:
        tries.append(world.clock.now())
        return await send_entry(*args)  # type: ignore[arg-type]

    outbox.send_entry = timed  # type: ignore[assignment, method-assign]
    world.faults.next_fates(LEDGER, *[Fate.LOST] * 8)
    await outbox.persist(LEDGER, "a", FENCING)
    pauses = [round(b - a, 3) for a, b in pairwise(tries)]
    assert pauses[:5] == [0.05, 0.1, 0.2, 0.4, 0.8]
    assert pauses[5:] == [LONGEST_PAUSE_S] * 3


@in_world
async def test_persist_ends_at_its_deadline(world: World) -> None:
    outbox = Outbox(await world.connect(), world.clock)
    world.broker.available = False
    until = world.clock.now() + 3.3
    with pytest.raises(AppendFailed):
        await outbox.persist(LEDGER, "a", FENCING, until=until)
    assert world.clock.now() == pytest.approx(until)


@in_world
async def test_a_record_that_is_too_large_is_not_repeated(world: World) -> None:
    outbox = Outbox(await world.connect(), world.clock)
    large = Request(id="a", token_ids=bytes(9 << 20))
    with pytest.raises(RecordTooLarge):
        await outbox.persist(REQUESTS, "a", large)
    assert world.clock.now() == 0.0


@in_world
async def test_a_closed_log_is_not_tried_again(world: World) -> None:
    log = await world.connect()
    outbox = Outbox(log, world.clock)
    world.faults.next_fates(LEDGER, *[Fate.LOST] * 1000)
    sending = world.spawn(outbox.persist(LEDGER, "a", FENCING))
    await world.sleep(5)
    await log.close()
    with pytest.raises(LogClosed):
        await asyncio.wait_for(sending, 2)


@in_world
async def test_persist_can_be_cancelled(world: World) -> None:
    outbox = Outbox(await world.connect(), world.clock)
    world.broker.available = False
    sending = world.spawn(outbox.persist(LEDGER, "a", FENCING))
    await world.sleep(5)
    sending.cancel()
    await asyncio.wait([sending])
    world.broker.available = True
    await world.sleep(5)
    assert world.everywhere(LEDGER) == []


@in_world
async def test_a_batch_stands_in_order_in_one_partition(world: World) -> None:
    outbox = Outbox(await world.connect(), world.clock)
    sent = [(f"k{i}", Cancel(id=f"k{i}")) for i in range(50)]
    appended = await outbox.send_batch(REQUESTS, 1, sent)
    assert appended[:2] == (1, 0)
    assert [(str(r.key, "ascii"), decode(r)) for r in world.records(REQUESTS, 1)] == sent


@pytest.mark.parametrize("how", ["send", "persist", "send_batch"])
def test_acknowledged_append_times_set_the_broker_clock(how: str) -> None:
    async def scenario(world: World) -> None:
        broker_clock = BrokerClock(world.clock)
        outbox = Outbox(await world.connect(), world.clock, broker_clock)
        await world.sleep(100)
        assert broker_clock.now_ms() == 0
        if how == "send_batch":
            await outbox.send_batch(LEDGER, 0, [("a", FENCING)])
        else:
            await getattr(outbox, how)(LEDGER, "a", FENCING)
        assert broker_clock.now_ms() == world.broker.now_ms()

    play(scenario)


@in_world
async def test_slow_appends_are_known_while_they_last_and_afterwards(world: World) -> None:
    clock = BrokerClock(world.clock)
    outbox = Outbox(await world.connect(), world.clock, clock)
    await outbox.send(LEDGER, "a", FENCING)
    await world.sleep(10)
    assert outbox.slow_ms == 0
    world.faults.slow["append"] = 4.0
    slow = world.spawn(outbox.send(LEDGER, "a", FENCING))
    await world.sleep(0.5)
    quick = world.spawn(outbox.send(LEDGER, "b", FENCING))
    assert outbox.slow_ms == 0
    await world.sleep(1.5)
    assert outbox.slow_ms == clock.now_ms()
    await slow
    await quick
    ended_ms = clock.now_ms()
    world.faults.slow.clear()
    await world.sleep(10)
    await outbox.send(LEDGER, "a", FENCING)
    assert outbox.slow_ms == ended_ms


@in_world
async def test_appends_that_fail_late_are_slow_too(world: World) -> None:
    clock = BrokerClock(world.clock)
    outbox = Outbox(await world.connect(), world.clock, clock)
    await outbox.send(LEDGER, "a", FENCING)
    world.faults.slow["append"] = 4.0
    world.faults.next_fates(LEDGER, Fate.LOST)
    with pytest.raises(AppendFailed):
        await outbox.send(LEDGER, "a", FENCING)
    assert outbox.slow_ms == clock.now_ms()
