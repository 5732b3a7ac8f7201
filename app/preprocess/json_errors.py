"""Error messages for malformed JSON, with the position of the error.

msgspec names the position of a wrong byte within its string only, and takes the escape of a lone
surrogate near the end for a truncated body.
"""

from __future__ import annotations

import re

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_ESCAPE = 6
"""Bytes of an escape."""
_POSITION = re.compile(r"surrogate.*\(byte (\d+)\)")


def json_error(body: bytes, error: Exception) -> str:
    """The reason that msgspec's decoder raised this error for a body."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if isinstance(error, UnicodeDecodeError):
        return _wrong_byte(body) or str(error)
    message = str(error)
    at = None
    if found := _POSITION.search(message):
        at = _lone_before(body, int(found[1]))
    elif "truncated" in message:
        at = _lone_at_end(body)
        message = f"it ends within a value, after {len(body)} bytes"
    if at is None:
        return message
    return f"the escape at byte {at} is a lone surrogate (one half of a character)"


def _wrong_byte(body: bytes) -> str:
    try:
        body.decode()
    except UnicodeDecodeError as e:
        return f"byte 0x{body[e.start]:02x} at position {e.start} is not UTF-8"
    return ""


def _lone_before(body: bytes, end: int) -> int | None:
    """Start of the escape that the decoder rejects: the last or last but one there."""
    for at in (end - _ESCAPE, end - 2 * _ESCAPE):
        if at >= 0 and _SURROGATE.match(body, at):
            return at
    return None


def _lone_at_end(body: bytes) -> int | None:
    """Start of an escape that is too near to the end for its second half."""
    for found in _SURROGATE.finditer(body, max(0, len(body) - 2 * _ESCAPE)):
        before = body[: found.start()]
        backslashes = len(before) - len(before.rstrip(b"\\"))
        if backslashes % 2 == 0:
            return found.start()
    return None
