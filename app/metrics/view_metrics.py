"""Prometheus metrics of the progress of materialized views."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvlane.app.metrics.metric_set import counters, gauges
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.streams.errors import BrokerUnavailable
from kvlane.streams.ports import Partition
from kvlane.streams.views.follower import Follower

log = logging.getLogger(__name__)

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
        """Read the end offsets again."""
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
