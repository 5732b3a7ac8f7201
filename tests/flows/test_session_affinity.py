"""Sessions over HTTP: where their requests go, and when that is over."""

from __future__ import annotations

from tests.towns import Town, session, stopped
from tests.worlds import World, in_world


@in_world
async def test_a_session_stays_where_it_began(world: World) -> None:
    town = await Town.found(world, ("w1", "w2", "w3"), policy="round_robin")
    first = await town.placed(**session())
    for _ in range(4):
        assert (await town.placed(**session(action="bind"))).worker == first.worker
    answer = await town.say({"x-session-id": "s"}).done()
    assert town.decision(answer).worker == first.worker
    others = {(await town.placed()).worker for _ in range(3)}
    assert others == {"w1", "w2", "w3"}


@in_world
async def test_a_session_ends_when_it_is_closed(world: World) -> None:
    town = await Town.found(world, ("w1", "w2", "w3"), policy="round_robin")
    first = await town.placed(**session(action="open"))
    closing = await town.placed(**session(action="close"))
    assert closing.worker == first.worker
    assert closing.session is not None
    assert closing.session.closes
    after = await town.placed(**session())
    assert after.session is not None
    assert after.session.bound_worker == ""


@in_world
async def test_a_session_that_opens_again_begins_anew(world: World) -> None:
    town = await Town.found(world, ("w1", "w2", "w3"), policy="round_robin")
    workers = {(await town.placed(**session(action="open"))).worker for _ in range(3)}
    assert workers == {"w1", "w2", "w3"}


@in_world
async def test_a_session_ends_when_it_is_idle(world: World) -> None:
    town = await Town.found(world, ("w1", "w2", "w3"), policy="round_robin")
    await town.placed(**session(timeout=30))
    await world.sleep(29)
    used = await town.placed(**session(timeout=30))
    assert used.session is not None
    assert used.session.bound_worker
    await world.sleep(31)
    late = await town.placed(**session(timeout=30))
    assert late.session is not None
    assert late.session.bound_worker == ""


@in_world
async def test_a_session_ends_with_its_worker(world: World) -> None:
    town = await Town.found(world, ("w1", "w2"), policy="round_robin")
    first = await town.placed(**session())
    await town.kill(first.worker)
    await world.sleep(20)
    after = await town.placed(**session())
    assert after.worker != first.worker
    assert (await town.placed(**session())).worker == after.worker


@in_world
async def test_all_routers_know_a_session(world: World) -> None:
    town = await Town.found(world, ("w1", "w2", "w3"), policy="round_robin")
    await town.route("r2", router_id="r2", policy="round_robin")
    await world.sleep(10)
    for name in ("a", "b"):
        placed = [await town.placed(**session(name)) for _ in range(12)]
        assert {decision.router for decision in placed} == {"-", "r2"}
        assert len({decision.worker for decision in placed}) == 1


@in_world
async def test_a_session_goes_elsewhere_when_its_worker_costs_too_much(world: World) -> None:
    town = await Town.found(world, (), policy="least_loaded", session_slack=1.5)
    await town.hire("w1", engine=stopped(world))
    first = town.say(**session())
    await world.until(lambda: len(town.decisions()) == 1)
    await town.hire("w2")
    stays = town.say(**session())
    await world.until(lambda: len(town.decisions()) == 2)
    assert town.decisions()[1].worker == "w1"
    assert (await town.placed(**session())).worker == "w2"
    for answer in (first, stays):
        answer.leave()
        await answer.task
