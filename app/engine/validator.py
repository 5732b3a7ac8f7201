"""Validator of the engine contract: wraps an engine and raises at the first broken rule.

For tests and `KVLANE_VALIDATE_ENGINE`. Checks, of the rules of `app/engine/interface.py`, the end
of a stream (2), its reaction to a stop (3) and a second `cleanup` (5); also the order of calls, and
the values of the config and of each output. Never here: readiness (1), resources (4), cache events
(6), probes (7), kinds (8), transfers of blocks (9, 10).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

from kvlane.app.engine.interface import (
    Engine,
    EngineError,
    EngineOutput,
    GenerateContext,
    KvEventListener,
)
from kvlane.app.engine.output_values import check_config, checked_output, checked_stats
from kvlane.app.text.answer_parts import ContentParser, Emit
from kvlane.streams.records import EngineConfig, EngineStats
from kvlane.streams.request import AnswerParsing, Request

MAX_OUTPUTS_AFTER_STOP = 1
"""One output may be in flight when the context stops; the next one must see the stop."""


class ContractViolation(AssertionError):
    """An engine broke a rule of `app/engine/interface.py`; the message names it."""


class ValidatingEngine(Engine):
    """Forwards all calls to `engine`, and raises ContractViolation if a rule is broken."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._starts = 0
        self._ready = False
        self._cleaned = False
        self._drained = False

    def set_kv_event_listener(self, listener: KvEventListener) -> None:
        _rule(self._starts == 0, "set_kv_event_listener is called before start")
        self._engine.set_kv_event_listener(listener)

    def stats(self) -> EngineStats | None:
        stats = self._engine.stats()
        _rule(checked_stats(stats) is stats, "statistics are whole numbers of 64 bits")
        return stats

    def versions(self) -> Mapping[str, str]:
        _rule(self._ready, "versions is called after start")
        return self._engine.versions()

    def calls_parser(self, parsing: AnswerParsing, request_id: str, emit: Emit) -> ContentParser:
        return self._engine.calls_parser(parsing, request_id, emit)

    def adapters(self) -> tuple[str, ...] | None:
        return self._engine.adapters()

    @property
    def output_timeout_s(self) -> float:
        return self._engine.output_timeout_s

    async def start(self, worker_id: str) -> EngineConfig:
        _rule(self._starts == 0, "start is called once")
        self._starts += 1
        config = await self._engine.start(worker_id)
        try:
            check_config(config)
        except EngineError as e:
            raise ContractViolation(f"engine contract broken: {e}") from e
        _rule(bool(config.model), "the config names a model")
        _rule(
            all(number is None or number > 0 for number in _numbers(config)),
            "advertised numbers are above 0; None advertises nothing",
        )
        _rule(
            (config.bootstrap_host is None) == (config.bootstrap_port is None),
            "bootstrap host and port are given both or not at all",
        )
        self._ready = True
        return config

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        _rule(self._ready, "generate is called between start and cleanup")
        stream = self._engine.generate(request, context)
        check = _StreamCheck(context)
        try:
            async for output in stream:
                check.output(output)
                yield output
        except EngineError:
            _rule(not check.ended, "nothing follows the terminal output, not even an error")
            raise
        finally:
            await stream.aclose()
        _rule(check.ended, "a stream ends with a finish reason or an EngineError")

    async def abort(self, context: GenerateContext) -> None:
        """Note a cancel; an abort without one is an error of the caller."""
        _rule(context.is_stopped, "abort is called on an explicit cancel only")
        await self._engine.abort(context)

    async def drain(self) -> None:
        _rule(not self._cleaned, "drain comes before cleanup")
        _rule(not self._drained, "drain is called once")
        self._drained = True
        await self._engine.drain()

    async def cleanup(self) -> None:
        """Clean up twice: by the contract the second call does nothing."""
        _rule(self._starts > 0, "cleanup is not called when start never was")
        _rule(not self._cleaned, "cleanup is called once")
        self._ready, self._cleaned = False, True
        await self._engine.cleanup()
        await self._engine.cleanup()


class _StreamCheck:
    def __init__(self, context: GenerateContext) -> None:
        self._context = context
        self.ended = False
        self._since_stop = 0

    def output(self, output: EngineOutput) -> None:
        _rule(not self.ended, "nothing follows the terminal output")
        try:
            checked_output(output)
        except EngineError as e:
            raise ContractViolation(f"engine contract broken: {e}") from e
        _rule(
            output.transfer is None or output.finish_reason is not None,
            "the transfer to decode comes with the terminal output",
        )
        if output.finish_reason is not None:
            self.ended = True
            _rule(
                output.finish_reason != "cancelled" or self._context.is_stopped,
                "cancelled is the end of a stopped context only; raise EngineError otherwise",
            )
            _rule(
                output.finish_reason != "error" or output.message,
                "an output that ends with an error has a message",
            )
        elif self._context.is_stopped:
            _rule(
                self._since_stop < MAX_OUTPUTS_AFTER_STOP,
                "a stream polls context.is_stopped between outputs and ends with cancelled",
            )
            self._since_stop += 1


def _numbers(config: EngineConfig) -> tuple[int | None, ...]:
    return (
        config.context_length,
        config.kv_cache_block_size,
        config.total_kv_blocks,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.bootstrap_port,
    )


def _rule(kept: object, rule: str) -> None:
    if not kept:
        raise ContractViolation(f"engine contract broken: {rule}")
