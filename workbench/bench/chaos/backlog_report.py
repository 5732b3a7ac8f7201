"""The report of the backlog bench: its figures, rows and bars."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from workbench.bench.report import Report, Threshold, at_least, at_most, none_of
from workbench.bench.statistics import percentile

SAMPLE_INTERVAL_S = 1.0
"""Time between two samples of the memory."""
THROUGHPUT_SHARE, GROWTH_LIMIT = 0.9, 0.1
RETRY = "retry"
"""Of an interactive answer: it ended with an error after which its client sends it again."""
MB = 1024 * 1024


class PhaseFigures(NamedTuple):
    """A phase of the drain. `results`: records over `seconds` of the clock; `capacity`: requests
    that the engines had taken meanwhile; `ttft_s`: of interactive requests."""

    name: str
    seconds: float
    results: int
    interactive: int
    capacity: float
    faults: int | None
    """None in a phase without faults."""
    ttft_s: Sequence[float] = ()


class MemorySeries(NamedTuple):
    """Resident memory of one start of a process under one load, a sample a second, in bytes."""

    process: str
    rss_bytes: Sequence[int]


@dataclass
class BacklogResult:
    """Result of the drain. `results_of`: number of results, by prompt; `refused`: results that are
    errors to retry; `verdicts`: of the interactive requests."""

    phases: list[PhaseFigures]
    results_of: Sequence[int]
    wrong: int
    refused: int
    unknown: int
    verdicts: Counter[str]
    memory: list[MemorySeries]
    warm_up_s: float
    crashes: list[str]


def memory_growth(series: Iterable[MemorySeries], warm_up_s: float) -> dict[str, float]:
    """By process, by which part of itself one start of it grew at most, from the first third after
    the warm-up to the last. Starts that ended before twice the warm-up are left out."""
    growth: dict[str, float] = {}
    for name, rss_bytes in series:
        steady = rss_bytes[int(warm_up_s / SAMPLE_INTERVAL_S) :]
        if len(steady) * SAMPLE_INTERVAL_S < warm_up_s:
            continue
        third = len(steady) // 3 or 1
        grown = median(steady[-third:]) / median(steady[:third]) - 1
        growth[name] = max(grown, growth.get(name, grown), key=abs)
    return growth


def backlog_report(found: BacklogResult) -> Report:
    """A row for each phase, and the bars."""
    growth = memory_growth(found.memory, found.warm_up_s)
    grown, part = max(((abs(v), name) for name, v in growth.items()), default=(0.0, "none"))
    wrong = found.verdicts.total() - found.verdicts["right"]
    bars = [
        *_results_bars(found, may_refuse=False),
        none_of("interactive answers lost, repeated or wrong", wrong),
        _some("interactive answers", found.verdicts.total()),
        *(
            _some(f"kills and stops, {phase.name}", phase.faults)
            for phase in found.phases
            if phase.faults is not None
        ),
        *(
            at_least(f"throughput, {phase.name}, of the engines' capacity",
                (phase.results + phase.interactive) / phase.capacity, "x", THROUGHPUT_SHARE)
            for phase in found.phases
        ),
        at_most(f"memory changed after warm-up, most of all {part}", grown, "x", GROWTH_LIMIT),
        _some("processes whose memory was compared", len(growth)),
        none_of("processes that ended by themselves", len(found.crashes)),
    ]  # fmt: skip
    sizes: dict[str, float] = {}
    for name, rss_bytes in found.memory:
        kind = name.partition("-")[0]
        sizes[kind] = max(sizes.get(kind, 0.0), max(rss_bytes) / MB)
    shown = ", ".join(f"{kind} {mb:.0f}" for kind, mb in sizes.items())
    rows = [_row(phase) for phase in found.phases]
    return Report("backlog", rows, bars, lines=[f"largest memory, MB: {shown}"])


def waiting_report(found: BacklogResult, faults: int) -> Report:
    """The report of a backlog with one phase, which has a number of faults of one kind.

    A slow machine may exceed the time limits of requests, which then have an error instead.
    """
    verdicts = found.verdicts
    wrong = verdicts.total() - verdicts["right"] - verdicts[RETRY]
    bars = [
        *_results_bars(found, may_refuse=True),
        _some("results with the text", len(found.results_of) - found.wrong - found.refused),
        none_of("interactive answers lost, repeated or wrong", wrong),
        _some("interactive answers", verdicts["right"]),
        at_least("faults", sum(phase.faults or 0 for phase in found.phases), "", faults),
        none_of("processes that ended by themselves", len(found.crashes)),
    ]
    retried = f"errors to retry: {found.refused} results, {verdicts[RETRY]} interactive answers"
    return Report("backlog", [_row(phase) for phase in found.phases], bars, lines=[retried])


def _results_bars(found: BacklogResult, *, may_refuse: bool) -> list[Threshold]:
    wrong = found.wrong if may_refuse else found.wrong + found.refused
    return [
        none_of("prompts without a result", found.results_of.count(0)),
        none_of("prompts with several results", sum(count > 1 for count in found.results_of)),
        none_of("results with a wrong text", wrong),
        none_of("results of unknown requests", found.unknown),
    ]


def _some(name: str, count: int) -> Threshold:
    """A number without which the other figures show nothing."""
    return at_least(name, count, "", 1)


def _row(phase: PhaseFigures) -> dict[str, Any]:
    return {
        "phase": phase.name,
        "s": phase.seconds,
        "faults": phase.faults or 0,
        "results": phase.results,
        "results/s": phase.results / phase.seconds,
        "HTTP answers": phase.interactive,
        "capacity/s": phase.capacity / phase.seconds,
        "first text ms, HTTP": {
            "p50": 1000 * percentile(phase.ttft_s, 0.5),
            "p99": 1000 * percentile(phase.ttft_s, 0.99),
        },
    }
