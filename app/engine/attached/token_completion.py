"""One answer of a server to a prompt of tokens: from its events to engine outputs."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from app.engine.attached.completion_events import (
    DONE,
    CompletionEvent,
    UsageCounts,
    parse_completion_event,
)
from app.engine.attached.request_body import ServerDialect
from app.engine.attached.retokenize import Retokenizer
from app.engine.attached.server_client import EventStream, ServerFailed
from app.engine.interface import EngineError, EngineOutput, GenerateContext, token_usage
from app.preprocess.text.tokenizer import Tokenizer
from streams.codecs import token_count
from streams.records import Usage
from streams.request import Request

log = logging.getLogger(__name__)

USAGE_TIMEOUT_S = 2.0
"""Time limit for the token counts that follow the end of an answer, in seconds."""


async def read_trailing_events(
    events: AsyncGenerator[bytes, None], on_event: Callable[[bytes], object]
) -> None:
    """Pass on the events after the end of an answer, which is complete without them."""
    try:
        async with asyncio.timeout(USAGE_TIMEOUT_S):
            async for event in events:
                if event != DONE:
                    on_event(event)
    except (TimeoutError, EngineError) as e:
        log.debug("an answer ended without its token counts: %s", e)


class TokenCompletion:
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

    async def read_outputs(
        self, stream: EventStream, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield the outputs, the final one last. Raises ServerFailed for an answer without an
        end."""
        async with aclosing(stream.events()) as events:
            async for event in events:
                if event == DONE:
                    break
                if context.is_stopped:
                    yield self.cancelled_output()
                    return
                piece = parse_completion_event(event, self._speech)
                self._counts = piece.usage or self._counts
                output = self._output(piece)
                if output.finish_reason is not None:
                    await read_trailing_events(events, self._read_counts)
                    yield output.with_usage(self._usage())
                    return
                if output.token_ids:
                    first = self._counted == len(output.token_ids)
                    yield output.with_usage(self._usage()) if first else output
        raise ServerFailed("the server ended the stream before the end of the answer")

    def cancelled_output(self) -> EngineOutput:
        """The final output of a cancelled request."""
        return EngineOutput.cancelled().with_usage(self._usage())

    def _read_counts(self, event: bytes) -> None:
        self._counts = parse_completion_event(event, self._speech).usage or self._counts

    def _output(self, piece: CompletionEvent) -> EngineOutput:
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
        return EngineOutput(
            token_ids=tokens,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            log_probs=log_probs,
        )

    def _usage(self) -> Usage:
        """The token counts, the server's own where it reports them."""
        said = self._counts.cached_tokens if self._counts is not None else None
        cached = self._cached if said is None else max(said, 0)
        return token_usage(self._prompt_tokens, self._counted, cached)
