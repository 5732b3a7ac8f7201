"""Tests of the recount of credit from the log, beside a preprocessor that grants all credit."""

from __future__ import annotations

import pytest

from kvlane.app.prompts.prompt_credit import REPORT_TTL_S, CreditDebit, PromptCredit
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import encode
from kvlane.streams.memory.partition_log import MemoryRecord
from kvlane.streams.ports import Partition
from kvlane.streams.record_base import ServiceClass
from kvlane.streams.records import Cancel, LogRecord, RouterCapacity
from kvlane.streams.request import Request
from kvlane.streams.topics import CAPACITY, REQUESTS
from workbench.testing.credit_recount import CreditRecount


class UnlimitedCredit(PromptCredit):
    def acquire(self, lane: int, request: Request) -> CreditDebit | None:
        return CreditDebit(1, 1)


class RecountedLog:
    """Lanes whose first records are at offset 0, and the recount of a preprocessor's credit."""

    def __init__(self, share: float = 1.0) -> None:
        self.now = 100.0
        self._credit = UnlimitedCredit(SystemClock())
        self._credit.prompts_share = share
        self._lanes: dict[int, list[MemoryRecord]] = {0: [], 1: []}
        self._recount = CreditRecount("p", self._credit, lambda: self.now, self._lanes.__getitem__)

    def report(
        self, positions: dict[int, int], requests: int = 0, batch: int = 0, router: str = "r"
    ) -> None:
        report = RouterCapacity(
            router=router, requests=requests, batch_requests=batch, positions=positions
        )
        self._credit.apply(Partition(CAPACITY, 0), [LogRecord(0, 0, report)], 1)

    def use(self, *ids: str, lane: int = 0, service_class: ServiceClass = "interactive") -> int:
        """Take credit for these requests; the number of violations so far."""
        for request_id in ids:
            request = Request(id=request_id, token_ids=b"", service_class=service_class)
            self._credit.acquire(lane, request)
        return len(self._recount.violations)

    def append(self, record: Request | Cancel, lane: int = 0) -> None:
        entry = encode(record, record.id)
        offset = len(self._lanes[lane])
        self._lanes[lane].append(MemoryRecord(REQUESTS, lane, offset, 0, *entry))

    def append_requests(self, *ids: str, lane: int = 0) -> None:
        for request_id in ids:
            self.append(Request(id=request_id, token_ids=b""), lane)

    @property
    def violations(self) -> list[str]:
        return self._recount.violations


def test_credit_is_limited_by_the_room_over_all_lanes_of_a_router() -> None:
    log = RecountedLog()
    log.report({0: 0, 1: 0}, requests=2)
    assert log.use("a") == log.use("b", lane=1) == 0
    log.use("c")
    [violation] = log.violations
    assert violation == (
        "credit: p publishes a, b, c with 2 credits, its share of the room of r at {0: 0, 1: 0}"
    )


@pytest.mark.parametrize(("position", "violations"), [(0, 1), (1, 1), (2, 0)])
def test_request_uses_credit_until_a_report_has_read_it(position: int, violations: int) -> None:
    log = RecountedLog()
    log.report({0: 0}, requests=2)
    log.use("a", "b")
    log.append_requests("a", "b")
    log.report({0: position}, requests=1)
    assert log.use("c") == violations


def test_request_that_another_router_has_read_uses_no_credit() -> None:
    log = RecountedLog()
    log.report({0: 0, 1: 0}, requests=1, router="r1")
    log.use("a")
    log.append_requests("a")
    log.report({0: 1}, router="r2")
    assert log.use("b", lane=1) == 0


def test_request_of_a_pending_append_uses_credit() -> None:
    log = RecountedLog()
    log.report({0: 0}, requests=1)
    log.use("a")
    log.append_requests("of a gateway")
    log.report({0: 1}, requests=1)
    assert log.use("b") == 1


def test_request_is_read_where_it_was_first_appended() -> None:
    log = RecountedLog()
    log.append_requests("a")  # by another preprocessor, before this one took credit
    log.report({0: 1}, requests=1)
    log.use("a")
    log.append(Cancel(id="a"))
    log.append_requests("a", "a")
    log.report({0: 2}, requests=1)
    assert log.use("b") == 1
    log.report({0: 3}, requests=2)
    assert log.use("c") == 1


def test_share_of_the_room_is_rounded_up() -> None:
    log = RecountedLog(share=0.5)
    log.report({0: 0}, requests=3)
    assert log.use("a", "b") == 0
    assert log.use("c") == 1


def test_batch_requests_use_the_room_of_their_class() -> None:
    log = RecountedLog()
    log.report({0: 0}, requests=2, batch=1)
    assert log.use("a", service_class="batch") == 0
    assert log.use("b", service_class="batch") == 1


def test_requests_to_a_lane_without_a_valid_report_use_no_credit() -> None:
    log = RecountedLog()
    log.report({0: 0}, requests=1)
    log.use("a")
    log.now += REPORT_TTL_S
    assert log.use("b", "c") == 0
    log.report({0: 0}, requests=1)
    assert log.use("d") == 0
    assert log.use("e") == 1


def test_lane_is_reported_by_the_router_that_reported_it_last() -> None:
    log = RecountedLog()
    log.report({0: 0}, requests=1, router="r1")
    log.report({0: 0}, requests=2, router="r2")
    assert log.use("a", "b") == 0
    log.report({}, requests=1, router="r2")
    assert log.use("c") == 0
