"""The parts of an answer: content, reasoning and tool calls, from the tokens of its engine.

`ParsedStream` has the interface of `TextStream`, and adds the parts that become `Chunk.data`, a
function of the tokens up to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvlane.app.text.answer_parsers import AnswerParser, CallsFactory
from kvlane.app.text.answer_parts import AnswerPart
from kvlane.app.text.stop_conditions import TextPiece, TextStream
from kvlane.streams.records import FinishReason
from kvlane.streams.request import AnswerParsing
from kvlane.streams.responses.transcript import data_chars


class ParsedStream:
    """The content and the other parts of one answer."""

    def __init__(
        self, text: TextStream, parsing: AnswerParsing, request_id: str, taken: Sequence[int] = (),
        engine_calls: CallsFactory | None = None,
    ) -> None:  # fmt: skip
        """`text` has no tokens yet; `taken`: tokens of this answer that were emitted already.
        `engine_calls`: as for `AnswerParser`.

        Raises ValueError for a parser that this worker lacks.
        """
        self._text = text
        self._parser = AnswerParser(parsing, request_id, engine_calls)
        self.chars = 0
        """Length of the content."""
        self.reasoning_tokens = 0
        self.ended: TextPiece | None = None
        """As `TextStream.ended`."""
        self.data_chars = data_chars(part.delta or {} for part in self.feed(taken).data)
        """Characters of the data of `taken`."""
        self._replayed = self._call_counts

    @property
    def _call_counts(self) -> tuple[int, int]:
        return self._parser.calls, self._parser.malformed_calls

    @property
    def new_calls(self) -> tuple[int, int]:
        """Calls that ended here, not in `taken`: all of them, and the malformed ones."""
        calls, malformed = self._call_counts
        return calls - self._replayed[0], malformed - self._replayed[1]

    @property
    def token_chars(self) -> list[int] | None:
        return self._text.token_chars

    @token_chars.setter
    def token_chars(self, value: list[int] | None) -> None:
        self._text.token_chars = value

    def feed(self, token_ids: Sequence[int]) -> TextPiece:
        """Content and data of these tokens, and the end. After the end, only its reasons."""
        if self.ended is not None:
            return self.ended
        text, parser = self._text, self._parser
        texts = text.texts_of(token_ids)
        if text.ended is None and (part := parser.plain_part("".join(texts))) is not None:
            self.reasoning_tokens += len(texts) if parser.is_reasoning else 0
            return self._piece((part,), len(texts))
        parts, tokens, is_reasoning = list[AnswerPart](), 0, parser.is_reasoning
        for tokens, each in enumerate(texts, 1):
            parts += parser.push(each)
            was_reasoning, is_reasoning = is_reasoning, parser.is_reasoning
            self.reasoning_tokens += was_reasoning or is_reasoning
            if text.ended is not None and tokens == len(texts):
                parts += parser.end()
                reason = text.ended.finish_reason or "stop"
                self.ended = text.ended._replace(finish_reason=self.finish_reason(reason))
            elif parser.is_complete:
                self.ended = TextPiece("", 0, "tool_calls")
                break
        if text.token_chars is not None:
            del text.token_chars[len(text.token_chars) - len(texts) + tokens :]
        piece = self._piece(parts, tokens)
        if self.ended is None:
            return piece
        return piece._replace(
            finish_reason=self.ended.finish_reason, stop_reason=self.ended.stop_reason
        )

    def feed_text(self, text: str) -> TextPiece:
        """As `feed`, of text without token ids, which counts as one token."""
        self.reasoning_tokens += self._parser.is_reasoning
        piece = self._piece(self._parser.push(text), 1)
        if not self._parser.is_complete:
            return piece
        self.ended = TextPiece("", 0, "tool_calls")
        return piece._replace(finish_reason="tool_calls")

    def end(self) -> TextPiece:
        """What was kept back, for an answer that its engine has ended."""
        if self.ended is not None:
            return TextPiece("", 0)
        return self._piece(self._parser.push(self._text.end().text) + self._parser.end(), 0)

    def finish_reason(self, reason: FinishReason) -> FinishReason:
        return "tool_calls" if reason == "stop" and self._parser.calls else reason

    def _piece(self, parts: Iterable[AnswerPart], tokens: int) -> TextPiece:
        content, data = "", list[AnswerPart]()
        for part in parts:
            content += part.content
            if part.delta is not None:
                data.append(part._replace(at=len(content)) if content else part)
        self.chars += len(content)
        return TextPiece(content, tokens, data=tuple(data))
