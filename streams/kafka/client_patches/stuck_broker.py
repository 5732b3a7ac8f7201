"""Detection of a hung broker: closes connections to a broker that its cluster has fenced.

If a connection has pending requests and no response for a while, the other brokers are asked in
turn for the members of the cluster. If the broker is none, its connection is closed: the pending
requests fail, and the client repeats them at the new leaders. A member has until the request
time-out.

aiokafka alone waits for the request time-out, then may ask the same broker for the new leader, and
waits again; a consumer whose partitions change cancels its requests each time, and never times out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from weakref import WeakSet

from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.errors import KafkaError
from aiokafka.protocol.metadata import MetadataRequest

log = logging.getLogger(__name__)

LATE_FRACTION = 0.25
"""Fraction of a request time-out: without a response for that long, others are asked, each for as
long."""

LATE_S = 0.5
"""Lower bound of that time: a broker without new records answers a reader after 250 ms."""

_watched: WeakSet[AIOKafkaConnection] = WeakSet()
_looks: set[asyncio.Task[None]] = set()


def watch_connection(connection: AIOKafkaConnection) -> None:
    """Watch a connection with a pending request until all of them are answered."""
    if connection not in _watched:
        _watched.add(connection)
        _Watch(connection).go_on()


class _Watch:
    """A connection with pending requests. Times are in seconds on the clock that the client uses
    for the arrival of responses."""

    def __init__(self, connection: AIOKafkaConnection) -> None:
        self._connection = connection
        writer = connection._writer
        self._transport = None if writer is None else writer.transport
        self._timeout_s: float = connection._request_timeout
        self._late_s = max(self._timeout_s * LATE_FRACTION, LATE_S)
        self._every_s = self._late_s / 2
        self._waits_from = self._looked_at = time.monotonic()
        self._look: asyncio.Task[None] | None = None
        self._turn = 0
        """Number of checks: others are asked in turn."""

    def go_on(self) -> None:
        """Look again a little later."""
        asyncio.get_running_loop().call_later(self._every_s, self._check)

    def _check(self) -> None:
        connection = self._connection
        if connection._requests:  # none are left of a connection that is closed
            try:
                self._judge(connection, time.monotonic())
            finally:
                self.go_on()
            return
        _watched.discard(connection)
        if self._transport is not None and not connection.connected():
            # Else the socket stays open until all pending data are sent, and blocks the close of
            # the client.
            self._transport.abort()

    def _judge(self, connection: AIOKafkaConnection, now: float) -> None:
        if now - self._looked_at > 2 * self._every_s:
            # this process was stopped: responses may be buffered
            self._waits_from = now
        self._looked_at = now
        silent_s = now - max(self._waits_from, connection._last_action)
        if silent_s > self._timeout_s + self._every_s:  # the caller has timed out by now
            self._leave(CloseReason.CONNECTION_TIMEOUT, f"has not answered for {silent_s:.1f} s")
        elif silent_s > self._late_s and (self._look is None or self._look.done()):
            self._look = asyncio.create_task(self._probe_others())
            _looks.add(self._look)
            self._look.add_done_callback(_looks.discard)

    async def _probe_others(self) -> None:
        """Close the connection if the broker is not, or no longer, a member of its cluster."""
        client = getattr(self._connection._on_close_cb, "__self__", None)
        if not isinstance(client, AIOKafkaClient):
            return  # to an address that need not be that of a broker
        if self._is_member(client):
            try:
                async with asyncio.timeout(self._late_s):
                    await self._refresh(client)
            except (KafkaError, TimeoutError):
                return  # another one is asked at the next look
        if not self._is_member(client):
            self._leave(CloseReason.CONNECTION_BROKEN, "hangs and has left its cluster")

    def _is_member(self, client: AIOKafkaClient) -> bool:
        here = (self._connection.host, self._connection.port)
        return any((b.host, b.port) == here for b in client.cluster.brokers())

    async def _refresh(self, client: AIOKafkaClient) -> None:
        """Refresh the cluster metadata from another broker. Raises KafkaError, TimeoutError."""
        other = await self._other(client)
        if other is None:
            return
        cluster, topics = client.cluster, set(client._topics)
        known_ms = cluster._last_successful_refresh_ms
        question = MetadataRequest(list(topics) or None, allow_auto_topic_creation=False)
        answer = await other.send(question)
        is_latest = cluster._last_successful_refresh_ms == known_ms
        if answer.brokers and is_latest and topics == client._topics:
            cluster.update_metadata(answer)

    async def _other(self, client: AIOKafkaClient) -> AIOKafkaConnection | None:
        """A connection to another broker, to each of them in turn; None if there is none."""
        here = (self._connection.host, self._connection.port)
        ids = [b.nodeId for b in client.cluster.brokers() if (b.host, b.port) != here]
        known = [client._conns.get((node, ConnectionGroup.DEFAULT)) for node in ids]
        others = [other for other in known if other is not None and other.connected()]
        self._turn += 1
        if others:
            return others[self._turn % len(others)]
        # A task that connects, maybe to the broker that hangs, holds the lock until that is done.
        if not ids or client._get_conn_lock.locked():
            return None
        return await client._get_conn(ids[self._turn % len(ids)])

    def _leave(self, reason: CloseReason, why: str) -> None:
        connection = self._connection
        if not connection.connected():
            return
        log.warning("broker %s:%d %s", connection.host, connection.port, why)
        connection.close(reason=reason)
