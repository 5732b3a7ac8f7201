"""HTTP/1.1 connections to one server for streamed answers: a protocol and a pool.

Owns heads, the frames of bodies and the reuse of connections; never the contents of an answer, nor
its deadlines. A connection has one request at a time, and a request is sent once: the server may
have begun to execute it (RFC 9110, 9.2.2), so a connection that breaks is the end of its answer.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
from typing import Protocol
from urllib.parse import urlsplit

import httptools
from aiohappyeyeballs import start_connection

CONNECT_TIMEOUT_S = 5.0
MAX_HEAD_BYTES = 64 * 1024
"""Limit on a head with the interim ones before it, on trailers, and on the frame of a chunk."""
IDLE_S = 4.0
"""Time for which an unused connection is kept. uvicorn, in vLLM and SGLang, closes one after 5 s,
and a request must not meet the end of its connection."""
MAX_IDLE = 256
END_S = 1.0
"""Time between the last event of an answer and the end of its body, for a connection to be kept."""
_HAPPY_EYEBALLS_S = 0.25


class ResponseReceiver(Protocol):
    """Receives one response, in the turn of the event loop that read it."""

    def on_head(self, status: int) -> None: ...

    def on_body(self, data: bytes) -> None: ...

    def on_end(self, fault: str) -> None:
        """The response is whole, or ended early by a fault of the server or of the network."""


class ServerConnection(asyncio.Protocol):
    _transport: asyncio.Transport

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._input = select.poll()
        self._parser: httptools.HttpResponseParser | None = None
        """The parser of the response under way."""
        self._receiver: ResponseReceiver | None = None
        """None while no response is under way, or only its end is awaited."""
        self._status = 0
        """Of the final head, once it is read."""
        self._has_length = self._is_encoded = self._is_whole = self._is_reusable = False
        self._overhead = 0
        """Bytes since the response began, or since the last ones of its body."""
        self._end_timer: asyncio.TimerHandle | None = None

    def send(self, request: bytes, receiver: ResponseReceiver) -> None:
        """Send a request, whose response goes to `receiver`."""
        self._receiver, self._status, self._overhead = receiver, 0, 0
        self._is_whole = False
        self._parser = httptools.HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(
            lenient_headers=True,
            lenient_optional_cr_before_lf=True,
            lenient_spaces_after_chunk_size=True,
        )
        self._transport.write(request)

    def abort(self) -> None:
        """Close it now, at which the server stops generating. The receiver is not called again."""
        self._receiver = self._parser = None
        self._is_reusable = False
        self._transport.abort()

    def close(self, fault: str) -> None:
        """Close it now, and end a response under way by a fault."""
        receiver = self._receiver
        self.abort()
        if receiver is not None:
            receiver.on_end(fault)

    def finish(self) -> None:
        """Leave a response after its last event; the connection is kept if its end comes soon."""
        self._receiver = None
        self._transport.resume_reading()
        self._end_timer = asyncio.get_running_loop().call_later(END_S, self.abort)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    @property
    def is_usable(self) -> bool:
        """False if the server has closed it, or sent what was not requested."""
        return not (self._transport.is_closing() or self._input.poll(0))

    # --- transport --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._input.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        parser = self._parser
        if parser is None:  # nothing was requested
            self._transport.abort()
            return
        self._overhead += len(data)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._is_reusable = False  # its status is that of an error
        except httptools.HttpParserError as e:
            self._is_reusable = False
            if not self._is_whole:
                self.close(f"its answer is not valid HTTP/1.1: {e.__context__ or e}")
        if self._is_whole:
            self._complete()
        elif self._overhead > MAX_HEAD_BYTES:
            self.close("the head, a trailer or the frame of a chunk is larger than 64 KiB")

    def eof_received(self) -> None:
        """The end of the input: of a body without a length, too."""
        if self._status and not self._has_length:
            self._is_reusable = False
            self._complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        if self._end_timer is not None:
            self._end_timer.cancel()
        self.close("the server closed it" if exc is None else repr(exc))

    def _complete(self) -> None:
        receiver, self._receiver, self._parser = self._receiver, None, None
        if self._end_timer is not None:
            self._end_timer.cancel()
            self._end_timer = None
        # A server may answer before it has read the request, of which the rest would come next.
        if self._is_reusable and not self._transport.get_write_buffer_size():
            self._transport.resume_reading()
            self._pool.put(self)
        else:
            self._transport.abort()
        if receiver is not None:
            receiver.on_end("")

    # --- parser -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._is_whole:  # a second response, for which nothing was requested
            self._is_reusable = False
        else:
            self._has_length = self._is_encoded = False

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"content-length":
                self._has_length = True
            case b"transfer-encoding":
                self._has_length = self._has_length or b"chunked" in value.lower()
            case b"content-encoding":
                self._is_encoded = value.lower() not in (b"", b"identity")

    def on_headers_complete(self) -> None:
        parser, receiver = self._parser, self._receiver
        if parser is None or receiver is None or self._is_whole:
            return
        status = parser.get_status_code()
        if 100 <= status < 200 and status != 101:
            return  # an interim response
        self._status, self._is_reusable = status, parser.should_keep_alive()
        if self._is_encoded and status == 200:
            self.close("its answer has a content-encoding, although it was asked for none")
        else:
            receiver.on_head(status)

    def on_body(self, data: bytes) -> None:
        receiver = self._receiver
        if receiver is not None and not (self._is_whole or self._is_encoded):
            self._overhead = 0
            receiver.on_body(data)

    def on_message_complete(self) -> None:
        self._is_whole = self._status != 0


class ConnectionPool:
    """The connections to the server at `url` (scheme, host and port)."""

    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)
        self._tls: ssl.SSLContext | None = None
        if self._url.scheme == "https":
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        self._open: set[ServerConnection] = set()
        self._idle: dict[ServerConnection, float] = {}
        """Unused connections with the time of their last response, oldest first."""
        self._sweep: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def host(self) -> str:
        """As in the head of a request."""
        return self._url.netloc.encode("idna").decode()

    async def acquire(self) -> ServerConnection:
        """A connection for one request. Raises OSError and ValueError if there is none."""
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.is_usable:
                return connection
            connection.abort()
        return await self._connect()

    def put(self, connection: ServerConnection) -> None:
        """Keep a connection whose response is whole."""
        if self._is_closed or len(self._idle) >= MAX_IDLE:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        self._idle[connection] = loop.time()
        if self._sweep is None:
            self._sweep = loop.call_later(IDLE_S, self._close_idle)

    def forget(self, connection: ServerConnection) -> None:
        """A connection is closed."""
        self._idle.pop(connection, None)
        self._open.discard(connection)

    def close(self) -> None:
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._open):
            connection.close("the worker ends")

    async def _connect(self) -> ServerConnection:
        loop, url = asyncio.get_running_loop(), self._url
        host, port = url.hostname or "", url.port or (80 if self._tls is None else 443)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            sock = await start_connection(addresses, happy_eyeballs_delay=_HAPPY_EYEBALLS_S)
            _, connection = await loop.create_connection(
                lambda: ServerConnection(self), sock=sock, ssl=self._tls,
                server_hostname=None if self._tls is None else host,
            )  # fmt: skip
        if self._is_closed:
            connection.abort()
            raise OSError("the worker ends")
        self._open.add(connection)
        return connection

    def _close_idle(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweep, until = None, loop.time() - IDLE_S
        while self._idle:
            connection, since = next(iter(self._idle.items()))
            if since > until:
                self._sweep = loop.call_at(since + IDLE_S, self._close_idle)
                return
            del self._idle[connection]
            connection.abort()
