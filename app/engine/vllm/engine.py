"""vLLM as an engine of ours: `AsyncLLM` in this process, tokens in, tokens out.

    Request ─► params.py ─► AsyncLLM ─► EngineOutputs
                            its cores ─► publisher.py ─► inbox.py ─► listener
                            its steps ─► figures.py ─► heartbeats

The same code for GPUs and CPUs; where it runs and how is vLLM's own choice, or that of its engine
arguments. Text is not vLLM's here: what comes out is tokens, read by `app/preprocess/stops.py` as
those of all engines are.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from app.engine.contract import (
    BlocksListener,
    Engine,
    EngineDead,
    EngineError,
    EngineOutput,
    GenerateContext,
    InvalidRequest,
    usage,
)
from app.engine.leash import Leash
from app.engine.vllm.figures import Figures
from app.engine.vllm.forking import make_forkable
from app.engine.vllm.inbox import Inbox
from app.engine.vllm.params import TRANSFER, priority_of, prompt_of, sampling_of
from app.engine.vllm.parent import PARENT
from app.engine.vllm.plugin import SCHEME
from app.engine.vllm.versions import check_plugin, installed
from streams.clock import Clock
from streams.codecs import token_count
from streams.records import EngineConfig, EngineFigures, FinishReason, LogProb, Request

log = logging.getLogger(__name__)

PROGRESS_S = 10.0
"""Between two lines that say that the model is still being loaded."""
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
NO_ARGUMENTS: Mapping[str, Any] = {}
NO_ADAPTERS: Mapping[str, Path] = {}

_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "abort": "cancelled",
    "repetition": "stop",
}


class Limits(NamedTuple):
    """What bounds an engine; None leaves the choice to vLLM."""

    context_length: int | None = None
    max_num_seqs: int | None = None
    block_size: int | None = None


class VllmEngine(Engine):
    """See the module. `source`: a folder or a name that vLLM can load, served as `model`.

    `adapters`: LoRA adapters by name, with their folders; loaded before anything is served.
    `arguments`: those of `vllm.AsyncEngineArgs`; they go before `limits`.
    """

    def __init__(
        self,
        clock: Clock,
        source: str,
        *,
        model: str,
        limits: Limits = Limits(),  # noqa: B008 - immutable
        adapters: Mapping[str, Path] = NO_ADAPTERS,
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
    ) -> None:
        self._clock = clock
        self._source = source
        self._model = model
        self._limits = limits
        self._adapters = adapters
        self._arguments = arguments
        self._listener: BlocksListener | None = None
        self._inbox: Inbox | None = None
        self._figures = Figures()
        self._llm: Any = None
        self._loading: asyncio.Task[Any] | None = None
        self._leash: Leash | None = None
        self._loaded: dict[str, Any] = {}
        """`LoRARequest`s by name."""
        self._numbers = count()
        self._names: dict[GenerateContext, str] = {}
        """What vLLM calls the requests that are under way."""
        self._ranks = 1
        self._context_length = 0

    @property
    def llm(self) -> Any:
        """The `AsyncLLM` inside; None before the start and after the end."""
        return self._llm

    def listen(self, listener: BlocksListener) -> None:
        """As `Engine.listen`."""
        self._listener = listener

    def figures(self) -> EngineFigures | None:
        """As `Engine.figures`."""
        if self._llm is None:
            return None
        return self._figures.now(idle=not self._llm.get_num_unfinished_requests())

    def versions(self) -> Mapping[str, str]:
        """As `Engine.versions`."""
        return {"vllm": installed()}

    # --- life ------------------------------------------------------------------------------------

    async def start(self, worker_id: str) -> EngineConfig:
        """Load the model: seconds to minutes. Raises EngineError, and what vLLM raises."""
        found = installed()
        log.info("vLLM %s of %s loads %s", found, worker_id, self._source)
        endpoint = ""
        if self._listener is not None:
            check_plugin()
            self._inbox = Inbox(self._listener)
            endpoint = self._inbox.open()
        self._leash = Leash()  # before vLLM starts processes
        # A thread: whoever waits for this process sees it answer, and may end it.
        self._loading = asyncio.create_task(asyncio.to_thread(self._load, endpoint))
        began_at = self._clock.now()
        while not (await asyncio.wait([self._loading], timeout=PROGRESS_S))[0]:
            log.info("%s is being loaded: %.0f s", self._source, self._clock.now() - began_at)
        try:
            self._llm = self._loading.result()
        except EngineError:
            raise
        except Exception as e:
            raise EngineError(f"vLLM cannot load {self._source}: {e}") from e
        await self._load_adapters()
        log.info("%s is loaded: %.1f s", self._source, self._clock.now() - began_at)
        return self._described()

    async def cleanup(self) -> None:
        """As `Engine.cleanup`; a load that is under way is waited for, since it has processes."""
        loading, self._loading = self._loading, None
        if loading is not None:
            await asyncio.wait([loading])
            if not loading.cancelled() and loading.exception() is None:
                llm = loading.result()
                gone = EngineError("the engine was shut down", retryable=True)
                llm.output_processor.propagate_error(gone)
                if llm.output_handler is not None:  # it would take the end for a death
                    llm.output_handler.cancel()
                await asyncio.to_thread(llm.shutdown)
        self._llm = None
        leash, self._leash = self._leash, None
        if leash is not None:
            leash.let_go()
        inbox, self._inbox = self._inbox, None
        if inbox is not None:
            await inbox.close()

    def _load(self, endpoint: str) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        if endpoint:
            from app.engine.vllm.plugin import register

            register()
        os.environ[PARENT] = str(os.getpid())
        # Not vLLM's fork: this process has threads, and an event loop that holds sockets.
        start_method = os.environ.setdefault(START_METHOD, "spawn")
        if start_method == "fork":
            make_forkable()
        try:
            arguments = AsyncEngineArgs(**self._engine_arguments(endpoint))
        except TypeError as e:
            raise EngineError(f"engine arguments: {e}") from e
        config = arguments.create_engine_config()
        os.environ[START_METHOD] = start_method  # on a CPU, making the configuration overrules it
        return AsyncLLM.from_vllm_config(
            config,
            stat_loggers=self._figures.loggers(),
            disable_log_stats=arguments.disable_log_stats,
        )

    def _engine_arguments(self, endpoint: str) -> dict[str, Any]:
        arguments = dict(self._arguments)
        if taken := arguments.keys() & {"model", "served_model_name", "kv_events_config"}:
            raise EngineError(f"engine arguments: {', '.join(sorted(taken))} is not for you to set")
        limits = {
            "max_model_len": self._limits.context_length,
            "max_num_seqs": self._limits.max_num_seqs,
            "block_size": self._limits.block_size,
        }
        named = {name: value for name, value in limits.items() if value is not None}
        named |= {"disable_log_stats": True, "enable_lora": bool(self._adapters)}
        named |= arguments
        if endpoint:
            from vllm.config import KVEventsConfig

            named["kv_events_config"] = KVEventsConfig(
                enable_kv_cache_events=True, publisher="zmq", endpoint=SCHEME + endpoint
            )
        return named | {"model": self._source, "served_model_name": self._model}

    async def _load_adapters(self) -> None:
        """Load them before they are used: a path that is wrong in a request kills vLLM's core."""
        from vllm.lora.request import LoRARequest

        for name, folder in self._adapters.items():
            adapter = LoRARequest(name, len(self._loaded) + 1, str(folder))
            try:
                await self._llm.add_lora(adapter)
            except Exception as e:
                raise EngineError(f"the adapter {name} of {folder} cannot be loaded: {e}") from e
            self._loaded[name] = adapter

    def _described(self) -> EngineConfig:
        config = self._llm.vllm_config
        cache, scheduler = config.cache_config, config.scheduler_config
        self._ranks = config.parallel_config.data_parallel_size
        self._context_length = config.model_config.max_model_len
        # The first block of each rank stands for nothing, and is never given away.
        self._figures.blocks = cache.num_gpu_blocks // self._ranks - 1
        lora = config.lora_config
        return EngineConfig(
            model=self._source,
            served_model_name=self._model,
            context_length=self._context_length,
            kv_cache_block_size=cache.block_size if cache.enable_prefix_caching else None,
            total_kv_blocks=self._figures.blocks,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            lora_names=tuple(self._loaded) if lora else None,
            data_parallel_size=self._ranks if self._ranks > 1 else None,
        )

    # --- requests --------------------------------------------------------------------------------

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """As `Engine.generate`."""
        prompt_tokens = token_count(request.token_ids)
        if prompt_tokens >= self._context_length:
            yield EngineOutput.length().with_usage(usage(prompt_tokens, 0))
            return
        try:
            stream = await self._begin(request, context)
            made = 0
            try:
                async for came in stream:
                    first, made = made == 0, made + len(came.outputs[0].token_ids)
                    output = _output(came, request.output.logprobs, stopped=context.stopped)
                    if first or output.finish_reason is not None:
                        counts = usage(prompt_tokens, made, came.num_cached_tokens or 0)
                        output = output.with_usage(counts)
                    yield output
                    if output.finish_reason is not None:
                        return
            finally:
                self._names.pop(context, None)
                await stream.aclose()  # which tells vLLM to stop, if it goes on
        except EngineError:
            raise
        except Exception as e:
            raise _translated(e) from e
        raise EngineError("vLLM ended an answer without a reason", retryable=True)

    async def _begin(self, request: Request, context: GenerateContext) -> AsyncGenerator[Any, None]:
        """Raises InvalidRequest, and what vLLM raises."""
        sampling = sampling_of(request)
        adapter = self._adapter(request.hints.lora_name)
        prompt = await prompt_of(request, self._llm.model_config)
        name = self._names[context] = f"{context.request_id}-{next(self._numbers)}"
        stream: AsyncGenerator[Any, None] = self._llm.generate(
            prompt,
            sampling,
            name,
            lora_request=adapter,
            priority=priority_of(request),
            data_parallel_rank=(request.hints.dp_rank or 0) if self._ranks > 1 else None,
        )
        return stream

    async def abort(self, context: GenerateContext) -> None:
        """As `Engine.abort`."""
        name = self._names.get(context)
        if name is not None:
            await self._llm.abort(name)

    def _adapter(self, name: str | None) -> Any:
        if not name:
            return None
        if name not in self._loaded:
            raise InvalidRequest(f"lora_name: this worker has no adapter {name!r}")
        return self._loaded[name]


def _translated(error: Exception) -> EngineError:
    """What an error of vLLM's means to whoever asked."""
    from vllm.exceptions import GracefulHTTPError, VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(error, EngineDeadError):
        return EngineDead(f"vLLM's engine core died: {error}")
    if isinstance(error, GracefulHTTPError):  # it has enough to do
        return EngineError(str(error), retryable=True)
    cause = error.__cause__
    if isinstance(cause, EngineError):
        return cause
    if isinstance(error, VLLMClientError | ValueError):
        return InvalidRequest(str(error))
    if isinstance(cause, ValueError):
        return InvalidRequest(str(cause))
    return EngineError(f"vLLM failed: {cause or error!r}", retryable=True)


def _output(came: Any, likeliest: int | None, *, stopped: bool) -> EngineOutput:
    """One step of an answer, from a `RequestOutput` that holds what is new."""
    answer = came.outputs[0]
    finish_reason: FinishReason | None = "cancelled" if stopped else None
    if answer.finish_reason is not None:
        finish_reason = _REASONS.get(answer.finish_reason, "error")
    log_probs = None
    if answer.logprobs is not None and likeliest is not None:
        log_probs = tuple(
            _of_token(token, by_token, likeliest)
            for token, by_token in zip(answer.token_ids, answer.logprobs, strict=True)
        )
    transfer = came.kv_transfer_params
    return EngineOutput(
        token_ids=tuple(answer.token_ids),
        finish_reason=finish_reason,
        stop_reason=answer.stop_reason,
        log_probs=log_probs,
        message="vLLM gave the answer up" if finish_reason == "error" else "",
        transfer=None if transfer is None else msgspec.json.encode({TRANSFER: transfer}),
    )


def _of_token(token: int, by_token: Mapping[int, Any], likeliest: int) -> tuple[LogProb, ...]:
    """Its own log probability, then those of the likeliest tokens, as they rank."""
    ranked = sorted((entry.rank or 0, other) for other, entry in by_token.items())
    others = [other for rank, other in ranked if rank <= likeliest]
    return tuple(LogProb(each, by_token[each].logprob) for each in (token, *others))
