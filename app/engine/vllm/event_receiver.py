"""Receiver of the cache events of vLLM in this process, from its engine cores by a local socket.

    zmq_publisher.py in each engine core ──ipc──► KvEventReceiver ──► listener(events, rank)

The sender keeps no history, so a missing batch number of a rank is lost, and the listener gets
`EventsLost`. `failure`: the exception that ended the reading task.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from kvlane.app.engine.interface import KvEventListener
from kvlane.app.engine.kv_events import (
    BatchNumberTracker,
    EngineEventBatch,
    UnreadableEvents,
    decode_batch,
)
from kvlane.indexer.cache_events.engine_events import AllCleared, EngineEvent, EventsLost

log = logging.getLogger(__name__)

MAX_PENDING_MESSAGES = 10_000
"""Bound on messages in the socket, one per step of an engine core. The sender drops more, which
leaves a gap in its numbers."""


class KvEventReceiver:
    """Receives cache events from `open` to `close`."""

    def __init__(self, listener: KvEventListener) -> None:
        self.failure: BaseException | None = None
        self._listener = listener
        self._unreadable = UnreadableEvents("vLLM")
        self._numbers: defaultdict[int, BatchNumberTracker] = defaultdict(BatchNumberTracker)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._socket: Any = None
        self._reading: asyncio.Task[None] | None = None

    def open(self) -> str:
        """Start receiving; returns the endpoint for the engine cores."""
        import zmq
        import zmq.asyncio

        # not accessible to other users
        self._folder = tempfile.TemporaryDirectory(prefix="kvlane-")
        endpoint = f"ipc://{Path(self._folder.name) / 'events'}"
        self._socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        self._socket.set_hwm(MAX_PENDING_MESSAGES)
        self._socket.subscribe(b"")
        self._socket.bind(endpoint)
        self._reading = asyncio.create_task(self._read(), name="cache events of vLLM")
        self._reading.add_done_callback(self._ended)
        return endpoint

    async def close(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _ended(self, reading: asyncio.Task[None]) -> None:
        if not reading.cancelled() and (error := reading.exception()) is not None:
            log.error("the receiver of vLLM's cache events failed", exc_info=error)
            self.failure = error

    async def _read(self) -> None:
        while True:
            self._take(await self._socket.recv_multipart())

    def _take(self, frames: list[bytes]) -> None:
        batch = decode_batch(frames)
        unreadable = self._unreadable.readable_events(batch)
        if batch is None:
            self._listener(unreadable, 0)
            return
        if events := self._in_order(batch):
            self._listener(events, batch.rank)

    def _in_order(self, batch: EngineEventBatch) -> tuple[EngineEvent, ...]:
        followed = self._numbers[batch.rank].advance(batch.number)
        if followed.is_restart:
            return (AllCleared(), *batch.events)
        return (EventsLost(), *batch.events) if followed.missing else batch.events
