"""Measurements of the index benchmark on one set-up, with comparison of all answers.

Sides take turns every GROUP operations, in rotating order, so that other load on the machine
affects all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.bench.index.comparison import (
    IndexFigure,
    RatioTarget,
    latency_figure,
    throughput_figure,
)
from workbench.bench.index.index_workload import (
    MATCH,
    CachedSequences,
    IndexSetup,
    OperationBatch,
    U64Column,
    queries_by_overlap,
)
from workbench.bench.index.peers import MeasuredIndex

OPERATIONS_PER_TURN = 20
STORE_PARTS = 10
REFILLED_PAIRS = 1_000_000
"""A larger set-up is stored only once: that takes seconds, and varies little."""
ROUND_BLOCKS = 400_000
MAX_EVENTS = 1500
DECODE_STEPS = 16
"""Blocks that are appended to a sequence one by one."""
CHECKED_QUERIES = 100
TRACE_GROUP = 250

FULL_HIT_TARGETS = {
    64: RatioTarget(3.0, 1.0),
    1024: RatioTarget(2.0, 1.0),
    8192: RatioTarget(2.5, 1.0),
}
HIT_TARGETS = {"half hit": RatioTarget(1.5, 1.0), "miss": RatioTarget(0.0)}
MISS_LIMIT_US = 0.4


class Repetitions(NamedTuple):
    """Number of queries of each kind by depth, and rounds of updates."""

    queries_by_depth: dict[int, int]
    rounds: int


class AnswerComparison:
    """Numbers of compared and of differing answers. The first side is compared with all others."""

    def __init__(self) -> None:
        self.compared = 0
        self.differing = 0

    def compare(self, sides: Iterable[MeasuredIndex], queries: U64Column) -> None:
        """Compare the answers of all sides to the same queries."""
        first, *others = [side.matches(queries) for side in sides]
        for other in others:
            self.compared += len(first)
            self.differing += sum(one != two for one, two in zip(first, other, strict=True))

    def compare_rows(self, one: Sequence[object], other: Sequence[object]) -> None:
        self.compared += 1
        self.differing += list(one) != list(other)


class IndexMeasurements:
    def __init__(
        self,
        sequences: CachedSequences,
        make: Callable[[], dict[str, MeasuredIndex]],
        effort: Repetitions,
        per_us: float,
        answers: AnswerComparison,
    ) -> None:
        """`make` creates empty sides."""
        self.answers = answers
        self._sequences = sequences
        self._make = make
        self._sides = make()
        self._effort = effort
        self._per_us = per_us
        self._turn = 0
        depth = sequences.depth
        self._where = IndexSetup(depth, sequences.workers, sequences.sequence_count * depth)
        self._own = depth - sequences.shared_blocks
        most = max(
            OPERATIONS_PER_TURN,
            min(MAX_EVENTS, sequences.sequence_count // 2, ROUND_BLOCKS // self._own),
        )
        self._chosen = sequences.random_subset(min(most, sequences.sequence_count))

    def figures(self) -> Iterator[IndexFigure]:
        """All figures, in an order in which each builds on the one before."""
        yield self._first_store()
        yield from self._matches()
        yield from self._changes()
        yield from self._single_blocks()
        yield from self._churn()
        yield from self._holes()
        close_sides(self._sides)

    def _first_store(self) -> IndexFigure:
        took: dict[str, list[int]] = {name: [] for name in self._sides}
        self._fill(took)
        for _ in range(1, self._effort.rounds if self._where.pairs <= REFILLED_PAIRS else 1):
            close_sides(self._sides)
            self._sides = self._make()
            self._fill(took)
        return throughput_figure(
            "first store", self._where, self._where.pairs, took, RatioTarget(3.0)
        )

    def _fill(self, took: dict[str, list[int]]) -> None:
        """The CPU time of a round is the sum of its parts: table growth makes some expensive."""
        sums = dict.fromkeys(self._sides, 0)
        whole = np.arange(self._sequences.sequence_count)
        for part in np.array_split(whole, min(STORE_PARTS, len(whole))):
            batch = self._sequences.store_batch(part)
            for name, side in self._in_turn():
                sums[name] += side.apply(batch)
        for name, cpu_ns in sums.items():
            took[name].append(cpu_ns)

    def _matches(self) -> Iterator[IndexFigure]:
        count = self._effort.queries_by_depth[self._where.blocks]
        queries_by_kind = queries_by_overlap(self._sequences, self._sequences.random_subset(count))
        for kind, queries in queries_by_kind.items():
            aim = FULL_HIT_TARGETS[self._where.blocks] if kind == "full hit" else HIT_TARGETS[kind]
            yield self._latency(f"match, {kind}", queries, aim)
            self.answers.compare(self._sides.values(), queries[:CHECKED_QUERIES])

    def _latency(self, measure: str, queries: U64Column, aim: RatioTarget) -> IndexFigure:
        ticks: dict[str, list[U64Column]] = {name: [] for name in self._sides}
        for _ in range(2):
            for start in range(0, len(queries), OPERATIONS_PER_TURN):
                for name, side in self._in_turn():
                    ticks[name].append(side.match(queries[start : start + OPERATIONS_PER_TURN]))
        together = {name: np.concatenate(own) for name, own in ticks.items()}
        return latency_figure(measure, self._where, together, self._per_us, aim)

    def _changes(self) -> Iterator[IndexFigure]:
        first = self._sequences.shared_blocks
        batches = (
            self._sequences.remove_batch(self._chosen, first),
            self._sequences.store_batch(self._chosen, first),
        )
        yield from self._rounds(("remove", "re-store"), batches, RatioTarget(1.5))

    def _single_blocks(self) -> Iterator[IndexFigure]:
        batches = self._sequences.decode_batches(self._chosen[:200], DECODE_STEPS)
        names = ("one-block stores", "one-block removals")
        yield from self._rounds(names, batches, RatioTarget(), group=10 * OPERATIONS_PER_TURN)

    def _holes(self) -> Iterator[IndexFigure]:
        batches = self._sequences.hole_batches(self._chosen)
        for side in self._sides.values():
            side.apply(batches[0])
        yield self._latency("match, holes", self._some_chosen(), RatioTarget())
        self.answers.compare(self._sides.values(), self._some_chosen()[:CHECKED_QUERIES])
        for side in self._sides.values():
            side.apply(batches[1])
        self.answers.compare(self._sides.values(), self._some_chosen()[:CHECKED_QUERIES])

    def _churn(self) -> Iterator[IndexFigure]:
        half = len(self._chosen) // 2
        out, back = self._chosen[:half], self._chosen[half : 2 * half]
        first = self._sequences.shared_blocks
        for side in self._sides.values():
            side.apply(self._sequences.remove_batch(back, first))
        there = self._sequences.exchange_batch(out, back, first)
        again = self._sequences.exchange_batch(back, out, first)
        yield from self._rounds(("churn", "churn back"), (there, again), RatioTarget(1.5))
        for side in self._sides.values():
            side.apply(self._sequences.store_batch(back, first))
        yield self._latency("match, after churn", self._some_chosen(), RatioTarget())

    def _some_chosen(self) -> U64Column:
        count = self._effort.queries_by_depth[self._where.blocks]
        return np.ascontiguousarray(self._sequences.local[self._chosen[:count]])

    def _rounds(
        self,
        names: tuple[str, str],
        batches: tuple[OperationBatch, OperationBatch],
        aim: RatioTarget,
        group: int = OPERATIONS_PER_TURN,
    ) -> Iterator[IndexFigure]:
        """Apply a batch and its inverse in each round."""
        took: list[dict[str, list[int]]] = [{name: [] for name in self._sides} for _ in batches]
        for _ in range(self._effort.rounds):
            for batch, own in zip(batches, took, strict=True):
                sums = dict.fromkeys(self._sides, 0)
                for part in batch.groups(group):
                    for name, side in self._in_turn():
                        sums[name] += side.apply(part)
                for name, cpu_ns in sums.items():
                    own[name].append(cpu_ns)
                self.answers.compare(self._sides.values(), self._some_chosen()[:CHECKED_QUERIES])
        for measure, batch, own in zip(names, batches, took, strict=True):
            where = self._where._replace(blocks=int(batch.rows["blocks"][0]))
            yield throughput_figure(measure, where, batch.blocks, own, aim)

    def _in_turn(self) -> list[tuple[str, MeasuredIndex]]:
        self._turn += 1
        return rotated(self._sides, self._turn)


def close_sides(sides: dict[str, MeasuredIndex]) -> None:
    for side in sides.values():
        side.close()


def rotated(sides: dict[str, MeasuredIndex], turn: int) -> list[tuple[str, MeasuredIndex]]:
    """All sides, in rotating order."""
    named = list(sides.items())
    start = turn % len(named)
    return named[start:] + named[:start]


def replay_trace(
    batch: OperationBatch,
    sides: dict[str, MeasuredIndex],
    workers: int,
    per_us: float,
    answers: AnswerComparison,
) -> Iterator[IndexFigure]:
    """Throughput and latency of the interleaved queries and events of a trace."""
    took = dict.fromkeys(sides, 0)
    ticks: dict[str, list[U64Column]] = {name: [] for name in sides}
    for turn, part in enumerate(batch.groups(TRACE_GROUP)):
        is_query = part.rows["kind"] == MATCH
        for name, side in rotated(sides, turn):
            cpu_ns, own = side.replay(part)
            took[name] += cpu_ns
            ticks[name].append(own[is_query])
        for query in _queries(part)[-OPERATIONS_PER_TURN:]:
            answers.compare(sides.values(), query[None, :])
    where = IndexSetup(0, workers, batch.blocks)
    totals = {name: [cpu_ns] for name, cpu_ns in took.items()}
    yield throughput_figure("trace", where, batch.blocks, totals, RatioTarget(1.2))
    together = {name: np.concatenate(own) for name, own in ticks.items()}
    yield latency_figure("trace, matches", where, together, per_us, RatioTarget())


def _queries(batch: OperationBatch) -> list[U64Column]:
    return [
        np.ascontiguousarray(batch.local[row["start"] : row["start"] + row["blocks"]])
        for row in batch.rows
        if row["kind"] == MATCH
    ]


def token_scores(
    prompts: NDArray[np.uint32],
    block_size: int,
    sides: dict[str, MeasuredIndex],
    per_us: float,
    setup: IndexSetup,
    target: RatioTarget,
) -> IndexFigure:
    """Latency from tokens to scores: hashes and match."""
    ticks: dict[str, list[U64Column]] = {name: [] for name in sides}
    for turn, start in enumerate([*range(0, len(prompts), OPERATIONS_PER_TURN)] * 3):
        part = prompts[start : start + OPERATIONS_PER_TURN]
        for name, side in rotated(sides, turn):
            ticks[name].append(side.match_tokens(part, block_size))
    together = {name: np.concatenate(own) for name, own in ticks.items()}
    measure = f"tokens to scores, {prompts.shape[1] // 1024} k at {block_size}"
    return latency_figure(measure, setup, together, per_us, target)
