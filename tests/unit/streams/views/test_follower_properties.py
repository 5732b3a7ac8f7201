"""Tests of the follower with random logs and interruptions: the state of a plain replay, or a
rebuild."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.streams.ports import Entry, Partition
from kvlane.streams.records import Ended, LogRecord, ModelCard, Tombstone
from kvlane.streams.topics import LEDGER, REGISTRY, SNAPSHOTS
from kvlane.streams.views.follower import Follower
from kvlane.streams.views.snapshot_store import SnapshotStore
from kvlane.streams.views.tail_reader import TailReader
from tests.harness.memory_world import MemoryWorld, run_scenario
from tests.harness.recording_view import RecordingView

LANES = 2
SOURCES = [Partition(LEDGER, p) for p in range(LANES)]
MALFORMED = Entry(b"k", b"\xc1", (("t", b"Ended"),))
NAMES = ("a", "b")

LANE = st.integers(0, LANES - 1)
OPS = st.one_of(
    st.tuples(st.just("append"), st.tuples(LANE, st.lists(st.booleans(), max_size=8))),
    st.tuples(st.just("append"), st.tuples(LANE, st.lists(st.booleans(), max_size=8))),
    st.tuples(st.just("append_much"), LANE),
    st.tuples(st.just("truncate"), st.tuples(LANE, st.floats(0, 1))),
    st.tuples(st.just("begin"), st.sampled_from(NAMES)),
    st.tuples(st.just("begin"), st.sampled_from(NAMES)),
    st.tuples(st.just("begin_second"), st.sampled_from(NAMES)),
    st.tuples(st.just("begin_second"), st.sampled_from(NAMES)),
    st.tuples(st.just("kill"), st.sampled_from(NAMES)),
    st.tuples(st.just("save"), st.tuples(st.sampled_from(NAMES), LANE)),
    st.tuples(st.just("save"), st.tuples(st.sampled_from(NAMES), LANE)),
    st.tuples(st.just("lose_snapshots"), st.integers(0, 7)),
    st.tuples(st.just("outage"), st.booleans()),
)
STEPS = st.lists(st.tuples(OPS, st.sampled_from([0.0, 0.01, 1.5, 3.0])), min_size=15, max_size=60)


class Copy:
    """One process that follows, until it is killed: with a reader of its own, or a shared one."""

    def __init__(
        self,
        world: MemoryWorld,
        log: Any,
        view: Any,
        sources: Sequence[Any],
        tail: TailReader | None = None,
    ) -> None:
        self.log = log
        self.view = view
        self.snapshots = SnapshotStore(log, world.clock)
        self.follower = Follower(
            log, view, sources, world.clock, snapshots=self.snapshots, tail=tail
        )
        self.running = world.spawn(self.follower.run())
        self.saving: list[asyncio.Task[Any]] = []
        self.second: Copy | None = None

    async def kill(self) -> None:
        self.log.kill()
        tasks = [self.running, *self.saving]
        if self.second is not None:
            tasks.append(self.second.running)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class Model:
    def __init__(self, world: MemoryWorld) -> None:
        self.world = world
        self.history: dict[Partition, list[str | None]] = {source: [] for source in SOURCES}
        self.alive: dict[str, Copy] = {}
        self.numbers = 0

    async def append(self, what: tuple[int, list[bool]]) -> None:
        lane, whole = what
        for is_whole in whole:
            self.numbers += 1
            record = Ended(id=str(self.numbers), code="seen")
            if is_whole:
                self.world.append(LEDGER, lane, record)
            else:
                self.world.append_raw(LEDGER, lane, MALFORMED)
            self.history[Partition(LEDGER, lane)].append(repr(record) if is_whole else None)

    async def append_much(self, lane: int) -> None:
        await self.append((lane, [True] * 600))

    async def truncate(self, what: tuple[int, float]) -> None:
        lane, share = what
        log = self.world.broker.log(LEDGER, lane)
        self.world.broker.delete_records(
            LEDGER, lane, log.start + int(share * (log.end - log.start))
        )

    async def begin(self, name: str) -> None:
        if name not in self.alive and self.world.broker.available:
            log = await self.world.connect(name)
            tail = TailReader(log, self.world.clock)
            copy = self.alive[name] = Copy(self.world, log, RecordingView(), [LEDGER], tail)
            copy.saving.append(self.world.spawn(tail.run()))

    async def begin_second(self, name: str) -> None:
        """A second view in a process that has one already."""
        first = self.alive.get(name)
        if first is not None and first.second is None and self.world.broker.available:
            tail = first.follower._tail
            first.second = Copy(self.world, first.log, RecordingView(), [SOURCES[0]], tail)

    def copies(self) -> list[Copy]:
        return [copy for first in self.alive.values() for copy in (first, first.second) if copy]

    async def kill(self, name: str) -> None:
        if (copy := self.alive.pop(name, None)) is not None:
            await copy.kill()

    async def save(self, what: tuple[str, int]) -> None:
        name, lane = what
        copy = self.alive.get(name)
        if copy is not None and copy.view.position(SOURCES[lane]) is not None:
            saving = self.world.spawn(copy.snapshots.save(copy.view, SOURCES[lane]))
            copy.saving.append(saving)

    async def lose_snapshots(self, partition: int) -> None:
        log = self.world.broker.log(SNAPSHOTS, partition)
        self.world.broker.delete_records(SNAPSHOTS, partition, (log.start + log.end + 1) // 2)

    async def outage(self, begins: bool) -> None:
        self.world.broker.available = not begins

    def check(self) -> None:
        for copy in self.copies():
            assert not copy.running.done(), copy.running
            for source, share in copy.view.shares.items():
                history = self.history[source]
                expected = [
                    (offset, what)
                    for offset in range(share.begin, share.position)
                    if (what := history[offset]) is not None
                ]
                assert share.seen == expected
        if len(self.alive) == len(NAMES):
            one, other = (copy.view for copy in self.alive.values())
            for source in one.shares.keys() & other.shares.keys():
                same = [(f.shares[source].begin, f.position(source)) for f in (one, other)]
                if same[0] == same[1]:
                    assert one.state_hash(source) == other.state_hash(source)

    async def drain(self) -> None:
        self.world.broker.available = True
        for name in NAMES:
            await self.begin(name)
            await self.begin_second(name)
        for copy in self.copies():
            await asyncio.wait_for(copy.follower.wait_caught_up(), 60)
            for source in copy.follower.sources:
                end = self.world.broker.log(*source).end
                await asyncio.wait_for(copy.follower.wait_for(source, end), 60)
                assert copy.view.position(source) == end
        self.check()


@settings(max_examples=100)
@given(STEPS)
def test_followed_view_equals_the_view_of_the_whole_log(
    steps: list[tuple[tuple[str, Any], float]],
) -> None:
    async def scenario(world: MemoryWorld) -> None:
        model = Model(world)
        await model.begin("a")
        for (op, what), pause_s in steps:
            await getattr(model, op)(what)
            await world.sleep(pause_s)
            model.check()
        await model.drain()

    run_scenario(scenario, lanes=LANES)


class Cards:
    """A fold of a compacted topic: the last card of each key."""

    name = "cards"

    def __init__(self) -> None:
        self.cards: dict[str, str] = {}
        self.at: int | None = None

    def apply(self, source: Partition, log_records: Sequence[LogRecord], position: int) -> None:
        for log_record in log_records:
            if isinstance(log_record.record, Tombstone):
                self.cards.pop(log_record.record.key, None)
            else:
                assert isinstance(log_record.record, ModelCard)
                self.cards[f"model/{log_record.record.name}"] = repr(log_record.record)
        self.at = position

    def position(self, source: Partition) -> int | None:
        return self.at

    def forget(self, source: Partition) -> None:
        self.cards, self.at = {}, None

    def snapshot(self, source: Partition) -> bytes:
        raise NotImplementedError

    def restore(self, source: Partition, data: bytes, position: int) -> None:
        raise NotImplementedError

    def state_hash(self, source: Partition) -> str:
        return repr(sorted(self.cards.items()))


CARD_OPS = st.tuples(
    st.sampled_from(["m", "n", "o"]),
    st.sampled_from(["card", "card", "tombstone", "compact", "begin"]),
    st.sampled_from([0.0, 0.0, 1.0]),
)


@settings(max_examples=150)
@given(st.lists(CARD_OPS, min_size=8, max_size=40))
def test_compaction_changes_no_view_of_a_compacted_topic(ops: list[tuple[str, str, float]]) -> None:
    async def scenario(world: MemoryWorld) -> None:
        plain: dict[str, str] = {}
        copies: list[Copy] = []
        for number, (name, op, pause_s) in enumerate(ops):
            key = f"model/{name}"
            if op == "card":
                card = ModelCard(name=name, block_size=number)
                plain[key] = repr(card)
                world.append(REGISTRY, 0, card, key=key)
            elif op == "tombstone":
                plain.pop(key, None)
                world.append(REGISTRY, 0, Tombstone(key=key), key=key)
            elif op == "compact":
                await world.sleep(2)  # no reader is behind for as long as tombstones are kept
                world.broker.log(REGISTRY, 0).compact(world.broker.now_ms(), world.broker.now_ms())
            else:
                copies.append(Copy(world, await world.connect(), Cards(), [REGISTRY]))
            await world.sleep(pause_s)
        copies.append(Copy(world, await world.connect(), Cards(), [REGISTRY]))
        end = world.broker.log(REGISTRY, 0).end
        for copy in copies:
            await asyncio.wait_for(copy.follower.wait_caught_up(), 60)
            await asyncio.wait_for(copy.follower.wait_for(Partition(REGISTRY, 0), end), 60)
            assert copy.view.cards == plain
            assert copy.view.at == end

    run_scenario(scenario)
