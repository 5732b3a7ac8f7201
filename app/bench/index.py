"""What the index costs, beside Dynamo's: matches, changes, tokens to scores, a trace, memory.

The peer is the crate `dynamo-kv-router` as a library in this process (`tests/peers`), by that of
its structures which is best at a measure. Both are given the same arrays and timed inside, so no
dispatch from Python is in the figures; what that adds is measured by itself. All answers are
compared. Without a peer ours is measured alone, its answers are held against the reference index,
and every bar that needs the peer counts as not met.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from app.bench.ground import Said
from app.bench.index_alone import PAUSE_MS, calls, reader_pauses, records
from app.bench.index_figures import OURS, Aim, Figure, bars
from app.bench.index_memory import bytes_a_pair
from app.bench.index_rounds import MISS_US, Answers, Course, Effort, close, replay, token_scores
from app.bench.index_sides import CRATE, Crate, NoPeer, Peer, Side, Structure, load
from app.bench.index_timing import Kernels, Reference, ticks_per_us, warm_up
from app.bench.index_work import Sequences, Setting, Where, replayed, sequences
from app.bench.report import Bar, Report, machine
from app.trace import SHIPPED
from indexer.hashing import local_hashes

BYTES_A_PAIR = 36.0
RECORD_BLOCKS = (128, 1024, 8192)
RECORDS_PER_S = 10.0
SMALL = Where(64, 8, 20_000)
"""What the reference can follow: an index in plain dicts."""
TREES = (Structure.TREE, Structure.CONCURRENT)
M = 1_000_000
LARGE = 10 * M
"""Pairs that memory and pauses are measured with."""


class TokenForm(NamedTuple):
    """Prompts from tokens to scores; `least` as in `Aim`."""

    tokens: int
    block_size: int
    prompts: int
    least: float


TOKENS = (
    TokenForm(1 << 10, 16, 400, 1.5),
    TokenForm(1 << 14, 16, 200, 1.5),
    TokenForm(1 << 16, 64, 40, 3.0),
)
TOKEN_WORKERS = 64


class Form(NamedTuple):
    """How much is measured. `settings`: the fleets that replay the trace."""

    grid: tuple[Where, ...]
    effort: Effort
    settings: tuple[Setting, ...]
    structures: tuple[Structure, ...]


QUICK = Form(
    grid=(
        Where(64, 64, M), Where(1024, 64, M), Where(8192, 64, M), Where(64, 512, M),
        Where(64, 64, 10 * M),
    ),
    effort=Effort({64: 1000, 1024: 500, 8192: 100}, rounds=5),
    settings=(Setting(64, 512, 6000),),
    structures=TREES,
)  # fmt: skip
FULL = Form(
    grid=tuple(
        Where(blocks, workers, pairs)
        for pairs in (M, 10 * M)
        for blocks in (64, 1024, 8192)
        for workers in (8, 64, 512, 1024)
    ),
    effort=Effort({64: 1000, 1024: 1000, 8192: 200}, rounds=7),
    settings=(Setting(8, 2048, 6000), Setting(64, 512, 12000), Setting(512, 128, 12000)),
    structures=tuple(Structure),
)


async def index(
    form: Form,
    said: Said,
    progress: Callable[[float], None],
    *,
    peers: bool = False,
    trace: Path | None = None,
) -> Report:
    """Measure. `progress` hears of shares of the whole."""
    crate = None
    if peers:
        try:
            crate = load(said)
        except NoPeer as e:
            said(f"not compared with {CRATE}: {e}")
    return Bench(form, crate, trace or SHIPPED).report(progress)


async def pauses(progress: Callable[[float], None]) -> Report:
    """Measure how long readers wait, and nothing else."""
    figures = reader_pauses(LARGE, progress)
    met = [
        Bar(f.measure, f.ours.middle, "ms", f"<= {PAUSE_MS:g}", f.ours.middle <= PAUSE_MS)
        for f in figures
        if "idle" not in f.measure and "elsewhere" not in f.measure
    ]
    return Report("index pauses", [f.row() for f in figures], met)


class Bench:
    """One run of all of it."""

    def __init__(self, form: Form, crate: Crate | None, trace: Path) -> None:
        self._form = form
        self._crate = crate
        self._trace = trace
        self._answers = Answers()
        self._per_us = ticks_per_us()
        self._chained = crate.chained if crate else None

    def report(self, progress: Callable[[float], None]) -> Report:
        """Everything, in parts of about equal shares."""
        warm_up()
        parts: list[Callable[[], Iterator[Figure]]] = [
            *((lambda where=where: self._course(where)) for where in self._form.grid),
            self._held_against_the_reference,
            self._tokens,
            *((lambda setting=setting: self._replay(setting)) for setting in self._form.settings),
            self._memory,
            lambda: records(RECORD_BLOCKS),
            lambda: calls(self._form.effort.queries, self._answers, peers=self._crate is not None),
        ]
        figures: list[Figure] = []
        for part in parts:
            figures += part()
            progress(1 / len(parts))
        return Report(
            "index",
            [figure.row() for figure in figures],
            self._bars(figures),
            {**machine(), "load": os.getloadavg()[0], "peer": CRATE if self._crate else None},
        )

    def _sides(self, where: Where) -> dict[str, Side]:
        sides: dict[str, Side] = {OURS: Kernels(where.workers)}
        if self._crate:
            for structure in self._form.structures:
                peer = Peer(self._crate, structure, where.workers)
                sides[peer.name] = peer
        return sides

    def _course(self, where: Where) -> Iterator[Figure]:
        course = Course(
            sequences(where, self._chained), lambda: self._sides(where), self._form.effort,
            self._per_us, self._answers,
        )  # fmt: skip
        yield from course.measures()

    def _held_against_the_reference(self) -> Iterator[Figure]:
        course = Course(
            sequences(SMALL), lambda: {OURS: Kernels(SMALL.workers), "reference": Reference()},
            Effort({SMALL.blocks: 100}, rounds=1), self._per_us, self._answers,
        )  # fmt: skip
        for _ in course.measures():
            pass
        yield from ()

    def _tokens(self) -> Iterator[Figure]:
        where = Where(1024, TOKEN_WORKERS, M)
        for form in TOKENS:
            sides = self._sides(where)
            rng = np.random.default_rng(form.tokens)
            prompts = rng.integers(0, 150_000, (form.prompts, form.tokens), np.uint32)
            local = np.array([local_hashes(prompt, form.block_size) for prompt in prompts])
            own = Sequences(local, where.workers, 0, self._chained)
            for cached in (sequences(where, self._chained), own):
                batch = cached.stores(np.arange(cached.count))
                for side in sides.values():
                    side.run(batch)
            self._answers.compare(sides.values(), own.local[:20])
            if self._crate:
                theirs = self._crate.local_hashes(prompts[0], form.block_size)
                self._answers.hold(local[0].tolist(), theirs.tolist())
            aim = Aim(form.least)
            where_own = where._replace(blocks=own.depth)
            yield token_scores(prompts, form.block_size, sides, self._per_us, where_own, aim)
            close(sides)

    def _replay(self, setting: Setting) -> Iterator[Figure]:
        batch = replayed(self._trace, setting, self._chained)
        sides = self._sides(Where(0, setting.workers, 0))
        yield from replay(batch, sides, setting.workers, self._per_us, self._answers)
        close(sides)

    def _memory(self) -> Iterator[Figure]:
        where = Where(64, 64, LARGE)
        yield bytes_a_pair(where, TREES if self._crate else ())

    def _bars(self, figures: list[Figure]) -> list[Bar]:
        answers = self._answers
        misses = max(f.ours.middle for f in figures if f.measure == "match, miss")
        memory = next(f.ours.middle for f in figures if f.measure == "memory")
        return [
            Bar("answers that differ", answers.differing, f"of {answers.compared}", "0",
                not answers.differing and answers.compared > 0),
            *bars(f for f in figures if f.measure not in ("match, miss", "memory")),
            Bar("match, miss", misses, "us", f"<= {MISS_US:g}", misses <= MISS_US),
            Bar("memory", memory, "B a pair", f"<= {BYTES_A_PAIR:g}", memory <= BYTES_A_PAIR),
            *(_record_bar(f) for f in figures if f.measure == "records"),
        ]  # fmt: skip


def _record_bar(figure: Figure) -> Bar:
    value = figure.ours.middle
    name = f"records of {figure.where.blocks} blocks"
    return Bar(name, value, "M blocks/s", f">= {RECORDS_PER_S:g}", value >= RECORDS_PER_S)
