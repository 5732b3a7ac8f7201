"""Adapters that an engine gets and loses while it works, and the card that says so."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from app.engine.attached import beside
from app.engine.attached.beside import Attachment
from app.engine.attached.passing import PassingEngine
from app.engine.echo import EchoEngine
from app.engine.validator import ValidatedEngine
from streams.clock import SystemClock
from streams.records import Assigned, Hints, WorkerCard
from streams.topics import LEDGER, REGISTRY, REQUESTS
from tests.desks import Desk
from tests.flows.test_attached_faults import RealWorld, until
from tests.routers import PROMPT, read, route, write
from tests.servers import Exchange, OpenAiServer
from tests.worlds import World, in_world

FOR_ADA = replace(PROMPT, model="echo", hints=Hints(lora_name="ada"))


class Adaptable(EchoEngine):
    """Has the adapters that its test says."""

    has: tuple[str, ...] = ()

    def adapters(self) -> tuple[str, ...]:
        return self.has


async def begun(world: World) -> tuple[Desk, Adaptable]:
    desk, engine = Desk(world), Adaptable(world.clock, 0.1)
    await desk.start(ValidatedEngine(engine))
    return desk, engine


def cards(desk: Desk) -> list[WorkerCard]:
    said: list[WorkerCard] = desk.said(REGISTRY, WorkerCard)
    return said


@in_world
async def test_an_adapter_that_comes_and_goes_is_on_the_card_of_the_same_life(world: World) -> None:
    desk, engine = await begun(world)
    await world.sleep(5)
    told = len(cards(desk))
    engine.has = ("ada", "bob")
    await world.sleep(5)
    engine.has = ()
    await world.sleep(5)
    new = cards(desk)[told:]
    assert [card.config.lora_names for card in new] == [("ada", "bob"), None]
    assert {card.epoch for card in new} == {desk.epoch}


@in_world
async def test_requests_for_an_adapter_go_where_it_was_loaded_since(world: World) -> None:
    desk, engine = await begun(world)
    await route(world)
    engine.has = ("ada",)
    await world.sleep(5)
    write(world, REQUESTS, FOR_ADA)
    await desk.finished(FOR_ADA.id)
    (decision,) = read(world, LEDGER, Assigned, FOR_ADA.id)
    assert decision.worker == desk.name


@pytest.mark.parametrize("after", [["theirs", "ada"], ["theirs"]])
async def test_what_a_server_loads_while_it_runs_is_on_the_card(
    after: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "ADAPTERS_S", 0.05)
    names = ["theirs", "bob"]

    async def models(exchange: Exchange) -> None:
        parents: list[dict[str, Any]] = [{}] + [{"parent": "theirs"}] * 9
        listed = [{"id": n} | parent for n, parent in zip(names, parents, strict=False)]
        await exchange.answer({"data": listed})

    async with OpenAiServer() as server:
        server.handlers["/v1/models"] = models
        desk = Desk(RealWorld())
        where = Attachment(server.url, silence_s=5.0, start_s=5.0)
        engine = PassingEngine(SystemClock(), where, "chat", serves_as="m")
        await desk.start(ValidatedEngine(engine), heartbeat_s=0.1)
        assert cards(desk)[-1].config.lora_names == ("bob",)
        names[:] = after
        await until(lambda: cards(desk)[-1].config.lora_names == (tuple(after[1:]) or None))
        await desk.life.end()
