"""What an engine promises: the interface between a worker process and whatever generates tokens.

Owns the `Engine` interface, the handle each request is given (`GenerateContext`), what an engine
yields (`EngineOutput`) and its typed errors. Knows nothing of Kafka, runs or leases; the rules
below are checked by `app/engine/validator.py`.

Life of an engine: constructed, `start`, any number of concurrent `generate`, `drain`, `cleanup`.

1. When `start` returns, the engine is ready to generate. It logs its progress: loading may take
   minutes and is silent otherwise.
2. A stream yields any number of outputs; exactly one, the last, has a finish reason. Or it raises
   an EngineError, which is an end of its own kind. Nothing follows either.
3. A stream polls `context.stopped` between outputs and then ends with `cancelled`.
4. What a stream holds (a slot, a handle) is released in its own `finally`: a consumer may leave at
   any output. `abort` is for telling others early, and called on an explicit cancel only.
5. `cleanup` runs once, also after a failed `start`, and is safe on a half-built engine; a second
   call does nothing. It does not run when `start` never was called: a constructor takes nothing
   that must be given back.
6. An engine with a block size tells its cache events, in order, to the listener it was given.
7. A probe (`Request.is_probe`) may carry token ids and nothing else. It is answered here, by this
   engine alone, and leaves out whatever has to be agreed on with others.
8. An engine takes what the kind in its config says: tokens, and yields tokens, or OpenAI's bodies
   (`Request.body`), and yields text, with asides for all that is no text. Nobody can go on with
   what was broken off of the latter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from indexer.engine_events import EngineEvent
from streams.records import (
    Aside,
    EngineConfig,
    EngineFigures,
    FinishReason,
    Json,
    LogProb,
    Request,
    Usage,
)

U32_MAX = 2**32 - 1


class BlocksListener(Protocol):
    """Told of cache events on the event loop, between two steps; must not block.

    `rank`: whose cache it is, of an engine that has several.
    """

    def __call__(self, events: Sequence[EngineEvent], rank: int = 0, /) -> None:
        """These happened, in this order."""


class EngineError(Exception):
    """A request failed in the engine. `retryable`: another worker may well succeed with it."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class EngineFull(EngineError):
    """It takes nothing more at the moment. Before the first word that is no failure of the request:
    it is asked again, elsewhere or a little later, up to its deadline. Needs more workers, or a
    larger limit at the server."""


class InvalidRequest(EngineError):
    """The request asks for what this engine cannot do, or makes no sense to it; names the field.

    No worker beside an engine of this kind will succeed with it: it ends with an error.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)


class EngineDead(EngineError):
    """The engine will never generate again; its process ends and is started anew."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


class EngineOutput(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """Some of one request's answer, tokens or text; with a finish reason it is the last output.

    `usage` counts this execution only: its prompt, with tokens of earlier attempts in it, and what
    it generated. It is optional, and of use on the first output, for its cached tokens, and on the
    last. `stop_reason` and `log_probs` are those of `streams.records.Chunk`. `transfer` is what a
    prefill hands to decode: the engine's own, on the last output. `data`: as in a Chunk, placed
    within this output's text.
    """

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    message: str = ""
    stop_reason: int | str | None = None
    log_probs: tuple[tuple[LogProb, ...], ...] | None = None
    transfer: Json | None = None
    text: str = ""
    data: tuple[Aside, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether it brings nothing of the answer."""
        return not (self.token_ids or self.text or self.data)

    @staticmethod
    def token(token_id: int) -> EngineOutput:
        """One token, with more to come."""
        return EngineOutput(token_ids=(token_id,))

    @staticmethod
    def stop() -> EngineOutput:
        """The model ended its answer."""
        return EngineOutput(finish_reason="stop")

    @staticmethod
    def length() -> EngineOutput:
        """The token limit or the end of the context was reached."""
        return EngineOutput(finish_reason="length")

    @staticmethod
    def cancelled() -> EngineOutput:
        """The context was stopped."""
        return EngineOutput(finish_reason="cancelled")

    @staticmethod
    def error(message: str) -> EngineOutput:
        """The answer failed for good. Raise EngineError where the kind of failure matters."""
        return EngineOutput(finish_reason="error", message=message)

    def with_tokens(self, token_ids: Iterable[int]) -> EngineOutput:
        """The same output with these tokens."""
        return msgspec.structs.replace(self, token_ids=tuple(token_ids))

    def with_usage(self, counts: Usage) -> EngineOutput:
        """The same output with token counts."""
        return msgspec.structs.replace(self, usage=counts)


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> Usage:
    """Token counts, each saturating at u32: what clients of any language can hold."""
    return Usage(
        prompt_tokens=min(prompt_tokens, U32_MAX),
        completion_tokens=min(completion_tokens, U32_MAX),
        cached_tokens=min(cached_tokens, U32_MAX),
    )


class GenerateContext:
    """One request's handle: tells the engine to stop, and hears of the first token."""

    def __init__(self, request_id: str, on_first_token: Callable[[], None] | None = None) -> None:
        self.request_id = request_id
        self._stopped = False
        self._on_first_token = on_first_token

    @property
    def stopped(self) -> bool:
        """Whether the request is no longer wanted."""
        return self._stopped

    def cancel(self) -> None:
        """The request is no longer wanted. Idempotent."""
        self._stopped = True

    def notify_first_token(self) -> None:
        """The first token exists; only the first call counts.

        The worker calls it at the first output with tokens. An engine calls it by itself only
        when it knows earlier than its stream shows.
        """
        notify, self._on_first_token = self._on_first_token, None
        if notify is not None:
            notify()


class Engine(ABC):
    """Generates tokens. One instance serves one worker process; the rules stand at the top."""

    def listen(self, listener: BlocksListener) -> None:  # noqa: B027 - optional by contract
        """Tell this one of cache events from now on; called before `start`."""

    def figures(self) -> EngineFigures | None:
        """What it does at the moment, if it knows."""
        return None

    def versions(self) -> Mapping[str, str]:
        """Versions of what generates here, by name; asked once it has started."""
        return {}

    def adapters(self) -> tuple[str, ...] | None:
        """Adapters that it has now, in order; None: as it said when it started."""
        return None

    @property
    def silence_s(self) -> float:
        """How long a request may hear nothing before the engine itself fails it; 0 if it does not
        look. Where figures count no steps, it is not taken for stalled before."""
        return 0.0

    @abstractmethod
    async def start(self, worker_id: str) -> EngineConfig:
        """Get ready to generate and say what this engine is.

        `worker_id` is opaque, unique in the fleet and stable for this life of the process. What
        the config leaves None is not advertised. Without `served_model_name` the model is served
        as `model`; without a block size requests are not routed by cache, without `total_kv_blocks`
        its use is not bounded, without `context_length` the model's own counts, without
        `max_num_seqs` the worker's setting, without a `curve` the published one; without bootstrap
        host and port, which come together, prefill is over before decode begins.
        """

    @abstractmethod
    def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """The answer's tokens as they come.

        Of `request` count the tokens, stop conditions and sampling. Its tokens may end with those
        that an earlier attempt has generated: the answer goes on from there. Of one with a body
        that counts alone, with the seed and the adapter.
        """

    async def abort(self, context: GenerateContext) -> None:  # noqa: B027 - optional by contract
        """The request was cancelled explicitly; never called for a stream that was just left."""

    async def drain(self) -> None:  # noqa: B027 - optional by contract
        """Wait for transfers that others depend on; once, before cleanup, no longer announced."""

    @abstractmethod
    async def cleanup(self) -> None:
        """Release everything; see rule 5."""
