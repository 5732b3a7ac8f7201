"""Leaving a broker that hangs, as soon as its cluster has left it.

Owns the watch over every connection of the clients. A broker that hangs keeps its connections open.
The client waits for its answer as long as a request may take, then looks for the new leader, maybe
at the same broker, and waits once more, while another broker leads since long ago. A consumer whose
partitions change ends its requests at every change, and never gives up at all.

So when nothing has come on a connection for a while although something was asked, another broker is
asked who belongs to the cluster. Whoever does not any more is left: what was asked of it fails, and
the client repeats it where the new leaders are. A broker that its cluster keeps has until the
request time-out. Knows nothing of topics, of producers and of consumers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any
from weakref import WeakSet

from aiokafka.client import AIOKafkaClient
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.errors import KafkaError
from aiokafka.protocol.metadata import MetadataRequest

log = logging.getLogger(__name__)

LATE = 0.25
"""Of a request time-out: after so long without an answer others are asked. A broker answers a
reader in 250 ms; when it is merely slow, asking costs little."""

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
        self._timeout_s: float = connection._request_timeout  # noqa: SLF001
        self._every_s = self._timeout_s * LATE / 2
        self._waits_from = self._looked_at = time.monotonic()
        self._look: asyncio.Task[None] | None = None
        self._asked = 0

    def go_on(self) -> None:
        """Look again a little later."""
        asyncio.get_running_loop().call_later(self._every_s, self._check)

    def _check(self) -> None:
        connection, now = self._connection, time.monotonic()
        if not (connection._requests and connection.connected()):  # noqa: SLF001
            _watched.discard(connection)
            return
        if now - self._looked_at > 2 * self._every_s:  # we stood still: answers may lie there
            self._waits_from = now
        self._looked_at = now
        silent_s = now - max(self._waits_from, connection._last_action)  # noqa: SLF001
        if silent_s > self._timeout_s + self._every_s:  # else who asked would have given up
            self._leave(CloseReason.CONNECTION_TIMEOUT, f"has not answered for {silent_s:.1f} s")
        elif silent_s > self._timeout_s * LATE and (self._look is None or self._look.done()):
            self._look = asyncio.create_task(self._ask_others())
            _looks.add(self._look)
            self._look.add_done_callback(_looks.discard)
        self.go_on()

    async def _ask_others(self) -> None:
        """Leave the broker if it is not, or no longer, a member of its cluster."""
        client = getattr(self._connection._on_close_cb, "__self__", None)  # noqa: SLF001
        if not isinstance(client, AIOKafkaClient):
            return  # to an address that need not be that of a broker
        others = self._others(client)
        if others and len(others) < len(client.cluster.brokers()):
            await _refresh(client, others[self._asked % len(others)])
            self._asked += 1
        if len(self._others(client)) == len(client.cluster.brokers()):
            self._leave(CloseReason.CONNECTION_BROKEN, "does not answer, and its cluster left it")

    def _others(self, client: AIOKafkaClient) -> list[Any]:
        """Ids of all brokers of the cluster but this one, those first that we are connected to."""
        here = (self._connection.host, self._connection.port)
        ids = [b.nodeId for b in client.cluster.brokers() if (b.host, b.port) != here]
        connected = {node for (node, _), c in client._conns.items() if c.connected()}  # noqa: SLF001
        return sorted(ids, key=lambda node: node not in connected)

    def _leave(self, reason: CloseReason, why: str) -> None:
        connection = self._connection
        if connection.connected():
            log.warning("broker %s:%d %s", connection.host, connection.port, why)
            connection.close(reason=reason)


async def _refresh(client: AIOKafkaClient, node: int) -> None:
    """Ask one broker who belongs to the cluster and who leads what; nothing if it fails."""
    connection = await client._get_conn(node)  # noqa: SLF001
    if connection is None:
        return
    if client._sync_task is None:  # noqa: SLF001  # closed meanwhile
        connection.close()
        return
    topics = set(client._topics)  # noqa: SLF001
    try:
        answer = await connection.send(MetadataRequest(list(topics) or None))
    except (KafkaError, TimeoutError):
        return
    if answer.brokers and topics == client._topics:  # noqa: SLF001
        client.cluster.update_metadata(answer)
