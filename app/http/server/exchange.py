"""One HTTP request and its response: uvicorn's, with the end of the connection by RFC 9112.

A connection that is closed with unread bytes is reset, and its client loses the response; so an
exchange only says that its connection ends (`closes`), and `http_protocol.py` ends it.

A `BodyWriter` in the scope of each request writes a part of the body by a call, without middleware
and coroutines; the bytes are the same. Head and end of a response are sent by ASGI.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import starlette.types
from uvicorn._types import (
    ASGI3Application,
    ASGIReceiveCallable,
    ASGISendCallable,
    ASGISendEvent,
    HTTPResponseBodyEvent,
    HTTPResponseStartEvent,
    Scope,
)
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_EXTENSION = "kvlane.body_writer"


class BodyWriter:
    def __init__(self, exchange: Exchange) -> None:
        self._cycle = exchange

    def offer(self, scope: Any) -> None:
        scope.setdefault("extensions", {})[_EXTENSION] = self

    @property
    def is_ready(self) -> bool:
        """Whether a part may be written now. Otherwise ASGI's `send` handles it: it waits for a
        full socket, drops data for a disconnected client, or raises."""
        cycle = self._cycle
        return not (
            cycle.flow.write_paused
            or cycle.disconnected
            or cycle.response_complete
            or not (cycle.chunked_encoding or cycle.ends_by_close)  # neither until the head is sent
        )

    def write(self, body: bytes) -> None:
        """Write a part that is not empty, by HTTP/1.1 as a chunk (7.1); only if `is_ready`."""
        cycle = self._cycle
        framed = body if cycle.ends_by_close else b"%x\r\n%b\r\n" % (len(body), body)
        cycle.transport.write(framed)


def body_writer_of(scope: starlette.types.Scope) -> BodyWriter | None:
    """The writer of a request's response; None if its server offers none."""
    writer = scope.get("extensions", {}).get(_EXTENSION)
    return writer if isinstance(writer, BodyWriter) else None


_END: HTTPResponseBodyEvent = {"type": "http.response.body", "body": b"", "more_body": False}


class Exchange(RequestResponseCycle):
    closes = False
    """The connection ends with this response. Set once its head is sent."""
    ends_by_close = False
    """The end of the connection is the end of the body (HTTP/1.0 without a length)."""

    async def run_asgi(self, app: ASGI3Application) -> None:
        async def answer(
            scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
        ) -> None:
            try:
                await app(scope, receive, send)
            except asyncio.CancelledError:
                self.disconnect()
                self.transport.close()

        await super().run_asgi(answer)

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            await self._send_head(message)
        elif self.response_complete and self.scope["method"] == "HEAD":
            return  # its head was all
        else:
            if self.ends_by_close:
                body = cast("HTTPResponseBodyEvent", message).get("body", b"")
                self.expected_content_length = len(body)
            await super().send(message)

    def disconnect(self) -> None:
        if not self.response_complete:
            self.disconnected = True
        self.message_event.set()

    async def _send_head(self, message: HTTPResponseStartEvent) -> None:
        if self.more_body:  # the rest of the request is for nothing
            self.keep_alive = False
        if self.scope["http_version"] == "1.0":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self.ends_by_close = b"content-length" not in names
            self.chunked_encoding = False if self.ends_by_close else None
        await super().send(message)
        if not self.disconnected:
            self.closes, self.keep_alive = not self.keep_alive, True
            if self.scope["method"] == "HEAD":
                await super().send(_END)
