"""Tests of the model of a worker: by its settings, in its card and its files."""

from __future__ import annotations

import random
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvlane.app import worker
from kvlane.app.engine.echo import EchoEngine
from kvlane.app.engine.engine_factory import create_engine, text_generator_of
from kvlane.app.engine.simulated.text_generator import expected_answer
from kvlane.app.preprocess.models.artifacts import ArtifactStore
from kvlane.app.preprocess.models.model import LoadedModel, load_model
from kvlane.app.preprocess.models.model_folder import DEMO_MODEL_FOLDER, read_folder
from kvlane.app.preprocess.prompt_errors import BadModel
from kvlane.app.preprocess.requests.openai_requests import read_openai
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.serving.worker_model import ModelMismatch
from kvlane.app.settings import Settings, SettingsError
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import decode, pack_tokens
from kvlane.streams.records import EngineConfig, ModelCard, WorkerCard
from kvlane.streams.request import Request
from kvlane.streams.topics import REGISTRY
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.worker_harness import WorkerHarness

SPEAKER = text_generator_of(read_folder(DEMO_MODEL_FOLDER))


class Built(WorkerHarness):
    """A worker with the engine of the settings."""

    async def build(self, **over: Any) -> None:
        fields: dict[str, Any] = {
            "worker_id": self.name, "router_id": "-", "cache_dir": "/dev/null/cache",
            "engine_speedup": 20, "context_length": 512, "cache_blocks": 128,
            "validate_engine": True,
        }  # fmt: skip
        self.ctx = ProcessContext(self.name, self.world.clock, random.Random(1))
        log = await self.world.connect(self.name)
        self.worker = worker.build(
            log, Settings(**({"status_port": None} | fields | over)), self.ctx
        )
        await self.worker.start()

    async def model(self) -> LoadedModel:
        """The model, as anybody gets it from the log."""
        artifacts = ArtifactStore(
            await self.world.connect("reader"), self.world.clock, InlinePool(), None
        )
        (card,) = self.records_of(REGISTRY, ModelCard)
        return await load_model(card, artifacts, InlinePool(), self.world.clock)

    async def request(self, request_id: str, **options: Any) -> Request:
        body = {"model": "demo", "messages": [{"role": "user", "content": request_id}]} | options
        (request,) = (await (await self.model()).prepare(read_openai("chat", body))).requests
        return request


@scenario_test
async def test_model_is_in_the_log_before_its_worker(world: MemoryWorld) -> None:
    harness = Built(world)
    await harness.build()
    cards = [decode(record) for record in world.records(REGISTRY, 0)]
    assert [type(card) for card in cards] == [ModelCard, WorkerCard, WorkerCard]
    model, last = cards[0], cards[-1]
    assert isinstance(model, ModelCard)
    assert isinstance(last, WorkerCard)
    assert (model.name, model.context_length, model.block_size) == ("demo", 512, 16)
    assert last.model == "demo"
    assert last.versions == dict.fromkeys(("kvlane", "simulated"), version("kvlane"))
    assert last.config == EngineConfig(
        model="demo", context_length=512, kv_cache_block_size=16, total_kv_blocks=128,
        max_num_seqs=256, max_num_batched_tokens=8192, curve=last.config.curve,
        unsupported=("guided_decoding", "logprobs"), transfer_lease_s=2.0,
        transfer_bytes_per_token=131_072,
    )  # fmt: skip
    assert (await harness.model()).card == model


@scenario_test
async def test_chat_is_answered_with_the_expected_text(world: MemoryWorld) -> None:
    harness = Built(world)
    await harness.build()
    model = await harness.model()
    for number in range(20):
        request = await harness.request(f"r{number}", stop=["river"], max_tokens=80)
        request = replace(request, id="a")
        expected = expected_answer(request, SPEAKER, model.text_stream(request))
        harness.assign(request=request, attempt=number)
        chunks = []
        while not chunks or chunks[-1].finish_reason is None:
            await world.sleep(0.1)
            chunks = [chunk for chunk in harness.chunks() if chunk.attempt == number]
        assert "".join(chunk.text for chunk in chunks) == expected.text
        assert tuple(t for chunk in chunks for t in chunk.token_ids) == expected.token_ids
        assert chunks[-1].finish_reason == expected.finish_reason
        assert chunks[-1].stop_reason == expected.stop_reason


@scenario_test
async def test_run_that_continues_elsewhere_has_the_same_text(world: MemoryWorld) -> None:
    harness = Built(world)
    await harness.build()
    model = await harness.model()
    request = await harness.request("on and on", max_tokens=60, ignore_eos=True)
    expected = expected_answer(request, SPEAKER, model.text_stream(request))
    for cut in (1, 7, 30, 59):
        text = model.text_stream(request)
        shown = text.feed(expected.token_ids[:cut]).text
        taken = pack_tokens(expected.token_ids[:cut])
        name = f"cut {cut}"
        whole = replace(request, id=name)
        harness.assign(request=whole, attempt=1, taken=taken, taken_chars=len(shown))
        await harness.wait_finished(name)
        chunks = harness.chunks(name)
        assert shown + "".join(chunk.text for chunk in chunks) == expected.text
        assert chunks[-1].chars == len(expected.text)


@scenario_test
async def test_echo_engine_has_no_model(world: MemoryWorld) -> None:
    harness = Built(world)
    await harness.build(engine="echo")
    assert not harness.records_of(REGISTRY, ModelCard)
    assert harness.records_of(REGISTRY, WorkerCard)[-1].config.kv_cache_block_size is None


@scenario_test
async def test_folder_that_is_no_model_is_refused(world: MemoryWorld) -> None:
    with pytest.raises(BadModel):
        await Built(world).build(model_path="/dev/null")


@pytest.mark.parametrize("engine", ["attached", "vllm"])
def test_model_without_a_tokenizer_is_refused_at_the_start(engine: str, tmp_path: Path) -> None:
    settings = Settings(
        worker_id="-", router_id="-", engine=engine, model_path=tmp_path,
        attach_url="http://127.0.0.1:1" if engine == "attached" else "",
    )  # fmt: skip
    with pytest.raises(BadModel, match=r"has no tokenizer\.json"):
        create_engine(settings, SystemClock())


def test_context_that_does_not_fit_into_the_cache_is_refused() -> None:
    settings = Settings(worker_id="-", router_id="-", context_length=512, cache_blocks=31)
    with pytest.raises(SettingsError, match="KVLANE_CACHE_BLOCKS"):
        create_engine(settings, SystemClock())
    own_engine = settings.model_copy(update={"engine": "echo"})
    create_engine(own_engine, SystemClock())


# --- others that serve it -------------------------------------------------------------------------


@scenario_test
async def test_worker_that_serves_another_model_by_the_same_name_is_refused(
    world: MemoryWorld,
) -> None:
    first, other = Built(world, "w1"), Built(world, "w2")
    await first.build()
    with pytest.raises(
        ModelMismatch, match=r"w1 serve 'demo'.* context_length is 512, here 256"
    ) as e:
        await other.build(context_length=256)
    assert "KVLANE_MODEL" in e.value.correction
    (card,) = first.records_of(REGISTRY, ModelCard)
    assert card.context_length == 512
    assert not [c for c in first.records_of(REGISTRY, WorkerCard) if c.id == "w2"]
    await Built(world, "w3").build(context_length=256, model="demo-short")


@scenario_test
async def test_same_model_again_joins_and_its_only_worker_may_change_it(world: MemoryWorld) -> None:
    first = Built(world, "w1")
    await first.build()
    await Built(world, "w2").build()
    assert {card.checksum for card in first.records_of(REGISTRY, ModelCard)} == {
        first.records_of(REGISTRY, ModelCard)[0].checksum
    }
    alone = Built(world, "w1")
    with pytest.raises(ModelMismatch, match="w2 serve"):
        await alone.build(context_length=256)


@scenario_test
async def test_worker_leaves_a_model_whose_card_was_rewritten(world: MemoryWorld) -> None:
    first, other = Built(world, "w1"), Built(world, "w2")
    starts = [world.spawn(first.build()), world.spawn(other.build(context_length=256))]
    await world.wait_until(lambda: all(start.done() for start in starts), within_s=60)
    await world.sleep(5)
    cards = first.records_of(REGISTRY, ModelCard)
    assert len(cards) == 2, "at the same moment nobody serves it yet"
    last, left = (first, other) if cards[-1].context_length == 512 else (other, first)
    assert last.ctx.error is None
    assert isinstance(left.ctx.error, ModelMismatch)


class BesideChats(EchoEngine):
    """Stands for a server that is asked in its clients' own words, and calls its model so."""

    calls_it = ""

    async def start(self, worker_id: str) -> EngineConfig:
        config = await super().start(worker_id)
        return replace(config, kind="chat", model=self.calls_it, served_model_name="m")


@scenario_test
async def test_workers_without_files_agree_on_the_model_of_their_servers(
    world: MemoryWorld,
) -> None:
    async def hire(name: str, calls_it: str, context: int = 100) -> None:
        engine = BesideChats(world.clock, 0.1, context_length=context)
        engine.calls_it = calls_it
        await WorkerHarness(world, name).start(engine)

    await hire("w1", "qwen")
    await hire("w2", "qwen")
    with pytest.raises(ModelMismatch, match="their served_as is qwen, here llama"):
        await hire("w3", "llama")
    with pytest.raises(ModelMismatch, match="their context_length is 100, here 50"):
        await hire("w4", "qwen", 50)


@scenario_test
async def test_worker_waits_for_leaving_workers_and_logs_how_long(
    world: MemoryWorld, caplog: pytest.LogCaptureFixture
) -> None:
    first, other = Built(world, "w1"), Built(world, "w2")
    await first.build()
    coming = world.spawn(other.build(context_length=256))
    await world.sleep(3)
    assert not coming.done()
    assert caplog.text.count("waits up to 40 s for them to leave") == 1
    await first.worker.stop()
    await coming
    assert [card.context_length for card in first.records_of(REGISTRY, ModelCard)] == [512, 256]
