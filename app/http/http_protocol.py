"""uvicorn's HTTP protocol with bounds on the head of a request, and answers to half-closed clients.

A connection whose head is too slow or too long is closed. Bodies are `app/http/middleware.py`'s.

A client that closes its sending side after its request (`shutdown(SHUT_WR)`, `nc -N`) may wait for
the answer, or may have closed its connection: TCP announces both by the same FIN. Only a write
shows which, since a closed connection answers it with a reset. So an interim response, which every
client of HTTP/1.1 has to skip, is written when the answer has not begun; later the answer's own
bytes do. A reset is a disconnect.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from app.http.body_writer import BodyWriter

HEAD_BYTES = 64 * 1024
"""Several times the size that clients and proxies send. One socket read more may be in memory."""
HEAD_TIMEOUT_S = 20.0
"""Time limit for a head, from the opening of the connection or from its first byte."""
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
RESET_POLL_S = 0.1
"""Interval of checks of a half-closed connection for a reset."""


class BoundedProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head: int | None = 0
        """Bytes read since the head began; None while a body is read."""
        self._timer: asyncio.TimerHandle | None = None
        self._reset_check: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit of the first head."""
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Parse data, or respond with 400 if the head is too long."""
        if self._head == 0 and not (data := data.lstrip(b"\r\n")):
            return  # empty lines before a head, which some clients send after a body: RFC 9112, 2.2
        if self._head is not None:
            if self._head > HEAD_BYTES:
                self.send_400_response("The head of the request is too large.")
                return
            self._head += len(data)
            self._arm()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """The head is over."""
        self._head = None
        self._disarm()
        before: RequestResponseCycle | None = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:  # which an upgrade leaves
            BodyWriter(self.cycle).offer(self.scope)

    def on_message_complete(self) -> None:
        """The next head may begin."""
        super().on_message_complete()
        self._head = 0

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection is kept: for the answer to a whole request."""
        cycle: RequestResponseCycle | None = self.cycle
        if self._head != 0 or cycle is None or cycle.response_complete or not self._may_half_close:
            return False
        cycle.keep_alive = False
        if self._reset_check is None:
            if not cycle.response_started and not self.pipeline:
                self.transport.write(INTERIM)
            self._check_for_reset()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers."""
        self._disarm()
        if self._reset_check is not None:
            self._reset_check.cancel()
        super().connection_lost(exc)

    @property
    def _may_half_close(self) -> bool:
        """Not under TLS, which has no half-closed connections, nor by HTTP/1.0, which has no
        interim responses."""
        return self.scheme == "http" and self.scope["http_version"] == "1.1"

    def _check_for_reset(self) -> None:
        """Take a reset for a disconnect: without reads, only a write reports it."""
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._reset_check = self.loop.call_later(RESET_POLL_S, self._check_for_reset)

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()
