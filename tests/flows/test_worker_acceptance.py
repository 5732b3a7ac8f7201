"""Tests of assignments that one worker accepts, rejects or ignores, on the log in memory."""

from __future__ import annotations

from kvlane.streams.records import Started
from kvlane.streams.topics import LEDGER
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.worker_harness import STEP_S, WorkerHarness, visible


@scenario_test
async def test_orders_for_others_and_for_other_epochs_are_ignored(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    harness.assign("a", worker="other")
    harness.assign("b", epoch=harness.epoch + 1)
    harness.assign("c", epoch=harness.epoch - 1)
    harness.assign("d")
    await harness.wait_finished("d")
    assert {r.id for r in harness.records_of(LEDGER, Started)} == {"d"}


@scenario_test
async def test_run_key_is_started_once(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    harness.assign()
    harness.assign()
    await harness.wait_finished()
    harness.assign()
    harness.assign(attempt=1)
    await world.sleep(10)
    assert [(s.attempt) for s in harness.lane_records(LEDGER, Started)] == [0, 1]


@scenario_test
async def test_refused_run_key_is_not_started_later(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world, max_num_seqs=1, worker_max_waiting=0)
    harness.assign("busy", max_tokens=5)
    harness.assign()
    assert (await harness.wait_finished()).code == "worker_full"
    await harness.wait_finished("busy")
    harness.assign()
    await world.sleep(5)
    assert not harness.lane_records(LEDGER, Started)


@scenario_test
async def test_run_beyond_slots_and_queue_is_refused_retryably(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world, max_num_seqs=2, worker_max_waiting=1)
    ids = ["r1", "r2", "r3", "r4"]
    for request_id in ids:
        harness.assign(request_id)
    refused = await harness.wait_finished("r4")
    assert (refused.code, refused.retryable, refused.run != 0) == ("worker_full", True, True)
    assert not harness.lane_records(LEDGER, Started, "r3")  # it waits
    assert [(await harness.wait_finished(i)).code for i in ids[:3]] == ["length"] * 3


@scenario_test
async def test_budget_that_is_used_up_is_refused_as_expired(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    harness.assign(budget_s=0.0)
    finished = await harness.wait_finished()
    assert (finished.code, finished.retryable) == ("expired", False)
    assert not harness.chunks()


@scenario_test
async def test_time_in_the_log_counts_against_the_budget(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    harness.assign(budget_s=60.0, deadline_ms=world.broker.now_ms() - 1)
    assert (await harness.wait_finished()).code == "expired"


@scenario_test
async def test_run_past_its_deadline_stops_without_a_finish_reason(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    harness.assign(budget_s=3.0, max_tokens=500)
    finished = await harness.wait_finished()
    assert finished.code == "expired"
    assert 2.9 < len(visible(harness.chunks()).tokens) * STEP_S < 4.2
    assert harness.chunks()[-1].finish_reason is None
