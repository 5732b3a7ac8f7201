"""Log probabilities in the two forms of the OpenAI API, for chats and for completions. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvlane.app.http.openai.passthrough_fields import JsonObject
from kvlane.streams.records import Chunk, LogProb


class TokenText(NamedTuple):
    """Text of tokens. `as_ids`: in the form `token_id:5`, which is unambiguous."""

    bytes_of: Callable[[int], bytes]
    as_ids: bool = False

    def text(self, token_id: int, bytes_prefix: str = "") -> str:
        """A token by itself. One that is no text has the form `\\xf0\\x9f`, after
        `bytes_prefix`."""
        if self.as_ids:
            return f"token_id:{token_id}"
        content = self.bytes_of(token_id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return bytes_prefix + repr(content)[2:-1]


class TokenLogprobs(NamedTuple):
    """A token of an answer. `ranked`: its own log probability, then the top ones; may be empty.
    `offset`: the characters of the text that were complete before it."""

    token_id: int
    ranked: Sequence[LogProb]
    offset: int = 0


def tokens_with_offsets(
    piece: Chunk, offset: int, spelling: TokenText
) -> tuple[list[TokenLogprobs], int]:
    """The tokens of a piece with log probabilities, and the offset of the next token. `offset`: of
    the first. Workers of older versions do not count characters: those of each token count."""
    counts: Iterable[int] = piece.token_chars
    if len(piece.token_chars) != len(piece.token_ids):
        texts = (spelling.bytes_of(token_id) for token_id in piece.token_ids)
        counts = [len(content.decode(errors="ignore")) for content in texts]
    found = []
    for token_id, ranked, chars in zip(piece.token_ids, piece.log_probs or (), counts, strict=True):
        found.append(TokenLogprobs(token_id, ranked, offset))
        offset += chars
    return found, offset


def chat_logprobs(tokens: Sequence[TokenLogprobs], spelling: TokenText) -> JsonObject:
    """The form of chats, which leaves out tokens without a probability."""
    content = [
        _entry(token.ranked[0], spelling)
        | {"top_logprobs": [_entry(other, spelling) for other in token.ranked[1:]]}
        for token in tokens
        if token.ranked
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[TokenLogprobs], spelling: TokenText) -> JsonObject:
    return {
        "tokens": [spelling.text(token.token_id, _BYTES) for token in tokens],
        "token_logprobs": [t.ranked[0].log_prob if t.ranked else None for t in tokens],
        "top_logprobs": [_top(token.ranked, spelling) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


_BYTES = "bytes:"


def _top(ranked: Sequence[LogProb], spelling: TokenText) -> JsonObject | None:
    """The most likely tokens, and the token itself; None without any probability. Of tokens with
    the same text the first one counts."""
    if not ranked:
        return None
    top: JsonObject = {}
    for each in ranked if len(ranked) > 1 else ():
        top.setdefault(spelling.text(each.token_id, _BYTES), each.log_prob)
    return top


def _entry(each: LogProb, spelling: TokenText) -> JsonObject:
    return {
        "token": spelling.text(each.token_id),
        "logprob": each.log_prob,
        "bytes": list(spelling.bytes_of(each.token_id)) or None,
    }
