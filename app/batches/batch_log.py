"""Reads and writes of `batch-jobs` in one process: the view, its follower, and a publisher.

`put` returns when the view has the write. A look-up in vain reads to the present end of the log, so
a fresh record of another process is found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvlane.app.batches.batch_view import BatchView, batch_key, cancel_key, file_key, response_key
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
from kvlane.streams.records import Tombstone
from kvlane.streams.topics import BATCH_JOBS, partition_of
from kvlane.streams.views.follower import Follower, OnApplied

T = TypeVar("T")

TIMEOUT_S = 10.0
"""Time limit of a write, and of reading to the end of a partition."""


class BatchLog:
    """The files and jobs of a deployment. Look-ups and writes raise BrokerUnavailable, AppendFailed
    and AccessDenied."""

    def __init__(self, log: Log, clock: Clock, on_applied: OnApplied | None = None) -> None:
        self._log = log
        self._clock = clock
        self._publisher = RecordPublisher(log, clock)
        self.view = BatchView(clock.wall_ms)
        self.follower = Follower(log, self.view, [BATCH_JOBS], clock, on_applied=on_applied)

    async def file(self, file_id: str, tenant: str) -> FileCard | None:
        return await self._look_up(file_id, partial(self.view.file, file_id, tenant))

    async def put_file(self, card: FileCard) -> None:
        """Write the card of a file, whose content is complete."""
        await self.put(card.id, file_key(card.id), card)

    async def delete_file(self, card: FileCard) -> None:
        await self.put(card.id, file_key(card.id), Tombstone(key=file_key(card.id)))

    async def job(self, job_id: str, tenant: str) -> BatchJob | None:
        return await self._look_up(job_id, partial(self.view.job, job_id, tenant))

    async def put_job(self, job: BatchJob) -> None:
        await self.put(job.id, batch_key(job.id), job)

    async def put_cancel(self, cancel: BatchCancel) -> None:
        await self.put(cancel.id, cancel_key(cancel.id), cancel)

    async def delete_response(self, response_id: str) -> None:
        await self.put(response_id, response_key(response_id), ResponseDeletion(id=response_id))

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
        processes see its entities in one order; the others are spread."""
        entity_id = new()
        if limit is not None:
            count = await self._log.partitions(BATCH_JOBS)
            wanted = partition_of(tenant.encode(), count)
            while partition_of(entity_id.encode(), count) != wanted:
                entity_id = new()
        return entity_id

    async def read_to_end(self, partition: int) -> None:
        """Wait until the view has all that is in a partition now."""
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
