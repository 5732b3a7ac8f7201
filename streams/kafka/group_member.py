"""A member of a Kafka consumer group that controls its own positions, and commits only on request.

A partition is paused when assigned, taken over by the next `poll`, which seeks to its commit, and
read after `resume`. Partitions are a lease, which ends a session time-out after the last answered
heartbeat was sent: the coordinator may then give them to another member. A process that was stopped
finds its lease over first, since the event loop calls timers before tasks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.errors import (
    CommitFailedError,
    ConsumerStoppedError,
    CorruptRecordException,
    IllegalStateError,
    KafkaError,
    NoOffsetForPartitionError,
    OffsetOutOfRangeError,
)

from kvlane.streams.errors import AppendFailed, BrokerUnavailable, LogClosed, OwnershipLost
from kvlane.streams.kafka.aiokafka_client import (
    READER_OPTIONS,
    REFUSAL_ERRORS,
    RETRY_S,
    SILENT_TIMEOUTS,
    LazyConsumer,
    to_access_denied,
)
from kvlane.streams.kafka.client_patches.client_parts import client_parts
from kvlane.streams.kafka.connection_options import KafkaSession
from kvlane.streams.ports import Batches, Partition, RebalanceListener
from kvlane.streams.topics import READ_COMMITTED

log = logging.getLogger(__name__)

_NEVER = float("inf")
HEARTBEAT_MS = 500
"""Members learn of a rebalance at their next heartbeat, which determines its duration."""


class KafkaMember:
    """Implements `Member`; made by `KafkaLog.member`. One task polls it. Without polls for five
    session time-outs it leaves the group. Errors of `revoked` are raised by the next poll."""

    def __init__(
        self, kafka: KafkaSession, topic: str, group: str, ownership: RebalanceListener
    ) -> None:
        session_ms = kafka.connection.session_timeout_ms
        self._session_s = session_ms / 1000
        self._kafka = kafka
        self._topic = topic
        self._group = kafka.prefix + group
        self._ownership = ownership
        self._client = LazyConsumer(
            {
                **kafka.options,
                **READER_OPTIONS,
                "group_id": self._group,
                "isolation_level": _isolation_level(topic),
                "partition_assignment_strategy": (RangePartitionAssignor,),
                "heartbeat_interval_ms": min(HEARTBEAT_MS, session_ms // 3),
                "session_timeout_ms": session_ms,
                # A join is answered when all members have joined or this is over, and the client
                # must not have given the request up by then. Giving up partitions takes no time.
                "rebalance_timeout_ms": max(1000, kafka.connection.request_timeout_ms - 1000),
                "max_poll_interval_ms": SILENT_TIMEOUTS * session_ms,
                # The leader of a group assigns nothing of a topic that its client does not know, as
                # after an answer of a broker that has just started, until its client asks again.
                "metadata_max_age_ms": session_ms,
            },
            kafka.request_timeout_s,
        )
        self._consumer: Any = None  # the one that is in the group
        self._granted: frozenset[int] | None = None  # given by the group, not taken over yet
        self._next: dict[int, int] = {}  # owned partitions: offset of the next record to hand out
        self._reading: set[int] = set()  # the resumed ones
        self._generation = 0
        self._unsettled_from = _NEVER  # when the rebalance began that is not over; inf: none
        self._lease_end = 0.0
        self._expiry: asyncio.TimerHandle | None = None
        self._is_cut_off = False  # the lease is over, and the group has not said more since
        self._waiting: asyncio.Timeout | None = None
        self._failure: Exception | None = None
        self._closed = False

    async def poll(self, timeout_s: float, max_records: int = 500) -> Batches:
        """The next records. Besides the port's errors: TopicMismatch, AccessDenied."""
        clock = asyncio.get_running_loop()
        deadline = clock.time() + timeout_s
        await asyncio.sleep(0)  # records that were fetched ahead are handed out without waiting
        while True:
            self._check()
            left_s = max(0.0, deadline - clock.time())
            consumer = await self._joined(left_s)
            if consumer is not None and self._granted is not None:
                await self._take_over(consumer, self._granted)
                self._check()
            left_s = max(0.0, deadline - clock.time())
            if consumer is not None and (
                batches := await self._fetch(consumer, left_s, max_records)
            ):
                return batches
            self._check()
            self._watch(clock.time())
            if clock.time() >= deadline:
                return {}

    def resume(self, partition: int) -> None:
        if self._consumer is not None and partition in self._next and not self._closed:
            self._reading.add(partition)
            self._consumer.resume(self._full(partition))

    def pause(self, partition: int, position: int | None = None) -> None:
        if self._consumer is None or partition not in self._reading or self._closed:
            return
        self._reading.discard(partition)
        self._consumer.pause(self._full(partition))
        if position is not None and position != self._next[partition]:
            self._next[partition] = position
            self._consumer.seek(self._full(partition), position)

    def end_of_gap(self, partition: int, position: int) -> int:
        consumer = self._consumer
        if consumer is None or self._next.get(partition) != position:
            return position
        if partition not in self._reading:
            return position
        return max(position, client_parts().position(consumer, self._full(partition)) or 0)

    async def commit(self, offsets: Mapping[int, int]) -> None:
        self._check_open()
        self._check_lease()
        consumer = self._consumer
        if (lost := offsets.keys() - self._next.keys()) or consumer is None:
            raise OwnershipLost(f"{self._topic}: {sorted(lost)} are not owned by this member")
        if not offsets:
            return
        try:
            # A little more than one request: cancelling one loses its error.
            async with asyncio.timeout(self._kafka.request_timeout_s + 5 * RETRY_S):
                await consumer.commit({self._full(p): offset for p, offset in offsets.items()})
        except (CommitFailedError, IllegalStateError) as e:
            raise OwnershipLost(f"{self._topic}: {self._group} has a new generation") from e
        except TimeoutError as e:
            raise AppendFailed(f"{self._topic}: no answer to a commit") from e
        except KafkaError as e:
            if isinstance(e, REFUSAL_ERRORS):
                raise to_access_denied(e, self._group) from e
            raise AppendFailed(f"{self._topic}: {e!r}") from e

    async def close(self) -> None:
        """Leave the group without a commit; the listener is not called. Idempotent."""
        self._closed = True
        if self._expiry is not None:
            self._expiry.cancel()
        self._next.clear()
        self._reading.clear()
        self._wake()
        self._kafka.forget(self)
        await self._client.close()

    # --- called by the client, through the listener ---

    def on_granted(self, consumer: Any, partitions: Iterable[TopicPartition]) -> None:
        if self._consumer is not consumer:  # one that was dropped
            return
        consumer.pause(*partitions)
        self._is_cut_off = self._lease_end <= asyncio.get_running_loop().time()
        if not self._is_cut_off:
            self._unsettled_from = _NEVER
            self._granted = frozenset(tp.partition for tp in partitions)
            self._wake()

    def on_revoked(self, consumer: Any) -> None:
        if self._consumer is consumer:
            self._is_cut_off = False
            self._release()

    def on_answer(self, consumer: Any, request: str, sent_at: float) -> None:
        """The coordinator has answered a request of a member whose assignment is valid."""
        if self._consumer is not consumer or self._closed:
            return
        loop = asyncio.get_running_loop()
        self._lease_end = end = sent_at + self._session_s
        if end <= loop.time():
            return
        if self._expiry is None:
            self._expiry = loop.call_at(end, self._expire)
        if self._is_cut_off and request == "heartbeat":
            log.info("%s: %s answers again", self._topic, self._group)
            self.on_granted(consumer, consumer.assignment())

    # --- the lease ---

    def _expire(self) -> None:
        """The lease is over, unless it was extended meanwhile."""
        self._expiry = None
        self._check_lease()
        if self._next or self._granted is not None:
            self._expiry = asyncio.get_running_loop().call_at(self._lease_end, self._expire)

    def _check_lease(self) -> None:
        if not self._next and self._granted is None:
            return
        if self._lease_end > asyncio.get_running_loop().time():
            return
        log.warning(
            "%s: no heartbeat to %s was answered for %.1f s",
            self._topic,
            self._group,
            self._session_s,
        )
        if self._reading:
            self._consumer.pause(*map(self._full, self._reading))
        self._is_cut_off = True
        self._release()

    def _release(self) -> None:
        self._generation += 1
        self._unsettled_from = asyncio.get_running_loop().time()
        self._granted = None
        owned = frozenset(self._next)
        self._next.clear()
        self._reading.clear()
        if owned and not self._closed:
            log.info("%s: giving up %s", self._topic, sorted(owned))
            try:
                self._ownership.revoked(owned)
            except Exception as e:  # noqa: BLE001  # the client would swallow it
                self._failure = e
                self._wake()

    # --- the steps of a poll ---

    async def _joined(self, timeout_s: float) -> AIOKafkaConsumer | None:
        if self._consumer is None:
            try:
                await self._kafka.partitions(self._topic)  # else asking for it might create it
                consumer = await self._client.ready(timeout_s)
            except KafkaError as e:
                raise to_access_denied(e, self._group) from e
            except BrokerUnavailable as e:
                log.warning("%s: cannot join %s yet: %s", self._topic, self._group, e)
                return None
            if consumer is None or self._closed:
                return None
            self._consumer = consumer
            self._unsettled_from = asyncio.get_running_loop().time()
            reports = client_parts().observe_answers(consumer, partial(self.on_answer, consumer))
            self._lease_end = 0.0 if reports else _NEVER
            topic = self._kafka.prefix + self._topic
            consumer.subscribe([topic], listener=_Listener(self, consumer))
        return self._consumer

    async def _take_over(self, consumer: AIOKafkaConsumer, granted: frozenset[int]) -> None:
        generation, partitions = self._generation, sorted(granted)
        try:
            async with asyncio.timeout(self._kafka.request_timeout_s):
                commits = await self._committed(consumer, partitions)
                starts = await self._kafka.start_offsets(self._topic, partitions)
        except (KafkaError, BrokerUnavailable, TimeoutError) as e:
            if isinstance(e, REFUSAL_ERRORS):
                raise to_access_denied(e, self._group) from e
            log.warning("%s: cannot fetch commits, retrying: %r", self._topic, e)
            await asyncio.sleep(RETRY_S)
            return
        if generation != self._generation or self._closed:
            return
        for partition in partitions:
            start, commit = starts[partition], commits[partition]
            if commit is not None and commit < start:
                self._alarm(partition, commit, start)
            position = start if commit is None else max(commit, start)
            consumer.seek(self._full(partition), position)
            self._next[partition] = position
        self._granted = None
        if partitions:
            log.info("%s: taking over %s", self._topic, partitions)
        self._ownership.assigned(dict(self._next))

    async def _committed(
        self, consumer: AIOKafkaConsumer, partitions: Sequence[int]
    ) -> dict[int, int | None]:
        found = await client_parts().committed(consumer, [self._full(p) for p in partitions])
        return {p: found.get(self._full(p)) for p in partitions}

    async def _fetch(
        self, consumer: AIOKafkaConsumer, timeout_s: float, max_records: int
    ) -> Batches:
        try:
            # The client waits for the end of a rebalance however long it takes; breaking its
            # waiting off loses nothing, since it does not wait between taking and returning.
            async with asyncio.timeout(timeout_s + 0.02) as self._waiting:
                found = await consumer.getmany(
                    timeout_ms=int(timeout_s * 1000), max_records=max_records
                )
        except TimeoutError:
            return {}
        except ConsumerStoppedError:
            return {}
        except KafkaError as e:
            await self._recover(consumer, e)
            return {}
        finally:
            self._waiting = None
        batches: dict[Partition, Any] = {}
        for tp, records in found.items():
            if tp.partition in self._reading:
                self._next[tp.partition] = records[-1].offset + 1
                batches[Partition(self._topic, tp.partition)] = records
        return batches

    async def _recover(self, consumer: AIOKafkaConsumer, error: KafkaError) -> None:
        """Raise errors for the caller; handle or wait out all others."""
        if isinstance(error, REFUSAL_ERRORS):
            raise to_access_denied(error, self._group) from error
        if isinstance(error, NoOffsetForPartitionError):
            return  # a partition that is not taken over yet
        if isinstance(error, OffsetOutOfRangeError):
            for tp, wanted in error.args[0].items():
                await self._go_on_inside(consumer, tp, wanted)
        elif isinstance(error, CorruptRecordException):
            log.warning("%s: %r, fetching again", self._topic, error)
            for partition in self._reading:  # a poll that fails half way has moved positions
                consumer.seek(self._full(partition), self._next[partition])
        elif consumer is self._consumer:
            self._join_anew(repr(error))
        await asyncio.sleep(RETRY_S)

    async def _go_on_inside(
        self, consumer: AIOKafkaConsumer, tp: TopicPartition, wanted: int
    ) -> None:
        partition, generation = tp.partition, self._generation
        try:
            start = (await self._kafka.start_offsets(self._topic, [partition]))[partition]
        except BrokerUnavailable:
            return  # the client reports it again
        if generation == self._generation and self._next.get(partition) == wanted:
            self._alarm(partition, wanted, start)
            self._next[partition] = start
            consumer.seek(tp, start)

    def _watch(self, now: float) -> None:
        """Rejoin if a rebalance does not end, as where addresses of brokers are gone."""
        if now - self._unsettled_from > SILENT_TIMEOUTS * self._session_s:
            self._join_anew("a rebalance does not end")

    def _join_anew(self, reason: str) -> None:
        log.warning("%s: rejoining the group %s: %s", self._topic, self._group, reason)
        self.on_revoked(self._consumer)
        self._unsettled_from = _NEVER
        self._consumer = None
        self._client.drop()

    def _alarm(self, partition: int, wanted: int, start: int) -> None:
        # One message for each lane: none may be left out as a repetition of another.
        message = (
            f"{self._topic}[{partition}]: records were deleted before they were read: "
            f"wanted {wanted}, the log starts at {start}"
        )
        log.error(message)

    def _full(self, partition: int) -> TopicPartition:
        return TopicPartition(self._kafka.prefix + self._topic, partition)

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time())

    def _check(self) -> None:
        self._check_open()
        self._check_lease()
        if (failure := self._failure) is not None:
            self._failure = None
            raise failure

    def _check_open(self) -> None:
        if self._closed:
            raise LogClosed("the member was closed")


def _isolation_level(topic: str) -> str:
    return "read_committed" if topic in READ_COMMITTED else "read_uncommitted"


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka is untyped
    """Forwards the rebalance callbacks of one consumer to its member."""

    def __init__(self, member: KafkaMember, consumer: AIOKafkaConsumer) -> None:
        self._member = member
        self._consumer = consumer

    def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:  # noqa: ARG002
        self._member.on_revoked(self._consumer)

    def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        self._member.on_granted(self._consumer, assigned)
