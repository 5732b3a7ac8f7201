"""Tests of the simulation bench: its comparisons, its thresholds, and its cached runs."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from pathlib import Path

import pytest

from kvlane.app.perf_curves import PROFILES
from kvlane.app.simulation.simulation_runs import SimulationRun, UnknownPolicy, parse_policy
from kvlane.app.simulation.trace_requests import ArrivalRate
from kvlane.app.traces.mooncake_trace import BUNDLED_TRACE, InvalidTrace, read_trace
from workbench.bench.bench_environment import BenchFailed
from workbench.bench.report import Report, Threshold
from workbench.bench.routing import policy_scenarios, policy_simulation, result_cache
from workbench.bench.routing.policy_scenarios import (
    ARRIVAL_JITTER_S,
    CONVERSATION,
    FULL,
    OWN_POLICY,
    QUICK,
    SETUPS,
    ScenarioResult,
    ScenarioRun,
    SimulationScale,
    all_thresholds,
    max_deviation,
    scenario_runs,
    trace_scenario,
)
from workbench.bench.routing.policy_simulation import TraceSet
from workbench.bench.routing.result_cache import ResultCache

TINY = SimulationScale(("dynamo",), 2, 0, generated_seeds=0)
SHIPPED_PLAYS = [
    ScenarioRun(CONVERSATION, SimulationRun(policy, 4)) for policy in ("predictive", "dynamo")
]


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A trace that counts as the published one: the first requests of the shipped one."""
    trace = tmp_path / "published.jsonl"
    trace.write_text("".join(BUNDLED_TRACE.read_text().splitlines(keepends=True)[:100]))
    rows = read_trace(trace)
    for module in (policy_simulation, policy_scenarios):
        monkeypatch.setattr(module, "REQUESTS", len(rows))
    monkeypatch.setattr(policy_simulation, "PROMPT_TOKENS", sum(row.input_length for row in rows))
    monkeypatch.setattr(policy_simulation, "OUTPUT_TOKENS", sum(row.output_length for row in rows))
    monkeypatch.setattr(policy_scenarios, "TRACE_KINDS", ())
    monkeypatch.setattr(policy_scenarios, "OTHER_POLICIES", ("round_robin",))
    return trace


def report_of(
    form: SimulationScale, trace: Path | None, output: list[str], keep: Path | None = None
) -> Report:
    return asyncio.run(
        policy_simulation.bench_policies(form, trace, output.append, lambda _: None, keep)
    )


def test_without_the_trace_its_bars_are_not_met_and_its_source_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policy_scenarios, "TRACE_KINDS", ("multi-turn",))
    monkeypatch.setattr(policy_simulation, "TraceSize", lambda: scenes_size(100))
    output: list[str] = []
    report = report_of(QUICK, None, output)
    assert "--trace" in output[0]
    generated = [each for each in report.thresholds if "multi-turn" in each.name]
    others = [each for each in report.thresholds if each not in generated]
    assert len(generated) == 2 * len(PROFILES)
    assert all(math.isfinite(each.value) for each in generated)
    assert len(others) > 20
    assert all(math.isnan(each.value) and not each.passed for each in others)


def scenes_size(requests: int) -> policy_simulation.TraceSize:
    from kvlane.app.simulation.synthetic_traces import TraceSize

    return TraceSize(requests)


def test_another_trace_than_the_published_one_is_refused() -> None:
    with pytest.raises(InvalidTrace, match="is not the conversation trace"):
        report_of(QUICK, BUNDLED_TRACE, [])


def test_rows_are_of_all_policies_and_bars_of_all_fleets(published: Path, tmp_path: Path) -> None:
    report = report_of(TINY, published, [], tmp_path / "kept")
    assert [(row["policy"], row["seed"]) for row in report.rows[:5]] == [
        ("predictive", 0), ("predictive", 1), ("dynamo", 0), ("dynamo", 1), ("round_robin", 0),
    ]  # fmt: skip
    assert json.loads(json.dumps(report.rows))[0]["ttft_ms"].keys() == {"mean", "p50", "p99"}
    thresholds = {each.name: each for each in report.thresholds}
    off = thresholds["8x1: round robin, the figure furthest from the published one"]
    assert off.value > 1, "it is a slice, of which nothing is published"
    assert not off.passed
    assert thresholds["16x8: speed, policy predictive"].value > 0
    assert len([name for name in thresholds if name.startswith("64x16:")]) == 5
    assert len([name for name in thresholds if name.startswith("64x16, h100:")]) == 4
    assert {row["profile"] for row in report.rows} == {*PROFILES}


def test_cached_results_are_reused_until_the_code_changes(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = tmp_path / "kept"
    done: list[SimulationRun] = []
    timed = policy_simulation.run_timed
    monkeypatch.setattr(policy_simulation, "_speeds", lambda _: ())
    monkeypatch.setattr(policy_scenarios, "OTHER_PROFILES", ())
    monkeypatch.setattr(
        policy_simulation, "run_timed", lambda t, run, *more: done.append(run) or timed(t, run)
    )
    first = report_of(TINY, published, [], keep)
    count = len(done)
    assert count == len(first.rows) == 4 * 5
    again = report_of(TINY, published, [], keep)
    assert len(done) == count
    assert again.rows == first.rows
    monkeypatch.setattr(result_cache, "source_digest", lambda: "another")
    report_of(TINY, published, [], keep)
    assert len(done) == 2 * count


def test_runs_in_separate_processes_have_the_same_results() -> None:
    found = [
        {
            done.scenario_run: done.figures
            for done in policy_simulation.run_all(SHIPPED_PLAYS, TraceSet(BUNDLED_TRACE), jobs)
        }
        for jobs in (1, 2)
    ]
    assert found[0] == found[1]
    assert set(found[0]) == set(SHIPPED_PLAYS)


def test_foreign_file_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text("not a run\n")
    with pytest.raises(BenchFailed, match="notes holds something else"):
        ResultCache(file)


def done(policy: str, ttft_ms: float, seed: int = 0, jitter_s: float = 0.0) -> ScenarioResult:
    figures = SETUPS[0].published._replace(ttft_mean=ttft_ms, e2e_mean=1.0)
    play = ScenarioRun(CONVERSATION, SimulationRun(policy, 8, ArrivalRate(1.0, jitter_s), seed))
    return ScenarioResult(play, figures, 1.0)


def thresholds_of(ran: list[ScenarioResult]) -> dict[str, Threshold]:
    return {each.name: each for each in all_thresholds(QUICK._replace(spread_seeds=2), ran)}


def test_default_is_compared_with_the_best_mean_of_the_other_settings() -> None:
    ran = [
        done("predictive", 90), done("dynamo", 120), done("dynamo:32", 80), done("least_loaded", 1),
        done("dynamo:32", 120, seed=1), done("dynamo:64", 1.0, jitter_s=ARRIVAL_JITTER_S),
    ]  # fmt: skip
    thresholds = thresholds_of(ran)
    ttft = thresholds["8x1: predictive, mean TTFT to dynamo's best setting"]
    assert (ttft.value, ttft.passed) == (pytest.approx(0.9), True)
    assert math.isnan(thresholds["8x4: predictive, mean TTFT to dynamo's best setting"].value)


def test_figure_that_is_a_little_worse_misses_its_threshold() -> None:
    thresholds = thresholds_of([done("predictive", 101), done("dynamo", 100)])
    assert not thresholds["8x1: predictive, mean TTFT to dynamo's best setting"].passed
    assert not thresholds["8x1: predictive, reuse to dynamo's best setting"].passed, (
        "equal is not more"
    )


def test_distance_is_that_of_the_furthest_figure() -> None:
    published = SETUPS[0].published
    assert max_deviation(published, published) == 0
    assert max_deviation(published._replace(itl_mean=published.itl_mean * 0.98), published) == (
        pytest.approx(0.02)
    )


def test_no_run_of_the_bench_is_repeated_and_all_policies_exist() -> None:
    found = scenario_runs(FULL)
    assert len(found) == len(set(found))
    assert set(scenario_runs(QUICK)) <= set(found)
    for policy in {play.run.policy for play in found}:
        assert parse_policy(policy).policy == policy.partition(":")[0]


def test_quick_form_is_less_than_twice_as_long_with_the_second_profile() -> None:
    runs = scenario_runs(QUICK)
    published = [each for each in runs if each.run.curves == PROFILES["published"]]
    assert len(published) < len(runs) < 2 * len(published)


def test_compared_policies_run_with_three_seeds() -> None:
    ours = [play for play in scenario_runs(FULL) if play.run.policy == OWN_POLICY]
    seeds = Counter(play._replace(run=play.run._replace(seed=0)) for play in ours)
    assert set(seeds.values()) == {3}


def test_round_robin_has_one_seed_where_nothing_is_drawn() -> None:
    assert trace_scenario(SETUPS[0]).run_of("round_robin", 2) == trace_scenario(SETUPS[0]).run_of(
        "round_robin", 0
    )
    spread = trace_scenario(SETUPS[0], ARRIVAL_JITTER_S)
    assert spread.run_of("round_robin", 2) != spread.run_of("round_robin", 0)


def test_number_after_dynamo_is_its_prefill_load_scale() -> None:
    assert parse_policy("dynamo:0.5").weights.prefill_load_scale == 0.5
    assert parse_policy("dynamo").weights.prefill_load_scale == 1.0


@pytest.mark.parametrize(
    "policy", ["", "nonsense", "direct", "dynamo:x", "dynamo:-1", "dynamo:nan", "random:3"]
)
def test_other_policies_are_refused(policy: str) -> None:
    with pytest.raises(UnknownPolicy):
        parse_policy(policy)
