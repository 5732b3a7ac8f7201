"""Multipart bodies, read part by part as they arrive: fields, and one file as a stream.

At most 64 KiB of a body are in memory, fields are short, and a body that stalls is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TypeVar

import aiohttp
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from starlette.requests import ClientDisconnect, Request

from kvlane.app.http.api_errors import ApiError, invalid_request, too_large
from kvlane.app.http.server.middleware import check_content_encoding

T = TypeVar("T")

BUFFER_BYTES = 64 * 1024
MAX_FIELD_BYTES = 8 * 1024
MAX_FIELDS = 20
STALL_TIMEOUT_S = 30.0
UPLOAD_TIMEOUT_S = 3600.0
FILE_FIELD = "file"
_BROKEN = (ValueError, AssertionError, RuntimeError, LookupError, HttpProcessingError)


class UploadedFile:
    def __init__(self, filename: str, part: aiohttp.BodyPartReader, most_bytes: int) -> None:
        self.filename = filename
        self._part = part
        self._most_bytes = most_bytes

    async def content(self) -> AsyncIterator[bytes]:
        """The content. Raises ApiError: 413 for a longer file, 400 for an incomplete body."""
        size = 0
        while True:
            piece = await _parsed(self._part.read_chunk(BUFFER_BYTES))
            if not piece and self._part.at_eof():
                return
            size += len(piece)
            if size > self._most_bytes:
                raise _too_large(self._most_bytes)
            yield piece


class MultipartBody:
    def __init__(self, reader: aiohttp.MultipartReader, most_bytes: int) -> None:
        self._reader = reader
        self._most_bytes = most_bytes
        self.fields: dict[str, str] = {}
        """Fields so far; complete after `fields_after_file`."""

    async def file(self) -> UploadedFile:
        """The file; its content must be read before anything else. Raises ApiError without one."""
        while (part := await self._next()) is not None:
            if part.name == FILE_FIELD:
                return UploadedFile(part.filename or "", part, self._most_bytes)
            await self._add(part)
        raise invalid_request("file: is needed, as a part of the multipart body", "file")

    async def fields_after_file(self) -> dict[str, str]:
        """All fields of the body. Raises ApiError."""
        while (part := await self._next()) is not None:
            if part.name == FILE_FIELD:
                raise invalid_request("file: one file a request", "file")
            await self._add(part)
        return self.fields

    async def _next(self) -> aiohttp.BodyPartReader | None:
        part = await _parsed(self._reader.next())
        if isinstance(part, aiohttp.MultipartReader):
            raise invalid_request("the body has a multipart within a multipart")
        if part is not None:
            _check_names(part)
        return part

    async def _add(self, part: aiohttp.BodyPartReader) -> None:
        value = bytearray()
        while not part.at_eof():
            value += await _parsed(part.read_chunk(BUFFER_BYTES))
            if len(value) > MAX_FIELD_BYTES or len(self.fields) >= MAX_FIELDS:
                raise invalid_request(f"a field has at most {MAX_FIELD_BYTES} bytes")
        try:
            self.fields[part.name or ""] = value.decode()
        except UnicodeDecodeError:
            raise invalid_request("a field is not UTF-8") from None


@asynccontextmanager
async def multipart_body(request: Request, most_bytes: int) -> AsyncGenerator[MultipartBody, None]:
    """The body of a request whose file may have `most_bytes`.

    Raises ApiError: 415 for another content type or a compressed body, 413 above the limit, 400 for
    no multipart, 408 if nothing arrives; ClientDisconnect.
    """
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "multipart/form-data":
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "send the file as multipart/form-data (curl: -F purpose=batch -F file=@FILE)",
            code="unsupported_content_type",
        )
    check_content_encoding(request)
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > most_bytes + MAX_FIELDS * MAX_FIELD_BYTES:
        raise _too_large(most_bytes)
    flow = _FlowControl(asyncio.get_running_loop())
    stream = aiohttp.StreamReader(flow, BUFFER_BYTES // 2, loop=asyncio.get_running_loop())
    feeding = asyncio.create_task(_feed(request, stream, flow))
    try:
        async with asyncio.timeout(UPLOAD_TIMEOUT_S):
            yield MultipartBody(_reader(kind, stream), most_bytes)
    except TimeoutError:
        raise _body_timeout(UPLOAD_TIMEOUT_S) from None
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)


def _reader(kind: str, stream: aiohttp.StreamReader) -> aiohttp.MultipartReader:
    try:
        return aiohttp.MultipartReader({"Content-Type": kind}, stream)
    except _BROKEN as e:
        raise _not_multipart(e) from None


class _FlowControl(BaseProtocol):
    """Pauses the transfer of the body while the parser has enough to read."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.may_feed = asyncio.Event()
        self.may_feed.set()

    @property
    def connected(self) -> bool:
        return True

    def pause_reading(self) -> None:
        self.may_feed.clear()

    def resume_reading(self, resume_parser: bool = True) -> None:  # noqa: ARG002, FBT001, FBT002
        self.may_feed.set()


async def _feed(request: Request, stream: aiohttp.StreamReader, flow: _FlowControl) -> None:
    """Move the body to the parser, whose next read raises the error that ends the transfer."""
    try:
        parts = aiter(request.stream())
        while True:
            await flow.may_feed.wait()
            async with asyncio.timeout(STALL_TIMEOUT_S):
                piece = await anext(parts, None)
            if piece is None:
                stream.feed_eof()
                return
            for start in range(0, len(piece), BUFFER_BYTES):
                await flow.may_feed.wait()
                stream.feed_data(piece[start : start + BUFFER_BYTES])
    except TimeoutError:
        stream.set_exception(_body_timeout(STALL_TIMEOUT_S))
    except ClientDisconnect as e:
        stream.set_exception(e)


async def _parsed(reading: Awaitable[T]) -> T:
    try:
        return await reading
    except _BROKEN as e:
        raise _not_multipart(e) from None


def _check_names(part: aiohttp.BodyPartReader) -> None:
    """Raises ApiError for names that are no text: no record or answer could hold them."""
    try:
        for name in (part.name, part.filename):
            (name or "").encode()
    except (ValueError, LookupError):
        message = "a part has a name or a file name that is not UTF-8: rename the file"
        raise invalid_request(message, "file") from None


def _body_timeout(waited_s: float) -> ApiError:
    message = f"the body did not come within {waited_s:g} s"
    return ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="body_timeout")


def _not_multipart(error: Exception) -> ApiError:
    return invalid_request(f"the body is no complete multipart/form-data: {type(error).__name__}")


def _too_large(most_bytes: int) -> ApiError:
    return too_large(f"a file may have {most_bytes} bytes at most", "file")
