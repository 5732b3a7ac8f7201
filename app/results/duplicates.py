"""Requests that repeat one whose reply is over: they get no reply, and no result.

A router ignores a request whose id it has seen, so its record stays without a reply. Usually the
collector remembers the result; where it does not (the first one asked for none, or is older than
what was read at a take-over), the ledger shows which record of the request was run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import aclosing

from app.results.collector_context import CLOCK_SKEW_MS, CollectorContext
from app.results.pending_result import PendingResult
from streams.codecs import decode
from streams.errors import BrokerUnavailable, PositionLost, RecordError
from streams.ports import Partition, Record
from streams.reading.range_reader import read_range
from streams.records import Assigned, Ended, Started
from streams.topics import LEDGER

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 20.0


async def find_duplicates(
    context: CollectorContext, lane: int, silent: Sequence[PendingResult]
) -> list[PendingResult]:
    """Those of `silent` that repeat an earlier request, if they are silent still when `responses`
    has been read to where it ends after this call."""
    source = Partition(LEDGER, lane)
    first_ms = min(pending.appended_ms for pending in silent)
    since_ms = max(0, first_ms - context.remembered_ms - CLOCK_SKEW_MS)
    try:
        start = await context.log.offset_at(LEDGER, lane, since_ms)
        end = (await context.log.end_offsets(LEDGER, [lane]))[lane]
        records = await _records(context, source, start, end, {p.id.encode() for p in silent})
    except (BrokerUnavailable, PositionLost, TimeoutError) as e:
        log.info("lane %d: repeated requests are looked for again: %s", lane, e)
        return []
    return [p for p in silent if _is_repetition(p, records.get(p.id.encode(), ()))]


async def _records(
    context: CollectorContext, source: Partition, start: int, end: int, keys: set[bytes]
) -> dict[bytes, list[Record]]:
    """The ledger's records of these keys, by key."""
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


def _is_repetition(pending: PendingResult, records: Sequence[Record]) -> bool:
    """Whether another record of its id was run, or ended.

    A run names the record that it is of. An end without a run is of another record, because the
    reply of a request is appended before the end in the ledger, and this one has no reply.
    """
    is_ended = False
    for record in records:
        try:
            fact = decode(record)
        except RecordError:
            continue
        if isinstance(fact, Assigned | Started):
            if pending.is_renewed:  # a router may have run it by the record before
                return fact.origin.offset > pending.offset
            return fact.origin.offset != pending.offset
        is_ended = is_ended or isinstance(fact, Ended)
    return is_ended
