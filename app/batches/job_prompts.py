"""Requests of one batch job: their check, their publication within a window, their withdrawal.

Ids of prompts follow from job and line, so routers ignore duplicates. Their append time is the time
at which the job began, by which routers recognise late ones.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec
from pydantic import ValidationError

from kvlane.app.batches.batch_requests import JobRequest, prompt_of, request_id, requests_of
from kvlane.app.batches.file_store import FileStore
from kvlane.app.batches.job_output import JobOutput, failure_line
from kvlane.streams.clock import Clock
from kvlane.streams.codecs import PART_BYTES
from kvlane.streams.errors import RecordError, RecordTooLarge
from kvlane.streams.ports import Entry, Log
from kvlane.streams.prompt import Prompt, encode_prompt, with_append_time
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.record_types.batch_records import (
    BatchEnding,
    BatchEndpoint,
    BatchError,
    BatchJob,
    FileCard,
)
from kvlane.streams.topics import BATCH

MAX_ERRORS = 100


class CheckedInput(NamedTuple):
    lines: int
    errors: tuple[BatchError, ...]


class JobInput:
    def __init__(
        self, store: FileStore, card: FileCard, endpoint: BatchEndpoint, max_lines: int
    ) -> None:
        self._store = store
        self._card = card
        self._endpoint: BatchEndpoint = endpoint
        self._max_lines = max_lines

    async def requests(
        self, is_wanted: Callable[[int], bool] = lambda _: True
    ) -> AsyncGenerator[JobRequest | BatchError, None]:
        """The requests, or the errors of their lines. Close it (`aclosing`). Raises FileDamaged,
        BrokerUnavailable."""
        async with (
            aclosing(self._store.read(self._card)) as pieces,
            aclosing(requests_of(pieces, self._endpoint, is_wanted)) as requests,
        ):
            async for request in requests:
                yield request

    async def check(self, interrupt: Callable[[], None]) -> CheckedInput:
        """Check all lines, up to 100 errors. `interrupt`: called at each, may raise."""
        errors: list[BatchError] = []
        known: set[bytes] = set()
        lines = 0
        async with aclosing(self.requests()) as requests:
            async for request in requests:
                interrupt()
                lines += 1
                if lines > self._max_lines:
                    message = f"a batch may have {self._max_lines} requests"
                    errors.append(BatchError(code="too_many_requests", message=message))
                elif isinstance(request, BatchError):
                    errors.append(request)
                elif not _add(known, request.custom_id):
                    message = "custom_id: another line has the same one"
                    errors.append(
                        BatchError(
                            code="duplicate_custom_id",
                            message=message,
                            line=request.line,
                            param="custom_id",
                        )
                    )
                if len(errors) >= MAX_ERRORS or lines > self._max_lines:
                    break
        if not lines:
            errors.append(BatchError(code="empty_file", message="the input file has no lines"))
        return CheckedInput(lines, tuple(errors))


def _add(known: set[bytes], custom_id: str) -> bool:
    """Add an id, by a digest of 8 bytes; false if it is known."""
    digest = hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=8).digest()
    if digest in known:
        return False
    known.add(digest)
    return True


WINDOW = 1000
"""Prompts of a job under way: as many as keep a fleet busy between two looks at the results."""
PROMPTS_PER_APPEND = 100


class _Prompt(msgspec.Struct, frozen=True, gc=False):
    """An encoded prompt. `index`: of its request."""

    index: int
    custom_id: str
    entry: Entry


class JobPrompts:
    """The prompts of one run of a job. One task at a time publishes or withdraws them.
    `is_continued`: former runs have published some."""

    def __init__(
        self, log: Log, clock: Clock, job: BatchJob, given: JobInput, output: JobOutput,
        *, is_continued: bool,
    ) -> None:  # fmt: skip
        self._publisher = RecordPublisher(log, clock)
        self._clock = clock
        self._job = job
        self._given = given
        self._output = output
        self._is_continued = is_continued
        self.published = job.published
        self.under_way = set(output.undone(job.published))
        self._has_room = asyncio.Event()
        self._is_full = False
        self._pauses = False
        self._is_published = False
        self._is_withdrawn = False
        self._task: asyncio.Task[None] | None = None

    # --- the task ---

    def start(self, ending: BatchEnding | None) -> None:
        if self._task is None and (work := self._next_work(ending)) is not None:
            self._task = asyncio.create_task(work)

    def _next_work(self, ending: BatchEnding | None) -> Coroutine[Any, Any, None] | None:
        """Publication begins with half a window of room, since it reads the input from its
        beginning."""
        if ending:
            return None if self._is_withdrawn else self._withdraw(ending)
        has_room = len(self.under_way) <= WINDOW // 2
        return self._publish_all() if has_room and not self._is_published else None

    def check(self) -> None:
        """Raise the error of a task that has ended."""
        if self._task is not None and self._task.done():
            self._task.result()
            self._task = None

    @property
    def is_idle(self) -> bool:
        return self._task is None or self._is_full

    async def pause(self, timeout_s: float) -> None:
        """End the task after the prompts that it appends now, and cancel it after a time."""
        if self._task is None:
            return
        self._pauses = True
        self._has_room.set()
        try:
            if timeout_s:
                await asyncio.wait({self._task}, timeout=timeout_s)
            await self.stop()
        finally:
            self._pauses = False

    async def stop(self) -> None:
        """Cancel the task; an error that it ended with before is raised."""
        if self._task is None:
            return
        task = self._task
        was_done = task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._task = None
        if was_done:
            task.result()

    def end(self, index: int) -> None:
        self.under_way.discard(index)
        if len(self.under_way) < WINDOW:
            self._has_room.set()

    # --- publication ---

    async def _publish_all(self) -> None:
        prompts: list[_Prompt] = []
        size = 0
        published = self.published
        done = self._output.is_done
        async with aclosing(self._given.requests(lambda i: not done(i))) as requests:
            async for request in requests:
                assert isinstance(request, JobRequest), "the input was validated"
                prompt = self._prompt(request)
                if prompt is None or request.index <= published:
                    continue
                prompts.append(prompt)
                size += len(prompt.entry.value or b"")
                if len(prompts) >= PROMPTS_PER_APPEND or size >= PART_BYTES:
                    if not await self._publish(prompts):
                        return
                    prompts.clear()
                    size = 0
        self._is_published = await self._publish(prompts)

    def _prompt(self, request: JobRequest) -> _Prompt | None:
        """The prompt of a request; None for one that is none, which gets its line."""
        job, index, custom_id = self._job, request.index, request.custom_id
        may_be_copy = self._is_continued or index in self.under_way
        since_s = job.in_progress_s if may_be_copy else self._clock.wall_ms() // 1000
        try:
            entry = encode_prompt(prompt_of(job, request, max(1.0, job.expires_s - since_s)))
        except ValidationError as e:
            message = "; ".join(problem["msg"] for problem in e.errors(include_url=False))
            self._fail(index, custom_id, "invalid_request", message)
            return None
        except RecordError as e:
            self._fail(index, custom_id, "invalid_request", str(e))
            return None
        if may_be_copy:
            entry = entry._replace(headers=with_append_time(entry.headers, since_s * 1000))
        return _Prompt(index, custom_id, entry)

    async def _publish(self, prompts: Sequence[_Prompt]) -> bool:
        """Append prompts once there is room; false, without them, if the turn is over before."""
        while len(self.under_way) >= WINDOW and not self._pauses:
            self._is_full = True
            self._has_room.clear()
            try:
                await self._has_room.wait()
            finally:
                self._is_full = False
        if self._pauses:
            return False
        indices = [prompt.index for prompt in prompts]
        self.under_way.update(indices)
        await asyncio.gather(*map(self._append, prompts))
        self.published = max(indices, default=self.published)
        return True

    async def _append(self, prompt: _Prompt) -> None:
        try:
            await self._publisher.publish_entry(BATCH, prompt.entry)
        except RecordTooLarge as e:
            self._fail(prompt.index, prompt.custom_id, "too_large", str(e))

    def _fail(self, index: int, custom_id: str, code: str, message: str) -> None:
        self._output.add(failure_line(self._job.id, index, custom_id, code, message))
        self.end(index)

    # --- withdrawal ---

    async def _withdraw(self, ending: BatchEnding) -> None:
        """Cancel the prompts under way. A former owner may have published a window more than it
        recorded."""
        if ending == "cancelled":
            most = self.published
            if self._is_continued:
                most += WINDOW + PROMPTS_PER_APPEND
            indices = sorted(self.under_way.union(self._output.undone(most)))
            for start in range(0, len(indices), PROMPTS_PER_APPEND):
                some = indices[start : start + PROMPTS_PER_APPEND]
                await asyncio.gather(*map(self._cancel, some))
        self._is_withdrawn = True

    async def _cancel(self, index: int) -> None:
        name = request_id(self._job.id, index)
        await self._publisher.publish_entry(BATCH, encode_prompt(Prompt(id=name, kind="cancel")))
