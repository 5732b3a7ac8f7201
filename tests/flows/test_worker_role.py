"""What a worker is there for, from its setting to the routers' choice."""

from __future__ import annotations

from msgspec.structs import replace

from streams.records import Assigned, End, WorkerCard
from streams.topics import LEDGER, REGISTRY, REQUESTS, RESPONSES
from tests.desks import Desk
from tests.gateways import House
from tests.routers import PROMPT, read, route, write
from tests.worlds import World, in_world


@in_world
async def test_a_role_stands_on_the_card_and_routers_go_by_it(world: World) -> None:
    desks = {role: Desk(world, f"w-{role}") for role in ("prefill", "decode")}
    for role, desk in desks.items():
        await desk.start(worker_role=role)
    cards = {card.id: card.role for card in desks["decode"].said(REGISTRY, WorkerCard)}
    assert cards == {"w-prefill": "prefill", "w-decode": "decode"}
    await route(world)
    for number in range(4):
        request_id = f"r{number}"
        write(world, REQUESTS, replace(PROMPT, id=request_id, model="echo"))
        await desks["decode"].finished(request_id)
        (decision,) = read(world, LEDGER, Assigned, request_id)
        assert decision.worker == "w-decode"
        assert [candidate.worker for candidate in decision.candidates] == ["w-decode"]


@in_world
async def test_a_model_with_prefill_workers_only_is_not_served(world: World) -> None:
    desk = Desk(world)
    await desk.start(worker_role="prefill")
    model = desk.said(REGISTRY, WorkerCard)[-1].model
    house = await House.open(world)
    await route(world)
    assert house.models() == []
    write(world, REQUESTS, replace(PROMPT, model=model, deadline_s=5))
    await world.until(lambda: bool(read(world, RESPONSES, End)))
    (end,) = read(world, RESPONSES, End)
    assert end.code in ("no_workers", "deadline")
