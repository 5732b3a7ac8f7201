"""Tests of the follower: caught up, waits, skipped records, and rebuilt partitions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvlane.streams.clock import BrokerClock
from kvlane.streams.errors import AccessDenied, LogClosed, NewerRecord
from kvlane.streams.memory.memory_log import MemoryReader
from kvlane.streams.ports import Batches, Entry, Partition
from kvlane.streams.reading.decoding import RecordDecoder
from kvlane.streams.records import Ended, LogRecord, ModelCard, Tombstone
from kvlane.streams.topics import LEDGER, REGISTRY, REQUESTS
from kvlane.streams.views.follower import Follower
from kvlane.streams.views.tail_reader import RECORDS_PER_POLL, decode_batches
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.recording_view import RecordingView

LANE_0, LANE_1 = Partition(LEDGER, 0), Partition(LEDGER, 1)
CARDS = Partition(REGISTRY, 0)
MALFORMED = Entry(b"k", b"\xc1", (("t", b"Ended"),))
FOR_NEWER_READERS = Entry(b"k", b"\x80", (("t", b"Telepathy"), ("r", b"2")))
HOUR_S, DAY_S = 3600.0, 86400.0


def ended(*ids: str) -> list[Ended]:
    return [Ended(id=i, code="seen") for i in ids]


def many(count: int) -> list[Ended]:
    return ended(*(f"r{i}" for i in range(count)))


class Copy:
    """A fold that is kept up to date."""

    def __init__(self, world: MemoryWorld, follower: Follower, view: RecordingView) -> None:
        self.world, self.follower, self.view = world, follower, view
        self.running = world.spawn(follower.run())

    async def caught_up(self) -> Copy:
        await asyncio.wait_for(self.follower.wait_caught_up(), 60)
        return self

    async def stop(self) -> None:
        self.running.cancel()
        await asyncio.wait([self.running])


async def a_copy(
    world: MemoryWorld,
    *sources: str | Partition,
    view: RecordingView | None = None,
    **options: object,
) -> Copy:
    log = await world.connect()
    view = view or RecordingView()
    follower = Follower(log, view, sources or (LEDGER,), world.clock, **options)  # type: ignore[arg-type]
    return Copy(world, follower, view)


# --- catching up ---------------------------------------------------------------------------------


@scenario_test
async def test_follower_replays_existing_records_and_follows_new_ones(world: MemoryWorld) -> None:
    world.append(LEDGER, 0, *many(3))
    world.append(LEDGER, 1, *many(2))
    copy = await (await a_copy(world)).caught_up()
    assert copy.view.offsets(LANE_0) == [0, 1, 2]
    assert copy.view.offsets(LANE_1) == [0, 1]
    world.append(LEDGER, 1, *many(1))
    await asyncio.wait_for(copy.follower.wait_for(LANE_1, 3), 5)
    assert copy.view.offsets(LANE_1) == [0, 1, 2]


@scenario_test
async def test_empty_log_is_caught_up_at_once(world: MemoryWorld) -> None:
    copy = await (await a_copy(world)).caught_up()
    assert copy.view.position(LANE_0) == 0
    await asyncio.wait_for(copy.follower.wait_for(LANE_0, 0), 1)


@scenario_test
async def test_follower_is_not_caught_up_before_every_partition_is(world: MemoryWorld) -> None:
    world.append(LEDGER, 0, *many(10))
    world.append(LEDGER, 1, *many(3 * RECORDS_PER_POLL))
    seen: list[tuple[bool, int]] = []

    def note(source: Partition, log_records: Sequence[LogRecord]) -> None:
        left = 3 * RECORDS_PER_POLL - (copy.view.position(LANE_1) or 0)
        seen.append((copy.follower.caught_up, left))

    copy = await a_copy(world, on_applied=note)
    await copy.caught_up()
    assert [caught_up for caught_up, left in seen if left > 0] == [False] * (len(seen) - 1)
    assert copy.view.position(LANE_1) == 3 * RECORDS_PER_POLL


@scenario_test
async def test_follower_catches_up_with_a_log_that_grows_as_fast_as_it_is_read(
    world: MemoryWorld,
) -> None:
    """The ends count that were there before the first poll."""
    world.append(LEDGER, 0, *many(2000))
    copy = await a_copy(
        world,
        on_applied=lambda source, log_records: (
            world.append(LEDGER, 0, *many(len(log_records))) and None
        ),
    )
    await copy.caught_up()
    assert (copy.view.position(LANE_0) or 0) < 4000


@scenario_test
async def test_only_given_partitions_are_followed(world: MemoryWorld) -> None:
    world.append(LEDGER, 0, *many(1))
    world.append(LEDGER, 1, *many(1))
    copy = await (await a_copy(world, LANE_1)).caught_up()
    assert copy.follower.sources == (LANE_1,)
    assert copy.view.position(LANE_0) is None
    with pytest.raises(ValueError, match="does not follow"):
        await copy.follower.wait_for(LANE_0, 0)


@scenario_test
async def test_several_topics_make_one_view(world: MemoryWorld) -> None:
    world.append(LEDGER, 0, *many(1))
    world.append(REGISTRY, 0, ModelCard(name="m"))
    copy = await (await a_copy(world, REGISTRY, LANE_0)).caught_up()
    assert copy.view.offsets(CARDS) == [0]
    assert copy.view.offsets(LANE_0) == [0]


@scenario_test
async def test_follower_starts_at_the_given_offset(world: MemoryWorld) -> None:
    world.append(LEDGER, 0, *many(10))

    async def start(source: Partition) -> int:
        return 7

    copy = await (await a_copy(world, start=start)).caught_up()
    assert copy.view.offsets(LANE_0) == [7, 8, 9]
    assert copy.view.position(LANE_1) == 0, "no start beyond the end"


@scenario_test
async def test_start_is_not_below_the_start_of_the_log(world: MemoryWorld) -> None:
    world.append(LEDGER, 0, *many(10))
    world.broker.delete_records(LEDGER, 0, 8)

    async def start(source: Partition) -> int:
        return 5

    copy = await (await a_copy(world, start=start)).caught_up()
    assert copy.view.offsets(LANE_0) == [8, 9]
    assert copy.follower.rebuilds == 0


@scenario_test
async def test_refusal_is_not_retried(world: MemoryWorld) -> None:
    log = await world.connect()

    async def refuse(topic: str, partitions: Sequence[int]) -> dict[int, int]:
        raise AccessDenied(f"{topic}: the broker refuses")

    log.end_offsets = refuse  # type: ignore[method-assign]
    with pytest.raises(AccessDenied):
        await Follower(log, RecordingView(), [LEDGER], world.clock).run()
    assert world.clock.now() == 0.0


@scenario_test
async def test_outage_at_the_start_is_waited_out(world: MemoryWorld) -> None:
    world.append(LEDGER, 0, *many(1))
    copy = await a_copy(world)
    world.broker.available = False
    await world.sleep(30)
    assert not copy.running.done()
    assert not copy.follower.caught_up
    world.broker.available = True
    await copy.caught_up()


@scenario_test
async def test_long_replay_lets_others_run(world: MemoryWorld) -> None:
    world.append(LEDGER, 0, *many(20_000))
    turns = 0

    async def bystander() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    world.spawn(bystander())
    await (await a_copy(world)).caught_up()
    assert turns >= 20_000 / RECORDS_PER_POLL


@scenario_test
async def test_poll_that_never_waits_lets_others_run(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Kafka client hands out what it has fetched without giving way."""

    async def poll(self: MemoryReader, timeout_s: float, max_records: int) -> Batches:
        return self.cursor.read(max_records)

    monkeypatch.setattr(MemoryReader, "poll", poll)
    world.append(LEDGER, 0, *many(5 * RECORDS_PER_POLL))
    copy = await a_copy(world)
    positions = set()
    while not copy.follower.caught_up:
        await asyncio.sleep(0)
        positions.add(copy.view.position(LANE_0))
    assert len(positions) >= 5
    await copy.stop()


@scenario_test
async def test_positions_and_ends_give_the_progress(world: MemoryWorld) -> None:
    copy = await (await a_copy(world)).caught_up()
    await copy.stop()
    world.append(LEDGER, 1, *many(4))
    assert copy.follower.positions() == {LANE_0: 0, LANE_1: 0}
    assert await copy.follower.ends() == {LANE_0: 0, LANE_1: 4}


@scenario_test
async def test_follower_reports_its_lag(world: MemoryWorld) -> None:
    world.append(LEDGER, 0, *many(3 * RECORDS_PER_POLL))
    copy = await a_copy(world)
    left = set()
    while not copy.follower.caught_up:
        await asyncio.sleep(0)
        left.add(copy.follower.remaining_offsets)
    assert left >= {3 * RECORDS_PER_POLL, 2 * RECORDS_PER_POLL, RECORDS_PER_POLL}
    assert copy.follower.remaining_offsets == 0


@scenario_test
async def test_no_records_are_applied_while_the_follower_is_paused(world: MemoryWorld) -> None:
    copy = await (await a_copy(world)).caught_up()
    async with copy.follower.paused():
        world.append(LEDGER, 0, *many(3))
        await world.sleep(10)
        assert copy.view.offsets(LANE_0) == []
    await asyncio.wait_for(copy.follower.wait_for(LANE_0, 3), 5)
    assert copy.view.offsets(LANE_0) == [0, 1, 2]


@scenario_test
async def test_append_times_that_were_read_set_the_broker_clock(world: MemoryWorld) -> None:
    broker_clock = BrokerClock(world.clock)
    copy = await (await a_copy(world, broker_clock=broker_clock)).caught_up()
    world.append(LEDGER, 0, *many(1))
    await copy.follower.wait_for(LANE_0, 1)
    assert broker_clock.now_ms() == world.broker.now_ms()


@scenario_test
async def test_listener_is_called_after_each_record_is_applied(world: MemoryWorld) -> None:
    received: list[int] = []

    def note(source: Partition, log_records: Sequence[LogRecord]) -> None:
        received.extend(r.offset for r in log_records)
        assert received == copy.view.offsets(LANE_0)

    world.append(LEDGER, 0, *many(3))
    copy = await a_copy(world, LANE_0, on_applied=note)
    await copy.caught_up()
    assert received == [0, 1, 2]


# --- barriers ------------------------------------------------------------------------------------


@scenario_test
async def test_barrier_opens_exactly_when_its_offset_is_passed(world: MemoryWorld) -> None:
    copy = await (await a_copy(world)).caught_up()
    barrier = world.spawn(copy.follower.wait_for(LANE_0, 3))
    world.append(LEDGER, 0, *many(2))
    await world.sleep(60)
    assert not barrier.done()
    world.append(LEDGER, 0, *many(1))
    at = world.clock.now()
    await barrier
    assert copy.view.position(LANE_0) == 3
    assert world.clock.now() == at, "no polling"


@scenario_test
async def test_barrier_opens_within_a_long_replay(world: MemoryWorld) -> None:
    world.append(LEDGER, 0, *many(5000))
    copy = await a_copy(world)
    await copy.follower.wait_for(LANE_0, 600)
    assert (copy.view.position(LANE_0) or 0) < 5000


@scenario_test
async def test_barrier_that_is_open_does_not_wait(world: MemoryWorld) -> None:
    world.append(LEDGER, 0, *many(3))
    copy = await (await a_copy(world)).caught_up()
    turn = world.spawn(copy.follower.wait_for(LANE_0, 3))
    await asyncio.sleep(0)
    assert turn.done()


@scenario_test
async def test_cancelled_barrier_leaves_nothing_behind(world: MemoryWorld) -> None:
    copy = await (await a_copy(world)).caught_up()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(copy.follower.wait_for(LANE_0, 3), 1)
    assert not copy.follower._barriers.pending_partitions


@scenario_test
async def test_wait_for_a_stopped_follower_raises(world: MemoryWorld) -> None:
    copy = await (await a_copy(world)).caught_up()
    barrier = world.spawn(copy.follower.wait_for(LANE_0, 3))
    await world.sleep(1)
    await copy.stop()
    with pytest.raises(LogClosed):
        await barrier
    with pytest.raises(LogClosed):
        await copy.follower.wait_caught_up()


# --- records that are no facts -------------------------------------------------------------------


@scenario_test
async def test_malformed_records_are_counted_and_skipped(world: MemoryWorld) -> None:
    world.append(LEDGER, 0, *many(1))
    world.append_raw(LEDGER, 0, MALFORMED, MALFORMED)
    world.append(LEDGER, 0, *many(1))
    world.append_raw(LEDGER, 0, MALFORMED)
    copy = await (await a_copy(world)).caught_up()
    assert copy.view.offsets(LANE_0) == [0, 3]
    assert copy.view.position(LANE_0) == 5
    assert copy.follower.malformed == 3
    assert copy.follower.applied == 2
    world.append_raw(LEDGER, 0, MALFORMED)
    await world.sleep(2)
    assert copy.view.position(LANE_0) == 6


@scenario_test
async def test_records_fetched_twice_are_applied_once(world: MemoryWorld) -> None:
    world.append(LEDGER, 0, *many(3))
    copy = await (await a_copy(world)).caught_up()
    world.append(LEDGER, 0, *many(2))
    records = world.records(LEDGER, 0)
    decoder = RecordDecoder(await world.connect(), world.clock)
    for fetched in (records[1:4], records[1:3]):
        copy.follower._apply(await decode_batches(decoder, {LANE_0: fetched}))
    assert copy.view.offsets(LANE_0) == [0, 1, 2, 3]
    assert copy.view.position(LANE_0) == 4


@scenario_test
async def test_record_for_newer_readers_ends_the_follower(world: MemoryWorld) -> None:
    copy = await (await a_copy(world)).caught_up()
    barrier = world.spawn(copy.follower.wait_for(LANE_0, 2))
    await world.sleep(0)
    world.append_raw(LEDGER, 0, FOR_NEWER_READERS)
    await asyncio.wait([copy.running])
    with pytest.raises(NewerRecord, match="ledger:0:0 requires readers of record version 2"):
        copy.running.result()
    with pytest.raises(NewerRecord):
        await barrier
    assert not copy.follower.caught_up
    assert copy.view.position(LANE_0) == 0


# --- gaps and losses -----------------------------------------------------------------------------


async def leave_a_gap_at_the_end(world: MemoryWorld) -> None:
    """The registry's last records are compacted away: its end is 3, its last record is at 0."""
    world.append(REGISTRY, 0, ModelCard(name="m"), key="model/m")
    world.append(REGISTRY, 0, ModelCard(name="n"), Tombstone(key="model/n"), key="model/n")
    log = world.broker.log(REGISTRY, 0)
    del log.records[1:]
    assert log.end == 3


@scenario_test
async def test_missing_offsets_at_the_end_of_the_log_do_not_block(world: MemoryWorld) -> None:
    await leave_a_gap_at_the_end(world)
    copy = await (await a_copy(world, REGISTRY)).caught_up()
    assert copy.view.offsets(CARDS) == [0]
    assert copy.view.position(CARDS) == 3


@scenario_test
async def test_later_gap_in_offsets_does_not_block(world: MemoryWorld) -> None:
    copy = await (await a_copy(world, REGISTRY)).caught_up()
    world.broker.available = False
    await leave_a_gap_at_the_end(world)
    barrier = world.spawn(copy.follower.wait_for(CARDS, 3))
    await world.sleep(5)
    world.broker.available = True
    await asyncio.wait_for(barrier, 5)


@scenario_test
async def test_gap_at_the_end_is_passed_while_another_partition_is_busy(world: MemoryWorld) -> None:
    await leave_a_gap_at_the_end(world)
    copy = await a_copy(
        world,
        REGISTRY,
        LANE_0,
        on_applied=lambda source, log_records: world.append(LEDGER, 0, *many(1)) and None,
    )
    world.append(LEDGER, 0, *many(1))
    await asyncio.wait_for(copy.follower.wait_for(CARDS, 3), 5)
    await copy.stop()


@scenario_test
async def test_positions_pass_the_gaps_that_compaction_left(world: MemoryWorld) -> None:
    for i in range(10):
        world.append(REGISTRY, 0, ModelCard(name=f"m{i}"), key="model/m")
    await world.sleep(3 * DAY_S)
    world.broker.compact(REGISTRY)
    world.append(REGISTRY, 0, ModelCard(name="n"), key="model/n")
    copy = await (await a_copy(world, REGISTRY)).caught_up()
    assert copy.view.offsets(CARDS) == [9, 10]
    assert copy.view.position(CARDS) == 11


@scenario_test
async def test_lost_position_rebuilds_the_partition(world: MemoryWorld) -> None:
    world.append(LEDGER, 0, *many(10))
    world.append(LEDGER, 1, *many(2))
    copy = await (await a_copy(world)).caught_up()
    world.broker.available = False  # it hears nothing while the log moves on
    world.append(LEDGER, 0, *many(10))
    world.broker.delete_records(LEDGER, 0, 15)
    await world.sleep(5)
    world.broker.available = True
    await copy.follower.wait_for(LANE_0, 20)
    assert copy.view.offsets(LANE_0) == list(range(15, 20))
    assert copy.view.offsets(LANE_1) == [0, 1], "the others keep their state"
    assert copy.follower.rebuilds == 1
    assert copy.follower.caught_up


@scenario_test
async def test_follower_is_not_caught_up_while_a_partition_is_rebuilt(world: MemoryWorld) -> None:
    world.append(LEDGER, 0, *many(10))
    copy = await (await a_copy(world)).caught_up()
    world.broker.available = False
    world.append(LEDGER, 0, *many(10))
    world.broker.delete_records(LEDGER, 0, 15)
    await world.sleep(5)
    world.faults.unanswered.add("offsets")
    world.broker.available = True
    await world.sleep(30)
    assert copy.view.position(LANE_0) is None
    assert not copy.follower.caught_up
    barrier = world.spawn(copy.follower.wait_for(LANE_0, 20))
    await world.sleep(1)
    assert not barrier.done()
    world.faults.unanswered.clear()
    await copy.caught_up()
    await barrier


@scenario_test
async def test_state_ahead_of_the_end_of_the_log_is_dropped(world: MemoryWorld) -> None:
    """Somebody deleted the topic and made it again."""
    view = RecordingView()
    view.apply(LANE_0, (), 100)
    world.append(LEDGER, 0, *many(3))
    copy = await (await a_copy(world, view=view)).caught_up()
    assert copy.view.offsets(LANE_0) == [0, 1, 2]


@scenario_test
async def test_state_below_the_start_of_the_log_is_dropped(world: MemoryWorld) -> None:
    view = RecordingView()
    view.apply(LANE_0, (), 2)
    world.append(LEDGER, 0, *many(10))
    world.broker.delete_records(LEDGER, 0, 5)
    copy = await (await a_copy(world, view=view)).caught_up()
    assert copy.view.offsets(LANE_0) == list(range(5, 10))
    assert view.forgotten == 1
    assert copy.follower.rebuilds == 0, "it was seen before anything was read"


@scenario_test
async def test_topic_of_any_partition_count_is_followed_whole(world: MemoryWorld) -> None:
    copy = await (await a_copy(world, REQUESTS)).caught_up()
    assert copy.follower.sources == (Partition(REQUESTS, 0), Partition(REQUESTS, 1))
