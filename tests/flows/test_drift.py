"""Tests of drift in a router: figures for Prometheus, an alarm in the log, and alert rules with
existing names."""

from __future__ import annotations

import logging
import random
import re
from pathlib import Path

import pytest
import yaml

from kvlane.app.indexer import Indexer
from kvlane.app.metrics.collector_metrics import CollectorMetrics
from kvlane.app.metrics.gateway_metrics import GatewayMetrics
from kvlane.app.metrics.preprocessor_metrics import PreprocessorMetrics
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import Assignment
from kvlane.streams.request import Request
from kvlane.streams.topics import REQUESTS
from tests.harness.fake_worker import FakeWorker, append_record, start_router, wait_for_items
from tests.harness.gateway_harness import memory_settings
from tests.harness.memory_world import MemoryWorld, run_scenario, scenario_test

ALERTS = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "alerts.yaml"
TOKENS = list(range(320))


async def serve(world: MemoryWorld, hand: FakeWorker, name: str, cached: int) -> None:
    """A request of twenty blocks, of which the engine finds so many tokens."""
    before = len(hand.received(Assignment))
    append_record(world, REQUESTS, Request(id=name, model="demo", token_ids=pack_tokens(TOKENS)))
    got = await wait_for_items(world, lambda: hand.received(Assignment)[before:])
    run = hand.start(got[0])
    await world.sleep(0.1)
    hand.finish(run, "stop", cached_tokens=cached, ttft_ms=100.0, output_tokens=3)


async def figures(router: Router) -> dict[str, float]:
    page = (await router._context.metrics.page()).decode()
    lines = (
        line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("kvlane_router_drift")
    )
    return {name.split("_drift_")[1].split("{")[0]: float(value) for name, value in lines}


@scenario_test
async def test_cache_that_differs_from_the_index_raises_one_alert(
    world: MemoryWorld, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvlane.app.router")

    def alarms() -> list[str]:
        return [r.levelname for r in caplog.records if "worker w1 (demo)" in r.message]

    hand = FakeWorker(world, block_size=16)
    hand.publish_blocks(TOKENS, 16)
    router = await start_router(world, policy="predictive")
    assert await figures(router) == {}
    for n in range(60):
        await serve(world, hand, f"right-{n}", 320 if n % 2 else 304)
    now = await figures(router)
    assert (now["runs"], now["p95_cached_blocks"], now["alert"]) == (60, 1, 0)
    assert 0 < now["p95_time_to_first_token_seconds"] < 0.2
    for n in range(10):
        await serve(world, hand, f"wrong-{n}", 160)
    await world.sleep(30)
    now = await figures(router)
    assert (now["runs"], now["p95_cached_blocks"], now["alert"]) == (70, 10, 1)
    assert alarms() == ["WARNING"]
    for n in range(256):
        await serve(world, hand, f"well-{n}", 320)
    await world.sleep(30)
    assert (await figures(router))["alert"] == 0
    assert alarms() == ["WARNING", "INFO"]
    await world.sleep(600)
    assert await figures(router) == {}
    assert len(alarms()) == 2


def test_alerts_use_existing_metrics() -> None:
    text = ALERTS.read_text()
    rules = [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
    assert all({"alert", "expr", "labels", "annotations"} <= rule.keys() for rule in rules)
    named = {*re.findall(r"kvlane_[a-z0-9_]+", text)}
    names: set[str] = set()

    async def scenario(world: MemoryWorld) -> None:
        router = await start_router(world)
        ctx = ProcessContext("indexer", world.clock, random.Random(1))
        indexer = Indexer(await world.connect("indexer"), memory_settings(), ctx, InlinePool())
        for registry in (
            router._context.metrics.registry,
            indexer._metrics.registry,
            GatewayMetrics().registry,
            CollectorMetrics(lambda: 0, lambda: 0, lambda: 0).registry,
            PreprocessorMetrics(lambda: 0, lambda: False, lambda: 0.0, lambda: ()).registry,
        ):
            for family in registry.collect():
                names.update({family.name, *(sample.name for sample in family.samples)})
                if family.type == "counter":
                    names.add(f"{family.name}_total")

    run_scenario(scenario)
    assert named <= names
