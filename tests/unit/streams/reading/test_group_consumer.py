"""Tests of the group consumer: at least once, in order, and never a commit past unfinished
records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from kvlane.streams.clock import BrokerClock
from kvlane.streams.codecs import AnyRecord, encode
from kvlane.streams.errors import LogClosed, OwnershipLost, TopicMismatch
from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.ports import Entry
from kvlane.streams.reading.group_consumer import (
    MAX_QUEUED_DEAD_LETTERS,
    GroupConsumer,
    PartitionClaim,
)
from kvlane.streams.records import Cancel, Heartbeat, LogRecord, Refused, Tombstone
from kvlane.streams.request import Request
from kvlane.streams.topics import DEAD_LETTERS, REQUESTS
from tests.harness.memory_world import MemoryWorld, scenario_test

GROUP = "routers"
MALFORMED = Entry(b"k", b"\xc1 not msgpack", (("t", b"Request"),))
UNTYPED = Entry(b"k", b"hello")
OF_A_NEWER_VERSION = Entry(b"k", b"\x80", (("t", b"Telepathy"),))
OF_ANOTHER_TOPIC = encode(Heartbeat(worker="w", epoch=0, slot_offset=0), "k")
TOMBSTONE = encode(Tombstone(key="k"), "k")
NO_KEY_NO_VALUE = Entry(None, None)


class Owner:
    """Takes lanes and writes down what happens; `at_once` resumes and is done with all records."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.intake: GroupConsumer | None = None
        self.at_once = at_once
        self.claims: dict[int, PartitionClaim] = {}
        self.log_records: list[tuple[int, LogRecord]] = []
        self.timeline: list[str] = []
        self.hook: Callable[[PartitionClaim, LogRecord], None] = lambda claim, log_record: None

    def on_claimed(self, claim: PartitionClaim) -> None:
        self.timeline.append(f"opened {claim.partition} at {claim.start}")
        self.claims[claim.partition] = claim
        if self.at_once:
            assert self.intake is not None
            self.intake.resume(claim)

    def on_record(self, claim: PartitionClaim, log_record: LogRecord) -> None:
        self.log_records.append((claim.partition, log_record))
        self.hook(claim, log_record)
        if self.at_once:
            claim.mark_done(log_record.offset)

    def on_released(self, claim: PartitionClaim) -> None:
        self.timeline.append(f"closed {claim.partition}, lost {claim.is_lost}")
        del self.claims[claim.partition]

    def resume_all(self) -> None:
        assert self.intake is not None
        for claim in self.claims.values():
            self.intake.resume(claim)

    def ids(self) -> list[str]:
        return [r.record.id for _, r in self.log_records if isinstance(r.record, Request)]

    def offsets(self, partition: int = 0) -> list[int]:
        return [r.offset for p, r in self.log_records if p == partition]


class Router:
    """An intake that runs, with its owner and its connection."""

    def __init__(
        self, world: MemoryWorld, log: MemoryLog, owner: Owner, broker_clock: BrokerClock
    ) -> None:
        self.world, self.log, self.owner = world, log, owner
        self.intake = owner.intake = GroupConsumer(
            log, REQUESTS, GROUP, owner, world.clock, broker_clock, commit_every_s=0.2
        )
        self.running = world.spawn(self.intake.run())

    async def owns(self, *lanes: int) -> Router:
        await self.world.wait_until(lambda: sorted(self.owner.claims) == sorted(lanes))
        return self

    async def received(self, count: int) -> Router:
        await self.world.wait_until(lambda: len(self.owner.log_records) >= count)
        return self

    async def kill(self) -> None:
        """As kill -9: nothing more arrives from it."""
        self.log.kill()
        self.running.cancel()
        await asyncio.wait([self.running])


async def a_router(world: MemoryWorld, name: str = "a", *, at_once: bool = False) -> Router:
    log = await world.connect(name)
    return Router(world, log, Owner(at_once=at_once), BrokerClock(world.clock))


async def reading_router(world: MemoryWorld) -> Router:
    """A router that owns both lanes and reads them."""
    router = await (await a_router(world)).owns(0, 1)
    router.owner.resume_all()
    return router


def requests(*ids: str) -> list[AnyRecord]:
    return [Request(id=i) for i in ids]


def committed(world: MemoryWorld) -> dict[int, int]:
    return world.broker.group(REQUESTS, GROUP).committed


# --- claims --------------------------------------------------------------------------------------


def test_low_water_is_the_lowest_offset_that_is_not_done() -> None:
    claim = PartitionClaim(0, 10)
    for offset in range(10, 15):
        claim.deliver(offset)
    for offset, mark in ((12, 10), (10, 11), (11, 13), (14, 13), (13, 15)):
        claim.mark_done(offset)
        assert claim.low_water == mark


def test_low_water_without_open_records_is_the_position() -> None:
    claim = PartitionClaim(0, 10)
    assert claim.low_water == 10
    claim.deliver(17)  # offsets may have gaps
    claim.mark_done(17)
    assert claim.low_water == 18


def test_done_twice_is_harmless() -> None:
    claim = PartitionClaim(0, 0)
    claim.deliver(0)
    claim.deliver(1)
    claim.mark_done(0)
    claim.mark_done(0)
    assert claim.low_water == 1


def test_completion_of_an_undelivered_record_is_a_bug() -> None:
    claim = PartitionClaim(0, 0)
    with pytest.raises(AssertionError):
        claim.mark_done(0)


def test_lost_claim_accepts_any_completion() -> None:
    claim = PartitionClaim(0, 0)
    claim.deliver(0)
    claim.is_lost = True
    claim.mark_done(0)
    claim.mark_done(7)
    assert claim.low_water == 0


# --- delivery ------------------------------------------------------------------------------------


@scenario_test
async def test_lane_is_not_read_before_resume(world: MemoryWorld) -> None:
    world.append(REQUESTS, 0, *requests("a"))
    router = await (await a_router(world)).owns(0, 1)
    await world.sleep(30)
    assert router.owner.log_records == []
    router.owner.resume_all()
    await router.received(1)


@scenario_test
async def test_waiting_lane_does_not_block_another_one(world: MemoryWorld) -> None:
    world.append(REQUESTS, 0, *requests("a"))
    world.append(REQUESTS, 1, *requests("b"))
    router = await (await a_router(world)).owns(0, 1)
    router.intake.resume(router.owner.claims[1])
    await world.sleep(30)
    assert [p for p, _ in router.owner.log_records] == [1]


@scenario_test
async def test_records_come_in_order_each_once(world: MemoryWorld) -> None:
    world.append(REQUESTS, 0, *requests(*(f"r{i}" for i in range(1000))))
    router = await (await a_router(world, at_once=True)).received(1000)
    world.append(REQUESTS, 0, Cancel(id="r0"))
    await router.received(1001)
    assert router.owner.offsets() == list(range(1001))
    stored = world.records(REQUESTS, 0)[-1]
    assert router.owner.log_records[-1][1] == LogRecord(1000, stored.timestamp, Cancel(id="r0"))


@scenario_test
async def test_full_lane_does_not_block_a_cancel(world: MemoryWorld) -> None:
    router = await reading_router(world)
    world.append(REQUESTS, 0, *requests(*(f"r{i}" for i in range(5000))), Cancel(id="r0"))
    await router.received(5001)
    assert router.owner.claims[0].unfinished == 5001


@scenario_test
async def test_append_times_set_the_broker_clock_before_the_record_is_seen(
    world: MemoryWorld,
) -> None:
    log, owner, broker_clock = await world.connect(), Owner(at_once=True), BrokerClock(world.clock)
    seen: list[int] = []
    owner.hook = lambda claim, log_record: seen.append(broker_clock.now_ms())
    await world.sleep(1)
    await Router(world, log, owner, broker_clock).owns(0, 1)
    world.append(REQUESTS, 0, *requests("a"))
    at = world.broker.now_ms()
    await world.wait_until(lambda: len(seen) == 1)
    assert seen == [at]


@scenario_test
async def test_error_of_the_lanes_ends_the_intake(world: MemoryWorld) -> None:
    router = await a_router(world, at_once=True)

    def fail(claim: PartitionClaim, log_record: LogRecord) -> None:
        raise ZeroDivisionError

    router.owner.hook = fail
    world.append(REQUESTS, 0, *requests("a"))
    await asyncio.wait([router.running])
    with pytest.raises(ZeroDivisionError):
        router.running.result()


@scenario_test
async def test_log_closed_elsewhere_ends_the_consumer(world: MemoryWorld) -> None:
    router = await (await a_router(world)).owns(0, 1)
    await router.log.close()
    await asyncio.wait([router.running], timeout=5)
    with pytest.raises(LogClosed):
        router.running.result()


@scenario_test
async def test_error_of_writing_a_dead_letter_ends_the_intake(world: MemoryWorld) -> None:
    world.append_raw(REQUESTS, 0, MALFORMED)
    router = await a_router(world, at_once=True)

    async def fail(*args: object) -> None:
        raise TopicMismatch("there are no dead-letters here")

    router.intake._dead_letters.write = fail  # type: ignore[assignment, method-assign]
    await asyncio.wait([router.running], timeout=5)
    with pytest.raises(TopicMismatch):
        router.running.result()


@scenario_test
async def test_lane_revoked_by_its_own_record_gets_no_more_of_the_batch(world: MemoryWorld) -> None:
    world.append(REQUESTS, 0, *requests("a", "b", "c"))
    router = await (await a_router(world)).owns(0, 1)
    router.owner.hook = lambda claim, log_record: router.intake.revoked(frozenset([0]))
    router.owner.resume_all()
    await router.received(1)
    await world.sleep(1)
    assert router.owner.offsets() == [0]


@scenario_test
async def test_cancelled_run_leaves_no_task(world: MemoryWorld) -> None:
    router = await (await a_router(world)).owns(0, 1)
    router.running.cancel()
    await asyncio.wait([router.running])
    await world.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


# --- commits -------------------------------------------------------------------------------------


@scenario_test
async def test_finished_records_are_committed_within_the_interval(world: MemoryWorld) -> None:
    world.append(REQUESTS, 0, *requests("a", "b", "c"))
    router = await reading_router(world)
    await router.received(3)
    claim = router.owner.claims[0]
    claim.mark_done(0)
    claim.mark_done(2)
    await world.sleep(0.21)
    assert committed(world) == {0: 1}
    claim.mark_done(1)
    await world.sleep(0.21)
    assert committed(world) == {0: 3}


@scenario_test
async def test_unmoved_position_is_not_committed(world: MemoryWorld) -> None:
    world.append(REQUESTS, 0, *requests("a", "b"))
    router = await reading_router(world)
    await router.received(2)
    router.owner.claims[0].mark_done(1)
    await world.sleep(60)
    assert "commit" not in world.faults.sent


@scenario_test
async def test_mark_is_committed_once(world: MemoryWorld) -> None:
    world.append(REQUESTS, 0, *requests("a", "b", "c"))
    router = await reading_router(world)
    await router.received(3)
    claim = router.owner.claims[0]
    claim.mark_done(0)
    await world.sleep(5)
    claim.mark_done(2)  # moves no mark
    await world.sleep(5)
    assert world.faults.sent.count("commit") == 1


@scenario_test
async def test_unanswered_commit_is_repeated(world: MemoryWorld) -> None:
    world.faults.unanswered.add("commit")
    world.append(REQUESTS, 0, *requests("a"))
    router = await (await a_router(world, at_once=True)).received(1)
    await world.sleep(5)
    assert committed(world) == {}
    world.faults.unanswered.clear()
    await world.sleep(0.21)
    assert committed(world) == {0: 1}
    assert not router.running.done()


@scenario_test
async def test_refused_commit_does_not_end_the_intake(world: MemoryWorld) -> None:
    router = await (await a_router(world, at_once=True)).owns(0, 1)
    member = router.intake._member
    assert member is not None
    commit, refused = member.commit, 0

    async def refuse(offsets: Mapping[int, int]) -> None:
        nonlocal refused
        refused += 1
        raise OwnershipLost("the group has moved on")

    member.commit = refuse  # type: ignore[method-assign]
    world.append(REQUESTS, 0, *requests("a"))
    await world.sleep(5)
    assert refused > 1
    assert not router.running.done()
    member.commit = commit  # type: ignore[method-assign]
    await world.sleep(0.21)
    assert committed(world) == {0: 1}


@scenario_test
async def test_closing_commits_and_leaves(world: MemoryWorld) -> None:
    world.append(REQUESTS, 0, *requests("a", "b"))
    router = await reading_router(world)
    await router.received(2)
    router.owner.claims[0].mark_done(0)
    await router.intake.close()
    assert committed(world) == {0: 1}
    assert router.owner.timeline[-2:] == ["closed 0, lost True", "closed 1, lost True"]
    assert world.broker.group(REQUESTS, GROUP).members == {}
    await asyncio.wait_for(router.running, 2)


@scenario_test
async def test_closing_leaves_the_group_although_the_last_commit_fails(world: MemoryWorld) -> None:
    world.append(REQUESTS, 0, *requests("a"))
    router = await reading_router(world)
    await router.received(1)
    world.faults.unanswered.add("commit")
    router.owner.claims[0].mark_done(0)
    await router.intake.close()
    assert world.broker.group(REQUESTS, GROUP).members == {}
    assert committed(world) == {}


@scenario_test
async def test_closing_before_running_or_twice_is_harmless(world: MemoryWorld) -> None:
    log, owner = await world.connect(), Owner()
    intake = GroupConsumer(log, REQUESTS, GROUP, owner, world.clock)
    await intake.close()
    await intake.close()
    assert owner.timeline == []


# --- moves ---------------------------------------------------------------------------------------


@scenario_test
async def test_unfinished_records_go_to_the_next_owner(world: MemoryWorld) -> None:
    world.append(REQUESTS, 0, *requests("a", "b", "c"))
    first = await reading_router(world)
    await first.received(3)
    first.owner.claims[0].mark_done(0)
    first.owner.claims[0].mark_done(2)
    await world.sleep(1)
    await first.kill()
    second = await (await a_router(world, "b", at_once=True)).received(2)
    assert second.owner.offsets() == [1, 2]
    assert second.owner.timeline[0] == "opened 0 at 1"


@scenario_test
async def test_revoked_claim_is_closed_at_once_and_commits_no_more(world: MemoryWorld) -> None:
    world.append(REQUESTS, 1, *requests("a", "b"))
    first = await reading_router(world)
    await first.received(2)
    claim = first.owner.claims[1]
    second = await a_router(world, "b")
    await second.owns(1)
    await first.owns(0)
    assert claim.is_lost
    assert first.owner.timeline[2:4] == ["closed 0, lost True", "closed 1, lost True"]
    claim.mark_done(0)
    claim.mark_done(1)
    await world.sleep(5)
    assert committed(world) == {}
    second.owner.resume_all()
    await second.received(2)


@scenario_test
async def test_returning_lane_is_a_new_claim(world: MemoryWorld) -> None:
    world.append(REQUESTS, 0, *requests("a", "b"))
    first = await reading_router(world)
    await first.received(2)
    before = first.owner.claims[0]
    await a_router(world, "b")
    await world.wait_until(lambda: before.is_lost)
    await first.owns(0)
    now = first.owner.claims[0]
    assert now is not before
    first.intake.resume(before)  # too late: must not start the new claim
    await world.sleep(10)
    assert len(first.owner.log_records) == 2
    first.intake.resume(now)
    await first.received(4)
    before.mark_done(0)
    before.mark_done(1)
    await world.sleep(5)
    assert committed(world) == {}
    assert now.unfinished == 2


@scenario_test
async def test_assignment_without_a_revocation_is_a_new_claim_too(world: MemoryWorld) -> None:
    owner = Owner()
    intake = GroupConsumer(await world.connect(), REQUESTS, GROUP, owner, world.clock)
    intake.assigned({0: 0, 1: 0})
    before = owner.claims[0]
    intake.assigned({0: 5})
    assert before.is_lost
    assert (owner.claims[0].start, owner.claims[1].is_lost) == (5, False)


@scenario_test
async def test_records_fetched_twice_are_handled_once(world: MemoryWorld) -> None:
    world.append(REQUESTS, 0, *requests("a", "b", "c"))
    owner = Owner()
    intake = GroupConsumer(await world.connect(), REQUESTS, GROUP, owner, world.clock)
    intake.assigned({0: 0})
    records = world.records(REQUESTS, 0)
    intake._process(owner.claims[0], records[:2])
    intake._process(owner.claims[0], records)
    assert owner.offsets() == [0, 1, 2]


# --- records that cannot be read -----------------------------------------------------------------


@pytest.mark.parametrize(
    "poison",
    [MALFORMED, UNTYPED, OF_A_NEWER_VERSION, OF_ANOTHER_TOPIC, TOMBSTONE, NO_KEY_NO_VALUE],
    ids=["malformed", "untyped", "newer", "misplaced", "tombstone", "nothing"],
)
def test_unreadable_record_is_dead_lettered_and_the_lane_continues(poison: Entry) -> None:
    async def scenario(world: MemoryWorld) -> None:
        world.append(REQUESTS, 0, *requests("before"))
        world.append_raw(REQUESTS, 0, poison)
        world.append(REQUESTS, 0, *requests("after"))
        router = await (await a_router(world, at_once=True)).received(2)
        await world.sleep(1)
        assert router.owner.ids() == ["before", "after"]
        (letter,) = world.all_records(DEAD_LETTERS)
        assert letter.key == poison.key
        assert dict(letter.headers)["origin_offset"] == b"1"
        assert committed(world) == {0: 3}

    scenario_test(scenario)()


@pytest.mark.parametrize("poison", [MALFORMED, UNTYPED], ids=["malformed", "untyped"])
def test_malformed_record_is_refused_by_its_key(poison: Entry) -> None:
    async def scenario(world: MemoryWorld) -> None:
        world.append_raw(REQUESTS, 0, poison)
        router = await (await a_router(world, at_once=True)).received(1)
        ((_, log_record),) = router.owner.log_records
        assert isinstance(log_record.record, Refused)
        assert (log_record.offset, log_record.record.id, log_record.record.code) == (
            0,
            "k",
            "invalid",
        )
        assert log_record.record.message

    scenario_test(scenario)()


@pytest.mark.parametrize(
    "poison",
    [
        OF_A_NEWER_VERSION,  # what it means is not known: it may be no request at all
        OF_ANOTHER_TOPIC,
        TOMBSTONE,
        NO_KEY_NO_VALUE,
        MALFORMED._replace(key=None),
        MALFORMED._replace(key=b""),
        MALFORMED._replace(key=b"\xff"),
        MALFORMED._replace(key=b"k" * 201),
    ],
    ids=["newer", "misplaced", "tombstone", "nothing", "no key", "empty", "no text", "too long"],
)
def test_record_without_a_request_id_becomes_a_dead_letter_only(poison: Entry) -> None:
    async def scenario(world: MemoryWorld) -> None:
        world.append_raw(REQUESTS, 0, poison)
        router = await a_router(world, at_once=True)
        await world.wait_until(lambda: committed(world) == {0: 1})
        assert router.owner.log_records == []
        assert len(world.all_records(DEAD_LETTERS)) == 1

    scenario_test(scenario)()


@scenario_test
async def test_refusal_is_done_after_handler_and_dead_letter(world: MemoryWorld) -> None:
    world.append_raw(REQUESTS, 0, MALFORMED)
    router = await reading_router(world)
    await router.received(1)
    await world.wait_until(lambda: len(world.all_records(DEAD_LETTERS)) == 1)
    await world.sleep(5)
    assert committed(world) == {}
    router.owner.claims[0].mark_done(0)
    await world.sleep(0.21)
    assert committed(world) == {0: 1}


@scenario_test
async def test_commit_stops_before_an_unacknowledged_dead_letter(world: MemoryWorld) -> None:
    world.append_raw(REQUESTS, 0, MALFORMED)
    world.append(REQUESTS, 0, *requests("after"))
    world.faults.next_fates(DEAD_LETTERS, *[AppendFate.LOST] * 6)
    router = await (await a_router(world, at_once=True)).received(1)
    await world.sleep(1.5)
    assert world.all_records(DEAD_LETTERS) == []
    assert committed(world) == {}
    await world.sleep(5)
    assert len(world.all_records(DEAD_LETTERS)) == 1
    assert committed(world) == {0: 2}
    assert router.owner.ids() == ["after"]


@scenario_test
async def test_unacknowledged_letter_is_written_by_the_next_owner(world: MemoryWorld) -> None:
    world.append_raw(REQUESTS, 0, MALFORMED)
    world.append(REQUESTS, 0, *requests("after"))
    world.faults.next_fates(DEAD_LETTERS, *[AppendFate.LOST] * 6)
    first = await (await a_router(world, at_once=True)).received(1)
    await first.kill()
    await (await a_router(world, "b", at_once=True)).received(1)
    await world.sleep(10)
    assert len(world.all_records(DEAD_LETTERS)) == 1
    assert committed(world) == {0: 2}


@scenario_test
async def test_paused_lane_gets_the_next_record_when_it_is_resumed(world: MemoryWorld) -> None:
    world.append(REQUESTS, 0, *requests("a", "b", "c", "d"))
    world.append(REQUESTS, 1, *requests("other"))
    router = await a_router(world, at_once=True)

    def pause_behind_b(claim: PartitionClaim, log_record: LogRecord) -> None:
        if isinstance(log_record.record, Request) and log_record.record.id == "b":
            router.intake.pause(claim)

    router.owner.hook = pause_behind_b
    await router.received(3)
    await world.sleep(5)
    assert sorted(router.owner.ids()) == ["a", "b", "other"]
    assert committed(world) == {0: 2, 1: 1}
    router.intake.resume(router.owner.claims[0])
    await router.received(5)
    assert router.owner.offsets(0) == [0, 1, 2, 3]
    await world.wait_until(lambda: committed(world) == {0: 4, 1: 1})


@scenario_test
async def test_flood_of_bad_records_is_bounded_and_drains(world: MemoryWorld) -> None:
    count = 3 * MAX_QUEUED_DEAD_LETTERS
    world.append_raw(REQUESTS, 0, *[MALFORMED] * count)
    world.append(REQUESTS, 0, *requests("after"))
    world.faults.next_fates(DEAD_LETTERS, *[AppendFate.LOST] * 80)
    router = await (await a_router(world, at_once=True)).owns(0, 1)
    await world.sleep(2)
    assert router.intake._queue.qsize() <= MAX_QUEUED_DEAD_LETTERS
    await router.received(1)
    await world.wait_until(lambda: committed(world) == {0: count + 1})
    assert len(world.all_records(DEAD_LETTERS)) == count


@scenario_test
async def test_prompt_text_does_not_reach_dead_letters(world: MemoryWorld) -> None:
    world.append_raw(REQUESTS, 0, MALFORMED._replace(value=b"\xc1 my secret"))
    await a_router(world, at_once=True)
    await world.wait_until(lambda: len(world.all_records(DEAD_LETTERS)) == 1)
    (letter,) = world.all_records(DEAD_LETTERS)
    assert letter.value == b""
