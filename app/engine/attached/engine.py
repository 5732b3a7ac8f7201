"""A server that runs already as an engine: completions over HTTP, its cache events, its figures.

    Request ─► dialect.py ─► server.py ─HTTP─► the server ─► pieces.py ─► EngineOutputs
                         its ZMQ socket, or a guess ─► events.py, guess ─► listener
                                      its metrics ─► health.py ─► heartbeats

One worker stands beside one server, and is no part of its life: it waits for it when it starts,
and finds out how to speak to it (`Introduction`). Whatever the server does, a stream ends: each
wait has a deadline, each answer a bound, and what breaks is a typed error. A cancel is passed on by
closing the connection.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from app.engine.attached.answer import Answer
from app.engine.attached.dialect import Speech, body_of
from app.engine.attached.events import ServerEvents
from app.engine.attached.health import Health
from app.engine.attached.introduction import Introduction
from app.engine.attached.pieces import ECHO_BYTES, EVENT_BYTES
from app.engine.attached.server import Server, Stream
from app.engine.contract import (
    BlocksListener,
    Engine,
    EngineDead,
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
from streams.records import EngineConfig, EngineFigures, Request

log = logging.getLogger(__name__)

COMPLETIONS = "/v1/completions"


class Attachment(NamedTuple):
    """Where the server is. `model`: its name there; "" for the only one.

    `silence_s`: for how long it may say nothing while it has something to answer; `start_s`: for
    how long it may be away when the worker starts.
    """

    url: str
    events: str = ""
    replay: str = ""
    model: str = ""
    api_key: str = ""
    silence_s: float = 120.0
    start_s: float = 600.0


class Guess(NamedTuple):
    """What is taken for true of a server that does not say."""

    context_length: int
    block_size: int
    blocks: int


class AttachedEngine(Engine):
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
        self._clock = clock
        self._where = where
        self._tokenizer = tokenizer
        self._guess = guess
        self._serves_as = serves_as
        self._listener: BlocksListener | None = None
        self._speech = Speech(where.model)
        self._context_length = guess.context_length
        self._server: Server | None = None
        self._health: Health | None = None
        self.events: ServerEvents | None = None
        """Of a server that publishes them."""
        self._modelled: ModelledCache | None = None
        """What its cache is thought to hold; told to the listener unless the server tells it."""
        self._tasks: list[asyncio.Task[None]] = []
        self._streams: dict[GenerateContext, Stream] = {}
        self._dead: EngineDead | None = None

    def listen(self, listener: BlocksListener) -> None:
        """As `Engine.listen`."""
        self._listener = listener

    def figures(self) -> EngineFigures | None:
        """As `Engine.figures`, not older than a few seconds."""
        metrics = self._health.metrics if self._health is not None else None
        return metrics.figures() if metrics is not None and metrics.running is not None else None

    # --- life ------------------------------------------------------------------------------------

    async def start(self, worker_id: str) -> EngineConfig:
        """Wait for the server and find out what it is. Raises EngineError, with what to do."""
        where = self._where
        log.info("worker %s is being attached to %s", worker_id, where.url)
        server = self._server = Server(where.url, where.silence_s, where.api_key)
        introduction = Introduction(server, self._clock, self._tokenizer)
        await introduction.wait(where.start_s)
        known = await introduction.introduce(where.model)
        self._speech = known.speech
        self._context_length = known.context_length or self._guess.context_length
        self._health = Health(server, self._clock, self._began_anew)
        await self._health.look()
        if self._health.metrics.ranks > 1:
            raise EngineError(
                f"{where.url} has {self._health.metrics.ranks} data-parallel ranks, of which a "
                "worker could not tell the caches apart: start a server, and a worker, for each"
            )
        config = self._describe(known.speech)
        if self.events is not None:
            await self.events.connect()
            self._spawn(self.events.run())
        self._spawn(self._health.keep_looking())
        log.info("%s: %s, %s", where.url, known.speech._replace(adapters=frozenset()), config)
        return config

    async def cleanup(self) -> None:
        """As `Engine.cleanup`. The server goes on."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in list(self._streams.values()):
            stream.close()
        if self.events is not None:
            self.events.close()
        server, self._server = self._server, None
        if server is not None:
            await server.close()

    def _describe(self, speech: Speech) -> EngineConfig:
        """What it is, and whose events its cache has."""
        assert self._health is not None
        metrics, guess, where = self._health.metrics, self._guess, self._where
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

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"beside {self._where.url}")
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("what looks after %s failed", self._where.url, exc_info=error)
            self._dead = EngineDead(f"what looks after {self._where.url} failed: {error!r}")

    # --- requests --------------------------------------------------------------------------------

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """As `Engine.generate`. Raises ServerFailed and InvalidRequest, besides EngineDead."""
        if self._dead is not None:
            raise self._dead
        prompt_tokens = token_count(request.token_ids)
        room = self._context_length - prompt_tokens
        if room <= 0:
            yield EngineOutput.length().with_usage(usage(prompt_tokens, 0))
            return
        wanted = request.stop.max_tokens or (1 if request.is_probe else room)
        limit = min(wanted, room)
        body = body_of(request, self._speech, limit, self._text_of)
        assert self._server is not None
        stream = self._server.stream(COMPLETIONS, body, EVENT_BYTES + ECHO_BYTES * prompt_tokens)
        self._streams[context] = stream
        answer = Answer(request, limit, self._speech, self._tokenizer, self._cached(request))
        try:
            async with stream, aclosing(answer.read(stream, context)) as outputs:
                async for output in outputs:
                    if output.token_ids and not answer.is_known:
                        answer.is_known = True
                        self._serve(request, ())
                    yield output
        except EngineError:
            if not context.stopped:
                raise
            yield answer.cancelled()
        finally:
            del self._streams[context]
            if answer.is_known:
                self._serve(request, answer.made)

    async def abort(self, context: GenerateContext) -> None:
        """As `Engine.abort`: the server sees the connection closed and stops generating."""
        if (stream := self._streams.get(context)) is not None:
            stream.close()

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
        """Another life of the server."""
        if self._modelled is not None:
            self._modelled.clear()
            self._tell([AllCleared()])

    def _tell(self, events: Sequence[EngineEvent]) -> None:
        if self._listener is not None and self.events is None and events:
            self._listener(events)
