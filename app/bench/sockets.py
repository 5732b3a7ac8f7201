"""HTTP clients that cost next to nothing: what is measured is the server, on the same machine."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from streams.clock import Clock

READ_BYTES = 1 << 18
LISTENS_S = 60.0
_STAMP = re.compile(rb"@(\d+\.\d+) ")
_POSITION = re.compile(rb"id: (\d+)\n")


class Stream(NamedTuple):
    """What a client saw of an answer. `late_s`: from the making of each step to its reading."""

    events: int
    tokens: int
    late_s: list[float]
    whole: bool


def free_port() -> int:
    """A port of loopback that nothing listens on at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def request_of(path: str, body: object) -> bytes:
    """A whole HTTP/1.1 request."""
    said = msgspec.json.encode(body)
    head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(said)}\r\n\r\n".encode() + said


async def listening(port: int, clock: Clock, check: Callable[[], None]) -> None:
    """Wait until something listens there. `check` raises when it never will; TimeoutError."""
    async with asyncio.timeout(LISTENS_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                check()
                await clock.sleep(0.1)
            else:
                writer.close()
                return


async def listen(port: int, request: bytes, clock: Clock) -> Stream:
    """Ask for a stream and read it to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        events, position, late_s, rest = 0, 0, [], b""
        while data := await reader.read(READ_BYTES):
            now = clock.now()
            events += data.count(b"data: {")
            late_s += [now - float(stamp) for stamp in _STAMP.findall(data)]
            if places := _POSITION.findall(data):
                position = int(places[-1])
            rest = (rest + data)[-64:]
            if b"[DONE]" in rest:
                return Stream(events, position, late_s, whole=True)
        return Stream(events, position, late_s, whole=False)
    finally:
        writer.close()


class Caller:
    """One connection that asks again and again for answers that are not streamed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @staticmethod
    async def connect(port: int) -> Caller:
        """Raises OSError."""
        return Caller(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, request: bytes) -> int:
        """The status of the answer, when it was read to its end."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        assert length is not None, "the answer is not streamed"
        await self._reader.readexactly(int(length[1]))
        return int(head.split(b" ", 2)[1])

    def close(self) -> None:
        """Hang up."""
        self._writer.close()
