"""The queue of record batches in front of a producer's sender: aiokafka's accumulator and batches.

Appends that wait for a request in flight join the last unsent batch of their partition, in order,
up to 1 MiB. Each is in one batch, so all or none of it is appended, and has one future.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Container, Iterator
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError, NotLeaderForPartitionError, TopicAuthorizationFailedError
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from kvlane.streams.kafka.client_patches.batch_sender import BatchSender
from kvlane.streams.kafka.client_patches.producer_queue import (
    MAX_BATCH_BYTES,
    PendingAppend,
    TranslateError,
)
from kvlane.streams.ports import Appended
from kvlane.streams.topics import MAX_RECORD_BYTES

LEADER_RETRY_S = 0.1


class PendingBatch:
    """One batch of a partition, with the interface of aiokafka's `MessageBatch`."""

    __slots__ = ("_data", "_queue", "appends", "created_at", "record_count", "size", "tp")

    def __init__(self, queue: BatchQueue, tp: TopicPartition) -> None:
        self.tp = tp
        self.appends: list[PendingAppend] = []
        self.size = 0
        self.record_count = 0
        self.created_at = time.monotonic()
        self._queue = queue
        self._data: Any = None

    @property
    def is_sent(self) -> bool:
        """Whether it has sequence numbers, so that it must not be changed or dropped."""
        return self._data is not None

    def add(self, append: PendingAppend) -> None:
        self.appends.append(append)
        self.size += append.size
        self.record_count += len(append.entries)

    def remove(self, append: PendingAppend) -> None:
        """Remove an append that was cancelled before the batch was sent."""
        self.appends.remove(append)
        self.size -= append.size
        self.record_count -= len(append.entries)

    def build(self, producer_id: int, producer_epoch: int, sequence: int) -> None:
        """Encode the records, with the numbers of the producer and of the first record."""
        builder = DefaultRecordBatchBuilder(
            2, 0, 0, producer_id, producer_epoch, sequence, 2 * MAX_RECORD_BYTES
        )
        write, offset = builder.append, 0
        for append in self.appends:
            for key, value, headers in append.entries:
                write(offset, None, key, value, list(headers))
                offset += 1
        self._data = builder.build()

    def get_data_buffer(self) -> Any:
        return self._data

    def done(self, base_offset: int, timestamp: int, log_start_offset: int | None = None) -> None:  # noqa: ARG002  # the sender's arguments
        if base_offset < 0:  # a repeat that the broker recognises, without its offset
            self._queue.on_acknowledged(self, KafkaError("appended, but at an unknown offset"))
            return
        if timestamp < 0:  # a topic with the time of creation
            timestamp = int(time.time() * 1000)
        offset, partition = base_offset, self.tp.partition
        for append in self.appends:
            if not append.future.done():
                append.future.set_result(Appended(partition, offset, timestamp))
            offset += len(append.entries)
        self._queue.on_acknowledged(self)

    def failure(self, exception: BaseException) -> None:
        """The batch was not acknowledged, and will not be sent again."""
        self._queue.on_failed(self, exception)


class BatchQueue:
    """The unacknowledged batches of one producer, with the interface of `MessageAccumulator`."""

    def __init__(
        self,
        translate: TranslateError,
        on_broken: Callable[[BaseException], None],
        leader_timeout_s: float,
    ) -> None:
        """`translate` makes the error of a caller; `on_broken` is called if a sent batch failed,
        which leaves a gap in the sequence numbers. A batch without a leader for `leader_timeout_s`
        fails."""
        self.size = 0
        self.heard_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._translate = translate
        self._on_broken = on_broken
        self._leader_timeout_s = leader_timeout_s
        self._unsent: dict[TopicPartition, deque[PendingBatch]] = {}
        self._in_flight: dict[PendingBatch, None] = {}
        self._producer: AIOKafkaProducer | None = None
        self._busy_nodes: Container[int] = ()
        self._work: asyncio.Future[None] = self._loop.create_future()
        self._retry: asyncio.TimerHandle | None = None
        self._empty: asyncio.Future[None] | None = None

    def attach(self, producer: AIOKafkaProducer) -> None:
        self._producer = producer
        producer._message_accumulator = self
        producer._sender._message_accumulator = self
        BatchSender.install(producer)

    def on_connected(self) -> None:
        self.heard_at = self._loop.time()

    def add(self, tp: TopicPartition, append: PendingAppend) -> None:
        queue = self._unsent.get(tp)
        if queue is None:
            queue = self._unsent[tp] = deque()
            batch = None
        else:
            batch = queue[-1]
        if batch is None or batch.is_sent or batch.size + append.size > MAX_BATCH_BYTES:
            batch = PendingBatch(self, tp)
            queue.append(batch)
        batch.add(append)
        self.size += append.size
        if not self._work.done() and not self._waits_for_node(tp):
            self._work.set_result(None)

    def give_up(self, now: float) -> bool:
        """Fail the appends whose deadline has passed (sent ones may come); whether there were
        any."""
        late = False
        for batch in list(self._batches()):
            for append in [a for a in batch.appends if a.deadline <= now]:
                if not append.future.done():
                    append.future.set_exception(self._translate(TimeoutError(), batch.tp))
                    late = True
                if not batch.is_sent:
                    batch.remove(append)
                    self.size -= append.size
            if not batch.appends:
                self._unsent[batch.tp].remove(batch)
                if not self._unsent[batch.tp]:
                    del self._unsent[batch.tp]
        self._check_empty()
        return late

    # --- for aiokafka's sender ---

    def waiter(self) -> asyncio.Future[None]:
        return self._work

    def drain_by_nodes(
        self, ignore_nodes: Container[int], muted_partitions: Container[TopicPartition] = ()
    ) -> tuple[dict[int, dict[TopicPartition, PendingBatch]], bool]:
        """The next batch of each partition by its leader; then False: unknown leaders are found
        here."""
        assert self._producer is not None
        client = self._producer.client
        self._busy_nodes = ignore_nodes
        found: dict[int, dict[TopicPartition, PendingBatch]] = {}
        for tp in list(self._unsent):
            if tp in muted_partitions:
                continue
            leader = client.cluster.leader_for_partition(tp)
            if leader is None or leader == -1:
                self._find_leader(tp)
            elif leader not in ignore_nodes and (batch := self._take(tp)) is not None:
                found.setdefault(leader, {})[tp] = batch
        if self._work.done():
            self._work = self._loop.create_future()
        return found, False

    def reenqueue(self, batch: PendingBatch) -> None:
        """Send a batch again, before all others of its partition."""
        if batch not in self._in_flight:
            return  # failed meanwhile
        del self._in_flight[batch]
        batch.created_at = time.monotonic()
        self._unsent.setdefault(batch.tp, deque()).appendleft(batch)

    def on_acknowledged(self, batch: PendingBatch, error: Exception | None = None) -> None:
        """A batch was acknowledged; with an error for its callers, if its offset is unknown."""
        self.heard_at = self._loop.time()
        if error is not None:
            self._fail(batch, error)
        self._forget(batch)

    def on_failed(self, batch: PendingBatch, error: BaseException) -> None:
        """A batch failed; if it was sent, so did the producer."""
        self._fail(batch, error)
        self._forget(batch)
        if batch.is_sent:
            self._on_broken(error)

    def fail_all(self, error: BaseException) -> None:
        for batch in self._batches():
            self._fail(batch, error)
        self._unsent.clear()
        self._in_flight.clear()
        self.size = 0
        if self._retry is not None:
            self._retry.cancel()
        self._check_empty()
        self._on_broken(error)

    async def flush(self) -> None:
        if self._unsent or self._in_flight:
            if self._empty is None:
                self._empty = self._loop.create_future()
            await asyncio.shield(self._empty)

    close = flush

    def _take(self, tp: TopicPartition) -> PendingBatch | None:
        queue = self._unsent[tp]
        batch = queue.popleft()
        if not queue:
            del self._unsent[tp]
        if not batch.is_sent:
            assert self._producer is not None
            numbers = self._producer._txn_manager
            try:
                batch.build(
                    numbers.producer_id, numbers.producer_epoch, numbers.sequence_number(tp)
                )
            except Exception as e:  # noqa: BLE001  # an entry that is not one: no other fails
                self.on_failed(batch, e)
                return None
            numbers.increment_sequence_number(tp, batch.record_count)
        self._in_flight[batch] = None
        return batch

    def _find_leader(self, tp: TopicPartition) -> None:
        """Ask for the leader of a partition, at most every `LEADER_RETRY_S`."""
        assert self._producer is not None
        client, batch = self._producer.client, self._unsent[tp][0]
        error: Exception | None = None
        if tp.topic in client.cluster.unauthorized_topics:
            error = TopicAuthorizationFailedError(tp.topic)
        elif time.monotonic() - batch.created_at > self._leader_timeout_s:
            error = NotLeaderForPartitionError()
        if error is not None:
            self._unsent[tp].popleft()
            if not self._unsent[tp]:
                del self._unsent[tp]
            self.on_failed(batch, error)
            return
        client.add_topic(tp.topic)
        if self._retry is None:
            self._retry = self._loop.call_later(LEADER_RETRY_S, self._wake_later)
            client.force_metadata_update().add_done_callback(self.look_again)

    def _wake_later(self) -> None:
        self._retry = None
        self.look_again()

    def look_again(self, _answer: object = None) -> None:
        """Wake the sender: it may have something to send, or a request has ended."""
        if not self._work.done():
            self._work.set_result(None)

    def _waits_for_node(self, tp: TopicPartition) -> bool:
        """Whether the sender is going to look by itself, after the request in flight."""
        if self._producer is None:
            return False
        return self._producer.client.cluster.leader_for_partition(tp) in self._busy_nodes

    def _batches(self) -> Iterator[PendingBatch]:
        yield from self._in_flight
        for queue in self._unsent.values():
            yield from queue

    def _fail(self, batch: PendingBatch, error: BaseException) -> None:
        for append in batch.appends:
            if not append.future.done():
                append.future.set_exception(self._translate(error, batch.tp))

    def _forget(self, batch: PendingBatch) -> None:
        """A batch has ended that is not queued."""
        self.size -= batch.size
        self._in_flight.pop(batch, None)
        self._check_empty()

    def _check_empty(self) -> None:
        if self._empty is not None and not self._unsent and not self._in_flight:
            self._empty.set_result(None)
            self._empty = None
