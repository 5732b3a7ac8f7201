"""Tests of the port probe: the correction names the protocol of a port that is not Kafka's.

The answers of real brokers, with TLS, a login and unreachable addresses, are in
tests/contracts/test_kafka_rights.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from kvlane.streams.brokers import port_probe
from kvlane.streams.brokers.port_probe import ClientSecurity, connection_advice

PLAIN = ClientSecurity(None, uses_sasl=False)


@asynccontextmanager
async def answering(answer: bytes, *, closes: bool = True) -> AsyncIterator[str]:
    """The address of a server that sends `answer` to anything, then closes the connection."""

    served: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.add(asyncio.current_task())
        with suppress(ConnectionError):
            await reader.read(100)
            writer.write(answer)
            await (writer.drain() if closes else reader.read())
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*filter(None, served))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "speaks HTTP"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not speak Kafka's protocol"),
        (b"-ERR unknown command\r\n", "does not speak Kafka's protocol"),
        (b"\x00\x00", "does not speak Kafka's protocol"),
        (b"\xff\xff\xff\xff\x00\x00\x00\x07", "does not speak Kafka's protocol"),
        (b"", "does not answer"),
    ],
)
async def test_correction_names_the_protocol_of_the_port(answer: bytes, said: str) -> None:
    async with answering(answer) as server:
        advice = await connection_advice([server], PLAIN)
    assert advice.startswith(f"The port {server} ")
    assert said in advice


async def test_silent_port_ends_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_probe, "PROBE_TIMEOUT_S", 0.1)
    async with answering(b"", closes=False) as server:
        assert "does not answer" in await connection_advice([server], PLAIN)


async def test_half_an_answer_of_kafka_is_no_error() -> None:
    async with answering(b"\x00\x00\x00\x20\x00\x00\x00\x07\x00") as server:
        assert "does not answer" in await connection_advice([server], PLAIN)


async def test_first_server_that_accepts_connections_is_described() -> None:
    async with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as server:
        advice = await connection_advice(["127.0.0.1:1", server], PLAIN)
    assert "speaks HTTP" in advice


async def test_servers_without_a_listener_have_no_correction() -> None:
    assert await connection_advice(["127.0.0.1:1", "nothing.invalid:9092"], PLAIN) == ""
