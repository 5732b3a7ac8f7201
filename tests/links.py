"""A network between a broker and its clients that can be cut or stopped, in this process."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

READ_BYTES = 1 << 16


class Link:
    """A proxy from `port` to `target` on loopback. `async with` it."""

    def __init__(self, port: int, target: int) -> None:
        self.port = port
        self._target = target
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._carrying: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._meet, "127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut()

    def stall(self) -> None:
        """Nothing arrives any more, in either direction; connections stay, and new ones are taken.

        As with a switch that drops packets: nobody is told.
        """
        self._flowing.clear()

    def flow(self) -> None:
        """Forward again, also the bytes held back meanwhile."""
        self._flowing.set()

    async def cut(self) -> None:
        """Close all connections at once; new ones are forwarded."""
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._carrying.add(task)
        others: list[asyncio.StreamWriter] = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            others.append(far_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._carry(reader, far_writer))
                both.create_task(self._carry(far_reader, writer))
        except* OSError:
            pass
        finally:
            self._carrying.discard(task)
            for other in others:
                other.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(READ_BYTES):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
        raise ConnectionResetError
