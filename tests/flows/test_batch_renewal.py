"""Tests of batch requests that wait for hours after a preemption: the tokens that readers have are
used, and every reader sees one answer."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.codecs import decode, pack_tokens, unpack_tokens
from kvlane.streams.records import Assignment, CancelRun, Chunk, End, Fence, LogProb, PrefillDone
from kvlane.streams.request import OutputOptions, Request, ResultOptions
from kvlane.streams.topics import LEDGER, REQUESTS, RESPONSES
from tests.harness.fake_worker import (
    FakeWorker,
    append_record,
    chunk,
    read_records,
    start_router,
    wait_for_items,
)
from tests.harness.gateway_harness import memory_settings
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.results_harness import ResultsHarness
from tests.reply_harness import connect, read

HOUR_S = 3600
BATCH = Request(
    id="b", model="demo", token_ids=pack_tokens([7, 8, 9]), deadline_s=24 * HOUR_S,
    service_class="batch", result=ResultOptions(kind="tokens"), output=OutputOptions(logprobs=1),
)  # fmt: skip
URGENT = replace(BATCH, id="a", service_class="interactive", deadline_s=100, result=None)


def piece(token: int, text: str, chars: int, **fields: Any) -> Any:
    given = chunk(0, token, text=text, chars=chars, log_probs=((LogProb(token, -0.5),),))
    return replace(given, id="b", token_chars=(1,), **fields)


async def begin_and_preempt(world: MemoryWorld, worker: FakeWorker, text: str = "x") -> None:
    """A batch request has two tokens, then the peak takes its worker for itself."""
    run = worker.start((await wait_for_items(world, lambda: worker.received(Assignment)))[0])
    append_record(world, RESPONSES, piece(70, text, len(text), model="demo"))
    append_record(world, RESPONSES, piece(71, "y", len(text) + 1, seq=1, index=1))
    append_record(world, LEDGER, PrefillDone(run=1, **run))
    await world.sleep(1)
    append_record(world, REQUESTS, URGENT)
    await wait_for_items(world, lambda: worker.received(CancelRun))
    worker.running, worker.state = [], "draining"
    await world.sleep(2)
    worker.finish(worker.start(worker.received(Assignment)[-1]), "stop")


def answer_rest(worker: FakeWorker, world: MemoryWorld) -> Assignment:
    """The worker makes the last token."""
    rest = worker.received(Assignment)[-1]
    last = piece(72, "z", 3, attempt=rest.attempt, run="2", index=2, finish_reason="stop")
    run = worker.start(rest)
    append_record(world, RESPONSES, last)
    worker.finish(run, "stop")
    return rest


LIMITS = {"max_lifetime_s": 20.0, "deadline_s": 20.0, "dedup_window_s": 40.0}
KEPT_MS = 120_000


def shorten_retention(world: MemoryWorld) -> None:
    """Keep records for six times the longest lifetime of a request, as the topics do."""
    for topic in (REQUESTS, RESPONSES):
        world.broker.create_topic(topic, world.lanes, KEPT_MS)


@partial(scenario_test, lanes=1)
async def test_tokens_of_a_preempted_run_are_used_when_their_records_are_gone(
    world: MemoryWorld,
) -> None:
    """The last renewal alone has them; router and collector are others than before, twice."""
    shorten_retention(world)
    worker = FakeWorker(world, max_num_seqs=1)
    router = await start_router(world, "r0", **LIMITS)
    results = ResultsHarness(world, **LIMITS)
    await results.start()
    append_record(world, REQUESTS, replace(BATCH, queued_ms=world.broker.now_ms()))
    reading = world.spawn(read(await connect(world), "b"))
    await begin_and_preempt(world, worker)
    for number in (1, 2):
        await world.sleep(250)
        await router.stop()
        await router._ctx.cancel_tasks()
        await results.kill()
        router = await start_router(world, f"r{number}", **LIMITS)
        await results.start()
    await world.sleep(100)
    assert read_records(world, RESPONSES, Chunk, "b") == []
    worker.state = "ready"
    await world.wait_until(lambda: len(worker.received(Assignment)) == 3, within_s=70)
    rest = answer_rest(worker, world)
    assert list(unpack_tokens(rest.taken)) == [70, 71]
    assert (rest.taken_chars, rest.request.shown) == (2, None)
    assert [piece.text for piece in await reading if isinstance(piece, Chunk)] == ["x", "y", "z"]
    result = await results.only("b")
    assert result.body is not None
    (choice,) = result.body["choices"]
    assert (choice["text"], choice["token_ids"]) == ("xyz", [70, 71, 72])
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 3
    assert (result.attempts, result.timings.ttft_ms) == (2, None)
    end_of_lane = world.records(REQUESTS, 0)[-1].offset + 1
    for group in ("router", "collector"):
        committed = world.broker.group(REQUESTS, group).committed
        await world.wait_until(lambda c=committed: c.get(0) == end_of_lane, within_s=10)


def renewals(world: MemoryWorld) -> list[Request]:
    found = map(decode, world.records(REQUESTS, 0))
    return [record for record in found if isinstance(record, Request) and record.shown is not None]


@pytest.mark.parametrize("killed_after_s", [0.0, 0.9, 1.1, 1.9, 2.1, 2.9, 3.1, 3.9, 4.1, 5.5])
@partial(scenario_test, lanes=1)
async def test_owner_killed_within_a_renewal_loses_no_token(
    world: MemoryWorld, killed_after_s: float
) -> None:
    """Fence, record, Fence and Fencing take a second each."""
    worker = FakeWorker(world, max_num_seqs=1)
    log = await world.connect("r1")
    ctx = ProcessContext("r1", world.clock, random.Random("r1"))
    await Router(log, memory_settings(**LIMITS), ctx).start()
    append_record(world, REQUESTS, replace(BATCH, queued_ms=world.broker.now_ms()))
    await begin_and_preempt(world, worker)
    await world.wait_until(lambda: len(renewals(world)) == 1)
    fences = len(read_records(world, RESPONSES, Fence, "b"))
    world.faults.slow["append"] = 1.0
    await world.wait_until(lambda: len(read_records(world, RESPONSES, Fence, "b")) > fences)
    await world.sleep(killed_after_s)
    log.kill()
    await ctx.cancel_tasks()
    world.faults.slow.clear()
    await start_router(world, "r2", **LIMITS)
    await world.sleep(60)
    worker.state = "ready"
    await world.wait_until(lambda: len(worker.received(Assignment)) == 3, within_s=70)
    rest = answer_rest(worker, world)
    assert list(unpack_tokens(rest.taken)) == [70, 71]
    pieces = [p for p in await read(await connect(world), "b") if isinstance(p, Chunk)]
    assert "".join(p.text for p in pieces) == "xyz"


@partial(scenario_test, lanes=1)
async def test_renewal_larger_than_a_record_leaves_the_limits_as_they_are(
    world: MemoryWorld, caplog: pytest.LogCaptureFixture
) -> None:
    worker = FakeWorker(world, max_num_seqs=1)
    await start_router(world, **LIMITS)
    prompt = pack_tokens(range(1_000_000))
    append_record(
        world, REQUESTS, replace(BATCH, token_ids=prompt, queued_ms=world.broker.now_ms())
    )
    await begin_and_preempt(world, worker, text="x" * 5_000_000)
    await world.sleep(60)
    assert [end.code for end in read_records(world, RESPONSES, End, "b")] == ["deadline"]
    assert renewals(world) == []
    assert "b has to end within its present time limit" in caplog.text


@partial(scenario_test, lanes=1)
async def test_renewal_of_a_request_that_no_router_knows_is_not_begun_anew(
    world: MemoryWorld,
) -> None:
    """Readers have a part of its answer, which the routers were down for too long to continue."""
    worker = FakeWorker(world)
    await start_router(world, **LIMITS)
    renewed = replace(BATCH, is_renewed=True, shown=piece(70, "x", 1, attempt=1))
    append_record(world, REQUESTS, replace(renewed, queued_ms=world.broker.now_ms()))
    await world.sleep(20)
    assert worker.received(Assignment) == []
    assert [end.code for end in read_records(world, RESPONSES, End, "b")] == ["lost"]
