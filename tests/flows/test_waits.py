"""Tests of the reasons of waits, as routers report them and operators read them."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from kvlane.app.audit.timeline import explain_request
from kvlane.app.audit.waits import explain_wait, read_reports
from kvlane.app.cli import app
from kvlane.app.lanes import periodic_records
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import encode, pack_tokens
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.ports import Entry
from kvlane.streams.records import Assignment, ReportedWaits, RouterCapacity
from kvlane.streams.request import Hints, Request, RoutingConstraints
from kvlane.streams.topics import CAPACITY, REQUESTS, lane_of
from tests.harness.fake_worker import FakeWorker, append_record, start_router
from tests.harness.memory_commands import connect_commands
from tests.harness.memory_world import MemoryWorld, scenario_test

one_lane = partial(scenario_test, lanes=1)


def ask(world: MemoryWorld, name: str, **over: Any) -> None:
    fields = {"model": "demo", "token_ids": pack_tokens(range(10)), "deadline_s": 500}
    append_record(world, REQUESTS, Request(id=name, **(fields | over)))


async def wait_text(world: MemoryWorld, request_id: str) -> str:
    """The wait of a request as `kvlane explain` shows it."""
    log = await world.connect("audit")
    timeline = await explain_request(log, world.clock, request_id)
    return await explain_wait(log, world.clock, timeline)


@one_lane
async def test_each_waiting_request_has_its_own_reason(world: MemoryWorld) -> None:
    worker = FakeWorker(world, max_runs=1)
    FakeWorker(world, "w2", state="draining", taints=("gpu=h100",))
    await start_router(world, max_queued_requests=8, policy="dynamo")
    await world.sleep(5)
    ask(world, "running")
    await world.wait_until(lambda: len(worker.received(Assignment)) == 1)
    worker.start(worker.received(Assignment)[0])
    ask(world, "any")
    ask(world, "pinned", hints=Hints(backend_instance_id="w1"))
    constraints = RoutingConstraints(required_taints=("gpu=h100",))
    ask(world, "tainted", hints=Hints(routing_constraints=constraints))
    ask(world, "batch", service_class="batch", queued_ms=world.broker.now_ms())
    for n in range(5):
        ask(world, f"prompt-{n}", queued_ms=world.broker.now_ms())
    await world.sleep(25)
    reports = await read_reports(await world.connect("audit"), world.clock)
    assert {wait.request_id: wait.reason for wait in reports.waits} == {
        "any": "all workers are full",
        "pinned": "the pinned worker w1 is busy",
        "tainted": "no ready worker has all required_taints",
        "batch": "all workers are full",
        "prompt-0": "all workers are full",
        **{
            f"prompt-{n}": "deferred: prompts fill their share of the router's queue"
            for n in range(1, 5)
        },
    }
    shown = await wait_text(world, "tainted")
    assert "assigned to no worker for 25.0 s: queued in router r1" in shown
    assert "no ready worker has all required_taints (as of " in shown
    assert await wait_text(world, "running") == ""


@one_lane
async def test_request_that_is_queued_for_a_worker_names_it(world: MemoryWorld) -> None:
    worker = FakeWorker(world, block_size=16, total_kv_blocks=100)  # 1600 tokens
    await start_router(world, policy="predictive", max_queue_wait_s=100)
    await world.sleep(5)
    ask(world, "a", token_ids=pack_tokens([7] * 1200))
    await world.wait_until(lambda: len(worker.received(Assignment)) == 1)
    worker.start(worker.received(Assignment)[0])
    ask(world, "b", token_ids=pack_tokens([8] * 1000))
    await world.sleep(21)
    assert "its worker is busy: w1 (as of" in await wait_text(world, "b")


@one_lane
async def test_reason_of_a_wait_follows_its_change(world: MemoryWorld) -> None:
    worker = FakeWorker(world, state="draining")
    await start_router(world)
    await world.sleep(5)
    ask(world, "a")
    await world.sleep(22)
    assert "no worker is ready" in await wait_text(world, "a")
    worker.state = "ready"
    await world.wait_until(lambda: len(worker.received(Assignment)) == 1)
    await world.sleep(15)
    shown = await wait_text(world, "a")
    assert "not started by its worker for 15" in shown
    assert "w1" in shown
    worker.start(worker.received(Assignment)[0])
    assert await wait_text(world, "a") == ""
    await world.sleep(10)
    assert (await read_reports(await world.connect("audit"), world.clock)).waits == ()


@one_lane
async def test_request_that_no_router_has_read_is_unread(world: MemoryWorld) -> None:
    ask(world, "a")
    assert "no router has reported" in await wait_text(world, "a")
    router = await start_router(world)
    await world.sleep(5)
    world.append(CAPACITY, 0, RouterCapacity(router="r2"))
    for position, words in ((0, "unread in its lane"), (1, "queued in router r3, which reports")):
        await router.stop()
        world.append(CAPACITY, 0, RouterCapacity(router="r3", positions={0: position}))
        assert words in await wait_text(world, "a")


@one_lane
async def test_lane_of_a_dead_router_has_no_owner(world: MemoryWorld) -> None:
    FakeWorker(world, state="draining")
    log = await world.connect("r1")
    world.append(CAPACITY, 0, RouterCapacity(router="r1", positions={0: 1}))
    await world.sleep(8)
    world.append(CAPACITY, 0, RouterCapacity(router="r2", positions={}))
    ask(world, "a")
    assert "no router owns lane 0" in await wait_text(world, "a")
    await log.close()


@one_lane
async def test_report_of_waits_is_bounded_and_has_the_longest(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(periodic_records, "MAX_REPORTED_WAITS", 2)
    FakeWorker(world, state="draining")
    await start_router(world, no_worker_timeout_s=300)
    await world.sleep(5)
    ask(world, "batch", service_class="batch", queued_ms=world.broker.now_ms())
    for name in ("first", "second", "third"):
        await world.sleep(1)
        ask(world, name)
    await world.sleep(25)
    reports = await read_reports(await world.connect("audit"), world.clock)
    assert [wait.request_id for wait in reports.waits] == ["first", "second"]
    assert reports.left_out == 2
    assert "2 wait that none reports" in await wait_text(world, "third")


@one_lane
async def test_report_with_a_reason_that_is_missing_is_left_out(world: MemoryWorld) -> None:
    odd = {"router": "r1", "waits": {"requests": [["a", 1, 3]], "reasons": ["x"]}}
    headers = encode(RouterCapacity(router="r1"), "r1").headers
    world.append_raw(CAPACITY, 0, Entry(b"r1", msgspec.msgpack.encode(odd), headers))
    assert (await read_reports(await world.connect("audit"), world.clock)).waits == ()


def test_waiting_requests_are_listed_with_their_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = connect_commands(MemoryBroker(SystemClock(), lanes=4), monkeypatch)
    now_ms = memory.now_ms()
    waits = ReportedWaits(
        reasons=("all workers are full", "no worker is ready"), left_out=7,
        requests=(("job-1", now_ms - 60_000, 0), ("job-[2]\x1b", now_ms - 30_000, 1)),
    )  # fmt: skip
    report = RouterCapacity(router="r1", positions={lane_of("job-1", 4): 1}, waits=waits)
    memory.append(CAPACITY, 0, [encode(report, "r1"), encode(RouterCapacity(router="r1"), "r1")])
    shown = CliRunner().invoke(app, ("explain", "--waiting"))
    assert shown.exit_code == 0, shown.output
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert ["job-1", "60", "s", "r1", "all", "workers", "are", "full"] in lines
    assert ["job-[2]\\x1b", "30", "s", "r1", "no", "worker", "is", "ready"] in lines
    assert ["1", "no", "worker", "is", "ready"] in lines
    assert lines[-1] == ["7", "more"]


@pytest.mark.parametrize("arguments", [(), ("job-1", "--waiting")])
def test_explain_takes_an_id_or_the_option_waiting(arguments: tuple[str, ...]) -> None:
    assert CliRunner().invoke(app, ("explain", *arguments)).exit_code == 2


def test_no_wait_is_said_to_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    connect_commands(MemoryBroker(SystemClock(), lanes=4), monkeypatch)
    shown = CliRunner().invoke(app, ("explain", "--waiting"))
    assert "no request has waited in a router for 10 s" in shown.stdout
