"""A parser of fetched record batches that no content can stop.

An unreadable record (also one that is too large uncompressed, or has too many headers) becomes an
`Unreadable` at its offset, so that the reader gets its neighbours. One poll returns a bounded
number of bytes per partition. In consumers with a `KeyFilter`, `FetchedBatches` replaces aiokafka's
`MemoryRecords`, `PartitionRecords` the class of that name, and `next_records` `FetchResult.getall`.
Consumers that read committed get no aborted records.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from aiokafka import TopicPartition
from aiokafka.consumer import fetcher
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecord, DefaultRecordBatch
from aiokafka.record.memory_records import MemoryRecords

from kvlane.streams.kafka.client_patches.decompression import DecompressionError, decompress
from kvlane.streams.kafka.connection_options import KeyFilter
from kvlane.streams.ports import Headers, Unreadable
from kvlane.streams.topics import MAX_RECORD_BYTES, MAX_UNCOMPRESSED_BYTES

log = logging.getLogger(__name__)

MAX_CLIENT_PARSED_BYTES = 1024 * 1024
"""A batch above this size is parsed here, with all bounds; others by the client's parser."""
MAX_HEADERS = 1000
HEADER_COST_BYTES = 64
"""Memory of the objects for a header, which takes 2 bytes in a batch."""
MAX_POLLED_BYTES = MAX_RECORD_BYTES
"""Bytes per partition in one poll, plus one record; decompressed or not."""
RECORD_COST_BYTES = 1024
"""Cost of parsing a record here, counted in bytes. 8000 of them take 40 ms."""

_LENGTH = struct.Struct(">i")
_LOG_OVERHEAD = 12  # base offset and length precede the bytes that the length counts
_MAGIC = 16
_ATTRIBUTES = 21
_COUNT = 57
_RECORDS = 61  # behind the header of a batch
_CODEC = 0x07


class ReadRecord(NamedTuple):
    """One record as a poll returns it; implements `Record`."""

    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers


_new_record = tuple.__new__  # a third faster than the constructor of a named tuple


class DamagedRecordError(Exception):
    """A record whose bytes are invalid."""


class FetchedBatches:
    """The batches in one fetch response; replaces aiokafka's `MemoryRecords`."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._data = memoryview(data)
        self._position = 0
        self._end = self._end_of_batch()
        self.parsed_bytes = 0
        """Decompressed bytes of the batches that were started: they take time without a record,
        too."""

    def size_in_bytes(self) -> int:
        """Size of the response, with an incomplete batch at its end."""
        return len(self._data)

    def has_next(self) -> bool:
        return self._end is not None

    def next_batch(self) -> Any:
        end = self._end
        if end is None:
            return None
        data = self._data[self._position : end]
        self._position = end
        self._end = self._end_of_batch()
        if len(data) > _MAGIC and data[_MAGIC] < 2:  # not written by any broker since Kafka 0.11
            return MemoryRecords(bytes(data)).next_batch()
        return FetchedBatch(data, self)

    def _end_of_batch(self) -> int | None:
        at = self._position
        if len(self._data) - at < _LOG_OVERHEAD:
            return None
        (length,) = _LENGTH.unpack_from(self._data, at + 8)
        end: int = at + _LOG_OVERHEAD + length
        return end if end <= len(self._data) else None


class FetchedBatch:
    """One batch. Iterating never raises: unreadable content becomes an `Unreadable`."""

    __slots__ = ("_answer", "_batch", "_data", "is_control_batch", "next_offset")

    @property
    def base_offset(self) -> int:
        return int(self._batch.base_offset)

    @property
    def transactional_producer(self) -> int | None:
        """The producer of a transaction's batch, None for any other batch."""
        return int(self._batch.producer_id) if self._batch.is_transactional else None

    def __init__(self, data: memoryview, answer: FetchedBatches) -> None:
        self._data = data
        self._answer = answer
        self._batch = batch = DefaultRecordBatch(data)
        self.next_offset: int = batch.next_offset
        self.is_control_batch: bool = batch.is_control_batch

    def validate_crc(self) -> bool:
        """Whether the checksum matches; brokers check every batch that they accept."""
        return bool(self._batch.validate_crc())

    def __iter__(self) -> Iterator[Any]:
        batch, data, content = self._batch, self._data, None
        if codec := batch.compression_type:
            try:
                content = decompress(codec, bytes(data[_RECORDS:]), MAX_UNCOMPRESSED_BYTES)
            except DecompressionError as e:
                self._answer.parsed_bytes += MAX_UNCOMPRESSED_BYTES
                yield self._unreadable(str(e))
                return
            if len(content) <= MAX_CLIENT_PARSED_BYTES:
                plain = struct.pack(">h", batch.attributes & ~_CODEC)
                batch = DefaultRecordBatch(
                    b"".join((data[:_ATTRIBUTES], plain, data[_ATTRIBUTES + 2 : _RECORDS], content))
                )
        self._answer.parsed_bytes += len(content if content is not None else data)
        read, last, after = 0, batch.base_offset - 1, self.next_offset
        if len(content if content is not None else data) <= MAX_CLIENT_PARSED_BYTES:
            try:
                for record in batch:
                    if not last < record.offset < after:  # brokers do not check it
                        break
                    last = record.offset
                    yield record
                    read += 1
                else:
                    return
            except Exception:  # noqa: BLE001, S110  # any error: the careful parser continues
                pass
        yield from self._parsed(bytes(data[_RECORDS:]) if content is None else content, read, last)

    def _parsed(self, content: bytes, skip: int, last: int) -> Iterator[DefaultRecord]:
        """The records of a batch's content after the first `skip`, which end at offset `last`."""
        position = 0
        (count,) = struct.unpack_from(">i", self._data, _COUNT)
        for number in range(count):
            try:
                record, position = _field(content, position)
            except DamagedRecordError as e:
                yield self._unreadable(f"record {number + 1} of {count}: {e}")
                return
            self._answer.parsed_bytes += RECORD_COST_BYTES
            if number < skip:
                continue
            if last + 1 >= self.next_offset:
                return  # no offset of the batch is left
            found = self._record(record or b"", number)
            if not last < found.offset < self.next_offset:
                reason = f"a record of offset {found.offset}, which is not in its batch"
                found = self._lost(last + 1, found.timestamp, found.key, reason)
            last = found.offset
            yield found

    def _record(self, data: bytes, number: int) -> DefaultRecord:
        batch = self._batch
        offset, at_ms = batch.base_offset + number, batch.max_timestamp
        key = None
        try:
            delta, position = _varint(data, 1)  # after the attributes
            shift, position = _varint(data, position)
            offset = batch.base_offset + shift
            if not batch.timestamp_type:  # the time of creation
                at_ms = batch.first_timestamp + delta
            key, position = _field(data, position)
            if (size := len(data)) > MAX_RECORD_BYTES:
                reason = f"a record of {size} bytes uncompressed, above {MAX_RECORD_BYTES}"
                return self._lost(offset, at_ms, key, reason)
            value, position = _field(data, position)
            headers = _headers(data, position)
        except DamagedRecordError as e:
            return self._lost(offset, at_ms, key, f"a record that cannot be read: {e}")
        return DefaultRecord(offset, at_ms, batch.timestamp_type, key, value, headers)

    def _unreadable(self, reason: str) -> DefaultRecord:
        """Replaces the rest of the batch, at its last offset."""
        last = self.next_offset - 1
        what = f"the batch of offsets {self._batch.base_offset} to {last} cannot be read: {reason}"
        return self._lost(last, self._batch.max_timestamp, None, what)

    def _lost(self, offset: int, at_ms: int, key: bytes | None, reason: str) -> DefaultRecord:
        if key is not None and len(key) > MAX_RECORD_BYTES:
            key = None
        value = Unreadable(reason.encode())
        return DefaultRecord(offset, at_ms, self._batch.timestamp_type, key, value, ())


def _varint(data: bytes, position: int) -> tuple[int, int]:
    result = shift = 0
    while position < len(data) and shift < 70:
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (result >> 1) ^ -(result & 1), position
        shift += 7
    raise DamagedRecordError("a number without an end")


def _field(data: bytes, position: int) -> tuple[bytes | None, int]:
    length, position = _varint(data, position)
    if length < 0:
        return None, position
    if position + length > len(data):
        raise DamagedRecordError("a field is longer than its container")
    return data[position : position + length], position + length


def _headers(data: bytes, position: int) -> tuple[tuple[str, bytes | None], ...]:
    count, position = _varint(data, position)
    if not 0 <= count <= MAX_HEADERS:
        raise DamagedRecordError(f"{count} headers, above {MAX_HEADERS}")
    headers = []
    for _ in range(count):
        name, position = _field(data, position)
        value, position = _field(data, position)
        headers.append(((name or b"").decode(errors="backslashreplace"), value))
    return tuple(headers)


class PartitionRecords:
    """The records of one partition in a fetch response."""

    def __init__(
        self,
        tp: TopicPartition,
        records: Any,
        aborted_transactions: Sequence[tuple[int, int]] | None,
        fetch_offset: int,
        key_filter: KeyFilter | None,
        _value_deserializer: object,
        check_crcs: bool,  # noqa: FBT001  # passed by aiokafka by its place
        _isolation_level: int,
    ) -> None:
        self._tp = tp
        self._records = records
        self._filter = key_filter
        self._check_crcs = check_crcs
        self._aborted = deque(sorted(aborted_transactions or (), key=itemgetter(1)))
        self._aborting: set[int] = set()
        self._batch: Any = None
        self._rest: Iterator[Any] = iter(())  # of the batch
        self.next_fetch_offset = fetch_offset

    def take(self, max_records: int | None) -> tuple[list[ReadRecord], bool]:
        """The next records, at most MAX_POLLED_BYTES and one more, and whether there may be others.
        Of a `KeyFilter`'s keys only. Raises CorruptRecordException for a wrong checksum."""
        found: list[ReadRecord] = []
        answer, partition, offset = self._records, self._tp.partition, self.next_fetch_offset
        keys = None if self._filter is None else self._filter.keys
        size, most = 0, answer.parsed_bytes + MAX_POLLED_BYTES
        while True:
            for record in self._rest:
                key = record.key
                if record.offset < offset or not (
                    keys is None or key in keys or answer.parsed_bytes >= most
                ):
                    continue
                offset, value, headers = record.offset, record.value, tuple(record.headers)
                fields = (partition, offset, record.timestamp, key, value, headers)
                found.append(_new_record(ReadRecord, fields))
                offset += 1
                size += len(key or b"") + len(value or b"")
                for name, content in headers:
                    size += HEADER_COST_BYTES + len(name) + len(content or b"")
                if (
                    size >= MAX_POLLED_BYTES
                    or answer.parsed_bytes >= most
                    or len(found) == max_records
                ):
                    self.next_fetch_offset = offset
                    return found, True
            if self._batch is not None:
                self.next_fetch_offset = offset = self._batch.next_offset
            self._batch = batch = answer.next_batch()
            if batch is None:
                return found, False
            if self._check_crcs and not batch.validate_crc():
                self._batch, self._records = None, FetchedBatches(b"")  # it is fetched again
                raise CorruptRecordException(f"a batch of {self._tp} does not match its checksum")
            if not (self._is_aborted(batch) or batch.is_control_batch):
                self._rest = iter(batch)

    def _is_aborted(self, batch: Any) -> bool:
        """Whether a batch, in offset order, belongs to an aborted transaction: from the first
        offset that a response names, to the producer's next control batch."""
        if not (self._aborted or self._aborting) or not isinstance(batch, FetchedBatch):
            return False
        while self._aborted and self._aborted[0][1] <= batch.base_offset:
            self._aborting.add(self._aborted.popleft()[0])
        producer = batch.transactional_producer
        if producer not in self._aborting:
            return False
        if batch.is_control_batch:
            self._aborting.discard(producer)
        return True


def next_records(result: Any, max_records: int | None = None) -> list[ReadRecord]:
    """The next records of a partition; replaces aiokafka's `FetchResult.getall`."""
    if isinstance(result._partition_records, _aiokafka_records):
        return _aiokafka_getall(result, max_records)  # type: ignore[no-any-return]
    if not result.check_assignment(result._topic_partition) or not result.has_more():
        return []
    found: list[ReadRecord]
    found, has_more = result._partition_records.take(max_records)
    result._update_position()
    if not has_more:
        result._partition_records = None
    return found


def _records_of(
    tp: TopicPartition,
    records: FetchedBatches,
    aborted_transactions: Any,
    fetch_offset: int,
    key_deserializer: object,
    *rest: Any,
) -> Any:
    """The records of a partition, as its consumer reads them; called like `PartitionRecords`."""
    if isinstance(key_deserializer, KeyFilter):
        return PartitionRecords(
            tp, records, aborted_transactions, fetch_offset, key_deserializer, *rest
        )
    return _aiokafka_records(
        tp, MemoryRecords(records.data), aborted_transactions, fetch_offset, key_deserializer, *rest
    )


_aiokafka_records, _aiokafka_getall = fetcher.PartitionRecords, fetcher.FetchResult.getall


def patch_parser() -> None:
    """Replace the parser of consumers with a `KeyFilter` in this process. Idempotent."""
    fetcher.MemoryRecords = FetchedBatches
    fetcher.PartitionRecords = _records_of
    fetcher.FetchResult.getall = next_records
