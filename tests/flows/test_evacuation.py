"""Tests of orders about workers that run: cordon, drain, evacuate."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from kvlane.app.audit.timeline import explain_request
from kvlane.app.cli import app
from kvlane.app.commands.worker_commands import (
    UnknownWorker,
    WorkerBusy,
    check_known,
    end_order,
    followed_fleet,
    others_of,
    wait_idle,
    write_order,
)
from kvlane.app.engine.echo import EchoEngine, echo_answer
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import decode, encode
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.records import (
    Assigned,
    Chunk,
    Cordon,
    EngineConfig,
    Fencing,
    Started,
    Tombstone,
    WorkerCard,
)
from kvlane.streams.request import Hints, SamplingOptions
from kvlane.streams.responses.transcript import Transcript
from kvlane.streams.topics import LEDGER, REGISTRY, RESPONSES
from tests.harness.fake_worker import read_records
from tests.harness.memory_commands import connect_commands
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.simulated_processes import (
    MODEL,
    ObservedAnswer,
    SimulatedProcesses,
    publish_request,
)
from tests.harness.worker_harness import PROMPT, STEP_S

TOKENS = 40
RUNS = tuple(f"q{number}" for number in range(50))
LOG_S = 0.02
"""Time of each append and read, as with a broker on another machine."""


class TextEngine(EchoEngine):
    """An engine that advertises answers without token ids."""

    async def start(self, worker_id: str) -> EngineConfig:
        return replace(await super().start(worker_id), gives_tokens=False)


async def order(world: MemoryWorld, worker: str, kind: str) -> None:
    log = await world.connect(f"operator {world.clock.now()}")
    if kind == "uncordon":
        await end_order(log, world.clock, f"cordon/{worker}")
    else:
        await write_order(log, world.clock, worker, evacuates=kind == "evacuate")
    await log.close()


async def begin_runs(
    world: MemoryWorld, processes: SimulatedProcesses, *ids: str, tokens: int = TOKENS, **over: Any
) -> EchoEngine:
    """The engine of worker `w1`, which runs all these requests."""
    engine = EchoEngine(world.clock, STEP_S, model=MODEL, max_num_seqs=64)
    await processes.worker("w1", engine, max_num_seqs=64)
    for request_id in ids:
        publish_request(world, tokens, request_id, **over)
    await world.wait_until(
        lambda: all(len(ObservedAnswer(world, each).tokens) >= 5 for each in ids)
    )
    return engine


async def wait_exact(world: MemoryWorld, *ids: str, tokens: int = TOKENS) -> None:
    await world.sleep(tokens * STEP_S)
    while not all(ObservedAnswer(world, each).is_over for each in ids):
        assert world.clock.now() < 100, "an answer has no end"
        await world.sleep(1.0)
    await world.sleep(3.0)  # whatever comes later changes nothing
    for each in ids:
        answer = ObservedAnswer(world, each)
        assert answer.tokens == echo_answer(PROMPT, tokens), each
        assert answer.finish_reason == "length"
        assert answer.transcript.gaps == 0


def longest_pause_ms(world: MemoryWorld, request_id: str) -> int:
    """The longest time between two pieces of an answer, for its readers."""
    transcript, times = Transcript(request_id), []
    for raw in world.records(RESPONSES, key=request_id):
        if raw.key == request_id.encode():
            piece = transcript.apply(decode(raw))  # type: ignore[arg-type]
            if isinstance(piece, Chunk) and piece.token_ids:
                times.append(raw.timestamp)
    return max(after - before for before, after in pairwise(times))


def reasons(world: MemoryWorld, request_id: str) -> list[str]:
    return [f.reason for f in read_records(world, LEDGER, Fencing, request_id)]


def workers_of(world: MemoryWorld, request_id: str) -> list[str]:
    return [d.worker for d in read_records(world, LEDGER, Assigned, request_id)]


@scenario_test
async def test_50_running_answers_leave_a_worker_whole_within_two_seconds(
    world: MemoryWorld,
) -> None:
    world.faults.slow = {"append": LOG_S, "offsets": LOG_S, "poll": LOG_S}
    processes = SimulatedProcesses(world)
    await processes.router("r1")
    await processes.router("r2")
    engine = await begin_runs(world, processes, *RUNS)
    await processes.worker("w2", max_num_seqs=64)
    await world.sleep(0.5)
    await order(world, "w1", "evacuate")
    await world.wait_until(lambda: engine.running_count == 0, within_s=2.0)
    await wait_exact(world, *RUNS)
    assert {tuple(workers_of(world, each)) for each in RUNS} == {("w1", "w2")}
    assert {tuple(reasons(world, each)) for each in RUNS} == {("evacuated",)}
    assert max(longest_pause_ms(world, each) for each in RUNS) <= 1500


@pytest.mark.parametrize("kind", [Fencing, Assigned])
@partial(scenario_test, lanes=1)
async def test_evacuation_goes_on_when_a_router_dies_in_its_middle(
    world: MemoryWorld, kind: type
) -> None:
    processes = SimulatedProcesses(world)
    await processes.router("r1")
    ids = RUNS[:6]
    engine = await begin_runs(world, processes, *ids, tokens=300)
    await processes.worker("w2", max_num_seqs=64)
    await world.sleep(0.5)
    processes.on_append("r1", kind, processes.kill)
    await order(world, "w1", "evacuate")
    await world.wait_until(lambda: not processes.has_pending_faults)
    await processes.router("r2")
    await wait_exact(world, *ids, tokens=300)
    assert {workers_of(world, each)[-1] for each in ids} == {"w2"}
    assert engine.running_count == 0


@scenario_test
async def test_answers_stay_while_no_other_worker_can_take_them(world: MemoryWorld) -> None:
    processes = SimulatedProcesses(world)
    await processes.router()
    pinned = Hints(allowed_worker_ids=("w1",))
    await begin_runs(world, processes, "a", "b", tokens=300)
    publish_request(world, 300, "pinned", hints=pinned)
    await world.sleep(1.0)
    await order(world, "w1", "evacuate")
    publish_request(world, 10, "new")
    await world.sleep(8.0)
    assert not any(reasons(world, each) for each in ("a", "b", "pinned"))
    assert workers_of(world, "new") == []
    await processes.worker("w2")
    await wait_exact(world, "a", "b", "pinned", tokens=300)
    await wait_exact(world, "new", tokens=10)
    moved = {each: workers_of(world, each) for each in ("a", "b", "pinned", "new")}
    assert moved == {"a": ["w1", "w2"], "b": ["w1", "w2"], "pinned": ["w1"], "new": ["w2"]}


@scenario_test
async def test_answer_that_cannot_be_continued_ends_where_it_is(world: MemoryWorld) -> None:
    processes = SimulatedProcesses(world)
    await processes.router()
    exact = SamplingOptions(temperature=0.0, presence_penalty=0.5)
    await begin_runs(world, processes, "a", sampling=exact)
    await processes.worker("w2")
    await order(world, "w1", "evacuate")
    await wait_exact(world, "a")
    assert (workers_of(world, "a"), reasons(world, "a")) == (["w1"], [])


@scenario_test
async def test_answer_leaves_for_the_worker_that_gives_token_ids(world: MemoryWorld) -> None:
    processes = SimulatedProcesses(world)
    await processes.router()
    await begin_runs(world, processes, *RUNS[:3], tokens=150)
    await processes.worker("w0", TextEngine(world.clock, STEP_S, model=MODEL))
    await order(world, "w1", "evacuate")
    await world.sleep(3.0)
    assert [reasons(world, each) for each in RUNS[:3]] == [[], [], []]
    await processes.worker("w2")
    await wait_exact(world, *RUNS[:3], tokens=150)
    assert {tuple(workers_of(world, each)) for each in RUNS[:3]} == {("w1", "w2")}


@pytest.mark.parametrize(
    ("waiting", "hints"), [(8, Hints()), (0, Hints(allowed_worker_ids=("w1", "w2")))]
)
@scenario_test
async def test_only_as_many_runs_leave_as_other_workers_have_room_for(
    world: MemoryWorld, waiting: int, hints: Hints
) -> None:
    processes = SimulatedProcesses(world)
    await processes.router()
    ids = RUNS[:8]
    await begin_runs(world, processes, *ids, tokens=60, hints=hints)
    await processes.worker("w2", max_num_seqs=2, worker_max_waiting=waiting)
    if hints.allowed_worker_ids:
        await processes.worker("w3", max_num_seqs=64)
    await order(world, "w1", "evacuate")
    await wait_exact(world, *ids, tokens=60)
    assert max(longest_pause_ms(world, each) for each in ids) <= 1500
    assert sum(workers_of(world, each) == ["w1", "w2"] for each in ids) == 2


@scenario_test
async def test_cordon_outlasts_restarts_of_its_worker_and_of_routers(world: MemoryWorld) -> None:
    processes = await SimulatedProcesses.started(world)
    await processes.worker("w2")
    await order(world, "w1", "cordon")
    await world.sleep(0.5)
    for number in range(4):
        publish_request(world, 3, f"before-{number}")
    await world.sleep(2.0)
    processes.kill("w1")
    processes.kill("r1")
    await world.sleep(1.0)
    await processes.worker("w1 again", worker_id="w1")
    router = await processes.router("r2")
    for number in range(4):
        publish_request(world, 3, f"after-{number}")
    ids = [f"{when}-{number}" for when in ("before", "after") for number in range(4)]
    await world.wait_until(lambda: all(workers_of(world, each) for each in ids))
    assert {tuple(workers_of(world, each)) for each in ids} == {("w2",)}
    log = await world.connect("explain")
    timeline = await explain_request(log, world.clock, "after-0")
    assert [s.decision.cordoned for s in timeline.steps if s.decision] == [("w1",)]
    await order(world, "w2", "cordon")
    publish_request(world, 3, "waits")
    await world.sleep(1.0)
    waits = [wait for owner in router._owners.values() for wait in owner.waits.values()]
    assert [wait.reason for wait in waits] == ["no worker is ready that is not cordoned (w1, w2)"]
    await order(world, "w1", "uncordon")
    await world.wait_until(lambda: workers_of(world, "waits") == ["w1"], within_s=5.0)


@scenario_test
async def test_drain_waits_for_the_last_run(world: MemoryWorld) -> None:
    processes = SimulatedProcesses(world)
    await processes.router()
    await begin_runs(world, processes, "a", "b", tokens=60)
    log, shown = await world.connect("operator"), []
    async with followed_fleet(log, world.clock) as fleet:
        with pytest.raises(UnknownWorker, match="no worker 'w9'"):
            check_known(fleet, "w9")
        await write_order(log, world.clock, "w1", evacuates=False)
        assert others_of(fleet, "w1") == 0
        with pytest.raises(WorkerBusy, match="w1 still has 2 runs after 2 s") as busy:
            await wait_idle(log, world.clock, fleet, "w1", 2.0)
        assert "kvlane workers evacuate w1" in busy.value.correction
        await wait_idle(log, world.clock, fleet, "w1", 60.0, shown.append)
    assert all(ObservedAnswer(world, each).is_over for each in ("a", "b"))
    assert (shown[0], shown[-1]) == (2, 0)
    assert not read_records(world, LEDGER, Fencing, "a")


@scenario_test
async def test_drain_of_a_worker_that_is_lost_is_over(world: MemoryWorld) -> None:
    processes = await SimulatedProcesses.started(world)
    publish_request(world, 500)
    await world.wait_until(lambda: bool(read_records(world, LEDGER, Started)))
    log = await world.connect("operator")
    async with followed_fleet(log, world.clock) as fleet:
        await write_order(log, world.clock, "w1", evacuates=False)
        processes.kill("w1")
        await wait_idle(log, world.clock, fleet, "w1", 60.0)


def test_commands_write_orders_and_end_them(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = connect_commands(MemoryBroker(SystemClock()), monkeypatch)
    card = WorkerCard(id="w1", slot=0, model="m", config=EngineConfig(model="m"))
    broker.append(REGISTRY, 0, [encode(card, "worker/w1")])

    def run(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["workers", *words])
        return result.exit_code, result.output

    assert run("cordon", "w9")[0] == 1
    assert run("uncordon", "w1") == (0, "there was no order about w1\n")
    assert run("cordon", "w1")[0] == 0
    assert run("uncordon", "w1") == (0, "w1 takes requests again\n")
    code, output = run("drain", "w1", "--timeout", "1.5")
    assert code == 1
    assert "w1 has not reported in 1.5 s that it is idle" in output
    assert run()[0] == 0
    orders = [decode(raw) for raw in broker.records(REGISTRY, 0)][1:]
    assert orders == [
        Cordon(worker="w1"), Tombstone(key="cordon/w1"), Cordon(worker="w1"),
    ]  # fmt: skip
