"""Tests of prompts that wait from one peak to the next: each runs once and has one result, also
when a copy is read late."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from msgspec.structs import replace

from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.preprocessor import Preprocessor
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.codecs import decode
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.ports import Entry
from kvlane.streams.prompt import APPENDED_HEADER
from kvlane.streams.records import Assigned, Assignment, CancelRun, Chunk, EndedIds, RequestOffset
from kvlane.streams.topics import BATCH, ENDED_IDS, LEDGER, PROMPTS, RESPONSES, partition_of
from tests.harness.fake_worker import FakeWorker, append_record, start_router
from tests.harness.gateway_harness import memory_settings
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.results_harness import ResultsHarness

WINDOW_S = 30
SETTINGS = {"dedup_window_s": WINDOW_S, "max_lifetime_s": WINDOW_S, "deadline_s": WINDOW_S}
valley_test = partial(scenario_test, lanes=1)


class Valley:
    """A deployment with one worker of one run at a time; `is_open`: whether it serves batch."""

    def __init__(self, world: MemoryWorld) -> None:
        self.world = world
        self.worker = FakeWorker(world, max_num_seqs=1, max_runs=1)
        self.results = ResultsHarness(world, **SETTINGS)
        self.is_open = True
        self.preprocessors: dict[str, tuple[MemoryLog, ProcessContext, Preprocessor]] = {}
        self.router: Router

    @staticmethod
    async def begin(world: MemoryWorld, *preprocessors: str) -> Valley:
        valley = Valley(world)
        await valley.start_router()
        await valley.results.start()
        for name in preprocessors:
            await valley.start(name)
        world.spawn(valley._serve())
        return valley

    async def start_router(self, name: str = "r1") -> None:
        self.router = await start_router(self.world, name, max_queued_batch_requests=2, **SETTINGS)

    async def kill_router(self) -> None:
        self.router._log.kill()  # type: ignore[attr-defined]
        await self.router._ctx.cancel_tasks()

    async def start(self, name: str) -> None:
        log, ctx = (
            await self.world.connect(name),
            ProcessContext(name, self.world.clock, random.Random(name)),
        )
        process = Preprocessor(log, memory_settings(**SETTINGS), ctx, InlinePool())
        await process.start()
        self.preprocessors[name] = log, ctx, process

    async def stop(self, name: str) -> None:
        _, ctx, process = self.preprocessors.pop(name)
        await process.stop()
        await ctx.cancel_tasks()

    async def kill(self, name: str) -> None:
        log, ctx, _ = self.preprocessors.pop(name)
        log.kill()
        cancelling = self.world.spawn(ctx.cancel_tasks())
        await self.world.sleep(0.1)
        cancelling.cancel()  # its members leave their groups, without an answer

    async def _serve(self) -> None:
        seen: list[RequestOffset] = []
        while True:
            for assignment in self.worker.received(Assignment):
                if assignment.origin in seen:
                    continue
                seen.append(assignment.origin)
                run = self.worker.start(assignment)
                while not self.is_open:
                    await self.world.sleep(1.0)
                if assignment.request.id in {c.id for c in self.worker.received(CancelRun)}:
                    self.worker.finish(run, "cancelled")
                    continue
                last = Chunk(
                    id=assignment.request.id, attempt=assignment.attempt, run="1", seq=0, index=0,
                    token_ids=(7,), text="x", chars=1, finish_reason="stop",
                )  # fmt: skip
                append_record(self.world, RESPONSES, last)
                self.worker.finish(run, "stop")
            await self.world.sleep(0.5)

    def ask(self, name: str, topic: str = BATCH, *, keyed: bool = True, **fields: object) -> None:
        """Publish a prompt that asks for a result."""
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": "demo", "messages": messages, "max_tokens": 3}
        value = json.dumps({"id": name, "body": body, "result": True} | fields).encode()
        key = name.encode() if keyed else None
        partition = partition_of(name.encode(), 16) if keyed else 0
        self.world.append_raw(topic, partition, Entry(key, value))

    async def pass_window(self) -> None:
        """The worker serves others for longer than ids of requests are remembered."""
        await self.world.sleep(2 * WINDOW_S)
        self.world.append(LEDGER, 0, _other(self.world), key="other")
        await self.world.sleep(1)

    async def wait_results(self, count: int) -> None:
        await self.world.wait_until(
            lambda: len({r.id for r in self.results.results()}) >= count, within_s=600
        )

    async def settle(self) -> None:
        """Wait until everything that was published has ended."""
        self.is_open = True
        await self.world.sleep(60)

    def runs(self) -> Counter[str]:
        records = map(decode, self.world.all_records(LEDGER))
        return Counter(r.id for r in records if isinstance(r, Assigned) and r.attempt == 0)

    def check_once(self, *names: str) -> None:
        """Each of these ids was run once, and has one result."""
        expected = Counter(names)
        assert Counter(r.id for r in self.results.results()) == expected
        assert {name: n for name, n in self.runs().items() if name in expected} == expected


def _other(world: MemoryWorld) -> Assigned:
    """A decision about another request, so that the time of the ledger passes."""
    records = map(decode, world.all_records(LEDGER))
    decision = next(r for r in records if isinstance(r, Assigned))
    return replace(decision, id="other", worker="gone", is_prompt=False)


async def _restart(valley: Valley) -> None:
    await valley.stop("p1")
    await valley.start("p2")


async def _crash(valley: Valley) -> None:
    await valley.kill("p1")
    await valley.start("p2")


async def _scale_up(valley: Valley) -> None:
    await valley.start("p2")


async def _rolling_upgrade(valley: Valley) -> None:
    await valley.start("p2")
    await valley.world.sleep(10)
    await valley.stop("p1")


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("change", [_restart, _crash, _scale_up, _rolling_upgrade])
@valley_test
async def test_change_of_preprocessors_repeats_no_batch_prompt(
    world: MemoryWorld, change: Callable[..., object], *, commits: bool
) -> None:
    if not commits:
        world.faults.unanswered = {"commit"}
    names = [f"p{n}" for n in range(12)]
    valley = await Valley.begin(world, "p1")
    for name in names:
        valley.ask(name, keyed=False)
    await valley.wait_results(5)
    valley.is_open = False
    await valley.pass_window()
    await change(valley)  # type: ignore[misc]
    await world.sleep(10)
    world.faults.unanswered = set()
    await valley.settle()
    valley.check_once(*names)


@pytest.mark.parametrize("topic", [BATCH, PROMPTS])
@pytest.mark.parametrize("keyed", [True, False])
@valley_test
async def test_copy_from_before_the_end_of_its_id_is_a_duplicate_however_late_it_is_read(
    world: MemoryWorld, topic: str, *, keyed: bool
) -> None:
    """Both copies are published before any of them runs; the second one waits in the backlog."""
    valley = await Valley.begin(world)
    valley.ask("x")
    await valley.start("p1")
    await valley.wait_results(1)
    await valley.stop("p1")
    valley.ask("x", topic, keyed=keyed, service_class="batch")
    await valley.pass_window()
    await valley.start("p2")
    await valley.settle()
    valley.check_once("x")


@valley_test
async def test_late_copy_of_an_interactive_prompt_gives_no_second_result(
    world: MemoryWorld,
) -> None:
    valley = await Valley.begin(world, "p1")
    valley.ask("x", PROMPTS)
    await valley.wait_results(1)
    await valley.stop("p1")
    valley.ask("x", PROMPTS)
    await valley.pass_window()  # its deadline passes as well
    await valley.start("p2")
    await valley.settle()
    valley.check_once("x")
    assert [r.status for r in valley.results.results()] == ["completed"]


@valley_test
async def test_copy_of_a_cancelled_prompt_is_not_run(world: MemoryWorld) -> None:
    valley = await Valley.begin(world, "p1")
    valley.is_open = False
    for name in ("a", "b", "x"):
        valley.ask(name)
    await world.sleep(5)
    valley.ask("x", kind="cancel", body={})
    await valley.wait_results(1)
    await valley.stop("p1")
    valley.ask("x")
    await valley.pass_window()
    await valley.start("p2")
    await valley.settle()
    assert [r.status for r in valley.results.results() if r.id == "x"] == ["cancelled"]
    assert "x" not in valley.runs()


@valley_test
async def test_copy_of_a_refused_prompt_is_not_answered_again(world: MemoryWorld) -> None:
    valley = await Valley.begin(world, "p1")
    valley.ask("a")
    valley.ask("x", body={"messages": []})
    await valley.wait_results(2)
    await valley.stop("p1")
    valley.ask("x")  # a valid one, by the same id
    await valley.pass_window()
    await valley.start("p2")
    await valley.settle()
    assert [r.status for r in valley.results.results() if r.id == "x"] == ["failed"]
    assert "x" not in valley.runs()


@pytest.mark.parametrize("after_s", [1, 90])
@valley_test
async def test_ids_of_prompts_outlive_all_routers(world: MemoryWorld, after_s: int) -> None:
    """`after_s`: the end of the prompt is in the ledger only, or on `ended-ids` as well."""
    valley = await Valley.begin(world, "p1")
    valley.ask("x")
    await valley.wait_results(1)
    await valley.stop("p1")
    valley.ask("x")
    await world.sleep(after_s)
    await valley.kill_router()
    await world.sleep(3600)
    await valley.start_router("r2")
    valley.ask("y")
    await valley.start("p2")
    await valley.settle()
    valley.check_once("x", "y")
    assert valley.router._ledger.lane(0).finished.keys() >= {"y"}


@valley_test
async def test_ids_of_prompts_are_kept_with_a_ledger_that_was_made_anew(world: MemoryWorld) -> None:
    """The topic has offsets of the ledger before, which the new one has not reached."""
    valley = await Valley.begin(world)
    world.append(ENDED_IDS, 0, EndedIds(lane=0, until=1_000_000), key="0")
    await valley.start("p1")
    valley.ask("x")
    await valley.wait_results(1)
    await valley.stop("p1")
    valley.ask("x")
    await world.sleep(90)
    await valley.kill_router()
    await world.sleep(3600)
    await valley.start_router("r2")
    await valley.start("p2")
    await valley.settle()
    valley.check_once("x")


@valley_test
async def test_id_may_be_used_again_after_the_window(world: MemoryWorld) -> None:
    valley = await Valley.begin(world, "p1")
    valley.ask("x")
    await valley.wait_results(1)
    await valley.pass_window()
    valley.ask("x")
    await valley.settle()
    valley.check_once("x", "x")


@valley_test
async def test_prompt_that_is_moved_again_long_after_its_append_is_a_duplicate(
    world: MemoryWorld,
) -> None:
    """Its first preprocessor died between the move and the commit."""
    world.faults.unanswered = {"commit"}
    valley = await Valley.begin(world, "p1")
    valley.ask("x", PROMPTS, service_class="batch")
    await valley.wait_results(1)
    await valley.kill("p1")
    await valley.pass_window()
    world.faults.unanswered = set()
    await valley.start("p2")
    await valley.settle()
    valley.check_once("x")
    first, again = world.all_records(BATCH)
    (prompt,) = world.all_records(PROMPTS)
    for moved in (first, again):
        assert dict(moved.headers) == {APPENDED_HEADER: str(prompt.timestamp).encode()}


@valley_test
async def test_requests_over_http_are_not_among_the_ids_that_are_kept(world: MemoryWorld) -> None:
    valley = await Valley.begin(world)
    valley.results.ask("h")
    await valley.wait_results(1)
    await world.sleep(70)
    records = [decode(record) for record in world.all_records(ENDED_IDS)]
    assert [record.digests for record in records] == [b""]  # type: ignore[union-attr]
