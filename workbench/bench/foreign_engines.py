"""Foreign engines: the default policy on engines whose steps have another shape than its prior.

    constant     constant parts of steps x 4
    linear       time per token x 4
    quadratic    time of a prompt grows with its square
    slower       twice as slow from the middle of the trace on

For each kind of engine and of traffic, the policy that learns the engines from the ledger is
compared with the same policy with the true curves on the cards, after `WARM_UP_PER_WORKER` requests
a worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from kvlane.app.perf_curves import PerfCurves
from kvlane.app.simulation.simulated_router import NetworkConditions
from kvlane.app.simulation.simulation_runs import RunMetrics, SimulationRun
from kvlane.app.simulation.synthetic_traces import NAME_PREFIX, SHORT_PROMPTS, TraceSize
from kvlane.app.simulation.trace_requests import ArrivalRate
from kvlane.indexer.precompile import compile_all
from workbench.bench.report import Report, Threshold, at_most
from workbench.bench.routing.policy_scenarios import OWN_POLICY, WARM_UP_PER_WORKER, ScenarioRun
from workbench.bench.routing.policy_simulation import TraceSet, run_all
from workbench.bench.routing.result_cache import ResultCache

WORKERS = 4
LIMIT = 1.02
"""Of the ratio of learned to known curves."""
ERROR_LIMITS = {
    "ttft_error_p50": 0.05, "ttft_error_p90": 0.2, "itl_error_p50": 0.05, "itl_error_p90": 0.2,
}  # fmt: skip
"""Of the errors of predictions with learned curves."""


class ForeignEngine(NamedTuple):
    """The curves of an engine, and those from the middle of the trace on."""

    curves: PerfCurves
    later_curves: PerfCurves | None = None


def foreign_engines() -> Mapping[str, ForeignEngine]:
    """The kinds of engines by name; each differs in one property from the prior."""
    prior = PerfCurves()
    (a, b, c), (p, q, r) = prior.prefill, prior.decode
    twice = PerfCurves((2 * a, 2 * b, 2 * c), (2 * p, 2 * q, 2 * r), 2 * prior.min_decode_ms)
    return {
        "constant x 4": ForeignEngine(PerfCurves((a, b, 4 * c), (p, q, 4 * r))),
        "linear x 4": ForeignEngine(PerfCurves((a, 4 * b, c), (4 * p, 4 * q, r))),
        "quadratic": ForeignEngine(PerfCurves((20 * a, b, c), (p, q, r))),
        "slower": ForeignEngine(prior, twice),
    }


TRAFFIC = {"shared-prefixes": 2.5, "multi-turn": 2.5, SHORT_PROMPTS: 40.0}
"""Requests a second, by kind of trace."""


class ForeignRun(NamedTuple):
    """A run on engines of a kind: with `is_known`, their curves are on the cards."""

    engine: str
    traffic: str
    is_known: bool

    @property
    def scenario_run(self) -> ScenarioRun:
        engine = foreign_engines()[self.engine]
        run = SimulationRun(
            OWN_POLICY, WORKERS, ArrivalRate(TRAFFIC[self.traffic] / TraceSize().rate),
            conditions=NetworkConditions(publishes_curves=self.is_known), curves=engine.curves,
            warmup_requests=WARM_UP_PER_WORKER * WORKERS, later_curves=engine.later_curves,
        )  # fmt: skip
        return ScenarioRun(NAME_PREFIX + self.traffic, run)


async def bench_foreign_engines(
    progress: Callable[[float], None], kept: ResultCache, jobs: int = 1
) -> Report:
    """Simulate all engines under all kinds of traffic, `jobs` runs in parallel."""
    compile_all()
    pairs = [(engine, traffic) for engine in foreign_engines() for traffic in TRAFFIC]
    runs = [ForeignRun(*pair, known).scenario_run for pair in pairs for known in (True, False)]
    found = {run: cached.figures for run in runs if (cached := kept.get(run)) is not None}
    for done in run_all([run for run in runs if run not in found], TraceSet(None), jobs):
        kept.put(done)
        found[done.scenario_run] = done.figures
        progress(1 / len(runs))
    rows: list[dict[str, Any]] = []
    thresholds: list[Threshold] = []
    for pair in pairs:
        known, learned = (found[ForeignRun(*pair, known).scenario_run] for known in (True, False))
        rows.append(_row(*pair, known, learned))
        thresholds += _thresholds(" with ".join(pair), known, learned)
    return Report("engines", rows, thresholds)


def _row(engine: str, traffic: str, known: RunMetrics, learned: RunMetrics) -> dict[str, Any]:
    return {
        "engine": engine,
        "traffic": traffic,
        "TTFT ms": {"known": known.ttft_mean, "learned": learned.ttft_mean},
        "E2E ms": {"known": known.e2e_mean, "learned": learned.e2e_mean},
        "learned to known": {
            "TTFT": learned.ttft_mean / known.ttft_mean,
            "E2E": learned.e2e_mean / known.e2e_mean,
        },
        "TTFT error": {"p50": learned.ttft_error_p50, "p90": learned.ttft_error_p90},
        "ITL error": {"p50": learned.itl_error_p50, "p90": learned.itl_error_p90},
    }


def _thresholds(name: str, known: RunMetrics, learned: RunMetrics) -> Iterator[Threshold]:
    ttft, e2e = learned.ttft_mean / known.ttft_mean, learned.e2e_mean / known.e2e_mean
    yield at_most(f"{name}: mean TTFT, learned to known", ttft, "x", LIMIT)
    yield at_most(f"{name}: mean E2E, learned to known", e2e, "x", LIMIT)
    for figure, limit in ERROR_LIMITS.items():
        error = getattr(learned, figure)
        yield at_most(f"{name}: {figure}", math.nan if error is None else error, "", limit)
