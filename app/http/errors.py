"""What goes wrong, in the words of the OpenAI API: a status, and a body that names the field.

The one place where codes of the log and errors of `streams` become HTTP. A message never repeats
what the client sent: it may be private, and it may be megabytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple

import msgspec
from starlette.responses import Response

from app.preprocess.errors import BadModel, InvalidPrompt, Overloaded, TooLarge
from streams.errors import (
    AppendFailed,
    BrokerUnavailable,
    Denied,
    LogClosed,
    PositionLost,
    RecordTooLarge,
)
from streams.records import Chunk, End

OVERLOADED = 529
"""What servers of models answer when they have enough to do already; HTTP itself has no name."""
CLIENT_LEFT = 499
"""Not the server's fault and nothing to repeat: the answer was cancelled."""
RETRY_AFTER_S = 1.0
"""When to come back, if nobody said."""

_TYPES = {
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
    OVERLOADED: "overloaded_error",
}


class ApiError(Exception):
    """An answer that is an error. `param` is the path of a field of the request's body."""

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

    def body(self) -> bytes:
        """The OpenAI error object, as JSON; it is an event's data as well."""
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status) or _general_type(self.status),
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """The answer. Retry-After is in whole seconds, and not less than asked for."""
        told = dict(headers or {})
        if self.retry_after_s is not None:
            told["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return Response(self.body(), self.status, told, media_type="application/json")


def _general_type(status: int) -> str:
    return "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"


class _Meaning(NamedTuple):
    status: int
    message: str
    retry: bool = False


_ENDS = {
    "refused": _Meaning(HTTPStatus.BAD_REQUEST, "the request was refused"),
    "invalid": _Meaning(HTTPStatus.BAD_REQUEST, "the request is not valid"),
    "too_large": _Meaning(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the request is too large"),
    "deadline": _Meaning(HTTPStatus.REQUEST_TIMEOUT, "the request took longer than it may"),
    "cancelled": _Meaning(CLIENT_LEFT, "the request was cancelled"),
    "no_workers": _Meaning(HTTPStatus.SERVICE_UNAVAILABLE, "no worker can take it", retry=True),
    "none_eligible": _Meaning(
        HTTPStatus.SERVICE_UNAVAILABLE, "no worker has what it asks for", retry=True
    ),
    "all_busy": _Meaning(OVERLOADED, "all workers have enough to do", retry=True),
    "pinned_gone": _Meaning(HTTPStatus.SERVICE_UNAVAILABLE, "the pinned worker is gone"),
    "pinned_busy": _Meaning(
        HTTPStatus.SERVICE_UNAVAILABLE, "the pinned worker cannot take it", retry=True
    ),
    "pin_not_allowed": _Meaning(HTTPStatus.BAD_REQUEST, "the pinned worker is not allowed"),
    "model_not_found": _Meaning(HTTPStatus.NOT_FOUND, "no worker serves this model"),
    "queue_full": _Meaning(OVERLOADED, "too many requests wait", retry=True),
    "attempts": _Meaning(HTTPStatus.INTERNAL_SERVER_ERROR, "it failed on several workers"),
    "lost": _Meaning(HTTPStatus.INTERNAL_SERVER_ERROR, "the answer cannot be continued"),
    "internal": _Meaning(HTTPStatus.INTERNAL_SERVER_ERROR, "the request failed"),
}
"""What a router's end means to a client. Codes of newer routers are errors of the server."""

_WHOLE = ("stop", "length")


def failure_of(piece: Chunk | End) -> ApiError | None:
    """The error that a piece of an answer ends it with; None while all is well."""
    if isinstance(piece, End):
        if piece.code in _WHOLE:
            return None
        meaning = _ENDS.get(piece.code, _ENDS["internal"])
        retry_after_s = piece.retry_after_s or (RETRY_AFTER_S if meaning.retry else None)
        return ApiError(
            meaning.status,
            piece.message or meaning.message,
            code=piece.code,
            retry_after_s=retry_after_s,
        )
    if piece.finish_reason == "error" and piece.invalid:
        return ApiError(HTTPStatus.BAD_REQUEST, piece.invalid, code="invalid")
    if piece.finish_reason == "error":
        return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "the engine failed", code="error")
    if piece.finish_reason == "cancelled":
        return ApiError(CLIENT_LEFT, _ENDS["cancelled"].message, code="cancelled")
    return None


def of_error(error: Exception) -> ApiError:
    """What an error of the log means to a client; any other is an error of ours."""
    if isinstance(error, RecordTooLarge):
        return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error), code="too_large")
    if isinstance(error, PositionLost):
        message = "the beginning of this stream is not kept any more"
        return ApiError(HTTPStatus.NOT_FOUND, message, code="stream_not_found")
    if isinstance(error, LogClosed):
        return stopping()
    if isinstance(error, BrokerUnavailable | AppendFailed):
        return ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "the log takes no requests at the moment",
            code="log_unavailable",
            retry_after_s=RETRY_AFTER_S,
        )
    if isinstance(error, Denied):  # what was refused is for those who run it to read
        return ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "the log refuses this gateway: its credentials or rights have to be changed",
            code="log_denied",
        )
    return ApiError(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "an error of the gateway; its log says more",
        code="internal",
    )


def unknown_stream() -> ApiError:
    """What is told of streams that are not there, and of those of somebody else."""
    message = "there is no such stream, or it is not kept any more"
    return ApiError(HTTPStatus.NOT_FOUND, message, code="stream_not_found")


def of_preprocess_error(error: InvalidPrompt | Overloaded | BadModel) -> ApiError:
    """What is wrong with a prompt, or with the model that it names."""
    if isinstance(error, TooLarge):
        return ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            str(error),
            code="too_large",
            param=error.field or None,
        )
    if isinstance(error, InvalidPrompt):
        return invalid(str(error), error.field or None)
    if isinstance(error, Overloaded):
        return overloaded(str(error))
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "the model cannot be used at the moment",
        code="model_unavailable",
        param="model",
        retry_after_s=RETRY_AFTER_S,
    )


def invalid(message: str, param: str | None = None, *, code: str = "invalid_value") -> ApiError:
    """The client's doing."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, code=code, param=param)


def overloaded(message: str) -> ApiError:
    """More to do than this process takes on."""
    return ApiError(OVERLOADED, message, code="overloaded", retry_after_s=RETRY_AFTER_S)


def stopping(message: str = "this gateway is stopping") -> ApiError:
    """This process takes nothing new; another one, or the next, does."""
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        message,
        code="stopping",
        retry_after_s=RETRY_AFTER_S,
    )


def overdue(waited_s: float) -> ApiError:
    """Nobody ended the request in its time: routers or the log do not answer."""
    message = f"no end within {waited_s:g} s"
    return ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="deadline")
