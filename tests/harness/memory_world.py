"""A small world for tests: the log in memory, in virtual time.

A scenario is an async function of one `MemoryWorld`; `scenario_test` makes a test of it. Time
passes only where everything waits, so waits cost nothing and every run is the same.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

from kvlane.streams.codecs import AnyRecord, encode
from kvlane.streams.memory.memory_broker import AppendFate, BrokerFaults, MemoryBroker, Operation
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.memory.partition_log import MemoryRecord
from kvlane.streams.ports import Entry
from kvlane.streams.topics import partition_of
from workbench.testing.virtual_time import VirtualClock, VirtualLoop, run_virtual

Scenario = Callable[["MemoryWorld"], Coroutine[Any, Any, Any]]


class ScriptedFaults(BrokerFaults):
    """Faults listed by the test: fates of the next appends, failing and slow operations."""

    def __init__(self) -> None:
        self.fates: dict[str, deque[AppendFate]] = {}
        self.unanswered: set[Operation] = set()
        self.sent: list[Operation] = []
        self.slow: dict[Operation, float] = {}
        self.late = 0.0
        self.gathers = False
        self.departures = 0
        """Number of appends that leave their process before it is killed."""

    def next_fates(self, topic: str, *fates: AppendFate) -> None:
        self.fates.setdefault(topic, deque()).extend(fates)

    def fate(self, client: str, topic: str, partition: int, entries: int) -> AppendFate:
        fates = self.fates.get(topic)
        return fates.popleft() if fates else AppendFate.KEPT

    def gather_s(self, wanted_s: float) -> float:
        return wanted_s if self.gathers else 0.0

    def late_s(self, client: str) -> float:
        return self.late

    def departed(self, client: str) -> bool:
        self.departures -= 1
        return self.departures >= 0

    def answered(self, client: str, operation: Operation) -> bool:
        self.sent.append(operation)
        return operation not in self.unanswered

    def latency_s(self, client: str, operation: Operation) -> float:
        return self.slow.get(operation, 0.0)

    def answer_s(self, client: str, operation: Operation) -> float:
        return self.slow.get(operation, 0.0)


class MemoryWorld:
    """A broker with `lanes` lanes, and a clock; spawned tasks end with the scenario."""

    def __init__(self, loop: VirtualLoop, lanes: int = 2) -> None:
        self.clock = VirtualClock(loop)
        self.faults = ScriptedFaults()
        self.broker = MemoryBroker(self.clock, lanes=lanes, faults=self.faults)
        self.lanes = lanes

    async def connect(self, client: str = "client") -> MemoryLog:
        log = MemoryLog(self.broker, client)
        await log.start()
        return log

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(work)

    async def sleep(self, seconds: float) -> None:
        await self.clock.sleep(seconds)

    async def wait_until(self, condition: Callable[[], bool], within_s: float = 60.0) -> None:
        deadline = self.clock.now() + within_s
        while not condition():
            assert self.clock.now() < deadline, "it never came true"
            await self.clock.sleep(0.01)

    def append(self, topic: str, partition: int, *records: AnyRecord, key: str = "k") -> int:
        """Append directly, without clients and faults; returns the offset of the first record."""
        entries = [encode(record, key) for record in records]
        return self.broker.append(topic, partition, entries).offset

    def append_raw(self, topic: str, partition: int, *entries: Entry) -> int:
        return self.broker.append(topic, partition, entries).offset

    def lead(self, topic: str, partition: int, ahead_ms: int) -> None:
        """A broker with a clock that is so much ahead leads a partition from now on."""
        self.broker.set_leader_clock(topic, partition, VirtualClock(self.clock._loop, ahead_ms))

    def records(
        self, topic: str, partition: int | None = None, key: str = ""
    ) -> list[MemoryRecord]:
        """The records of a partition: the given one, or that of a key."""
        if partition is None:
            partition = partition_of(key.encode(), self.broker.partitions[topic])
        return list(self.broker.records(topic, partition))

    def all_records(self, topic: str) -> list[MemoryRecord]:
        count = self.broker.partitions[topic]
        return [r for p in range(count) for r in self.broker.records(topic, p)]


def run_scenario(scenario: Scenario, lanes: int = 2) -> None:
    """Run a scenario in a new world."""
    run_virtual(lambda loop: scenario(MemoryWorld(loop, lanes)))


def scenario_test(
    scenario: Callable[..., Coroutine[Any, Any, Any]], lanes: int = 2
) -> Callable[..., None]:
    """A test of an async function of a `world`; its other parameters are fixtures."""

    @wraps(scenario)
    def test(**fixtures: Any) -> None:
        run_scenario(lambda world: scenario(world=world, **fixtures), lanes)

    signature = inspect.signature(scenario)
    wanted = [p for p in signature.parameters.values() if p.name != "world"]
    test.__signature__ = signature.replace(parameters=wanted)  # type: ignore[attr-defined]
    return test
