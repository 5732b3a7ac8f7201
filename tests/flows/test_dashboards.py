"""Tests of queries of dashboards, alerts and autoscaling: each reads metrics that a deployment
exports.

The deployment runs in one process, on the log in memory, and has answered over HTTP and over Kafka.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvlane.app.audit.drift import MIN_RUNS
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.app.standalone import StandaloneProcess
from kvlane.streams.client import Client
from kvlane.streams.clock import SystemClock
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.prompt import Prompt
from tests.harness.http_exchange import HttpExchange

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
TARGET_LABELS = {"instance", "job", "namespace", "pod"}
"""Labels that Prometheus adds to every sample of a scraped process; the last two on Kubernetes."""
WAIT_S = 120.0
LATE = {
    "kvlane_router_drift_alert", "kvlane_router_worker_slowdown_ratio",
    "kvlane_indexer_snapshot_age_seconds",
}  # fmt: skip
"""Metrics that appear after enough runs, at a later decision, and after the first snapshot."""

Exported = Mapping[str, set[str]]
"""By name of a sample, the labels that it has."""


def grafana_generator() -> Any:
    path = DEPLOY / "grafana" / "generate.py"
    spec = importlib.util.spec_from_file_location("grafana_generator", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def export(folder: Path) -> Exported:
    """The samples of all processes of a deployment that has served requests."""
    settings = Settings(
        lanes=2, cache_dir=folder, http_port=0, indexer_port=0, engine_speedup=20,
        heartbeat_interval_s=0.2, snapshot_interval_s=0.5, worker_id="w", router_id="r",
    )  # fmt: skip
    ctx = ProcessContext("standalone", rng=random.Random(1))
    log = MemoryLog(MemoryBroker(SystemClock(), lanes=2), "standalone")
    await log.start()
    deployment = StandaloneProcess(log, settings, ctx, workers=1)
    await deployment.start()
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello " * 40}]}
    body |= {"max_tokens": 20, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=deployment.gateway.url, timeout=WAIT_S) as http:
        for _ in range(MIN_RUNS // 2):
            (await http.post("/v1/chat/completions", json=body)).raise_for_status()
        async with Client(log, ctx.clock) as client:
            for _ in range(MIN_RUNS // 2):
                prompt = Prompt(id=client.new_request_id(), body=body)
                await client.publish(prompt)
                await client.result(prompt.id, WAIT_S)
        deadline = ctx.clock.now() + WAIT_S
        while not (found := await read_pages(deployment)).keys() >= LATE:
            assert ctx.clock.now() < deadline, f"not exported: {LATE - found.keys()}"
            await ctx.clock.sleep(0.2)
            (await http.post("/v1/chat/completions", json=body)).raise_for_status()
    await deployment.stop()
    await ctx.cancel_tasks()
    await log.close()
    return found


async def read_pages(deployment: StandaloneProcess) -> Exported:
    found: dict[str, set[str]] = defaultdict(set)
    for part in deployment._parts:
        exchange = await HttpExchange(part.http, "GET", "/metrics").wait_done()
        for family in text_string_to_metric_families(exchange.content.decode()):
            for sample in family.samples:
                found[sample.name] |= sample.labels.keys()
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return asyncio.run(export(tmp_path_factory.mktemp("cache")))


def walk(expression: promql.Expr) -> Iterator[promql.Expr]:
    """An expression and all within it."""
    yield expression
    for name in ("expr", "lhs", "rhs", "param", "vector_selector"):
        if (inner := getattr(expression, name, None)) is not None:
            yield from walk(inner)
    for inner in getattr(expression, "args", None) or ():
        yield from walk(inner)


def faults(query: str, exported: Exported, legend: str = "") -> list[str]:
    """Metrics and labels of a query that no process exports. Raises ValueError for bad PromQL."""
    parts = list(walk(promql.parse(query.replace("$__rate_interval", "5m"))))
    selectors = [part for part in parts if isinstance(part, promql.VectorSelector)]
    labels = TARGET_LABELS.union(*(exported.get(part.name, ()) for part in selectors))
    found = [part.name for part in selectors if part.name not in exported and part.name != "up"]
    labels |= {
        part.args[1].val
        for part in parts
        if isinstance(part, promql.Call) and part.func.name == "label_replace"
    }
    used = {m.name for part in selectors for m in part.matchers.matchers}
    used |= {
        label
        for part in parts
        if isinstance(part, promql.AggregateExpr) and part.modifier
        for label in part.modifier.labels
    }
    used |= set(re.findall(r"{{(\w+)}}", legend))
    return [*found, *sorted(used - labels)]


def alert_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def scaling_queries() -> list[str]:
    parts = yaml.safe_load_all((DEPLOY / "k8s" / "keda.yaml").read_text())
    return [
        trigger["metadata"]["query"]
        for part in parts
        if part and part["kind"] == "ScaledObject"
        for trigger in part["spec"]["triggers"]
        if trigger["type"] == "prometheus"
    ]


def test_dashboards_are_those_of_the_table() -> None:
    """Renew them with `python deploy/grafana/generate.py`."""
    generator = grafana_generator()
    assert {path.stem for path in DASHBOARDS} == generator.DASHBOARDS.keys()
    for path in DASHBOARDS:
        assert path.read_text() == generator.content(path.stem), path.name


def test_every_query_of_a_dashboard_is_limited_to_a_namespace() -> None:
    panels = [panel for path in DASHBOARDS for panel in json.loads(path.read_text())["panels"]]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert [query for query in queries if 'namespace=~"$namespace"' not in query] == []


def test_every_query_reads_exported_metrics(exported: Exported) -> None:
    wrong = {}
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                if broken := faults(target["expr"], exported, target["legendFormat"]):
                    wrong[f"{path.stem}: {panel['title']}"] = broken
    for rule in alert_rules():
        described = " ".join(rule["annotations"].values()).replace("$labels.", "")
        described = re.sub(r"{{ *(\w+) *}}", r"{{\1}}", described)
        if broken := faults(rule["expr"], exported, described):
            wrong[rule["alert"]] = broken
    for query in scaling_queries():
        if broken := faults(query, exported):
            wrong[query] = broken
    assert wrong == {}


@pytest.mark.parametrize(
    ("query", "legend", "named"),
    [
        ("sum(kvlane_router_queue)", "", "kvlane_router_queue"),
        ("sum by (tenant) (kvlane_router_queued_tokens)", "", "tenant"),
        ('rate(kvlane_router_requests_total{result="stop"}[5m])', "", "result"),
        ("kvlane_router_queued_bytes", "{{model}}", "model"),
        ("max(kvlane_router_queued_tokens) / max(kvlane_worker_steps)", "", "kvlane_worker_steps"),
    ],
)
def test_query_of_an_unknown_metric_is_found(
    query: str, legend: str, named: str, exported: Exported
) -> None:
    assert faults(query, exported, legend) == [named]


def test_invalid_promql_is_found() -> None:
    with pytest.raises(ValueError, match="unclosed"):
        faults("sum(kvlane_router_queued_tokens", {})
