"""What the index bench measures on one set-up, side by side; the answers are compared throughout.

Sides take turns every GROUP operations, and not always the same one first: what else the machine
does hits all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.bench.index_figures import Aim, Figure, latency, throughput
from app.bench.index_sides import Side
from app.bench.index_work import MATCH, Batch, Column, Sequences, Where, prompts

GROUP = 20
STORE_PARTS = 10
REFILLED_PAIRS = 1_000_000
"""More are stored only once: that takes seconds, and varies little."""
ROUND_BLOCKS = 400_000
MOST_EVENTS = 1500
STEPS = 16
"""Blocks that one sequence gets one by one."""
CHECKED = 100
TRACE_GROUP = 250

FULL_HIT = {64: Aim(3.0, 1.0), 1024: Aim(2.0, 1.0), 8192: Aim(2.5, 1.0)}
HITS = {"half hit": Aim(1.5, 1.0), "miss": Aim(0.0)}
MISS_US = 0.4


class Effort(NamedTuple):
    """Queries of each kind, by their blocks, and rounds of changes."""

    queries: dict[int, int]
    rounds: int


class Answers:
    """How many were compared, and how many differed. A side's first answer is held against all."""

    def __init__(self) -> None:
        self.compared = 0
        self.differing = 0

    def compare(self, sides: Iterable[Side], queries: Column) -> None:
        """Ask all sides the same."""
        first, *others = [side.answers(queries) for side in sides]
        for other in others:
            self.compared += len(first)
            self.differing += sum(one != two for one, two in zip(first, other, strict=True))

    def hold(self, one: Sequence[object], other: Sequence[object]) -> None:
        """Two rows that have to be the same."""
        self.compared += 1
        self.differing += list(one) != list(other)


class Course:
    """One set-up, filled, and what is done to it."""

    def __init__(
        self,
        sequences: Sequences,
        make: Callable[[], dict[str, Side]],
        effort: Effort,
        per_us: float,
        answers: Answers,
    ) -> None:
        """`make` gives empty sides."""
        self.answers = answers
        self._sequences = sequences
        self._make = make
        self._sides = make()
        self._effort = effort
        self._per_us = per_us
        self._turn = 0
        depth = sequences.depth
        self._where = Where(depth, sequences.workers, sequences.count * depth)
        self._own = depth - sequences.shared
        most = max(GROUP, min(MOST_EVENTS, sequences.count // 2, ROUND_BLOCKS // self._own))
        self._chosen = sequences.some(min(most, sequences.count))

    def measures(self) -> Iterator[Figure]:
        """All of them, in an order that each one builds on."""
        yield self._first_store()
        yield from self._matches()
        yield from self._changes()
        yield from self._single_blocks()
        yield from self._churn()
        yield from self._holes()
        close(self._sides)

    def _first_store(self) -> Figure:
        took: dict[str, list[int]] = {name: [] for name in self._sides}
        self._fill(took)
        for _ in range(1, self._effort.rounds if self._where.pairs <= REFILLED_PAIRS else 1):
            close(self._sides)
            self._sides = self._make()
            self._fill(took)
        return throughput("first store", self._where, self._where.pairs, took, Aim(3.0))

    def _fill(self, took: dict[str, list[int]]) -> None:
        """A round's CPU time is that of all parts: a table that grows makes some of them dear."""
        sums = dict.fromkeys(self._sides, 0)
        whole = np.arange(self._sequences.count)
        for part in np.array_split(whole, min(STORE_PARTS, len(whole))):
            batch = self._sequences.stores(part)
            for name, side in self._in_turn():
                sums[name] += side.run(batch)
        for name, cpu_ns in sums.items():
            took[name].append(cpu_ns)

    def _matches(self) -> Iterator[Figure]:
        count = self._effort.queries[self._where.blocks]
        asked = prompts(self._sequences, self._sequences.some(count))
        for kind, queries in asked.items():
            aim = FULL_HIT[self._where.blocks] if kind == "full hit" else HITS[kind]
            yield self._latency(f"match, {kind}", queries, aim)
            self.answers.compare(self._sides.values(), queries[:CHECKED])

    def _latency(self, measure: str, queries: Column, aim: Aim) -> Figure:
        ticks: dict[str, list[Column]] = {name: [] for name in self._sides}
        for _ in range(2):
            for start in range(0, len(queries), GROUP):
                for name, side in self._in_turn():
                    ticks[name].append(side.match(queries[start : start + GROUP]))
        together = {name: np.concatenate(own) for name, own in ticks.items()}
        return latency(measure, self._where, together, self._per_us, aim)

    def _changes(self) -> Iterator[Figure]:
        first = self._sequences.shared
        batches = (
            self._sequences.removes(self._chosen, first),
            self._sequences.stores(self._chosen, first),
        )
        yield from self._rounds(("remove", "re-store"), batches, Aim(1.5))

    def _single_blocks(self) -> Iterator[Figure]:
        batches = self._sequences.single_blocks(self._chosen[:200], STEPS)
        names = ("one-block stores", "one-block removals")
        yield from self._rounds(names, batches, Aim(), group=10 * GROUP)

    def _holes(self) -> Iterator[Figure]:
        batches = self._sequences.holes(self._chosen)
        for side in self._sides.values():
            side.run(batches[0])
        yield self._latency("match, holes", self._some_chosen(), Aim())
        self.answers.compare(self._sides.values(), self._some_chosen()[:CHECKED])
        for side in self._sides.values():
            side.run(batches[1])
        self.answers.compare(self._sides.values(), self._some_chosen()[:CHECKED])

    def _churn(self) -> Iterator[Figure]:
        half = len(self._chosen) // 2
        out, back = self._chosen[:half], self._chosen[half : 2 * half]
        first = self._sequences.shared
        for side in self._sides.values():
            side.run(self._sequences.removes(back, first))
        there = self._sequences.exchanges(out, back, first)
        again = self._sequences.exchanges(back, out, first)
        yield from self._rounds(("churn", "churn back"), (there, again), Aim(1.5))
        for side in self._sides.values():
            side.run(self._sequences.stores(back, first))
        yield self._latency("match, after churn", self._some_chosen(), Aim())

    def _some_chosen(self) -> Column:
        count = self._effort.queries[self._where.blocks]
        return np.ascontiguousarray(self._sequences.local[self._chosen[:count]])

    def _rounds(
        self, names: tuple[str, str], batches: tuple[Batch, Batch], aim: Aim, group: int = GROUP
    ) -> Iterator[Figure]:
        """Do a batch, and the one that undoes it, some times."""
        took: list[dict[str, list[int]]] = [{name: [] for name in self._sides} for _ in batches]
        for _ in range(self._effort.rounds):
            for batch, own in zip(batches, took, strict=True):
                sums = dict.fromkeys(self._sides, 0)
                for part in batch.groups(group):
                    for name, side in self._in_turn():
                        sums[name] += side.run(part)
                for name, cpu_ns in sums.items():
                    own[name].append(cpu_ns)
                self.answers.compare(self._sides.values(), self._some_chosen()[:CHECKED])
        for measure, batch, own in zip(names, batches, took, strict=True):
            where = self._where._replace(blocks=int(batch.rows["blocks"][0]))
            yield throughput(measure, where, batch.blocks, own, aim)

    def _in_turn(self) -> list[tuple[str, Side]]:
        self._turn += 1
        return in_turn(self._sides, self._turn)


def close(sides: dict[str, Side]) -> None:
    """Give back the memory of all sides."""
    for side in sides.values():
        side.close()


def in_turn(sides: dict[str, Side], turn: int) -> list[tuple[str, Side]]:
    """All sides, another one first each time."""
    named = list(sides.items())
    start = turn % len(named)
    return named[start:] + named[:start]


def replay(
    batch: Batch, sides: dict[str, Side], workers: int, per_us: float, answers: Answers
) -> Iterator[Figure]:
    """A trace's queries and events, interleaved."""
    took = dict.fromkeys(sides, 0)
    ticks: dict[str, list[Column]] = {name: [] for name in sides}
    for turn, part in enumerate(batch.groups(TRACE_GROUP)):
        asked = part.rows["kind"] == MATCH
        for name, side in in_turn(sides, turn):
            cpu_ns, own = side.replay(part)
            took[name] += cpu_ns
            ticks[name].append(own[asked])
        for query in _queries(part)[-GROUP:]:
            answers.compare(sides.values(), query[None, :])
    where = Where(0, workers, batch.blocks)
    totals = {name: [cpu_ns] for name, cpu_ns in took.items()}
    yield throughput("trace", where, batch.blocks, totals, Aim(1.2))
    together = {name: np.concatenate(own) for name, own in ticks.items()}
    yield latency("trace, matches", where, together, per_us, Aim())


def _queries(batch: Batch) -> list[Column]:
    return [
        np.ascontiguousarray(batch.local[row["start"] : row["start"] + row["blocks"]])
        for row in batch.rows
        if row["kind"] == MATCH
    ]


def token_scores(
    prompts: NDArray[np.uint32],
    block_size: int,
    sides: dict[str, Side],
    per_us: float,
    where: Where,
    aim: Aim,
) -> Figure:
    """From tokens to scores: hashes and match."""
    ticks: dict[str, list[Column]] = {name: [] for name in sides}
    for turn, start in enumerate([*range(0, len(prompts), GROUP)] * 3):
        part = prompts[start : start + GROUP]
        for name, side in in_turn(sides, turn):
            ticks[name].append(side.match_tokens(part, block_size))
    together = {name: np.concatenate(own) for name, own in ticks.items()}
    measure = f"tokens to scores, {prompts.shape[1] // 1024} k at {block_size}"
    return latency(measure, where, together, per_us, aim)
