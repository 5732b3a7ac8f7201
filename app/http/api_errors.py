"""Errors in the form of the OpenAI API, or of Anthropic's on its paths.

The one map of codes of the log and errors of `streams` to HTTP. Of the client's data, a message
repeats only the model's name, shortened: the rest may be private, and long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvlane.app.preprocess.prompt_errors import (
    BadModel,
    ContextExceeded,
    InvalidPrompt,
    PreprocessorOverloaded,
    TooLarge,
)
from kvlane.streams.errors import (
    AccessDenied,
    AppendFailed,
    BrokerUnavailable,
    LogClosed,
    NotFound,
    PositionLost,
    RecordTooLarge,
)
from kvlane.streams.records import Chunk, End

OVERLOADED = 529
"""Status of overloaded model servers; HTTP itself does not define it."""
CLIENT_LEFT = 499
"""Status of a cancelled request: neither a fault of the server nor worth a retry."""
DEFAULT_RETRY_AFTER_S = 1.0

_TYPES = {
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
    OVERLOADED: "overloaded_error",
}
_MESSAGE_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    OVERLOADED: "overloaded_error",
}
"""Types of errors of Anthropic's API that have their own status."""
MESSAGES_PATH = "/v1/messages"


class ApiError(Exception):
    """An error response. `param` is the path of a field of the request's body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = int(status)
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def fields(self) -> dict[str, str | None]:
        """The OpenAI error object."""
        return {
            "message": self.message,
            "type": _TYPES.get(self.status)
            or ("server_error" if self.status >= 500 else "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.fields()})

    def message_body(self) -> bytes:
        is_own = self.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        general = "api_error" if is_own else "invalid_request_error"
        error = {"type": _MESSAGE_TYPES.get(self.status, general), "message": self.message}
        return msgspec.json.encode({"type": "error", "error": error})

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """The HTTP response. Retry-After is rounded up to whole seconds."""
        sent_headers = dict(headers or {})
        if self.retry_after_s is not None:
            sent_headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return _ErrorResponse(self, sent_headers)


class _ErrorResponse(Response):
    """An error in the form of the endpoint that was called."""

    def __init__(self, error: ApiError, headers: Mapping[str, str]) -> None:
        super().__init__(error.body(), error.status, headers, media_type="application/json")
        self._error = error
        self._sent_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_messages_path(scope.get("path", "")):
            await super().__call__(scope, receive, send)
            return
        body, status = self._error.message_body(), self._error.status
        other = Response(body, status, self._sent_headers, media_type="application/json")
        await other(scope, receive, send)


def is_messages_path(path: str) -> bool:
    """Whether it is an endpoint of Anthropic's API."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


class _Meaning(NamedTuple):
    status: int
    message: str
    retry: bool = False


_ENDS = {
    "refused": _Meaning(HTTPStatus.BAD_REQUEST, "the request was refused"),
    "invalid": _Meaning(HTTPStatus.BAD_REQUEST, "the request is not valid"),
    "too_large": _Meaning(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the request is too large"),
    "deadline": _Meaning(HTTPStatus.REQUEST_TIMEOUT, "the time limit of the request is over"),
    "cancelled": _Meaning(CLIENT_LEFT, "the request was cancelled"),
    "no_workers": _Meaning(HTTPStatus.SERVICE_UNAVAILABLE, "the model has no worker", retry=True),
    "none_eligible": _Meaning(
        HTTPStatus.SERVICE_UNAVAILABLE, "no worker satisfies the request's constraints", retry=True
    ),
    "all_busy": _Meaning(OVERLOADED, "all eligible workers are at capacity", retry=True),
    "pinned_gone": _Meaning(HTTPStatus.SERVICE_UNAVAILABLE, "the pinned worker does not exist"),
    "pinned_busy": _Meaning(
        HTTPStatus.SERVICE_UNAVAILABLE, "the pinned worker is at capacity", retry=True
    ),
    "pin_not_allowed": _Meaning(HTTPStatus.BAD_REQUEST, "the pinned worker is not allowed"),
    "model_not_found": _Meaning(HTTPStatus.NOT_FOUND, "no worker serves this model"),
    "queue_full": _Meaning(OVERLOADED, "the queue for workers is full", retry=True),
    "attempts": _Meaning(HTTPStatus.INTERNAL_SERVER_ERROR, "the request failed on several workers"),
    "lost": _Meaning(HTTPStatus.INTERNAL_SERVER_ERROR, "the answer cannot be continued"),
    "internal": _Meaning(HTTPStatus.INTERNAL_SERVER_ERROR, "the request failed"),
}
"""HTTP errors by the code of a router's end. Unknown codes of newer routers are server errors."""

WHOLE_CODES = ("stop", "length")
"""Codes of a router's end after a complete answer."""


def error_of_piece(piece: Chunk | End) -> ApiError | None:
    """The error that a piece ends its answer with; None if it does not fail."""
    if isinstance(piece, End):
        if piece.code in WHOLE_CODES:
            return None
        meaning = _ENDS.get(piece.code, _ENDS["internal"])
        retry_after_s = piece.retry_after_s or (DEFAULT_RETRY_AFTER_S if meaning.retry else None)
        return ApiError(
            meaning.status,
            piece.message or meaning.message,
            code=piece.code,
            retry_after_s=retry_after_s,
        )
    if piece.finish_reason == "error" and piece.invalid:
        status = piece.invalid_status if 400 <= piece.invalid_status < 500 else 400
        return ApiError(status, piece.invalid, code="invalid")
    if piece.finish_reason == "error":
        return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "the engine failed", code="error")
    if piece.finish_reason == "cancelled":
        return ApiError(CLIENT_LEFT, _ENDS["cancelled"].message, code="cancelled")
    return None


def error_of_stream(error: Exception) -> ApiError:
    """The HTTP error for an error of the log; any other exception is a server error."""
    if isinstance(error, RecordTooLarge):
        return too_large(str(error))
    if isinstance(error, NotFound | PositionLost):
        return unknown_stream(was_cut=isinstance(error, PositionLost))
    if isinstance(error, LogClosed):
        return gateway_stopping()
    if isinstance(error, BrokerUnavailable | AppendFailed):
        return unavailable("Kafka is temporarily unavailable", "log_unavailable")
    if isinstance(error, AccessDenied):  # the log of the process has details for operators
        message = "Kafka denied access: check the credentials and ACLs of this gateway"
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="log_denied")
    message = "internal error of the gateway; its log has the details"
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="internal")


def unknown_stream(*, was_cut: bool = False) -> ApiError:
    """The error for a stream that does not exist or belongs to another tenant."""
    message = "there is no such stream, or it is no longer kept"
    if was_cut:
        message = "the beginning of this stream is no longer kept"
    return ApiError(HTTPStatus.NOT_FOUND, message, code="stream_not_found")


def error_of_prompt(error: InvalidPrompt | PreprocessorOverloaded | BadModel) -> ApiError:
    """The HTTP error for an invalid prompt or an unusable model."""
    if isinstance(error, TooLarge):
        return too_large(str(error), error.field or None)
    if isinstance(error, ContextExceeded):
        return invalid_request(str(error), error.field or None, code="context_length_exceeded")
    if isinstance(error, InvalidPrompt):
        return invalid_request(str(error), error.field or None)
    if isinstance(error, PreprocessorOverloaded):
        return overloaded(str(error))
    return unavailable("the model cannot be used at the moment", "model_unavailable", "model")


def invalid_request(
    message: str, param: str | None = None, *, code: str = "invalid_value"
) -> ApiError:
    """A client error, 400."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, code=code, param=param)


def too_large(message: str, param: str | None = None) -> ApiError:
    """The error of a body or an answer beyond a limit, 413."""
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="too_large", param=param)


def unavailable(message: str, code: str, param: str | None = None) -> ApiError:
    """The error of an object that is missing for the moment, 503: the client may retry."""
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        message,
        code=code,
        param=param,
        retry_after_s=DEFAULT_RETRY_AFTER_S,
    )


def overloaded(message: str) -> ApiError:
    return ApiError(OVERLOADED, message, code="overloaded", retry_after_s=DEFAULT_RETRY_AFTER_S)


def gateway_stopping(message: str = "this gateway is stopping") -> ApiError:
    """The error of a process that is shutting down; another one accepts the request."""
    return unavailable(message, "stopping")


def deadline_exceeded(waited_s: float) -> ApiError:
    """The error for a request that no router ended within its deadline."""
    message = f"no end within {waited_s:g} s"
    return ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="deadline")
