"""Output and error file of one batch job: one line for each request, across restarts.

The parts of the two files are the whole progress of a job. The headers of a part have the requests
of its lines, and of a flush's last part the offsets of `results` before which every result is in
the files. A new owner fences, reads the parts that count, and continues from those offsets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from kvlane.app.batches.batch_requests import error_file_id, output_file_id, request_id
from kvlane.app.batches.file_store import FileStore, PartOrder, WrittenFile
from kvlane.streams.codecs import PART_BYTES
from kvlane.streams.errors import RecordTooLarge
from kvlane.streams.ports import Headers, Record
from kvlane.streams.record_types.batch_records import BatchJob
from kvlane.streams.records import Result

_OK = 200


class OutputLine(msgspec.Struct, frozen=True):
    index: int
    is_output: bool
    content: bytes


def result_line(index: int, result: Result) -> OutputLine:
    body: Any = result.body
    if body is None or result.status_code != _OK:
        error = result.error and msgspec.to_builtins(result.error)
        body = {"error": error or {"message": result.status, "type": "server_error"}}
    response = {"status_code": result.status_code, "request_id": result.id, "body": body}
    is_output = result.status_code == _OK and result.body is not None
    return _line(index, result.id, result.custom_id, response, None, is_output=is_output)


def failure_line(job_id: str, index: int, custom_id: str, code: str, message: str) -> OutputLine:
    error = {"code": code, "message": message}
    return _line(index, request_id(job_id, index), custom_id, None, error, is_output=False)


def _line(
    index: int, name: str, custom_id: str, response: dict[str, Any] | None,
    error: dict[str, str] | None, *, is_output: bool,
) -> OutputLine:  # fmt: skip
    content = {
        "id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": error,
    }  # fmt: skip
    return OutputLine(index, is_output, msgspec.json.encode(content) + b"\n")


MAX_LINES_PER_PART = 5000
"""Their indices in the headers take 25 kB at most, so that a part stays below 1 MiB."""
_LINES = "lines"
_RESULTS = "results"


class OutputSuperseded(Exception):
    """Another owner writes the files of this job. Nothing is to be done here."""


class _OutputFile:
    def __init__(self, file_id: str) -> None:
        self.file_id = file_id
        self.order = PartOrder(file_id)
        self.lines = 0
        self.unwritten: list[OutputLine] = []

    def next_part(self) -> list[OutputLine]:
        """Take the lines of the next part: one at least."""
        count = size = 0
        for line in self.unwritten[:MAX_LINES_PER_PART]:
            size += len(line.content)
            if count and size > PART_BYTES:
                break
            count += 1
        part, self.unwritten = self.unwritten[:count], self.unwritten[count:]
        return part


class JobOutput:
    """The two files of a job, for the owner that began `run`. One task restores, flushes and
    verifies."""

    def __init__(self, store: FileStore, job: BatchJob, partition: int, run: str) -> None:
        self._store = store
        self._job_id = job.id
        self._partition = partition
        self._first = job.outputs_from
        self._run = run
        self._files = (_OutputFile(output_file_id(job.id)), _OutputFile(error_file_id(job.id)))
        self._is_done = bytearray(job.lines + 1)
        self._parts = [0, 0]
        self.positions = dict(job.results_from)
        """Offsets of `results` before which every result is in the files."""
        self.left = job.lines
        self.unwritten_bytes = 0

    @property
    def completed(self) -> int:
        return self._files[0].lines

    @property
    def failed(self) -> int:
        return self._files[1].lines

    def is_done(self, index: int) -> bool:
        return bool(self._is_done[index])

    def undone(self, most: int) -> Iterator[int]:
        index = self._is_done.find(0, 1)
        while 0 < index <= most:
            yield index
            index = self._is_done.find(0, index + 1)

    async def restore(self, end: int) -> None:
        """Read the log up to an offset: the one after the fence of this run."""
        ids = [file.file_id for file in self._files]
        records = self._store.records(self._partition, self._first, end, *ids)
        async with aclosing(records):
            async for record in records:
                for number, file in enumerate(self._files):
                    if file.order.accept(record):
                        self._restore_part(file, record)
                        self._parts[number] = file.order.next_number

    def add(self, line: OutputLine) -> bool:
        if not 0 < line.index < len(self._is_done) or self._is_done[line.index]:
            return False
        self._is_done[line.index] = 1
        self.left -= 1
        file = self._files[0 if line.is_output else 1]
        file.lines += 1
        file.unwritten.append(line)
        self.unwritten_bytes += len(line.content)
        return True

    async def flush(self, positions: Mapping[int, int] | None = None) -> None:
        """Append all lines; returns when all is acknowledged. `positions`: offsets of `results`
        that were read. Raises AccessDenied, LogClosed."""
        while any(file.unwritten for file in self._files):
            number = 0 if self._files[0].unwritten else 1
            lines = self._files[number].next_part()
            is_last = not any(file.unwritten for file in self._files)
            await self._append(number, lines, positions if is_last else None)
        self.unwritten_bytes = 0
        self.positions = dict(positions or self.positions)  # also without a line between the two

    async def _append(
        self, number: int, lines: list[OutputLine], positions: Mapping[int, int] | None
    ) -> None:
        headers: Headers = ((_LINES, msgspec.msgpack.encode([line.index for line in lines])),)
        if positions is not None:
            headers += ((_RESULTS, msgspec.msgpack.encode(dict(positions))),)
        file, content = self._files[number], b"".join(line.content for line in lines)
        try:
            await self._store.append_part(
                file.file_id, self._run, self._parts[number], content, self._partition, headers
            )
        except RecordTooLarge:
            [line] = lines  # several lines have less than a megabyte
            await self._append_too_large(number, line, positions)
            return
        self._parts[number] += 1

    async def _append_too_large(
        self, number: int, line: OutputLine, positions: Mapping[int, int] | None
    ) -> None:
        """A line in the error file, in place of one that is no record."""
        custom_id = msgspec.json.decode(line.content)["custom_id"]
        message = f"the result has {len(line.content)} bytes, more than a file can hold in a line"
        self._files[number].lines -= 1
        self._files[1].lines += 1
        failure = failure_line(self._job_id, line.index, custom_id, "too_large", message)
        await self._append(1, [failure], positions)

    def _restore_part(self, file: _OutputFile, record: Record) -> None:
        headers = dict(record.headers)
        lines = msgspec.msgpack.decode(headers[_LINES] or b"", type=list[int])
        for index in lines:
            self._is_done[index] = 1
        file.lines += len(lines)
        self.left -= len(lines)
        if (positions := headers.get(_RESULTS)) is not None:
            self.positions = msgspec.msgpack.decode(positions, type=dict[int, int])

    async def verify(self, end: int) -> tuple[WrittenFile | None, WrittenFile | None]:
        """Read both files from the log; None for empty ones. Raises OutputSuperseded unless the two
        have one line for each request."""
        seen = bytearray(len(self._is_done))
        checks = [_FileCheck(file.file_id) for file in self._files]
        ids = [file.file_id for file in self._files]
        async with aclosing(self._store.records(self._partition, self._first, end, *ids)) as found:
            async for record in found:
                for check in checks:
                    for index in check.take(record):
                        seen[index] += 1
        if seen.count(1) != len(seen) - 1:
            raise OutputSuperseded(f"{self._job_id}: lines are missing that were appended")
        written = [
            None if not check.size else
            WrittenFile(self._partition, self._first, end, check.size, check.digest.hexdigest())
            for check in checks
        ]  # fmt: skip
        return written[0], written[1]


class _FileCheck:
    """Size and checksum of the parts of a file that count."""

    def __init__(self, file_id: str) -> None:
        self._order = PartOrder(file_id)
        self.size = 0
        self.digest = hashlib.sha256()

    def take(self, record: Record) -> list[int]:
        """Take in the next record; the requests whose lines it has."""
        if not self._order.accept(record):
            return []
        content = record.value or b""
        self.size += len(content)
        self.digest.update(content)
        return msgspec.msgpack.decode(dict(record.headers)[_LINES] or b"", type=list[int])
