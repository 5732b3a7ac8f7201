"""aiokafka's connections: broken transports, closed clients, and lookups of names."""

from __future__ import annotations

import asyncio
import socket
from typing import Any
from weakref import WeakKeyDictionary

from aiokafka.client import AIOKafkaClient
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.errors import KafkaConnectionError

from kvlane.streams.kafka.client_patches.stuck_broker import watch_connection

_send = AIOKafkaConnection.send
_connect = AIOKafkaConnection.connect
_get_conn = AIOKafkaClient._get_conn
_lookups: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Future[Any]]] = (
    WeakKeyDictionary()
)


def patch_connections() -> None:
    """Replace the methods of all connections in this process. Idempotent."""
    AIOKafkaConnection.send = _send_and_watch
    AIOKafkaConnection.connect = _connect_after_lookup
    AIOKafkaClient._get_conn = _get_conn_while_open


def _send_and_watch(connection: AIOKafkaConnection, *request: Any, **options: Any) -> Any:
    """Send a request, and watch for the response.

    Raises KafkaConnectionError if the transport is closed already. uvloop's transport raises a
    RuntimeError before the connection is notified. aiokafka does not handle it: its fetching or
    sending task would end for good, and the process with it.
    """
    try:
        answer = _send(connection, *request, **options)
    except RuntimeError as e:
        connection.close(reason=CloseReason.CONNECTION_BROKEN)
        raise KafkaConnectionError(f"the connection is broken: {e}") from e
    watch_connection(connection)
    return answer


async def _get_conn_while_open(
    client: AIOKafkaClient, node: int, **options: Any
) -> AIOKafkaConnection | None:
    """A connection to a broker; None if the client is closed, or is closed meanwhile.

    aiokafka would connect all the same, and leak the connection.
    """
    if client._sync_task is None:  # there is one from its start until it is closed
        return None
    connection = await _get_conn(client, node, **options)
    if connection is not None and client._sync_task is None:
        connection.close(reason=CloseReason.SHUTDOWN)
        return None
    return connection


async def _connect_after_lookup(connection: AIOKafkaConnection) -> Any:
    """Connect to a broker whose name is known; one lookup of a name at a time.

    An event loop has 4 to 6 threads for lookups, and one that was begun keeps its thread, also
    after its caller has waited long enough: up to 10 s for the name of a dead container, where the
    resolver does not answer. Lookups for each attempt of each client would take all threads, and
    the names of the other brokers would wait behind them.
    """
    loop, host = asyncio.get_running_loop(), connection.host
    lookups = _lookups.setdefault(loop, {})
    if (lookup := lookups.get(host)) is None:
        lookup = lookups[host] = asyncio.ensure_future(
            loop.getaddrinfo(host, connection.port, type=socket.SOCK_STREAM)
        )
        lookup.add_done_callback(lambda done: _end_lookup(lookups, host, done))
    async with asyncio.timeout(connection._request_timeout):
        await asyncio.shield(lookup)
    return await _connect(connection)


def _end_lookup(
    lookups: dict[str, asyncio.Future[Any]], host: str, done: asyncio.Future[Any]
) -> None:
    del lookups[host]
    if not done.cancelled():
        done.exception()  # retrieved, so that asyncio does not log it
