"""What a router says of itself over HTTP: that it lives, that it is ready, and its figures."""

from __future__ import annotations

import random

import httpx
import pytest
from msgspec.structs import replace

from app.bench.views import Lies, view_of
from app.lifetime import Lifetime
from app.router import Router
from streams.clock import SystemClock
from streams.codecs import pack_tokens
from streams.memory.broker import MemoryBroker
from streams.records import Assigned, Assignment, End, Hints, ModelCard, Request
from streams.topics import LEDGER, REGISTRY, REQUESTS, RESPONSES
from tests.exchange import Exchange
from tests.gateways import settings_of
from tests.routers import PROMPT, Hand, read, route, some, write
from tests.worlds import World, in_world

SIZE = 16
TOKENS = list(range(5 * SIZE + 4))
LONG = replace(PROMPT, token_ids=pack_tokens(TOKENS))


async def get(router: Router, path: str) -> Exchange:
    return await Exchange(router.http, "GET", path).done()


async def figures(router: Router) -> dict[str, float]:
    page = (await get(router, "/metrics")).content.decode()
    lines = [line.rpartition(" ") for line in page.splitlines() if not line.startswith("#")]
    return {name.removeprefix("kvlane_router_"): float(value) for name, _, value in lines}


@in_world
async def test_all_figures_are_there_as_zeros_before_the_first_request(world: World) -> None:
    told = await figures(await route(world))
    for policy in ("dynamo", "predictive", "least_loaded", "round_robin", "random",
                   "power_of_two", "session_hash", "direct"):  # fmt: skip
        assert told[f'decisions_total{{policy="{policy}"}}'] == 0
    for code in ("no_workers", "none_eligible", "all_busy", "pinned_gone", "pinned_busy",
                 "pin_not_allowed", "queue_full", "deadline"):  # fmt: skip
        assert told[f'outcomes_total{{code="{code}"}}'] == 0
    for name in ("queue_seconds_count", "prompt_tokens_count", "hit_rate_count", "queries_total",
                 "waiting_requests", "waiting_tokens", "waiting_bytes"):  # fmt: skip
        assert told[name] == 0


@in_world
async def test_a_decision_is_counted_with_its_prompt_its_hit_rate_and_its_wait(
    world: World,
) -> None:
    router = await route(world)
    write(world, REQUESTS, LONG)
    await world.sleep(3)
    Hand(world, block_size=SIZE).holds(TOKENS, SIZE)
    await some(world, lambda: read(world, LEDGER, Assigned))
    told = await figures(router)
    assert told['decisions_total{policy="predictive"}'] == 1
    assert told["prompt_tokens_sum"] == len(TOKENS)
    assert told["hit_rate_sum"] == pytest.approx(5 / 6), "the sixth block is not full"
    assert 3 <= told["queue_seconds_sum"] < 5


@in_world
async def test_a_second_attempt_is_a_decision_but_its_wait_began_with_the_first(
    world: World,
) -> None:
    router = await route(world)
    hand = Hand(world)
    write(world, REQUESTS, PROMPT)
    (assignment,) = await some(world, lambda: hand.told(Assignment))
    run = hand.start(assignment)
    hand.finish(run, "broken")
    await some(world, lambda: read(world, LEDGER, Assigned), 2)
    told = await figures(router)
    assert told['decisions_total{policy="predictive"}'] == 2
    assert told["queue_seconds_count"] == 1
    assert told["prompt_tokens_count"] == told["hit_rate_count"] == 1


@in_world
async def test_a_dry_run_is_in_prompt_lengths_and_hit_rates_and_is_no_decision(
    world: World,
) -> None:
    router = await route(world)
    Hand(world, block_size=SIZE).holds(TOKENS, SIZE)
    await world.sleep(1)
    write(world, REQUESTS, replace(LONG, annotations=("query_instance_id:",)))
    (end,) = await some(world, lambda: read(world, RESPONSES, End))
    assert end.placed is not None
    assert (end.placed.worker_id, list(end.placed.token_ids)) == ("w1", TOKENS)
    told = await figures(router)
    assert told["queries_total"] == 1
    assert told["prompt_tokens_sum"] == len(TOKENS)
    assert told["hit_rate_sum"] == pytest.approx(5 / 6)
    assert told['decisions_total{policy="predictive"}'] == told["queue_seconds_count"] == 0
    assert read(world, LEDGER, Assigned) == []


@in_world
async def test_what_waits_is_told_in_tokens_that_no_cache_has(world: World) -> None:
    world.append(REGISTRY, 0, ModelCard(name="demo", block_size=SIZE), key="model/demo")
    hand = Hand(world, block_size=SIZE)
    hand.holds(TOKENS[: 2 * SIZE], SIZE)
    hand.state = "draining"
    router = await route(world)
    write(world, REQUESTS, LONG)
    await world.sleep(2)
    told = await figures(router)
    assert told["waiting_requests"] == 1
    assert told["waiting_tokens"] == len(TOKENS) - 2 * SIZE
    hand.state = "ready"
    await some(world, lambda: read(world, LEDGER, Assigned))
    told = await figures(router)
    assert told["waiting_requests"] == told["waiting_tokens"] == 0


@in_world
async def test_ends_are_counted_by_code(world: World) -> None:
    router = await route(world)
    Hand(world)
    await world.sleep(1)
    for number, hints in enumerate(
        (Hints(backend_instance_id="w9"), Hints(lora_name="x"), Hints(lora_name="y"))
    ):
        write(world, REQUESTS, Request(id=f"r{number}", model="demo", hints=hints))
    await world.sleep(2)
    told = await figures(router)
    assert told['outcomes_total{code="pinned_gone"}'] == 1
    assert told['outcomes_total{code="none_eligible"}'] == 2
    assert told['outcomes_total{code="deadline"}'] == 0


@in_world
async def test_a_router_is_ready_when_it_has_read_what_there_was(world: World) -> None:
    router = await route(world)
    ready = await get(router, "/readyz")
    assert ready.status == 200
    assert ready.json["ready"]
    assert {"load_read", "fleet_read", "index_read"} <= set(ready.json)
    assert (await get(router, "/livez")).json == {"alive": True}
    assert (await figures(router))['kvlane_fold_caught_up{fold="load"}'] == 1
    assert (await get(router, "/nonsense")).status == 404


@in_world
async def test_a_router_that_failed_does_not_live(world: World) -> None:
    router = await route(world)
    router._life.fail(RuntimeError("broken"))
    assert (await get(router, "/livez")).status == 503


async def test_a_router_listens_where_its_settings_say_and_not_at_all_without() -> None:
    log = MemoryBroker(SystemClock(), lanes=2).connect("r1")
    await log.start()
    life = Lifetime("r1", rng=random.Random(1))
    router = Router(log, settings_of(router_port=0), life)
    await router.start()
    try:
        async with httpx.AsyncClient(base_url=router.url, timeout=20) as http:
            assert (await http.get("/readyz")).status_code == 200
            assert "kvlane_router_decisions_total" in (await http.get("/metrics")).text
    finally:
        await router.stop()
        await life.end()
        await log.close()


@in_world
async def test_what_lies_on_workers_is_told_until_it_is_over(world: World) -> None:
    router = await route(world)
    hand = Hand(world, block_size=SIZE)
    await world.sleep(1)
    assert (await figures(router))['open_runs{worker="w1"}'] == 0
    write(world, REQUESTS, LONG)
    (assignment,) = await some(world, lambda: hand.told(Assignment))
    await world.sleep(1)
    told = await figures(router)
    assert told['open_runs{worker="w1"}'] == 1
    assert told['open_tokens{worker="w1"}'] == told['prefill_tokens{worker="w1"}'] == len(TOKENS)
    assert told["undelivered_runs"] == 0
    page = (await get(router, "/metrics")).content.decode()
    assert view_of("r1", page).known.loads == {"w1": Lies(1, len(TOKENS), len(TOKENS))}
    hand.finish(hand.start(assignment), "stop")
    await world.sleep(1)
    told = await figures(router)
    assert told['open_runs{worker="w1"}'] == told['open_tokens{worker="w1"}'] == 0
    assert view_of("r1", (await get(router, "/metrics")).content.decode()).is_idle
