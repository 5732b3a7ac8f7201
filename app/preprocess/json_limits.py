"""Limits on JSON bodies and on the requests made from them, and errors of malformed ones.

A parser takes time and memory for each value, so they are counted before parsing: first as upper
bounds, with brackets and commas in strings; only above a limit without.
"""

from __future__ import annotations

import codecs
import re
from typing import Any, NamedTuple

import msgspec

from kvlane.app.preprocess.prompt_errors import TooLarge
from kvlane.app.preprocess.thread_pool import Steps

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_ESCAPE = 6
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


UNCHECKED_BYTES = 64 * 1024
"""Shorter bodies are not counted: parsing and validation take a few milliseconds."""
MAX_PARTS = 2**16
"""Objects, lists and strings in a body, the names of fields among them."""
MAX_VALUES = 2**19
"""Values in all lists and objects together, mostly token ids."""
MAX_RENDERED_VALUES = 2**17
"""The same of a chat, whose template may write them as JSON in one call."""
MAX_DIGITS = 100
"""Digits of one number: the time to parse an integer grows with their square."""
MAX_PROMPT_TOKENS = 2**20
MAX_REQUESTS_BYTES = 32 * 1024 * 1024
"""Bytes of all requests made from one body: four times the limit of a single one."""

_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG = b"0" * (MAX_DIGITS + 1)


class ParsedJson(NamedTuple):
    """A JSON text. `values`: how many its lists and objects have together, or more; 0: of a text
    that is too short to be checked."""

    value: Any
    values: int


def parse_json(text: bytes) -> Steps[ParsedJson]:
    """A JSON text within the bounds, made in short steps. Raises TooLarge, and DecodeError,
    UnicodeDecodeError or RecursionError for invalid JSON."""
    text = without_mark(text)
    values = yield from _values(text)
    return ParsedJson(msgspec.json.decode(text), values)


def without_mark(text: bytes) -> bytes:
    """The text with spaces for a byte order mark at its start: positions in errors stay the
    same."""
    return b"   " + text[3:] if text.startswith(codecs.BOM_UTF8) else text


def check_size(size: int, what: str = "requests") -> None:
    """Raise TooLarge when the requests for a body, or its other records, have too many bytes."""
    if size > MAX_REQUESTS_BYTES:
        raise TooLarge(
            "",
            f"its answers are {what} of {size} bytes together, of which {MAX_REQUESTS_BYTES} are "
            "taken: ask for fewer at a time",
        )


def _values(text: bytes) -> Steps[int]:
    if len(text) <= UNCHECKED_BYTES:
        return 0
    plain = text.translate(_DIGITS)
    yield
    parts = plain.count(b'"') // 2 + plain.count(b"{") + plain.count(b"[")
    yield
    values = plain.count(b",") + 1
    is_long = _LONG in plain
    yield
    if parts <= MAX_PARTS and values <= MAX_RENDERED_VALUES and not is_long:
        return values
    plain = plain.replace(b"\\\\", b"__")
    yield
    plain = plain.replace(b'\\"', b"__")
    yield
    strings = plain.count(b'"') // 2
    _check(strings, MAX_PARTS, _PARTS)
    plain = b'"'.join(plain.split(b'"')[::2])
    yield
    values = plain.count(b",") + 1
    _check(strings + plain.count(b"{") + plain.count(b"["), MAX_PARTS, _PARTS)
    _check(values, MAX_VALUES, "values")
    if _LONG in plain:
        raise TooLarge("", f"it has a number of more than {MAX_DIGITS} digits")
    yield
    return values


_PARTS = "objects, lists and strings"


def _check(count: int, most: int, what: str) -> None:
    if count > most:
        raise TooLarge("", f"it has {count} {what} or more; {most} are allowed")
