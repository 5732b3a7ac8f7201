"""Tests of a router over HTTP: liveness, readiness and metrics."""

from __future__ import annotations

import random

import httpx
import pytest
from msgspec.structs import replace

from kvlane.app.router import Router
from kvlane.app.routing.policy_names import POLICY_NAMES
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.records import Assigned, Assignment, End, ModelCard
from kvlane.streams.request import Hints, Request
from kvlane.streams.topics import LEDGER, REGISTRY, REQUESTS, RESPONSES
from tests.harness.fake_worker import (
    PROMPT,
    FakeWorker,
    append_record,
    read_records,
    start_router,
    wait_for_items,
)
from tests.harness.gateway_harness import memory_settings
from tests.harness.http_exchange import HttpExchange
from tests.harness.memory_world import MemoryWorld, scenario_test
from workbench.bench.routing.router_views import LoadFigures, parse_view

SIZE = 16
TOKENS = list(range(5 * SIZE + 4))
LONG = replace(PROMPT, token_ids=pack_tokens(TOKENS))


async def get(router: Router, path: str) -> HttpExchange:
    return await HttpExchange(router.http, "GET", path).wait_done()


async def figures(router: Router) -> dict[str, float]:
    page = (await get(router, "/metrics")).content.decode()
    lines = [line.rpartition(" ") for line in page.splitlines() if not line.startswith("#")]
    return {name.removeprefix("kvlane_router_"): float(value) for name, _, value in lines}


@scenario_test
async def test_all_metrics_are_zero_before_the_first_request(world: MemoryWorld) -> None:
    got = await figures(await start_router(world))
    for policy in POLICY_NAMES:
        assert got[f'decisions_total{{policy="{policy}"}}'] == 0
    for code in ("no_workers", "none_eligible", "all_busy", "pinned_gone", "pinned_busy",
                 "pin_not_allowed", "queue_full", "deadline"):  # fmt: skip
        assert got[f'terminated_requests_total{{code="{code}"}}'] == 0
    for name in ("queue_time_seconds_count", "prompt_tokens_count",
                 "prefix_cache_hit_ratio_count", "dry_runs_total",
                 "queued_requests", "queued_bytes", 'queued_tokens{model="unknown"}',
                 'queued_batch_requests{model="unknown"}'):  # fmt: skip
        assert got[name] == 0


@scenario_test
async def test_decision_is_counted_with_its_prompt_its_hit_rate_and_its_wait(
    world: MemoryWorld,
) -> None:
    router = await start_router(world)
    append_record(world, REQUESTS, LONG)
    await world.sleep(3)
    FakeWorker(world, block_size=SIZE).publish_blocks(TOKENS, SIZE)
    await wait_for_items(world, lambda: read_records(world, LEDGER, Assigned))
    got = await figures(router)
    assert got['decisions_total{policy="predictive"}'] == 1
    assert got["prompt_tokens_sum"] == len(TOKENS)
    assert got["prefix_cache_hit_ratio_sum"] == pytest.approx(5 / 6), "the sixth block is not full"
    assert 3 <= got["queue_time_seconds_sum"] < 5


@scenario_test
async def test_second_attempt_is_a_decision_but_its_wait_began_with_the_first(
    world: MemoryWorld,
) -> None:
    router = await start_router(world)
    hand = FakeWorker(world)
    append_record(world, REQUESTS, PROMPT)
    (assignment,) = await wait_for_items(world, lambda: hand.received(Assignment))
    run = hand.start(assignment)
    hand.finish(run, "broken")
    await wait_for_items(world, lambda: read_records(world, LEDGER, Assigned), 2)
    got = await figures(router)
    assert got['decisions_total{policy="predictive"}'] == 2
    assert got["queue_time_seconds_count"] == 1
    assert got["prompt_tokens_count"] == got["prefix_cache_hit_ratio_count"] == 1


@scenario_test
async def test_dry_run_is_in_prompt_lengths_and_hit_rates_and_is_no_decision(
    world: MemoryWorld,
) -> None:
    router = await start_router(world)
    FakeWorker(world, block_size=SIZE).publish_blocks(TOKENS, SIZE)
    await world.sleep(1)
    append_record(world, REQUESTS, replace(LONG, annotations=("query_instance_id:",)))
    (end,) = await wait_for_items(world, lambda: read_records(world, RESPONSES, End))
    assert end.placed is not None
    assert (end.placed.worker_id, list(end.placed.token_ids)) == ("w1", TOKENS)
    got = await figures(router)
    assert got["dry_runs_total"] == 1
    assert got["prompt_tokens_sum"] == len(TOKENS)
    assert got["prefix_cache_hit_ratio_sum"] == pytest.approx(5 / 6)
    assert got['decisions_total{policy="predictive"}'] == got["queue_time_seconds_count"] == 0
    assert read_records(world, LEDGER, Assigned) == []


@scenario_test
async def test_queue_is_measured_in_uncached_tokens(world: MemoryWorld) -> None:
    world.append(REGISTRY, 0, ModelCard(name="demo", block_size=SIZE), key="model/demo")
    hand = FakeWorker(world, block_size=SIZE)
    hand.publish_blocks(TOKENS[: 2 * SIZE], SIZE)
    hand.state = "draining"
    router = await start_router(world)
    append_record(world, REQUESTS, LONG)
    await world.sleep(2)
    got = await figures(router)
    assert got["queued_requests"] == 1
    assert got['queued_tokens{model="demo"}'] == len(TOKENS) - 2 * SIZE
    assert got['queued_tokens{model="unknown"}'] == 0
    hand.state = "ready"
    await wait_for_items(world, lambda: read_records(world, LEDGER, Assigned))
    got = await figures(router)
    assert got["queued_requests"] == got['queued_tokens{model="demo"}'] == 0


@scenario_test
async def test_ends_are_counted_by_code(world: MemoryWorld) -> None:
    router = await start_router(world)
    FakeWorker(world)
    await world.sleep(1)
    for number, hints in enumerate(
        (Hints(backend_instance_id="w9"), Hints(lora_name="x"), Hints(lora_name="y"))
    ):
        append_record(world, REQUESTS, Request(id=f"r{number}", model="demo", hints=hints))
    await world.sleep(2)
    got = await figures(router)
    assert got['terminated_requests_total{code="pinned_gone"}'] == 1
    assert got['terminated_requests_total{code="none_eligible"}'] == 2
    assert got['terminated_requests_total{code="deadline"}'] == 0


@scenario_test
async def test_router_is_ready_after_reading_existing_records(world: MemoryWorld) -> None:
    router = await start_router(world)
    ready = await get(router, "/readyz")
    assert ready.status == 200
    assert ready.json["ready"]
    assert {"load_read", "fleet_read", "index_read"} <= set(ready.json)
    assert (await get(router, "/livez")).json == {"alive": True}
    assert (await figures(router))['kvlane_view_caught_up{view="load"}'] == 1
    assert (await get(router, "/nonsense")).status == 404


@scenario_test
async def test_failed_router_is_not_alive(world: MemoryWorld) -> None:
    router = await start_router(world)
    router._ctx.fail(RuntimeError("broken"))
    assert (await get(router, "/livez")).status == 503


async def test_router_listens_at_its_configured_address_only() -> None:
    log = MemoryLog(MemoryBroker(SystemClock(), lanes=2), "r1")
    await log.start()
    ctx = ProcessContext("r1", rng=random.Random(1))
    router = Router(log, memory_settings(status_port=0), ctx)
    await router.start()
    try:
        async with httpx.AsyncClient(base_url=router.url, timeout=20) as http:
            assert (await http.get("/readyz")).status_code == 200
            assert "kvlane_router_decisions_total" in (await http.get("/metrics")).text
    finally:
        await router.stop()
        await ctx.cancel_tasks()
        await log.close()


@scenario_test
async def test_load_of_workers_is_reported_until_it_is_released(world: MemoryWorld) -> None:
    router = await start_router(world)
    hand = FakeWorker(world, block_size=SIZE)
    await world.sleep(1)
    assert (await figures(router))['active_requests{worker="w1"}'] == 0
    append_record(world, REQUESTS, LONG)
    (assignment,) = await wait_for_items(world, lambda: hand.received(Assignment))
    await world.sleep(1)
    got = await figures(router)
    assert got['active_requests{worker="w1"}'] == 1
    assert (
        got['active_tokens{worker="w1"}']
        == got['pending_prefill_tokens{worker="w1"}']
        == len(TOKENS)
    )
    assert got["unconfirmed_assignments"] == 0
    page = (await get(router, "/metrics")).content.decode()
    assert parse_view("r1", page).figures.loads == {"w1": LoadFigures(1, len(TOKENS), len(TOKENS))}
    hand.finish(hand.start(assignment), "stop")
    await world.sleep(1)
    got = await figures(router)
    assert got['active_requests{worker="w1"}'] == got['active_tokens{worker="w1"}'] == 0
    assert parse_view("r1", (await get(router, "/metrics")).content.decode()).is_idle
