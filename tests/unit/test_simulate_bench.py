"""What the simulation bench compares with what is published, and when its bars are met."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest

from app.bench import simulate
from app.bench.report import Report
from app.bench.simulate import FULL, QUICK, SETUPS, Done, Form, distance
from app.simulation.runs import BadPolicy, Run, tuning_of
from app.simulation.traffic import Pace
from app.trace import SHIPPED, BadTrace, read_trace


def report_of(form: Form, trace: Path | None, said: list[str] | None = None) -> Report:
    lines: list[str] = [] if said is None else said
    return asyncio.run(simulate.simulate(form, trace, lines.append, lambda _: None))


def test_without_the_trace_no_bar_is_met_and_it_says_where_to_get_it() -> None:
    said: list[str] = []
    report = report_of(QUICK, None, said)
    assert "--trace" in said[0]
    assert len(report.bars) == 15
    assert not any(bar.met for bar in report.bars)
    assert all(math.isnan(bar.value) for bar in report.bars)


def test_another_trace_than_the_published_one_is_refused() -> None:
    with pytest.raises(BadTrace, match="is another trace"):
        report_of(QUICK, SHIPPED)


def test_bars_are_those_of_the_worst_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = read_trace(SHIPPED)
    monkeypatch.setattr(simulate, "REQUESTS", len(rows))
    monkeypatch.setattr(simulate, "PROMPT_TOKENS", sum(row.input_length for row in rows))
    monkeypatch.setattr(simulate, "OUTPUT_TOKENS", sum(row.output_length for row in rows))
    report = report_of(Form(("dynamo", "round_robin"), 2, (0.0,)), SHIPPED)
    assert [(row["policy"], row["seed"]) for row in report.rows[:3]] == [
        ("dynamo", 0), ("dynamo", 1), ("round_robin", 0),
    ]  # fmt: skip
    off, speed = report.bars[0], report.bars[6]
    assert not off.met  # it is a slice, of which nothing is published
    assert off.value > 1
    slowest = max(r["wall_s"] for r in report.rows if (r["policy"], r["workers"]) == ("dynamo", 16))
    assert speed.value == pytest.approx((rows[-1].timestamp - rows[0].timestamp) / 1000 / slowest)
    assert json.loads(json.dumps(report.rows))[0]["ttft_ms"].keys() == {"mean", "p50", "p99"}


def test_ours_is_held_against_the_best_mean_of_the_other_settings() -> None:
    def done(policy: str, ttft_ms: float, seed: int = 0) -> Done:
        figures = SETUPS[0].published._replace(ttft_mean=ttft_ms, e2e_mean=1.0)
        return Done(Run(policy, 8, Pace(1.0), seed), figures, 1.0)

    spread = done("dynamo:64", 1.0)
    ran = [
        done("predictive", 90), done("dynamo", 120), done("dynamo:32", 80), done("least_loaded", 1),
        done("dynamo:32", 120, seed=1), spread._replace(run=Run("dynamo:64", 8, Pace(1.0, 3.0))),
    ]  # fmt: skip
    bars = {bar.name: bar for bar in simulate.bars(None, ran)}
    ttft = bars["8x1: predictive, mean TTFT against dynamo's best setting"]
    assert (ttft.value, ttft.met) == (pytest.approx(0.9), True)
    assert math.isnan(bars["8x4: predictive, mean TTFT against dynamo's best setting"].value)


def test_the_distance_is_that_of_the_furthest_figure() -> None:
    published = SETUPS[0].published
    assert distance(published, published) == 0
    assert distance(published._replace(itl_mean=published.itl_mean * 0.98), published) == (
        pytest.approx(0.02)
    )


@pytest.mark.parametrize("policy", {*QUICK.policies, *FULL.policies})
def test_all_policies_of_the_bench_are_known(policy: str) -> None:
    assert tuning_of(policy).policy == policy.partition(":")[0]


def test_a_number_after_dynamo_is_its_prefill_load_scale() -> None:
    assert tuning_of("dynamo:0.5").weights.prefill_load_scale == 0.5
    assert tuning_of("dynamo").weights.prefill_load_scale == 1.0


@pytest.mark.parametrize(
    "policy", ["", "nonsense", "direct", "dynamo:x", "dynamo:-1", "dynamo:nan", "random:3"]
)
def test_other_policies_are_refused(policy: str) -> None:
    with pytest.raises(BadPolicy):
        tuning_of(policy)
