"""Interface of an engine: the contract between a worker process and the generator of tokens.

`app/engine/validator.py` checks rules 2, 3 and 5; a worker refuses an output with values that
records cannot carry (`app/engine/output_values.py`). Lifecycle: constructed, `start`, any number of
concurrent `generate`, `drain`, `cleanup`.

1. When `start` returns, the engine is ready to generate. It logs its progress meanwhile.
2. A stream yields any number of outputs; exactly one, the last, has a finish reason. Or it raises
   an EngineError, which ends it too.
3. A stream checks `context.is_stopped` between outputs, and then ends with `cancelled`.
4. The resources of a stream are released in its own `finally`: a consumer may leave at any output.
   `abort` stops the generation early, and is called on an explicit cancel only.
5. `cleanup` runs once after `start`, also after a failed one; a second call does nothing. Without a
   call of `start` it does not run, so a constructor acquires no resources.
6. An engine with a block size passes its cache events, in order, to its listener.
7. A probe (`Request.is_probe`) may carry token ids and nothing else. This engine alone answers it.
8. The kind in the config is the kind of requests: tokens, answered with tokens, or OpenAI bodies
   (`Request.body`), answered with text and asides, which no other worker can resume.
9. An engine with a `transfer_lease_s` hands prompts over. In phase prefill its last output has
   `transfer`, with which another engine can fetch the blocks within the lease; its tokens are
   discarded. In phase decode it fetches the blocks of `Request.prefill_result`, and generates the
   answer, or raises a retryable EngineError.
10. With a bootstrap host and port in its config, an engine meets another one in the room of
    `Request.bootstrap_info`: both have the request at the same time. In phase prefill it needs no
    `transfer`; in phase decode it waits for the blocks until its consumer leaves, or until `abort`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from kvlane.app.operator_error import OperatorError
from kvlane.app.text.answer_parts import ContentParser, Emit
from kvlane.indexer.cache_events.engine_events import EngineEvent
from kvlane.streams.record_base import JsonText
from kvlane.streams.records import (
    GUIDED_DECODING_FEATURE,
    LOGPROBS_FEATURE,
    EngineConfig,
    EngineStats,
    FinishReason,
    LogProb,
    PassthroughDelta,
    Phase,
    Usage,
)
from kvlane.streams.request import AnswerParsing, Request

U32_MAX = 2**32 - 1


class KvEventListener(Protocol):
    """Receives cache events on the event loop, between two steps; must not block.

    `rank`: the data-parallel rank of the cache, of an engine with several.
    """

    def __call__(self, events: Sequence[EngineEvent], rank: int = 0, /) -> None:
        """Process events in their order."""


class EngineError(OperatorError):
    """An engine did not start, or a request failed in it. `retryable`: another worker may succeed
    with the request. `reason`: the part of the message for clients, without addresses."""

    correction = "Correct the setting or the server that the message names (docs/engines.md)."
    is_stall = False
    """Whether the engine made no step for the request in time."""

    def __init__(
        self, message: str, *, retryable: bool = False, reason: str = "", correction: str = ""
    ) -> None:
        super().__init__(message, correction=correction)
        self.retryable = retryable
        self.reason = reason


class EngineFull(EngineError):
    """The engine accepts no more requests at the moment. Before the first token this does not fail
    the request: it is assigned again, to another worker or later, up to its deadline. Add workers,
    or raise the limit of the server."""


class InvalidRequest(EngineError):
    """The request is invalid, or needs a feature that this engine lacks; names the field.

    No worker with this kind of engine can serve it. `status`: that of HTTP, from 400 to 499.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message, reason=message)
        self.status = status


COMPILE_TIMEOUT_S = 60.0
"""From the start of a request with guided decoding in its engine to its first output. The engine
of vLLM bounds the time of a compile; a request also waits for other prompts."""
MAX_KNOWN_FORMS = 10_000
"""Forms of answers that an engine remembers as compiled."""
KV_TRANSFER_FIELD = "kv_transfer_params"
"""The field of a prefill's transfer for vLLM's connector."""


def not_compiled() -> InvalidRequest:
    """The error for a form without an output within COMPILE_TIMEOUT_S."""
    return InvalidRequest(
        f"the form of the answer was not compiled within {COMPILE_TIMEOUT_S:g} s: use a simpler "
        "schema, grammar or regular expression, and few new ones at a time"
    )


TEXT_ONLY_UNSUPPORTED = (GUIDED_DECODING_FEATURE, LOGPROBS_FEATURE)
"""`EngineConfig.unsupported` of an engine that generates plain text only."""
SCRIPTED_UNSUPPORTED = (LOGPROBS_FEATURE,)
"""The same of an engine with a script, whose answers are taken to have the form they are asked for.
"""


def check_text_only(request: Request, *, has_script: bool = False) -> None:
    """Raises InvalidRequest for a feature in TEXT_ONLY_UNSUPPORTED, or in SCRIPTED_UNSUPPORTED.

    Gateways and preprocessors reject it earlier, except while the model has no worker.
    """
    if request.sampling.guided_decoding is not None and not has_script:
        raise InvalidRequest(
            f"{GUIDED_DECODING_FEATURE}: not supported by the engine of this model"
        )
    if request.output.logprobs is not None or request.output.prompt_logprobs is not None:
        raise InvalidRequest(f"{LOGPROBS_FEATURE}: not supported by the engine of this model")


class EngineDead(EngineError):
    """The engine will never generate again. Its process ends and must be restarted."""

    correction = "Restart the worker; its log above this line has the engine's own error."

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


class EngineOutput(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """A part of one request's answer, tokens or text; with a finish reason it is the last output.

    `usage`: optional, on the first output (cached tokens) and the last; of this execution only: its
    prompt, with tokens of earlier attempts, and the generated tokens. `stop_reason`, `log_probs`:
    as in `streams/records.py`. `transfer`: from prefill to decode, on the last output. `data`: as
    in a Chunk, with positions within this output's text.
    """

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    message: str = ""
    stop_reason: int | str | None = None
    log_probs: tuple[tuple[LogProb, ...], ...] | None = None
    transfer: JsonText | None = None
    text: str = ""
    data: tuple[PassthroughDelta, ...] = ()

    @property
    def is_empty(self) -> bool:
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
        """The answer failed finally. Raise EngineError where the kind of failure matters."""
        return EngineOutput(finish_reason="error", message=message)

    def with_tokens(self, token_ids: Iterable[int]) -> EngineOutput:
        return msgspec.structs.replace(self, token_ids=tuple(token_ids))

    def with_usage(self, usage: Usage) -> EngineOutput:
        return msgspec.structs.replace(self, usage=usage)


def token_usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> Usage:
    """Token counts, each saturating at u32, which clients in any language can represent."""
    return Usage(
        prompt_tokens=min(prompt_tokens, U32_MAX),
        completion_tokens=min(completion_tokens, U32_MAX),
        cached_tokens=min(cached_tokens, U32_MAX),
    )


class GenerateContext:
    """Handle of one request: carries the stop to the engine and reports the first token.

    `phase`: the part of the request that this engine executes, see rule 9.
    """

    def __init__(
        self,
        request_id: str,
        on_first_token: Callable[[], None] | None = None,
        phase: Phase = "aggregated",
    ) -> None:
        self.request_id = request_id
        self.phase = phase
        self.traceparent = ""
        """The W3C Trace Context for the engine's own spans; empty if the request is not sampled."""
        self.taken_tokens = 0
        """Tokens at the end of the prompt that are of the answer: earlier runs generated them."""
        self._stopped = False
        self._on_first_token = on_first_token

    @property
    def is_stopped(self) -> bool:
        return self._stopped

    def cancel(self) -> None:
        self._stopped = True

    def notify_first_token(self) -> None:
        """Report that the first token exists; only the first call counts.

        The worker reports the first output with tokens; an engine may know earlier.
        """
        notify, self._on_first_token = self._on_first_token, None
        if notify is not None:
            notify()


class Engine(ABC):
    """Interface of an engine: it generates tokens for one worker process.

    The rules are at the top of this module; `KVLANE_VALIDATE_ENGINE=true` checks some of them at
    run time. Required: `start`, `generate`, `cleanup`. Errors: InvalidRequest for a request that no
    worker can serve, EngineFull when another one can, EngineDead when the process has to be
    restarted, EngineError for any other failure of one request.

    Example:
        class Parrot(Engine):
            async def start(self, worker_id: str) -> EngineConfig:
                return EngineConfig(model="parrot", context_length=4096)

            async def generate(self, request, context):
                for token in prompt_tokens(request)[: request.stop.max_tokens]:
                    if context.is_stopped:
                        yield EngineOutput.cancelled()
                        return
                    yield EngineOutput.token(token)
                yield EngineOutput.stop()

            async def cleanup(self) -> None: ...
    """

    def set_kv_event_listener(self, listener: KvEventListener) -> None:  # noqa: B027 - optional by contract
        """Set the listener of cache events; called before `start`."""

    def stats(self) -> EngineStats | None:
        """Current statistics, if the engine has any."""
        return None

    def versions(self) -> Mapping[str, str]:
        """Versions of the engine's software, by name; called after `start`."""
        return {}

    def calls_parser(
        self,
        parsing: AnswerParsing,
        request_id: str,  # noqa: ARG002
        emit: Emit,  # noqa: ARG002
    ) -> ContentParser:
        """A parser of the engine's own for the tool calls of an answer. Raises ValueError for one
        that it lacks."""
        raise ValueError(f"this engine has no tool parser {parsing.tools!r}")

    def adapters(self) -> tuple[str, ...] | None:
        """The adapters loaded now, in order; None if they are those of its config."""
        return None

    @property
    def output_timeout_s(self) -> float:
        """The engine's own limit on the time between two outputs of a request; 0 for none. An
        engine whose statistics count no steps is not considered stalled before it."""
        return 0.0

    @abstractmethod
    async def start(self, worker_id: str) -> EngineConfig:
        """Get ready to generate, and return the configuration of this engine.

        `worker_id`: opaque, unique in the fleet, stable for this process. A field that is None is
        not advertised: without `served_model_name` the model is served as `model`; without a block
        size requests are not routed by cache; without `total_kv_blocks` its use is not bounded;
        without `context_length` the model's applies, without `max_num_seqs` the worker's setting,
        without a `curve` the published one. Bootstrap host and port come together; without them
        prefill ends before decode.
        """

    @abstractmethod
    def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield the answer as it is generated.

        An engine reads the tokens (or body), stop conditions, sampling and adapter of `request`.
        Its tokens may end with those of an earlier attempt (`context.taken_tokens`): the answer
        continues there, and all limits are those of the rest.
        """

    async def abort(self, context: GenerateContext) -> None:  # noqa: B027 - optional by contract
        """Handle an explicit cancel of the request; not called for a stream that was only left."""

    async def drain(self) -> None:  # noqa: B027 - optional by contract
        """Wait for transfers that other workers depend on; once, unregistered, before `cleanup`.
        Ends with the last lease, if not before."""

    @abstractmethod
    async def cleanup(self) -> None:
        """Release everything; see rule 5."""


def with_whole_thinking_budget(request: Request, context: GenerateContext) -> Request:
    """The request for an engine that counts thinking tokens in the prompt too, as vLLM does: with
    the budget of the whole answer, not of the rest."""
    budget, taken = request.stop.max_thinking_tokens, context.taken_tokens
    if budget is None or not taken:
        return request
    stop = msgspec.structs.replace(request.stop, max_thinking_tokens=budget + taken)
    return msgspec.structs.replace(request, stop=stop)


def refuse_unknown_options(request: Request, beam_search: str) -> None:
    """Raise InvalidRequest for an option that no engine has.

    `beam_search`: the reason why this engine refuses beam search.
    """
    sampling = request.sampling
    if sampling.n not in (None, 1) or sampling.best_of not in (None, 1):
        raise InvalidRequest("n, best_of: a request to an engine has one answer")
    if sampling.use_beam_search or sampling.length_penalty not in (None, 1.0):
        raise InvalidRequest(f"use_beam_search, length_penalty: {beam_search}")
    if sampling.detokenize is False:
        raise InvalidRequest("detokenize: an answer always comes with its text")
    if request.output.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs: log probabilities of prompts are not supported")
