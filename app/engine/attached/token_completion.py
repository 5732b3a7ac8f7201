"""One answer of a server to a prompt of tokens: from its events to engine outputs.

A prefill is answered by a single response, with the transfer parameters for another server.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from kvlane.app.engine.attached.answer_stream import AnswerStream, parse_usage
from kvlane.app.engine.attached.completion_events import CompletionEvent, parse_completion_event
from kvlane.app.engine.attached.request_body import ServerDialect
from kvlane.app.engine.attached.server_client import EventStream
from kvlane.app.engine.attached.server_errors import ServerFailed, error_of_event
from kvlane.app.engine.interface import (
    KV_TRANSFER_FIELD,
    EngineOutput,
    GenerateContext,
    token_usage,
)
from kvlane.app.preprocess.text.tokenizer import Tokenizer
from kvlane.streams.codecs import token_count
from kvlane.streams.records import Usage
from kvlane.streams.request import Request


class TokenCompletion(AnswerStream):
    """One answer. `generated_ids`: its tokens so far, if they are the model's own; `has_started`:
    whether any output has come, so that the prompt has been computed."""

    def __init__(
        self,
        request: Request,
        limit: int,
        dialect: ServerDialect,
        tokenizer: Tokenizer,
        cached: int,
    ) -> None:
        """`cached`: estimate of the prompt tokens in the server's cache."""
        self.generated_ids = array("I")
        self.has_started = False
        self._limit = limit
        self._cached = cached
        self._dialect = dialect
        self._prompt_tokens = token_count(request.token_ids)
        self._retokenised = Retokenizer(tokenizer) if dialect.answer_tokens == "text" else None
        self._wants_log_probs = request.output.logprobs is not None
        self._counted = 0
        self._counts: Usage | None = None

    def _parsed(self, event: bytes) -> CompletionEvent:
        piece = parse_completion_event(event, self._dialect)
        self._counts = piece.usage or self._counts
        return piece

    def _output(self, event: bytes) -> EngineOutput:
        piece = self._parsed(event)
        if self._retokenised is not None:
            tokens = self._retokenised.push(piece.text)
        elif piece.token_ids is not None:
            tokens = piece.token_ids
            self.generated_ids.extend(tokens)
        elif piece.text:
            raise ServerFailed("the server returned no token ids, unlike when the worker started")
        else:
            tokens = ()
        over = self._counted + len(tokens) - self._limit
        if over > 0 and self._retokenised is None:
            raise ServerFailed(f"the server generated {over} tokens more than requested")
        self._counted += len(tokens)
        log_probs = piece.log_probs if self._wants_log_probs and tokens else None
        if log_probs is not None and len(log_probs) != len(tokens):
            raise ServerFailed("the server sent log probabilities that do not match its tokens")
        output = EngineOutput(
            token_ids=tokens,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            log_probs=log_probs,
        )
        is_first = bool(tokens) and self._counted == len(tokens)
        return output.with_usage(self._usage()) if is_first else output

    def _completed(self, output: EngineOutput) -> EngineOutput:
        if self._retokenised is not None:
            rest = self._retokenised.flush()
            self._counted += len(rest)
            output = output.with_tokens(output.token_ids + rest)
        return super()._completed(output)

    def _usage(self) -> Usage:
        cached = _cached_tokens(self._counts, self._cached)
        return token_usage(self._prompt_tokens, self._counted, cached)


def _cached_tokens(usage: Usage | None, estimate: int) -> int:
    """The cached tokens that a server reports, or else their estimate."""
    if usage is None or "cached_tokens" in usage.unknown:
        return estimate
    return usage.cached_tokens


class _PrefillBody(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None
    usage: Any = None
    error: Any = None


class PrefillResponse:
    """The response to a prefill. `cached`: estimate of the prompt tokens in the server's cache."""

    def __init__(self, prompt_tokens: int, cached: int, max_bytes: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._cached = cached
        self._max_bytes = max_bytes

    async def read_outputs(
        self, stream: EventStream, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield the final output. Raises ServerFailed for an invalid response."""
        response = await stream.read_all(self._max_bytes)
        try:
            body = msgspec.json.decode(response, type=_PrefillBody)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as e:
            raise ServerFailed(f"the server sent an invalid response to a prefill: {e}") from e
        if body.error and (error := error_of_event({"error": body.error})) is not None:
            raise error
        cached = _cached_tokens(parse_usage(body.usage), self._cached)
        if context.is_stopped:
            yield self.cancelled_output()
            return
        transfer = None
        if body.kv_transfer_params:
            transfer = msgspec.json.encode({KV_TRANSFER_FIELD: body.kv_transfer_params})
        counts = token_usage(self._prompt_tokens, 1, cached)
        yield EngineOutput(finish_reason="length", usage=counts, transfer=transfer)

    def cancelled_output(self) -> EngineOutput:
        return EngineOutput.cancelled()


class Retokenizer:
    """Tokeniser of the text of a server that returns no token ids.

    The boundaries of tokens are an estimate: they serve to count tokens and to find the end of an
    answer, not to resume it. Words are held back until they are complete.
    """

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
        decode = self._tokenizer.decode
        before = decode(self._last, skip_special=False)
        return decode([*self._last, *tokens], skip_special=False)[len(before) :]
