"""The results of one lane: which requests of it get one, and how far each of them is.

Pure state of one claim: records of `requests` and `responses` in, finished results out. Each
request gets one result, even if it is published or delivered twice; `finished` holds the ids of
results that are in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from app.results.pending_result import PendingResult
from streams.codecs import decode
from streams.errors import Malformed
from streams.ports import Record, Unreadable
from streams.records import Chunk, End, Fence, LogRecord, Refused
from streams.request import Request
from streams.responses.unreadable import UnknownPlace, describe, place_of

log = logging.getLogger(__name__)

_VISIBLE = (Chunk, Fence, End)

OnUnreadable = Callable[[Record, str], None]


class LaneResults:
    """Requests of a lane whose results are not written, and ids of those whose results are."""

    def __init__(self, kept_ms: int, on_unreadable: OnUnreadable) -> None:
        """`kept_ms`: for how long the id of a finished request is remembered, in broker time.

        `on_unreadable`: called with a record that has ended a reply, as it cannot be read.
        """
        self._on_unreadable = on_unreadable
        self.ready: dict[PendingResult, None] = {}
        """Requests that are over, in the order of their ends."""
        self.cut_below = 0
        """Records of replies to requests below this offset may have been deleted."""
        self._kept_ms = kept_ms
        self._pending: dict[str, PendingResult] = {}
        """Those in `ready` are among them."""
        self._by_key: dict[bytes, PendingResult] = {}
        """Those that are not over, by the key of their records."""
        self._finished: dict[str, int] = {}

    @property
    def open_requests(self) -> int:
        """Number of requests with an open reply."""
        return len(self._by_key)

    def add_finished(self, finished: Mapping[str, int]) -> None:
        """Results that are in the log: append times in broker ms by request id."""
        self._finished |= finished

    def add_request(self, fact: LogRecord) -> int | None:
        """Take a record of `requests`; returns the offset of the record that is done with it.

        That is its own if it needs no result, or has one already, and that of the record in whose
        place it is.
        """
        record = fact.record
        if not isinstance(record, Request | Refused) or record.result is None:
            return fact.offset
        if record.id in self._finished:
            return fact.offset
        if (known := self._pending.get(record.id)) is not None:
            is_renewed = isinstance(record, Request) and record.is_renewed and known.is_silent
            return known.renew(fact) if is_renewed else fact.offset
        pending = PendingResult(fact, record, record.result)
        pending.may_be_cut = fact.offset < self.cut_below
        self._pending[record.id] = self._by_key[record.id.encode()] = pending
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
            if not isinstance(decoded, _VISIBLE):
                continue
            try:
                is_over = pending.apply(decoded, record.timestamp)
            except Exception:
                # A collector that ended for it would be restarted and get the same record again.
                log.exception("%s: a record of its reply cannot be processed", pending.id)
                pending.fail(record.timestamp)
                is_over = True
            if is_over:
                self._end(pending)

    def _apply_unreadable(self, record: Record, pending: PendingResult, error: Malformed) -> None:
        reason = describe(record, error)
        if pending.apply_unreadable(place_of(record, pending.id), reason, record.timestamp):
            log.error("%s: its reply ends: %s", pending.id, reason)
            self._on_unreadable(record, reason)
            self._end(pending)

    def _suspect(self, record: Record) -> None:
        """Records that may be of any reply cannot be read."""
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
        """Requests that were appended before a broker time, and whose reply has not begun, or may
        have begun among deleted records."""
        return [
            p
            for p in self._by_key.values()
            if (p.is_silent or p.is_lost) and p.appended_ms < before_ms
        ]

    def drop(self, pending: PendingResult) -> None:
        """Forget a request that gets no result."""
        if self._pending.pop(pending.id, None) is not None:
            self._by_key.pop(pending.id.encode(), None)

    def finish(self, written: Iterable[PendingResult], at_ms: int) -> None:
        """The results of these are in the log since a broker time."""
        for pending in written:
            del self._pending[pending.id], self.ready[pending]
            self._finished[pending.id] = at_ms
        while self._finished:
            oldest = next(iter(self._finished))
            if self._finished[oldest] >= at_ms - self._kept_ms:
                break
            del self._finished[oldest]

    def is_finished(self, request_id: str) -> bool:
        """Whether its result is in the log, as far as this process remembers."""
        return request_id in self._finished

    def _end(self, pending: PendingResult) -> None:
        del self._by_key[pending.id.encode()]
        self.ready[pending] = None
