"""Leaving a broker that hangs, as soon as its cluster has left it.

Owns the watch over every connection of the clients. A broker that hangs keeps its connections open.
The client waits for its answer as long as a request may take, then looks for the new leader, maybe
at the same broker, and waits once more, while another broker leads since long ago. A consumer whose
partitions change ends its requests at every change, and never gives up at all.

So when nothing has come on a connection for a while although something was asked, the others are
asked in turn who belongs to the cluster. Whoever does not any more is left: what was asked of it
fails, and the client repeats it where the new leaders are. A broker that its cluster keeps has
until the request time-out. Knows nothing of producers and consumers, nor of what they ask.
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

LATE = 0.25
"""Of a request time-out: after so long without an answer others are asked, each for as long."""

LATE_S = 0.5
"""After less nobody is late: a reader whose broker has nothing new is answered after 250 ms."""

_watched: WeakSet[AIOKafkaConnection] = WeakSet()
_looks: set[asyncio.Task[None]] = set()


def watch(connection: AIOKafkaConnection) -> None:
    """Something was asked on this connection: look after it until all is answered."""
    if connection not in _watched:
        _watched.add(connection)
        _Watch(connection).go_on()


class _Watch:
    """One connection on which something was asked.

    Times are in seconds on the clock by which the client notes when an answer has come.
    """

    def __init__(self, connection: AIOKafkaConnection) -> None:
        self._connection = connection
        writer = connection._writer  # noqa: SLF001
        self._transport = None if writer is None else writer.transport
        self._timeout_s: float = connection._request_timeout  # noqa: SLF001
        self._late_s = max(self._timeout_s * LATE, LATE_S)
        self._every_s = self._late_s / 2
        self._waits_from = self._looked_at = time.monotonic()
        self._look: asyncio.Task[None] | None = None
        self._turn = 0
        """How many looks there were: others are asked in turn."""

    def go_on(self) -> None:
        """Look again a little later."""
        asyncio.get_running_loop().call_later(self._every_s, self._check)

    def _check(self) -> None:
        connection = self._connection
        if connection._requests:  # noqa: SLF001  # none are left of a connection that is closed
            try:
                self._judge(connection, time.monotonic())
            finally:
                self.go_on()
            return
        _watched.discard(connection)
        if self._transport is not None and not connection.connected():
            # Else the socket stays until all that is to be sent was taken, and so does who closes
            # the client.
            self._transport.abort()

    def _judge(self, connection: AIOKafkaConnection, now: float) -> None:
        if now - self._looked_at > 2 * self._every_s:  # we stood still: answers may lie there
            self._waits_from = now
        self._looked_at = now
        silent_s = now - max(self._waits_from, connection._last_action)  # noqa: SLF001
        if silent_s > self._timeout_s + self._every_s:  # whoever asked has given up by now
            self._leave(CloseReason.CONNECTION_TIMEOUT, f"has not answered for {silent_s:.1f} s")
        elif silent_s > self._late_s and (self._look is None or self._look.done()):
            self._look = asyncio.create_task(self._ask_others())
            _looks.add(self._look)
            self._look.add_done_callback(_looks.discard)

    async def _ask_others(self) -> None:
        """Leave the broker if it is not, or no longer, a member of its cluster."""
        client = getattr(self._connection._on_close_cb, "__self__", None)  # noqa: SLF001
        if not isinstance(client, AIOKafkaClient):
            return  # to an address that need not be that of a broker
        if self._is_member(client):
            try:
                async with asyncio.timeout(self._late_s):
                    await self._refresh(client)
            except (KafkaError, TimeoutError):
                return  # another one is asked at the next look
        if not self._is_member(client):
            self._leave(CloseReason.CONNECTION_BROKEN, "does not answer, and its cluster left it")

    def _is_member(self, client: AIOKafkaClient) -> bool:
        here = (self._connection.host, self._connection.port)
        return any((b.host, b.port) == here for b in client.cluster.brokers())

    async def _refresh(self, client: AIOKafkaClient) -> None:
        """Ask another broker who belongs to the cluster and who leads what.

        Raises KafkaError, TimeoutError.
        """
        other = await self._other(client)
        if other is None:
            return
        cluster, topics = client.cluster, set(client._topics)  # noqa: SLF001
        known_ms = cluster._last_successful_refresh_ms  # noqa: SLF001
        question = MetadataRequest(list(topics) or None, allow_auto_topic_creation=False)
        answer = await other.send(question)
        is_latest = cluster._last_successful_refresh_ms == known_ms  # noqa: SLF001
        if answer.brokers and is_latest and topics == client._topics:  # noqa: SLF001
            cluster.update_metadata(answer)

    async def _other(self, client: AIOKafkaClient) -> AIOKafkaConnection | None:
        """A connection to another broker, to each of them in turn; None if there is none."""
        here = (self._connection.host, self._connection.port)
        ids = [b.nodeId for b in client.cluster.brokers() if (b.host, b.port) != here]
        known = [client._conns.get((node, ConnectionGroup.DEFAULT)) for node in ids]  # noqa: SLF001
        others = [other for other in known if other is not None and other.connected()]
        self._turn += 1
        if others:
            return others[self._turn % len(others)]
        # Whoever connects holds the lock until that is done, maybe to the broker that hangs.
        if not ids or client._get_conn_lock.locked():  # noqa: SLF001
            return None
        return await client._get_conn(ids[self._turn % len(ids)])  # noqa: SLF001

    def _leave(self, reason: CloseReason, why: str) -> None:
        connection = self._connection
        if not connection.connected():
            return
        log.warning("broker %s:%d %s", connection.host, connection.port, why)
        connection.close(reason=reason)
