"""Appending to Kafka: one idempotent producer, and its replacement after a failure.

Guarantees beyond the client's:

- Appends to one partition are in the log in the order of the calls, even if several are pending.
- After any failed delivery the producer is replaced, and all pending appends fail, since brokers
  reject batches behind a gap. So an acknowledged append is never overtaken by a later one.
- A wait ends at its deadline, or by cancellation; the append may still be in the log afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError, MessageSizeTooLargeError, RecordListTooLargeError

from kvlane.streams.errors import AppendFailed, LogClosed, RecordTooLarge, StreamError
from kvlane.streams.kafka.aiokafka_client import REFUSAL_ERRORS, start_client, to_access_denied
from kvlane.streams.kafka.client_patches.client_parts import (
    client_parts,
    close_connections,
    tasks_of,
)
from kvlane.streams.kafka.client_patches.producer_queue import (
    MAX_BATCH_BYTES,
    PendingAppend,
    ProducerQueue,
    size_bytes,
)
from kvlane.streams.ports import Appended, Entry
from kvlane.streams.topics import MAX_RECORD_BYTES

log = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 64 * 1024 * 1024
"""Bound of the queue; beyond it an append fails at once, with nothing appended. The client sends
all pending batches for a broker in one request, and brokers accept up to 100 MiB."""

OVERSIZE = (MessageSizeTooLargeError, RecordListTooLargeError)


class Producer:
    """Appends entries to partitions (by their full topic names) and waits for acknowledgements."""

    def __init__(self, options: Mapping[str, Any], request_timeout_s: float) -> None:
        """`options` are those of the connection. An append waits for three request time-outs: to
        notice a broker that hangs, to find the new leader, to append."""
        self.append_timeout_s = 3 * request_timeout_s
        self._look_every_s = request_timeout_s / 10
        self._grace_s = request_timeout_s
        self._options = dict(options)
        self._queue: ProducerQueue | None = None
        self._connecting: asyncio.Task[AIOKafkaProducer] | None = None
        """The task that connected the producer of the queue, or that is connecting it."""
        self._look_at_deadlines: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def ready(self) -> AIOKafkaProducer:
        """The producer, connected. Raises KafkaError, LogClosed."""
        self._open_queue()
        assert self._connecting is not None
        return await asyncio.shield(self._connecting)

    def append(self, to: TopicPartition, entries: Sequence[Entry]) -> asyncio.Future[Appended]:
        """Append entries as one; the future completes, or raises, as `Log.append_many`."""
        assert entries, "a batch holds at least one entry"
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Appended] = loop.create_future()
        size = size_bytes(entries)
        if size > (MAX_RECORD_BYTES if len(entries) == 1 else MAX_BATCH_BYTES):
            future.set_exception(
                RecordTooLarge(f"{_name(to)}: {len(entries)} entries of {size} bytes together")
            )
            return future
        queue = self._open_queue()
        if queue.size + size > MAX_QUEUED_BYTES and queue.size:
            future.set_exception(
                AppendFailed(f"{_name(to)}: queue full, {queue.size} bytes wait for the broker")
            )
            return future
        queue.add(to, PendingAppend(entries, size, loop.time() + self.append_timeout_s, future))
        if self._look_at_deadlines is None:
            self._look_at_deadlines = loop.call_later(self._look_every_s, self._give_up_waiting)
        return future

    async def close(self) -> None:
        """Wait for queued records, at most for one request time-out, and disconnect. Idempotent."""
        self._closed = True
        if self._look_at_deadlines is not None:
            self._look_at_deadlines.cancel()
        if (queue := self._queue) is not None:
            flushing = asyncio.create_task(queue.flush())
            await asyncio.wait({flushing}, timeout=self._grace_s)
            flushing.cancel()
            # The client's `stop` waits for ever for batches after the flush, if the broker hangs.
            self._abandon(queue, LogClosed("closed before the broker answered"))
        if self._ending:
            await asyncio.wait(self._ending, timeout=self._grace_s)
        if self._ending:
            for task in self._ending:
                task.cancel()
            await asyncio.wait(self._ending, timeout=self._grace_s)

    def _open_queue(self) -> ProducerQueue:
        """The queue of the current producer; without one, a new one begins to connect."""
        if self._closed:
            raise LogClosed("the log was closed")
        if self._queue is None:
            queue = client_parts().new_queue(
                self._translated, lambda error: self._replace(queue, error), self._grace_s
            )
            self._queue = queue
            self._connecting = asyncio.create_task(self._connect(queue))
            self._connecting.add_done_callback(lambda task: self._connected(queue, task))
        return self._queue

    async def _connect(self, queue: ProducerQueue) -> AIOKafkaProducer:
        producer = AIOKafkaProducer(
            **self._options, acks="all", enable_idempotence=True, max_batch_size=MAX_BATCH_BYTES
        )
        queue.attach(producer)
        await start_client(producer, self._options)
        return producer

    def _connected(self, queue: ProducerQueue, task: asyncio.Task[AIOKafkaProducer]) -> None:
        error = KafkaError("cancelled") if task.cancelled() else task.exception()
        if error is None:
            queue.on_connected()
        elif queue is self._queue:
            self._queue = None
            queue.fail_all(error)

    def _give_up_waiting(self) -> None:
        """End the waits whose deadline has passed. One timer for all of them, a little late."""
        self._look_at_deadlines = None
        if (queue := self._queue) is None:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        is_connected = self._connecting is not None and self._connecting.done()
        if queue.give_up(now) and is_connected and now - queue.heard_at >= self.append_timeout_s:
            # The client never drops a broker that has moved to another address, nor a record.
            self._replace(queue, KafkaError(f"no acknowledgement for {self.append_timeout_s:g} s"))
        elif queue.size:
            self._look_at_deadlines = loop.call_later(self._look_every_s, self._give_up_waiting)

    def _replace(self, queue: ProducerQueue, error: BaseException) -> None:
        """Drop a producer whose numbering is broken; the next append creates a new one."""
        if queue is self._queue:
            log.warning("replacing the Kafka producer after %r", error)
            self._abandon(queue, KafkaError(f"the producer was replaced after {error!r}"))

    def _abandon(self, queue: ProducerQueue, error: Exception) -> None:
        assert self._connecting is not None
        self._queue = None
        queue.fail_all(error)
        task = asyncio.create_task(end_unflushed(self._connecting, self.append_timeout_s))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _translated(self, error: BaseException, to: TopicPartition) -> StreamError:
        translated: StreamError
        if isinstance(error, TimeoutError):
            translated = AppendFailed(
                f"{_name(to)}: no acknowledgement in {self.append_timeout_s:g} s"
            )
        elif isinstance(error, OVERSIZE):
            translated = RecordTooLarge(f"{_name(to)}: {error}")
        elif isinstance(error, REFUSAL_ERRORS):
            translated = to_access_denied(error, _name(to))
        elif isinstance(error, LogClosed):
            translated = LogClosed(str(error))
        else:
            translated = AppendFailed(f"{_name(to)}: {error!r}")
        translated.__cause__ = error
        return translated


async def end_unflushed(connecting: asyncio.Task[AIOKafkaProducer], grace_s: float) -> None:
    """Stop a producer without flushing its queue; pending requests are awaited."""
    if not connecting.done():  # so nothing was sent
        connecting.cancel()
        await asyncio.wait({connecting}, timeout=grace_s)
    if not connecting.done() or connecting.cancelled() or connecting.exception() is not None:
        return
    producer = connecting.result()
    tasks = tasks_of(producer)
    try:
        if tasks:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=grace_s)
    finally:
        for task in tasks:
            task.cancel()  # the second one breaks off the request it waits for
        await close_connections(producer)


def _name(to: TopicPartition) -> str:
    return f"{to.topic}[{to.partition}]"
