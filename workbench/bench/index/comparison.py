"""Figures of the index benchmark: samples of both sides, ratios and thresholds. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.bench.index.index_workload import IndexSetup
from workbench.bench.report import Threshold, at_least

OUR_INDEX = "ours"
LESS_IS_BETTER = frozenset({"us", "B"})


class RatioTarget(NamedTuple):
    """A threshold: required ratio to the peer, of the medians and of the worst case."""

    min_ratio: float = 1.0
    min_tail_ratio: float = 0.0


class SampleSummary(NamedTuple):
    """Samples of one side: the median, and the tail: p99 latency, or the slowest round."""

    median: float
    tail: float


class IndexFigure(NamedTuple):
    """One measure on one set-up. `structure`: the peer structure that is best at it.

    `peer` is None without a peer, `target` without a threshold.
    """

    measure: str
    setup: IndexSetup
    unit: str
    ours: SampleSummary
    peer: SampleSummary | None
    structure: str
    target: RatioTarget | None

    @property
    def ratio(self) -> float:
        """By which factor ours is better in the median; nan without a peer."""
        return self._ratio(0)

    @property
    def worst_ratio(self) -> float:
        """The same for the tail."""
        return self._ratio(1)

    @property
    def is_passed(self) -> bool:
        """Whether the threshold is passed; without a comparison it is not."""
        least, worst = self.target or RatioTarget()
        return self.ratio >= least and (not worst or self.worst_ratio >= worst)

    def row(self) -> dict[str, Any]:
        return {
            "measure": self.measure,
            "blocks": self.setup.blocks,
            "workers": self.setup.workers,
            "pairs": self.setup.pairs,
            "unit": self.unit,
            "ours": self.ours.median,
            "ours p99": self.ours.tail,
            "peer": self.peer.median if self.peer else None,
            "peer p99": self.peer.tail if self.peer else None,
            "structure": self.structure,
            "ratio": self.ratio if self.peer else None,
            "threshold": f">= {self.target.min_ratio:g}" if self.target else None,
            "passed": self._verdict(),
        }

    def _verdict(self) -> str | None:
        if self.target is None:
            return None
        return "yes" if self.is_passed else "no" if self.peer else "not compared"

    def _ratio(self, part: int) -> float:
        if self.peer is None:
            return math.nan
        ours, peer = self.ours[part], self.peer[part]
        return peer / ours if self.unit in LESS_IS_BETTER else ours / peer


def latency_figure(
    measure: str,
    setup: IndexSetup,
    ticks: dict[str, NDArray[np.uint64]],
    per_us: float,
    target: RatioTarget,
) -> IndexFigure:
    """Latency in microseconds, from the ticks of calls by side."""
    samples = {
        side: SampleSummary(*(float(p) / per_us for p in np.percentile(own, (50, 99))))
        for side, own in ticks.items()
    }
    return compare_sides(measure, setup, "us", samples, target)


def throughput_figure(
    measure: str, setup: IndexSetup, blocks: int, cpu_ns: dict[str, list[int]], target: RatioTarget
) -> IndexFigure:
    """Throughput in M blocks/s, from the CPU time of rounds by side."""
    samples = {
        side: SampleSummary(1e3 * blocks / median(own), 1e3 * blocks / max(own))
        for side, own in cpu_ns.items()
    }
    return compare_sides(measure, setup, "M blocks/s", samples, target)


def compare_sides(
    measure: str,
    setup: IndexSetup,
    unit: str,
    samples: dict[str, SampleSummary],
    target: RatioTarget | None,
) -> IndexFigure:
    """A figure from samples by side; ours must be among them."""
    peers = {side: own for side, own in samples.items() if side != OUR_INDEX}
    best = min if unit in LESS_IS_BETTER else max
    structure = best(peers, key=lambda side: peers[side].median) if peers else ""
    return IndexFigure(
        measure, setup, unit, samples[OUR_INDEX], peers.get(structure), structure, target
    )


def thresholds(figures: Iterable[IndexFigure]) -> list[Threshold]:
    """A threshold for each measure and length, on the set-up in which ours is worst."""
    grouped = defaultdict(list)
    for one in figures:
        if one.target is not None:
            grouped[one.measure, one.setup.blocks, one.target].append(one)
    found = []
    for (measure, blocks, aim), own in grouped.items():
        name = f"{measure}, {blocks} blocks" if blocks else measure
        ratio = min(one.ratio for one in own)
        found.append(at_least(name, ratio, "x the peer", aim.min_ratio))
        if aim.min_tail_ratio:
            ratio = min(one.worst_ratio for one in own)
            found.append(at_least(f"{name}, p99", ratio, "x the peer", aim.min_tail_ratio))
    return found
