"""Tests of the engine beside vLLM itself: the same tokens, with every option of a request."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from kvlane.app.demo.tiny_model import BLOCK_SIZE, VOCABULARY_SIZE
from kvlane.app.engine.interface import EngineError, EngineOutput, GenerateContext, InvalidRequest
from kvlane.indexer.cache_events.engine_events import BlocksStored
from kvlane.indexer.cache_events.event_normalizer import NormalizerCounters
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.request import (
    GuidedDecoding,
    MultimodalData,
    OutputOptions,
    SamplingOptions,
    StopConditions,
)
from tests.vllm.engines import (
    GREEDY,
    RealEngine,
    answer,
    cached,
    direct,
    make_request,
    outputs,
    settled,
)

RNG = random.Random(7)


def prompt(length: int) -> list[int]:
    """Tokens that no other test has asked with."""
    return [RNG.randrange(16, VOCABULARY_SIZE) for _ in range(length)]


def test_card_has_the_properties_of_vllm(engine: RealEngine) -> None:
    config = engine.config
    assert (config.kv_cache_block_size, config.total_kv_blocks) == (BLOCK_SIZE, 40)
    assert (config.context_length, config.max_num_seqs) == (1024, 16)
    assert config.lora_names == ("one", "two")


async def test_concurrent_streams_equal_those_of_vllm_alone(engine: RealEngine) -> None:
    prompts = [prompt(n) for n in (1, 5, 31, 32, 33, 64, 100, 150)]
    answers = await asyncio.gather(*(answer(engine, make_request(p, 20)) for p in prompts))
    assert answers == [await direct(engine, p, 20) for p in prompts]


async def test_answer_depends_on_the_first_token_of_its_prompt(engine: RealEngine) -> None:
    tokens = prompt(60)
    assert await answer(engine, make_request(tokens)) != await answer(
        engine, make_request([20, *tokens[1:]])
    )


async def test_interrupted_answer_continues_unchanged(engine: RealEngine) -> None:
    tokens = prompt(50)
    whole = await answer(engine, make_request(tokens, 30))
    assert whole[:11] + await answer(engine, make_request(tokens + whole[:11], 19)) == whole


async def test_prompt_is_found_in_the_cache_up_to_its_last_whole_block(engine: RealEngine) -> None:
    tokens = prompt(100)
    assert cached(await outputs(engine, make_request(tokens))) == 0
    got = await outputs(engine, make_request(tokens))
    assert cached(got) == 96
    last = got[-1].usage
    assert last is not None
    assert (last.prompt_tokens, last.completion_tokens, last.cached_tokens) == (100, 8, 96)


async def test_salts_share_no_cache(engine: RealEngine) -> None:
    tokens = prompt(70)
    for salt in ("tenant-a", "tenant-b", ""):
        assert cached(await outputs(engine, make_request(tokens, cache_salt=salt))) == 0
        assert cached(await outputs(engine, make_request(tokens, cache_salt=salt))) == 64


async def test_adapters_answer_differently_and_share_no_cache(engine: RealEngine) -> None:
    tokens = prompt(70)
    answers = []
    for lora in (None, "one", "two"):
        first = await outputs(engine, make_request(tokens, lora=lora))
        assert cached(first) == 0
        assert cached(await outputs(engine, make_request(tokens, lora=lora))) == 64
        answers.append(tuple(t for o in first for t in o.token_ids))
    assert len(set(answers)) == 3
    adapter = engine.vllm._lora_requests["two"]
    assert list(answers[2]) == await direct(engine, tokens, lora_request=adapter)


async def test_events_have_salt_and_adapter(engine: RealEngine) -> None:
    tokens, before = prompt(64), len(engine.events)
    await answer(engine, make_request(tokens, lora="one", cache_salt="s"))

    def stored_since() -> list[BlocksStored]:
        return [event for _, event in engine.events[before:] if isinstance(event, BlocksStored)]

    await settled(lambda: bool(stored_since()))
    (stored,) = stored_since()
    assert (list(stored.token_ids), stored.lora_name, stored.cache_salt) == (tokens, "one", "s")


async def test_bridge_follows_the_cache_under_eviction(engine: RealEngine) -> None:
    prompts = [prompt(320) for _ in range(6)]  # 60 blocks, for a cache of 40
    for tokens in prompts:
        await answer(engine, make_request(tokens, 1))
    last = tuple(prompts[-1][-BLOCK_SIZE:])
    await settled(lambda: any(tuple(e.token_ids[-BLOCK_SIZE:]) == last for e in stored(engine)))
    bridge = engine.bridge()
    assert 30 <= bridge.held_blocks <= 40
    assert bridge.counters == NormalizerCounters()


def stored(engine: RealEngine) -> list[BlocksStored]:
    return [event for _, event in engine.events if isinstance(event, BlocksStored)]


async def test_cancelled_stream_ends_as_cancelled_and_frees_its_place(engine: RealEngine) -> None:
    context = GenerateContext("c")
    got: list[EngineOutput] = []
    async with aclosing(engine.generate(make_request(prompt(20), 900), context)) as stream:
        async for output in stream:
            got.append(output)
            if len(got) == 3:
                context.cancel()
                await engine.abort(context)
    assert got[-1].finish_reason == "cancelled"
    assert len(got) < 20
    await settled(lambda: engine.stats().running == 0)  # type: ignore[union-attr]


async def test_abandoned_stream_is_aborted(engine: RealEngine) -> None:
    async with aclosing(
        engine.generate(make_request(prompt(20), 900), GenerateContext("c"))
    ) as stream:
        await anext(stream)
    await settled(lambda: engine.llm.get_num_unfinished_requests() == 0)


async def test_metrics_count_steps_and_blocks(engine: RealEngine) -> None:
    before = engine.stats()
    async with aclosing(
        engine.generate(make_request(prompt(64), 200), GenerateContext("c"))
    ) as stream:
        for _ in range(5):
            await anext(stream)
        busy = engine.stats()
    assert before is not None
    assert busy is not None
    assert busy.steps >= before.steps + 4
    assert (busy.running, busy.kv_total_blocks) == (1, 40)
    assert busy.kv_used_blocks >= 2


async def test_tokens_that_end_an_answer_end_it(engine: RealEngine) -> None:
    tokens = prompt(30)
    whole = await answer(engine, make_request(tokens, 10))
    stop = StopConditions(max_tokens=10, stop_token_ids=(whole[4],), ignore_eos=True)
    got = await outputs(engine, make_request(tokens, stop=stop))
    end = whole.index(whole[4]) + 1
    assert [t for o in got for t in o.token_ids] == whole[:end]
    assert (got[-1].finish_reason, got[-1].stop_reason) == ("stop", whole[4])
    hidden = StopConditions(max_tokens=10, stop_token_ids_hidden=(whole[4],))
    assert (await outputs(engine, make_request(tokens, stop=hidden)))[-1].finish_reason == "stop"
    eos = make_request(tokens, stop=StopConditions(max_tokens=10), eos_token_ids=(whole[4],))
    assert (await outputs(engine, eos))[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingOptions(temperature=0.0, allowed_token_ids=(40, 41)),
        SamplingOptions(temperature=0.0, logit_bias={40: 100.0, 41: 90.0}),
        SamplingOptions(temperature=1.0, seed=5, top_k=2, logit_bias={40: 100.0, 41: 100.0}),
        SamplingOptions(temperature=0.0, guided_decoding=GuidedDecoding(regex="[GH]+")),
    ],
    ids=["allowed tokens", "logit bias", "top k", "guided"],
)
async def test_generated_tokens_are_restricted(
    engine: RealEngine, model: Path, sampling: SamplingOptions
) -> None:
    stop = StopConditions(max_tokens=8)
    text = set(await answer(engine, make_request(prompt(20), sampling=sampling, stop=stop)))
    if sampling.guided_decoding is None:
        assert text <= {40, 41}
        return
    from tokenizers import Tokenizer

    text = Tokenizer.from_file(str(model / "tokenizer.json")).decode(list(text))
    assert set(text) <= {"G", "H"}


FORMS = {
    "fields": GuidedDecoding(json=b'{"properties":{"a":{"type":"integer"}},"type":"object"}'),
    "choice": GuidedDecoding(choice=("ab", 'c"d\\')),
    "grammar": GuidedDecoding(grammar='root ::= "ab" | [0-9]'),
    "lark": GuidedDecoding(grammar='start: "ab" | "cd"'),
}


@pytest.mark.parametrize("name", FORMS)
async def test_form_passes_its_trial_and_is_kept(engine: RealEngine, name: str) -> None:
    sampling = SamplingOptions(temperature=0.0, guided_decoding=FORMS[name])
    request = make_request(prompt(20), sampling=sampling, stop=StopConditions(max_tokens=8))
    assert await answer(engine, request)


async def test_form_that_takes_minutes_is_refused_beside_other_answers(engine: RealEngine) -> None:
    names = [f"x{n}" for n in range(1000)]
    rules = [f'x{n} ::= "" | [a-z]* x{7 * n % 1000}' for n in range(1000)]
    form = GuidedDecoding(grammar="\n".join((f"root ::= {' '.join(names)}", *rules)))
    sampling = SamplingOptions(temperature=0.0, guided_decoding=form)
    compiled = asyncio.create_task(outputs(engine, make_request(prompt(5), sampling=sampling)))
    assert await answer(engine, make_request([9, 8, 7], 2)) == await direct(engine, [9, 8, 7], 2)
    with pytest.raises(InvalidRequest, match="was not compiled within"):
        await compiled


async def test_words_may_be_forbidden_by_their_tokens(engine: RealEngine) -> None:
    tokens = prompt(20)
    first, *_ = await answer(engine, make_request(tokens, 1))
    sampling = SamplingOptions(temperature=0.0, bad_words_token_ids=((first,),))
    assert first not in await answer(engine, make_request(tokens, sampling=sampling))


async def test_seed_draws_the_same_again(engine: RealEngine) -> None:
    tokens, sampling = prompt(20), SamplingOptions(temperature=1.0, seed=11)
    first = await answer(engine, make_request(tokens, 12, sampling=sampling))
    assert await answer(engine, make_request(tokens, 12, sampling=sampling)) == first
    other = SamplingOptions(temperature=1.0, seed=12)
    assert await answer(engine, make_request(tokens, 12, sampling=other)) != first


async def test_log_probabilities_come_with_each_token_its_own_first(engine: RealEngine) -> None:
    got = await outputs(engine, make_request(prompt(20), 4, output=OutputOptions(logprobs=2)))
    entries = [(t, e) for o in got for t, e in zip(o.token_ids, o.log_probs or (), strict=True)]
    assert len(entries) == 4
    for token, (own, first, second) in entries:
        assert own.token_id == token == first.token_id, "greedy: the likeliest one"
        assert 0 >= own.log_prob == first.log_prob >= second.log_prob


async def test_full_context_gives_an_empty_answer(engine: RealEngine) -> None:
    (only,) = await outputs(engine, make_request(prompt(1024)))
    assert (only.finish_reason, only.token_ids) == ("length", ())


async def test_probe_may_be_a_single_token(engine: RealEngine) -> None:
    got = await outputs(engine, make_request([0], is_probe=True, stop=StopConditions()))
    assert sum(len(output.token_ids) for output in got) == 1


IMAGE = {"image_url": (MultimodalData(kind="url", url="http://127.0.0.1:1/x.png"),)}
REFUSED: dict[str, dict[str, Any]] = {
    "empty": {"token_ids": b""},
    "vocabulary": {"token_ids": pack_tokens([5000])},
    "temperature": {"sampling": SamplingOptions(temperature=9.0)},
    "n, best_of": {"sampling": SamplingOptions(n=2)},
    "best_of": {"sampling": SamplingOptions(best_of=2)},
    "beam": {"sampling": SamplingOptions(use_beam_search=True)},
    "length_penalty": {"sampling": SamplingOptions(length_penalty=2.0)},
    "detokenize": {"sampling": SamplingOptions(detokenize=False)},
    "allowed": {"sampling": SamplingOptions(allowed_token_ids=(9999,))},
    "logit_bias": {"sampling": SamplingOptions(logit_bias={9999: 1.0})},
    "backend": {
        "sampling": SamplingOptions(guided_decoding=GuidedDecoding(regex="a", backend="outlines"))
    },
    "rammar": {"sampling": SamplingOptions(guided_decoding=GuidedDecoding(grammar="("))},
    "prompt_logprobs": {"output": OutputOptions(prompt_logprobs=1)},
    "thinking": {"stop": StopConditions(max_tokens=4, max_thinking_tokens=2)},
    "not loaded an adapter": {"lora": "three"},
    "extra_args": {"extra_args": b"[]"},
    "kv_transfer_params": {"extra_args": b'{"kv_transfer_params": 5}'},
    "prompt_embeds": {"prompt_embeds": "AAAA"},
    "text only": {"multi_modal_data": IMAGE},
    "text": {"mm_processor_kwargs": b"{}"},
}


@pytest.mark.parametrize("named", REFUSED)
async def test_unsupported_options_are_refused_with_a_reason(
    engine: RealEngine, named: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"(?i){named}") as refused:
        await outputs(engine, make_request(**({"tokens": prompt(5)} | REFUSED[named])))
    assert not refused.value.retryable
    assert await answer(engine, make_request([9, 8, 7], 2)) == await direct(engine, [9, 8, 7], 2)


async def test_adapter_that_cannot_be_loaded_is_named_and_the_engine_continues(
    engine: RealEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.vllm, "_adapters", {"broken": Path("/nowhere")})
    with pytest.raises(EngineError, match="broken in /nowhere"):
        await engine.vllm._load_adapters()
    assert await answer(engine, make_request(prompt(5), sampling=GREEDY))
