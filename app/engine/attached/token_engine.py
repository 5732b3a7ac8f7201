"""Engine over a running server with prompts of tokens: completions, cache events, metrics.

    Request ─► request_body.py ─► server_client.py ─HTTP─► the server
    its response ─► completion_events.py ─► EngineOutputs
    its ZMQ socket ─► zmq_events.py ─► listener; without one: served tokens ─► EstimatedCache ─► it
    its metrics ─► server_engine.py ─► heartbeats

The worker waits for the server at its start, and finds its dialect of the API (`ServerDiscovery`).
Every stream ends, also with a faulty server: each wait has a deadline, each answer a bound.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from kvlane.app.engine.attached.completion_events import (
    ECHO_BYTES_PER_TOKEN,
    MAX_COMPLETION_EVENT_BYTES,
)
from kvlane.app.engine.attached.new_forms import form_key
from kvlane.app.engine.attached.request_body import ServerDialect, completion_body, prefill_body
from kvlane.app.engine.attached.server_engine import ServerAddress, ServerEngine
from kvlane.app.engine.attached.server_metrics import ServerMetrics
from kvlane.app.engine.attached.token_completion import PrefillResponse, TokenCompletion
from kvlane.app.engine.attached.zmq_events import ZmqEventFollower
from kvlane.app.engine.interface import (
    EngineError,
    EngineOutput,
    GenerateContext,
    KvEventListener,
    token_usage,
    with_whole_thinking_budget,
)
from kvlane.app.preprocess.text.tokenizer import Tokenizer
from kvlane.indexer.cache_events.engine_events import AllCleared, EngineEvent, EstimatedCache
from kvlane.streams.clock import Clock
from kvlane.streams.codecs import token_count, unpack_tokens
from kvlane.streams.records import EngineConfig
from kvlane.streams.request import Request

log = logging.getLogger(__name__)

COMPLETIONS_PATH = "/v1/completions"


class AssumedLimits(NamedTuple):
    """Values assumed of a server that does not report its own."""

    context_length: int
    block_size: int
    cache_blocks: int


class AttachedEngine(ServerEngine):
    """See the module. `served_name`: the model's name for clients; "" for the server's name.

    `transfer_lease_s`: how long the server (vLLM or SGLang) holds the blocks of a prompt for
    another one; None: no hand-overs. `bootstrap`: where a SGLang server for prompts meets the other
    one.
    """

    def __init__(
        self,
        clock: Clock,
        address: ServerAddress,
        tokenizer: Tokenizer,
        assumed: AssumedLimits,
        *,
        served_name: str = "",
        transfer_lease_s: float | None = None,
        bootstrap: tuple[str, int] | None = None,
    ) -> None:
        super().__init__(clock, address)
        self._tokenizer = tokenizer
        self._guess = assumed
        self._serves_as = served_name
        self._transfer_lease_s = transfer_lease_s
        self._bootstrap = bootstrap
        self._listener: KvEventListener | None = None
        self._context_length = assumed.context_length
        self.event_follower: ZmqEventFollower | None = None
        """The follower of its cache events, if the server publishes them."""
        self._estimate: EstimatedCache | None = None
        """Estimate of its cache; passed to the listener unless the server publishes events."""

    def set_kv_event_listener(self, listener: KvEventListener) -> None:
        self._listener = listener

    # --- lifecycle
    # ------------------------------------------------------------------------------------

    async def start(self, worker_id: str) -> EngineConfig:
        """Wait for the server and discover its properties. Raises EngineError with advice."""
        where = self._where
        introduction = await self._connect(worker_id)
        has_transfers = self._transfer_lease_s is not None
        known = await introduction.discover(
            where.model, self._tokenizer, has_transfers=has_transfers
        )
        self._dialect, self._versions = known.dialect, known.versions
        self._context_length = known.context_length or self._guess.context_length
        if has_transfers and not (known.dialect.is_vllm or known.dialect.is_disaggregated):
            raise EngineError(
                f"KVLANE_ATTACH_TRANSFER_LEASE_S is set, but {where.url} is neither a vLLM nor a "
                "SGLang server: only these hand prompts over; unset it"
            )
        if self._bootstrap is not None and not known.dialect.is_disaggregated:
            raise EngineError(
                f"KVLANE_ATTACH_BOOTSTRAP is set, but {where.url} is no SGLang server; unset it"
            )
        health = await self._start_monitoring()
        if health.metrics.ranks > 1:
            raise EngineError(
                f"{where.url} has {health.metrics.ranks} data-parallel ranks, whose caches a "
                "worker cannot distinguish: start one server and one worker for each rank"
            )
        config = self._describe(known.dialect, health.metrics)
        if self.event_follower is not None:
            await self.event_follower.connect()
            self._spawn(self.event_follower.run())
        dialect, cache = known.dialect, "no blocks to route by"
        if config.kv_cache_block_size is not None:
            source = "estimated" if config.guesses_cache else "known by its events"
            cache = f"{config.total_kv_blocks} blocks of {config.kv_cache_block_size}, {source}"
        log.info(
            "%s serves %s: prompts as %s, answers with %s, context %d tokens, cache: %s",
            where.url, config.model, dialect.prompt_form, dialect.answer_tokens.replace("_", " "),
            self._context_length, cache,
        )  # fmt: skip
        return config

    async def cleanup(self) -> None:
        """As `Engine.cleanup`. The server keeps running."""
        await super().cleanup()
        if self.event_follower is not None:
            self.event_follower.close()

    def _describe(self, dialect: ServerDialect, metrics: ServerMetrics) -> EngineConfig:
        """The configuration of this engine; sets up its cache events or their estimate."""
        guess, where = self._guess, self._where
        blocks = metrics.cache_blocks or guess.cache_blocks
        block_size = metrics.block_size if metrics.cache_config else guess.block_size
        if block_size is not None:
            self._estimate = EstimatedCache(block_size, blocks)
            if where.events_endpoint and self._listener is not None:
                self.event_follower = ZmqEventFollower(
                    where.events_endpoint, where.replay_endpoint, self._listener
                )
        host, port = self._bootstrap or (None, None)
        return EngineConfig(
            model=dialect.model,
            served_model_name=self._serves_as or dialect.model,
            context_length=self._context_length,
            kv_cache_block_size=block_size,
            total_kv_blocks=None if block_size is None else blocks,
            lora_names=tuple(sorted(dialect.adapters)) or None,
            gives_tokens=dialect.answer_tokens != "text",
            guesses_cache=self._estimate is not None and not where.events_endpoint,
            transfer_lease_s=self._transfer_lease_s,
            bootstrap_host=host,
            bootstrap_port=port,
        )

    # --- requests --------------------------------------------------------------------------------

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """As `Engine.generate`. Raises ServerFailed and InvalidRequest, besides EngineDead."""
        prompt_tokens = token_count(request.token_ids)
        room = self._context_length - prompt_tokens
        if room <= 0:
            yield EngineOutput.length().with_usage(token_usage(prompt_tokens, 0))
            return
        if context.phase == "prefill" and self._transfer_lease_s is not None:
            async with aclosing(self._prefill(request, context)) as prefilled:
                async for output in prefilled:
                    yield output
            return
        wanted = request.stop.max_tokens or (1 if request.is_probe else room)
        limit = min(wanted, room)
        whole = with_whole_thinking_budget(request, context)  # only vLLM has such a budget
        body = completion_body(whole, self._dialect, limit, self._text_of)
        answer = TokenCompletion(
            request, limit, self._dialect, self._tokenizer, self._cached(request)
        )
        most_bytes = MAX_COMPLETION_EVENT_BYTES + ECHO_BYTES_PER_TOKEN * prompt_tokens
        form = form_key(request)
        answering = self._answer(COMPLETIONS_PATH, body, most_bytes, answer, context, form)
        try:
            async with aclosing(answering) as outputs:
                async for output in outputs:
                    if output.token_ids and not answer.has_started:
                        answer.has_started = True
                        self._record_served(request, ())
                    yield output
        finally:
            if answer.has_started:
                self._record_served(request, answer.generated_ids)

    async def _prefill(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """Let the server compute a prompt, and hold it for another one."""
        prompt_tokens = token_count(request.token_ids)
        most_bytes = MAX_COMPLETION_EVENT_BYTES + ECHO_BYTES_PER_TOKEN * prompt_tokens
        body = prefill_body(request, self._dialect, self._text_of)
        reading = PrefillResponse(prompt_tokens, self._cached(request), most_bytes)
        form = form_key(request)
        answering = self._answer(COMPLETIONS_PATH, body, most_bytes, reading, context, form)
        async with aclosing(answering) as outputs:
            async for output in outputs:
                self._record_served(request, ())
                yield output

    def _text_of(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special=False)

    # --- estimate of its cache -------------------------------------------------------

    def _cached(self, request: Request) -> int:
        """Estimate of the cached tokens of a prompt; the server reports them at the end only."""
        if self._estimate is None or request.is_probe or request.prompt_embeds is not None:
            return 0
        return self._estimate.cached_tokens(
            unpack_tokens(request.token_ids),
            lora_name=request.hints.lora_name or "",
            cache_salt=request.cache_salt,
        )

    def _record_served(self, request: Request, answer: Sequence[int]) -> None:
        """Record that the server has computed this prompt and these tokens of its answer."""
        if self._estimate is None or request.is_probe or request.prompt_embeds is not None:
            return
        tokens = array("I", unpack_tokens(request.token_ids)) + array("I", answer)
        self._publish(
            self._estimate.on_served(
                tokens, lora_name=request.hints.lora_name or "", cache_salt=request.cache_salt
            )
        )

    def _on_restart(self) -> None:
        if self._estimate is not None:
            self._estimate.clear()
            self._publish([AllCleared()])

    def _publish(self, events: Sequence[EngineEvent]) -> None:
        if self._listener is not None and self.event_follower is None and events:
            self._listener(events)
