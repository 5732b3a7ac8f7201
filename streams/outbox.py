"""Sending records: encode, append, wait for the acknowledgement, try again where that is allowed.

An append without an acknowledgement may be in the log all the same. So there are two ways to send:
`send` tries once and leaves the doubt to the caller; `persist` repeats until it is acknowledged,
for records that may stand twice. Neither keeps a record: what is not acknowledged when the
process dies is found again from the log by whoever is answerable for it.

Appends of the same caller are in order when it waits for each one. `persist` keeps that order too,
since it returns only when its record stands.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from streams.clock import BrokerClock, Clock
from streams.codecs import AnyRecord, encode
from streams.patience import until_answered
from streams.ports import Appended, Entry, Log

SLOW_S = 1.0
"""An append that takes longer says that the broker, or the way to it, is in trouble, so that those
of others are late as well. Else one takes a few milliseconds, on a busy machine a hundred."""


class Outbox:
    """Sends records through one log; feeds append times to the broker clock.

    All methods raise RecordTooLarge, Denied and LogClosed at once: repeating would not help.
    """

    def __init__(self, log: Log, clock: Clock, broker_clock: BrokerClock | None = None) -> None:
        self._log = log
        self._clock = clock
        self._broker_clock = broker_clock
        self._under_way: dict[object, float] = {}
        """Appends, the oldest first, and when they began."""
        self._slow_ms = 0

    @property
    def slow_ms(self) -> int:
        """Until when appends were slow, by the broker clock: now, if one is; 0 for never."""
        assert self._broker_clock is not None, "without a broker clock nobody can tell"
        began_at = next(iter(self._under_way.values()), None)
        if began_at is not None and self._clock.now() - began_at > SLOW_S:
            return self._broker_clock.now_ms()
        return self._slow_ms

    async def send(
        self, topic: str, key: str, record: AnyRecord, partition: int | None = None
    ) -> Appended:
        """Append one record, once. Raises AppendFailed: it may be in the log or not."""
        return await self.send_entry(topic, encode(record, key), partition)

    async def send_entry(self, topic: str, entry: Entry, partition: int | None = None) -> Appended:
        """As `send`, for an entry that is encoded already."""
        return await self._observed(self._log.append(topic, entry, partition))

    async def send_batch(
        self, topic: str, partition: int, records: Sequence[tuple[str, AnyRecord]]
    ) -> Appended:
        """Append (key, record) pairs to one partition in order, all or none, once.

        Raises AppendFailed, or RecordTooLarge when they do not fit into one batch of 1 MiB.
        """
        entries = [encode(record, key) for key, record in records]
        return await self._observed(self._log.append_batch(topic, partition, entries))

    async def persist(
        self,
        topic: str,
        key: str,
        record: AnyRecord,
        partition: int | None = None,
        *,
        until: float | None = None,
    ) -> Appended:
        """Append one record, again and again until it is acknowledged; it may stand several times.

        `until` is a point on the clock; past it the last AppendFailed goes up. Without it the only
        ends are the acknowledgement, an error that repeating cannot cure, and cancellation.
        """
        return await self.persist_entry(topic, encode(record, key), partition, until=until)

    async def persist_batch(
        self, topic: str, partition: int, records: Sequence[tuple[str, AnyRecord]]
    ) -> Appended:
        """Append pairs as `send_batch` does, until they are acknowledged; as `persist`."""
        return await until_answered(
            self._clock, lambda: self.send_batch(topic, partition, records), until=None
        )

    async def persist_entry(
        self,
        topic: str,
        entry: Entry,
        partition: int | None = None,
        *,
        until: float | None = None,
    ) -> Appended:
        """As `persist`, for an entry that is encoded already."""
        return await until_answered(
            self._clock, lambda: self.send_entry(topic, entry, partition), until=until
        )

    async def _observed(self, appending: Awaitable[Appended]) -> Appended:
        under_way, clock = self._under_way, self._broker_clock
        key, began_at = object(), self._clock.now()
        under_way[key] = began_at
        try:
            appended = await appending
        finally:
            del under_way[key]
            if clock is not None and self._clock.now() - began_at > SLOW_S:
                self._slow_ms = max(self._slow_ms, clock.now_ms())
        if clock is not None:
            clock.observe(appended.timestamp_ms)
        return appended
