"""Tests of the commands about a fleet, with the log in memory."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvlane.app.audit.fleet.fleet_reader import FleetReader, reading_fleet
from kvlane.app.audit.fleet.fleet_status import FleetStatus, TopicSampler, fleet_status
from kvlane.app.audit.fleet.request_rows import ended_requests_of, open_requests_of
from kvlane.app.audit.fleet.worker_rows import worker_rows
from kvlane.app.audit.time_range import InvalidTime
from kvlane.app.cli import app
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import encode
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.ports import Entry
from kvlane.streams.reading.range_reader import NO_DATA_TIMEOUT_S
from kvlane.streams.record_types.batch_records import BatchJob
from kvlane.streams.records import Ended, EngineConfig, Heartbeat, ModelCard, WorkerCard
from kvlane.streams.request import Request
from kvlane.streams.topics import (
    BATCH_JOBS,
    DEAD_LETTERS,
    KV_EVENTS,
    LEDGER,
    PROMPTS,
    REGISTRY,
    REQUESTS,
    lane_of,
)
from tests.harness.gateway_harness import GatewayHarness
from tests.harness.memory_commands import connect_commands
from tests.harness.memory_world import MemoryWorld, scenario_test

TIMEOUT_S = 3.0
COMMANDS = [["workers"], ["models"], ["requests"], ["queue"], ["status"]]


async def present_status(reader: FleetReader, sampler: TopicSampler) -> FleetStatus:
    open_requests = open_requests_of(reader.view, reader.now_ms())
    workers = worker_rows(reader.view, reader.now_ms(), TIMEOUT_S)
    return await fleet_status(reader, sampler, workers, open_requests)


async def status_of(world: MemoryWorld, since: str = "-5m") -> FleetStatus:
    log = await world.connect("fleet")
    sampler = TopicSampler(log, world.clock)
    await sampler.begin()
    async with reading_fleet(log, world.clock, since) as reader:
        return await present_status(reader, sampler)


def alarms(status: FleetStatus) -> list[tuple[str, str]]:
    return [(alarm.kind, alarm.name) for alarm in status.alarms]


@scenario_test
async def test_fleet_is_read_while_it_answers(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    done = harness.chat("hello")
    await done.wait_done()
    running = harness.chat("x" * 250, stream=True)
    await world.wait_until(lambda: len(running.text) > 60)
    log = await world.connect("fleet")
    async with reading_fleet(log, world.clock, "-5m") as reader:
        (worker,) = worker_rows(reader.view, reader.now_ms(), TIMEOUT_S)
        assert (worker.id, worker.state, worker.running) == ("w1", "ready", 1)
        (row,) = open_requests_of(reader.view, reader.now_ms())
        (first, second) = harness.requests()
        assert (row.id, row.phase, row.worker) == (second.id, "decode", "w1")
        assert row.output_tokens > 0
        (ended,) = ended_requests_of(reader.view)
        assert (ended.id, ended.code) == (first.id, "stop")
        assert ended.ttft_ms is not None
        assert ended.total_ms is not None
        assert 0 <= ended.ttft_ms <= ended.total_ms
        await running.wait_done()
        await world.sleep(2)
        assert open_requests_of(reader.view, reader.now_ms()) == []
        assert len(ended_requests_of(reader.view)) == 2


@scenario_test
async def test_status_of_a_healthy_deployment_has_no_alarm(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    await harness.chat("hello").wait_done()
    status = await status_of(world)
    assert status.alarms == []
    assert status.workers == {"ready": 1}
    assert status.requests == {}
    assert next(row for row in status.topics if row.name == "kv-events").rate > 0
    assert next(row for row in status.topics if row.name == REQUESTS).lag == 0


@scenario_test
async def test_killed_worker_is_silent_then_lost(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    await harness.start_backend(worker_timeout_s=TIMEOUT_S)
    await harness.start_worker("w2")
    log = await world.connect("fleet")
    async with reading_fleet(log, world.clock, "-5m") as reader:
        await harness.kill("w2")
        states = []
        for _ in range(100):
            rows = worker_rows(reader.view, reader.now_ms(), TIMEOUT_S)
            states += [row.state for row in rows if row.id == "w2"]
            await world.sleep(0.1)
    assert list(dict.fromkeys(states))[-1] == "lost"
    status = await status_of(world)
    assert alarms(status) == [("worker", "w2")]
    assert status.workers == {"ready": 1, "lost": 1}


@scenario_test
async def test_workers_of_a_deployment_that_is_down_are_silent(world: MemoryWorld) -> None:
    """Nothing is appended any more, so the last heartbeat is the newest record."""
    harness = await GatewayHarness.open(world)
    await harness.start_worker("w1")
    await world.sleep(2)
    await harness.kill("w1")
    await world.sleep(60)
    status = await status_of(world)
    assert status.workers == {"silent": 1}
    assert alarms(status) == [("worker", "w1"), ("model", "demo"), ("router", "all")]


@scenario_test
async def test_unread_records_are_late_after_a_minute(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    world.append_raw(PROMPTS, 0, Entry(b"a", b"{}"))
    await world.sleep(30)
    status = await status_of(world)
    row = next(row for row in status.topics if row.name == PROMPTS)
    assert (row.lag, row.late, status.alarms) == (1, 0, [])
    world.append_raw(PROMPTS, 1, Entry(b"b", b"{}"))
    await world.sleep(40)
    status = await status_of(world)
    row = next(row for row in status.topics if row.name == PROMPTS)
    assert (row.lag, row.late) == (2, 1)
    assert alarms(status) == [("lag", PROMPTS)]
    assert harness.requests() == []


@scenario_test
async def test_dead_letters_of_the_window_raise_an_alarm(world: MemoryWorld) -> None:
    await GatewayHarness.with_backend(world)
    world.append_raw(DEAD_LETTERS, 0, Entry(b"a", b"?"))
    status = await status_of(world)
    assert (alarms(status), status.dead_letters) == ([("dead letters", DEAD_LETTERS)], 1)
    log = await world.connect("top")
    sampler = TopicSampler(log, world.clock)
    await sampler.begin()
    async with reading_fleet(log, world.clock, "-1m") as reader:
        assert (await present_status(reader, sampler)).dead_letters == 1
        await world.sleep(120)
        assert (await present_status(reader, sampler)).alarms == [], "top goes on"


@scenario_test
async def test_window_bounds_the_records_that_are_read(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    await harness.chat("hello").wait_done()
    await world.sleep(120)
    log = await world.connect("fleet")
    async with reading_fleet(log, world.clock, "-1m") as reader:
        assert reader.follower.applied < 400
        assert ended_requests_of(reader.view) == []
        assert [row.state for row in worker_rows(reader.view, reader.now_ms(), 3)] == ["ready"]
    with pytest.raises(InvalidTime, match="kept for an hour"):
        async with reading_fleet(log, world.clock, "-2h"):
            pass


@scenario_test
async def test_error_of_the_reading_reaches_the_command(world: MemoryWorld) -> None:
    world.broker.append(REGISTRY, 0, [Entry(b"a", b"\x80", (("t", b"Poem"), ("r", b"7")))])
    with pytest.raises(Exception, match="registry:0:0"):
        async with reading_fleet(await world.connect("fleet"), world.clock, "-1m"):
            pass


@scenario_test
async def test_slow_read_may_take_longer_than_a_pause_between_records(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlane.streams.views.follower.RECORDS_PER_POLL", 1)
    for number in range(4):
        world.append(REGISTRY, 0, ModelCard(name=f"m{number}"), key=f"model/m{number}")
    world.faults.slow["poll"] = NO_DATA_TIMEOUT_S / 2
    began_s = world.clock.now()
    async with reading_fleet(await world.connect("fleet"), world.clock, "-5m") as reader:
        assert len(reader.view.fleet.models) == 4
    assert world.clock.now() - began_s > NO_DATA_TIMEOUT_S


# --- the command line -----------------------------------------------------------------------------


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MemoryBroker:
    monkeypatch.setattr("kvlane.app.audit.fleet.fleet_reader.OBSERVE_S", 0.05)
    return connect_commands(MemoryBroker(SystemClock(), lanes=4), monkeypatch)


def kvlane(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def write(broker: MemoryBroker) -> None:
    """A worker that was registered a moment ago, its model, and a request that waits."""
    card = WorkerCard(id="w[1]", slot=0, model="demo", config=EngineConfig(model="demo"), epoch=0)
    broker.append(REGISTRY, 0, [encode(card, "worker/w[1]")])
    broker.append(REGISTRY, 0, [encode(ModelCard(name="demo"), "model/demo")])
    request = Request(id="job-1", model="demo", tenant="acme\x1b[31m", token_ids=b"1234")
    broker.append(REQUESTS, lane_of("job-1", 4), [encode(request, "job-1")])


def test_rows_are_shown_with_the_texts_of_topics_escaped(memory: MemoryBroker) -> None:
    write(memory)
    assert "w[1]" in kvlane("workers").stdout
    assert "demo" in kvlane("models").stdout
    shown = kvlane("requests").stdout
    assert "job-1" in shown
    assert "acme\\x1b[31m" in shown
    assert "\x1b" not in shown
    assert "job-1" not in kvlane("requests", "--tenant", "other").stdout
    assert "job-1" in kvlane("requests", "--model", "demo").stdout
    assert "job-1" not in kvlane("requests", "--failed").stdout
    assert "job-1" not in kvlane("requests", "--slow", "3").stdout
    assert "lane" in kvlane("queue").stdout


def test_last_line_has_the_number_of_requests_that_are_not_kept(
    memory: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = "kvlane.app.audit.fleet.request_facts"
    monkeypatch.setattr(f"{facts}.MAX_NEWEST", 1)
    monkeypatch.setattr(f"{facts}.MAX_OF_MINUTE", 1)
    monkeypatch.setattr("kvlane.app.audit.fleet.fleet_view.MAX_OPEN", 1)
    for name in ("a", "b", "c", "d"):
        memory.append(LEDGER, 0, [encode(Ended(id=name, code="invalid"), name)])
        memory.append(REQUESTS, 0, [encode(Request(id=f"open-{name}"), f"open-{name}")])
    assert "d" in kvlane("requests", "--slow", "1").stdout
    shown = kvlane("requests", "--failed").stdout
    assert shown.splitlines()[-1].startswith("2 more have failed and are not listed")
    assert json.loads(kvlane("requests", "--failed", "--json", "-").stdout)["left_out"] == 2
    assert json.loads(kvlane("requests", "--slow", "2", "--json", "-").stdout)["left_out"] == 0
    shown = kvlane("requests").stdout
    assert "open-d" in shown
    assert shown.splitlines()[-1].startswith("up to 3 older ones are open and are not listed")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_json_goes_to_standard_output_alone(memory: MemoryBroker, command: list[str]) -> None:
    write(memory)
    found: dict[str, Any] = json.loads(kvlane(*command, "--json", "-").stdout)
    assert found["since_ms"] <= found["now_ms"]
    rows = found[{"queue": "lanes", "status": "topics"}.get(command[0], command[0])]
    assert rows
    assert all(isinstance(row, dict) for row in rows)


@pytest.mark.parametrize("command", [["workers"], ["models"], ["requests"]], ids=" ".join)
def test_rows_need_no_right_to_other_topics(
    memory: MemoryBroker, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr(TopicSampler, "begin", None)
    assert kvlane(*command).exit_code == 0


def test_status_fails_with_each_alarm_by_name(memory: MemoryBroker) -> None:
    write(memory)
    shown = kvlane("status")
    assert shown.exit_code == 1
    assert "router all: no router has reported a lane for 5 s" in shown.stdout
    assert "model demo: has no ready worker, and 1 open requests" in shown.stdout


@pytest.mark.parametrize("color", ["", "1"])
def test_top_without_a_terminal_prints_one_frame(
    memory: MemoryBroker, monkeypatch: pytest.MonkeyPatch, color: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", color)
    write(memory)
    for name in ("a", "b"):
        memory.append(LEDGER, 0, [encode(Ended(id=f"ended-{name}", code="invalid"), name)])
    created_s = SystemClock().wall_ms() // 1000
    job = BatchJob("batch-1", "/v1/completions", "file-1", created_s, window_s=60)
    memory.append(BATCH_JOBS, 0, [encode(job, "batch/batch-1")])
    monkeypatch.setattr("kvlane.app.commands.fleet.fleet_commands.TOP_MORE_ROWS", 1)
    shown = kvlane("top")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.count("router all: no router") == 1
    assert "w[1]" in shown.stdout
    assert "job-1" in shown.stdout
    assert shown.stdout.count("ended-") == 1
    assert "batch-1" in shown.stdout


def test_top_shows_ten_workers_those_that_are_not_ready_first(memory: MemoryBroker) -> None:
    for number in range(12):
        name = f"w{number:02}"
        card = WorkerCard(
            id=name, slot=number, model="demo", config=EngineConfig(model="demo"), epoch=number
        )
        memory.append(REGISTRY, 0, [encode(card, f"worker/{name}")])
    beat = Heartbeat(worker="w00", epoch=0, slot_offset=0)
    memory.append(KV_EVENTS, 0, [encode(beat, "w00")])
    shown = kvlane("top").stdout
    assert "1 ready, 11 starting" in shown
    assert [word for word in shown.split() if word[:2] in ("w0", "w1")] == [
        f"w{number:02}" for number in range(1, 11)
    ]
    assert "records/s" in shown


@pytest.mark.parametrize("command", [*COMMANDS, ["top"]], ids=" ".join)
def test_command_without_a_broker_names_the_setting(
    monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.delenv("KVLANE_BOOTSTRAP_SERVERS", raising=False)
    shown = kvlane(*command)
    assert shown.exit_code == (3 if command == ["status"] else 1), "1 is an alarm"
    assert "KVLANE_BOOTSTRAP_SERVERS" in shown.output
    assert "Traceback" not in shown.output


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("workers", "--since", "-3h"), "kept for an hour"),
        (("requests", "--since", "yesterday"), "invalid time"),
        (("requests", "--slow", "0"), "0 is not in the range"),
        (("requests", "--slow", "3", "--failed"), "--slow or --failed, not both"),
    ],
)
def test_wrong_option_is_explained(
    memory: MemoryBroker, arguments: tuple[str, ...], why: str
) -> None:
    shown = kvlane(*arguments)
    assert shown.exit_code in (1, 2)
    assert why in " ".join(shown.output.split())
