"""Tests of a worker whose engine falls silent, stalls or dies: its heartbeats, and the fate of
runs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator

from kvlane.app.engine.interface import EngineDead, EngineError, EngineOutput, GenerateContext
from kvlane.streams.codecs import decode, pack_tokens
from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.records import EngineStats, Finished, Heartbeat, Lost
from kvlane.streams.request import GuidedDecoding, Request, SamplingOptions, StopConditions
from kvlane.streams.topics import KV_EVENTS, LEDGER, RESPONSES
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.worker_harness import TOKEN, ScriptedEngine, WorkerHarness

DONE = EngineOutput.stop().with_tokens([65])


class Sick(ScriptedEngine):
    """Answers probes by `answer`: an error, a wait in seconds, or well if it is None."""

    answer: Exception | float | None = None
    probes = 0
    steps = 0

    def stats(self) -> EngineStats:
        return EngineStats(steps=self.steps)

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        if request.is_probe:
            self.probes += 1
            if isinstance(self.answer, Exception):
                raise self.answer
            if self.answer is not None:
                await self.world.sleep(self.answer)
        async for output in super().generate(request, context):
            yield output


async def sick(
    world: MemoryWorld, *script: EngineOutput | float | Exception
) -> tuple[WorkerHarness, Sick]:
    harness, engine = WorkerHarness(world), Sick(world, *script)
    await harness.start(engine)
    return harness, engine


def state(harness: WorkerHarness) -> str:
    return harness.heartbeats()[-1].state


@scenario_test
async def test_probe_of_an_idle_engine_writes_no_records(world: MemoryWorld) -> None:
    harness, engine = await sick(world)
    await world.sleep(9.0)
    assert engine.probes == 0
    await world.sleep(25.0)
    assert engine.probes in (2, 3)
    assert state(harness) == "ready"
    assert not world.all_records(RESPONSES)
    assert not world.all_records(LEDGER)


@scenario_test
async def test_engine_with_requests_is_not_probed(world: MemoryWorld) -> None:
    harness, engine = await sick(world, *(x for _ in range(30) for x in (1.0, TOKEN)), DONE)
    harness.assign(max_tokens=100)
    await world.sleep(28.0)
    assert engine.probes == 0


@scenario_test
async def test_engine_that_does_not_answer_in_time_is_unhealthy_until_it_does(
    world: MemoryWorld,
) -> None:
    harness, engine = await sick(world, DONE)
    engine.answer = 4.0
    await world.wait_until(lambda: state(harness) == "unhealthy", within_s=14.5)
    assert "probe was not answered within 3 s" in harness.heartbeats()[-1].reason
    harness.assign()
    refused = await harness.wait_finished()
    assert (refused.code, refused.retryable) == ("worker_full", True)
    engine.answer = None
    await world.wait_until(lambda: state(harness) == "ready", within_s=10)
    harness.assign("b")
    assert (await harness.wait_finished("b")).code == "stop"


@scenario_test
async def test_engine_that_fails_its_probe_is_unhealthy(world: MemoryWorld) -> None:
    harness, engine = await sick(world)
    engine.answer = EngineError("out of memory")
    await world.wait_until(lambda: state(harness) == "unhealthy", within_s=12)
    assert "out of memory" in harness.heartbeats()[-1].reason


@scenario_test
async def test_new_epoch_of_an_unhealthy_worker_is_also_unhealthy(world: MemoryWorld) -> None:
    harness, engine = await sick(world)
    engine.answer = EngineError("out of memory")
    await world.wait_until(lambda: state(harness) == "unhealthy")
    old = harness.epoch
    harness.send(Lost(worker="w", epoch=old))
    await world.wait_until(lambda: harness.worker.epoch not in (None, old))
    harness.assign()
    assert (await harness.wait_finished()).code == "worker_full"
    assert harness.heartbeats()[-1].state == "unhealthy"


async def check_that_requests_are_broken(world: MemoryWorld, steps: float) -> None:
    harness, engine = await sick(world, TOKEN, 1000.0)
    engine.steps = steps  # type: ignore[assignment]
    harness.assign()
    await world.wait_until(lambda: bool(harness.chunks()))
    await world.sleep(28.0)
    assert state(harness) == "ready"
    await world.sleep(4.0)
    assert (await harness.wait_finished()).code == "broken"
    assert all(c.finish_reason is None for c in harness.chunks())
    stalled = [b for b in harness.heartbeats() if b.state == "unhealthy"]
    assert "no step for" in stalled[0].reason
    await world.wait_until(lambda: state(harness) == "ready", within_s=10)  # it answers probes


@scenario_test
async def test_requests_of_an_engine_without_steps_are_broken(world: MemoryWorld) -> None:
    await check_that_requests_are_broken(world, 0)


@scenario_test
async def test_steps_that_are_not_a_number_are_no_steps(world: MemoryWorld) -> None:
    await check_that_requests_are_broken(world, math.nan)


@scenario_test
async def test_run_without_a_token_is_reported_as_one_that_stalled_its_engine(
    world: MemoryWorld,
) -> None:
    harness, _ = await sick(world, 1000.0)
    harness.assign()
    finished = await harness.wait_finished()
    assert (finished.code, finished.stalled) == ("broken", True)


@scenario_test
async def test_run_with_a_token_stalls_no_engine_by_itself(world: MemoryWorld) -> None:
    harness, _ = await sick(world, TOKEN, 1000.0)
    harness.assign()
    finished = await harness.wait_finished()
    assert (finished.code, finished.stalled) == ("broken", False)


def guided(request_id: str = "a") -> Request:
    return Request(
        id=request_id,
        token_ids=pack_tokens([1]),
        stop=StopConditions(max_tokens=9),
        sampling=SamplingOptions(guided_decoding=GuidedDecoding(regex="a")),
    )


@scenario_test
async def test_compile_of_a_grammar_is_no_stall_and_moves_no_other_run(world: MemoryWorld) -> None:
    harness, _ = await sick(world, 40.0, DONE)
    harness.assign(request=guided())
    harness.assign("b")
    assert (await harness.wait_finished()).code == "stop"
    assert (await harness.wait_finished("b")).code == "stop"
    assert all(beat.state == "ready" for beat in harness.heartbeats())


@scenario_test
async def test_engine_without_an_answer_is_unhealthy_during_a_compile_too(
    world: MemoryWorld,
) -> None:
    harness, engine = await sick(world, 40.0, DONE)
    engine.answer = 1000.0
    harness.assign(request=guided())
    await world.wait_until(lambda: state(harness) == "unhealthy", within_s=15)
    assert "probe was not answered" in harness.heartbeats()[-1].reason


@scenario_test
async def test_compile_that_takes_too_long_ends_its_request_as_invalid(world: MemoryWorld) -> None:
    harness, engine = await sick(world, 1000.0)
    harness.assign(request=guided(), budget_s=600.0, deadline_ms=world.broker.now_ms() + 600_000)
    finished = await harness.wait_finished()
    assert (finished.code, finished.retryable, finished.stalled) == ("error", False, False)
    assert "not compiled within 60 s" in harness.chunks()[-1].invalid
    assert engine.is_closed
    assert state(harness) == "ready"


@scenario_test
async def test_engine_with_its_own_stall_check_may_be_silent_as_long(world: MemoryWorld) -> None:
    class Patient(Sick):
        output_timeout_s = 120.0

    harness, engine = WorkerHarness(world), Patient(world, 100.0, DONE)
    await harness.start(engine)
    harness.assign(budget_s=500.0, deadline_ms=world.broker.now_ms() + 500_000)
    await world.sleep(90.0)
    assert (await harness.wait_finished()).code == "stop"
    engine.steps = 1  # from now on its steps tell more
    harness.assign("b", budget_s=500.0, deadline_ms=world.broker.now_ms() + 500_000)
    assert (await harness.wait_finished("b")).code == "broken"


@scenario_test
async def test_engine_with_steps_is_healthy_however_long_its_prefill(world: MemoryWorld) -> None:
    harness, engine = await sick(world, 100.0, DONE)
    harness.assign(budget_s=500.0, deadline_ms=world.broker.now_ms() + 500_000)
    for _ in range(99):
        await world.sleep(1.0)
        engine.steps += 1
    assert (await harness.wait_finished()).code == "stop"


@scenario_test
async def test_request_that_waits_while_others_get_tokens_is_no_stall(world: MemoryWorld) -> None:
    class Unfair(ScriptedEngine):
        async def generate(
            self, request: Request, context: GenerateContext
        ) -> AsyncGenerator[EngineOutput, None]:
            for _ in range(60):
                await world.sleep(1.0)
                if request.id == "a":
                    yield TOKEN
            yield DONE

    harness = await WorkerHarness.started(world, Unfair(world))
    harness.assign("a", max_tokens=100, budget_s=99.0, deadline_ms=world.broker.now_ms() + 99_000)
    harness.assign("b", max_tokens=100, budget_s=99.0, deadline_ms=world.broker.now_ms() + 99_000)
    assert (await harness.wait_finished("b")).code == "stop"


@scenario_test
async def test_tokens_refused_by_the_log_are_no_stall_of_the_engine(world: MemoryWorld) -> None:
    harness, _ = await sick(world, *[EngineOutput(token_ids=(65,) * 600)] * 4, DONE)
    world.faults.slow["append"] = 40.0
    harness.assign(max_tokens=5000, budget_s=900.0, deadline_ms=world.broker.now_ms() + 900_000)
    await world.wait_until(lambda: bool(harness.lane_records(LEDGER, Finished)), within_s=800)
    assert harness.lane_records(LEDGER, Finished)[-1].code == "stop"


@scenario_test
async def test_dead_engine_is_announced_before_the_process_ends(world: MemoryWorld) -> None:
    harness, _ = await sick(world, TOKEN, EngineDead("the GPU is gone"))
    harness.assign()
    await world.wait_until(lambda: harness.ctx.error is not None)
    assert isinstance(harness.ctx.error, EngineDead)
    last = harness.heartbeats()[-1]
    assert last.state == "unhealthy"
    assert "the GPU is gone" in last.reason


@scenario_test
async def test_runs_of_a_dying_worker_are_moved_before_it_ends(world: MemoryWorld) -> None:
    class Dying(ScriptedEngine):
        async def generate(
            self, request: Request, context: GenerateContext
        ) -> AsyncGenerator[EngineOutput, None]:
            yield TOKEN
            await world.sleep(1.0 if request.id == "a" else 500.0)
            raise EngineDead("the GPU is gone")

    harness = await WorkerHarness.started(world, Dying(world), max_num_seqs=2)
    for name in "abc":
        harness.assign(name)
    await world.wait_until(lambda: harness.ctx.error is not None, within_s=5)
    codes = [(await harness.wait_finished(name)).code for name in "abc"]
    assert codes == ["error", "broken", "broken"]


@scenario_test
async def test_engine_found_dead_by_a_probe_ends_the_process(world: MemoryWorld) -> None:
    harness, engine = await sick(world)
    engine.answer = EngineDead("the GPU is gone")
    await world.wait_until(lambda: harness.ctx.error is not None, within_s=15)
    assert state(harness) == "unhealthy"


@scenario_test
async def test_engine_without_probe_answers_for_long_is_abandoned(world: MemoryWorld) -> None:
    harness, engine = await sick(world)
    engine.answer = EngineError("it hangs")
    await world.sleep(60.0)
    assert harness.ctx.error is None
    await world.wait_until(lambda: harness.ctx.error is not None, within_s=20)
    assert isinstance(harness.ctx.error, EngineDead)
    await harness.ctx.cancel_tasks()
    assert engine.calls == ["start", "cleanup"]


@scenario_test
async def test_probe_that_hangs_when_cancelled_is_abandoned(world: MemoryWorld) -> None:
    class Stuck(ScriptedEngine):
        open = 0

        async def generate(
            self, request: Request, context: GenerateContext
        ) -> AsyncGenerator[EngineOutput, None]:
            self.open += 1
            yield EngineOutput()
            for _ in range(30):
                try:
                    await world.sleep(400.0)
                except asyncio.CancelledError:
                    continue

    harness, engine = WorkerHarness(world), Stuck(world)
    await harness.start(engine)
    await world.wait_until(lambda: state(harness) == "unhealthy", within_s=15)
    await world.wait_until(lambda: harness.ctx.error is not None, within_s=90)
    assert engine.open == 1


@scenario_test
async def test_dying_worker_ends_without_a_broker_too(world: MemoryWorld) -> None:
    harness, engine = await sick(world, 2.0, EngineDead("the GPU is gone"))
    harness.assign()
    await world.sleep(1.0)
    engine.answer = EngineDead("the GPU is gone")
    world.faults.next_fates(LEDGER, *[AppendFate.LOST] * 5000)
    world.faults.next_fates(KV_EVENTS, *[AppendFate.LOST] * 5000)
    await world.wait_until(lambda: harness.ctx.error is not None, within_s=60)


@scenario_test
async def test_stopping_worker_is_not_probed(world: MemoryWorld) -> None:
    harness, engine = await sick(world, 15.0, DONE)
    harness.assign()
    await world.sleep(1.0)
    engine.answer = EngineDead("shutting down")
    await harness.worker.stop()
    assert (await harness.wait_finished()).code == "stop"
    assert engine.probes == 0
    states = [
        r.state for r in map(decode, world.all_records(KV_EVENTS)) if isinstance(r, Heartbeat)
    ]
    assert states[-1] == "draining"
