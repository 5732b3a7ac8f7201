"""Follower of a server's cache events, as vLLM publishes them on a ZMQ socket, without gaps.

    PUB  ──SUB────► batches, numbered ──in order──► listener
    ROUTER ◄─DEALER─ the batches from a number on, when one is missing

Missing batches are requested from the replay socket; lost ones become `EventsLost`, so that no
block that may be gone counts as cached. After a broken connection the cache is unknown until the
server's history was replayed; without a replay socket only blocks stored later are known. Follows
one rank.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvlane.app.engine.interface import EngineError, KvEventListener
from kvlane.app.engine.kv_events import (
    END_OF_REPLAY,
    BatchNumberTracker,
    EngineEventBatch,
    UnreadableEvents,
    decode_batch,
    recovered_events,
)
from kvlane.indexer.cache_events.engine_events import AllCleared, EngineEvent, EventsLost

log = logging.getLogger(__name__)

IDLE_CHECK_S = 5.0
"""Time without a batch after which the replay socket is asked for newer ones."""
CONNECT_TIMEOUT_S = 10.0
REPLAY_TIMEOUT_S = 5.0
"""Time limit between two batches of a replay."""
MAX_REPLAY_ATTEMPTS = 3
"""Attempts to fill a gap; some servers lose parts of a long replay."""
MAX_PENDING_MESSAGES = 100_000
"""Bound on messages in the socket, as on the server; more become a gap."""
PAST_END = 2**62
"""Beyond every batch number: a replay from here has nothing but its end."""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
SETUP_HINT = (
    'Start vLLM with --kv-events-config \'{"enable_kv_cache_events":true,"publisher":"zmq",'
    '"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558"}\' and set '
    "KVLANE_ATTACH_EVENTS_ENDPOINT=tcp://127.0.0.1:5557 and KVLANE_ATTACH_REPLAY_ENDPOINT=tcp://127.0.0.1:5558"
)


class ZmqEventFollower:
    """Follows the server that publishes at `endpoint`. `replay` may be empty."""

    def __init__(self, endpoint: str, replay: str, listener: KvEventListener) -> None:
        self._endpoint = endpoint
        self._replay = replay
        self._listener = listener
        self._unreadable = UnreadableEvents(endpoint)
        self._numbers = BatchNumberTracker()
        self._in_sequence = False
        """Whether gaps show in the number of the next batch; not on a new connection."""
        self._context = zmq.asyncio.Context()
        self._batches: zmq.asyncio.Socket | None = None
        self._monitor: zmq.asyncio.Socket | None = None

    async def connect(self) -> None:
        """Connect and check that the server answers, without events. Raises EngineError."""
        batches = self._batches = self._socket(zmq.SUB)
        batches.rcvhwm = MAX_PENDING_MESSAGES
        self._monitor = batches.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        batches.subscribe(b"")
        try:
            batches.connect(self._endpoint)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._monitor.recv_multipart()
            if self._replay and await self._request_replay(PAST_END) is None:
                raise EngineError(f"{self._replay}: no answer to a replay request. {SETUP_HINT}")
        except TimeoutError as e:
            raise EngineError(f"{self._endpoint}: no publisher of events. {SETUP_HINT}") from e
        except zmq.ZMQError as e:
            raise EngineError(f"{self._endpoint}, {self._replay}: {e}. {SETUP_HINT}") from e

    async def run(self) -> None:
        assert self._batches is not None
        assert self._monitor is not None
        await self._catch_up()
        batches, monitor = self._batches, self._monitor
        poller = zmq.asyncio.Poller()
        for socket in (batches, monitor):
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(await poller.poll(IDLE_CHECK_S * 1000))
            if monitor in ready:
                await self._connection_changed(await monitor.recv_multipart())
            if batches in ready:
                await self._take(await batches.recv_multipart())
            if not ready and self._replay and self._in_sequence:
                await self._check_for_missed()

    def close(self) -> None:
        self._context.destroy(linger=0)

    # --- batches ------------------------------------------------------------------------------

    async def _take(self, frames: Sequence[bytes]) -> None:
        batch = decode_batch(frames)
        events = self._unreadable.readable_events(batch)
        if batch is None:
            self._publish(events)
            return
        if batch.number == END_OF_REPLAY:
            return
        if batch.rank:
            return  # of another rank, which has an endpoint of its own
        if not self._in_sequence and not await self._catch_up():
            self._in_sequence, self._numbers.next_number = True, batch.number
        if self._replay and batch.number < self._numbers.next_number:
            return  # already replayed
        step = self._numbers.advance(batch.number)
        if step.is_restart or batch.number == 0:
            self._publish([AllCleared()])
        elif step.missing:
            await self._fill(step.missing)
        self._publish(events)

    async def _fill(self, missing: range) -> None:
        """Replay missing batches and pass on their events."""
        found: dict[int, EngineEventBatch] = {}
        for _ in range(MAX_REPLAY_ATTEMPTS if self._replay else 0):
            wanted = next((n for n in missing if n not in found), None)
            if wanted is None:
                break
            for batch in await self._request_replay(wanted) or ():
                if batch.number in missing:
                    found[batch.number] = batch
        if len(found) < len(missing):
            log.warning(
                "%d batches of cache events from %s are lost: its cache is partly unknown",
                len(missing) - len(found),
                self._endpoint,
            )
        self._publish(recovered_events(missing, found.values()))

    async def _check_for_missed(self) -> None:
        """Ask for newer batches: the last ones may be lost, which no later number shows."""
        for batch in await self._request_replay(self._numbers.next_number) or ():
            if batch.number >= self._numbers.next_number:
                step = self._numbers.advance(batch.number)
                self._publish([*([EventsLost()] if step.missing else []), *batch.events])

    # --- connections -----------------------------------------------------------------------------

    async def _connection_changed(self, message: list[bytes]) -> None:
        if parse_monitor_message(message)["event"] != zmq.EVENT_DISCONNECTED:
            await self._catch_up()
            return
        log.warning("the connection to %s broke: its cache is unknown", self._endpoint)
        self._in_sequence = False
        assert self._batches is not None
        with suppress(zmq.Again):  # queued messages may be from before a restart
            while True:
                await self._batches.recv_multipart(zmq.NOBLOCK)
        self._publish([EventsLost()])

    async def _catch_up(self) -> bool:
        """Replay the history of a server whose cache is unknown; False if that is impossible."""
        past = await self._request_replay(0) if self._replay else None
        if past is None:
            return False
        numbers = range(past[0].number, past[-1].number + 1) if past else range(0)
        begins = EventsLost() if numbers.start else AllCleared()
        self._publish([begins, *recovered_events(numbers, past)])
        self._in_sequence, self._numbers.next_number = True, numbers.stop
        return True

    async def _request_replay(self, start: int) -> list[EngineEventBatch] | None:
        """The batches from a number on, as far as they come; None without an answer."""
        found: list[EngineEventBatch] = []
        async with self._dealer() as dealer:
            with suppress(TimeoutError):
                async with asyncio.timeout(REPLAY_TIMEOUT_S) as timeout:
                    await dealer.send_multipart([b"", start.to_bytes(8, "big")])
                    while True:
                        batch = decode_batch(await dealer.recv_multipart())
                        if batch is not None and batch.number == END_OF_REPLAY:
                            return found
                        timeout.reschedule(asyncio.get_running_loop().time() + REPLAY_TIMEOUT_S)
                        if batch is not None and not batch.rank:
                            found.append(batch)
        return found or None

    @asynccontextmanager
    async def _dealer(self) -> AsyncGenerator[zmq.asyncio.Socket, None]:
        """A new socket for each replay, so that answers are not mixed up."""
        dealer = self._socket(zmq.DEALER)
        dealer.rcvhwm = MAX_PENDING_MESSAGES
        try:
            dealer.connect(self._replay)
            yield dealer
        finally:
            dealer.close(linger=0)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket: zmq.asyncio.Socket = self._context.socket(kind)
        socket.linger = 0
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        return socket

    def _publish(self, events: Sequence[EngineEvent]) -> None:
        if events:
            self._listener(events)
