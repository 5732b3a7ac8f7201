"""A production trace on four simulated fleets, under all policies, beside published figures.

Those of round robin, which leaves nothing to chance, show that the simulation is right: they are
what the offline replay of NVIDIA Dynamo (ai-dynamo-runtime 1.6.1) says of the same trace. The rest
says what the policies are worth: ours against the best of Dynamo's settings, run beside it, for
each row and each figure the best of them. Only the whole trace has published figures; without it
its bars count as not met. Generated traces, of other kinds of work, are played in any case.

A scene is a set of runs and the bars that they are for (`app/bench/scenes.py`); runs that were kept
(`app/bench/kept.py`) are not done again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

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
) -> Report:
    """Play it all, one run after the other; a coroutine like the other benchmarks."""
    traces: dict[str, Trace] = {}
    if file is None:
        said(MISSING)
    else:
        rows = read_trace(file)
        if not _is_published(rows):
            raise BadTrace(f"{file} is another trace: {MISSING}")
        traces[CONVERSATION] = Trace(rows)
    compile_all()
    kept = Kept(keep)
    wanted = [play for play in plays(form) if play.trace in traces or play.trace != CONVERSATION]
    done = []
    for play in wanted:
        if play.trace not in traces:
            traces[play.trace] = Trace(generated(play.trace.removeprefix(PREFIX), Size()))
        done.append(_done(play, traces[play.trace], kept))
        progress(0.95 / len(wanted))
    speeds = list(_speeds(traces.get(CONVERSATION)))
    progress(0.05)
    found = chain(verdicts(form, done), speeds)
    return Report("simulate", [_row(each) for each in done], list(found))


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


def _done(play: Play, trace: Trace, kept: Kept) -> Done:
    if (known := kept.get(play)) is not None:
        return known
    took = timed(trace, play.run)
    done = Done(play, took.found, took.wall_s)
    kept.put(done)
    return done


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
