"""Tests of the indexer on the log in memory: its answers are those of the workers' events."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from kvlane.app.indexer import Indexer
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.routing.selection.eligibility import worker_number
from kvlane.app.runtime.process import ProcessContext
from kvlane.indexer.block_hashes import local_hashes
from kvlane.streams.records import Lost, ModelCard, Tombstone
from kvlane.streams.topics import KV_EVENTS, REGISTRY, TOPICS_BY_NAME, partition_of
from tests.harness.fake_worker import FakeWorker
from tests.harness.gateway_harness import memory_settings
from tests.harness.http_exchange import HttpExchange
from tests.harness.memory_world import MemoryWorld, scenario_test

SIZE = 16
TOKENS = list(range(10 * SIZE + 3))
PARTITION = partition_of(b"w1", TOPICS_BY_NAME[KV_EVENTS].partitions)


async def opened(world: MemoryWorld, **over: Any) -> Indexer:
    ctx = ProcessContext("i1", world.clock, random.Random("i1"))
    indexer = Indexer(await world.connect("i1"), memory_settings(**over), ctx, InlinePool())
    await indexer.open()
    return indexer


async def call(indexer: Indexer, method: str, path: str, body: Any = None) -> HttpExchange:
    exchange = HttpExchange(indexer.http, method, path, body)
    await exchange.wait_done()
    return exchange


async def sent(indexer: Indexer, path: str = "/query", **body: Any) -> dict[str, Any]:
    exchange = await call(indexer, "POST", path, body)
    assert exchange.status == 200, exchange.content
    got: dict[str, Any] = exchange.json
    return got


async def metrics(indexer: Indexer) -> dict[str, float]:
    page = (await call(indexer, "GET", "/metrics")).content.decode()
    lines = [line.rpartition(" ") for line in page.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def holders(got: dict[str, Any]) -> dict[str, int]:
    return {holder["worker"]: holder["blocks"] for holder in got["holders"]}


@scenario_test
async def test_workers_with_a_prefix_are_listed_by_cached_tokens(world: MemoryWorld) -> None:
    for name, blocks in (("w1", 3), ("w2", 10), ("w3", 0)):
        FakeWorker(world, name, block_size=SIZE).publish_blocks(TOKENS[: blocks * SIZE], SIZE)
    got = await sent(await opened(world), token_ids=TOKENS, model="demo")
    assert (got["block_size"], got["blocks"]) == (SIZE, 10)
    assert [(h["worker"], h["blocks"], h["device"], h["host"]) for h in got["holders"]] == [
        ("w2", 10, 10, 0),
        ("w1", 3, 3, 0),
    ]


@scenario_test
async def test_hashes_signed_or_not_answer_as_tokens_do(world: MemoryWorld) -> None:
    FakeWorker(world, block_size=SIZE).publish_blocks(TOKENS, SIZE)
    indexer = await opened(world)
    hashes = local_hashes(TOKENS, SIZE)
    for got in (hashes.tolist(), hashes.astype("i8").tolist()):
        by_hash = await sent(indexer, "/query_by_hash", block_hashes=got, model="demo")
        assert by_hash == await sent(indexer, token_ids=TOKENS, model="demo")


@scenario_test
async def test_models_salts_and_adapters_are_kept_apart(world: MemoryWorld) -> None:
    FakeWorker(world, "w1", block_size=SIZE).publish_blocks(TOKENS, SIZE)
    FakeWorker(world, "w2", "big", block_size=SIZE).publish_blocks(TOKENS, SIZE)
    indexer = await opened(world)
    assert holders(await sent(indexer, token_ids=TOKENS)) == {"w1": 10, "w2": 10}
    assert holders(await sent(indexer, token_ids=TOKENS, model="big")) == {"w2": 10}
    for more in ({"cache_salt": "tenant"}, {"lora_name": "adapter"}):
        assert holders(await sent(indexer, token_ids=TOKENS, **more)) == {}


@scenario_test
async def test_block_size_is_that_of_the_models_card(world: MemoryWorld) -> None:
    FakeWorker(world, block_size=SIZE)
    world.append(REGISTRY, 0, ModelCard(name="demo", block_size=32), key="model/demo")
    got = await sent(await opened(world), token_ids=TOKENS, model="demo")
    assert (got["block_size"], got["blocks"]) == (32, 5)


@scenario_test
async def test_answers_follow_the_log(world: MemoryWorld) -> None:
    worker = FakeWorker(world, block_size=SIZE)
    indexer = await opened(world)
    assert holders(await sent(indexer, token_ids=TOKENS)) == {}
    worker.publish_blocks(TOKENS, SIZE)
    await world.sleep(0.1)
    assert holders(await sent(indexer, token_ids=TOKENS)) == {"w1": 10}
    partition = partition_of(b"w1", world.broker.partitions[KV_EVENTS])
    world.append(KV_EVENTS, partition, Lost(worker="w1", epoch=worker.epoch), key="w1")
    await world.sleep(0.1)
    assert holders(await sent(indexer, token_ids=TOKENS)) == {}


@scenario_test
async def test_workers_are_listed_with_the_state_of_their_caches(world: MemoryWorld) -> None:
    for name in ("w1", "w2", "gone"):
        FakeWorker(world, name, block_size=SIZE)
    got = FakeWorker(world, "w3", block_size=SIZE)
    got.publish_blocks(TOKENS, SIZE)
    world.append(REGISTRY, 0, Tombstone(key="worker/gone"), key="worker/gone")
    listed = (await call(await opened(world), "GET", "/workers")).json["workers"]
    tiers = dict.fromkeys(("device", "host", "disk", "external"), 0)
    assert [worker["worker"] for worker in listed] == ["w1", "w2", "w3"]
    assert listed[2] == {
        "worker": "w3", "number": worker_number("w3"), "epoch": got.epoch, "model": "demo",
        "role": "aggregated", "versions": {}, "block_size": SIZE, "known": True,
        "ranks": [{"rank": 0, "blocks": 10, "complete": True, **tiers, "device": 10}],
    }  # fmt: skip
    assert listed[0]["ranks"] == [{"rank": 0, "blocks": 0, "complete": False, **tiers}]


@scenario_test
async def test_keys_of_another_secret_are_visible_in_every_view(world: MemoryWorld) -> None:
    FakeWorker(world, block_size=SIZE).publish_blocks(TOKENS, SIZE)
    indexer = await opened(world, hash_secret="another")
    assert holders(await sent(indexer, token_ids=TOKENS)) == {}
    listed = (await call(indexer, "GET", "/workers")).json["workers"]
    assert [worker["known"] for worker in listed] == [False]
    page = await metrics(indexer)
    assert page['kvlane_indexer_skipped_records_total{reason="wrong_secret"}'] == 1


@scenario_test
async def test_dump_has_every_key_of_every_cache(world: MemoryWorld) -> None:
    for name, blocks in (("w1", 3), ("w2", 10)):
        FakeWorker(world, name, block_size=SIZE).publish_blocks(TOKENS[: blocks * SIZE], SIZE)
    lines = (await call(await opened(world), "GET", "/dump")).content.splitlines()
    first, second = (json.loads(line) for line in lines)
    assert (first["worker"], first["rank"], first["tier"]) == ("w1", 0, "device")
    assert second["keys"][:3] == first["keys"]
    assert second["positions"] == list(range(10))
    assert all(isinstance(key, str) for key in first["keys"])


@scenario_test
async def test_health_and_metrics(world: MemoryWorld) -> None:
    FakeWorker(world, block_size=SIZE).publish_blocks(TOKENS, SIZE)
    indexer = await opened(world)
    assert (await call(indexer, "GET", "/livez")).json == {"alive": True}
    ready = (await call(indexer, "GET", "/readyz")).json
    assert ready == {
        "ready": True, "index_read": True, "fleet_read": True, "index_left": 0, "fleet_left": 0,
        "log_answers": True,
    }  # fmt: skip
    page = await metrics(indexer)
    assert (
        page["kvlane_indexer_blocks"] == page['kvlane_indexer_worker_blocks{rank="0",worker="w1"}']
    )
    assert page["kvlane_indexer_blocks"] == 10
    assert page['kvlane_indexer_worker_complete{rank="0",worker="w1"}'] == 1
    assert page['kvlane_indexer_events_total{outcome="applied"}'] == 2
    assert page['kvlane_view_caught_up{view="index"}'] == 1
    of = f'{{partition="{PARTITION}",topic="kv-events",view="index"}}'
    assert page[f"kvlane_view_offset{of}"] == len(world.records(KV_EVENTS, PARTITION))
    assert page[f"kvlane_view_state_hash{of}"] > 0


@scenario_test
async def test_metrics_exist_before_the_first_event(world: MemoryWorld) -> None:
    page = await metrics(await opened(world))
    for name in (
        "kvlane_indexer_blocks", 'kvlane_indexer_events_total{outcome="stale"}',
        'kvlane_indexer_skipped_records_total{reason="wrong_secret"}',
        "kvlane_indexer_rejected_blocks_total", "kvlane_indexer_event_gaps_total",
        'kvlane_view_lag_records{partition="0",topic="kv-events",view="index"}',
        'kvlane_view_malformed_records_total{view="fleet"}', "kvlane_indexer_snapshots_total",
        'kvlane_indexer_query_duration_seconds_count{endpoint="query"}',
    ):  # fmt: skip
        assert page[name] == 0, name


@scenario_test
async def test_metrics_have_the_lag_and_count_answers(world: MemoryWorld) -> None:
    indexer = await opened(world)
    await sent(indexer, token_ids=TOKENS)
    async with indexer._followers["index"].paused():
        world.append(KV_EVENTS, PARTITION, *[Lost(worker="w1", epoch=1)] * 7, key="w1")
        page = await metrics(indexer)
    of = f'{{partition="{PARTITION}",topic="kv-events",view="index"}}'
    assert page[f"kvlane_view_lag_records{of}"] == 7
    assert page['kvlane_indexer_query_duration_seconds_count{endpoint="query"}'] == 1


@scenario_test
async def test_metrics_are_served_while_no_broker_answers(world: MemoryWorld) -> None:
    FakeWorker(world, block_size=SIZE).publish_blocks(TOKENS, SIZE)
    indexer = await opened(world)
    world.broker.available = False
    page = await metrics(indexer)
    assert page["kvlane_indexer_blocks"] == 10


@scenario_test
async def test_indexer_is_not_ready_before_the_log_is_read(world: MemoryWorld) -> None:
    ctx = ProcessContext("i1", world.clock, random.Random("i1"))
    indexer = Indexer(await world.connect("i1"), memory_settings(), ctx, InlinePool())
    exchange = await call(indexer, "GET", "/readyz")
    assert exchange.status == 503
    assert exchange.json["ready"] is False


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/query", b"no json", "malformed"),
        ("/query", {"token_ids": [-1]}, "token_ids"),
        ("/query", {"token_ids": [2**32]}, "token_ids"),
        ("/query", {"model": "demo"}, "token_ids"),
        ("/query", {"token_ids": [], "salt": "x"}, "salt"),
        ("/query_by_hash", {"block_hashes": ["1"]}, "block_hashes"),
        ("/query_by_hash", {"block_hashes": [2**64]}, "64"),
        ("/query_by_hash", {"block_hashes": [-(2**63) - 1]}, "64"),
    ],
)
@scenario_test
async def test_malformed_query_is_refused_with_its_reason(
    world: MemoryWorld, path: str, body: Any, words: str
) -> None:
    exchange = await call(await opened(world), "POST", path, body)
    assert exchange.status == 400, exchange.content
    assert words in exchange.error["message"]


@scenario_test
async def test_body_that_is_too_large_is_not_read(world: MemoryWorld) -> None:
    indexer = await opened(world, http_max_body_bytes=1024)
    assert (await call(indexer, "POST", "/query", {"token_ids": TOKENS * 10})).status == 413


@scenario_test
async def test_unknown_urls_are_answered_in_the_same_form(world: MemoryWorld) -> None:
    exchange = await call(await opened(world), "GET", "/nowhere")
    assert exchange.status == 404
    assert exchange.error["code"] == "unknown_url"
