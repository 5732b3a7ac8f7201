"""The queue of one connection's appends to one partition, with their faults in transit."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from kvlane.streams.errors import AppendFailed
from kvlane.streams.memory.broker_faults import AppendFate
from kvlane.streams.memory.memory_connection import MemoryConnection
from kvlane.streams.memory.partition_log import PartitionLog
from kvlane.streams.ports import Appended, Entry

_UNHEARD = (AppendFate.UNREPORTED, AppendFate.LATE, AppendFate.OVERTAKEN)


class AppendQueue:
    """Appends arrive in the order of sending, also abandoned ones and those of an ended process.
    Except where the producer was replaced (`AppendFate.OVERTAKEN`)."""

    def __init__(self, client: MemoryConnection, log: PartitionLog) -> None:
        self._client = client
        self._log = log
        self._under_way: deque[_Sending] = deque()
        self._queued: deque[_Sending] = deque()
        """Abandoned appends that are still in the producer's queue."""
        self._last: _Sending | None = None

    def append(self, entries: tuple[Entry, ...]) -> Coroutine[Any, Any, Appended]:
        """Append entries after all earlier calls. Waiting raises AppendFailed."""
        sending = _Sending(entries)
        self._under_way.append(sending)
        return self._deliver(sending)

    async def _deliver(self, sending: _Sending) -> Appended:
        client, broker = self._client, self._client.broker
        if (latency_s := broker.faults.latency_s(client.client_id, "append")) > 0:
            try:
                await broker.clock.sleep(latency_s)
            except asyncio.CancelledError:  # only the caller stops waiting
                self._later(broker.faults.late_s(client.client_id), self.arrive, sending)
                raise
        self.arrive(sending)
        await broker.clock.sleep(broker.faults.answer_s(client.client_id, "append"))
        if client.is_killed:
            await client.check_alive()
        if sending.fate is AppendFate.TWICE and self._last is sending:
            broker.append(*self._log.name, sending.entries)
        if sending.appended is None or sending.fate in _UNHEARD:
            topic, partition = self._log.name
            raise AppendFailed(f"{topic}[{partition}]: no acknowledgement")
        return sending.appended

    def arrive(self, last: _Sending) -> None:
        client = self._client
        while not last.landed:
            sending = self._under_way.popleft()
            sending.landed = True
            if not client.is_killed:
                self._arrive(sending)

    def flush(self) -> None:
        if self._under_way:
            self.arrive(self._under_way[-1])

    def kill(self) -> None:
        """The process was killed: appends that had left it arrive, others are lost."""
        name, faults = self._client.client_id, self._client.broker.faults
        departed = True
        for sending in self._under_way:
            sending.landed = True
            if departed := departed and faults.departed(name):
                self._queued.append(sending)
                self._later(faults.late_s(name), self._catch_up, sending)
        self._under_way.clear()

    def _arrive(self, sending: _Sending) -> None:
        client, broker = self._client, self._client.broker
        sending.fate = broker.faults.fate(client.client_id, *self._log.name, len(sending.entries))
        if sending.fate is AppendFate.LOST or not broker.available:
            return
        if sending.fate in (AppendFate.LATE, AppendFate.OVERTAKEN):
            late_s = broker.faults.late_s(client.client_id)
            if sending.fate is AppendFate.LATE:
                self._queued.append(sending)
                self._later(late_s, self._catch_up, sending)
            else:
                self._later(late_s, broker.append, *self._log.name, sending.entries)
            return
        if self._queued:
            self._catch_up(self._queued[-1])
        sending.appended = broker.append(*self._log.name, sending.entries)
        self._last = sending

    def _catch_up(self, last: _Sending) -> None:
        """Abandoned appends up to `last` arrive, unless they have."""
        while last in self._queued:
            self._client.broker.append(*self._log.name, self._queued.popleft().entries)

    @staticmethod
    def _later(late_s: float, do: Callable[..., object], *what: object) -> None:
        """Outside of the sending process, which may be stopped or dead."""
        if late_s <= 0:
            do(*what)
        else:
            asyncio.get_running_loop().call_later(late_s, do, *what, context=Context())


class _Sending:
    __slots__ = ("appended", "entries", "fate", "landed")

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self.entries = entries
        self.landed = False
        self.fate = AppendFate.KEPT
        self.appended: Appended | None = None
