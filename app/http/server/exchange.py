"""One HTTP request and its response: uvicorn's, with the end of the connection by RFC 9112.

Owns the framing of the response. A connection that is closed while bytes of the request are unread
is reset, and its client loses the response; so an exchange only says that its connection ends
(`closes`), and `app/http/server/http_protocol.py` ends it.
"""

from __future__ import annotations

import asyncio
from typing import cast

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

_END: HTTPResponseBodyEvent = {"type": "http.response.body", "body": b"", "more_body": False}


class Exchange(RequestResponseCycle):
    """A request and its response."""

    closes = False
    """The connection ends with this response. Set once its head is sent."""
    ends_by_close = False
    """The end of the connection is the end of the body (HTTP/1.0 without a length)."""

    async def run_asgi(self, app: ASGI3Application) -> None:
        """Call the application. Cancelled, at the end of the process, it leaves no traceback."""

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
        """Send a part of the response."""
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
        """The client left, or sent something that is no request: the application has to end."""
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
