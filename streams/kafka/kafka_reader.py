"""Reading Kafka partitions from given positions, without a group. Owns the positions, which move
only when records are returned. Never jumps: a position outside the log raises PositionLost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import ConsumerStoppedError, KafkaError, OffsetOutOfRangeError

from kvlane.streams.errors import BrokerUnavailable, LogClosed, PositionLost
from kvlane.streams.kafka.aiokafka_client import (
    MOVING_READER_OPTIONS,
    READER_OPTIONS,
    REFUSAL_ERRORS,
    RETRY_S,
    SILENT_TIMEOUTS,
    LazyConsumer,
    to_access_denied,
)
from kvlane.streams.kafka.client_patches.client_parts import client_parts
from kvlane.streams.kafka.connection_options import KafkaSession, KeyFilter
from kvlane.streams.ports import Batches, Partition, Record
from kvlane.streams.topics import READ_COMMITTED

log = logging.getLogger(__name__)

_SETTLE_EVERY_S = 0.05
_SETTLE_BYTES = 1024 * 1024
"""A broker omits partitions from a response that is too large (by default 55 MiB, here 32 MiB, both
less one batch of 8 MiB). That cannot have happened while no more than this was read."""

_GATHER_BYTES = 1024 * 1024
"""A broker answers a reader that gathers records when it has so many bytes, or after its time; an
idle reader at the first record (`streams/kafka/client_patches/session_fetcher.py`)."""

_PATIENCE = 0.75
"""Fraction of the request time-out: a broker answers a reader in 250 ms."""


class KafkaReader:
    """Implements `Reader`; made by `KafkaLog.reader`. One task polls it."""

    def __init__(self, kafka: KafkaSession, *, moving: bool, gather_s: float = 0.0) -> None:
        self._kafka = kafka
        self._gather_s = gather_s
        timeout_ms = int(1000 * _PATIENCE * kafka.request_timeout_s)
        reading = dict(MOVING_READER_OPTIONS if moving else READER_OPTIONS)
        if gather_s:
            reading |= {"fetch_min_bytes": _GATHER_BYTES, "fetch_max_wait_ms": int(1000 * gather_s)}
        self._selection = KeyFilter()
        options = {
            **kafka.options,
            **reading,
            "request_timeout_ms": timeout_ms,
            "key_deserializer": self._selection,
        }
        self._options = options
        self._is_committed = False
        self._client = LazyConsumer(options, kafka.request_timeout_s)
        self._consumer: AIOKafkaConsumer | None = None  # the one with the assignment
        self._names: dict[TopicPartition, Partition] = {}
        self._next: dict[TopicPartition, int] = {}  # offset of the next record to hand out
        self._settled: dict[TopicPartition, int] = {}  # the results of `position`
        self._tails = _Tails()
        self._settle_from = 0.0
        self._silence_s = SILENT_TIMEOUTS * kafka.request_timeout_s
        self._silent_from = 0.0
        self._answered_ms = 0
        self._changed = asyncio.Event()
        self._closed = False

    def assign(
        self, positions: Mapping[Partition, int], keys: Container[bytes | None] | None = None
    ) -> None:
        self._check_open()
        self._selection.keys = keys
        self._names = {self._kafka.full_name(name): name for name in positions}
        self._next = {tp: positions[name] for tp, name in self._names.items()}
        self._settled = dict(self._next)
        self._tails = _Tails()
        if not self._is_committed and any(name.topic in READ_COMMITTED for name in positions):
            self._read_committed()
        if self._consumer is not None:
            self._configure(self._consumer)
        self._changed.set()

    async def poll(self, timeout_s: float, max_records: int = 2000) -> Batches:
        """The next records. Besides the port's errors: TopicMismatch, AccessDenied."""
        self._check_open()
        clock = asyncio.get_running_loop()
        deadline = clock.time() + timeout_s
        await asyncio.sleep(0)  # records that were fetched ahead are handed out without waiting
        consumer = await self._ready(timeout_s)
        self._check_open()
        left_s = max(0.0, deadline - clock.time())
        if consumer is None:
            await self._wait(left_s)
            return {}
        try:
            found = await consumer.getmany(timeout_ms=int(left_s * 1000), max_records=max_records)
            batches = self._take(found)
            if sum(map(len, found.values())) < max_records:  # nothing fetched is left behind
                is_selecting = self._selection.keys is not None  # positions run ahead of records
                await self._settle(consumer, clock.time(), idle=not found or is_selecting)
            self._watch(clock.time(), idle=not found)
        except ConsumerStoppedError:
            batches = {}
        except KafkaError as e:
            await self._recover(consumer, e)
            await self._wait(min(RETRY_S, max(0.0, deadline - clock.time())))
            batches = {}
        self._check_open()
        return batches

    def set_gather_s(self, gather_s: float) -> None:
        """Only of a reader that was made to gather records."""
        assert self._gather_s, "the first requests of a consumer decide"
        self._gather_s = gather_s
        if self._consumer is not None:
            client_parts().set_gather_s(self._consumer, gather_s)

    def position(self, partition: Partition) -> int:
        return self._settled[self._kafka.full_name(partition)]

    async def close(self) -> None:
        self._closed = True
        self._changed.set()
        self._kafka.forget(self)
        await self._client.close()

    async def _ready(self, timeout_s: float) -> AIOKafkaConsumer | None:
        """The consumer with the assignment; None when there is none to read from yet."""
        if not self._next:
            return None
        if self._consumer is None:
            try:
                for topic in {name.topic for name in self._names.values()}:
                    await self._kafka.partitions(topic)  # else asking for it might create it
                consumer = await self._client.ready(timeout_s)
            except KafkaError as e:
                raise to_access_denied(e, "reading") from e
            except BrokerUnavailable:
                return None
            if consumer is not None and not self._closed:
                self._configure(consumer)
                self._consumer = consumer
                self._silent_from = asyncio.get_running_loop().time()
        return self._consumer

    def _read_committed(self) -> None:
        """Leave out records of transactions that are aborted or not over."""
        assert not self._client.is_used, "the isolation level is that of the first assignment"
        self._is_committed = True
        options = {**self._options, "isolation_level": "read_committed"}
        self._client = LazyConsumer(options, self._kafka.request_timeout_s)

    def _configure(self, consumer: AIOKafkaConsumer) -> None:
        if self._gather_s:
            client_parts().set_gather_s(consumer, self._gather_s)
        consumer.assign(list(self._next))
        self._seek(consumer)

    def _seek(self, consumer: AIOKafkaConsumer) -> None:
        for tp, offset in self._next.items():
            consumer.seek(tp, offset)

    def _take(self, found: Mapping[TopicPartition, list[Record]]) -> Batches:
        batches: dict[Partition, list[Any]] = {}
        keys = self._selection.keys
        for tp, records in found.items():
            if (name := self._names.get(tp)) is not None:  # not if `assign` was called meanwhile
                self._next[tp] = self._settled[tp] = records[-1].offset + 1
                chosen = records if keys is None else [r for r in records if r.key in keys]
                if chosen:
                    batches[name] = chosen
        self._tails.read(found)
        return batches

    async def _settle(self, consumer: AIOKafkaConsumer, now: float, *, idle: bool) -> None:
        """Move positions over gaps that compaction and retention have left."""
        if not idle and now < self._settle_from:
            return
        self._settle_from = now + _SETTLE_EVERY_S
        behind = {}
        answered_ms = 0
        for tp in self._next:
            # Does not wait: every partition has a position since `assign`.
            position = await consumer.position(tp)
            self._settled[tp] = max(self._settled[tp], position)
            ends = consumer.last_stable_offset if self._is_committed else consumer.highwater
            end = ends(tp)
            at_ms = consumer.last_poll_timestamp(tp)
            answered_ms = max(answered_ms, at_ms or 0)
            if end is not None and self._settled[tp] < end:
                behind[tp] = _LastResponse(position, at_ms, end)
        self._settled |= self._tails.look(behind)
        if answered_ms != self._answered_ms:
            self._answered_ms, self._silent_from = answered_ms, now

    def _watch(self, now: float, *, idle: bool) -> None:
        """Reconnect after a long time without responses."""
        if not idle:
            self._silent_from = now
        elif now - self._silent_from > self._silence_s:
            log.warning("no response for %.0f s, reconnecting", now - self._silent_from)
            self._silent_from = now
            self._consumer = None
            self._client.drop()

    async def _recover(self, consumer: AIOKafkaConsumer, error: KafkaError) -> None:
        """Raise errors for the caller; any other is an outage, to be waited out."""
        if isinstance(error, REFUSAL_ERRORS):
            raise to_access_denied(error, "reading") from error
        if consumer is not self._consumer:
            return
        # A poll that fails half way has moved positions over records that were not returned.
        self._seek(consumer)
        if isinstance(error, OffsetOutOfRangeError):
            for tp, wanted in error.args[0].items():
                if self._next.get(tp) == wanted:
                    await self._check_inside(tp, wanted, error)
        else:
            log.warning("reading failed, retrying: %r", error)

    async def _check_inside(self, tp: TopicPartition, wanted: int, cause: KafkaError) -> None:
        topic, partition = self._names[tp]
        try:
            start = (await self._kafka.start_offsets(topic, [partition]))[partition]
            end = (await self._kafka.end_offsets(topic, [partition]))[partition]
        except BrokerUnavailable:
            return
        if not start <= wanted <= end:
            raise PositionLost(topic, partition, wanted, start) from cause

    async def _wait(self, timeout_s: float) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _check_open(self) -> None:
        if self._closed:
            raise LogClosed("the reader was closed")


class _LastResponse(NamedTuple):
    """The last response about a partition: the fetch position, the time, and the end offset."""

    position: int
    at_ms: int
    end: int


class _Tails:
    """Detects that the rest of a partition contains no records.

    A fetch at position p that returned no record while the log reached to h shows that [p, h) is
    gone. Such a response arrived between two checks if the position did not change and little was
    read; a further check ensures empty buffers.
    """

    def __init__(self) -> None:
        self._positions: dict[TopicPartition, int] = {}
        self._first: dict[TopicPartition, _LastResponse] = {}
        self._empty: dict[TopicPartition, _LastResponse] = {}
        self._bytes = 0

    def read(self, found: Mapping[TopicPartition, list[Record]]) -> None:
        if self._first:
            self._bytes += sum(
                len(r.key or b"") + len(r.value or b"") + 100
                for records in found.values()
                for r in records
            )

    def look(self, behind: Mapping[TopicPartition, _LastResponse]) -> dict[TopicPartition, int]:
        """Ends of partitions without a record before them; only with an empty client buffer.
        `behind`: the latest answers about partitions that seem to have more."""
        ends: dict[TopicPartition, int] = {}
        first: dict[TopicPartition, _LastResponse] = {}
        empty: dict[TopicPartition, _LastResponse] = {}
        too_much = self._bytes > _SETTLE_BYTES
        for tp, answer in behind.items():
            if self._positions.get(tp) != answer.position:
                continue
            before, known = self._first.get(tp), self._empty.get(tp)
            if known is not None and known.position == answer.position:
                ends[tp] = known.end
            elif before is None or before.position != answer.position or too_much:
                first[tp] = answer
            elif before.at_ms == answer.at_ms:
                first[tp] = before
            else:
                empty[tp] = answer
        self._first, self._empty = first, empty
        self._positions = {tp: answer.position for tp, answer in behind.items()}
        if too_much or not first:
            self._bytes = 0
        return ends
