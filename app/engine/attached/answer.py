"""One answer of a server, from the pieces that come to outputs."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from app.engine.attached.dialect import Speech
from app.engine.attached.pieces import DONE, Counts, Piece, piece_of
from app.engine.attached.retokenised import Retokenised
from app.engine.attached.server import ServerFailed, Stream
from app.engine.contract import EngineError, EngineOutput, GenerateContext, usage
from app.preprocess.tokenizer import Tokenizer
from streams.codecs import token_count
from streams.records import Request, Usage

log = logging.getLogger(__name__)

TAIL_S = 2.0
"""What a server gets, after the end of an answer, to say what it counted."""


async def read_tail(events: AsyncGenerator[bytes, None], take: Callable[[bytes], object]) -> None:
    """Take what comes behind the end of an answer, which is whole without it."""
    try:
        async with asyncio.timeout(TAIL_S):
            async for event in events:
                if event != DONE:
                    take(event)
    except (TimeoutError, EngineError) as e:
        log.debug("an answer ended without what was counted: %s", e)


class Answer:
    """One answer, from the server's pieces to outputs. `made`: the tokens so far, if they are the
    model's own; `is_known`: whether anything came, so that the prompt was computed."""

    def __init__(
        self, request: Request, limit: int, speech: Speech, tokenizer: Tokenizer, cached: int
    ) -> None:
        """`cached`: tokens of the prompt that are thought to be in the server's cache."""
        self.made = array("I")
        self.is_known = False
        self._limit = limit
        self._cached = cached
        self._speech = speech
        self._prompt_tokens = token_count(request.token_ids)
        self._retokenised = Retokenised(tokenizer) if speech.answers == "text" else None
        self._wants_log_probs = request.output.logprobs is not None
        self._counted = 0
        self._counts: Counts | None = None

    async def read(
        self, stream: Stream, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """The outputs, the terminal one last. Raises ServerFailed for an answer without an end."""
        async with aclosing(stream.events()) as events:
            async for event in events:
                if event == DONE:
                    break
                if context.stopped:
                    yield self.cancelled()
                    return
                piece = piece_of(event, self._speech)
                self._counts = piece.counts or self._counts
                output = self._output(piece)
                if output.finish_reason is not None:
                    await read_tail(events, self._read_counts)
                    yield output.with_usage(self._usage())
                    return
                if output.token_ids:
                    first = self._counted == len(output.token_ids)
                    yield output.with_usage(self._usage()) if first else output
        raise ServerFailed("the server broke its answer off before the end")

    def cancelled(self) -> EngineOutput:
        """The end of an answer that nobody wants any more."""
        return EngineOutput.cancelled().with_usage(self._usage())

    def _read_counts(self, event: bytes) -> None:
        self._counts = piece_of(event, self._speech).counts or self._counts

    def _output(self, piece: Piece) -> EngineOutput:
        if self._retokenised is not None:
            tokens = self._retokenised.push(piece.text)
            if piece.finish_reason is not None:
                tokens += self._retokenised.end()
        elif piece.token_ids is not None:
            tokens = piece.token_ids
            self.made.extend(tokens)
        elif piece.text:
            raise ServerFailed("the server gave no token ids, as it did when it was attached to")
        else:
            tokens = ()
        over = self._counted + len(tokens) - self._limit
        if over > 0 and self._retokenised is None:
            raise ServerFailed(f"the server made {over} tokens more than it was asked for")
        self._counted += len(tokens)
        log_probs = piece.log_probs if self._wants_log_probs and tokens else None
        if log_probs is not None and len(log_probs) != len(tokens):
            raise ServerFailed("the server sent log probabilities of other tokens than it made")
        return EngineOutput(
            token_ids=tokens,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            log_probs=log_probs,
        )

    def _usage(self) -> Usage:
        """What was counted, by the server where it says so."""
        said = self._counts.cached_tokens if self._counts is not None else None
        cached = self._cached if said is None else max(said, 0)
        return usage(self._prompt_tokens, self._counted, cached)
