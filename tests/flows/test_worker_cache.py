"""Tests of the cache of a worker in the log: always the contents of its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from itertools import pairwise

import pytest

from kvlane.app.engine.interface import KvEventListener
from kvlane.app.engine.simulated.batch import EngineLimits
from kvlane.app.engine.simulated.block_cache import BlockCache
from kvlane.app.engine.simulated.engine import SimulatedEngine
from kvlane.app.engine.simulated.text_generator import TextGenerator
from kvlane.app.engine.validator import ValidatingEngine
from kvlane.app.serving import kv_event_publisher
from kvlane.app.serving.kv_event_publisher import (
    REPUBLISH_CHUNK_INTERVAL_S,
    REPUBLISHES_PER_RETENTION,
)
from kvlane.app.settings import Settings
from kvlane.indexer.block_hashes import local_hashes, prompt_keys
from kvlane.indexer.cache_events.engine_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    EngineEvent,
    EngineHash,
    EventsLost,
)
from kvlane.indexer.epochs import CacheId
from kvlane.indexer.events import EventColumns
from kvlane.streams.codecs import decode, pack_tokens
from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.records import Blocks, Heartbeat, Lost, PrefillDone
from kvlane.streams.topics import KV_EVENTS, partition_of
from tests.harness.decoded import decode_events as events_of
from tests.harness.memory_world import MemoryWorld, run_scenario
from tests.harness.worker_harness import WorkerHarness
from workbench.reference_index import ReferenceIndex

SIZE = 4
SHAPE = EngineLimits(block_size=SIZE, cache_blocks=24, max_sequences=4)
SECRET = Settings(worker_id="-", router_id="-").block_key_secret()
HOLDER = CacheId("w", 0)
SAYS = TextGenerator(
    ["a b c d"], lambda text: [1, 2, 3, 4] if text[0] == "a" else [5, 6, 7, 8], None
)
DAY_S = 86_400.0


class Watched(SimulatedEngine):
    """Remembers what it told of its blocks: the prefix that each of them ends."""

    prefixes: dict[EngineHash, tuple[int, ...]]

    def set_kv_event_listener(self, listener: KvEventListener) -> None:
        self.prefixes = {}

        def both(events: Sequence[EngineEvent]) -> None:
            for event in events:
                self._note(event)
            listener(events)

        super().set_kv_event_listener(both)

    def clear_cache(self) -> None:
        assert not self.used_blocks
        self._state.cache = BlockCache(SHAPE.cache_blocks)
        self._publish([AllCleared()])

    def _note(self, event: EngineEvent) -> None:
        match event:
            case BlocksStored():
                prefix = self.prefixes[event.parent] if event.parent is not None else ()
                for number, name in enumerate(event.block_hashes):
                    prefix += tuple(event.token_ids[number * SIZE : (number + 1) * SIZE])
                    self.prefixes[name] = prefix
            case BlocksRemoved():
                for name in event.block_hashes:
                    del self.prefixes[name]
            case AllCleared():
                self.prefixes.clear()


class Cached(WorkerHarness):
    """A worker with a small cache, and what the log says about it."""

    engine: Watched

    async def begin(self, seed: int = 1, shape: EngineLimits = SHAPE) -> None:
        clock = self.world.clock
        self.engine = Watched(
            clock, shape, context_length=shape.capacity_tokens, continuation=SAYS, speedup=20
        )
        await self.start(ValidatingEngine(self.engine), seed=seed)

    async def make_request(self, *prompts: int, tokens: int = 20, answer: int = 6) -> None:
        """Serve prompts, each named by a number, which share nothing with one another."""
        sent = []
        for prompt in prompts:
            name = f"{self.epoch} {prompt} {len(self.engine.prefixes)} {self.world.clock.now()}"
            self.assign(
                name, prompt=range(1000 * prompt, 1000 * prompt + tokens), max_tokens=answer
            )
            sent.append(self.wait_finished(name))
        await asyncio.gather(*sent)

    def index(self, after: int = 0) -> ReferenceIndex:
        """What one knows who reads the log from an offset on."""
        index = ReferenceIndex()
        number = partition_of(b"w", self.world.broker.partitions[KV_EVENTS])
        for raw in self.world.records(KV_EVENTS, number):
            if raw.offset < after:
                continue
            match decode(raw):
                case Blocks() as record:
                    columns = EventColumns(
                        record.kinds, record.tiers, record.positions, record.counts, record.keys
                    )
                    holder = CacheId(record.worker, record.rank)
                    events = events_of(columns)
                    index.apply_events(0, holder, record.epoch, record.first_event_id, events)
                case Heartbeat() as beat:
                    for rank, last in enumerate(beat.last_event_ids):
                        index.on_heartbeat(0, CacheId(beat.worker, rank), beat.epoch, last)
                case Lost() as lost:
                    index.end_epoch(0, lost.worker, lost.epoch)
        return index

    def differences(self, index: ReferenceIndex | None = None) -> list[str]:
        index = index or self.index()
        held = set(self.engine.prefixes.values())
        found = []
        if index.block_count(HOLDER) != len(held):
            found.append(
                f"{index.block_count(HOLDER)} blocks in the index, {len(held)} in the cache"
            )
        for prefix in held:
            overlap = index.match_prefix(prompt_keys(local_hashes(prefix, SIZE), SECRET).tolist())
            depth = 0
            while prefix[: (depth + 1) * SIZE] in held and depth < len(prefix) // SIZE:
                depth += 1
            got = overlap[HOLDER].total_blocks if HOLDER in overlap else 0
            if got != depth:
                found.append(f"{got} of {depth} blocks of {prefix}")
        return found

    async def settle(self) -> None:
        """Returns when log and cache agree, with not a single gap seen on the way."""
        await self.world.wait_until(lambda: not self.differences(), 30)
        assert self.engine.prefixes
        assert self.index().counters.gaps == 0

    def lose(self) -> None:
        lost = Lost(worker="w", epoch=self.epoch)
        self.world.append(
            KV_EVENTS, partition_of(b"w", self.world.broker.partitions[KV_EVENTS]), lost, key="w"
        )
        self.send(lost)


Scenario = Callable[[Cached], Coroutine[None, None, None]]


def with_cache(scenario: Scenario) -> Callable[[], None]:
    def test() -> None:
        async def begun(world: MemoryWorld) -> None:
            cached = Cached(world)
            await cached.begin()
            await scenario(cached)

        run_scenario(begun)

    test.__name__ = scenario.__name__
    return test


@with_cache
async def test_log_has_the_blocks_of_the_engine(harness: Cached) -> None:
    await harness.make_request(1, 2)
    await harness.settle()
    assert harness.index().is_complete(HOLDER)


@with_cache
async def test_blocks_of_prompts_and_answers_are_published(harness: Cached) -> None:
    await harness.make_request(1, tokens=8, answer=12)
    await harness.settle()
    assert max(len(p) for p in harness.engine.prefixes.values()) == 20 - SIZE


@with_cache
async def test_evicted_blocks_are_removed(harness: Cached) -> None:
    for prompt in range(12):
        await harness.make_request(prompt)
    await harness.settle()
    keys = prompt_keys(local_hashes(range(20), SIZE), SECRET).tolist()
    assert HOLDER not in harness.index().match_prefix(keys), (
        "the first prompt made room for the last"
    )


@with_cache
async def test_new_epoch_announces_the_cache_again(harness: Cached) -> None:
    await harness.make_request(1, 2)
    await harness.settle()
    old = harness.epoch
    harness.lose()
    await harness.world.wait_until(lambda: harness.worker.epoch not in (None, old))
    await harness.settle()
    assert harness.index().is_complete(HOLDER)
    await harness.make_request(3)
    await harness.settle()


@with_cache
async def test_only_the_newest_epoch_is_announced(harness: Cached) -> None:
    for _ in range(3):
        await harness.make_request(1)
        old = harness.epoch
        harness.lose()
        await harness.world.wait_until(lambda old=old: harness.worker.epoch not in (None, old))  # type: ignore[misc]
    for prompt in range(12):
        harness.world.faults.next_fates(
            KV_EVENTS, AppendFate.LOST, AppendFate.KEPT, AppendFate.LOST
        )
        await harness.make_request(prompt)
    await harness.settle()  # two writers would overtake each other, and leave a gap


@with_cache
async def test_events_between_two_epochs_are_not_lost(harness: Cached) -> None:
    await harness.make_request(1)
    harness.assign("a", prompt=range(40), max_tokens=40)
    await harness.world.wait_until(lambda: len(harness.chunks("a")) > 2)
    harness.world.faults.slow["append"] = 1.0  # registering takes seconds
    harness.lose()
    await harness.world.wait_until(lambda: harness.worker.epoch is None)
    await harness.world.sleep(1)
    harness.engine.clear_cache()
    await harness.world.wait_until(lambda: harness.worker.epoch is not None)
    harness.world.faults.slow.clear()
    await harness.make_request(2)
    await harness.settle()


@with_cache
async def test_restarted_worker_loses_its_old_blocks(harness: Cached) -> None:
    await harness.make_request(1, 2)
    await harness.settle()
    harness.worker._log.kill()  # type: ignore[attr-defined]
    await harness.ctx.cancel_tasks()
    await harness.begin(seed=2)
    await harness.world.sleep(1)
    assert harness.index().block_count(HOLDER) == 0
    await harness.make_request(3)
    await harness.settle()


@pytest.mark.parametrize(
    "fates",
    [[AppendFate.LOST], [AppendFate.UNREPORTED], [AppendFate.LOST, AppendFate.UNREPORTED] * 3],
)
def test_records_without_acknowledgement_are_repeated_in_order(fates: list[AppendFate]) -> None:
    async def scenario(harness: Cached) -> None:
        for prompt in range(8):
            harness.world.faults.next_fates(KV_EVENTS, *fates)
            await harness.make_request(prompt)
        await harness.settle()
        assert harness.index().is_complete(HOLDER)

    with_cache(scenario)()


@with_cache
async def test_events_of_an_outage_are_published_after_it(harness: Cached) -> None:
    harness.assign("a", prompt=range(40), max_tokens=40)
    await harness.world.wait_until(lambda: len(harness.chunks("a")) > 2)
    harness.world.broker.available = False
    await harness.world.sleep(20)
    harness.world.broker.available = True
    await harness.settle()


@with_cache
async def test_slow_log_does_not_block_the_engine(harness: Cached) -> None:
    steps = harness.engine.step_count
    world = harness.world
    world.faults.next_fates(KV_EVENTS, *[AppendFate.LOST] * 1000)
    for number in range(4):
        harness.assign(f"r{number}", prompt=range(1000 * number, 1000 * number + 20), max_tokens=20)
    await world.sleep(3)
    assert harness.engine.step_count - steps >= 20
    assert harness.engine.running_count == 0
    world.faults.fates.clear()
    await harness.settle()


@with_cache
async def test_simultaneous_events_share_a_record(harness: Cached) -> None:
    before = len(harness.records_of(KV_EVENTS, Blocks))
    await harness.make_request(1, 2, 3, tokens=24, answer=1)
    await harness.settle()
    assert len(harness.records_of(KV_EVENTS, Blocks)) - before == 1


@with_cache
async def test_records_name_the_model_and_the_secret_of_their_keys(harness: Cached) -> None:
    await harness.make_request(1)
    await harness.settle()
    for record in harness.records_of(KV_EVENTS, Blocks):
        assert record.model == "simulated"
        assert record.hash_fingerprint == SECRET.fingerprint


@with_cache
async def test_cache_is_announced_again_before_its_retention_ends(harness: Cached) -> None:
    await harness.make_request(1, 2)
    await harness.settle()
    number = partition_of(b"w", harness.world.broker.partitions[KV_EVENTS])
    for _ in range(2):
        forgotten = harness.world.records(KV_EVENTS, number)[-1].offset + 1
        await harness.world.sleep(DAY_S / REPUBLISHES_PER_RETENTION + 1)
        assert not harness.differences(harness.index(forgotten))
    assert not harness.differences()


def test_workers_that_start_together_do_not_announce_together() -> None:
    told_at = []

    async def scenario(world: MemoryWorld, seed: int) -> None:
        harness = Cached(world)
        await harness.begin(seed)
        await harness.make_request(1)
        await harness.settle()
        begun, records = world.broker.now_ms(), len(harness.records_of(KV_EVENTS, Blocks))
        await world.sleep(DAY_S / REPUBLISHES_PER_RETENTION)
        number = partition_of(b"w", world.broker.partitions[KV_EVENTS])
        blocks = [r for r in world.records(KV_EVENTS, number) if isinstance(decode(r), Blocks)]
        told_at.append((blocks[records].timestamp - begun) / 1000)

    for seed in (1, 2):
        run_scenario(lambda world, seed=seed: scenario(world, seed))  # type: ignore[misc]
    assert abs(told_at[0] - told_at[1]) > 60
    assert min(told_at) > DAY_S / REPUBLISHES_PER_RETENTION / 2 - 60


@with_cache
async def test_announcement_is_spread_and_blocks_nothing(harness: Cached) -> None:
    await harness.make_request(1, 2, 3)
    await harness.settle()
    number = partition_of(b"w", harness.world.broker.partitions[KV_EVENTS])
    before = len(harness.world.records(KV_EVENTS, number))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_event_publisher, "REPUBLISH_CHUNK_BLOCKS", 2)
        (events,) = harness.worker._cache_events
        events.normalizer.start_announcement(harness.world.clock.now(), clear=True)
        events._changed.notify_all()
        await harness.world.sleep(3.5 * REPUBLISH_CHUNK_INTERVAL_S)
        harness.worker._on_engine_events([BlocksStored([1], None, [7] * SIZE, SIZE)])
        await harness.world.sleep(1)
    got = [
        (raw.timestamp, record)
        for raw in harness.world.records(KV_EVENTS, number)[before:]
        if isinstance(record := decode(raw), Blocks)
    ]
    (new,) = prompt_keys(local_hashes([7] * SIZE, SIZE), SECRET).tolist()
    with_new = [at for at, record in got if new.to_bytes(8, "little") in record.keys]
    assert with_new[0] < got[-1][0] - 2 * REPUBLISH_CHUNK_INTERVAL_S * 1000, "in between"
    pieces = [at for at, record in got if at not in with_new]
    assert len(pieces) > 5
    assert all(len(record.keys) <= 2 * 8 for _, record in got)
    assert all(b - a >= REPUBLISH_CHUNK_INTERVAL_S * 1000 - 1 for a, b in pairwise(pieces))


@with_cache
async def test_too_many_pending_events_are_replaced_by_the_cache_state(harness: Cached) -> None:
    await harness.make_request(1)
    await harness.settle()
    normalizer = harness.worker._cache_events[0].normalizer
    normalizer._max_pending = 8
    harness.world.faults.next_fates(KV_EVENTS, *[AppendFate.LOST] * 1000)
    for n in range(2, 14):
        await harness.make_request(n)
    assert normalizer._pending_blocks < 24
    harness.world.faults.fates.clear()
    await harness.settle()
    assert normalizer.counters.overflows
    assert harness.index().is_complete(HOLDER)


@with_cache
async def test_only_blocks_that_the_engine_continues_are_announced_after_lost_events(
    harness: Cached,
) -> None:
    await harness.make_request(1, 2)
    await harness.make_request(3)
    await harness.settle()
    number = partition_of(b"w", harness.world.broker.partitions[KV_EVENTS])
    before = harness.world.records(KV_EVENTS, number)[-1].offset + 1
    harness.worker._on_engine_events([EventsLost()])
    await harness.world.sleep(1)
    anew = harness.index(before)
    assert anew.is_complete(HOLDER), "it begins with cleared"
    assert not anew.block_count(HOLDER)
    await harness.make_request(1, answer=6 + 2 * SIZE)
    await harness.world.sleep(1)
    known = harness.index(before)
    continued, doubtful = (
        known.match_prefix(prompt_keys(local_hashes(range(n, n + 20), SIZE), SECRET).tolist())
        for n in (1000, 3000)
    )
    assert continued[HOLDER].total_blocks == 20 // SIZE
    assert HOLDER not in doubtful


@with_cache
async def test_heartbeats_have_the_event_position_and_the_engine_load(harness: Cached) -> None:
    await harness.make_request(1)
    await harness.settle()
    await harness.world.sleep(1)
    beat = harness.heartbeats()[-1]
    events = sum(len(record.kinds) for record in harness.records_of(KV_EVENTS, Blocks))
    assert beat.last_event_ids == (events - 1,)
    assert beat.engine is not None
    assert (beat.engine.kv_total_blocks, beat.engine.running) == (24, 0)
    assert beat.engine.steps == 6


@with_cache
async def test_heartbeat_never_runs_ahead_of_the_events(harness: Cached) -> None:
    harness.world.faults.next_fates(KV_EVENTS, *[AppendFate.KEPT, AppendFate.LOST] * 20)
    await harness.make_request(*range(10))
    await harness.world.sleep(30)
    await harness.settle()  # a heartbeat that did would show as a gap


@with_cache
async def test_block_size_that_differs_from_the_card_makes_it_unhealthy(harness: Cached) -> None:
    event = BlocksStored([1], None, [0] * 8, 8)
    harness.worker._on_engine_events([event])
    await harness.world.sleep(2)
    beat = harness.heartbeats()[-1]
    assert beat.state == "unhealthy"
    assert "blocks of 8" in beat.reason


@with_cache
async def test_ledger_has_the_cached_tokens_of_a_prompt(harness: Cached) -> None:
    await harness.make_request(1)
    harness.assign("b", prompt=range(1000, 1020), max_tokens=5)
    finished = await harness.wait_finished("b")
    (done,) = harness.lane_records("ledger", PrefillDone, "b")
    assert done.cached_tokens == finished.cached_tokens == 16  # the last token is always computed
    assert 0 < done.prefill_ms <= done.ttft_ms
    usage = harness.chunks("b")[-1].usage
    assert usage is not None
    assert usage.cached_tokens == 16


@with_cache
async def test_resumed_run_counts_no_more_cached_tokens_than_the_prompt_has(
    harness: Cached,
) -> None:
    harness.assign("a", prompt=range(20), max_tokens=12)
    await harness.wait_finished("a")
    output = [t for chunk in harness.chunks("a") for t in chunk.token_ids]
    harness.assign("a", attempt=1, prompt=range(20), taken=pack_tokens(output[:10]), max_tokens=12)
    await harness.world.wait_until(lambda: harness.chunks("a")[-1].attempt == 1)
    await harness.world.sleep(1)
    usage = harness.chunks("a")[-1].usage
    assert usage is not None
    assert usage.cached_tokens == 20
