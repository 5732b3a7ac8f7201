"""Where the cache events of an engine in this process come in: from its cores, by a local socket.

    publisher.py in each engine core ──ipc──► Inbox ──► listener(events, rank)

The numbers of each rank are followed. The sender keeps no more than its socket does, so what is
missing is lost for good, and the listener is told so. Owns the socket and its file.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from app.engine.contract import BlocksListener
from app.engine.kv_events import EngineBatch, Numbers, Unread, read
from indexer.engine_events import AllCleared, EngineEvent, EventsLost

log = logging.getLogger(__name__)


class Inbox:
    """See the module. Open from `open` to `close`."""

    def __init__(self, listener: BlocksListener) -> None:
        self.unread = Unread()
        self._listener = listener
        self._numbers: defaultdict[int, Numbers] = defaultdict(Numbers)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._socket: Any = None
        self._reading: asyncio.Task[None] | None = None

    def open(self) -> str:
        """Begin to listen; the endpoint that cores are to be given."""
        import zmq
        import zmq.asyncio

        self._folder = tempfile.TemporaryDirectory(prefix="kvlane-")  # nobody else can enter it
        endpoint = f"ipc://{Path(self._folder.name) / 'events'}"
        self._socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        self._socket.set_hwm(0)  # bounded by the senders, who drop what they cannot keep
        self._socket.subscribe(b"")
        self._socket.bind(endpoint)
        self._reading = asyncio.create_task(self._read(), name="cache events of vLLM")
        return endpoint

    async def close(self) -> None:
        """Listen no more. Idempotent."""
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

    async def _read(self) -> None:
        while True:
            self._take(await self._socket.recv_multipart())

    def _take(self, frames: list[bytes]) -> None:
        batch = read(frames, self.unread)
        if batch is None:
            log.warning("a message of the engine's cache cannot be read: is vLLM too new?")
            return
        if events := self._in_order(batch):
            self._listener(events, batch.rank)

    def _in_order(self, batch: EngineBatch) -> tuple[EngineEvent, ...]:
        followed = self._numbers[batch.rank].follow(batch.number)
        if followed.restarted:
            return (AllCleared(), *batch.events)
        return (EventsLost(), *batch.events) if followed.missing else batch.events
