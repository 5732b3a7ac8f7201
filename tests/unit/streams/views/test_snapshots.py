"""Tests of snapshots: whole ones are used, newest first; anything else costs a replay."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import Callable, Sequence
from hashlib import sha256

import msgspec
import pytest
import zstandard

from kvlane.streams.codecs import decode, encode
from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.memory.partition_log import MemoryRecord
from kvlane.streams.ports import Entry, Partition
from kvlane.streams.records import Ended, LogRecord, ModelCard, SnapshotPointer, Tombstone
from kvlane.streams.topics import LEDGER, REGISTRY, SNAPSHOTS
from kvlane.streams.views.follower import Follower
from kvlane.streams.views.snapshot_store import SLICE_BYTES, SnapshotStore, capture, pointer_key
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.recording_view import RecordingView

LANE_0, LANE_1 = Partition(LEDGER, 0), Partition(LEDGER, 1)


class Blob:
    """A fold whose state is any bytes."""

    name = "blob"

    def __init__(self, data: bytes = b"", at: int | None = None) -> None:
        self.data, self.at = data, at

    def apply(self, source: Partition, log_records: Sequence[LogRecord], position: int) -> None:
        self.at = position

    def position(self, source: Partition) -> int | None:
        return self.at

    def forget(self, source: Partition) -> None:
        self.data, self.at = b"", None

    def snapshot(self, source: Partition) -> bytes:
        return self.data

    def restore(self, source: Partition, data: bytes, position: int) -> None:
        self.data, self.at = data, position

    def state_hash(self, source: Partition) -> str:
        return sha256(self.data).hexdigest()


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def a_tally(count: int, source: Partition = LANE_0) -> RecordingView:
    view = RecordingView()
    view.apply(source, (), 0)
    log_records = [LogRecord(i, 0, Ended(id=str(i), code="seen")) for i in range(count)]
    view.apply(source, log_records, count)
    return view


async def snapshots(world: MemoryWorld, client: str = "client") -> SnapshotStore:
    return SnapshotStore(await world.connect(client), world.clock)


def parts(world: MemoryWorld) -> list[MemoryRecord]:
    return world.all_records(SNAPSHOTS)


# --- whole snapshots -----------------------------------------------------------------------------


@scenario_test
async def test_loaded_snapshot_equals_the_saved_one(world: MemoryWorld) -> None:
    saved, loaded = a_tally(50), RecordingView()
    await (await snapshots(world)).save(saved, LANE_0)
    assert await (await snapshots(world)).load(loaded, LANE_0)
    assert loaded.position(LANE_0) == 50
    assert loaded.shares == saved.shares
    assert loaded.state_hash(LANE_0) == saved.state_hash(LANE_0)


@scenario_test
async def test_pointer_has_view_partition_position_and_hash(world: MemoryWorld) -> None:
    view = a_tally(3, LANE_1)
    pointer = await (await snapshots(world)).save(view, LANE_1)
    (record,) = world.records(REGISTRY, 0)
    assert record.key == b"snapshot/tally/1"
    assert decode(record) == pointer
    assert (pointer.view, pointer.partition, pointer.position) == ("tally", 1, 3)
    assert pointer.state_hash == view.state_hash(LANE_1)


@pytest.mark.parametrize("size", [0, 1, SLICE_BYTES, SLICE_BYTES + 1, 3_500_000])
@scenario_test
async def test_snapshot_of_any_size_comes_back_in_parts_of_at_most_a_megabyte(
    world: MemoryWorld, size: int
) -> None:
    data, loaded = noise(size), Blob()
    pointer = await (await snapshots(world)).save(Blob(data, 7), LANE_0)
    assert all(len(r.value or b"") <= 1024 * 1024 for r in parts(world))
    assert pointer.parts == len(parts(world)) == 1 + -(-size // SLICE_BYTES)
    assert await (await snapshots(world)).load(loaded, LANE_0)
    assert (loaded.data, loaded.at) == (data, 7)


@scenario_test
async def test_compressible_snapshot_is_compressed(world: MemoryWorld) -> None:
    await (await snapshots(world)).save(Blob(bytes(5_000_000), 1), LANE_0)
    assert sum(len(r.value or b"") for r in parts(world)) < 10_000


@scenario_test
async def test_each_partition_has_its_own_snapshot(world: MemoryWorld) -> None:
    view, loaded = a_tally(3, LANE_0), RecordingView()
    view.shares[LANE_1] = a_tally(5, LANE_1).shares[LANE_1]
    store = await snapshots(world)
    await store.save(view, LANE_0)
    await store.save(view, LANE_1)
    assert await store.load(loaded, LANE_1)
    assert loaded.position(LANE_0) is None
    assert loaded.position(LANE_1) == 5


@scenario_test
async def test_newest_snapshot_is_used(world: MemoryWorld) -> None:
    store, loaded = await snapshots(world), RecordingView()
    for count in (3, 9, 6):
        await store.save(a_tally(count), LANE_0)
    assert await store.load(loaded, LANE_0)
    assert loaded.position(LANE_0) == 6


@scenario_test
async def test_snapshot_saved_since_the_last_load_is_found(world: MemoryWorld) -> None:
    store, other = await snapshots(world), await snapshots(world, "other")
    await store.save(a_tally(3), LANE_0)
    for count in (3, 5):
        loaded = RecordingView()
        assert await other.load(loaded, LANE_0)
        assert loaded.position(LANE_0) == count
        await store.save(a_tally(5), LANE_0)


@scenario_test
async def test_state_and_position_are_consistent(world: MemoryWorld) -> None:
    world.faults.slow["append"] = 0.5
    view, loaded = Blob(noise(2_500_000), 10), Blob()
    saving = world.spawn((await snapshots(world)).save(view, LANE_0))
    await world.sleep(0.7)
    view.data, view.at = b"later", 11
    pointer = await saving
    assert pointer.position == 10
    assert await (await snapshots(world)).load(loaded, LANE_0)
    assert (loaded.data, loaded.at) == (noise(2_500_000), 10)


@scenario_test
async def test_writing_and_reading_a_large_snapshot_lets_others_run(world: MemoryWorld) -> None:
    turns = 0

    async def bystander() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    world.spawn(bystander())
    store = await snapshots(world)
    await store.save(Blob(noise(20 * SLICE_BYTES), 1), LANE_0)
    assert turns >= 40  # once a slice to hash it and once to send it
    turns = 0
    assert await store.load(Blob(), LANE_0)
    assert turns >= 3


@scenario_test
async def test_refresh_continues_with_the_same_reader(world: MemoryWorld) -> None:
    await (await snapshots(world)).save(a_tally(3), LANE_0)
    log = await world.connect("late")
    store, opened = SnapshotStore(log, world.clock), log.reader
    readers = []
    log.reader = lambda: readers.append(opened()) or readers[-1]  # type: ignore[func-returns-value,method-assign]
    for _ in range(3):
        await store.refresh()
    assert len(readers) == 1
    assert store.newest("tally", LANE_0) is not None


@scenario_test
async def test_unwanted_snapshot_is_aborted(world: MemoryWorld) -> None:
    store, left = await snapshots(world), [True, True, False]
    taken = capture(Blob(noise(2_500_000), 1), LANE_0)
    assert await store.write(taken, lambda: left.pop(0)) is None
    assert len(parts(world)) == 2
    assert not world.records(REGISTRY, 0)


@scenario_test
async def test_several_snapshots_are_loaded_together(world: MemoryWorld) -> None:
    store, loaded = await snapshots(world), RecordingView()
    await store.save(a_tally(3, LANE_0), LANE_0)
    await store.save(a_tally(5, LANE_1), LANE_1)
    assert await store.load(loaded, LANE_0, LANE_1, Partition(LEDGER, 2)) == {LANE_0, LANE_1}
    assert (loaded.position(LANE_0), loaded.position(LANE_1)) == (3, 5)


@scenario_test
async def test_view_without_a_position_cannot_be_saved(world: MemoryWorld) -> None:
    with pytest.raises(ValueError, match="no state"):
        await (await snapshots(world)).save(RecordingView(), LANE_0)


@scenario_test
async def test_without_a_snapshot_nothing_is_loaded(world: MemoryWorld) -> None:
    loaded = RecordingView()
    assert not await (await snapshots(world)).load(loaded, LANE_0)
    assert loaded.position(LANE_0) is None


@scenario_test
async def test_repeated_parts_count_once(world: MemoryWorld) -> None:
    world.faults.next_fates(
        SNAPSHOTS, AppendFate.UNREPORTED, AppendFate.TWICE, AppendFate.UNREPORTED, AppendFate.KEPT
    )
    view, loaded = Blob(noise(2_500_000), 1), Blob()
    await (await snapshots(world)).save(view, LANE_0)
    assert len(parts(world)) > 4
    assert await (await snapshots(world)).load(loaded, LANE_0)
    assert loaded.data == view.data


@scenario_test
async def test_other_records_among_the_parts_do_not_matter(world: MemoryWorld) -> None:
    world.faults.slow["append"] = 0.5
    view, loaded = Blob(noise(2_500_000), 1), Blob()
    saving = world.spawn((await snapshots(world)).save(view, LANE_0))
    await world.wait_until(lambda: len(parts(world)) == 2)
    for headers in (
        (),
        (("snapshot", b"\xff"), ("part", b"2")),
        (("snapshot", b"a"), ("part", b"b")),
    ):
        world.append_raw(SNAPSHOTS, 0, Entry(b"k", b"v", headers))
    world.append_raw(SNAPSHOTS, 0, Entry(b"k", None, world.records(SNAPSHOTS, 0)[1].headers))
    await saving
    assert await (await snapshots(world)).load(loaded, LANE_0)
    assert loaded.data == view.data


@scenario_test
async def test_concurrent_snapshots_do_not_mix(world: MemoryWorld) -> None:
    world.faults.slow["append"] = 0.5
    one, other = Blob(noise(3_500_000, 1), 1), Blob(noise(3_500_000, 2), 2)
    await asyncio.gather(
        (await snapshots(world, "one")).save(one, LANE_0),
        (await snapshots(world, "other")).save(other, LANE_0),
    )
    checksums = [dict(r.headers)["snapshot"] for r in parts(world)]
    assert checksums != sorted(checksums), "they did not interleave"
    loaded = Blob()
    assert await (await snapshots(world)).load(loaded, LANE_0)
    assert loaded.at == newest(world).position
    assert loaded.data == (one.data if loaded.at == 1 else other.data)


@scenario_test
async def test_follower_starts_from_a_snapshot(world: MemoryWorld) -> None:
    world.append(LEDGER, 0, *[Ended(id=str(i), code="seen") for i in range(10)])
    await (await snapshots(world)).save(a_tally(8), LANE_0)
    log, view = await world.connect(), RecordingView()
    follower = Follower(log, view, [LEDGER], world.clock, snapshots=SnapshotStore(log, world.clock))
    world.spawn(follower.run())
    await follower.wait_caught_up()
    assert view.offsets(LANE_0) == list(range(10))
    assert follower.applied == 2


@scenario_test
async def test_snapshot_below_the_start_of_its_log_is_dropped(world: MemoryWorld) -> None:
    world.append(LEDGER, 0, *[Ended(id=str(i), code="seen") for i in range(20)])
    world.broker.delete_records(LEDGER, 0, 15)
    await (await snapshots(world)).save(a_tally(8), LANE_0)
    log, view = await world.connect(), RecordingView()
    follower = Follower(log, view, [LEDGER], world.clock, snapshots=SnapshotStore(log, world.clock))
    world.spawn(follower.run())
    await follower.wait_caught_up()
    assert view.offsets(LANE_0) == list(range(15, 20))


# --- snapshots that cannot be used ---------------------------------------------------------------


def newest(world: MemoryWorld) -> SnapshotPointer:
    pointer = decode(world.records(REGISTRY, 0)[-1])
    assert isinstance(pointer, SnapshotPointer)
    return pointer


def repoint(world: MemoryWorld, **changes: object) -> None:
    """Put another pointer in the place of the newest one."""
    changed = msgspec.structs.replace(newest(world), **changes)
    registry = world.broker.log(REGISTRY, 0).records
    registry[-1] = registry[-1]._replace(value=encode(changed, "").value)


def rewrite(world: MemoryWorld, change: Callable[[int, bytes], bytes | None]) -> None:
    """Write the parts of the newest snapshot once more, changed, and point at them."""
    checksum = newest(world).checksum.encode()
    written = [r for r in parts(world) if dict(r.headers)["snapshot"] == checksum]
    offsets = []
    for number, part in enumerate(written):
        value = change(number, part.value or b"")
        if value is not None:  # None leaves a part out
            entry = Entry(part.key, value, part.headers)
            offsets.append(world.append_raw(SNAPSHOTS, part.partition, entry))
    repoint(world, first_part=offsets[0])


def recovered(cover: bytes, **changes: object) -> bytes:
    fields = msgspec.msgpack.decode(cover)
    return msgspec.msgpack.encode(fields | changes)


def flip(data: bytes, at: int = -1) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


BOMB = zstandard.ZstdCompressor().compress(bytes(50 * SLICE_BYTES))

SPOILED: dict[str, Callable[[MemoryWorld], None]] = {
    "a part is missing": lambda w: rewrite(w, lambda n, v: None if n == 2 else v),
    "the last part is missing": lambda w: rewrite(w, lambda n, v: None if n == 3 else v),
    "a part is flipped": lambda w: rewrite(w, lambda n, v: flip(v) if n == 2 else v),
    "a part is no zstd": lambda w: rewrite(w, lambda n, v: b"zzz" if n == 2 else v),
    "a part is another one": lambda w: rewrite(
        w, lambda n, v: zstandard.ZstdCompressor().compress(b"x") if n == 2 else v
    ),
    "a part is a bomb": lambda w: rewrite(w, lambda n, v: BOMB if n == 2 else v),
    "the cover is no msgpack": lambda w: rewrite(w, lambda n, v: b"\xc1" if n == 0 else v),
    "the cover has another position": lambda w: rewrite(
        w, lambda n, v: recovered(v, position=3) if n == 0 else v
    ),
    "the pointer has another position": lambda w: repoint(w, position=3),
    "the pointer has another format": lambda w: repoint(w, format=2),
    "the pointer has another checksum": lambda w: repoint(w, checksum="0" * 64),
    "the pointer has another state hash": lambda w: repoint(w, state_hash="0"),
    "the pointer wants more parts": lambda w: repoint(w, parts=9),
    "the pointer wants fewer parts": lambda w: repoint(w, parts=2),
    "the pointer wants no parts": lambda w: repoint(w, parts=0),
    "it points at nothing": lambda w: repoint(w, first_part=1000),
}


@pytest.mark.parametrize("has_older", [False, True], ids=["alone", "with an older one"])
@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
@scenario_test
async def test_incomplete_snapshot_is_not_used(
    world: MemoryWorld, spoil: Callable[[MemoryWorld], None], has_older: bool
) -> None:
    if has_older:
        await (await snapshots(world)).save(Blob(b"older", 1), LANE_0)
    await (await snapshots(world)).save(Blob(noise(2_500_000), 5), LANE_0)
    spoil(world)
    loaded = Blob()
    assert bool(await (await snapshots(world)).load(loaded, LANE_0)) == has_older
    assert (loaded.data, loaded.at) == ((b"older", 1) if has_older else (b"", None))


@scenario_test
async def test_corrupted_part_never_reaches_the_view(world: MemoryWorld) -> None:
    class Trusting(Blob):
        def state_hash(self, source: Partition) -> str:
            return "always the same"

        def restore(self, source: Partition, data: bytes, position: int) -> None:
            pytest.fail("it was given bytes that nobody wrote")

    await (await snapshots(world)).save(Trusting(noise(2_500_000), 5), LANE_0)
    rewrite(world, lambda number, value: flip(value) if number == 2 else value)
    assert not await (await snapshots(world)).load(Trusting(), LANE_0)


@scenario_test
async def test_bomb_takes_no_memory(world: MemoryWorld) -> None:
    await (await snapshots(world)).save(Blob(noise(2_500_000), 5), LANE_0)
    rewrite(world, lambda number, value: BOMB if number == 1 else value)
    tracemalloc.start()
    try:
        assert not await (await snapshots(world)).load(Blob(), LANE_0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * SLICE_BYTES


@scenario_test
async def test_snapshot_with_partly_deleted_parts_is_not_used(world: MemoryWorld) -> None:
    await (await snapshots(world)).save(Blob(noise(2_500_000), 5), LANE_0)
    world.broker.delete_records(SNAPSHOTS, 0, 1)
    assert not await (await snapshots(world)).load(Blob(), LANE_0)


@scenario_test
async def test_snapshot_deleted_while_it_is_read_is_not_used(world: MemoryWorld) -> None:
    await (await snapshots(world)).save(Blob(noise(12_000_000), 5), LANE_0)
    world.faults.slow["poll"] = 0.5
    loading = world.spawn((await snapshots(world)).load(loaded := Blob(), LANE_0))
    await world.sleep(1.2)
    world.broker.delete_records(SNAPSHOTS, 0, 12)
    assert not await loading
    assert loaded.at is None


@scenario_test
async def test_snapshot_of_a_dead_writer_is_not_visible(world: MemoryWorld) -> None:
    world.faults.slow["append"] = 0.1
    log = await world.connect()
    saving = world.spawn(SnapshotStore(log, world.clock).save(Blob(noise(2_500_000), 5), LANE_0))
    await world.wait_until(lambda: len(parts(world)) == 2)
    log.kill()
    saving.cancel()
    await world.sleep(10)
    world.faults.slow.clear()
    assert not await (await snapshots(world, "other")).load(Blob(), LANE_0)


@scenario_test
async def test_snapshot_of_another_view_is_not_used(world: MemoryWorld) -> None:
    await (await snapshots(world)).save(Blob(b"x", 1), LANE_0)
    pointer = msgspec.structs.replace(newest(world), view="tally")
    world.append(REGISTRY, 0, pointer, key=pointer_key("tally", LANE_0))
    assert not await (await snapshots(world)).load(RecordingView(), LANE_0)


@scenario_test
async def test_snapshot_of_another_topic_is_not_used(world: MemoryWorld) -> None:
    await (await snapshots(world)).save(Blob(b"x", 1), LANE_0)
    assert not await (await snapshots(world)).load(Blob(), Partition(REGISTRY, 0))


@pytest.mark.parametrize("error", [ValueError("another version"), KeyError("a field")])
@scenario_test
async def test_snapshot_unreadable_by_the_view_leaves_nothing_behind(
    world: MemoryWorld, error: Exception
) -> None:
    class Refusing(Blob):
        def restore(self, source: Partition, data: bytes, position: int) -> None:
            super().restore(source, data[:1], position)
            raise error

    await (await snapshots(world)).save(Blob(b"xyz", 1), LANE_0)
    loaded = Refusing()
    assert not await (await snapshots(world)).load(loaded, LANE_0)
    assert (loaded.data, loaded.at) == (b"", None)


@scenario_test
async def test_snapshot_that_restores_to_other_state_leaves_nothing_behind(
    world: MemoryWorld,
) -> None:
    class Forgetful(Blob):
        def restore(self, source: Partition, data: bytes, position: int) -> None:
            super().restore(source, data[:1], position)

    await (await snapshots(world)).save(Blob(b"xyz", 1), LANE_0)
    loaded = Forgetful()
    assert not await (await snapshots(world)).load(loaded, LANE_0)
    assert (loaded.data, loaded.at) == (b"", None)


@scenario_test
async def test_withdrawn_pointer_has_no_snapshot(world: MemoryWorld) -> None:
    store = await snapshots(world)
    await store.save(Blob(b"x", 1), LANE_0)
    assert await store.load(Blob(), LANE_0)
    key = pointer_key("blob", LANE_0)
    world.append(REGISTRY, 0, Tombstone(key=key), key=key)
    assert not await store.load(Blob(), LANE_0)


@scenario_test
async def test_other_registry_records_are_ignored(world: MemoryWorld) -> None:
    world.append(REGISTRY, 0, ModelCard(name="m"), key="model/m")
    world.append_raw(
        REGISTRY,
        0,
        Entry(b"k", b"\xc1", (("t", b"WorkerCard"),)),
        Entry(b"k", b"\x80", (("t", b"Telepathy"),)),
        Entry(None, b"\xff"),
    )
    await (await snapshots(world)).save(Blob(b"x", 1), LANE_0)
    assert await (await snapshots(world)).load(Blob(), LANE_0)


@scenario_test
async def test_silent_log_is_not_awaited_forever(world: MemoryWorld) -> None:
    await (await snapshots(world)).save(Blob(b"x", 1), LANE_0)
    store = SnapshotStore(await world.connect(), world.clock, load_timeout_s=20)
    world.faults.slow["poll"] = 3.0
    loading = world.spawn(store.load(Blob(), LANE_0))
    await world.sleep(1)
    world.broker.available = False
    assert not await asyncio.wait_for(loading, 30)
