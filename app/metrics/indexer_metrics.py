"""Prometheus metrics of an indexer: views, index, snapshots and queries.

All series exist, at zero, before the first record; series by worker exist while the worker does.
Only queries are counted here, the rest is read from its owners for each scrape.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.metrics.gateway_metrics import LoopDelayMonitor
from app.metrics.view_metrics import ViewCollector
from app.routing.state.kv_index import KvIndexView
from streams.snapshots.snapshot_writer import SnapshotWriter
from streams.topics import KV_EVENTS
from streams.views.follower import Follower

log = logging.getLogger(__name__)

ENDPOINTS = ("query", "query_by_hash")

_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


class IndexerMetrics:
    """The metrics of one indexer, in a registry of its own."""

    def __init__(
        self, index: KvIndexView, followers: Mapping[str, Follower], duty: SnapshotWriter
    ) -> None:
        self.registry = registry = CollectorRegistry()
        self.query_s = Histogram(
            "kvlane_indexer_query_duration_seconds", "Time from a query, read whole, to its answer",
            ["endpoint"], buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        for endpoint in ENDPOINTS:
            self.query_s.labels(endpoint)
        self.loop_delay = LoopDelayMonitor(registry)
        self._folds = ViewCollector(index, followers)
        ProcessCollector(registry=registry)
        for collector in (_Index(index), self._folds, _Duty(duty)):
            registry.register(collector)

    async def page(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return await self._folds.page(self.registry)


class _Index(Collector):
    """Contents of caches, and events and records that were not applied."""

    def __init__(self, index: KvIndexView) -> None:
        self._index = index

    def collect(self) -> Iterator[Metric]:
        holdings, counters = self._index.cache_sizes(), self._index.blocks.counters
        by_worker = GaugeMetricFamily(
            "kvlane_indexer_worker_blocks",
            "Blocks in a cache, all tiers",
            labels=["worker", "rank"],
        )
        complete = GaugeMetricFamily(
            "kvlane_indexer_worker_complete",
            "Whether the index has every block of a cache", labels=["worker", "rank"],
        )  # fmt: skip
        for holder, held in sorted(holdings.items()):
            labels = [holder.worker, str(holder.rank)]
            by_worker.add_metric(labels, held.total_blocks)
            complete.add_metric(labels, held.complete)
        total = sum(held.total_blocks for held in holdings.values())
        yield GaugeMetricFamily("kvlane_indexer_blocks", "Blocks in all caches and tiers", total)
        yield by_worker
        yield complete
        events = CounterMetricFamily(
            "kvlane_indexer_events", "Cache events by outcome: stale ones are of an earlier "
            "epoch", labels=["outcome"],
        )  # fmt: skip
        events.add_metric(["applied"], counters.applied_events)
        events.add_metric(["stale"], counters.stale_events)
        events.add_metric(["duplicate"], counters.duplicate_events)
        yield events
        skipped = CounterMetricFamily(
            "kvlane_indexer_skipped_records", "Records of cache events that were skipped; "
            "wrong_secret, another hash secret, must stay 0", labels=["reason"],
        )  # fmt: skip
        skipped.add_metric(["malformed"], self._index.skipped.malformed)
        skipped.add_metric(["wrong_secret"], self._index.skipped.wrong_secret)
        yield skipped
        yield CounterMetricFamily(
            "kvlane_indexer_rejected_blocks", "Blocks beyond what one cache may hold",
            counters.rejected_blocks,
        )  # fmt: skip
        yield CounterMetricFamily(
            "kvlane_indexer_event_gaps", "Caches dropped because events were missing", counters.gaps
        )


class _Duty(Collector):
    """Snapshots written by this replica, and the age of the newest ones."""

    def __init__(self, duty: SnapshotWriter) -> None:
        self._duty = duty

    def collect(self) -> Iterator[Metric]:
        duty = self._duty
        yield GaugeMetricFamily(
            "kvlane_indexer_snapshot_partitions", "Partitions whose snapshots this replica writes",
            len(duty.owned),
        )  # fmt: skip
        age = GaugeMetricFamily(
            "kvlane_indexer_snapshot_age_seconds", "Age of the newest snapshot of a partition",
            labels=["topic", "partition"],
        )  # fmt: skip
        for partition in sorted(duty.owned):
            if (seconds := duty.age_s(partition)) is not None:
                age.add_metric([KV_EVENTS, str(partition)], seconds)
        yield age
        yield CounterMetricFamily("kvlane_indexer_snapshots", "Snapshots written", duty.written)
        yield CounterMetricFamily(
            "kvlane_indexer_snapshot_bytes",
            "Bytes of the snapshots written, before compression",
            duty.bytes,
        )
        yield GaugeMetricFamily(
            "kvlane_indexer_snapshot_duration_seconds",
            "Time that the last snapshot took",
            duty.last_duration_s,
        )
