"""Incremental reader of a tool call in JSON: `{"name": …, "arguments": {…}}`.

Character by character: the arguments are given out as they arrive, in the model's spelling, once
the name is known.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from msgspec import DecodeError
from msgspec import json as msgspec_json

from kvlane.app.text.answer_parts import writable

ARGUMENT_KEYS = ("arguments", "parameters")
MAX_NAME_CHARS = 256

_State = Literal["begin", "key", "colon", "value", "scalar", "string", "nested", "next", "end"]
_SPACE = " \t\r\n"
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')
_CLOSERS = {"{": "}", "[": "]"}


class MalformedCall(Exception):
    """The text is no tool call; the message names the reason."""


class JsonCall:
    """One tool call. `push` each character until `is_complete`."""

    def __init__(self) -> None:
        self.name: str | None = None
        """The name of the function, as soon as it is known."""
        self.arguments = ""
        """Text of the arguments that is complete and not taken yet (`take_arguments`)."""
        self.is_complete = False
        self.is_valid = True
        """False if the arguments, once complete, are no object of JSON."""
        self._state: _State = "begin"
        self._key = ""
        self._value = ""
        self._closers: list[str] = []
        self._in_string = self._is_escaped = False
        self._whole_arguments: list[str] = []
        self._has_arguments = False

    def push(self, char: str) -> None:
        """Read the next character. Raises MalformedCall."""
        if self._state == "nested":
            self._read_nested(char)
        elif self._state == "string":
            self._read_string(char)
        elif self._state == "scalar":
            self._read_scalar(char)
        elif char not in _SPACE:
            self._read_structure(char)

    def push_within_string(self, text: str) -> bool:
        """Read a text at once if it lies within a string of the arguments; whether it does. It is
        an argument that needs not be taken."""
        if not self._in_string or self._is_escaped or self._key not in ARGUMENT_KEYS:
            return False
        if '"' in text or "\\" in text:
            return False
        self._whole_arguments.append(text)
        return True

    def take_arguments(self) -> str:
        """The arguments so far that were not taken, once the name is known."""
        if self.name is None:
            return ""
        taken, self.arguments = self.arguments, ""
        return taken

    def _read_structure(self, char: str) -> None:
        match self._state, char:
            case "begin", "{":
                self._state = "key"
            case "key", '"':
                self._begin_string(key=True)
            case "colon", ":":
                self._state = "value"
            case "value", '"':
                self._begin_string(key=False)
            case "value", "{" | "[":
                self._state = "nested"
                self._closers = []
                self._read_nested(char)
            case "value", _ if char.isalnum() or char == "-":
                self._state, self._value = "scalar", char
            case "next", ",":
                self._state = "key"
            case "next", "}":
                self._finish()
            case _:
                raise MalformedCall(f"{char!r} is not expected after {self._key!r}")

    def _begin_string(self, *, key: bool) -> None:
        self._state, self._value, self._is_escaped = "string", '"', False
        if key:
            self._key = ""

    def _read_string(self, char: str) -> None:
        self._value += char
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._end_string()
        if self._key == "name" and len(self._value) > MAX_NAME_CHARS:
            raise MalformedCall("the name of its function is too long")

    def _end_string(self) -> None:
        text = (_lenient_string if self._key in ARGUMENT_KEYS else _string)(self._value)
        if not self._key:
            if not text:
                raise MalformedCall("it has an empty key")
            self._key, self._state = text, "colon"
            return
        if self._key == "name":
            if not text:
                raise MalformedCall("the name of its function is empty")
            self.name = self.name or text
        elif self._key in ARGUMENT_KEYS:  # some models write JSON in a string
            self._add_arguments(text)
        self._end_value()

    def _read_scalar(self, char: str) -> None:
        if char not in ",}" and char not in _SPACE:
            self._value += char
            return
        if self._key == "name":
            raise MalformedCall("the name of its function is no string")
        if self._key in ARGUMENT_KEYS:
            if self._value != "null":
                raise MalformedCall("its arguments are no object")
            self._add_arguments("{}")
        self._end_value()
        if char not in _SPACE:
            self._read_structure(char)

    def _read_nested(self, char: str) -> None:
        if self._key in ARGUMENT_KEYS:
            if not self._closers and char == "[":
                raise MalformedCall("its arguments are no object")
            self._add_arguments(char)
        elif self._key == "name":
            raise MalformedCall("the name of its function is no string")
        if self._in_string:
            self._read_nested_string(char)
        elif char == '"':
            self._in_string = True
        elif char in _CLOSERS:
            self._closers.append(_CLOSERS[char])
        elif char in "}]":
            if self._closers.pop() != char:
                raise MalformedCall("its brackets do not match")
            if not self._closers:
                self._end_value()

    def _read_nested_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False

    def _add_arguments(self, text: str) -> None:
        self.arguments += text
        self._whole_arguments.append(text)

    def _end_value(self) -> None:
        self._has_arguments |= self._key in ARGUMENT_KEYS
        self._key, self._value, self._state = "", "", "next"

    def _finish(self) -> None:
        if self.name is None:
            raise MalformedCall("it names no function")
        if not self._has_arguments:
            self._add_arguments("{}")
        self.is_complete = True
        self.is_valid = is_object("".join(self._whole_arguments))
        self._state = "end"


def _string(literal: str) -> str:
    try:
        return writable(json.loads(literal, strict=False))
    except ValueError as e:
        raise MalformedCall(f"it has a string that is no JSON: {e}") from None


def _lenient_string(literal: str) -> str:
    """The same of arguments, where a backslash that escapes nothing is a character."""
    return _string(_ESCAPE.sub(lambda found: found[0] if found[1] else "\\\\", literal))


def is_object(text: str) -> bool:
    try:
        return isinstance(msgspec_json.decode(text.encode(errors="replace")), dict)
    except (DecodeError, RecursionError):
        return False
