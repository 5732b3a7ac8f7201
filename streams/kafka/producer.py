"""Appending to Kafka: one idempotent producer, and its replacement after a failure.

Owns the producer of a process and the queue in front of the broker. Guarantees, beyond what the
client does:

- Appends to one partition are in the log in the order of the calls, even if several are pending.
- An idempotent producer numbers its batches; one that is abandoned leaves a gap in the numbers,
  and the broker rejects all later ones. So after any failed delivery the producer is replaced,
  and all pending appends fail with the same error: an acknowledged append is never overtaken by
  one that was called later and acknowledged.
- A wait ends at its deadline, though the client never drops a batch: a queued one may still be
  appended afterwards. The same holds for a cancelled caller.

An append of 8 records on each of 32 partitions takes 41 us of CPU, 32 of them the client's; each
record more takes 1 us.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import (
    KafkaError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
    UnknownTopicOrPartitionError,
)
from aiokafka.structs import RecordMetadata

from streams.errors import (
    AppendFailed,
    LogClosed,
    RecordTooLarge,
    StreamError,
)
from streams.kafka.aiokafka_client import REFUSAL_ERRORS, RETRY_S, start_client, to_access_denied
from streams.ports import Appended, Entry
from streams.topics import MAX_RECORD_BYTES

log = logging.getLogger(__name__)

MAX_BATCH_BYTES = 1024 * 1024
MAX_QUEUED_BYTES = 64 * 1024 * 1024
"""Bound of the queue; beyond it an append fails at once, with nothing appended. The client sends
all pending batches for a broker in one request, and brokers accept up to 100 MiB."""

_ENTRY_BYTES = 100  # around key and value, roughly
_OVERSIZE = (MessageSizeTooLargeError, RecordListTooLargeError)
_HARMLESS = (*_OVERSIZE, *REFUSAL_ERRORS)
"""Raised before anything was queued, so that the numbering is still intact."""

_Sent = asyncio.Future[RecordMetadata]
_Put = Callable[[AIOKafkaProducer], Awaitable[_Sent]]
_Queued = tuple[AIOKafkaProducer, _Sent]


class _PendingAppend(NamedTuple):
    """A pending append: its future, its size in bytes, and its deadline."""

    future: asyncio.Future[RecordMetadata]
    size: int
    deadline: float


class Producer:
    """Appends entries to partitions (by their full topic names) and waits for acknowledgements."""

    def __init__(self, options: Mapping[str, Any], request_timeout_s: float) -> None:
        """`options` are those of the connection.

        An append waits for three request time-outs: a broker that hangs, and that its cluster
        keeps, costs one until it is noticed, finding the new leader may ask the same broker once
        more, and then there must be time left to append.
        """
        self.append_timeout_s = 3 * request_timeout_s
        self._look_every_s = request_timeout_s / 10
        self._grace_s = request_timeout_s
        self._options = dict(options)
        self._producer: AIOKafkaProducer | None = None
        self._starting = asyncio.Lock()
        self._turns: defaultdict[TopicPartition, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._sent: dict[_Sent, _PendingAppend] = {}
        self._queued_bytes = 0
        self._heard_at = 0.0
        self._look_at_deadlines: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    async def ready(self) -> AIOKafkaProducer:
        """The producer, connected. Raises KafkaError, LogClosed."""
        if self._producer is None:
            async with self._starting:
                if self._producer is None:
                    self._producer = await self._start()
        return self._producer

    async def append(self, to: TopicPartition, entry: Entry) -> Appended:
        """Append one entry. Raises as `Log.append`."""

        async def put(producer: AIOKafkaProducer) -> _Sent:
            sent: _Sent = await producer.send(
                to.topic, entry.value, entry.key, to.partition, headers=list(entry.headers)
            )
            return sent

        return await self._deliver(to, _bytes(entry), put)

    async def append_batch(self, to: TopicPartition, entries: Sequence[Entry]) -> Appended:
        """Append entries as one batch. Raises as `Log.append_batch`."""
        assert entries, "a batch holds at least one entry"

        async def put(producer: AIOKafkaProducer) -> _Sent:
            batch = producer.create_batch()
            append = batch.append
            for key, value, headers in entries:
                append(timestamp=None, key=key, value=value, headers=list(headers))
            # A full batch takes nothing more, but its first record whatever its size.
            if batch.record_count() < len(entries) or batch.size() > MAX_BATCH_BYTES:
                raise RecordTooLarge(
                    f"{_name(to)}: {len(entries)} entries exceed {MAX_BATCH_BYTES} bytes"
                )
            batch.close()  # else single appends would be put into it
            sent: _Sent = await producer.send_batch(batch, to.topic, partition=to.partition)
            return sent

        return await self._deliver(to, sum(map(_bytes, entries)), put)

    async def close(self) -> None:
        """Wait for what is queued, at most for one request time-out, and disconnect. Idempotent."""
        self._closed = True
        if self._look_at_deadlines is not None:
            self._look_at_deadlines.cancel()
        producer, self._producer = self._producer, None
        if producer is not None:
            flushing = asyncio.create_task(producer.flush())
            await asyncio.wait({flushing}, timeout=self._grace_s)
            flushing.cancel()
            # Its own `stop` waits for ever for what came after the flush, if the broker hangs.
            self._abandon(producer, LogClosed("closed before the broker answered"))
        if self._ending:
            await asyncio.wait(self._ending, timeout=self._grace_s)
        if self._ending:
            for task in self._ending:
                task.cancel()
            await asyncio.wait(self._ending, timeout=self._grace_s)

    async def _deliver(self, to: TopicPartition, size: int, put: _Put) -> Appended:
        if self._queued_bytes + size > MAX_QUEUED_BYTES and self._queued_bytes:
            raise AppendFailed(
                f"{_name(to)}: queue full, {self._queued_bytes} bytes wait for the broker"
            )
        deadline = asyncio.get_running_loop().time() + self.append_timeout_s
        try:
            sent = await (await self._queue(to, size, put, deadline))
        except TimeoutError as e:
            self._lose_patience()
            raise AppendFailed(
                f"{_name(to)}: no acknowledgement in {self.append_timeout_s:g} s"
            ) from e
        except KafkaError as e:
            raise _translated(e, to) from e
        if sent.offset < 0:  # a repeat that the broker knows, but no longer where it stands
            raise AppendFailed(f"{_name(to)}: appended, but at an unknown offset")
        return Appended(sent.partition, sent.offset, sent.timestamp)

    async def _queue(self, to: TopicPartition, size: int, put: _Put, deadline: float) -> _Sent:
        """Queue one entry or batch in order; the future completes with its acknowledgement.

        It is not the client's future: that one must be awaited even if the caller is gone, because
        an error breaks the producer for all appends.
        """
        self._queued_bytes += size
        try:
            turn = self._turns[to]
            if turn.locked():
                async with asyncio.timeout_at(deadline):
                    await turn.acquire()
            else:
                await turn.acquire()
            try:
                producer, sent = await self._put(to, put, deadline)
            finally:
                turn.release()
        except BaseException:
            self._queued_bytes -= size
            raise
        loop = asyncio.get_running_loop()
        waiter = _PendingAppend(loop.create_future(), size, deadline)
        self._sent[sent] = waiter
        sent.add_done_callback(partial(self._settle, producer))
        if self._look_at_deadlines is None:
            self._look_at_deadlines = loop.call_later(self._look_every_s, self._give_up_waiting)
        return waiter.future

    async def _put(self, to: TopicPartition, put: _Put, deadline: float) -> _Queued:
        """Pass it to the client once it is connected, has room, and knows the partition."""
        # Nearly always the first try is the last. It goes without a deadline, which would cost as
        # much as all the rest here (5 of 11 us): to a partition that it knows, the client waits for
        # room only, one request time-out at most.
        producer = self._producer
        if producer is not None and producer.client.cluster.leader_for_partition(to) is not None:
            queued = await self._try(producer, to, put)
            if queued is not None:
                return queued
        async with asyncio.timeout_at(deadline):
            while True:
                queued = await self._try(await self.ready(), to, put)
                if queued is not None:
                    return queued
                await asyncio.sleep(RETRY_S)

    async def _try(
        self, producer: AIOKafkaProducer, to: TopicPartition, put: _Put
    ) -> _Queued | None:
        """Pass it to the client; None if it had no room, or did not know the partition.

        The caller has checked that the partition exists. The client looks it up at the first write
        and after every change of the cluster, and fails while no broker that knows it answers.
        """
        try:
            sent = await put(producer)
        except (KafkaTimeoutError, UnknownTopicOrPartitionError):
            return None
        except (AssertionError, ValueError):  # how the client says "unrecognized partition"
            if to.partition in (producer.client.cluster.partitions_for_topic(to.topic) or ()):
                raise
            producer.client.force_metadata_update()
            return None
        except _HARMLESS:
            raise
        except KafkaError as e:
            self._replace(producer, e)
            raise
        self._check_open()
        if producer is not self._producer:
            raise KafkaError("the producer was replaced")
        return producer, sent

    def _give_up_waiting(self) -> None:
        """End the waits whose deadline has passed. One timer for all of them, a little late."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for waiter in self._sent.values():
            if waiter.deadline <= now and not waiter.future.done():
                waiter.future.set_exception(TimeoutError())
        self._look_at_deadlines = (
            loop.call_later(self._look_every_s, self._give_up_waiting) if self._sent else None
        )

    def _settle(self, producer: AIOKafkaProducer, sent: _Sent) -> None:
        error = KafkaError("cancelled") if sent.cancelled() else sent.exception()
        waiter = self._sent.pop(sent, None)
        if waiter is None:
            return  # of a replaced producer; the caller has its error
        self._queued_bytes -= waiter.size
        if error is not None:
            if not waiter.future.done():
                waiter.future.set_exception(error)
            self._replace(producer, error)
            return
        self._heard_at = asyncio.get_running_loop().time()
        if not waiter.future.done():
            waiter.future.set_result(sent.result())

    def _lose_patience(self) -> None:
        """Reconnect if no append was acknowledged for as long as one waits.

        The client never drops a broker that has moved to another address, nor a record.
        """
        now = asyncio.get_running_loop().time()
        if self._producer is not None and now - self._heard_at >= self.append_timeout_s:
            self._replace(
                self._producer, KafkaError(f"no acknowledgement for {self.append_timeout_s:g} s")
            )

    def _replace(self, producer: AIOKafkaProducer, error: BaseException) -> None:
        """Drop a producer whose numbering is broken; the next append creates a new one."""
        if producer is self._producer:
            log.warning("replacing the Kafka producer after %r", error)
            self._producer = None
            self._abandon(producer, KafkaError(f"the producer was replaced after {error!r}"))

    def _abandon(self, producer: AIOKafkaProducer, error: Exception) -> None:
        for waiter in self._sent.values():
            self._queued_bytes -= waiter.size
            if not waiter.future.done():
                waiter.future.set_exception(error)
        self._sent.clear()
        task = asyncio.create_task(_end_unflushed(producer, self.append_timeout_s))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _start(self) -> AIOKafkaProducer:
        self._check_open()
        producer = AIOKafkaProducer(
            **self._options,
            acks="all",
            enable_idempotence=True,
            linger_ms=0,
            max_batch_size=MAX_BATCH_BYTES,
            # What is larger is refused here: a refusal by the broker would break the numbering.
            max_request_size=MAX_RECORD_BYTES,
        )
        await start_client(producer, self._options)
        try:
            self._check_open()
        except LogClosed:
            await producer.stop()
            raise
        self._heard_at = asyncio.get_running_loop().time()
        return producer

    def _check_open(self) -> None:
        if self._closed:
            raise LogClosed("the log was closed")


async def _end_unflushed(producer: AIOKafkaProducer, grace_s: float) -> None:
    """Stop a producer without flushing its queue.

    Its `stop` would wait for the queue, possibly for ever. Pending requests are awaited, since the
    client does not end them properly once the connections are closed.
    """
    sender = producer._sender.sender_task  # noqa: SLF001
    try:
        if sender is not None:
            sender.cancel()
            await asyncio.wait({sender}, timeout=grace_s)
    finally:
        if sender is not None and not sender.done():
            sender.cancel()  # the second one breaks off the request it waits for
        await producer.client.close()
        producer._closed = True  # noqa: SLF001  # else its destructor complains


def _translated(error: KafkaError, to: TopicPartition) -> StreamError:
    if isinstance(error, _OVERSIZE):
        return RecordTooLarge(f"{_name(to)}: {error}")
    if isinstance(error, REFUSAL_ERRORS):
        return to_access_denied(error, _name(to))
    return AppendFailed(f"{_name(to)}: {error!r}")


def _name(to: TopicPartition) -> str:
    return f"{to.topic}[{to.partition}]"


def _bytes(entry: Entry) -> int:
    return len(entry.key or b"") + len(entry.value or b"") + _ENTRY_BYTES
