"""A production trace on four simulated fleets, under all policies, beside published figures.

Those of round robin, which leaves nothing to chance, show that the simulation is right: they are
what the offline replay of NVIDIA Dynamo (ai-dynamo-runtime 1.6.1) says of the same trace. The rest
says what the policies are worth: ours against the best of Dynamo's settings, run beside it. Only
the whole trace has published figures; without it every bar counts as not met.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from app.bench.ground import Said
from app.bench.report import Bar, Report
from app.simulation.figures import Figures
from app.simulation.runs import Run, Trace, played, row
from app.simulation.traffic import Pace
from app.trace import BadTrace, TraceRow, read_trace
from indexer.warm import compile_all

REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 12_031, 144_793_823, 4_122_048
"""By which the trace of the published figures is known."""
MISSING = (
    "the bars need the whole conversation trace, which is not part of kvlane: get "
    "FAST25-release/traces/conversation_trace.jsonl from https://github.com/kvcache-ai/Mooncake "
    "and pass it with --trace"
)

CLOSE = 0.01
TRACE_S_A_SECOND = 1000.0
SPREAD_S = 3.0
"""Recorded arrivals stand on ticks of this many seconds; jittered, they are spread over them."""


class Setup(NamedTuple):
    """A fleet, how fast the trace is played on it, and what is published of round robin there."""

    workers: int
    speed: float
    published: Figures
    is_timed: bool

    @property
    def name(self) -> str:
        """As people call it."""
        return f"{self.workers}x{self.speed:g}"


SETUPS = (
    Setup(8, 1.0, Figures(REQUESTS, 0.08237, 320.9, 183.6, 2048.0, 7.588, 2913.0, 10890.0), True),
    Setup(8, 4.0, Figures(REQUESTS, 0.08148, 475.1, 273.2, 2780.0, 25.84, 9302.0, 36640.0), True),
    Setup(16, 8.0, Figures(REQUESTS, 0.07492, 410.2, 225.2, 2582.0, 25.71, 9193.0, 36600.0), True),
    Setup(64, 16.0, Figures(REQUESTS, 0.0611, 277.5, 146.6, 1946.0, 10.16, 3748.0, 14970.0), False),
)


class Form(NamedTuple):
    """How much is played. Policies as for `tuning_of`; all seeds with and without jitter."""

    policies: tuple[str, ...]
    seeds: int
    jitters_s: tuple[float, ...]


_OTHERS = ("round_robin", "random", "least_loaded", "power_of_two", "session_hash")
OURS = "predictive"
QUICK = Form((OURS, "dynamo", "dynamo:32", "dynamo:64", *_OTHERS), 1, (0.0,))
FULL = Form(
    (OURS, "dynamo", *(f"dynamo:{scale}" for scale in (16, 32, 64, 256)), *_OTHERS),
    5,
    (0.0, SPREAD_S),
)
TIMED = "dynamo"
"""The policy whose speed counts: it looks at all that there is to look at, once a request."""


class Done(NamedTuple):
    """A run, and how long it took."""

    run: Run
    found: Figures
    wall_s: float


async def simulate(
    form: Form, file: Path | None, said: Said, progress: Callable[[float], None]
) -> Report:
    """Play it all, one run after the other; a coroutine like the other benchmarks."""
    if file is None:
        said(MISSING)
        return Report("simulate", [], list(bars(None, ())))
    rows = read_trace(file)
    if not _is_published(rows):
        raise BadTrace(f"{file} is another trace: {MISSING}")
    compile_all()
    trace = Trace(rows)
    runs = list(_runs(form))
    done = [timed(trace, run, lambda n: progress(n / REQUESTS / len(runs))) for run in runs]
    return Report("simulate", [row(*each) for each in done], list(bars(trace, done)))


def timed(trace: Trace, run: Run, progress: Callable[[int], None]) -> Done:
    """Do a run. `progress` hears how many more requests have come."""
    began = time.perf_counter()
    found = played(trace, run, progress)
    return Done(run, found, time.perf_counter() - began)


def _is_published(rows: Sequence[TraceRow]) -> bool:
    return (len(rows), sum(r.input_length for r in rows), sum(r.output_length for r in rows)) == (
        REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS,
    )  # fmt: skip


def _runs(form: Form) -> Iterator[Run]:
    for setup, jitter_s, policy, seed in product(
        SETUPS, form.jitters_s, form.policies, range(form.seeds)
    ):
        if policy != "round_robin" or jitter_s or not seed:  # there is nothing to draw
            yield Run(policy, setup.workers, Pace(setup.speed, jitter_s), seed)


def bars(trace: Trace | None, done: Sequence[Done]) -> Iterator[Bar]:
    """What has to be reached; nan where the runs for it were not done."""
    for setup in SETUPS:
        found = [d.found for d in _of(setup, done) if d.run.policy == "round_robin"]
        off = max((distance(each, setup.published) for each in found), default=math.nan)
        yield Bar(
            f"{setup.name}: round robin, the figure furthest from the published one",
            off * 100, "%", f"<= {CLOSE:.0%}", off <= CLOSE,
        )  # fmt: skip
    for setup in SETUPS:
        if setup.is_timed:
            walls = [d.wall_s for d in _of(setup, done) if d.run.policy == TIMED]
            pace = trace.seconds / max(walls) if trace and walls else math.nan
            yield Bar(
                f"{setup.name}: speed, policy {TIMED}",
                pace, "trace s/s", f">= {TRACE_S_A_SECOND:g}", pace >= TRACE_S_A_SECOND,
            )  # fmt: skip
    for setup in SETUPS:
        for name, figure in (("TTFT", "ttft_mean"), ("E2E", "e2e_mean")):
            ratio = _ratio(_of(setup, done), figure)
            yield Bar(
                f"{setup.name}: {OURS}, mean {name} against dynamo's best setting",
                ratio, "x", "<= 1", ratio <= 1,
            )  # fmt: skip


def _of(setup: Setup, done: Sequence[Done]) -> list[Done]:
    """The runs with arrivals as recorded."""
    where = (setup.workers, Pace(setup.speed))
    return [d for d in done if (d.run.workers, d.run.pace) == where]


def _ratio(done: Sequence[Done], figure: str) -> float:
    """Ours to the least of dynamo's settings, each by the mean of its seeds; nan without both."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for run, found, _ in done:
        values[run.policy].append(getattr(found, figure))
    theirs = [fmean(values[policy]) for policy in values if policy.partition(":")[0] == "dynamo"]
    return fmean(values[OURS]) / min(theirs) if OURS in values and theirs else math.nan


def distance(found: Figures, published: Figures) -> float:
    """Of the figure that is furthest from the published one, as a share of that."""
    return max(abs(a / b - 1) for a, b in zip(found, published, strict=True))
