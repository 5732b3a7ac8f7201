"""The parts of an answer: content, reasoning and tool calls, from the tokens of its engine.

`ParsedStream` has the interface of `TextStream`, and adds the items of `Chunk.data`, a function of
the tokens up to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvlane.app.text.answer_parsers import AnswerParser, CallsFactory
from kvlane.app.text.answer_parts import AnswerPart
from kvlane.app.text.stop_conditions import TextPiece, TextStream
from kvlane.streams.records import FinishReason, PassthroughDelta
from kvlane.streams.request import AnswerParsing


class ParsedStream:
    """The content and the items of data of one answer."""

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
        self.items = 0
        """Number of items of data."""
        self.reasoning_tokens = 0
        self.ended: TextPiece | None = None
        """As `TextStream.ended`."""
        self.feed(taken)
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
        text, parser, parts = self._text, self._parser, list[AnswerPart]()
        before, is_reasoning = text.tokens, parser.is_reasoning
        for token_id in token_ids:
            if self.ended is not None:
                break
            parts += parser.push(text.feed((token_id,)).text)
            was_reasoning, is_reasoning = is_reasoning, parser.is_reasoning
            self.reasoning_tokens += was_reasoning or is_reasoning
            if text.ended is not None:
                parts += parser.end()
                reason = text.ended.finish_reason or "stop"
                self.ended = text.ended._replace(finish_reason=self.finish_reason(reason))
            elif parser.is_complete:
                self.ended = TextPiece("", 0, "tool_calls")
        piece = self._piece(parts, text.tokens - before)
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
        content, data = "", list[PassthroughDelta]()
        for text, delta in parts:
            content += text
            if delta is not None:
                data.append(PassthroughDelta(at=len(content), delta=delta))
        self.chars += len(content)
        self.items += len(data)
        return TextPiece(content, tokens, data=tuple(data))
