"""Tests of adapters that an engine loads and loses while it works, and the card with them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kvlane.app.engine.attached import server_engine
from kvlane.app.engine.attached.passthrough_engine import PassthroughEngine
from kvlane.app.engine.attached.server_engine import ServerAddress
from kvlane.app.engine.echo import EchoEngine
from kvlane.app.engine.validator import ValidatingEngine
from kvlane.streams.clock import SystemClock
from kvlane.streams.records import Assigned, WorkerCard
from kvlane.streams.request import Hints
from kvlane.streams.topics import LEDGER, REGISTRY, REQUESTS
from tests.flows.test_attached_faults import RealWorld, until
from tests.harness.fake_worker import PROMPT, append_record, read_records, start_router
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.model_servers import ScriptedServer, ServerExchange
from tests.harness.worker_harness import WorkerHarness

FOR_ADA = replace(PROMPT, model="echo", hints=Hints(lora_name="ada"))


class Adaptable(EchoEngine):
    """Has the adapters that its test says."""

    has: tuple[str, ...] = ()

    def adapters(self) -> tuple[str, ...]:
        return self.has


async def begun(world: MemoryWorld) -> tuple[WorkerHarness, Adaptable]:
    harness, engine = WorkerHarness(world), Adaptable(world.clock, 0.1)
    await harness.start(ValidatingEngine(engine))
    return harness, engine


def cards(harness: WorkerHarness) -> list[WorkerCard]:
    output: list[WorkerCard] = harness.records_of(REGISTRY, WorkerCard)
    return output


@scenario_test
async def test_loaded_and_unloaded_adapters_are_on_the_card_of_the_same_epoch(
    world: MemoryWorld,
) -> None:
    harness, engine = await begun(world)
    await world.sleep(5)
    got = len(cards(harness))
    engine.has = ("ada", "bob")
    await world.sleep(5)
    engine.has = ()
    await world.sleep(5)
    new = cards(harness)[got:]
    assert [card.config.lora_names for card in new] == [("ada", "bob"), None]
    assert {card.epoch for card in new} == {harness.epoch}


@scenario_test
async def test_requests_for_an_adapter_go_to_the_worker_that_loaded_it_later(
    world: MemoryWorld,
) -> None:
    harness, engine = await begun(world)
    await start_router(world)
    engine.has = ("ada",)
    await world.sleep(5)
    append_record(world, REQUESTS, FOR_ADA)
    await harness.wait_finished(FOR_ADA.id)
    (decision,) = read_records(world, LEDGER, Assigned, FOR_ADA.id)
    assert decision.worker == harness.name


@scenario_test
async def test_adapters_of_the_settings_are_on_the_card_of_an_engine_that_reports_none(
    world: MemoryWorld,
) -> None:
    harness = WorkerHarness(world)
    await harness.start(EchoEngine(world.clock, 0.1), adapters={"ada": "/adapters/ada"})
    assert cards(harness)[-1].config.lora_names == ("ada",)


@scenario_test
async def test_adapters_of_the_settings_are_not_on_the_card_of_a_server_without_them(
    world: MemoryWorld,
) -> None:
    harness = WorkerHarness(world)
    await harness.start(Adaptable(world.clock, 0.1), adapters={"ada": "/adapters/ada"})
    await world.sleep(5)
    assert {card.config.lora_names for card in cards(harness)} == {None}


@pytest.mark.parametrize("after", [["theirs", "ada"], ["theirs"]])
async def test_adapters_that_a_server_loads_at_runtime_are_on_the_card(
    after: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_engine, "ADAPTERS_POLL_S", 0.05)
    names = ["theirs", "bob"]

    async def models(exchange: ServerExchange) -> None:
        parents: list[dict[str, Any]] = [{}] + [{"parent": "theirs"}] * 9
        listed = [{"id": n} | parent for n, parent in zip(names, parents, strict=False)]
        await exchange.answer({"data": listed})

    async with ScriptedServer() as server:
        server.handlers["/v1/models"] = models
        harness = WorkerHarness(RealWorld())
        where = ServerAddress(server.url, read_timeout_s=5.0, start_timeout_s=5.0)
        engine = PassthroughEngine(SystemClock(), where, "chat", served_name="m")
        await harness.start(ValidatingEngine(engine), heartbeat_interval_s=0.1)
        assert cards(harness)[-1].config.lora_names == ("bob",)
        names[:] = after
        await until(lambda: cards(harness)[-1].config.lora_names == (tuple(after[1:]) or None))
        await harness.ctx.cancel_tasks()
