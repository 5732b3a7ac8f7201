"""Tests of workers beside two servers, one of which computes prompts for the other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Any, NamedTuple

import pytest

from kvlane.app.engine.attached.server_engine import ServerAddress
from kvlane.app.engine.attached.server_errors import ServerFailed
from kvlane.app.engine.attached.token_engine import AssumedLimits, AttachedEngine
from kvlane.app.engine.echo import echo_answer
from kvlane.app.engine.interface import EngineError, EngineOutput, GenerateContext
from kvlane.app.engine.simulated.engine import SimulatedEngine
from kvlane.app.engine.simulated.transfers import KvTransfers
from kvlane.app.engine.validator import ValidatingEngine
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import Phase
from kvlane.streams.request import PrefillResult, Request, StopConditions
from tests.contracts.test_engine import SHAPE
from tests.harness.model_servers import TOKENIZER, ModelServer, ServerExchange

CLOCK = SystemClock()
PROMPT = list(range(5, 45))
LEASE_S = 2.0


class Pair(NamedTuple):
    """Engines attached to two servers, which hand prompts over to each other."""

    transfers: KvTransfers
    servers: list[ModelServer]
    prefill: ValidatingEngine
    decode: ValidatingEngine


def attached(server: ModelServer, lease_s: float | None = LEASE_S) -> AttachedEngine:
    where = ServerAddress(server.url, read_timeout_s=5.0, start_timeout_s=5.0)
    limits = AssumedLimits(512, 16, 40)
    return AttachedEngine(CLOCK, where, TOKENIZER, limits, transfer_lease_s=lease_s)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        transfers, servers, engines = KvTransfers(CLOCK), [], []
        for _ in range(2):
            behind = SimulatedEngine(
                CLOCK, SHAPE, context_length=512, speedup=50.0, transfers=transfers
            )
            await behind.start("behind")
            stack.push_async_callback(behind.cleanup)
            server = await stack.enter_async_context(ModelServer(behind))
            engine = ValidatingEngine(attached(server))
            assert (await engine.start("w")).transfer_lease_s == LEASE_S
            stack.push_async_callback(engine.cleanup)
            servers.append(server)
            engines.append(engine)
        yield Pair(transfers, servers, *engines)


def make_request(max_tokens: int, **more: Any) -> Request:
    stop = StopConditions(max_tokens=max_tokens, ignore_eos=True)
    return Request(id="a", token_ids=pack_tokens(PROMPT), stop=stop, **more)


async def outputs(engine: ValidatingEngine, phase: Phase, request: Request) -> list[EngineOutput]:
    context = GenerateContext(request.id, phase=phase)
    async with aclosing(engine.generate(request, context)) as stream:
        return [output async for output in stream]


async def test_one_server_continues_from_the_prompt_of_another(pair: Pair) -> None:
    (last,) = await outputs(pair.prefill, "prefill", make_request(1))
    assert last.transfer is not None
    assert pair.transfers.held_offers == 1
    handed = PrefillResult(disaggregated_params=last.transfer)
    got = await outputs(pair.decode, "decode", make_request(12, prefill_result=handed))
    assert [token for output in got for token in output.token_ids] == echo_answer(PROMPT, 12)
    assert pair.transfers.held_offers == 0
    sent = pair.servers[0].received_bodies()[-1]
    assert (sent["max_tokens"], "stream" in sent) == (1, False)


async def test_blocks_that_a_server_cannot_fetch_are_retryable(pair: Pair) -> None:
    (last,) = await outputs(pair.prefill, "prefill", make_request(1))
    assert last.transfer is not None
    request = make_request(12, prefill_result=PrefillResult(disaggregated_params=last.transfer))
    await outputs(pair.decode, "decode", request)
    with pytest.raises(EngineError, match="taken already") as caught:
        await outputs(pair.decode, "decode", request)
    assert caught.value.retryable


@pytest.mark.parametrize("response", [b"", b"[1]", b'{"kv_transfer_params": 1}'])
async def test_invalid_response_to_a_prefill_is_retryable(pair: Pair, response: bytes) -> None:
    async def answer(exchange: ServerExchange) -> None:
        await exchange.answer(response)

    pair.servers[0].handlers["/v1/completions"] = answer
    with pytest.raises(ServerFailed, match="invalid response to a prefill"):
        await outputs(pair.prefill, "prefill", make_request(1))


async def test_server_without_a_connector_gives_no_transfer(pair: Pair) -> None:
    async def answer(exchange: ServerExchange) -> None:
        await exchange.answer({"choices": [], "kv_transfer_params": None})

    pair.servers[0].handlers["/v1/completions"] = answer
    (last,) = await outputs(pair.prefill, "prefill", make_request(1))
    assert (last.finish_reason, last.transfer) == ("length", None)


async def test_only_vllm_hands_over_prompts(pair: Pair) -> None:
    async with ModelServer(pair.servers[0].engine, "llamacpp") as server:
        engine = attached(server)
        with pytest.raises(EngineError, match="KVLANE_ATTACH_TRANSFER_LEASE_S is set, but"):
            await engine.start("w")
        await engine.cleanup()
