"""The traffic table of `kvlane bench traffic`: ratios to the best other policy, and its limits."""

from __future__ import annotations

import asyncio

import pytest

from kvlane.app.simulation.synthetic_traces import TraceSize
from workbench.bench import foreign_engines
from workbench.bench.report import Report
from workbench.bench.routing import policy_simulation, policy_traffic
from workbench.bench.routing.policy_traffic import (
    OWN_POLICY,
    POLICIES,
    QUICK,
    PolicyMeans,
    TrafficRow,
    generated_scenarios,
    run_of,
)
from workbench.bench.routing.result_cache import ResultCache


def test_ratios_are_to_the_best_other_policy_of_each_figure() -> None:
    row = TrafficRow(
        "chats",
        {
            OWN_POLICY: PolicyMeans(22.0, 50.0, 900.0),
            "dynamo": PolicyMeans(20.0, 40.0, 1100.0),
            "round_robin": PolicyMeans(30.0, 60.0, 1000.0),
        },
    )
    assert row.ratios(OWN_POLICY) == pytest.approx(PolicyMeans(1.1, 1.25, 0.9))
    assert [each["sum"] for each in row.rows()] == pytest.approx([2.0, 2.1, 2.5])
    passed = {each.name.partition(": ")[2]: each.passed for each in row.thresholds()}
    assert passed == {
        "mean TTFT to the best": False,
        "mean E2E to the best": True,
        "p99 TTFT to the best": False,
        "sum to the least sum": True,
    }


def test_every_policy_runs_on_every_profile_and_kind_of_traffic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some = generated_scenarios()[:1]
    monkeypatch.setattr(policy_traffic, "generated_scenarios", lambda: some)
    monkeypatch.setattr(policy_simulation, "TraceSize", lambda: TraceSize(60))
    parts: list[float] = []
    report = asyncio.run(policy_traffic.bench_traffic(QUICK, None, lambda _: None, parts.append))
    assert isinstance(report, Report)
    assert [row["policy"] for row in report.rows] == 2 * list(POLICIES)
    published, fitted = report.rows[0], report.rows[len(POLICIES)]
    assert (published["traffic"], fitted["traffic"]) == (some[0].name, f"{some[0].name}, h100")
    assert fitted["TTFT ms"] > published["TTFT ms"] + 30
    assert len(report.thresholds) == 8
    assert sum(parts) == pytest.approx(1)


def test_another_seed_is_another_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_simulation, "TraceSize", lambda: TraceSize(60))
    scenario, traces = generated_scenarios()[0], policy_simulation.TraceSet(None)
    runs = [run_of(scenario, "round_robin", seed) for seed in (0, 1)]
    first, second = (traces[run.trace].rows for run in runs)
    assert first != second
    assert first == traces[scenario.trace].rows, "seed 0 is the default"


def test_foreign_engines_are_learned_and_known(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = foreign_engines.foreign_engines()
    some = {name: engines[name] for name in ("linear x 4", "slower")}
    monkeypatch.setattr(foreign_engines, "foreign_engines", lambda: some)
    monkeypatch.setattr(foreign_engines, "TRAFFIC", {"short-prompts": 40.0})
    monkeypatch.setattr(foreign_engines, "WARM_UP_PER_WORKER", 30)
    monkeypatch.setattr(policy_simulation, "TraceSize", lambda: TraceSize(240))
    parts: list[float] = []
    report = asyncio.run(foreign_engines.bench_foreign_engines(parts.append, ResultCache(None)))
    assert [row["engine"] for row in report.rows] == list(some)
    assert sum(parts) == pytest.approx(1)
    linear, _ = report.rows
    assert linear["learned to known"]["TTFT"] == pytest.approx(1, abs=0.1)
    assert linear["TTFT error"]["p50"] < 0.2
    assert len(report.thresholds) == len(some) * 6
