"""What an indexer tells Prometheus: its folds, its index, its snapshots, and its answers.

All of it is there, at zero, before the first record; series by worker come and go with the workers.
Nothing is counted here but the answers: the rest is read off its owners when a page is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.http.folds import Folds
from app.http.metrics import LoopDelay
from app.routing.index import Index
from streams.duty import SnapshotDuty
from streams.follow import Follower
from streams.topics import KV_EVENTS

log = logging.getLogger(__name__)

ENDPOINTS = ("query", "query_by_hash")

_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


class IndexMetrics:
    """The metrics of one indexer, in a registry of its own."""

    def __init__(self, index: Index, followers: Mapping[str, Follower], duty: SnapshotDuty) -> None:
        self.registry = registry = CollectorRegistry()
        self.query_s = Histogram(
            "kvlane_query_seconds", "From a question, read whole, to its answer",
            ["endpoint"], buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        for endpoint in ENDPOINTS:
            self.query_s.labels(endpoint)
        self.loop_delay = LoopDelay(registry)
        self._folds = Folds(index, followers)
        ProcessCollector(registry=registry)
        for collector in (_Index(index), self._folds, _Duty(duty)):
            registry.register(collector)

    async def page(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return await self._folds.page(self.registry)


class _Index(Collector):
    """What the caches hold, and what was not taken as it came."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def collect(self) -> Iterator[Metric]:
        holdings, counters = self._index.holdings(), self._index.blocks.counters
        by_worker = GaugeMetricFamily(
            "kvlane_index_worker_blocks", "Blocks in a cache, all tiers", labels=["worker", "rank"]
        )
        complete = GaugeMetricFamily(
            "kvlane_index_worker_complete", "Whether all that a cache holds was announced in what "
            "was read", labels=["worker", "rank"],
        )  # fmt: skip
        for holder, held in sorted(holdings.items()):
            labels = [holder.worker, str(holder.rank)]
            by_worker.add_metric(labels, held.blocks)
            complete.add_metric(labels, held.complete)
        total = sum(held.blocks for held in holdings.values())
        yield GaugeMetricFamily("kvlane_index_blocks", "Blocks in all caches and tiers", total)
        yield by_worker
        yield complete
        events = CounterMetricFamily(
            "kvlane_index_events", "Cache events by what became of them: stale are those of an "
            "epoch that is over, repeated those that stand twice", labels=["outcome"],
        )  # fmt: skip
        events.add_metric(["applied"], counters.applied_events)
        events.add_metric(["stale"], counters.stale_events)
        events.add_metric(["repeated"], counters.repeated_events)
        yield events
        skipped = CounterMetricFamily(
            "kvlane_index_skipped_records", "Records of cache events that were not taken: foreign "
            "are those under another hash secret, which must stay 0", labels=["reason"],
        )  # fmt: skip
        skipped.add_metric(["malformed"], self._index.skipped.malformed)
        skipped.add_metric(["foreign"], self._index.skipped.foreign)
        yield skipped
        yield CounterMetricFamily(
            "kvlane_index_refused_blocks", "Blocks beyond what one cache may hold",
            counters.refused_blocks,
        )  # fmt: skip
        yield CounterMetricFamily(
            "kvlane_index_gaps", "Caches dropped because events were missing", counters.gaps
        )


class _Duty(Collector):
    """The snapshots that this replica writes, and how old the newest of anybody's are."""

    def __init__(self, duty: SnapshotDuty) -> None:
        self._duty = duty

    def collect(self) -> Iterator[Metric]:
        duty = self._duty
        yield GaugeMetricFamily(
            "kvlane_snapshot_partitions", "Partitions whose snapshots this replica writes",
            len(duty.owned),
        )  # fmt: skip
        age = GaugeMetricFamily(
            "kvlane_snapshot_age_seconds", "Age of the newest snapshot of a partition",
            labels=["topic", "partition"],
        )  # fmt: skip
        for partition in sorted(duty.owned):
            if (seconds := duty.age_s(partition)) is not None:
                age.add_metric([KV_EVENTS, str(partition)], seconds)
        yield age
        yield CounterMetricFamily("kvlane_snapshots", "Snapshots written", duty.written)
        yield CounterMetricFamily(
            "kvlane_snapshot_bytes", "Bytes of them, before compression", duty.bytes
        )
        yield GaugeMetricFamily(
            "kvlane_snapshot_seconds", "What the last one took to write", duty.last_s
        )
