"""vLLM engine: `AsyncLLM` in this process, with tokens as input and output.

    Request ─► params.py ─► AsyncLLM ─► EngineOutputs
                            its cores ─► zmq_publisher.py ─► event_receiver.py ─► listener
                            its steps ─► stats.py ─► heartbeats

For GPUs and CPUs, as vLLM or its engine arguments choose. Text and stop strings are handled by
`app/text/stop_conditions.py`. Adapters are loaded at the start; one that is loaded into vLLM later
is not served.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvlane.app.engine.interface import (
    KV_TRANSFER_FIELD,
    Engine,
    EngineDead,
    EngineError,
    EngineOutput,
    GenerateContext,
    InvalidRequest,
    KvEventListener,
    token_usage,
    with_whole_thinking_budget,
)
from kvlane.app.engine.process_reaper import ProcessReaper
from kvlane.app.engine.vllm import guided_resume
from kvlane.app.engine.vllm.calls_parser import VllmCallsParser
from kvlane.app.engine.vllm.event_receiver import KvEventReceiver
from kvlane.app.engine.vllm.form_trials import FormTrials
from kvlane.app.engine.vllm.params import sampling_params, vllm_priority, vllm_prompt
from kvlane.app.engine.vllm.parent_death import PARENT_PID_VARIABLE
from kvlane.app.engine.vllm.plugin import ENDPOINT_PREFIX
from kvlane.app.engine.vllm.stats import VllmStats
from kvlane.app.engine.vllm.versions import check_plugin, installed_version
from kvlane.app.text.answer_forms import after_reasoning
from kvlane.app.text.answer_parts import Emit
from kvlane.streams.clock import Clock
from kvlane.streams.codecs import token_count
from kvlane.streams.records import EngineConfig, EngineStats, FinishReason, LogProb
from kvlane.streams.request import AnswerParsing, Request


def make_fork_safe() -> None:
    """Make llvmlite raise AttributeError for dunder attributes. Idempotent; no other effect."""
    from llvmlite.binding import ffi

    kind = ffi._lib_wrapper  # noqa: SLF001 - it has no other name
    plain = kind.__getattr__
    if getattr(plain, "is_honest", False):
        return

    def honest(self: object, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return plain(self, name)

    honest.is_honest = True  # type: ignore[attr-defined]
    kind.__getattr__ = honest


log = logging.getLogger(__name__)

LOAD_LOG_INTERVAL_S = 10.0
"""Interval between two log lines while the model is loading."""
START_METHOD_VARIABLE = "VLLM_WORKER_MULTIPROC_METHOD"
REDIRECTS_VARIABLE = "VLLM_MEDIA_URL_ALLOW_REDIRECTS"
SIDE_CHANNEL_PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"
LEASE_OPTION = "kv_lease_duration"
"""Option in `kv_connector_extra_config`: time that blocks are held for another engine, in s."""
NIXL_LEASE_S = 30.0
"""Its default in vLLM's NIXL connectors."""
NO_ARGUMENTS: Mapping[str, Any] = {}
NO_ADAPTERS: Mapping[str, Path] = {}

_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "abort": "cancelled",
    "repetition": "stop",
}


class VllmLimits(NamedTuple):
    """Limits of the engine; None leaves the choice to vLLM."""

    context_length: int | None = None
    max_num_seqs: int | None = None
    block_size: int | None = None


class VllmEngine(Engine):
    """vLLM in this process. `source`: a folder or a name that vLLM can load, served as `model`.

    `adapters`: folders of LoRA adapters by name. `arguments`: of `vllm.AsyncEngineArgs`; they
    override `limits`.
    """

    def __init__(
        self,
        clock: Clock,
        source: str,
        *,
        model: str,
        limits: VllmLimits = VllmLimits(),  # noqa: B008 - immutable
        adapters: Mapping[str, Path] = NO_ADAPTERS,
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
    ) -> None:
        self._clock = clock
        self._source = source
        self._model = model
        self._limits = limits
        self._adapters = adapters
        self._arguments = arguments
        self._listener: KvEventListener | None = None
        self._inbox: KvEventReceiver | None = None
        self._figures = VllmStats()
        self._llm: Any = None
        self._loading: asyncio.Task[Any] | None = None
        self._trials: FormTrials | None = None
        self._leash: ProcessReaper | None = None
        self._lora_requests: dict[str, Any] = {}
        """`LoRARequest`s by name."""
        self._id_numbers = count()
        self._request_ids: dict[GenerateContext, str] = {}
        """vLLM's ids of the open requests."""
        self._ranks = 1
        self._context_length = 0
        self._last_transfer_at: float | None = None
        """When a prompt was last handed over."""

    @property
    def llm(self) -> Any:
        """The `AsyncLLM`; None before the start and after the cleanup."""
        return self._llm

    def set_kv_event_listener(self, listener: KvEventListener) -> None:
        self._listener = listener

    def stats(self) -> EngineStats | None:
        if self._llm is None:
            return None
        return self._figures.snapshot(idle=not self._llm.get_num_unfinished_requests())

    def versions(self) -> Mapping[str, str]:
        return {"vllm": installed_version()}

    def calls_parser(self, parsing: AnswerParsing, request_id: str, emit: Emit) -> VllmCallsParser:
        return VllmCallsParser(parsing, request_id, emit, self._llm.get_tokenizer())

    # --- lifecycle
    # ------------------------------------------------------------------------------------

    async def start(self, worker_id: str) -> EngineConfig:
        """Load the model: seconds to minutes. Raises EngineError, and the errors of vLLM."""
        found = installed_version()
        log.info("vLLM %s of worker %s loads %s", found, worker_id, self._source)
        endpoint = ""
        if self._listener is not None:
            check_plugin()
            self._inbox = KvEventReceiver(self._listener)
            endpoint = self._inbox.open()
        self._leash = ProcessReaper()  # before vLLM starts processes
        # In a thread, so that the process answers its probes and can be stopped meanwhile.
        self._loading = asyncio.create_task(asyncio.to_thread(self._load, endpoint))
        began_at = self._clock.now()
        while not (await asyncio.wait([self._loading], timeout=LOAD_LOG_INTERVAL_S))[0]:
            log.info("%s is loading: %.0f s", self._source, self._clock.now() - began_at)
        try:
            self._llm = self._loading.result()
        except EngineError:
            raise
        except Exception as e:
            raise EngineError(f"vLLM cannot load {self._source}: {e}") from e
        await self._load_adapters()
        if self._llm.vllm_config.structured_outputs_config.backend in ("auto", "xgrammar"):
            self._trials = FormTrials(self._tokenizer_info)
            await self._trials.start()
        log.info("%s is loaded: %.1f s", self._source, self._clock.now() - began_at)
        return self._describe()

    async def drain(self) -> None:
        """Wait until other engines have fetched the blocks held for them, or the last lease ends.
        Pauses vLLM, which is the only way to be notified when it holds no more blocks."""
        if self._last_transfer_at is not None:
            lease_s = _transfer_lease_s(self._llm.vllm_config.kv_transfer_config) or 0.0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._last_transfer_at + lease_s - self._clock.now()):
                    await self._llm.pause_generation(mode="wait", clear_cache=False)

    async def cleanup(self) -> None:
        """As `Engine.cleanup`; waits for a load in progress, since it has started processes."""
        trials, self._trials = self._trials, None
        if trials is not None:
            await trials.close()
        loading, self._loading = self._loading, None
        if loading is not None:
            await asyncio.wait([loading])
            if not loading.cancelled() and loading.exception() is None:
                llm = loading.result()
                gone = EngineError("the engine was shut down", retryable=True)
                llm.output_processor.propagate_error(gone)
                if llm.output_handler is not None:  # it would report the shutdown as a failure
                    llm.output_handler.cancel()
                await asyncio.to_thread(llm.shutdown)
        self._llm = None
        leash, self._leash = self._leash, None
        if leash is not None:
            leash.release()
        inbox, self._inbox = self._inbox, None
        if inbox is not None:
            await inbox.close()

    def _load(self, endpoint: str) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        if endpoint:
            from kvlane.app.engine.vllm.plugin import register

            register()
        os.environ[PARENT_PID_VARIABLE] = str(os.getpid())
        os.environ.setdefault(REDIRECTS_VARIABLE, "0")  # an allowed host could lead to any other
        # Not fork, vLLM's default: this process has threads, and an event loop with sockets.
        start_method = os.environ.setdefault(START_METHOD_VARIABLE, "spawn")
        if start_method == "fork":
            make_fork_safe()
        try:
            arguments = AsyncEngineArgs(**self._engine_arguments(endpoint))
        except TypeError as e:
            raise EngineError(f"engine arguments: {e}") from e
        config = arguments.create_engine_config()
        os.environ[START_METHOD_VARIABLE] = (
            start_method  # on a CPU, create_engine_config overrides it
        )
        with _side_channel_port():
            return AsyncLLM.from_vllm_config(
                config,
                stat_loggers=self._figures.loggers(),
                disable_log_stats=arguments.disable_log_stats,
            )

    def _engine_arguments(self, endpoint: str) -> dict[str, Any]:
        arguments = dict(self._arguments)
        if taken := arguments.keys() & {"model", "served_model_name", "kv_events_config"}:
            raise EngineError(f"engine arguments: {', '.join(sorted(taken))} is reserved")
        limits = {
            "max_model_len": self._limits.context_length,
            "max_num_seqs": self._limits.max_num_seqs,
            "block_size": self._limits.block_size,
        }
        named: dict[str, Any] = {n: value for n, value in limits.items() if value is not None}
        named |= {"disable_log_stats": True, "enable_lora": bool(self._adapters)}
        named |= arguments
        if isinstance(named.get("kv_transfer_config"), dict):
            from vllm.config import KVTransferConfig

            named["kv_transfer_config"] = KVTransferConfig(**named["kv_transfer_config"])
        if endpoint:
            from vllm.config import KVEventsConfig

            named["kv_events_config"] = KVEventsConfig(
                enable_kv_cache_events=True, publisher="zmq", endpoint=ENDPOINT_PREFIX + endpoint
            )
        return named | {"model": self._source, "served_model_name": self._model}

    def _tokenizer_info(self) -> str:
        """The tokenizer as vLLM gives it to xgrammar, as JSON."""
        import xgrammar

        size = self._llm.vllm_config.model_config.get_vocab_size()
        tokenizer = self._llm.get_tokenizer()
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
        encoded: str = info.serialize_json()
        return encoded

    async def _load_adapters(self) -> None:
        """Load all adapters now: a wrong path in a request would kill vLLM's engine core."""
        from vllm.lora.request import LoRARequest

        for name, folder in self._adapters.items():
            adapter = LoRARequest(name, len(self._lora_requests) + 1, str(folder))
            try:
                await self._llm.add_lora(adapter)
            except Exception as e:
                raise EngineError(f"the adapter {name} in {folder} cannot be loaded: {e}") from e
            self._lora_requests[name] = adapter

    def _describe(self) -> EngineConfig:
        config = self._llm.vllm_config
        cache, scheduler = config.cache_config, config.scheduler_config
        self._ranks = config.parallel_config.data_parallel_size
        self._context_length = config.model_config.max_model_len
        # The first block of each rank is a placeholder, and never allocated.
        self._figures.blocks_per_rank = cache.num_gpu_blocks // self._ranks - 1
        lora = config.lora_config
        return EngineConfig(
            model=self._source,
            served_model_name=self._model,
            context_length=self._context_length,
            kv_cache_block_size=cache.block_size if cache.enable_prefix_caching else None,
            total_kv_blocks=self._figures.blocks_per_rank,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            lora_names=tuple(self._lora_requests) if lora else None,
            data_parallel_size=self._ranks if self._ranks > 1 else None,
            transfer_lease_s=_transfer_lease_s(config.kv_transfer_config),
            # With a publisher of ours the engine's processes have loaded the plugin.
            continues_guided=self._inbox is not None and not guided_resume.interface_fault(),
        )

    # --- requests --------------------------------------------------------------------------------

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        if self._inbox is not None and (failed := self._inbox.failure) is not None:
            raise EngineDead(f"the receiver of vLLM's cache events failed: {failed!r}")
        prompt_tokens = token_count(request.token_ids)
        if prompt_tokens >= self._context_length:
            yield EngineOutput.length().with_usage(token_usage(prompt_tokens, 0))
            return
        try:
            stream = await self._begin(request, context)
            made = 0
            try:
                async for result in stream:
                    first, made = made == 0, made + len(result.outputs[0].token_ids)
                    output = _output(result, request.output.logprobs, stopped=context.is_stopped)
                    if output.transfer is not None:
                        self._last_transfer_at = self._clock.now()
                    if output.finish_reason == "error" and not made:
                        _raise_known_cause(request, context)
                    if first or output.finish_reason is not None:
                        counts = token_usage(prompt_tokens, made, result.num_cached_tokens or 0)
                        output = output.with_usage(counts)
                    yield output
                    if output.finish_reason is not None:
                        return
            finally:
                self._request_ids.pop(context, None)
                await stream.aclose()  # which stops vLLM if it is still generating
        except EngineError:
            raise
        except Exception as e:
            raise _translated(e) from e
        raise EngineError("vLLM ended an answer without a finish reason", retryable=True)

    async def _begin(self, request: Request, context: GenerateContext) -> AsyncGenerator[Any, None]:
        """Pass a request to vLLM. Raises InvalidRequest, and errors of vLLM."""
        guided = after_reasoning(request.sampling.guided_decoding, request.parsing)
        if guided is not None and self._trials is not None:
            await self._trials.check(guided, request.tenant)
        whole = with_whole_thinking_budget(request, context)
        sampling = sampling_params(whole, context.phase, context.taken_tokens)
        adapter = self._adapter(request.hints.lora_name)
        prompt = await vllm_prompt(request, self._llm.model_config)
        name = self._request_ids[context] = f"{context.request_id}-{next(self._id_numbers)}"
        stream: AsyncGenerator[Any, None] = self._llm.generate(
            prompt,
            sampling,
            name,
            lora_request=adapter,
            trace_headers={"traceparent": context.traceparent} if context.traceparent else None,
            priority=vllm_priority(request),
            data_parallel_rank=(request.hints.dp_rank or 0) if self._ranks > 1 else None,
        )
        return stream

    async def abort(self, context: GenerateContext) -> None:
        name = self._request_ids.get(context)
        if name is not None:
            await self._llm.abort(name)

    def _adapter(self, name: str | None) -> Any:
        if not name:
            return None
        if name not in self._lora_requests:
            raise InvalidRequest(f"lora_name: this worker has not loaded an adapter {name!r}")
        return self._lora_requests[name]


def _raise_known_cause(request: Request, context: GenerateContext) -> None:
    """Raise the EngineError of an answer that ended with an error before its first token, which has
    no message in vLLM."""
    if request.prefill_result:
        raise EngineError("vLLM could not fetch the blocks of the prompt", retryable=True)
    if request.sampling.guided_decoding is None:
        return
    if context.taken_tokens:
        raise EngineError(
            "vLLM cannot continue the answer in the form that it must have: the log of the worker "
            "has the reason"
        )
    raise InvalidRequest("vLLM cannot compile the form of the answer: use a simpler one")


def _transfer_lease_s(config: Any) -> float | None:
    """Time that vLLM holds the blocks of a prompt for another engine, by its KVTransferConfig; None
    if it hands nothing over by parameters of a request, as far as is known."""
    if config is None:
        return None
    default = NIXL_LEASE_S if str(config.kv_connector).startswith("Nixl") else None
    lease_s = config.get_from_extra_config(LEASE_OPTION, default)
    return None if lease_s is None else float(lease_s)


@contextlib.contextmanager
def _side_channel_port() -> Iterator[None]:
    """Give the engine that is started meanwhile a free port for NIXL, unless one is given: the
    default of vLLM is the same for all engines."""
    from vllm.utils.network_utils import get_open_port

    if SIDE_CHANNEL_PORT_VARIABLE in os.environ:
        yield
        return
    os.environ[SIDE_CHANNEL_PORT_VARIABLE] = str(get_open_port())
    try:
        yield
    finally:
        del os.environ[SIDE_CHANNEL_PORT_VARIABLE]


def _translated(error: Exception) -> EngineError:
    from vllm.exceptions import GracefulHTTPError, VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(error, EngineDeadError):
        return EngineDead(f"vLLM's engine core died: {error}")
    if isinstance(error, GracefulHTTPError):  # overloaded
        return EngineError(str(error), retryable=True)
    cause = error.__cause__
    if isinstance(cause, EngineError):
        return cause
    if isinstance(error, VLLMClientError | ValueError):
        return InvalidRequest(str(error))
    if isinstance(cause, ValueError):
        return InvalidRequest(str(cause))
    return EngineError(f"vLLM failed: {cause or error!r}", retryable=True)


def _output(result: Any, likeliest: int | None, *, stopped: bool) -> EngineOutput:
    """One output, from a `RequestOutput` with the new tokens."""
    answer = result.outputs[0]
    finish_reason: FinishReason | None = "cancelled" if stopped else None
    if answer.finish_reason is not None:
        finish_reason = _REASONS.get(answer.finish_reason, "error")
    log_probs = None
    if answer.logprobs is not None and likeliest is not None:
        log_probs = tuple(
            _of_token(token, by_token, likeliest)
            for token, by_token in zip(answer.token_ids, answer.logprobs, strict=True)
        )
    transfer = result.kv_transfer_params
    return EngineOutput(
        token_ids=tuple(answer.token_ids),
        finish_reason=finish_reason,
        stop_reason=answer.stop_reason,
        log_probs=log_probs,
        message="vLLM ended the answer with an error" if finish_reason == "error" else "",
        transfer=None if transfer is None else msgspec.json.encode({KV_TRANSFER_FIELD: transfer}),
    )


def _of_token(token: int, by_token: Mapping[int, Any], likeliest: int) -> tuple[LogProb, ...]:
    """The token's own log probability, then those of the most likely tokens by rank."""
    ranked = sorted((entry.rank or 0, other) for other, entry in by_token.items())
    others = [other for rank, other in ranked if rank <= likeliest]
    return tuple(LogProb(each, by_token[each].logprob) for each in (token, *others))
