"""The interfaces of the log, implemented by `streams/kafka/` and `streams/memory/`.

    Log      append, ask for offsets, open readers and group members
    Reader   reads chosen partitions from chosen positions, without a group
    Member   one member of a consumer group: owns partitions, commits explicitly
    TransactionalWriter   appends to several partitions, all or nothing, one writer of a name

Names of topics are without the prefix of the deployment. Every waiting call has a deadline, from
its caller or from the settings. One contract suite (`tests/contracts`) runs over both.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:  # routing, which is pure, reads Partition and Record from here
    from asyncio import Future


POLL_S = 1.0
"""Longest wait of a poll without records, of a reader that does nothing else meanwhile."""


class Partition(NamedTuple):
    """A topic (short name) and the number of one of its partitions."""

    topic: str
    partition: int


Headers = tuple[tuple[str, bytes | None], ...]
"""Names and values of the headers of a record, in order. Kafka's values may be null."""


class Entry(NamedTuple):
    """One record to append. A value of None is a tombstone."""

    key: bytes | None
    value: bytes | None
    headers: Headers = ()


class TopicEntry(NamedTuple):
    """One record to append in a transaction, to a topic of the deployment only: a partition without
    a broker holds the transaction, and its writer. Without `partition` the key decides."""

    topic: str
    entry: Entry
    partition: int | None = None


class Appended(NamedTuple):
    """Position of an entry (of the first one of a batch), and its append time in broker ms."""

    partition: int
    offset: int
    timestamp_ms: int


class Unreadable(bytes):
    """Replaces the value of a record, or of a batch of records, that could not be read. The bytes
    are the reason, as text. The offset of the record is that of the last missing one."""

    __slots__ = ()

    @property
    def reason(self) -> str:
        return self.decode(errors="replace")


class Record(Protocol):
    """One record as it was read, with the attribute names of Kafka clients."""

    @property
    def partition(self) -> int:
        """The partition it was read from."""

    @property
    def offset(self) -> int:
        """The offset in the partition."""

    @property
    def timestamp(self) -> int:
        """Append time, milliseconds of broker time."""

    @property
    def key(self) -> bytes | None:
        """The key that determined the partition: a request, a worker or an entity."""

    @property
    def value(self) -> bytes | None:
        """The bytes of the record; None for a tombstone."""

    @property
    def headers(self) -> Sequence[tuple[str, bytes | None]]:
        """Names and values, in the order they were written. Kafka's values may be null."""


Batches = Mapping[Partition, Sequence[Record]]
"""The result of a poll: records by partition, each list in offset order and never empty."""


class Reader(Protocol):
    """Reads partitions from explicit positions; belongs to no group and commits nothing."""

    def assign(
        self, positions: Mapping[Partition, int], keys: Container[bytes | None] | None = None
    ) -> None:
        """Read exactly these partitions, each from the given offset on; with `keys` only records
        with one of them. Keys added between two polls apply from `position` on."""

    async def poll(self, timeout_s: float, max_records: int = 2000) -> Batches:
        """The next records; empty after `timeout_s` without any, also during an outage. Raises
        PositionLost if a position is outside of the log: its records are gone."""

    def set_gather_s(self, gather_s: float) -> None:
        """Change `gather_s` of `Log.reader` from the next request on."""

    def position(self, partition: Partition) -> int:
        """Every record below this offset was returned by a poll, or is known to be gone. A poll
        that finds nothing left in a partition moves it to the end, so that a wait for an end offset
        terminates."""

    async def close(self) -> None:
        """Stop reading; idempotent."""


class RebalanceListener(Protocol):
    """The listener for changes of owned partitions, on the event loop. After `revoked` no poll
    returns their records until they are `assigned` again, then from the committed offset on."""

    def assigned(self, starts: Mapping[int, int]) -> None:
        """These partitions are owned, each read from its offset after `Member.resume`. None: the
        group has more members than partitions."""

    def revoked(self, partitions: frozenset[int]) -> None:
        """These partitions are no longer owned; unfinished records go to another member."""


class Member(Protocol):
    """One member of a consumer group on one topic. Range assignor; no automatic commits."""

    async def poll(self, timeout_s: float, max_records: int = 500) -> Batches:
        """The next records of owned, resumed partitions; empty after `timeout_s` without any."""

    def resume(self, partition: int) -> None:
        """Start reading an owned partition. Ignored when it is not owned (any more)."""

    def pause(self, partition: int, position: int | None = None) -> None:
        """Stop reading an owned partition until `resume`, which continues at `position` (at or
        below the current one) or where it was. `poll` keeps the ownership. Ignored for other
        partitions."""

    def end_of_gap(self, partition: int, position: int) -> int:
        """The offset up to which no record follows `position`, since transactions leave gaps.
        `position` itself if polls have returned records behind it, or the partition is not
        owned."""

    async def commit(self, offsets: Mapping[int, int]) -> None:
        """Commit next offsets by partition. Raises OwnershipLost if the group has rebalanced,
        AppendFailed without an answer."""

    async def close(self) -> None:
        """Leave the group, without committing anything."""


class TransactionalWriter(Protocol):
    """The only writer of its name: opening one ends all others of that name, in any process."""

    async def open(self) -> None:
        """Take over the name, again after an error of `write`. When it returns, every transaction
        of an earlier writer has ended. Raises BrokerUnavailable."""

    async def write(self, entries: Sequence[TopicEntry]) -> None:
        """Append all entries, or none. Raises OwnershipLost or RecordTooLarge: nothing was
        appended; AppendFailed: `open` decides. After each of these errors call `open`."""

    async def close(self) -> None:
        """Disconnect; idempotent. A transaction that is not over is aborted."""


class Log(Protocol):
    """A connection to the log, for one process. All methods, also of its readers and members, may
    raise AccessDenied, and LogClosed after `close`."""

    async def start(self) -> None:
        """Connect. Raises BrokerUnavailable, AccessDenied."""

    async def close(self) -> None:
        """Flush and disconnect; idempotent."""

    async def partitions(self, topic: str) -> int:
        """How many partitions a topic has. Raises TopicMismatch when it does not exist."""

    async def append(self, topic: str, entry: Entry, partition: int | None = None) -> Appended:
        """Append one record, acknowledged by all in-sync replicas. Without `partition` the key
        decides (murmur2). Raises AppendFailed (no acknowledgement in time), RecordTooLarge."""

    async def append_batch(self, topic: str, partition: int, entries: Sequence[Entry]) -> Appended:
        """Append records to one partition, in order, all or none. Raises as `append`;
        RecordTooLarge when several exceed a batch of 1 MiB together."""

    def append_many(
        self, topic: str, batches: Mapping[int, Sequence[Entry]]
    ) -> Mapping[int, Future[Appended]]:
        """As `append_batch` for several partitions, behind all earlier calls for each, without
        waiting. A future per partition completes or raises; cancelling it ends the wait, not the
        append."""

    async def start_offsets(self, topic: str, partitions: Sequence[int]) -> dict[int, int]:
        """Offset of the oldest record kept, by partition. Raises BrokerUnavailable."""

    async def end_offsets(self, topic: str, partitions: Sequence[int]) -> dict[int, int]:
        """Offset the next record will get, by partition; of a topic that clients write
        (`OF_CLIENTS` in streams/topics.py) the last stable offset. Raises BrokerUnavailable."""

    async def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        """First offset appended at or after `timestamp_ms`; the end when there is none."""

    async def committed_offsets(self, topic: str, group: str) -> Mapping[int, int]:
        """The offsets of a topic that a group has committed, by partition; without partitions that
        have none. Raises BrokerUnavailable."""

    async def foreign_partitions(self, topics: Collection[str]) -> dict[str, int]:
        """Partitions of topics outside of the deployment, by whole names; 0: does not exist. Raises
        BrokerUnavailable."""

    def outside(self) -> Log:
        """Another connection of this process, for topics of clients by their whole names. No
        failure of an append there fails one here. To be started; closed with this one."""

    def transactional_writer(self, name: str) -> TransactionalWriter:
        """A writer that appends nothing until `open`; its name gets the deployment's prefix."""

    def reader(self, *, moving: bool = True, gather_s: float = 0.0) -> Reader:
        """A reader that reads nothing until `assign`. `moving=False`: for a fixed assignment, with
        fewer requests to brokers. `gather_s`: polls return records at most so often, the first
        after a pause at once."""

    def member(self, topic: str, group: str, ownership: RebalanceListener) -> Member:
        """Join a group at the first poll. Partitions without a commit start at the log's start."""
