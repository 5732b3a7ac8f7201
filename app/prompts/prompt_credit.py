"""Credit-based flow control: the number of requests that fit into the routers' queues.

Routers report their free capacity to `capacity`, each with the offsets up to which it has read its
lanes. Requests beyond those offsets, and pending appends, use it up; the rest is credit. So a late
report cannot be spent twice. Preprocessors share a router's capacity in proportion to the
partitions of `prompts` that they own. HTTP requests use it too, and lanes may move, so a few too
many are published now and then; routers queue those.

A report is valid for REPORT_TTL_S. Requests to a lane that no router reports are limited in rate,
so no prompt waits for ever. The lag of the routers' group on `requests` is no measure: its
committed offset stays while one request is queued.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvlane.app.wait_queue import WaitQueue
from kvlane.streams.clock import Clock
from kvlane.streams.ports import Partition
from kvlane.streams.records import LogRecord, RouterCapacity
from kvlane.streams.request import Request

REPORT_TTL_S = 5.0
"""Validity of a report; routers publish one every second."""
UNREPORTED_LANE_RATE = 200.0
"""Requests a second to lanes that no router reports, of all preprocessors together."""


class ReportedRoom(NamedTuple):
    """Room of a router for requests of one class: requests, tokens and bytes of their prompts."""

    requests: float
    tokens: float
    bytes: float


class RoomRule(NamedTuple):
    """The room for a class in a report, and its requests a second to lanes without a report."""

    room: Callable[[RouterCapacity], ReportedRoom]
    unreported_rate: float


INTERACTIVE_ROOM = RoomRule(
    lambda report: ReportedRoom(report.requests, report.tokens, report.bytes), UNREPORTED_LANE_RATE
)
BATCH_ROOM = RoomRule(lambda report: ReportedRoom(report.batch_requests, math.inf, math.inf), 0.0)
"""None goes to a lane without a report: batch work can wait for the router that takes it over."""


@dataclass(eq=False, slots=True)
class CreditDebit:
    """A request that took credit. `offset`: its offset in the lane, once acknowledged."""

    tokens: int
    bytes: int
    offset: int | None = None


class _Report(NamedTuple):
    capacity: RouterCapacity
    at: float


@dataclass(eq=False, slots=True)
class _UnreadLane:
    router: str = ""
    unread: deque[CreditDebit] = field(default_factory=deque)
    tokens: int = 0
    bytes: int = 0

    def add(self, sent: CreditDebit) -> None:
        self.unread.append(sent)
        self.tokens += sent.tokens
        self.bytes += sent.bytes

    def read_to(self, position: int) -> None:
        """Drop the requests below this offset: they were read."""
        while self.unread and (at := self.unread[0].offset) is not None and at < position:
            sent = self.unread.popleft()
            self.tokens -= sent.tokens
            self.bytes -= sent.bytes


class PromptCredit:
    """The credit of one preprocessor for one class; a `FollowedView` over `capacity`.
    `prompts_share`: of the partitions of `prompts`. `credit_changed`: notified when it may grow."""

    name = "capacity"

    def __init__(self, clock: Clock, rule: RoomRule = INTERACTIVE_ROOM) -> None:
        self._rule = rule
        self.prompts_share = 1.0
        self.credit_changed = WaitQueue()
        self._clock = clock
        self._position: int | None = None
        self._reports: dict[str, _Report] = {}
        self._lanes: dict[int, _UnreadLane] = {}
        self._allowance = rule.unreported_rate
        self._refilled_at = clock.now()

    def acquire(self, lane: int, request: Request) -> CreditDebit | None:
        """Take credit for one request to a lane; None if there is none now. The caller sets its
        `offset` when the append is acknowledged, else calls `release`."""
        of = self._lanes.setdefault(lane, _UnreadLane())
        sent = CreditDebit(request.prompt_tokens, request.prompt_bytes)
        report = self._report_of(of)
        if report is None:
            return sent if self._is_allowed() else None
        if self._left(report) <= 0:
            return None
        of.add(sent)
        return sent

    def release(self, debit: CreditDebit) -> None:
        debit.offset = -1  # the next report takes it away

    def available_requests(self) -> float:
        """Requests that may be published now to the lanes that routers report."""
        now = self._clock.now()
        reports = [r.capacity for r in self._reports.values() if now - r.at < REPORT_TTL_S]
        return sum(max(0.0, self._left(report)) for report in reports)

    def _report_of(self, lane: _UnreadLane) -> RouterCapacity | None:
        report = self._reports.get(lane.router)
        if report is not None and self._clock.now() - report.at < REPORT_TTL_S:
            return report.capacity
        # No valid report has the position of this lane's reader.
        lane.unread.clear()
        lane.tokens = lane.bytes = 0
        return None

    def _left(self, report: RouterCapacity) -> float:
        """Free capacity of a router in requests; 0 also if tokens or bytes are used up."""
        lanes = [self._lanes[lane] for lane in report.positions if lane in self._lanes]
        room = self._rule.room(report)
        share = self.prompts_share
        if not share:
            return 0.0
        left = (
            share * room.requests - sum(len(lane.unread) for lane in lanes),
            share * room.tokens - sum(lane.tokens for lane in lanes),
            share * room.bytes - sum(lane.bytes for lane in lanes),
        )
        return left[0] if min(left) > 0 else 0.0

    def _is_allowed(self) -> bool:
        """Whether the rate limit allows one more request to a lane without reports."""
        now = self._clock.now()
        rate = self.prompts_share * self._rule.unreported_rate
        earned = (now - self._refilled_at) * rate
        self._allowance = min(self._allowance + earned, max(1.0, rate) if rate else 0.0)
        self._refilled_at = now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True

    # --- View ------------------------------------------------------------------------------------

    def apply(self, source: Partition, log_records: Sequence[LogRecord], position: int) -> None:  # noqa: ARG002
        self._position = position
        for log_record in log_records:
            if isinstance(log_record.record, RouterCapacity):
                # The first read returns old reports, too; their age is counted from the newest.
                # A broker's clock may go back: that makes none younger than the newest.
                age_ms = max(0, log_records[-1].timestamp_ms - log_record.timestamp_ms)
                self._reported(log_record.record, age_ms / 1000)
        if log_records:
            self.credit_changed.notify_all()

    def _reported(self, report: RouterCapacity, age_s: float) -> None:
        now = self._clock.now()
        self._reports[report.router] = _Report(report, now - age_s)
        for name in [n for n, r in self._reports.items() if now - r.at >= REPORT_TTL_S]:
            del self._reports[name]
        for number, lane in self._lanes.items():
            if lane.router == report.router and number not in report.positions:
                lane.router = ""
        for number, position in report.positions.items():
            lane = self._lanes.setdefault(number, _UnreadLane())
            lane.router = report.router
            lane.read_to(position)

    def position(self, source: Partition) -> int | None:  # noqa: ARG002
        return self._position

    def forget(self, source: Partition) -> None:  # noqa: ARG002
        self._position = None
        self._reports.clear()
