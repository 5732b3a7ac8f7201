"""Runner of batch jobs: runs the open jobs of the partitions that it owns. A part of the collector.

A consumer group on `batch-jobs`, through which nothing is read or committed, assigns its
partitions. Jobs start by the state of the view, so unfinished work of a predecessor is found. A
former owner is fenced in the job's files (`app/batches/file_store.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest

from kvlane.app.batches.batch_log import BatchLog
from kvlane.app.batches.fair_turns import FairTurns
from kvlane.app.batches.file_store import FileStore
from kvlane.app.batches.job_output import OutputSuperseded
from kvlane.app.batches.job_run import JobContext, JobRun
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.streams.errors import AccessDenied, LogClosed, StreamError
from kvlane.streams.ports import Log, Partition
from kvlane.streams.reading.group_consumer import GroupMembership
from kvlane.streams.record_types.batch_records import BatchJob
from kvlane.streams.records import LogRecord
from kvlane.streams.topics import BATCH_JOBS

log = logging.getLogger(__name__)

GROUP = "collector-jobs"

CHECK_S = 1.0
"""Period of checks for jobs to start; also the delay before a run is repeated."""
PAUSE_S = 0.05
"""Each record of a job causes a check."""
MAX_RUNNING = 8
"""Jobs that are worked on at a time: each takes some megabytes and a consumer of `results`."""
MAX_OPEN = 256
"""Jobs that have a run at a time; by tenant in rotation, the oldest first."""
MAX_ATTEMPTS = 3
"""Runs that end with an error of this program, after which the job fails."""
MAX_RUNS = 10
"""Runs without progress after which the job fails, of any cause."""


class JobRunner:
    def __init__(self, log: Log, settings: Settings, ctx: ProcessContext) -> None:
        self._ctx = ctx
        self._batches = BatchLog(log, ctx.clock, self._applied)
        self._context = JobContext(
            log, ctx.clock, ctx.rng, self._batches, FileStore(log, ctx.clock),
            settings.batch_max_lines, FairTurns(MAX_RUNNING), FairTurns(MAX_RUNNING),
        )  # fmt: skip
        self._membership = GroupMembership(log, BATCH_JOBS, GROUP, self)
        self._owned: dict[int, object] = {}
        """By owned partition, a token of its assignment."""
        self._read: dict[int, object] = {}
        """Those that the view has read to their ends since the assignment."""
        self._running: dict[str, asyncio.Task[None]] = {}
        self._errors: dict[str, list[str]] = {}
        """By job, the errors of this program that ended its runs."""
        self._assigned = asyncio.Event()
        self._changed = asyncio.Event()

    @property
    def running_jobs(self) -> int:
        """Jobs that have a run here, whether it has a turn or waits for one."""
        return len(self._running)

    @property
    def caught_up(self) -> bool:
        """Whether all jobs of the time of the start have been read."""
        return self._batches.follower.caught_up

    async def start(self) -> None:
        self._ctx.spawn("batch jobs", self._batches.follower.run())
        await self._batches.follower.wait_caught_up()
        self._ctx.spawn("jobs of new partitions", self._read_assigned())
        self._ctx.spawn("ownership of jobs", self._membership.run())
        self._ctx.spawn("jobs", self._run())

    async def stop(self) -> None:
        self.revoked(frozenset(self._owned))
        await self._membership.close()

    # --- ownership, called by the member ---

    def assigned(self, starts: Mapping[int, int]) -> None:
        self._owned |= {partition: object() for partition in starts}
        self._assigned.set()

    def revoked(self, partitions: frozenset[int]) -> None:
        """Stop the jobs of these partitions."""
        for partition in partitions:
            self._owned.pop(partition, None)
            self._read.pop(partition, None)
        self._changed.set()

    # ---

    def _applied(self, _: Partition, __: Sequence[LogRecord]) -> None:
        self._changed.set()

    async def _read_assigned(self) -> None:
        """Read each new partition to its end: the last record of a job may be just written."""
        while True:
            self._assigned.clear()
            async with asyncio.TaskGroup() as reads:
                for partition, token in self._owned.items():
                    if self._read.get(partition) is not token:
                        reads.create_task(self._read_to_end(partition, token))
            if self._read == self._owned:
                await self._assigned.wait()
            elif not self._assigned.is_set():
                await self._ctx.clock.sleep(CHECK_S)

    async def _read_to_end(self, partition: int, token: object) -> None:
        try:
            await self._batches.read_to_end(partition)
        except StreamError as e:
            log.info("jobs of partition %d are not read yet: %s", partition, e)
            return
        if self._owned.get(partition) is token:
            self._read[partition] = token
            self._changed.set()

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self._check()
                await self._write_again()
            except (AccessDenied, LogClosed):
                raise
            except StreamError as e:
                log.warning("jobs are looked at again later: %s", e)
            await self._ctx.clock.sleep(PAUSE_S)
            try:
                async with asyncio.timeout(CHECK_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _check(self) -> None:
        for name, task in list(self._running.items()):
            if task.done():
                del self._running[name]
            elif task.cancelling():
                continue  # a second cancel would interrupt its clean-up
            elif await self._batches.partition_of(name) not in self._owned:
                task.cancel()
        opened = {job.id: job for job in self._batches.view.open_jobs()}
        chosen = {job.id: job for job in self._chosen(opened.values())}
        for name, task in self._running.items():
            if name in opened and name not in chosen and not task.cancelling():
                task.cancel()
        for name, job in chosen.items():
            if name not in self._running and await self._batches.partition_of(name) in self._read:
                self._running[name] = self._ctx.spawn(f"job {name}", self._work(job))

    def _chosen(self, jobs: Iterable[BatchJob]) -> Iterator[BatchJob]:
        """Of open jobs, the oldest first, those that may have a run."""
        now_s, waiting = self._ctx.clock.wall_ms() // 1000, dict[str, list[BatchJob]]()
        for job in jobs:
            is_cancelled = self._batches.view.cancelled_s(job.id) is not None
            if is_cancelled or job.ending or now_s >= job.expires_s:
                yield job
            else:
                waiting.setdefault(job.tenant, []).append(job)
        rows = zip_longest(*waiting.values())
        in_rotation = (job for row in rows for job in row if job is not None)
        yield from islice(in_rotation, MAX_OPEN)

    async def _write_again(self) -> None:
        """Write the records that count again, else compaction would keep the last record of a
        key."""
        for key, (partition, record) in self._batches.view.overwritten().items():
            if partition in self._read:
                await self._batches.put(key.partition("/")[2], key, record)

    async def _work(self, job: BatchJob) -> None:
        run = JobRun(self._context, job)
        errors = self._errors.get(job.id, [])
        try:
            if len(errors) >= MAX_ATTEMPTS:
                message = f"the job failed {len(errors)} times: {errors[-1]}"
                await run.fail("internal_error", message)
            elif job.attempts >= MAX_RUNS:
                message = f"{job.attempts} runs of the job ended without progress"
                await run.fail("interrupted", message)
            else:
                await run.run()
            self._errors.pop(job.id, None)
        except (AccessDenied, LogClosed):
            raise
        except (OutputSuperseded, StreamError, TimeoutError) as e:
            log.info("%s continues later: %s", job.id, e)
            await self._ctx.clock.sleep(CHECK_S)
        except Exception as e:  # a job must not end the process, again and again
            log.exception("%s was interrupted by an error of this program", job.id)
            self._errors.setdefault(job.id, []).append(repr(e))
            await self._ctx.clock.sleep(CHECK_S)
        finally:
            self._changed.set()
