"""The index compared with Dynamo's: matches, updates, tokens to scores, a trace, memory.

The peer is the crate `dynamo-kv-router` as a library in this process (`workbench/peers`), with the
structure that is best at each measure. Both get the same arrays and are timed inside compiled code,
without Python dispatch. All answers are compared. Without a peer only our index is measured, its
answers are compared with the reference index, and every threshold that needs the peer counts as
failed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvlane.app.commands.simulation.simulation_report import machine_info
from kvlane.app.traces.mooncake_trace import BUNDLED_TRACE
from kvlane.indexer.block_hashes import local_hashes
from workbench.bench.bench_environment import PrintLine
from workbench.bench.index.comparison import OUR_INDEX, IndexFigure, RatioTarget, thresholds
from workbench.bench.index.index_workload import (
    CachedSequences,
    IndexSetup,
    TraceFleet,
    make_sequences,
    trace_operations,
)
from workbench.bench.index.kernel_timing import (
    DictIndex,
    KernelIndex,
    compile_kernels,
    ticks_per_us,
)
from workbench.bench.index.measurements import (
    MISS_LIMIT_US,
    AnswerComparison,
    IndexMeasurements,
    Repetitions,
    close_sides,
    replay_trace,
    token_scores,
)
from workbench.bench.index.memory_per_block import bytes_per_pair
from workbench.bench.index.peers import (
    CRATE_NAME,
    CrateIndex,
    MeasuredIndex,
    PeerCrate,
    PeerStructure,
    PeerUnavailable,
    load_crate,
)
from workbench.bench.index.record_rates import record_rates
from workbench.bench.report import Report, Threshold, at_least, at_most

BYTES_PER_PAIR_LIMIT = 36.0
RECORD_BLOCKS = (128, 1024, 8192)
MIN_RECORD_BLOCKS_PER_S = 10.0
REFERENCE_SETUP = IndexSetup(64, 8, 20_000)
"""A size that the reference, an index in plain dicts, can handle."""
TREE_STRUCTURES = (PeerStructure.TREE, PeerStructure.CONCURRENT)
MILLION = 1_000_000
LARGE_PAIRS = 10 * MILLION
"""Pairs for the measurement of memory."""


class TokenScoreScale(NamedTuple):
    """Prompts from tokens to scores; `min_ratio` as in `RatioTarget`."""

    tokens: int
    block_size: int
    prompts: int
    min_ratio: float


TOKENS = (
    TokenScoreScale(1 << 10, 16, 400, 1.5),
    TokenScoreScale(1 << 14, 16, 200, 1.5),
    TokenScoreScale(1 << 16, 64, 40, 3.0),
)
TOKEN_WORKERS = 64


class IndexScale(NamedTuple):
    """Amount of work. `trace_fleets`: the fleets that replay the trace."""

    grid: tuple[IndexSetup, ...]
    repetitions: Repetitions
    trace_fleets: tuple[TraceFleet, ...]
    structures: tuple[PeerStructure, ...]


QUICK = IndexScale(
    grid=(
        IndexSetup(64, 64, MILLION),
        IndexSetup(1024, 64, MILLION),
        IndexSetup(8192, 64, MILLION),
        IndexSetup(64, 512, MILLION),
        IndexSetup(64, 64, 10 * MILLION),
    ),
    repetitions=Repetitions({64: 1000, 1024: 500, 8192: 100}, rounds=5),
    trace_fleets=(TraceFleet(64, 512, 6000),),
    structures=TREE_STRUCTURES,
)
FULL = IndexScale(
    grid=tuple(
        IndexSetup(blocks, workers, pairs)
        for pairs in (MILLION, 10 * MILLION)
        for blocks in (64, 1024, 8192)
        for workers in (8, 64, 512, 1024)
    ),
    repetitions=Repetitions({64: 1000, 1024: 1000, 8192: 200}, rounds=7),
    trace_fleets=(
        TraceFleet(8, 2048, 6000),
        TraceFleet(64, 512, 12000),
        TraceFleet(512, 128, 12000),
    ),
    structures=tuple(PeerStructure),
)


async def bench_index(
    scale: IndexScale,
    print_line: PrintLine,
    progress: Callable[[float], None],
    *,
    peers: bool = False,
    trace: Path | None = None,
) -> Report:
    """Run it; `progress` gets shares of the whole."""
    crate = None
    if peers:
        try:
            crate = load_crate(print_line)
        except PeerUnavailable as e:
            print_line(f"no comparison with {CRATE_NAME}: {e}")
    return IndexBench(scale, crate, trace or BUNDLED_TRACE).run(progress)


class IndexBench:
    def __init__(self, form: IndexScale, crate: PeerCrate | None, trace: Path) -> None:
        self._form = form
        self._crate = crate
        self._trace = trace
        self._answers = AnswerComparison()
        self._per_us = ticks_per_us()
        self._chained = crate.chain_hashes if crate else None

    def run(self, progress: Callable[[float], None]) -> Report:
        """Run all parts, of about equal duration."""
        compile_kernels()
        parts: list[Callable[[], Iterator[IndexFigure]]] = [
            *((lambda where=where: self._course(where)) for where in self._form.grid),
            self._held_against_the_reference,
            self._tokens,
            *(
                (lambda setting=setting: self._replay(setting))
                for setting in self._form.trace_fleets
            ),
            self._memory,
            lambda: record_rates(RECORD_BLOCKS),
        ]
        figures: list[IndexFigure] = []
        for part in parts:
            figures += part()
            progress(1 / len(parts))
        return Report(
            "index",
            [figure.row() for figure in figures],
            self._bars(figures),
            {
                **machine_info(),
                "load": os.getloadavg()[0],
                "peer": CRATE_NAME if self._crate else None,
            },
        )

    def _sides(self, where: IndexSetup) -> dict[str, MeasuredIndex]:
        sides: dict[str, MeasuredIndex] = {OUR_INDEX: KernelIndex(where.workers)}
        if self._crate:
            for structure in self._form.structures:
                peer = CrateIndex(self._crate, structure, where.workers)
                sides[peer.name] = peer
        return sides

    def _course(self, where: IndexSetup) -> Iterator[IndexFigure]:
        course = IndexMeasurements(
            make_sequences(where, self._chained),
            lambda: self._sides(where),
            self._form.repetitions,
            self._per_us,
            self._answers,
        )
        yield from course.figures()

    def _held_against_the_reference(self) -> Iterator[IndexFigure]:
        course = IndexMeasurements(
            make_sequences(REFERENCE_SETUP),
            lambda: {OUR_INDEX: KernelIndex(REFERENCE_SETUP.workers), "reference": DictIndex()},
            Repetitions({REFERENCE_SETUP.blocks: 100}, rounds=1),
            self._per_us,
            self._answers,
        )
        for _ in course.figures():
            pass
        yield from ()

    def _tokens(self) -> Iterator[IndexFigure]:
        where = IndexSetup(1024, TOKEN_WORKERS, MILLION)
        for form in TOKENS:
            sides = self._sides(where)
            rng = np.random.default_rng(form.tokens)
            prompts = rng.integers(0, 150_000, (form.prompts, form.tokens), np.uint32)
            local = np.array([local_hashes(prompt, form.block_size) for prompt in prompts])
            own = CachedSequences(local, where.workers, 0, self._chained)
            for cached in (make_sequences(where, self._chained), own):
                batch = cached.store_batch(np.arange(cached.sequence_count))
                for side in sides.values():
                    side.apply(batch)
            self._answers.compare(sides.values(), own.local[:20])
            if self._crate:
                theirs = self._crate.local_hashes(prompts[0], form.block_size)
                self._answers.compare_rows(local[0].tolist(), theirs.tolist())
            aim = RatioTarget(form.min_ratio)
            where_own = where._replace(blocks=own.depth)
            yield token_scores(prompts, form.block_size, sides, self._per_us, where_own, aim)
            close_sides(sides)

    def _replay(self, setting: TraceFleet) -> Iterator[IndexFigure]:
        batch = trace_operations(self._trace, setting, self._chained)
        sides = self._sides(IndexSetup(0, setting.workers, 0))
        yield from replay_trace(batch, sides, setting.workers, self._per_us, self._answers)
        close_sides(sides)

    def _memory(self) -> Iterator[IndexFigure]:
        where = IndexSetup(64, 64, LARGE_PAIRS)
        yield bytes_per_pair(where, TREE_STRUCTURES if self._crate else ())

    def _bars(self, figures: list[IndexFigure]) -> list[Threshold]:
        answers = self._answers
        misses = max(f.ours.median for f in figures if f.measure == "match, miss")
        memory = next(f.ours.median for f in figures if f.measure == "memory")
        return [
            Threshold("answers that differ", answers.differing, f"of {answers.compared}", "0",
                not answers.differing and answers.compared > 0),
            *thresholds(f for f in figures if f.measure not in ("match, miss", "memory")),
            at_most("match, miss", misses, "us", MISS_LIMIT_US),
            at_most("memory", memory, "B a pair", BYTES_PER_PAIR_LIMIT),
            *(_record_bar(f) for f in figures if f.measure == "records"),
        ]  # fmt: skip


def _record_bar(figure: IndexFigure) -> Threshold:
    value = figure.ours.median
    name = f"records of {figure.setup.blocks} blocks"
    return at_least(name, value, "M blocks/s", MIN_RECORD_BLOCKS_PER_S)
