"""One HTTP server, asked with bounds: every wait ends, every answer has a size.

Owns the connection and what can go wrong with it, as EngineErrors: whether another worker may well
succeed is decided here, by what failed. Knows paths, bodies and lines of server-sent events,
nothing of what they say.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from app.engine.contract import EngineError, EngineFull, InvalidRequest

ANSWER_BYTES = 16 * 1024 * 1024
"""Of what is read at once; metrics of large servers have half a MiB."""
STREAM_BYTES = 64 * 1024 * 1024
"""Of an answer that is streamed, unless the settings say otherwise: a million tokens, at what
servers write around each."""
ERROR_BYTES = 64 * 1024
CONNECT_S = 5.0
RETRYABLE_4XX = frozenset({401, 403, 404, 405, 408, 409, 421, 425, 429})
"""Say something of the server or of who asks (the model is not there, the key is wrong, too many
at a time), not of the request: a worker beside another server may well succeed."""
FULL = frozenset({429, 503, 529})
"""Say that the server has enough to do, or is not ready yet."""
_DATA = b"data:"


class ServerFailed(EngineError):
    """The server did not answer, or not as it should; another one may. `status`: what it said.

    See the server's own log; KVLANE_ATTACH_URL must name one that speaks OpenAI's completions.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message, retryable=True)
        self.status = status


class TooMuch(ServerFailed):
    """The server sent more than is read of one event, or of one answer.

    KVLANE_ATTACH_ANSWER_BYTES bounds answers.
    """


class ServerFull(ServerFailed, EngineFull):
    """The server has enough to do."""


class Rejected(InvalidRequest):
    """The server takes a request like this from nobody. `status`: what it said."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """The server at `url` (scheme, host and port). Made on a running event loop."""

    def __init__(
        self, url: str, silence_s: float, api_key: str = "", answer_bytes: int = STREAM_BYTES
    ) -> None:
        """`silence_s`: the longest time it may say nothing while it has something to answer;
        `answer_bytes`: the most that is read of an answer that is streamed."""
        self.url = url
        self.silence_s = silence_s
        self.answer_bytes = answer_bytes
        headers = {"Accept-Encoding": "identity"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self.session = aiohttp.ClientSession(
            headers=headers,
            # Runs are bounded by the worker; a limit here would only hide where they wait.
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=silence_s),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        await self.session.close()

    async def get(self, path: str, within_s: float) -> bytes:
        """The body of a 200. Raises ServerFailed, Rejected."""
        return await self._ask("GET", path, None, within_s)

    async def post(self, path: str, body: Any, within_s: float) -> bytes:
        """As `get`, of a JSON body that was posted."""
        return await self._ask("POST", path, body, within_s)

    def stream(self, path: str, body: Any, event_bytes: int) -> Stream:
        """The events of an answer that is streamed; an event has at most so many bytes."""
        return Stream(self, path, body, event_bytes)

    async def _ask(self, method: str, path: str, body: Any, within_s: float) -> bytes:
        with self.translated(within_s):
            async with (
                asyncio.timeout(within_s),
                self.session.request(
                    method, self.url + path, data=_encoded(body), headers=_TYPE,
                    allow_redirects=False,
                ) as response,
            ):  # fmt: skip
                await self.check(response)
                return await _bounded(response, ANSWER_BYTES)

    async def check(self, response: aiohttp.ClientResponse) -> None:
        """Raise what a status other than 200 means."""
        status = response.status
        if status == 200:
            return
        try:
            said = explained(await _bounded(response, ERROR_BYTES))
        except ServerFailed:
            said = "an answer of more than 64 KiB"
        raise failure(status, said)

    @contextmanager
    def translated(self, within_s: float) -> Iterator[None]:
        """What the client raises, as ServerFailed."""
        try:
            yield
        except TimeoutError as e:  # aiohttp's own are of this kind, too
            raise ServerFailed(f"{self.url} said nothing for {within_s:g} s") from e
        except aiohttp.ClientConnectorError as e:
            raise ServerFailed(f"{self.url} cannot be reached: {e.os_error}") from e
        except (aiohttp.ClientError, OSError, ValueError, RuntimeError) as e:
            # ValueError is what aiohttp says of some lines that are no HTTP, RuntimeError of a
            # connection that was closed on this side meanwhile.
            raise ServerFailed(f"{self.url} broke off: {e!r:.500}") from e


class Stream:
    """Server-sent events, one at a time; leave it as a context manager, however it ends."""

    def __init__(self, server: Server, path: str, body: Any, event_bytes: int) -> None:
        self._server = server
        self._path = path
        self._body = body
        self._event_bytes = event_bytes
        self._response: aiohttp.ClientResponse | None = None
        self._waiting: asyncio.Timeout | None = None
        self._closed = False
        self._bytes = 0

    async def __aenter__(self) -> Self:
        """Ask. Raises ServerFailed, Rejected."""
        server = self._server
        async with self._patience(asyncio.get_running_loop().time() + server.silence_s):
            self._response = await server.session.post(
                server.url + self._path, data=_encoded(self._body), headers=_TYPE,
                allow_redirects=False,
            )  # fmt: skip
            try:
                await server.check(self._response)
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
        """What is not read to its end is broken off: the server stops generating."""
        if self._response is not None:
            self._response.release()

    def close(self) -> None:
        """Break it off, from another task: whoever waits for the next event gets ServerFailed."""
        self._closed = True
        if self._waiting is not None:
            self._waiting.reschedule(0.0)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The data of each event, up to the end of the answer; `[DONE]` is one of them.

        Raises ServerFailed when the next one does not come in time, is too long, or never will.
        """
        buffer, data = bytearray(), bytearray()
        loop, silence_s = asyncio.get_running_loop(), self._server.silence_s
        until = loop.time() + silence_s  # lines that are no events do not count as words
        while True:
            end = buffer.find(b"\n")
            if end < 0 and (end := await self._read_line(buffer, until)) < 0:
                return
            line = bytes(buffer[:end]).rstrip(b"\r")
            del buffer[: end + 1]
            if line.startswith(_DATA):
                data += line[len(_DATA) :].strip()
                self._check_size(len(data))
            elif not line and data:
                event, data = bytes(data), bytearray()
                yield event
                until = loop.time() + silence_s

    async def whole(self, most_bytes: int) -> bytes:
        """All of an answer that is no stream. Raises ServerFailed as `events` does."""
        assert self._response is not None
        async with self._patience(asyncio.get_running_loop().time() + self._server.silence_s):
            return await _bounded(self._response, most_bytes)

    async def _read_line(self, buffer: bytearray, until: float) -> int:
        """Read until the buffer has the end of a line; where it is, -1 at the end of the answer."""
        assert self._response is not None
        content, searched = self._response.content, len(buffer)
        async with self._patience(until):
            while True:
                self._check_size(searched)
                piece = await content.readany()
                if not piece:
                    return -1
                self._bytes += len(piece)
                if self._bytes > self._server.answer_bytes:
                    raise TooMuch(
                        f"{self._server.url} sent an answer of more than "
                        f"{self._server.answer_bytes} bytes (KVLANE_ATTACH_ANSWER_BYTES)"
                    )
                buffer += piece
                if (end := buffer.find(b"\n", searched)) >= 0:
                    return end
                searched = len(buffer)

    @asynccontextmanager
    async def _patience(self, until: float) -> AsyncGenerator[None, None]:
        """Around each wait for the server, up to a time of the event loop."""
        if self._closed:
            raise ServerFailed("broken off")
        server = self._server
        with server.translated(server.silence_s):
            try:
                async with asyncio.timeout_at(until) as self._waiting:
                    yield
            finally:
                self._waiting = None

    def _check_size(self, size: int) -> None:
        if size > self._event_bytes:
            raise TooMuch(
                f"{self._server.url} sent an event of more than {self._event_bytes} bytes"
            )


def failure(status: int, said: str) -> ServerFailed | Rejected:
    """The error for a status of HTTP, or for one that stands in a stream."""
    if 400 <= status < 500 and status not in RETRYABLE_4XX:
        return Rejected(said or f"the server answers {status}", status)
    kind = ServerFull if status in FULL else ServerFailed
    return kind(f"the server answers {status}: {said}" if said else f"{status}", status)


class _Said(msgspec.Struct):
    message: str = ""


class _Problem(msgspec.Struct):
    """Errors as OpenAI has them, as older servers have them, and as FastAPI has them."""

    error: _Said | str | None = None
    message: str = ""
    detail: Any = None


_problems = msgspec.json.Decoder(_Problem)


def explained(body: bytes) -> str:
    """The message in the body of an error; its beginning, when it is not as others write it."""
    try:
        problem = _problems.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return body[:500].decode(errors="replace")
    error = problem.error
    message = error.message if isinstance(error, _Said) else error
    return (message or problem.message or str(problem.detail or ""))[:2000]


_TYPE = {"Content-Type": "application/json"}


def _encoded(body: Any) -> bytes | None:
    """Raises InvalidRequest."""
    try:
        return None if body is None else msgspec.json.encode(body)
    except RecursionError:
        raise InvalidRequest("body: is nested too deep") from None


async def _bounded(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    parts = bytearray()
    async for piece in response.content.iter_any():
        parts += piece
        if len(parts) > most_bytes:
            raise TooMuch(f"an answer of more than {most_bytes} bytes", response.status)
    return bytes(parts)
