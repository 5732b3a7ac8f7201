"""An incremental fetch session (KIP-227) with one broker, and the codec of its requests. Pure.

A broker keeps the partitions and positions of a session. A request lists only the partitions that
differ, and the response only those with records, an error or a new end. The rules that keep both
sides equal:

- One request at a time; `positions` are those of the last.
- A partition that is not read (revoked, paused, moved, or with records that wait in the client) is
  forgotten, else the broker would answer at once, again and again.
- A request without a response, or with an error of the whole response, leaves open which side the
  broker has: `restart`. So does a new assignment, since ends of partitions are reported once.
- A broker without a free session answers with session id 0: the next request is a full one.

A broker has 1000 sessions by default, so the first requests of a reader are made without one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from aiokafka import TopicPartition

NO_SESSION = 0
"""Session id of a client that has none."""
FINAL_EPOCH = -1
"""Epoch of a request that lists all partitions and opens no session."""
INITIAL_EPOCH = 0
"""Epoch of a request that lists all partitions and opens a session. Both close the one named."""
MAX_EPOCH = 2**31 - 1

REQUESTS_WITHOUT_SESSION = 3
"""Responses after a (re)start before a session is opened."""


class SessionRequest(NamedTuple):
    """The part of a fetch request that depends on the session."""

    session_id: int
    epoch: int
    positions: list[tuple[TopicPartition, int]]
    forgotten: list[TopicPartition]


class FetchSession:
    __slots__ = ("_answered", "_epoch", "_id", "_record_bytes", "positions")

    def __init__(self) -> None:
        self._id = NO_SESSION
        self._epoch = FINAL_EPOCH
        self._answered = 0
        self._record_bytes = 0
        self.positions: Mapping[TopicPartition, int] = {}
        """Partitions and positions of the last request."""

    @property
    def record_bytes(self) -> int | None:
        """Bytes of records in the last response; None after one of the first after a (re)start."""
        return self._record_bytes if self._answered >= REQUESTS_WITHOUT_SESSION else None

    def request(self, wanted: Mapping[TopicPartition, int]) -> SessionRequest:
        """The request that makes the broker's side equal to `wanted`, which must not change."""
        known, self.positions = self.positions, wanted
        if self._epoch > INITIAL_EPOCH and wanted == known:
            return SessionRequest(self._id, self._epoch, [], [])
        changed = [item for item in wanted.items() if known.get(item[0]) != item[1]]
        if self._epoch <= INITIAL_EPOCH:
            # A broker fills a response in the order of the request, so that those that have just
            # got records come last. In a session it keeps that order itself.
            others = [item for item in wanted.items() if known.get(item[0]) == item[1]]
            return SessionRequest(self._id, self._epoch, others + changed, [])
        forgotten = [tp for tp in known if tp not in wanted]
        return SessionRequest(self._id, self._epoch, changed, forgotten)

    def answered(self, session_id: int, record_bytes: int) -> None:
        """The broker has answered the last request, with so many bytes of records."""
        self._answered += 1
        self._record_bytes = record_bytes
        if session_id == NO_SESSION:
            opening = self._answered >= REQUESTS_WITHOUT_SESSION
            self._epoch = INITIAL_EPOCH if opening else FINAL_EPOCH
        else:
            self._epoch = 1 if self._epoch >= MAX_EPOCH else self._epoch + 1
        self._id = session_id

    def restart(self) -> None:
        """Begin anew: the broker's side is unknown, or unfit."""
        self._epoch = FINAL_EPOCH
        self._answered = 0


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
