"""Tests of the engine contract: its rules, and the error that names a broken one."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable

import pytest

from kvlane.app.engine.interface import (
    U32_MAX,
    Engine,
    EngineError,
    EngineOutput,
    GenerateContext,
    token_usage,
)
from kvlane.app.engine.validator import ContractViolation, ValidatingEngine
from kvlane.streams.records import EngineConfig, LogProb, Usage
from kvlane.streams.request import Request

Script = Callable[[GenerateContext], AsyncGenerator[EngineOutput, None]]


class Scripted(Engine):
    """An engine that yields what the test says, rules or not."""

    def __init__(self, script: Script | None = None, config: EngineConfig | None = None) -> None:
        self._script = script
        self._config = config or EngineConfig(model="m")
        self.cleanups = 0
        self.released = False

    async def start(self, worker_id: str) -> EngineConfig:
        return self._config

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        assert self._script is not None
        try:
            async for output in self._script(context):
                yield output
        finally:
            self.released = True

    async def cleanup(self) -> None:
        self.cleanups += 1


def outputs(*items: EngineOutput) -> Script:
    async def script(context: GenerateContext) -> AsyncGenerator[EngineOutput, None]:
        for item in items:
            yield item

    return script


async def run(script: Script, context: GenerateContext | None = None) -> list[EngineOutput]:
    engine = ValidatingEngine(Scripted(script))
    await engine.start("w")
    return [o async for o in engine.generate(Request(id="r"), context or GenerateContext("r"))]


async def test_stream_that_keeps_the_rules_passes_unchanged() -> None:
    items = [EngineOutput.token(1), EngineOutput.length().with_tokens([2])]
    assert await run(outputs(*items)) == items


async def test_stream_without_an_end_is_named() -> None:
    with pytest.raises(ContractViolation, match="ends with a finish reason"):
        await run(outputs(EngineOutput.token(1)))


async def test_output_after_the_end_is_named() -> None:
    with pytest.raises(ContractViolation, match="nothing follows the terminal output"):
        await run(outputs(EngineOutput.stop(), EngineOutput.token(1)))


async def test_error_after_the_end_is_named() -> None:
    async def script(context: GenerateContext) -> AsyncGenerator[EngineOutput, None]:
        yield EngineOutput.stop()
        raise EngineError("too late")

    with pytest.raises(ContractViolation, match="not even an error"):
        await run(script)


async def test_typed_error_is_an_end_of_its_own() -> None:
    async def script(context: GenerateContext) -> AsyncGenerator[EngineOutput, None]:
        yield EngineOutput.token(1)
        raise EngineError("out of memory", retryable=True)

    with pytest.raises(EngineError, match="out of memory") as failed:
        await run(script)
    assert failed.value.retryable


async def test_output_after_a_cancel_is_named() -> None:
    context = GenerateContext("r")
    context.cancel()
    with pytest.raises(ContractViolation, match=r"polls context\.is_stopped"):
        await run(outputs(EngineOutput.token(1), EngineOutput.token(2)), context)


async def test_ending_with_cancelled_after_a_cancel_is_right() -> None:
    context = GenerateContext("r")
    context.cancel()
    items = [EngineOutput.token(1), EngineOutput.cancelled()]
    assert await run(outputs(*items), context) == items


async def test_cancelled_end_without_a_cancel_is_named() -> None:
    with pytest.raises(ContractViolation, match="a stopped context only"):
        await run(outputs(EngineOutput.cancelled()))


async def test_error_without_a_type_is_named() -> None:
    with pytest.raises(ContractViolation, match="has a message"):
        await run(outputs(EngineOutput.error("")))


async def test_transfer_to_decode_comes_last() -> None:
    early, late = EngineOutput(transfer=b"{}"), EngineOutput(transfer=b"{}", finish_reason="stop")
    assert await run(outputs(late)) == [late]
    with pytest.raises(ContractViolation, match="transfer to decode"):
        await run(outputs(early, late))


async def test_usage_beyond_u32_is_named() -> None:
    counts = Usage(prompt_tokens=U32_MAX + 1)
    with pytest.raises(ContractViolation, match=r"usage\.prompt_tokens"):
        await run(outputs(EngineOutput.stop().with_usage(counts)))


async def test_number_that_json_does_not_have_is_named() -> None:
    output = EngineOutput(token_ids=(1,), log_probs=((LogProb(1, math.nan),),))
    with pytest.raises(ContractViolation, match="log_probs nan"):
        await run(outputs(output, EngineOutput.stop()))
    config = EngineConfig(model="m", curve=(1.0, math.inf))
    with pytest.raises(ContractViolation, match=r"config\.curve"):
        await ValidatingEngine(Scripted(config=config)).start("w")


async def test_leaving_a_stream_releases_its_resources() -> None:
    inner = Scripted(outputs(EngineOutput.token(1), EngineOutput.stop()))
    engine = ValidatingEngine(inner)
    await engine.start("w")
    stream = engine.generate(Request(id="r"), GenerateContext("r"))
    await anext(stream)
    await stream.aclose()
    assert inner.released


async def test_generating_before_start_is_named() -> None:
    engine = ValidatingEngine(Scripted(outputs(EngineOutput.stop())))
    with pytest.raises(ContractViolation, match="between start and cleanup"):
        await anext(engine.generate(Request(id="r"), GenerateContext("r")))


async def test_half_a_bootstrap_address_is_named() -> None:
    for half in ({"bootstrap_host": "h"}, {"bootstrap_port": 7}):
        engine = ValidatingEngine(Scripted(config=EngineConfig(model="m", **half)))
        with pytest.raises(ContractViolation, match="both or not at all"):
            await engine.start("w")
    whole = EngineConfig(model="m", bootstrap_host="h", bootstrap_port=7)
    assert await ValidatingEngine(Scripted(config=whole)).start("w") == whole


@pytest.mark.parametrize("field", ["context_length", "kv_cache_block_size", "max_num_seqs"])
async def test_meaningless_number_is_named(field: str) -> None:
    engine = ValidatingEngine(Scripted(config=EngineConfig(model="m", **{field: 0})))
    with pytest.raises(ContractViolation, match="above 0"):
        await engine.start("w")


async def test_second_drain_is_named() -> None:
    engine = ValidatingEngine(Scripted())
    await engine.start("w")
    await engine.drain()
    with pytest.raises(ContractViolation, match="drain is called once"):
        await engine.drain()


async def test_second_cleanup_is_named_and_idempotence_is_exercised() -> None:
    inner = Scripted()
    engine = ValidatingEngine(inner)
    await engine.start("w")
    await engine.cleanup()
    assert inner.cleanups == 2
    with pytest.raises(ContractViolation, match="cleanup is called once"):
        await engine.cleanup()


async def test_abort_without_a_cancel_is_named() -> None:
    engine = ValidatingEngine(Scripted())
    with pytest.raises(ContractViolation, match="explicit cancel"):
        await engine.abort(GenerateContext("r"))


def test_first_token_is_reported_once() -> None:
    got: list[int] = []
    context = GenerateContext("r", lambda: got.append(1))
    context.notify_first_token()
    context.notify_first_token()
    assert got == [1]


def test_reporting_the_first_token_without_a_listener_does_nothing() -> None:
    GenerateContext("r").notify_first_token()


def test_setters_give_the_same_output_with_one_field_changed() -> None:
    counts = token_usage(1, 2, 3)
    last = EngineOutput.length().with_tokens([1, 2]).with_usage(counts)
    assert last == EngineOutput(token_ids=(1, 2), finish_reason="length", usage=counts)
    assert last.with_tokens([]).with_usage(token_usage(0, 0)).finish_reason == "length"


def test_usage_saturates_at_u32() -> None:
    assert token_usage(U32_MAX + 5, 7, U32_MAX + 1) == Usage(
        prompt_tokens=U32_MAX, completion_tokens=7, cached_tokens=U32_MAX
    )


def test_outputs_have_their_finish_reason() -> None:
    reasons = [
        o.finish_reason
        for o in (
            EngineOutput.token(1),
            EngineOutput.stop(),
            EngineOutput.length(),
            EngineOutput.cancelled(),
            EngineOutput.error("e"),
        )
    ]
    assert reasons == [None, "stop", "length", "cancelled", "error"]
