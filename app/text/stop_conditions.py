"""Visible text of an answer: detokenised, and ended by the stop conditions of its request.

The text after a token is a function of the tokens up to it, not of the engine's steps nor of
interruptions: a run that continues an answer feeds the tokens that are out already first.

Stop strings are found with their last character, across any borders. Text that may be the beginning
of one is kept back; visible text is never retracted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvlane.app.text.answer_parts import AnswerPart
from kvlane.app.text.detokenize import Detokenizer
from kvlane.streams.records import FinishReason
from kvlane.streams.request import StopConditions


class TextPiece(NamedTuple):
    """Visible text of some tokens, and the number of tokens that count; the rest is dropped.

    `stop_reason`: the stop string or token id that ended the answer; None for an end of text.
    `data`: parts besides the text, with places in this text.
    """

    text: str
    tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    data: tuple[AnswerPart, ...] = ()


class TextStream:
    """The visible text of one answer.

    Nothing ends an answer before `min_tokens` tokens of it exist, the last one included. Then, in
    this order: a hidden stop token (the model's end of text among them, unless `ignore_eos`) ends
    it without text and without a reason; one of `stop_token_ids` ends it without its text; the
    stop string that is complete first, or the longest of those, ends it before its first
    character. With `include_stop` the last two are shown. Last comes `max_tokens`.
    """

    data_chars = 0
    """Characters of the data of `taken`: text alone has none."""
    reasoning_tokens: int | None = None
    """Number of tokens of the reasoning; None where it is not separated."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        conditions: StopConditions,
        *,
        eos_token_ids: Collection[int] = (),
        include_stop: bool = False,
        taken: Sequence[int] = (),
    ) -> None:
        """`taken`: tokens of this answer that were emitted already, with their text."""
        self._detokenizer = detokenizer
        self._conditions = conditions
        hidden = {*eos_token_ids, *conditions.stop_token_ids_hidden}
        self._hidden = frozenset() if conditions.ignore_eos else frozenset(hidden)
        self._named = frozenset(conditions.stop_token_ids)
        self._include_stop = include_stop
        self._searches = [_Search(string) for string in conditions.stop if string]
        self._held = ""
        self.tokens = 0
        """Number of tokens of the answer that counted."""
        self.chars = 0
        """Length of the visible text."""
        self.token_chars: list[int] | None = None
        """The characters that each token completed, visible or not; counted if it is a list."""
        self.ended: TextPiece | None = None
        """Set once the answer is over: its reasons, without text or tokens."""
        self.feed(taken)

    def feed(self, token_ids: Sequence[int]) -> TextPiece:
        """Visible text of these tokens, and the end. After the end, only its reasons."""
        texts = self.texts_of(token_ids)
        text = "".join(texts)
        if self.ended is None:
            return TextPiece(text, len(texts))
        return self.ended._replace(text=text, tokens=len(texts))

    def texts_of(self, token_ids: Sequence[int]) -> list[str]:
        """As `feed`: the visible text of each token that counts."""
        texts = []
        for token_id in token_ids:
            if self.ended is not None:
                break
            texts.append(text := self._step(token_id))
            self.chars += len(text)
        return texts

    def feed_text(self, text: str) -> TextPiece:
        """As `feed`, of text without token ids, which counts as one token."""
        return TextPiece(text, 1)

    def end(self) -> TextPiece:
        """The text that was kept back, for an answer that its engine has ended."""
        if self.ended is not None:
            return TextPiece("", 0)
        text = self._rest()
        self.chars += len(text)
        return TextPiece(text, 0)

    def finish_reason(self, reason: FinishReason) -> FinishReason:
        """The finish reason of the answer, of which its engine or its text gave this one."""
        return reason

    def _step(self, token_id: int) -> str:
        self.tokens += 1
        limit, may_stop = self._conditions.max_tokens, self.tokens >= self._conditions.min_tokens
        if may_stop and token_id in self._hidden:
            self._count_chars(0)
            return self._finish(self._rest(), "stop")
        if may_stop and token_id in self._named:
            shown = self._detokenizer.push(token_id) if self._include_stop else ""
            self._count_chars(len(shown))
            return self._finish(self._held + shown + self._detokenizer.end(), "stop", token_id)
        new = self._detokenizer.push(token_id)
        self._count_chars(len(new))
        text = self._held + new
        if self._searches and (match := self._search(new, may_stop=may_stop)) is not None:
            cut = len(self._held) + match.end
            cut -= 0 if self._include_stop else len(match.string)
            return self._finish(text[:cut], "stop", match.string)
        if limit is not None and self.tokens >= limit:
            return self._finish(text + self._detokenizer.end(), "length")
        if not self._searches:
            return text
        clear = len(text) - max(search.found for search in self._searches)
        self._held = text[clear:]
        return text[:clear]

    def _count_chars(self, chars: int) -> None:
        if self.token_chars is not None:
            self.token_chars.append(chars)

    def _search(self, new: str, *, may_stop: bool) -> _Match | None:
        """The stop string to end with, if one is complete in the new text."""
        for end, char in enumerate(new, 1):
            complete = [search.string for search in self._searches if search.advance(char)]
            if complete and may_stop:
                return _Match(max(complete, key=len), end)
        return None

    def _rest(self) -> str:
        return self._held + self._detokenizer.end()

    def _finish(self, text: str, reason: FinishReason, stop_reason: int | str | None = None) -> str:
        self._held = ""
        self.ended = TextPiece("", 0, reason, stop_reason)
        return text


class _Match(NamedTuple):
    string: str
    end: int
    """Its end in the new text."""


class _Search:
    """A search for one string, a character at a time (Knuth-Morris-Pratt)."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.found = 0
        """Length of the longest proper beginning of the string that the text ends with."""
        self._fallback = [0, 0]
        for char in string[1:]:
            self._fallback.append(self._extended(self._fallback[-1], char))

    def advance(self, char: str) -> bool:
        """Whether the string is complete with this character."""
        found = self._extended(self.found, char)
        complete = found == len(self.string)
        self.found = self._fallback[found] if complete else found
        return complete

    def _extended(self, found: int, char: str) -> int:
        while found and self.string[found] != char:
            found = self._fallback[found]
        return found + (self.string[found] == char)
