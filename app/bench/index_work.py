"""What the index bench has both sides do: operations on made-up caches, and those of a trace.

An operation says of one worker that blocks were stored or removed, or asks who holds the beginning
of a prompt. Its blocks stand in columns that many operations share: *local* hashes, *chain* hashes
(what events of Dynamo name blocks by) and *keys* (what ours do), so that neither side has to
compute what its events bring along. Pure; nothing is measured here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.trace import read_trace
from indexer.keys import LOOPBACK_SECRET, derive, prompt_keys

STORED, REMOVED, MATCH = range(3)
OPERATION = np.dtype(
    [(name, "<u8") for name in ("kind", "worker", "position", "parent", "start", "blocks")]
)
"""`blocks` blocks from `start` of the columns on; the first one is at `position` of its prompt, and
`parent` is the chain hash of the one before."""
SECRET = derive(LOOPBACK_SECRET)

GROUPS = 32
SHARED = 0.25
"""This share of each sequence, its beginning, is one of GROUPS."""
BLOCKS_A_CHUNK = 32
"""A trace names 512 tokens by one number: so many blocks of 16."""

Column = NDArray[np.uint64]
Chained = Callable[[Column], Column]
"""From rows of local hashes to rows of chain hashes."""


class Batch(NamedTuple):
    """Operations, and the columns that they point into."""

    rows: NDArray[np.void]
    local: Column
    chain: Column
    keys: Column

    @property
    def blocks(self) -> int:
        """Of all operations together."""
        return int(self.rows["blocks"].sum())

    def part(self, rows: slice | NDArray[np.intp]) -> Batch:
        """Some of the operations."""
        return self._replace(rows=np.ascontiguousarray(self.rows[rows]))

    def groups(self, size: int) -> Iterator[Batch]:
        """All operations in turn, so many at a time."""
        for start in range(0, len(self.rows), size):
            yield self.part(slice(start, start + size))


def mixed(numbers: Column) -> Column:
    """Random-looking numbers, each from one number: the end of splitmix64 (Steele et al. 2014)."""
    x = numbers.copy()
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def foreign(prompts: int, depth: int, series: int = 0) -> Column:
    """Local hashes of blocks that nobody holds: (prompts, depth); other ones in each series."""
    prompt = np.arange(prompts, dtype=np.uint64)[:, None] << np.uint64(24)
    return mixed(np.uint64((0xBAD0 + series) << 48) | prompt | np.arange(depth, dtype=np.uint64))


class Where(NamedTuple):
    """What is measured on: blocks of a prompt or of an event, workers, (worker, block) pairs."""

    blocks: int
    workers: int
    pairs: int


def sequences(where: Where, chained: Chained | None = None, *, seed: int = 42) -> Sequences:
    """Prompts of `blocks` blocks, the first quarter of which is one of GROUPS; about `pairs`."""
    count = max(where.pairs // where.blocks, 1)
    shared = round(where.blocks * SHARED)
    group = np.random.default_rng(seed).integers(0, GROUPS, count).astype(np.uint64)[:, None]
    number = np.arange(1, count + 1, dtype=np.uint64)[:, None]
    block = np.arange(where.blocks, dtype=np.uint64)[None, :]
    beginning = np.uint64(1 << 60) | (group << np.uint64(32))
    numbers = np.where(block < np.uint64(shared), beginning, number << np.uint64(32)) | block
    return Sequences(mixed(numbers), where.workers, shared, chained)


class Sequences:
    """Cached prompts of one length, sequence s on worker s mod `workers`.

    `local`: u64 (sequences, blocks), of which the first `shared` stand in other sequences, too.
    `chained`: how their chain hashes are made; where nobody needs these, other numbers do.
    """

    def __init__(
        self, local: Column, workers: int, shared: int, chained: Chained | None = None
    ) -> None:
        self.count, self.depth = local.shape
        self.workers = workers
        self.shared = shared
        self.local = local
        self._chained = chained
        self._rng = np.random.default_rng(1)
        self.chain, self.keys = self._named(local)

    @property
    def pairs(self) -> int:
        """Different blocks of each worker, over all of them."""
        worker = np.arange(self.count, dtype=np.uint64) % np.uint64(self.workers)
        beginnings = len(set(zip(worker.tolist(), self.local[:, 0].tolist(), strict=True)))
        return int(self.count * (self.depth - self.shared) + beginnings * self.shared)

    def some(self, most: int) -> NDArray[np.intp]:
        """Numbers of different sequences, in random order."""
        return self._rng.permutation(self.count)[:most]

    def stores(self, which: NDArray[np.intp], first: int = 0) -> Batch:
        """Each of these sequences from its block `first` on, in one event."""
        rows = self._rows(STORED, which, self.depth - first)
        rows["position"] = first
        rows["start"] = which * self.depth + first
        if first:
            rows["parent"] = self.chain[which, first - 1]
        return Batch(rows, *self._columns())

    def removes(self, which: NDArray[np.intp], first: int = 0) -> Batch:
        """The same blocks in one event each, the last one first, as engines evict them."""
        blocks = self.depth - first
        rows = self._rows(REMOVED, which, blocks)
        rows["start"] = np.arange(len(which)) * blocks
        local, chain, keys = (
            np.ascontiguousarray(column[which, first:][:, ::-1]).reshape(-1)
            for column in (self.local, self.chain, self.keys)
        )
        return Batch(rows, local, chain, keys)

    def exchanges(self, out: NDArray[np.intp], back: NDArray[np.intp], first: int) -> Batch:
        """The ends of as many sequences are removed as are stored again, in turn."""
        gone, come = self.removes(out, first), self.stores(back, first)
        spans = come.rows["start"][:, None] + np.arange(self.depth - first, dtype=np.uint64)
        rows = np.stack([gone.rows, come.rows], axis=1).reshape(-1)
        rows["start"][1::2] = np.arange(len(back)) * (self.depth - first) + gone.blocks
        local, chain, keys = (
            np.concatenate([old, new[spans.reshape(-1)]])
            for old, new in zip(gone[1:], come[1:], strict=True)
        )
        return Batch(rows, local, chain, keys)

    def single_blocks(self, which: NDArray[np.intp], steps: int) -> tuple[Batch, Batch]:
        """Decoding: one new block behind each of these, `steps` times; and all of it back again."""
        longer = np.concatenate([self.local[which], foreign(len(which), steps, series=1)], axis=1)
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
        return Batch(rows, *columns), Batch(back, *columns)

    def holes(self, which: NDArray[np.intp]) -> tuple[Batch, Batch]:
        """A block that is not shared is lost with all behind it, in each; and what fills that."""
        first = self._rng.integers(self.shared, self.depth, len(which))
        lost = self._rows(REMOVED, which, 0)
        lost["start"] = which * self.depth + first
        lost["blocks"] = self.depth - first
        filled = lost.copy()
        filled["kind"] = STORED
        filled["position"] = first
        filled["parent"] = self.chain[which, first - 1]
        return Batch(lost, *self._columns()), Batch(filled, *self._columns())

    def _columns(self) -> tuple[Column, Column, Column]:
        return self.local.reshape(-1), self.chain.reshape(-1), self.keys.reshape(-1)

    def _rows(self, kind: int, which: NDArray[np.intp], blocks: int) -> NDArray[np.void]:
        rows = np.zeros(len(which), OPERATION)
        rows["kind"], rows["worker"], rows["blocks"] = kind, which % self.workers, blocks
        return rows

    def _named(self, local: Column) -> tuple[Column, Column]:
        """Chain hashes and keys."""
        keys = np.empty_like(local)
        for row, own in zip(keys, local, strict=True):
            row[:] = prompt_keys(own, SECRET)
        return self._chained(local) if self._chained else local, keys


def prompts(cached: Sequences, which: NDArray[np.intp]) -> dict[str, Column]:
    """Queries for each of some sequences by how much of them is cached: (sequences, depth) each."""
    full = np.ascontiguousarray(cached.local[which])
    miss = foreign(len(which), cached.depth)
    half = full.copy()
    half[:, cached.depth // 2 :] = miss[:, cached.depth // 2 :]
    return {"full hit": full, "half hit": half, "miss": miss}


# --- a trace --------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """A fleet for a trace: workers, and the chunks that each can hold.

    `requests`: a shorter trace is served in as many copies side by side as this takes.
    """

    workers: int
    chunks: int
    requests: int


class _Step(NamedTuple):
    kind: int
    worker: int
    first: int
    """Of the chunks, the first that is stored."""
    chunks: list[int]


def replayed(trace: Path, setting: Setting, chained: Chained | None = None) -> Batch:
    """Queries and events, interleaved, of a fleet that serves a trace.

    Each worker is an LRU of chunks; a request goes where most of it is cached, unless that worker
    has had too many lately. `trace`: see `app/trace.py`.
    """
    steps = _steps(_requests(trace, setting.requests), setting)
    rows = np.zeros(len(steps), OPERATION)
    columns: list[tuple[Column, Column, Column]] = []
    known: dict[int, tuple[Column, Column, Column]] = {}
    start = 0
    for row, step in zip(rows, steps, strict=True):
        if step.kind == REMOVED:
            found = [known[chunk] for chunk in step.chunks]
            local, chain, keys = (
                np.concatenate([columns[i][::-1] for columns in found]) for i in range(3)
            )
        else:
            local = _chunk_blocks(step.chunks)
            chain = chained(local[None, :])[0] if chained else local
            keys = prompt_keys(local, SECRET)
            for i, chunk in enumerate(step.chunks):
                own = slice(i * BLOCKS_A_CHUNK, (i + 1) * BLOCKS_A_CHUNK)
                known.setdefault(chunk, (local[own], chain[own], keys[own]))
            first = step.first * BLOCKS_A_CHUNK
            if first:
                row["position"], row["parent"] = first, chain[first - 1]
            local, chain, keys = local[first:], chain[first:], keys[first:]
        row["kind"], row["worker"] = step.kind, step.worker
        row["start"], row["blocks"] = start, len(local)
        columns.append((local, chain, keys))
        start += len(local)
    return Batch(rows, *(np.concatenate([c[i] for c in columns]) for i in range(3)))


def _requests(trace: Path, least: int) -> list[list[int]]:
    """The chunks of each request, those of the copies in turn; every copy has chunks of its own."""
    rows = read_trace(trace)
    copies = -(-least // len(rows))
    return [
        [chunk * copies + copy for chunk in row.hash_ids] for row in rows for copy in range(copies)
    ]


def _chunk_blocks(chunks: list[int]) -> Column:
    """Local hashes of the blocks of some chunks."""
    base = np.uint64(1 << 60) | (np.array(chunks, np.uint64) << np.uint64(8))
    return mixed(base[:, None] | np.arange(BLOCKS_A_CHUNK, dtype=np.uint64)).reshape(-1)


def _steps(requests: list[list[int]], setting: Setting) -> list[_Step]:
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
        for _ in range(min(len(cache), len(cache) + len(chunks) - held - setting.chunks)):
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
    """The worker of the best balance between what it holds and what it had to compute lately."""
    idle = int(load.argmin())
    candidates = [idle, *sorted(holders.get(chunks[0], ()))]
    return max(candidates, key=lambda w: (_leading(chunks, caches[w]) - load[w] * 0.02, -w))


def _leading(chunks: list[int], cache: OrderedDict[int, None]) -> int:
    """How many chunks from the first one on are cached."""
    for i, chunk in enumerate(chunks):
        if chunk not in cache:
            return i
    return len(chunks)
