"""Tests of sessions over HTTP: the worker of their requests, and the end of a session."""

from __future__ import annotations

from tests.harness.cluster_harness import ClusterHarness, session_hint, slow_engine
from tests.harness.memory_world import MemoryWorld, scenario_test


@scenario_test
async def test_session_stays_where_it_began(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world, ("w1", "w2", "w3"), policy="round_robin")
    first = await cluster.wait_decision(**session_hint())
    for _ in range(4):
        assert (await cluster.wait_decision(**session_hint(action="bind"))).worker == first.worker
    answer = await cluster.complete_with({"x-session-id": "s"}).wait_done()
    assert cluster.decision(answer).worker == first.worker
    others = {(await cluster.wait_decision()).worker for _ in range(3)}
    assert others == {"w1", "w2", "w3"}


@scenario_test
async def test_session_ends_when_it_is_closed(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world, ("w1", "w2", "w3"), policy="round_robin")
    first = await cluster.wait_decision(**session_hint(action="open"))
    closing = await cluster.wait_decision(**session_hint(action="close"))
    assert closing.worker == first.worker
    assert closing.session is not None
    assert closing.session.closes
    after = await cluster.wait_decision(**session_hint())
    assert after.session is not None
    assert after.session.bound_worker == ""


@scenario_test
async def test_reopened_session_is_bound_again(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world, ("w1", "w2", "w3"), policy="round_robin")
    workers = {
        (await cluster.wait_decision(**session_hint(action="open"))).worker for _ in range(3)
    }
    assert workers == {"w1", "w2", "w3"}


@scenario_test
async def test_session_ends_when_it_is_idle(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world, ("w1", "w2", "w3"), policy="round_robin")
    await cluster.wait_decision(**session_hint(timeout=30))
    await world.sleep(29)
    used = await cluster.wait_decision(**session_hint(timeout=30))
    assert used.session is not None
    assert used.session.bound_worker
    await world.sleep(31)
    late = await cluster.wait_decision(**session_hint(timeout=30))
    assert late.session is not None
    assert late.session.bound_worker == ""


@scenario_test
async def test_session_ends_with_its_worker(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world, ("w1", "w2"), policy="round_robin")
    first = await cluster.wait_decision(**session_hint())
    await cluster.kill(first.worker)
    await world.sleep(20)
    after = await cluster.wait_decision(**session_hint())
    assert after.worker != first.worker
    assert (await cluster.wait_decision(**session_hint())).worker == after.worker


@scenario_test
async def test_all_routers_share_a_session(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(world, ("w1", "w2", "w3"), policy="round_robin")
    await cluster.start_router("r2", router_id="r2", policy="round_robin")
    await world.sleep(10)
    for name in ("a", "b"):
        placed = [await cluster.wait_decision(**session_hint(name)) for _ in range(12)]
        assert {decision.router for decision in placed} == {"-", "r2"}
        assert len({decision.worker for decision in placed}) == 1


@scenario_test
async def test_session_goes_elsewhere_when_its_worker_costs_too_much(world: MemoryWorld) -> None:
    cluster = await ClusterHarness.start(
        world, (), policy="least_loaded", session_affinity_tolerance=1.5
    )
    await cluster.start_worker("w1", engine=slow_engine(world))
    first = cluster.complete_with(**session_hint())
    await world.wait_until(lambda: len(cluster.decisions()) == 1)
    await cluster.start_worker("w2")
    stays = cluster.complete_with(**session_hint())
    await world.wait_until(lambda: len(cluster.decisions()) == 2)
    assert cluster.decisions()[1].worker == "w1"
    assert (await cluster.wait_decision(**session_hint())).worker == "w2"
    for answer in (first, stays):
        answer.disconnect()
        await answer.task
