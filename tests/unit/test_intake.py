"""Intake: at least once, in order, and never a commit past what is not done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from streams.clock import BrokerClock
from streams.codecs import AnyRecord, encode
from streams.errors import LogClosed, OwnershipLost, TopicsDiffer
from streams.intake import LETTERS_QUEUED, Claim, Intake
from streams.memory.broker import Fate, MemoryLog
from streams.ports import Entry
from streams.records import Cancel, Fact, Heartbeat, Refused, Request, Tombstone
from streams.topics import DEAD_LETTERS, REQUESTS
from tests.worlds import World, in_world

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
        self.intake: Intake | None = None
        self.at_once = at_once
        self.claims: dict[int, Claim] = {}
        self.facts: list[tuple[int, Fact]] = []
        self.story: list[str] = []
        self.hook: Callable[[Claim, Fact], None] = lambda claim, fact: None

    def opened(self, claim: Claim) -> None:
        self.story.append(f"opened {claim.partition} at {claim.start}")
        self.claims[claim.partition] = claim
        if self.at_once:
            assert self.intake is not None
            self.intake.resume(claim)

    def received(self, claim: Claim, fact: Fact) -> None:
        self.facts.append((claim.partition, fact))
        self.hook(claim, fact)
        if self.at_once:
            claim.done(fact.offset)

    def closed(self, claim: Claim) -> None:
        self.story.append(f"closed {claim.partition}, lost {claim.lost}")
        del self.claims[claim.partition]

    def resume_all(self) -> None:
        assert self.intake is not None
        for claim in self.claims.values():
            self.intake.resume(claim)

    def ids(self) -> list[str]:
        return [fact.record.id for _, fact in self.facts if isinstance(fact.record, Request)]

    def offsets(self, partition: int = 0) -> list[int]:
        return [fact.offset for p, fact in self.facts if p == partition]


class Router:
    """An intake that runs, with its owner and its connection."""

    def __init__(
        self, world: World, log: MemoryLog, owner: Owner, broker_clock: BrokerClock
    ) -> None:
        self.world, self.log, self.owner = world, log, owner
        self.intake = owner.intake = Intake(
            log, REQUESTS, GROUP, owner, world.clock, broker_clock, commit_every_s=0.2
        )
        self.running = world.spawn(self.intake.run())

    async def owns(self, *lanes: int) -> Router:
        await self.world.until(lambda: sorted(self.owner.claims) == sorted(lanes))
        return self

    async def received(self, count: int) -> Router:
        await self.world.until(lambda: len(self.owner.facts) >= count)
        return self

    async def kill(self) -> None:
        """As kill -9: nothing more arrives from it."""
        self.log.cut()
        self.running.cancel()
        await asyncio.wait([self.running])


async def a_router(world: World, name: str = "a", *, at_once: bool = False) -> Router:
    log = await world.connect(name)
    return Router(world, log, Owner(at_once=at_once), BrokerClock(world.clock))


def requests(*ids: str) -> list[AnyRecord]:
    return [Request(id=i) for i in ids]


def committed(world: World) -> dict[int, int]:
    return world.broker.group(REQUESTS, GROUP).committed


# --- claims --------------------------------------------------------------------------------------


def test_low_water_is_the_lowest_offset_that_is_not_done() -> None:
    claim = Claim(0, 10)
    for offset in range(10, 15):
        claim.take(offset)
    for offset, mark in ((12, 10), (10, 11), (11, 13), (14, 13), (13, 15)):
        claim.done(offset)
        assert claim.low_water == mark


def test_low_water_without_open_records_is_the_position() -> None:
    claim = Claim(0, 10)
    assert claim.low_water == 10
    claim.take(17)  # offsets may have gaps
    claim.done(17)
    assert claim.low_water == 18


def test_done_twice_is_harmless() -> None:
    claim = Claim(0, 0)
    claim.take(0)
    claim.take(1)
    claim.done(0)
    claim.done(0)
    assert claim.low_water == 1


def test_done_for_a_record_that_was_never_handed_on_is_a_bug() -> None:
    claim = Claim(0, 0)
    with pytest.raises(AssertionError):
        claim.done(0)


def test_a_lost_claim_takes_any_done() -> None:
    claim = Claim(0, 0)
    claim.take(0)
    claim.lost = True
    claim.done(0)
    claim.done(7)
    assert claim.low_water == 0


# --- delivery ------------------------------------------------------------------------------------


@in_world
async def test_nothing_is_read_before_the_lane_is_resumed(world: World) -> None:
    world.append(REQUESTS, 0, *requests("a"))
    router = await (await a_router(world)).owns(0, 1)
    await world.sleep(30)
    assert router.owner.facts == []
    router.owner.resume_all()
    await router.received(1)


@in_world
async def test_one_lane_waits_while_another_one_is_read(world: World) -> None:
    world.append(REQUESTS, 0, *requests("a"))
    world.append(REQUESTS, 1, *requests("b"))
    router = await (await a_router(world)).owns(0, 1)
    router.intake.resume(router.owner.claims[1])
    await world.sleep(30)
    assert [p for p, _ in router.owner.facts] == [1]


@in_world
async def test_records_come_in_order_each_once(world: World) -> None:
    world.append(REQUESTS, 0, *requests(*(f"r{i}" for i in range(1000))))
    router = await (await a_router(world, at_once=True)).received(1000)
    world.append(REQUESTS, 0, Cancel(id="r0"))
    await router.received(1001)
    assert router.owner.offsets() == list(range(1001))
    stored = world.records(REQUESTS, 0)[-1]
    assert router.owner.facts[-1][1] == Fact(1000, stored.timestamp, Cancel(id="r0"))


@in_world
async def test_a_full_lane_does_not_hold_up_a_cancel(world: World) -> None:
    router = await (await a_router(world)).owns(0, 1)
    router.owner.resume_all()
    world.append(REQUESTS, 0, *requests(*(f"r{i}" for i in range(5000))), Cancel(id="r0"))
    await router.received(5001)
    assert router.owner.claims[0].undone == 5001


@in_world
async def test_append_times_set_the_broker_clock_before_the_record_is_seen(world: World) -> None:
    log, owner, broker_clock = await world.connect(), Owner(at_once=True), BrokerClock(world.clock)
    seen: list[int] = []
    owner.hook = lambda claim, fact: seen.append(broker_clock.now_ms())
    await world.sleep(1)
    await Router(world, log, owner, broker_clock).owns(0, 1)
    world.append(REQUESTS, 0, *requests("a"))
    at = world.broker.now_ms()
    await world.until(lambda: len(seen) == 1)
    assert seen == [at]


@in_world
async def test_an_error_of_the_lanes_ends_the_intake(world: World) -> None:
    router = await a_router(world, at_once=True)

    def fail(claim: Claim, fact: Fact) -> None:
        raise ZeroDivisionError

    router.owner.hook = fail
    world.append(REQUESTS, 0, *requests("a"))
    await asyncio.wait([router.running])
    with pytest.raises(ZeroDivisionError):
        router.running.result()


@in_world
async def test_a_log_that_is_closed_by_somebody_else_ends_the_intake(world: World) -> None:
    router = await (await a_router(world)).owns(0, 1)
    await router.log.close()
    await asyncio.wait([router.running], timeout=5)
    with pytest.raises(LogClosed):
        router.running.result()


@in_world
async def test_an_error_of_writing_a_dead_letter_ends_the_intake(world: World) -> None:
    world.append_raw(REQUESTS, 0, MALFORMED)
    router = await a_router(world, at_once=True)

    async def fail(*args: object) -> None:
        raise TopicsDiffer("there are no dead-letters here")

    router.intake._dead_letters.persist = fail  # type: ignore[assignment, method-assign]
    await asyncio.wait([router.running], timeout=5)
    with pytest.raises(TopicsDiffer):
        router.running.result()


@in_world
async def test_a_lane_lost_through_its_own_record_gets_no_more_of_the_batch(world: World) -> None:
    world.append(REQUESTS, 0, *requests("a", "b", "c"))
    router = await (await a_router(world)).owns(0, 1)
    router.owner.hook = lambda claim, fact: router.intake.revoked(frozenset([0]))
    router.owner.resume_all()
    await router.received(1)
    await world.sleep(1)
    assert router.owner.offsets() == [0]


@in_world
async def test_a_cancelled_run_leaves_no_task(world: World) -> None:
    router = await (await a_router(world)).owns(0, 1)
    router.running.cancel()
    await asyncio.wait([router.running])
    await world.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


# --- commits -------------------------------------------------------------------------------------


@in_world
async def test_what_is_done_is_committed_within_the_interval(world: World) -> None:
    world.append(REQUESTS, 0, *requests("a", "b", "c"))
    router = await (await a_router(world)).owns(0, 1)
    router.owner.resume_all()
    await router.received(3)
    claim = router.owner.claims[0]
    claim.done(0)
    claim.done(2)
    await world.sleep(0.21)
    assert committed(world) == {0: 1}
    claim.done(1)
    await world.sleep(0.21)
    assert committed(world) == {0: 3}


@in_world
async def test_nothing_is_committed_when_no_mark_moved(world: World) -> None:
    world.append(REQUESTS, 0, *requests("a", "b"))
    router = await (await a_router(world)).owns(0, 1)
    router.owner.resume_all()
    await router.received(2)
    router.owner.claims[0].done(1)
    await world.sleep(60)
    assert "commit" not in world.faults.asked


@in_world
async def test_a_mark_is_committed_once(world: World) -> None:
    world.append(REQUESTS, 0, *requests("a", "b", "c"))
    router = await (await a_router(world)).owns(0, 1)
    router.owner.resume_all()
    await router.received(3)
    claim = router.owner.claims[0]
    claim.done(0)
    await world.sleep(5)
    claim.done(2)  # moves no mark
    await world.sleep(5)
    assert world.faults.asked.count("commit") == 1


@in_world
async def test_an_unanswered_commit_is_repeated(world: World) -> None:
    world.faults.unanswered.add("commit")
    world.append(REQUESTS, 0, *requests("a"))
    router = await (await a_router(world, at_once=True)).received(1)
    await world.sleep(5)
    assert committed(world) == {}
    world.faults.unanswered.clear()
    await world.sleep(0.21)
    assert committed(world) == {0: 1}
    assert not router.running.done()


@in_world
async def test_a_refused_commit_does_not_end_the_intake(world: World) -> None:
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


@in_world
async def test_closing_commits_and_leaves(world: World) -> None:
    world.append(REQUESTS, 0, *requests("a", "b"))
    router = await (await a_router(world)).owns(0, 1)
    router.owner.resume_all()
    await router.received(2)
    router.owner.claims[0].done(0)
    await router.intake.close()
    assert committed(world) == {0: 1}
    assert router.owner.story[-2:] == ["closed 0, lost True", "closed 1, lost True"]
    assert world.broker.group(REQUESTS, GROUP).members == {}
    await asyncio.wait_for(router.running, 2)


@in_world
async def test_closing_leaves_the_group_although_the_last_commit_fails(world: World) -> None:
    world.append(REQUESTS, 0, *requests("a"))
    router = await (await a_router(world)).owns(0, 1)
    router.owner.resume_all()
    await router.received(1)
    world.faults.unanswered.add("commit")
    router.owner.claims[0].done(0)
    await router.intake.close()
    assert world.broker.group(REQUESTS, GROUP).members == {}
    assert committed(world) == {}


@in_world
async def test_closing_before_running_or_twice_is_harmless(world: World) -> None:
    log, owner = await world.connect(), Owner()
    intake = Intake(log, REQUESTS, GROUP, owner, world.clock)
    await intake.close()
    await intake.close()
    assert owner.story == []


# --- moves ---------------------------------------------------------------------------------------


@in_world
async def test_the_next_owner_gets_what_is_not_done(world: World) -> None:
    world.append(REQUESTS, 0, *requests("a", "b", "c"))
    first = await (await a_router(world)).owns(0, 1)
    first.owner.resume_all()
    await first.received(3)
    first.owner.claims[0].done(0)
    first.owner.claims[0].done(2)
    await world.sleep(1)
    await first.kill()
    second = await (await a_router(world, "b", at_once=True)).received(2)
    assert second.owner.offsets() == [1, 2]
    assert second.owner.story[0] == "opened 0 at 1"


@in_world
async def test_a_revoked_claim_is_closed_at_once_and_commits_no_more(world: World) -> None:
    world.append(REQUESTS, 1, *requests("a", "b"))
    first = await (await a_router(world)).owns(0, 1)
    first.owner.resume_all()
    await first.received(2)
    claim = first.owner.claims[1]
    second = await a_router(world, "b")
    await second.owns(1)
    await first.owns(0)
    assert claim.lost
    assert first.owner.story[2:4] == ["closed 0, lost True", "closed 1, lost True"]
    claim.done(0)
    claim.done(1)
    await world.sleep(5)
    assert committed(world) == {}
    second.owner.resume_all()
    await second.received(2)


@in_world
async def test_a_lane_that_comes_back_is_a_new_claim(world: World) -> None:
    world.append(REQUESTS, 0, *requests("a", "b"))
    first = await (await a_router(world)).owns(0, 1)
    first.owner.resume_all()
    await first.received(2)
    before = first.owner.claims[0]
    await a_router(world, "b")
    await world.until(lambda: before.lost)
    await first.owns(0)
    now = first.owner.claims[0]
    assert now is not before
    first.intake.resume(before)  # too late: must not start the new claim
    await world.sleep(10)
    assert len(first.owner.facts) == 2
    first.intake.resume(now)
    await first.received(4)
    before.done(0)
    before.done(1)
    await world.sleep(5)
    assert committed(world) == {}
    assert now.undone == 2


@in_world
async def test_an_assignment_without_a_revocation_is_a_new_claim_too(world: World) -> None:
    owner = Owner()
    intake = Intake(await world.connect(), REQUESTS, GROUP, owner, world.clock)
    intake.assigned({0: 0, 1: 0})
    before = owner.claims[0]
    intake.assigned({0: 5})
    assert before.lost
    assert (owner.claims[0].start, owner.claims[1].lost) == (5, False)


@in_world
async def test_what_the_client_fetches_again_is_not_handed_on_again(world: World) -> None:
    world.append(REQUESTS, 0, *requests("a", "b", "c"))
    owner = Owner()
    intake = Intake(await world.connect(), REQUESTS, GROUP, owner, world.clock)
    intake.assigned({0: 0})
    records = world.records(REQUESTS, 0)
    intake._hand_on(owner.claims[0], records[:2])
    intake._hand_on(owner.claims[0], records)
    assert owner.offsets() == [0, 1, 2]


# --- records that cannot be read -----------------------------------------------------------------


@pytest.mark.parametrize(
    "poison",
    [MALFORMED, UNTYPED, OF_A_NEWER_VERSION, OF_ANOTHER_TOPIC, TOMBSTONE, NO_KEY_NO_VALUE],
    ids=["malformed", "untyped", "newer", "misplaced", "tombstone", "nothing"],
)
def test_a_record_that_cannot_be_read_is_put_aside_and_the_lane_goes_on(poison: Entry) -> None:
    async def scenario(world: World) -> None:
        world.append(REQUESTS, 0, *requests("before"))
        world.append_raw(REQUESTS, 0, poison)
        world.append(REQUESTS, 0, *requests("after"))
        router = await (await a_router(world, at_once=True)).received(2)
        await world.sleep(1)
        assert router.owner.ids() == ["before", "after"]
        (letter,) = world.everywhere(DEAD_LETTERS)
        assert letter.key == poison.key
        assert dict(letter.headers)["origin_offset"] == b"1"
        assert committed(world) == {0: 3}
        assert router.intake.undecodable == 1

    in_world(scenario)()


@pytest.mark.parametrize("poison", [MALFORMED, UNTYPED], ids=["malformed", "untyped"])
def test_whoever_sent_what_cannot_be_read_is_refused_by_its_key(poison: Entry) -> None:
    async def scenario(world: World) -> None:
        world.append_raw(REQUESTS, 0, poison)
        router = await (await a_router(world, at_once=True)).received(1)
        ((_, fact),) = router.owner.facts
        assert isinstance(fact.record, Refused)
        assert (fact.offset, fact.record.id, fact.record.code) == (0, "k", "invalid")
        assert fact.record.message

    in_world(scenario)()


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
def test_what_names_no_request_is_only_put_aside(poison: Entry) -> None:
    async def scenario(world: World) -> None:
        world.append_raw(REQUESTS, 0, poison)
        router = await a_router(world, at_once=True)
        await world.until(lambda: committed(world) == {0: 1})
        assert router.owner.facts == []
        assert len(world.everywhere(DEAD_LETTERS)) == 1

    in_world(scenario)()


@in_world
async def test_a_refusal_is_done_when_the_lane_says_so_and_the_letter_is_written(
    world: World,
) -> None:
    world.append_raw(REQUESTS, 0, MALFORMED)
    router = await (await a_router(world)).owns(0, 1)
    router.owner.resume_all()
    await router.received(1)
    await world.until(lambda: len(world.everywhere(DEAD_LETTERS)) == 1)
    await world.sleep(5)
    assert committed(world) == {}
    router.owner.claims[0].done(0)
    await world.sleep(0.21)
    assert committed(world) == {0: 1}


@in_world
async def test_nothing_is_committed_past_a_letter_that_is_not_acknowledged(world: World) -> None:
    world.append_raw(REQUESTS, 0, MALFORMED)
    world.append(REQUESTS, 0, *requests("after"))
    world.faults.next_fates(DEAD_LETTERS, *[Fate.LOST] * 6)
    router = await (await a_router(world, at_once=True)).received(1)
    await world.sleep(1.5)
    assert world.everywhere(DEAD_LETTERS) == []
    assert committed(world) == {}
    await world.sleep(5)
    assert len(world.everywhere(DEAD_LETTERS)) == 1
    assert committed(world) == {0: 2}
    assert router.owner.ids() == ["after"]


@in_world
async def test_a_letter_that_was_not_acknowledged_is_written_by_the_next_owner(
    world: World,
) -> None:
    world.append_raw(REQUESTS, 0, MALFORMED)
    world.append(REQUESTS, 0, *requests("after"))
    world.faults.next_fates(DEAD_LETTERS, *[Fate.LOST] * 6)
    first = await (await a_router(world, at_once=True)).received(1)
    await first.kill()
    await (await a_router(world, "b", at_once=True)).received(1)
    await world.sleep(10)
    assert len(world.everywhere(DEAD_LETTERS)) == 1
    assert committed(world) == {0: 2}


@in_world
async def test_a_flood_of_bad_records_is_bounded_and_drains(world: World) -> None:
    count = 3 * LETTERS_QUEUED
    world.append_raw(REQUESTS, 0, *[MALFORMED] * count)
    world.append(REQUESTS, 0, *requests("after"))
    world.faults.next_fates(DEAD_LETTERS, *[Fate.LOST] * 500)
    router = await (await a_router(world, at_once=True)).owns(0, 1)
    await world.sleep(2)
    assert router.intake._letters.qsize() <= LETTERS_QUEUED
    await router.received(1)
    await world.until(lambda: committed(world) == {0: count + 1})
    assert len(world.everywhere(DEAD_LETTERS)) == count


@in_world
async def test_prompt_text_does_not_reach_dead_letters(world: World) -> None:
    world.append_raw(REQUESTS, 0, MALFORMED._replace(value=b"\xc1 my secret"))
    await a_router(world, at_once=True)
    await world.until(lambda: len(world.everywhere(DEAD_LETTERS)) == 1)
    (letter,) = world.everywhere(DEAD_LETTERS)
    assert letter.value == b""
