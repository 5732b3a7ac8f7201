"""Tests of batches of records: with any content, neighbours are read and positions are passed."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import cramjam
import pytest
import zstandard
from aiokafka import TopicPartition
from aiokafka.consumer import fetcher
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c

from kvlane.streams.kafka.client_patches import record_batches
from kvlane.streams.kafka.client_patches.decompression import DecompressionError, decompress
from kvlane.streams.kafka.client_patches.record_batches import (
    MAX_HEADERS,
    MAX_POLLED_BYTES,
    FetchedBatches,
    PartitionRecords,
)
from kvlane.streams.kafka.connection_options import KeyFilter
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.kafka.kafka_reader import KafkaReader
from kvlane.streams.ports import Partition, Unreadable
from kvlane.streams.topics import MAX_RECORD_BYTES, MAX_UNCOMPRESSED_BYTES

PLAIN, GZIP, SNAPPY, LZ4, ZSTD = range(5)
COMPRESSED = [GZIP, SNAPPY, LZ4, ZSTD]
record_batches.patch_parser()
Header = tuple[str, bytes | None]


def batch(
    *values: bytes, codec: int = PLAIN, base: int = 10, headers: tuple[Header, ...] = ()
) -> bytes:
    """A batch as a broker stores it; `NAME` in a header stands for one that is not UTF-8."""
    builder = DefaultRecordBatchBuilder(2, codec, 0, -1, -1, -1, 1 << 30)
    for number, value in enumerate(values):
        builder.append(number, 1000, b"k%d" % number, value, list(headers))
    return sealed(bytearray(builder.build()), base)


def sealed(data: bytearray, base: int = 10) -> bytes:
    data[:8] = struct.pack(">q", base)
    data[17:21] = struct.pack(">I", calc_crc32c(bytes(data[21:])))
    return bytes(data)


def read(data: bytes, start: int = 10) -> tuple[list[Any], int]:
    """What a consumer makes of it, and its next position."""
    tp = TopicPartition("t", 0)
    reading = PartitionRecords(tp, FetchedBatches(data), [], start, None, None, True, 0)
    found: list[Any] = []
    has_more = True
    while has_more:
        polled, has_more = reading.take(None)
        found += polled
    return found, reading.next_fetch_offset


@pytest.mark.parametrize("codec", [PLAIN, *COMPRESSED])
@pytest.mark.parametrize("size", [0, 300, 3_000_000])
def test_records_are_read_as_they_were_written(codec: int, size: int) -> None:
    values = [bytes([n]) * size for n in range(3)]
    found, after = read(batch(*values, codec=codec, headers=(("t", b"x"), ("n", None))) * 1)
    assert [r.offset for r in found] == [10, 11, 12]
    assert [r.key for r in found] == [b"k0", b"k1", b"k2"]
    assert [r.value for r in found] == values
    assert {r.timestamp for r in found} == {1000}
    assert {r.headers for r in found} == {(("t", b"x"), ("n", None))}
    assert after == 13


@pytest.mark.parametrize("codec", [PLAIN, *COMPRESSED])
def test_answer_of_several_batches_is_read_to_its_end(codec: int) -> None:
    data = b"".join(batch(b"a", b"b", codec=codec, base=10 + 2 * n) for n in range(5))
    found, after = read(data + data[:20], start=11)
    assert [r.offset for r in found] == list(range(11, 20))
    assert after == 20


def test_name_of_a_header_that_is_not_utf8_is_escaped() -> None:
    data = bytearray(batch(b"before", b"odd", b"after", headers=(("name", b"1"), ("t", b"x"))))
    at = data.index(b"name", data.index(b"odd"))
    data[at : at + 4] = b"\xff\xfe\xfd\xfc"
    found, after = read(sealed(data))
    assert [r.value for r in found] == [b"before", b"odd", b"after"]
    names = [r.headers[0][0] for r in found]
    assert sorted(names) == ["\\xff\\xfe\\xfd\\xfc", "name", "name"]
    assert [r.headers[1] for r in found] == [("t", b"x")] * 3
    assert after == 13


def gzipped(size: int) -> bytes:
    return gzip.compress(bytes(size), 1)


def zipped_in_members(size: int) -> bytes:
    return gzipped(size // 2) * 2


def zipped_between_empty_members(size: int) -> bytes:
    return gzip.compress(b"") + gzipped(size) + gzip.compress(b"")


def xerial(size: int) -> bytes:
    block = bytes(cramjam.snappy.compress_raw(bytes(size // 4)))
    header = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)
    return header + (struct.pack(">I", len(block)) + block) * 4


def without_size(size: int) -> bytes:
    making = zstandard.ZstdCompressor().compressobj()
    return bytes(making.compress(bytes(size)) + making.flush())


FORMS: list[tuple[int, Callable[[int], bytes]]] = [
    (GZIP, gzipped),
    (GZIP, zipped_in_members),
    (GZIP, zipped_between_empty_members),
    (SNAPPY, lambda size: bytes(cramjam.snappy.compress_raw(bytes(size)))),
    (SNAPPY, xerial),
    (LZ4, lambda size: bytes(cramjam.lz4.compress(bytes(size)))),
    (LZ4, lambda size: bytes(cramjam.lz4.compress(bytes(size // 2))) * 2),
    (ZSTD, lambda size: zstandard.ZstdCompressor().compress(bytes(size))),
    (ZSTD, without_size),
]


@pytest.mark.parametrize(("codec", "form"), FORMS)
def test_size_at_the_bound_is_expanded_and_one_above_it_is_not(
    codec: int, form: Callable[[int], bytes]
) -> None:
    most = 4 * 1024 * 1024
    assert decompress(codec, form(most), most) == bytes(most)
    with pytest.raises(DecompressionError, match="uncompressed"):
        decompress(codec, form(most + 4), most)


@pytest.mark.parametrize(("codec", "form"), FORMS)
def test_bomb_takes_no_more_memory_than_the_bound(codec: int, form: Callable[[int], bytes]) -> None:
    data = form(200 * 1024 * 1024)
    tracemalloc.start()
    with pytest.raises(DecompressionError):
        decompress(codec, data, 4 * 1024 * 1024)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * 1024 * 1024


@pytest.mark.parametrize("codec", [*COMPRESSED, 7])
@pytest.mark.parametrize(
    "damage", [lambda c: b"", lambda c: c[: len(c) // 2], lambda c: b"\xff" * 40]
)
def test_batch_that_cannot_be_decompressed_is_one_unreadable_record_at_its_last_offset(
    codec: int, damage: Callable[[bytes], bytes]
) -> None:
    whole = batch(b"x" * 100, b"y" * 100, codec=codec if codec < 5 else ZSTD)
    content = damage(whole[61:])
    data = bytearray(whole[:61] + content)
    data[8:12] = struct.pack(">i", len(data) - 12)
    data[21:23] = struct.pack(">h", codec)
    found, after = read(sealed(data) + batch(b"next", base=12))
    assert [type(r.value) for r in found] == [Unreadable, bytes]
    assert found[0].offset == 11
    assert "offsets 10 to 11" in found[0].value.reason
    assert (found[1].offset, found[1].value) == (12, b"next")
    assert after == 13


@pytest.mark.parametrize("codec", COMPRESSED)
def test_bomb_is_skipped_and_its_neighbours_are_read(codec: int) -> None:
    bomb = batch(bytes(MAX_UNCOMPRESSED_BYTES + 1), codec=codec, base=11)
    found, after = read(batch(b"before") + bomb + batch(b"after", base=12))
    assert [r.offset for r in found] == [10, 11, 12]
    assert isinstance(found[1].value, Unreadable)
    assert "uncompressed" in found[1].value.reason
    assert [found[0].value, found[2].value] == [b"before", b"after"]
    assert after == 13


def test_record_too_large_uncompressed_is_unreadable_and_keeps_its_key() -> None:
    found, after = read(batch(b"a", bytes(MAX_RECORD_BYTES), b"c", codec=ZSTD))
    assert [r.value for r in found][::2] == [b"a", b"c"]
    assert isinstance(found[1].value, Unreadable)
    assert found[1].key == b"k1"
    assert after == 13


def test_record_of_too_many_headers_is_unreadable() -> None:
    filler = bytes(2_000_000)  # such a batch is parsed with care
    headers = (("", None),) * (MAX_HEADERS + 1)
    builder = DefaultRecordBatchBuilder(2, ZSTD, 0, -1, -1, -1, 1 << 30)
    builder.append(0, 1000, b"k0", filler, [])
    builder.append(1, 1000, b"k1", b"", list(headers))
    found, _ = read(sealed(bytearray(builder.build())))
    assert found[0].value == filler
    assert "headers" in found[1].value.reason


@pytest.mark.parametrize("at", range(61, 90))
def test_no_byte_of_a_record_can_stop_a_reader(at: int) -> None:
    """Brokers check the checksum of a batch, not what it says of its records."""
    whole = bytearray(batch(b"one", b"two", headers=(("t", b"x"),)))
    for byte in (0, 1, 0x7F, 0x80, 0xFF):
        data = bytearray(whole)
        data[min(at, len(data) - 1)] = byte
        found, after = read(sealed(data) + batch(b"next", base=12))
        assert found[-1].value == b"next"
        assert after == 13


def test_batch_that_names_more_records_than_it_holds_ends_as_unreadable() -> None:
    data = bytearray(batch(b"one", b"two"))
    data[57:61] = struct.pack(">i", 2_000_000_000)
    data[23:27] = struct.pack(">i", 4)
    found, after = read(sealed(data))
    assert [r.value for r in found[:2]] == [b"one", b"two"]
    assert isinstance(found[2].value, Unreadable)
    assert (len(found), found[2].offset) == (3, 14)
    assert after == 15


@pytest.mark.parametrize("filler", [b"", bytes(2_000_000)], ids=["compiled", "careful"])
@pytest.mark.parametrize("delta", [1_000_000, -7, 0, 3])
def test_record_of_an_offset_outside_its_batch_moves_no_position(delta: int, filler: bytes) -> None:
    """Brokers assign the offsets of a batch, and do not look at those in its records."""
    builder = DefaultRecordBatchBuilder(2, PLAIN, 0, -1, -1, -1, 1 << 30)
    for number, value in enumerate([filler, b"stray", b"last"]):
        builder.append(delta if value == b"stray" else number, 1000, b"k%d" % number, value, [])
    data = bytearray(builder.build())
    data[23:27] = struct.pack(">i", 2)
    found, after = read(sealed(data) + batch(b"next", base=13))
    assert [r.offset for r in found] == [10, 11, 12, 13]
    assert [r.value for r in found][2:] == [b"last", b"next"]
    assert isinstance(found[1].value, Unreadable)
    assert (found[1].key, after) == (b"k1", 14)


def test_offsets_in_a_compacted_batch_keep_their_gaps() -> None:
    builder = DefaultRecordBatchBuilder(2, PLAIN, 0, -1, -1, -1, 1 << 30)
    for offset in (2, 5):
        builder.append(offset, 1000, b"k", b"v", [])
    data = bytearray(builder.build())
    data[23:27] = struct.pack(">i", 8)
    found, after = read(sealed(data))
    assert [r.offset for r in found] == [12, 15]
    assert after == 19


def test_gzip_of_very_many_members_is_refused_at_once() -> None:
    """The copies of what is left would be 1.7 TB."""
    with pytest.raises(DecompressionError, match="members"):
        decompress(GZIP, gzip.compress(b"x") * 400_000, MAX_UNCOMPRESSED_BYTES)


@pytest.mark.parametrize(
    "headers", [(("h", bytes(MAX_RECORD_BYTES // 2)),), (("", None),) * 70_000]
)
def test_one_poll_counts_the_headers_of_records(headers: tuple[Header, ...]) -> None:
    data = b"".join(batch(b"v", codec=ZSTD, base=10 + n, headers=headers) for n in range(4))
    result, _ = fetched(data)
    assert [record.offset for record in result.getall(500)] == [10, 11]
    assert [record.offset for record in result.getall(500)] == [12, 13]


@pytest.mark.parametrize("codec", COMPRESSED)
def test_one_poll_ends_after_a_batch_that_was_too_large(codec: int) -> None:
    """Decompressing to the bound takes 20 ms: 2000 batches of one poll held the event loop."""
    bomb = batch(bytes(MAX_UNCOMPRESSED_BYTES + 1), codec=codec)
    result, _ = fetched(b"".join(sealed(bytearray(bomb), 10 + n) for n in range(3)))
    for offset in (10, 11, 12):
        assert [record.offset for record in result.getall(500)] == [offset]


@pytest.mark.parametrize(
    ("values", "polled"),
    [([bytes(1_000_000)], [18, 27]), ([bytes(2_000_000), *[b""] * 20_000], [5974, 14166])],
    ids=["batches", "records"],
)
def test_unselected_records_also_end_a_poll(values: list[bytes], polled: list[int]) -> None:
    chosen = KeyFilter()
    chosen.keys = {b"awaited"}
    one = batch(*values, codec=ZSTD)
    data = b"".join(sealed(bytearray(one), 10 + n * len(values)) for n in range(18))
    result, position = fetched(data, chosen)
    for offset in polled:
        assert [record.offset for record in result.getall(500)] == [offset]
        assert position.position == offset + 1


def test_reader_skips_unselected_records() -> None:
    kafka = SimpleNamespace(
        request_timeout_s=1.0, options={}, full_name=lambda name: TopicPartition(*name)
    )
    reader = KafkaReader(cast("KafkaLog", kafka), moving=False)
    name = Partition("t", 0)
    reader.assign({name: 10}, {b"k0"})
    found, _ = read(batch(b"chosen", b"other"))
    tp = TopicPartition("t", 0)
    assert reader._take({tp: found}) == {name: found[:1]}
    assert reader.position(name) == 12
    reader.assign({name: 11}, {b"k0"})
    assert reader._take({tp: found[1:]}) == {}
    assert reader.position(name) == 12


def fetched(data: bytes, chosen: KeyFilter | None = None) -> tuple[Any, SimpleNamespace]:
    """One answer of a broker as the client holds it, and the client's position."""
    tp = TopicPartition("t", 0)
    chosen = chosen or KeyFilter()
    records = fetcher.PartitionRecords(tp, FetchedBatches(data), [], 10, chosen, None, True, 0)
    position = SimpleNamespace(paused=False, position=10)
    position.consumed_to = lambda offset: setattr(position, "position", offset)
    assignment = SimpleNamespace(active=True, state_value=lambda _: position)
    result = fetcher.FetchResult(tp, assignment=assignment, partition_records=records, backoff=0)
    return result, position


def test_one_poll_returns_a_bounded_number_of_bytes() -> None:
    data = b"".join(batch(bytes(MAX_RECORD_BYTES // 2), codec=ZSTD, base=10 + n) for n in range(6))
    result, position = fetched(data)
    for polled in ([10, 11], [12, 13], [14, 15]):
        assert [record.offset for record in result.getall(500)] == polled
        assert position.position == polled[-1] + 1
    assert result.getall(500) == []
    assert not result.has_more()
    assert MAX_POLLED_BYTES == MAX_RECORD_BYTES


def test_consumers_of_other_programs_keep_the_records_of_aiokafka() -> None:
    tp = TopicPartition("t", 0)
    data = batch(b"a", b"b", b"c")
    records = fetcher.PartitionRecords(tp, FetchedBatches(data), [], 10, None, bytes.upper, True, 0)
    position = SimpleNamespace(paused=False, position=10)
    position.consumed_to = lambda offset: setattr(position, "position", offset)
    assignment = SimpleNamespace(active=True, state_value=lambda _: position)
    result = fetcher.FetchResult(tp, assignment=assignment, partition_records=records, backoff=0)
    one = result.getone()
    assert (one.topic, one.partition, one.offset, one.value) == ("t", 0, 10, b"A")
    assert [record.value for record in result.getall()] == [b"B", b"C"]
    assert position.position == 13


def test_number_of_records_of_a_poll_is_bounded_as_before() -> None:
    result, _ = fetched(batch(*[b"x"] * 5))
    assert [record.offset for record in result.getall(3)] == [10, 11, 12]
    assert [record.offset for record in result.getall(3)] == [13, 14]
    assert not result.has_more()
