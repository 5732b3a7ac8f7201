"""Publishing records: encode, append, wait for the acknowledgement, retry where that is allowed.

An unacknowledged append may be in the log all the same: `publish_once` leaves the uncertainty to
the caller; `publish` repeats, for records that may be duplicated. Neither stores records. Appends
of a caller are in order if it awaits each one.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from kvlane.streams.clock import INITIAL_BACKOFF_S, MAX_BACKOFF_S, BrokerClock, Clock
from kvlane.streams.codecs import AnyRecord, encode
from kvlane.streams.errors import AppendFailed, BrokerUnavailable
from kvlane.streams.ports import Appended, Entry

log = logging.getLogger(__name__)

SLOW_APPEND_S = 1.0
"""A slower append indicates a problem that delays the appends of other processes too."""

RETRY_WAIT_S = 15.0
"""Wait of a failed append while another one to the same target is being retried."""

AppendTarget = tuple[str, object]
"""A topic, and a partition or, if the client picks it, the key."""


class OutgoingRecord(NamedTuple):
    """A record to publish, with its topic, partition and key."""

    topic: str
    partition: int
    key: str
    record: AnyRecord


class Appender(Protocol):
    """The part of a `Log` that records are published with."""

    async def append(self, topic: str, entry: Entry, partition: int | None = None) -> Appended: ...

    async def append_batch(
        self, topic: str, partition: int, entries: Sequence[Entry]
    ) -> Appended: ...

    def append_many(
        self, topic: str, batches: Mapping[int, Sequence[Entry]]
    ) -> Mapping[int, asyncio.Future[Appended]]: ...


class RecordPublisher:
    """Publishes records to one log. All methods raise RecordTooLarge, AccessDenied and LogClosed at
    once: a retry would not help."""

    def __init__(
        self, log: Appender, clock: Clock, broker_clock: BrokerClock | None = None
    ) -> None:
        self._log = log
        self._clock = clock
        self._broker_clock = broker_clock
        self._under_way: dict[object, float] = {}
        """Start times of pending appends, the oldest first."""
        self._slow_s = -math.inf
        self._repeating: dict[AppendTarget, asyncio.Event] = {}
        """Targets with an append that is being retried; set when that is over."""

    @property
    def slow_until_s(self) -> float:
        """When the latest slow append ended: now, if one is pending; -inf for never."""
        now_s, began_s = self._clock.now(), next(iter(self._under_way.values()), math.inf)
        return now_s if now_s - began_s > SLOW_APPEND_S else self._slow_s

    async def publish_once(
        self, topic: str, key: str, record: AnyRecord, partition: int | None = None
    ) -> Appended:
        """Append one record, once. Raises AppendFailed: it may or may not be in the log."""
        return await self.publish_entry_once(topic, encode(record, key), partition)

    async def publish_entry_once(
        self, topic: str, entry: Entry, partition: int | None = None
    ) -> Appended:
        return await self._observed(self._log.append(topic, entry, partition))

    async def publish_batch_once(
        self, topic: str, partition: int, records: Sequence[tuple[str, AnyRecord]]
    ) -> Appended:
        """Append (key, record) pairs to one partition in order, all or none, once. Raises
        AppendFailed, or RecordTooLarge when they do not fit into one batch of 1 MiB."""
        entries = [encode(record, key) for key, record in records]
        return await self._observed(self._log.append_batch(topic, partition, entries))

    def publish_many_once(
        self, topic: str, records: Mapping[int, Sequence[tuple[str, AnyRecord]]]
    ) -> Mapping[int, asyncio.Future[Appended]]:
        """Append (key, record) pairs to several partitions, without waiting: the future of each
        completes or raises as `publish_batch_once`."""
        return self._append_many(
            topic,
            {
                partition: [encode(record, key) for key, record in pairs]
                for partition, pairs in records.items()
            },
        )

    def _append_many(
        self, topic: str, batches: Mapping[int, Sequence[Entry]]
    ) -> Mapping[int, asyncio.Future[Appended]]:
        appending = self._log.append_many(topic, batches)
        began_at = self._clock.now()
        for appended in appending.values():
            self._under_way[appended] = began_at
            appended.add_done_callback(self._on_end)
        return appending

    async def publish(
        self,
        topic: str,
        key: str,
        record: AnyRecord,
        partition: int | None = None,
        *,
        until: float | None = None,
    ) -> Appended:
        """Append one record, retrying until acknowledged; it may be appended several times. Raises
        the last AppendFailed past `until`, a point on the clock, and errors that a retry cannot
        cure."""
        return await self.publish_entry(topic, encode(record, key), partition, until=until)

    async def publish_batch(
        self, topic: str, partition: int, records: Sequence[tuple[str, AnyRecord]]
    ) -> Appended:
        """Append pairs as `publish_batch_once` does, until they are acknowledged; as `publish`."""
        return await self._repeated(
            (topic, partition), lambda: self.publish_batch_once(topic, partition, records), None
        )

    async def publish_entries(
        self, topic: str, partition: int, entries: Sequence[Entry], *, until: float | None = None
    ) -> Appended:
        """As `publish_batch`, for encoded entries; `until` as in `publish`."""
        return await self._repeated(
            (topic, partition),
            lambda: self._observed(self._log.append_batch(topic, partition, entries)),
            until,
        )

    async def publish_together(self, *records: OutgoingRecord) -> list[Appended]:
        """Append records to different partitions at once, each as `publish`; their positions.
        Raises the first error that a retry cannot cure; the others may be in the log then."""
        appending = [
            self._append_many(topic, {partition: (encode(record, key),)})[partition]
            for topic, partition, key, record in records
        ]
        try:
            try:
                return [await first for first in appending]
            except (AppendFailed, BrokerUnavailable):
                return [
                    await self._repeated(
                        (topic, partition),
                        partial(self.publish_once, topic, key, record, partition),
                        None,
                        first,
                    )
                    for first, (topic, partition, key, record) in zip(
                        appending, records, strict=True
                    )
                ]
        finally:
            for first in appending:
                first.cancel()  # unless it has ended

    async def publish_entry(
        self, topic: str, entry: Entry, partition: int | None = None, *, until: float | None = None
    ) -> Appended:
        place = (topic, entry.key if partition is None else partition)
        return await self._repeated(
            place, lambda: self.publish_entry_once(topic, entry, partition), until
        )

    async def publish_renamed(
        self, topic: str, entries: Iterator[Entry], partition: int
    ) -> Appended:
        """As `publish_entry`, with the next entry at each attempt: on a compacted topic whose
        records count by their place, none takes the place of an earlier attempt."""
        return await self._repeated(
            (topic, partition),
            lambda: self.publish_entry_once(topic, next(entries), partition),
            None,
        )

    async def _repeated(
        self,
        place: AppendTarget,
        append: Callable[[], Awaitable[Appended]],
        until: float | None,
        first: Awaitable[Appended] | None = None,
    ) -> Appended:
        """Append until acknowledged, or past `until`. `first`: an append under way. Of failed
        appends to one target one is retried while the others wait: a partition without a leader
        costs one try a second."""
        pause_s, over = INITIAL_BACKOFF_S, None
        try:
            while True:
                try:
                    return await (append() if first is None else first)
                except (AppendFailed, BrokerUnavailable) as e:
                    left_s = math.inf if until is None else until - self._clock.now()
                    if left_s <= 0:
                        raise
                    log.warning("broker unavailable, retrying: %s", e)
                first = None
                if over is None and (other := self._repeating.get(place)) is not None:
                    await self._wait(other, min(RETRY_WAIT_S, left_s))
                    continue
                if over is None:
                    over = self._repeating[place] = asyncio.Event()
                await self._clock.sleep(min(pause_s, left_s))
                pause_s = min(2 * pause_s, MAX_BACKOFF_S)
        finally:
            if over is not None:
                del self._repeating[place]
                over.set()

    async def _wait(self, other: asyncio.Event, most_s: float) -> None:
        """Wait until another append is acknowledged or abandoned, at most `most_s`."""
        try:
            async with asyncio.timeout(most_s):
                await other.wait()
        except TimeoutError:
            pass

    async def _observed(self, appending: Awaitable[Appended]) -> Appended:
        key = object()
        self._under_way[key] = self._clock.now()
        try:
            appended = await appending
        finally:
            self._note_end(key)
        if self._broker_clock is not None:
            self._broker_clock.observe(appended.timestamp_ms)
        return appended

    def _on_end(self, appended: asyncio.Future[Appended]) -> None:
        self._note_end(appended)
        if (
            self._broker_clock is not None
            and not appended.cancelled()
            and appended.exception() is None
        ):
            self._broker_clock.observe(appended.result().timestamp_ms)

    def _note_end(self, key: object) -> None:
        now_s = self._clock.now()
        if now_s - self._under_way.pop(key) > SLOW_APPEND_S:
            self._slow_s = now_s
