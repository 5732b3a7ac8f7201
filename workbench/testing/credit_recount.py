"""Recount of the credit that preprocessors use, from the records of the log.

A report of a router has room for a number of requests, and positions in its lanes. Whenever a
preprocessor takes credit, the recount finds in the log which of its requests in these lanes no
router has reported as read, and these must not be more than its share of the room, rounded up. It
keeps no balance: the code that it checks does.

One preprocessor and one class are recounted exactly, by the reports that this process has read. So
late and lost reports need no slack: their positions are as old as their room. The sum that all
processes publish together may be more than a router's room, and no check forbids it, because

    HTTP requests         take no credit, and use the same room
    shares                are each rounded up; while partitions of prompts move, two members may
                          count the same one
    restarts              a new process does not count the requests that the one before it published
    lanes that move       requests that a router has reported as read use the credit of none,
                          although the next owner reads some of it again
    lanes without report  have a router that is gone, silent or new: a rate limits requests to
                          them, and a later report counts none of those from before

Repeats of an append count once, as the first that reaches the log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvlane.app.prompts.prompt_credit import REPORT_TTL_S, CreditDebit, PromptCredit
from kvlane.streams.codecs import type_of
from kvlane.streams.memory.partition_log import MemoryRecord
from kvlane.streams.ports import Partition
from kvlane.streams.records import LogRecord, RouterCapacity
from kvlane.streams.request import Request


class CreditUse(NamedTuple):
    """A request that took credit. `lane_end`: end of its lane at that time."""

    request_id: str
    lane: int
    lane_end: int


class ReadReport(NamedTuple):
    """A report that a preprocessor has read. `at`: time of its append, by the reader's clock."""

    capacity: RouterCapacity
    at: float


def valid_report(reports: Sequence[ReadReport], lane: int, now: float) -> RouterCapacity | None:
    """The newest report of the router that was the last to report a lane; None if that router no
    longer reports the lane, or nothing at all."""
    names = (r.capacity.router for r in reversed(reports) if lane in r.capacity.positions)
    router = next(names, None)
    newest = next((r for r in reversed(reports) if r.capacity.router == router), None)
    if newest is None or now - newest.at >= REPORT_TTL_S:
        return None
    return newest.capacity if lane in newest.capacity.positions else None


def reported_position(reports: Sequence[ReadReport], lane: int) -> int:
    """The offset up to which any router has reported a lane as read."""
    return max(report.capacity.positions.get(lane, 0) for report in reports)


def is_unread(use: CreditUse, position: int, records: Sequence[MemoryRecord]) -> bool:
    """Whether a request is at or beyond a position of its lane, or not yet among its records."""
    key = use.request_id.encode()
    offsets = (
        r.offset
        for r in records
        if r.offset >= use.lane_end and r.key == key and type_of(r) == b"Request"
    )
    return next(offsets, position) >= position


class CreditRecount:
    """The recount for one preprocessor and one class; it observes `credit` from now on.

    `label`: of the process, and `now` its time. `records`: of a lane of `requests`, deleted ones
    included.
    """

    def __init__(
        self,
        label: str,
        credit: PromptCredit,
        now: Callable[[], float],
        records: Callable[[int], Sequence[MemoryRecord]],
    ) -> None:
        self.violations: list[str] = []
        self._label = label
        self._credit = credit
        self._now = now
        self._records = records
        self._reports: list[ReadReport] = []
        self._uses: list[CreditUse] = []
        self._acquire, self._apply = credit.acquire, credit.apply
        credit.acquire = self._observe_acquire  # type: ignore[method-assign]
        credit.apply = self._observe_apply  # type: ignore[method-assign]

    def _observe_apply(
        self, source: Partition, log_records: Sequence[LogRecord], position: int
    ) -> None:
        for log_record in log_records:
            if isinstance(log_record.record, RouterCapacity):
                age_ms = max(0, log_records[-1].timestamp_ms - log_record.timestamp_ms)
                self._reports.append(ReadReport(log_record.record, self._now() - age_ms / 1000))
        self._apply(source, log_records, position)

    def _observe_acquire(self, lane: int, request: Request) -> CreditDebit | None:
        report = valid_report(self._reports, lane, self._now())
        debit = self._acquire(lane, request)
        if report is None:
            self._uses = [use for use in self._uses if use.lane != lane]
        elif debit is not None:
            records = self._records(lane)
            lane_end = records[-1].offset + 1 if records else 0
            self._uses.append(CreditUse(request.id, lane, lane_end))
            self._check(request, report)
        return debit

    def _check(self, request: Request, report: RouterCapacity) -> None:
        room = report.batch_requests if request.service_class == "batch" else report.requests
        most = math.ceil(self._credit.prompts_share * room)
        unread = [
            use.request_id
            for use in self._uses
            if use.lane in report.positions
            and is_unread(use, reported_position(self._reports, use.lane), self._records(use.lane))
        ]
        if len(unread) > most:
            self.violations.append(
                f"credit: {self._label} publishes {', '.join(unread)} with {most} credits, its "
                f"share of the room of {report.router} at {report.positions}"
            )
