"""Tests of the report of the backlog bench."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kvlane.streams.errors import BrokerUnavailable
from kvlane.streams.prompt import Prompt
from tests.harness.memory_world import MemoryWorld, scenario_test
from workbench.bench.bench_environment import BenchFailed
from workbench.bench.chaos.backlog_drain import BacklogDrain, BacklogScale, background, cut_rounds
from workbench.bench.chaos.backlog_prompts import engine_requests_per_s
from workbench.bench.chaos.backlog_report import (
    RETRY,
    BacklogResult,
    MemorySeries,
    PhaseFigures,
    backlog_report,
    memory_growth,
    waiting_report,
)
from workbench.bench.chaos.fault_injection import InjectedFault

MB = 1024 * 1024
GOOD = BacklogResult(
    phases=[
        PhaseFigures("no faults", 100.0, 1000, 0, 1020.0, None),
        PhaseFigures("faults, beside HTTP", 100.0, 800, 100, 950.0, 12, [0.1, 0.2]),
    ],
    results_of=[1, 1, 1],
    wrong=0,
    refused=0,
    unknown=0,
    verdicts=Counter(right=100),
    memory=[MemorySeries("router-1", [100 * MB] * 60), MemorySeries("router-1", [90 * MB] * 5)],
    warm_up_s=20.0,
    crashes=[],
)


def missed(found: BacklogResult) -> list[str]:
    return [each.name for each in backlog_report(found).thresholds if not each.passed]


def test_backlog_with_one_result_for_each_prompt_passes() -> None:
    assert missed(GOOD) == []


@pytest.mark.parametrize(
    ("found", "threshold"),
    [
        (replace(GOOD, results_of=[1, 0, 1]), "prompts without a result"),
        (replace(GOOD, results_of=[1, 2, 1]), "prompts with several results"),
        (replace(GOOD, wrong=1), "results with a wrong text"),
        (replace(GOOD, refused=1), "results with a wrong text"),
        (replace(GOOD, unknown=1), "results of unknown requests"),
        (
            replace(GOOD, verdicts=Counter(right=9, lost=1)),
            "interactive answers lost, repeated or wrong",
        ),
        (replace(GOOD, crashes=["worker-1"]), "processes that ended by themselves"),
        (replace(GOOD, memory=[]), "processes whose memory was compared"),
        (replace(GOOD, verdicts=Counter()), "interactive answers"),
        (
            replace(GOOD, phases=[PhaseFigures("faults", 100.0, 1000, 0, 1020.0, 0)]),
            "kills and stops, faults",
        ),
        (
            replace(GOOD, phases=[PhaseFigures("no faults", 100.0, 800, 0, 1020.0, None)]),
            "throughput, no faults, of the engines' capacity",
        ),
    ],
)
def test_each_fault_misses_its_threshold(found: BacklogResult, threshold: str) -> None:
    assert missed(found) == [threshold]


async def test_error_beside_the_drain_ends_it() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise BrokerUnavailable("away")

    async def run() -> None:
        await asyncio.Event().wait()

    with pytest.raises(BrokerUnavailable):
        async with background(run(), fail()):
            await asyncio.Event().wait()
    with pytest.raises(BenchFailed):
        async with background(run()):
            raise BenchFailed("it is not ready")
    async with background(run()):
        pass


def test_growth_is_measured_after_the_warm_up() -> None:
    warm_up = [MB * (20 + n) for n in range(80)]
    series = [MemorySeries("worker-1", [*warm_up, *[100 * MB] * 30, *[115 * MB] * 60])]
    assert memory_growth(series, 80.0) == {"worker-1": pytest.approx(0.15)}
    assert memory_growth([MemorySeries("worker-1", warm_up)], 80.0) == {}


def test_capacity_is_that_of_full_engines() -> None:
    """8 requests at a time, about 35 tokens of 20 ms each and prefills of others in between."""
    assert 5 < engine_requests_per_s() < 8 / (35 * 0.02)


def test_backlog_of_one_kind_of_faults_needs_its_faults_and_whole_answers() -> None:
    def missed(found: BacklogResult, faults: int) -> list[str]:
        return [t.name for t in waiting_report(found, faults).thresholds if not t.passed]

    retried = replace(GOOD, refused=2, verdicts=Counter({"right": 9, RETRY: 2}))
    assert missed(retried, faults=12) == []
    assert missed(retried, faults=13) == ["faults"]
    lost = replace(GOOD, verdicts=Counter(right=9, lost=1))
    assert missed(lost, faults=12) == ["interactive answers lost, repeated or wrong"]


LINKS = [(name, n) for n in (1, 2, 3) for name in ("gateway-1", "gateway-2", "router-1")]


def test_each_link_is_cut_once_alone_or_one_of_each_kind_of_process_at_once() -> None:
    alone = cut_rounds(LINKS, together=False)
    assert sorted(ends for (ends,) in alone) == sorted(LINKS)
    assert cut_rounds(LINKS, together=True) == [[("gateway-1", 1), ("router-1", 2)]]


class QuickFleet:
    """Client, results, load and faults of a fleet that answers each prompt at once."""

    conversations: tuple[Any, ...] = ()

    def __init__(self, world: MemoryWorld, faults: int) -> None:
        self.count = self._left = faults
        self.counts: list[int] = []
        self.received = 0
        self._clock = world.clock

    is_done = property(lambda self: not self._left)

    def new_request_id(self) -> str:
        return "id"

    def expect(self, ids: list[str]) -> int:
        self.counts += [0] * len(ids)
        return len(self.counts) - len(ids)

    async def publish(self, prompt: Prompt, **_: Any) -> None:
        self.counts[int(prompt.custom_id or -1)] += 1
        self.received += 1

    async def inject(self, stop: asyncio.Event) -> list[InjectedFault]:
        await self._clock.sleep(10)
        self._left -= 1
        return [InjectedFault("collector", "collector-1", 0.0, 0.0)]

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def drain(self) -> None: ...


@scenario_test
async def test_backlog_lasts_until_all_faults_are_done_however_fast_it_is_drained(
    world: MemoryWorld,
) -> None:
    fleet: Any = QuickFleet(world, faults=5)
    scale, lines = BacklogScale(prompts=1, window_s=10.0), list[str]()
    drain = BacklogDrain(
        world.clock, fleet, fleet, fleet, scale, [fleet], client=fleet,
        progress=lambda _: None, print_line=lines.append,
    )  # fmt: skip
    await drain.run()
    found = drain._phases[0]
    assert found.faults == 5
    assert found.results == len(fleet.counts) > 5 * 10 * 20
    assert len(lines) == 2
