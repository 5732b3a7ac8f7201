"""Tests of connections that are closed while the client believes them open, and the reverse."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvloop
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import AIOKafkaConnection
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.metadata import MetadataRequest, MetadataResponse_v1

from kvlane.streams.kafka.client_patches.client_parts import client_parts

client_parts()  # replaces the methods of connections


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


def test_closed_connection_is_also_broken_for_the_client() -> None:
    assert not uvloop.run(_send_on_a_closed_transport()).connected()


class Line(AIOKafkaConnection):
    """A connection to nobody."""

    open = True

    def connected(self) -> bool:
        return self.open

    def close(self, reason: Any = None, exc: Any = None) -> asyncio.Future[None]:
        self.open = False
        closed = asyncio.get_running_loop().create_future()
        closed.set_result(None)
        return closed


class Connecting:
    """Instead of the client's way to connect: one that takes until it is told."""

    def __init__(self) -> None:
        self.made: list[Line] = []
        self.began, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, host: str, port: int, **_: Any) -> Line:
        self.made.append(line := Line(host, port))
        self.began.set()
        await self.go_on.wait()
        return line


@pytest.fixture
async def connecting(monkeypatch: pytest.MonkeyPatch) -> Connecting:
    connecting = Connecting()
    monkeypatch.setattr("aiokafka.client.create_conn", connecting)
    return connecting


@pytest.fixture
async def kafka() -> AsyncIterator[AIOKafkaClient]:
    """A client that knows of one broker."""
    kafka = AIOKafkaClient(bootstrap_servers="one")
    kafka.cluster.update_metadata(MetadataResponse_v1([(1, "one", 9092, None)], 1, []))
    kafka._sync_task = asyncio.create_task(asyncio.sleep(60))
    yield kafka
    await kafka.close()


async def test_client_that_is_open_connects_once(
    connecting: Connecting, kafka: AIOKafkaClient
) -> None:
    connecting.go_on.set()
    line = await kafka._get_conn(1)
    assert line.connected()
    assert await kafka._get_conn(1) is line
    assert connecting.made == [line]


async def test_closed_client_opens_no_connection(
    connecting: Connecting, kafka: AIOKafkaClient
) -> None:
    await kafka.close()
    assert not await kafka.ready(1)
    assert connecting.made == []


async def test_client_that_is_closed_meanwhile_keeps_no_connection(
    connecting: Connecting, kafka: AIOKafkaClient
) -> None:
    sending = asyncio.create_task(kafka.ready(1))
    await connecting.began.wait()
    await kafka.close()
    connecting.go_on.set()
    assert not await sending
    assert not connecting.made[0].connected()


async def test_name_that_is_not_found_occupies_one_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, begun, released = asyncio.get_running_loop(), [], asyncio.Event()

    async def look_up(host: str, *_: object, **__: object) -> list[Any]:
        begun.append(host)
        await released.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(loop, "getaddrinfo", look_up)
    for _ in range(3):
        connections = [AIOKafkaConnection("dead", 9092, request_timeout_ms=20) for _ in range(3)]
        ends = await asyncio.gather(*(c.connect() for c in connections), return_exceptions=True)
        assert [type(end) for end in ends] == [TimeoutError] * 3
    assert begun == ["dead"]

    waiting = asyncio.create_task(AIOKafkaConnection("dead", 9092).connect())
    await asyncio.sleep(0)
    released.set()
    with pytest.raises(OSError, match="Temporary failure"):
        await waiting
    with pytest.raises(OSError, match="Temporary failure"):
        await AIOKafkaConnection("dead", 9092).connect()
    assert begun == ["dead", "dead"], "the next attempt looks again"
