"""Our index in the index benchmark: its kernels, timed in compiled code, and the reference.

The only module of the benchmark that uses internals of the index. The kernels are called from
kernels, as the peer is called from Rust, with the arguments that `Index` would pass.
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

from kvlane.indexer.block_hashes import BASE_SEED, local_hashes, prompt_keys
from kvlane.indexer.blocks.block_table import (
    MAX_LOAD_FACTOR,
    NEXT_CAPACITY,
    USED,
    BlockTable,
    copy_slots,
    empty_table,
    finish_growth,
    is_too_full,
    start_growth,
)
from kvlane.indexer.blocks.holder_sets import (
    COUNT,
    FREE,
    RETIRED,
    WORD_BITS,
    HolderSets,
    empty_sets,
    with_capacity,
)
from kvlane.indexer.blocks.prefix_keys import TIERS, KeyConstants, SearchScratch, new_scratch
from kvlane.indexer.blocks.prefix_search import RETRY, match_prefix
from kvlane.indexer.blocks.updates import ACCOUNT_WORDS, update_run
from kvlane.indexer.epochs import CacheId
from kvlane.indexer.events import CacheEvent, EventKind, Tier
from kvlane.indexer.kernels import inlined, kernel
from kvlane.indexer.native.xxh3_kernels import hash_rows
from workbench.bench.index.index_workload import (
    MATCH,
    SECRET,
    STORED,
    IndexSetup,
    OperationBatch,
    U64Column,
    make_sequences,
)
from workbench.bench.index.peers import BlocksByWorker, TokenArray
from workbench.reference_index import ReferenceIndex

MAX_PROMPT_BLOCKS = 1 << 14
"""The largest number of blocks of a prompt."""
CALIBRATION_S = 0.2
NO_BLOCK_LIMIT = 1 << 40
ALL_SLOTS = 1 << 40
KIND_COLUMN, WORKER_COLUMN, POSITION_COLUMN, _, START_COLUMN, BLOCKS_COLUMN = range(6)
"""Columns of a row of `OPERATION`."""


@intrinsic  # type: ignore[untyped-decorator]
def ticks_now(_: Any) -> Any:
    """The processor's time stamp counter, as the shim reads it."""

    def generate(_: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        of = ir.FunctionType(ir.IntType(64), [])
        return builder.call(builder.module.declare_intrinsic("llvm.readcyclecounter", [], of), [])

    return types.uint64(), generate


@kernel(types.uint64())
def ticks() -> Any:
    return ticks_now()


@cache
def ticks_per_us() -> float:
    """The frequency of the counter, which does not depend on the clock rate of the processor."""
    began, start = time.perf_counter(), ticks()
    time.sleep(CALIBRATION_S)
    return float((ticks() - start) / (time.perf_counter() - began) / 1e6)


def compile_kernels() -> None:
    side, cached = KernelIndex(1), make_sequences(IndexSetup(16, 1, 1 << 13))
    side.apply(cached.store_batch(np.arange(cached.sequence_count)))  # the table grows
    side.match(cached.local)
    side.matches(cached.local)
    for block_size in (16, 64):
        side.match_tokens(np.zeros((1, block_size), np.uint32), block_size)


class IndexArrays(NamedTuple):
    """The arrays of a lookup, without its prompt."""

    table: BlockTable
    sets: HolderSets
    live_columns: U64Column
    mixing: KeyConstants
    scratch: SearchScratch


@kernel()
def match_rows(state: IndexArrays, queries: U64Column, hot: U64Column, ticks: U64Column) -> None:
    """Look up each row from `hot`, where its hashes were just written, as in a router."""
    for i in range(len(queries)):
        for j in range(len(hot)):
            hot[j] = queries[i, j]
        began = ticks_now()
        match_prefix(
            state.table, state.sets, state.live_columns, state.mixing, hot, True, state.scratch
        )
        ticks[i] = ticks_now() - began


@kernel()
def match_prompts(
    state: IndexArrays,
    prompts: TokenArray,
    block_size: np.uint64,
    local: U64Column,
    ticks: U64Column,
) -> None:
    """Hash and look up each row of tokens; `local`: a buffer for the hashes of a row."""
    for i in range(len(prompts)):
        began = ticks_now()
        hash_rows(prompts[i], block_size, block_size, np.uint64(BASE_SEED), local)
        match_prefix(
            state.table, state.sets, state.live_columns, state.mixing, local, True, state.scratch
        )
        ticks[i] = ticks_now() - began


@kernel()
def run_operations(
    state: IndexArrays,
    rows: U64Column,
    at: int,
    local: U64Column,
    keys: U64Column,
    tags: U64Column,
    accounts: NDArray[np.uint64],
    ticks: U64Column,
) -> int:
    """Apply operations from row `at` on; the index of the first one without capacity, or the end.

    `ticks`: of each lookup, and in the last element of all operations, without the call itself.
    """
    table, sets = state.table, state.sets
    entered = ticks_now()
    while at < len(rows):
        worker: Any = np.int64(rows[at, WORKER_COLUMN])
        start, blocks = np.int64(rows[at, START_COLUMN]), np.int64(rows[at, BLOCKS_COLUMN])
        span, account = keys[start : start + blocks], accounts[worker]
        if rows[at, KIND_COLUMN] == np.uint64(MATCH):
            began = ticks_now()
            match_prefix(
                table, sets, state.live_columns, state.mixing, local[start : start + blocks], True,
                state.scratch,
            )  # fmt: skip
            ticks[at] = ticks_now() - began
        elif not has_capacity(state, blocks):
            break
        else:
            joins, position = (
                rows[at, KIND_COLUMN] == np.uint64(STORED),
                np.int64(rows[at, POSITION_COLUMN]),
            )
            update_run(
                table, sets, worker, joins, tags[worker], span, position, NO_BLOCK_LIMIT, account
            )
        at += 1
    ticks[len(rows)] += ticks_now() - entered
    return at


@inlined
def has_capacity(state: IndexArrays, blocks: int) -> bool:
    """Whether this number of blocks can be stored or removed without growth."""
    numbers = state.sets.state
    used = numbers[COUNT] - numbers[FREE] - numbers[RETIRED]
    if len(state.sets.references) < used + min(blocks, used):
        return False
    return state.table.state[USED] + blocks <= MAX_LOAD_FACTOR * state.table.state[NEXT_CAPACITY]


class KernelIndex:
    """The index of kvlane, as a `MeasuredIndex`."""

    name = "ours"

    def __init__(self, workers: int) -> None:
        words = -(-workers // WORD_BITS)
        columns = WORD_BITS * words
        self._state = IndexArrays(
            empty_table(),
            empty_sets(words),
            np.full(words, ~np.uint64(0)),
            KeyConstants(*(np.uint64(part) for part in SECRET[:4])),
            new_scratch(MAX_PROMPT_BLOCKS, columns),
        )
        self._tags = np.random.default_rng(1).integers(1, 1 << 63, columns, np.uint64)
        self._accounts = np.zeros((columns, ACCOUNT_WORDS), np.uint64)

    def apply(self, batch: OperationBatch) -> int:
        return self.replay(batch)[0]

    def replay(self, batch: OperationBatch) -> tuple[int, U64Column]:
        ticks = np.zeros(len(batch.rows) + 1, np.uint64)
        rows = batch.rows.view(np.uint64).reshape(len(batch.rows), -1)
        at, growing_ns = 0, 0
        while True:
            at = run_operations(
                self._state, rows, at, batch.local, batch.keys, self._tags, self._accounts, ticks
            )
            if at == len(rows):
                return growing_ns + int(1000 * int(ticks[-1]) / ticks_per_us()), ticks[:-1]
            began = time.thread_time_ns()
            self._make_room(int(rows[at, BLOCKS_COLUMN]))
            growing_ns += time.thread_time_ns() - began

    def match(self, queries: U64Column) -> U64Column:
        ticks = np.zeros(len(queries), np.uint64)
        match_rows(self._state, queries, np.empty(queries.shape[1], np.uint64), ticks)
        return ticks

    def match_tokens(self, prompts: TokenArray, block_size: int) -> U64Column:
        ticks = np.zeros(len(prompts), np.uint64)
        local = np.empty(prompts.shape[1] // block_size, np.uint64)
        match_prompts(self._state, prompts, np.uint64(block_size), local, ticks)
        return ticks

    def matches(self, queries: U64Column) -> list[BlocksByWorker]:
        return [self._answer(query) for query in queries]

    def close(self) -> None:
        del self._state

    def _answer(self, query: U64Column) -> BlocksByWorker:
        state = self._state
        count = match_prefix(
            state.table, state.sets, state.live_columns, state.mixing, query, True, state.scratch
        )
        assert count != RETRY
        depths = state.scratch.depths.reshape(-1, TIERS)[:count, 0]
        return dict(zip(state.scratch.columns[:count].tolist(), depths.tolist(), strict=True))

    def _make_room(self, blocks: int) -> None:
        table, sets = self._state.table, self._state.sets
        if is_too_full(table, blocks):
            table = start_growth(table, blocks)
            copy_slots(table, ALL_SLOTS)
            table = finish_growth(table)
        sets = with_capacity(sets, min(blocks, sets.used_sets + 1), sets.column_capacity)
        self._state = self._state._replace(table=table, sets=sets)


class DictIndex:
    """The index in plain dicts, as a `MeasuredIndex`: for its answers, not for its latency."""

    name = "reference"

    def __init__(self) -> None:
        self._index = ReferenceIndex()
        self._next: dict[CacheId, int] = {}

    def apply(self, batch: OperationBatch) -> int:
        began = time.thread_time_ns()
        for row in batch.rows:
            self._apply(batch, row)
        return time.thread_time_ns() - began

    def match(self, queries: U64Column) -> U64Column:
        return np.array([self._timed(query) for query in queries], np.uint64)

    def replay(self, batch: OperationBatch) -> tuple[int, U64Column]:
        ticks = np.zeros(len(batch.rows), np.uint64)
        began = time.thread_time_ns()
        for i, row in enumerate(batch.rows):
            if row["kind"] == MATCH:
                ticks[i] = self._timed(batch.local[_span(row)])
            else:
                self._apply(batch, row)
        return time.thread_time_ns() - began, ticks

    def match_tokens(self, prompts: TokenArray, block_size: int) -> U64Column:
        return self.match(np.array([local_hashes(prompt, block_size) for prompt in prompts]))

    def matches(self, queries: U64Column) -> list[BlocksByWorker]:
        found = [self._index.match_prefix(prompt_keys(query, SECRET).tolist()) for query in queries]
        return [
            {int(h.worker): overlap.total_blocks for h, overlap in one.items()} for one in found
        ]

    def close(self) -> None:
        """See `MeasuredIndex`."""

    def _timed(self, query: U64Column) -> int:
        """Nanoseconds in place of ticks; they are never compared."""
        began = time.perf_counter_ns()
        self._index.match_prefix(prompt_keys(query, SECRET).tolist())
        return time.perf_counter_ns() - began

    def _apply(self, batch: OperationBatch, row: np.void) -> None:
        holder = CacheId(str(row["worker"]), 0)
        kind = EventKind.STORED if row["kind"] == STORED else EventKind.REMOVED
        event = CacheEvent(
            kind, Tier.DEVICE, int(row["position"]), tuple(batch.keys[_span(row)].tolist())
        )
        number = self._next.get(holder, 0)
        self._index.apply_events(0, holder, 1, number, [event])
        self._next[holder] = number + 1


def _span(row: np.void) -> slice:
    return slice(int(row["start"]), int(row["start"] + row["blocks"]))
