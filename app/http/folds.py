"""How far the folds of a process are, for Prometheus."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.routing.index import Index
from streams.errors import BrokerUnavailable
from streams.follow import Follower
from streams.ports import Partition

log = logging.getLogger(__name__)

LAG_S = 2.0
"""What a page waits for the ends of the log; without an answer it tells the lag to the last one."""
HASH_SHIFT = 11
"""A gauge is a float of 53 bits: the upper 53 of a state hash of 64."""


class Folds(Collector):
    """How far the folds are."""

    def __init__(self, index: Index, followers: Mapping[str, Follower]) -> None:
        """`followers` by the names of their folds, that of `index` among them."""
        self._index = index
        self._followers = followers
        self._ends: dict[str, dict[Partition, int]] = {name: {} for name in followers}

    async def page(self, registry: CollectorRegistry) -> bytes:
        """All of a registry, in Prometheus' text format, with the ends of the log as they are."""
        try:
            async with asyncio.timeout(LAG_S):
                for name, follower in self._followers.items():
                    self._ends[name] = await follower.ends()
        except (BrokerUnavailable, TimeoutError) as e:
            log.warning("the ends of the log are not known: %r", e)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """Read off the followers."""
        where = ["fold", "topic", "partition"]
        caught_up = GaugeMetricFamily(
            "kvlane_fold_caught_up", "Whether a fold has read its topics to where they ended",
            labels=["fold"],
        )  # fmt: skip
        left = GaugeMetricFamily(
            "kvlane_fold_left_records", "Offsets to be read until it has", labels=["fold"]
        )
        position = GaugeMetricFamily(
            "kvlane_fold_position", "Next offset of a partition", labels=where
        )
        lag = GaugeMetricFamily(
            "kvlane_fold_lag_records", "Offsets between that and the partition's end", labels=where
        )
        counts = {
            "applied": CounterMetricFamily(
                "kvlane_fold_records", "Records taken in", labels=["fold"]
            ),
            "malformed": CounterMetricFamily(
                "kvlane_fold_malformed_records", "Records that no codec reads", labels=["fold"]
            ),
            "rebuilt": CounterMetricFamily(
                "kvlane_fold_rebuilds", "Partitions that were built again", labels=["fold"]
            ),
        }
        for name, follower in self._followers.items():
            caught_up.add_metric([name], follower.caught_up)
            left.add_metric([name], follower.left)
            for counter, family in counts.items():
                family.add_metric([name], getattr(follower, counter))
            for source, at in follower.positions().items():
                labels = [name, source.topic, str(source.partition)]
                position.add_metric(labels, at)
                if (end := self._ends[name].get(source)) is not None:
                    lag.add_metric(labels, max(0, end - at))
        yield from (caught_up, left, position, lag, *counts.values())
        hashes = GaugeMetricFamily(
            "kvlane_fold_state_hash", "Upper 53 bits of the hash of what is known from a "
            "partition: equal at equal positions", labels=where,
        )  # fmt: skip
        for source in self._followers[self._index.name].positions():
            told = int(self._index.state_hash(source), 16) >> HASH_SHIFT
            hashes.add_metric([self._index.name, source.topic, str(source.partition)], told)
        yield hashes
