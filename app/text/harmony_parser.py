"""Parser of the answers of gpt-oss: messages with a channel and, for calls, a recipient.

    <|channel|>analysis<|message|>… <|end|> <|start|>assistant<|channel|>final<|message|>…
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…} <|call|>

It reads text, so stop strings end an answer as for other models; the library of OpenAI reads the
tokens of one vocabulary. The tests with vLLM compare both.
"""

from __future__ import annotations

import logging
import re
from typing import Literal

from kvlane.app.text.answer_parts import (
    AnswerPart,
    ContentParser,
    Emit,
    arguments_part,
    name_part,
    reasoning_part,
)
from kvlane.app.text.json_call import is_object
from kvlane.streams.request import AnswerParsing

log = logging.getLogger(__name__)

HARMONY_TOOLS, HARMONY_REASONING = "openai", "openai_gptoss"
"""vLLM's names of these parsers."""
_MESSAGE = "<|message|>"
_END = re.compile(r"<\|(?:end|call|return)\|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_MOST_HEADER_CHARS = 512


class HarmonyParser(ContentParser):
    """The content, the reasoning and the calls of one answer, which begins with a header.

    A message to another recipient than a function is content, and so is a header without an end.
    """

    def __init__(self, emit: Emit, request_id: str, parsing: AnswerParsing) -> None:
        super().__init__(emit)
        self._request_id = request_id
        self._parsing = parsing
        self._state: Literal["header", "content", "reasoning", "call"] = "header"
        self._held = ""
        """The header so far, or text that may begin the tag at the end of a message."""
        self._arguments: list[str] = []
        self.calls = 0

    @property
    def is_full(self) -> bool:  # type: ignore[override]
        is_between = self._state == "header"
        return is_between and 0 < self._parsing.max_calls <= self.calls

    @property
    def is_reasoning(self) -> bool:
        return self._state == "reasoning"

    def plain_part(self, text: str) -> AnswerPart | None:
        is_tagged = self._state == "header" or self._held or "<" in text
        return None if is_tagged else self._body_part(text)

    def push(self, text: str) -> None:
        text, self._held = self._held + text, ""
        while text and not self.is_full:
            text = self._push_header(text) if self._state == "header" else self._push_body(text)

    def end(self) -> None:
        held, self._held = self._held, ""
        if self._state != "header":
            self._emit(self._body_part(held))
            if self._state != "call" or is_object("".join(self._arguments)):
                self._end_message()
        elif held.strip() and not held.startswith("<|"):  # a header that is cut off is no text
            self._warn("its header has no end")
            self._emit(AnswerPart(held))

    def _push_header(self, text: str) -> str:
        header, is_found, rest = text.partition(_MESSAGE)
        if not is_found:
            if len(text) > _MOST_HEADER_CHARS:
                self._warn("its header is too long")
                self._state = "content"
                return text
            self._held = text
            return ""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._state = "content"
        if recipient and self._parsing.tools:
            self._state, self._arguments = "call", []
            self._emit(name_part(self._request_id, self.calls, recipient[1]))
        elif channel and channel[1] == "analysis" and self._parsing.reasoning:
            self._state = "reasoning"
        return rest

    def _push_body(self, text: str) -> str:
        """Read a message up to its end; returns the text behind it."""
        if end := _END.search(text):
            self._emit(self._body_part(text[: end.start()]))
            self._end_message()
            return text[end.end() :]
        place = text.rfind("<")
        if place >= 0 and any(tag.startswith(text[place:]) for tag in _ENDS):
            text, self._held = text[:place], text[place:]
        self._emit(self._body_part(text))
        return ""

    def _body_part(self, text: str) -> AnswerPart:
        if not text or self._state == "content":
            return AnswerPart(text)
        if self._state == "call":
            self._arguments.append(text)
            return arguments_part(self.calls, text)
        return reasoning_part(text) if self._parsing.shows_reasoning else AnswerPart()

    def _end_message(self) -> None:
        if self._state == "call":
            if not self._arguments:
                self._emit(self._body_part("{}"))
            if not is_object("".join(self._arguments)):
                self._warn("its arguments are no JSON")
            self.calls += 1
        self._state = "header"

    def _warn(self, reason: str) -> None:
        self.malformed_calls += 1
        log.warning("%s: a message is malformed: %s", self._request_id, reason)
