"""Tests of models with a tokenizer and a template of their own, from the log, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from kvlane.app.preprocess.models.artifacts import ArtifactStore
from kvlane.app.preprocess.models.model import LOAD_RETRY_S, MAX_SPARE_MODELS, publish_files
from kvlane.app.preprocess.models.model_folder import DEMO_MODEL_FOLDER, read_folder
from kvlane.app.preprocess.text.tokenizer import Tokenizer
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.streams.codecs import unpack_tokens
from kvlane.streams.records import Artifact, ModelCard, Tombstone
from kvlane.streams.request import Request
from kvlane.streams.topics import REGISTRY
from tests.harness.fake_worker import FakeWorker
from tests.harness.gateway_harness import CONTEXT, GatewayHarness
from tests.harness.memory_world import MemoryWorld, scenario_test


async def publish_model(world: MemoryWorld, name: str = "demo", **over: Any) -> ModelCard:
    artifacts = ArtifactStore(await world.connect("publisher"), world.clock, InlinePool(), None)
    card = await publish_files(
        name, read_folder(DEMO_MODEL_FOLDER), artifacts, **({"context_length": CONTEXT} | over)
    )
    world.append(REGISTRY, 0, card, key=f"model/{name}")
    return card


def text_of(request: Request) -> str:
    tokenizer = Tokenizer((DEMO_MODEL_FOLDER / "tokenizer.json").read_bytes(), InlinePool())
    return tokenizer.decode(unpack_tokens(request.token_ids), skip_special=False)


@scenario_test
async def test_chat_is_rendered_by_the_template_of_its_model(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    card = await publish_model(world)
    await harness.register_and_wait()
    harness.chat("how are you?")
    (request,) = await harness.published()
    assert "how are you?" in text_of(request)
    assert len(text_of(request)) > len("how are you?"), "markers stand around it"
    tokens = len(request.token_ids) // 4
    assert tokens < len(text_of(request))
    assert request.stop.max_tokens == CONTEXT - tokens
    assert request.mdc_sum == card.checksum
    assert request.eos_token_ids == card.eos_token_ids


@scenario_test
async def test_model_is_loaded_before_its_first_request(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    await publish_model(world)
    await harness.register_and_wait()
    (load,) = harness.gateway._library._loader._loads.values()
    await world.wait_until(load.done)
    world.faults.unanswered.add("offsets")  # its files could not be read any more
    harness.chat()
    await harness.published()


@scenario_test
async def test_model_that_was_there_before_the_gateway_is_loaded(world: MemoryWorld) -> None:
    await publish_model(world)
    first = await GatewayHarness.open(world)
    await first.register_and_wait()
    harness = await GatewayHarness.open(world, "g2")
    assert len(harness.gateway._library._loader._loads) == 1
    assert (await harness.send("GET", "/v1/models").wait_done()).json["data"][0]["id"] == "demo"


@scenario_test
async def test_prompt_length_is_checked_in_tokens_of_its_model(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    await publish_model(world, context_length=64)
    await harness.register_and_wait()
    taken = harness.complete("word " * 40)
    await harness.published()
    taken.disconnect()
    refused = await harness.complete("word " * 400).wait_done()
    assert refused.status == 400
    assert "64" in refused.error["message"]


@scenario_test
async def test_model_whose_files_are_missing_is_unavailable_until_they_come(
    world: MemoryWorld,
) -> None:
    harness = await GatewayHarness.open(world)
    whole = await publish_model(world, "other")
    missing = Artifact(sha256="0" * 64, size=10)
    broken = ModelCard(name="demo", tokenizer=missing, checksum="x")
    world.append(REGISTRY, 0, broken, key="model/demo")
    await harness.register_and_wait()
    answer = await harness.chat().wait_done()
    assert (answer.status, answer.error["code"]) == (503, "model_unavailable")
    assert answer.error["param"] == "model"
    assert harness.ctx.error is None
    repaired = ModelCard(name="demo", tokenizer=whole.tokenizer, checksum="y")
    world.append(REGISTRY, 0, repaired, key="model/demo")
    await world.sleep(1)
    harness.complete("hi")
    await harness.published()


@scenario_test
async def test_failed_load_of_a_model_is_repeated(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    await publish_model(world)
    world.faults.unanswered.add("offsets")
    await harness.register_and_wait()
    assert (await harness.chat().wait_done()).status == 503
    world.faults.unanswered.clear()
    assert (await harness.chat().wait_done()).status == 503, "not at once"
    await world.sleep(LOAD_RETRY_S)
    harness.chat()
    await harness.published()


@pytest.mark.parametrize(
    ("kind", "chat", "completion"),
    [("tokens", 0, 0), ("chat", 0, 400), ("completion", 400, 0), ("embedding", 400, 400)],
)
@scenario_test
async def test_model_serves_the_endpoints_of_its_card(
    world: MemoryWorld, kind: Any, chat: int, completion: int
) -> None:
    harness = await GatewayHarness.open(world)
    world.append(REGISTRY, 0, ModelCard(name="demo", kind=kind), key="model/demo")
    await harness.register_and_wait()
    sent = [harness.chat(), harness.complete()]
    await world.sleep(1)
    assert [exchange.status for exchange in sent] == [chat, completion]
    for exchange in sent:
        if exchange.status:
            assert exchange.error["code"] == "model_not_supported"


@scenario_test
async def test_unserved_models_are_released(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    for number in range(MAX_SPARE_MODELS + 4):
        name = f"m{number}"
        await publish_model(world, name, context_length=100 + number)
        epoch = harness.register_worker(name, f"w{number}")
        await world.wait_until(lambda name=name: name in harness.models())  # type: ignore[misc]
        await world.sleep(1)
        tombstone = Tombstone(key=f"worker/w{number}", epoch=epoch)
        world.append(REGISTRY, 0, tombstone, key=f"worker/w{number}")
    await world.sleep(1)
    assert len(harness.gateway._library._loader._loads) == MAX_SPARE_MODELS


@scenario_test
async def test_model_without_its_prefill_worker_is_not_listed(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world, enforce_disaggregation=True)
    FakeWorker(world, "d", role="decode")
    await world.sleep(3)
    assert harness.models() == []
    FakeWorker(world, "p", role="prefill")
    await world.wait_until(lambda: harness.models() == ["demo"])
    usual = await GatewayHarness.open(world, "g2")
    await world.wait_until(lambda: usual.models() == ["demo"])


@scenario_test
async def test_model_with_prefill_workers_only_is_not_listed(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    FakeWorker(world, "p", role="prefill")
    await world.sleep(3)
    assert harness.models() == []
