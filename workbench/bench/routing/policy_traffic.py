"""Traffic table: every policy on many kinds of traffic, relative to the best one.

For each row, mean TTFT and mean E2E are ratios to the least of all policies, separately, so that a
policy that gives away one for the other shows it; their sum ranks the policies. Rows, for each
profile of engines: short prompts at random times and in bursts, chats with long answers near
saturation, the generated traces, and with its file the conversation trace on its four fleets. Each
seed generates other traces. Engines other than the published one have no curves on their cards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from kvlane.app.perf_curves import PROFILES
from kvlane.app.simulation.simulation_runs import RunMetrics, SimulationRun
from kvlane.app.simulation.synthetic_traces import (
    LONG_ANSWERS,
    NAME_PREFIX,
    SHORT_BURSTS,
    SHORT_PROMPTS,
    TraceSize,
)
from kvlane.app.simulation.trace_requests import ArrivalRate
from kvlane.indexer.precompile import compile_all
from workbench.bench.bench_environment import PrintLine
from workbench.bench.report import Report, Threshold, at_most
from workbench.bench.routing.policy_scenarios import (
    DYNAMO_POLICIES,
    OWN_POLICY,
    SETUPS,
    TRACE_KINDS,
    PolicyScenario,
    ScenarioResult,
    ScenarioRun,
    generated_scenario,
    trace_scenario,
    with_profile,
)
from workbench.bench.routing.policy_simulation import TraceSet, run_all
from workbench.bench.routing.result_cache import ResultCache

POLICIES = (OWN_POLICY, *DYNAMO_POLICIES, "least_loaded", "power_of_two", "round_robin")
WORKERS = 4
SHORT_RATES = (20, 40, 120, 400)
"""Requests a second."""
LONG_ANSWER_RATE = 7.5
LIMIT = 1.05
"""Of each ratio to the best policy."""


class TrafficScale(NamedTuple):
    """Amount of work: fleets of the conversation trace, seeds."""

    fleets: int
    seeds: int


QUICK, FULL = TrafficScale(3, 1), TrafficScale(len(SETUPS), 3)


def generated_scenarios() -> list[PolicyScenario]:
    """The rows that need no file."""
    base = TraceSize().rate
    rows = [
        _scenario(kind, rate / base, f"{kind}, {rate}/s")
        for kind in (SHORT_PROMPTS, SHORT_BURSTS)
        for rate in SHORT_RATES
    ]
    rows.append(_scenario(LONG_ANSWERS, LONG_ANSWER_RATE / base, LONG_ANSWERS))
    return [*rows, *(generated_scenario(kind) for kind in TRACE_KINDS)]


def _scenario(kind: str, speed: float, name: str) -> PolicyScenario:
    return PolicyScenario(NAME_PREFIX + kind, SimulationRun("", WORKERS, ArrivalRate(speed)), name)


async def bench_traffic(
    scale: TrafficScale,
    trace_file: Path | None,
    print_line: PrintLine,
    progress: Callable[[float], None],
    cache_file: Path | None = None,
    jobs: int = 1,
    first_seed: int = 0,
) -> Report:
    """Simulate all policies on all rows, `jobs` runs in parallel; `first_seed`: of its seeds."""
    seeds = range(first_seed, first_seed + scale.seeds)
    traces = TraceSet(trace_file)
    if trace_file is None:
        print_line("without --trace the rows of the conversation trace are left out")
    compile_all()
    scenarios = generated_scenarios()
    if trace_file is not None:
        scenarios += [trace_scenario(setup) for setup in SETUPS[: scale.fleets]]
    scenarios = [with_profile(each, name) for name, each in product(PROFILES, scenarios)]
    plays = product(scenarios, POLICIES, seeds)
    wanted = list(dict.fromkeys(run_of(each, policy, seed) for each, policy, seed in plays))
    kept = ResultCache(cache_file)
    found = {play: known for play in wanted if (known := kept.get(play)) is not None}
    for done in run_all([play for play in wanted if play not in found], traces, jobs):
        kept.put(done)
        found[done.scenario_run] = done
        progress(1 / len(wanted))
    rows: list[dict[str, Any]] = []
    thresholds: list[Threshold] = []
    for each in scenarios:
        table = TrafficRow.of(each, seeds, found)
        rows += table.rows()
        thresholds += table.thresholds()
    return Report("traffic", rows, thresholds)


def run_of(scenario: PolicyScenario, policy: str, seed: int) -> ScenarioRun:
    """The run of a policy, on the trace of a seed where traces are generated."""
    trace, run = scenario.run_of(policy, seed)
    return ScenarioRun(f"{trace}@{seed}" if trace.startswith(NAME_PREFIX) else trace, run)


class PolicyMeans(NamedTuple):
    """Means over seeds of a policy's figures, in ms."""

    ttft: float
    ttft_p99: float
    e2e: float


class TrafficRow(NamedTuple):
    """The policies on one kind of traffic."""

    name: str
    means: Mapping[str, PolicyMeans]

    @classmethod
    def of(
        cls,
        scenario: PolicyScenario,
        seeds: Sequence[int],
        found: Mapping[ScenarioRun, ScenarioResult],
    ) -> TrafficRow:
        """The means of the runs of a scenario."""
        means = {}
        for policy in POLICIES:
            runs = {run_of(scenario, policy, seed) for seed in seeds}
            means[policy] = _means([found[run].figures for run in runs])
        return cls(scenario.name, means)

    def best(self, figure: str) -> float:
        """The least of a figure over all policies but ours."""
        others = [each for name, each in self.means.items() if name != OWN_POLICY]
        return float(min(getattr(each, figure) for each in others))

    def ratios(self, policy: str) -> PolicyMeans:
        """Ratios of the figures of a policy to the best other one."""
        each = self.means[policy]
        return PolicyMeans(*(getattr(each, name) / self.best(name) for name in each._fields))

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row of the table for each policy."""
        for policy, each in self.means.items():
            ratio = self.ratios(policy)
            yield {
                "traffic": self.name, "policy": policy, "TTFT ms": each.ttft,
                "p99": each.ttft_p99, "E2E ms": each.e2e,
                "to best": {"TTFT": ratio.ttft, "E2E": ratio.e2e},
                "sum": ratio.ttft + ratio.e2e,
            }  # fmt: skip

    def thresholds(self) -> Iterator[Threshold]:
        """The limits of the default policy."""
        own = self.ratios(OWN_POLICY)
        yield at_most(f"{self.name}: mean TTFT to the best", own.ttft, "x", LIMIT)
        yield at_most(f"{self.name}: mean E2E to the best", own.e2e, "x", LIMIT)
        yield at_most(f"{self.name}: p99 TTFT to the best", own.ttft_p99, "x", LIMIT)
        sums = {name: sum(self.ratios(name)[::2]) for name in self.means if name != OWN_POLICY}
        least = min(sums.values())
        yield at_most(f"{self.name}: sum to the least sum", (own.ttft + own.e2e) / least, "x", 1.0)


def _means(figures: Sequence[RunMetrics]) -> PolicyMeans:
    count = len(figures)
    return PolicyMeans(
        sum(each.ttft_mean for each in figures) / count,
        sum(each.ttft_p99 for each in figures) / count,
        sum(each.e2e_mean for each in figures) / count,
    )
