"""Files and batch jobs of a deployment: the view of `batch-jobs`, its follower and a publisher.

Compaction must not change the log's decision: a removed key stays removed, of two records of a job
the later one of the later owner counts, and a job beyond the limit of its tenant does not exist.
Where the last record of a key does not count, it is `overwritten`: the partition's owner writes the
record that counts again within the compaction lag. An entity whose last record is older than the
retention is gone.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from kvlane.streams.clock import Clock
from kvlane.streams.codecs import AnyRecord
from kvlane.streams.errors import BrokerUnavailable
from kvlane.streams.ports import Log, Partition
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.record_types.batch_records import (
    BatchCancel,
    BatchJob,
    FileCard,
    ResponseDeletion,
)
from kvlane.streams.records import LogRecord, Tombstone
from kvlane.streams.topics import BATCH_JOBS, DAY_MS, FILE_RETENTION_MS, partition_of
from kvlane.streams.views.follower import Follower, OnApplied


def file_key(file_id: str) -> str:
    return f"file/{file_id}"


def batch_key(job_id: str) -> str:
    return f"batch/{job_id}"


def cancel_key(job_id: str) -> str:
    return f"cancel/{job_id}"


def response_key(response_id: str) -> str:
    return f"response/{response_id}"


class Deletion(NamedTuple):
    """A deletion of a response. `at_ms`: the time of its record."""

    at_ms: int
    tenant: str


class BatchView:
    name = "batch jobs"

    def __init__(self, wall_ms: Callable[[], int], deletions_ms: int = 0) -> None:
        """`deletions_ms`: time for which deletions of responses are known; 0 where none is asked
        for."""
        self._wall_ms = wall_ms
        self._deletions_ms = deletions_ms
        self._deletions: dict[int, dict[str, Deletion]] = {}
        """By partition and id of the response, the oldest first."""
        self._deletions_of: Counter[str] = Counter()
        """Their numbers, by tenant."""
        self._files: dict[str, FileCard] = {}
        self._jobs: dict[str, BatchJob] = {}
        self._open: dict[int, dict[str, BatchJob]] = {}
        self._cancels: dict[str, int] = {}
        self._removed: set[str] = set()
        self._overwritten: dict[str, int] = {}
        """Keys whose last record does not count, and their partitions."""
        self._seen: dict[int, dict[str, int]] = {}
        """By partition: keys and the append times of their last records, the oldest first."""
        self._positions: dict[Partition, int] = {}

    def file(self, file_id: str, tenant: str) -> FileCard | None:
        self._expire()
        card = self._files.get(file_id)
        return card if card is not None and card.tenant == tenant else None

    def files(self, tenant: str) -> Iterator[FileCard]:
        self._expire()
        return (card for card in self._files.values() if card.tenant == tenant)

    def job(self, job_id: str, tenant: str) -> BatchJob | None:
        self._expire()
        job = self._jobs.get(job_id)
        return job if job is not None and job.tenant == tenant else None

    def jobs(self, tenant: str) -> Iterator[BatchJob]:
        self._expire()
        return (job for job in self._jobs.values() if job.tenant == tenant)

    def open_jobs(self) -> list[BatchJob]:
        self._expire()
        jobs = [job for opened in self._open.values() for job in opened.values()]
        return sorted(jobs, key=lambda job: (job.created_s, job.id))

    def overwritten(self) -> Mapping[str, tuple[int, AnyRecord]]:
        """By key, partition and record of those that have to be written again."""
        return {
            key: (partition, self._counting(key)) for key, partition in self._overwritten.items()
        }

    def cancelled_s(self, job_id: str) -> int | None:
        """When a job was cancelled, in seconds since 1970; None: it was not."""
        self._expire()
        return self._cancels.get(job_id)

    def is_deleted(self, response_id: str) -> bool:
        self._expire()
        return any(response_id in deletions for deletions in self._deletions.values())

    def deletions(self, tenant: str) -> int:
        """The number of deletions of responses of a tenant."""
        self._expire()
        return self._deletions_of[tenant]

    # --- the view --------------------------------------------------------------------------------

    def apply(self, source: Partition, log_records: Sequence[LogRecord], position: int) -> None:
        seen = self._seen.setdefault(source.partition, {})
        for log_record in log_records:
            record = log_record.record
            if isinstance(record, Tombstone):
                key = record.key
                self._remove(source, key)
                self._overwritten.pop(key, None)
            elif isinstance(record, FileCard):
                key = file_key(record.id)
                if self._counts(source, key):
                    self._files[record.id] = record
            elif isinstance(record, BatchJob):
                key = batch_key(record.id)
                if self._counts(source, key, self._is_later(source, record)):
                    self._set_job(source, record)
            elif isinstance(record, BatchCancel):
                key = cancel_key(record.id)
                self._cancels[record.id] = record.at_s
            elif isinstance(record, ResponseDeletion) and self._deletions_ms:
                self._add_deletion(source.partition, record, log_record.timestamp_ms)
                continue
            else:
                continue
            seen.pop(key, None)  # a later record moves to the end
            seen[key] = log_record.timestamp_ms
        self._positions[source] = position

    def _counts(self, source: Partition, key: str, is_later: bool = True) -> bool:  # noqa: FBT001, FBT002
        """True if the last record of a key counts; adds the key to `overwritten` otherwise."""
        if is_later and key not in self._removed:
            self._overwritten.pop(key, None)
            return True
        self._overwritten[key] = source.partition
        return False

    def _is_later(self, source: Partition, job: BatchJob) -> bool:
        """False for a record older than the known one. A job beyond the limit of its tenant is
        removed with its first record."""
        known = self._jobs.get(job.id)
        if known is not None:
            return (job.fence, job.writes) >= (known.fence, known.writes)
        if job.most_open and job.fence < 0:
            opened = self._open.get(source.partition, {}).values()
            if sum(other.tenant == job.tenant for other in opened) >= job.most_open:
                self._remove(source, batch_key(job.id))
        return True

    def _set_job(self, source: Partition, job: BatchJob) -> None:
        self._jobs[job.id] = job
        opened = self._open.setdefault(source.partition, {})
        if job.has_ended:
            opened.pop(job.id, None)
        else:
            opened[job.id] = job

    def _remove(self, source: Partition, key: str) -> None:
        """Remove an entity for good: its key is never used again."""
        self._drop(source.partition, key)
        self._removed.add(key)

    def _add_deletion(self, partition: int, record: ResponseDeletion, at_ms: int) -> None:
        deletions = self._deletions.setdefault(partition, {})
        if record.id not in deletions:
            tenant = sys.intern(record.tenant)
            deletions[record.id] = Deletion(at_ms, tenant)
            self._deletions_of[tenant] += 1

    def _forget_deletion(self, deletions: dict[str, Deletion]) -> None:
        """Forget the oldest one."""
        tenant = deletions.pop(next(iter(deletions))).tenant
        self._deletions_of[tenant] -= 1
        if not self._deletions_of[tenant]:
            del self._deletions_of[tenant]

    def _counting(self, key: str) -> AnyRecord:
        return Tombstone(key=key) if key in self._removed else self._jobs[key.partition("/")[2]]

    def _expire(self) -> None:
        """Drop expired entries. Before each look-up, since a quiet partition brings no records."""
        before_ms = self._wall_ms() - FILE_RETENTION_MS
        for partition, seen in self._seen.items():
            while seen and next(iter(seen.values())) < before_ms:
                key = next(iter(seen))
                del seen[key]
                self._drop(partition, key)
        before_ms = self._wall_ms() - self._deletions_ms
        for deletions in self._deletions.values():
            while deletions and next(iter(deletions.values())).at_ms < before_ms:
                self._forget_deletion(deletions)

    def _drop(self, partition: int, key: str) -> None:
        kind, _, entity_id = key.partition("/")
        self._removed.discard(key)
        self._overwritten.pop(key, None)
        if kind == "file":
            self._files.pop(entity_id, None)
        elif kind == "batch":
            self._jobs.pop(entity_id, None)
            self._open.get(partition, {}).pop(entity_id, None)
        elif kind == "cancel":
            self._cancels.pop(entity_id, None)

    def position(self, source: Partition) -> int | None:
        return self._positions.get(source)

    def forget(self, source: Partition) -> None:
        for key in self._seen.pop(source.partition, {}):
            self._drop(source.partition, key)
        deletions = self._deletions.pop(source.partition, {})
        while deletions:
            self._forget_deletion(deletions)
        self._positions.pop(source, None)


T = TypeVar("T")

TIMEOUT_S = 10.0
"""Time limit of a write, and of reading to the end of a partition."""
DELETION_MARGIN_MS = DAY_MS
"""A deletion is known for so much longer than its response is kept: also its answer in `responses`
is hidden, which is gone by then, and clocks may differ."""


class BatchLog:
    """Reads and writes of one process. `put` returns when the view has the write. A look-up in vain
    reads to the present end of the log. They raise BrokerUnavailable, AppendFailed and
    AccessDenied."""

    def __init__(
        self,
        log: Log,
        clock: Clock,
        on_applied: OnApplied | None = None,
        *,
        results_retention_s: float = 0.0,
    ) -> None:
        """`results_retention_s`: of the topic; 0 in a process that reads no stored responses."""
        self.responses_kept_ms = min(int(1000 * results_retention_s), FILE_RETENTION_MS)
        """Time for which a stored response can be read."""
        deletions_ms = self.responses_kept_ms and self.responses_kept_ms + DELETION_MARGIN_MS
        self._log = log
        self._clock = clock
        self._publisher = RecordPublisher(log, clock)
        self.view = BatchView(clock.wall_ms, deletions_ms)
        self.follower = Follower(log, self.view, [BATCH_JOBS], clock, on_applied=on_applied)

    async def file(self, file_id: str, tenant: str) -> FileCard | None:
        return await self._look_up(file_id, partial(self.view.file, file_id, tenant))

    async def put_file(self, card: FileCard) -> None:
        await self.put(card.id, file_key(card.id), card)

    async def delete_file(self, card: FileCard) -> None:
        await self.put(card.id, file_key(card.id), Tombstone(key=file_key(card.id)))

    async def job(self, job_id: str, tenant: str) -> BatchJob | None:
        return await self._look_up(job_id, partial(self.view.job, job_id, tenant))

    async def put_job(self, job: BatchJob) -> None:
        await self.put(job.id, batch_key(job.id), job)

    async def put_cancel(self, cancel: BatchCancel) -> None:
        await self.put(cancel.id, cancel_key(cancel.id), cancel)

    async def delete_response(self, response_id: str, tenant: str) -> None:
        deletion = ResponseDeletion(id=response_id, tenant=tenant)
        await self.put(response_id, response_key(response_id), deletion)

    async def is_deleted(self, response_id: str) -> bool:
        """Whether a stored response was deleted, by any process."""
        found = partial(self.view.is_deleted, response_id)
        return bool(await self._look_up(response_id, lambda: found() or None))

    async def put(self, entity_id: str, key: str, record: AnyRecord) -> None:
        """Write a record of an entity; returns when the view has it."""
        partition = await self.partition_of(entity_id)
        until = self._clock.now() + TIMEOUT_S
        appended = await self._publisher.publish(BATCH_JOBS, key, record, partition, until=until)
        await self._wait_for(partition, appended.offset + 1)

    async def partition_of(self, entity_id: str) -> int:
        return partition_of(entity_id.encode(), await self._log.partitions(BATCH_JOBS))

    async def new_id(self, tenant: str, new: Callable[[], str], limit: int | None) -> str:
        """A new id. With a limit of the tenant it is in the partition of the tenant, where all
        processes see its entities in one order."""
        entity_id = new()
        if limit is not None:
            count = await self._log.partitions(BATCH_JOBS)
            wanted = partition_of(tenant.encode(), count)
            while partition_of(entity_id.encode(), count) != wanted:
                entity_id = new()
        return entity_id

    async def read_to_end(self, partition: int) -> None:
        ends = await self._log.end_offsets(BATCH_JOBS, [partition])
        await self._wait_for(partition, ends[partition])

    async def _look_up(self, entity_id: str, find: Callable[[], T | None]) -> T | None:
        """The state of an entity in the view; if it has none, after a read of its partition."""
        if (found := find()) is None:
            await self.read_to_end(await self.partition_of(entity_id))
            found = find()
        return found

    async def _wait_for(self, partition: int, offset: int) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self.follower.wait_for(Partition(BATCH_JOBS, partition), offset)
        except TimeoutError:
            raise BrokerUnavailable(f"{BATCH_JOBS} was not read within {TIMEOUT_S:g} s") from None
