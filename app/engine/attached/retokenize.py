"""Tokeniser of the text of a server that returns no token ids.

The text of the tokens is exactly the server's; their boundaries are an estimate. So they serve to
count tokens and to find the end of an answer, not to resume it on another worker. Words are held
back until they are complete, since tokens end there.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.preprocess.text.tokenizer import Tokenizer


class Retokenizer:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._held = ""
        self._last: list[int] = []

    def push(self, text: str) -> tuple[int, ...]:
        """Add text; returns the tokens of all words that are now complete."""
        self._held += text
        end = max(self._held.rfind(" "), self._held.rfind("\n"))
        words, self._held = self._held[: max(end, 0)], self._held[max(end, 0) :]
        return self._tokens(words)

    def flush(self) -> tuple[int, ...]:
        """The tokens of the remaining text."""
        rest, self._held = self._held, ""
        return self._tokens(rest)

    def _tokens(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        tokens = self._tokenizer.encode_now(text)
        if text[0] == " " and self._text(tokens) != text:
            # Some tokenizers prepend a space to any text.
            without = self._tokenizer.encode_now(text[1:])
            if self._text(without) == text:
                tokens = without
        self._last = list(tokens[-1:])
        return tuple(tokens)

    def _text(self, tokens: Sequence[int]) -> str:
        """The text of tokens that follow the last one."""
        decode = self._tokenizer.decode
        before = decode(self._last, skip_special=False)
        return decode([*self._last, *tokens], skip_special=False)[len(before) :]
