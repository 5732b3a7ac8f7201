"""Tests of the audit of the log: views built again, and the timeline of a request."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvlane.app.audit import timeline
from kvlane.app.audit.rebuild import VIEW_TOPICS, ViewName, rebuild_view
from kvlane.app.audit.timeline import explain_request
from kvlane.app.cli import app
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import encode, pack_tokens
from kvlane.streams.errors import NewerRecord
from kvlane.streams.ids import new_request_id
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.ports import Entry, Partition
from kvlane.streams.records import (
    Assigned,
    Cancel,
    Candidate,
    Chunk,
    End,
    Ended,
    EngineConfig,
    Fence,
    Fencing,
    Finished,
    PassthroughDelta,
    PrefillDone,
    Refused,
    RequestOffset,
    RouterCapacity,
    Started,
    Usage,
    WorkerCard,
)
from kvlane.streams.request import Request
from kvlane.streams.topics import (
    BATCH,
    CAPACITY,
    KV_EVENTS,
    LEDGER,
    PROMPTS,
    REGISTRY,
    REQUESTS,
    RESPONSES,
    lane_of,
    partition_of,
)
from tests.harness.fake_worker import FakeWorker
from tests.harness.gateway_harness import GatewayHarness, memory_settings
from tests.harness.memory_commands import connect_commands
from tests.harness.memory_world import MemoryWorld, scenario_test

VIEWS: tuple[tuple[ViewName, str], ...] = (
    ("load", "_ledger"),
    ("fleet", "_fleet"),
    ("index", "_index"),
)


async def with_a_death(world: MemoryWorld) -> GatewayHarness:
    """A world in which a worker died in the middle of an answer."""
    harness = await GatewayHarness.open(world)
    await harness.start_backend(worker_timeout_s=3)
    answer = harness.chat("x" * 200, stream=True)
    await world.wait_until(lambda: len(answer.text) > 20)
    await harness.kill("w1")
    await harness.start_worker("w2")
    await answer.wait_done()
    return harness


@scenario_test
async def test_rebuilt_view_equals_the_routers(world: MemoryWorld) -> None:
    await with_a_death(world)
    ctx = ProcessContext("r2", world.clock, random.Random("r2"))
    router = Router(await world.connect("r2"), memory_settings(), ctx)
    await router.start()
    await world.sleep(3)
    log = await world.connect("audit")
    for name, attribute in VIEWS:
        view = getattr(router, attribute)
        positions = {}
        for topic in VIEW_TOPICS[name]:
            for number in range(await log.partitions(topic)):
                source = Partition(topic, number)
                positions[source] = view.position(source)
        again = await rebuild_view(log, memory_settings(), world.clock, name, positions)
        got = {Partition(s.topic, s.partition): s.state_hash for s in again.partitions}
        assert got == {source: view.state_hash(source) for source in positions}
    await router.stop()
    await ctx.cancel_tasks()


@scenario_test
async def test_rebuilt_view_stops_at_the_given_position_or_time(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    await harness.chat("hello").wait_done()
    first = harness.requests()[0]
    lane = lane_of(first.id, world.lanes)
    await world.sleep(1)  # its end is told before it is in the ledger
    before_ms = world.clock.wall_ms()
    await world.sleep(1)
    await harness.chat("hello").wait_done()
    await world.sleep(1)
    log = await world.connect("audit")
    args = (log, memory_settings(), world.clock, "load")
    open_one = await rebuild_view(*args, {Partition(LEDGER, lane): 1})
    assert open_one.summary["unfinished requests"] == 1
    by_time = await rebuild_view(*args, before_ms)
    assert sum(by_time.summary["ended requests by code"].values()) == 1
    whole = await rebuild_view(*args)
    assert sum(whole.summary["ended requests by code"].values()) == 2
    assert len({open_one.state_hash, by_time.state_hash, whole.state_hash}) == 3
    assert (await rebuild_view(*args)) == whole


@scenario_test
async def test_rebuilt_index_has_the_blocks_of_a_given_time(world: MemoryWorld) -> None:
    worker = FakeWorker(world)
    worker.publish_blocks(list(range(10 * 16)), 16)
    await world.sleep(10)
    before_ms = world.clock.wall_ms()
    await world.sleep(10)
    worker.publish_blocks(list(range(30 * 16)), 16, first_event_id=2)
    args = (await world.connect("audit"), memory_settings(), world.clock, "index")
    then, now = await rebuild_view(*args, before_ms), await rebuild_view(*args)
    assert then.summary["blocks by worker and rank"] == {"w1/0": 10}
    assert now.summary["blocks by worker and rank"] == {"w1/0": 30}
    partition = partition_of(b"w1", world.broker.partitions[KV_EVENTS])
    by_offset = await rebuild_view(
        *args, {Partition(KV_EVENTS, partition): then.partitions[partition].position}
    )
    assert by_offset.partitions[partition] == then.partitions[partition]
    assert then.state_hash != now.state_hash


@scenario_test
async def test_progress_reaches_the_end_and_broken_records_are_counted(world: MemoryWorld) -> None:
    world.broker.append(LEDGER, 1, [Entry(b"a", b"\xff", (("t", b"Ended"),))])
    world.append(LEDGER, 1, Ended(id="a", code="lost"), key="a")
    received: list[tuple[int, int]] = []
    log = await world.connect("audit")
    again = await rebuild_view(
        log, memory_settings(), world.clock, "load", progress=lambda *both: received.append(both)
    )
    assert (again.partitions[1].records, again.partitions[1].malformed) == (2, 1)
    assert received[-1] == (2, 2)


@scenario_test
async def test_record_for_newer_readers_is_not_skipped(world: MemoryWorld) -> None:
    world.broker.append(LEDGER, 0, [Entry(b"a", b"\x80", (("t", b"Poem"), ("r", b"7")))])
    with pytest.raises(NewerRecord, match="ledger:0:0"):
        await rebuild_view(await world.connect("audit"), memory_settings(), world.clock, "load")


@scenario_test
async def test_timeline_of_a_request_has_its_move_to_another_worker(world: MemoryWorld) -> None:
    harness = await with_a_death(world)
    (request,) = harness.requests()
    timeline = await explain_request(await world.connect("audit"), world.clock, request.id)
    names = [step.name for step in timeline.steps]
    assert names[:3] == ["Request", "Assigned", "Started"]
    fencing = names.index("Fencing")
    assert names.index("Shown") < fencing < names.index("Fence")
    assert names[fencing:].index("Assigned") > 0
    moved = timeline.steps[fencing]
    assert moved.fields["attempt"] == 1
    assert moved.fields["reason"]
    workers = [step.fields["worker"] for step in timeline.steps if step.name == "Assigned"]
    assert workers == ["w1", "w2"]
    shown = [step.fields["tokens"] for step in timeline.steps if step.name == "Shown"]
    assert len(shown) == 2
    assert sum(shown) == 200
    assert timeline.ending == "stop"


@scenario_test
async def test_timeline_counts_calls_and_reasoning_and_shows_neither(world: MemoryWorld) -> None:
    deltas: list[dict[str, Any]] = [
        {"reasoning_content": "hidden", "reasoning": "hidden"},
        {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "secret"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
    ]
    data = tuple(PassthroughDelta(delta=delta) for delta in deltas)
    chunk = Chunk(id="a", attempt=0, run="1", seq=0, index=0, token_ids=(1, 2), data=data)
    world.append(RESPONSES, lane_of("a", 2), chunk, key="a")
    timeline = await explain_request(await world.connect("audit"), world.clock, "a")
    (shown,) = [step.fields for step in timeline.steps if step.name == "Shown"]
    assert (shown["calls"], shown["reasoning_chars"]) == (1, len("hidden"))
    assert "hidden" not in str(timeline)
    assert "secret" not in str(timeline)


@scenario_test
async def test_timeline_contains_no_prompt_text(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    await harness.chat("sesame").wait_done()
    (request,) = harness.requests()
    timeline = await explain_request(await world.connect("audit"), world.clock, request.id)
    assert timeline.steps[0].fields["prompt_tokens"] == len(request.token_ids) // 4
    assert "sesame" not in str(timeline)


@scenario_test
async def test_unknown_id_has_no_timeline(world: MemoryWorld) -> None:
    world.append(LEDGER, lane_of("job-17", 2), Ended(id="other", code="lost"), key="other")
    timeline = await explain_request(await world.connect("audit"), world.clock, "job-17")
    assert (timeline.steps, timeline.ending) == ([], "")


# --- the command line -----------------------------------------------------------------------------


class Ticking(SystemClock):
    """A millisecond passes with every look at it, so that records come one after the other."""

    def __init__(self) -> None:
        self._ms = super().wall_ms()

    def wall_ms(self) -> int:
        self._ms += 1
        return self._ms


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MemoryBroker:
    return connect_commands(MemoryBroker(Ticking(), lanes=4), monkeypatch)


def kvlane(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def write(broker: MemoryBroker) -> None:
    """The story of job-17, as records."""
    lane = lane_of("job-17", 4)
    origin = RequestOffset(topic="requests", partition=lane, offset=0)
    run = {"id": "job-17", "phase": "aggregated", "epoch": 3}
    due = {"origin": origin, "responses_from": 0, "deadline_ms": 99}

    def append(topic: str, record: object) -> None:
        broker.append(topic, lane, [encode(record, "job-17")])  # type: ignore[arg-type]

    append(REQUESTS, Request(id="job-17", model="demo", token_ids=pack_tokens([1, 2, 3])))
    append(
        LEDGER,
        Assigned(
            **run, attempt=0, worker="w1", **due, policy="dynamo", router="r[9]", prompt_tokens=3,
            prefill_tokens=3, params={"temperature": 0.5}, block_size=2,
            listed=(
                Candidate(worker="w2", epoch=4, cost=6.5, overlap_blocks=1, open_tokens=12),
                Candidate(worker="w1", epoch=3, cost=1.5),
            ),
        ),
    )  # fmt: skip
    append(LEDGER, Started(**run, attempt=0, worker="w1", run=5, **due))
    done = PrefillDone(**run, attempt=0, worker="w1", run=5, cached_tokens=2, ttft_ms=12.5)
    append(LEDGER, done)
    chunk = Chunk(id="job-17", attempt=0, run="5", seq=0, index=0, token_ids=(7, 8), text="ab")
    append(RESPONSES, chunk)
    append(LEDGER, Fencing(id="job-17", attempt=1, reason="lost"))
    append(RESPONSES, Fence(id="job-17", attempt=1))
    append(LEDGER, Assigned(**run, attempt=1, worker="w2", **due))
    usage = Usage(prompt_tokens=3, completion_tokens=3)
    last = Chunk(
        id="job-17", attempt=1, run="6", seq=0, index=2, token_ids=(9,), text="c",
        finish_reason="length", usage=usage,
    )  # fmt: skip
    append(RESPONSES, last)
    append(LEDGER, Finished(**run, attempt=1, worker="w2", code="length", output_tokens=1))


def test_explain_shows_every_input_of_a_decision(memory: MemoryBroker) -> None:
    write(memory)
    shown = kvlane("explain", "job-17")
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    heads = [line.split()[2] for line in lines if line.startswith("+")]
    assert heads == [
        "Request", "Assigned", "Started", "PrefillDone", "Shown", "Fencing", "Fence", "Assigned",
        "Shown", "Finished",
    ]  # fmt: skip
    assert "the least cost: w2 came next with 5 blocks more, mostly decode" in lines[3]
    assert lines[3].split()[-8:] == ["0", "tokens", "2", "-", "12.5", "ms", "-", "-"]
    (columns,) = (line for line in lines if "own prefill" in line)
    assert "cost blocks" in columns
    rows = [line.split() for line in lines if line.startswith("  *") or "6.50" in line]
    assert rows[0][:4] == ["*", "w1", "1.50", "1.50"], "the cheapest first, the chosen one marked"
    assert rows[1][:4] == ["w2", "6.50", "0.50", "6.00"]
    assert "  to w1 (epoch 3) by r[9], policy dynamo" in lines
    assert "temperature 0.5" in shown.stdout
    assert "reason lost" in shown.stdout
    assert lines[-1] == "ended: length"


def test_explain_shows_all_inputs_on_request(memory: MemoryBroker) -> None:
    write(memory)
    assert "overlap_blocks" not in kvlane("explain", "job-17").stdout
    lines = kvlane("explain", "job-17", "--inputs").stdout.splitlines()
    at = next(n for n, line in enumerate(lines) if "overlap_blocks" in line)
    columns = lines[at].split()
    assert lines[at + 2].split()[columns.index("overlap_blocks")] == "1"
    assert "disk_blocks" not in columns, "which nobody has"


def test_explain_writes_json(memory: MemoryBroker, tmp_path: Path) -> None:
    write(memory)
    file = tmp_path / "story.json"
    assert kvlane("explain", "job-17", "--json", str(file)).exit_code == 0
    timeline = json.loads(file.read_bytes())
    decision = next(step for step in timeline["steps"] if step["name"] == "Assigned")
    assert decision["actual"] == {
        "cached_tokens": 2, "ttft_ms": 12.5, "code": None, "itl_ms": None,
    }  # fmt: skip
    reasons = decision["reasons"]
    assert reasons["chosen"]["terms"] == {"own prefill": 1.5, "decode": 0.0}
    assert reasons["others"][0]["inputs"]["open_tokens"] == 12
    assert (reasons["lost_by"], reasons["lost_in"]) == (5.0, "decode")
    assert timeline["ending"] == "length"


def test_decision_that_recomputes_differently_is_reported(memory: MemoryBroker) -> None:
    write(memory)
    assert "differs" not in kvlane("explain", "job-17").stdout
    other_write = Assigned(
        id="job-19", attempt=0, phase="aggregated", worker="w1", epoch=3, responses_from=0,
        deadline_ms=9, origin=RequestOffset(topic="requests", partition=0, offset=0),
        prompt_tokens=4,
        policy="dynamo", block_size=2, listed=(Candidate(worker="w1", epoch=3, cost=1.0),),
    )  # fmt: skip
    memory.append(LEDGER, lane_of("job-19", 4), [encode(other_write, "job-19")])
    shown = kvlane("explain", "job-19").stdout
    assert "recomputed, it differs: the cost of w1 is 2.0, and was 1.0" in shown
    assert "the request is no longer retained (1 h)" in shown


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (Refused(id="job-20", code="invalid"), "its prompt was rejected before a router got it"),
        (Cancel(id="job-20"), "only a cancel has this id"),
    ],
)
def test_refusal_or_cancel_without_a_request_is_explained(
    memory: MemoryBroker, record: Refused | Cancel, words: str
) -> None:
    memory.append(REQUESTS, lane_of("job-20", 4), [encode(record, "job-20")])
    shown = kvlane("explain", "job-20").stdout
    assert words in shown
    assert "no longer retained (1 h)" not in shown


@pytest.mark.parametrize("topic", [PROMPTS, BATCH])
def test_prompt_that_no_preprocessor_has_passed_on_is_explained(
    memory: MemoryBroker, topic: str
) -> None:
    memory.append(topic, 1, [Entry(b"other", b"{}"), Entry(b"job-21", b'{"prompt": "sesame"}')])
    shown = kvlane("explain", "job-21")
    assert shown.exit_code == 0, shown.output
    assert "its prompt waits" in shown.stdout
    assert "kvlane_backlog_records" in shown.stdout
    assert f"{topic}/1:1" in shown.stdout
    assert "sesame" not in shown.stdout


def test_cancelled_prompt_that_no_preprocessor_has_passed_on_is_explained(
    memory: MemoryBroker,
) -> None:
    memory.append(PROMPTS, 1, [Entry(b"job-21", b"{}")])
    memory.append(REQUESTS, lane_of("job-21", 4), [encode(Cancel(id="job-21"), "job-21")])
    shown = kvlane("explain", "job-21").stdout
    assert "its prompt waits" in shown
    assert "only a cancel" not in shown


def test_prompts_are_not_searched_for_a_request_of_the_ledger(
    memory: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find_prompt(*_: object) -> None:
        pytest.fail("read all prompts")

    monkeypatch.setattr(timeline, "find_prompt", find_prompt)
    ended = Ended(id="job-23", code="stop")
    memory.append(LEDGER, lane_of("job-23", 4), [encode(ended, "job-23")])
    assert "no longer retained" in kvlane("explain", "job-23").stdout


def test_request_without_a_decision_waits_where_its_router_is(memory: MemoryBroker) -> None:
    request, lane = Request(id="job-22", token_ids=b"1234"), lane_of("job-22", 4)
    memory.append(REQUESTS, lane, [encode(request, "job-22")])
    report = RouterCapacity(router="r[1]", positions={lane: 0})
    memory.append(CAPACITY, 0, [encode(report, "r[1]")])
    shown = " ".join(kvlane("explain", "job-22").stdout.split())
    assert "assigned to no worker for" in shown
    assert "unread in its lane: router r[1] has read `requests` up to offset 0" in shown
    ended = End(id="job-22", code="queue_full")
    memory.append(RESPONSES, lane_of("job-22", 4), [encode(ended, "job-22")])
    assert "assigned to no worker" not in kvlane("explain", "job-22").stdout


def test_unknown_id_error_lists_possible_reasons(memory: MemoryBroker) -> None:
    shown = kvlane("explain", "job-18")
    assert shown.exit_code == 1
    assert "nothing found about job-18" in shown.stderr
    assert "Is the id complete" in shown.stderr


def test_id_older_than_the_ledger_is_reported_as_too_old(memory: MemoryBroker) -> None:
    shown = kvlane("explain", "018bcfe5-6800-7c02-9d41-0123456789ab")
    assert shown.exit_code == 1
    assert "issued at 2023-11-14 22:13:20.000 UTC, and records older than 24 h are" in shown.stderr


def test_recent_id_that_is_not_in_the_log_is_reported_as_wrong(memory: MemoryBroker) -> None:
    shown = kvlane("explain", new_request_id(SystemClock(), random.Random(1)))
    assert shown.exit_code == 1
    assert "Is the id right" in shown.stderr


def test_request_queued_long_before_its_decision_is_found(memory: MemoryBroker) -> None:
    drawn = new_request_id(SystemClock(), random.Random(1))
    later = int(drawn[:8] + drawn[9:13], 16) - 5 * 3_600_000
    request_id = f"{later >> 16:08x}-{later & 0xFFFF:04x}{drawn[13:]}"
    lane = lane_of(request_id, 4)
    memory.append(REQUESTS, lane, [encode(Request(id=request_id, token_ids=b"1234"), request_id)])
    shown = kvlane("explain", request_id)
    assert shown.exit_code == 0, shown.output
    assert "1 prompt tokens" in shown.stdout


def test_view_is_shown_and_written(memory: MemoryBroker, tmp_path: Path) -> None:
    write(memory)
    file = tmp_path / "load.json"
    shown = kvlane("replay", "--view", "load", "--json", str(file))
    assert shown.exit_code == 0, shown.output
    got = json.loads(file.read_bytes())
    lane = lane_of("job-17", 4)
    assert got["partitions"][lane]["records"] == 6
    assert got["partitions"][lane]["position"] == 6
    assert got["summary"]["ended requests by code"] == {"length": 1}
    assert got["state_hash"] in shown.stdout
    assert f"ledger/{lane}" in shown.stdout
    assert "3 partitions without records" in shown.stdout
    for view in ("fleet", "index"):
        assert kvlane("replay", "--view", view).exit_code == 0


def test_fleet_is_shown_with_its_versions(memory: MemoryBroker, tmp_path: Path) -> None:
    card = WorkerCard(
        id="w1", slot=0, model="demo", config=EngineConfig(model="demo"), epoch=0,
        versions={"kvlane": "0.1.0", "vllm": "0.32.1"},
    )  # fmt: skip
    memory.append(REGISTRY, 0, [encode(card, "worker/w1")])
    shown = kvlane("replay", "--view", "fleet", "--json", str(tmp_path / "fleet.json"))
    assert shown.exit_code == 0, shown.output
    workers = json.loads((tmp_path / "fleet.json").read_bytes())["summary"]["workers"]
    assert workers["w1"].endswith("kvlane 0.1.0, vllm 0.32.1")


@pytest.mark.parametrize(
    "at", ["yesterday", "ledger/3", "ledger/99:5", "registry/0:1", "-5 apples"]
)
def test_invalid_moment_is_explained(memory: MemoryBroker, at: str) -> None:
    shown = kvlane("replay", "--view", "load", "--at", at)
    assert shown.exit_code == 1
    assert "error:" in shown.output
    assert "Traceback" not in shown.output


# --- captures -------------------------------------------------------------------------------------


def test_period_is_captured_and_its_decisions_recomputed(
    memory: MemoryBroker, tmp_path: Path
) -> None:
    write(memory)
    file = tmp_path / "run.jsonl.zst"
    wrote = kvlane("capture", "--from", "-1h", "--out", str(file))
    assert wrote.exit_code == 0, wrote.output
    assert "1 requests, 2 decisions, 1 runs, 0 worker epochs" in wrote.stdout
    for source in (str(file), "-1h"):
        shown = kvlane("verify-decisions", source)
        assert shown.exit_code == 0, shown.output
        assert "2 decisions recomputed (dynamo 1, none 1): 1 equal" in shown.stdout
        assert "1 could not be recomputed" in shown.stdout


def test_decision_that_recomputes_differently_fails_the_replay(
    memory: MemoryBroker, tmp_path: Path
) -> None:
    write(memory)
    file = tmp_path / "run.jsonl"
    kvlane("capture", "--from", "-1h", "--out", str(file))
    file.write_bytes(file.read_bytes().replace(b'"cost":1.5', b'"cost":1.25'))
    shown = kvlane("verify-decisions", str(file), "--json", str(tmp_path / "result"))
    assert shown.exit_code == 1
    lane = lane_of("job-17", 4)
    assert f"first difference: job-17 at ledger/{lane}:0: the cost of w1 is 1.5, and was 1.25" in (
        shown.stdout
    )
    assert json.loads((tmp_path / "result").read_bytes())["differ"] == 1


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("capture", "--from", "-5m", "--to", "-10m", "--out", "x"), "empty period"),
        (("capture", "--from", "ledger/0:1", "--out", "x"), "is not a time"),
        (("capture", "--from", "-5m", "--out", "/absent/x"), "No such file"),
        (("verify-decisions", "absent.jsonl"), "not a file and not a period"),
        (("verify-decisions", "-5x"), "invalid time"),
        (("replay",), "Missing option '--view'"),
        (("verify-decisions",), "Missing argument"),
    ],
)
def test_error_of_capture_or_replay_has_its_reason(
    memory: MemoryBroker, arguments: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    shown = kvlane(*arguments)
    assert shown.exit_code in (1, 2)
    assert why in " ".join(shown.output.split())
    assert "Traceback" not in shown.output


def test_empty_period_gives_a_warning(memory: MemoryBroker, tmp_path: Path) -> None:
    shown = kvlane("capture", "--from", "-1h", "--out", str(tmp_path / "x"))
    assert shown.exit_code == 0
    assert "no decision in this period" in shown.stdout
