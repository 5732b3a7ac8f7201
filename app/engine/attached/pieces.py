"""What a server says: the events of a completion that is streamed, read.

Tokens stand where `Speech.answers` says. What cannot be read, what says that it failed, and ends
that are not the model's are errors; never passed on as if they were an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from app.engine.attached.dialect import Speech
from app.engine.attached.server import ServerFailed, failure
from streams.records import FinishReason, LogProb

TOKEN_ID = "token_id:"  # noqa: S105 - what vLLM writes before the number of a token
EVENT_BYTES = 1 << 20
ECHO_BYTES = 16
"""An event may repeat the prompt, at so many bytes a token."""


class Details(msgspec.Struct):
    """Of the prompt's tokens."""

    cached_tokens: int | None = None


class Counts(msgspec.Struct):
    """What the server counted."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that came from its cache; None if it does not say."""
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens


class _Likely(msgspec.Struct):
    """A token by llama.cpp."""

    id: int
    logprob: float
    top_logprobs: list[_Likely] = []


class _LogProbs(msgspec.Struct):
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None
    content: list[_Likely] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _LogProbs | None = None


class _Problem(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Counts | None = None
    error: _Problem | str | None = None


class Piece(NamedTuple):
    """What one event brings. `token_ids` is None where the server does not give them."""

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    log_probs: tuple[tuple[LogProb, ...], ...] | None = None
    counts: Counts | None = None


DONE = b"[DONE]"
_events = msgspec.json.Decoder(_Event)
REASONS: Mapping[str, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "repetition": "stop",
    "tool_calls": "stop",
    "length": "length",
    "content_filter": "content_filter",
}


def piece_of(event: bytes, speech: Speech) -> Piece:
    """An event of an answer, read.

    Raises ServerFailed or Rejected for one that says what failed, and ServerFailed for one that
    makes no sense.
    """
    try:
        read = _events.decode(event)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as e:
        raise ServerFailed(f"the server sent what is no completion: {e}") from e
    if read.error is not None:
        error = read.error if isinstance(read.error, _Problem) else _Problem(read.error)
        raise failure(error.code if isinstance(error.code, int) else 500, error.message)
    if not read.choices:
        return Piece(counts=read.usage)
    choice = read.choices[0]
    log_probs = _log_probs(choice.logprobs)
    ids = choice.token_ids
    if ids is None and log_probs is not None and speech.answers == "log_probs":
        ids = [ranked[0].token_id for ranked in log_probs]
    if ids is not None and not all(0 <= token < 1 << 32 for token in ids):
        raise ServerFailed(f"the server sent numbers that are no tokens: {ids!r:.200}")
    return Piece(
        choice.text or "",
        None if ids is None else tuple(ids),
        _reason(choice.finish_reason),
        choice.stop_reason,
        log_probs,
        read.usage,
    )


def _reason(said: str | None) -> FinishReason | None:
    if said is None:
        return None
    if said not in REASONS:  # `abort`, `error`: the server gave it up, not the model
        raise ServerFailed(f"the server ended the answer with {said!r:.200}")
    return REASONS[said]


def _log_probs(said: _LogProbs | None) -> tuple[tuple[LogProb, ...], ...] | None:
    """For each token its own, then the likeliest ones; None where tokens have no numbers."""
    if said is None:
        return None
    if said.content is not None:
        return tuple(
            (LogProb(at.id, at.logprob), *(LogProb(o.id, o.logprob) for o in at.top_logprobs))
            for at in said.content
        )
    tokens, own = said.tokens or [], said.token_logprobs or []
    others = said.top_logprobs or [None] * len(tokens)
    if len(tokens) != len(own) or len(tokens) != len(others):
        raise ServerFailed("the server sent log probabilities of other tokens than it made")
    if not all(token.startswith(TOKEN_ID) for token in tokens):
        return None
    return tuple(
        (LogProb(_number(token), log_prob or 0.0), *_ranked(ranked or {}))
        for token, log_prob, ranked in zip(tokens, own, others, strict=True)
    )


def _ranked(by_token: Mapping[str, float]) -> list[LogProb]:
    found = [LogProb(_number(t), p) for t, p in by_token.items() if t.startswith(TOKEN_ID)]
    return sorted(found, key=lambda likely: -likely.log_prob)


def _number(token: str) -> int:
    try:
        return int(token.removeprefix(TOKEN_ID))
    except ValueError:
        raise ServerFailed(f"the server sent a token without a number: {token!r:.200}") from None
