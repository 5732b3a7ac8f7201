"""A worker whose engine falls silent, stalls or dies: what it says, and what becomes of runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from app.engine.contract import EngineDead, EngineError, EngineOutput, GenerateContext
from streams.codecs import decode
from streams.memory.broker import Fate
from streams.records import EngineFigures, Finished, Heartbeat, Lost, Request
from streams.topics import KV_EVENTS, LEDGER, RESPONSES
from tests.desks import TOKEN, Desk, Scripted
from tests.worlds import World, in_world

DONE = EngineOutput.stop().with_tokens([65])


class Sick(Scripted):
    """Answers probes by `answer`: an error, a wait in seconds, or well if it is None."""

    answer: Exception | float | None = None
    probes = 0
    steps = 0

    def figures(self) -> EngineFigures:
        return EngineFigures(steps=self.steps)

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


async def sick(world: World, *script: EngineOutput | float | Exception) -> tuple[Desk, Sick]:
    desk, engine = Desk(world), Sick(world, *script)
    await desk.start(engine)
    return desk, engine


def state(desk: Desk) -> str:
    return desk.beats()[-1].state


@in_world
async def test_an_idle_engine_is_probed_and_nobody_hears_of_it(world: World) -> None:
    desk, engine = await sick(world)
    await world.sleep(9.0)
    assert engine.probes == 0
    await world.sleep(25.0)
    assert engine.probes in (2, 3)
    assert state(desk) == "ready"
    assert not world.everywhere(RESPONSES)
    assert not world.everywhere(LEDGER)


@in_world
async def test_an_engine_with_requests_is_not_probed(world: World) -> None:
    desk, engine = await sick(world, *(x for _ in range(30) for x in (1.0, TOKEN)), DONE)
    desk.assign(max_tokens=100)
    await world.sleep(28.0)
    assert engine.probes == 0


@in_world
async def test_an_engine_that_does_not_answer_in_time_is_unhealthy_until_it_does(
    world: World,
) -> None:
    desk, engine = await sick(world, DONE)
    engine.answer = 4.0
    await world.until(lambda: state(desk) == "unhealthy", within_s=14.5)
    assert "probe was not answered within 3 s" in desk.beats()[-1].reason
    desk.assign()
    refused = await desk.finished()
    assert (refused.code, refused.retryable) == ("worker_full", True)
    engine.answer = None
    await world.until(lambda: state(desk) == "ready", within_s=10)
    desk.assign("b")
    assert (await desk.finished("b")).code == "stop"


@in_world
async def test_an_engine_that_fails_its_probe_is_unhealthy(world: World) -> None:
    desk, engine = await sick(world)
    engine.answer = EngineError("out of memory")
    await world.until(lambda: state(desk) == "unhealthy", within_s=12)
    assert "out of memory" in desk.beats()[-1].reason


@in_world
async def test_a_new_epoch_of_an_unhealthy_worker_takes_nothing_either(world: World) -> None:
    desk, engine = await sick(world)
    engine.answer = EngineError("out of memory")
    await world.until(lambda: state(desk) == "unhealthy")
    old = desk.epoch
    desk.tell(Lost(worker="w", epoch=old))
    await world.until(lambda: desk.worker.epoch not in (None, old))
    desk.assign()
    assert (await desk.finished()).code == "worker_full"
    assert desk.beats()[-1].state == "unhealthy"


@in_world
async def test_requests_of_an_engine_that_makes_no_step_are_broken_off(world: World) -> None:
    desk, _ = await sick(world, TOKEN, 1000.0)
    desk.assign()
    await world.until(lambda: bool(desk.chunks()))
    await world.sleep(28.0)
    assert state(desk) == "ready"
    await world.sleep(4.0)
    assert (await desk.finished()).code == "broken"
    assert all(c.finish_reason is None for c in desk.chunks())
    stalled = [b for b in desk.beats() if b.state == "unhealthy"]
    assert "no step for" in stalled[0].reason
    await world.until(lambda: state(desk) == "ready", within_s=10)  # it answers probes


@in_world
async def test_an_engine_that_sees_to_silence_itself_and_counts_no_steps_may_be_silent_as_long(
    world: World,
) -> None:
    class Patient(Sick):
        silence_s = 120.0

    desk, engine = Desk(world), Patient(world, 100.0, DONE)
    await desk.start(engine)
    desk.assign(budget_s=500.0, deadline_ms=world.broker.now_ms() + 500_000)
    await world.sleep(90.0)
    assert (await desk.finished()).code == "stop"
    engine.steps = 1  # from now on its steps tell more
    desk.assign("b", budget_s=500.0, deadline_ms=world.broker.now_ms() + 500_000)
    assert (await desk.finished("b")).code == "broken"


@in_world
async def test_an_engine_that_makes_steps_is_left_alone_however_long_its_prefill(
    world: World,
) -> None:
    desk, engine = await sick(world, 100.0, DONE)
    desk.assign(budget_s=500.0, deadline_ms=world.broker.now_ms() + 500_000)
    for _ in range(99):
        await world.sleep(1.0)
        engine.steps += 1
    assert (await desk.finished()).code == "stop"


@in_world
async def test_a_request_that_waits_while_others_get_tokens_is_no_stall(world: World) -> None:
    class Unfair(Scripted):
        async def generate(
            self, request: Request, context: GenerateContext
        ) -> AsyncGenerator[EngineOutput, None]:
            for _ in range(60):
                await world.sleep(1.0)
                if request.id == "a":
                    yield TOKEN
            yield DONE

    desk = Desk(world)
    await desk.start(Unfair(world))
    desk.assign("a", max_tokens=100, budget_s=99.0, deadline_ms=world.broker.now_ms() + 99_000)
    desk.assign("b", max_tokens=100, budget_s=99.0, deadline_ms=world.broker.now_ms() + 99_000)
    assert (await desk.finished("b")).code == "stop"


@in_world
async def test_tokens_that_the_log_does_not_take_are_no_stall_of_the_engine(world: World) -> None:
    desk, _ = await sick(world, *[EngineOutput(token_ids=(65,) * 600)] * 4, DONE)
    world.faults.slow["append"] = 40.0
    desk.assign(max_tokens=5000, budget_s=900.0, deadline_ms=world.broker.now_ms() + 900_000)
    await world.until(lambda: bool(desk.lane(LEDGER, Finished)), within_s=800)
    assert desk.lane(LEDGER, Finished)[-1].code == "stop"


@in_world
async def test_a_dead_engine_is_announced_before_the_process_ends(world: World) -> None:
    desk, _ = await sick(world, TOKEN, EngineDead("the GPU is gone"))
    desk.assign()
    await world.until(lambda: desk.life.failed is not None)
    assert isinstance(desk.life.failed, EngineDead)
    last = desk.beats()[-1]
    assert last.state == "unhealthy"
    assert "the GPU is gone" in last.reason


@in_world
async def test_what_a_dying_worker_runs_is_handed_on_before_it_ends(world: World) -> None:
    class Dying(Scripted):
        async def generate(
            self, request: Request, context: GenerateContext
        ) -> AsyncGenerator[EngineOutput, None]:
            yield TOKEN
            await world.sleep(1.0 if request.id == "a" else 500.0)
            raise EngineDead("the GPU is gone")

    desk = Desk(world)
    await desk.start(Dying(world), max_num_seqs=2)
    for name in "abc":
        desk.assign(name)
    await world.until(lambda: desk.life.failed is not None, within_s=5)
    codes = [(await desk.finished(name)).code for name in "abc"]
    assert codes == ["error", "broken", "broken"]


@in_world
async def test_an_engine_found_dead_by_a_probe_ends_the_process(world: World) -> None:
    desk, engine = await sick(world)
    engine.answer = EngineDead("the GPU is gone")
    await world.until(lambda: desk.life.failed is not None, within_s=15)
    assert state(desk) == "unhealthy"


@in_world
async def test_an_engine_that_answers_no_probe_for_long_is_given_up(world: World) -> None:
    desk, engine = await sick(world)
    engine.answer = EngineError("it hangs")
    await world.sleep(60.0)
    assert desk.life.failed is None
    await world.until(lambda: desk.life.failed is not None, within_s=20)
    assert isinstance(desk.life.failed, EngineDead)
    await desk.life.end()
    assert engine.calls == ["start", "cleanup"]


@in_world
async def test_a_probe_that_hangs_even_when_cancelled_is_left_behind(world: World) -> None:
    class Stuck(Scripted):
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

    desk, engine = Desk(world), Stuck(world)
    await desk.start(engine)
    await world.until(lambda: state(desk) == "unhealthy", within_s=15)
    await world.until(lambda: desk.life.failed is not None, within_s=90)
    assert engine.open == 1


@in_world
async def test_a_dying_worker_ends_without_a_broker_too(world: World) -> None:
    desk, engine = await sick(world, 2.0, EngineDead("the GPU is gone"))
    desk.assign()
    await world.sleep(1.0)
    engine.answer = EngineDead("the GPU is gone")
    world.faults.next_fates(LEDGER, *[Fate.LOST] * 5000)
    world.faults.next_fates(KV_EVENTS, *[Fate.LOST] * 5000)
    await world.until(lambda: desk.life.failed is not None, within_s=60)


@in_world
async def test_a_stopping_worker_is_not_probed(world: World) -> None:
    desk, engine = await sick(world, 15.0, DONE)
    desk.assign()
    await world.sleep(1.0)
    engine.answer = EngineDead("shutting down")
    await desk.worker.stop()
    assert (await desk.finished()).code == "stop"
    assert engine.probes == 0
    states = [r.state for r in map(decode, world.everywhere(KV_EVENTS)) if isinstance(r, Heartbeat)]
    assert states[-1] == "draining"
