"""Tests of real routers and workers, killed at chosen moments: every answer is whole, and shown
once."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from kvlane.app.engine.echo import EchoEngine, echo_answer
from kvlane.app.engine.interface import EngineError, EngineOutput, GenerateContext
from kvlane.app.lanes import shared_reads
from kvlane.app.serving.run_executor import resumed_request
from kvlane.app.text.byte_level import ASSISTANT, USER
from kvlane.streams.codecs import pack_tokens, unpack_tokens
from kvlane.streams.records import (
    Assigned,
    Assignment,
    Cancel,
    CancelRun,
    Chunk,
    End,
    Ended,
    EngineConfig,
    Fence,
    Fencing,
    Finished,
    Heartbeat,
    Lost,
    PrefillDone,
    Started,
    Tombstone,
)
from kvlane.streams.request import Request, SamplingOptions, StopConditions
from kvlane.streams.topics import LEDGER, REQUESTS, RESPONSES
from tests.harness.decoded import decode_bytes as text_of
from tests.harness.fake_worker import append_record, read_records
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.simulated_processes import (
    MODEL,
    ObservedAnswer,
    SimulatedProcesses,
    publish_request,
    wait_complete,
)
from tests.harness.worker_harness import PROMPT, STEP_S


class Prefilling(EchoEngine):
    """An echo whose first token takes a while."""

    prefill_s = 2.0
    seeds: list[int | None]

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        await self._clock.sleep(self.prefill_s)
        async for output in super().generate(request, context):
            yield output


def started(world: MemoryWorld) -> bool:
    return bool(read_records(world, LEDGER, Started))


def decisions(world: MemoryWorld) -> list[Assigned]:
    return read_records(world, LEDGER, Assigned)


def spoken(world: MemoryWorld, tokens: int) -> Callable[[], bool]:
    return lambda: len(ObservedAnswer(world).tokens) >= tokens


# --- a worker dies -------------------------------------------------------------------------------


@scenario_test
async def test_queued_request_is_assigned_elsewhere_when_a_worker_dies(world: MemoryWorld) -> None:
    processes = SimulatedProcesses(world)
    await processes.router()
    await processes.worker("w1", max_num_seqs=1, worker_max_waiting=0)
    publish_request(world, 500, "busy")
    await world.wait_until(lambda: bool(read_records(world, LEDGER, Started, "busy")))
    publish_request(world)
    await world.sleep(1.0)
    processes.kill("w1")
    await processes.worker("w2", max_num_seqs=2)
    await wait_complete(world)
    assert {s.worker for s in read_records(world, LEDGER, Started)} == {"w2"}


@scenario_test
async def test_run_that_waits_in_its_worker_is_moved(world: MemoryWorld) -> None:
    processes = SimulatedProcesses(world)
    await processes.router()
    await processes.worker("w1", max_num_seqs=1, worker_max_waiting=4)
    publish_request(world, 500, "busy")
    await world.wait_until(lambda: bool(read_records(world, LEDGER, Started, "busy")))
    publish_request(world)
    await world.wait_until(lambda: bool(decisions(world)))
    assert not started(world)
    await processes.worker("w2")
    processes.kill("w1")
    received = await wait_complete(world)
    assert received.fences == 1
    assert [d.worker for d in decisions(world)] == ["w1", "w2"]


@scenario_test
async def test_prefill_of_a_dead_worker_is_repeated(world: MemoryWorld) -> None:
    processes = SimulatedProcesses(world)
    await processes.router()
    await processes.worker("w1", Prefilling(world.clock, STEP_S, model=MODEL))
    publish_request(world)
    await world.wait_until(lambda: started(world))
    await processes.worker("w2")
    processes.kill("w1")
    received = await wait_complete(world)
    assert received.fences == 1
    assert decisions(world)[-1].base_tokens == 0


@scenario_test
async def test_answer_continues_where_its_worker_died(world: MemoryWorld) -> None:
    processes = await SimulatedProcesses.started(world)
    publish_request(world)
    await world.wait_until(spoken(world, 8))
    shown = len(ObservedAnswer(world).tokens)
    await processes.worker("w2")
    processes.kill("w1")
    await wait_complete(world)
    assert decisions(world)[-1].base_tokens >= shown


@scenario_test
async def test_answer_with_its_last_chunk_ends_without_a_finished_record(
    world: MemoryWorld,
) -> None:
    processes = await SimulatedProcesses.started(world)
    publish_request(world)
    await world.wait_until(spoken(world, 19))
    processes.on_append("w1", Chunk, processes.kill)
    received = await wait_complete(world)
    await world.wait_until(lambda: bool(read_records(world, LEDGER, Ended)))
    assert not read_records(world, LEDGER, Finished)
    if received.records[-1] is not received.visible_records[-1]:  # a Fence behind the end
        assert isinstance(received.records[-1], Fence)
    assert {e.code for e in read_records(world, LEDGER, Ended)} <= {"seen", "length"}


@pytest.mark.parametrize("kind", [Started, PrefillDone, Chunk, Finished, Heartbeat])
@scenario_test
async def test_worker_may_die_at_any_of_its_records(world: MemoryWorld, kind: type) -> None:
    processes = await SimulatedProcesses.started(world)
    processes.on_append("w1", kind, processes.kill)
    publish_request(world)
    await world.wait_until(lambda: not processes.has_pending_faults)
    await processes.worker("w2")
    await wait_complete(world)


@pytest.mark.parametrize("tokens", range(1, 14))
@scenario_test
async def test_half_a_character_is_completed_by_the_next_worker(
    world: MemoryWorld, tokens: int
) -> None:
    """The prompt has characters of two and of three bytes, each byte a token."""
    processes = await SimulatedProcesses.started(world)
    publish_request(world)
    await world.wait_until(spoken(world, tokens))
    processes.kill("w1")
    await processes.worker("w2")
    await wait_complete(world)
    assert decisions(world)[-1].base_tokens in (tokens, tokens + 1)


@pytest.mark.parametrize("tokens", [*range(1, 12)])
@scenario_test
async def test_stop_string_split_by_a_failover_is_found_and_never_shown(
    world: MemoryWorld, tokens: int
) -> None:
    prompt = [USER, *b"one two END three", ASSISTANT]
    processes = await SimulatedProcesses.started(world)
    publish_request(world, prompt=prompt, stop=StopConditions(max_tokens=17, stop=("END",)))
    await world.wait_until(spoken(world, tokens))
    processes.kill("w1")
    await processes.worker("w2")
    await world.wait_until(lambda: ObservedAnswer(world).is_over, 90.0)
    received = ObservedAnswer(world)
    assert received.text == "one two "
    assert received.finish_reason == "stop"
    assert text_of(received.tokens) == "one two END"
    last = received.visible_records[-1]
    assert isinstance(last, Chunk)
    assert last.stop_reason == "END"


@scenario_test
async def test_two_failovers_leave_the_answer_unchanged(world: MemoryWorld) -> None:
    processes = await SimulatedProcesses.started(world)
    publish_request(world, 40)
    await world.wait_until(spoken(world, 7))
    await processes.worker("w2")
    processes.kill("w1")
    await world.wait_until(spoken(world, 22), 30.0)
    await processes.worker("w3")
    processes.kill("w2")
    received = await wait_complete(world, max_tokens=40)
    assert received.fences == 2


@scenario_test
async def test_records_of_a_resumed_zombie_are_skipped(world: MemoryWorld) -> None:
    processes = await SimulatedProcesses.started(world)
    publish_request(world, 60)
    await world.wait_until(spoken(world, 7))
    await processes.worker("w2")
    processes.stop("w1")
    await world.wait_until(lambda: bool(read_records(world, RESPONSES, Fence)), 30.0)
    processes.resume("w1")
    await wait_complete(world, max_tokens=60)
    runs = [chunk.run for chunk in read_records(world, RESPONSES, Chunk) if chunk.finish_reason]
    assert len(runs) == 1


@scenario_test
async def test_resumed_seed_is_a_function_of_the_generated_tokens(world: MemoryWorld) -> None:
    """Drawn again as it is, it would repeat the draws of the beginning."""
    request = Request(
        id="a",
        token_ids=pack_tokens(PROMPT),
        sampling=SamplingOptions(seed=7),
        stop=StopConditions(max_tokens=20, min_tokens=9),
    )
    rest = resumed_request(request, pack_tokens([1, 2, 3]))
    assert rest.sampling.seed not in (None, 7)
    assert rest == resumed_request(request, pack_tokens([1, 2, 3]))
    assert rest.sampling.seed != resumed_request(request, pack_tokens([1, 2, 4])).sampling.seed
    assert (rest.stop.max_tokens, rest.stop.min_tokens) == (17, 6)
    assert list(unpack_tokens(rest.token_ids)) == [*PROMPT, 1, 2, 3]


@scenario_test
async def test_worker_that_failed_a_request_does_not_get_it_again(world: MemoryWorld) -> None:
    failed: dict[str, str] = {}
    names = [f"r{n}" for n in range(10)]

    class Failing(EchoEngine):
        async def start(self, worker_id: str) -> EngineConfig:
            self.name = worker_id
            return await super().start(worker_id)

        async def generate(
            self, request: Request, context: GenerateContext
        ) -> AsyncGenerator[EngineOutput, None]:
            if request.id in names and failed.setdefault(request.id, self.name) == self.name:
                raise EngineError("bad memory", retryable=True)
            async for output in super().generate(request, context):
                yield output

    processes = SimulatedProcesses(world)
    await processes.router()
    for worker in ("w1", "w2"):
        await processes.worker(worker, Failing(world.clock, STEP_S, model=MODEL))
    for name in names:
        publish_request(world, 20, name)
    for name in names:
        await wait_complete(world, name)
        assert len(read_records(world, LEDGER, Assigned, name)) == 2


@scenario_test
async def test_requests_of_a_dead_worker_are_collected_in_one_pass_over_their_lane(
    world: MemoryWorld,
) -> None:
    passes: list[int] = []

    class Counted(shared_reads._Scan):
        def __init__(self, questions: Any) -> None:
            super().__init__(questions)
            if questions[0].key is not None:
                passes.append(len(questions))

    original, shared_reads._Scan = shared_reads._Scan, Counted  # type: ignore[misc]
    try:
        processes = await SimulatedProcesses.started(world)
        names = [f"r{n}" for n in range(40)]
        for name in names:
            publish_request(world, 30, name)
        await world.wait_until(lambda: all(len(ObservedAnswer(world, n).tokens) > 3 for n in names))
        await processes.worker("w2")
        processes.kill("w1")
        await world.wait_until(lambda: all(ObservedAnswer(world, n).is_over for n in names), 60.0)
    finally:
        shared_reads._Scan = original  # type: ignore[misc]
    assert sum(passes) == 40
    assert len(passes) <= 2 * world.lanes, passes
    for name in names:
        assert ObservedAnswer(world, name).tokens == echo_answer(PROMPT, 30)


@scenario_test
async def test_cancel_of_a_request_whose_worker_died_ends_it_once(world: MemoryWorld) -> None:
    processes = await SimulatedProcesses.started(world)
    publish_request(world, 500)
    await world.wait_until(spoken(world, 5))
    processes.kill("w1")
    await world.sleep(1.0)
    append_record(world, REQUESTS, Cancel(id="a", reason="enough"))
    await world.wait_until(lambda: bool(read_records(world, RESPONSES, End)), 30.0)
    await processes.worker("w2")
    await world.sleep(30.0)
    received = ObservedAnswer(world)
    assert received.finish_reason == "cancelled"
    assert len(decisions(world)) == 1


# --- a router dies in the middle of a failover ---------------------------------------------------

STEPS = [Lost, Tombstone, Fencing, Fence, Assigned, Assignment]


async def failing_over(world: MemoryWorld) -> SimulatedProcesses:
    """A worker has died in mid answer, another one is there; nothing was noticed yet."""
    processes = await SimulatedProcesses.started(world)
    await world.sleep(1.0)
    publish_request(world, 40)
    await world.wait_until(spoken(world, 9))
    await processes.worker("w2")
    await processes.worker("w3")
    processes.stop("w1")  # so that it may still speak afterwards
    return processes


@pytest.mark.parametrize("kind", STEPS)
@scenario_test
async def test_router_may_die_at_any_step_of_a_failover(world: MemoryWorld, kind: type) -> None:
    processes = await failing_over(world)
    processes.on_append("r1", kind, processes.kill)
    await world.wait_until(lambda: not processes.has_pending_faults, 30.0)
    await processes.router("r2")
    await wait_complete(world, max_tokens=40)


@pytest.mark.parametrize("kind", STEPS)
@scenario_test
async def test_router_suspended_during_a_failover_resumes_without_effects(
    world: MemoryWorld, kind: type
) -> None:
    processes = await failing_over(world)
    processes.on_append("r1", kind, processes.stop)
    await world.wait_until(lambda: not processes.has_pending_faults, 30.0)
    await processes.router("r2")
    await world.wait_until(lambda: bool(len(ObservedAnswer(world).tokens) > 15), 60.0)
    processes.resume("r1")
    processes.resume("w1")
    await wait_complete(world, max_tokens=40)


@pytest.mark.parametrize("first", STEPS)
@pytest.mark.parametrize("second", [Fencing, Fence, Assigned, Assignment])
@scenario_test
async def test_two_routers_may_die_one_after_the_other_in_the_same_failover(
    world: MemoryWorld, first: type, second: type
) -> None:
    processes = await failing_over(world)
    processes.on_append("r1", first, processes.kill)
    await world.wait_until(lambda: not processes.has_pending_faults, 30.0)
    processes.on_append("r2", second, processes.kill)
    await processes.router("r2")
    await world.sleep(20.0)  # it may find nothing left to do
    await processes.router("r3")
    await wait_complete(world, max_tokens=40)


@pytest.mark.parametrize("kind", [Fencing, Fence, CancelRun, Assigned, Assignment])
@pytest.mark.parametrize("struck", ["killed", "stopped"])
@scenario_test
async def test_router_may_die_when_it_moves_a_run_that_lost_a_chunk(
    world: MemoryWorld, kind: type, struck: str
) -> None:
    """Its worker lives, and is told to stop."""
    processes = await SimulatedProcesses.started(world)
    publish_request(world, 40)
    await world.wait_until(spoken(world, 9))
    await processes.worker("w2")
    processes.on_append("r1", kind, processes.kill if struck == "killed" else processes.stop)
    append_record(world, LEDGER, Fencing(id="a", attempt=1, reason="broken"))
    if kind is Fencing:  # the one that the router would have written
        processes.kill("r1")
    else:
        await world.wait_until(lambda: not processes.has_pending_faults, 30.0)
    await processes.router("r2")
    await world.wait_until(spoken(world, 15), 60.0)
    if struck == "stopped" and kind is not Fencing:
        processes.resume("r1")
    await wait_complete(world, max_tokens=40)


@pytest.mark.parametrize("kind", [Assigned, Assignment])
@scenario_test
async def test_router_may_die_at_any_step_of_an_admission(world: MemoryWorld, kind: type) -> None:
    processes = await SimulatedProcesses.started(world)
    processes.on_append("r1", kind, processes.kill)
    publish_request(world)
    await world.wait_until(lambda: not processes.has_pending_faults)
    await processes.router("r2")
    await wait_complete(world)


@scenario_test
async def test_queued_request_of_a_dead_router_is_queued_by_the_next_one(
    world: MemoryWorld,
) -> None:
    processes = SimulatedProcesses(world)
    await processes.router("r1")
    publish_request(world)
    await world.sleep(2.0)
    processes.kill("r1")
    await processes.router("r2")
    await processes.worker("w1")
    received = await wait_complete(world)
    assert received.fences == 0


@pytest.mark.parametrize("kind", [End, CancelRun, Ended])
@scenario_test
async def test_router_may_die_at_any_step_of_an_end(world: MemoryWorld, kind: type) -> None:
    processes = await SimulatedProcesses.started(world)
    publish_request(world, 500)
    await world.wait_until(spoken(world, 5))
    processes.on_append("r1", kind, processes.kill)
    append_record(world, REQUESTS, Cancel(id="a", reason="enough"))
    await world.wait_until(lambda: not processes.has_pending_faults)
    await processes.router("r2")
    await world.sleep(30.0)
    assert ObservedAnswer(world).finish_reason == "cancelled"
    assert read_records(world, LEDGER, Ended) or read_records(world, LEDGER, Finished)
    assert len(ObservedAnswer(world).tokens) < 100, "its worker was told to stop"
    chunks = len(read_records(world, RESPONSES, Chunk))
    await world.sleep(5.0)
    assert len(read_records(world, RESPONSES, Chunk)) == chunks


@scenario_test
async def test_two_routers_that_both_own_a_lane_answer_once(world: MemoryWorld) -> None:
    """One of them was given up by the group and does not know it."""
    processes = SimulatedProcesses(world)
    first = await processes.router("r1")
    await processes.worker("w1")
    await processes.worker("w2")
    processes.on_append("r1", Assigned, processes.stop)
    publish_request(world, 40)
    await world.wait_until(lambda: not processes.has_pending_faults)
    group = world.broker.group(REQUESTS, "router")
    for member in list(group.members):
        group.evict(member)
    await processes.router("r2")
    await world.wait_until(spoken(world, 3), 60.0)
    processes.resume("r1")
    assert first._owners
    await wait_complete(world, max_tokens=40)
