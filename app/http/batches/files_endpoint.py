"""Endpoints of OpenAI's Files API. Content passes through in pieces.

A file belongs to the tenant whose key uploaded it; for others it does not exist.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from http import HTTPStatus
from itertools import takewhile
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kvlane.app.http.api_errors import ApiError, invalid_request
from kvlane.app.http.batches.listing import json_response, list_response, page_of, translated
from kvlane.app.http.batches.multipart_upload import MultipartBody, multipart_body
from kvlane.app.http.openai.gateway_deps import GatewayDeps
from kvlane.app.http.server.caller import Caller, caller_of
from kvlane.app.http.server.middleware import TenantSlots
from kvlane.streams.record_types.batch_records import FileCard, FilePurpose

MAX_TRANSFERS = 16
"""Uploads and downloads at a time, of some megabytes each; a tenant has half of them at most."""
LIST_DEFAULT, LIST_MOST = 1000, 10_000
MAX_NAME_CHARS = 255
PURPOSE: FilePurpose = "batch"
_JSONL = "application/jsonl"
Counted = Callable[[AsyncIterator[bytes]], AsyncIterator[bytes]]


class FilesEndpoint:
    def __init__(self, parts: GatewayDeps) -> None:
        self._parts = parts
        self._batches = parts.batches
        self._store = parts.files
        self._transfers = TenantSlots(
            MAX_TRANSFERS, MAX_TRANSFERS // 2, "too many files are being transferred"
        )
        self._arriving: dict[str, dict[object, int]] = {}
        """Bytes of the uploads under way by tenant, oldest first: as announced, or as arrived."""

    async def create(self, request: Request) -> Response:
        caller = caller_of(request)
        await caller.count_request()
        most_bytes = self._room(caller)
        with self._transfers.taken(caller.tenant), translated(), self._arrival(request) as counted:
            async with multipart_body(request, most_bytes) as body:
                card = await self._write(body, caller, counted)
            await self._batches.put_file(card)
            await self._check_kept(card, caller)
        return json_response(file_object(card))

    async def list(self, request: Request) -> Response:
        """The files of the caller's tenant: `purpose`, `limit`, `after`, `order`."""
        purpose = request.query_params.get("purpose")
        cards = (
            card for card in self._batches.view.files(caller_of(request).tenant)
            if purpose in (None, card.purpose)
        )  # fmt: skip
        page, has_more = page_of(cards, request.query_params, LIST_DEFAULT, LIST_MOST)
        return list_response([file_object(card) for card in page], has_more=has_more)

    async def retrieve(self, request: Request) -> Response:
        return json_response(file_object(await self._card(request)))

    async def content(self, request: Request) -> Response:
        """The content of a file, as a stream. Raises ApiError before its first byte."""
        card = await self._card(request)
        pieces = self._pieces(card)
        with translated():
            first = await anext(pieces)

        async def stream() -> AsyncGenerator[bytes, None]:
            async with aclosing(pieces):
                yield first
                async for piece in pieces:
                    yield piece

        return StreamingResponse(
            stream(), headers={"content-length": str(card.size)}, media_type=_JSONL
        )

    async def delete(self, request: Request) -> Response:
        card = await self._card(request)
        self._check_unused(card)
        with translated():
            await self._batches.delete_file(card)
            await self._store.delete(card)
        return json_response({"id": card.id, "object": "file", "deleted": True})

    # ---

    async def _card(self, request: Request) -> FileCard:
        with translated():
            card = await self._batches.file(
                request.path_params["file_id"], caller_of(request).tenant
            )
        if card is None:
            message = "there is no such file, or it is no longer kept"
            raise ApiError(HTTPStatus.NOT_FOUND, message, code="file_not_found")
        return card

    def _check_unused(self, card: FileCard) -> None:
        """Raises ApiError for the input of a batch that has not ended."""
        for job in self._batches.view.jobs(card.tenant):
            if job.input_file_id == card.id and not job.has_ended:
                message = f"{job.id} uses the file: it can be deleted when that has ended"
                raise ApiError(HTTPStatus.CONFLICT, message, code="file_in_use")

    async def _write(self, body: MultipartBody, caller: Caller, counted: Counted) -> FileCard:
        """The card of a file that is completely in the log, once all fields are known."""
        file, tenant = await body.file(), caller.tenant
        file_id = await self._batches.new_id(tenant, self._new_id, caller.terms.file_bytes)
        created_s = self._parts.ctx.clock.wall_ms() // 1000
        written = await self._store.write(file_id, counted(file.content()))
        card = FileCard(
            id=file_id, purpose=PURPOSE, created_s=created_s,
            filename=file.filename[:MAX_NAME_CHARS], tenant=tenant, **written._asdict(),
        )  # fmt: skip
        try:
            fields = await body.fields_after_file()
            if fields.get("purpose") != PURPOSE:
                raise invalid_request("purpose: batch is the one purpose of files", "purpose")  # noqa: TRY301
        except BaseException:
            await self._store.delete(card)
            raise
        return card

    def _new_id(self) -> str:
        return f"file-{self._parts.entity_ids.new()}"

    def _used(self, caller: Caller) -> int:
        return sum(card.size for card in self._batches.view.files(caller.tenant))

    def _room(self, caller: Caller) -> int:
        """Bytes that a new file of the caller may have. Raises ApiError, 429, for none."""
        most, limit = self._parts.settings.http_max_file_bytes, caller.terms.file_bytes
        if limit is None:
            return most
        used = self._used(caller)
        if used + sum(self._arriving.get(caller.tenant, {}).values()) >= limit:
            raise _quota_error(caller, limit)
        return min(most, limit - used)

    @contextmanager
    def _arrival(self, request: Request) -> Iterator[Counted]:
        """Counts the bytes of an upload until its end. It counts for those that begin later."""
        caller, upload, size = caller_of(request), object(), 0
        under_way = self._arriving.setdefault(caller.tenant, {})
        announced = request.headers.get("content-length", "")
        under_way[upload] = int(announced[:20]) if announced.isdecimal() else 0

        async def counted(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
            nonlocal size
            async for piece in pieces:
                size += len(piece)
                under_way[upload] = max(size, under_way[upload])
                before = takewhile(lambda each: each[0] is not upload, under_way.items())
                self._check_size(size + sum(most for _, most in before), caller)
                yield piece

        try:
            yield counted
        finally:
            del under_way[upload]
            if not under_way:
                self._arriving.pop(caller.tenant, None)

    def _check_size(self, more: int, caller: Caller) -> None:
        """Raises ApiError if `more` bytes exceed the quota of the tenant."""
        limit = caller.terms.file_bytes
        if limit is not None and self._used(caller) + more > limit:
            raise _quota_error(caller, limit)

    async def _check_kept(self, card: FileCard, caller: Caller) -> None:
        """Withdraw a file that is beyond the limit with those before it in the log, which other
        gateways wrote at the same time. Raises ApiError."""
        if (limit := caller.terms.file_bytes) is None:
            return
        files = self._batches.view.files(caller.tenant)
        before = sum(each.size for each in takewhile(lambda each: each.id != card.id, files))
        if before + card.size > limit:
            await self._batches.delete_file(card)
            await self._store.delete(card)
            raise _quota_error(caller, limit)

    async def _pieces(self, card: FileCard) -> AsyncGenerator[bytes, None]:
        with self._transfers.taken(card.tenant):
            async with aclosing(self._store.read(card)) as pieces:
                async for piece in pieces:
                    yield piece


def _quota_error(caller: Caller, limit: int) -> ApiError:
    message = f"the files of the tenant may have {limit} bytes together: delete some"
    return caller.refused("file_bytes", message, "file_quota_exceeded")


def file_object(card: FileCard) -> dict[str, Any]:
    return {
        "id": card.id, "object": "file", "bytes": card.size, "created_at": card.created_s,
        "expires_at": card.expires_s, "filename": card.filename,
        "purpose": card.purpose, "status": "processed",
    }  # fmt: skip
