"""Tests of alert rules: each fires on the series of its fault, after its time, and on nothing
else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from tests.harness.promql_evaluation import Labels, Series, evaluate

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "prometheus"
GROUPS = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
RULES: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in GROUPS for rule in group["rules"]
}
TOOLS = Path.home() / ".cache/kvlane/tools"
PROMTOOL = shutil.which("promtool") or shutil.which("promtool", path=TOOLS)
SCRAPE_S, INTERVAL_S, END_S = 15, 30, 1800
SECONDS = {"s": 1, "m": 60}


def labelled(**labels: str) -> Labels:
    return frozenset(labels.items())


def recorded(
    name: str, labels: Labels, *changes: tuple[int, float], until: int = END_S
) -> dict[tuple[str, Labels], Sequence[tuple[float, float]]]:
    """A series of half an hour, or less. `changes`: from when on it has which value."""
    samples = [
        (float(t), [value for since, value in changes if since <= t][-1])
        for t in range(0, until, SCRAPE_S)
    ]
    return {(name, labels): samples}


RISING = [(t, max(0.0, t - 600.0)) for t in range(0, END_S, SCRAPE_S)]


def within_limit(name: str, limit: str, labels: Labels, share: float) -> Series:
    """A histogram with 1 value a second from ten minutes on, of which a share is within a limit."""
    part = [(t, share * value) for t, value in RISING]
    bucket = labels | labelled(le=limit)
    return recorded(f"{name}_bucket", bucket, *part) | recorded(f"{name}_count", labels, *RISING)


def firing_at(rule: dict[str, Any], series: Series) -> list[float]:
    """The times at which an alert fires, as Prometheus evaluates its rule."""
    expression = promql.parse(rule["expr"])
    text = rule.get("for", "0s")
    wait_s = int(text[:-1]) * SECONDS[text[-1]]
    pending: dict[Labels, float] = {}
    times = []
    for at in range(0, END_S, INTERVAL_S):
        found = evaluate(expression, series, float(at))
        pending = {labels: pending.get(labels, float(at)) for labels in found}
        if any(at - since >= wait_s for since in pending.values()):
            times.append(float(at))
    return times


W1 = labelled(model="demo", worker="w1", instance="r1")
W1_TARGET = labelled(job="kvlane", instance="w1")
R1 = labelled(instance="r1", view="load")
CASES: dict[str, tuple[Series, Series, int]] = {
    "KvlaneCacheDrift": (
        recorded("kvlane_router_drift_alert", W1, (0, 0), (600, 1)),
        recorded("kvlane_router_drift_alert", W1, (0, 0), (600, 1), (840, 0)),
        900,
    ),
    "KvlaneWrongPredictions": (
        recorded("kvlane_router_drift_prediction_error_ratio",
                 W1 | labelled(time="ttft", quantile="0.9"), (0, 0.3), (600, 1.4)),
        recorded("kvlane_router_drift_prediction_error_ratio",
                 W1 | labelled(time="ttft", quantile="0.9"), (0, 0.3), (600, 1.4), (1140, 0.3)),
        1200,
    ),
    "KvlaneWrongHashSecret": (
        recorded("kvlane_indexer_skipped_records_total", labelled(reason="wrong_secret"),
                 (0, 0), (600, 1)),
        recorded("kvlane_indexer_skipped_records_total", labelled(reason="malformed"),
                 (0, 0), (600, 9)),
        600,
    ),
    "KvlaneStreamGap": (
        recorded("kvlane_gateway_stream_gaps_total", labelled(instance="g1"), (0, 0), (600, 1)),
        recorded("kvlane_gateway_stream_gaps_total", labelled(instance="g1"), (0, 3), (600, 0)),
        600,
    ),
    "KvlaneBrokerUnresponsive": (
        recorded("kvlane_gateway_broker_last_response_age_seconds", labelled(instance="g1"),
                 (0, 4), (600, 31)),
        recorded("kvlane_gateway_broker_last_response_age_seconds", labelled(instance="g1"),
                 (0, 4), (600, 29)),
        600,
    ),
    "KvlaneNoWorkers": (
        recorded("kvlane_router_terminated_requests_total", labelled(code="no_workers"),
                 (0, 0), (600, 2)),
        recorded("kvlane_router_terminated_requests_total", labelled(code="deadline"),
                 (0, 0), (600, 2)),
        600,
    ),
    "KvlaneQueueFull": (
        recorded("kvlane_router_terminated_requests_total", labelled(code="queue_full"),
                 (0, 0), *((t, t) for t in range(600, 1200, 60))),
        recorded("kvlane_router_terminated_requests_total", labelled(code="queue_full"),
                 (0, 0), (600, 50)),
        900,
    ),
    "KvlaneViewBehind": (
        recorded("kvlane_view_lag_records", R1, (0, 5), (600, 20_000)),
        recorded("kvlane_view_lag_records", R1, (0, 5), (600, 20_000), (690, 9_000)),
        720,
    ),
    "KvlaneRecordsMalformed": (
        recorded("kvlane_view_malformed_records_total", R1, (0, 0), (600, 1)),
        recorded("kvlane_view_malformed_records_total", R1, (0, 7)),
        600,
    ),
    "KvlaneProcessMissing": (
        recorded("kvlane_router_queued_requests", labelled(instance="r1"), (0, 3), until=600),
        recorded("kvlane_router_queued_requests", labelled(instance="r1"), (0, 3), until=600)
        | recorded("kvlane_router_queued_requests", labelled(instance="r2"), (0, 0)),
        960,
    ),
    "KvlaneProcessDown": (
        recorded("up", W1_TARGET, (0, 1), (600, 0))
        | recorded("kvlane_http_connections", W1_TARGET, (0, 2), until=600),
        recorded("up", W1_TARGET, (0, 1), (600, 0)),
        660,
    ),
    "KvlaneDeadLetters": (
        recorded("kvlane_preprocessor_prompts_total", labelled(outcome="dead_letter"),
                 (0, 0), (600, 1)),
        recorded("kvlane_preprocessor_prompts_total", labelled(outcome="refused"),
                 (0, 0), (600, 1)),
        600,
    ),
    "KvlaneBacklogOld": (
        recorded("kvlane_backlog_oldest_age_seconds", labelled(topic="prompts"),
                 (0, 0), (600, 301)),
        recorded("kvlane_backlog_oldest_age_seconds", labelled(topic="batch"),
                 (0, 0), (600, 301)),
        900,
    ),
    "KvlaneResultsLate": (
        within_limit("kvlane_collector_result_delay_seconds", "5.0", labelled(), share=0.8),
        within_limit("kvlane_collector_result_delay_seconds", "5.0", labelled(), share=0.95),
        930,
    ),
    "KvlaneFirstTokensLate": (
        within_limit("kvlane_gateway_time_to_first_token_seconds", "10.0", labelled(), share=0.8),
        within_limit("kvlane_gateway_time_to_first_token_seconds", "10.0", labelled(), share=0.95),
        1230,
    ),
    "KvlaneHandOversUnused": (
        recorded("kvlane_router_handed_over_requests_total", labelled(use="unused"), *RISING)
        | recorded("kvlane_router_handed_over_requests_total", labelled(use="used"), *RISING),
        recorded("kvlane_router_handed_over_requests_total", labelled(use="unused"), (0, 0))
        | recorded("kvlane_router_handed_over_requests_total", labelled(use="used"), *RISING),
        1230,
    ),
}  # fmt: skip
"""By alert: series of its fault, series without it, and when it fires first, in seconds."""


@pytest.mark.parametrize("name", RULES)
def test_alert_fires_on_its_fault_only(name: str) -> None:
    fault, ordinary, first_s = CASES[name]
    assert firing_at(RULES[name], fault)[0] == first_s
    assert firing_at(RULES[name], ordinary) == []


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool: deploy/prometheus/check.sh builds it")
def test_prometheus_evaluates_the_rules_as_their_tests_expect() -> None:
    path = f"{Path(str(PROMTOOL)).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [FOLDER / "check.sh"], env=os.environ | {"PATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_alert_has_a_case_for_promtool_with_the_labels_of_its_texts() -> None:
    expected: dict[str, set[str]] = {}
    for case in yaml.safe_load((FOLDER / "alerts_test.yaml").read_text())["tests"]:
        for expression in case["promql_expr_test"]:
            for sample in expression.get("exp_samples", ()):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', sample["labels"]))
                expected[labels.pop("alertname")] = set(labels)
    assert list(expected) == list(RULES)
    for name, rule in RULES.items():
        used = re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values()))
        assert set(used) <= expected[name], name


def test_every_alert_has_a_section_in_the_runbook() -> None:
    text = (ROOT / "docs" / "runbook.md").read_text()
    sections = re.findall(r"^## (\w+)\n\n.*\n", text, re.MULTILINE)
    assert sections == list(RULES)
    for name, rule in RULES.items():
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"
        assert {"expr", "labels", "annotations"} <= rule.keys()
        assert rule["labels"]["severity"] in ("warning", "critical")
