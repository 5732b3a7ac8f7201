"""An in-memory broker: the state that the `MemoryLog`s of all processes share, and its faults.

The contract suite in `tests/contracts` compares it with a real broker. It lacks: durability,
replicas, segments (deletion and compaction work record by record), quotas, security, compression,
readers of uncommitted records, static members, other assignors than range, and fetches bounded by
bytes. Time is the injected clock's; a wait uses a timer of the running loop, which may be virtual.
"""

# ruff: noqa: ARG002 - without faults their arguments do not matter

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Literal, Protocol

from kvlane.streams.clock import Clock
from kvlane.streams.errors import TopicMismatch
from kvlane.streams.memory.consumer_groups import NEVER, ConsumerGroup
from kvlane.streams.memory.partition_log import Cursor, MemoryRecord, PartitionLog
from kvlane.streams.ports import Appended, Entry, Partition
from kvlane.streams.topics import DAY_MS, DEFAULT_LANES, PER_LANE, TOPICS

Operation = Literal["append", "offsets", "poll", "commit", "heartbeat", "leave"]


class AppendFate(Enum):
    KEPT = "kept"
    LOST = "lost"
    """Nothing is appended, AppendFailed is raised."""
    UNREPORTED = "unreported"
    """Appended, but AppendFailed is raised: the acknowledgement was lost."""
    TWICE = "twice"
    """Appended again before the acknowledgement: the producer's retry of an unanswered request."""
    LATE = "late"
    """AppendFailed is raised; it is appended up to `late_s` later, before the producer's later
    ones."""
    OVERTAKEN = "overtaken"
    """As LATE, but the producer was replaced: appends of its successor come first."""


class BrokerFaults:
    """No faults and no latency. All times in seconds."""

    def latency_s(self, client: str, operation: Operation) -> float:
        """Delay of a request before it takes effect."""
        return 0.0

    def answer_s(self, client: str, operation: Operation) -> float:
        """Delay of the response after that."""
        return 0.0

    def gather_s(self, wanted_s: float) -> float:
        """Time that records wait for others, for a reader that asked for `wanted_s`."""
        return 0.0

    def late_s(self, client: str) -> float:
        """Time that an abandoned append remains in transit."""
        return 0.0

    def departed(self, client: str) -> bool:
        """Whether an append had left its process when the process was killed."""
        return False

    def fate(self, client: str, topic: str, partition: int, entries: int) -> AppendFate:
        """Asked when an append of so many entries reaches the broker."""
        return AppendFate.KEPT

    def answered(self, client: str, operation: Operation) -> bool:
        """False: the request has no effect, and the client times out."""
        return True


_COMPACT_FROM = 1000  # records in a partition before compaction looks at it


class MemoryBroker:
    def __init__(
        self,
        clock: Clock,
        *,
        lanes: int = DEFAULT_LANES,
        partitions: Mapping[str, int] | None = None,
        faults: BrokerFaults | None = None,
        max_records: int | None = None,
        session_timeout_s: float = 10.0,
        max_poll_interval_s: float = 300.0,
    ) -> None:
        """All topics of `streams/topics.py` exist; `partitions` overrides counts. `max_records`
        bounds partitions that delete by age."""
        overrides = partitions or {}
        self.clock = clock
        self.faults = faults or BrokerFaults()
        self.session_timeout_s = session_timeout_s
        self.max_poll_interval_s = max_poll_interval_s
        self.failed_at = NEVER
        """When the outage began that is not over."""
        self.partitions: dict[str, int] = {}
        self._max_records = max_records
        self._retention_ms: dict[str, int | None] = {}
        self._compacting: set[str] = set()
        self._logs: dict[str, list[PartitionLog]] = {}
        for topic in TOPICS:
            count = lanes if topic.partitions == PER_LANE else topic.partitions
            self.create_topic(topic.name, overrides.get(topic.name, count), topic.retention_ms)
            if topic.compacts:
                self._compacting.add(topic.name)
        self._groups: dict[tuple[str, str], ConsumerGroup] = {}
        self._stamps: dict[Clock, int] = {}
        self._leaders: dict[PartitionLog, Clock] = {}
        self._members = 0
        self._writer_epochs: dict[str, int] = {}

    @property
    def available(self) -> bool:
        """False during an outage: appends and queries fail, polls return nothing."""
        return self.failed_at == NEVER

    @available.setter
    def available(self, is_available: bool) -> None:
        if is_available:
            self.failed_at = NEVER
        elif self.available:
            self.failed_at = self.clock.now()
            for group in self._groups.values():
                for member in group.members.values():
                    member.watch_lease()

    def create_topic(self, name: str, partitions: int, retention_ms: int | None) -> None:
        """Add an empty topic; without retention it is a compacted one."""
        self.partitions[name] = partitions
        self._retention_ms[name] = retention_ms
        self._logs[name] = [PartitionLog(Partition(name, p)) for p in range(partitions)]

    def now_ms(self, log: PartitionLog | None = None) -> int:
        """Broker time as stamped on records, by the leader of a partition if one is given."""
        clock = self.clock if log is None else self._leaders.get(log, self.clock)
        self._stamps[clock] = now_ms = max(self._stamps.get(clock, 0), clock.wall_ms())
        return now_ms

    def set_leader_clock(self, topic: str, partition: int, clock: Clock) -> None:
        self._leaders[self.log(topic, partition)] = clock

    def log(self, topic: str, partition: int) -> PartitionLog:
        """Raises TopicMismatch when there is no such partition."""
        try:
            return self._logs[topic][partition]
        except LookupError:
            raise TopicMismatch(f"no partition {partition} of topic {topic!r}") from None

    def records(self, topic: str, partition: int) -> Sequence[MemoryRecord]:
        return self.log(topic, partition).records

    def append(self, topic: str, partition: int, entries: Sequence[Entry]) -> Appended:
        """Append at once, without faults; applies retention."""
        log = self.log(topic, partition)
        timestamp_ms = self.now_ms(log)
        offset = log.append(entries, timestamp_ms)
        self._clean(log, timestamp_ms)
        return Appended(partition, offset, timestamp_ms)

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        """Delete the records below an offset, as an administrator does."""
        self.log(topic, partition).delete_before(before)

    def compact(self, topic: str, lag_ms: int = DAY_MS) -> None:
        """Compact now, keeping records younger than the lag, and tombstones for twice as long."""
        now_ms = self.now_ms()
        for log in self._logs[topic]:
            log.compact(now_ms - lag_ms, now_ms - 2 * lag_ms)

    def compact_all(self, lag_ms: int = DAY_MS) -> None:
        """Compact every topic whose records are replaced by newer ones of their key."""
        for topic, retention_ms in self._retention_ms.items():
            if retention_ms is None or topic in self._compacting:
                self.compact(topic, lag_ms)

    def group(self, topic: str, name: str) -> ConsumerGroup:
        self.log(topic, 0)
        group = self._groups.get((topic, name))
        if group is None:
            group = self._groups[topic, name] = ConsumerGroup(
                self.clock, topic, self.partitions[topic], self.session_timeout_s
            )
        return group

    def member_id(self, client_id: str) -> str:
        self._members += 1
        return f"{client_id}-{self._members:06}"

    def begin_writer_epoch(self, name: str) -> int:
        """The epoch of a new transactional writer of this name; it ends all earlier ones."""
        self._writer_epochs[name] = epoch = self._writer_epochs.get(name, 0) + 1
        return epoch

    def is_writer_epoch(self, name: str, epoch: int) -> bool:
        return self._writer_epochs.get(name) == epoch

    def expire(self, log: PartitionLog) -> None:
        if log.records and (retention_ms := self._retention_ms[log.name.topic]) is not None:
            log.delete_older(self.now_ms(log) - retention_ms)

    def _clean(self, log: PartitionLog, now_ms: int) -> None:
        retention_ms = self._retention_ms[log.name.topic]
        if retention_ms is None or log.name.topic in self._compacting:
            if len(log.records) >= 2 * log.compacted_size + _COMPACT_FROM:
                log.compact(now_ms - DAY_MS, now_ms - 2 * DAY_MS)
            if retention_ms is not None:
                log.delete_older(now_ms - retention_ms)
            return
        log.delete_older(now_ms - retention_ms)
        if self._max_records is not None and log.end - log.start > self._max_records:
            log.delete_before(log.end - self._max_records)


class ConnectionUser(Protocol):
    cursor: Cursor
    """The positions that it reads from."""

    async def close(self) -> None: ...


class MemoryConnection(Protocol):
    """Implemented by `MemoryLog` (`streams/memory/memory_log.py`). Times are the broker's."""

    broker: MemoryBroker
    client_id: str
    is_killed: bool
    suspended_at: float | None
    """When the client sent its last heartbeat, while it is stopped."""
    cut_off_at: float | None
    """Since when it does not reach the coordinator of its groups."""

    def check_open(self) -> None:
        """Raises LogClosed."""

    async def check_alive(self) -> None:
        """Return only if this client still exists. Raises LogClosed."""

    async def send_request(self, operation: Operation) -> bool:
        """The way to the broker; False when there will be no answer."""

    async def receive_answer(self, operation: Operation) -> None:
        """The way back."""

    def forget(self, user: ConnectionUser) -> None:
        """The user has closed itself."""
