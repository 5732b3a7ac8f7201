"""Tests of compacted topics, compacted before each restart: later processes find the same state."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from kvlane.app.batches.batch_log import batch_key, file_key
from kvlane.app.preprocess.models.artifacts import ArtifactStore
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.routing.state.fleet import Fleet
from kvlane.streams.codecs import PART_BYTES, decode, encode
from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.ports import Partition
from kvlane.streams.record_types.batch_records import BatchJob, FileCard
from kvlane.streams.records import LogRecord
from kvlane.streams.topics import ARTIFACTS, BATCH_JOBS, FILE_PARTS, REGISTRY, TOPICS, partition_of
from tests.harness.batch_harness import BatchHarness, chat_line, jsonl
from tests.harness.gateway_harness import GatewayHarness
from tests.harness.memory_world import MemoryWorld, scenario_test

LAG_MS = 1000
"""Compaction lag of these tests, in place of a day."""


def last_of(world: MemoryWorld, kind: type, entity_id: str) -> BatchJob | FileCard:
    found = [r for r in map(decode, world.all_records(BATCH_JOBS)) if isinstance(r, kind)]
    return [r for r in found if r.id == entity_id][-1]  # type: ignore[attr-defined]


def append_late(world: MemoryWorld, key: str, record: BatchJob | FileCard) -> None:
    """A record that was delayed on its way from a former owner."""
    partition = partition_of(record.id.encode(), world.broker.partitions[BATCH_JOBS])
    world.broker.append(BATCH_JOBS, partition, [encode(record, key)])


async def compact(world: MemoryWorld) -> None:
    await world.sleep(3 * LAG_MS / 1000)
    world.broker.compact_all(LAG_MS)


@scenario_test
async def test_ended_batch_stays_ended_after_late_records_and_compaction(
    world: MemoryWorld,
) -> None:
    harness = await BatchHarness.open(world, "r1")
    batch_id = await harness.submit(jsonl(chat_line("a")))
    begun = last_of(world, BatchJob, batch_id)
    batch = await harness.ended(batch_id)
    append_late(world, batch_key(batch_id), replace(begun, fence=-1, writes=0))
    await compact(world)
    await harness.kill("r1")
    await harness.start_runner("r2")
    await world.sleep(30)
    harness.gateway = await harness.gateway.open(world, "g2")
    assert await harness.batch(batch_id) == batch
    assert harness.fleet.seen == 1


@scenario_test
async def test_deleted_file_stays_deleted_after_a_late_card_and_compaction(
    world: MemoryWorld,
) -> None:
    harness = await BatchHarness.open(world, "r1")
    file_id = await harness.upload(jsonl(chat_line("a")))
    card = last_of(world, FileCard, file_id)
    await harness.send("DELETE", f"/v1/files/{file_id}")
    append_late(world, file_key(file_id), card)
    await world.sleep(5)
    assert (await harness.send("GET", f"/v1/files/{file_id}")).status == 404
    await compact(world)
    harness.gateway = await harness.gateway.open(world, "g2")
    assert (await harness.send("GET", f"/v1/files/{file_id}")).status == 404
    assert (await harness.send("GET", "/v1/files")).json["data"] == []


@pytest.mark.parametrize("fate", [AppendFate.OVERTAKEN, AppendFate.TWICE, AppendFate.UNREPORTED])
@scenario_test
async def test_deployment_serves_with_compaction_before_each_restart(
    world: MemoryWorld, fate: AppendFate
) -> None:
    """Cards whose appends were repeated and arrived late, too."""
    world.faults.late = 2.0
    backend = await GatewayHarness.open(world)
    await backend.start_router("r0")
    for n in range(3):
        world.faults.next_fates(REGISTRY, *[AppendFate.KEPT] * n, fate)
        await backend.start_worker("w1")
        await world.sleep(5)
        before = fleet(world)
        await compact(world)
        after = fleet(world)
        assert (after.members, after.models) == (before.members, before.models)
        gateway = await GatewayHarness.open(world, f"g{n}")
        await backend.start_router(f"r{n + 1}")
        answer = await gateway.chat("hello", max_tokens=3).wait_done()
        assert answer.status == 200, answer.content
        await backend.kill("w1")


@pytest.mark.parametrize("fate", [AppendFate.OVERTAKEN, AppendFate.TWICE, AppendFate.UNREPORTED])
@scenario_test
async def test_artifact_is_whole_after_repeated_appends_and_compaction(
    world: MemoryWorld, fate: AppendFate
) -> None:
    world.faults.late = 2.0
    world.faults.slow["append"] = 0.5
    content = random.Random(1).randbytes(2 * PART_BYTES + 7)
    for n in range(3):
        world.faults.next_fates(ARTIFACTS, *[AppendFate.KEPT] * n, fate)
        log = await world.connect(f"w{n}")
        artifact = await ArtifactStore(log, world.clock, InlinePool(), None).publish(content)
        await compact(world)
        log = await world.connect(f"g{n}")
        assert await ArtifactStore(log, world.clock, InlinePool(), None).fetch(artifact) == content
        content += b"x"


def fleet(world: MemoryWorld) -> Fleet:
    """The view of a process that starts now."""
    view = Fleet()
    log_records = [LogRecord(r.offset, 0, decode(r)) for r in world.records(REGISTRY, 0)]
    view.apply(Partition(REGISTRY, 0), log_records, world.broker.log(REGISTRY, 0).end)
    return view


def test_compacted_topics_are_those_that_are_tried_here() -> None:
    compacted = {t.name for t in TOPICS if t.compacts or t.retention_ms is None}
    assert compacted == {REGISTRY, ARTIFACTS, BATCH_JOBS, FILE_PARTS}


@scenario_test
async def test_batch_has_one_line_for_each_request_with_compaction_before_each_restart(
    world: MemoryWorld,
) -> None:
    """With appends that arrive late or unreported."""
    harness = await BatchHarness.open(world, "r0")
    world.faults.late = 2.0
    count, allowed = 250, 0
    harness.fleet.answers = lambda name: int(name.partition("-")[2]) < allowed
    names = [f"line-{n}" for n in range(count)]
    batch_id = await harness.submit(jsonl(*map(chat_line, names)))
    fates = [AppendFate.OVERTAKEN, AppendFate.KEPT, AppendFate.UNREPORTED, AppendFate.KEPT]
    for n in range(4):
        world.faults.next_fates(FILE_PARTS, *fates[n % 2 :])
        world.faults.next_fates(BATCH_JOBS, *fates[(n + 1) % 2 :])
        allowed += 50
        await world.sleep(4)
        await harness.kill(f"r{n}")
        await compact(world)
        await harness.start_runner(f"r{n + 1}")
        await world.sleep(12)
    allowed = count
    batch = await harness.ended(batch_id, within_s=300)
    await compact(world)
    assert batch["status"] == "completed"
    harness.gateway = await harness.gateway.open(world, "g2")
    done = await harness.lines(batch["output_file_id"])
    assert sorted(line["custom_id"] for line in done) == sorted(names)
    assert harness.fleet.seen >= count
