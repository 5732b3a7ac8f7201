"""Tests of a router with workers without a role: requests that cost less on two workers than on
one."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from kvlane.app.audit.recompute import find_difference
from kvlane.app.perf_curves import PerfCurves
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import Assigned, Assignment
from kvlane.streams.topics import LEDGER, REQUESTS
from tests.harness.fake_worker import (
    FakeWorker,
    append_record,
    read_records,
    start_router,
    wait_for_items,
)
from tests.harness.handover_harness import LONG, PARAMS
from tests.harness.memory_world import MemoryWorld, scenario_test

COMPUTES = PerfCurves((0.0, 0.001, 1.0), (0.0, 0.0, 900.0), 900.0)
"""3000 tokens of a prompt in 4 ms, a step of decode in 900 ms."""
DECODES = PerfCurves((0.0, 1.0, 1.0), (0.0, 0.0, 1.0), 1.0)
"""3000 tokens in 3 s, a step in 1 ms."""


def worker(world: MemoryWorld, name: str, curves: PerfCurves, **over: Any) -> FakeWorker:
    engine = {"transfer_lease_s": 30.0, "curve": curves.coefficients()} | over
    return FakeWorker(world, name, **engine)


def decisions(world: MemoryWorld) -> list[Assigned]:
    return read_records(world, LEDGER, Assigned, "a")


@scenario_test
async def test_each_worker_does_the_part_that_it_is_fast_at(world: MemoryWorld) -> None:
    first, second = worker(world, "w1", COMPUTES), worker(world, "w2", DECODES)
    await start_router(world)
    append_record(world, REQUESTS, LONG)
    (prefill,) = await wait_for_items(world, lambda: first.received(Assignment))
    assert prefill.phase == "prefill"
    first.hand_over(prefill, PARAMS)
    (decode,) = await wait_for_items(world, lambda: second.received(Assignment))
    assert decode.phase == "decode"
    assert decode.request.prefill_result is not None
    split = decisions(world)
    assert [(each.phase, each.worker) for each in split] == [("prefill", "w1"), ("decode", "w2")]
    assert [find_difference(each) for each in split] == ["", ""]
    choice = split[0].choice
    assert choice is not None
    assert (choice.prefill.worker, choice.decode.worker) == ("w1", "w2")
    assert split[1].choice is None


@scenario_test
async def test_equal_idle_workers_get_whole_requests(world: MemoryWorld) -> None:
    both = [worker(world, name, COMPUTES) for name in ("w1", "w2")]
    await start_router(world)
    append_record(world, REQUESTS, LONG)
    (whole,) = await wait_for_items(
        world, lambda: [got for each in both for got in each.received(Assignment)]
    )
    assert whole.phase == "aggregated"
    (decision,) = decisions(world)
    assert decision.choice is not None
    assert find_difference(decision) == ""


@scenario_test
async def test_workers_without_transfers_get_whole_requests(world: MemoryWorld) -> None:
    for name, curves in (("w1", COMPUTES), ("w2", DECODES)):
        worker(world, name, curves, transfer_lease_s=None)
    await start_router(world)
    append_record(world, REQUESTS, LONG)
    (decision,) = await wait_for_items(world, lambda: decisions(world))
    assert (decision.phase, decision.choice) == ("aggregated", None)


@scenario_test
async def test_decode_never_goes_to_the_worker_that_computed_the_prompt(world: MemoryWorld) -> None:
    first, second = worker(world, "w1", COMPUTES), worker(world, "w2", DECODES, max_runs=1)
    await start_router(world)
    append_record(world, REQUESTS, LONG)
    (prefill,) = await wait_for_items(world, lambda: first.received(Assignment))
    append_record(
        world, REQUESTS, replace(LONG, id="b", token_ids=pack_tokens([1, 2, 3]), deadline_s=5)
    )
    (other,) = await wait_for_items(world, lambda: second.received(Assignment))
    assert other.request.id == "b"
    first.hand_over(prefill, PARAMS)
    await world.sleep(3)
    assert [each.phase for each in decisions(world)] == ["prefill"]
