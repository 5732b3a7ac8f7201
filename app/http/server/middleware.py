"""HTTP middleware: request ids, response counts, and bounds on bodies and work in memory."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import NamedTuple
from uuid import uuid4

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvlane.app.http.api_errors import (
    ApiError,
    error_of_stream,
    is_messages_path,
    overloaded,
    too_large,
)
from kvlane.app.metrics.gateway_metrics import GatewayMetrics

REQUEST_ID = b"x-request-id"
SHORT_REQUEST_ID = b"request-id"
STREAM_ID = b"x-kvlane-id"
_REPEATABLE = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]{0,126}[\x21-\x7e])?")
"""Client ids that are echoed: at most 128 printable ASCII characters."""

MAX_BODIES = 32
BODY_TIMEOUT_S = 30.0

_PATHS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/embeddings": "embedding",
    "/v1/messages": "message",
    "/v1/responses": "response",
}
_PREFIXES = {
    "/v1/streams": "streams",
    "/v1/files": "files",
    "/v1/batches": "batches",
    "/v1/responses": "responses",
}
_OTHER = "other"
_STATUSES = (200, 202, 400, 401, 403, 404, 405, 408, 409, 410, 413, 415, 429, 499, 500, 503, 529)
"""Of kvlane's own answers; those of attached servers have others, too."""


class RequestIdMiddleware:
    """ASGI middleware: sets `x-request-id` and counts responses by endpoint and status. The id: the
    client's own if printable; else that of the answer's stream; else a new one."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics
        for endpoint in (*_PATHS.values(), *_PREFIXES.values(), _OTHER):
            for status in _STATUSES:
                metrics.responses.labels(endpoint, str(status))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == REQUEST_ID), b"")
        begun = False

        async def send_on(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = message.get("headers", ())
                request_id = _request_id(given, headers)
                message["headers"] = [*headers, (REQUEST_ID, request_id)]
                if is_messages_path(scope["path"]):
                    message["headers"].append((SHORT_REQUEST_ID, request_id))
                self._count(scope["path"], message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except Exception as e:  # the default handler is outside of this middleware
            if not begun:
                await error_of_stream(e).response()(scope, receive, send_on)
            raise

    def _count(self, path: str, status: int) -> None:
        first = "/".join(path.split("/", 3)[:3])
        endpoint = _PATHS.get(path) or _PREFIXES.get(first, _OTHER)
        self._metrics.responses.labels(endpoint, str(status)).inc()


def _request_id(given: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    if _REPEATABLE.fullmatch(given):
        return given
    stream_id = next((value for name, value in headers if name == STREAM_ID), b"")
    first, _, _ = stream_id.partition(b",")
    return first if _REPEATABLE.fullmatch(first) else f"req-{uuid4().hex}".encode()


Hold = Callable[[int], None]
"""Counts bytes that are in memory for a request. Raises ApiError, 529, for too many."""


class HeldBody(NamedTuple):
    """A body that is in memory. `hold`: for bytes that are read for it."""

    content: bytes
    hold: Hold


class BodyLimiter:
    """The bodies of requests that are in memory, up to `limit` bytes each. Bound: MAX_BODIES times
    the limit in all. Beyond it requests are refused at once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncGenerator[HeldBody, None]:
        """The body; it counts until the context is left. Raises ApiError: 415 if it is no JSON or
        compressed, 413 with both sizes, 408 when it does not come, 529 for too many;
        ClientDisconnect."""
        check_content_type(request)
        check_content_encoding(request)
        held = bytearray()
        with self.holding() as hold:
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    await self._receive(request, held, hold)
            except TimeoutError:
                message = f"the body did not come within {BODY_TIMEOUT_S:g} s"
                raise ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="body_timeout") from None
            yield HeldBody(bytes(held), hold)

    @contextmanager
    def holding(self) -> Iterator[Hold]:
        """A function that counts bytes until the context is left."""
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            if self._held + size > MAX_BODIES * self._limit:
                raise overloaded("too many requests are being read")
            self._held += size
            held += size

        try:
            yield hold
        finally:
            self._held -= held

    async def _receive(self, request: Request, held: bytearray, hold: Hold) -> None:
        if (announced := _announced(request)) > self._limit:
            raise self._too_large(announced)
        async for part in request.stream():
            if (size := len(held) + len(part)) > self._limit:
                raise self._too_large(size)
            hold(len(part))
            held += part

    def _too_large(self, size: int) -> ApiError:
        return too_large(f"the body has {size} bytes or more; {self._limit} are allowed")


def check_content_type(request: Request) -> None:
    """Raises ApiError, 415, unless the body is JSON, which browsers send to other sites only after
    a CORS preflight."""
    given = request.headers.get("content-type")
    if given is not None and given.partition(";")[0].strip().lower() == "application/json":
        return
    raise ApiError(
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        f"the body has {'another' if given else 'no'} content type: send JSON, with the header "
        "content-type: application/json (curl: -H 'content-type: application/json')",
        code="unsupported_content_type",
    )


def check_content_encoding(request: Request) -> None:
    """Raises ApiError, 415, for a compressed body."""
    given = request.headers.get("content-encoding", "identity").strip().lower()
    if given not in ("", "identity"):
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "the header content-encoding names a compression, and no compressed body is read: send "
            "the body as it is, without this header",
            code="unsupported_content_encoding",
        )


def _announced(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() and len(length) < 20 else 0


class TenantSlots:
    """At most `most` pieces of work at a time, `of_tenant` of them for one tenant; others are
    refused."""

    def __init__(self, most: int, of_tenant: int, refusal: str) -> None:
        self._most = most
        self._of_tenant = of_tenant
        self._refusal = refusal
        self._taken: Counter[str] = Counter()

    @contextmanager
    def taken(self, tenant: str) -> Iterator[None]:
        """A slot until the context is left. Without tenants, "" may take all. Raises ApiError."""
        most = self._of_tenant if tenant else self._most
        if self._taken.total() >= self._most or self._taken[tenant] >= most:
            raise overloaded(self._refusal)
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            self._taken += Counter()  # without the tenants that have none
