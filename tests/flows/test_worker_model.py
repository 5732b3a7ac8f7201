"""A worker as its settings make it: the model it serves, and what it tells others of it."""

from __future__ import annotations

import random
from importlib.metadata import version
from typing import Any

import pytest
from msgspec.structs import replace

from app import worker
from app.engine.choice import speaker_of
from app.engine.continuation import due
from app.engine.echo import EchoEngine
from app.lifetime import Lifetime
from app.preprocess.artifacts import Artifacts
from app.preprocess.errors import BadModel
from app.preprocess.loaded import LoadedModel, load
from app.preprocess.modelfolder import DEMO, read_folder
from app.preprocess.openai import read
from app.preprocess.pool import Inline
from app.serving.admission import PoolDiffers
from app.settings import Settings, SettingsError
from streams.codecs import decode, pack_tokens
from streams.records import EngineConfig, ModelCard, Request, WorkerCard
from streams.topics import REGISTRY
from tests.desks import Desk
from tests.worlds import World, in_world

SPEAKER = speaker_of(read_folder(DEMO))


class Built(Desk):
    """A worker with the engine of the settings."""

    async def build(self, **over: Any) -> None:
        fields: dict[str, Any] = {
            "worker_id": self.name, "router_id": "-", "cache_dir": "/dev/null/cache",
            "engine_speedup": 20, "context_length": 512, "cache_blocks": 128, "debug": True,
        }  # fmt: skip
        self.life = Lifetime(self.name, self.world.clock, random.Random(1))
        log = await self.world.connect(self.name)
        self.worker = worker.build(log, Settings(**(fields | over)), self.life)
        await self.worker.start()

    async def model(self) -> LoadedModel:
        """The model, as anybody gets it from the log."""
        artifacts = Artifacts(await self.world.connect("reader"), self.world.clock, Inline(), None)
        (card,) = self.said(REGISTRY, ModelCard)
        return await load(card, artifacts, Inline(), self.world.clock)

    async def request(self, request_id: str, **options: Any) -> Request:
        body = {"model": "demo", "messages": [{"role": "user", "content": request_id}]} | options
        (request,) = (await (await self.model()).prepare(read("chat", body))).requests
        return request


@in_world
async def test_the_model_is_in_the_log_before_its_worker(world: World) -> None:
    desk = Built(world)
    await desk.build()
    cards = [decode(record) for record in world.records(REGISTRY, 0)]
    assert [type(card) for card in cards] == [ModelCard, WorkerCard, WorkerCard]
    model, last = cards[0], cards[-1]
    assert isinstance(model, ModelCard)
    assert isinstance(last, WorkerCard)
    assert (model.name, model.context_length, model.block_size) == ("demo", 512, 16)
    assert last.model == "demo"
    assert last.versions == {"kvlane": version("kvlane")}
    assert last.config == EngineConfig(
        model="demo", context_length=512, kv_cache_block_size=16, total_kv_blocks=128,
        max_num_seqs=256, max_num_batched_tokens=8192, curve=last.config.curve,
    )  # fmt: skip
    assert (await desk.model()).card == model


@in_world
async def test_a_chat_is_answered_as_the_engine_must_say_it(world: World) -> None:
    desk = Built(world)
    await desk.build()
    model = await desk.model()
    for number in range(20):
        request = await desk.request(f"r{number}", stop=["river"], max_tokens=80)
        request = replace(request, id="a")
        expected = due(request, SPEAKER, model.text_stream(request))
        desk.assign(request=request, attempt=number)
        chunks = []
        while not chunks or chunks[-1].finish_reason is None:
            await world.sleep(0.1)
            chunks = [chunk for chunk in desk.chunks() if chunk.attempt == number]
        assert "".join(chunk.text for chunk in chunks) == expected.text
        assert tuple(t for chunk in chunks for t in chunk.token_ids) == expected.token_ids
        assert chunks[-1].finish_reason == expected.finish_reason
        assert chunks[-1].stop_reason == expected.stop_reason


@in_world
async def test_a_run_that_goes_on_elsewhere_says_the_same(world: World) -> None:
    desk = Built(world)
    await desk.build()
    model = await desk.model()
    request = await desk.request("on and on", max_tokens=60, ignore_eos=True)
    expected = due(request, SPEAKER, model.text_stream(request))
    for cut in (1, 7, 30, 59):
        text = model.text_stream(request)
        shown = text.feed(expected.token_ids[:cut]).text
        taken = pack_tokens(expected.token_ids[:cut])
        name = f"cut {cut}"
        whole = replace(request, id=name)
        desk.assign(request=whole, attempt=1, taken=taken, taken_chars=len(shown))
        await desk.finished(name)
        chunks = desk.chunks(name)
        assert shown + "".join(chunk.text for chunk in chunks) == expected.text
        assert chunks[-1].chars == len(expected.text)


@in_world
async def test_the_echo_engine_has_no_model(world: World) -> None:
    desk = Built(world)
    await desk.build(engine="echo")
    assert not desk.said(REGISTRY, ModelCard)
    assert desk.said(REGISTRY, WorkerCard)[-1].config.kv_cache_block_size is None


@in_world
async def test_a_folder_that_is_no_model_is_refused(world: World) -> None:
    with pytest.raises(BadModel):
        await Built(world).build(model_path="/dev/null")


def test_a_context_that_does_not_fit_into_the_cache_is_refused() -> None:
    with pytest.raises(SettingsError, match="KVLANE_CACHE_BLOCKS"):
        Settings(worker_id="-", router_id="-", context_length=512, cache_blocks=31)


# --- others that serve it -------------------------------------------------------------------------


@in_world
async def test_a_worker_that_serves_another_model_by_the_same_name_is_refused(world: World) -> None:
    first, other = Built(world, "w1"), Built(world, "w2")
    await first.build()
    with pytest.raises(
        PoolDiffers, match=r"w1 serve 'demo'.* context_length is 512, here 256"
    ) as e:
        await other.build(context_length=256)
    assert "KVLANE_MODEL" in str(e.value)
    (card,) = first.said(REGISTRY, ModelCard)
    assert card.context_length == 512
    assert not [c for c in first.said(REGISTRY, WorkerCard) if c.id == "w2"]
    await Built(world, "w3").build(context_length=256, model="demo-short")


@in_world
async def test_the_same_model_again_joins_and_its_only_worker_may_change_it(world: World) -> None:
    first = Built(world, "w1")
    await first.build()
    await Built(world, "w2").build()
    assert {card.checksum for card in first.said(REGISTRY, ModelCard)} == {
        first.said(REGISTRY, ModelCard)[0].checksum
    }
    alone = Built(world, "w1")
    with pytest.raises(PoolDiffers, match="w2 serve"):
        await alone.build(context_length=256)


@in_world
async def test_a_worker_leaves_a_model_whose_card_another_one_has_written_since(
    world: World,
) -> None:
    first, other = Built(world, "w1"), Built(world, "w2")
    starts = [world.spawn(first.build()), world.spawn(other.build(context_length=256))]
    await world.until(lambda: all(start.done() for start in starts), within_s=60)
    await world.sleep(5)
    cards = first.said(REGISTRY, ModelCard)
    assert len(cards) == 2, "at the same moment nobody serves it yet"
    last, left = (first, other) if cards[-1].context_length == 512 else (other, first)
    assert last.life.failed is None
    assert isinstance(left.life.failed, PoolDiffers)


class BesideChats(EchoEngine):
    """Stands for a server that is asked in its clients' own words, and calls its model so."""

    calls_it = ""

    async def start(self, worker_id: str) -> EngineConfig:
        config = await super().start(worker_id)
        return replace(config, kind="chat", model=self.calls_it, served_model_name="m")


@in_world
async def test_workers_without_files_agree_on_what_their_servers_tell(world: World) -> None:
    async def hire(name: str, calls_it: str, context: int = 100) -> None:
        engine = BesideChats(world.clock, 0.1, context_length=context)
        engine.calls_it = calls_it
        await Desk(world, name).start(engine)

    await hire("w1", "qwen")
    await hire("w2", "qwen")
    with pytest.raises(PoolDiffers, match="their served_as is qwen, here llama"):
        await hire("w3", "llama")
    with pytest.raises(PoolDiffers, match="their context_length is 100, here 50"):
        await hire("w4", "qwen", 50)


@in_world
async def test_a_worker_waits_for_those_who_leave(world: World) -> None:
    first, other = Built(world, "w1"), Built(world, "w2")
    await first.build()
    coming = world.spawn(other.build(context_length=256))
    await world.sleep(3)
    assert not coming.done()
    await first.worker.stop()
    await coming
    assert [card.context_length for card in first.said(REGISTRY, ModelCard)] == [512, 256]
