"""Tests of heartbeats, lost epochs and registration of one worker, on the log in memory."""

from __future__ import annotations

import pytest

from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.serving.registration import REGISTER_TIMEOUT_S
from kvlane.app.worker import WorkerIdTaken
from kvlane.streams.codecs import decode
from kvlane.streams.errors import AppendFailed
from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.ports import Partition
from kvlane.streams.records import Blocks, Finished, LogRecord, Lost, Tombstone, WorkerCard
from kvlane.streams.topics import KV_EVENTS, LEDGER, REGISTRY
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.worker_harness import ScriptedEngine, WorkerHarness

# --- heartbeats ------------------------------------------------------------------------------


@scenario_test
async def test_heartbeats_list_open_runs_and_the_next_offset(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world, max_num_seqs=1)
    harness.assign("a", max_tokens=100)
    harness.assign("b", max_tokens=100)
    await world.sleep(2.5)
    beat = harness.heartbeats()[-1]
    assert [r.id for r in beat.running] == ["a", "b"]
    assert beat.running[0].output_tokens > 10
    assert (beat.slot_offset, beat.waiting, beat.state) == (2, 1, "ready")


@scenario_test
async def test_lost_heartbeat_is_not_repeated(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    await world.sleep(0.5)
    world.faults.next_fates(KV_EVENTS, AppendFate.LOST)
    await world.sleep(3)
    assert len(harness.heartbeats()) == 3  # at 0, 2 and 3 s


# --- epochs ----------------------------------------------------------------------------------


@scenario_test
async def test_lost_drops_the_runs_without_records_and_begins_a_new_epoch(
    world: MemoryWorld,
) -> None:
    harness = await WorkerHarness.started(world)
    old = harness.epoch
    harness.assign(max_tokens=500)
    harness.assign("b", max_tokens=500)
    await world.wait_until(lambda: len(harness.chunks()) == 3)
    harness.send(Lost(worker="w", epoch=old, by="r1", silent_ms=5000))
    await world.wait_until(lambda: harness.worker.epoch not in (None, old))
    await world.sleep(5)
    assert not harness.records_of(LEDGER, Finished)
    assert len(harness.chunks()) <= 4  # what was on its way may have landed
    assert harness.chunks()[-1].finish_reason is None
    assert [c.epoch for c in harness.records_of(REGISTRY, WorkerCard)] == [
        None,
        old,
        None,
        harness.epoch,
    ]
    assert [b.epoch for b in harness.records_of(KV_EVENTS, Blocks)] == [old, harness.epoch]
    assert harness.heartbeats()[-1].running == ()
    harness.assign("c")
    assert (await harness.wait_finished("c")).epoch == harness.epoch


@scenario_test
async def test_lost_epochs_leave_no_state(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    for _ in range(20):
        epoch = harness.epoch
        harness.send(Lost(worker="w", epoch=epoch))
        await world.wait_until(lambda before=epoch: harness.worker.epoch not in (None, before))
    await world.sleep(1)
    assert len(harness.worker._loops) <= 4


@scenario_test
async def test_new_epoch_begins_however_long_the_broker_is_away(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    old = harness.epoch
    world.faults.next_fates(REGISTRY, *[AppendFate.LOST] * 5000)
    harness.send(Lost(worker="w", epoch=old))
    await world.sleep(10 * REGISTER_TIMEOUT_S)
    assert harness.worker.epoch is None
    assert harness.ctx.error is None
    world.faults.fates.clear()
    await world.wait_until(lambda: harness.worker.epoch not in (None, old))
    harness.assign()
    assert (await harness.wait_finished()).epoch == harness.epoch


@scenario_test
async def test_card_is_written_again_however_long_the_broker_is_away(world: MemoryWorld) -> None:
    harness = WorkerHarness(world)
    world.append(REGISTRY, 0, Tombstone(key="worker/x"), key="worker/x")
    await harness.start()
    world.append(REGISTRY, 0, Tombstone(key="worker/w", epoch=0), key="worker/w")
    world.faults.next_fates(REGISTRY, *[AppendFate.LOST] * 500)
    await world.sleep(3 * REGISTER_TIMEOUT_S)
    assert harness.ctx.error is None
    world.faults.fates.clear()
    await world.sleep(5)
    assert isinstance(decode(world.records(REGISTRY, 0)[-1]), WorkerCard)


@scenario_test
async def test_worker_that_cannot_register_at_its_start_fails(world: MemoryWorld) -> None:
    world.faults.next_fates(REGISTRY, *[AppendFate.LOST] * 500)
    engine = ScriptedEngine(world)
    began = world.clock.now()
    with pytest.raises(AppendFailed):
        await WorkerHarness(world).start(engine)
    assert world.clock.now() - began >= REGISTER_TIMEOUT_S
    assert engine.calls == ["start", "cleanup"]


@scenario_test
async def test_lost_of_an_older_epoch_is_ignored(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    epoch = harness.epoch
    harness.send(Lost(worker="w", epoch=epoch - 1))
    harness.send(Lost(worker="other", epoch=epoch))
    await world.sleep(3)
    assert harness.epoch == epoch


@scenario_test
async def test_epoch_whose_first_card_is_appended_twice_ends_in_a_complete_one(
    world: MemoryWorld,
) -> None:
    """The repeated card is read while the epoch begins."""
    harness = await WorkerHarness.started(world)
    old = harness.epoch
    world.faults.next_fates(REGISTRY, AppendFate.TWICE)
    world.faults.slow["append"] = 0.5
    harness.send(Lost(worker="w", epoch=old))
    await world.sleep(30)
    fleet = Fleet()
    cards = [LogRecord(r.offset, r.timestamp, decode(r)) for r in world.records(REGISTRY, 0)]
    fleet.apply(Partition(REGISTRY, 0), cards, len(cards))
    member = fleet.members["w"]
    assert member.epoch == member.card.epoch == harness.epoch != old


@scenario_test
async def test_tombstone_of_its_epoch_counts_as_lost(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(world)
    old = harness.epoch
    world.append(REGISTRY, 0, Tombstone(key="worker/w", epoch=old), key="worker/w")
    await world.wait_until(lambda: harness.worker.epoch not in (None, old))


@scenario_test
async def test_overwritten_card_is_written_again(world: MemoryWorld) -> None:
    harness = WorkerHarness(world)
    world.append(REGISTRY, 0, Tombstone(key="worker/x"), key="worker/x")
    await harness.start()
    epoch = harness.epoch
    world.append(REGISTRY, 0, Tombstone(key="worker/w", epoch=0), key="worker/w")
    await world.sleep(3)
    last = decode(world.records(REGISTRY, 0)[-1])
    assert isinstance(last, WorkerCard)
    assert last.epoch == epoch == harness.epoch


@scenario_test
async def test_newer_process_of_the_same_name_ends_this_one(world: MemoryWorld) -> None:
    older, newer = WorkerHarness(world), WorkerHarness(world)
    await older.start()
    older.assign(max_tokens=500)
    await world.wait_until(lambda: len(older.chunks()) == 3)
    await newer.start(seed=2)
    await world.wait_until(lambda: older.ctx.error is not None)
    assert isinstance(older.ctx.error, WorkerIdTaken)
    assert "KVLANE_WORKER_ID" in str(older.ctx.error)
    assert newer.ctx.error is None
    await older.ctx.cancel_tasks()
    await world.sleep(5)
    assert len(older.chunks()) <= 4
    assert not older.records_of(LEDGER, Finished)
