"""Overhead of Python around the index kernels: decoding records, calls, and reader pauses.

The only peer is Dynamo's Python wheel, for calls. It runs in an environment of its own
(`workbench/peers/build.sh wheel`), because its dependencies conflict with those of kvlane.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvlane.app.runtime.process import tune_interpreter
from kvlane.indexer.epochs import CacheId
from kvlane.indexer.events import CLEARED, EventColumns, EventKind
from kvlane.indexer.events import encode_events as columns_of
from kvlane.indexer.index import Index
from kvlane.streams import codecs
from kvlane.streams.memory.partition_log import MemoryRecord
from kvlane.streams.records import Blocks
from kvlane.streams.topics import KV_EVENTS
from workbench.bench.index.comparison import (
    OUR_INDEX,
    IndexFigure,
    RatioTarget,
    SampleSummary,
    compare_sides,
)
from workbench.bench.index.index_workload import (
    SECRET,
    CachedSequences,
    IndexSetup,
    U64Column,
    make_sequences,
)
from workbench.bench.index.measurements import AnswerComparison
from workbench.bench.index.peers import BUILD_SCRIPT, LIBRARY

MILLION = 1_000_000
WHEEL = LIBRARY.parent / "wheel" / "bin" / "python"
WHEEL_TIMEOUT_S = 120.0
CALL_PAIRS, CALL_WORKERS = 200_000, 64
RECORD_ROUNDS = 3
RECORD_WORKERS = 64
PAUSE_LIMIT_MS = 2.0
PAUSE_PROMPT_BLOCKS = 1024
READ_INTERVAL_S = 0.0002
"""Interval between matches. A thread without a pause takes the interpreter's lock again before the
writer has woken up, and the writer then gets it only once in 5 ms: minutes instead of seconds."""
SWEEP_SLOTS = 1 << 14
"""Slots per sweep step: as with a small record."""
SLOT_BYTES = 16
IDLE_MEASUREMENT_S = 2.0
PAUSE_ROUNDS = 9
PAUSE_INTERVALS = 64
"""Intervals of a round. The index delays a reader in the same interval of every round; the machine
delays a thread at any time: of two threads that added up numbers for 30 s, one once took 35 ms of
processor time for 0.07."""
PAUSE_KINDS = 4


def record_rates(record_blocks: Iterable[int], blocks: int = MILLION) -> Iterator[IndexFigure]:
    """Throughput from the bytes of kv-events records to the index; CPU time with table growth."""
    for size in record_blocks:
        written = list(_records(size, blocks))
        rates = []
        for _ in range(RECORD_ROUNDS):
            index, began = Index(SECRET), time.thread_time()
            for record in written:
                _apply(index, record)
            rates.append(blocks / (time.thread_time() - began) / 1e6)
        where = IndexSetup(size, RECORD_WORKERS, blocks)
        yield _alone(
            "records", where, "M blocks/s", SampleSummary(float(np.median(rates)), min(rates))
        )


def call_latencies(
    queries_by_depth: dict[int, int], answers: AnswerComparison, *, peers: bool
) -> Iterator[IndexFigure]:
    """Latency of a match from Python: to arrays, as in the router, and to overlaps by cache."""
    for depth, count in queries_by_depth.items():
        where = IndexSetup(depth, CALL_WORKERS, CALL_PAIRS)
        cached = make_sequences(where)
        index, queries = filled_index(cached), cached.random_subset(count)
        queried_keys = cached.local[queries]
        samples = {OUR_INDEX: _times(index.match_depths, queried_keys)}
        if peers and WHEEL.exists():
            took, scores = _wheel(cached, queries)
            samples["wheel"] = _samples(took)
            for query, theirs in zip(queried_keys, scores, strict=True):
                ours = {int(h.worker): o.total_blocks for h, o in index.match_prefix(query).items()}
                answers.compare_rows(sorted(ours.items()), theirs)
        yield compare_sides("call", where, "us", samples, RatioTarget(5.0) if peers else None)
        yield _alone("call, overlaps", where, "us", _times(index.match_prefix, queried_keys))


def _times(call: Callable[[U64Column], object], queries: U64Column) -> SampleSummary:
    """Latency of a call per row, in microseconds."""
    took = []
    for query in queries:
        began = time.perf_counter()
        call(query)
        took.append(1e6 * (time.perf_counter() - began))
    return _samples(took)


def _samples(took: list[float]) -> SampleSummary:
    return SampleSummary(*(float(p) for p in np.percentile(took, (50, 99))))


def _wheel(
    cached: CachedSequences, queries: NDArray[np.intp]
) -> tuple[list[float], list[list[tuple[int, int]]]]:
    """Microseconds and result of each call of the wheel."""
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        np.savez(
            file, local=cached.local, chain=cached.chain, workers=cached.workers, queries=queries
        )
        file.flush()
        done = subprocess.run(  # noqa: S603 - a script of this repository
            [str(WHEEL), str(BUILD_SCRIPT.with_name("wheel.py")), file.name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=WHEEL_TIMEOUT_S,
        )
    found = json.loads(done.stdout)
    return found["us"], [[(worker, held) for worker, held in row] for row in found["scores"]]


class ReadPauses:
    """A thread that looks up a prompt continuously while another thread changes the index.

    `interval`: the current interval of `PAUSE_INTERVALS`, set by the other thread.
    """

    def __init__(self, index: Index, query: U64Column) -> None:
        self.interval = 0
        self._index = index
        self._query = query
        self._stopped = threading.Event()
        self.longest_ms = np.zeros((2, PAUSE_INTERVALS))
        """By interval the longest match since its due time, and the largest CPU time of a match.

        CPU time has no waits for a processor or the interpreter's lock, but on a virtual machine it
        includes time that the host takes from a running thread."""
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _read(self) -> None:
        due = time.perf_counter()
        while not self._stopped.is_set():
            part, began_cpu = self.interval, time.thread_time()
            self._index.match_prefix(self._query)
            took_s = time.perf_counter() - due, time.thread_time() - began_cpu
            met = self.longest_ms[:, part : self.interval + 1]
            np.maximum(met, 1e3 * np.array(took_s)[:, None], out=met)
            due = time.perf_counter() + READ_INTERVAL_S
            time.sleep(READ_INTERVAL_S)


def reader_pauses(pairs: int, progress: Callable[[float], None]) -> list[IndexFigure]:
    """The largest read latency: idle, during table growth, during a sweep.

    The largest over the intervals of the median over the rounds; and the largest of all. The first
    rows are the baseline of machine and interpreter: idle, and while another index grows.
    """
    where = IndexSetup(PAUSE_PROMPT_BLOCKS, 64, pairs)
    cached = make_sequences(where)
    longest: dict[str, list[NDArray[np.float64]]] = {}
    for _ in range(PAUSE_ROUNDS):
        for beside, reader in _pauses_of_a_round(cached):
            longest.setdefault(beside, []).append(reader.longest_ms)
            progress(1 / (PAUSE_KINDS * PAUSE_ROUNDS))
    figures = []
    for beside, rounds in longest.items():
        usual, most = np.median(rounds, axis=0).max(axis=1), np.max(rounds, axis=(0, 2))
        for kind, *each in zip(("", ", CPU"), usual.tolist(), most.tolist(), strict=True):
            figures.append(_alone(f"pause, {beside}{kind}", where, "ms", SampleSummary(*each)))
    return figures


def _pauses_of_a_round(cached: CachedSequences) -> Iterator[tuple[str, ReadPauses]]:
    index, another = filled_index(cached, stop=64), filled_index(cached, stop=64)
    query = cached.local[0].copy()
    bounds = np.linspace(64, cached.sequence_count, PAUSE_INTERVALS + 1).astype(int).tolist()
    index.match_prefix(query)  # the first call loads the kernel and allocates arrays of the thread
    switch_s = sys.getswitchinterval()
    tune_interpreter()  # as every process does when it has started
    with ReadPauses(index, query) as reader:
        for reader.interval in range(PAUSE_INTERVALS):
            time.sleep(IDLE_MEASUREMENT_S / PAUSE_INTERVALS)
    yield "idle", reader
    for beside, growing in (("growth elsewhere", another), ("growth", index)):
        with ReadPauses(index, query) as reader:
            for reader.interval, (start, stop) in enumerate(pairwise(bounds)):
                _fill(growing, cached, start, stop)
        yield beside, reader
    del another, growing
    with ReadPauses(index, query) as reader:
        for worker in range(1, cached.workers):
            index.end_epoch(0, str(worker), 1)
        swept, slots = 0, index.nbytes // SLOT_BYTES  # and the rows of some sets
        while index.maintain(SWEEP_SLOTS):
            swept += SWEEP_SLOTS
            reader.interval = min(swept * PAUSE_INTERVALS // slots, PAUSE_INTERVALS - 1)
            time.sleep(0)  # as between two records
    yield "sweep", reader
    gc.unfreeze()
    sys.setswitchinterval(switch_s)


def filled_index(cached_sequences: CachedSequences, stop: int | None = None) -> Index:
    """An index with these sequences, or with the first `stop` of them."""
    index = Index(SECRET)
    for worker in range(cached_sequences.workers):
        index.apply_events(0, CacheId(str(worker), 0), 1, 0, columns_of([CLEARED]))
    _fill(index, cached_sequences, 0, cached_sequences.sequence_count if stop is None else stop)
    return index


def _fill(index: Index, cached: CachedSequences, start: int, stop: int) -> None:
    for number in range(start, stop):
        worker = number % cached.workers
        event_id = 1 + number // cached.workers
        index.apply_events(0, CacheId(str(worker), 0), 1, event_id, _stored(cached.keys[number]))


def _stored(keys: U64Column) -> EventColumns:
    """One event with the first blocks of a prompt."""
    counts = np.array([len(keys)], "<u4").tobytes()
    return EventColumns(bytes([EventKind.STORED]), bytes(1), bytes(4), counts, keys.tobytes())


def _records(size: int, blocks: int) -> Iterator[MemoryRecord]:
    """Records with one event of this number of blocks, for all workers in turn."""
    cached = make_sequences(IndexSetup(size, RECORD_WORKERS, blocks))
    for number, keys in enumerate(cached.keys):
        worker, event_id = f"worker-{number % RECORD_WORKERS}", number // RECORD_WORKERS
        record = Blocks(
            worker=worker, epoch=1, first_event_id=event_id, hash_fingerprint=SECRET.fingerprint,
            **_stored(keys)._asdict(),
        )  # fmt: skip
        entry = codecs.encode(record, worker)
        yield MemoryRecord(KV_EVENTS, 0, number, 0, entry.key, entry.value, entry.headers)


def _apply(index: Index, record: MemoryRecord) -> None:
    blocks = codecs.decode(record)
    assert isinstance(blocks, Blocks)
    columns = EventColumns(blocks.kinds, blocks.tiers, blocks.positions, blocks.counts, blocks.keys)
    holder = CacheId(blocks.worker, blocks.rank)
    index.apply_events(record.partition, holder, blocks.epoch, blocks.first_event_id, columns)


def _alone(measure: str, where: IndexSetup, unit: str, samples: SampleSummary) -> IndexFigure:
    return IndexFigure(measure, where, unit, samples, None, "", None)
