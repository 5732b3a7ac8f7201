"""Text of a server that gives no tokens, as tokens of its model.

Their text is that of the server, character by character; their borders are a guess. So they serve
to count and to find where an answer stops, not to continue it elsewhere. Words are kept back until
they are whole, since that is where tokens end.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.preprocess.tokenizer import Tokenizer


class Retokenised:
    """The tokens of one answer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._held = ""
        self._last: list[int] = []

    def push(self, text: str) -> tuple[int, ...]:
        """The tokens of all words that are whole with this text."""
        self._held += text
        end = max(self._held.rfind(" "), self._held.rfind("\n"))
        words, self._held = self._held[: max(end, 0)], self._held[max(end, 0) :]
        return self._tokens(words)

    def end(self) -> tuple[int, ...]:
        """The tokens of the rest."""
        rest, self._held = self._held, ""
        return self._tokens(rest)

    def _tokens(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        tokens = self._tokenizer.encode_now(text)
        if text[0] == " " and self._text(tokens) != text:
            # Some tokenizers put a space before any text of their own.
            without = self._tokenizer.encode_now(text[1:])
            if self._text(without) == text:
                tokens = without
        self._last = list(tokens[-1:])
        return tuple(tokens)

    def _text(self, tokens: Sequence[int]) -> str:
        """What these tokens say behind the last one."""
        decode = self._tokenizer.decode
        before = decode(self._last, skip_special=False)
        return decode([*self._last, *tokens], skip_special=False)[len(before) :]
