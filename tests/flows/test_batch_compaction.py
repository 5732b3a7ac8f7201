"""Files and batch jobs under compaction: what counts stays so, for later processes too."""

from __future__ import annotations

from msgspec.structs import replace

from app.batches.batch_view import batch_key, file_key
from streams.batch_records import BatchJob, FileCard
from streams.codecs import decode, encode
from streams.memory.broker_faults import AppendFate
from streams.topics import BATCH_JOBS, FILE_PARTS, TOPICS, partition_of
from tests.harness.batch_harness import BatchHarness, chat_line, jsonl
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


@scenario_test
async def test_batch_has_one_line_for_each_request_with_compaction_before_each_restart(
    world: MemoryWorld,
) -> None:
    """Of all compacted topics, with appends that arrive late, twice or unreported."""
    assert {BATCH_JOBS, FILE_PARTS} <= {topic.name for topic in TOPICS if topic.compacts}
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
