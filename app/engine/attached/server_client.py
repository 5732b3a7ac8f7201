"""HTTP client of one server, with a limit on every wait and on the size of every answer.

Translates the failures of its connections into EngineErrors (`server_errors.py`). Handles paths,
bodies and server-sent events, not their contents. aiohttp has the requests whose answers are whole
bodies; streamed answers come from connections of `server_connection.py`, at a quarter of its cost.
"""

from __future__ import annotations

import asyncio
import codecs
import math
from collections import deque
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from kvlane.app.engine.attached.server_connection import (
    CONNECT_TIMEOUT_S,
    ConnectionPool,
    ServerConnection,
)
from kvlane.app.engine.attached.server_errors import (
    DONE,
    ConnectionBroken,
    ResponseTooLarge,
    ServerSilent,
    error_for_status,
    error_of_body,
    error_of_text,
    is_answer,
    is_json,
)
from kvlane.app.engine.interface import EngineError, InvalidRequest

MAX_BODY_BYTES = 16 * 1024 * 1024
"""Limit on a body that is no stream; the metrics of large servers have half a MiB."""
MAX_STREAM_BYTES = 64 * 1024 * 1024
"""Default limit on a streamed answer: a million tokens with the JSON around each."""
MAX_ERROR_BYTES = 64 * 1024
MAX_HELD_BYTES = 128 * 1024
"""Bytes of events that wait for a slow reader, at which the connection is read no further."""
_DATA = b"data:"
_FIELDS = (b":", b"event:", b"id:", b"retry:")
"""Beginnings of the other lines of a stream of events."""
_ERROR_EVENT = (b"event: error", b"event:error")
_ERROR = b"error:"
"""Beginning of an error in servers that write it as a field of its own."""
_FIXED_FIELDS = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "kvlane"}


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
        self.connections = ConnectionPool(url)
        self._headers = _FIXED_FIELDS | {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        self.connections.close()
        await self._session.close()

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

    def stream_request(self, path: str, body: Any, traceparent: str) -> bytes:
        """The bytes of a POST. Raises InvalidRequest."""
        content = _encoded(body)
        fields = {"Host": self.connections.host, "Content-Length": str(len(content))}
        if traceparent:
            fields["traceparent"] = traceparent
        lines = [f"{name}: {value}\r\n" for name, value in (fields | self._headers).items()]
        return f"POST {path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode() + content

    async def _request(self, method: str, path: str, body: Any, within_s: float) -> bytes:
        try:
            async with (
                asyncio.timeout(within_s),
                self._session.request(
                    method, self.url + path, data=None if body is None else _encoded(body),
                    allow_redirects=False,
                ) as response,
            ):  # fmt: skip
                is_answer = response.status == 200
                most_bytes = MAX_BODY_BYTES if is_answer else MAX_ERROR_BYTES
                received = bytearray()
                async for piece in response.content.iter_any():
                    received += piece
                    if len(received) > most_bytes:
                        raise _too_large(response.status, most_bytes)
        except TimeoutError as e:  # aiohttp's own are of this kind, too
            raise ServerSilent(f"{self.url} sent nothing for {within_s:g} s") from e
        except aiohttp.ClientConnectorError as e:
            cause = getattr(e, "os_error", e)  # certificate errors have none
            raise ConnectionBroken(f"{self.url} cannot be reached: {cause}") from e
        except (aiohttp.ClientError, OSError, ValueError, RuntimeError) as e:
            # ValueError for some invalid HTTP, RuntimeError for a client that was closed meanwhile
            raise ConnectionBroken(f"{self.url}: the connection broke: {e!r:.500}") from e
        if not is_answer:
            raise error_of_body(response.status, bytes(received))
        return bytes(received).removeprefix(codecs.BOM_UTF8)


class EventStream:
    """One streamed answer. A context manager, which closes it however it ends.

    Its connection calls it in the turn of the event loop that reads a part of the answer; a reader
    waits for at most `read_timeout_s` of the server, by one timer that is moved when it is due.
    """

    def __init__(
        self, server: ServerClient, path: str, body: Any, event_bytes: int, traceparent: str = ""
    ) -> None:
        self._server = server
        self._request = (path, body, traceparent)
        self._connection: ServerConnection | None = None
        self._connecting: asyncio.Timeout | None = None
        self._status = 0
        self._body = bytearray()
        """What has come before the reader has chosen how to read it, or to be read as a whole."""
        self._events = EventParser(server.url, event_bytes)
        self._has_events = False
        """Whether it is read as events."""
        self._bytes = 0
        self._held = 0
        """Bytes received since the reader has had all events."""
        self._is_paused = False
        self._last = b""
        self._is_over = False
        self._error: EngineError | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[bool] | None = None
        """Of the reader; its result is whether the time is over."""
        self._wait_until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        """Send the request. Raises ServerFailed, RequestRejected."""
        try:
            await self._open()
        except BaseException:
            self._leave()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connection of an answer not read to its end, so the server stops."""
        self._leave()

    def close(self) -> None:
        """Abort it from another task: a wait for the next event raises ServerFailed."""
        self._error = ConnectionBroken("the stream was aborted")
        self._events.found.clear()
        self._end()
        if self._connecting is not None and not self._connecting.expired():
            self._connecting.reschedule(0.0)

    async def next_event(self, until: float = math.inf) -> bytes | None:
        """The data of the next event, `[DONE]` included; None at the end of the answer.

        A JSON response is one event. Raises TimeoutError past `until`, a time of the event loop;
        ServerFailed if the event is late or too long, or the connection breaks, and the error of
        any other response.
        """
        if not self._has_events:
            self._begin_events()
        found = self._events.found
        if not found and not self._is_over:
            silent_at = self._loop.time() + self._server.read_timeout_s
            while not found and not self._is_over:
                await self._wait(silent_at, until)
        if not found:
            if self._error is not None:
                raise self._error
            return None
        self._last = event = found.popleft()
        if not found:
            self._held = 0
            if self._is_paused and self._connection is not None:
                self._is_paused = False
                self._connection.resume_reading()
        return event

    async def read_all(self, max_bytes: int) -> bytes:
        """Read an answer that is no stream. Raises ServerFailed as `next_event` does."""
        return await self._read(max_bytes, self._loop.time() + self._server.read_timeout_s)

    # --- connection -------------------------------------------------------------------------------

    def on_head(self, status: int) -> None:
        self._status = status
        self._wake()

    def on_body(self, data: bytes) -> None:
        if not self._has_events:
            self._body += data
            self._wake()
            return
        self._bytes += len(data)
        server = self._server
        try:
            if self._bytes > server.max_response_bytes:
                raise ResponseTooLarge(
                    f"{server.url} sent an answer of more than {server.max_response_bytes} bytes "
                    "(KVLANE_ATTACH_MAX_RESPONSE_BYTES)"
                )
            self._events.feed(data)
        except EngineError as e:
            self._error = e
            self._end()
        if self._events.found:
            self._held += len(data)
            if self._held > MAX_HELD_BYTES and self._connection is not None:
                self._is_paused = True
                self._connection.pause_reading()
            self._wake()

    def on_end(self, fault: str) -> None:
        self._connection = None
        if fault:
            self._error = ConnectionBroken(f"{self._server.url}: the connection broke: {fault}")
        elif self._has_events:
            self._end_events()
        self._end()

    # --- reader -----------------------------------------------------------------------------------

    async def _open(self) -> None:
        server = self._server
        request = server.stream_request(*self._request)
        silent_at = self._loop.time() + server.read_timeout_s
        self._connection = await self._connect(silent_at)
        self._connection.send(request, self)
        while not (self._status or self._is_over):
            await self._wait(silent_at)
        if not self._status:
            assert self._error is not None
            raise self._error
        if self._status != 200:
            raise error_of_body(self._status, await self._read(MAX_ERROR_BYTES, silent_at))

    async def _connect(self, until: float) -> ServerConnection:
        url = self._server.url
        try:
            async with asyncio.timeout_at(until) as self._connecting:
                connection = await self._server.connections.acquire()
        except TimeoutError as e:
            silent = ServerSilent(f"{url} cannot be reached: no connection in time")
            raise self._error or silent from e
        except (OSError, ValueError) as e:
            raise ConnectionBroken(f"{url} cannot be reached: {e}") from e
        finally:
            self._connecting = None
        if self._error is not None:  # closed meanwhile
            connection.abort()
            raise self._error
        return connection

    async def _read(self, max_bytes: int, silent_at: float) -> bytes:
        """The whole body, within a limit."""
        while True:
            if len(self._body) > max_bytes:
                raise _too_large(self._status, max_bytes)
            if self._error is not None:
                raise self._error
            if self._is_over:
                return bytes(self._body).removeprefix(codecs.BOM_UTF8)
            await self._wait(silent_at)

    async def _wait(self, silent_at: float, until: float = math.inf) -> None:
        """Wait for a part of the answer, or its end. Raises ServerSilent, and TimeoutError if the
        time of the reader is over before that of the server."""
        self._wait_until = min(silent_at, until)
        if self._timer is None or self._timer.when() > self._wait_until:
            self._set_timer()
        self._waiter = self._loop.create_future()
        try:
            is_late = await self._waiter
        finally:
            self._waiter = None
        if is_late and until < silent_at:
            raise TimeoutError
        if is_late:
            server = self._server
            raise ServerSilent(f"{server.url} sent nothing for {server.read_timeout_s:g} s")

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._wait_until, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        if self._waiter is None:
            return  # the next wait sets it
        if self._loop.time() < self._wait_until:
            self._set_timer()
        else:
            self._wake(is_late=True)

    def _wake(self, *, is_late: bool = False) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(is_late)

    def _begin_events(self) -> None:
        """Read it as events from now on: what has come already, too."""
        self._has_events = True
        self.on_body(bytes(self._body))
        self._body.clear()
        if self._is_over and self._error is None:
            self._end_events()

    def _end_events(self) -> None:
        try:
            self._events.end()
        except EngineError as e:
            self._error = e

    def _end(self) -> None:
        """Nothing more of it is received."""
        self._is_over = True
        if (connection := self._connection) is not None:
            self._connection = None
            connection.abort()
        self._wake()

    def _leave(self) -> None:
        """The reader wants no more of it."""
        if self._timer is not None:
            self._timer.cancel()
        if self._last == DONE and self._connection is not None:
            self._connection.finish()
            self._connection = None
        self._end()


class EventParser:
    """The server-sent events of one answer, from its bytes. `found`: those for the reader."""

    def __init__(self, url: str, max_event_bytes: int) -> None:
        self.found: deque[bytes] = deque()
        self._url = url
        self._most_bytes = max_event_bytes
        self._line = bytearray()
        """The beginning of a line whose end is not there yet."""
        self._is_at_start = True
        """True before the first line, which may begin with a byte order mark."""
        self._data: list[bytes] = []
        """The lines of data of the event under way."""
        self._size = 0
        self._is_error = False
        """Whether the event under way is called an error."""
        self._has_events = False
        self._other = bytearray()
        """The text of a response without events."""

    def feed(self, data: bytes) -> None:
        """Raises ServerFailed for an event beyond the limit, and the error that a server sends."""
        if b"\n" in data:
            if self._line:
                data = bytes(self._line) + data
            lines = data.split(b"\n")
            self._line = bytearray(lines.pop())
            for line in lines:
                self._add(line.rstrip(b"\r"))
        else:
            self._line += data
        self._check_size(len(self._line))

    def end(self) -> None:
        """The response is over: its last line may lack its end, and its last event the empty line.
        Raises the error of a response that is none of events."""
        self._add(bytes(self._line).rstrip(b"\r"))
        if self._data:
            event = b"".join(self._data)
            if is_json(event):
                self.found.append(event)
        elif self._other and not self._has_events:
            if not is_answer(self._other):
                raise error_of_text(self._other)
            self.found.append(bytes(self._other))

    def _add(self, line: bytes) -> None:
        if self._is_at_start:
            self._is_at_start, line = False, line.removeprefix(codecs.BOM_UTF8)
        if line.startswith(_DATA):
            piece = line[len(_DATA) :].strip()
            self._size += len(piece)
            self._check_size(self._size)
            if piece:
                self._data.append(piece)
        elif not line:
            if self._data:
                event, self._data, self._size = b"".join(self._data), [], 0
                self._has_events = True
                if self._is_error:
                    raise error_of_text(event)
                self.found.append(event)
            self._is_error = False
        elif line.startswith(_ERROR):
            raise error_of_text(line[len(_ERROR) :])
        elif line.startswith(_FIELDS):
            self._is_error = self._is_error or line.startswith(_ERROR_EVENT)
        elif not self._has_events:
            self._other += line + b"\n"
            self._check_size(len(self._other))

    def _check_size(self, size: int) -> None:
        if size > self._most_bytes:
            raise ResponseTooLarge(
                f"{self._url} sent an event of more than {self._most_bytes} bytes"
            )


def _too_large(status: int, most_bytes: int) -> EngineError:
    if status == 200:
        return ResponseTooLarge(f"an answer of more than {most_bytes} bytes", status)
    return error_for_status(status, "an answer of more than 64 KiB")


def _encoded(body: Any) -> bytes:
    """Raises InvalidRequest."""
    try:
        return msgspec.json.encode(body)
    except RecursionError:
        raise InvalidRequest("body: nested too deeply") from None
