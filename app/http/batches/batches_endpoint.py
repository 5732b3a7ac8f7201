"""Endpoints of OpenAI's Batch API (work: `app/batches/job_runner.py`).

A job belongs to the tenant whose key created it; for others it does not exist.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvlane.app.batches.batch_log import BatchLog
from kvlane.app.http.api_errors import ApiError, invalid_request
from kvlane.app.http.batches.listing import json_response, list_response, page_of, translated
from kvlane.app.http.openai.completions import parse_body
from kvlane.app.http.openai.gateway_deps import GatewayDeps
from kvlane.app.http.server.caller import Caller, caller_of
from kvlane.app.http.server.middleware import BodyLimiter
from kvlane.app.preprocess.thread_pool import run_cooperatively
from kvlane.streams.record_types.batch_records import BatchCancel, BatchEndpoint, BatchJob

LIST_DEFAULT, LIST_MOST = 20, 100
MAX_METADATA = 16
DEFAULT_WINDOW = "24h"
_WINDOW = re.compile(r"([1-9][0-9]{0,3})([mhd])")
_UNIT_S = {"m": 60, "h": 3600, "d": 24 * 3600}

_MetadataKey = Annotated[str, msgspec.Meta(max_length=64)]
_MetadataValue = Annotated[str, msgspec.Meta(max_length=512)]


class NewBatch(msgspec.Struct, frozen=True):
    """The body of a request for a new batch. Other fields are ignored."""

    input_file_id: str
    endpoint: BatchEndpoint
    completion_window: (
        Annotated[str, msgspec.Meta(extra_json_schema={"pattern": f"^{_WINDOW.pattern}$"})] | None
    ) = None
    metadata: (
        Annotated[dict[_MetadataKey, _MetadataValue], msgspec.Meta(max_length=MAX_METADATA)] | None
    ) = None


class BatchesEndpoint:
    def __init__(self, parts: GatewayDeps) -> None:
        self._parts = parts
        self._batches = parts.batches
        self._bodies = BodyLimiter(parts.settings.http_max_body_bytes)
        self._creating: Counter[str] = Counter()
        """Batches that are being created, by tenant."""

    async def create(self, request: Request) -> Response:
        caller = caller_of(request)
        await caller.count_request()
        await caller.require_budget()
        async with self._bodies.read(request) as body:
            fields, _ = await run_cooperatively(parse_body(body.content))
        wanted = _new_batch(fields)
        window = DEFAULT_WINDOW if wanted.completion_window is None else wanted.completion_window
        window_s = self._window_s(window)
        limit = caller.terms.batches
        with self._creation(caller), translated():
            file = await self._batches.file(wanted.input_file_id, caller.tenant)
            if file is None or file.purpose != "batch":
                message = "input_file_id: there is no such file of the purpose batch"
                raise invalid_request(message, "input_file_id", code="file_not_found")
            if file.expires_s < self._now_s() + window_s:
                message = "input_file_id: the file expires within the window: upload it again"
                raise invalid_request(message, "input_file_id", code="file_expires")
            job = BatchJob(
                id=await self._batches.new_id(caller.tenant, self._new_id, limit),
                endpoint=wanted.endpoint,
                input_file_id=file.id,
                created_s=self._now_s(),
                window_s=window_s,
                completion_window=window,
                tenant=caller.tenant,
                cache_salt=self._cache_salt(caller),
                metadata=wanted.metadata,
                most_open=limit or 0,
                key_id=caller.key_id,
            )
            await self._batches.put_job(job)
        if self._batches.view.job(job.id, caller.tenant) is None:  # others came before it
            raise _limit_error(caller, limit or 0)
        return self._response(job)

    async def list(self, request: Request) -> Response:
        """The batches of the caller's tenant: `limit`, `after`, `order`."""
        jobs = self._batches.view.jobs(caller_of(request).tenant)
        page, has_more = page_of(jobs, request.query_params, LIST_DEFAULT, LIST_MOST)
        objects = [batch_object(job, self._batches) for job in page]
        return list_response(objects, has_more=has_more)

    async def retrieve(self, request: Request) -> Response:
        return self._response(await self._job(request))

    async def cancel(self, request: Request) -> Response:
        """Cancel a batch; one that is cancelled already stays so. Raises ApiError."""
        job = await self._job(request)
        if job.has_ended and job.status != "cancelled":
            message = f"the batch is {job.status}, it can no longer be cancelled"
            raise ApiError(HTTPStatus.CONFLICT, message, code="batch_ended")
        if not job.has_ended and self._batches.view.cancelled_s(job.id) is None:
            with translated():
                await self._batches.put_cancel(BatchCancel(id=job.id, at_s=self._now_s()))
        return self._response(job)

    # ---

    async def _job(self, request: Request) -> BatchJob:
        with translated():
            job = await self._batches.job(
                request.path_params["batch_id"], caller_of(request).tenant
            )
        if job is None:
            message = "there is no such batch, or it is no longer kept"
            raise ApiError(HTTPStatus.NOT_FOUND, message, code="batch_not_found")
        return job

    def _response(self, job: BatchJob) -> Response:
        return json_response(batch_object(job, self._batches))

    def _window_s(self, window: str) -> int:
        most_s = int(self._parts.settings.batch_max_lifetime_s)
        match = _WINDOW.fullmatch(window)
        length_s = int(match[1]) * _UNIT_S[match[2]] if match else 0
        if not 0 < length_s <= most_s:
            message = f"completion_window: give 24h, 90m or 7d, {most_s} s at most"
            raise invalid_request(message, "completion_window")
        return length_s

    @contextmanager
    def _creation(self, caller: Caller) -> Iterator[None]:
        """Count a batch that is being created. Raises ApiError beyond the limit of the tenant. Of
        those that several gateways create at a time, the log decides: see `most_open`."""
        limit, tenant = caller.terms.batches, caller.tenant
        opened = sum(not job.has_ended for job in self._batches.view.jobs(tenant))
        if limit is not None and opened + self._creating[tenant] >= limit:
            raise _limit_error(caller, limit)
        self._creating[tenant] += 1
        try:
            yield
        finally:
            self._creating[tenant] -= 1
            self._creating += Counter()  # without the tenants that create none

    def _new_id(self) -> str:
        return f"batch_{self._parts.entity_ids.new()}"

    def _cache_salt(self, caller: Caller) -> str:
        if not caller.tenant or caller.terms.share_cache:
            return ""
        return self._parts.streams.seal.cache_salt(caller.tenant, "")

    def _now_s(self) -> int:
        return self._parts.ctx.clock.wall_ms() // 1000


def _limit_error(caller: Caller, limit: int) -> ApiError:
    message = f"{limit} batches of the tenant may be open at a time: wait for the end of one"
    return caller.refused("batches", message, "batch_limit_exceeded")


def _new_batch(fields: dict[str, Any]) -> NewBatch:
    try:
        return msgspec.convert(fields, NewBatch)
    except msgspec.ValidationError as e:
        message, _, path = str(e).partition(" - at `$.")
        missing = re.search(r"required field `(\w+)`", message)
        field = missing[1] if missing else re.split(r"[\[.`]", path)[0]
        raise invalid_request(f"{field}: {message}", field or None) from None


def batch_object(job: BatchJob, batches: BatchLog) -> dict[str, Any]:
    cancelled_s = batches.view.cancelled_s(job.id)
    status: str = job.status
    if cancelled_s is not None and not job.has_ended:
        status = "cancelling"

    def ended(name: str) -> int | None:
        return job.ended_s if job.status == name else None

    errors = [
        {"code": e.code, "message": e.message, "line": e.line, "param": e.param} for e in job.errors
    ]
    return {
        "id": job.id, "object": "batch", "endpoint": job.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": job.input_file_id, "completion_window": job.completion_window,
        "status": status, "output_file_id": job.output_file_id or None,
        "error_file_id": job.error_file_id or None, "created_at": job.created_s,
        "in_progress_at": job.in_progress_s or None, "expires_at": job.expires_s,
        "finalizing_at": job.finalizing_s or None, "completed_at": ended("completed"),
        "failed_at": ended("failed"), "expired_at": ended("expired"),
        "cancelling_at": cancelled_s, "cancelled_at": ended("cancelled"),
        "request_counts": {
            "total": job.lines, "completed": job.completed, "failed": job.failed,
        },
        "metadata": job.metadata,
    }  # fmt: skip
