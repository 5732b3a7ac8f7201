"""Tests of names of the metrics of all processes: by the rules of `promtool check metrics`, and
of the project."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from kvlane.app.metrics.collector_metrics import CollectorMetrics
from kvlane.app.metrics.gateway_metrics import GatewayMetrics
from tests.flows.test_indexer import opened
from tests.flows.test_preprocessor import begin
from tests.harness.fake_worker import start_router
from tests.harness.http_exchange import HttpExchange
from tests.harness.memory_world import MemoryWorld, run_scenario
from tests.harness.worker_harness import WorkerHarness

SUBSYSTEMS = (
    "gateway", "router", "worker", "preprocessor", "backlog", "collector", "indexer", "view",
    "event_loop", "http",
)  # fmt: skip
"""The processes; `backlog` is of preprocessors, `view`, `event_loop` and `http` of several."""
PREFIXES = tuple(f"kvlane_{subsystem}_" for subsystem in SUBSYSTEMS)
UNITS = (
    "bytes", "tokens", "blocks", "records", "requests", "runs", "prompts", "chunks", "completions",
    "responses", "assignments", "decisions", "partitions", "snapshots", "events", "gaps", "models",
    "rebuilds", "steps", "results", "transactions", "replies", "connections",
    "calls", "replays",
)  # fmt: skip
"""Nouns that say what is counted; times are in seconds, fractions are ratios."""
NO_BASE_UNITS = frozenset({
    "milliseconds", "ms", "microseconds", "us", "nanoseconds", "ns", "minutes", "hours", "days",
    "kilobytes", "kb", "mb", "gb", "kibibytes", "mebibytes", "gibibytes", "percent", "bits",
})  # fmt: skip
TYPES = frozenset({"counter", "gauge", "histogram", "summary"})


class Family(NamedTuple):
    """A metric as a page shows it. `labels`: of all its samples."""

    name: str
    kind: str
    meaning: str
    labels: frozenset[str]


def families(page: str) -> Iterator[Family]:
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", page, re.MULTILINE))
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE):
        if name.startswith("kvlane_") and not name.endswith("_created"):
            samples = re.findall(rf"^{name}[a-z_]*{{(.*)}} ", page, re.MULTILINE)
            labels = {label for sample in samples for label in re.findall(r'(\w+)="', sample)}
            yield Family(name, kind, helps.get(name, ""), frozenset(labels))


def faults(metric: Family) -> list[str]:
    """The rules that a metric breaks."""
    *path, last = metric.name.split("_")
    words = {*path, last}
    counted = path[-1] if last == "total" else last
    rules = {
        "use lower case, digits and underscores": re.fullmatch(r"[a-z][a-z0-9_]*", metric.name),
        "needs a help text": metric.meaning,
        "a help text is a phrase without a full stop": not metric.meaning.endswith("."),
        "name the process after kvlane_": metric.name.startswith(PREFIXES),
        "counters end with _total, and nothing else does": (metric.kind == "counter")
        == (last == "total"),
        "counters and histograms end with their unit": counted in (*UNITS, "seconds", "ratio")
        or metric.kind == "gauge",
        "suffixes of histograms": last not in ("bucket", "count", "sum"),
        "use base units": NO_BASE_UNITS.isdisjoint(words),
        "the unit comes last": "seconds" not in words or counted == "seconds",
        "leave out the type of the metric": TYPES.isdisjoint(words),
        "labels in lower case": all(re.fullmatch(r"[a-z][a-z0-9_]*", x) for x in metric.labels),
    }
    return [rule for rule, holds in rules.items() if not holds]


async def pages(world: MemoryWorld) -> list[str]:
    harness = WorkerHarness(world)
    processes = [await harness.start(), await start_router(world), await opened(world)]
    harness.assign(max_tokens=2)
    await harness.wait_finished()
    await world.sleep(2)
    found = [
        (await HttpExchange(process.http, "GET", "/metrics").wait_done()).content.decode()
        for process in processes
    ]
    collected = await CollectorMetrics(lambda: 0, lambda: 0, lambda: 0).page()
    return [*found, (await GatewayMetrics().page()).decode(), collected.decode()]


async def preprocessor_page(world: MemoryWorld) -> list[str]:
    process, _ = await begin(world)
    return [(await HttpExchange(process.http, "GET", "/metrics").wait_done()).content.decode()]


def test_names_of_metrics_follow_the_rules_of_prometheus() -> None:
    found: dict[str, Family] = {}

    async def scenario(world: MemoryWorld) -> None:
        for page in await pages(world):
            found.update({family.name: family for family in families(page)})

    async def other(world: MemoryWorld) -> None:
        for page in await preprocessor_page(world):
            found.update({family.name: family for family in families(page)})

    run_scenario(scenario)
    run_scenario(other)
    for subsystem in SUBSYSTEMS:
        assert any(name.startswith(f"kvlane_{subsystem}_") for name in found), subsystem
    assert {name: broken for name, family in found.items() if (broken := faults(family))} == {}


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("kvlane_router_decisions", "counter", "_total"),
        ("kvlane_router_queue_total", "gauge", "_total"),
        ("kvlane_ttft_seconds", "histogram", "process"),
        ("kvlane_router_wait_ms", "gauge", "base units"),
        ("kvlane_router_seconds_queue", "gauge", "last"),
        ("kvlane_worker_latency", "histogram", "unit"),
        ("kvlane_worker_gauge_blocks", "gauge", "type"),
        ("kvlane_worker_run_count", "gauge", "suffixes"),
        ("kvlane_worker_kvBlocks", "gauge", "lower case"),
    ],
)
def test_invalid_metric_name_is_found(name: str, kind: str, words: str) -> None:
    assert any(words in fault for fault in faults(Family(name, kind, "Help", frozenset())))
