"""A codec of Kafka's fetch API, version 11: requests to bytes, bytes to responses. Pure.

The layout is in five structs instead of a schema:
https://kafka.apache.org/protocol#The_Messages_Fetch; tests compare it with aiokafka's classes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from aiokafka import TopicPartition

API_KEY, API_VERSION = 1, 11

_HEADER = struct.Struct(">hhih")  # API key, version, correlation id, length of the client id
_CORRELATION_ID = struct.Struct(">i")
_REQUEST = struct.Struct(">iiiibii")  # replica, max wait, min and max bytes, isolation, session
_WANTED = struct.Struct(">iiqqi")  # partition, leader epoch, offset, log start, max bytes
_RESPONSE = struct.Struct(">ihii")  # throttle time, error, session id, number of topics
_PARTITION = struct.Struct(">ihqqqi")  # partition, error, three offsets, aborted transactions
_ABORTED = struct.Struct(">qq")  # producer id, first offset
_RECORDS = struct.Struct(">ii")  # preferred read replica, size of the records
_COUNT = struct.Struct(">i")
_LENGTH = struct.Struct(">h")


class FetchOptions(NamedTuple):
    """The part of a request that is the same in all requests of a consumer."""

    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    isolation_level: int
    max_partition_bytes: int
    rack: str


PartitionResponse = tuple[int, int, int, int, int, list[tuple[int, int]] | None, int, bytes]
"""Partition, error code, high watermark, last stable offset, log start offset, aborted transactions
(producer id, first offset; None: null), preferred read replica (-1: none), record batches. A tuple
in the order of aiokafka's class, since its fetcher reads it."""


class FetchResponse(NamedTuple):
    """A decoded response. `topics` holds the partitions that the broker has listed."""

    throttle_ms: int
    error_code: int
    session_id: int
    topics: list[tuple[str, list[PartitionResponse]]]

    @property
    def API_VERSION(self) -> int:  # noqa: N802  # aiokafka's name
        """The version, as aiokafka's fetcher asks for it."""
        return API_VERSION


def encode_header(
    correlation_id: int, client_id: str, api_key: int = API_KEY, version: int = API_VERSION
) -> bytes:
    name = client_id.encode()
    return _HEADER.pack(api_key, version, correlation_id, len(name)) + name


def decode_header(data: bytes) -> int:
    correlation_id: int = _CORRELATION_ID.unpack_from(data)[0]
    return correlation_id


def encode_request(
    options: FetchOptions,
    session_id: int,
    epoch: int,
    positions: Iterable[tuple[TopicPartition, int]],
    forgotten: Iterable[TopicPartition],
) -> bytes:
    """The body of a request: `positions` to fetch from, `forgotten` partitions to leave out."""
    by_topic: dict[str, list[bytes]] = {}
    for (topic, partition), offset in positions:
        wanted = _WANTED.pack(partition, -1, offset, -1, options.max_partition_bytes)
        by_topic.setdefault(topic, []).append(wanted)
    gone: dict[str, list[bytes]] = {}
    for topic, partition in forgotten:
        gone.setdefault(topic, []).append(_COUNT.pack(partition))
    head = _REQUEST.pack(
        -1, options.max_wait_ms, options.min_bytes, options.max_bytes, options.isolation_level,
        session_id, epoch,
    )  # fmt: skip
    return b"".join((head, _topics(by_topic), _topics(gone), _string(options.rack)))


def decode_response(data: bytes, at: int = _CORRELATION_ID.size) -> FetchResponse:
    """The response whose body begins at byte `at`. Raises struct.error, UnicodeDecodeError."""
    throttle_ms, error_code, session_id, topic_count = _RESPONSE.unpack_from(data, at)
    at += _RESPONSE.size
    topics = []
    for _ in range(topic_count):
        (size,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        topic = data[at : at + size].decode()
        at += size
        (count,) = _COUNT.unpack_from(data, at)
        at += _COUNT.size
        partitions = []
        for _ in range(count):
            partition, error, high, stable, start, aborted_count = _PARTITION.unpack_from(data, at)
            at += _PARTITION.size
            aborted = None
            if aborted_count >= 0:
                end = at + aborted_count * _ABORTED.size
                aborted = list(_ABORTED.iter_unpack(data[at:end]))
                at = end
            replica, size = _RECORDS.unpack_from(data, at)
            at += _RECORDS.size
            end = at + max(size, 0)  # negative: null
            if end > len(data):
                raise struct.error(f"{topic}[{partition}]: {size} bytes of records are cut off")
            partitions.append(
                (partition, error, high, stable, start, aborted, replica, data[at:end])
            )
            at = end
        topics.append((topic, partitions))
    return FetchResponse(throttle_ms, error_code, session_id, topics)


def _topics(by_topic: Mapping[str, Sequence[bytes]]) -> bytes:
    pieces = [_COUNT.pack(len(by_topic))]
    for topic, partitions in by_topic.items():
        pieces += (_string(topic), _COUNT.pack(len(partitions)), *partitions)
    return b"".join(pieces)


def _string(text: str) -> bytes:
    data = text.encode()
    return _LENGTH.pack(len(data)) + data
