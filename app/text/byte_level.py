"""Text as tokens and tokens as text, for models whose tokens are the bytes of UTF-8.

Tokens 0 to 255 are bytes; four more mark turns. Owns the vocabulary and the rendering of a chat.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Literal

END_OF_TEXT = 256
USER = 257
ASSISTANT = 258
SYSTEM = 259

MessageRole = Literal["system", "developer", "user", "assistant"]
_MARKERS: dict[MessageRole, int] = {
    "system": SYSTEM,
    "developer": SYSTEM,
    "user": USER,
    "assistant": ASSISTANT,
}


def encode_bytes(text: str) -> list[int]:
    """The tokens of a text. Raises UnicodeEncodeError for lone surrogates, which are no text."""
    return list(text.encode())


def render_chat(turns: Iterable[tuple[MessageRole, str]]) -> list[int]:
    """The prompt of a chat: a marker and its text for each turn, then the assistant's marker."""
    tokens: list[int] = []
    for role, text in turns:
        tokens.append(_MARKERS[role])
        tokens += text.encode()
    tokens.append(ASSISTANT)
    return tokens


class ByteDetokenizer:
    """Turns tokens into text as they come, and never emits a part of a character.

    All pieces together are the text of the whole answer decoded at once: bytes that cannot become a
    character, and an incomplete one at the end, give U+FFFD. Markers have no text.
    """

    def __init__(self, taken: Sequence[int] = ()) -> None:
        """`taken`: tokens that were emitted before; the incomplete end of them comes out here."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.chars = len(self.push(taken))

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        return self._decoder.decode(bytes(t for t in token_ids if t < END_OF_TEXT))

    def end(self) -> str:
        """The rest of the text, after the last token."""
        return self._decoder.decode(b"", final=True)
