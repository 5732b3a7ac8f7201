"""A production trace on four simulated fleets, under all policies, beside published figures.

Those of round robin, which leaves nothing to chance, show that the simulation is right: they are
what the offline replay of NVIDIA Dynamo (ai-dynamo-runtime 1.6.1) says of the same trace. The rest
says what the policies are worth: ours against the best of Dynamo's settings, run beside it, for
each row and each figure the best of them. Only the whole trace has published figures; without it
its bars count as not met. Generated traces, of other kinds of work, are played in any case.

A scene is a set of runs and the bars that they are for (`app/bench/scenes.py`); runs that were kept
(`app/bench/kept.py`) are not done again. Runs know nothing of each other, so several are done at a
time, each in a process; how fast the simulation is, is measured when nothing else runs any more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from functools import cache
from pathlib import Path
from typing import NamedTuple

from app.bench.crew import crew
from app.bench.ground import Said
from app.bench.kept import Kept
from app.bench.report import Bar, Report
from app.bench.scenes import (
    CONVERSATION,
    REQUESTS,
    SETUPS,
    SPEED_POLICIES,
    Done,
    Form,
    Play,
    plays,
    verdicts,
)
from app.simulation.figures import Figures
from app.simulation.generated import PREFIX, Size, generated
from app.simulation.runs import Run, Trace, played, row
from app.simulation.traffic import Pace
from app.trace import BadTrace, TraceRow, read_trace
from indexer.warm import compile_all

PROMPT_TOKENS, OUTPUT_TOKENS = 144_793_823, 4_122_048
"""With REQUESTS, by which the trace of the published figures is known."""
MISSING = (
    "most bars need the whole conversation trace, which is not part of kvlane: get "
    "FAST25-release/traces/conversation_trace.jsonl from https://github.com/kvcache-ai/Mooncake "
    "and pass it with --trace"
)
TRACE_S_A_SECOND = 1000.0
SPEED_ROUNDS = 2
"""Of which the faster one counts: what else the machine does is no property of the simulation."""


async def simulate(
    form: Form,
    file: Path | None,
    said: Said,
    progress: Callable[[float], None],
    keep: Path | None = None,
    jobs: int = 1,
) -> Report:
    """Play it all, `jobs` runs at a time; a coroutine like the other benchmarks."""
    traces = Traces(file)
    if file is None:
        said(MISSING)
    elif not _is_published(traces[CONVERSATION].rows):
        raise BadTrace(f"{file} is another trace: {MISSING}")
    compile_all()
    kept = Kept(keep)
    wanted = [play for play in plays(form) if file is not None or play.trace != CONVERSATION]
    found = {play: known for play in wanted if (known := kept.get(play)) is not None}
    missing = [play for play in wanted if play not in found]
    progress(0.95 * len(found) / max(len(wanted), 1))
    for done in played_out(missing, traces, jobs):
        kept.put(done)
        found[done.play] = done
        progress(0.95 / len(wanted))
    speeds = list(_speeds(None if file is None else traces[CONVERSATION]))
    progress(0.05)
    in_order = [found[play] for play in wanted]
    return Report(
        "simulate", [_row(each) for each in in_order], [*verdicts(form, in_order), *speeds]
    )


class Traces:
    """The traces of the benchmark by their names, each read or made when it is asked for first.

    `file`: of the one that is recorded.
    """

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self._known: dict[str, Trace] = {}

    def __getitem__(self, name: str) -> Trace:
        """Raises BadTrace."""
        if name not in self._known:
            self._known[name] = Trace(self._rows(name))
        return self._known[name]

    def _rows(self, name: str) -> list[TraceRow]:
        if name != CONVERSATION:
            return generated(name.removeprefix(PREFIX), Size())
        assert self.file is not None, "its runs are not wanted without it"
        return read_trace(self.file)


def played_out(plays: Sequence[Play], traces: Traces, jobs: int) -> Iterator[Done]:
    """Do runs; each as it ends, in whatever order."""
    if jobs == 1 or len(plays) <= 1:
        yield from (_done(play, traces) for play in plays)
        return
    pool = crew(min(jobs, len(plays)))
    try:
        under_way = [pool.submit(_done_apart, play, traces.file) for play in plays]
        for ended in as_completed(under_way):
            yield ended.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _done(play: Play, traces: Traces) -> Done:
    took = timed(traces[play.trace], play.run)
    return Done(play, took.found, took.wall_s)


def _done_apart(play: Play, file: Path | None) -> Done:
    """The same in a process that does nothing else, for one run after the other."""
    return _done(play, _traces_apart(file))


@cache
def _traces_apart(file: Path | None) -> Traces:
    compile_all()
    return Traces(file)


class Timed(NamedTuple):
    """A run, what came of it, and how long it took."""

    run: Run
    found: Figures
    wall_s: float


def timed(trace: Trace, run: Run, progress: Callable[[int], None] = lambda _: None) -> Timed:
    """Do a run. `progress` hears how many more requests have come."""
    began = time.perf_counter()
    found = played(trace, run, progress)
    return Timed(run, found, time.perf_counter() - began)


def _row(done: Done) -> dict[str, object]:
    return {"trace": done.play.trace, **row(done.play.run, done.found, done.wall_s)}


def _is_published(rows: Sequence[TraceRow]) -> bool:
    return (len(rows), sum(r.input_length for r in rows), sum(r.output_length for r in rows)) == (
        REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS,
    )  # fmt: skip


def _speeds(trace: Trace | None) -> Iterator[Bar]:
    """How fast the simulation is; never kept, since it is the machine's as well."""
    for setup in SETUPS:
        for policy in SPEED_POLICIES if setup.is_timed else ():
            pace = math.nan
            if trace is not None:
                run = Run(policy, setup.workers, Pace(setup.speed))
                pace = trace.seconds / min(timed(trace, run).wall_s for _ in range(SPEED_ROUNDS))
            yield Bar(
                f"{setup.name}: speed, policy {policy}",
                pace, "trace s/s", f">= {TRACE_S_A_SECOND:g}", pace >= TRACE_S_A_SECOND,
            )  # fmt: skip
