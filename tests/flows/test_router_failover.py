"""The router moves requests on when workers, runs or routers fail."""

from __future__ import annotations

import asyncio

from streams.codecs import decode, unpack_tokens
from streams.memory.broker import Fate
from streams.ports import Partition
from streams.records import (
    Assigned,
    Assignment,
    CancelRun,
    End,
    Ended,
    Fence,
    Fencing,
    GuidedDecoding,
    Lost,
    Request,
    RunProgress,
    SamplingOptions,
    StopConditions,
    Tombstone,
    Usage,
)
from streams.topics import (
    ASSIGNMENTS,
    LEDGER,
    REGISTRY,
    REQUESTS,
    RESPONSES,
)
from tests.routers import PROMPT, Hand, chunk, never_read, read, route, some, write
from tests.worlds import World, in_world


@in_world
async def test_a_lost_worker_is_declared_and_its_stream_goes_on_elsewhere(world: World) -> None:
    first = Hand(world, "w1")
    await route(world)
    write(world, REQUESTS, PROMPT)
    (assignment,) = await some(world, lambda: first.told(Assignment))
    first.start(assignment)
    write(world, RESPONSES, chunk(0, 7, 8, text="ab", chars=2))
    second = Hand(world, "w2")
    first.beating.cancel()
    (again,) = await some(world, lambda: second.told(Assignment))
    assert list(unpack_tokens(again.taken)) == [7, 8]
    assert again.taken_chars == 2
    assert again.attempt == 1
    assert again.deadline_ms == assignment.deadline_ms
    (lost,) = first.told(Lost)
    assert lost.epoch == first.epoch
    assert lost.silent_ms > 5000
    assert [f.attempt for f in read(world, RESPONSES, Fence)] == [1]
    assert [f.reason for f in read(world, LEDGER, Fencing)] == ["lost"]
    cards = [decode(r) for r in world.records(REGISTRY, 0)]
    assert Tombstone(key="worker/w1", epoch=first.epoch) in cards


@in_world
async def test_chunks_after_the_fence_are_not_carried_over(world: World) -> None:
    first = Hand(world, "w1")
    await route(world)
    write(world, REQUESTS, PROMPT)
    run = first.start((await some(world, lambda: first.told(Assignment)))[0])
    write(world, RESPONSES, chunk(0, 7))
    write(world, RESPONSES, Fence(id="a", attempt=1))
    write(world, RESPONSES, chunk(1, 8, seq=1))
    second = Hand(world, "w2")
    first.finish(run, "broken")
    (again,) = await some(world, lambda: second.told(Assignment))
    assert list(unpack_tokens(again.taken)) == [7]


@in_world
async def test_a_stream_that_had_ended_before_the_fence_is_closed_as_seen(world: World) -> None:
    worker = Hand(world)
    await route(world)
    write(world, REQUESTS, PROMPT)
    worker.start((await some(world, lambda: worker.told(Assignment)))[0])
    write(world, RESPONSES, chunk(0, 7, finish_reason="stop"))
    worker.beating.cancel()
    assert [e.code for e in await some(world, lambda: read(world, LEDGER, Ended))] == ["seen"]
    assert read(world, RESPONSES, End) == []
    assert len(worker.told(Assignment)) == 1


@in_world
async def test_an_answer_that_was_whole_but_for_its_last_chunk_ends_as_length(world: World) -> None:
    worker = Hand(world)
    await route(world)
    limited = Request(
        id="a", model="demo", token_ids=PROMPT.token_ids, stop=StopConditions(max_tokens=2)
    )
    write(world, REQUESTS, limited)
    run = worker.start((await some(world, lambda: worker.told(Assignment)))[0])
    write(world, RESPONSES, chunk(0, 7, 8))
    worker.finish(run, "broken")
    (end,) = await some(world, lambda: read(world, RESPONSES, End))
    assert end.code == "length"
    assert end.usage == Usage(prompt_tokens=3, completion_tokens=2)
    assert len(worker.told(Assignment)) == 1


@in_world
async def test_a_request_that_fails_on_every_worker_ends_with_attempts(world: World) -> None:
    worker = Hand(world)
    await route(world, max_attempts=2)
    write(world, REQUESTS, PROMPT)
    for n in range(2):
        run = worker.start((await some(world, lambda: worker.told(Assignment), n + 1))[n])
        worker.finish(run, "broken")
    (end,) = await some(world, lambda: read(world, RESPONSES, End))
    assert end.code == "attempts"
    assert len(worker.told(Assignment)) == 2


@in_world
async def test_an_assignment_that_got_lost_is_found_and_made_again(world: World) -> None:
    worker = Hand(world)
    await route(world)
    write(world, REQUESTS, PROMPT)
    (_assignment,) = await some(world, lambda: worker.told(Assignment))
    worker.slot_offset = 1  # read past it, and never took it
    await some(world, lambda: worker.told(Assignment), 2)
    assert [f.reason for f in read(world, LEDGER, Fencing)] == ["not_started"]


@in_world
async def test_a_run_that_is_listed_but_slow_to_start_is_left_alone(world: World) -> None:
    worker = Hand(world)
    await route(world)
    write(world, REQUESTS, PROMPT)
    await some(world, lambda: worker.told(Assignment))
    worker.running = [RunProgress(id="a", attempt=0, phase="aggregated")]
    worker.slot_offset = 1
    await world.sleep(20)
    assert len(worker.told(Assignment)) == 1


@in_world
async def test_a_run_that_its_worker_forgot_is_restarted(world: World) -> None:
    worker = Hand(world)
    await route(world)
    write(world, REQUESTS, PROMPT)
    worker.start((await some(world, lambda: worker.told(Assignment)))[0])
    await world.sleep(3)
    worker.running = []
    await some(world, lambda: worker.told(Assignment), 2)
    assert [f.reason for f in read(world, LEDGER, Fencing)] == ["broken"]


@in_world
async def test_a_run_that_is_looked_for_and_turns_out_broken_is_restarted(world: World) -> None:
    worker, other = Hand(world), Hand(world, "w2")
    other.state = "draining"
    await route(world)
    write(world, REQUESTS, PROMPT)
    (assignment,) = await some(world, lambda: worker.told(Assignment))
    await world.sleep(10)  # it does not read its slot, and the router waits for it to do so
    run = {"id": "a", "attempt": 0, "phase": "aggregated", "worker": "w1"}
    other.state = "ready"
    worker.finish(run | {"epoch": worker.epoch}, "broken")
    (again,) = await some(world, lambda: other.told(Assignment))
    assert again.attempt == assignment.attempt + 1


@in_world
async def test_a_superseded_run_that_goes_on_is_cancelled_and_an_unknown_one_is_not(
    world: World,
) -> None:
    first, second = Hand(world, "w1"), Hand(world, "w2")
    await route(world)
    write(world, REQUESTS, PROMPT)
    await world.until(lambda: len(first.told(Assignment)) + len(second.told(Assignment)) == 1)
    worker = first if first.told(Assignment) else second
    run = worker.start(worker.told(Assignment)[0])
    worker.finish(run, "broken")
    worker.running = [
        RunProgress(id="a", attempt=0, phase="aggregated"),
        RunProgress(id="strange", attempt=0, phase="aggregated"),
    ]
    cancels = await some(world, lambda: worker.told(CancelRun), 2)
    assert {(c.id, c.attempt) for c in cancels} == {("a", 0)}


@in_world
async def test_a_run_is_not_cancelled_before_its_fence_stands(world: World) -> None:
    """Its last word would be the end of a request that nobody cancelled."""
    worker = Hand(world)
    await route(world)
    write(world, REQUESTS, PROMPT)
    (assignment,) = await some(world, lambda: worker.told(Assignment))
    worker.start(assignment)
    world.faults.next_fates(RESPONSES, *[Fate.LOST] * 1000)
    write(world, LEDGER, Fencing(id="a", attempt=1, reason="broken"))
    await world.sleep(10.0)
    assert not read(world, RESPONSES, Fence)
    assert not worker.told(CancelRun)
    world.faults.fates.clear()
    cancels = await some(world, lambda: worker.told(CancelRun))
    assert {(c.id, c.attempt) for c in cancels} == {("a", 0)}
    assert read(world, RESPONSES, Fence)


@in_world
async def test_a_fenced_run_is_cancelled_while_its_request_waits_for_a_place(world: World) -> None:
    worker = Hand(world)
    await route(world)
    write(world, REQUESTS, PROMPT)
    (assignment,) = await some(world, lambda: worker.told(Assignment))
    worker.start(assignment)
    worker.state = "draining"  # goes on with what it has, takes nothing
    await world.sleep(2.0)
    write(world, LEDGER, Fencing(id="a", attempt=1, reason="broken"))
    cancels = await some(world, lambda: worker.told(CancelRun), 2)
    assert {(c.id, c.attempt) for c in cancels} == {("a", 0)}
    assert len(worker.told(Assignment)) == 1


@in_world
async def test_another_router_takes_over_where_the_first_one_died(world: World) -> None:
    """Between Assigned and Assignment: only the ledger knows of the decision."""
    worker = Hand(world)
    first = await route(world, "r1")
    world.faults.next_fates(ASSIGNMENTS, *[Fate.LOST] * 1000)
    write(world, REQUESTS, PROMPT)
    await some(world, lambda: read(world, LEDGER, Assigned))
    await first.stop()
    await first._life.end()
    world.faults.fates.clear()
    worker.slot_offset = 0
    await route(world, "r2")
    (assignment,) = await some(world, lambda: worker.told(Assignment))
    assert assignment.attempt == 1
    assert assignment.request == PROMPT


@in_world
async def test_held_requests_of_a_dead_router_come_back(world: World) -> None:
    first = await route(world, "r1")
    write(world, REQUESTS, PROMPT)
    await world.sleep(2)
    first._log.cut()  # type: ignore[attr-defined]
    await asyncio.wait_for(first._life.end(), 5)
    await route(world, "r2")
    worker = Hand(world)
    await some(world, lambda: worker.told(Assignment))


@in_world
async def test_routers_that_have_read_the_same_hold_the_same(world: World) -> None:
    workers = [Hand(world, f"w{n}") for n in range(3)]
    routers = [await route(world, f"r{n}") for n in range(3)]
    for n in range(20):
        write(world, REQUESTS, Request(id=f"a{n}", model="demo", token_ids=PROMPT.token_ids))
    await world.until(lambda: sum(len(w.told(Assignment)) for w in workers) == 20)
    workers[0].beating.cancel()
    await world.sleep(20)
    for lane in range(world.lanes):
        source = Partition(LEDGER, lane)
        assert len({r._load.position(source) for r in routers}) == 1
        assert len({r._load.state_hash(source) for r in routers}) == 1
    assert all(not r._context._undelivered for r in routers)


@in_world
async def test_an_answer_that_had_reached_its_end_of_text_ends_as_stop(world: World) -> None:
    worker = Hand(world)
    await route(world)
    write(world, REQUESTS, Request(id="a", model="demo", eos_token_ids=(8,)))
    run = worker.start((await some(world, lambda: worker.told(Assignment)))[0])
    write(world, RESPONSES, chunk(0, 7, 8))
    worker.finish(run, "broken")
    (end,) = await some(world, lambda: read(world, RESPONSES, End))
    assert end.code == "stop"
    assert len(worker.told(Assignment)) == 1


@in_world
async def test_an_answer_of_a_prescribed_form_is_not_continued_in_its_middle(
    world: World,
) -> None:
    worker = Hand(world)
    await route(world)
    guided = SamplingOptions(guided_decoding=GuidedDecoding(regex="a*"))
    write(world, REQUESTS, Request(id="a", model="demo", sampling=guided))
    run = worker.start((await some(world, lambda: worker.told(Assignment)))[0])
    worker.finish(run, "broken")
    run = worker.start((await some(world, lambda: worker.told(Assignment), 2))[1])
    write(world, RESPONSES, chunk(0, 7, attempt=1))
    worker.finish(run, "broken")
    (end,) = await some(world, lambda: read(world, RESPONSES, End))
    assert end.code == "lost"
    assert "form" in end.message


@in_world
async def test_a_request_that_cannot_be_read_back_in_its_time_is_lost(world: World) -> None:
    worker = Hand(world)
    router = await route(world)
    write(world, REQUESTS, PROMPT)
    run = worker.start((await some(world, lambda: worker.told(Assignment)))[0])
    router._context.scanner.fetch = never_read  # type: ignore[method-assign]
    worker.finish(run, "broken")
    await world.sleep(95)
    assert read(world, RESPONSES, End) == []
    (end,) = await some(world, lambda: read(world, RESPONSES, End))
    assert end.code == "lost"
    assert "could not be read" in end.message
