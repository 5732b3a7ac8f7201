"""Tests of the role on a worker's card and the routers' choice."""

from __future__ import annotations

from msgspec.structs import replace

from kvlane.app.engine.simulated.engine import SimulatedEngine
from kvlane.streams.records import Assigned, End, Finished, WorkerCard
from kvlane.streams.topics import LEDGER, REGISTRY, REQUESTS, RESPONSES
from tests.harness.fake_worker import PROMPT, append_record, read_records, start_router
from tests.harness.gateway_harness import GatewayHarness
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.worker_harness import WorkerHarness


def handing_over(world: MemoryWorld) -> SimulatedEngine:
    return SimulatedEngine(world.clock, model="echo")


@scenario_test
async def test_role_is_on_the_card_and_routers_apply_it(world: MemoryWorld) -> None:
    desks = {role: WorkerHarness(world, f"w-{role}") for role in ("prefill", "decode")}
    for role, worker_harness in desks.items():
        await worker_harness.start(handing_over(world), worker_role=role)
    cards = {card.id: card.role for card in desks["decode"].records_of(REGISTRY, WorkerCard)}
    assert cards == {"w-prefill": "prefill", "w-decode": "decode"}
    await start_router(world)
    for number in range(4):
        request_id = f"r{number}"
        append_record(world, REQUESTS, replace(PROMPT, id=request_id, model="echo"))
        await world.wait_until(
            lambda name=request_id: len(read_records(world, LEDGER, Finished, name)) == 2
        )
        decisions = read_records(world, LEDGER, Assigned, request_id)
        assert [(d.phase, d.worker) for d in decisions] == [
            ("prefill", "w-prefill"),
            ("decode", "w-decode"),
        ]
        assert all(len(d.candidates) == 1 for d in decisions)


@scenario_test
async def test_model_with_prefill_workers_only_is_not_served(world: MemoryWorld) -> None:
    worker_harness = await WorkerHarness.started(world, handing_over(world), worker_role="prefill")
    model = worker_harness.records_of(REGISTRY, WorkerCard)[-1].model
    harness = await GatewayHarness.open(world)
    await start_router(world)
    assert harness.models() == []
    append_record(world, REQUESTS, replace(PROMPT, model=model, deadline_s=5))
    await world.wait_until(lambda: bool(read_records(world, RESPONSES, End)))
    (end,) = read_records(world, RESPONSES, End)
    assert end.code in ("no_workers", "deadline")
