"""vLLM's own parsers of tool calls, fed with the text of one token at a time.

    text of a token ─► parse_delta ─► parts of the answer, with ids of our own

`VLLM_TOOL_PARSERS` has those whose parts follow from the text alone and, joined, are those that
vLLM reads from the whole text (tests/vllm/test_vllm_parsers.py). Left out are llama3_json and
xlam, whose streams lack parts of the whole, pythonic, whose parts depend on the length of the
steps, and those of DeepSeek, which need token ids.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import msgspec

from kvlane.app.text.answer_parts import (
    AnswerPart,
    ContentParser,
    Emit,
    arguments_part,
    name_part,
    writable,
)
from kvlane.streams.request import AnswerParsing

log = logging.getLogger(__name__)


class VllmCallsParser(ContentParser):
    """The calls of one answer. After an error of vLLM's parser the text stays content."""

    def __init__(self, parsing: AnswerParsing, request_id: str, emit: Emit, tokenizer: Any) -> None:
        """Raises ValueError for a tokenizer without the tokens of these calls."""
        super().__init__(emit)
        self._request_id = request_id
        self._chat = _chat(parsing.functions)
        try:
            self._parser: Any = _parser_class(parsing.tools)(tokenizer, self._chat.tools)
        except Exception as e:
            raise ValueError(f"vLLM's tool parser {parsing.tools} does not fit: {e}") from e
        self._is_first = True
        self.calls = 0

    def plain_part(self, text: str) -> AnswerPart | None:
        return super().plain_part(text) if self._parser is None else None

    def push(self, text: str) -> None:
        if text:
            self._parse(text, finished=False)

    def end(self) -> None:
        self._parse("", finished=True)

    def _parse(self, text: str, *, finished: bool) -> None:
        if self._parser is None:
            return super().push(text)
        prompt: list[int] | None = [] if self._is_first else None  # without reasoning
        self._is_first = False
        try:
            delta = self._parser.parse_delta(text, [], self._chat, prompt, finished=finished)
        except Exception as e:  # noqa: BLE001 - of the answer's text
            log.warning("%s: vLLM's parser failed, its text follows: %r", self._request_id, e)
            self._parser = None
            self.malformed_calls += 1
            return super().push(text)
        if delta is None:
            return None
        if delta.content:
            self._emit(AnswerPart(delta.content))
        for call in delta.tool_calls or ():
            self._emit_call(call)
        return None

    def _emit_call(self, call: Any) -> None:
        name = writable((call.function and call.function.name) or "")
        arguments = writable((call.function and call.function.arguments) or "")
        if name:
            self.calls += 1
            self._emit(name_part(self._request_id, call.index, name, arguments))
        elif arguments:
            self._emit(arguments_part(call.index, arguments))


@functools.cache
def _parser_class(name: str) -> Any:
    from vllm.parser import ParserManager

    return ParserManager.get_parser(tool_parser_name=name, enable_auto_tools=True)


@functools.lru_cache(maxsize=64)
def _chat(functions: bytes | None) -> Any:
    """The request that a parser looks up the types of arguments in."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(
        model="", messages=[{"role": "user", "content": ""}], tool_choice="auto",
        tools=msgspec.json.decode(functions or b"[]"),
    )  # fmt: skip
