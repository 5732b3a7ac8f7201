"""Tests of start, runs and stop of one worker on the log in memory; the test takes the router's
part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from kvlane.app.engine.echo import EchoEngine, echo_answer
from kvlane.app.engine.interface import EngineError, EngineOutput, GenerateContext, token_usage
from kvlane.app.serving.chunk_writer import MAX_PENDING_TOKENS
from kvlane.streams.codecs import decode, pack_tokens
from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.records import (
    Blocks,
    Chunk,
    EngineConfig,
    Fence,
    Finished,
    Heartbeat,
    Lost,
    PrefillDone,
    Started,
    Tombstone,
    WorkerCard,
)
from kvlane.streams.request import Request, SamplingOptions, StopConditions
from kvlane.streams.responses.transcript import Transcript
from kvlane.streams.topics import KV_EVENTS, LEDGER, REGISTRY, RESPONSES, lane_of
from tests.harness.decoded import decode_bytes as text_of
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.worker_harness import (
    PROMPT,
    STEP_S,
    TOKEN,
    ScriptedEngine,
    WorkerHarness,
    count_batches,
    next_running_runs,
    visible,
)

# --- start -----------------------------------------------------------------------------------


@scenario_test
async def test_worker_registers_clears_its_cache_and_sends_heartbeats_in_this_order(
    world: MemoryWorld,
) -> None:
    harness = WorkerHarness(world)
    before = world.append(REGISTRY, 0, Tombstone(key="worker/other"), key="worker/other")
    await harness.start()
    first, second = harness.records_of(REGISTRY, WorkerCard)
    assert first.epoch is None
    assert second.epoch == before + 1 == harness.epoch  # the offset of the first card
    assert (second.id, second.slot) == ("w", harness.slot)
    kinds = [type(r) for r in map(decode, world.all_records(KV_EVENTS))]
    assert kinds == [Blocks, Heartbeat]
    (cleared,) = harness.records_of(KV_EVENTS, Blocks)
    assert (cleared.epoch, cleared.kinds) == (harness.epoch, b"\x02")


@scenario_test
async def test_assignment_written_right_after_the_card_is_served(world: MemoryWorld) -> None:
    harness = WorkerHarness(world)
    world.faults.slow["append"] = 0.5
    starting = world.spawn(harness.start())
    await world.wait_until(lambda: len(harness.records_of(REGISTRY, WorkerCard)) == 2)
    epoch = harness.records_of(REGISTRY, WorkerCard)[1].epoch
    assert epoch is not None
    harness.assign(epoch=epoch)
    await starting
    assert (await harness.wait_finished()).code == "length"


@scenario_test
async def test_card_that_was_sent_twice_still_gives_one_epoch(world: MemoryWorld) -> None:
    harness = WorkerHarness(world)
    world.faults.next_fates(REGISTRY, AppendFate.UNREPORTED)
    await harness.start()
    cards = harness.records_of(REGISTRY, WorkerCard)
    assert [c.epoch for c in cards] == [None, None, 1]
    assert harness.epoch == 1


@scenario_test
async def test_outage_delays_the_start_and_does_not_end_it(world: MemoryWorld) -> None:
    harness = WorkerHarness(world)
    world.faults.unanswered = {"offsets"}
    starting = world.spawn(harness.start())
    await world.sleep(30.0)
    assert not starting.done()
    world.faults.unanswered = set()
    await starting


@scenario_test
async def test_engine_that_fails_to_start_is_cleaned_up(world: MemoryWorld) -> None:
    class Failing(ScriptedEngine):
        async def start(self, worker_id: str) -> EngineConfig:
            raise EngineError("no memory")

    engine = Failing(world)
    try:
        await WorkerHarness(world).start(engine)
    except EngineError:
        pass
    else:
        raise AssertionError("the error was swallowed")
    assert engine.calls == ["cleanup"]
    assert not world.all_records(REGISTRY)


# --- a run -----------------------------------------------------------------------------------


@scenario_test
async def test_answer_is_the_engines_and_ends_with_usage(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    harness.assign()
    finished = await harness.wait_finished()
    seen = visible(harness.chunks())
    assert seen.tokens == echo_answer(PROMPT, 20)
    assert seen.text == text_of(echo_answer(PROMPT, 20))
    assert (finished.code, finished.output_tokens, finished.retryable) == ("length", 20, False)
    last = harness.chunks()[-1]
    assert last.finish_reason == "length"
    assert last.usage == token_usage(len(PROMPT), 20)
    assert abs(finished.itl_ms - STEP_S * 1000) < 1


@scenario_test
async def test_chunks_count_from_zero_and_have_their_positions(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    harness.assign()
    await harness.wait_finished()
    index, text = 0, ""
    for seq, chunk in enumerate(harness.chunks()):
        text += chunk.text
        assert (chunk.seq, chunk.index, chunk.chars) == (seq, index, len(text))
        index += len(chunk.token_ids)


@scenario_test
async def test_started_repeats_the_fields_of_the_assignment(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    assignment = harness.assign()
    finished = await harness.wait_finished()
    (started,) = harness.lane_records(LEDGER, Started)
    assert started.origin == assignment.origin
    assert started.responses_from == assignment.responses_from
    assert started.deadline_ms == assignment.deadline_ms
    assert started.run == finished.run == int(harness.chunks()[0].run)


@scenario_test
async def test_no_chunk_goes_out_before_started_is_acknowledged(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    world.faults.next_fates(LEDGER, *[AppendFate.LOST] * 4)
    harness.assign()
    while not harness.lane_records(LEDGER, Started):
        assert not harness.chunks()
        await world.sleep(0.01)
    await harness.wait_finished()
    assert visible(harness.chunks()).tokens == echo_answer(PROMPT, 20)


@scenario_test
async def test_prefill_does_not_wait_for_started(world: MemoryWorld) -> None:
    engine = ScriptedEngine(world, 1.0, EngineOutput.stop().with_tokens([65]))
    harness = await WorkerHarness.started(world, engine)
    world.faults.slow["append"] = 0.4  # on the way there and again on the way back
    began = world.clock.now()
    harness.assign()
    await world.wait_until(lambda: bool(harness.chunks()))
    assert world.clock.now() - began < 1.6


@scenario_test
async def test_ledger_has_the_run_in_order(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    harness.assign()
    await harness.wait_finished()
    records = [decode(r) for r in world.records(LEDGER, lane_of("a", world.lanes))]
    assert [type(r) for r in records] == [Started, PrefillDone, Finished]


@scenario_test
async def test_finished_waits_for_the_last_chunks_acknowledgement(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(
        world, ScriptedEngine(world, 2.0, EngineOutput.stop().with_tokens([65]))
    )
    harness.assign()
    await world.sleep(1.0)
    world.faults.slow["append"] = 3.0  # when the last Chunk stands, its answer takes as long
    await world.wait_until(lambda: bool(harness.chunks()))
    await world.sleep(2.5)
    assert not harness.lane_records(LEDGER, Finished)
    assert (await harness.wait_finished()).code == "stop"


@scenario_test
async def test_finished_is_repeated_and_listed_until_it_is_acknowledged(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world, ScriptedEngine(world, 1.0, EngineOutput.stop()))
    harness.assign()
    await world.sleep(0.5)
    world.faults.next_fates(LEDGER, *[AppendFate.LOST] * 5)
    await world.sleep(2.0)
    assert not harness.lane_records(LEDGER, Finished)
    assert [r.id for r in harness.heartbeats()[-1].running] == ["a"]
    assert (await harness.wait_finished()).code == "stop"
    await world.sleep(1.5)
    assert harness.heartbeats()[-1].running == ()


@scenario_test
async def test_tokens_of_one_step_in_one_lane_travel_as_one_batch(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    same_lane = [i for i in (f"r{n}" for n in range(40)) if lane_of(i, world.lanes) == 0][:5]
    sent = count_batches(harness)
    for request_id in same_lane:
        harness.assign(request_id, max_tokens=3)
    await asyncio.gather(*(harness.wait_finished(i) for i in same_lane))
    assert sent == [5, 5, 5]


@scenario_test
async def test_unsent_tokens_are_dropped_after_lost(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    harness.assign(max_tokens=500)
    await world.wait_until(lambda: bool(harness.chunks()))
    world.faults.slow["append"] = 1.0
    await world.sleep(0.5)  # one batch is on its way, and tokens wait behind it
    count = len(harness.chunks())
    harness.send(Lost(worker="w", epoch=harness.epoch))
    await world.sleep(10)
    assert len(harness.chunks()) <= count + 1


class Reluctant(EchoEngine):
    """An engine that needs long to let go of a request."""

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        try:
            async for output in super().generate(request, context):
                yield output
        finally:
            await self._clock.sleep(5.0)


@scenario_test
async def test_lost_silences_runs_that_their_engine_does_not_release(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world, Reluctant(world.clock, STEP_S))
    harness.assign(max_tokens=500)
    await world.wait_until(lambda: bool(harness.chunks()))
    world.faults.slow["append"] = 1.0
    await world.sleep(0.5)
    count = len(harness.chunks())
    harness.send(Lost(worker="w", epoch=harness.epoch))
    await world.sleep(10)
    assert len(harness.chunks()) <= count + 1


@scenario_test
async def test_slow_broker_slows_down_the_engine(world: MemoryWorld) -> None:
    engine = ScriptedEngine(world, *[TOKEN] * 2000, EngineOutput.stop())
    harness = await WorkerHarness.started(world, engine)
    world.faults.next_fates(
        LEDGER, *[AppendFate.LOST] * 5
    )  # nothing goes out before Started stands
    harness.assign(max_tokens=5000)
    (run,) = await next_running_runs(harness)
    assert MAX_PENDING_TOKENS <= run.output_tokens <= MAX_PENDING_TOKENS + 1
    assert (await harness.wait_finished()).output_tokens == 2000
    assert visible(harness.chunks()).tokens == [65] * 2000


@scenario_test
async def test_unanswerable_assignments_are_bounded_and_dropped(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world, max_num_seqs=2, worker_max_waiting=1)
    world.faults.next_fates(LEDGER, *[AppendFate.LOST] * 500)
    for n in range(50):
        harness.assign(f"r{n}")
    await world.sleep(2.5)
    beat = harness.heartbeats()[-1]
    assert len(beat.running) == 6  # twice the places; the others are in no heartbeat
    assert beat.slot_offset == 50


@scenario_test
async def test_run_keys_are_dropped_when_they_cannot_recur(world: MemoryWorld) -> None:
    """Runs of batch requests may take twice as long as the others."""
    harness = await WorkerHarness.started(
        world, max_lifetime_s=10, deadline_s=10, dedup_window_s=10
    )
    harness.assign()
    await harness.wait_finished()
    await world.sleep(16)
    harness.assign()
    await world.sleep(6)
    assert len(harness.lane_records(LEDGER, Started)) == 1
    harness.assign()
    await world.sleep(3)
    assert len(harness.lane_records(LEDGER, Started)) == 2


@scenario_test
async def test_copy_that_is_read_after_a_long_outage_starts_and_reports_nothing(
    world: MemoryWorld,
) -> None:
    harness = await WorkerHarness.started(world, max_lifetime_s=10, deadline_s=10)
    harness.assign()
    await harness.wait_finished()
    world.faults.slow["poll"] = 30.0
    await world.sleep(5)
    harness.assign()
    await world.sleep(60)
    assert len(harness.lane_records(LEDGER, Finished)) == 1


@scenario_test
async def test_tokens_wait_for_the_batch_on_its_way_and_join_into_one_chunk(
    world: MemoryWorld,
) -> None:
    harness = await WorkerHarness.started(world)
    harness.assign(max_tokens=20)
    await world.wait_until(lambda: bool(harness.chunks()))
    world.faults.slow["append"] = 5 * STEP_S
    await harness.wait_finished()
    sizes = [len(c.token_ids) for c in harness.chunks()]
    assert max(sizes) >= 4
    assert visible(harness.chunks()).tokens == echo_answer(PROMPT, 20)


@scenario_test
async def test_resumed_run_continues_the_text_and_counts_the_whole(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    whole = echo_answer(PROMPT, 20)
    taken = whole[:3]  # ends in the middle of the two bytes of "ï"
    harness.assign(attempt=1, taken=pack_tokens(taken), taken_chars=2)
    finished = await harness.wait_finished()
    chunks = harness.chunks()
    assert [t for c in chunks for t in c.token_ids] == whole[3:]
    assert "".join(c.text for c in chunks) == text_of(whole)[2:]
    assert (chunks[0].index, chunks[0].attempt) == (3, 1)
    assert chunks[-1].chars == len(text_of(whole))
    assert chunks[-1].usage == token_usage(len(PROMPT), 20)
    assert finished.output_tokens == 17


@scenario_test
async def test_resumed_run_requests_only_the_rest_from_the_engine(world: MemoryWorld) -> None:
    engine = ScriptedEngine(world, EngineOutput.stop())
    harness = await WorkerHarness.started(world, engine)
    request = Request(
        id="a",
        token_ids=pack_tokens(PROMPT),
        sampling=SamplingOptions(seed=5),
        stop=StopConditions(max_tokens=20, min_tokens=4),
    )
    harness.assign(request=request, attempt=1, taken=pack_tokens([1, 2, 3]), taken_chars=3)
    await harness.wait_finished()
    (sent,) = engine.requests
    assert sent.token_ids == pack_tokens([*PROMPT, 1, 2, 3])
    assert (sent.stop.max_tokens, sent.stop.min_tokens) == (17, 1)
    assert sent.sampling.seed not in (None, 5)  # the same draws again would repeat the text


@scenario_test
async def test_resumed_run_without_remaining_tokens_ends_as_length(world: MemoryWorld) -> None:
    engine = ScriptedEngine(world)
    harness = await WorkerHarness.started(world, engine)
    harness.assign(attempt=1, max_tokens=3, taken=pack_tokens([1, 2, 3]), taken_chars=3)
    assert (await harness.wait_finished()).code == "length"
    assert not engine.requests
    assert harness.chunks()[-1].usage == token_usage(len(PROMPT), 3)


# --- stop ------------------------------------------------------------------------------------


@scenario_test
async def test_stopping_worker_drains_finishes_its_runs_and_leaves(world: MemoryWorld) -> None:
    engine = ScriptedEngine(world, 4.0, EngineOutput.stop().with_tokens([65]))
    harness = await WorkerHarness.started(world, engine)
    harness.assign()
    await world.sleep(1)
    stopping = world.spawn(harness.worker.stop())
    await world.sleep(0.1)
    assert harness.heartbeats()[-1].state == "draining"
    await world.sleep(2.5)
    harness.assign("late")
    refused = await harness.wait_finished("late")
    assert (refused.code, refused.retryable) == ("worker_full", True)
    await stopping
    assert (await harness.wait_finished()).code == "stop"
    assert engine.calls == ["start", "drain", "cleanup"]
    last = decode(world.records(REGISTRY, 0)[-1])
    assert last == Tombstone(
        key="worker/w", epoch=harness.records_of(REGISTRY, WorkerCard)[-1].epoch
    )


@scenario_test
async def test_assignments_before_routers_see_the_drain_are_executed(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    stopping = world.spawn(harness.worker.stop())
    await world.sleep(0.5)
    harness.assign()
    await stopping
    assert (await harness.wait_finished()).code == "length"


@scenario_test
async def test_runs_that_outlast_the_grace_end_as_broken(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world, drain_grace_s=3, max_num_seqs=1)
    harness.assign(max_tokens=5000)
    harness.assign("waits", max_tokens=5000)
    await world.sleep(1)
    await harness.worker.stop()
    assert (
        (await harness.wait_finished()).code
        == (await harness.wait_finished("waits")).code
        == "broken"
    )
    assert harness.chunks()[-1].finish_reason is None
    count = len(harness.chunks())
    await world.sleep(5)
    assert len(harness.chunks()) == count


@scenario_test
async def test_stop_with_a_dead_broker_ends_all_the_same(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world, drain_grace_s=3)
    harness.assign(max_tokens=5000)
    await world.sleep(1)
    world.broker.available = False
    await asyncio.wait_for(harness.worker.stop(), 60)
    await harness.ctx.cancel_tasks()
    assert len(harness.ctx._tasks) == 0


@scenario_test
async def test_failing_drain_does_not_keep_the_worker_from_leaving(world: MemoryWorld) -> None:
    class Bad(ScriptedEngine):
        async def drain(self) -> None:
            raise RuntimeError("transfer stuck")

    engine = Bad(world)
    harness = await WorkerHarness.started(world, engine)
    await harness.worker.stop()
    assert engine.calls == ["start", "cleanup"]
    assert isinstance(decode(world.records(REGISTRY, 0)[-1]), Tombstone)


@scenario_test
async def test_finished_runs_leave_no_state(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    tasks = len(harness.ctx._tasks)
    for n in range(30):
        harness.assign(f"r{n}")
    for n in range(30):
        await harness.wait_finished(f"r{n}")
    await world.sleep(0.5)
    assert len(harness.ctx._tasks) == tasks


@scenario_test
async def test_fenced_zombie_shows_nothing(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    harness.assign(max_tokens=10)
    await world.wait_until(lambda: len(harness.chunks()) == 3)
    lane = lane_of("a", world.lanes)
    world.append(RESPONSES, lane, Fence(id="a", attempt=1), key="a")
    await harness.wait_finished()
    transcript = Transcript("a")
    for record in world.records(RESPONSES, lane):
        shown = decode(record)
        assert isinstance(shown, Chunk | Fence)
        transcript.apply(shown)
    assert transcript.tokens == echo_answer(PROMPT, 10)[:3]
    assert not transcript.is_over
