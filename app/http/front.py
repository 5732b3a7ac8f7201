"""What every HTTP exchange passes through: names, counts, and bounds on what is taken in.

Owns how much of requests may be in memory at a time. Knows no endpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from http import HTTPStatus

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http.errors import ApiError, overloaded
from app.http.metrics import Metrics

REQUEST_ID = b"x-request-id"

BODIES = 32
"""How many bodies of the largest size may be in memory at a time, or more smaller ones."""
BODY_S = 30.0
"""What a client gets to send its body: 8 MiB at 2 Mbit/s."""
UNREAD_BYTES = 64 * 1024 * 1024
"""So much of a body that is too large is read and dropped. Many clients see the answer only when
they have sent all; what is larger still gets a closed connection."""

_PATHS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/embeddings": "embedding",
}
_STREAMS = "/v1/streams/"


class Front:
    """ASGI middleware: echoes the request's own id, counts responses by endpoint and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = [header for header in scope["headers"] if header[0] == REQUEST_ID][:1]

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *given]
                self._count(scope["path"], message["status"])
            await send(message)

        await self._app(scope, receive, send_on)

    def _count(self, path: str, status: int) -> None:
        endpoint = _PATHS.get(path) or ("streams" if path.startswith(_STREAMS) else "other")
        self._metrics.responses.labels(endpoint, str(status)).inc()


class Bodies:
    """The bodies of requests that are in memory, up to `limit` bytes each.

    Bound: BODIES times the limit in all. Beyond it requests are refused at once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncGenerator[bytes, None]:
        """The body; it counts until the context is left.

        Raises ApiError: 413 with both sizes, 408 when it does not come, 529 when there are too
        many; ClientDisconnect when its client leaves.
        """
        held = bytearray()
        try:
            try:
                async with asyncio.timeout(BODY_S):
                    await self._receive(request, held)
            except TimeoutError:
                message = f"the body did not come within {BODY_S:g} s"
                raise ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="body_timeout") from None
            yield bytes(held)
        finally:
            self._held -= len(held)

    async def _receive(self, request: Request, held: bytearray) -> None:
        size = _announced(request)
        if size > self._limit and (size > UNREAD_BYTES or "expect" in request.headers):
            raise self._too_large(size)
        size = 0
        async for part in request.stream():
            size += len(part)
            if size <= self._limit:
                self._take(len(part))
                held += part
            elif size > UNREAD_BYTES:
                break
        if size > self._limit:
            raise self._too_large(max(size, _announced(request)))

    def _take(self, size: int) -> None:
        if self._held + size > BODIES * self._limit:
            raise overloaded("too many requests are being read")
        self._held += size

    def _too_large(self, size: int) -> ApiError:
        return ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body has {size} bytes or more; {self._limit} are allowed",
            code="too_large",
        )


def _announced(request: Request) -> int:
    """The size that the request says its body has; 0 when it does not say."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() and len(length) < 20 else 0
