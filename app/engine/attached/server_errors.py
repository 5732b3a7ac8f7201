"""Errors of a server: from its statuses, and the objects in its bodies and events, to EngineErrors.

The status decides whether another worker may succeed: that of HTTP, or in an answer that began with
200 the number that the error names (`code`, `status`), or that of a word in its code or type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvlane.app.engine.interface import EngineError, EngineFull, InvalidRequest

RETRYABLE_4XX = frozenset({401, 402, 403, 404, 405, 408, 409, 421, 425, 429})
"""Statuses about the server or the caller (unknown model, wrong key, rate limit), not about the
request: a worker with another server may succeed."""
CREDENTIAL_STATUSES = frozenset({401, 402, 403})
"""Statuses about the operator's account, whose messages are not for clients."""
OVERLOADED_STATUSES = frozenset({429, 503, 529})
"""Statuses of an overloaded server, or one that is not ready yet."""
DONE = b"[DONE]"
"""The event after the last one of an answer."""
MAX_MESSAGE_CHARS = 2000
_MAX_PLAIN_CHARS = 500
_MAX_NESTING = 4


class ServerFailed(EngineError):
    """The server did not answer, or not correctly; another one may. `status`: its HTTP status."""

    correction = (
        "See the server's own log. KVLANE_ATTACH_URL must name an OpenAI-compatible server."
    )

    def __init__(self, message: str, status: int | None = None, reason: str = "") -> None:
        super().__init__(message, retryable=True, reason=reason)
        self.status = status


class ConnectionBroken(ServerFailed):
    """The server cannot be reached, or the connection to it broke."""


class ServerSilent(ConnectionBroken):
    """The server sent nothing in time."""

    is_stall = True


class ResponseTooLarge(ServerFailed):
    """The server sent more than the limit of one event, or of one answer.
    KVLANE_ATTACH_MAX_RESPONSE_BYTES bounds answers."""


class ServerOverloaded(ServerFailed, EngineFull):
    """The server is overloaded."""


class RequestRejected(InvalidRequest):
    """The server rejects the request itself. `status`: its HTTP status."""


def error_for_status(status: int, message: str, *, is_exhausted: bool = False) -> EngineError:
    """The error for a status. `is_exhausted`: 429 because a quota is used up, which waiting does
    not change."""
    if 400 <= status < 500 and status not in RETRYABLE_4XX:
        return RequestRejected(message or f"the server answered {status}", status)
    kind = ServerOverloaded if status in OVERLOADED_STATUSES else ServerFailed
    if is_exhausted:
        kind = ServerFailed
    text = f"the server answered {status}"
    reason = text if status in CREDENTIAL_STATUSES or not message else f"{text}: {message}"
    return kind(f"{text}: {message}" if message else text, status, reason)


def error_of_body(status: int, body: bytes) -> EngineError:
    """The error of a response with a status other than 200."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return error_for_status(status, plain_message(body))
    return error_for_status(status, _message(fields), is_exhausted=_is_exhausted(fields))


def error_of_text(text: bytes | bytearray) -> EngineError:
    """The error of a text in the place of an answer, or of an event that is called an error."""
    try:
        fields = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        said = f"the server sent no answer: {plain_message(text)}"
        return ServerFailed(said, reason=said)
    given = fields if isinstance(fields, dict) else {"error": fields}
    return error_of_event(given) or error_of_event({"error": given or "an empty error"})  # type: ignore[return-value]


def is_json(text: bytes | bytearray) -> bool:
    """True for one JSON object, or `[DONE]`."""
    if text.strip() == DONE:
        return True
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return False


def is_answer(text: bytes | bytearray) -> bool:
    """True for a JSON object that may be an answer, or an error in one of the usual forms."""
    try:
        fields = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return text.strip() == DONE
    return "choices" in fields or error_of_event(fields) is not None


def error_of_event(fields: Mapping[str, Any]) -> EngineError | None:
    """The error in an event, or in the body of a 200; None if it is a part of an answer."""
    found = _error_in(fields)
    if found is None:
        return None
    message = _message(found) or _message(fields)
    status = _status(found, fields)
    return error_for_status(status, message, is_exhausted=_is_exhausted(found))


def plain_message(body: bytes | bytearray) -> str:
    """The beginning of a body that is no JSON, without the marks of HTML."""
    text = bytes(body[: 8 * _MAX_PLAIN_CHARS]).decode(errors="replace")
    if text.lstrip().startswith("<"):
        text = re.sub(r"(?is)<(script|style)\b.*?(</\1>|$)|<[^>]*(>|$)", " ", text)
    return " ".join(text.split())[:_MAX_PLAIN_CHARS]


# --- forms of error objects ------------------------------------------------------------------


def _error_in(fields: Mapping[str, Any]) -> Any:
    if error := fields.get("error") or fields.get("errors"):
        return error
    if fields.get("object") == "error" or fields.get("type") == "error":
        return fields  # older servers have no field for it
    if fields.get("choices"):
        first = fields["choices"][0] if isinstance(fields["choices"], list) else None
        return (first.get("error") or None) if isinstance(first, dict) else None
    is_told = any(fields.get(name) for name in _OWN_MESSAGES)
    if fields.get("detail") or (is_told and _has_status(fields)):
        return fields
    return None


def _has_status(fields: Mapping[str, Any]) -> bool:
    return any(fields.get(name) is not None for name in (*_STATUS_FIELDS, "type"))


_STATUS_FIELDS = (
    "code", "status", "status_code", "statusCode", "http_status", "httpStatus", "error_code",
)  # fmt: skip
_OWN_MESSAGES = ("message", "msg", "error_message", "error_msg")
"""Fields with the message of an error that is the whole body."""
_MESSAGE_FIELDS = ("message", "msg", "detail", "details", *_OWN_MESSAGES[2:], "title", "reason")


def _message(error: Any) -> str:
    for level in _levels(error):
        if isinstance(level, str):
            return level[:MAX_MESSAGE_CHARS]
        for name in _MESSAGE_FIELDS:
            value = level.get(name)
            if value and isinstance(value, str):
                return value[:MAX_MESSAGE_CHARS]
            if isinstance(value, list) and value:
                return str(value)[:MAX_MESSAGE_CHARS]
    texts = (
        level[name] for level in _levels(error) if isinstance(level, dict)
        for name in ("code", "type", "status") if isinstance(level.get(name), str)
    )  # fmt: skip
    return next(texts, "")[:MAX_MESSAGE_CHARS]


def _levels(error: Any) -> Iterator[dict[str, Any] | str]:
    at = error
    for _ in range(_MAX_NESTING):
        if isinstance(at, list):
            at = at[0] if at else None
        if not isinstance(at, dict | str) or not at:
            return
        yield at
        if isinstance(at, str):
            return
        inner = (at.get(name) for name in ("error", "errors", "message", "detail"))
        at = next((value for value in inner if isinstance(value, dict | list) and value), None) or (
            at["error"] if isinstance(at.get("error"), str) else None
        )


def _status(*errors: Any) -> int:
    """The status that an error names, by a number or else by a word."""
    levels = [x for error in errors for x in _levels(error) if isinstance(x, dict)]
    named = [level.get(name) for level in levels for name in _STATUS_FIELDS]
    for value in named:
        if (number := _number(value)) is not None:
            return number
    for value in (*named, *(level.get("type") for level in levels)):
        if isinstance(value, str) and (status := _status_of_word(value)) is not None:
            return status
    return 500


def _number(value: Any) -> int | None:
    """A status as a number, or as a text that begins with one."""
    if isinstance(value, str):
        found = re.match(r"\s*([45]\d\d)(?!\w)", value)
        value = int(found[1]) if found else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 400 <= value <= 599 else None


_WORDS = (
    (401, r"apikey|authentication|unauthenticated|unauthorized|credential"),
    (403, r"permission|forbidden"),
    (429, r"ratelimit|toomany|throttl|quota|resourceexhausted|requestlimit|insufficientbalance"),
    (429, r"concurren|per(second|minute|hour|day|month)|usagelimit|billing|credits|spend"),
    (404, r"notfound"),
    (503, r"overload|unavailable|capacity|serverbusy|notready|loading"),
    (504, r"timeout|timedout|deadline"),
    (413, r"toolarge"),
    (422, r"unprocessable"),
    (400, r"badrequest|invalid|context|unsupported|notsupported|validation|contentfilter"),
    (400, r"contentpolicy|safety|toolong|exceed|missing|outofrange|precondition"),
)


def _status_of_word(word: str) -> int | None:
    """The status for a code or a type in words."""
    letters = re.sub(r"[^a-z]", "", word.lower())
    return next((status for status, words in _WORDS if re.search(words, letters)), None)


def _is_exhausted(error: Any) -> bool:
    """True for an error by which the operator's account at the server has no credit left."""
    words = [level.get(name) for level in _levels(error) if isinstance(level, dict)
             for name in ("code", "type")]  # fmt: skip
    return any(isinstance(w, str) and re.search("quota|balance|billing", w.lower()) for w in words)
