"""What the class around the kernels costs: records from bytes, calls from Python, waiting readers.

The only peer here is Dynamo's Python wheel, for calls. It runs in an environment of its own
(`tests/peers/build.sh wheel`), because it does not take the packages that kvlane has.
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

from app.bench.index_figures import OURS, Aim, Figure, Samples, figure
from app.bench.index_rounds import Answers
from app.bench.index_sides import LIBRARY, SCRIPT
from app.bench.index_work import SECRET, Column, Sequences, Where, sequences
from app.lifetime import settle
from indexer.events import CLEARED, Columns, Kind
from indexer.events import encode as columns_of
from indexer.index import Index
from indexer.lives import Holder
from streams import codecs
from streams.memory.partition import MemoryRecord
from streams.records import Blocks
from streams.topics import KV_EVENTS

M = 1_000_000
WHEEL = LIBRARY.parent / "wheel" / "bin" / "python"
WHEEL_TIMEOUT_S = 120.0
CALL_PAIRS, CALL_WORKERS = 200_000, 64
RECORD_ROUNDS = 3
RECORD_WORKERS = 64
PAUSE_MS = 2.0
PAUSE_PROMPT_BLOCKS = 1024
BETWEEN_S = 0.0002
"""Between two matches. A thread that asks without a break takes the interpreter's lock again before
the writer has woken up, who then gets it once in 5 ms only: minutes instead of seconds."""
STEP = 1 << 14
"""Slots that are swept at once: as with a small record."""
SLOT_BYTES = 16
IDLE_S = 2.0
PAUSE_ROUNDS = 9
PAUSE_PARTS = 64
"""Stretches of a round. What the index does to a reader, it does in every round in the same one;
what a machine does to a thread, at any time: of two threads that added up numbers for 30 s, one
once took 35 ms of processor time for 0.07."""
PAUSE_KINDS = 4


def records(sizes: Iterable[int], blocks: int = M) -> Iterator[Figure]:
    """From the bytes of kv-events records to the state after them; CPU time, growth included."""
    for size in sizes:
        written = list(_records(size, blocks))
        rates = []
        for _ in range(RECORD_ROUNDS):
            index, began = Index(SECRET), time.thread_time()
            for record in written:
                _apply(index, record)
            rates.append(blocks / (time.thread_time() - began) / 1e6)
        where = Where(size, RECORD_WORKERS, blocks)
        yield _alone("records", where, "M blocks/s", Samples(float(np.median(rates)), min(rates)))


def calls(queries: dict[int, int], answers: Answers, *, peers: bool) -> Iterator[Figure]:
    """A match as Python calls it: to arrays, as the router reads them, and to overlaps by cache."""
    for depth, count in queries.items():
        where = Where(depth, CALL_WORKERS, CALL_PAIRS)
        cached = sequences(where)
        index, asked = filled(cached), cached.some(count)
        asked_for = cached.local[asked]
        samples = {OURS: _times(index.depths, asked_for)}
        if peers and WHEEL.exists():
            took, scores = _wheel(cached, asked)
            samples["wheel"] = _samples(took)
            for query, theirs in zip(asked_for, scores, strict=True):
                ours = {int(h.worker): o.blocks for h, o in index.match(query).items()}
                answers.hold(sorted(ours.items()), theirs)
        yield figure("call", where, "us", samples, Aim(5.0) if peers else None)
        yield _alone("call, overlaps", where, "us", _times(index.match, asked_for))


def _times(call: Callable[[Column], object], queries: Column) -> Samples:
    """Of a call for each row, in microseconds."""
    took = []
    for query in queries:
        began = time.perf_counter()
        call(query)
        took.append(1e6 * (time.perf_counter() - began))
    return _samples(took)


def _samples(took: list[float]) -> Samples:
    return Samples(*(float(p) for p in np.percentile(took, (50, 99))))


def _wheel(
    cached: Sequences, asked: NDArray[np.intp]
) -> tuple[list[float], list[list[tuple[int, int]]]]:
    """Microseconds of each call, and what it found."""
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        np.savez(file, local=cached.local, chain=cached.chain, workers=cached.workers, asked=asked)
        file.flush()
        done = subprocess.run(  # noqa: S603 - a script of this repository
            [str(WHEEL), str(SCRIPT.with_name("wheel.py")), file.name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=WHEEL_TIMEOUT_S,
        )
    found = json.loads(done.stdout)
    return found["us"], [[(worker, held) for worker, held in row] for row in found["scores"]]


class Pauses:
    """One thread looks up prompts, again and again, while another one changes the index.

    `part`: of `PAUSE_PARTS`, how far that one has come; to be set by it.
    """

    def __init__(self, index: Index, query: Column) -> None:
        self.part = 0
        self._index = index
        self._query = query
        self._stopped = threading.Event()
        self.longest_ms = np.zeros((2, PAUSE_PARTS))
        """In each part the longest match, from when it was due, and the most processor time of one.

        What waiting for a processor, or for the interpreter's lock, is not in the latter, but where
        a machine is virtual, what it takes from a thread in the middle of its work."""
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
            part, began_cpu = self.part, time.thread_time()
            self._index.match(self._query)
            took_s = time.perf_counter() - due, time.thread_time() - began_cpu
            met = self.longest_ms[:, part : self.part + 1]
            np.maximum(met, 1e3 * np.array(took_s)[:, None], out=met)
            due = time.perf_counter() + BETWEEN_S
            time.sleep(BETWEEN_S)


def reader_pauses(pairs: int, progress: Callable[[float], None]) -> list[Figure]:
    """The longest that a reader waits: beside nothing, beside growth, beside a sweep.

    Of each part of a round the median over the rounds, and of these the longest; and the longest of
    all. The first rows are what the machine and the interpreter do to a thread: beside nobody, and
    beside another index that grows.
    """
    where = Where(PAUSE_PROMPT_BLOCKS, 64, pairs)
    cached = sequences(where)
    longest: dict[str, list[NDArray[np.float64]]] = {}
    for _ in range(PAUSE_ROUNDS):
        for beside, reader in _pauses_of_a_round(cached):
            longest.setdefault(beside, []).append(reader.longest_ms)
            progress(1 / (PAUSE_KINDS * PAUSE_ROUNDS))
    figures = []
    for beside, rounds in longest.items():
        usual, most = np.median(rounds, axis=0).max(axis=1), np.max(rounds, axis=(0, 2))
        for kind, *each in zip(("", ", CPU"), usual.tolist(), most.tolist(), strict=True):
            figures.append(_alone(f"pause, {beside}{kind}", where, "ms", Samples(*each)))
    return figures


def _pauses_of_a_round(cached: Sequences) -> Iterator[tuple[str, Pauses]]:
    index, another = filled(cached, stop=64), filled(cached, stop=64)
    query = cached.local[0].copy()
    bounds = np.linspace(64, cached.count, PAUSE_PARTS + 1).astype(int).tolist()
    index.match(query)  # its first call loads the kernel, and the arrays that a thread keeps
    switch_s = sys.getswitchinterval()
    settle()  # as every process does when it has started
    with Pauses(index, query) as reader:
        for reader.part in range(PAUSE_PARTS):
            time.sleep(IDLE_S / PAUSE_PARTS)
    yield "idle", reader
    for beside, growing in (("growth elsewhere", another), ("growth", index)):
        with Pauses(index, query) as reader:
            for reader.part, (start, stop) in enumerate(pairwise(bounds)):
                _fill(growing, cached, start, stop)
        yield beside, reader
    del another, growing
    with Pauses(index, query) as reader:
        for worker in range(1, cached.workers):
            index.lose(0, str(worker), 1)
        swept, slots = 0, index.nbytes // SLOT_BYTES  # and the rows of some sets
        while index.tidy(STEP):
            swept += STEP
            reader.part = min(swept * PAUSE_PARTS // slots, PAUSE_PARTS - 1)
            time.sleep(0)  # as between two records
    yield "sweep", reader
    gc.unfreeze()
    sys.setswitchinterval(switch_s)


def filled(cached: Sequences, stop: int | None = None) -> Index:
    """An index that holds them, or the first of them."""
    index = Index(SECRET)
    for worker in range(cached.workers):
        index.apply(0, Holder(str(worker), 0), 1, 0, columns_of([CLEARED]))
    _fill(index, cached, 0, cached.count if stop is None else stop)
    return index


def _fill(index: Index, cached: Sequences, start: int, stop: int) -> None:
    for number in range(start, stop):
        worker = number % cached.workers
        event_id = 1 + number // cached.workers
        index.apply(0, Holder(str(worker), 0), 1, event_id, _stored(cached.keys[number]))


def _stored(keys: Column) -> Columns:
    """One event, of the first blocks of a prompt."""
    counts = np.array([len(keys)], "<u4").tobytes()
    return Columns(bytes([Kind.STORED]), bytes(1), bytes(4), counts, keys.tobytes())


def _records(size: int, blocks: int) -> Iterator[MemoryRecord]:
    """One event of so many blocks each, for all workers in turn."""
    cached = sequences(Where(size, RECORD_WORKERS, blocks))
    for number, keys in enumerate(cached.keys):
        worker, event_id = f"worker-{number % RECORD_WORKERS}", number // RECORD_WORKERS
        record = Blocks(
            worker=worker, epoch=1, first_event_id=event_id, hash_fingerprint=SECRET.fingerprint,
            **_stored(keys)._asdict(),
        )  # fmt: skip
        entry = codecs.encode(record, worker)
        yield MemoryRecord(KV_EVENTS, 0, number, 0, entry.key, entry.value, entry.headers)


def _apply(index: Index, record: MemoryRecord) -> None:
    said = codecs.decode(record)
    assert isinstance(said, Blocks)
    columns = Columns(said.kinds, said.tiers, said.positions, said.counts, said.keys)
    holder = Holder(said.worker, said.rank)
    index.apply(record.partition, holder, said.epoch, said.first_event_id, columns)


def _alone(measure: str, where: Where, unit: str, samples: Samples) -> Figure:
    return Figure(measure, where, unit, samples, None, "", None)
