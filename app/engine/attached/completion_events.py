"""Parser of the events of a streamed completion; `ServerDialect.answer_tokens` names their tokens.

Unreadable events, error events and ends that the model did not cause raise errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvlane.app.engine.attached.answer_stream import parse_finish_reason, parse_usage
from kvlane.app.engine.attached.request_body import ServerDialect
from kvlane.app.engine.attached.server_errors import ServerFailed, error_of_event
from kvlane.app.engine.output_values import LOWEST_LOG_PROB
from kvlane.streams.records import FinishReason, LogProb, Usage

TOKEN_ID_PREFIX = "token_id:"  # noqa: S105 - vLLM's prefix of token ids
MAX_COMPLETION_EVENT_BYTES = 1 << 20
ECHO_BYTES_PER_TOKEN = 16
"""Bytes per token of a prompt that an event repeats."""


class _Likely(msgspec.Struct):
    """A token in the format of llama.cpp."""

    id: int
    logprob: float | None
    top_logprobs: list[_Likely] = []


class _LogProbs(msgspec.Struct):
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float | None] | None] | None = None
    content: list[_Likely] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _LogProbs | None = None
    error: Any = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None


class CompletionEvent(msgspec.Struct, frozen=True, gc=False):
    """The contents of one event. `token_ids`: None if the server does not return them."""

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    log_probs: tuple[tuple[LogProb, ...], ...] | None = None
    usage: Usage | None = None


_events = msgspec.json.Decoder(_Event)


def parse_completion_event(event: bytes, dialect: ServerDialect) -> CompletionEvent:
    """Parse one event of an answer. Raises ServerFailed or RequestRejected for an error event, and
    ServerFailed for an invalid one."""
    try:
        read = _events.decode(event)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as e:
        _raise_error(event)
        raise ServerFailed(f"the server sent an event that is not a completion: {e}") from e
    usage = parse_usage(read.usage)
    if read.error or not read.choices or read.choices[0].error:
        _raise_error(event)
    if not read.choices:
        return CompletionEvent(usage=usage)
    choice = read.choices[0]
    log_probs = _log_probs(choice.logprobs)
    ids = choice.token_ids
    if ids is None and log_probs is not None and dialect.answer_tokens == "log_probs":
        ids = [ranked[0].token_id for ranked in log_probs]
    if ids is not None and not all(0 <= token < 1 << 32 for token in ids):
        raise ServerFailed(f"the server sent invalid token ids: {ids!r:.200}")
    reason = parse_finish_reason(choice.finish_reason)
    return CompletionEvent(
        choice.text or "",
        None if ids is None else tuple(ids),
        "stop" if reason in ("tool_calls", "function_call") else reason,
        choice.stop_reason,
        log_probs,
        usage,
    )


def _raise_error(event: bytes) -> None:
    try:
        fields = msgspec.json.decode(event, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return
    if (error := error_of_event(fields)) is not None:
        raise error


def _log_probs(reported: _LogProbs | None) -> tuple[tuple[LogProb, ...], ...] | None:
    """For each token its own, then the most likely ones; None for tokens without ids."""
    if reported is None:
        return None
    if reported.content is not None:
        return tuple(
            tuple(LogProb(o.id, _log_prob(o.logprob)) for o in (at, *at.top_logprobs))
            for at in reported.content
        )
    tokens, own = reported.tokens or [], reported.token_logprobs or []
    others = reported.top_logprobs or [None] * len(tokens)
    if len(tokens) != len(own) or len(tokens) != len(others):
        raise ServerFailed("the server sent log probabilities that do not match its tokens")
    if not all(token.startswith(TOKEN_ID_PREFIX) for token in tokens):
        return None
    return tuple(
        (LogProb(_number(token), _log_prob(log_prob)), *_ranked(ranked or {}))
        for token, log_prob, ranked in zip(tokens, own, others, strict=True)
    )


def _log_prob(reported: float | None) -> float:
    """A log probability; servers write null for one that JSON has no number for."""
    return LOWEST_LOG_PROB if reported is None else reported


def _ranked(by_token: Mapping[str, float | None]) -> list[LogProb]:
    found = [
        LogProb(_number(token), _log_prob(reported))
        for token, reported in by_token.items()
        if token.startswith(TOKEN_ID_PREFIX)
    ]
    return sorted(found, key=lambda likely: -_log_prob(likely.log_prob))


def _number(token: str) -> int:
    try:
        return int(token.removeprefix(TOKEN_ID_PREFIX))
    except ValueError:
        raise ServerFailed(f"the server sent a token without an id: {token!r:.200}") from None
