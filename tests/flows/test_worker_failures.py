"""Tests of failures and cancels of the runs of one worker, on the log in memory."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator

import pytest

from kvlane.app.engine.echo import EchoEngine
from kvlane.app.engine.interface import EngineDead, EngineError, EngineOutput, GenerateContext
from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.ports import Entry
from kvlane.streams.records import EngineStats, LogProb, PassthroughDelta, Started
from kvlane.streams.request import Request
from kvlane.streams.topics import ASSIGNMENTS, LEDGER, RESPONSES, lane_of
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.worker_harness import STEP_S, TOKEN, ScriptedEngine, WorkerHarness

# --- failures --------------------------------------------------------------------------------


@scenario_test
async def test_lost_chunk_breaks_the_run_and_no_chunk_follows(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    harness.assign(max_tokens=50)
    await world.wait_until(lambda: len(harness.chunks()) == 3)
    world.faults.next_fates(RESPONSES, AppendFate.LOST)
    finished = await harness.wait_finished()
    assert (finished.code, len(harness.chunks())) == ("broken", 3)
    await world.sleep(5)
    assert len(harness.chunks()) == 3


@scenario_test
async def test_unreported_chunk_breaks_the_run_too(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    harness.assign(max_tokens=50)
    await world.wait_until(lambda: len(harness.chunks()) == 3)
    world.faults.next_fates(RESPONSES, AppendFate.UNREPORTED)
    assert (await harness.wait_finished()).code == "broken"
    await world.sleep(5)
    assert len(harness.chunks()) == 4  # the one in doubt stands, nothing after it


@scenario_test
async def test_lost_last_chunk_ends_as_broken(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(
        world, ScriptedEngine(world, 1.0, EngineOutput.stop().with_tokens([65]))
    )
    harness.assign()
    await world.sleep(0.5)
    world.faults.next_fates(RESPONSES, AppendFate.LOST)
    assert (await harness.wait_finished()).code == "broken"


@scenario_test
async def test_all_runs_of_a_failed_batch_break_and_others_continue(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    ids = [f"r{n}" for n in range(20)]
    failing = [i for i in ids if lane_of(i, world.lanes) == 0][:2]
    other = next(i for i in ids if lane_of(i, world.lanes) == 1)
    for request_id in (*failing, other):
        harness.assign(request_id)
    await world.wait_until(lambda: all(harness.chunks(i) for i in failing))
    world.faults.next_fates(RESPONSES, AppendFate.LOST)
    codes = [(await harness.wait_finished(i)).code for i in (*failing, other)]
    assert sorted(codes) in (["broken", "broken", "length"], ["broken", "length", "length"])
    broken_lanes = {lane_of(i, world.lanes) for i, c in zip((*failing, other), codes, strict=True)
                    if c == "broken"}  # fmt: skip
    assert len(broken_lanes) == 1


@scenario_test
async def test_retryable_engine_error_leaves_the_end_to_the_owner(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(
        world, ScriptedEngine(world, TOKEN, EngineError("oom", retryable=True))
    )
    harness.assign()
    finished = await harness.wait_finished()
    assert (finished.code, finished.retryable, finished.message) == ("error", True, "oom")
    assert all(c.finish_reason is None for c in harness.chunks())


@pytest.mark.parametrize(
    ("output", "named"),
    [
        (EngineOutput(token_ids=(66,), log_probs=((LogProb(66, math.nan),),)), "log_probs nan"),
        (EngineOutput(data=(PassthroughDelta(delta={"a": math.inf}),)), "delta.a is inf"),
        (EngineOutput(token_ids=(66.0,)), "token_ids 66.0"),  # type: ignore[arg-type]
        (EngineOutput(text="\ud800", finish_reason="stop"), "text"),
        (EngineError("\ud800", retryable=True), "?"),
    ],
)
@scenario_test
async def test_output_that_no_record_can_carry_ends_the_run_by_the_name_of_its_field(
    world: MemoryWorld, output: EngineOutput | EngineError, named: str
) -> None:
    harness = await WorkerHarness.started(world, ScriptedEngine(world, TOKEN, output))
    harness.assign()
    finished = await harness.wait_finished()
    assert (finished.code, finished.retryable) == ("error", True)
    assert named in finished.message
    assert all(c.finish_reason is None for c in harness.chunks())
    assert harness.ctx.error is None


@scenario_test
async def test_heartbeats_leave_out_statistics_that_no_record_can_carry(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = EngineStats(running=math.nan)  # type: ignore[arg-type]
    monkeypatch.setattr(ScriptedEngine, "stats", lambda _: odd)
    harness = await WorkerHarness.started(world, ScriptedEngine(world, TOKEN))
    await world.sleep(3)
    assert harness.heartbeats()[-1].engine is None


@scenario_test
async def test_final_engine_error_has_a_last_chunk(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(
        world, ScriptedEngine(world, TOKEN, EngineError("bad grammar"))
    )
    harness.assign()
    finished = await harness.wait_finished()
    assert (finished.code, finished.retryable) == ("error", False)
    assert harness.chunks()[-1].finish_reason == "error"


@scenario_test
async def test_bug_in_the_engine_is_retryable_and_the_worker_continues(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world, ScriptedEngine(world, TOKEN, ZeroDivisionError()))
    harness.assign()
    finished = await harness.wait_finished()
    assert (finished.code, finished.retryable) == ("error", True)
    assert harness.ctx.error is None


@scenario_test
async def test_answer_without_an_end_is_a_retryable_error(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world, ScriptedEngine(world, TOKEN))
    harness.assign()
    assert (await harness.wait_finished()).retryable


@scenario_test
async def test_cancellation_inside_the_engine_is_an_error_of_the_engine(world: MemoryWorld) -> None:
    class Cancelling(ScriptedEngine):
        async def generate(
            self, request: Request, context: GenerateContext
        ) -> AsyncGenerator[EngineOutput, None]:
            yield TOKEN
            raise asyncio.CancelledError

    harness = await WorkerHarness.started(world, Cancelling(world))
    harness.assign()
    assert (await harness.wait_finished()).retryable


@scenario_test
async def test_dead_engine_ends_the_process_after_its_last_record(world: MemoryWorld) -> None:
    engine = ScriptedEngine(world, TOKEN, EngineDead("the GPU is gone"))
    harness = await WorkerHarness.started(world, engine)
    harness.assign()
    assert (await harness.wait_finished()).retryable
    await world.wait_until(lambda: harness.ctx.error is not None)
    await harness.ctx.cancel_tasks()
    assert engine.calls == ["start", "cleanup"]


@scenario_test
async def test_bad_record_in_the_slot_does_not_stop_the_worker(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    world.append_raw(ASSIGNMENTS, harness.slot, Entry(b"w", b"\xff\xff", (("t", b"Assignment"),)))
    world.append_raw(ASSIGNMENTS, harness.slot, Entry(b"w", b"?", (("t", b"FromTheFuture"),)))
    harness.assign()
    assert (await harness.wait_finished()).code == "length"


# --- cancel ----------------------------------------------------------------------------------


@scenario_test
async def test_cancelled_run_ends_with_a_last_chunk_and_aborts_the_engine(
    world: MemoryWorld,
) -> None:
    class Aborted(EchoEngine):
        aborts = 0

        async def abort(self, context: GenerateContext) -> None:
            self.aborts += 1

    engine = Aborted(world.clock, STEP_S)
    harness = await WorkerHarness.started(world, engine)
    harness.assign(max_tokens=500)
    await world.wait_until(lambda: len(harness.chunks()) == 3)
    harness.cancel()
    harness.cancel()  # a router repeats it every beat
    finished = await harness.wait_finished()
    assert finished.code == "cancelled"
    assert harness.chunks()[-1].finish_reason == "cancelled"
    assert len(harness.chunks()) <= 5
    assert engine.aborts == 1


@scenario_test
async def test_waiting_run_that_is_cancelled_never_starts(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world, max_num_seqs=1, worker_max_waiting=4)
    harness.assign("busy", max_tokens=10)
    harness.assign()
    harness.cancel()
    finished = await harness.wait_finished()
    assert finished.code == "broken"  # `cancelled` would promise a last Chunk
    await harness.wait_finished("busy")
    await world.sleep(2)
    assert not harness.lane_records(LEDGER, Started)


@scenario_test
async def test_cancel_of_an_unknown_run_does_nothing(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    harness.cancel()
    harness.assign()
    assert (await harness.wait_finished()).code == "length"
