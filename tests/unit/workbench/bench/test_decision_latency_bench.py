"""Tests of the plan bench: it agrees with the plain formulas, and fails if it does not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvlane.app.settings import Settings
from workbench.bench.routing import cost_reference
from workbench.bench.routing.decision_latency import (
    DecisionMismatch,
    DecisionScale,
    bench_decisions,
    decision_thresholds,
)

SMALL = DecisionScale((1, 3), 5, 2)


def test_every_size_and_policy_is_measured() -> None:
    shares: list[float] = []
    report = asyncio.run(bench_decisions(Settings(), SMALL, lambda _: None, shares.append))
    assert [(r["what"], r["policy"], r["workers"]) for r in report.rows] == [
        ("decision", "predictive", 1), ("decision", "dynamo", 1), ("decision", "predictive", 3),
        ("decision", "dynamo", 3), ("100 held", "predictive", 64),
        *((f"decision, {n} waiting", "predictive", 64) for n in (10, 100, 1000, 4096)),
    ]  # fmt: skip
    assert sum(shares) == pytest.approx(1)


def test_costs_that_differ_from_the_plain_formulas_end_the_bench(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cost_reference, "dynamo_cost", lambda *_: -1.0)
    with pytest.raises(DecisionMismatch, match=r"by the reference -1\.0"):
        asyncio.run(bench_decisions(Settings(), SMALL, lambda _: None, lambda _: None))


def test_bars_are_for_the_sizes_that_have_one() -> None:
    def row(workers: int, us: float, what: str = "decision") -> dict[str, Any]:
        return {"what": what, "policy": "predictive", "workers": workers} | {
            f"{part} us": {"p50": us, "p99": us} for part in ("all", "rest")
        }

    rows = [row(8, 999.0), row(64, 39.0), row(512, 201.0), row(64, 1999.0, "100 held")]
    rows += [row(64, 40.0, "decision, 10 waiting"), row(64, 79.0, "decision, 4096 waiting")]
    assert [each.passed for each in decision_thresholds(rows)] == [True, False, True, True]
    rows[-1] = row(64, 81.0, "decision, 4096 waiting")
    assert [each.passed for each in decision_thresholds(rows)] == [True, False, False, True]
