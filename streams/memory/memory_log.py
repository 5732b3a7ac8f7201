"""One process's connection to the in-memory broker: appends, queries, readers."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Container, Coroutine, Mapping, Sequence
from typing import Any

from kvlane.streams.errors import (
    BrokerUnavailable,
    LogClosed,
    PositionLost,
    RecordTooLarge,
    TopicMismatch,
)
from kvlane.streams.memory.memory_broker import ConnectionUser, MemoryBroker, Operation
from kvlane.streams.memory.memory_member import MemoryMember
from kvlane.streams.memory.memory_writes import AppendQueue, MemoryTransactionalWriter
from kvlane.streams.memory.partition_log import Cursor, PartitionLog
from kvlane.streams.ports import Appended, Batches, Entry, Partition, RebalanceListener
from kvlane.streams.topics import MAX_RECORD_BYTES, REGISTRY, partition_of

MAX_BATCH_BYTES = 1024 * 1024
CONNECT_S, RECONNECT_S = 12.0, 0.5
"""Limit of the wait of `start` for a broker, and its retry interval, as with a real broker."""
_RECORD_OVERHEAD = 90  # bytes around key, value and headers in a batch of one record


class MemoryLog:
    """Implements `Log`: one client's connection."""

    def __init__(self, broker: MemoryBroker, client_id: str) -> None:
        self.broker = broker
        self.client_id = client_id
        self.is_killed = False
        self.suspended_at: float | None = None
        self.cut_off_at: float | None = None
        self._started = False
        self._closed = False
        self._users: dict[ConnectionUser, None] = {}
        self._lines: dict[PartitionLog, AppendQueue] = {}
        self._appending: set[asyncio.Task[Appended]] = set()
        self._writers: list[MemoryTransactionalWriter] = []

    async def start(self) -> None:
        """Connect; nothing else works before. Raises BrokerUnavailable after CONNECT_S."""
        until = self.broker.clock.now() + CONNECT_S
        while not self.broker.available:
            if self.broker.clock.now() >= until:
                raise BrokerUnavailable(f"{self.client_id}: the broker is down")
            await self.broker.clock.sleep(RECONNECT_S)
        if self._closed:
            raise LogClosed(self.client_id)
        self._started = True

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for line in self._lines.values():
            line.flush()
        for user in list(self._users):
            await user.close()

    def kill(self) -> None:
        """As kill -9: nothing more is sent, but appends that had left the process arrive later."""
        self.is_killed = True
        for line in self._lines.values():
            line.kill()
        for writer in self._writers:
            writer.kill()
        self.suspend()
        for user in self._users:
            user.cursor.clear()

    def suspend(self) -> None:
        """As SIGSTOP: the client sends no heartbeats until `resume`; sent requests still arrive."""
        if self.suspended_at is None:
            self.suspended_at = self.broker.clock.now()

    def resume(self) -> None:
        """As SIGCONT: the client continues; its groups may have rebalanced without it."""
        for user in self._users:
            if isinstance(user, MemoryMember):
                user.check_timeouts()
        if not self.is_killed:
            self.suspended_at = None

    def cut_off(self) -> None:
        """As a broken link to the coordinator of its groups, until `reconnect`."""
        if self.cut_off_at is None:
            self.cut_off_at = self.broker.clock.now()
            for user in self._users:
                if isinstance(user, MemoryMember):
                    user.watch_lease()

    def reconnect(self) -> None:
        """The coordinator can be reached again; the groups may have rebalanced meanwhile."""
        for user in self._users:
            if isinstance(user, MemoryMember):
                user.check_timeouts()
        self.cut_off_at = None
        for user in self._users:
            user.cursor.wake_up.notify()

    async def partitions(self, topic: str) -> int:
        self.check_open()
        self.broker.log(topic, 0)
        return self.broker.partitions[topic]

    async def append(self, topic: str, entry: Entry, partition: int | None = None) -> Appended:
        self.check_open()
        assert entry.key is not None or entry.value is not None, "the client of Kafka refuses it"
        if _bytes(entry) > MAX_RECORD_BYTES:
            raise RecordTooLarge(f"{topic}: {_bytes(entry)} bytes")
        if partition is None:
            assert entry.key is not None, "a record without a key needs a partition"
            self.broker.log(topic, 0)
            partition = partition_of(entry.key, self.broker.partitions[topic])
        return await self._append(topic, partition, (entry,))

    async def append_batch(self, topic: str, partition: int, entries: Sequence[Entry]) -> Appended:
        return await self._append_batch(topic, partition, entries)

    def append_many(
        self, topic: str, batches: Mapping[int, Sequence[Entry]]
    ) -> dict[int, asyncio.Future[Appended]]:
        self.check_open()
        loop = asyncio.get_running_loop()
        futures: dict[int, asyncio.Future[Appended]] = {}
        for partition, entries in batches.items():
            try:
                appending = self._append_batch(topic, partition, entries)
            except (RecordTooLarge, TopicMismatch) as e:
                futures[partition] = loop.create_future()
                futures[partition].set_exception(e)
            else:
                futures[partition] = task = loop.create_task(appending)
                self._appending.add(task)
                task.add_done_callback(self._appending.discard)
        return futures

    async def start_offsets(self, topic: str, partitions: Sequence[int]) -> dict[int, int]:
        await self._exchange(topic, partitions)
        return {p: self.broker.log(topic, p).start for p in partitions}

    async def end_offsets(self, topic: str, partitions: Sequence[int]) -> dict[int, int]:
        await self._exchange(topic, partitions)
        return {p: self.broker.log(topic, p).stable_end for p in partitions}

    async def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        await self._exchange(topic, (partition,))
        return self.broker.log(topic, partition).offset_at(timestamp_ms)

    async def committed_offsets(self, topic: str, group: str) -> dict[int, int]:
        await self._exchange(topic, ())
        return dict(self.broker.group(topic, group).committed)

    async def foreign_partitions(self, topics: Collection[str]) -> dict[str, int]:
        await self._exchange(REGISTRY, (0,))
        return {topic: self.broker.partitions.get(topic, 0) for topic in topics}

    def outside(self) -> MemoryLog:
        return self

    def transactional_writer(self, name: str) -> MemoryTransactionalWriter:
        self.check_open()
        self._writers = [writer for writer in self._writers if not writer.is_closed]
        self._writers.append(writer := MemoryTransactionalWriter(self, name))
        return writer

    def reader(
        self,
        *,
        moving: bool = True,  # noqa: ARG002  each position waits alone
        gather_s: float = 0.0,
    ) -> MemoryReader:
        self.check_open()
        reader = MemoryReader(self, gather_s)
        self._users[reader] = None
        return reader

    def member(self, topic: str, group: str, ownership: RebalanceListener) -> MemoryMember:
        self.check_open()
        member = MemoryMember(self, topic, self.broker.group(topic, group), ownership)
        self._users[member] = None
        return member

    # --- for readers and members of this connection ---

    def check_open(self) -> None:
        if self._closed or not self._started:
            raise LogClosed(f"{self.client_id}: {'closed' if self._closed else 'not started'}")

    async def check_alive(self) -> None:
        if self.is_killed:
            await asyncio.get_running_loop().create_future()  # for ever: the process is dead
        self.check_open()

    async def send_request(self, operation: Operation) -> bool:
        await self.broker.clock.sleep(self.broker.faults.latency_s(self.client_id, operation))
        await self.check_alive()
        return self.broker.faults.answered(self.client_id, operation)

    async def receive_answer(self, operation: Operation) -> None:
        if (answer_s := self.broker.faults.answer_s(self.client_id, operation)) > 0:
            await self.broker.clock.sleep(answer_s)
        if self.is_killed:
            await asyncio.get_running_loop().create_future()

    def forget(self, user: ConnectionUser) -> None:
        self._users.pop(user, None)

    async def _exchange(self, topic: str, partitions: Sequence[int]) -> None:
        self.check_open()
        if not await self.send_request("offsets") or not self.broker.available:
            raise BrokerUnavailable(f"{self.client_id}: no answer about {topic}")
        for partition in partitions or (0,):
            self.broker.expire(self.broker.log(topic, partition))
        await self.receive_answer("offsets")

    def _append_batch(
        self, topic: str, partition: int, entries: Sequence[Entry]
    ) -> Coroutine[Any, Any, Appended]:
        self.check_open()
        assert entries, "a batch holds at least one entry"
        size = sum(map(_bytes, entries))
        if size > (MAX_RECORD_BYTES if len(entries) == 1 else MAX_BATCH_BYTES):
            raise RecordTooLarge(f"{topic}: {len(entries)} entries of {size} bytes together")
        return self._append(topic, partition, tuple(entries))

    def _append(
        self, topic: str, partition: int, entries: tuple[Entry, ...]
    ) -> Coroutine[Any, Any, Appended]:
        log = self.broker.log(topic, partition)
        line = self._lines.get(log)
        if line is None:
            line = self._lines[log] = AppendQueue(self, log)
        return line.append(entries)


class MemoryReader:
    """Implements `Reader`; made by `MemoryLog.reader`."""

    def __init__(self, log: MemoryLog, gather_s: float = 0.0) -> None:
        self.cursor = Cursor()
        self._log = log
        self._gather_s = log.broker.faults.gather_s(gather_s)
        self._gathered_at = 0.0
        self._keys: Container[bytes | None] | None = None
        self._closed = False

    def assign(
        self, positions: Mapping[Partition, int], keys: Container[bytes | None] | None = None
    ) -> None:
        self._check_open()
        self._keys = keys
        self.cursor.clear()
        for name, position in positions.items():
            self.cursor.add(self._log.broker.log(*name), position)

    async def poll(self, timeout_s: float, max_records: int = 2000) -> Batches:
        self._check_open()
        broker = self._log.broker
        deadline = broker.clock.now() + timeout_s
        await self._log.send_request("poll")
        if (gathering_s := self._gathered_at - broker.clock.now()) > 0:
            await broker.clock.sleep(min(gathering_s, timeout_s))
            await self._log.check_alive()
        while True:
            self._check_open()
            if broker.available:
                self._check_positions()
                if batch := self.cursor.read(max_records):
                    if sum(map(len, batch.values())) < max_records:
                        self._gathered_at = broker.clock.now() + self._gather_s
                    return batch if self._keys is None else _chosen(batch, self._keys)
            if (wait_s := deadline - broker.clock.now()) <= 0:
                return {}
            await self.cursor.wake_up.wait(wait_s)
            await self._log.check_alive()

    def set_gather_s(self, gather_s: float) -> None:
        """After the next poll."""
        self._gather_s = self._log.broker.faults.gather_s(gather_s)

    def position(self, partition: Partition) -> int:
        return self.cursor.positions[partition]

    async def close(self) -> None:
        self._closed = True
        self.cursor.clear()
        self.cursor.wake_up.notify()
        self._log.forget(self)

    def _check_positions(self) -> None:
        for log in self.cursor.ready:
            self._log.broker.expire(log)
            if (wanted := self.cursor.positions[log.name]) < log.start:
                raise PositionLost(*log.name, wanted, log.start)

    def _check_open(self) -> None:
        self._log.check_open()
        if self._closed:
            raise LogClosed(f"reader of {self._log.client_id}")


def _chosen(batch: Batches, keys: Container[bytes | None]) -> Batches:
    chosen = {name: [r for r in records if r.key in keys] for name, records in batch.items()}
    return {name: records for name, records in chosen.items() if records}


def _bytes(entry: Entry) -> int:
    """The size of an entry in a batch of its own, roughly as the broker counts it."""
    size = _RECORD_OVERHEAD + len(entry.key or b"") + len(entry.value or b"")
    return size + sum(len(name) + len(value or b"") + 4 for name, value in entry.headers)
