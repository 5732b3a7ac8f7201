"""Tests of the answers of the console's fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from kvlane.app.http.console.live_fleet import LiveFleet
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.clock import SystemClock
from kvlane.streams.ports import Partition
from kvlane.streams.topics import LEDGER
from tests.unit.app.http.console.test_recent_activity import decided


class BusyPool:
    """A pool during whose work further decisions are read."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], None] = lambda: None

    async def run(self, work: Callable[[], Any]) -> Any:
        result = work()
        self.meanwhile()
        await asyncio.sleep(0)
        return result


async def test_decisions_that_are_read_during_an_answer_are_in_the_next() -> None:
    pool = BusyPool()
    fleet = LiveFleet(None, ProcessContext("test", SystemClock()), pool, 5.0, list)  # type: ignore[arg-type]
    fleet._ask = lambda: None  # type: ignore[method-assign]

    def read(number: int) -> None:
        fleet._activity.on_records(Partition(LEDGER, 0), [decided(number)])

    read(1)
    pool.meanwhile = lambda: read(2)
    first = msgspec.json.decode(await fleet.decisions(0))
    pool.meanwhile = lambda: None
    second = msgspec.json.decode(await fleet.decisions(first["last"]))
    assert [row["id"] for row in first["decisions"] + second["decisions"]] == ["r1", "r2"]
