"""The router ends what its clients no longer want, and what was refused before it."""

from __future__ import annotations

from msgspec.structs import replace

from streams.records import (
    Assignment,
    Cancel,
    CancelRun,
    End,
    Ended,
    Fence,
    Refused,
)
from streams.topics import (
    LEDGER,
    REQUESTS,
    RESPONSES,
    lane_of,
)
from tests.routers import PROMPT, Hand, never_read, read, route, some, write
from tests.worlds import World, in_world


@in_world
async def test_a_held_request_can_be_cancelled(world: World) -> None:
    await route(world)
    write(world, REQUESTS, PROMPT)
    await world.sleep(1)
    write(world, REQUESTS, Cancel(id="a"))
    (end,) = await some(world, lambda: read(world, RESPONSES, End))
    assert end.code == "cancelled"
    worker = Hand(world)
    await world.sleep(3)
    assert worker.told(Assignment) == []


@in_world
async def test_a_request_and_its_cancel_of_one_poll_do_not_wait_for_a_worker(world: World) -> None:
    write(world, REQUESTS, PROMPT)
    offset = write(world, REQUESTS, Cancel(id="a"))
    await route(world)
    await world.until(lambda: bool(read(world, RESPONSES, End)), within_s=2)
    assert [e.code for e in read(world, RESPONSES, End)] == ["cancelled"]
    group = world.broker.group(REQUESTS, "router")
    await world.until(lambda: group.committed.get(lane_of("a", world.lanes)) == offset + 1)


@in_world
async def test_a_cancel_is_taken_before_what_came_earlier_and_waits_as_well(world: World) -> None:
    write(world, REQUESTS, PROMPT)
    write(world, REQUESTS, Refused(id="a", code="invalid"))
    write(world, REQUESTS, Cancel(id="a"))
    await route(world)
    await world.until(lambda: bool(read(world, RESPONSES, End)), within_s=2)
    assert [e.code for e in read(world, RESPONSES, End)] == ["cancelled"]


@in_world
async def test_a_request_that_waits_for_another_worker_can_be_cancelled(world: World) -> None:
    worker = Hand(world)
    await route(world)
    write(world, REQUESTS, PROMPT)
    run = worker.start((await some(world, lambda: worker.told(Assignment)))[0])
    worker.state = "draining"
    worker.beat()
    worker.finish(run, "broken")
    await some(world, lambda: read(world, RESPONSES, Fence))
    await world.sleep(1)
    write(world, REQUESTS, Cancel(id="a"))
    await world.until(lambda: bool(read(world, RESPONSES, End)), within_s=2)
    assert [e.code for e in read(world, RESPONSES, End)] == ["cancelled"]


@in_world
async def test_a_cancel_that_comes_while_a_request_is_fenced_is_not_held_with_it(
    world: World,
) -> None:
    worker = Hand(world)
    await route(world)
    write(world, REQUESTS, PROMPT)
    run = worker.start((await some(world, lambda: worker.told(Assignment)))[0])
    worker.state = "draining"
    worker.beat()
    world.faults.slow["append"] = 0.5
    worker.finish(run, "broken")
    await world.sleep(0.6)  # Fencing stands, Fence does not
    write(world, REQUESTS, Cancel(id="a"))
    await world.until(lambda: bool(read(world, RESPONSES, End)), within_s=5)
    assert [e.code for e in read(world, RESPONSES, End)] == ["cancelled"]


@in_world
async def test_a_cancel_does_not_wait_for_a_heartbeat_that_never_comes(world: World) -> None:
    worker = Hand(world)
    await route(world)
    write(world, REQUESTS, PROMPT)
    await some(world, lambda: worker.told(Assignment))
    await world.sleep(10)  # it never reads its slot: the router waits to see whether it has
    write(world, REQUESTS, Cancel(id="a"))
    await world.until(lambda: bool(read(world, RESPONSES, End)), within_s=2)
    assert [e.code for e in read(world, RESPONSES, End)] == ["cancelled"]


@in_world
async def test_a_cancel_that_comes_before_the_wait_for_a_heartbeat_begins(world: World) -> None:
    worker = Hand(world)
    await route(world)
    write(world, REQUESTS, PROMPT)
    await some(world, lambda: worker.told(Assignment))
    world.faults.slow["offsets"] = 1.0  # the first questions of the search take 4 seconds
    await world.sleep(4)
    write(world, REQUESTS, Cancel(id="a"))
    world.faults.slow.clear()
    await world.until(lambda: bool(read(world, RESPONSES, End)), within_s=8)
    assert [e.code for e in read(world, RESPONSES, End)] == ["cancelled"]


@in_world
async def test_a_cancel_does_not_wait_for_a_log_that_cannot_be_read(world: World) -> None:
    worker = Hand(world)
    router = await route(world)
    write(world, REQUESTS, PROMPT)
    run = worker.start((await some(world, lambda: worker.told(Assignment)))[0])
    router._context.scanner.fetch = never_read  # type: ignore[method-assign]
    worker.finish(run, "broken")
    await some(world, lambda: read(world, RESPONSES, Fence))
    await world.sleep(1)
    write(world, REQUESTS, Cancel(id="a"))
    await world.until(lambda: bool(read(world, RESPONSES, End)), within_s=1)
    assert [e.code for e in read(world, RESPONSES, End)] == ["cancelled"]


@in_world
async def test_two_cancels_at_once_of_a_held_request_are_both_done(world: World) -> None:
    await route(world)
    offset = write(world, REQUESTS, PROMPT)
    await world.sleep(1)
    for _ in range(2):
        write(world, REQUESTS, Cancel(id="a"))
    await some(world, lambda: read(world, LEDGER, Ended))
    group = world.broker.group(REQUESTS, "router")
    await world.until(lambda: group.committed.get(lane_of("a", world.lanes)) == offset + 3)


@in_world
async def test_a_running_request_is_cancelled_for_reader_worker_and_ledger(world: World) -> None:
    worker = Hand(world)
    await route(world)
    write(world, REQUESTS, PROMPT)
    worker.start((await some(world, lambda: worker.told(Assignment)))[0])
    write(world, REQUESTS, Cancel(id="a"))
    await some(world, lambda: read(world, LEDGER, Ended))
    assert [e.code for e in read(world, RESPONSES, End)] == ["cancelled"]
    assert next((c.id, c.attempt) for c in worker.told(CancelRun)) == ("a", 0)


@in_world
async def test_a_cancel_of_an_unknown_id_leaves_no_trace(world: World) -> None:
    await route(world)
    write(world, REQUESTS, Cancel(id="a"))
    await world.sleep(3)
    assert read(world, RESPONSES, End) == []
    assert read(world, LEDGER, Ended) == []


@in_world
async def test_a_refused_prompt_is_ended_visibly_unless_its_id_is_known(world: World) -> None:
    worker = Hand(world)
    await route(world)
    write(world, REQUESTS, Refused(id="b", code="invalid", message="messages: is empty"))
    (end,) = await some(world, lambda: read(world, RESPONSES, End, "b"))
    assert (end.code, end.message) == ("invalid", "messages: is empty")
    write(world, REQUESTS, PROMPT)
    await some(world, lambda: worker.told(Assignment))
    write(world, REQUESTS, Refused(id="a", code="invalid"))
    await world.sleep(1)
    assert read(world, RESPONSES, End) == []


@in_world
async def test_a_cancel_is_exact_however_full_the_queue_is(world: World) -> None:
    """It takes effect at once, on its request alone, and its place goes to the next one."""
    worker = Hand(world)
    worker.state = "draining"
    await route(world, held_requests=3)
    for name in ("h0", "h1", "h2", "too-many"):
        write(world, REQUESTS, replace(PROMPT, id=name))
        await world.sleep(0.1)
    (refused,) = await some(world, lambda: read(world, RESPONSES, End, "too-many"))
    assert refused.code == "queue_full"
    began = world.clock.now()
    write(world, REQUESTS, Cancel(id="h1", reason="enough"))
    (end,) = await some(world, lambda: read(world, RESPONSES, End, "h1"))
    assert end.code == "cancelled"
    assert world.clock.now() - began < 0.2
    write(world, REQUESTS, replace(PROMPT, id="next"))
    await world.sleep(1.0)
    assert not read(world, RESPONSES, End, "next")
    worker.state = "ready"
    await world.until(lambda: len(worker.told(Assignment)) == 3)
    assert {a.request.id for a in worker.told(Assignment)} == {"h0", "h2", "next"}


@in_world
async def test_a_running_request_is_cancelled_though_the_queue_is_full(world: World) -> None:
    worker = Hand(world)
    await route(world, held_requests=1)
    write(world, REQUESTS, PROMPT)
    worker.start((await some(world, lambda: worker.told(Assignment)))[0])
    worker.state = "draining"
    await world.sleep(2.0)
    for name in ("h0", "too-many"):
        write(world, REQUESTS, replace(PROMPT, id=name))
        await world.sleep(0.1)
    assert read(world, RESPONSES, End, "too-many")
    write(world, REQUESTS, Cancel(id="a", reason="enough"))
    (end,) = await some(world, lambda: read(world, RESPONSES, End))
    assert end.code == "cancelled"
    assert await some(world, lambda: worker.told(CancelRun))
    await world.sleep(5.0)
    assert not read(world, RESPONSES, End, "h0")
