"""The router takes requests in: assigned, held, refused, ended."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from app.router import Router
from streams.records import (
    Assigned,
    Assignment,
    End,
    Ended,
    Finished,
    Request,
)
from streams.topics import (
    LEDGER,
    REQUESTS,
    RESPONSES,
    lane_of,
)
from tests.routers import PROMPT, Hand, chunk, read, route, some, write
from tests.worlds import World, in_world


@in_world
async def test_a_request_is_assigned_and_the_decision_stands_in_the_ledger(world: World) -> None:
    worker = Hand(world)
    await route(world)
    write(world, REQUESTS, PROMPT)
    (assignment,) = await some(world, lambda: worker.told(Assignment))
    (decision,) = read(world, LEDGER, Assigned)
    assert assignment.request == PROMPT
    assert assignment.epoch == decision.epoch == worker.epoch
    assert decision.origin == assignment.origin
    assert decision.origin.offset == 0
    assert 99 < assignment.budget_s <= 100
    assert [c.worker for c in decision.candidates] == ["w1"]
    assert decision.prompt_tokens == 3


@in_world
async def test_a_decision_says_how_far_its_router_had_read_the_ledger(world: World) -> None:
    Hand(world)
    await route(world)
    write(world, REQUESTS, PROMPT)
    (first,) = await some(world, lambda: read(world, LEDGER, Assigned))
    assert first.known_ms == 0, "nothing stood there"
    await world.sleep(5)
    write(world, REQUESTS, replace(PROMPT, id="b"))
    (second,) = await some(world, lambda: read(world, LEDGER, Assigned, "b"))
    stood = [record.timestamp for record in world.everywhere(LEDGER)]
    assert second.known_ms == stood[0], "what stands behind it was not read"


@in_world
async def test_requests_spread_over_the_workers_at_once(world: World) -> None:
    workers = [Hand(world, f"w{n}") for n in range(4)]
    await route(world)
    for n in range(8):
        write(world, REQUESTS, Request(id=f"a{n}", model="demo", token_ids=PROMPT.token_ids))
    await world.until(lambda: sum(len(w.told(Assignment)) for w in workers) == 8)
    assert [len(w.told(Assignment)) for w in workers] == [2, 2, 2, 2]


@in_world
async def test_an_id_that_comes_again_is_not_run_again(world: World) -> None:
    worker = Hand(world)
    await route(world)
    write(world, REQUESTS, PROMPT)
    write(world, REQUESTS, PROMPT)
    worker.start((await some(world, lambda: worker.told(Assignment)))[0])
    write(world, REQUESTS, PROMPT)
    await world.sleep(5)
    assert len(worker.told(Assignment)) == 1
    assert read(world, RESPONSES, End) == []


@in_world
async def test_a_request_waits_for_a_worker(world: World) -> None:
    await route(world)
    write(world, REQUESTS, PROMPT)
    await world.sleep(10)
    worker = Hand(world)
    await some(world, lambda: worker.told(Assignment))


@in_world
async def test_a_request_that_no_worker_takes_is_ended_at_its_deadline(world: World) -> None:
    await route(world)
    write(world, REQUESTS, Request(id="a", deadline_s=5))
    await world.sleep(4.5)
    assert read(world, RESPONSES, End) == []
    (end,) = await some(world, lambda: read(world, RESPONSES, End))
    assert end.code == "no_workers"
    assert [e.code for e in await some(world, lambda: read(world, LEDGER, Ended))] == ["no_workers"]


@in_world
async def test_a_request_read_past_its_deadline_is_never_run(world: World) -> None:
    worker = Hand(world)
    write(world, REQUESTS, Request(id="a", model="demo", deadline_s=5))
    await world.sleep(6)
    await route(world)
    (end,) = await some(world, lambda: read(world, RESPONSES, End))
    assert end.code == "deadline"
    assert worker.told(Assignment) == []


@in_world
async def test_beyond_its_bound_the_router_refuses_at_once(world: World) -> None:
    await route(world, held_requests=1)
    write(world, REQUESTS, PROMPT)
    await world.sleep(1)
    write(world, REQUESTS, Request(id="b", model="demo"))
    (end,) = await some(world, lambda: read(world, RESPONSES, End, "b"))
    assert end.code == "queue_full"
    assert end.retry_after_s
    assert read(world, RESPONSES, End) == []


@in_world
async def test_a_full_worker_is_asked_again_and_costs_no_attempt(world: World) -> None:
    worker = Hand(world)
    await route(world, max_attempts=1)
    write(world, REQUESTS, PROMPT)
    for n in range(4):
        assignments = await some(world, lambda: worker.told(Assignment), n + 1)
        run = {"id": "a", "attempt": n, "phase": "aggregated", "worker": "w1"}
        worker.finish(run | {"epoch": worker.epoch}, "worker_full", retryable=True)
    assert [a.attempt for a in assignments] == [0, 1, 2, 3]
    assert read(world, RESPONSES, End) == []


@in_world
async def test_a_refusal_without_a_decision_does_not_make_an_id_known(world: World) -> None:
    """The router before this one died after the Assignment and before its Assigned."""
    worker = Hand(world)
    run = {"id": "a", "attempt": 0, "phase": "aggregated", "worker": "w1", "epoch": worker.epoch}
    write(world, LEDGER, Finished(code="worker_full", retryable=True, **run))
    write(world, REQUESTS, PROMPT)
    await route(world)
    assert await some(world, lambda: worker.told(Assignment))


@in_world
async def test_an_answer_is_looked_for_from_where_its_lane_ended_when_it_was_taken_over(
    world: World,
) -> None:
    Hand(world)
    for n in range(10):
        world.append(RESPONSES, lane_of("a", world.lanes), chunk(n), key="other")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "_follow_response_ends", lambda _: asyncio.sleep(1000))
        await route(world)
    write(world, REQUESTS, PROMPT)
    (decision,) = await some(world, lambda: read(world, LEDGER, Assigned))
    assert decision.responses_from == 10
