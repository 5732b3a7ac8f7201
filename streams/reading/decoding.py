"""Decoding of the records of views: malformed ones are counted and skipped.

So are records of an unknown type, or of one that the topic table does not list. A record that is
marked for newer readers stops the view, unless the registry has a `Skip` of its position (`kvlane
topics skip`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import aclosing

from kvlane.streams.clock import Clock, retry_while_unavailable
from kvlane.streams.codecs import AnyRecord, decode
from kvlane.streams.errors import (
    BrokerUnavailable,
    Malformed,
    NewerRecord,
    NothingToSkip,
    PositionLost,
    RecordError,
)
from kvlane.streams.ports import Appended, Log, Partition, Record
from kvlane.streams.reading.range_reader import read_range, record_at
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import LogRecord, Skip
from kvlane.streams.topics import REGISTRY, TYPES_BY_TOPIC

log = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 30.0
"""Time limit for reading skips from the registry, before the read is restarted."""

_PREFIX = "skip/"


def skip_key(topic: str, partition: int, offset: int) -> str:
    return f"{_PREFIX}{topic}/{partition}/{offset}"


def decode_for_topic(topic: str, record: Record) -> AnyRecord:
    """Decode a record whose type belongs on this topic. Raises NewerRecord, Malformed."""
    decoded = decode(record)
    name = type(decoded).__name__
    if name not in TYPES_BY_TOPIC[topic]:
        raise Malformed(f"a {name} does not belong on {topic}")
    return decoded


class RecordDecoder:
    """Decodes the records of one reader; skips malformed ones."""

    def __init__(self, log: Log, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._logged: set[tuple[str, str]] = set()

    async def decode_records(self, source: Partition, records: Sequence[Record]) -> list[LogRecord]:
        """The decoded records, in order, without malformed ones. Raises NewerRecord."""
        log_records: list[LogRecord] = []
        for record in records:
            try:
                record_body = decode_for_topic(source.topic, record)
            except Malformed as e:
                self._skip(source, record.offset, e)
            except NewerRecord as e:
                skips = await retry_while_unavailable(
                    self._clock, lambda: read_skips(self._log, self._clock)
                )
                if (*source, record.offset) not in skips:
                    place = f"{source.topic}:{source.partition}:{record.offset}"
                    raise NewerRecord(e.required, e.version, place) from None
                self._skip(source, record.offset, e)
            else:
                log_records.append(LogRecord(record.offset, record.timestamp, record_body))
        return log_records

    def _skip(self, source: Partition, offset: int, error: RecordError) -> None:
        kind = (source.topic, type(error).__name__)
        if kind in self._logged:
            log.debug("skipping malformed record %s[%d]@%d: %s", *source, offset, error)
            return
        self._logged.add(kind)
        log.warning(
            "skipping malformed record %s[%d]@%d: %s (similar ones on %s are counted, not logged)",
            *source, offset, error, source.topic,
        )  # fmt: skip


async def write_skip(log: Log, clock: Clock, source: Partition, offset: int) -> Appended:
    """Let readers skip a record that is marked for newer ones; returns the position of the Skip.
    Raises NothingToSkip for any other record or position, BrokerUnavailable, AppendFailed."""
    place = f"{source.topic}:{source.partition}:{offset}"
    record = await record_at(log, clock, source, offset) if source.topic in TYPES_BY_TOPIC else None
    if record is None:
        raise NothingToSkip(f"no record at {place}: it does not exist, or its retention is over")
    try:
        name = type(decode_for_topic(source.topic, record)).__name__
    except NewerRecord:
        skip = Skip(source.topic, source.partition, offset)
        until = clock.now() + LOOKUP_TIMEOUT_S
        key = skip_key(source.topic, source.partition, offset)
        return await RecordPublisher(log, clock).publish(REGISTRY, key, skip, 0, until=until)
    except Malformed as e:
        raise NothingToSkip(f"the record at {place} stops no reader, it is skipped: {e}") from e
    raise NothingToSkip(f"the record at {place} stops no reader: it is a {name}")


async def read_skips(log: Log, clock: Clock) -> frozenset[tuple[str, int, int]]:
    """Topic, partition and offset of all skipped records. Raises BrokerUnavailable."""
    registry = Partition(REGISTRY, 0)
    starts = {registry: (await log.start_offsets(REGISTRY, [0]))[0]}
    ends = {registry: (await log.end_offsets(REGISTRY, [0]))[0]}
    found = set()
    try:
        async with aclosing(
            read_range(log, clock, starts, ends, timeout_s=LOOKUP_TIMEOUT_S)
        ) as pieces:
            async for piece in pieces:
                for record in piece.records:
                    if (record.key or b"").startswith(_PREFIX.encode()):
                        try:
                            record_body = decode(record)
                        except RecordError:
                            continue
                        if isinstance(record_body, Skip):
                            found.add(
                                (record_body.topic, record_body.partition, record_body.offset)
                            )
    except (TimeoutError, PositionLost) as e:
        raise BrokerUnavailable(f"cannot read the registry: {e!r}") from e
    return frozenset(found)
