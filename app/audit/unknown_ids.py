"""Existence of records under a request id, within the retention of the log.

Reads `prompts`, and the lane of the id in `requests` and `ledger`. Compares keys only.
"""

from __future__ import annotations

from contextlib import aclosing

from app.audit.time_range import format_time
from streams.clock import Clock
from streams.errors import AccessDenied, BrokerUnavailable, PositionLost
from streams.ids import issued_ms
from streams.ports import Log, Partition
from streams.reading.range_reader import read_range
from streams.responses.reply_reader import CLOCK_MARGIN_MS
from streams.topics import BATCH, LEDGER, PROMPTS, REQUESTS, TOPICS_BY_NAME, lane_of

_HOUR_MS = 3_600_000


async def is_published(log: Log, clock: Clock, request_id: str, within_s: float) -> bool | None:
    """Whether a record has the id as its key; None if that could not be read in time."""
    key = request_id.encode()
    try:
        starts, ends = await _stretches(log, request_id)
        reading = read_range(log, clock, starts, ends, timeout_s=within_s)
        async with aclosing(reading) as pieces:
            async for piece in pieces:
                if any(record.key == key for record in piece.records):
                    return True
    except (BrokerUnavailable, AccessDenied, PositionLost, TimeoutError):
        return None
    return False


async def _stretches(
    log: Log, request_id: str
) -> tuple[dict[Partition, int], dict[Partition, int]]:
    starts, ends = {}, {}
    drawn_ms = issued_ms(request_id)
    lane = lane_of(request_id, await log.partitions(LEDGER))
    # Partitioners differ, so a prompt may be in any partition.
    every = {of: list(range(await log.partitions(of))) for of in (PROMPTS, BATCH)}
    every |= {REQUESTS: [lane], LEDGER: [lane]}
    for topic, partitions in every.items():
        oldest = await log.start_offsets(topic, partitions)
        newest = await log.end_offsets(topic, partitions)
        for partition in partitions:
            start = oldest[partition]
            if drawn_ms is not None:
                since_ms = max(0, drawn_ms - CLOCK_MARGIN_MS)
                start = max(start, await log.offset_at(topic, partition, since_ms))
            ends[Partition(topic, partition)] = newest[partition]
            starts[Partition(topic, partition)] = min(start, newest[partition])
    return starts, ends


def explain_unknown(request_id: str, now_ms: int) -> str:
    """Explain why no record of an id was found."""
    hours = (TOPICS_BY_NAME[LEDGER].retention_ms or 0) / _HOUR_MS
    drawn_ms = issued_ms(request_id)
    if drawn_ms is None:
        return (
            f"no record has this id in the last {hours:g} h, and older ones are deleted. Is the id "
            "complete, and KVLANE_TOPIC_PREFIX right?"
        )
    drawn = f"the id was issued at {format_time(drawn_ms)} UTC"
    if drawn_ms < now_ms - hours * _HOUR_MS:
        return (
            f"{drawn}, and records older than {hours:g} h are deleted. `kvlane capture` keeps a "
            "period for longer."
        )
    return f"{drawn}, but no record has it. Is the id right, and KVLANE_TOPIC_PREFIX?"
