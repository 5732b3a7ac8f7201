"""Records of `results`, keyed by request id: one for each finished request."""

# ruff: noqa: RUF012 - msgspec gives each struct its own copy of an empty default

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from kvlane.streams.record_base import PublicRecord


class ResultError(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An error in the form of the OpenAI API. Part of a Result."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ResultUsage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Token counts of a request, over all its attempts. Part of a Result.

    `unknown`: the names of those that its server has not reported, which are 0; absent for none.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    cached_tokens: int = 0
    unknown: tuple[str, ...] | UnsetType = UNSET


class ResultTimings(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Times of a request in milliseconds, all between append times. Part of a Result.

    They count from the append of its prompt, over HTTP from that of its request. `queued_ms`: until
    the append of its request; `ttft_ms`: until its first tokens, None without any; `total_ms`:
    until its end. `finished_ms`: the end, in ms since 1970.
    """

    queued_ms: int = 0
    ttft_ms: int | None = None
    total_ms: int = 0
    finished_ms: int = 0


class Result(PublicRecord, frozen=True, tag="Result", omit_defaults=False):
    """A finished request, as one record. All fields are present on the wire.

    `status`: completed, failed or cancelled; `status_code`: that of the HTTP response. `body`:
    the response object of the OpenAI API; None for one that did not complete, which has an `error`.
    `kind`, `metadata`, `batch_id`, `custom_id`: those of the prompt. `attempts`: how often it was
    begun, 0 for a request that never was.
    """

    id: str
    status: str
    status_code: int
    model: str = ""
    kind: str = "chat"
    body: dict[str, Any] | None = None
    usage: ResultUsage | None = None
    error: ResultError | None = None
    timings: ResultTimings = ResultTimings()
    attempts: int = 0
    metadata: dict[str, Any] = {}
    batch_id: str = ""
    custom_id: str = ""
