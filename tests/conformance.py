"""What every engine is held to, whatever is inside: `app/engine/interface.py`, tried out.

A test class of an engine inherits from `Conformance` and gives the fixture `subject`. Every engine
runs behind the validator, so each of these tests checks all rules about outputs as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvlane.app.engine.interface import Engine, EngineError, EngineOutput, GenerateContext
from kvlane.app.engine.validator import ValidatingEngine
from kvlane.indexer.block_hashes import derive_secret, local_hashes, prompt_keys
from kvlane.indexer.cache_events.engine_events import EngineEvent
from kvlane.indexer.cache_events.event_normalizer import EventNormalizer
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import EngineConfig
from kvlane.streams.request import Request, SamplingOptions, StopConditions

WITHIN_S = 120.0
"""For what takes milliseconds; it only keeps a broken engine from hanging the suite."""
SECRET = derive_secret(b"s")


@dataclass
class Subject:
    """One engine that was started. `idle`: whether nothing of any request is left in it."""

    engine: Engine
    config: EngineConfig
    idle: Callable[[], bool] = lambda: True
    got: list[EngineEvent] = field(default_factory=list)
    salt: int = 0
    mark: tuple[int, ...] = ()
    """What a prompt ends with."""
    reports_cached: bool = True
    draws_tokens: bool = True
    """Whether its tokens are the model's own, so that an answer can be continued from them."""

    def prompt(self, tokens: int) -> list[int]:
        """One that was not there before."""
        self.salt += 1
        body = [100 + (self.salt * 7 + 13 * i) % 150 for i in range(tokens - len(self.mark))]
        return [*body, *self.mark]

    def make_request(self, prompt: Sequence[int], max_tokens: int = 8, **more: Any) -> Request:
        stop = StopConditions(max_tokens=max_tokens, min_tokens=max_tokens, ignore_eos=True)
        sent = {"stop": stop, "sampling": SamplingOptions(temperature=0.0)} | more
        return Request(id=f"r{self.salt}", token_ids=pack_tokens(prompt), **sent)

    async def run(self, request: Request, context: GenerateContext | None = None) -> Answer:
        context = context or GenerateContext(request.id)
        async with aclosing(self.engine.generate(request, context)) as outputs:
            return Answer([output async for output in outputs])

    async def settled(self) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not self.idle():  # noqa: ASYNC110 - engines have no bell for it
                await asyncio.sleep(0.01)


@dataclass
class Answer:
    outputs: list[EngineOutput]

    @property
    def last(self) -> EngineOutput:
        return self.outputs[-1]

    @property
    def tokens(self) -> list[int]:
        """Its tokens; of an engine that gives text only, its characters."""
        text = [(*output.token_ids, *map(ord, output.text)) for output in self.outputs]
        return [token for each in text for token in each]


async def first_of(stream: AsyncGenerator[EngineOutput, None]) -> EngineOutput:
    """The first output with tokens or text."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            output = await anext(stream)
            if not output.is_empty or output.finish_reason is not None:
                return output


class Conformance:
    async def test_engine_is_ready_when_start_returns(self, subject: Subject) -> None:
        answer = await subject.run(subject.make_request(subject.prompt(20)))
        assert len(answer.tokens) == 8
        assert answer.last.finish_reason == "length"

    async def test_engine_names_its_model(self, subject: Subject) -> None:
        assert subject.config.model
        assert subject.config.served_model_name != ""

    async def test_answer_has_one_end_which_is_its_last_output(self, subject: Subject) -> None:
        answer = await subject.run(subject.make_request(subject.prompt(20)))
        assert [o.finish_reason is None for o in answer.outputs[:-1]] == [True] * (
            len(answer.outputs) - 1
        )
        assert answer.last.finish_reason is not None

    async def test_end_has_the_token_counts(self, subject: Subject) -> None:
        counts = (await subject.run(subject.make_request(subject.prompt(20), 5))).last.usage
        assert counts is not None
        assert (counts.prompt_tokens, counts.completion_tokens) == (20, 5)

    async def test_concurrent_answers_do_not_mix(self, subject: Subject) -> None:
        requests = [subject.make_request(subject.prompt(20 + n)) for n in range(6)]
        together = await asyncio.gather(*map(subject.run, requests))
        alone = [(await subject.run(request)).tokens for request in requests]
        assert [answer.tokens for answer in together] == alone

    async def test_answer_continues_after_its_first_tokens(self, subject: Subject) -> None:
        if not subject.draws_tokens:
            pytest.skip("its card says that its answers cannot be continued")
        prompt = subject.prompt(20)
        whole = (await subject.run(subject.make_request(prompt, 10))).tokens
        rest = (await subject.run(subject.make_request([*prompt, *whole[:4]], 6))).tokens
        assert [*whole[:4], *rest] == whole

    async def test_stopped_request_ends_with_cancelled(self, subject: Subject) -> None:
        request, context = subject.make_request(subject.prompt(20), 400), GenerateContext("r")
        stream = subject.engine.generate(request, context)
        async with aclosing(stream):
            await first_of(stream)
            context.cancel()
            async with asyncio.timeout(WITHIN_S):
                rest = [output async for output in stream]
        assert rest[-1].finish_reason == "cancelled"
        await subject.settled()

    async def test_request_stopped_before_its_start_ends_with_cancelled(
        self, subject: Subject
    ) -> None:
        context = GenerateContext("r")
        context.cancel()
        answer = await subject.run(subject.make_request(subject.prompt(20)), context)
        assert answer.last.finish_reason == "cancelled"

    async def test_abort_of_a_stopped_request_ends_it_with_cancelled(
        self, subject: Subject
    ) -> None:
        request, context = subject.make_request(subject.prompt(20), 400), GenerateContext("r")
        stream = subject.engine.generate(request, context)
        async with aclosing(stream):
            await first_of(stream)
            context.cancel()
            await subject.engine.abort(context)
            async with asyncio.timeout(WITHIN_S):
                rest = [output async for output in stream]
        assert rest[-1].finish_reason == "cancelled"
        await subject.engine.abort(context)  # too late is no mistake

    async def test_abandoned_stream_holds_nothing(self, subject: Subject) -> None:
        stream = subject.engine.generate(
            subject.make_request(subject.prompt(20), 400), GenerateContext("r")
        )
        async with aclosing(stream):
            await first_of(stream)
        await subject.settled()
        assert len((await subject.run(subject.make_request(subject.prompt(20)))).tokens) == 8

    async def test_cancelled_reader_holds_nothing(self, subject: Subject) -> None:
        begun = asyncio.Event()

        async def read() -> None:
            stream = subject.engine.generate(
                subject.make_request(subject.prompt(20), 400), GenerateContext("r")
            )
            async with aclosing(stream):
                async for _ in stream:
                    begun.set()

        reading = asyncio.create_task(read())
        async with asyncio.timeout(WITHIN_S):
            await begun.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await subject.settled()

    async def test_first_token_is_reported_at_most_once(self, subject: Subject) -> None:
        got: list[int] = []
        context = GenerateContext("r", lambda: got.append(1))
        await subject.run(subject.make_request(subject.prompt(20)), context)
        context.notify_first_token()  # as the worker does
        assert got == [1]

    async def test_prompt_that_fills_the_context_leaves_no_room(self, subject: Subject) -> None:
        context_length = subject.config.context_length
        if context_length is None:
            pytest.skip("it advertises no context")
        answer = await subject.run(subject.make_request(subject.prompt(context_length), 4))
        assert (answer.tokens, answer.last.finish_reason) == ([], "length")

    async def test_empty_request_has_an_empty_answer_or_a_typed_error(
        self, subject: Subject
    ) -> None:
        try:
            answer = await subject.run(Request(id="r"))
        except EngineError:
            return
        assert answer.tokens == []

    async def test_probe_needs_nothing_but_tokens(self, subject: Subject) -> None:
        probe = Request(id="", token_ids=pack_tokens(subject.prompt(3)), is_probe=True)
        async with asyncio.timeout(WITHIN_S):
            answer = await subject.run(probe)
        assert answer.last.finish_reason in ("stop", "length")

    async def test_cache_events_name_the_blocks_of_served_prompts(self, subject: Subject) -> None:
        size = subject.config.kv_cache_block_size
        if size is None:
            pytest.skip("it advertises no blocks")
        prompt = subject.prompt(3 * size + 1)
        await subject.run(subject.make_request(prompt))
        bridge = EventNormalizer(size, SECRET)
        wanted = set(prompt_keys(local_hashes(prompt, size), SECRET).tolist())

        def keys() -> set[int]:
            bridge.on_events(subject.got, 0.0)
            subject.got.clear()
            batch = bridge.take_batch()
            return {key for event in batch.events for key in event.keys} if batch else set()

        found = keys()
        async with asyncio.timeout(WITHIN_S):
            while not wanted <= found:
                await asyncio.sleep(0.01)
                found |= keys()
        assert bridge.mismatched_block_size is None
        assert bridge.counters.malformed == 0

    async def test_served_prompt_is_cached(self, subject: Subject) -> None:
        size = subject.config.kv_cache_block_size
        if size is None or not subject.reports_cached:
            pytest.skip("it says nothing of its cache")
        prompt = subject.prompt(3 * size + 1)
        await subject.run(subject.make_request(prompt))
        counts = (await subject.run(subject.make_request(prompt))).last.usage
        assert counts is not None
        assert counts.cached_tokens == 3 * size


class Lifecycle:
    """For engines that can be made cheaply: `make` gives one that was not started."""

    kind: type[Subject] = Subject

    async def test_worker_ids_are_opaque(self, make: Callable[[], Engine]) -> None:
        for worker_id in ("w", "0" * 128, "a:b.c_d-e"):
            engine = ValidatingEngine(make())
            assert (await engine.start(worker_id)).model
            await engine.cleanup()  # twice, by the validator

    async def test_drain_comes_before_cleanup_and_needs_nothing(
        self, make: Callable[[], Engine]
    ) -> None:
        engine = ValidatingEngine(make())
        await engine.start("w")
        await engine.drain()
        await engine.cleanup()

    async def test_cleanup_without_a_start_does_nothing(self, make: Callable[[], Engine]) -> None:
        engine = make()
        await engine.cleanup()
        await engine.cleanup()

    async def test_cleanup_ends_open_streams(self, make: Callable[[], Engine]) -> None:
        engine = make()
        config = await engine.start("w")
        subject = self.kind(engine, config)
        stream = engine.generate(
            subject.make_request(subject.prompt(20), 400), GenerateContext("r")
        )
        async with aclosing(stream):
            await first_of(stream)
            await engine.cleanup()
            async with asyncio.timeout(WITHIN_S):
                try:
                    rest = [output async for output in stream]
                except EngineError:
                    return
        assert rest[-1].finish_reason is not None
