"""Tests of links between processes and brokers that the benches cut."""

from __future__ import annotations

import asyncio

import pytest

from kvlane.streams.brokers.broker import LOOPBACK, free_ports
from kvlane.streams.brokers.jvm import LinkPorts, add_links
from workbench.bench.chaos.broker_links import BrokerLink


async def test_cut_link_holds_what_is_sent_until_it_is_restored() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    ports = LinkPorts(*free_ports(2))
    link = BrokerLink(ports)
    async with (
        await asyncio.start_server(echo, LOOPBACK, ports.broker),
        await asyncio.start_server(link.serve, LOOPBACK, ports.proxy),
    ):
        reader, writer = await asyncio.open_connection(LOOPBACK, ports.proxy)
        writer.write(b"before")
        assert await reader.readexactly(6) == b"before"
        link.cut()
        writer.write(b"during")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(1), 0.1)
        link.restore()
        assert await reader.readexactly(6) == b"during"
        await link.close()
        assert await reader.read() == b""
        writer.close()


def test_listener_of_a_link_sends_its_clients_to_the_proxy() -> None:
    settings = {
        "listeners": "PLAINTEXT://127.0.0.1:1",
        "advertised.listeners": "PLAINTEXT://127.0.0.1:1",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT",
    }
    add_links(settings, [LinkPorts(broker=2, proxy=3)])
    assert settings["listeners"].endswith(",LINK0://127.0.0.1:2")
    assert settings["advertised.listeners"].endswith(",LINK0://127.0.0.1:3")
    assert settings["listener.security.protocol.map"].endswith(",LINK0:PLAINTEXT")
