"""Our side of the index bench: the kernels of the index, timed where they run, and the reference.

The only module of the bench that knows what the index is made of. The kernels are called from
kernels, as the peer is called from Rust, and get what they would from the class around them.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from app.bench.index_sides import Answer, Tokens
from app.bench.index_work import MATCH, SECRET, STORED, Batch, Column, Where, sequences
from indexer.changes import ACCOUNT_WORDS, change
from indexer.events import Event, Kind, Tier
from indexer.hash_kernels import hash_rows
from indexer.hashing import BASE_SEED, local_hashes
from indexer.kernels import inlined, kernel
from indexer.keys import prompt_keys
from indexer.lives import Holder
from indexer.prefixes import Mixing, Scratch, new_scratch
from indexer.reference import ReferenceIndex
from indexer.search import RETRY, match
from indexer.sets import COUNT, FREE, RETIRED, WORD_BITS, Sets, new_sets, with_room
from indexer.table import (
    LOAD,
    NEXT_CAPACITY,
    USED,
    Table,
    grow,
    grown,
    needs_room,
    new_table,
    settled,
)

LONGEST = 1 << 14
"""Blocks of a prompt, at most."""
CALIBRATION_S = 0.2
UNLIMITED = 1 << 40
ALL_SLOTS = 1 << 40
KIND, WORKER, POSITION, _, START, BLOCKS = range(6)
"""Places in a row of `OPERATION`."""


@intrinsic  # type: ignore[untyped-decorator]
def ticks_now(_: Any) -> Any:
    """The processor's time stamp counter, as the shim reads it."""

    def generate(_: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        of = ir.FunctionType(ir.IntType(64), [])
        return builder.call(builder.module.declare_intrinsic("llvm.readcyclecounter", [], of), [])

    return types.uint64(), generate


@kernel(types.uint64())
def ticks() -> Any:
    """For the calibration."""
    return ticks_now()


@cache
def ticks_per_us() -> float:
    """How fast the counter counts, which does not change with the processor's clock."""
    began, start = time.perf_counter(), ticks()
    time.sleep(CALIBRATION_S)
    return float((ticks() - start) / (time.perf_counter() - began) / 1e6)


def warm_up() -> None:
    """Have everything compiled that is timed here."""
    side, cached = Kernels(1), sequences(Where(16, 1, 1 << 13))
    side.run(cached.stores(np.arange(cached.count)))  # the table grows
    side.match(cached.local)
    side.answers(cached.local)
    for block_size in (16, 64):
        side.match_tokens(np.zeros((1, block_size), np.uint32), block_size)


class State(NamedTuple):
    """What a lookup needs, beside its prompt."""

    table: Table
    sets: Sets
    alive: Column
    mixing: Mixing
    scratch: Scratch


@kernel()
def match_rows(state: State, queries: Column, hot: Column, ticks: Column) -> None:
    """Look up each row, from `hot`, where its hashes were just written, as a router's are."""
    for i in range(len(queries)):
        for j in range(len(hot)):
            hot[j] = queries[i, j]
        began = ticks_now()
        match(state.table, state.sets, state.alive, state.mixing, hot, True, state.scratch)
        ticks[i] = ticks_now() - began


@kernel()
def match_prompts(
    state: State, prompts: Tokens, block_size: np.uint64, local: Column, ticks: Column
) -> None:
    """Hash and look up each row of tokens; `local` has room for the hashes of one."""
    for i in range(len(prompts)):
        began = ticks_now()
        hash_rows(prompts[i], block_size, block_size, np.uint64(BASE_SEED), local)
        match(state.table, state.sets, state.alive, state.mixing, local, True, state.scratch)
        ticks[i] = ticks_now() - began


@kernel()
def operate(
    state: State,
    rows: Column,
    at: int,
    local: Column,
    keys: Column,
    tags: Column,
    accounts: NDArray[np.uint64],
    ticks: Column,
) -> int:
    """Do the operations from row `at` on; the first one that there is no room for, or all.

    `ticks`: of each lookup; and behind them, of all there is, as the peer's: without the call.
    """
    table, sets = state.table, state.sets
    entered = ticks_now()
    while at < len(rows):
        worker: Any = np.int64(rows[at, WORKER])
        start, blocks = np.int64(rows[at, START]), np.int64(rows[at, BLOCKS])
        span, account = keys[start : start + blocks], accounts[worker]
        if rows[at, KIND] == np.uint64(MATCH):
            began = ticks_now()
            match(
                table, sets, state.alive, state.mixing, local[start : start + blocks], True,
                state.scratch,
            )  # fmt: skip
            ticks[at] = ticks_now() - began
        elif not has_room(state, blocks):
            break
        else:
            joins, position = rows[at, KIND] == np.uint64(STORED), np.int64(rows[at, POSITION])
            change(table, sets, worker, joins, tags[worker], span, position, UNLIMITED, account)
        at += 1
    ticks[len(rows)] += ticks_now() - entered
    return at


@inlined
def has_room(state: State, blocks: int) -> bool:
    """Whether so many blocks can be stored or removed without growing first."""
    numbers = state.sets.state
    used = numbers[COUNT] - numbers[FREE] - numbers[RETIRED]
    if len(state.sets.references) < used + min(blocks, used):
        return False
    return state.table.state[USED] + blocks <= LOAD * state.table.state[NEXT_CAPACITY]


class Kernels:
    """The index of kvlane, as a `Side`."""

    name = "ours"

    def __init__(self, workers: int) -> None:
        words = -(-workers // WORD_BITS)
        columns = WORD_BITS * words
        self._state = State(
            new_table(), new_sets(words), np.full(words, ~np.uint64(0)),
            Mixing(*(np.uint64(part) for part in SECRET[:4])), new_scratch(LONGEST, columns),
        )  # fmt: skip
        self._tags = np.random.default_rng(1).integers(1, 1 << 63, columns, np.uint64)
        self._accounts = np.zeros((columns, ACCOUNT_WORDS), np.uint64)

    def run(self, batch: Batch) -> int:
        """See `Side`."""
        return self.replay(batch)[0]

    def replay(self, batch: Batch) -> tuple[int, Column]:
        """See `Side`."""
        ticks = np.zeros(len(batch.rows) + 1, np.uint64)
        rows = batch.rows.view(np.uint64).reshape(len(batch.rows), -1)
        at, growing_ns = 0, 0
        while True:
            at = operate(
                self._state, rows, at, batch.local, batch.keys, self._tags, self._accounts, ticks
            )
            if at == len(rows):
                return growing_ns + int(1000 * int(ticks[-1]) / ticks_per_us()), ticks[:-1]
            began = time.thread_time_ns()
            self._make_room(int(rows[at, BLOCKS]))
            growing_ns += time.thread_time_ns() - began

    def match(self, queries: Column) -> Column:
        """See `Side`."""
        ticks = np.zeros(len(queries), np.uint64)
        match_rows(self._state, queries, np.empty(queries.shape[1], np.uint64), ticks)
        return ticks

    def match_tokens(self, prompts: Tokens, block_size: int) -> Column:
        """See `Side`."""
        ticks = np.zeros(len(prompts), np.uint64)
        local = np.empty(prompts.shape[1] // block_size, np.uint64)
        match_prompts(self._state, prompts, np.uint64(block_size), local, ticks)
        return ticks

    def answers(self, queries: Column) -> list[Answer]:
        """See `Side`."""
        return [self._answer(query) for query in queries]

    def close(self) -> None:
        """See `Side`."""
        del self._state

    def _answer(self, query: Column) -> Answer:
        state = self._state
        count = match(
            state.table, state.sets, state.alive, state.mixing, query, True, state.scratch
        )
        assert count != RETRY
        found = state.scratch.out[:count].tolist()
        return {word >> 32: word & 0xFFFFFFFF for word in found}

    def _make_room(self, blocks: int) -> None:
        table, sets = self._state.table, self._state.sets
        if needs_room(table, blocks):
            table = grown(table, blocks)
            grow(table, ALL_SLOTS)
            table = settled(table)
        sets = with_room(sets, min(blocks, sets.used + 1), sets.columns)
        self._state = self._state._replace(table=table, sets=sets)


class Reference:
    """The index in plain dicts, as a `Side`: for its answers, not for its times."""

    name = "reference"

    def __init__(self) -> None:
        self._index = ReferenceIndex()
        self._next: dict[Holder, int] = {}

    def run(self, batch: Batch) -> int:
        """See `Side`."""
        began = time.thread_time_ns()
        for row in batch.rows:
            self._apply(batch, row)
        return time.thread_time_ns() - began

    def match(self, queries: Column) -> Column:
        """See `Side`."""
        return np.array([self._timed(query) for query in queries], np.uint64)

    def replay(self, batch: Batch) -> tuple[int, Column]:
        """See `Side`."""
        ticks = np.zeros(len(batch.rows), np.uint64)
        began = time.thread_time_ns()
        for i, row in enumerate(batch.rows):
            if row["kind"] == MATCH:
                ticks[i] = self._timed(batch.local[_span(row)])
            else:
                self._apply(batch, row)
        return time.thread_time_ns() - began, ticks

    def match_tokens(self, prompts: Tokens, block_size: int) -> Column:
        """See `Side`."""
        return self.match(np.array([local_hashes(prompt, block_size) for prompt in prompts]))

    def answers(self, queries: Column) -> list[Answer]:
        """See `Side`."""
        found = [self._index.match(prompt_keys(query, SECRET).tolist()) for query in queries]
        return [{int(h.worker): overlap.blocks for h, overlap in one.items()} for one in found]

    def close(self) -> None:
        """See `Side`."""

    def _timed(self, query: Column) -> int:
        """In nanoseconds, which only look like ticks: nobody compares them."""
        began = time.perf_counter_ns()
        self._index.match(prompt_keys(query, SECRET).tolist())
        return time.perf_counter_ns() - began

    def _apply(self, batch: Batch, row: np.void) -> None:
        holder = Holder(str(row["worker"]), 0)
        kind = Kind.STORED if row["kind"] == STORED else Kind.REMOVED
        event = Event(
            kind, Tier.DEVICE, int(row["position"]), tuple(batch.keys[_span(row)].tolist())
        )
        number = self._next.get(holder, 0)
        self._index.apply(0, holder, 1, number, [event])
        self._next[holder] = number + 1


def _span(row: np.void) -> slice:
    return slice(int(row["start"]), int(row["start"] + row["blocks"]))
