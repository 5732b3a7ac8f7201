"""Scenarios of the policy simulation and their thresholds.

    published   round robin: the simulation is right
    recorded    arrivals as recorded, in bursts on the ticks of the recording's clock
    spread      the same requests, spread over these ticks
    late        the same with dispatch and event delays
    unknown     engines without a performance profile, after warm-up, and the same with one
    generated   other workloads, on which nothing was tuned

Recorded, spread and generated are also simulated on engines of each other profile, which have no
curves on their cards, with the policies that are compared.

Thresholds compare means over seeds. The comparison with Dynamo's cost uses the best of its
settings, for each figure separately.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from statistics import fmean
from typing import NamedTuple

from kvlane.app.perf_curves import PROFILES, PerfCurves, ProfileName
from kvlane.app.routing.selection.policies.registry import SIMULATED
from kvlane.app.simulation.simulated_router import DEFAULT_CONDITIONS, NetworkConditions
from kvlane.app.simulation.simulation_runs import RunMetrics, SimulationRun
from kvlane.app.simulation.synthetic_traces import NAME_PREFIX
from kvlane.app.simulation.trace_requests import ArrivalRate
from workbench.bench.report import Threshold, at_least, at_most

REQUESTS = 12_031
CONVERSATION = "conversation"
OWN_POLICY = "predictive"
DYNAMO_POLICIES = ("dynamo", "dynamo:16", "dynamo:32", "dynamo:64", "dynamo:256")
OTHER_POLICIES = tuple(name for name in SIMULATED if name not in (OWN_POLICY, "dynamo"))
SPEED_POLICIES = (OWN_POLICY, "dynamo")
PUBLISHED_TOLERANCE = 0.01
ARRIVAL_JITTER_S = 3.0
"""Recorded arrivals are on ticks of this many seconds; jitter spreads them over a tick."""
DELAY_CONDITIONS = (
    NetworkConditions(dispatch_delay_ms=1.0),
    NetworkConditions(event_delay_ms=5.0),
    NetworkConditions(event_delay_ms=100.0),
)
WARM_UP_PER_WORKER = 200
"""Warm-up requests per worker, after which its performance must have been learned."""
LEARNED_LIMIT = 1.05
ENGINE_CURVES = (
    PerfCurves(),
    PerfCurves((8.42e-7, 3.037e-2, 33.0), (-51.48, 108.02, 11.48), 2.0),
    PerfCurves((2.1e-7, 7.592e-3, 8.251), (-12.87, 27.0, 2.87), 0.5),
    PerfCurves((0.0, 2.2e-2, 4.0), (-10.0, 40.0, 8.0), 1.0),
)
"""The published engine, one at half and one at double speed, and one of another shape."""
GENERATED_WORKERS = 8
TRACE_KINDS = ("shared-prefixes", "offline", "multi-turn", "agent-tools")
"""The generated traces with common prefixes, on one fleet; `policy_traffic.py` has others."""


class FleetSetup(NamedTuple):
    """A fleet, the speed of the trace, and the published figures of round robin.

    `spread_e2e`: limit of the E2E ratio to Dynamo, with arrivals spread.
    """

    workers: int
    speed: float
    published: RunMetrics
    is_timed: bool = True
    recorded_e2e: float = 1.0
    spread_e2e: float = 0.98

    @property
    def name(self) -> str:
        return f"{self.workers}x{self.speed:g}"


SETUPS = (
    FleetSetup(
        8, 1.0, RunMetrics(REQUESTS, 0.08237, 320.9, 183.6, 2048.0, 7.588, 2913.0, 10890.0),
        recorded_e2e=1.01, spread_e2e=1.0,
    ),
    FleetSetup(8, 4.0, RunMetrics(REQUESTS, 0.08148, 475.1, 273.2, 2780.0, 25.84, 9302.0, 36640.0)),
    FleetSetup(16, 8.0,
        RunMetrics(REQUESTS, 0.07492, 410.2, 225.2, 2582.0, 25.71, 9193.0, 36600.0)),
    FleetSetup(
        64, 16.0, RunMetrics(REQUESTS, 0.0611, 277.5, 146.6, 1946.0, 10.16, 3748.0, 14970.0),
        is_timed=False,
    ),
)  # fmt: skip
ABSOLUTE_SETUP = SETUPS[2]
TTFT_LIMIT_MS, MIN_REUSE = 208.0, 0.32
"""Absolute thresholds in ABSOLUTE_SETUP."""


class ScenarioRun(NamedTuple):
    """A run on one of the traces."""

    trace: str
    run: SimulationRun


class ScenarioResult(NamedTuple):
    """The figures of a run, and its duration."""

    scenario_run: ScenarioRun
    figures: RunMetrics
    wall_s: float


class SimulationScale(NamedTuple):
    """Amount of work. Policies other than ours and Dynamo's have one seed each."""

    dynamo_policies: tuple[str, ...]
    seeds: int
    spread_seeds: int
    delays: tuple[NetworkConditions, ...] = ()
    engines: tuple[PerfCurves, ...] = ()
    generated_seeds: int = 1


QUICK = SimulationScale(("dynamo", "dynamo:32", "dynamo:64"), 1, 0)
FULL = SimulationScale(DYNAMO_POLICIES, 3, 3, DELAY_CONDITIONS, ENGINE_CURVES, 3)


class PolicyScenario(NamedTuple):
    """Runs of one kind on one fleet; the policy and the seed make the run."""

    trace: str
    template: SimulationRun
    name: str

    def run_of(self, policy: str, seed: int) -> ScenarioRun:
        """The run of a policy and a seed. Only arrivals are random under round robin."""
        drawn = policy != "round_robin" or self.template.pace.jitter_s
        return ScenarioRun(
            self.trace, self.template._replace(policy=policy, seed=seed if drawn else 0)
        )


def trace_scenario(
    setup: FleetSetup, jitter_s: float = 0.0, conditions: NetworkConditions = DEFAULT_CONDITIONS
) -> PolicyScenario:
    like = SimulationRun(
        "", setup.workers, ArrivalRate(setup.speed, jitter_s), conditions=conditions
    )
    how = f"{setup.name}{' spread' if jitter_s else ''}"
    return PolicyScenario(CONVERSATION, like, how)


def generated_scenario(kind: str) -> PolicyScenario:
    return PolicyScenario(NAME_PREFIX + kind, SimulationRun("", GENERATED_WORKERS), kind)


def with_profile(scenario: PolicyScenario, profile: ProfileName) -> PolicyScenario:
    """The scenario with engines of a profile."""
    if profile == "published":
        return scenario
    like = scenario.template._replace(
        curves=PROFILES[profile],
        conditions=scenario.template.conditions._replace(publishes_curves=False),
    )
    return scenario._replace(template=like, name=f"{scenario.name}, {profile}")


def profile_of(curves: PerfCurves) -> str:
    """The profile with these curves, "" for others."""
    return next((name for name, known in PROFILES.items() if known == curves), "")


OTHER_PROFILES: tuple[ProfileName, ...] = tuple(name for name in PROFILES if name != "published")


def engine_scenarios(
    setup: FleetSetup, curves: PerfCurves
) -> tuple[PolicyScenario, PolicyScenario]:
    """Scenarios of a fleet of these engines, with and without a profile on the cards."""
    like = SimulationRun(
        "", setup.workers, ArrivalRate(setup.speed, ARRIVAL_JITTER_S), curves=curves,
        warmup_requests=WARM_UP_PER_WORKER * setup.workers,
    )  # fmt: skip
    unknown = like._replace(conditions=NetworkConditions(publishes_curves=False))
    return PolicyScenario(CONVERSATION, like, setup.name), PolicyScenario(
        CONVERSATION, unknown, setup.name
    )


LEARNING_SETUPS = (SETUPS[0], SETUPS[2])


def scenarios_of(
    scale: SimulationScale, profile: ProfileName
) -> Iterator[tuple[PolicyScenario, int]]:
    """The scenarios on engines of a profile, without delays; the number of seeds of each."""
    for setup in SETUPS:
        yield with_profile(trace_scenario(setup), profile), scale.seeds
        if scale.spread_seeds:
            yield with_profile(trace_scenario(setup, ARRIVAL_JITTER_S), profile), scale.spread_seeds
    for kind in TRACE_KINDS:
        yield with_profile(generated_scenario(kind), profile), scale.generated_seeds


def scenario_runs(scale: SimulationScale) -> list[ScenarioRun]:
    """All runs, in order, without duplicates."""
    found: list[ScenarioRun] = []
    policies = (OWN_POLICY, *scale.dynamo_policies)
    for of, seeds in scenarios_of(scale, "published"):
        found += _all(of, policies, seeds) + _all(of, OTHER_POLICIES, 1)
    for profile in OTHER_PROFILES:
        for of, seeds in scenarios_of(scale, profile):
            found += _all(of, policies, seeds)
    for setup, curves in product(LEARNING_SETUPS, scale.engines):
        for each in engine_scenarios(setup, curves):
            found += _all(each, (OWN_POLICY,), scale.spread_seeds)
    for conditions, setup, jitter_s in product(scale.delays, SETUPS, (0.0, ARRIVAL_JITTER_S)):
        seeds = scale.spread_seeds if jitter_s else scale.seeds
        found += _all(trace_scenario(setup, jitter_s, conditions), policies, seeds)
    return list(dict.fromkeys(found))


def _all(of: PolicyScenario, policies: Sequence[str], seeds: int) -> list[ScenarioRun]:
    return [of.run_of(policy, seed) for policy, seed in product(policies, range(seeds))]


class ThresholdChecks:
    """Thresholds of finished runs; nan where runs are missing."""

    def __init__(self, form: SimulationScale, done: Sequence[ScenarioResult]) -> None:
        self._form = form
        self._found = {each.scenario_run: each.figures for each in done}

    def mean(self, scenario: PolicyScenario, policy: str, figure: str) -> float:
        """Mean of a figure over all seeds."""
        plays = {scenario.run_of(policy, seed) for seed in range(max(self._form[1:3]) + 1)}
        found = [getattr(self._found[play], figure) for play in plays if play in self._found]
        return fmean(found) if found else math.nan

    def ratio_to_best(self, scenario: PolicyScenario, figure: str) -> float:
        """Ratio of ours to the best of Dynamo's settings: less is better, except for reuse."""
        theirs = [self.mean(scenario, policy, figure) for policy in self._form.dynamo_policies]
        best = max(theirs) if figure == "reuse" else min(theirs)
        return self.mean(scenario, OWN_POLICY, figure) / best

    def at_most(self, scenario: PolicyScenario, figure: str, limit: float, label: str) -> Threshold:
        """Threshold of the ratio of ours to the best of Dynamo's settings."""
        ratio = self.ratio_to_best(scenario, figure)
        name = f"{scenario.name}: {OWN_POLICY}, {label} to dynamo's best setting"
        return at_most(name, ratio, "x", limit)

    def all(self) -> Iterator[Threshold]:
        for setup in SETUPS:
            yield self.published(setup)
        for setup in SETUPS:
            yield from self.recorded(setup, trace_scenario(setup))
        reuse = self.mean(trace_scenario(ABSOLUTE_SETUP), OWN_POLICY, "reuse")
        ttft = self.mean(trace_scenario(ABSOLUTE_SETUP), OWN_POLICY, "ttft_mean")
        yield at_most(f"{ABSOLUTE_SETUP.name}: {OWN_POLICY}, mean TTFT", ttft, "ms", TTFT_LIMIT_MS)
        yield at_least(f"{ABSOLUTE_SETUP.name}: {OWN_POLICY}, reuse", reuse, "", MIN_REUSE)
        if self._form.spread_seeds:
            for setup in SETUPS:
                yield from self.spread(trace_scenario(setup, ARRIVAL_JITTER_S), setup.spread_e2e)
        for conditions, setup in product(self._form.delays, SETUPS):
            yield from self.late(setup, conditions)
        for setup, curves in product(LEARNING_SETUPS, self._form.engines):
            yield self.learned(setup, curves)
        for kind in TRACE_KINDS:
            yield from self.spread(generated_scenario(kind), 1.0)
        for profile in OTHER_PROFILES:
            yield from self.on_profile(profile)

    def on_profile(self, profile: ProfileName) -> Iterator[Threshold]:
        """Thresholds with engines of another profile."""
        for setup in SETUPS:
            yield from self.recorded(setup, with_profile(trace_scenario(setup), profile))
            if self._form.spread_seeds:
                spread = with_profile(trace_scenario(setup, ARRIVAL_JITTER_S), profile)
                yield from self.spread(spread, setup.spread_e2e)
        for kind in TRACE_KINDS:
            yield from self.spread(with_profile(generated_scenario(kind), profile), 1.0)

    def published(self, setup: FleetSetup) -> Threshold:
        """Round robin compared with the published figures."""
        play = trace_scenario(setup).run_of("round_robin", 0)
        found = self._found.get(play)
        off = math.nan if found is None else max_deviation(found, setup.published)
        return Threshold(
            f"{setup.name}: round robin, the figure furthest from the published one",
            off * 100, "%", f"<= {PUBLISHED_TOLERANCE:.0%}", off <= PUBLISHED_TOLERANCE,
        )  # fmt: skip

    def recorded(self, setup: FleetSetup, of: PolicyScenario) -> Iterator[Threshold]:
        """Thresholds with arrivals as recorded."""
        yield self.at_most(of, "ttft_mean", 1.0, "mean TTFT")
        yield self.at_most(of, "e2e_mean", setup.recorded_e2e, "mean E2E")
        yield self.at_most(of, "ttft_p99", 1.03, "p99 TTFT")
        reuse = self.ratio_to_best(of, "reuse")
        yield Threshold(
            f"{of.name}: {OWN_POLICY}, reuse to dynamo's best setting", reuse, "x", "> 1", reuse > 1
        )

    def spread(self, scenario: PolicyScenario, e2e_limit: float) -> Iterator[Threshold]:
        """Thresholds with single arrivals."""
        yield self.at_most(scenario, "ttft_mean", 1.01, "mean TTFT")
        yield self.at_most(scenario, "e2e_mean", e2e_limit, "mean E2E")

    def late(self, setup: FleetSetup, conditions: NetworkConditions) -> Iterator[Threshold]:
        """The same thresholds with delays."""
        late = (
            f"hop {conditions.dispatch_delay_ms:g} ms"
            if conditions.dispatch_delay_ms
            else (f"notices {conditions.event_delay_ms:g} ms")
        )
        spread = self.spread(trace_scenario(setup, ARRIVAL_JITTER_S, conditions), setup.spread_e2e)
        recorded = self.recorded(setup, trace_scenario(setup, 0.0, conditions))
        for each in (*recorded, *spread):
            yield Threshold(
                f"{late}, {each.name}", each.value, each.unit, each.threshold, each.passed
            )

    def learned(self, setup: FleetSetup, curves: PerfCurves) -> Threshold:
        """Engines without a profile, compared with the same engines with one."""
        with_length, unknown = (
            self.mean(each, OWN_POLICY, "ttft_mean") for each in engine_scenarios(setup, curves)
        )
        ratio = unknown / with_length
        a, b, c = curves.prefill
        return at_most(
            f"{setup.name}: curves learned from nothing to known ones, mean TTFT, prefill "
            f"{a:.2g} n^2 + {b:.2g} n + {c:.2g} ms",
            ratio,
            "x",
            LEARNED_LIMIT,
        )


def all_thresholds(
    scale: SimulationScale, results: Sequence[ScenarioResult]
) -> Iterator[Threshold]:
    """All thresholds of an amount of work."""
    return ThresholdChecks(scale, results).all()


def max_deviation(figures: RunMetrics, published: RunMetrics) -> float:
    """The largest relative deviation of a figure from the published one, where there is one."""
    return max(
        abs(a / b - 1) for a, b in zip(figures, published, strict=True) if a is not None and b
    )
