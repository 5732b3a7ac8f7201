"""Tests of errors behind the gateway, in the form of its clients."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from kvlane.app.http.api_errors import (
    ApiError,
    error_of_piece,
    error_of_prompt,
    error_of_stream,
    invalid_request,
    overloaded,
)
from kvlane.app.preprocess.prompt_errors import (
    BadModel,
    InvalidPrompt,
    PreprocessorOverloaded,
    TooLarge,
)
from kvlane.streams.errors import (
    AccessDenied,
    AppendFailed,
    BrokerUnavailable,
    LogClosed,
    PositionLost,
    RecordTooLarge,
    UnknownType,
)
from kvlane.streams.records import Chunk, End, EndCode


def error_of(error: ApiError) -> dict[str, Any]:
    got: dict[str, Any] = json.loads(error.body())["error"]
    return got


def chunk(reason: str | None) -> Chunk:
    return Chunk(id="a", attempt=0, run="1", seq=0, index=0, finish_reason=reason)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("refused", 400),
        ("invalid", 400),
        ("too_large", 413),
        ("deadline", 408),
        ("cancelled", 499),
        ("no_workers", 503),
        ("model_not_found", 404),
        ("queue_full", 529),
        ("attempts", 500),
        ("lost", 500),
        ("internal", 500),
        ("a code of a newer router", 500),
    ],
)
def test_status_of_an_end(code: str, status: int) -> None:
    error = error_of_piece(End(id="a", code=code, message="why"))
    assert error is not None
    assert (error.status, error.code, error.message) == (status, code, "why")


def test_every_end_has_a_meaning_or_is_whole() -> None:
    for code in get_args(EndCode):
        error = error_of_piece(End(id="a", code=code))
        assert (error is None) == (code in ("stop", "length"))
        assert error is None or error.message


@pytest.mark.parametrize("reason", [None, "stop", "length", "content_filter", "tool_calls"])
def test_pieces_without_a_failure(reason: str | None) -> None:
    assert error_of_piece(chunk(reason)) is None


@pytest.mark.parametrize(("reason", "status"), [("error", 500), ("cancelled", 499)])
def test_last_chunk_can_be_a_failure(reason: str, status: int) -> None:
    error = error_of_piece(chunk(reason))
    assert error is not None
    assert error.status == status


def test_retry_after_is_whole_seconds_rounded_up() -> None:
    error = error_of_piece(End(id="a", code="queue_full", retry_after_s=1.2))
    assert error is not None
    assert error.response().headers["retry-after"] == "2"


@pytest.mark.parametrize("code", ["no_workers", "queue_full"])
def test_transient_error_has_retry_after(code: str) -> None:
    error = error_of_piece(End(id="a", code=code))
    assert error is not None
    assert error.response().headers["retry-after"] == "1"


def test_body_is_an_openai_error_object() -> None:
    response = invalid_request("must not be empty", "messages").response()
    assert response.headers["content-type"] == "application/json"
    assert json.loads(bytes(response.body)) == {
        "error": {
            "message": "must not be empty",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "invalid_value",
        }
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (408, "timeout_error"),
        (500, "server_error"),
        (503, "service_unavailable_error"),
        (529, "overloaded_error"),
    ],
)
def test_type_follows_the_status(status: int, kind: str) -> None:
    assert error_of(ApiError(status, "x", code="y"))["type"] == kind


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RecordTooLarge("x"), 413),
        (PositionLost("responses", 1, 2, 3), 404),
        (LogClosed("x"), 503),
        (BrokerUnavailable("x"), 503),
        (AppendFailed("x"), 503),
        (AccessDenied("secret"), 503),
        (UnknownType("x"), 500),
        (ValueError("secret"), 500),
    ],
)
def test_status_of_an_error(error: Exception, status: int) -> None:
    got = error_of_stream(error)
    assert got.status == status
    assert "secret" not in got.message


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (InvalidPrompt("messages.0.role", "unknown"), 400, "messages.0.role"),
        (InvalidPrompt("", "not text"), 400, None),
        (TooLarge("", "more than is taken"), 413, None),
        (PreprocessorOverloaded("x"), 529, None),
        (BadModel("/secret/path"), 503, "model"),
    ],
)
def test_status_of_prompt_errors(
    error: InvalidPrompt | PreprocessorOverloaded | BadModel, status: int, param: str | None
) -> None:
    got = error_of_prompt(error)
    assert (got.status, got.param) == (status, param)
    assert "secret" not in got.message


def test_overload_has_retry_after() -> None:
    assert overloaded("x").response().headers["retry-after"] == "1"
