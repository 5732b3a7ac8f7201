"""Minimal HTTP clients, so that the server on the same machine is measured and not the client."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from kvlane.streams.clock import Clock

READ_BYTES = 1 << 18
LISTEN_TIMEOUT_S = 60.0
_STAMP = re.compile(rb"@(\d+\.\d+) ")
_POSITION = re.compile(rb"id: (\d+)\n")


class StreamResult(NamedTuple):
    """A received answer. `latencies_s`: time from the creation of each step to its receipt."""

    events: int
    tokens: int
    latencies_s: list[float]
    is_complete: bool


def http_request(path: str, body: object, key: str = "") -> bytes:
    """The bytes of an HTTP/1.1 request, with an API key if given."""
    encoded = msgspec.json.encode(body)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"authorization: Bearer {key}\r\n" if key else ""
    return f"{head}content-length: {len(encoded)}\r\n\r\n".encode() + encoded


async def wait_listening(port: int, clock: Clock, check: Callable[[], None]) -> None:
    """Wait for a listener. `check` raises if its process has ended. Raises TimeoutError."""
    async with asyncio.timeout(LISTEN_TIMEOUT_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                check()
                await clock.sleep(0.1)
            else:
                writer.close()
                return


async def read_stream(port: int, request: bytes, clock: Clock) -> StreamResult:
    """Send a request and read the streamed answer to its end."""
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
                return StreamResult(events, position, late_s, is_complete=True)
        return StreamResult(events, position, late_s, is_complete=False)
    finally:
        writer.close()


async def metrics_page(port: int) -> str:
    """The metrics of a process. Raises OSError."""
    url = f"http://127.0.0.1:{port}/metrics"
    page = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=60).read())
    return str(page, "utf-8")


class HttpConnection:
    """A kept connection for answers that are not streamed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @staticmethod
    async def connect(port: int) -> HttpConnection:
        """Raises OSError."""
        return HttpConnection(*await asyncio.open_connection("127.0.0.1", port))

    async def request(self, request: bytes) -> int:
        """Send a request and read the answer; its status."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        assert length is not None, "the answer is not streamed"
        await self._reader.readexactly(int(length[1]))
        return int(head.split(b" ", 2)[1])

    def close(self) -> None:
        self._writer.close()
