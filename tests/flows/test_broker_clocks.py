"""Tests of requests in a lane whose brokers have other clocks than the rest."""

from __future__ import annotations

import pytest

from kvlane.streams.records import Assignment, End
from kvlane.streams.request import Request
from kvlane.streams.topics import LEDGER, REQUESTS, RESPONSES, lane_of
from tests.harness.fake_worker import (
    FakeWorker,
    append_record,
    read_records,
    start_router,
    wait_for_items,
)
from tests.harness.memory_world import MemoryWorld, scenario_test

LANE_TOPICS = (REQUESTS, LEDGER, RESPONSES)
SKEW_MS = 20_000


def lead_lane(world: MemoryWorld, topics: tuple[str, ...], ahead_ms: int) -> None:
    for topic in topics:
        world.lead(topic, lane_of("a", world.lanes), ahead_ms)


def ends(world: MemoryWorld) -> list[str]:
    return [end.code for end in read_records(world, RESPONSES, End)]


@pytest.mark.parametrize("ahead_ms", [-SKEW_MS, SKEW_MS])
@pytest.mark.parametrize("topics", [(REQUESTS,), LANE_TOPICS])
@scenario_test
async def test_time_limit_is_as_long_whatever_the_clock_of_the_lane(
    world: MemoryWorld, ahead_ms: int, topics: tuple[str, ...]
) -> None:
    worker = FakeWorker(world)
    await start_router(world)
    await world.sleep(2)
    lead_lane(world, topics, ahead_ms)
    append_record(world, REQUESTS, Request(id="a", model="demo", deadline_s=8))
    (assignment,) = await wait_for_items(world, lambda: worker.received(Assignment))
    assert assignment.budget_s == pytest.approx(8, abs=0.2)
    worker.start(assignment)
    await world.sleep(7.5)
    assert ends(world) == []
    await world.wait_until(lambda: ends(world) == ["deadline"], within_s=1)


@scenario_test
async def test_refusals_are_as_rare_where_the_ledger_has_a_slow_clock(world: MemoryWorld) -> None:
    lane = lane_of("a", world.lanes)
    other = next(name for name in "bcdefgh" if lane_of(name, world.lanes) != lane)
    lead_lane(world, (LEDGER,), -SKEW_MS)
    workers = {name: FakeWorker(world, f"w-{name}", model=name) for name in ("a", other)}
    await start_router(world)
    for name, worker in workers.items():
        world.spawn(worker.serve(room=0))
        append_record(world, REQUESTS, Request(id=name, model=name, deadline_s=100))
    await world.sleep(20)
    slow, usual = [len(worker.received(Assignment)) for worker in workers.values()]
    assert usual > 3
    assert slow == pytest.approx(usual, abs=2)
