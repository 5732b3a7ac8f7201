"""Tests of a model from the log to prepared requests and visible text."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import msgspec
import pytest

from kvlane.app.preprocess.models.artifacts import ArtifactStore
from kvlane.app.preprocess.models.model import (
    LoadedModel,
    ModelLoader,
    PreparedPrompts,
    load_model,
    publish_files,
)
from kvlane.app.preprocess.models.model_folder import DEMO_MODEL_FOLDER, checksum_of, read_folder
from kvlane.app.preprocess.prompt_errors import ArtifactUnavailable, BadModel, InvalidPrompt
from kvlane.app.preprocess.request_reader import prepare
from kvlane.app.preprocess.requests.openai_requests import TokenizedKind, read_openai
from kvlane.app.preprocess.text.chat_template import ChatTemplate
from kvlane.app.preprocess.text.tokenizer import Tokenizer
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams import records as r
from kvlane.streams import request as q
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import pack_tokens, unpack_tokens
from kvlane.streams.records import ModelCard
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.tenant_times import guess

POOL = InlinePool()
T = TypeVar("T")


async def in_log(world: MemoryWorld) -> ArtifactStore:
    return ArtifactStore(await world.connect("model"), world.clock, POOL, None)


async def demo(world: MemoryWorld) -> LoadedModel:
    artifacts = await in_log(world)
    return await load_model(
        await publish_files("demo", read_folder(DEMO_MODEL_FOLDER), artifacts),
        artifacts,
        POOL,
        world.clock,
    )


async def prepared(
    model: LoadedModel, kind: TokenizedKind = "chat", **fields: Any
) -> PreparedPrompts:
    return await model.prepare(read_openai(kind, fields))


def text_of(model: LoadedModel, request: q.Request) -> str:
    return model.tokenizer.decode(unpack_tokens(request.token_ids), skip_special=False)


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


# --- through the log ------------------------------------------------------------------------------


@scenario_test
async def test_model_is_published_with_all_that_it_takes(world: MemoryWorld) -> None:
    artifacts = await in_log(world)
    card = await publish_files(
        "demo", read_folder(DEMO_MODEL_FOLDER), artifacts, context_length=4096, block_size=16
    )
    assert (card.name, card.context_length, card.block_size) == ("demo", 4096, 16)
    assert card.checksum == checksum_of(card)
    assert card.tokenizer is not None
    assert (
        await artifacts.fetch(card.tokenizer) == (DEMO_MODEL_FOLDER / "tokenizer.json").read_bytes()
    )


@scenario_test
async def test_model_without_a_template_has_none_on_its_card(world: MemoryWorld) -> None:
    with TemporaryDirectory() as name:
        (Path(name) / "tokenizer.json").write_bytes(
            (DEMO_MODEL_FOLDER / "tokenizer.json").read_bytes()
        )
        artifacts = await in_log(world)
        card = await publish_files("bare", read_folder(Path(name)), artifacts)
        model = await load_model(card, artifacts, POOL, world.clock)
    assert card.template is None
    with pytest.raises(InvalidPrompt, match="no chat template"):
        await prepared(model, **CHAT)


@scenario_test
async def test_model_whose_files_are_not_there_cannot_be_loaded(world: MemoryWorld) -> None:
    artifacts = await in_log(world)
    card = await publish_files("demo", read_folder(DEMO_MODEL_FOLDER), artifacts)
    missing = msgspec.structs.replace(card, template=r.Artifact(sha256="ab" * 32, size=5))
    with pytest.raises(ArtifactUnavailable):
        await load_model(missing, artifacts, POOL, world.clock)


@scenario_test
async def test_card_without_a_tokenizer_cannot_be_loaded(world: MemoryWorld) -> None:
    with pytest.raises(BadModel, match="no tokenizer"):
        await load_model(ModelCard(name="m"), await in_log(world), POOL, world.clock)


@scenario_test
async def test_template_that_is_no_text_cannot_be_loaded(world: MemoryWorld) -> None:
    artifacts = await in_log(world)
    card = await publish_files("demo", read_folder(DEMO_MODEL_FOLDER), artifacts)
    broken = msgspec.structs.replace(card, template=await artifacts.publish(b"\xff"))
    with pytest.raises(BadModel, match="UTF-8"):
        await load_model(broken, artifacts, POOL, world.clock)


@scenario_test
async def test_models_with_equal_files_keep_their_names(world: MemoryWorld) -> None:
    artifacts = await in_log(world)
    ctx = ProcessContext("loader", world.clock, random.Random(1))
    loader = ModelLoader(artifacts, POOL, ctx)
    files = read_folder(DEMO_MODEL_FOLDER)
    cards = [await publish_files(name, files, artifacts) for name in ("demo", "demo-fp8")]
    loader.sync(cards)
    models = [await loader.model(card) for card in cards]
    asked = read_openai("chat", CHAT | {"model": "chat"})
    requests = [(await prepare(asked, model)).requests[0] for model in models]
    assert [request.model for request in requests] == ["demo", "demo-fp8"]
    assert models[0].tokenizer is models[1].tokenizer
    await ctx.cancel_tasks()


@scenario_test
async def test_template_has_the_special_tokens_of_the_card(world: MemoryWorld) -> None:
    artifacts = await in_log(world)
    card = await publish_files("demo", read_folder(DEMO_MODEL_FOLDER), artifacts)
    template = await artifacts.publish(b"{{ eos_token }}")
    model = await load_model(
        msgspec.structs.replace(card, template=template), artifacts, POOL, world.clock
    )
    assert (await prepared(model, **CHAT)).texts == ("<|end|>",)


# --- prompts --------------------------------------------------------------------------------------


@scenario_test
async def test_chat_becomes_the_tokens_of_its_rendering(world: MemoryWorld) -> None:
    model = await demo(world)
    made = await prepared(model, **CHAT)
    assert made.texts == ("<|user|>hi<|end|><|assistant|>",)
    assert text_of(model, made.requests[0]) == made.texts[0]


@scenario_test
async def test_request_is_made_with_the_card(world: MemoryWorld) -> None:
    model = await demo(world)
    (request,) = (await prepared(model, **CHAT)).requests
    assert request.mdc_sum == model.card.checksum
    assert request.eos_token_ids == (1, 0)
    assert request.stop.max_tokens == 131_072 - len(unpack_tokens(request.token_ids))


@scenario_test
async def test_prompts_of_a_completion_become_requests_of_their_own(world: MemoryWorld) -> None:
    model = await demo(world)
    made = await prepared(model, "completion", prompt=["once", [1, 2]])
    assert made.texts == ("once", None)
    assert [text_of(model, one) for one in made.requests] == ["once", "<|end|><|system|>"]


@scenario_test
async def test_tokens_are_taken_as_they_come(world: MemoryWorld) -> None:
    made = await prepared(await demo(world), "tokens", token_ids=[4095, 0])
    assert made.requests[0].token_ids == pack_tokens([4095, 0])


@pytest.mark.parametrize(
    ("kind", "fields", "field"),
    [
        ("tokens", {"token_ids": [4096]}, "token_ids"),
        ("completion", {"prompt": [1, 2**32 - 1]}, "prompt"),
        ("chat", {**CHAT, "nvext": {"token_data": [4096]}}, "messages"),
    ],
)
async def test_tokens_outside_the_vocabulary_are_refused(
    kind: TokenizedKind, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidPrompt, match="4096") as raised:
        await LOADED.prepare(read_openai(kind, fields))
    assert raised.value.field == field


async def test_invalid_text_is_refused() -> None:
    with pytest.raises(InvalidPrompt) as raised:
        await LOADED.prepare(
            read_openai("chat", {"messages": [{"role": "\ud800", "content": "hi"}]})
        )
    assert raised.value.field.startswith("messages")


async def test_empty_completion_is_refused() -> None:
    with pytest.raises(InvalidPrompt, match="is empty"):
        await LOADED.prepare(read_openai("completion", {"prompt": ""}))


# --- answers --------------------------------------------------------------------------------------


def loaded() -> LoadedModel:
    tokenizer = Tokenizer((DEMO_MODEL_FOLDER / "tokenizer.json").read_bytes(), POOL)
    source = (DEMO_MODEL_FOLDER / "chat_template.jinja").read_text()
    card = ModelCard(name="demo", context_length=8192, eos_token_ids=(1,))
    return LoadedModel(card, tokenizer, ChatTemplate(source, SystemClock()), POOL)


LOADED = loaded()


async def visible(answer: str, taken: int = 0, **fields: Any) -> str:
    """The text of an answer that is generated after `taken` tokens of it are out."""
    (request,) = (await LOADED.prepare(read_openai("chat", CHAT | fields))).requests
    tokens = await LOADED.tokenizer.encode(answer)
    stream = LOADED.text_stream(request, tokens[:taken])
    return stream.feed(tokens[taken:]).text + stream.end().text


async def test_answer_ends_at_the_models_end_of_text() -> None:
    assert await visible("yes<|end|>no") == "yes"


async def test_answer_ends_at_a_stop_string() -> None:
    assert await visible("one two three", stop=" two") == "one"


async def test_stop_string_is_shown_on_request() -> None:
    shown = await visible("one two three", stop=" two", include_stop_str_in_output=True)
    assert shown == "one two"


async def test_special_tokens_are_shown_on_request_only() -> None:
    assert await visible("a<|user|>b") == "ab"
    assert await visible("a<|user|>b", skip_special_tokens=False) == "a<|user|>b"


async def test_resumed_answer_continues_after_the_shown_text() -> None:
    assert await visible("one two three", taken=2) == " three"


async def test_cards_end_of_text_counts_for_requests_that_name_none() -> None:
    stream = LOADED.text_stream(q.Request(id="x", token_ids=pack_tokens([5])))
    assert stream.feed([1]).finish_reason == "stop"


async def test_answer_completes_the_character_its_prompt_ends_with() -> None:
    first, second = await LOADED.tokenizer.encode("\u0378")  # in no text, so in no merge
    stream = LOADED.text_stream(q.Request(id="x", token_ids=pack_tokens([first])))
    assert stream.feed([second]).text == "\u0378"


class CountingPool(InlinePool):
    def __init__(self) -> None:
        self.jobs = 0

    async def run(self, work: Callable[[], T]) -> T:
        self.jobs += 1
        return work()


@pytest.mark.parametrize(
    ("changes", "jobs"),
    [
        ({}, 0),
        ({"messages": [{"role": "user", "content": "hi " * 300}] * 2}, 0),
        ({"messages": [{"role": "user", "content": "hi " * 700}]}, 1),
        ({"messages": [{"role": "user", "content": "hi"}] * 9}, 1),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}, 1),
        ({"chat_template_kwargs": {"rounds": 1}}, 1),
        ({"documents": [{"text": "hi"}]}, 1),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 1),
    ],
)
async def test_short_chat_of_text_is_rendered_without_a_thread(
    changes: dict[str, Any], jobs: int
) -> None:
    pool = CountingPool()
    template = ChatTemplate("{{ messages | length }}", SystemClock())
    model = LoadedModel(ModelCard(name="m"), LOADED.tokenizer, template, pool)
    await prepared(model, **(CHAT | changes))
    assert pool.jobs == jobs


async def test_work_for_a_prompt_does_not_depend_on_the_texts_of_other_tenants() -> None:
    """`python -m tests.tenant_times` measures the same in time."""
    others = await guess("evil", "acme", 5, POOL)
    assert others.equal_work == 5
    own = await guess("acme", "acme", 5, POOL)
    assert own.equal_work == 0
