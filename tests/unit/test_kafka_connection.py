"""A connection whose transport is closed while the client believes it open."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import uvloop
from aiokafka.conn import AIOKafkaConnection
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.metadata import MetadataRequest

from streams.kafka import client

assert client, "it mends the connection when it is loaded"


async def _broker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        await reader.read()
    writer.close()


async def _send_on_a_closed_transport() -> AIOKafkaConnection:
    async with await asyncio.start_server(_broker, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        connection = AIOKafkaConnection(host, port)
        connection._closed_fut = asyncio.get_running_loop().create_future()
        connection._reader, connection._writer = await asyncio.open_connection(host, port)
        connection._read_task = asyncio.create_task(asyncio.sleep(0))
        connection._versions = {3: (0, 12)}
        connection._writer.transport.abort()
        await asyncio.sleep(0.05)
        with pytest.raises(KafkaConnectionError, match="the connection is broken"):
            connection.send(MetadataRequest([]))
        await asyncio.sleep(0.05)
        return connection


def test_it_is_broken_and_closed_for_the_client_too() -> None:
    assert not uvloop.run(_send_on_a_closed_transport()).connected()
