"""Proxies between each process and each broker of a cluster, by which single links are cut.

A cut link loses no connection: what is sent over it stays on its way, as where packets get lost,
and so do new connections. Each process has listeners of its own at the brokers, which advertise its
proxies (`JvmBroker`), so that its client connects through them and nowhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from kvlane.app.local.deployment import DeploymentPart
from kvlane.streams.brokers.broker import LOOPBACK
from kvlane.streams.brokers.broker_factory import JvmBroker
from kvlane.streams.brokers.jvm import LinkPorts
from workbench.bench.bench_environment import BenchEnvironment

LinkEnds = tuple[str, int]
"""The ends of a link: the name of a process, and the number of a broker, from 1."""
CHUNK_BYTES = 65_536


class BrokerLink:
    """The way between one process and one broker."""

    def __init__(self, ports: LinkPorts) -> None:
        self._ports = ports
        self._is_whole = asyncio.Event()
        self._is_whole.set()
        self._connections: set[asyncio.Future[None]] = set()

    def cut(self) -> None:
        """Let nothing through, in either direction."""
        self._is_whole.clear()

    def restore(self) -> None:
        """Let through what has waited, and all that follows."""
        self._is_whole.set()

    async def serve(self, client: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection of the process until either side closes it."""
        relaying = asyncio.ensure_future(self._relay(client, writer))
        self._connections.add(relaying)
        try:
            await asyncio.wait({relaying})
        finally:
            self._connections.discard(relaying)
            writer.close()

    async def _relay(self, client: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._is_whole.wait()
        with suppress(OSError):  # a broker that is down closes the connection
            broker, to_broker = await asyncio.open_connection(LOOPBACK, self._ports.broker)
            try:
                ways = [self._pass(client, to_broker), self._pass(broker, writer)]
                tasks = [asyncio.ensure_future(way) for way in ways]
                try:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                to_broker.close()

    async def close(self) -> None:
        """End all connections."""
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(CHUNK_BYTES):
                await self._is_whole.wait()
                target.write(data)
                await target.drain()


class BrokerLinks:
    """The links of some processes, by their ends."""

    def __init__(self, broker: JvmBroker, processes: Sequence[str]) -> None:
        self._ports = {
            (name, node.number): node.links[place]
            for node in broker.nodes
            for place, name in enumerate(processes)
        }
        self.links: dict[LinkEnds, BrokerLink] = {
            key: BrokerLink(ports) for key, ports in self._ports.items()
        }

    def through_links(self, process: DeploymentPart) -> DeploymentPart:
        """A process that reaches the brokers through its links."""
        ports = [p.proxy for (name, _), p in self._ports.items() if name == process.name]
        servers = ",".join(f"{LOOPBACK}:{port}" for port in ports)
        own = {**process.settings, "bootstrap_servers": servers}
        return process._replace(settings=own)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve all links."""
        servers = []
        try:
            for key, link in self.links.items():
                port = self._ports[key].proxy
                servers.append(await asyncio.start_server(link.serve, LOOPBACK, port))
            yield
        finally:
            for server in servers:
                server.close()
            for link in self.links.values():
                await link.close()


@asynccontextmanager
async def links_between(
    processes: Sequence[DeploymentPart], on: BenchEnvironment
) -> AsyncIterator[BrokerLinks | None]:
    """The links between processes and the brokers of a cluster that has them; else None."""
    broker = on.broker
    if not isinstance(broker, JvmBroker) or not broker.nodes[0].links:
        yield None
        return
    links = BrokerLinks(broker, [process.name for process in processes])
    async with links.serving():
        yield links
