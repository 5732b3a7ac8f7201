"""Figures of the index bench: the samples of both sides, and whether a bar is met. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.bench.index_work import Where
from app.bench.report import Bar

OURS = "ours"
LESS_IS_BETTER = frozenset({"us", "B"})


class Aim(NamedTuple):
    """A bar. `least`: how many times better than the peer, by the median, and in the worst case."""

    least: float = 1.0
    worst: float = 0.0


class Samples(NamedTuple):
    """Of one side: the middle, and the tail: a latency's p99, a throughput's lowest round."""

    middle: float
    tail: float


class Figure(NamedTuple):
    """One measure on one set-up. `structure` is the peer that is best at it.

    `peer` is None where none was measured, `aim` where there is none to compare with.
    """

    measure: str
    where: Where
    unit: str
    ours: Samples
    peer: Samples | None
    structure: str
    aim: Aim | None

    @property
    def ratio(self) -> float:
        """How many times better ours is, by the middle; nan without a peer."""
        return self._ratio(0)

    @property
    def worst_ratio(self) -> float:
        """The same by the tail."""
        return self._ratio(1)

    @property
    def is_met(self) -> bool:
        """A bar that nothing was compared with is not met."""
        least, worst = self.aim or Aim()
        return self.ratio >= least and (not worst or self.worst_ratio >= worst)

    def row(self) -> dict[str, Any]:
        """For the table."""
        return {
            "measure": self.measure,
            "blocks": self.where.blocks,
            "workers": self.where.workers,
            "pairs": self.where.pairs,
            "unit": self.unit,
            "ours": self.ours.middle,
            "ours p99": self.ours.tail,
            "peer": self.peer.middle if self.peer else None,
            "peer p99": self.peer.tail if self.peer else None,
            "structure": self.structure,
            "ratio": self.ratio if self.peer else None,
            "bar": f">= {self.aim.least:g}" if self.aim else None,
            "met": self._verdict(),
        }

    def _verdict(self) -> str | None:
        if self.aim is None:
            return None
        return "yes" if self.is_met else "no" if self.peer else "not compared"

    def _ratio(self, part: int) -> float:
        if self.peer is None:
            return math.nan
        ours, peer = self.ours[part], self.peer[part]
        return peer / ours if self.unit in LESS_IS_BETTER else ours / peer


def latency(
    measure: str, where: Where, ticks: dict[str, NDArray[np.uint64]], per_us: float, aim: Aim
) -> Figure:
    """From the ticks of calls, by side; in microseconds."""
    samples = {
        side: Samples(*(float(p) / per_us for p in np.percentile(own, (50, 99))))
        for side, own in ticks.items()
    }
    return figure(measure, where, "us", samples, aim)


def throughput(
    measure: str, where: Where, blocks: int, cpu_ns: dict[str, list[int]], aim: Aim
) -> Figure:
    """From the CPU time of rounds of so many blocks, by side; in millions of blocks a second."""
    samples = {
        side: Samples(1e3 * blocks / median(own), 1e3 * blocks / max(own))
        for side, own in cpu_ns.items()
    }
    return figure(measure, where, "M blocks/s", samples, aim)


def figure(
    measure: str, where: Where, unit: str, samples: dict[str, Samples], aim: Aim | None
) -> Figure:
    """From samples by side, of which there is at least ours."""
    peers = {side: own for side, own in samples.items() if side != OURS}
    best = min if unit in LESS_IS_BETTER else max
    structure = best(peers, key=lambda side: peers[side].middle) if peers else ""
    return Figure(measure, where, unit, samples[OURS], peers.get(structure), structure, aim)


def bars(figures: Iterable[Figure]) -> list[Bar]:
    """One for each measure and length, by the set-up in which ours is worst."""
    grouped = defaultdict(list)
    for one in figures:
        if one.aim is not None:
            grouped[one.measure, one.where.blocks, one.aim].append(one)
    found = []
    for (measure, blocks, aim), own in grouped.items():
        name = f"{measure}, {blocks} blocks" if blocks else measure
        ratio = min(one.ratio for one in own)
        found.append(Bar(name, ratio, "x the peer", f">= {aim.least:g}", ratio >= aim.least))
        if aim.worst:
            ratio = min(one.worst_ratio for one in own)
            found.append(
                Bar(f"{name}, p99", ratio, "x the peer", f">= {aim.worst:g}", ratio >= aim.worst)
            )
    return found
