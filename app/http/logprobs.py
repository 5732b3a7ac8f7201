"""Log probabilities in the words of the OpenAI API: chats and completions tell them differently.

Pure functions from tokens and `LogProb`s, as Chunks have them, to what is encoded to JSON. Knows no
streams; what a token looks like in text comes from the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from streams.records import LogProb

Json = dict[str, Any]


class Spelling(NamedTuple):
    """How tokens are written. `as_ids`: as `token_id:5`, for clients that want to know exactly."""

    bytes_of: Callable[[int], bytes]
    as_ids: bool = False

    def text(self, token_id: int) -> str:
        """A token by itself; half a letter becomes U+FFFD."""
        if self.as_ids:
            return f"token_id:{token_id}"
        return self.bytes_of(token_id).decode("utf-8", errors="replace")


class Likely(NamedTuple):
    """A token of an answer; first its own probability, then the likeliest ones. Both may lack."""

    token_id: int
    ranked: Sequence[LogProb]


def of_chat(tokens: Sequence[Likely], spelling: Spelling) -> Json:
    """As chats tell them. Tokens without a probability have no place there."""
    content = [
        _entry(token.ranked[0], spelling)
        | {"top_logprobs": [_entry(other, spelling) for other in token.ranked[1:]]}
        for token in tokens
        if token.ranked
    ]
    return {"content": content, "refusal": None}


def of_completion(tokens: Sequence[Likely], spelling: Spelling, offset: int) -> Json:
    """As completions tell them; the first token begins at character `offset` of the text."""
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


def _entry(each: LogProb, spelling: Spelling) -> Json:
    return {
        "token": spelling.text(each.token_id),
        "logprob": each.log_prob,
        "bytes": list(spelling.bytes_of(each.token_id)),
    }
