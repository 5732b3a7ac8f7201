"""Workload of the index benchmark: operations on generated caches, and those of a trace.

An operation stores or removes blocks of a worker, or looks up a prompt. Its blocks are in columns
that many operations share: *local* hashes, *chain* hashes (which name blocks in Dynamo's events)
and *keys* (in ours), so that no side has to compute the contents of its events. Pure; nothing is
measured here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlane.app.traces.mooncake_trace import read_trace
from kvlane.indexer.block_hashes import LOOPBACK_SECRET, derive_secret, prompt_keys

STORED, REMOVED, MATCH = range(3)
OPERATION = np.dtype(
    [(name, "<u8") for name in ("kind", "worker", "position", "parent", "start", "blocks")]
)
"""`blocks`: the number of blocks from `start` in the columns; `position`: of the first one in its
prompt; `parent`: the chain hash of the block before it."""
SECRET = derive_secret(LOOPBACK_SECRET)

SHARED_PREFIXES = 32
SHARED_FRACTION = 0.25
"""The share of each sequence that is one of SHARED_PREFIXES prefixes."""
BLOCKS_PER_CHUNK = 32
"""A number in a trace stands for 512 tokens: this many blocks of 16."""

U64Column = NDArray[np.uint64]
ChainHasher = Callable[[U64Column], U64Column]
"""A function from rows of local hashes to rows of chain hashes."""


class OperationBatch(NamedTuple):
    """Operations, and the columns that they point into."""

    rows: NDArray[np.void]
    local: U64Column
    chain: U64Column
    keys: U64Column

    @property
    def blocks(self) -> int:
        return int(self.rows["blocks"].sum())

    def subset(self, rows: slice | NDArray[np.intp]) -> OperationBatch:
        return self._replace(rows=np.ascontiguousarray(self.rows[rows]))

    def groups(self, size: int) -> Iterator[OperationBatch]:
        """All operations in groups of this size."""
        for start in range(0, len(self.rows), size):
            yield self.subset(slice(start, start + size))


def splitmix64(numbers: U64Column) -> U64Column:
    """Pseudo-random numbers, one per input: the finalizer of splitmix64 (Steele et al. 2014)."""
    x = numbers.copy()
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uncached_hashes(count: int, depth: int, series: int = 0) -> U64Column:
    """Local hashes of uncached blocks: (prompts, depth); different in each series."""
    prompt = np.arange(count, dtype=np.uint64)[:, None] << np.uint64(24)
    return splitmix64(
        np.uint64((0xBAD0 + series) << 48) | prompt | np.arange(depth, dtype=np.uint64)
    )


class IndexSetup(NamedTuple):
    """A set-up: blocks of a prompt or of an event, workers, (worker, block) pairs."""

    blocks: int
    workers: int
    pairs: int


def make_sequences(setup: IndexSetup, chain_hasher: ChainHasher | None = None) -> CachedSequences:
    """Prompts of `blocks` blocks, whose first quarter is shared by a group; about `pairs`."""
    count = max(setup.pairs // setup.blocks, 1)
    shared = round(setup.blocks * SHARED_FRACTION)
    group = np.random.default_rng(42).integers(0, SHARED_PREFIXES, count).astype(np.uint64)[:, None]
    number = np.arange(1, count + 1, dtype=np.uint64)[:, None]
    block = np.arange(setup.blocks, dtype=np.uint64)[None, :]
    beginning = np.uint64(1 << 60) | (group << np.uint64(32))
    numbers = np.where(block < np.uint64(shared), beginning, number << np.uint64(32)) | block
    return CachedSequences(splitmix64(numbers), setup.workers, shared, chain_hasher)


class CachedSequences:
    """Cached prompts of one length, sequence s on worker s mod `workers`.

    `local`: u64 (sequences, blocks), of which the first `shared_blocks` are in other sequences,
    too. `chain_hasher`: computes chain hashes; without it the local hashes take their place.
    """

    def __init__(
        self, local: U64Column, workers: int, shared: int, chained: ChainHasher | None = None
    ) -> None:
        self.sequence_count, self.depth = local.shape
        self.workers = workers
        self.shared_blocks = shared
        self.local = local
        self._chained = chained
        self._rng = np.random.default_rng(1)
        self.chain, self.keys = self._named(local)

    @property
    def pairs(self) -> int:
        """The number of distinct (worker, block) pairs."""
        worker = np.arange(self.sequence_count, dtype=np.uint64) % np.uint64(self.workers)
        beginnings = len(set(zip(worker.tolist(), self.local[:, 0].tolist(), strict=True)))
        return int(
            self.sequence_count * (self.depth - self.shared_blocks)
            + beginnings * self.shared_blocks
        )

    def random_subset(self, count: int) -> NDArray[np.intp]:
        """Indexes of distinct sequences, in random order."""
        return self._rng.permutation(self.sequence_count)[:count]

    def store_batch(self, which: NDArray[np.intp], first: int = 0) -> OperationBatch:
        """Each of these sequences from its block `first` on, in one event."""
        rows = self._rows(STORED, which, self.depth - first)
        rows["position"] = first
        rows["start"] = which * self.depth + first
        if first:
            rows["parent"] = self.chain[which, first - 1]
        return OperationBatch(rows, *self._columns())

    def remove_batch(self, which: NDArray[np.intp], first: int = 0) -> OperationBatch:
        """Removals of the same blocks, the last block first, as engines evict them."""
        blocks = self.depth - first
        rows = self._rows(REMOVED, which, blocks)
        rows["start"] = np.arange(len(which)) * blocks
        local, chain, keys = (
            np.ascontiguousarray(column[which, first:][:, ::-1]).reshape(-1)
            for column in (self.local, self.chain, self.keys)
        )
        return OperationBatch(rows, local, chain, keys)

    def exchange_batch(
        self, removed: NDArray[np.intp], stored: NDArray[np.intp], first: int
    ) -> OperationBatch:
        """Alternating removals and stores of the ends of sequences."""
        gone, come = self.remove_batch(removed, first), self.store_batch(stored, first)
        spans = come.rows["start"][:, None] + np.arange(self.depth - first, dtype=np.uint64)
        rows = np.stack([gone.rows, come.rows], axis=1).reshape(-1)
        rows["start"][1::2] = np.arange(len(stored)) * (self.depth - first) + gone.blocks
        local, chain, keys = (
            np.concatenate([old, new[spans.reshape(-1)]])
            for old, new in zip(gone[1:], come[1:], strict=True)
        )
        return OperationBatch(rows, local, chain, keys)

    def decode_batches(
        self, which: NDArray[np.intp], steps: int
    ) -> tuple[OperationBatch, OperationBatch]:
        """Decoding: one new block at the end of each, `steps` times; and the inverse."""
        longer = np.concatenate(
            [self.local[which], uncached_hashes(len(which), steps, series=1)], axis=1
        )
        chain, keys = self._named(longer)
        rows = np.concatenate([self._rows(STORED, which, 1) for _ in range(steps)])
        step = np.repeat(np.arange(steps), len(which))
        row = np.tile(np.arange(len(which)), steps)
        rows["position"] = self.depth + step
        rows["start"] = row * (self.depth + steps) + rows["position"]
        rows["parent"] = chain[row, rows["position"] - 1]
        back = rows[::-1].copy()
        back["kind"] = REMOVED
        columns = (longer.reshape(-1), chain.reshape(-1), keys.reshape(-1))
        return OperationBatch(rows, *columns), OperationBatch(back, *columns)

    def hole_batches(self, which: NDArray[np.intp]) -> tuple[OperationBatch, OperationBatch]:
        """Removal of the blocks from an unshared one on, in each; and the stores that fill it."""
        first = self._rng.integers(self.shared_blocks, self.depth, len(which))
        lost = self._rows(REMOVED, which, 0)
        lost["start"] = which * self.depth + first
        lost["blocks"] = self.depth - first
        filled = lost.copy()
        filled["kind"] = STORED
        filled["position"] = first
        filled["parent"] = self.chain[which, first - 1]
        return OperationBatch(lost, *self._columns()), OperationBatch(filled, *self._columns())

    def _columns(self) -> tuple[U64Column, U64Column, U64Column]:
        return self.local.reshape(-1), self.chain.reshape(-1), self.keys.reshape(-1)

    def _rows(self, kind: int, which: NDArray[np.intp], blocks: int) -> NDArray[np.void]:
        rows = np.zeros(len(which), OPERATION)
        rows["kind"], rows["worker"], rows["blocks"] = kind, which % self.workers, blocks
        return rows

    def _named(self, local: U64Column) -> tuple[U64Column, U64Column]:
        keys = np.empty_like(local)
        for row, own in zip(keys, local, strict=True):
            row[:] = prompt_keys(own, SECRET)
        return self._chained(local) if self._chained else local, keys


def queries_by_overlap(
    cached_sequences: CachedSequences, which: NDArray[np.intp]
) -> dict[str, U64Column]:
    """Queries for sequences by cached share: (sequences, depth) each."""
    full = np.ascontiguousarray(cached_sequences.local[which])
    miss = uncached_hashes(len(which), cached_sequences.depth)
    half = full.copy()
    half[:, cached_sequences.depth // 2 :] = miss[:, cached_sequences.depth // 2 :]
    return {"full hit": full, "half hit": half, "miss": miss}


# --- a trace --------------------------------------------------------------------------------------


class TraceFleet(NamedTuple):
    """A fleet for a trace: workers, and the chunks in the cache of each.

    `min_requests`: a shorter trace is served in several parallel copies, up to this number.
    """

    workers: int
    chunks_per_worker: int
    min_requests: int


class _Step(NamedTuple):
    kind: int
    worker: int
    first: int
    """The index of the first stored chunk."""
    chunks: list[int]


def trace_operations(
    trace: Path, fleet: TraceFleet, chain_hasher: ChainHasher | None = None
) -> OperationBatch:
    """Interleaved queries and events of a fleet that serves a trace.

    Each worker is an LRU of chunks; a request goes where most of it is cached, unless that worker
    has had too many lately. `trace`: see `app/traces/mooncake_trace.py`.
    """
    steps = _steps(_requests(trace, fleet.min_requests), fleet)
    rows = np.zeros(len(steps), OPERATION)
    columns: list[tuple[U64Column, U64Column, U64Column]] = []
    known: dict[int, tuple[U64Column, U64Column, U64Column]] = {}
    start = 0
    for row, step in zip(rows, steps, strict=True):
        if step.kind == REMOVED:
            found = [known[chunk] for chunk in step.chunks]
            local, chain, keys = (
                np.concatenate([columns[i][::-1] for columns in found]) for i in range(3)
            )
        else:
            local = _chunk_blocks(step.chunks)
            chain = chain_hasher(local[None, :])[0] if chain_hasher else local
            keys = prompt_keys(local, SECRET)
            for i, chunk in enumerate(step.chunks):
                own = slice(i * BLOCKS_PER_CHUNK, (i + 1) * BLOCKS_PER_CHUNK)
                known.setdefault(chunk, (local[own], chain[own], keys[own]))
            first = step.first * BLOCKS_PER_CHUNK
            if first:
                row["position"], row["parent"] = first, chain[first - 1]
            local, chain, keys = local[first:], chain[first:], keys[first:]
        row["kind"], row["worker"] = step.kind, step.worker
        row["start"], row["blocks"] = start, len(local)
        columns.append((local, chain, keys))
        start += len(local)
    return OperationBatch(rows, *(np.concatenate([c[i] for c in columns]) for i in range(3)))


def _requests(trace: Path, least: int) -> list[list[int]]:
    """The chunks of each request; every copy of the trace has chunks of its own."""
    rows = read_trace(trace)
    copies = -(-least // len(rows))
    return [
        [chunk * copies + copy for chunk in row.hash_ids] for row in rows for copy in range(copies)
    ]


def _chunk_blocks(chunks: list[int]) -> U64Column:
    """Local hashes of the blocks of some chunks."""
    base = np.uint64(1 << 60) | (np.array(chunks, np.uint64) << np.uint64(8))
    return splitmix64(base[:, None] | np.arange(BLOCKS_PER_CHUNK, dtype=np.uint64)).reshape(-1)


def _steps(requests: list[list[int]], setting: TraceFleet) -> list[_Step]:
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(setting.workers)]
    holders: dict[int, set[int]] = {}
    load = np.zeros(setting.workers)
    steps = []
    for chunks in requests:
        load *= 0.999
        worker = _chosen(chunks, caches, holders, load)
        cache = caches[worker]
        held = _leading(chunks, cache)
        load[worker] += len(chunks) - held + 1
        steps.append(_Step(MATCH, worker, 0, chunks))
        for chunk in reversed(chunks):  # tails are evicted first
            if chunk in cache:
                cache.move_to_end(chunk)
        evicted = []
        for _ in range(
            min(len(cache), len(cache) + len(chunks) - held - setting.chunks_per_worker)
        ):
            chunk, _ = cache.popitem(last=False)
            holders[chunk].discard(worker)
            evicted.append(chunk)
        if evicted:
            steps.append(_Step(REMOVED, worker, 0, evicted))
        held = _leading(chunks, cache)
        if held < len(chunks):
            steps.append(_Step(STORED, worker, held, chunks))
        for chunk in reversed(chunks):
            cache[chunk] = None
            cache.move_to_end(chunk)
            holders.setdefault(chunk, set()).add(worker)
    return steps


def _chosen(
    chunks: list[int],
    caches: list[OrderedDict[int, None]],
    holders: dict[int, set[int]],
    load: NDArray[np.float64],
) -> int:
    """The worker with the best balance of cached chunks and recent load."""
    idle = int(load.argmin())
    candidates = [idle, *sorted(holders.get(chunks[0], ()))]
    return max(candidates, key=lambda w: (_leading(chunks, caches[w]) - load[w] * 0.02, -w))


def _leading(chunks: list[int], cache: OrderedDict[int, None]) -> int:
    for i, chunk in enumerate(chunks):
        if chunk not in cache:
            return i
    return len(chunks)
