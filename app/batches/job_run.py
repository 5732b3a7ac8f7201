"""One batch job at its owner: validates the input, publishes prompts, follows their results, ends.

    input file ──► prompts ──► batch        results ──► JobOutput ──► output and error file

All progress is in the log: the state of the job (`batch-jobs`) and its files (`file-parts`). A run
that ends in the middle leaves nothing behind. The next one fences its predecessor, restores the
written lines, reads the results since, and publishes the other prompts. Ids of prompts follow from
job and line, so a prompt that is published twice is a duplicate, which routers ignore.

Memory does not depend on the size of the batch, but for some bytes a line: at most `WINDOW` prompts
are under way, and lines are written when a megabyte of them has come, or after a second.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from msgspec.structs import replace
from pydantic import ValidationError

from app.batches.batch_log import BatchLog
from app.batches.batch_requests import (
    JobRequest,
    RequestKeys,
    error_file_id,
    output_file_id,
    prompt_of,
    request_id,
    request_index,
    requests_of,
)
from app.batches.file_store import FileDamaged, FileStore, WrittenFile
from app.batches.job_output import JobOutput
from app.batches.output_lines import failure_line, result_line
from streams.batch_records import BatchEnding, BatchError, BatchJob, FileCard
from streams.clock import Clock
from streams.codecs import decode
from streams.errors import PositionLost, RecordError, RecordTooLarge
from streams.ports import Log, Partition, Reader, Record
from streams.prompt import Prompt, encode_prompt
from streams.reading.part_format import PART_BYTES
from streams.record_publisher import RecordPublisher
from streams.records import Result
from streams.topics import BATCH, RESULTS

log = logging.getLogger(__name__)

WINDOW = 1000
"""Prompts of a job under way: as many as keep a fleet busy between two looks at the results."""
PROMPTS_PER_APPEND = 100
POLL_S = 0.5
FLUSH_S = 1.0
"""Longest delay of a line, and shortest time between two records of a job's state."""
GRACE_S = 30.0
"""Time for prompts under way to end after a cancel or the end of the window."""
MAX_ERRORS = 100
"""Errors of an input that are listed."""
_ENDINGS: Mapping[BatchEnding, tuple[str, str]] = {
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was run."),
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
}


class JobContext(NamedTuple):
    """The parts of a runner that all its jobs share. `max_lines`: of an input."""

    log: Log
    clock: Clock
    rng: random.Random
    batches: BatchLog
    store: FileStore
    max_lines: int


class JobRun:
    """One attempt to bring a job to its end."""

    def __init__(self, context: JobContext, job: BatchJob) -> None:
        self._context = context
        self._job = job
        self._publisher = RecordPublisher(context.log, context.clock)
        self._under_way: set[int] = set()
        self._has_room = asyncio.Event()
        self._flushed_at = context.clock.now()

    async def run(self) -> None:
        """Bring the job to its end.

        Raises OutputSuperseded when another owner has begun; StreamError. The next run
        continues after any of them.
        """
        context, job = self._context, self._job
        run = f"{context.rng.getrandbits(64):016x}"
        partition = await context.store.partition_of(job.id)
        files = (output_file_id(job.id), error_file_id(job.id))
        fence = await context.store.fence(partition, run, files)
        first = fence if job.outputs_from < 0 else job.outputs_from
        await self._put(fence=fence, outputs_from=first)
        try:
            card = await self._input()
            if self._job.status == "validating" and not await self._validate(card):
                return
            output = JobOutput(context.store, self._job, partition, run)
            await output.restore(fence + len(files))
            await self._execute(card, output)
            await self._finish(card, output)
        except FileDamaged as e:
            await self.fail("file_damaged", str(e))

    async def fail(self, code: str, message: str, *errors: BatchError) -> None:
        """End the job with errors."""
        found = errors or (BatchError(code=code, message=message),)
        await self._put(status="failed", errors=found, ended_s=self._now_s())

    # --- the input ---

    async def _input(self) -> FileCard:
        """Raises FileDamaged if it no longer exists."""
        job = self._job
        card = await self._context.batches.file(job.input_file_id, job.tenant)
        if card is None:
            raise FileDamaged(f"{job.input_file_id}: it was deleted")
        return card

    async def _requests(self, card: FileCard) -> AsyncGenerator[JobRequest | BatchError, None]:
        async with (
            aclosing(self._context.store.read(card)) as pieces,
            aclosing(requests_of(pieces, self._job.endpoint)) as requests,
        ):
            async for request in requests:
                yield request

    async def _validate(self, card: FileCard) -> bool:
        """Check each line; false if the job has failed."""
        errors: list[BatchError] = []
        known: set[bytes] = set()
        lines = 0
        async with aclosing(self._requests(card)) as requests:
            async for request in requests:
                lines += 1
                if lines > self._context.max_lines:
                    message = f"a batch may have {self._context.max_lines} requests"
                    errors.append(BatchError(code="too_many_requests", message=message))
                elif isinstance(request, BatchError):
                    errors.append(request)
                elif not _add(known, request.custom_id):
                    message = "custom_id: another line has the same one"
                    errors.append(
                        BatchError(
                            code="duplicate_custom_id", message=message, line=request.line,
                            param="custom_id",
                        )
                    )  # fmt: skip
                if len(errors) >= MAX_ERRORS or lines > self._context.max_lines:
                    break
                if lines % PROMPTS_PER_APPEND == 0:
                    await self._context.clock.sleep(0)
        if not lines:
            errors.append(BatchError(code="empty_file", message="the input file has no lines"))
        if errors:
            await self.fail("", "", *errors)
            return False
        ends = await self._result_ends()
        await self._put(
            status="in_progress", lines=lines, results_from=ends, in_progress_s=self._now_s()
        )
        return True

    # --- execution ---

    async def _execute(self, card: FileCard, output: JobOutput) -> None:
        """Publish prompts and take in results, until all have come or the job ends before."""
        self._count(output)
        clock = self._context.clock
        reader = self._context.log.reader()
        working: asyncio.Task[None] | None = None
        try:
            await self._catch_up(reader, output)
            published = range(1, self._job.published + 1)
            self._under_way = {index for index in published if not output.is_done(index)}
            ending = self._job.ending
            working = asyncio.create_task(
                self._withdraw(ending) if ending else self._publish_all(card, output)
            )
            until = clock.now() + GRACE_S
            while output.left:
                if not ending and (ending := self._ending()):
                    await _stop(working)
                    await self._put(ending=ending)  # full files do not show it to the next run
                    working = asyncio.create_task(self._withdraw(ending))
                    until = clock.now() + GRACE_S
                    log.info("%s: %s, %d under way", self._job.id, ending, len(self._under_way))
                if ending and (not self._under_way or clock.now() > until):
                    break
                await self._take_results(reader, output)
                if working.done():
                    working.result()
            await output.flush(_positions(reader, output))
        finally:
            try:
                if working is not None:
                    await _stop(working)
            finally:
                await reader.close()

    async def _catch_up(self, reader: Reader, output: JobOutput) -> None:
        """Take in the results that came before this run: their prompts need not be repeated."""
        reader.assign(_sources(output.positions), RequestKeys(self._job.id))
        ends = await self._result_ends()
        while any(reader.position(Partition(RESULTS, p)) < end for p, end in ends.items()):
            await self._take_results(reader, output)

    async def _take_results(self, reader: Reader, output: JobOutput) -> None:
        try:
            batches = await reader.poll(POLL_S, PROMPTS_PER_APPEND)
        except PositionLost as e:
            log.warning("%s: results were deleted before they were read: %s", self._job.id, e)
            output.positions[e.partition] = e.start
            reader.assign(_sources(output.positions), RequestKeys(self._job.id))
            return
        for records in batches.values():
            for record in records:
                self._take(record, output)
        now = self._context.clock.now()
        if output.unwritten_bytes >= PART_BYTES or now - self._flushed_at >= FLUSH_S:
            self._flushed_at = now
            if output.unwritten_bytes:
                await output.flush(_positions(reader, output))
            await self._put_progress(output)

    def _take(self, record: Record, output: JobOutput) -> None:
        try:
            result = decode(record)
        except RecordError as e:
            log.warning("%s: a result cannot be read: %s", self._job.id, e)
            return
        if not isinstance(result, Result):
            return
        index = request_index(self._job.id, result.id)
        if index is not None:
            output.add(result_line(index, result))
            self._end(index)

    def _end(self, index: int) -> None:
        self._under_way.discard(index)
        if len(self._under_way) < WINDOW:
            self._has_room.set()

    def _ending(self) -> BatchEnding | None:
        if self._context.batches.view.cancelled_s(self._job.id) is not None:
            return "cancelled"
        return "expired" if self._now_s() >= self._job.expires_s else None

    # --- prompts ---

    async def _publish_all(self, card: FileCard, output: JobOutput) -> None:
        """Publish the prompt of each request without a line, within the window."""
        prompts: list[Prompt] = []
        published = self._job.published
        async with aclosing(self._requests(card)) as requests:
            async for request in requests:
                assert isinstance(request, JobRequest), "the input was validated"
                index = request.index
                if output.is_done(index):
                    continue
                prompt = self._prompt(request, output)
                if prompt is None or index <= published:
                    continue
                prompts.append(prompt)
                if len(prompts) >= PROMPTS_PER_APPEND:
                    await self._publish(prompts, output)
                    prompts.clear()
        await self._publish(prompts, output)

    def _prompt(self, request: JobRequest, output: JobOutput) -> Prompt | None:
        """The prompt of a request; None for one that is none, which gets its line."""
        deadline_s = max(1.0, self._job.expires_s - self._now_s())
        try:
            return prompt_of(self._job, request, deadline_s)
        except ValidationError as e:
            message = "; ".join(problem["msg"] for problem in e.errors(include_url=False))
            self._fail_request(request.index, request.custom_id, "invalid_request", message, output)
            return None

    async def _publish(self, prompts: Sequence[Prompt], output: JobOutput) -> None:
        if not prompts:
            return
        while len(self._under_way) >= WINDOW:
            self._has_room.clear()
            await self._has_room.wait()
        indices = [request_index(self._job.id, prompt.id) or 0 for prompt in prompts]
        self._under_way.update(indices)
        await asyncio.gather(*(self._append(prompt, output) for prompt in prompts))
        self._job = replace(self._job, published=max(indices))

    async def _append(self, prompt: Prompt, output: JobOutput) -> None:
        try:
            await self._publisher.publish_entry(BATCH, encode_prompt(prompt))
        except RecordTooLarge as e:
            index = request_index(self._job.id, prompt.id) or 0
            self._fail_request(index, prompt.custom_id, "too_large", str(e), output)

    def _fail_request(
        self, index: int, custom_id: str, code: str, message: str, output: JobOutput
    ) -> None:
        output.add(failure_line(self._job.id, index, custom_id, code, message))
        self._end(index)

    async def _withdraw(self, ending: BatchEnding) -> None:
        """Cancel the prompts under way; those of an expired job end by their deadline."""
        if ending != "cancelled":
            return
        for index in sorted(self._under_way):
            name = request_id(self._job.id, index)
            await self._publisher.publish_entry(
                BATCH, encode_prompt(Prompt(id=name, kind="cancel"))
            )

    # --- the end ---

    async def _finish(self, card: FileCard, output: JobOutput) -> None:
        self._count(output)
        await self._put(status="finalizing", finalizing_s=self._now_s())
        if output.left:
            assert self._job.ending, "else each request has its line"
            code, message = _ENDINGS[self._job.ending]
            async with aclosing(self._requests(card)) as requests:
                async for request in requests:
                    assert isinstance(request, JobRequest), "the input was validated"
                    if not output.is_done(request.index):
                        args = (request.index, request.custom_id, code, message)
                        output.add(failure_line(self._job.id, *args))
                    if output.unwritten_bytes >= PART_BYTES:
                        await output.flush()
        await output.flush()
        self._count(output)
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
        """Make a file public; its id, empty for one without content."""
        if written is None:
            return ""
        job = self._job
        card = FileCard(
            id=file_id, purpose="batch_output", created_s=self._now_s(), tenant=job.tenant,
            filename=f"{job.id}_{kind}.jsonl", **written._asdict(),
        )  # fmt: skip
        await self._context.batches.put_file(card)
        return file_id

    # --- the state of the job ---

    def _count(self, output: JobOutput) -> None:
        self._job = replace(self._job, completed=output.completed, failed=output.failed)

    async def _put_progress(self, output: JobOutput) -> None:
        """Write the counts, if they have changed: at most once in FLUSH_S."""
        before = self._job
        self._count(output)
        known = self._context.batches.view.job(before.id, before.tenant)
        if known != self._job:
            await self._put()

    async def _put(self, **changes: Any) -> None:
        self._job = replace(self._job, **changes)
        await self._context.batches.put_job(self._job)

    async def _result_ends(self) -> dict[int, int]:
        partitions = range(await self._context.log.partitions(RESULTS))
        return await self._context.log.end_offsets(RESULTS, partitions)

    def _now_s(self) -> int:
        return self._context.clock.wall_ms() // 1000


async def _stop(task: asyncio.Task[None]) -> None:
    """Cancel a task; an error that it ended with before is raised."""
    was_done = task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    if was_done:
        task.result()


def _positions(reader: Reader, output: JobOutput) -> dict[int, int]:
    """The offsets of `results` up to which a reader has read."""
    return {p: reader.position(Partition(RESULTS, p)) for p in output.positions}


def _sources(positions: Mapping[int, int]) -> dict[Partition, int]:
    return {Partition(RESULTS, p): offset for p, offset in positions.items()}


def _add(known: set[bytes], custom_id: str) -> bool:
    """Add an id, by a digest of 8 bytes; false if it is known."""
    digest = hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=8).digest()
    if digest in known:
        return False
    known.add(digest)
    return True
