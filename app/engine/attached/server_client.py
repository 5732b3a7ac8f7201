"""HTTP client of one server, with a limit on every wait and on the size of every answer.

Owns the connection and translates its failures into EngineErrors (`server_errors.py`). Handles
paths, bodies and server-sent events, not their contents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from kvlane.app.engine.attached.server_errors import (
    ConnectionBroken,
    ResponseTooLarge,
    ServerFailed,
    ServerSilent,
    error_for_status,
    error_of_body,
    error_of_text,
    is_json,
)
from kvlane.app.engine.interface import InvalidRequest

MAX_BODY_BYTES = 16 * 1024 * 1024
"""Limit on a body that is no stream; the metrics of large servers have half a MiB."""
MAX_STREAM_BYTES = 64 * 1024 * 1024
"""Default limit on a streamed answer: a million tokens with the JSON around each."""
MAX_ERROR_BYTES = 64 * 1024
CONNECT_TIMEOUT_S = 5.0
_DATA = b"data:"
_FIELDS = (b":", b"event:", b"id:", b"retry:")
"""Beginnings of the other lines of a stream of events."""
_ERROR_EVENT = (b"event: error", b"event:error")
_ERROR = b"error:"
"""Beginning of an error in servers that write it as a field of its own."""


class ServerClient:
    """Client of the server at `url` (scheme, host and port). Created on a running event loop."""

    def __init__(
        self,
        url: str,
        read_timeout_s: float,
        api_key: str = "",
        max_response_bytes: int = MAX_STREAM_BYTES,
    ) -> None:
        """`read_timeout_s`: the longest time without data during an answer; `max_response_bytes`:
        limit on a streamed answer."""
        self.url = url
        self.read_timeout_s = read_timeout_s
        self.max_response_bytes = max_response_bytes
        headers = {"Accept-Encoding": "identity"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self.session = aiohttp.ClientSession(
            headers=headers,
            # The worker bounds the runs; a limit here would only hide their queue.
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=read_timeout_s
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        await self.session.close()

    async def get(self, path: str, timeout_s: float) -> bytes:
        """The body of a 200. Raises ServerFailed, RequestRejected."""
        return await self._request("GET", path, None, timeout_s)

    async def post(self, path: str, body: Any, timeout_s: float) -> bytes:
        return await self._request("POST", path, body, timeout_s)

    def open_stream(
        self, path: str, body: Any, max_event_bytes: int, traceparent: str = ""
    ) -> EventStream:
        """A streamed answer; `max_event_bytes`: limit on one event."""
        return EventStream(self, path, body, max_event_bytes, traceparent)

    async def _request(self, method: str, path: str, body: Any, within_s: float) -> bytes:
        with self.translating_errors(within_s):
            async with (
                asyncio.timeout(within_s),
                self.session.request(
                    method, self.url + path, data=_encoded(body), headers=_TYPE,
                    allow_redirects=False,
                ) as response,
            ):  # fmt: skip
                await self.check_status(response)
                return await _bounded(response, MAX_BODY_BYTES)

    async def check_status(self, response: aiohttp.ClientResponse) -> None:
        """Raise the error of a status other than 200."""
        status = response.status
        if status == 200:
            return
        try:
            body = await _bounded(response, MAX_ERROR_BYTES)
        except ServerFailed:
            raise error_for_status(status, "an answer of more than 64 KiB") from None
        raise error_of_body(status, body)

    @contextmanager
    def translating_errors(self, timeout_s: float) -> Iterator[None]:
        try:
            yield
        except TimeoutError as e:  # aiohttp's own are of this kind, too
            raise ServerSilent(f"{self.url} sent nothing for {timeout_s:g} s") from e
        except aiohttp.ClientConnectorError as e:
            raise ConnectionBroken(f"{self.url} cannot be reached: {e.os_error}") from e
        except (aiohttp.ClientError, OSError, ValueError, RuntimeError) as e:
            # aiohttp raises ValueError for some invalid HTTP, and RuntimeError for a connection
            # that
            # this side has closed meanwhile.
            raise ConnectionBroken(f"{self.url}: the connection broke: {e!r:.500}") from e


class EventStream:
    """Server-sent events of one answer. A context manager, which closes it however it ends."""

    def __init__(
        self, server: ServerClient, path: str, body: Any, event_bytes: int, traceparent: str = ""
    ) -> None:
        self._server = server
        self._path = path
        self._body = body
        self._event_bytes = event_bytes
        self._headers = _TYPE | {"traceparent": traceparent} if traceparent else _TYPE
        self._response: aiohttp.ClientResponse | None = None
        self._waiting: asyncio.Timeout | None = None
        self._closed = False
        self._bytes = 0

    async def __aenter__(self) -> Self:
        """Send the request. Raises ServerFailed, RequestRejected."""
        server = self._server
        async with self._timeout(asyncio.get_running_loop().time() + server.read_timeout_s):
            self._response = await server.session.post(
                server.url + self._path,
                data=_encoded(self._body),
                headers=self._headers,
                allow_redirects=False,
            )
            try:
                await server.check_status(self._response)
            except BaseException:
                self._response.close()
                raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connection of an answer not read to its end, so the server stops."""
        if self._response is not None:
            self._response.release()

    def close(self) -> None:
        """Abort it from another task: a wait for the next event raises ServerFailed."""
        self._closed = True
        if self._waiting is not None:
            self._waiting.reschedule(0.0)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the data of each event up to the end of the answer, `[DONE]` included.

        A JSON response is one event. Raises ServerFailed if the next one is late or too long, or
        the connection breaks, and the error of any other response.
        """
        buffer, data, other = bytearray(), bytearray(), bytearray()
        has_events, is_error, is_over = False, False, False
        loop, silence_s = asyncio.get_running_loop(), self._server.read_timeout_s
        until = loop.time() + silence_s  # lines without an event do not extend it
        while not is_over:
            end = buffer.find(b"\n")
            if end < 0 and (end := await self._read_line(buffer, until)) < 0:
                end, is_over = len(buffer), True  # the last line may lack its end
            line = bytes(buffer[:end]).rstrip(b"\r")
            del buffer[: end + 1]
            if line.startswith(_DATA):
                data += line[len(_DATA) :].strip()
                self._check_size(len(data))
            elif line.startswith(_ERROR):
                raise error_of_text(line[len(_ERROR) :])
            elif line and not has_events and not line.startswith(_FIELDS):
                other += line + b"\n"
                self._check_size(len(other))
            if data and not line:
                event, data, has_events = bytes(data), bytearray(), True
                if is_error:
                    raise error_of_text(event)
                yield event
                until = loop.time() + silence_s
            is_error = line.startswith(_ERROR_EVENT) or (is_error and bool(line))
        if (last := _last_event(data, bytearray() if has_events else other)) is not None:
            yield last

    async def read_all(self, max_bytes: int) -> bytes:
        """Read an answer that is no stream. Raises ServerFailed as `events` does."""
        assert self._response is not None
        async with self._timeout(asyncio.get_running_loop().time() + self._server.read_timeout_s):
            return await _bounded(self._response, max_bytes)

    async def _read_line(self, buffer: bytearray, until: float) -> int:
        """Read until the end of a line; returns its position, or -1 at the end of the answer."""
        assert self._response is not None
        content, searched = self._response.content, len(buffer)
        async with self._timeout(until):
            while True:
                self._check_size(searched)
                piece = await content.readany()
                if not piece:
                    return -1
                self._bytes += len(piece)
                if self._bytes > self._server.max_response_bytes:
                    raise ResponseTooLarge(
                        f"{self._server.url} sent an answer of more than "
                        f"{self._server.max_response_bytes} bytes "
                        "(KVLANE_ATTACH_MAX_RESPONSE_BYTES)"
                    )
                buffer += piece
                if (end := buffer.find(b"\n", searched)) >= 0:
                    return end
                searched = len(buffer)

    @asynccontextmanager
    async def _timeout(self, until: float) -> AsyncGenerator[None, None]:
        """Limit a wait for the server, up to a time of the event loop."""
        if self._closed:
            raise ConnectionBroken("the stream was aborted")
        server = self._server
        with server.translating_errors(server.read_timeout_s):
            try:
                async with asyncio.timeout_at(until) as self._waiting:
                    yield
            finally:
                self._waiting = None

    def _check_size(self, size: int) -> None:
        if size > self._event_bytes:
            raise ResponseTooLarge(
                f"{self._server.url} sent an event of more than {self._event_bytes} bytes"
            )


def _last_event(data: bytearray, other: bytearray) -> bytes | None:
    """The event whose end is that of the response. `data`: of an event; `other`: the text of a
    response without any. Raises the error of such a text."""
    if data:
        return bytes(data) if is_json(data) else None
    if other and not is_json(other):
        raise error_of_text(other)
    return bytes(other) or None


_TYPE = {"Content-Type": "application/json"}


def _encoded(body: Any) -> bytes | None:
    """Raises InvalidRequest."""
    try:
        return None if body is None else msgspec.json.encode(body)
    except RecursionError:
        raise InvalidRequest("body: nested too deeply") from None


async def _bounded(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    parts = bytearray()
    async for piece in response.content.iter_any():
        parts += piece
        if len(parts) > most_bytes:
            raise ResponseTooLarge(f"an answer of more than {most_bytes} bytes", response.status)
    return bytes(parts)
