"""uvicorn's HTTP protocol with bounds on everything that a client sends, or does not send.

- Bytes: a head, a trailer section, the frame of a chunk and the heads that wait have one limit.
  Trailers are dropped. Bodies are bounded by `middleware.py`.
- Time: a connection has a deadline while it waits for a head, is idle, or ends, and another one
  while its client reads nothing. The time of a body is bounded by its endpoint.
- Order: an error of the client is answered behind the requests before it, and nothing is read
  behind it. A response before the end of its request ends the connection.
- End: after the last response only the sending side is closed, and input is dropped until the
  client closes too (RFC 9112, 9.6). The kernel resets a connection that is closed with unread
  input, and its client would lose the response.
- A request for an upgrade is served without it (RFC 9110, 7.8).

A client that closes its sending side (`shutdown(SHUT_WR)`, `nc -N`) looks like one that is gone
until a write is answered with a reset. So an interim response, which every client of HTTP/1.1 has
to skip, is written when the answer has not begun.
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
from typing import Any
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvlane.app.http.api_errors import invalid_request, overloaded
from kvlane.app.http.server.connection_table import ConnectionTable
from kvlane.app.http.server.exchange import BodyWriter, Exchange

REQUEST_BYTES = 4096
FIELD_BYTES = 128
HEAD_TIMEOUT_S = 20.0
"""Time limit for a head, from the opening of the connection or from its first byte."""
CLOSE_TIMEOUT_S = 10.0
"""Time for a client to read the last response and to send the rest of its request."""
MAX_DISCARDED_BYTES = 64 * 1024 * 1024
WRITE_TIMEOUT_S = 60.0
"""Time for a client to read a part of a response once all buffers are full."""
PROBES = frozenset({"/livez", "/readyz", "/metrics"})
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
RESET_POLL_S = 0.1
_HOST = re.compile(rb"(?:\[[\w:.%~-]+\]|[\w.~!$&'()*+,;=%-]*)(?::[0-9]*)?")
"""A name or an address, and a port. Other parts of a URL make it none (RFC 9110, 7.2)."""


class _BadRequest(Exception):
    """A request that cannot be read. The connection ends with the answer to it."""


class BoundedProtocol(HttpToolsProtocol):
    cycle: Exchange

    def __init__(self, table: ConnectionTable, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._table = table
        self._is_spare = False
        """Only probes are answered, since the table is full."""
        self._is_in_head = self._is_in_body = False
        self._pending = 0
        """Bytes since the head began, or since the last byte of the body."""
        self._held = 0
        """Approximate memory of the heads that wait, in bytes."""
        self._head_bytes = table.head_bytes
        """Limit of `_held`. One socket read more may be in memory."""
        self._drops = False
        """Input is dropped: after an error, and after the last response."""
        self._dropped = 0
        self._running: Exchange | None = None
        """The exchange whose application runs, or ran last; `cycle` is the newest one."""
        self._deadline = self._write_deadline = math.inf
        self._reset_check: asyncio.TimerHandle | None = None

    # --- connection -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.time() + HEAD_TIMEOUT_S
        self._is_spare = not self._table.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        if self._reset_check is not None:
            self._reset_check.cancel()
        if self._running is not None:
            self._running.disconnect()  # uvicorn does it for the newest one only
        self.pipeline.clear()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """True to keep the connection, for the answers to whole requests."""
        running = self._running
        if running is None or not self._is_busy or not self._may_half_close(running):
            return False
        if self._is_in_body and not self._drops:  # the newest request will never be whole
            if not self.pipeline:
                return False
            self.pipeline.popleft()
        newest = self.pipeline[0][0] if self.pipeline else running
        newest.keep_alive = False
        self._drops = True
        if self._reset_check is None:
            if not running.response_started:
                self.transport.write(INTERIM)
            self._check_for_reset()
        return True

    def pause_writing(self) -> None:
        self._write_deadline = self.loop.time() + WRITE_TIMEOUT_S
        super().pause_writing()

    def resume_writing(self) -> None:
        self._write_deadline = math.inf
        super().resume_writing()

    def expire(self, now: float) -> None:
        is_closing = self.transport.is_closing()
        if now >= self._write_deadline or (now >= self._deadline and (is_closing or self._drops)):
            self.abort()
        elif now >= self._deadline:
            self.transport.close()
            self._deadline = now + CLOSE_TIMEOUT_S
        elif is_closing and self._deadline == math.inf:
            self._deadline = now + CLOSE_TIMEOUT_S

    def abort(self) -> None:
        self.transport.abort()

    # --- input ------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse data, or respond with 400 if it is no request within the bounds."""
        if self._drops:
            self._dropped += len(data)
            if self._dropped > MAX_DISCARDED_BYTES:
                self.abort()
            return
        if not (self._is_in_head or self._is_in_body):
            if not (data := data.lstrip(b"\r\n")):
                return  # empty lines before a head, which some clients send after a body: 2.2
            if not self._is_busy:
                self._deadline = min(self._deadline, self.loop.time() + HEAD_TIMEOUT_S)
        self._pending += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as e:
            cause = e.__context__
            is_ours = isinstance(cause, _BadRequest)
            self._refuse(str(cause) if is_ours else "the request is not valid HTTP/1.1")
        else:
            if self._pending > self._head_bytes:
                self._refuse("the head, a trailer or a chunk extension is too large")

    def _parse(self, data: bytes) -> None:
        """Parse data; again without its upgrade, if a request asks for one: the parser takes the
        rest for another protocol."""
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as e:
                data = self._head_without_upgrade() + data[e.args[0] :]
                self.parser = httptools.HttpRequestParser(self)  # the old one may be at its end
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            else:
                return

    def _head_without_upgrade(self) -> bytes:
        fields = [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
        version = self.scope["http_version"].encode()
        method = self.parser.get_method()
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(fields))

    def on_message_begin(self) -> None:
        self._is_in_head = True
        if not self.pipeline:
            self._held = 0
        self._head_bytes = self._table.head_bytes
        super().on_message_begin()
        self._hold(REQUEST_BYTES)

    def on_url(self, url: bytes) -> None:
        self._hold(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header field. Trailers are none (RFC 9110, 6.5.1)."""
        if not self._is_in_body:
            self._hold(FIELD_BYTES + len(name) + len(value))
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is over: the application is called, once it is its turn."""
        self._is_in_head = False
        version, method = self.parser.get_http_version(), self.parser.get_method().decode()
        self.scope["http_version"] = version
        if method == "CONNECT":
            raise _BadRequest("this server is no proxy: CONNECT is not offered")
        if self.parser.should_upgrade():
            return
        self._check_head(version)
        url = httptools.parse_url(self.url)
        raw_path = url.path or b"/"  # http://host alone
        path = raw_path.decode("ascii")
        self.scope["method"] = method
        self.scope["path"] = unquote(path) if "%" in path else path
        self.scope["raw_path"] = raw_path
        self.scope["query_string"] = url.query or b""
        app: Any = self.app
        if self._is_spare and self.scope["path"] not in PROBES:
            app = overloaded("all connections are in use").response()
        self.cycle = exchange = self._exchange(self.scope)
        exchange.keep_alive = (
            version == "1.1" and self.parser.should_keep_alive() and not self._is_spare
        )
        self._is_in_body, self._pending = True, 0
        BodyWriter(exchange).offer(self.scope)
        self._answer(exchange, app)

    def on_body(self, body: bytes) -> None:
        self._pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._is_in_body, self._pending = False, 0
            super().on_message_complete()

    def _hold(self, size: int) -> None:
        self._held += size
        if self._held > self._head_bytes:
            raise _BadRequest(
                "the heads of the requests on this connection are too large: send fewer or shorter "
                "header fields, and read the responses before the next request"
            )

    def _check_head(self, version: str) -> None:
        """Raises _BadRequest for a head that RFC 9112 does not allow and the parser does."""
        if version not in ("1.0", "1.1"):
            raise _BadRequest("this server has HTTP/1.1 and HTTP/1.0 only")
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and version == "1.1"):
            raise _BadRequest(f"the request has {hosts} Host headers: send exactly one")
        for name, value in self.headers:
            if name == b"host" and not _HOST.fullmatch(value):
                raise _BadRequest("the header host is no name or address, with or without a port")
            if name == b"transfer-encoding" and value.lower() != b"chunked":
                raise _BadRequest("the header transfer-encoding may be chunked only")

    def _refuse(self, message: str) -> None:
        """Answer the newest request with 400, after those before it, and read nothing more."""
        self._drops = True
        app = invalid_request(message, code="bad_request").response()
        newest, is_in_body = self.cycle, self._is_in_body
        if is_in_body and newest.response_started:
            return  # it closes the connection
        if is_in_body and self.pipeline:
            self.pipeline[0] = (newest, app)  # type: ignore[assignment]
            return
        if is_in_body:
            newest.disconnect()  # its body has no end
        method = (
            "HEAD" if self.parser.get_method() == b"HEAD" else "GET"
        )  # whose answer has no body
        scope = {"type": "http", "method": method, "http_version": "1.1", "headers": []}
        self.cycle = self._exchange(newest.scope if is_in_body else scope)
        self.cycle.keep_alive = False
        self._answer(self.cycle, app)

    # --- responses --------------------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        running = self._running
        return running is not None and not (running.response_complete or running.disconnected)

    def _exchange(self, scope: Any) -> Exchange:
        return Exchange(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=True,
            on_response=self.on_response_complete,
        )

    def _answer(self, exchange: Exchange, app: ASGIApp) -> None:
        if self._is_busy:
            self.pipeline.appendleft((exchange, app))  # type: ignore[arg-type]
            return
        self._running = exchange
        self._deadline = math.inf
        self._table.begin(self)
        self._start_asgi_task(exchange, app)  # type: ignore[arg-type]

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        assert self._running is not None
        now = self.loop.time()
        if self._running.closes:
            self._end(now)
        elif self.pipeline:
            self._answer(*self.pipeline.pop())  # type: ignore[arg-type]
        else:
            self._deadline = now + (HEAD_TIMEOUT_S if self._is_in_head else self.timeout_keep_alive)
            self._table.wait(self)

    def _end(self, now: float) -> None:
        assert self._running is not None
        has_unread = self._drops or self._running.more_body or self.pipeline
        self._deadline = now + CLOSE_TIMEOUT_S
        self._drops = True
        self.pipeline.clear()
        self._table.wait(self)
        if self._reset_check is not None:  # the client has closed its side
            self.transport.close()
        elif self.transport.can_write_eof():
            self.transport.write_eof()
        elif not has_unread:  # TLS has no half-closed connections
            self.transport.close()

    def _may_half_close(self, exchange: Exchange) -> bool:
        """Not under TLS, which has no half-closed connections, nor by HTTP/1.0, which has no
        interim responses."""
        return self.scheme == "http" and exchange.scope["http_version"] == "1.1"

    def _check_for_reset(self) -> None:
        """Take a reset for a disconnect: without reads, only a write reports it."""
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._reset_check = self.loop.call_later(RESET_POLL_S, self._check_for_reset)
