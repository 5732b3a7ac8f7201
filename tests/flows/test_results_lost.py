"""Tests of results of requests whose replies were deleted before a collector read them, or never
come."""

from __future__ import annotations

from kvlane.streams.records import Assigned, End, Ended, Finished, RequestOffset
from kvlane.streams.topics import LEDGER, REQUESTS, RESPONSES
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.results_harness import ResultsHarness


def refuse(results: ResultsHarness, request_id: str, origin: int = -1) -> None:
    """The records of a router that ends a request without a run."""
    world, lane = results.world, results.lane(request_id)
    end = End(id=request_id, code="invalid", origin=origin)
    world.append(RESPONSES, lane, end, key=request_id)
    world.append(LEDGER, lane, Ended(id=request_id, code="invalid"), key=request_id)


def run(results: ResultsHarness, request_id: str, offset: int, *, is_over: bool) -> None:
    """The records of a run in the ledger, of the request at this offset."""
    lane = results.lane(request_id)
    origin = RequestOffset(topic=REQUESTS, partition=lane, offset=offset)
    assigned = Assigned(
        id=request_id, attempt=0, phase="aggregated", worker="w1", epoch=1, origin=origin,
        responses_from=0, deadline_ms=0,
    )  # fmt: skip
    finished = Finished(
        id=request_id, attempt=0, phase="aggregated", worker="w1", epoch=1, code="stop"
    )
    log_records = [assigned, finished] if is_over else [assigned]
    results.world.append(LEDGER, lane, *log_records, key=request_id)


def delete_replies(results: ResultsHarness, lane: int) -> None:
    """Delete all records of replies in a lane."""
    results.world.broker.delete_records(
        RESPONSES, lane, results.world.broker.log(RESPONSES, lane).end
    )


def committed(results: ResultsHarness, lane: int) -> int:
    return results.world.broker.group(REQUESTS, "collector").committed.get(lane, 0)


async def only_is_lost(results: ResultsHarness) -> None:
    result = await results.only()
    assert result.error is not None
    assert (result.status, result.error.code) == ("failed", "lost")
    lane = results.lane("a")
    await results.world.wait_until(
        lambda: committed(results, lane) == results.world.broker.log(REQUESTS, lane).end
    )


@scenario_test
async def test_reply_whose_beginning_was_deleted_is_lost(world: MemoryWorld) -> None:
    results = ResultsHarness(world)
    await results.start()
    results.ask("a")
    results.answer("a", "on", end=None)
    await world.sleep(5)
    await results.kill()
    results.answer("a", "ce", seq=1, index=1)
    world.broker.delete_records(RESPONSES, results.lane("a"), 1)
    await results.start("c2")
    await only_is_lost(results)


@scenario_test
async def test_deleted_reply_is_lost_before_the_deadline(world: MemoryWorld) -> None:
    results = ResultsHarness(world)
    results.ask("a")
    results.answer("a", "once")
    run(results, "a", offset=0, is_over=True)
    delete_replies(results, results.lane("a"))
    await results.start()
    await only_is_lost(results)


@scenario_test
async def test_reply_that_was_deleted_while_its_lane_was_read_is_lost(world: MemoryWorld) -> None:
    results = ResultsHarness(world)
    process = await results.start()
    results.ask("a")
    await world.sleep(5)
    lane = results.lane("a")
    results.answer("a", "once")
    run(results, "a", offset=0, is_over=True)
    process._lanes[lane].skip_to(world.broker.log(RESPONSES, lane).end)
    await only_is_lost(results)


@scenario_test
async def test_deleted_refusal_is_lost(world: MemoryWorld) -> None:
    """The ledger has an end without a run, as of a request that repeats another one."""
    results = ResultsHarness(world)
    results.ask("a")
    refuse(results, "a")
    delete_replies(results, results.lane("a"))
    await results.start()
    await only_is_lost(results)


@scenario_test
async def test_deleted_refusal_is_lost_although_a_copy_was_seen_later(world: MemoryWorld) -> None:
    results = ResultsHarness(world)
    results.ask("a")
    refuse(results, "a")
    delete_replies(results, lane := results.lane("a"))
    results.ask("a")
    world.append(LEDGER, lane, Ended(id="a", code="seen"), key="a")
    await results.start()
    await only_is_lost(results)


@scenario_test
async def test_repetition_beside_deleted_replies_gets_no_second_result(world: MemoryWorld) -> None:
    results = ResultsHarness(world)
    await results.start()
    results.ask("a")
    refuse(results, "a")
    await results.only()
    await world.sleep(600)
    await results.kill()
    results.ask("a")
    delete_replies(results, results.lane("a"))
    await results.start("c2")
    lane = results.lane("a")
    await world.wait_until(lambda: committed(results, lane) == 2, within_s=60)
    await results.only()


@scenario_test
async def test_request_that_continues_beside_deleted_replies_is_awaited(world: MemoryWorld) -> None:
    results = ResultsHarness(world)
    results.ask("a")
    results.answer("a", "on", end=None)
    run(results, "a", offset=0, is_over=False)
    delete_replies(results, results.lane("a"))
    await results.start()
    await world.sleep(200)
    assert results.results() == []
    results.answer("a", "ce", seq=1, index=1)
    await only_is_lost(results)


@scenario_test
async def test_fenced_run_ends_no_reply_beside_deleted_ones(world: MemoryWorld) -> None:
    """As after a preemption: the run that was cancelled has a last Chunk behind the Fence."""
    results = ResultsHarness(world)
    neighbour = next(name for name in "bcdefgh" if results.lane(name) == results.lane("a"))
    results.answer(neighbour, "deleted")
    delete_replies(results, results.lane("a"))
    results.ask("a")
    results.fence("a", 1)
    results.answer("a", "", end="cancelled")
    await results.start()
    await world.sleep(5)
    results.answer("a", "once", attempt=1)
    result = await results.only()
    assert result.status == "completed"
    assert result.body is not None
    assert result.body["choices"][0]["text"] == "once"


@scenario_test
async def test_repetition_is_found_in_lane_without_pauses(world: MemoryWorld) -> None:
    results = ResultsHarness(world)
    await results.start()
    lane = results.lane("a")
    offset = results.ask("a")
    run(results, "a", offset=offset + 7, is_over=True)
    world.faults.slow["poll"] = 0.1
    until = world.clock.now() + 60
    while world.clock.now() < until:
        world.append(RESPONSES, lane, End(id="other", code="stop"), key="other")
        await world.sleep(0.05)
    assert committed(results, lane) == 1


@scenario_test
async def test_end_that_is_appended_again_ends_no_later_copy_of_its_request(
    world: MemoryWorld,
) -> None:
    """Its router died before the ledger had it, and another collector has written the result."""
    results = ResultsHarness(world)
    await results.start()
    lane, first = results.lane("a"), results.ask("a")
    end = End(id="a", code="cancelled", origin=first)
    world.append(RESPONSES, lane, end, key="a")
    await results.wait_results(1)
    await results.stop()
    await results.start("c2")
    await world.sleep(5)
    results.ask("a")
    refuse(results, "a", origin=first)
    end_of_lane = world.broker.log(REQUESTS, lane).end
    await world.wait_until(lambda: committed(results, lane) == end_of_lane)
    assert len(results.results()) == 1
    later = results.ask("b")
    refuse(results, "b", origin=later)
    assert len(await results.wait_results(2)) == 2
