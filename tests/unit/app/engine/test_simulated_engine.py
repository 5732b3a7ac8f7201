"""Tests of the simulated engine, in virtual time: its answers, times, cancels, events and
limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import repeat
from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from kvlane.app.engine.echo import echo_answer
from kvlane.app.engine.interface import EngineDead, EngineError, EngineOutput, GenerateContext
from kvlane.app.engine.simulated.batch import EngineLimits
from kvlane.app.engine.simulated.engine import SimulatedEngine
from kvlane.app.engine.simulated.text_generator import TextGenerator, echo_continuation
from kvlane.app.engine.validator import ValidatingEngine
from kvlane.app.perf_curves import PerfCurves
from kvlane.app.text.byte_level import ASSISTANT, END_OF_TEXT, render_chat
from kvlane.indexer.block_hashes import derive_secret, local_hashes, prompt_keys
from kvlane.indexer.cache_events.engine_events import BlocksRemoved, BlocksStored, EngineEvent
from kvlane.indexer.cache_events.event_normalizer import EventNormalizer
from kvlane.indexer.epochs import CacheId, Overlap
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import EngineConfig, Usage
from kvlane.streams.request import Hints, Request, StopConditions
from workbench.reference_index import ReferenceIndex
from workbench.testing.virtual_time import VirtualClock, VirtualLoop, run_virtual

CURVES = PerfCurves()
SMALL = EngineLimits(block_size=4, cache_blocks=32, max_batched_tokens=64, max_sequences=4)
PROMPT = [*range(1, 10), ASSISTANT]


def request(
    tokens: Sequence[int], max_tokens: int | None = None, request_id: str = "r", **more: Any
) -> Request:
    stop = more.pop("stop", StopConditions())
    stop = replace(stop, max_tokens=max_tokens)
    return Request(id=request_id, token_ids=pack_tokens(tokens), stop=stop, **more)


@dataclass
class Answer:
    context: GenerateContext
    tokens: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    """When each token came."""
    reason: str | None = None
    usage: Usage | None = None
    error: EngineError | None = None


class Bench:
    """An engine, started, behind the validator, with what it told of its blocks."""

    def __init__(self, loop: VirtualLoop, shape: EngineLimits = SMALL, **more: Any) -> None:
        self.clock = VirtualClock(loop)
        self.events: list[EngineEvent] = []
        more.setdefault("context_length", shape.capacity_tokens)
        self.simulated = SimulatedEngine(self.clock, shape, listener=self.events.extend, **more)
        self.engine = ValidatingEngine(self.simulated)
        self._streams: set[asyncio.Task[None]] = set()

    def send(self, wanted: Request) -> tuple[Answer, asyncio.Task[None]]:
        answer = Answer(GenerateContext(wanted.id))
        task = asyncio.ensure_future(self._read(wanted, answer))
        self._streams.add(task)
        return answer, task

    async def answers(self, *wanted: Request) -> list[Answer]:
        sent = [self.send(each) for each in wanted]
        await asyncio.gather(*(task for _, task in sent))
        return [answer for answer, _ in sent]

    async def _read(self, wanted: Request, answer: Answer) -> None:
        try:
            async for output in self.engine.generate(wanted, answer.context):
                self._note(output, answer)
        except EngineError as e:
            answer.error = e

    def _note(self, output: EngineOutput, answer: Answer) -> None:
        answer.tokens += output.token_ids
        answer.at += repeat(self.clock.now(), len(output.token_ids))
        answer.reason, answer.usage = output.finish_reason, output.usage


Scenario = Callable[[Bench], Coroutine[Any, Any, None]]


def with_engine(
    shape: EngineLimits = SMALL, **more: Any
) -> Callable[[Scenario], Callable[[], None]]:
    """The test of a scenario with a started engine, in virtual time; it is cleaned up after."""

    def decorate(scenario: Scenario) -> Callable[[], None]:
        async def main(loop: VirtualLoop) -> None:
            bench = Bench(loop, shape, **more)
            await bench.engine.start("w")
            await scenario(bench)
            await bench.engine.cleanup()
            assert bench.simulated.used_blocks == 0

        @wraps(scenario)
        def test() -> None:
            run_virtual(main)

        del test.__wrapped__  # type: ignore[attr-defined]
        return test

    return decorate


# --- answers -------------------------------------------------------------------------------------


@with_engine()
async def test_answer_is_that_of_the_text_generator(bench: Bench) -> None:
    prompt = render_chat([("user", "héllo")])
    (answer,) = await bench.answers(request(prompt))
    assert bytes(answer.tokens).decode() == "héllo"
    assert answer.reason == "stop"


@with_engine()
async def test_answer_stops_at_the_limit(bench: Bench) -> None:
    (answer,) = await bench.answers(request(PROMPT, 12))
    assert answer.tokens == echo_answer(PROMPT, 12)
    assert (answer.reason, answer.usage) == (
        "length",
        Usage(prompt_tokens=10, completion_tokens=12),
    )


@with_engine()
async def test_resumed_request_continues_the_same_text(bench: Bench) -> None:
    (whole,) = await bench.answers(request(PROMPT, 12))
    (rest,) = await bench.answers(request([*PROMPT, *whole.tokens[:5]], 7))
    assert whole.tokens[:5] + rest.tokens == whole.tokens


@with_engine()
async def test_answer_of_a_resumed_request_depends_on_the_original_prompt(bench: Bench) -> None:
    (answer,) = await bench.answers(request([1, 2, 3]))
    assert (answer.tokens, answer.reason) == ([1, 2, 3], "stop")


@with_engine(context_length=20)
async def test_context_bounds_the_answer(bench: Bench) -> None:
    (answer,) = await bench.answers(request(PROMPT, 50))
    assert (len(answer.tokens), answer.reason) == (10, "length")


@with_engine(context_length=10)
async def test_prompt_that_fills_the_context_gets_no_answer(bench: Bench) -> None:
    (answer,) = await bench.answers(request(PROMPT, 5))
    assert (answer.tokens, answer.reason) == ([], "length")


@with_engine()
async def test_limit_of_zero_gives_an_empty_answer(bench: Bench) -> None:
    (answer,) = await bench.answers(request(PROMPT, 0))
    assert (answer.tokens, answer.reason) == ([], "length")


@with_engine()
async def test_empty_prompt_is_an_error(bench: Bench) -> None:
    (answer,) = await bench.answers(request([], 5))
    assert answer.error is not None
    assert not answer.error.retryable


def spoken(*tokens: int) -> Callable[[Sequence[int], int | None], Iterator[int]]:
    return lambda _sequence, _max_tokens: iter(tokens)


@with_engine(continuation=spoken(5, END_OF_TEXT, 6, END_OF_TEXT, 7))
async def test_end_of_text_ends_the_answer_and_is_its_last_token(bench: Bench) -> None:
    (answer,) = await bench.answers(request(PROMPT, 5, eos_token_ids=(END_OF_TEXT,)))
    assert (answer.tokens, answer.reason) == ([5, END_OF_TEXT], "stop")


@with_engine(continuation=spoken(5, END_OF_TEXT, 6, END_OF_TEXT, 7))
async def test_end_of_text_does_not_end_the_answer_before_min_tokens(bench: Bench) -> None:
    stop = StopConditions(min_tokens=3)
    (answer,) = await bench.answers(request(PROMPT, 5, stop=stop, eos_token_ids=(END_OF_TEXT,)))
    assert answer.tokens == [5, END_OF_TEXT, 6, END_OF_TEXT]


@with_engine(continuation=spoken(5, END_OF_TEXT, 6, 7))
async def test_end_of_text_may_be_ignored_but_stop_tokens_are_not(bench: Bench) -> None:
    stop = StopConditions(ignore_eos=True, stop_token_ids=(6,))
    (answer,) = await bench.answers(request(PROMPT, 9, stop=stop, eos_token_ids=(END_OF_TEXT,)))
    assert (answer.tokens, answer.reason) == ([5, END_OF_TEXT, 6], "stop")


@with_engine(continuation=TextGenerator(["a b"], lambda _: [1000, 2000], None))
async def test_tokens_of_other_vocabularies_may_be_generated(bench: Bench) -> None:
    (answer,) = await bench.answers(request(PROMPT, 9))
    assert answer.tokens[:2] == [1000, 2000]
    assert set(answer.tokens) == {1000, 2000}


# --- times ---------------------------------------------------------------------------------------


@with_engine()
async def test_tokens_come_at_the_modelled_times(bench: Bench) -> None:
    (answer,) = await bench.answers(request(PROMPT, 3))
    prefill = CURVES.prefill_ms(10)
    first, second = CURVES.decode_ms(11 / 128), CURVES.decode_ms(12 / 128)
    expected = [prefill, prefill + first, prefill + first + second]
    assert [at * 1000 for at in answer.at] == pytest.approx(expected)


@with_engine(speedup=10.0)
async def test_faster_engine_takes_as_much_less_time(bench: Bench) -> None:
    (answer,) = await bench.answers(request(PROMPT, 1))
    assert answer.at[0] * 1000 == pytest.approx(CURVES.prefill_ms(10) / 10)


@with_engine(speedup=inf)
async def test_infinitely_fast_engine_takes_none(bench: Bench) -> None:
    (answer,) = await bench.answers(request(PROMPT, 50))
    assert (len(answer.tokens), bench.clock.now()) == (50, 0.0)


@with_engine()
async def test_requests_that_come_together_share_a_step(bench: Bench) -> None:
    one, other = await bench.answers(
        request(PROMPT, 2, "a"), request([*range(20, 31), ASSISTANT], 2, "b")
    )
    assert one.at == other.at
    assert one.at[0] * 1000 == pytest.approx(CURVES.prefill_ms(22))


@with_engine()
async def test_idle_time_does_not_count_towards_the_next_step(bench: Bench) -> None:
    await bench.answers(request(PROMPT, 2))
    await bench.clock.sleep(100.0)
    sent_at = bench.clock.now()
    (answer,) = await bench.answers(request([9, 9, 9, ASSISTANT], 1))
    assert (answer.at[0] - sent_at) * 1000 == pytest.approx(CURVES.prefill_ms(4))


def ending_early(sequence: Sequence[int], _max_tokens: int | None) -> Iterator[int]:
    return iter([1, END_OF_TEXT] if sequence[0] == 1 else [2] * 10)


@with_engine(continuation=ending_early)
async def test_ended_request_takes_no_part_in_the_next_step(bench: Bench) -> None:
    ended, other = await bench.answers(
        request(PROMPT, 9, "a", eos_token_ids=(END_OF_TEXT,)),
        request([2, 2, 2], 3, "b", eos_token_ids=(END_OF_TEXT,)),
    )
    assert ended.at == other.at[:2]
    alone = (other.at[2] - other.at[1]) * 1000
    assert alone == pytest.approx(CURVES.decode_ms(5 / 128))


@with_engine()
async def test_cancelled_request_takes_no_part_in_the_next_step(bench: Bench) -> None:
    cancelled, task = bench.send(request(PROMPT, 9, "a"))
    other, others_task = bench.send(request([2, 2, 2], 3, "b"))
    await bench.clock.sleep(CURVES.prefill_ms(13) / 1000 + 0.001)
    cancelled.context.cancel()
    await asyncio.gather(task, others_task)
    alone = (other.at[2] - other.at[1]) * 1000
    assert alone == pytest.approx(CURVES.decode_ms(5 / 128))


class OversleepingClock(VirtualClock):
    """Wakes up later than it was asked to."""

    late_s = 0.003

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds + self.late_s if seconds else 0.0)


def test_late_wake_ups_do_not_accumulate() -> None:
    async def main(loop: VirtualLoop) -> None:
        bench = Bench(loop)
        bench.simulated._clock = OversleepingClock(loop)
        await bench.engine.start("w")
        (answer,) = await bench.answers(request(PROMPT, 100))
        exact = CURVES.prefill_ms(10) + sum(CURVES.decode_ms(n / 128) for n in range(11, 110))
        assert 0 <= answer.at[-1] * 1000 - exact <= 3.0 + 1e-6
        await bench.engine.cleanup()

    run_virtual(main)


# --- load ----------------------------------------------------------------------------------------


@with_engine()
async def test_no_more_requests_run_than_allowed_and_all_are_answered(bench: Bench) -> None:
    prompts = [[n, n, n, n, ASSISTANT] for n in range(1, 8)]
    most = 0
    sent = [bench.send(request(p, 6, f"r{p[0]}")) for p in prompts]
    while not all(task.done() for _, task in sent):
        most = max(most, bench.simulated.running_count)
        await bench.clock.sleep(0.001)
    assert most == 4
    assert [answer.tokens for answer, _ in sent] == [echo_answer(p, 6) for p in prompts]


@with_engine(EngineLimits(block_size=4, cache_blocks=8, max_batched_tokens=64, max_sequences=4))
async def test_full_cache_loses_no_token(bench: Bench) -> None:
    prompts = [[n] * 7 + [ASSISTANT] for n in range(1, 5)]
    answers = await bench.answers(*(request(p, 20, f"r{p[0]}") for p in prompts))
    assert [a.tokens for a in answers] == [echo_answer(p, 20) for p in prompts]
    assert [a.reason for a in answers] == ["length"] * 4


@with_engine(max_waiting=2)
async def test_requests_beyond_the_bound_are_refused_at_once(bench: Bench) -> None:
    prompts = [[n, n, n, n, ASSISTANT] for n in range(1, 4)]
    answers = await bench.answers(*(request(p, 3, f"r{p[0]}") for p in prompts))
    refused = answers[2].error
    assert refused is not None
    assert refused.retryable
    assert [a.reason for a in answers] == ["length", "length", None]


@with_engine(EngineLimits(block_size=4, cache_blocks=32, max_batched_tokens=64, max_sequences=1))
async def test_more_urgent_request_goes_first(bench: Bench) -> None:
    busy, _ = bench.send(request(PROMPT, 5, "busy"))
    await bench.clock.sleep(0.001)
    late = request([1, 1, ASSISTANT], 3, "late", hints=Hints(priority=1))
    soon = request([2, 2, ASSISTANT], 3, "soon", hints=Hints(priority=0))
    second, first = await bench.answers(late, soon)
    assert busy.at[-1] < first.at[-1] < second.at[0]


@with_engine()
async def test_cached_blocks_are_reported_as_cached(bench: Bench) -> None:
    await bench.answers(request(PROMPT, 6))
    (again,) = await bench.answers(request([*PROMPT, *echo_answer(PROMPT, 6), 7, ASSISTANT], 1))
    assert again.usage == Usage(prompt_tokens=18, completion_tokens=1, cached_tokens=12)


@pytest.mark.parametrize("more", [{"cache_salt": "s"}, {"hints": Hints(lora_name="l")}])
def test_salts_and_adapters_share_nothing(more: dict[str, Any]) -> None:
    @with_engine()
    async def scenario(bench: Bench) -> None:
        await bench.answers(request(PROMPT, 1))
        (other,) = await bench.answers(request(PROMPT, 1, **more))
        assert other.usage is not None
        assert other.usage.cached_tokens == 0

    scenario()


# --- ends ----------------------------------------------------------------------------------------


@with_engine()
async def test_cancel_ends_a_request_between_two_steps(bench: Bench) -> None:
    answer, task = bench.send(request(PROMPT, 100))
    while len(answer.tokens) < 3:
        await bench.clock.sleep(0.001)
    answer.context.cancel()
    await task
    assert answer.reason == "cancelled"
    assert answer.tokens == echo_answer(PROMPT, len(answer.tokens))
    assert answer.usage == Usage(prompt_tokens=10, completion_tokens=len(answer.tokens))
    assert bench.simulated.running_count == 0


@with_engine(EngineLimits(block_size=4, cache_blocks=32, max_batched_tokens=64, max_sequences=1))
async def test_cancel_ends_a_waiting_request(bench: Bench) -> None:
    _, busy = bench.send(request(PROMPT, 50, "busy"))
    await bench.clock.sleep(0.001)
    answer, task = bench.send(request([1, 2, ASSISTANT], 5))
    await bench.clock.sleep(0.001)
    answer.context.cancel()
    await task
    assert (answer.reason, answer.tokens, busy.done()) == ("cancelled", [], False)
    assert bench.simulated.waiting_count == 0
    await busy


@with_engine()
async def test_reader_that_leaves_frees_its_slot(bench: Bench) -> None:
    stream = bench.engine.generate(request(PROMPT, 100), GenerateContext("r"))
    await anext(stream)
    await stream.aclose()
    assert bench.simulated.running_count == 0
    (answer,) = await bench.answers(request(PROMPT, 2))
    assert answer.tokens == echo_answer(PROMPT, 2)


def broken(_sequence: Sequence[int], _max_tokens: int | None) -> Iterator[int]:
    yield 1
    raise RuntimeError("no more ideas")


@with_engine(continuation=broken)
async def test_failed_step_ends_every_request_as_engine_dead(bench: Bench) -> None:
    running = await bench.answers(request(PROMPT, 5, "a"), request(PROMPT, 5, "b"))
    (later,) = await bench.answers(request(PROMPT, 5, "c"))
    assert [type(a.error) for a in (*running, later)] == [EngineDead] * 3


def test_cleanup_ends_open_streams() -> None:
    async def main(loop: VirtualLoop) -> None:
        bench = Bench(loop)
        await bench.engine.start("w")
        answer, task = bench.send(request(PROMPT, 100))
        await bench.clock.sleep(0.05)
        await bench.engine.cleanup()
        await task
        assert answer.error is not None
        assert answer.error.retryable

    run_virtual(main)


@pytest.mark.parametrize("more", [{"context_length": 129}, {"speedup": 0.0}])
def test_impossible_shape_is_refused_at_once(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"context|speedup"):
        SimulatedEngine(SystemClock(), SMALL, **{"context_length": 128, **more})


def test_engine_config_has_the_shape_of_the_engine() -> None:
    async def main(loop: VirtualLoop) -> None:
        engine = Bench(loop, context_length=100, model="m").engine
        assert await engine.start("w") == EngineConfig(
            model="m",
            context_length=100,
            kv_cache_block_size=4,
            total_kv_blocks=32,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            curve=CURVES.coefficients(),
            unsupported=("guided_decoding", "logprobs"),
            transfer_lease_s=2.0,
            transfer_bytes_per_token=131_072,
        )
        await engine.cleanup()

    run_virtual(main)


# --- cache events --------------------------------------------------------------------------------


@with_engine()
async def test_stored_blocks_are_reported_with_their_tokens_and_parents(bench: Bench) -> None:
    await bench.answers(request(PROMPT, 4, cache_salt="s", hints=Hints(lora_name="l")))
    first, second = bench.events
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert (list(first.token_ids), first.parent, len(first.block_hashes)) == (PROMPT[:8], None, 2)
    assert list(second.token_ids) == [*PROMPT[8:], *echo_answer(PROMPT, 2)]
    assert second.parent == first.block_hashes[-1]
    assert (first.cache_salt, second.cache_salt, second.lora_name) == ("s", "", "l")


@with_engine(EngineLimits(block_size=4, cache_blocks=4, max_batched_tokens=64, max_sequences=4))
async def test_evicted_blocks_are_reported(bench: Bench) -> None:
    await bench.answers(request([1] * 11 + [ASSISTANT], 1))
    await bench.answers(request([2] * 11 + [ASSISTANT], 1))
    stored, removed, _ = bench.events
    assert isinstance(stored, BlocksStored)
    assert isinstance(removed, BlocksRemoved)
    assert list(removed.block_hashes) == [*stored.block_hashes[:0:-1]]


@with_engine(EngineLimits(block_size=4, cache_blocks=12, max_batched_tokens=64, max_sequences=4))
async def test_index_behind_the_bridge_predicts_the_hits_of_the_next_request(bench: Bench) -> None:
    secret, index, holder = derive_secret(b"s"), ReferenceIndex(), CacheId("w", 0)
    bridge = EventNormalizer(4, secret)
    turn = [5, 6, 7, 8, 9, ASSISTANT]
    found = []
    for n in range(12):
        prompt = [n % 3 + 1] * 6 + turn * (n % 2) + [n % 5, ASSISTANT]
        keys = prompt_keys(local_hashes(prompt, 4), secret).tolist()
        known = index.match_prefix(keys).get(holder, Overlap()).total_blocks
        (answer,) = await bench.answers(request(prompt, 5, f"r{n}"))
        assert answer.usage is not None
        # At least one token is always computed, so a whole hit finds one block less.
        assert answer.usage.cached_tokens == min(known, (len(prompt) - 1) // 4) * 4
        found.append(answer.usage.cached_tokens)
        bridge.on_events(bench.events, 0.0)
        bench.events.clear()
        while (batch := bridge.take_batch()) is not None:
            index.apply_events(0, holder, 1, batch.first_event_id, batch.events)
    assert len(set(found)) > 1
    counters = bridge.counters
    assert counters.orphans == counters.unknown_removed == counters.malformed == 0


def test_same_requests_give_the_same_times_and_events() -> None:
    def played() -> list[Any]:
        seen: list[Any] = []

        async def main(loop: VirtualLoop) -> None:
            shape = EngineLimits(
                block_size=4, cache_blocks=10, max_batched_tokens=16, max_sequences=3
            )
            bench = Bench(loop, shape, continuation=echo_continuation)
            await bench.engine.start("w")
            sent = []
            for n in range(8):
                sent.append(bench.send(request([n % 3, 2, 3, n, ASSISTANT], 9 + n, f"r{n}")))
                await bench.clock.sleep(0.02 * (n % 2))
            for answer, _ in sent[2:4]:
                answer.context.cancel()
            for answer, task in sent:
                await task
                seen.append((answer.tokens, answer.at, answer.reason))
            seen.extend(bench.events)
            await bench.engine.cleanup()

        run_virtual(main)
        return seen

    assert played() == played()
