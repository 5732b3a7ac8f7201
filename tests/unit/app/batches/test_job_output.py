"""Tests of output files of a job: the state that a new owner finds after any death of the former
one."""

from __future__ import annotations

from typing import Any

import pytest

from kvlane.app.batches.batch_requests import error_file_id, output_file_id
from kvlane.app.batches.file_store import FileStore
from kvlane.app.batches.job_output import JobOutput, OutputLine, OutputSuperseded, failure_line
from kvlane.streams.codecs import PART_BYTES
from kvlane.streams.record_types.batch_records import BatchJob
from kvlane.streams.topics import FILE_PARTS
from tests.harness.memory_world import MemoryWorld, scenario_test

JOB = "batch_0198c5a4-0000-7000-8000-000000000001"
PARTITION = 3
START = {0: 5, 1: 7}
LATER = {0: 50, 1: 70}


def ok(index: int, size: int = 10) -> OutputLine:
    return OutputLine(index, is_output=True, content=b"x" * size + b"\n")


def bad(index: int) -> OutputLine:
    return failure_line(JOB, index, f"line-{index}", "code", "message")


class Owners:
    """Owners of one job of `lines` lines, each with a run of its own."""

    def __init__(self, world: MemoryWorld, lines: int) -> None:
        self.world = world
        self.first = -1
        self._lines = lines

    async def new(self, name: str) -> tuple[JobOutput, FileStore]:
        """An owner that has fenced the others and restored what is written."""
        store = FileStore(await self.world.connect(name), self.world.clock)
        files = (output_file_id(JOB), error_file_id(JOB))
        fence = await store.fence(PARTITION, name, files)
        self.first = fence if self.first < 0 else self.first
        fields: dict[str, Any] = {"outputs_from": self.first, "results_from": START}
        job = BatchJob(
            id=JOB, endpoint="/v1/embeddings", input_file_id="f", created_s=0, window_s=60,
            lines=self._lines, **fields,
        )  # fmt: skip
        output = JobOutput(store, job, PARTITION, name)
        await output.restore(fence + len(files))
        return output, store

    def end(self) -> int:
        return self.world.records(FILE_PARTS, PARTITION)[-1].offset + 1


@scenario_test
async def test_new_owner_continues_where_the_last_one_stopped(world: MemoryWorld) -> None:
    owners = Owners(world, 4)
    first, _ = await owners.new("a")
    assert (first.positions, first.left) == (START, 4)
    assert first.add(ok(1))
    assert first.add(bad(2))
    assert not first.add(ok(2))
    await first.flush(LATER)
    first.add(ok(3))  # lost with its process
    second, _ = await owners.new("b")
    assert (second.positions, second.left) == (LATER, 2)
    assert (second.completed, second.failed) == (1, 1)
    assert [second.is_done(index) for index in range(1, 5)] == [True, True, False, False]
    assert not second.add(ok(1))


@scenario_test
async def test_former_owner_cannot_append_lines(world: MemoryWorld) -> None:
    owners = Owners(world, 3)
    old, _ = await owners.new("a")
    old.add(ok(1))
    await old.flush(LATER)
    new, _ = await owners.new("b")
    for index in (2, 3):
        old.add(ok(index, 20))
    await old.flush({0: 99, 1: 99})
    with pytest.raises(OutputSuperseded):
        await old.verify(owners.end())
    third, _ = await owners.new("c")
    assert (third.left, third.positions) == (2, LATER)
    for index in (2, 3):
        third.add(ok(index))
    await third.flush(LATER)
    done, failed = await third.verify(owners.end())
    assert done is not None
    assert (done.size, failed) == (33, None)
    new.add(ok(2))
    await new.flush()
    assert await third.verify(owners.end()) == (done._replace(end=owners.end()), None)


@pytest.mark.parametrize("written", [1, 2])
@scenario_test
async def test_positions_hold_only_with_all_lines_before_them(
    world: MemoryWorld, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner that dies between the parts of a flush."""
    owners = Owners(world, 3)
    first, store = await owners.new("a")
    first.add(ok(1, PART_BYTES - 10))
    first.add(ok(2, PART_BYTES - 10))
    first.add(bad(3))
    append, left = store.append_part, written

    async def dying(*args: Any) -> Any:
        nonlocal left
        if not left:
            raise ConnectionError("killed")
        left -= 1
        return await append(*args)

    monkeypatch.setattr(store, "append_part", dying)
    with pytest.raises(ConnectionError):
        await first.flush(LATER)
    second, _ = await owners.new("b")
    assert (second.left, second.positions) == (3 - written, START)


@scenario_test
async def test_line_that_is_no_record_becomes_an_error(world: MemoryWorld) -> None:
    owners = Owners(world, 2)
    output, _ = await owners.new("a")
    huge = b'{"custom_id":"big","text":"' + b"x" * 9_000_000 + b'"}\n'
    output.add(OutputLine(1, is_output=True, content=huge))
    output.add(ok(2))
    await output.flush(LATER)
    assert (output.completed, output.failed) == (1, 1)
    done, failed = await output.verify(owners.end())
    assert done is not None
    assert failed is not None
    again, _ = await owners.new("b")
    assert (again.left, again.completed, again.failed) == (0, 1, 1)
