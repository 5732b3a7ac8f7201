"""A server's cache events, as vLLM publishes them on a ZMQ socket, followed without gaps.

    PUB  ──SUB────► batches, numbered ──in order──► listener
    ROUTER ◄─DEALER─ the batches from a number on, when one is missing

Messages may be lost on the way, and the server may begin anew. What is missing is asked for at the
replay socket; what cannot be had is told as `EventsLost`, so that nothing that may be gone is kept
for known. When the connection breaks, nothing is known until the server's past was read again, or
shows in what it stores from then on.

Formats are `app/engine/kv_events.py`'s, what events mean `indexer/bridge.py`'s. Follows one rank.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from app.engine.contract import BlocksListener, EngineError
from app.engine.kv_events import END, EngineBatch, Numbers, Unread, read, recovered
from indexer.engine_events import AllCleared, EngineEvent, EventsLost

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""After so long without a batch the replay socket is asked whether the last ones were lost."""
CONNECT_S = 10.0
REPLAY_S = 5.0
"""From one batch of a replay to the next."""
REPLAYS = 3
"""Attempts at one gap; some servers lose parts of a long replay."""
PENDING_MESSAGES = 100_000
"""What may wait in the socket, as many as the server keeps; more are a gap."""
BEYOND = 2**62
"""No engine gets as far: a replay from here on is its end alone."""
MESSAGE_BYTES = 64 * 1024 * 1024
HOW = (
    'Start vLLM with --kv-events-config \'{"enable_kv_cache_events":true,"publisher":"zmq",'
    '"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558"}\' and set '
    "KVLANE_ATTACH_EVENTS=tcp://127.0.0.1:5557 and KVLANE_ATTACH_REPLAY=tcp://127.0.0.1:5558"
)


class ServerEvents:
    """The events of the server that publishes at `endpoint`. `replay` may be empty.

    `lost` counts how often something was missing for good, `repaired` how often it was asked for
    and came.
    """

    def __init__(self, endpoint: str, replay: str, listener: BlocksListener) -> None:
        self.unread = Unread()
        self.lost = 0
        self.repaired = 0
        self._endpoint = endpoint
        self._replay = replay
        self._listener = listener
        self._numbers = Numbers()
        self._follows = False
        """Whether the number of the next batch says what was missed; not on a new connection."""
        self._context = zmq.asyncio.Context()
        self._batches: zmq.asyncio.Socket | None = None
        self._monitor: zmq.asyncio.Socket | None = None

    async def connect(self) -> None:
        """Connect, and see that somebody is there; tells nothing yet. Raises EngineError."""
        batches = self._batches = self._socket(zmq.SUB)
        batches.rcvhwm = PENDING_MESSAGES
        self._monitor = batches.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        batches.subscribe(b"")
        try:
            batches.connect(self._endpoint)
            async with asyncio.timeout(CONNECT_S):
                await self._monitor.recv_multipart()
            if self._replay and await self._ask(BEYOND) is None:
                raise EngineError(f"{self._replay}: nobody answers to replays there. {HOW}")
        except TimeoutError as e:
            raise EngineError(f"{self._endpoint}: nobody publishes events there. {HOW}") from e
        except zmq.ZMQError as e:
            raise EngineError(f"{self._endpoint}, {self._replay}: {e}. {HOW}") from e

    async def run(self) -> None:
        """Follow the server until cancelled."""
        assert self._batches is not None
        assert self._monitor is not None
        await self._catch_up()
        batches, monitor = self._batches, self._monitor
        poller = zmq.asyncio.Poller()
        for socket in (batches, monitor):
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(await poller.poll(LOOK_S * 1000))
            if monitor in ready:
                await self._connection_changed(await monitor.recv_multipart())
            if batches in ready:
                await self._take(await batches.recv_multipart())
            if not ready and self._replay and self._follows:
                await self._look_for_more()

    def close(self) -> None:
        """Close all sockets. Idempotent."""
        self._context.destroy(linger=0)

    # --- what comes ------------------------------------------------------------------------------

    async def _take(self, frames: Sequence[bytes]) -> None:
        batch = read(frames, self.unread)
        if batch is None or batch.number == END:
            return
        if batch.rank:
            self.unread.messages += 1
            return
        if not self._follows and not await self._catch_up():
            self._follows, self._numbers.expected = True, batch.number
        if self._replay and batch.number < self._numbers.expected:
            return  # it came with a replay
        step = self._numbers.follow(batch.number)
        if step.restarted or batch.number == 0:
            self._tell([AllCleared()])
        elif step.missing:
            await self._fill(step.missing)
        self._tell(batch.events)

    async def _fill(self, missing: range) -> None:
        """Tell the events of batches that did not come."""
        found: dict[int, EngineBatch] = {}
        for _ in range(REPLAYS if self._replay else 0):
            wanted = next((n for n in missing if n not in found), None)
            if wanted is None:
                break
            for batch in await self._ask(wanted) or ():
                if batch.number in missing:
                    found[batch.number] = batch
        if len(found) == len(missing):
            self.repaired += 1
        else:
            self.lost += 1
            log.warning(
                "%d batches of cache events from %s are lost: what they told is forgotten",
                len(missing) - len(found), self._endpoint,
            )  # fmt: skip
        self._tell(recovered(missing, found.values()))

    async def _look_for_more(self) -> None:
        """The last batches may have been lost, and no later one tells it."""
        for batch in await self._ask(self._numbers.expected) or ():
            if batch.number >= self._numbers.expected:
                step = self._numbers.follow(batch.number)
                self.repaired += 1
                self._tell([*([EventsLost()] if step.missing else []), *batch.events])

    # --- connections -----------------------------------------------------------------------------

    async def _connection_changed(self, message: list[bytes]) -> None:
        if parse_monitor_message(message)["event"] != zmq.EVENT_DISCONNECTED:
            await self._catch_up()
            return
        log.warning("the connection to %s broke: what is cached there is unknown", self._endpoint)
        self._follows = False
        self.lost += 1
        assert self._batches is not None
        with suppress(zmq.Again):  # what is left may be of a life that is over
            while True:
                await self._batches.recv_multipart(zmq.NOBLOCK)
        self._tell([EventsLost()])

    async def _catch_up(self) -> bool:
        """Read the past of a server that nothing is known of; False if that cannot be."""
        past = await self._ask(0) if self._replay else None
        if past is None:
            return False
        numbers = range(past[0].number, past[-1].number + 1) if past else range(0)
        begins = EventsLost() if numbers.start else AllCleared()
        self._tell([begins, *recovered(numbers, past)])
        self._follows, self._numbers.expected = True, numbers.stop
        return True

    async def _ask(self, start: int) -> list[EngineBatch] | None:
        """The batches from a number on, as far as they come; None when nobody answers."""
        found: list[EngineBatch] = []
        async with self._dealer() as dealer:
            with suppress(TimeoutError):
                async with asyncio.timeout(REPLAY_S) as patience:
                    await dealer.send_multipart([b"", start.to_bytes(8, "big")])
                    while True:
                        batch = read(await dealer.recv_multipart(), self.unread)
                        if batch is not None and batch.number == END:
                            return found
                        patience.reschedule(asyncio.get_running_loop().time() + REPLAY_S)
                        if batch is not None and not batch.rank:
                            found.append(batch)
        return found or None

    @asynccontextmanager
    async def _dealer(self) -> AsyncGenerator[zmq.asyncio.Socket, None]:
        """A socket of its own for each replay, so that no answer is taken for that of another."""
        dealer = self._socket(zmq.DEALER)
        dealer.rcvhwm = PENDING_MESSAGES
        try:
            dealer.connect(self._replay)
            yield dealer
        finally:
            dealer.close(linger=0)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket: zmq.asyncio.Socket = self._context.socket(kind)
        socket.linger = 0
        socket.maxmsgsize = MESSAGE_BYTES
        return socket

    def _tell(self, events: Sequence[EngineEvent]) -> None:
        if events:
            self._listener(events)
