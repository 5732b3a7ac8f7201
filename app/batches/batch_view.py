"""Files and batch jobs of a deployment: the view of `batch-jobs`.

Compaction must not change the log's decision: a removed key stays removed, of two records of a job
the later one of the later owner counts, and a job beyond the limit of its tenant does not exist.
Where the last record of a key does not count, it is `overwritten`: the partition's owner writes the
one that counts again within the compaction lag. An entity whose last record is older than the
retention is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from kvlane.streams.codecs import AnyRecord
from kvlane.streams.ports import Partition
from kvlane.streams.record_types.batch_records import (
    BatchCancel,
    BatchJob,
    FileCard,
    ResponseDeletion,
)
from kvlane.streams.records import LogRecord, Tombstone
from kvlane.streams.topics import FILE_RETENTION_MS


def file_key(file_id: str) -> str:
    return f"file/{file_id}"


def batch_key(job_id: str) -> str:
    return f"batch/{job_id}"


def cancel_key(job_id: str) -> str:
    return f"cancel/{job_id}"


def response_key(response_id: str) -> str:
    return f"response/{response_id}"


class BatchView:
    name = "batch jobs"

    def __init__(self, wall_ms: Callable[[], int]) -> None:
        """`wall_ms`: the time since 1970. Its difference to broker time is nothing to a retention
        of days."""
        self._wall_ms = wall_ms
        self._files: dict[str, FileCard] = {}
        self._jobs: dict[str, BatchJob] = {}
        self._open: dict[int, dict[str, BatchJob]] = {}
        """Jobs that have not ended, by partition."""
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
        """Whether a stored response was deleted."""
        self._expire()
        return any(response_key(response_id) in seen for seen in self._seen.values())

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
            elif isinstance(record, ResponseDeletion):
                key = response_key(record.id)
            else:
                continue
            _touch(seen, key, log_record.timestamp_ms)
        self._positions[source] = position

    def _counts(self, source: Partition, key: str, is_later: bool = True) -> bool:  # noqa: FBT001, FBT002
        """True if the last record of a key counts; adds the key to `overwritten` otherwise."""
        if is_later and key not in self._removed:
            self._overwritten.pop(key, None)
            return True
        self._overwritten[key] = source.partition
        return False

    def _is_later(self, source: Partition, job: BatchJob) -> bool:
        """False for a record of a job that is older than the known one. A job beyond the limit of
        its tenant is removed with its first record."""
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
        self._positions.pop(source, None)


def _touch(seen: dict[str, int], key: str, at_ms: int) -> None:
    seen.pop(key, None)
    seen[key] = at_ms
