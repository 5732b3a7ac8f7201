"""Files and batch jobs of a deployment: the view of `batch-jobs`.

Nothing is kept for ever: an entity whose last record is older than the retention of the topic is
gone, here as in the log, also in a topic that nothing is appended to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from streams.batch_records import BatchCancel, BatchJob, FileCard
from streams.ports import Partition
from streams.records import LogRecord, Tombstone
from streams.topics import FILE_RETENTION_MS


def file_key(file_id: str) -> str:
    """Key of the card of a file."""
    return f"file/{file_id}"


def batch_key(job_id: str) -> str:
    """Key of the record of a batch job."""
    return f"batch/{job_id}"


def cancel_key(job_id: str) -> str:
    """Key of the cancel of a batch job."""
    return f"cancel/{job_id}"


class BatchView:
    """A `MaterializedView` (streams/views/view.py) of the topic `batch-jobs`."""

    name = "batch jobs"

    def __init__(self, wall_ms: Callable[[], int]) -> None:
        """`wall_ms`: the time since 1970. Its difference to broker time is nothing to a retention
        of days."""
        self._wall_ms = wall_ms
        self._files: dict[str, FileCard] = {}
        self._jobs: dict[str, BatchJob] = {}
        self._cancels: dict[str, int] = {}
        self._seen: dict[int, dict[str, int]] = {}
        """By partition: keys and the append times of their last records, the oldest first."""
        self._positions: dict[Partition, int] = {}

    def file(self, file_id: str, tenant: str) -> FileCard | None:
        """A file of a tenant."""
        self._expire()
        card = self._files.get(file_id)
        return card if card is not None and card.tenant == tenant else None

    def files(self, tenant: str) -> Iterator[FileCard]:
        """All files of a tenant."""
        self._expire()
        return (card for card in self._files.values() if card.tenant == tenant)

    def job(self, job_id: str, tenant: str) -> BatchJob | None:
        """A job of a tenant."""
        self._expire()
        job = self._jobs.get(job_id)
        return job if job is not None and job.tenant == tenant else None

    def jobs(self, tenant: str) -> Iterator[BatchJob]:
        """All jobs of a tenant."""
        self._expire()
        return (job for job in self._jobs.values() if job.tenant == tenant)

    def open_jobs(self) -> list[BatchJob]:
        """Jobs that have not ended, the oldest first."""
        self._expire()
        jobs = [job for job in self._jobs.values() if not job.has_ended]
        return sorted(jobs, key=lambda job: (job.created_s, job.id))

    def cancelled_s(self, job_id: str) -> int | None:
        """When a job was cancelled, in seconds since 1970; None: it was not."""
        self._expire()
        return self._cancels.get(job_id)

    # --- the view --------------------------------------------------------------------------------

    def apply(self, source: Partition, facts: Sequence[LogRecord], position: int) -> None:
        """Take in records of one partition; `position` is the next offset after them."""
        seen = self._seen.setdefault(source.partition, {})
        for fact in facts:
            record = fact.record
            if isinstance(record, Tombstone):
                self._drop(record.key)
                seen.pop(record.key, None)
            elif isinstance(record, FileCard):
                self._files[record.id] = record
                _touch(seen, file_key(record.id), fact.timestamp_ms)
            elif isinstance(record, BatchJob):
                known = self._jobs.get(record.id)
                if known is None or record.fence >= known.fence:  # else by a former owner
                    self._jobs[record.id] = record
                    _touch(seen, batch_key(record.id), fact.timestamp_ms)
            elif isinstance(record, BatchCancel):
                self._cancels.setdefault(record.id, record.at_s)
                _touch(seen, cancel_key(record.id), fact.timestamp_ms)
        self._positions[source] = position

    def _expire(self) -> None:
        """Drop expired entries. Before each look-up, since a quiet partition brings no records."""
        before_ms = self._wall_ms() - FILE_RETENTION_MS
        for seen in self._seen.values():
            while seen and next(iter(seen.values())) < before_ms:
                key = next(iter(seen))
                del seen[key]
                self._drop(key)

    def _drop(self, key: str) -> None:
        kind, _, entity_id = key.partition("/")
        if kind == "file":
            self._files.pop(entity_id, None)
        elif kind == "batch":
            self._jobs.pop(entity_id, None)
        elif kind == "cancel":
            self._cancels.pop(entity_id, None)

    def position(self, source: Partition) -> int | None:
        """The next offset of a partition; None before the first `apply`."""
        return self._positions.get(source)

    def forget(self, source: Partition) -> None:
        """Drop the state and the position of this partition."""
        for key in self._seen.pop(source.partition, {}):
            self._drop(key)
        self._positions.pop(source, None)

    def snapshot(self, source: Partition) -> bytes:  # noqa: ARG002
        """Empty: the topic is compacted, it is its own snapshot."""
        return b""

    def restore(self, source: Partition, data: bytes, position: int) -> None:  # noqa: ARG002
        """Raises ValueError: there are no snapshots."""
        raise ValueError(f"{self.name} has no snapshots")

    def state_hash(self, source: Partition) -> str:  # noqa: ARG002
        """Constant: the topic is compacted, and has no snapshots to compare."""
        return ""


def _touch(seen: dict[str, int], key: str, at_ms: int) -> None:
    seen.pop(key, None)
    seen[key] = at_ms
