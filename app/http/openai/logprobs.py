"""Log probabilities in the two forms of the OpenAI API, for chats and for completions.

Pure functions from tokens and `LogProb`s, as Chunks have them, to values for JSON. Never here: the
streams; the text of a token comes from the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from app.http.openai.passthrough_fields import JsonObject
from streams.records import LogProb


class TokenText(NamedTuple):
    """Text of tokens. `as_ids`: in the form `token_id:5`, which is unambiguous."""

    bytes_of: Callable[[int], bytes]
    as_ids: bool = False

    def text(self, token_id: int) -> str:
        """A token by itself; half a letter becomes U+FFFD."""
        if self.as_ids:
            return f"token_id:{token_id}"
        return self.bytes_of(token_id).decode("utf-8", errors="replace")


class TokenLogprobs(NamedTuple):
    """A token of an answer. `ranked`: its own log probability, then the top ones; may be empty."""

    token_id: int
    ranked: Sequence[LogProb]


def chat_logprobs(tokens: Sequence[TokenLogprobs], spelling: TokenText) -> JsonObject:
    """The form of chats, which leaves out tokens without a probability."""
    content = [
        _entry(token.ranked[0], spelling)
        | {"top_logprobs": [_entry(other, spelling) for other in token.ranked[1:]]}
        for token in tokens
        if token.ranked
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokens: Sequence[TokenLogprobs], spelling: TokenText, offset: int
) -> JsonObject:
    """The form of completions; the first token starts at character `offset` of the text."""
    texts = [spelling.text(token.token_id) for token in tokens]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(spelling.bytes_of(token.token_id).decode("utf-8", errors="replace"))
    return {
        "tokens": texts,
        "token_logprobs": [t.ranked[0].log_prob if t.ranked else None for t in tokens],
        "top_logprobs": [
            {spelling.text(other.token_id): other.log_prob for other in token.ranked[1:]}
            for token in tokens
        ],
        "text_offset": offsets,
    }


def _entry(each: LogProb, spelling: TokenText) -> JsonObject:
    return {
        "token": spelling.text(each.token_id),
        "logprob": each.log_prob,
        "bytes": list(spelling.bytes_of(each.token_id)),
    }
