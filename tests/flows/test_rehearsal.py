"""Tests of rehearsals on the log in memory: two models, the second with planted differences."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec import to_builtins
from msgspec.structs import replace
from typer.testing import CliRunner

from kvlane.app.audit.time_range import TimeRange
from kvlane.app.cli import app
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.preprocessor import Preprocessor
from kvlane.app.rehearsal.rehearsal import Rehearsal, RehearsalPlan
from kvlane.app.rehearsal.request_sample import REHEARSAL_TENANT, RehearsalRefused
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.worker import Worker
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import decode, encode, pack_tokens
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.records import AliasTarget, End, EngineConfig, ModelAlias, ModelCard, WorkerCard
from kvlane.streams.request import Request, SamplingOptions, StopConditions
from kvlane.streams.topics import BATCH, LEDGER, REGISTRY, REQUESTS, RESPONSES, RESULTS
from tests.harness.capture_harness import serve_requests
from tests.harness.fake_worker import append_record
from tests.harness.gateway_harness import memory_settings
from tests.harness.memory_commands import connect_commands
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.rehearsal_harness import GREEDY, changed, engine_of, greedy_requests

COUNT = 40
RATE = 20.0
LONG = bool(os.environ.get("KVLANE_TEST_LONG"))
CARDS = {name: ModelCard(name=name, context_length=4096) for name in ("a", "b")}


async def start_models(world: MemoryWorld, differences: dict[bytes, int], workers: int = 1) -> None:
    """A router, a preprocessor, a worker for model a, and some for model b."""
    ctx = ProcessContext("r1", world.clock, random.Random("r1"))
    await Router(await world.connect("r1"), memory_settings(), ctx, "r1").start()
    for name in ("a", *(f"b{number}" for number in range(workers))):
        ctx = ProcessContext(name, world.clock, random.Random(name))
        engine = engine_of(world.clock, name[0], changed({} if name == "a" else differences))
        log = await world.connect(name)
        await Worker(log, memory_settings(), ctx, engine, worker_id=name).start()
    ctx = ProcessContext("p1", world.clock, random.Random("p1"))
    await Preprocessor(await world.connect("p1"), memory_settings(), ctx, InlinePool()).start()
    await world.sleep(2)


def plan_of(world: MemoryWorld, **over: Any) -> RehearsalPlan:
    period = TimeRange(0, world.clock.wall_ms())
    plan = RehearsalPlan(period, CARDS["b"], "a", 1.0, COUNT, 10, 600.0, "")
    return plan._replace(**over)


async def rehearse(world: MemoryWorld, **over: Any) -> Rehearsal:
    log = await world.connect("rehearsal")
    made = Rehearsal(log, world.clock, plan_of(world, **over), CARDS)
    await made.run(lambda *_: None, lambda *_: None)
    return made


async def served(world: MemoryWorld, planted: dict[int, int]) -> list[Request]:
    """Requests that model a has answered; `planted`: by number, where b answers otherwise."""
    requests = greedy_requests(world.clock, "a", COUNT)
    await start_models(world, {requests[n].token_ids: at for n, at in planted.items()})
    await serve_requests(world, requests)
    return requests


@scenario_test
async def test_planted_differences_are_found_and_no_others(world: MemoryWorld) -> None:
    planted = {3: 0, 17: 5, 39: 11}
    requests = await served(world, planted)
    report = (await rehearse(world)).report()
    assert report["verdicts"] == {"equal": COUNT - 3, "differs": 3, "sampled": 0, "failed": 0}
    found = [(pair.id, pair.first_difference, pair.unit) for pair in report["differences"]]
    assert found == [(requests[n].id, at, "token") for n, at in planted.items()]
    assert report["figures"]["ttft_ms"]["pairs"] == COUNT
    assert (report["left_out"], report["open"]) == ({}, 0)


@scenario_test
async def test_repetitions_are_batch_work_of_their_own_tenant_and_reach_no_client(
    world: MemoryWorld,
) -> None:
    requests = await served(world, {})
    await rehearse(world)
    ids = {request.id for request in requests}
    repeated = [r for r in map(decode, world.all_records(REQUESTS)) if r.id not in ids]  # type: ignore[union-attr]
    assert len(repeated) == COUNT
    for request in repeated:
        assert isinstance(request, Request)
        assert (request.model, request.service_class) == ("b", "batch")
        assert (request.tenant, request.result) == (REHEARSAL_TENANT, None)
    assert world.all_records(RESULTS) == []


@scenario_test
async def test_interrupted_rehearsal_goes_on_and_repeats_nothing(world: MemoryWorld) -> None:
    await served(world, {7: 2})
    log = await world.connect("first")
    first = Rehearsal(log, world.clock, plan_of(world), CARDS)
    running = world.spawn(first.run(lambda *_: None, lambda *_: None))
    await world.wait_until(lambda: len(first.pairs) > 4)
    running.cancel()
    await world.sleep(30)
    some = first.report()
    assert some["open"] == COUNT - some["pairs"] > 0
    whole = (await rehearse(world, in_flight=3)).report()
    assert whole["verdicts"]["equal"] == COUNT - 1
    assert len(world.all_records(BATCH)) == COUNT
    again = (await rehearse(world)).report()
    assert again["verdicts"] == whole["verdicts"]
    assert len(world.all_records(BATCH)) == COUNT
    await rehearse(world, label="again")
    assert len(world.all_records(BATCH)) == 2 * COUNT


@scenario_test
async def test_drawn_answers_are_compared_by_figures_only(world: MemoryWorld) -> None:
    requests = greedy_requests(world.clock, "a", COUNT)
    drawn = [replace(r, sampling=SamplingOptions(temperature=1.0)) for r in requests[:15]]
    await start_models(world, {r.token_ids: 1 for r in requests[10:20]})
    await serve_requests(world, [*drawn, *requests[15:]])
    verdicts = (await rehearse(world)).report()["verdicts"]
    assert verdicts == {"equal": 20, "differs": 5, "sampled": 15, "failed": 0}


@scenario_test
async def test_share_and_limit_choose_the_same_requests_each_time(world: MemoryWorld) -> None:
    await served(world, {})
    chosen = [
        {pair.id for pair in (await rehearse(world, **over)).pairs}
        for over in ({"share": 0.5}, {"share": 0.5}, {"limit": 7}, {"share": 0.5, "limit": 7})
    ]
    assert chosen[0] == chosen[1]
    assert 8 < len(chosen[0]) < 32
    assert len(chosen[2]) == 7
    assert chosen[2] == chosen[3] < chosen[0]


@scenario_test
async def test_answers_that_failed_or_are_gone_are_counted_and_not_repeated(
    world: MemoryWorld,
) -> None:
    await served(world, {})
    for number in range(3):
        append_record(world, REQUESTS, Request(id=f"x{number}", model="a", deadline_s=-1))
    await world.sleep(5)
    report = (await rehearse(world, limit=1000, in_flight=100)).report()
    assert report["pairs"] == COUNT
    assert report["left_out"] == {"answers that failed or were cancelled": 3}


@scenario_test
async def test_answer_of_a_former_run_that_is_no_longer_kept_is_not_awaited(
    world: MemoryWorld,
) -> None:
    await served(world, {})
    await rehearse(world)
    world.broker.delete_records(RESPONSES, 1, len(world.records(RESPONSES, 1)))
    world.append(RESPONSES, 1, End(id="other", code="stop"), key="other")
    began_s = world.clock.now()
    report = (await rehearse(world, period=TimeRange(0, world.clock.wall_ms() + 1))).report()
    verdicts, lost = report["verdicts"], {pair.rehearsal.code for pair in report["failures"]}
    assert 0 < verdicts["failed"] < report["pairs"] == sum(verdicts.values()) < COUNT
    assert (lost, report["open"]) == ({"lost"}, 0)
    assert world.clock.now() - began_s < 30


@scenario_test
async def test_period_without_requests_is_refused_in_words(world: MemoryWorld) -> None:
    await served(world, {})
    with pytest.raises(RehearsalRefused, match=r"no request for 'c' from .* can be rehearsed"):
        await rehearse(world, model="c")


@scenario_test
async def test_period_that_is_no_longer_kept_is_refused_in_words(world: MemoryWorld) -> None:
    await served(world, {})
    until_ms = world.clock.wall_ms()
    await world.sleep(60)
    for request in greedy_requests(world.clock, "a", COUNT, seed=2):
        append_record(world, REQUESTS, request)
    for lane in range(world.lanes):
        for topic in (REQUESTS, RESPONSES, LEDGER):
            kept = [r.offset for r in world.records(topic, lane) if r.timestamp >= until_ms]
            world.broker.delete_records(topic, lane, kept[0] if kept else 0)
    with pytest.raises(RehearsalRefused, match=r"are kept since .* and the period ends at"):
        await rehearse(world, period=TimeRange(0, until_ms))


async def ask_in_turn(world: MemoryWorld, name: str, until: Callable[[], bool]) -> list[str]:
    """Append interactive requests for model b, RATE a second at random times, until it is enough;
    the same ones each time. Returns their ids."""
    rng, ids = random.Random(7), list[str]()
    while not until():
        await world.sleep(rng.expovariate(RATE))
        tokens = [rng.randrange(200) for _ in range(rng.randint(100, 800))]
        ids.append(f"{name}-{len(ids)}")
        append_record(
            world, REQUESTS,
            Request(
                id=ids[-1], model="b", token_ids=pack_tokens(tokens), sampling=GREEDY,
                stop=StopConditions(max_tokens=rng.randint(20, 80)),
            ),
        )  # fmt: skip
    await world.sleep(30)
    return ids


def ttft_ms(world: MemoryWorld, ids: Sequence[str]) -> list[int]:
    """Times from the append of requests to that of their first tokens."""
    asked = {decode(r).id: r.timestamp for r in world.all_records(REQUESTS)}  # type: ignore[union-attr]
    first: dict[str, int] = {}
    for record in world.all_records(RESPONSES):
        first.setdefault((record.key or b"").decode(), record.timestamp)
    return [first[name] - asked[name] for name in ids]


@pytest.mark.skipif(not LONG, reason="takes minutes: KVLANE_TEST_LONG=1")
@scenario_test
async def test_thousand_requests_beside_interactive_ones(world: MemoryWorld) -> None:
    """Its figures are in docs/benchmarks.md."""
    stop = StopConditions(max_tokens=120)
    requests = [replace(each, stop=stop) for each in greedy_requests(world.clock, "a", 1000)]
    planted = dict(zip(random.Random(5).sample(range(1000), 17), [*range(11)] * 2, strict=False))
    await start_models(world, {requests[n].token_ids: at for n, at in planted.items()}, workers=4)
    await serve_requests(world, requests)
    began_s = world.clock.now()
    alone = await ask_in_turn(world, "alone", lambda: world.clock.now() - began_s > 300)
    running = world.spawn(rehearse(world, limit=1000, in_flight=100))
    began_s = world.clock.now()
    beside = await ask_in_turn(world, "beside", running.done)
    took_s = world.clock.now() - began_s - 30
    report = running.result().report()
    found = {pair["id"]: pair["first_difference"] for pair in to_builtins(report["differences"])}
    assert found == {requests[n].id: at for n, at in planted.items()}
    assert report["verdicts"]["equal"] == 1000 - len(planted)
    for ids in (alone, beside):
        p50, p99 = np.percentile(ttft_ms(world, ids), (50, 99), method="inverted_cdf")
        print(f"{len(ids)} interactive requests: TTFT p50 {p50} ms, p99 {p99} ms")  # noqa: T201
    print(f"rehearsal of 1000 requests, {len(found)} differ: {took_s:.0f} s")  # noqa: T201


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--to", "c"], "the model 'c' does not exist; available: a"),
        (["--to", "chat"], "'chat' is an alias: name one of its models (a)"),
        (["--to", "a"], "the model 'a' has no ready worker"),
        (["--to", "a", "--from", "-1h", "--until", "-2h"], "empty period"),
        (["--to", "a", "--html", "it.pdf"], "must end in one of .html"),
    ],
)
def test_refusals_name_the_reason(
    arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = connect_commands(MemoryBroker(SystemClock(), lanes=2), monkeypatch)
    card = WorkerCard(id="w", slot=0, model="a", config=EngineConfig(model="a"))
    alias = ModelAlias(name="chat", targets=(AliasTarget(model="a"),))
    broker.append(REGISTRY, 0, [encode(card, "worker/w"), encode(alias, "alias/chat")])
    result = CliRunner().invoke(app, ["rehearse", *arguments], terminal_width=200)
    assert result.exit_code in (1, 2)
    assert reason in " ".join(result.output.split())
