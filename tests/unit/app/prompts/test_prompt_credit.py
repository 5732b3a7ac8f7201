"""Tests of credit: published and unread prompts count against the room that routers report."""

from __future__ import annotations

from kvlane.app.prompts.prompt_credit import (
    REPORT_TTL_S,
    UNREPORTED_LANE_RATE,
    CreditDebit,
    PromptCredit,
)
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.ports import Partition
from kvlane.streams.records import LogRecord, RouterCapacity
from kvlane.streams.request import Request
from kvlane.streams.topics import CAPACITY

SOURCE = Partition(CAPACITY, 0)


class Clock:
    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at

    def wall_ms(self) -> int:
        return int(self.at * 1000)

    async def sleep(self, seconds: float) -> None:
        raise AssertionError(seconds)


class PublishedPrompts:
    """A credit, with the reports that the test makes."""

    def __init__(self, share: float = 1.0) -> None:
        self.clock = Clock()
        self.credit = PromptCredit(self.clock)
        self.credit.prompts_share = share
        self._offset = 0

    def report(
        self, router: str, requests: int, positions: dict[int, int], age_ms: int = 0
    ) -> None:
        report = RouterCapacity(
            router=router, requests=requests, tokens=100, bytes=1000, positions=positions
        )
        newest = RouterCapacity(router="another", positions={})
        log_records = [
            LogRecord(self._offset, 10_000 - age_ms, report),
            LogRecord(self._offset + 1, 10_000, newest),
        ]
        self._offset += 2
        self.credit.apply(SOURCE, log_records if age_ms else log_records[:1], self._offset)

    def take(self, lane: int, count: int, tokens: int = 1) -> list[CreditDebit]:
        request = Request(id="a", token_ids=pack_tokens([1] * tokens))
        taken = (self.credit.acquire(lane, request) for _ in range(count))
        return [sent for sent in taken if sent is not None]


def test_only_the_reported_room_is_used() -> None:
    credit_world = PublishedPrompts()
    credit_world.report("r1", 5, {0: 10, 1: 20})
    assert len(credit_world.take(0, 3)) == 3
    assert credit_world.credit.available_requests() == 2
    assert len(credit_world.take(1, 10)) == 2
    assert credit_world.take(0, 1) == []


def test_prompts_read_by_a_router_are_counted_by_its_report_alone() -> None:
    credit_world = PublishedPrompts()
    credit_world.report("r1", 5, {0: 10})
    for offset, sent in enumerate(credit_world.take(0, 5), 10):
        sent.offset = offset
    credit_world.report("r1", 3, {0: 12})  # of the room for five, two took theirs
    assert credit_world.take(0, 1) == []
    credit_world.report("r1", 3, {0: 15})
    assert len(credit_world.take(0, 10)) == 3


def test_report_older_than_an_append_does_not_release_its_credit() -> None:
    credit_world = PublishedPrompts()
    credit_world.report("r1", 2, {0: 10})
    first, second = credit_world.take(0, 2)
    first.offset = 10
    credit_world.report("r1", 2, {0: 10})
    assert credit_world.take(0, 1) == []
    credit_world.report("r1", 2, {0: 11})
    assert len(credit_world.take(0, 2)) == 1
    second.offset = 11
    credit_world.report("r1", 2, {0: 12})
    assert len(credit_world.take(0, 2)) == 1


def test_credit_of_an_unpublished_prompt_is_released() -> None:
    credit_world = PublishedPrompts()
    credit_world.report("r1", 2, {0: 10})
    for sent in credit_world.take(0, 2):
        credit_world.credit.release(sent)
    credit_world.report("r1", 2, {0: 10})
    assert len(credit_world.take(0, 5)) == 2


def test_tokens_and_bytes_are_also_bounded_and_one_that_exceeds_them_may_go() -> None:
    credit_world = PublishedPrompts()
    credit_world.report("r1", 50, {0: 0})
    assert len(credit_world.take(0, 5, tokens=60)) == 2
    credit_world = PublishedPrompts()
    credit_world.report("r1", 50, {0: 0})
    assert len(credit_world.take(0, 5, tokens=10_000)) == 1


def test_lanes_of_several_routers_have_credits_of_their_own() -> None:
    credit_world = PublishedPrompts()
    credit_world.report("r1", 0, {0: 0})
    credit_world.report("r2", 3, {1: 0})
    assert credit_world.take(0, 1) == []
    assert len(credit_world.take(1, 10)) == 3
    credit_world.report("r2", 4, {0: 0, 1: 9})  # the lane moved
    assert len(credit_world.take(0, 10)) == 1


def test_preprocessors_share_by_their_partitions_and_each_gets_some() -> None:
    desks = [PublishedPrompts(share) for share in (10 / 16, 5 / 16, 1 / 16)]
    for credit_world in desks:
        credit_world.report("r1", 8, {0: 0})
    assert [len(credit_world.take(0, 100)) for credit_world in desks] == [5, 3, 1]


def test_router_without_reports_blocks_nothing() -> None:
    credit_world = PublishedPrompts()
    credit_world.report("r1", 0, {0: 0})
    credit_world.clock.at += REPORT_TTL_S - 0.1
    assert credit_world.take(0, 1) == []
    credit_world.clock.at += 0.2
    assert len(credit_world.take(0, 10_000)) == UNREPORTED_LANE_RATE
    credit_world.clock.at += 0.5
    assert len(credit_world.take(0, 10_000)) == UNREPORTED_LANE_RATE / 2
    assert credit_world.credit.available_requests() == 0


def test_reports_from_before_the_start_have_their_true_age() -> None:
    credit_world = PublishedPrompts()
    credit_world.report("r1", 0, {0: 0}, age_ms=int(REPORT_TTL_S * 1000) + 1)
    assert len(credit_world.take(0, 1)) == 1


def test_append_to_a_lane_without_reports_leaves_no_state() -> None:
    credit_world = PublishedPrompts()
    for _ in range(100):
        credit_world.take(0, 200)
        credit_world.clock.at += 1
    assert not credit_world.credit._lanes[0].unread


def test_report_from_a_clock_that_was_set_back_counts_no_longer_than_others() -> None:
    credit_world = PublishedPrompts()
    credit_world.report("r1", 0, {0: 10}, age_ms=-3_600_000)
    assert credit_world.take(0, 1) == []
    credit_world.clock.at += REPORT_TTL_S
    assert len(credit_world.take(0, 1)) == 1
