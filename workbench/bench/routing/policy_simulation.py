"""Policy simulation: a production trace on four fleets, and published figures.

The deterministic figures of round robin validate the simulation: they are those of the offline
replay of NVIDIA Dynamo (ai-dynamo-runtime 1.6.1) of the same trace. The rest compares our policy
with the best of Dynamo's settings, simulated as well, separately for each row and figure. Only the
whole trace has published figures; without it its thresholds count as failed. Generated traces of
other workloads are simulated in any case.

A scene is a set of runs and their thresholds (`policy_scenarios.py`); cached runs
(`result_cache.py`) are not repeated. Runs are independent, so several run in parallel, each in a
process; the speed of the simulation is measured when no other run is active.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from kvlane.app.commands.console import plot_page
from kvlane.app.commands.simulation.simulation_report import policy_figure
from kvlane.app.simulation.simulation_runs import (
    PreparedTrace,
    SimulationRun,
    result_row,
    run_timed,
)
from kvlane.app.simulation.synthetic_traces import NAME_PREFIX, TraceSize, generate_trace
from kvlane.app.simulation.trace_requests import ArrivalRate
from kvlane.app.traces.mooncake_trace import InvalidTrace, TraceRow, read_trace
from kvlane.indexer.precompile import compile_all
from workbench.bench.bench_environment import PrintLine
from workbench.bench.process_pool import process_pool
from workbench.bench.report import Report, Threshold, at_least
from workbench.bench.routing.policy_scenarios import (
    CONVERSATION,
    REQUESTS,
    SETUPS,
    SPEED_POLICIES,
    ScenarioResult,
    ScenarioRun,
    SimulationScale,
    all_thresholds,
    profile_of,
    scenario_runs,
)
from workbench.bench.routing.result_cache import ResultCache

PROMPT_TOKENS, OUTPUT_TOKENS = 144_793_823, 4_122_048
"""Together with REQUESTS, these identify the trace of the published figures."""
TRACE_MISSING = (
    "most thresholds need the whole conversation trace, which is not part of kvlane: get "
    "FAST25-release/traces/conversation_trace.jsonl from https://github.com/kvcache-ai/Mooncake "
    "and pass it with --trace"
)
MIN_SPEED = 1000.0
_SCENARIO = ("trace", "profile", "workers", "speed", "jitter_s", "conditions")
"""Fields of the rows that are the same in one plot."""
SPEED_ROUNDS = 2
"""The faster round counts: other load on the machine is no property of the simulation."""


async def bench_policies(
    scale: SimulationScale,
    trace_file: Path | None,
    print_line: PrintLine,
    progress: Callable[[float], None],
    cache_file: Path | None = None,
    jobs: int = 1,
) -> Report:
    """Simulate all scenarios, `jobs` runs in parallel; a coroutine like the other benchmarks."""
    traces = TraceSet(trace_file)
    published_trace(traces, print_line)
    compile_all()
    kept = ResultCache(cache_file)
    wanted = [
        play
        for play in scenario_runs(scale)
        if trace_file is not None or play.trace != CONVERSATION
    ]
    found = {play: known for play in wanted if (known := kept.get(play)) is not None}
    missing = [play for play in wanted if play not in found]
    progress(0.95 * len(found) / max(len(wanted), 1))
    for done in run_all(missing, traces, jobs):
        kept.put(done)
        found[done.scenario_run] = done
        progress(0.95 / len(wanted))
    speeds = list(_speeds(None if trace_file is None else traces[CONVERSATION]))
    progress(0.05)
    in_order = [found[play] for play in wanted]
    return Report(
        "simulate", [_row(each) for each in in_order], [*all_thresholds(scale, in_order), *speeds]
    )


def plot_scenarios(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write a page with a plot for the rows of each trace, fleet and condition."""
    found: dict[tuple[object, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in _SCENARIO), []).append(row)
    created_on = datetime.now(UTC).date()
    figures = [
        policy_figure(each, f"{each[0]['trace']} ({each[0]['profile']})", created_on)
        for each in found.values()
    ]
    file.write_text(plot_page("kvlane bench simulate", *figures), "utf-8")


class TraceSet:
    """The traces of the benchmark by name, read or generated on first use: `gen:KIND`, or
    `gen:KIND@SEED`.

    `trace_file`: of the recorded one.
    """

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self._known: dict[str, PreparedTrace] = {}

    def __getitem__(self, name: str) -> PreparedTrace:
        """Raises InvalidTrace."""
        if name not in self._known:
            self._known[name] = PreparedTrace(self._rows(name))
        return self._known[name]

    def _rows(self, name: str) -> list[TraceRow]:
        if name != CONVERSATION:
            kind, _, seed = name.removeprefix(NAME_PREFIX).partition("@")
            return generate_trace(kind, TraceSize()._replace(seed=int(seed or 0)))
        assert self.file is not None, "the caller skips its runs without the file"
        return read_trace(self.file)


def published_trace(traces: TraceSet, print_line: PrintLine) -> PreparedTrace | None:
    """The trace that has published figures; None, with a message, if it was not given.

    Raises InvalidTrace for another one.
    """
    if traces.file is None:
        print_line(TRACE_MISSING)
        return None
    if not _is_published(traces[CONVERSATION].rows):
        raise InvalidTrace(f"{traces.file} is not the conversation trace: {TRACE_MISSING}")
    return traces[CONVERSATION]


def run_all(runs: Sequence[ScenarioRun], traces: TraceSet, jobs: int) -> Iterator[ScenarioResult]:
    """Run all; yields results in the order of completion."""
    if jobs == 1 or len(runs) <= 1:
        yield from (_done(play, traces) for play in runs)
        return
    pool = process_pool(min(jobs, len(runs)))
    try:
        under_way = [pool.submit(_done_apart, play, traces.file) for play in runs]
        for ended in as_completed(under_way):
            yield ended.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _done(play: ScenarioRun, traces: TraceSet) -> ScenarioResult:
    took = run_timed(traces[play.trace], play.run)
    return ScenarioResult(play, took.figures, took.wall_s)


def _done_apart(play: ScenarioRun, file: Path | None) -> ScenarioResult:
    """The same in a process of the pool."""
    return _done(play, _traces_apart(file))


@cache
def _traces_apart(file: Path | None) -> TraceSet:
    compile_all()
    return TraceSet(file)


def _row(done: ScenarioResult) -> dict[str, object]:
    return {
        "trace": done.scenario_run.trace,
        "profile": profile_of(done.scenario_run.run.curves),
        **result_row(done.scenario_run.run, done.figures, done.wall_s),
    }


def _is_published(rows: Sequence[TraceRow]) -> bool:
    return (len(rows), sum(r.input_length for r in rows), sum(r.output_length for r in rows)) == (
        REQUESTS,
        PROMPT_TOKENS,
        OUTPUT_TOKENS,
    )


def _speeds(trace: PreparedTrace | None) -> Iterator[Threshold]:
    """Speed of the simulation; never cached, since it depends on the machine."""
    for setup in SETUPS:
        for policy in SPEED_POLICIES if setup.is_timed else ():
            pace = math.nan
            if trace is not None:
                run = SimulationRun(policy, setup.workers, ArrivalRate(setup.speed))
                pace = trace.duration_s / min(
                    run_timed(trace, run).wall_s for _ in range(SPEED_ROUNDS)
                )
            yield at_least(f"{setup.name}: speed, policy {policy}", pace, "trace s/s", MIN_SPEED)
