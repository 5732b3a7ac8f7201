"""Throughput from the bytes of kv-events records to the index, in Python."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import numpy as np

from kvlane.indexer.epochs import CacheId
from kvlane.indexer.events import EventColumns, EventKind
from kvlane.indexer.index import Index
from kvlane.streams import codecs
from kvlane.streams.memory.partition_log import MemoryRecord
from kvlane.streams.records import Blocks
from kvlane.streams.topics import KV_EVENTS
from workbench.bench.index.comparison import IndexFigure, SampleSummary
from workbench.bench.index.index_workload import SECRET, IndexSetup, U64Column, make_sequences

MILLION = 1_000_000
ROUNDS = 3
WORKERS = 64


def record_rates(record_blocks: Iterable[int], blocks: int = MILLION) -> Iterator[IndexFigure]:
    """Millions of blocks per second of CPU time, with the growth of the table."""
    for size in record_blocks:
        written = list(_records(size, blocks))
        rates = []
        for _ in range(ROUNDS):
            index, began = Index(SECRET), time.thread_time()
            for record in written:
                _apply(index, record)
            rates.append(blocks / (time.thread_time() - began) / 1e6)
        where = IndexSetup(size, WORKERS, blocks)
        samples = SampleSummary(float(np.median(rates)), min(rates))
        yield IndexFigure("records", where, "M blocks/s", samples, None, "", None)


def _records(size: int, blocks: int) -> Iterator[MemoryRecord]:
    """Records with one event of this number of blocks, for all workers in turn."""
    cached = make_sequences(IndexSetup(size, WORKERS, blocks))
    for number, keys in enumerate(cached.keys):
        worker, event_id = f"worker-{number % WORKERS}", number // WORKERS
        record = Blocks(
            worker=worker, epoch=1, first_event_id=event_id, hash_fingerprint=SECRET.fingerprint,
            **_stored(keys)._asdict(),
        )  # fmt: skip
        entry = codecs.encode(record, worker)
        yield MemoryRecord(KV_EVENTS, 0, number, 0, entry.key, entry.value, entry.headers)


def _stored(keys: U64Column) -> EventColumns:
    """One event with the first blocks of a prompt."""
    counts = np.array([len(keys)], "<u4").tobytes()
    return EventColumns(bytes([EventKind.STORED]), bytes(1), bytes(4), counts, keys.tobytes())


def _apply(index: Index, record: MemoryRecord) -> None:
    blocks = codecs.decode(record)
    assert isinstance(blocks, Blocks)
    columns = EventColumns(blocks.kinds, blocks.tiers, blocks.positions, blocks.counts, blocks.keys)
    holder = CacheId(blocks.worker, blocks.rank)
    index.apply_events(record.partition, holder, blocks.epoch, blocks.first_event_id, columns)
