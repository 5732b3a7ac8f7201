"""A server that runs already as an engine: completions over HTTP, its cache events, its figures.

    Request ─► dialect.py ─► server.py ─HTTP─► the server ─► pieces.py ─► EngineOutputs
                         its ZMQ socket, or a guess ─► events.py, guess ─► listener
                                      its metrics ─► health.py ─► heartbeats

One worker stands beside one server, and is no part of its life: it waits for it when it starts,
and finds out how to speak to it (`Introduction`). Whatever the server does, a stream ends: each
wait has a deadline, each answer a bound, and what breaks is a typed error.

What has no part in tokens is `beside.py`'s; a server that is asked in OpenAI's own words is
`passing.py`'s.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from app.engine.attached.answer import Answer
from app.engine.attached.beside import Attachment, Beside
from app.engine.attached.dialect import Speech, body_of
from app.engine.attached.events import ServerEvents
from app.engine.attached.figures import Metrics
from app.engine.attached.pieces import ECHO_BYTES, EVENT_BYTES
from app.engine.contract import (
    BlocksListener,
    EngineError,
    EngineOutput,
    GenerateContext,
    usage,
)
from app.preprocess.tokenizer import Tokenizer
from indexer.engine_events import AllCleared, EngineEvent
from indexer.modelled import ModelledCache
from streams.clock import Clock
from streams.codecs import token_count, unpack_tokens
from streams.records import EngineConfig, Request

log = logging.getLogger(__name__)

COMPLETIONS = "/v1/completions"


class Guess(NamedTuple):
    """What is taken for true of a server that does not say."""

    context_length: int
    block_size: int
    blocks: int


class AttachedEngine(Beside):
    """See the module. `serves_as`: the model's name for clients; "" for that of the server."""

    def __init__(
        self,
        clock: Clock,
        where: Attachment,
        tokenizer: Tokenizer,
        guess: Guess,
        *,
        serves_as: str = "",
    ) -> None:
        super().__init__(clock, where)
        self._tokenizer = tokenizer
        self._guess = guess
        self._serves_as = serves_as
        self._listener: BlocksListener | None = None
        self._context_length = guess.context_length
        self.events: ServerEvents | None = None
        """Of a server that publishes them."""
        self._modelled: ModelledCache | None = None
        """What its cache is thought to hold; told to the listener unless the server tells it."""

    def listen(self, listener: BlocksListener) -> None:
        """As `Engine.listen`."""
        self._listener = listener

    # --- life ------------------------------------------------------------------------------------

    async def start(self, worker_id: str) -> EngineConfig:
        """Wait for the server and find out what it is. Raises EngineError, with what to do."""
        where = self._where
        introduction = await self._meet(worker_id)
        known = await introduction.introduce(where.model, self._tokenizer)
        self._speech, self._versions = known.speech, known.versions
        self._context_length = known.context_length or self._guess.context_length
        health = await self._look_after()
        if health.metrics.ranks > 1:
            raise EngineError(
                f"{where.url} has {health.metrics.ranks} data-parallel ranks, of which a "
                "worker could not tell the caches apart: start a server, and a worker, for each"
            )
        config = self._describe(known.speech, health.metrics)
        if self.events is not None:
            await self.events.connect()
            self._spawn(self.events.run())
        log.info("%s: %s, %s", where.url, known.speech._replace(adapters=frozenset()), config)
        return config

    async def cleanup(self) -> None:
        """As `Engine.cleanup`. The server goes on."""
        await super().cleanup()
        if self.events is not None:
            self.events.close()

    def _describe(self, speech: Speech, metrics: Metrics) -> EngineConfig:
        """What it is, and whose events its cache has."""
        guess, where = self._guess, self._where
        blocks = metrics.blocks or guess.blocks
        block_size = metrics.block_size if metrics.cache else guess.block_size
        if block_size is not None:
            self._modelled = ModelledCache(block_size, blocks)
            if where.events and self._listener is not None:
                self.events = ServerEvents(where.events, where.replay, self._listener)
        return EngineConfig(
            model=speech.model,
            served_model_name=self._serves_as or speech.model,
            context_length=self._context_length,
            kv_cache_block_size=block_size,
            total_kv_blocks=None if block_size is None else blocks,
            lora_names=tuple(sorted(speech.adapters)) or None,
            gives_tokens=speech.answers != "text",
            guesses_cache=self._modelled is not None and not where.events,
        )

    # --- requests --------------------------------------------------------------------------------

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """As `Engine.generate`. Raises ServerFailed and InvalidRequest, besides EngineDead."""
        prompt_tokens = token_count(request.token_ids)
        room = self._context_length - prompt_tokens
        if room <= 0:
            yield EngineOutput.length().with_usage(usage(prompt_tokens, 0))
            return
        wanted = request.stop.max_tokens or (1 if request.is_probe else room)
        limit = min(wanted, room)
        body = body_of(request, self._speech, limit, self._text_of)
        answer = Answer(request, limit, self._speech, self._tokenizer, self._cached(request))
        most_bytes = EVENT_BYTES + ECHO_BYTES * prompt_tokens
        answering = self._answer(COMPLETIONS, body, most_bytes, answer, context)
        try:
            async with aclosing(answering) as outputs:
                async for output in outputs:
                    if output.token_ids and not answer.is_known:
                        answer.is_known = True
                        self._serve(request, ())
                    yield output
        finally:
            if answer.is_known:
                self._serve(request, answer.made)

    def _text_of(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special=False)

    # --- what its cache is thought to hold -------------------------------------------------------

    def _cached(self, request: Request) -> int:
        """Tokens of its prompt that are thought to be cached; the server tells only at the end."""
        if self._modelled is None or request.is_probe or request.prompt_embeds is not None:
            return 0
        return self._modelled.cached_tokens(
            unpack_tokens(request.token_ids),
            lora_name=request.hints.lora_name or "",
            cache_salt=request.cache_salt,
        )

    def _serve(self, request: Request, answer: Sequence[int]) -> None:
        """The server has computed this prompt, with so much of its answer."""
        if self._modelled is None or request.is_probe or request.prompt_embeds is not None:
            return
        tokens = array("I", unpack_tokens(request.token_ids)) + array("I", answer)
        self._tell(
            self._modelled.serve(
                tokens, lora_name=request.hints.lora_name or "", cache_salt=request.cache_salt
            )
        )

    def _began_anew(self) -> None:
        if self._modelled is not None:
            self._modelled.clear()
            self._tell([AllCleared()])

    def _tell(self, events: Sequence[EngineEvent]) -> None:
        if self._listener is not None and self.events is None and events:
            self._listener(events)
