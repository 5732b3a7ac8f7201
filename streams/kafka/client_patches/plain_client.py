"""aiokafka's own parts, by public names alone: for versions without tested replacements. Each
append is one batch; a task for each partition passes them on in order."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError, KafkaTimeoutError, UnknownTopicOrPartitionError

from kvlane.streams.kafka.client_patches.producer_queue import (
    PendingAppend,
    ProducerQueue,
    TranslateError,
)
from kvlane.streams.ports import Appended

_RETRY_S = 0.1
"""Pause before an append is passed on again to a producer without room, or without its topic."""


class PlainQueue:
    """Implements `ProducerQueue`."""

    def __init__(
        self, translate: TranslateError, on_broken: Callable[[BaseException], None]
    ) -> None:
        """As of `BatchQueue`; the producer itself bounds the wait for a leader."""
        self.size = 0
        self.heard_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._translate = translate
        self._on_broken = on_broken
        self._producer: AIOKafkaProducer | None = None
        self._connected = asyncio.Event()
        self._pending: dict[PendingAppend, TopicPartition] = {}
        self._waiting: dict[TopicPartition, deque[PendingAppend]] = {}
        """The pending appends that the producer does not have yet; it may be taking the first."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()

    def attach(self, producer: AIOKafkaProducer) -> None:
        self._producer = producer

    def on_connected(self) -> None:
        self.heard_at = self._loop.time()
        self._connected.set()

    def add(self, tp: TopicPartition, append: PendingAppend) -> None:
        self.size += append.size
        self._pending[append] = tp
        if tp in self._waiting:
            self._waiting[tp].append(append)
            return
        self._waiting[tp] = deque([append])
        task = asyncio.create_task(self._pass_on(tp, self._waiting[tp]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def give_up(self, now: float) -> bool:
        late = [append for append in self._pending if append.deadline <= now]
        has_failed = False
        for append in late:
            tp = self._pending[append]
            has_failed |= self._fail(append, TimeoutError())
            queue = self._waiting.get(tp, deque())
            if append in queue and append is not queue[0]:
                queue.remove(append)
                self._forget(append)
        return has_failed

    def fail_all(self, error: BaseException) -> None:
        for task in self._tasks:
            task.cancel()
        for append in list(self._pending):
            self._fail(append, error)
            self._forget(append)
        self._waiting.clear()
        self._on_broken(error)

    async def flush(self) -> None:
        while self._pending:
            self._empty.clear()
            await self._empty.wait()

    async def _pass_on(self, tp: TopicPartition, queue: deque[PendingAppend]) -> None:
        await self._connected.wait()
        while queue:
            append = queue[0]
            sent = None if append.future.done() else await self._try(tp, append)
            queue.popleft()
            if sent is None:
                self._forget(append)
            else:
                sent.add_done_callback(partial(self._on_sent, append))
        del self._waiting[tp]

    async def _try(self, tp: TopicPartition, append: PendingAppend) -> asyncio.Future[Any] | None:
        """The future of an append that the producer has taken; None for one that has failed."""
        assert self._producer is not None
        while not append.future.done():
            try:
                batch = self._producer.create_batch()
                for key, value, headers in append.entries:
                    batch.append(timestamp=None, key=key, value=value, headers=list(headers))
                sent: asyncio.Future[Any] = await self._producer.send_batch(
                    batch, tp.topic, partition=tp.partition
                )
            except (KafkaTimeoutError, UnknownTopicOrPartitionError):
                await asyncio.sleep(_RETRY_S)  # until the deadline of the append
            except Exception as e:  # noqa: BLE001  # an entry that is not one: no other fails
                self._fail(append, e)
            else:
                return sent
        return None

    def _on_sent(self, append: PendingAppend, sent: asyncio.Future[Any]) -> None:
        error = KafkaError("cancelled") if sent.cancelled() else sent.exception()
        if (tp := self._pending.get(append)) is None:
            return  # failed with all others
        if error is None:
            self.heard_at = self._loop.time()
            acknowledged = sent.result()
            if acknowledged.offset < 0:  # a repeat that the broker recognises, without its offset
                self._fail(append, KafkaError("appended, but at an unknown offset"))
            elif not append.future.done():
                at_ms = acknowledged.timestamp
                if at_ms < 0:  # a topic with the time of creation
                    at_ms = int(time.time() * 1000)
                append.future.set_result(Appended(tp.partition, acknowledged.offset, at_ms))
            self._forget(append)
        else:
            self._fail(append, error)
            self._forget(append)
            self._on_broken(error)

    def _fail(self, append: PendingAppend, error: BaseException) -> bool:
        """Whether the caller gets the error, and had no result before."""
        if append.future.done():
            return False
        append.future.set_exception(self._translate(error, self._pending[append]))
        return True

    def _forget(self, append: PendingAppend) -> None:
        del self._pending[append]
        self.size -= append.size
        if not self._pending:
            self._empty.set()


class PlainClient:
    """Implements `ClientParts`. What aiokafka does not offer is left out."""

    def new_queue(
        self,
        translate: TranslateError,
        on_broken: Callable[[BaseException], None],
        leader_timeout_s: float,  # noqa: ARG002  # bounded by the producer
    ) -> ProducerQueue:
        return PlainQueue(translate, on_broken)

    def prepare(self, consumer: AIOKafkaConsumer) -> None: ...

    def fetch_in_sessions(self, consumer: AIOKafkaConsumer) -> None: ...

    def set_gather_s(self, consumer: AIOKafkaConsumer, gather_s: float) -> None: ...

    def observe_answers(
        self,
        consumer: AIOKafkaConsumer,  # noqa: ARG002
        on_answer: Callable[[str, float], None],  # noqa: ARG002
    ) -> bool:
        return False

    def position(self, consumer: AIOKafkaConsumer, tp: TopicPartition) -> int | None: ...

    async def committed(
        self, consumer: AIOKafkaConsumer, tps: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        offsets = await asyncio.gather(*map(consumer.committed, tps))
        return {tp: o for tp, o in zip(tps, offsets, strict=True) if o is not None}

    def transaction_error(self, producer: AIOKafkaProducer) -> BaseException | None: ...
