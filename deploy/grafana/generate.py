"""The Grafana dashboards: a table of panels, and the JSON that Grafana reads.

`python deploy/grafana/generate.py` writes `dashboards/*.json`. A row of a panel is a legend and a
query; `$rate` is replaced by Grafana's interval of rates.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "dashboards"
COLUMNS, WIDTH, HEIGHT = 2, 12, 8
SOURCE = {"type": "prometheus", "uid": "${source}"}


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
                  {"{{instance}}":
                   "kvlane_worker_kv_cache_used_blocks / kvlane_worker_kv_cache_blocks"}),
            Panel("Age of heartbeats", "s", "Above KVLANE_WORKER_TIMEOUT_S a worker is lost.",
                  {"{{instance}}": "kvlane_worker_heartbeat_age_seconds"}),
            Panel("Streams of gateways", "short", "Completions that are being streamed.",
                  {"{{instance}}": "kvlane_gateway_completions_in_flight"}),
            Panel("CPU", "short", "Cores in use of each process.",
                  {"{{instance}}": "rate(process_cpu_seconds_total[$rate])"}),
            Panel("Memory", "bytes", "Resident memory of each process.",
                  {"{{instance}}": "process_resident_memory_bytes"}),
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
            Panel("Unconfirmed assignments", "short", "Decisions not yet read back.",
                  {"{{instance}}": "kvlane_router_unconfirmed_assignments"}),
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
                  {"{{instance}}": "histogram_quantile(0.99, sum by (le, instance) "
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
                  {"{{instance}}": "kvlane_router_queued_requests"}),
            Panel("Queued tokens", "short", "Their uncached prompt tokens: scale by these.",
                  {"{{instance}}": "kvlane_router_queued_tokens"}),
            Panel("Queued bytes", "bytes", "Their prompts; KVLANE_MAX_QUEUED_BYTES is the limit.",
                  {"{{instance}}": "kvlane_router_queued_bytes"}),
            Panel("Deferred prompts", "short", "Prompts from Kafka that wait in the log.",
                  {"{{instance}}": "kvlane_router_deferred_requests"}),
            Panel("Age of prompts", "s", "From their append to their being read.",
                  quantiles("kvlane_preprocessor_prompt_age_seconds")),
            Panel("Prompts", "reqps", "By outcome.",
                  {"{{outcome}}": rate("kvlane_preprocessor_prompts_total", "outcome")}),
            Panel("Room in routers", "short",
                  "Requests that preprocessors may publish; paused ones leave prompts in the log.",
                  {"{{instance}}": "kvlane_preprocessor_credit_requests",
                   "paused": "sum(kvlane_preprocessor_paused)"}),
            Panel("Rejected requests", "reqps", "Requests that routers ended, by code.",
                  {"{{code}}": rate("kvlane_router_terminated_requests_total", "code")}),
        ],
    ),
    "log": (
        "kvlane: log",
        [
            Panel("Lag of views", "short", "Offsets between a view and the end of its topics.",
                  {"{{instance}} {{view}}": "sum by (instance, view) (kvlane_view_lag_records)"}),
            Panel("Silence of the broker", "s", "Time since it last answered a gateway.",
                  {"{{instance}}": "kvlane_gateway_broker_last_response_age_seconds"}),
            Panel("Records applied", "short", "Records a second, by view.",
                  {"{{view}}": rate("kvlane_view_records_total", "view")}),
            Panel("Must stay 0", "short", "Lost chunks and events, malformed records.",
                  {"stream gaps": "sum(increase(kvlane_gateway_stream_gaps_total[$rate]))",
                   "malformed": "sum(increase(kvlane_view_malformed_records_total[$rate]))",
                   "skipped: {{reason}}":
                   "sum by (reason) (increase(kvlane_indexer_skipped_records_total[$rate]))",
                   "event gaps": "sum(increase(kvlane_indexer_event_gaps_total[$rate]))"}),
            Panel("Skipped chunks", "short", "Duplicates, and those of abandoned runs.",
                  {"{{instance}}": rate("kvlane_gateway_skipped_chunks_total", "instance")}),
            Panel("Rebuilt partitions", "short", "Views that began anew.",
                  {"{{view}}": "sum by (view) (increase(kvlane_view_rebuilds_total[$rate]))"}),
            Panel("Blocks in the index", "short", "By worker.",
                  {"{{worker}}": "max by (worker) (kvlane_indexer_worker_blocks)"}),
            Panel("Age of snapshots", "s", "Of the newest of a partition; without one, none.",
                  {"{{instance}}": "kvlane_indexer_snapshot_age_seconds"}),
        ],
    ),
}  # fmt: skip
"""By file name: the title and the panels of a dashboard."""


def dashboard(name: str) -> dict[str, Any]:
    """The JSON object of a dashboard."""
    title, panels = DASHBOARDS[name]
    return {
        "uid": f"kvlane-{name}",
        "title": title,
        "tags": ["kvlane"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "source", "label": "Prometheus", "type": "datasource",
                      "query": "prometheus"}]
        },
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
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
                "expr": query.replace("$rate", "$__rate_interval"),
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
