"""Tests of real engines behind real routers: predicted cache hits, and the cost of deaths."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from kvlane.app.demo.tiny_model import BLOCK_SIZE, VOCABULARY_SIZE
from kvlane.app.engine.interface import EngineDead
from kvlane.streams.records import Chunk
from kvlane.streams.request import StopConditions
from tests.vllm.engines import RealEngine, answer, core_of, direct, make_request, outputs, started
from tests.vllm.fleet import Fleet


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def second(model: Path, adapters: dict[str, Path]) -> AsyncIterator[RealEngine]:
    engine = await started(model, blocks=40, adapters=adapters)
    yield engine
    await engine.cleanup()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet(
    model: Path, engine: RealEngine, second: RealEngine, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Fleet]:
    scratch = tmp_path_factory.mktemp("scratch")
    async with Fleet(model, {"w1": engine, "w2": second}, "tiny", scratch) as fleet:
        yield fleet


def words(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(16, VOCABULARY_SIZE) for _ in range(tokens)]


async def test_cache_hits_equal_the_predictions_under_eviction(fleet: Fleet) -> None:
    rng = random.Random(3)
    stems = [words(rng, rng.randrange(2, 10) * BLOCK_SIZE) for _ in range(16)]  # 90 blocks, for 80
    wrong, reused = [], 0
    for _ in range(80):
        request_id = await fleet.make_request(
            rng.choice(stems) + words(rng, rng.randrange(1, 60)), 4
        )
        await fleet.answer(request_id)
        found = fleet.decisions.cached_tokens(request_id)
        (decision,) = fleet.decisions.decisions(request_id)
        assert found is not None
        reused += found
        if abs(found - decision.cached_tokens_predicted) > BLOCK_SIZE:
            wrong.append((found, decision.cached_tokens_predicted))
    assert not wrong
    assert reused > 80 * BLOCK_SIZE
    assert {fleet.decisions.decisions(i)[0].worker for i in fleet.decisions._assigned} == {
        "w1",
        "w2",
    }


async def test_chat_over_http_has_log_probabilities(fleet: Fleet) -> None:
    async with openai.AsyncOpenAI(base_url=fleet.url, api_key="none", max_retries=0) as client:
        output = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=4,
            temperature=0, logprobs=True, top_logprobs=2, extra_body={"ignore_eos": True},
        )  # fmt: skip
    likely = output.choices[0].logprobs
    assert likely is not None
    assert likely.content is not None
    assert len(likely.content) == 4
    assert b"".join(bytes(t.bytes or ()) for t in likely.content).decode(errors="replace") == (
        output.choices[0].message.content
    )
    for token in likely.content:
        assert token.logprob == token.top_logprobs[0].logprob
        assert len(token.top_logprobs) == 2


async def test_refusal_by_vllm_is_a_client_error(fleet: Fleet) -> None:
    async with openai.AsyncOpenAI(base_url=fleet.url, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
            await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "Hello"}],
                max_tokens=4,
                extra_body={"prompt_logprobs": 3},
            )


async def test_answer_continues_unchanged_when_its_engine_is_killed(
    model: Path, second: RealEngine, tmp_path: Path
) -> None:
    victim = await started(model, blocks=40)
    try:
        prompt = words(random.Random(5), 100)
        due = await direct(second, prompt, 400)
        async with Fleet(model, {"victim": victim}, "doomed", tmp_path) as fleet:
            request_id = await fleet.make_request(prompt, 400)
            tokens: list[int] = []
            async for piece in fleet.pieces(request_id):
                assert isinstance(piece, Chunk), piece
                if not tokens:
                    await fleet.join("heir", second)
                    os.kill(core_of(victim), signal.SIGKILL)
                tokens += piece.token_ids
            assert tokens == due
            assert fleet.decisions.workers_of(request_id) == ["victim", "heir"]
        with pytest.raises(EngineDead, match="core died"):
            await outputs(victim, make_request([1, 2, 3]))
    finally:
        await victim.cleanup()
    assert await answer(second, make_request([9, 8, 7], stop=StopConditions(max_tokens=2)))
