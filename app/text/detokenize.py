"""Incremental detokenisation, one token at a time, without partial characters.

All pieces together are the text of the whole answer decoded at once: exact for byte-level BPE,
whose tokens are runs of bytes; for any other tokenizer a sliding window is decoded. The tokens
before the answer may be given, to complete a character of the prompt.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

_LONGEST_TAIL = 3  # bytes of a character that lacks its last one
_CONTEXT_TOKENS = 6
_MOST_PENDING = 16
"""Tokens without a whole character among them: a character has four bytes at most, so these are
bytes that will never be one, and waiting on would decode ever longer windows."""


class Detokenizer(Protocol):
    """Turns one answer's tokens into text."""

    def push(self, token_id: int) -> str:
        """The text that this token completes."""

    def end(self) -> str:
        """The rest of the text, after the last token; half a character becomes U+FFFD."""


class Vocabulary(NamedTuple):
    """The bytes of every token of a byte-level vocabulary; b"" for ids without one."""

    pieces: Sequence[bytes]
    special: frozenset[int]


def vocabulary_of(tokens: dict[str, int], special: frozenset[int]) -> Vocabulary:
    """The bytes behind the tokens of a byte-level vocabulary, by id. A token with a character
    outside the byte alphabet is plain text."""
    pieces = [b""] * (max(tokens.values(), default=-1) + 1)
    for token, token_id in tokens.items():
        try:
            pieces[token_id] = bytes(_BYTES[c] for c in token)
        except KeyError:
            pieces[token_id] = token.encode()
    return Vocabulary(pieces, special)


class ByteLevelDetokenizer:
    """Exact for byte-level BPE. Ids that are not in the vocabulary have no text."""

    def __init__(
        self, vocabulary: Vocabulary, before: Sequence[int] = (), *, skip_special: bool = True
    ) -> None:
        self._pieces = vocabulary.pieces
        self._skipped = vocabulary.special if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(self._tail(before))

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._piece(token_id))

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)

    def _piece(self, token_id: int) -> bytes:
        if token_id in self._skipped or not 0 <= token_id < len(self._pieces):
            return b""
        return self._pieces[token_id]

    def _tail(self, before: Sequence[int]) -> bytes:
        """The last bytes of the tokens before: all that an unfinished character can consist of."""
        tail = b""
        for i in range(len(before) - 1, -1, -1):
            tail = self._piece(before[i]) + tail
            if len(tail) >= _LONGEST_TAIL:
                break
        return tail


class WindowedDetokenizer:
    """For every other tokenizer: decodes the last tokens with and without the new ones.

    `decode`: the tokenizer's own. Text that ends with U+FFFD may be half a character and is kept
    back.
    """

    def __init__(self, decode: Callable[[list[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(before[-_CONTEXT_TOKENS:])
        self._shown = len(self._window)

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        return self._advance(at_end=len(self._window) - self._shown >= _MOST_PENDING)

    def end(self) -> str:
        return self._advance(at_end=True)

    def _advance(self, *, at_end: bool) -> str:
        old = self._decode(self._window[: self._shown])
        new = self._decode(self._window)
        if len(new) <= len(old) or (new.endswith("\ufffd") and not at_end):
            return ""
        del self._window[: max(self._shown - _CONTEXT_TOKENS, 0)]
        self._shown = len(self._window)
        return new[len(old) :]


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes as. Printable Latin-1 characters
    stand for themselves; the other bytes, in order, are U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()
