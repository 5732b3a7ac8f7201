"""Tests of the group consumer with random deliveries, deaths and moves: nothing is lost or
skipped."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.streams.memory.memory_broker import AppendFate, Operation
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.ports import Entry
from kvlane.streams.reading.group_consumer import GroupConsumer, PartitionClaim
from kvlane.streams.records import LogRecord
from kvlane.streams.request import Request
from kvlane.streams.topics import DEAD_LETTERS, REQUESTS
from tests.harness.memory_world import MemoryWorld, run_scenario

GROUP = "routers"
LANES = 3
ROUTERS = ("a", "b", "c")
MALFORMED = Entry(b"k", b"\xc1", (("t", b"Request"),))

SLOW_OPERATIONS = st.sampled_from(["poll", "heartbeat", "commit", "append"])
OPS = st.one_of(
    st.tuples(st.just("publish"), st.integers(0, LANES - 1)),
    st.tuples(st.just("publish_malformed"), st.integers(0, LANES - 1)),
    st.tuples(st.just("done"), st.integers(0, 1000)),
    st.tuples(st.just("done"), st.integers(0, 1000)),
    st.tuples(st.just("resume"), st.integers(0, 1)),
    st.tuples(st.just("resume"), st.integers(0, 1)),
    st.tuples(st.just("join"), st.sampled_from(ROUTERS)),
    st.tuples(st.just("leave"), st.sampled_from(ROUTERS)),
    st.tuples(st.just("kill"), st.sampled_from(ROUTERS)),
    st.tuples(st.just("lose_letters"), st.integers(1, 4)),
    st.tuples(st.just("outage"), st.booleans()),
    st.tuples(st.just("slow"), st.tuples(SLOW_OPERATIONS, st.sampled_from([0.0, 0.05, 1.5]))),
)
PAUSES = st.sampled_from([0.0, 0.0, 0.01, 0.19, 0.21, 1.0, 12.0])
STEPS = st.lists(st.tuples(OPS, PAUSES), min_size=15, max_size=60)


@dataclass
class Effects:
    """What stands in the world: offsets with their effect, by lane. Survives every process."""

    by_lane: dict[int, set[int]] = field(default_factory=lambda: {p: set() for p in range(LANES)})


class Owner:
    """One life of a router. Its effect is acknowledged before it says done."""

    def __init__(self, world: MemoryWorld, effects: Effects, log: MemoryLog) -> None:
        self.effects = effects
        self.log = log
        self.undone: list[tuple[PartitionClaim, int]] = []
        self.open: list[PartitionClaim] = []
        self.seen: dict[PartitionClaim, list[int]] = {}
        self.intake = GroupConsumer(log, REQUESTS, GROUP, self, world.clock)
        self.running = world.spawn(self.intake.run())

    def on_claimed(self, claim: PartitionClaim) -> None:
        assert not any(c.partition == claim.partition for c in self.open)
        self.open.append(claim)
        self.seen[claim] = []

    def on_record(self, claim: PartitionClaim, log_record: LogRecord) -> None:
        assert claim in self.open
        self.seen[claim].append(log_record.offset)
        self.undone.append((claim, log_record.offset))

    def on_released(self, claim: PartitionClaim) -> None:
        self.open.remove(claim)  # what is undone of it stays there: a late done must be harmless

    def done(self, choice: int) -> None:
        if self.undone:
            claim, offset = self.undone.pop(choice % len(self.undone))
            self.effects.by_lane[claim.partition].add(offset)
            claim.mark_done(offset)

    async def end(self) -> None:
        self.running.cancel()
        await asyncio.wait([self.running])


class Model:
    def __init__(self, world: MemoryWorld) -> None:
        self.world = world
        self.effects = Effects()
        self.alive: dict[str, Owner] = {}
        self.all: list[Owner] = []

    async def publish(self, lane: int) -> None:
        self.world.append(REQUESTS, lane, Request(id="r"))

    async def publish_malformed(self, lane: int) -> None:
        self.world.append_raw(REQUESTS, lane, MALFORMED)

    async def join(self, name: str) -> None:
        if name not in self.alive and self.world.broker.available:
            log = await self.world.connect(name)
            self.alive[name] = Owner(self.world, self.effects, log)
            self.all.append(self.alive[name])

    async def leave(self, name: str) -> None:
        if (owner := self.alive.pop(name, None)) is not None:
            await owner.intake.close()
            await owner.end()

    async def kill(self, name: str) -> None:
        if (owner := self.alive.pop(name, None)) is not None:
            owner.log.kill()
            await owner.end()

    async def done(self, choice: int) -> None:
        for owner in self.alive.values():
            owner.done(choice)

    async def resume(self, every_other: int) -> None:
        for owner in self.alive.values():
            for claim in owner.open[every_other::2]:
                owner.intake.resume(claim)

    async def lose_letters(self, count: int) -> None:
        self.world.faults.next_fates(
            DEAD_LETTERS, *[AppendFate.LOST, AppendFate.LOST, AppendFate.UNREPORTED] * count
        )

    async def outage(self, begins: bool) -> None:
        self.world.broker.available = not begins

    async def slow(self, what: tuple[Operation, float]) -> None:
        operation, seconds = what
        self.world.faults.slow[operation] = seconds

    def check(self) -> None:
        buried = {
            (int(h["origin_partition"]), int(h["origin_offset"]))
            for h in (dict(r.headers) for r in self.world.all_records(DEAD_LETTERS))
        }
        for lane, mark in self.world.broker.group(REQUESTS, GROUP).committed.items():
            effects = self.effects.by_lane[lane] | {o for p, o in buried if p == lane}
            missing = set(range(mark)) - effects
            assert not missing, f"lane {lane}: committed {mark}, no effect of {sorted(missing)}"
        for owner in self.all:
            for seen in owner.seen.values():
                assert seen == sorted(set(seen)), f"out of order or twice: {seen}"
        for owner in self.alive.values():
            assert not owner.running.done(), owner.running

    async def drain(self) -> None:
        """Everything works again and somebody takes all lanes: all there is gets its effect."""
        self.world.broker.available = True
        self.world.faults.slow.clear()
        self.world.faults.fates.clear()
        for name in list(self.alive):
            await self.kill(name)
        await self.join("last")
        last = self.alive["last"]
        log = self.world.broker
        ends = {p: log.log(REQUESTS, p).end for p in range(LANES)}

        def complete() -> bool:
            for claim in last.open:
                last.intake.resume(claim)
            while last.undone:
                last.done(0)
            committed = log.group(REQUESTS, GROUP).committed
            return all(committed.get(p, 0) == end for p, end in ends.items())

        await self.world.wait_until(complete)
        self.check()


@settings(max_examples=120)
@given(STEPS)
def test_no_commit_passes_a_missing_effect_and_every_record_gets_one(
    steps: list[tuple[tuple[str, Any], float]],
) -> None:
    async def scenario(world: MemoryWorld) -> None:
        model = Model(world)
        await model.join("a")
        for (op, what), pause_s in steps:
            await getattr(model, op)(what)
            await world.sleep(pause_s)
            model.check()
        await model.drain()

    run_scenario(scenario, lanes=LANES)
