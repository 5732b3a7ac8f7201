"""Existence of records under a request id, within the retention of the log.

Reads `prompts` and `batch`, and the lane of the id in `requests` and `ledger`. Compares keys only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple

from kvlane.app.audit.time_range import format_time
from kvlane.streams.clock import Clock
from kvlane.streams.errors import AccessDenied, BrokerUnavailable, PositionLost
from kvlane.streams.ids import issued_ms
from kvlane.streams.ports import Log, Partition, Record
from kvlane.streams.reading.range_reader import Progress, read_range
from kvlane.streams.responses.reply_reader import CLOCK_MARGIN_MS
from kvlane.streams.topics import BATCH, HOUR_MS, LEDGER, PROMPTS, REQUESTS, TOPICS_BY_NAME, lane_of


class FoundRecord(NamedTuple):
    source: Partition
    record: Record


async def is_published(log: Log, clock: Clock, request_id: str, within_s: float) -> bool | None:
    """Whether a record has the id as its key; None if that could not be read in time."""
    try:
        lane = [lane_of(request_id, await log.partitions(LEDGER))]
        topics = {**await _prompt_partitions(log), REQUESTS: lane, LEDGER: lane}
        found = await _first_record(log, clock, request_id, topics, timeout_s=within_s)
    except (BrokerUnavailable, AccessDenied, PositionLost, TimeoutError):
        return None
    return found is not None


async def find_prompt(
    log: Log, clock: Clock, request_id: str, progress: Progress
) -> FoundRecord | None:
    """The prompt of an id in `prompts` or `batch`; None also without the right to read them. Raises
    BrokerUnavailable, PositionLost."""
    try:
        topics = await _prompt_partitions(log)
        return await _first_record(log, clock, request_id, topics, progress=progress)
    except AccessDenied:
        return None


async def _prompt_partitions(log: Log) -> dict[str, Sequence[int]]:
    """Partitioners differ, so a prompt may be in any partition."""
    return {topic: range(await log.partitions(topic)) for topic in (PROMPTS, BATCH)}


async def _first_record(
    log: Log,
    clock: Clock,
    request_id: str,
    topics: Mapping[str, Sequence[int]],
    *,
    timeout_s: float | None = None,
    progress: Progress = lambda _done, _total: None,
) -> FoundRecord | None:
    """The first record with the id as its key: since the time in the id, if it has one, then
    before it, as the clock of the id may have been ahead."""
    firsts, starts, ends = {}, {}, {}
    drawn_ms = issued_ms(request_id)
    for topic, numbers in topics.items():
        partitions = list(numbers)
        oldest = await log.start_offsets(topic, partitions)
        newest = await log.end_offsets(topic, partitions)
        for partition in partitions:
            start = firsts[Partition(topic, partition)] = oldest[partition]
            if drawn_ms is not None:
                since_ms = max(0, drawn_ms - CLOCK_MARGIN_MS)
                start = max(start, await log.offset_at(topic, partition, since_ms))
            ends[Partition(topic, partition)] = newest[partition]
            starts[Partition(topic, partition)] = min(start, newest[partition])
    keys = {request_id.encode()}
    for first, last in ((starts, ends), (firsts, starts)):
        reading = read_range(
            log, clock, first, last, timeout_s=timeout_s, progress=progress, keys=keys
        )
        async with aclosing(reading) as batches:
            async for source, records, _ in batches:
                if records:
                    return FoundRecord(source, records[0])
    return None


def explain_unknown(request_id: str, now_ms: int) -> str:
    hours = (TOPICS_BY_NAME[LEDGER].retention_ms or 0) / HOUR_MS
    drawn_ms = issued_ms(request_id)
    if drawn_ms is None:
        return (
            f"no record has this id in the last {hours:g} h, and older ones are deleted. Is the id "
            "complete, an x-kvlane-id and no x-request-id, and KVLANE_TOPIC_PREFIX right?"
        )
    drawn = f"the id was issued at {format_time(drawn_ms)} UTC"
    if drawn_ms < now_ms - hours * HOUR_MS:
        return (
            f"{drawn}, and records older than {hours:g} h are deleted. `kvlane capture` keeps a "
            "period for longer."
        )
    return f"{drawn}, but no record has it. Is the id right, and KVLANE_TOPIC_PREFIX?"
