"""Checks of batch jobs, once the world has drained: all have ended, none has lost a line.

A client gets one line for each line of its input. The text of an answer is that of its stream, a
line without an answer has a cause, and the counts of the job are those of its lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from kvlane.app.batches.batch_log import BatchView
from kvlane.app.batches.batch_requests import request_id
from kvlane.streams.ports import Partition
from kvlane.streams.record_types.batch_records import BatchJob
from kvlane.streams.records import LogRecord
from kvlane.streams.responses.transcript import Transcript
from kvlane.streams.topics import BATCH_JOBS
from workbench.testing.checks.stream_checks import (
    COMPLETE,
    decode_or_none,
    end_code,
    is_cut,
    shown_streams,
)
from workbench.testing.clients.all_clients import Clients
from workbench.testing.clients.job_clients import JobClient
from workbench.testing.simulated_world import SimulatedWorld


def open_jobs(world: SimulatedWorld) -> list[BatchJob]:
    """The jobs of all clients that have not ended, as a process reads them that starts now."""
    view = BatchView(world.clock.wall_ms)
    for partition in range(world.broker.partitions[BATCH_JOBS]):
        raws = world.broker.records(BATCH_JOBS, partition)
        records = [(r, decode_or_none(r)) for r in raws]
        log_records = [LogRecord(r.offset, r.timestamp, d) for r, d in records if d is not None]
        view.apply(Partition(BATCH_JOBS, partition), log_records, len(raws))
    return view.open_jobs()


def job_violations(world: SimulatedWorld, clients: Clients) -> Iterator[str]:
    """Violations, as texts."""
    if not clients.jobs:
        return
    for job in open_jobs(world):
        yield f"job: {job.id} is {job.status}"
    shown = shown_streams(world)
    for client in clients.jobs:
        if client.unexpected_errors:
            yield f"surprise: {client.name} got {client.unexpected_errors}"
        elif not client.is_over:
            yield f"job: {client.name} waits for the end of {client.job.get('id')}"
        else:
            yield from _wrong_lines(world, client, shown)


def _wrong_lines(
    world: SimulatedWorld, client: JobClient, shown: dict[str, Transcript]
) -> Iterator[str]:
    job = client.job
    if job["status"] != "completed" and not (client.is_cancelled and job["status"] == "cancelled"):
        yield f"job: {job['id']} is {job['status']}: {job['errors']}"
        return
    if job["status"] == "cancelled" and not job["request_counts"]["total"] and not client.lines:
        return  # cancelled before its input was read
    found = Counter(line["custom_id"] for line in client.lines)
    if found != Counter(client.names):
        yield f"lines: {job['id']} has {dict(found)} of {client.names}"
    answers = 0
    for line in client.lines:
        index = client.names.index(line["custom_id"]) + 1
        name = request_id(job["id"], index)
        seen, text = shown[name], _text(line)
        answers += text is not None
        if text is not None and text != seen.text:
            yield f"line: {job['id']} {line['custom_id']} has {text!r}, its stream {seen.text!r}"
        elif (
            text is None
            and job["status"] == "completed"
            and end_code(seen) in COMPLETE
            and not is_cut(world, name)
        ):
            yield f"line: {job['id']} {line['custom_id']} has {line}, its stream {seen.text!r}"
    counts = job["request_counts"]
    if counts["completed"] != answers or counts["total"] != len(client.names):
        yield f"lines: {job['id']} counts {counts}, {answers} of its lines have answers"


def _text(line: dict[str, Any]) -> str | None:
    """The text of an answer; None for an error."""
    response = line["response"]
    if response is None or "choices" not in response["body"]:
        return None
    text: str = response["body"]["choices"][0]["text"]
    return text
