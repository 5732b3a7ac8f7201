"""The report of the backlog bench."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from app.bench.bench_environment import BenchFailed
from app.bench.chaos.backlog_drain import (
    BacklogResult,
    MemorySeries,
    PhaseFigures,
    background,
    backlog_report,
    engine_requests_per_s,
    memory_growth,
    waiting_report,
)
from streams.errors import BrokerUnavailable

MB = 1024 * 1024
GOOD = BacklogResult(
    phases=[
        PhaseFigures("no faults", 100.0, 1000, 0, 1020.0, 0),
        PhaseFigures("faults, beside HTTP", 100.0, 800, 100, 950.0, 12, [0.1, 0.2]),
    ],
    results_of=[1, 1, 1],
    wrong=0,
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
            replace(GOOD, phases=[PhaseFigures("no faults", 100.0, 800, 0, 1020.0, 0)]),
            "throughput, no faults, of the engines' capacity",
        ),
    ],
)  # fmt: skip
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


def test_backlog_of_one_kind_of_faults_needs_its_faults() -> None:
    waiting = replace(GOOD, results_of=[1] * 1300, verdicts=Counter(), memory=[])
    assert [t.name for t in waiting_report(waiting, 100).thresholds if not t.passed] == [
        "kills and stops"
    ]
    assert all(t.passed for t in waiting_report(waiting, 200).thresholds)
