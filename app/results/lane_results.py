"""The results of one lane: which requests of it get one, and how far each of them is. Pure: records
of `requests` and `responses` in, finished results out, one for each request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvlane.app.results.pending_result import PendingResult
from kvlane.streams.clock import CLOCK_SKEW_MS
from kvlane.streams.codecs import decode
from kvlane.streams.errors import Malformed
from kvlane.streams.ports import Partition, Record, Unreadable
from kvlane.streams.records import LogRecord, Refused
from kvlane.streams.request import Request
from kvlane.streams.responses.transcript import VISIBLE
from kvlane.streams.responses.unreadable import UnknownPlace, describe, place_of

log = logging.getLogger(__name__)


OnUnreadable = Callable[[Record, str], None]


class WrittenResult(NamedTuple):
    """A result in the log: its append time in broker ms, and its place if it was found there."""

    at_ms: int
    place: Partition | None = None
    offset: int = 0


class LaneResults:
    """Requests of a lane whose results are not written, and ids of those whose results are."""

    def __init__(self, kept_ms: int, on_unreadable: OnUnreadable) -> None:
        """`kept_ms`: for how long the id of a finished request is remembered, in broker time.
        `on_unreadable`: called with a record that has ended a reply, as it cannot be read."""
        self._on_unreadable = on_unreadable
        self.ready: dict[PendingResult, None] = {}
        """Requests that are over, in the order of their ends."""
        self.replaced: list[int] = []
        """Offsets of records that are done without a result of their own."""
        self.cut_below = 0
        """Records of replies to requests below this offset may have been deleted."""
        self._kept_ms = kept_ms
        self._pending: dict[str, PendingResult] = {}
        """Those in `ready` are among them."""
        self._by_key: dict[bytes, PendingResult] = {}
        """Those that are not over, by the key of their records."""
        self._finished: dict[str, WrittenResult] = {}

    @property
    def open_requests(self) -> int:
        """Number of requests with an open reply."""
        return len(self._by_key)

    def add_finished(self, finished: Mapping[str, WrittenResult]) -> None:
        self._finished = dict(finished) | self._finished

    def first_ms(self, default_ms: int) -> int:
        """The append time of the first request without a result, in broker time."""
        return min((pending.appended_ms for pending in self._pending.values()), default=default_ms)

    def take_finished(self) -> list[PendingResult]:
        """Drop the requests whose results are in the log, and return them."""
        done = [p for p in self._pending.values() if self._is_finished(p.id, p.begun_ms)]
        for pending in done:
            self.drop(pending)
        return done

    def take_unreplied(self, request_id: str, appended_ms: int) -> WrittenResult | None:
        """The result of another collector, whose reply may be missing; once for each."""
        written = self._finished.get(request_id)
        if written is None or written.place is None or written.at_ms < appended_ms - CLOCK_SKEW_MS:
            return None
        self._finished[request_id] = WrittenResult(written.at_ms)
        return written

    def add_request(self, log_record: LogRecord) -> int | None:
        """Take a record of `requests`; the offset of the record that is done with it: its own if it
        needs no result, or of the record whose place it takes. None for a request that waits."""
        record = log_record.record
        if not isinstance(record, Request | Refused) or record.result is None:
            return log_record.offset
        if self._is_finished(record.id, record.queued_ms or log_record.timestamp_ms):
            return log_record.offset
        if (known := self._pending.get(record.id)) is not None:
            if isinstance(record, Request) and record.shown is not None:
                known.renewals[log_record.offset] = log_record.timestamp_ms
                return None
            is_renewed = isinstance(record, Request) and record.is_renewed and known.is_silent
            return known.renew(log_record) if is_renewed else log_record.offset
        pending = PendingResult(log_record, record, record.result)
        pending.may_be_cut = log_record.offset < self.cut_below
        self._pending[record.id] = self._by_key[record.id.encode()] = pending
        if pending.is_over:
            self._end(pending)
        return None

    def apply(self, records: Sequence[Record]) -> None:
        """Apply records of `responses`, in log order. Raises NewerRecord."""
        by_key = self._by_key
        for record in records:
            if record.key is None or (pending := by_key.get(record.key)) is None:
                if record.key is None and isinstance(record.value, Unreadable):
                    self._suspect(record)
                continue
            try:
                decoded = decode(record)
            except Malformed as e:
                self._apply_unreadable(record, pending, e)
                continue
            if not isinstance(decoded, VISIBLE):
                continue
            try:
                is_over = pending.apply(decoded, record.timestamp)
            except Exception:
                # A collector that ended for it would be restarted and get the same record again.
                log.exception("%s: a record of its reply cannot be processed", pending.id)
                pending.fail(record.timestamp)
                is_over = True
            self.replaced += pending.replaced
            pending.replaced.clear()
            if is_over:
                self._end(pending)

    def _apply_unreadable(self, record: Record, pending: PendingResult, error: Malformed) -> None:
        reason = describe(record, error)
        if pending.apply_unreadable(place_of(record, pending.id), reason, record.timestamp):
            log.error("%s: its reply ends: %s", pending.id, reason)
            self._on_unreadable(record, reason)
            self._end(pending)

    def _suspect(self, record: Record) -> None:
        reason = describe(record)
        for pending in self._by_key.values():
            pending.apply_unreadable(UnknownPlace(), reason, record.timestamp)

    def truncate(self) -> None:
        """Records of the lane were deleted before they were read."""
        for pending in self._by_key.values():
            pending.cut()

    def lose_overdue(self, now_ms: int) -> None:
        """Lose requests that are due, and whose reply may have ended among deleted records."""
        for pending in [p for p in self._by_key.values() if p.is_lost and p.due_ms < now_ms]:
            self.lose(pending, now_ms)

    def lose(self, pending: PendingResult, now_ms: int) -> None:
        """End a request whose reply was deleted. `now_ms`: broker time."""
        pending.lose(now_ms)
        self._end(pending)

    def unanswered(self, before_ms: int) -> list[PendingResult]:
        """Requests from before a broker time whose reply has not begun, or among deleted
        records."""
        return [
            p
            for p in self._by_key.values()
            if (p.is_silent or p.is_lost) and p.appended_ms < before_ms
        ]

    def is_open(self, pending: PendingResult) -> bool:
        """True while a request has no result, and its reply has not ended."""
        return self._by_key.get(pending.id.encode()) is pending

    def drop(self, pending: PendingResult) -> None:
        if self._pending.pop(pending.id, None) is not None:
            self.replaced += (*pending.replaced, *pending.renewals)
            self._by_key.pop(pending.id.encode(), None)
            self.ready.pop(pending, None)

    def finish(self, written: Iterable[PendingResult], at_ms: int) -> None:
        """The results of these are in the log since a broker time, by this collector."""
        for pending in written:
            del self._pending[pending.id], self.ready[pending]
            self.replaced += (*pending.replaced, *pending.renewals)
            self._finished.pop(pending.id, None)  # the order is that of the ends
            self._finished[pending.id] = WrittenResult(at_ms)
        while self._finished:
            oldest = next(iter(self._finished))
            if self._finished[oldest].at_ms >= at_ms - self._kept_ms:
                break
            del self._finished[oldest]

    def _is_finished(self, request_id: str, appended_ms: int) -> bool:
        """True if a request, by its append time, has a result or repeats one that has."""
        written = self._finished.get(request_id)
        return written is not None and written.at_ms >= appended_ms - self._kept_ms

    def _end(self, pending: PendingResult) -> None:
        del self._by_key[pending.id.encode()]
        self.ready[pending] = None
