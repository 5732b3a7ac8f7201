"""Tests of the KV index of a replica that starts anew: from snapshots, or from the rest of the
log."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from kvlane.app.indexer import Indexer
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext
from kvlane.indexer.block_hashes import derive_secret
from kvlane.indexer.events import CLEARED, CacheEvent, EventKind, Tier, encode_events
from kvlane.streams.codecs import decode
from kvlane.streams.codecs import encode as encoded
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.records import Blocks, Heartbeat, SnapshotPointer
from kvlane.streams.topics import KV_EVENTS, REGISTRY, SNAPSHOTS, TOPICS_BY_NAME, partition_of
from kvlane.streams.views.tail_reader import MAX_QUEUED_RECORDS
from tests.harness.fake_worker import FakeWorker
from tests.harness.gateway_harness import memory_settings
from tests.harness.http_exchange import HttpExchange
from tests.harness.memory_world import MemoryWorld, scenario_test

SECRET = "ours"
EVERY_S = 60.0
PARTITION = partition_of(b"w1", TOPICS_BY_NAME[KV_EVENTS].partitions)


class Replica:
    """An indexer on a connection of its own."""

    def __init__(self, world: MemoryWorld, log: MemoryLog, name: str, secret: str) -> None:
        self.log = log
        self.ctx = ProcessContext(name, world.clock, random.Random(name))
        settings = memory_settings(hash_secret=secret, snapshot_interval_s=EVERY_S)
        self.indexer = Indexer(log, settings, self.ctx, InlinePool())

    @staticmethod
    async def open(world: MemoryWorld, name: str = "i1", secret: str = SECRET) -> Replica:
        replica = Replica(world, await world.connect(name), name, secret)
        await replica.indexer.open()
        return replica

    async def kill(self) -> None:
        self.log.kill()
        await self.ctx.cancel_tasks()

    async def get(self, path: str) -> HttpExchange:
        exchange = HttpExchange(self.indexer.http, "GET", path)
        await exchange.wait_done()
        return exchange

    async def knows(self) -> tuple[bytes, dict[str, str]]:
        """Everything that it knows of the caches, and the hashes of it."""
        page = (await self.get("/metrics")).content.decode().splitlines()
        hashes = dict(
            line.rsplit(" ", 1) for line in page if line.startswith("kvlane_view_state_hash{")
        )
        return (await self.get("/dump")).content, hashes

    async def complete(self) -> dict[str, bool]:
        workers = (await self.get("/workers")).json["workers"]
        return {worker["worker"]: worker["ranks"][0]["complete"] for worker in workers}

    @property
    def restored(self) -> int:
        return self.indexer._followers["index"].restored


class Cache:
    """A worker's cache, told of event by event."""

    def __init__(self, world: MemoryWorld, name: str = "w1") -> None:
        self.hand = FakeWorker(world, name)
        self.hand.heartbeat_task.cancel()  # its heartbeats would not know the ids of these events
        self.world = world
        self.at = 0

    def say(self, *events: CacheEvent) -> int:
        """The offset of the record."""
        secret = derive_secret(SECRET.encode())
        blocks = Blocks(
            worker=self.hand.name, epoch=self.hand.epoch, first_event_id=self.at,
            hash_fingerprint=secret.fingerprint, **encode_events(events)._asdict(),
        )  # fmt: skip
        self.at += len(events)
        return self.world.append(KV_EVENTS, self.partition, blocks, key=self.hand.name)

    def beat(self) -> None:
        beat = Heartbeat(
            worker=self.hand.name,
            epoch=self.hand.epoch,
            slot_offset=0,
            last_event_ids=(self.at - 1,),
        )
        self.world.append(KV_EVENTS, self.partition, beat, key=self.hand.name)

    @property
    def partition(self) -> int:
        return partition_of(self.hand.name.encode(), TOPICS_BY_NAME[KV_EVENTS].partitions)


def stored(first: int, count: int, position: int = 0, tier: Tier = Tier.DEVICE) -> CacheEvent:
    return CacheEvent(EventKind.STORED, tier, position, tuple(range(first, first + count)))


def removed(*keys: int) -> CacheEvent:
    return CacheEvent(EventKind.REMOVED, keys=keys)


def pointers(world: MemoryWorld) -> list[SnapshotPointer]:
    found = [decode(record) for record in world.records(REGISTRY, 0)]
    return [each for each in found if isinstance(each, SnapshotPointer)]


def repoint(world: MemoryWorld, **changes: object) -> None:
    """Change every pointer there is."""
    log = world.broker.log(REGISTRY, 0).records
    for at, record in enumerate(log):
        pointer = decode(record)
        if isinstance(pointer, SnapshotPointer):
            changed = msgspec.structs.replace(pointer, **changes)
            log[at] = record._replace(value=encoded(changed, "").value)


def drop_parts(world: MemoryWorld, number: int) -> None:
    for partition in range(world.broker.partitions[SNAPSHOTS]):
        records = world.broker.log(SNAPSHOTS, partition).records
        for at, record in enumerate(records):
            if dict(record.headers).get("part") == b"%d" % number:
                records[at] = record._replace(value=None)


def flip_parts(world: MemoryWorld) -> None:
    for partition in range(world.broker.partitions[SNAPSHOTS]):
        records = world.broker.log(SNAPSHOTS, partition).records
        for at, record in enumerate(records):
            value = record.value or b""
            records[at] = record._replace(value=value[:-1] + bytes([value[-1] ^ 1]))


def cut_snapshots(world: MemoryWorld) -> None:
    for partition in range(world.broker.partitions[SNAPSHOTS]):
        log = world.broker.log(SNAPSHOTS, partition)
        world.broker.delete_records(SNAPSHOTS, partition, log.end)


# --- from snapshots ------------------------------------------------------------------------------


@scenario_test
async def test_replica_from_snapshots_and_the_tail_equals_one_from_the_log(
    world: MemoryWorld,
) -> None:
    caches = [Cache(world, f"w{n}") for n in range(1, 6)]
    for n, cache in enumerate(caches):
        cache.say(CLEARED, stored(1, 40), stored(100 * n + 100, 60, 40))
        cache.say(stored(7000, 9, 0, Tier.HOST), removed(100 * n + 159))
    live = await Replica.open(world)
    await world.sleep(EVERY_S / 2)
    assert len(pointers(world)) == len({cache.partition for cache in caches})
    for cache in caches:
        cache.say(stored(9000, 5), removed(40))
    from_snapshots = await Replica.open(world, "i2")
    assert from_snapshots.restored == len(pointers(world))
    cut_snapshots(world)
    from_the_log = await Replica.open(world, "i3")
    assert from_the_log.restored == 0
    knows = await live.knows()
    assert await from_snapshots.knows() == await from_the_log.knows() == knows
    assert b"9004" in knows[0]


@scenario_test
async def test_router_starts_from_snapshots_and_the_tail(world: MemoryWorld) -> None:
    cache = Cache(world)
    end = cache.say(CLEARED, stored(1, 40)) + 1
    await Replica.open(world)
    await world.sleep(EVERY_S / 2)
    world.broker.delete_records(KV_EVENTS, cache.partition, end)  # so that there is no other way
    ctx = ProcessContext("r1", world.clock, random.Random("r1"))
    router = Router(await world.connect("r1"), memory_settings(hash_secret=SECRET), ctx)
    await router.start()
    assert {tuple(h): held.total_blocks for h, held in router._index.cache_sizes().items()} == {
        ("w1", 0): 40
    }
    await router.stop()
    await ctx.cancel_tasks()


@scenario_test
async def test_snapshot_keeps_completeness_after_the_log_was_truncated(world: MemoryWorld) -> None:
    whole, half = Cache(world, "w1"), Cache(world, "w2")
    whole.say(CLEARED, stored(1, 40))
    half.say(stored(1, 40))  # the log begins in its middle
    await Replica.open(world)
    await world.sleep(EVERY_S / 2)
    for cache in (whole, half):
        end = world.broker.log(KV_EVENTS, cache.partition).end
        world.broker.delete_records(KV_EVENTS, cache.partition, end)
        cache.say(stored(500, 3))
    replica = await Replica.open(world, "i2")
    assert await replica.complete() == {"w1": True, "w2": False}


@scenario_test
async def test_partitions_of_a_dead_indexer_are_taken_over(world: MemoryWorld) -> None:
    cache = Cache(world)
    cache.say(CLEARED, stored(1, 40))
    first, second = await Replica.open(world, "i1"), await Replica.open(world, "i2")
    await world.sleep(EVERY_S / 2)
    owner = next(r for r in (first, second) if PARTITION in r.indexer._duty.owned)
    await owner.kill()
    cache.say(stored(41, 2, 40))
    for _ in range(10):
        await world.sleep(EVERY_S / 4)
        cache.beat()
    newest = pointers(world)[-1]
    assert newest.partition == PARTITION
    assert newest.position > 2


# --- from what is left ---------------------------------------------------------------------------

UNUSABLE: dict[str, Callable[[MemoryWorld], None]] = {
    "a part is gone": lambda w: drop_parts(w, 1),
    "the cover is gone": lambda w: drop_parts(w, 0),
    "parts are flipped": flip_parts,
    "their topic was cut": cut_snapshots,
    "the state hash is another": lambda w: repoint(w, state_hash="0"),
    "the position is another": lambda w: repoint(w, position=1),
    "the format is a newer one": lambda w: repoint(w, format=2),
}


@pytest.mark.parametrize("spoil", UNUSABLE.values(), ids=UNUSABLE.keys())
@scenario_test
async def test_without_a_whole_snapshot_the_log_is_read(
    world: MemoryWorld, spoil: Callable[[MemoryWorld], None]
) -> None:
    cache = Cache(world)
    cache.say(CLEARED, stored(1, 40))
    cache.say(stored(41, 2, 40))
    live = await Replica.open(world)
    await world.sleep(EVERY_S / 2)
    assert pointers(world)
    spoil(world)
    replica = await Replica.open(world, "i2")
    assert replica.restored == 0
    assert await replica.knows() == await live.knows()


@scenario_test
async def test_snapshots_under_another_secret_are_ignored(world: MemoryWorld) -> None:
    cache = Cache(world)
    cache.say(CLEARED, stored(1, 40))
    live = await Replica.open(world)
    await world.sleep(EVERY_S / 2)
    foreign = await Replica.open(world, "i2", "theirs")
    assert foreign.restored == 0
    assert b"40" not in (await foreign.knows())[0]
    for _ in range(10):  # it writes its own, newer ones
        await world.sleep(EVERY_S / 4)
        cache.beat()
    await live.kill()
    for _ in range(10):
        await world.sleep(EVERY_S / 4)
        cache.beat()
    replica = await Replica.open(world, "i3")
    assert replica.restored == 0
    assert (await replica.knows())[0] == (await live.knows())[0]


@scenario_test
async def test_snapshot_from_before_the_logs_start_is_dropped(world: MemoryWorld) -> None:
    cache = Cache(world)
    cache.say(CLEARED, stored(1, 40))
    live = await Replica.open(world)
    await world.sleep(EVERY_S / 2)
    await live.kill()
    end = [cache.say(stored(100, 3)), cache.say(removed(1))][-1]
    world.broker.delete_records(KV_EVENTS, cache.partition, end)
    cache.say(stored(200, 3))
    replica = await Replica.open(world, "i2")
    dump, _ = await replica.knows()
    assert b'"200"' in dump
    assert b'"2"' not in dump, "what was removed between the snapshot and the log is not known"
    assert await replica.complete() == {"w1": False}


@scenario_test
async def test_truncated_cache_is_incomplete_until_it_is_cleared(world: MemoryWorld) -> None:
    cache = Cache(world)
    cache.say(CLEARED, stored(1, 40))
    end = cache.say(stored(41, 2, 40))
    world.broker.delete_records(KV_EVENTS, cache.partition, end)
    replica = await Replica.open(world)
    assert await replica.complete() == {"w1": False}
    cache.say(stored(1, 42))
    await world.sleep(1)
    assert await replica.complete() == {"w1": False}, "it does not say that this is all"
    cache.say(CLEARED, stored(1, 42))
    await world.sleep(1)
    assert await replica.complete() == {"w1": True}


@scenario_test
async def test_log_at_the_edge_of_retention_rebuilds_the_index(world: MemoryWorld) -> None:
    """Workers announce all they hold again and again, without *cleared*: the rest may go."""
    cache = Cache(world)
    rng = random.Random(5)
    cache.say(CLEARED, stored(1, 30), stored(500, 10, 0, Tier.DISK))
    live = await Replica.open(world)
    held: set[int] = set(range(1, 31))
    again: list[int] = []
    for _ in range(20):
        for _ in range(5):
            key = rng.randrange(1, 60)
            cache.say(removed(key) if key in held else stored(key, 1))
            held ^= {key}
            cache.beat()
        again.append(cache.say(*(stored(key, 1) for key in sorted(held))))
        cache.say(stored(500, 10, 0, Tier.DISK))
        cache.say(stored(1000 + len(again), 1))
        held.add(1000 + len(again))
    for edge in (again[0], again[7], again[-1]):
        world.broker.delete_records(KV_EVENTS, cache.partition, edge)
        cut_snapshots(world)
        replica = await Replica.open(world, f"from {edge}")
        assert replica.restored == 0
        assert (await replica.knows())[1] == (await live.knows())[1]


@scenario_test
async def test_view_paused_beyond_retention_is_rebuilt_from_a_snapshot(world: MemoryWorld) -> None:
    """A replica that was stopped for so long that its place in the log is gone."""
    cache = Cache(world)
    cache.say(CLEARED, stored(1, 40))
    live, slow = await Replica.open(world), await Replica.open(world, "slow")
    await world.sleep(EVERY_S / 2)
    slow.indexer._duty.revoked(frozenset(range(99)))
    live.indexer._duty.assigned({cache.partition: 0})
    async with slow.indexer._followers["index"].paused():
        for n in range(3):
            cache.say(stored(100 * n + 100, 20))
        for _ in range(2 * MAX_QUEUED_RECORDS):  # more than wait for a view that is paused
            cache.beat()
        for _ in range(10):
            await world.sleep(EVERY_S / 4)
            cache.beat()
        position = pointers(world)[-1].position
        world.broker.delete_records(KV_EVENTS, cache.partition, position)
    await world.sleep(20)
    assert slow.indexer._followers["index"].rebuilds == 1
    assert (await slow.knows())[1] == (await live.knows())[1]
    assert await slow.complete() == {"w1": True}
