"""Parts of an answer, and the parser without calls, which the others extend."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any, NamedTuple


class AnswerPart(NamedTuple):
    """A part of an answer: content, or the fields of a delta of OpenAI's form."""

    content: str = ""
    delta: dict[str, Any] | None = None


Emit = Callable[[AnswerPart], None]


class ContentParser:
    """The parser of answers without tool calls: all of the text is content."""

    calls = 0
    malformed_calls = 0
    is_full = False

    def __init__(self, emit: Emit) -> None:
        self._emit = emit

    def push(self, text: str) -> None:
        if text:
            self._emit(AnswerPart(text))

    def end(self) -> None:
        """Nothing is kept back."""


def call_id(request_id: str, number: int) -> str:
    """The same id for every worker and reader."""
    digest = blake2b(f"{number} {request_id}".encode(), digest_size=12).hexdigest()
    return f"call_{digest}"
