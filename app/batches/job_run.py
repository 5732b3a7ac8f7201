"""One batch job at its owner: validation, prompts, results, end.

    input file ──► prompts ──► batch        results ──► JobOutput ──► output and error file

All progress is in the log (`batch-jobs`, `file-parts`). A new run fences its predecessor, restores
the written lines, reads the results since, and publishes the other prompts.

A process has a bounded number of turns (`app/batches/fair_turns.py`). A run that waits for results,
or has worked for some seconds, gives its turn back, and has no reader and no part of a file in
memory until the next. Cancelled and late jobs take turns apart from the others.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvlane.app.batches.batch_log import BatchLog
from kvlane.app.batches.batch_requests import (
    JobRequest,
    RequestKeys,
    error_file_id,
    output_file_id,
    request_index,
)
from kvlane.app.batches.fair_turns import FairTurns
from kvlane.app.batches.file_store import FileDamaged, FileStore, WrittenFile
from kvlane.app.batches.job_output import JobOutput, OutputSuperseded, failure_line, result_line
from kvlane.app.batches.job_prompts import JobInput, JobPrompts
from kvlane.app.preprocess.json_limits import UNCHECKED_BYTES
from kvlane.streams.clock import Clock
from kvlane.streams.codecs import PART_BYTES, decode
from kvlane.streams.errors import PositionLost, RecordError
from kvlane.streams.ports import Log, Partition, Reader, Record
from kvlane.streams.record_types.batch_records import BatchEnding, BatchError, BatchJob, FileCard
from kvlane.streams.records import Result
from kvlane.streams.topics import RESULTS

UNRUN: Mapping[BatchEnding, tuple[str, str]] = {
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was run."),
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
}


class EndsEarly(Exception):
    """The job ends before its input is validated."""

    def __init__(self, ending: BatchEnding) -> None:
        super().__init__(ending)
        self.ending = ending


log = logging.getLogger(__name__)

RESULTS_PER_POLL = 100
RESULTS_POLL_S = 0.5
TURN_S = 5.0
"""Time after which a run gives its turn to others, though it has more to do."""
FLUSH_S = 1.0
"""Longest delay of a line, and shortest time between two records of a job's state."""
GRACE_S = 30.0
"""Time for prompts under way to end, and for the input to be validated, after the window."""


class JobContext(NamedTuple):
    """The parts of a runner that all its jobs share. `ending_turns`: of cancelled and expired
    jobs."""

    log: Log
    clock: Clock
    rng: random.Random
    batches: BatchLog
    store: FileStore
    max_lines: int
    turns: FairTurns
    ending_turns: FairTurns


class _Work(NamedTuple):
    given: JobInput
    output: JobOutput
    prompts: JobPrompts


class JobRun:
    def __init__(self, context: JobContext, job: BatchJob) -> None:
        self._context = context
        self._job = job
        self._run = ""
        self._partition = -1
        self._is_continued = job.outputs_from >= 0
        self._started: _Work | None = None
        self._flushed_at = context.clock.now()
        self._late_at = math.inf

    async def run(self) -> None:
        """Bring the job to its end. Raises OutputSuperseded when another owner has begun;
        StreamError."""
        try:
            self._check_early_end()
            while not self._job.has_ended:
                async with self._turn() as turns:
                    await self._advance(turns)
        except FileDamaged as e:
            await self.fail("file_damaged", str(e))
        except EndsEarly as e:
            await self._put(status=e.ending, ended_s=self._now_s())

    async def _advance(self, turns: FairTurns) -> None:
        if self._started is None:
            given = await self._begin()
            if given is None:
                return
            self._started = await self._restored(given)
        work = self._started
        if work.output.left and not self._is_over(work):
            await self._execute(work, turns)
        if not work.output.left or self._is_over(work):
            await self._finish(work)

    async def fail(self, code: str, message: str, *errors: BatchError) -> None:
        found = errors or (BatchError(code=code, message=message),)
        await self._put(status="failed", errors=found, ended_s=self._now_s())

    # --- turns and ends ---

    @asynccontextmanager
    async def _turn(self) -> AsyncGenerator[FairTurns, None]:
        """A turn at work. Raises EndsEarly."""
        tenant = self._job.tenant
        turns = self._turns()
        place = turns.enter(tenant)
        try:
            while not place.done():
                await asyncio.wait({place}, timeout=RESULTS_POLL_S)
                self._check_early_end()
                if not place.done() and turns is not self._turns():
                    turns.leave(tenant, place)
                    turns = self._turns()
                    place = turns.enter(tenant)
            yield turns
        finally:
            turns.leave(tenant, place)

    def _turns(self) -> FairTurns:
        return self._context.ending_turns if self._ending() else self._context.turns

    def _ending(self) -> BatchEnding | None:
        """The end that is to come; None: all requests are to be run."""
        job, clock = self._job, self._context.clock
        ending = job.ending
        if ending is None and self._context.batches.view.cancelled_s(job.id) is not None:
            ending = "cancelled"
        elif ending is None and self._now_s() >= job.expires_s:
            ending = "expired"
        if ending and self._late_at == math.inf:
            self._late_at = clock.now() + GRACE_S
        return ending

    def _is_late(self) -> bool:
        """True after the grace period since the end was noticed."""
        return self._ending() is not None and self._context.clock.now() > self._late_at

    def _is_over(self, work: _Work) -> bool:
        """A job that is to end, and waits for nothing."""
        return self._job.ending is not None and (not work.prompts.under_way or self._is_late())

    def _check_early_end(self) -> None:
        """Raises EndsEarly for a job that is to end and whose input is not validated in time."""
        if self._job.status != "validating" or (ending := self._ending()) is None:
            return
        if ending == "cancelled" or self._is_late():
            raise EndsEarly(ending)

    # --- the input ---

    async def _begin(self) -> JobInput | None:
        """Fence former owners and validate; None if the job has failed. Raises EndsEarly,
        FileDamaged."""
        context, job = self._context, self._job
        self._run = f"{context.rng.getrandbits(64):016x}"
        self._partition = await context.store.partition_of(job.id)
        fence = await context.store.fence(self._partition, self._run, _files(job))
        first = fence if job.outputs_from < 0 else job.outputs_from
        await self._put(fence=fence, outputs_from=first, attempts=job.attempts + 1)
        card = await context.batches.file(job.input_file_id, job.tenant)
        if card is None:
            raise FileDamaged(f"{job.input_file_id}: it was deleted")
        given = JobInput(context.store, card, job.endpoint, context.max_lines)
        if job.status == "validating" and not await self._validate(given):
            return None
        return given

    async def _restored(self, given: JobInput) -> _Work:
        context, job = self._context, self._job
        output = JobOutput(context.store, job, self._partition, self._run)
        await output.restore(job.fence + len(_files(job)))
        prompts = JobPrompts(
            context.log, context.clock, job, given, output, is_continued=self._is_continued
        )
        return _Work(given, output, prompts)

    async def _validate(self, given: JobInput) -> bool:
        checked = await given.check(self._check_early_end)
        if checked.errors:
            await self.fail("", "", *checked.errors)
            return False
        ends = await self._result_ends()
        await self._put(
            status="in_progress", lines=checked.lines, results_from=ends,
            in_progress_s=self._now_s(), attempts=0,
        )  # fmt: skip
        return True

    # --- execution ---

    async def _execute(self, work: _Work, turns: FairTurns) -> None:
        """Publish prompts and take in results for one turn."""
        self._count(work)
        _, output, prompts = work
        clock = self._context.clock
        until = clock.now() + TURN_S
        reader = self._context.log.reader()
        try:
            await self._catch_up(reader, work)
            while output.left:
                if not self._job.ending and self._ending():
                    await self._begin_ending(work)
                prompts.start(self._job.ending)
                if self._is_over(work):
                    break
                taken = await self._take_results(reader, work)
                prompts.check()
                is_idle = not taken and prompts.is_idle
                if taken or is_idle:
                    self._job = replace(self._job, attempts=0)
                if turns.is_wanted and (is_idle or clock.now() >= until):
                    break
            await prompts.pause(0.0 if self._is_late() else TURN_S)
            await output.flush(_positions(reader, output))
            await self._put_progress(work)
        finally:
            try:
                await prompts.stop()
            finally:
                await reader.close()

    async def _begin_ending(self, work: _Work) -> None:
        await work.prompts.stop()
        self._count(work)
        await self._put(ending=self._ending())  # full files do not show it to the next run
        left = len(work.prompts.under_way)
        log.info("%s: %s, %d under way", self._job.id, self._job.ending, left)

    async def _catch_up(self, reader: Reader, work: _Work) -> None:
        """Take in the results that came before: their prompts need not be repeated."""
        reader.assign(_sources(work.output.positions), RequestKeys(self._job.id))
        ends = await self._result_ends()
        while (
            any(reader.position(Partition(RESULTS, p)) < end for p, end in ends.items())
            and not self._is_late()
        ):
            await self._take_results(reader, work)

    async def _take_results(self, reader: Reader, work: _Work) -> bool:
        """Take in the next results; whether there were any of this job."""
        output = work.output
        left = output.left
        try:
            batches = await reader.poll(RESULTS_POLL_S, RESULTS_PER_POLL)
        except PositionLost as e:
            log.warning("%s: results were deleted before they were read: %s", self._job.id, e)
            output.positions[e.partition] = e.start
            reader.assign(_sources(output.positions), RequestKeys(self._job.id))
            return False
        size = 0
        for records in batches.values():
            for record in records:
                self._take(record, work)
                size += len(record.value or b"")
                if size >= UNCHECKED_BYTES:
                    size = 0
                    await asyncio.sleep(0)
        now = self._context.clock.now()
        if output.unwritten_bytes >= PART_BYTES or now - self._flushed_at >= FLUSH_S:
            self._flushed_at = now
            if output.unwritten_bytes:
                await output.flush(_positions(reader, output))
            await self._put_progress(work)
        return output.left < left

    def _take(self, record: Record, work: _Work) -> None:
        try:
            result = decode(record)
        except RecordError as e:
            log.warning("%s: a result cannot be read: %s", self._job.id, e)
            return
        if not isinstance(result, Result):
            return
        index = request_index(self._job.id, result.id)
        if index is not None:
            work.output.add(result_line(index, result))
            work.prompts.end(index)

    # --- the end ---

    async def _finish(self, work: _Work) -> None:
        given, output, _ = work
        self._count(work)
        await self._put(status="finalizing", finalizing_s=self._now_s())
        if output.left:
            assert self._job.ending, "else each request has its line"
            code, message = UNRUN[self._job.ending]
            async with aclosing(given.requests(lambda i: not output.is_done(i))) as requests:
                async for request in requests:
                    assert isinstance(request, JobRequest), "the input was validated"
                    args = (request.index, request.custom_id, code, message)
                    output.add(failure_line(self._job.id, *args))
                    if output.unwritten_bytes >= PART_BYTES:
                        await output.flush()
        await output.flush()
        self._count(work)
        store = self._context.store
        done, failed = await output.verify(
            await store.end_of(await store.partition_of(self._job.id))
        )
        names = [
            await self._add_file(written, file_id, kind)
            for written, file_id, kind in (
                (done, output_file_id(self._job.id), "output"),
                (failed, error_file_id(self._job.id), "errors"),
            )
        ]
        status = self._job.ending or "completed"
        await self._put(
            status=status, output_file_id=names[0], error_file_id=names[1], ended_s=self._now_s()
        )
        log.info("%s: %s, %d + %d lines", self._job.id, status, output.completed, output.failed)

    async def _add_file(self, written: WrittenFile | None, file_id: str, kind: str) -> str:
        if written is None:
            return ""
        job = self._job
        card = FileCard(
            id=file_id, purpose="batch_output", created_s=job.in_progress_s, tenant=job.tenant,
            filename=f"{job.id}_{kind}.jsonl", **written._asdict(),
        )  # fmt: skip
        await self._context.batches.put_file(card)
        return file_id

    # --- the state of the job ---

    def _count(self, work: _Work) -> None:
        self._job = replace(
            self._job,
            completed=work.output.completed,
            failed=work.output.failed,
            published=work.prompts.published,
        )

    async def _put_progress(self, work: _Work) -> None:
        """Write the counts, if they have changed: at most once in FLUSH_S."""
        before = self._job
        self._count(work)
        known = self._context.batches.view.job(before.id, before.tenant)
        if known != self._job:
            await self._put()

    async def _put(self, **changes: Any) -> None:
        """Write the state. Raises OutputSuperseded."""
        self._job = replace(self._job, writes=self._job.writes + 1, **changes)
        known = self._context.batches.view.job(self._job.id, self._job.tenant)
        if known is not None and known.fence > self._job.fence:
            raise OutputSuperseded(f"{self._job.id}: another owner writes it")
        await self._context.batches.put_job(self._job)

    async def _result_ends(self) -> dict[int, int]:
        partitions = range(await self._context.log.partitions(RESULTS))
        return await self._context.log.end_offsets(RESULTS, partitions)

    def _now_s(self) -> int:
        return self._context.clock.wall_ms() // 1000


def _files(job: BatchJob) -> tuple[str, str]:
    """The ids of its output file and its error file."""
    return output_file_id(job.id), error_file_id(job.id)


def _positions(reader: Reader, output: JobOutput) -> dict[int, int]:
    return {p: reader.position(Partition(RESULTS, p)) for p in output.positions}


def _sources(positions: Mapping[int, int]) -> dict[Partition, int]:
    return {Partition(RESULTS, p): offset for p, offset in positions.items()}
