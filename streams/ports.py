"""The log as kvlane sees it: five small interfaces, implemented twice.

`streams/kafka/` implements them over a real broker, `streams/memory/` in this process; one contract
suite (`tests/contracts`) runs over both. Topic names here are the short ones of
`streams/topics.py`; the implementation adds the deployment's prefix.

    Log      append, ask for offsets, open readers and group members, administer topics
    Reader   reads chosen partitions from chosen positions, without a group
    Member   one member of a consumer group: owns partitions, commits by its own account
    Record   one record as it was read            Entry   one record to append

All waiting calls take a deadline or have one from the settings; none waits for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol


class Partition(NamedTuple):
    """A topic (short name) and the number of one of its partitions."""

    topic: str
    partition: int


class Entry(NamedTuple):
    """One record to append. A value of None is a tombstone."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()


class Appended(NamedTuple):
    """Where an entry (the first one of a batch) stands in the log; append time in broker ms."""

    partition: int
    offset: int
    timestamp_ms: int


class Record(Protocol):
    """One record as it was read.

    The attribute names are those of the Kafka client's own record, which is handed out as it is:
    wrapping every record would cost more than reading it.
    """

    @property
    def partition(self) -> int:
        """The partition it was read from."""

    @property
    def offset(self) -> int:
        """Its place in the partition."""

    @property
    def timestamp(self) -> int:
        """Append time, milliseconds of broker time."""

    @property
    def key(self) -> bytes | None:
        """What decided the partition; names a request, a worker or an entity."""

    @property
    def value(self) -> bytes | None:
        """The bytes of the record; None for a tombstone."""

    @property
    def headers(self) -> Sequence[tuple[str, bytes]]:
        """Names and values, in the order they were written."""


Batches = Mapping[Partition, Sequence[Record]]
"""What one poll returns: records by partition, each list in offset order and never empty."""


class Reader(Protocol):
    """Reads partitions from explicit positions; belongs to no group and commits nothing."""

    def assign(self, positions: Mapping[Partition, int]) -> None:
        """Read exactly these partitions, each from the given offset on."""

    async def poll(self, timeout_s: float, max_records: int = 2000) -> Batches:
        """The next records; empty after `timeout_s` without any.

        Raises PositionLost when a position lies outside of the log: what it was to read is gone.
        Outages of the broker are waited out: the poll comes back empty.
        """

    def position(self, partition: Partition) -> int:
        """Every record below this offset was returned by a poll, or is known to be gone.

        Compaction and retention leave gaps, at the end of a log too. A later poll that finds
        nothing left in a partition moves its position to the end that it saw, also while other
        partitions keep returning records: waiting for an end offset must come to an end.
        """

    async def close(self) -> None:
        """Stop reading; idempotent."""


class Ownership(Protocol):
    """Who is told about the partitions a member owns.

    Called on the event loop, synchronously. After `revoked` no poll returns records of those
    partitions until they are `assigned` again, and then from the committed offset on.
    """

    def assigned(self, starts: Mapping[int, int]) -> None:
        """These partitions are owned from now on; reading starts at the given offsets.

        Nothing is read from a new partition before `Member.resume`.
        """

    def revoked(self, partitions: frozenset[int]) -> None:
        """These partitions are no longer owned; what is unfinished there is somebody else's."""


class Member(Protocol):
    """One member of a consumer group on one topic. Range assignor; no automatic commits."""

    async def poll(self, timeout_s: float, max_records: int = 500) -> Batches:
        """The next records of owned, resumed partitions; empty after `timeout_s` without any."""

    def resume(self, partition: int) -> None:
        """Start reading an owned partition. Ignored when it is not owned (any more)."""

    async def commit(self, offsets: Mapping[int, int]) -> None:
        """Commit next offsets by partition.

        Raises OwnershipLost when the group has moved on, AppendFailed when no answer came.
        """

    async def close(self) -> None:
        """Leave the group, without committing anything."""


class Log(Protocol):
    """A connection to the log, for one process.

    Everything here and in its readers and members may raise Denied, which repeating cannot cure,
    and LogClosed after `close`.
    """

    async def start(self) -> None:
        """Connect. Raises BrokerUnavailable, Denied."""

    async def close(self) -> None:
        """Flush and disconnect; idempotent."""

    async def partitions(self, topic: str) -> int:
        """How many partitions a topic has. Raises TopicsDiffer when it does not exist."""

    async def append(self, topic: str, entry: Entry, partition: int | None = None) -> Appended:
        """Append one record and wait for its acknowledgement by all in-sync replicas.

        Without `partition` the key decides (murmur2, as in the Java client).
        Raises AppendFailed when no acknowledgement came in time, RecordTooLarge.
        """

    async def append_batch(self, topic: str, partition: int, entries: Sequence[Entry]) -> Appended:
        """Append records to one partition, in order, as one request. All or none is appended.

        Raises as `append`; RecordTooLarge when they do not fit into one batch of 1 MiB together.
        """

    async def start_offsets(self, topic: str, partitions: Sequence[int]) -> dict[int, int]:
        """Offset of the oldest record kept, by partition. Raises BrokerUnavailable."""

    async def end_offsets(self, topic: str, partitions: Sequence[int]) -> dict[int, int]:
        """Offset the next record will get, by partition. Raises BrokerUnavailable."""

    async def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        """First offset appended at or after `timestamp_ms`; the end when there is none."""

    def reader(self, *, moving: bool = True) -> Reader:
        """A reader that reads nothing until `assign`.

        Without `moving` it is for positions that stay: brokers are asked less often when there is
        nothing new, and what is assigned while it reads may wait a quarter of a second.
        """

    def member(self, topic: str, group: str, ownership: Ownership) -> Member:
        """Join a group at the first poll. Partitions without a commit start at the log's start."""
