"""Tests of prompts that one vLLM computes and another continues from, over NIXL on this machine."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import openai
import pytest
import pytest_asyncio

from kvlane.app.demo.tiny_model import BLOCK_SIZE, VOCABULARY_SIZE, connector_arguments
from kvlane.app.engine.interface import EngineError, EngineOutput, GenerateContext
from kvlane.app.engine.validator import ValidatingEngine
from kvlane.app.local.processes import free_port
from kvlane.indexer.cache_events.engine_events import BlocksStored
from kvlane.streams.codecs import AnyRecord, decode, encode
from kvlane.streams.records import (
    Assignment,
    Chunk,
    Finished,
    Phase,
    PrefillDone,
    RequestOffset,
    Role,
    WorkerCard,
)
from kvlane.streams.request import PrefillResult, Request
from kvlane.streams.topics import ASSIGNMENTS, LEDGER, REGISTRY, REQUESTS, RESPONSES
from tests.vllm.engines import CLOCK, RealEngine, direct, make_request, settled, started
from tests.vllm.fleet import Fleet
from tests.vllm.servers import START_S, running

LEASE_S = 5
BLOCKS = 80
LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 5 * BLOCK_SIZE, 5 * BLOCK_SIZE + 7)
ROLES: dict[str, Role] = {"p": "prefill", "d": "decode"}
R = TypeVar("R", bound=AnyRecord)


class Pair(NamedTuple):
    """A prefill and a decode engine."""

    prefill: RealEngine
    decode: RealEngine

    def by_worker(self) -> dict[str, RealEngine]:
        return {"p": self.prefill, "d": self.decode}


async def connected(model: Path, lease_s: int) -> RealEngine:
    """An engine with a KV connector."""
    return await started(model, blocks=BLOCKS, **connector_arguments(lease_s))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(model: Path) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        prefill = await connected(model, LEASE_S)
        stack.push_async_callback(prefill.cleanup)
        decode_engine = await connected(model, LEASE_S)
        stack.push_async_callback(decode_engine.cleanup)
        yield Pair(prefill, decode_engine)


def prompt_of(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(16, VOCABULARY_SIZE) for _ in range(tokens)]


async def outputs(engine: ValidatingEngine, phase: Phase, request: Request) -> list[EngineOutput]:
    context = GenerateContext(request.id, phase=phase)
    async with aclosing(engine.generate(request, context)) as stream:
        return [output async for output in stream]


async def transfer_of(pair: Pair, tokens: Sequence[int]) -> bytes:
    last = (await outputs(pair.prefill, "prefill", make_request(tokens, 1)))[-1]
    assert last.transfer is not None
    return last.transfer


def decode_request(tokens: Sequence[int], transfer: bytes, max_tokens: int = 8) -> Request:
    handed = PrefillResult(disaggregated_params=transfer)
    return make_request(tokens, max_tokens, prefill_result=handed)


# --- servers -------------------------------------------------------------------------------------
# First: the idle engines of `pair`, with a connector, take more than a core.


@pytest.mark.timeout(2.5 * START_S)
async def test_server_continues_from_the_prompt_of_another(
    model: Path, engine: RealEngine, tmp_path: Path
) -> None:
    connector = json.dumps(connector_arguments()["kv_transfer_config"])
    async with AsyncExitStack() as stack:
        servers = []
        for name in ROLES:
            server = await stack.enter_async_context(
                running(
                    model,
                    tmp_path / name,
                    more=("--kv-transfer-config", connector),
                    VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()),
                )
            )
            servers.append(server)
        engines = []
        for server in servers:  # which start side by side
            await server.wait_ready()
            attached = ValidatingEngine(server.attached(transfer_lease_s=30.0))
            engines.append(attached)
            await attached.start("w")
            stack.push_async_callback(attached.cleanup)
        prefill, decoding = engines
        rng, tokens = random.Random(44), 3 * BLOCK_SIZE + 5
        prompt, other = prompt_of(rng, tokens), prompt_of(rng, tokens - 1)
        last = (await outputs(prefill, "prefill", make_request(prompt, 1)))[-1]
        assert last.transfer is not None
        request = decode_request([*other, prompt[-1]], last.transfer)
        got = await outputs(decoding, "decode", request)
        due = await direct(engine, prompt)  # other tokens, but for the last one, as above
        assert [token for output in got for token in output.token_ids] == due


# --- engines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", LENGTHS)
async def test_two_engines_answer_like_one(pair: Pair, engine: RealEngine, tokens: int) -> None:
    prompt = prompt_of(random.Random(tokens), tokens)
    due = await direct(engine, prompt)
    request = decode_request(prompt, await transfer_of(pair, prompt))
    got = await outputs(pair.decode, "decode", request)
    assert [token for output in got for token in output.token_ids] == due
    assert got[-1].finish_reason == "length"


async def test_answer_uses_the_blocks_of_the_hand_over(pair: Pair, engine: RealEngine) -> None:
    """The decode engine gets other tokens, but for the last one, which it computes itself."""
    rng, tokens = random.Random(43), 3 * BLOCK_SIZE + 5
    prompt, other = prompt_of(rng, tokens), prompt_of(rng, tokens - 1)
    request = decode_request([*other, prompt[-1]], await transfer_of(pair, prompt))
    got = await outputs(pair.decode, "decode", request)
    assert [token for output in got for token in output.token_ids] == await direct(engine, prompt)


async def test_received_blocks_are_announced(pair: Pair) -> None:
    prompt = prompt_of(random.Random(40), 3 * BLOCK_SIZE + 2)
    request = decode_request(prompt, await transfer_of(pair, prompt))
    before = len(pair.decode.events)
    await outputs(pair.decode, "decode", request)

    def stored() -> list[int]:
        events = [event for _, event in pair.decode.events[before:]]
        return [t for e in events if isinstance(e, BlocksStored) for t in e.token_ids]

    await settled(lambda: len(stored()) >= 3 * BLOCK_SIZE)
    assert stored()[: 3 * BLOCK_SIZE] == prompt[: 3 * BLOCK_SIZE]


async def test_engines_report_their_lease(pair: Pair, engine: RealEngine) -> None:
    assert [each.config.transfer_lease_s for each in pair] == [LEASE_S, LEASE_S]
    assert engine.config.transfer_lease_s is None


async def test_blocks_of_a_dead_engine_are_retryable(pair: Pair) -> None:
    prompt = prompt_of(random.Random(41), 2 * BLOCK_SIZE)
    transfer = msgspec.json.decode(await transfer_of(pair, prompt))
    there = transfer["kv_transfer_params"]
    there |= {"remote_engine_id": "gone", "remote_port": free_port()}
    request = decode_request(prompt, msgspec.json.encode(transfer))
    with pytest.raises(EngineError, match="could not fetch the blocks") as caught:
        await outputs(pair.decode, "decode", request)
    assert caught.value.retryable


async def drained_s(engine: RealEngine) -> float:
    """Seconds that a drain takes."""
    began_at = CLOCK.now()
    await engine.vllm.drain()
    took_s = CLOCK.now() - began_at
    await engine.llm.resume_generation()
    return took_s


async def test_drain_lasts_until_the_lease_of_unfetched_blocks_ends(pair: Pair) -> None:
    await transfer_of(pair, prompt_of(random.Random(42), BLOCK_SIZE))
    assert LEASE_S - 0.5 < await drained_s(pair.prefill) < LEASE_S + 1.5
    assert await drained_s(pair.decode) < 0.5


async def test_drain_ends_when_the_blocks_have_been_fetched(pair: Pair) -> None:
    prompt = prompt_of(random.Random(45), 3 * BLOCK_SIZE)
    request = decode_request(prompt, await transfer_of(pair, prompt))
    draining = asyncio.create_task(drained_s(pair.prefill))
    await CLOCK.sleep(0.5)
    assert not draining.done()
    await outputs(pair.decode, "decode", request)
    assert await draining < LEASE_S - 1


# --- workers -------------------------------------------------------------------------------------


class Router:
    """The test in the place of a router: it writes Assignments and reads what becomes of them."""

    def __init__(self, fleet: Fleet) -> None:
        self._broker = fleet.broker
        self._cards = {card.id: card for card in self._records(REGISTRY, WorkerCard)}

    async def run(self, worker: str, phase: Phase, request: Request, **over: int) -> Finished:
        """Assign a run; returns its Finished."""
        card = self._cards[worker]
        assert card.epoch is not None
        assert card.role == ROLES[worker]
        assignment = Assignment(
            worker=worker, epoch=card.epoch, attempt=0, phase=phase, request=request,
            origin=RequestOffset(topic=REQUESTS, partition=0, offset=0), responses_from=0,
            deadline_ms=self._broker.now_ms() + 60_000, budget_s=60.0, **over,
        )  # fmt: skip
        self._broker.append(ASSIGNMENTS, card.slot, [encode(assignment, worker)])
        await settled(lambda: bool(self._ended(request.id, phase)))
        return self._ended(request.id, phase)[0]

    def handed_over(self, request_id: str) -> PrefillDone:
        done = self._records(LEDGER, PrefillDone)
        return next(r for r in done if r.id == request_id and r.phase == "prefill")

    def tokens(self, request_id: str) -> list[int]:
        chunks = (r for r in self._records(RESPONSES, Chunk) if r.id == request_id)
        return [token for chunk in chunks for token in chunk.token_ids]

    def now_ms(self) -> int:
        return self._broker.now_ms()

    def _ended(self, request_id: str, phase: Phase) -> list[Finished]:
        ends = self._records(LEDGER, Finished)
        return [r for r in ends if (r.id, r.phase) == (request_id, phase)]

    def _records(self, topic: str, kind: type[R]) -> list[R]:
        partitions = range(self._broker.partitions[topic])
        found = (decode(r) for p in partitions for r in self._broker.records(topic, p))
        return [record for record in found if isinstance(record, kind)]


async def test_prefill_and_a_decode_worker_answer_as_one_engine_does(
    model: Path, pair: Pair, engine: RealEngine, tmp_path: Path
) -> None:
    async with Fleet(model, pair.by_worker(), "tiny", tmp_path, roles=ROLES, others=()) as fleet:
        router = Router(fleet)
        for length in LENGTHS:
            prompt = prompt_of(random.Random(1000 + length), length)
            request = msgspec.structs.replace(make_request(prompt, 12), id=f"r{length}")
            assert (await router.run("p", "prefill", request)).code == "handed_off"
            assert router.tokens(request.id) == []
            done = router.handed_over(request.id)
            left_ms = done.lease_until_ms - router.now_ms()
            assert 0 < left_ms <= LEASE_S * 1000
            handed = PrefillResult(disaggregated_params=done.handoff)
            request = msgspec.structs.replace(request, prefill_result=handed)
            until_ms = router.now_ms() + left_ms // 2
            ended = await router.run("d", "decode", request, handoff_until_ms=until_ms)
            assert ended.code == "length"
            assert router.tokens(request.id) == await direct(engine, prompt, 12)


# --- the whole path ------------------------------------------------------------------------------


async def test_router_and_gateway_hand_requests_over(
    model: Path, pair: Pair, engine: RealEngine, tmp_path: Path
) -> None:
    rng = random.Random(7)
    prompts = [prompt_of(rng, rng.choice([3, 20, 32, 45, 64, 100, 170])) for _ in range(24)]
    due = [await direct(engine, prompt, 10) for prompt in prompts]
    async with Fleet(
        model, pair.by_worker(), "tiny", tmp_path, roles=ROLES, handover_min_tokens=0
    ) as fleet:
        ids = [await fleet.make_request(prompt, 10) for prompt in prompts]
        answers = await asyncio.gather(*(fleet.answer(request_id) for request_id in ids))
        assert answers == due
        for request_id in ids:
            phases = [(d.phase, d.worker) for d in fleet.decisions.decisions(request_id)]
            assert phases == [("prefill", "p"), ("decode", "d")]
        for prompt, answer in zip(prompts, due, strict=True):  # whole, where it was decoded
            again = await fleet.make_request(prompt, 10, nvext={"backend_instance_id": "d"})
            assert await fleet.answer(again) == answer
            (decision,) = fleet.decisions.decisions(again)
            full, used = len(prompt) // BLOCK_SIZE, (len(prompt) - 1) // BLOCK_SIZE
            assert decision.cached_tokens_predicted == full * BLOCK_SIZE
            assert fleet.decisions.cached_tokens(again) == used * BLOCK_SIZE
        chat = [{"role": "user", "content": "Tell me about rivers and mountains."}]
        async with openai.AsyncOpenAI(base_url=fleet.url, api_key="none", max_retries=0) as client:
            texts = [
                await client.chat.completions.create(
                    model="tiny", messages=chat, max_tokens=12, temperature=0,
                    extra_body={"ignore_eos": True},
                )
                for _ in range(2)
            ]  # fmt: skip
        everything = [d for made in fleet.decisions._assigned.values() for d in made]
        assert [d.phase for d in everything].count("prefill") == len(prompts) + len(texts)
        assert [d.phase for d in everything].count("decode") == len(prompts) + len(texts)
        first, second = (text.choices[0].message.content for text in texts)
        assert first
        assert first == second
        assert texts[0].usage is not None
        assert texts[0].usage.completion_tokens == 12
