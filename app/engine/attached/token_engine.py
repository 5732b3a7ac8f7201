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
from typing import Any, NamedTuple

import msgspec

from kvlane.app.engine.attached.answer_stream import AnswerStream, parse_usage
from kvlane.app.engine.attached.completion_events import (
    ECHO_BYTES_PER_TOKEN,
    MAX_COMPLETION_EVENT_BYTES,
    CompletionEvent,
    parse_completion_event,
)
from kvlane.app.engine.attached.new_forms import form_key
from kvlane.app.engine.attached.request_body import ServerDialect, completion_body, prefill_body
from kvlane.app.engine.attached.server_client import EventStream
from kvlane.app.engine.attached.server_engine import ServerAddress, ServerEngine
from kvlane.app.engine.attached.server_errors import ServerFailed, error_of_event
from kvlane.app.engine.attached.server_metrics import ServerMetrics
from kvlane.app.engine.attached.zmq_events import ZmqEventFollower
from kvlane.app.engine.interface import (
    KV_TRANSFER_FIELD,
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
from kvlane.streams.records import EngineConfig, Usage
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
