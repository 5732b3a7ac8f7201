"""Prometheus metrics of an indexer (index, snapshots, queries), and of the progress of views.

All series exist, at zero, from the start; those by worker while the worker does. Only queries are
counted here, the rest is read for each scrape.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from functools import partial

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvlane.app.metrics.metric_set import MetricSet, counters, gauges
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.streams.errors import BrokerUnavailable
from kvlane.streams.ports import Partition
from kvlane.streams.topics import KV_EVENTS
from kvlane.streams.views.follower import Follower
from kvlane.streams.views.snapshot_writer import SnapshotWriter

END_OFFSETS_TIMEOUT_S = 2.0
"""Time limit for reading end offsets; without a response, lag refers to the last known ones."""
HASH_SHIFT = 11
"""A gauge is a float of 53 bits: the upper 53 of a state hash of 64."""


class ViewCollector(Collector):
    def __init__(self, index: KvIndexView, followers: Mapping[str, Follower]) -> None:
        """`followers` by the names of their views, that of `index` among them."""
        self._index = index
        self._followers = followers
        self._ends: dict[str, dict[Partition, int]] = {name: {} for name in followers}

    async def refresh(self) -> None:
        try:
            async with asyncio.timeout(END_OFFSETS_TIMEOUT_S):
                for name, follower in self._followers.items():
                    self._ends[name] = await follower.ends()
        except (BrokerUnavailable, TimeoutError) as e:
            log.warning("the ends of the log are not known: %r", e)

    def collect(self) -> Iterator[Metric]:
        followers = self._followers.items()
        for family, name, meaning, attribute in (
            (gauges, "caught_up", "1 once a view has caught up after its start", "caught_up"),
            (gauges, "catch_up_remaining_records",
             "Offsets left to read until the view has caught up", "remaining_offsets"),
            (counters, "records", "Records applied", "applied"),
            (counters, "malformed_records", "Records that cannot be decoded", "malformed"),
            (counters, "rebuilds", "Partitions that were rebuilt", "rebuilds"),
        ):  # fmt: skip
            samples = [([view], getattr(follower, attribute)) for view, follower in followers]
            yield family(f"kvlane_view_{name}", meaning, "view", samples)
        offsets = {
            (view, source): at
            for view, follower in followers
            for source, at in follower.positions().items()
        }
        yield _by_partition("offset", "Next offset of a partition", offsets)
        lags = {
            (view, source): max(0, end - at)
            for (view, source), at in offsets.items()
            if (end := self._ends[view].get(source)) is not None
        }
        yield _by_partition("lag_records", "Offsets between that and the end of it", lags)
        hashes = {
            (view, source): int(self._index.state_hash(source), 16) >> HASH_SHIFT
            for view, source in offsets
            if view == self._index.name
        }
        yield _by_partition(
            "state_hash",
            "Upper 53 bits of the hash of a partition's state: equal at equal offsets",
            hashes,
        )


def _by_partition(
    name: str, meaning: str, values: Mapping[tuple[str, Partition], float]
) -> GaugeMetricFamily:
    samples = (([view, at.topic, str(at.partition)], value) for (view, at), value in values.items())
    return gauges(f"kvlane_view_{name}", meaning, "view topic partition", samples)


log = logging.getLogger(__name__)

ENDPOINTS = ("query", "query_by_hash")

_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


class IndexerMetrics(MetricSet):
    def __init__(
        self, index: KvIndexView, followers: Mapping[str, Follower], duty: SnapshotWriter
    ) -> None:
        super().__init__()
        self.query_s = self.histogram(
            "kvlane_indexer_query_duration_seconds",
            "Time from a query, read whole, to its answer",
            "endpoint",
            buckets=_SECONDS,
        )
        for endpoint in ENDPOINTS:
            self.query_s.labels(endpoint)
        self._views = ViewCollector(index, followers)
        self.registry.register(self._views)
        self.read(partial(_index_families, index))
        self.read(partial(_snapshot_families, duty))

    async def page(self) -> bytes:
        await self._views.refresh()
        return await super().page()


def _index_families(index: KvIndexView) -> Iterator[Metric]:
    counts = index.blocks.counters
    sizes = sorted(index.cache_sizes().items())
    caches = [([cache.worker, str(cache.rank)], size) for cache, size in sizes]
    total = sum(size.total_blocks for _, size in caches)
    yield GaugeMetricFamily("kvlane_indexer_blocks", "Blocks in all caches and tiers", total)
    yield gauges(
        "kvlane_indexer_worker_blocks",
        "Blocks in a cache, all tiers",
        "worker rank",
        ((labels, size.total_blocks) for labels, size in caches),
    )
    yield gauges(
        "kvlane_indexer_worker_complete",
        "1 if the index has every block of a cache",
        "worker rank",
        ((labels, size.complete) for labels, size in caches),
    )
    yield counters(
        "kvlane_indexer_events",
        "Cache events by outcome: stale ones are of an earlier epoch",
        "outcome",
        (
            (["applied"], counts.applied_events),
            (["stale"], counts.stale_events),
            (["duplicate"], counts.duplicate_events),
        ),
    )
    skipped = index.skipped
    yield counters(
        "kvlane_indexer_skipped_records",
        "Records of cache events that were skipped; wrong_secret, another hash secret, must stay 0",
        "reason",
        ((["malformed"], skipped.malformed), (["wrong_secret"], skipped.wrong_secret)),
    )
    for name, meaning, count in (
        ("rejected_blocks", "Blocks beyond the limit of one cache", counts.rejected_blocks),
        ("event_gaps", "Caches dropped because events were missing", counts.gaps),
    ):
        yield CounterMetricFamily(f"kvlane_indexer_{name}", meaning, count)


def _snapshot_families(duty: SnapshotWriter) -> Iterator[Metric]:
    ages = {partition: duty.age_s(partition) for partition in sorted(duty.owned)}
    yield gauges(
        "kvlane_indexer_snapshot_age_seconds",
        "Age of the newest snapshot of a partition",
        "topic partition",
        (([KV_EVENTS, str(p)], seconds) for p, seconds in ages.items() if seconds is not None),
    )
    yield GaugeMetricFamily(
        "kvlane_indexer_snapshot_partitions",
        "Partitions whose snapshots this replica writes",
        len(ages),
    )
    yield GaugeMetricFamily(
        "kvlane_indexer_snapshot_duration_seconds",
        "Duration of the last snapshot",
        duty.last_duration_s,
    )
    yield CounterMetricFamily("kvlane_indexer_snapshots", "Snapshots written", duty.written)
    yield CounterMetricFamily(
        "kvlane_indexer_snapshot_bytes", "Bytes of snapshots, before compression", duty.bytes
    )
