"""Requests without a reply: those that repeat another one, and those whose reply was deleted.

A router ignores a request whose id it has seen. Where the collector does not remember the result,
the ledger shows which record was run, and the end of a request whose reply is gone.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import aclosing
from typing import NamedTuple

from kvlane.app.results.collector_context import CollectorContext
from kvlane.app.results.pending_result import PendingResult
from kvlane.app.routing.state.ledger import LedgerState
from kvlane.app.routing.state.request_state import LedgerRecord
from kvlane.streams.clock import CLOCK_SKEW_MS
from kvlane.streams.codecs import decode
from kvlane.streams.errors import BrokerUnavailable, PositionLost, RecordError
from kvlane.streams.ports import Partition, Record
from kvlane.streams.reading.range_reader import read_range
from kvlane.streams.records import Assigned, Ended, LogRecord, Started
from kvlane.streams.topics import LEDGER

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 20.0
NO_LIMIT_MS = sys.maxsize


class LedgerFindings(NamedTuple):
    """Unanswered requests, by the ledger: `repetitions` of others; `ended`, or repeating; not those
    that go on."""

    repetitions: list[PendingResult]
    ended: list[PendingResult]


async def search_ledger(
    context: CollectorContext, lane: int, unanswered: Sequence[PendingResult]
) -> LedgerFindings:
    """The findings about requests that are unanswered when `responses` is read to its end later."""
    source = Partition(LEDGER, lane)
    first_ms = min(pending.appended_ms for pending in unanswered)
    since_ms = max(0, first_ms - context.remembered_ms - CLOCK_SKEW_MS)
    findings = LedgerFindings([], [])
    try:
        start = await context.log.offset_at(LEDGER, lane, since_ms)
        end = (await context.log.end_offsets(LEDGER, [lane]))[lane]
        records = await _records(context, source, start, end, {p.id.encode() for p in unanswered})
    except (BrokerUnavailable, PositionLost, TimeoutError) as e:
        log.info("lane %d: requests without a reply are looked up again: %s", lane, e)
        return findings
    for pending in unanswered:
        if not (log_records := _log_records(records.get(pending.id.encode(), ()))):
            continue
        origin, is_over = _origin(log_records), _is_over(pending.id, log_records)
        if origin is not None and _is_other(pending, origin):
            findings.repetitions.append(pending)
        elif (
            origin is None
            and _is_seen(log_records)
            and not (pending.is_lost and _has_end(log_records))
        ):
            # A router found the end of another record with this id among older ones. Where that end
            # is here as well, and the reply was deleted, this may be the record that it is of.
            findings.repetitions.append(pending)
        elif is_over and pending.is_lost:
            findings.ended.append(pending)
        elif is_over and origin is None:
            # The reply of a request is appended before its end in the ledger: the end is of
            # another record.
            findings.repetitions.append(pending)
    return findings


async def _records(
    context: CollectorContext, source: Partition, start: int, end: int, keys: set[bytes]
) -> dict[bytes, list[Record]]:
    found: dict[bytes, list[Record]] = {}
    pieces = read_range(
        context.log, context.ctx.clock, {source: start}, {source: end}, timeout_s=READ_TIMEOUT_S
    )
    async with aclosing(pieces):
        async for piece in pieces:
            for record in piece.records:
                if record.key in keys:
                    found.setdefault(record.key or b"", []).append(record)
    return found


def _log_records(records: Sequence[Record]) -> list[LogRecord]:
    log_records = []
    for record in records:
        try:
            decoded = decode(record)
        except RecordError:
            continue
        if isinstance(decoded, LedgerRecord):
            log_records.append(LogRecord(record.offset, record.timestamp, decoded))
    return log_records


def _origin(log_records: Sequence[LogRecord]) -> int | None:
    """The offset of the request that was run; None without a run."""
    runs = (r.record for r in log_records if isinstance(r.record, Assigned | Started))
    first = next(runs, None)
    return None if first is None else first.origin.offset


def _has_end(log_records: Sequence[LogRecord]) -> bool:
    """Whether a request with the id ended, other than as one that was seen before."""
    return any(isinstance(r.record, Ended) and r.record.code != "seen" for r in log_records)


def _is_seen(log_records: Sequence[LogRecord]) -> bool:
    return any(isinstance(r.record, Ended) and r.record.code == "seen" for r in log_records)


def _is_other(pending: PendingResult, origin: int) -> bool:
    if pending.is_renewed:  # a router may have run it by the record before
        return origin > pending.offset
    return origin != pending.offset


def _is_over(request_id: str, log_records: Sequence[LogRecord]) -> bool:
    ledger = LedgerState(NO_LIMIT_MS)
    ledger.apply(Partition(LEDGER, 0), log_records, 0)
    state = ledger.request(0, request_id)
    return state is not None and state.is_finished
