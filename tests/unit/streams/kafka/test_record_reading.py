"""Tests of the records of a fetch response: the same as aiokafka's reading of the same bytes."""

from __future__ import annotations

import importlib.util
import struct
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.streams.kafka.client_patches.record_batches import (
    FetchedBatches,
    PartitionRecords,
    next_records,
)
from kvlane.streams.kafka.connection_options import KeyFilter

PARTITION = TopicPartition("t", 3)
FIRST = 10  # offset of the first batch
LOG_APPEND_TIME, CONTROL = 0x08, 0x20
LAST_OFFSET_DELTA, MAX_TIMESTAMP = 23, 35  # places in the header of a batch
KEYS = [None, b"", b"a", b"b", bytes(300)]


def _unpatched() -> Any:
    """aiokafka's fetcher with its own parser."""
    spec = importlib.util.find_spec("aiokafka.consumer.fetcher")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


aiokafkas = _unpatched()


class Batch(NamedTuple):
    records: list[tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]]
    """Time, key, value, headers."""
    codec: int
    attributes: int
    is_transactional: bool
    gap: int
    """Offsets that compaction has removed behind the records."""

    def encode(self, base: int) -> tuple[bytes, int]:
        """The bytes as a broker stores them, and the offset after them."""
        builder = DefaultRecordBatchBuilder(2, self.codec, self.is_transactional, 7, 0, 0, 1 << 30)
        for number, (at_ms, key, value, headers) in enumerate(self.records):
            builder.append(number, at_ms, key, value, headers)
        data = bytearray(builder.build())
        last = len(self.records) - 1 + self.gap
        data[:8] = struct.pack(">q", base)
        data[22] |= self.attributes
        data[LAST_OFFSET_DELTA : LAST_OFFSET_DELTA + 4] = struct.pack(">i", last)
        if self.attributes & LOG_APPEND_TIME:
            data[MAX_TIMESTAMP : MAX_TIMESTAMP + 8] = struct.pack(">q", 123_456)
        data[17:21] = struct.pack(">I", calc_crc32c(bytes(data[21:])))
        return bytes(data), base + last + 1


fields = st.none() | st.binary(max_size=40) | st.sampled_from([bytes(200), bytes(70_000)])
records = st.tuples(
    st.integers(0, 1 << 41),
    st.sampled_from(KEYS),
    fields,
    st.lists(st.tuples(st.text(max_size=5), fields), max_size=3),
)
batches = st.builds(
    Batch,
    st.lists(records, min_size=1, max_size=4),
    st.integers(0, 4),
    st.sampled_from([0, 0, 0, LOG_APPEND_TIME, CONTROL]),
    st.booleans(),
    st.integers(0, 3),
)


def held(reading: Any) -> SimpleNamespace:
    """A response as the client holds it."""
    state = SimpleNamespace(paused=False, position=reading.next_fetch_offset)
    state.consumed_to = lambda offset: setattr(state, "position", offset)
    assignment = SimpleNamespace(active=True, state_value=lambda _: state)
    result = aiokafkas.FetchResult(
        PARTITION, assignment=assignment, partition_records=reading, backoff=0
    )
    return SimpleNamespace(result=result, state=state)


def ours(data: bytes, start: int, keys: KeyFilter | None = None) -> Any:
    return PartitionRecords(PARTITION, FetchedBatches(data), None, start, keys, None, True, 0)


def plain(record: Any) -> tuple[Any, ...]:
    return (
        record.partition,
        record.offset,
        record.timestamp,
        record.key,
        record.value,
        record.headers,
    )


@settings(max_examples=300, deadline=None)
@given(
    st.lists(batches, max_size=4),
    st.integers(FIRST, FIRST + 6),
    st.integers(0, 80),
    st.none() | st.integers(1, 5),
    st.none() | st.frozensets(st.sampled_from(KEYS)),
)
def test_same_as_aiokafka(
    written: list[Batch],
    start: int,
    cut: int,
    max_records: int | None,
    keys: frozenset[bytes | None] | None,
) -> None:
    data, after = b"", FIRST
    for one in written:
        encoded, after = one.encode(after)
        data += encoded
    data = data[: len(data) - cut]  # a broker cuts the last batch off
    theirs = aiokafkas.PartitionRecords(
        PARTITION, aiokafkas.MemoryRecords(data), None, start, None, None, True, 0
    )
    expected = [plain(r) for r in theirs if keys is None or r.key in keys]
    selection = KeyFilter()
    selection.keys = keys
    holding = held(ours(data, start, selection))
    found: list[Any] = []
    while holding.result.has_more():
        polled = next_records(holding.result, max_records)
        assert max_records is None or len(polled) <= max_records
        found += polled
        assert not polled or keys is not None or holding.state.position > polled[-1].offset
    assert [plain(r) for r in found] == expected
    assert holding.state.position == theirs.next_fetch_offset


def test_batch_with_a_wrong_checksum_is_fetched_again() -> None:
    good, after = Batch([(1, b"a", b"good", [])], 0, 0, False, 0).encode(FIRST)
    bad = bytearray(Batch([(1, b"a", b"bad", [])], 0, 0, False, 0).encode(after)[0])
    bad[-2] ^= 1
    holding = held(ours(bytes(bad) + good, FIRST))
    with pytest.raises(CorruptRecordException, match="does not match its checksum"):
        next_records(holding.result)
    assert next_records(holding.result) == []
    assert not holding.result.has_more()
    assert holding.state.position == FIRST
