"""Prometheus metrics of the progress of materialized views."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.routing.state.kv_index import KvIndexView
from streams.errors import BrokerUnavailable
from streams.ports import Partition
from streams.views.follower import Follower

log = logging.getLogger(__name__)

END_OFFSETS_TIMEOUT_S = 2.0
"""Time limit for reading end offsets; without a response, lag refers to the last known ones."""
HASH_SHIFT = 11
"""A gauge is a float of 53 bits: the upper 53 of a state hash of 64."""


class ViewCollector(Collector):
    """Collector of the progress of all views of a process."""

    def __init__(self, index: KvIndexView, followers: Mapping[str, Follower]) -> None:
        """`followers` by the names of their views, that of `index` among them."""
        self._index = index
        self._followers = followers
        self._ends: dict[str, dict[Partition, int]] = {name: {} for name in followers}

    async def page(self, registry: CollectorRegistry) -> bytes:
        """All metrics in Prometheus' text format, after refreshing the end offsets."""
        try:
            async with asyncio.timeout(END_OFFSETS_TIMEOUT_S):
                for name, follower in self._followers.items():
                    self._ends[name] = await follower.ends()
        except (BrokerUnavailable, TimeoutError) as e:
            log.warning("the ends of the log are not known: %r", e)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """Read the followers."""
        where = ["view", "topic", "partition"]
        caught_up = GaugeMetricFamily(
            "kvlane_view_caught_up",
            "Whether a view has caught up with the end of its topics at start",
            labels=["view"],
        )  # fmt: skip
        left = GaugeMetricFamily(
            "kvlane_view_catch_up_remaining_records",
            "Offsets left to read until the view has caught up",
            labels=["view"],
        )
        position = GaugeMetricFamily(
            "kvlane_view_offset", "Next offset of a partition", labels=where
        )
        lag = GaugeMetricFamily(
            "kvlane_view_lag_records",
            "Offsets between that and the end of the partition",
            labels=where,
        )
        counts = {
            "applied": CounterMetricFamily(
                "kvlane_view_records", "Records applied", labels=["view"]
            ),
            "malformed": CounterMetricFamily(
                "kvlane_view_malformed_records", "Records that cannot be decoded", labels=["view"]
            ),
            "rebuilds": CounterMetricFamily(
                "kvlane_view_rebuilds", "Partitions that were rebuilt", labels=["view"]
            ),
        }
        for name, follower in self._followers.items():
            caught_up.add_metric([name], follower.caught_up)
            left.add_metric([name], follower.remaining_offsets)
            for counter, family in counts.items():
                family.add_metric([name], getattr(follower, counter))
            for source, at in follower.positions().items():
                labels = [name, source.topic, str(source.partition)]
                position.add_metric(labels, at)
                if (end := self._ends[name].get(source)) is not None:
                    lag.add_metric(labels, max(0, end - at))
        yield from (caught_up, left, position, lag, *counts.values())
        hashes = GaugeMetricFamily(
            "kvlane_view_state_hash", "Upper 53 bits of the hash of a partition's state: "
            "equal at equal offsets", labels=where,
        )  # fmt: skip
        for source in self._followers[self._index.name].positions():
            told = int(self._index.state_hash(source), 16) >> HASH_SHIFT
            hashes.add_metric([self._index.name, source.topic, str(source.partition)], told)
        yield hashes
