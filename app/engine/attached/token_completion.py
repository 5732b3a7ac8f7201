"""One answer of a server to a prompt of tokens: from its events to engine outputs.

A prefill is answered by a single response, with the transfer parameters for another server.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from app.engine.attached.answer_stream import AnswerStream
from app.engine.attached.completion_events import (
    CompletionEvent,
    UsageCounts,
    parse_completion_event,
)
from app.engine.attached.request_body import KV_TRANSFER_FIELD, ServerDialect
from app.engine.attached.retokenize import Retokenizer
from app.engine.attached.server_client import EventStream, ServerFailed
from app.engine.interface import EngineOutput, GenerateContext, token_usage
from app.preprocess.text.tokenizer import Tokenizer
from streams.codecs import token_count
from streams.records import Usage
from streams.request import Request


class TokenCompletion(AnswerStream):
    """One answer. `generated_ids`: its tokens so far, if they are the model's own; `has_started`:
    whether any output has come, so that the prompt has been computed."""

    def __init__(
        self, request: Request, limit: int, speech: ServerDialect, tokenizer: Tokenizer, cached: int
    ) -> None:
        """`cached`: estimate of the prompt tokens in the server's cache."""
        self.generated_ids = array("I")
        self.has_started = False
        self._limit = limit
        self._cached = cached
        self._speech = speech
        self._prompt_tokens = token_count(request.token_ids)
        self._retokenised = Retokenizer(tokenizer) if speech.answer_tokens == "text" else None
        self._wants_log_probs = request.output.logprobs is not None
        self._counted = 0
        self._counts: UsageCounts | None = None

    def _on_trailing_event(self, event: bytes) -> None:
        self._parsed(event)

    def _parsed(self, event: bytes) -> CompletionEvent:
        piece = parse_completion_event(event, self._speech)
        self._counts = piece.usage or self._counts
        return piece

    def _output(self, event: bytes) -> EngineOutput:
        piece = self._parsed(event)
        if self._retokenised is not None:
            tokens = self._retokenised.push(piece.text)
            if piece.finish_reason is not None:
                tokens += self._retokenised.flush()
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

    def _usage(self) -> Usage:
        reported = self._counts.cached_tokens if self._counts is not None else None
        cached = self._cached if reported is None else max(reported, 0)
        return token_usage(self._prompt_tokens, self._counted, cached)


class _PrefillBody(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None
    usage: UsageCounts | None = None


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
        reported = body.usage.cached_tokens if body.usage is not None else None
        cached = self._cached if reported is None else max(reported, 0)
        if context.is_stopped:
            yield self.cancelled_output()
            return
        transfer = None
        if body.kv_transfer_params:
            transfer = msgspec.json.encode({KV_TRANSFER_FIELD: body.kv_transfer_params})
        counts = token_usage(self._prompt_tokens, 1, cached)
        yield EngineOutput(finish_reason="length", usage=counts, transfer=transfer)

    def cancelled_output(self) -> EngineOutput:
        """The final output of a cancelled prefill."""
        return EngineOutput.cancelled()
