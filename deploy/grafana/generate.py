"""The Grafana dashboards: a table of panels, and the JSON that Grafana reads.

`python deploy/grafana/generate.py` writes `dashboards/*.json`. A row of a panel is a legend and a
query; `$rate` is replaced by Grafana's interval of rates, and each metric gets the selectors of the
variables whose labels it has.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "dashboards"
COLUMNS, WIDTH, HEIGHT = 2, 12, 8
SOURCE = {"type": "prometheus", "uid": "${source}"}
OF_MODEL = (
    r"kvlane_router_(request_\w+|requests_total|queued_tokens|queued_batch_requests|drift_\w+)"
    r"|kvlane_worker_(runs_total|time_to_\w+|inter_token_\w+|(cached_)?(prompt|output)_tokens_total)"
)
"""Metrics with a label model."""
OF_WORKER = r"kvlane_router_(active_\w+|drift_\w+|worker_\w+)|kvlane_indexer_worker_\w+"
VARIABLES = {
    "namespace": ("kvlane_http_connections", r"\w+"),
    "model": ("kvlane_router_queued_tokens", OF_MODEL),
    "worker": ("kvlane_router_active_requests", OF_WORKER),
    "tenant": ("kvlane_collector_usage_requests_total", r"kvlane_collector_usage_\w+"),
}
"""By label: a metric that has all its values, and the metrics that it selects from."""
PROCESS = "{{pod}} {{instance}}"
"""Legend of a process: on Kubernetes its pod, elsewhere its address."""
OF_KVLANE = "and on (job, instance) kvlane_http_connections"
METRIC = re.compile(r"\b(?P<name>(?:kvlane|process)_\w+)(?:{(?P<labels>[^}]*)})?")


class Panel(NamedTuple):
    """A panel of a dashboard. `queries`: by legend; `meaning`: for the reader of the panel."""

    title: str
    unit: str
    meaning: str
    queries: dict[str, str]


def rate(metric: str, by: str = "") -> str:
    """The rate of a counter, summed."""
    return f"sum{_by(by)}(rate({metric}[$rate]))"


def quantiles(metric: str, by: str = "") -> dict[str, str]:
    """The median and the 99th percentile of a histogram, by legend."""
    labels = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return {
        f"p{share * 100:g}{legend}": (
            f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket[$rate])))"
        )
        for share in (0.5, 0.99)
    }


def per_worker(metric: str) -> str:
    """A gauge of each worker; every router reports all of them."""
    return f"max by (worker) ({metric})"


def selected(query: str) -> str:
    """The query, with selectors for the values of the variables. A label that a metric lacks, such
    as the namespace outside of Kubernetes, is matched by all values."""

    def add(found: re.Match[str]) -> str:
        name, own = found["name"], found["labels"]
        labels = [own] if own else []
        labels += [
            f'{label}=~"${label}"'
            for label, (_, metrics) in VARIABLES.items()
            if re.fullmatch(metrics, re.sub("_(bucket|sum|count)$", "", name))
        ]
        return f"{name}{{{', '.join(labels)}}}"

    return METRIC.sub(add, query)


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""


DASHBOARDS: dict[str, tuple[str, list[Panel]]] = {
    "fleet": (
        "kvlane: fleet",
        [
            Panel("Ended requests", "reqps", "By outcome of the last run or of the router's end.",
                  {"{{outcome}}": rate("kvlane_router_requests_total", "outcome")}),
            Panel("Tokens", "short", "Tokens a second: generated, of prompts, and cached.",
                  {"output": rate("kvlane_worker_output_tokens_total"),
                   "prompt": rate("kvlane_worker_prompt_tokens_total"),
                   "cached": rate("kvlane_worker_cached_prompt_tokens_total")}),
            Panel("Active requests of workers", "short", "From the ledger.",
                  {"{{worker}}": per_worker("kvlane_router_active_requests")}),
            Panel("KV cache in use", "percentunit", "Blocks in use of all blocks.",
                  {PROCESS:
                   "kvlane_worker_kv_cache_used_blocks / kvlane_worker_kv_cache_blocks"}),
            Panel("Age of heartbeats", "s", "Above KVLANE_WORKER_TIMEOUT_S a worker is lost.",
                  {PROCESS: "kvlane_worker_heartbeat_age_seconds"}),
            Panel("Usage of tenants", "short",
                  "Prompt and output tokens a second; tenants beyond the first 100 are `other`.",
                  {"{{tenant}}": "sum by (tenant) (rate(kvlane_collector_usage_tokens_total"
                   '{kind=~"prompt|output"}[$rate]))'}),
            Panel("Requests of tenants", "reqps", "Ended requests of each tenant.",
                  {"{{tenant}}": rate("kvlane_collector_usage_requests_total", "tenant")}),
            Panel("Streams of gateways", "short", "Completions that are being streamed.",
                  {PROCESS: "kvlane_gateway_completions_in_flight"}),
            Panel("CPU", "short", "Cores in use of each process.",
                  {PROCESS: f"rate(process_cpu_seconds_total[$rate]) {OF_KVLANE}"}),
            Panel("Memory", "bytes", "Resident memory of each process.",
                  {PROCESS: f"process_resident_memory_bytes {OF_KVLANE}"}),
        ],
    ),
    "routing": (
        "kvlane: routing quality",
        [
            Panel("Cached prompt tokens", "percentunit",
                  "Prompt tokens that engines found in their caches, of all.",
                  {"{{model}}": rate("kvlane_worker_cached_prompt_tokens_total", "model")
                   + " / " + rate("kvlane_worker_prompt_tokens_total", "model")}),
            Panel("Expected cached fraction", "percentunit", "Mean at the decision, by the index.",
                  {"mean": rate("kvlane_router_prefix_cache_hit_ratio_sum") + " / "
                   + rate("kvlane_router_prefix_cache_hit_ratio_count")}),
            Panel("Drift of cached blocks", "short",
                  "Expected against found blocks, 95th percentile; above 1 the index is wrong.",
                  {"{{worker}}": "max by (worker) (kvlane_router_drift_p95_cached_blocks)"}),
            Panel("Drift of time to first token", "s", "Expected against measured, p95.",
                  {"{{worker}}":
                   "max by (worker) (kvlane_router_drift_p95_time_to_first_token_seconds)"}),
            Panel("Load of the busiest worker", "short", "Active tokens; 1: even load.",
                  {"busiest / mean": "max(max by (worker) (kvlane_router_active_tokens)) / "
                   "avg(max by (worker) (kvlane_router_active_tokens))"}),
            Panel("Slowdown of workers", "short", "Measured latency relative to the profile.",
                  {"{{worker}}": per_worker("kvlane_router_worker_slowdown_ratio")}),
            Panel("Decisions", "reqps", "Requests assigned to a worker, by policy.",
                  {"{{policy}}": rate("kvlane_router_decisions_total", "policy")}),
            Panel("Preempted batch runs", "reqps", "Batch runs that gave way to interactive ones.",
                  {"preempted": rate("kvlane_router_preempted_runs_total")}),
            Panel("Hand-overs", "reqps",
                  "Prompts of prefill workers; unused ones are computed again by the next attempt.",
                  {"{{use}}": rate("kvlane_router_handed_over_requests_total", "use")}),
            Panel("Unconfirmed assignments", "short", "Decisions not yet read back.",
                  {PROCESS: "kvlane_router_unconfirmed_assignments"}),
        ],
    ),
    "latency": (
        "kvlane: latency",
        [
            Panel("Time to first token", "s", "From receipt, over HTTP and Kafka alike.",
                  quantiles("kvlane_router_request_time_to_first_token_seconds", "model")),
            Panel("Inter-token latency", "s", "Mean of the last run of each request.",
                  quantiles("kvlane_router_request_inter_token_latency_seconds", "model")),
            Panel("Queue time", "s", "From receipt to the first assignment.",
                  quantiles("kvlane_router_request_queue_time_seconds", "model")),
            Panel("Time to first token in workers", "s", "From the acceptance of a run.",
                  quantiles("kvlane_worker_time_to_first_token_seconds", "model")),
            Panel("Time to first token at gateways", "s", "From a request to its first token.",
                  quantiles("kvlane_gateway_time_to_first_token_seconds")),
            Panel("Inter-token latency at gateways", "s", "Averaged over blocks of 16 tokens.",
                  quantiles("kvlane_gateway_inter_token_latency_seconds")),
            Panel("Prompt and output tokens", "short", "Of a completion over HTTP.",
                  {f"{name} {legend}": query for name in ("prompt", "output")
                   for legend, query in quantiles(f"kvlane_gateway_{name}_tokens").items()}),
            Panel("Delay of event loops", "s", "A sign of blocking work; 99th percentile.",
                  {PROCESS: "histogram_quantile(0.99, sum by (le, pod, instance) "
                   "(rate(kvlane_event_loop_delay_seconds_bucket[$rate])))"}),
        ],
    ),
    "backlog": (
        "kvlane: backlog",
        [
            Panel("Prompts that wait", "short", "Records in the log that are no requests yet.",
                  {"{{topic}}": "sum by (topic) (kvlane_backlog_records)"}),
            Panel("Age of the oldest prompt", "s", "Of those that wait, since its append.",
                  {"{{topic}}": "max by (topic) (kvlane_backlog_oldest_age_seconds)"}),
            Panel("Queued requests", "short", "Requests that wait in routers.",
                  {PROCESS: "kvlane_router_queued_requests"}),
            Panel("Queued tokens", "short", "Their uncached prompt tokens: scale by these.",
                  {"{{model}}": "sum by (model) (kvlane_router_queued_tokens)"}),
            Panel("Queued batch requests", "short", "Those in routers; others wait in the log.",
                  {"{{model}}": "sum by (model) (kvlane_router_queued_batch_requests)"}),
            Panel("Batch jobs", "short", "Jobs that collectors run now.",
                  {"jobs": "sum(kvlane_collector_batch_jobs)"}),
            Panel("Queued bytes", "bytes", "Their prompts; KVLANE_MAX_QUEUED_BYTES is the limit.",
                  {PROCESS: "kvlane_router_queued_bytes"}),
            Panel("Deferred prompts", "short", "Prompts from Kafka that wait in the log.",
                  {PROCESS: "kvlane_router_deferred_requests"}),
            Panel("Age of prompts", "s", "From their append to their being read.",
                  quantiles("kvlane_preprocessor_prompt_age_seconds")),
            Panel("Prompts", "reqps", "By outcome.",
                  {"{{outcome}}": rate("kvlane_preprocessor_prompts_total", "outcome")}),
            Panel("Room in routers", "short",
                  "Requests that preprocessors may publish; paused ones leave prompts in the log.",
                  {PROCESS: "kvlane_preprocessor_credit_requests",
                   "paused": "sum(kvlane_preprocessor_paused)"}),
            Panel("Results", "reqps", "Results that collectors wrote, by status.",
                  {"{{status}}": rate("kvlane_collector_results_total", "status")}),
            Panel("Delay of results", "s", "From the end of an answer to its result.",
                  quantiles("kvlane_collector_result_delay_seconds")),
            Panel("Collectors", "short", "Lanes, and open requests that get a result.",
                  {f"lanes {PROCESS}": "kvlane_collector_lanes",
                   f"requests {PROCESS}": "kvlane_collector_open_requests"}),
            Panel("Transactions and replies", "short",
                  "Transactions with results by outcome; replies that were left out, by reason.",
                  {"{{outcome}}": rate("kvlane_collector_transactions_total", "outcome"),
                   "reply: {{reason}}":
                   rate("kvlane_collector_undelivered_replies_total", "reason")}),
            Panel("Rejected requests", "reqps", "Requests that routers ended, by code.",
                  {"{{code}}": rate("kvlane_router_terminated_requests_total", "code")}),
        ],
    ),
    "log": (
        "kvlane: log",
        [
            Panel("Lag of views", "short", "Offsets between a view and the end of its topics.",
                  {f"{PROCESS} {{{{view}}}}":
                   "sum by (pod, instance, view) (kvlane_view_lag_records)"}),
            Panel("Silence of the broker", "s", "Time since it last answered a gateway.",
                  {PROCESS: "kvlane_gateway_broker_last_response_age_seconds"}),
            Panel("Records applied", "short", "Records a second, by view.",
                  {"{{view}}": rate("kvlane_view_records_total", "view")}),
            Panel("Must stay 0", "short", "Lost chunks and events, malformed records.",
                  {"stream gaps": "sum(increase(kvlane_gateway_stream_gaps_total[$rate]))",
                   "malformed": "sum(increase(kvlane_view_malformed_records_total[$rate]))",
                   "skipped: {{reason}}":
                   "sum by (reason) (increase(kvlane_indexer_skipped_records_total[$rate]))",
                   "dead letters": "sum(increase(kvlane_preprocessor_prompts_total"
                   '{outcome="dead_letter"}[$rate]))',
                   "unreadable": "sum(increase(kvlane_collector_unreadable_records_total[$rate]))",
                   "event gaps": "sum(increase(kvlane_indexer_event_gaps_total[$rate]))"}),
            Panel("Skipped chunks", "short", "Duplicates, and those of abandoned runs.",
                  {PROCESS: rate("kvlane_gateway_skipped_chunks_total", "pod, instance")}),
            Panel("Rebuilt partitions", "short", "Views that began anew.",
                  {"{{view}}": "sum by (view) (increase(kvlane_view_rebuilds_total[$rate]))"}),
            Panel("Blocks in the index", "short", "By worker.",
                  {"{{worker}}": "max by (worker) (kvlane_indexer_worker_blocks)"}),
            Panel("Age of snapshots", "s", "Of the oldest of those in use; without one, none.",
                  {PROCESS: "max by (pod, instance) (kvlane_indexer_snapshot_age_seconds)"}),
        ],
    ),
}  # fmt: skip
"""By file name: the title and the panels of a dashboard."""


def dashboard(name: str) -> dict[str, Any]:
    """The JSON object of a dashboard."""
    title, panels = DASHBOARDS[name]
    queries = [selected(query) for panel in panels for query in panel.queries.values()]
    return {
        "uid": f"kvlane-{name}",
        "title": title,
        "tags": ["kvlane"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Prometheus", "type": "datasource",
                 "query": "prometheus"},
                *(
                    _variable(label, metric)
                    for label, (metric, _) in VARIABLES.items()
                    if any(f'"${label}"' in query for query in queries)
                ),
            ]
        },
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }  # fmt: skip


def _variable(label: str, metric: str) -> dict[str, Any]:
    return {
        "name": label, "type": "query", "datasource": SOURCE, "refresh": 2, "sort": 1,
        "query": f"label_values({metric}, {label})",
        "multi": True, "includeAll": True, "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    position = {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.meaning,
        "datasource": SOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": selected(query).replace("$rate", "$__rate_interval"),
                "legendFormat": legend,
            }
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def content(name: str) -> str:
    """The content of the file of a dashboard."""
    return json.dumps(dashboard(name), indent=1) + "\n"


def main() -> None:
    """Write all dashboards."""
    FOLDER.mkdir(exist_ok=True)
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(content(name))


if __name__ == "__main__":
    main()
