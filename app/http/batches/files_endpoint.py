"""Endpoints of OpenAI's Files API: upload, list, retrieve, download, delete.

A file belongs to the tenant whose key uploaded it; for others it does not exist. Content passes
through in pieces, and never is whole in memory.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from app.http.api_errors import ApiError, invalid_request, overloaded
from app.http.authentication import Caller, caller_of
from app.http.batches.listing import json_response, list_response, page_of, translated
from app.http.batches.multipart_upload import MultipartBody, multipart_body
from app.http.openai.gateway_deps import GatewayDeps
from streams.batch_records import FileCard, FilePurpose
from streams.topics import FILE_RETENTION_MS

MAX_TRANSFERS = 16
"""Uploads and downloads at a time, of some megabytes of memory each; more are refused."""
LIST_DEFAULT, LIST_MOST = 1000, 10_000
MAX_NAME_CHARS = 255
PURPOSE: FilePurpose = "batch"
_JSONL = "application/jsonl"


class FilesEndpoint:
    """Handlers of `/v1/files`."""

    def __init__(self, parts: GatewayDeps) -> None:
        self._parts = parts
        self._batches = parts.batches
        self._store = parts.files
        self._transfers = 0

    async def create(self, request: Request) -> Response:
        """Upload a file. Raises ApiError."""
        caller = caller_of(request)
        caller.count_request()
        most_bytes = self._room(caller)
        with self._transfer(), translated():
            async with multipart_body(request, most_bytes) as body:
                card = await self._write(body, caller.tenant)
            await self._batches.put_file(card)
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
        """One file. Raises ApiError."""
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
        """Delete a file. Raises ApiError."""
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
            raise unknown_file()
        return card

    def _check_unused(self, card: FileCard) -> None:
        """Raises ApiError for the input of a batch that has not ended."""
        for job in self._batches.view.jobs(card.tenant):
            if job.input_file_id == card.id and not job.has_ended:
                message = f"{job.id} uses the file: it can be deleted when that has ended"
                raise ApiError(HTTPStatus.CONFLICT, message, code="file_in_use")

    async def _write(self, body: MultipartBody, tenant: str) -> FileCard:
        """The card of a file that is completely in the log, once all fields are known."""
        file = await body.file()
        file_id = f"file-{self._parts.entity_ids.new()}"
        written = await self._store.write(file_id, file.content())
        card = FileCard(
            id=file_id, purpose=PURPOSE, created_s=self._parts.ctx.clock.wall_ms() // 1000,
            filename=file.filename[:MAX_NAME_CHARS], tenant=tenant, **written._asdict(),
        )  # fmt: skip
        try:
            _check_purpose(await body.fields_after_file())
        except BaseException:
            await self._store.delete(card)
            raise
        return card

    def _room(self, caller: Caller) -> int:
        """Bytes that a new file of the caller may have. Raises ApiError, 429, for none."""
        most = self._parts.settings.http_max_file_bytes
        limit = caller.terms.file_bytes
        if limit is None:
            return most
        kept = sum(card.size for card in self._batches.view.files(caller.tenant))
        if kept >= limit:
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"the files of the tenant have {kept} bytes, {limit} are allowed: delete some",
                code="file_quota_exceeded",
            )
        return min(most, limit - kept)

    @contextmanager
    def _transfer(self) -> Iterator[None]:
        if self._transfers >= MAX_TRANSFERS:
            raise overloaded("too many files are being transferred")
        self._transfers += 1
        try:
            yield
        finally:
            self._transfers -= 1

    async def _pieces(self, card: FileCard) -> AsyncGenerator[bytes, None]:
        with self._transfer():
            async with aclosing(self._store.read(card)) as pieces:
                async for piece in pieces:
                    yield piece


def _check_purpose(fields: Mapping[str, str]) -> None:
    """Raises ApiError."""
    if fields.get("purpose") != PURPOSE:
        raise invalid_request("purpose: batch is the one purpose of files", "purpose")


def file_object(card: FileCard) -> dict[str, Any]:
    """A file in OpenAI's form."""
    return {
        "id": card.id, "object": "file", "bytes": card.size, "created_at": card.created_s,
        "expires_at": card.created_s + FILE_RETENTION_MS // 1000, "filename": card.filename,
        "purpose": card.purpose, "status": "processed",
    }  # fmt: skip


def unknown_file() -> ApiError:
    """The error for a file that does not exist or belongs to another tenant."""
    message = "there is no such file, or it is no longer kept"
    return ApiError(HTTPStatus.NOT_FOUND, message, code="file_not_found")
