"""Tests of turns of batch jobs, and the end of each job in time, while other jobs run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvlane.app.batches.fair_turns import FairTurns
from kvlane.app.batches.job_prompts import WINDOW, JobInput
from kvlane.app.batches.job_run import GRACE_S
from kvlane.app.batches.job_runner import MAX_RUNNING, MAX_RUNS
from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.topics import BATCH
from tests.harness.batch_harness import BatchHarness, chat_line, jsonl
from tests.harness.key_files import KeyFileHarness
from tests.harness.memory_world import MemoryWorld, scenario_test


@pytest.fixture
def keys(tmp_path: Path) -> KeyFileHarness:
    return KeyFileHarness(tmp_path)


def is_fast(name: str) -> bool:
    return not name.startswith("slow")


def input_of(name: str, count: int) -> bytes:
    return jsonl(*(chat_line(f"{name}-{n}") for n in range(count)))


# --- turns ----------------------------------------------------------------------------------------


def test_turns_go_round_by_tenant() -> None:
    async def scenario() -> list[str]:
        turns, order = FairTurns(2), []
        held = [("a", turns.enter("a")), ("a", turns.enter("a"))]
        waiting = [(name, turns.enter(name)) for name in ("a", "a", "a", "b", "c", "b")]
        while held:
            turns.leave(*held.pop(0))
            for each in [each for each in waiting if each[1].done()]:
                waiting.remove(each)
                held.append(each)
                order.append(each[0])
        assert not turns.is_wanted
        return order

    assert asyncio.run(scenario()) == ["a", "b", "c", "a", "b", "a"]


def test_place_that_is_left_is_passed_over() -> None:
    async def scenario() -> None:
        turns = FairTurns(1)
        first, second, third = (turns.enter("a") for _ in range(3))
        turns.leave("a", second)
        turns.leave("a", first)
        assert third.done()
        turns.leave("a", third)
        assert turns.enter("b").done()

    asyncio.run(scenario())


@scenario_test
async def test_jobs_that_wait_for_results_hold_no_turn(world: MemoryWorld) -> None:
    harness = await BatchHarness.open(world, "r1")
    harness.fleet.answers = is_fast
    slow = [await harness.submit(input_of("slow", 3)) for _ in range(2 * MAX_RUNNING)]
    await harness.submit(input_of("slow-full", WINDOW + 300))
    await world.sleep(5)
    quick = await harness.submit(input_of("quick", 2))
    assert (await harness.ended(quick, within_s=20))["status"] == "completed"
    harness.fleet.answers = lambda _: True
    for job in slow:
        assert (await harness.ended(job))["status"] == "completed"


@scenario_test
async def test_job_of_a_tenant_starts_beside_many_of_another(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    ours, theirs = keys.add("acme"), keys.add("globex")
    harness = await BatchHarness.open(world, "r1", **keys.settings)
    begun: list[str] = []
    check = JobInput.check

    async def slow_check(given: JobInput, interrupt: Any) -> Any:
        begun.append("")
        await world.sleep(20)
        return await check(given, interrupt)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobInput, "check", slow_check)
        for n in range(4 * MAX_RUNNING):
            await harness.submit(input_of(f"their-{n}", 1), theirs)
        await world.sleep(1)
        assert len(begun) == MAX_RUNNING
        our = await harness.submit(input_of("our", 1), ours)
        assert (await harness.ended(our, ours, within_s=60))["status"] == "completed"
        assert len(begun) < 4 * MAX_RUNNING


@scenario_test
async def test_jobs_with_a_run_are_bounded_and_chosen_by_tenant(
    world: MemoryWorld, keys: KeyFileHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 20
    monkeypatch.setattr("kvlane.app.batches.job_runner.MAX_OPEN", most)
    ours, theirs = keys.add("acme"), keys.add("globex")
    harness = await BatchHarness.open(world, "r1", **keys.settings)
    runner, _, _ = harness.runners["r1"]
    harness.fleet.answers = lambda name: name.startswith("our")
    file_id = await harness.upload(input_of("slow", 1), theirs)
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions"}
    jobs = [
        (await harness.send("POST", "/v1/batches", body, theirs)).json["id"]
        for _ in range(most + 3)
    ]
    await world.sleep(30)
    assert runner.running_jobs == most
    await harness.send("POST", f"/v1/batches/{jobs.pop()}/cancel", token=theirs)
    last = await harness.send("POST", f"/v1/batches/{jobs[-1]}/cancel", token=theirs)
    assert last.json["status"] == "cancelling"
    await harness.ended(jobs[-1], theirs, within_s=GRACE_S)
    our = await harness.submit(input_of("our", 1), ours)
    assert (await harness.ended(our, ours, within_s=60))["status"] == "completed"
    await world.sleep(30)
    assert runner.running_jobs == most


# --- cancels and windows --------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["cancelled", "expired"])
@scenario_test
async def test_job_ends_in_time_while_others_hold_all_turns(
    world: MemoryWorld, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await BatchHarness.open(world, "r1")

    async def endless(_: JobInput, __: Any) -> Any:
        await world.sleep(10**6)

    waiting = await harness.submit(input_of("slow-own", 3), completion_window="2m")
    harness.fleet.answers = is_fast
    await world.sleep(5)
    monkeypatch.setattr(JobInput, "check", endless)
    for n in range(MAX_RUNNING):
        await harness.submit(input_of(f"slow-{n}", 1))
    await world.sleep(5)
    unbegun = await harness.submit(input_of("quick", 2), completion_window="2m")
    await world.sleep(10)
    assert (await harness.batch(unbegun))["status"] == "validating"
    monkeypatch.undo()
    if ending == "cancelled":
        for job in (waiting, unbegun):
            await harness.send("POST", f"/v1/batches/{job}/cancel")
    else:
        await world.sleep(120)
    for job in (waiting, unbegun):
        assert (await harness.ended(job, within_s=GRACE_S + 2))["status"] == ending


@pytest.mark.parametrize("ending", ["cancelled", "expired"])
@scenario_test
async def test_job_ends_while_its_input_is_validated(
    world: MemoryWorld, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of such lines as take long, each."""
    harness = await BatchHarness.open(world, "r1")
    requests = JobInput.requests

    async def slow_requests(given: JobInput, *args: Any) -> Any:
        async for request in requests(given, *args):
            await world.sleep(10)
            yield request

    monkeypatch.setattr(JobInput, "requests", slow_requests)
    batch_id = await harness.submit(input_of("a", 1000), completion_window="1m")
    await world.sleep(15)
    if ending == "cancelled":
        await harness.send("POST", f"/v1/batches/{batch_id}/cancel")
    batch = await harness.ended(batch_id, within_s=60 + GRACE_S + 12)
    assert (batch["status"], batch["output_file_id"]) == (ending, None)
    assert batch[f"{ending}_at"]
    assert world.all_records(BATCH) == []


@scenario_test
async def test_many_cancelled_jobs_end_in_time(world: MemoryWorld) -> None:
    harness = await BatchHarness.open(world, "r1")
    harness.fleet.answers = is_fast
    jobs = [await harness.submit(input_of("slow", 2)) for _ in range(3 * MAX_RUNNING)]
    await world.sleep(60)
    for job in jobs:
        await harness.send("POST", f"/v1/batches/{job}/cancel")
    await world.sleep(GRACE_S + 2)
    assert {(await harness.batch(job))["status"] for job in jobs} == {"cancelled"}


@pytest.mark.parametrize("others", [0, MAX_RUNNING])
@scenario_test
async def test_cancelled_job_ends_while_no_prompt_can_be_appended(
    world: MemoryWorld, others: int
) -> None:
    """Neither its prompts nor their cancels, since the partitions have no leader; with jobs that
    want its turn, too."""
    harness = await BatchHarness.open(world, "r1")
    world.faults.next_fates(BATCH, *[AppendFate.LOST] * 100_000)
    jobs = [await harness.submit(input_of("a", 20)) for _ in range(others + 1)]
    await world.sleep(20)
    await harness.send("POST", f"/v1/batches/{jobs[0]}/cancel")
    batch = await harness.ended(jobs[0], within_s=GRACE_S + 2)
    assert (batch["status"], batch["request_counts"]["failed"]) == ("cancelled", 20)


# --- runs without progress ------------------------------------------------------------------------


@scenario_test
async def test_job_whose_runs_end_without_progress_fails(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kills the collector that has it, which is noticed by its successor only."""
    harness = await BatchHarness.open(world)
    begun = 0

    async def deadly(*_: object) -> None:
        nonlocal begun
        begun += 1
        await world.sleep(10**6)

    monkeypatch.setattr(JobInput, "check", deadly)
    batch_id = await harness.submit(input_of("a", 1))
    for n in range(MAX_RUNS):
        await harness.start_runner(f"r{n}")
        await world.wait_until(lambda n=n: begun > n, within_s=30)
        await harness.kill(f"r{n}")
    await harness.start_runner("last")
    batch = await harness.ended(batch_id)
    assert (batch["status"], begun) == ("failed", MAX_RUNS)
    assert [e["code"] for e in batch["errors"]["data"]] == ["interrupted"]


@scenario_test
async def test_job_that_waits_for_capacity_outlasts_any_number_of_runs(world: MemoryWorld) -> None:
    harness = await BatchHarness.open(world)
    harness.fleet.answers = lambda _: False
    batch_id = await harness.submit(input_of("a", 5))
    for n in range(MAX_RUNS + 5):
        await harness.start_runner(f"r{n}")
        await world.sleep(15)
        await harness.kill(f"r{n}")
    harness.fleet.answers = lambda _: True
    await harness.start_runner("last")
    assert (await harness.ended(batch_id))["status"] == "completed"
