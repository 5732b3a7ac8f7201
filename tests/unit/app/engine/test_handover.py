"""Tests of prompts handed over between simulated engines, against one engine that does both
phases."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from math import inf
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.app.engine.echo import echo_answer
from kvlane.app.engine.interface import EngineError, EngineOutput, GenerateContext
from kvlane.app.engine.simulated.batch import EngineLimits
from kvlane.app.engine.simulated.engine import SimulatedEngine
from kvlane.app.engine.simulated.transfers import KvTransfers, TransferModel, TransferParams
from kvlane.app.engine.validator import ValidatingEngine
from kvlane.app.lanes.handovers import bootstrap_info
from kvlane.app.text.byte_level import ASSISTANT
from kvlane.indexer.cache_events.engine_events import BlocksStored, EngineEvent
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import EngineConfig, Phase, WorkerCard
from kvlane.streams.request import PrefillResult, Request, StopConditions
from workbench.testing.virtual_time import VirtualClock, VirtualLoop, run_virtual

SHAPE = EngineLimits(block_size=4, cache_blocks=32, max_batched_tokens=64, max_sequences=4)
SLOW = TransferModel(bytes_per_token=1000, bytes_per_s=1e5, latency_ms=50.0, lease_s=2.0)
PROMPT = [*range(1, 10), ASSISTANT]
BLOCKS = 3


class Pair:
    """A prefill and a decode engine with common transfers."""

    def __init__(self, loop: VirtualLoop, model: TransferModel = SLOW, **more: Any) -> None:
        self.clock = VirtualClock(loop)
        self.transfers = KvTransfers(self.clock, model)
        self.events: dict[str, list[EngineEvent]] = {"prefill": [], "decode": []}
        fields = {"context_length": SHAPE.capacity_tokens, "transfers": self.transfers} | more
        self.simulated = {
            name: SimulatedEngine(self.clock, SHAPE, listener=events.extend, **fields)
            for name, events in self.events.items()
        }
        self.engines = {name: ValidatingEngine(e) for name, e in self.simulated.items()}

    async def outputs(
        self, phase: Phase, request: Request, context: GenerateContext | None = None
    ) -> list[EngineOutput]:
        context = context or GenerateContext(request.id, phase=phase)
        return [output async for output in self.engines[phase].generate(request, context)]

    async def prefill(self, tokens: Sequence[int] = PROMPT, **more: Any) -> bytes:
        request = make_request(tokens, 1, **more)
        transfer = (await self.outputs("prefill", request))[-1].transfer
        assert transfer is not None
        return transfer

    async def decode(
        self, transfer: bytes, tokens: Sequence[int] = PROMPT, max_tokens: int = 8
    ) -> list[int]:
        handed = PrefillResult(disaggregated_params=transfer)
        request = make_request(tokens, max_tokens, prefill_result=handed)
        outputs = await self.outputs("decode", request)
        return [token for output in outputs for token in output.token_ids]


def make_request(tokens: Sequence[int], max_tokens: int | None, **more: Any) -> Request:
    stop = StopConditions(max_tokens=max_tokens)
    return Request(id="r", token_ids=pack_tokens(tokens), stop=stop, **more)


Scenario = Callable[[Pair], Coroutine[Any, Any, None]]


def run_pair(scenario: Scenario, **more: Any) -> None:
    async def main(loop: VirtualLoop) -> None:
        pair = Pair(loop, **more)
        for name, engine in pair.engines.items():
            await engine.start(name)
        await scenario(pair)
        for engine in pair.engines.values():
            await engine.cleanup()
        assert [engine.used_blocks for engine in pair.simulated.values()] == [0, 0]

    run_virtual(main)


def pair_test(**more: Any) -> Callable[[Scenario], Callable[[], None]]:
    def decorate(scenario: Scenario) -> Callable[[], None]:
        def test() -> None:
            run_pair(scenario, **more)

        return test

    return decorate


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(1, 200), min_size=1, max_size=30), st.integers(1, 12)),
        min_size=1,
        max_size=6,
    ),
    speedup=st.sampled_from([1.0, 7.0, inf]),
)
def test_two_engines_answer_like_one(prompts: list[tuple[list[int], int]], speedup: float) -> None:
    async def scenario(pair: Pair) -> None:
        async def answer(body: list[int], max_tokens: int) -> list[int]:
            tokens = [*body, ASSISTANT]
            return await pair.decode(await pair.prefill(tokens), tokens, max_tokens)

        found = await asyncio.gather(*(answer(*prompt) for prompt in prompts))
        assert found == [echo_answer([*body, ASSISTANT], count) for body, count in prompts]
        assert (pair.transfers.held_offers, pair.transfers.held_blocks) == (0, 0)
        for name, engine in pair.simulated.items():
            assert engine.used_blocks == 0, name

    run_pair(scenario, speedup=speedup)


@pair_test()
async def test_blocks_are_held_until_they_are_transferred(pair: Pair) -> None:
    transfer = await pair.prefill()
    assert pair.simulated["prefill"].used_blocks == pair.transfers.held_blocks == BLOCKS
    began_at = pair.clock.now()
    decoding = asyncio.ensure_future(pair.decode(transfer, max_tokens=1))
    took_s = SLOW.duration_s(len(PROMPT))
    await pair.clock.sleep(took_s - 0.001)
    assert pair.transfers.held_offers == 1
    assert pair.simulated["decode"].used_blocks == 0
    await pair.clock.sleep(0.002)
    assert pair.simulated["prefill"].used_blocks == pair.transfers.held_offers == 0
    await decoding
    step_s = SHAPE.curves.decode_ms(len(PROMPT) / SHAPE.capacity_tokens) / 1000
    assert pair.clock.now() - began_at == pytest.approx(took_s + step_s)


@pair_test()
async def test_lease_frees_the_blocks_at_its_end(pair: Pair) -> None:
    transfer = await pair.prefill()
    await pair.clock.sleep(SLOW.lease_s - 0.001)
    assert pair.simulated["prefill"].used_blocks == BLOCKS
    await pair.clock.sleep(0.002)
    assert pair.simulated["prefill"].used_blocks == pair.transfers.held_blocks == 0
    with pytest.raises(EngineError, match="its lease is over") as caught:
        await pair.decode(transfer)
    assert caught.value.retryable


@pair_test()
async def test_prompt_that_waits_for_held_blocks_continues_after_the_lease(pair: Pair) -> None:
    large = [*range(1, 120), ASSISTANT]
    await pair.prefill(large)
    await pair.prefill([*range(200, 300), ASSISTANT])
    assert pair.clock.now() > SLOW.lease_s


@pair_test()
async def test_offer_is_taken_once(pair: Pair) -> None:
    transfer = await pair.prefill()
    assert await pair.decode(transfer) == echo_answer(PROMPT, 8)
    with pytest.raises(EngineError, match="taken already") as caught:
        await pair.decode(transfer)
    assert caught.value.retryable
    assert pair.transfers.taken_twice == 1


@pair_test()
async def test_offers_of_an_engine_end_with_it(pair: Pair) -> None:
    transfer = await pair.prefill()
    await pair.simulated["prefill"].cleanup()
    with pytest.raises(EngineError, match="was shut down") as caught:
        await pair.decode(transfer)
    assert caught.value.retryable


@pair_test()
async def test_transfer_fails_if_its_blocks_are_released_meanwhile(pair: Pair) -> None:
    transfer = await pair.prefill()
    decoding = asyncio.ensure_future(pair.decode(transfer))
    await pair.clock.sleep(0.01)
    await pair.simulated["prefill"].cleanup()
    with pytest.raises(EngineError, match="released too early") as caught:
        await decoding
    assert caught.value.retryable


@pair_test()
async def test_offers_of_other_processes_are_valid_until_their_lease_ends(pair: Pair) -> None:
    expires_ms = pair.clock.wall_ms() + 1000
    there = TransferParams("elsewhere", 1, len(PROMPT), expires_ms)
    assert await pair.decode(msgspec.json.encode(there)) == echo_answer(PROMPT, 8)
    await pair.clock.sleep(1.0)
    late = msgspec.structs.replace(there, handoff=2)
    with pytest.raises(EngineError, match="its lease is over") as caught:
        await pair.decode(msgspec.json.encode(late))
    assert caught.value.retryable
    assert pair.transfers.taken_late == 1


@pair_test()
async def test_engines_that_meet_after_the_lease_see_it_themselves(pair: Pair) -> None:
    there = TransferParams("paused", 1, len(PROMPT), pair.clock.wall_ms() - 1)
    with pytest.raises(EngineError, match="its lease is over") as caught:
        pair.transfers.take(msgspec.json.encode(there), len(PROMPT), is_met=True)
    assert caught.value.retryable
    assert pair.transfers.taken_late == 0


@pytest.mark.parametrize("params", [b"{", b"{}", b"null"])
def test_invalid_parameters_are_refused(params: bytes) -> None:
    async def scenario(pair: Pair) -> None:
        with pytest.raises(EngineError, match="parameters are invalid") as caught:
            await pair.decode(params)
        assert caught.value.retryable

    run_pair(scenario)


@pair_test()
async def test_blocks_of_another_prompt_are_refused(pair: Pair) -> None:
    transfer = await pair.prefill()
    with pytest.raises(EngineError, match="it has 10 tokens, the prompt has 11"):
        await pair.decode(transfer, [1, *PROMPT])


@pair_test()
async def test_received_blocks_are_reported_as_stored(pair: Pair) -> None:
    await pair.decode(await pair.prefill(), max_tokens=1)
    stored = {
        name: [event for event in events if isinstance(event, BlocksStored)]
        for name, events in pair.events.items()
    }
    (there,), (here,) = stored["prefill"], stored["decode"]
    assert list(here.token_ids) == PROMPT[:8]
    assert here.block_hashes == there.block_hashes


@pair_test()
async def test_cancelled_prefill_holds_nothing(pair: Pair) -> None:
    context = GenerateContext("r", phase="prefill")
    context.cancel()
    (output,) = await pair.outputs("prefill", make_request(PROMPT, 1), context)
    assert (output.finish_reason, output.transfer) == ("cancelled", None)
    assert pair.transfers.held_offers == pair.simulated["prefill"].used_blocks == 0


@pair_test()
async def test_consumer_that_leaves_during_a_prefill_leaves_nothing_held(pair: Pair) -> None:
    reading = asyncio.ensure_future(pair.prefill())
    await pair.clock.sleep(0.001)
    reading.cancel()
    await asyncio.wait([reading])
    await pair.clock.sleep(1.0)
    assert pair.transfers.held_offers == pair.simulated["prefill"].used_blocks == 0


@pair_test()
async def test_drain_ends_with_the_last_lease(pair: Pair) -> None:
    await pair.prefill()
    held_at = pair.clock.now()
    await pair.engines["prefill"].drain()
    assert pair.clock.now() - held_at == pytest.approx(SLOW.lease_s)
    drained_at = pair.clock.now()
    await pair.engines["decode"].drain()
    assert pair.clock.now() == drained_at


# --- rooms ---------------------------------------------------------------------------------------


def test_room_of_a_prefill_worker_has_its_rank() -> None:
    config = EngineConfig(model="m", bootstrap_host="h", bootstrap_port=1)
    card = WorkerCard(id="p", slot=0, model="m", config=config, ranks=7)
    rooms = [bootstrap_info(card, rank, random.Random(rank)) for rank in range(7)]
    assert [room and room.bootstrap_room % 7 for room in rooms] == list(range(7))
    assert all(room and 0 <= room.bootstrap_room < 2**63 for room in rooms)


@pytest.mark.parametrize("engine", [{}, {"bootstrap_host": "h"}, {"bootstrap_port": 1}])
def test_worker_without_a_bootstrap_endpoint_has_no_rooms(engine: dict[str, Any]) -> None:
    card = WorkerCard(id="p", slot=0, model="m", config=EngineConfig(model="m", **engine))
    assert bootstrap_info(card, 0, random.Random(1)) is None


def meet_in_rooms(test: Callable[[KvTransfers], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test(KvTransfers(SystemClock(), TransferModel(lease_s=0.05), has_bootstrap=True)))


def test_engines_meet_in_a_room_whichever_comes_first() -> None:
    async def scenario(transfers: KvTransfers) -> None:
        name = transfers.add_engine("p")
        waiting = asyncio.ensure_future(transfers.meet(1))
        await asyncio.sleep(0)
        params = [transfers.offer(name, 5, 1, lambda: None, room) for room in (1, 2)]
        assert [await waiting, await transfers.meet(2)] == params
        for each in params:
            assert transfers.take(each, 5).finish()
        assert not transfers._rooms

    meet_in_rooms(scenario)


def test_room_is_gone_with_the_lease_of_its_offer() -> None:
    async def scenario(transfers: KvTransfers) -> None:
        transfers.offer(transfers.add_engine("p"), 5, 1, lambda: None, 1)
        await asyncio.sleep(0.1)
        assert (transfers.held_offers, transfers._rooms) == (0, {})

    meet_in_rooms(scenario)


def test_second_prefill_in_a_room_is_counted() -> None:
    async def scenario(transfers: KvTransfers) -> None:
        name = transfers.add_engine("p")
        for _ in range(2):
            transfers.offer(name, 5, 1, lambda: None, 1)
        assert transfers.invalid == 1

    meet_in_rooms(scenario)
