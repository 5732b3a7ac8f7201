"""Tests of the probe of the log: silence, its log lines, and cut waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from kvlane.app.runtime.broker_probe import MAX_PENDING_PROBES, BrokerProbe
from kvlane.streams.errors import BrokerUnavailable
from tests.harness.memory_world import MemoryWorld, run_scenario, scenario_test

LANES = 8
TIMEOUT_S = 4.0


class Answers:
    """A log of which only the ends of lanes are asked."""

    def __init__(self, world: MemoryWorld) -> None:
        self._clock = world.clock
        self.hanging: set[int] = set()
        self.under_way = self.most = 0

    async def partitions(self, _: str) -> int:
        return LANES

    async def end_offsets(self, _: str, lanes: Sequence[int]) -> dict[int, int]:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            if self.hanging & set(lanes):
                await self._clock.sleep(3 * TIMEOUT_S)
                raise BrokerUnavailable("no answer")
            await self._clock.sleep(0.01)
        finally:
            self.under_way -= 1
        return dict.fromkeys(lanes, 0)


def probed(world: MemoryWorld) -> tuple[Answers, BrokerProbe]:
    def spawn(_: str, work: Any) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(work)

    answers = Answers(world)
    probe = BrokerProbe(answers, world.clock, TIMEOUT_S, spawn)  # type: ignore[arg-type]
    world.spawn(probe.run())
    return answers, probe


@scenario_test
async def test_unresponsive_log_is_detected_within_five_seconds(world: MemoryWorld) -> None:
    answers, probe = probed(world)
    await world.sleep(60)
    assert probe.is_answering
    answers.hanging = set(range(LANES))
    await world.sleep(5)
    assert not probe.is_answering
    await world.sleep(60)
    assert answers.most <= MAX_PENDING_PROBES
    answers.hanging.clear()
    await world.sleep(3 * TIMEOUT_S + 2)
    assert probe.is_answering


@scenario_test
async def test_one_broker_of_several_that_hangs_is_no_outage(world: MemoryWorld) -> None:
    answers, probe = probed(world)
    await world.sleep(10)
    answers.hanging = {0, 3, 6}
    for _ in range(60):
        await world.sleep(1)
        assert probe.is_answering


@scenario_test
async def test_waits_end_when_the_log_stops_responding(world: MemoryWorld) -> None:
    answers, probe = probed(world)
    await world.sleep(10)
    answers.hanging = set(range(LANES))
    began_at = world.clock.now()
    with pytest.raises(TimeoutError):
        async with probe.timeout(100):
            await world.sleep(200)
    assert world.clock.now() - began_at <= 5.5


def test_beginning_and_the_end_of_an_outage_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "kvlane.app.runtime.broker_probe")

    async def scenario(world: MemoryWorld) -> None:
        answers, _ = probed(world)
        await world.sleep(10)
        answers.hanging = set(range(LANES))
        await world.sleep(30)
        answers.hanging.clear()
        await world.sleep(20)

    run_scenario(scenario)
    begin, end = (record.getMessage() for record in caplog.records)
    assert begin.startswith("Kafka has not answered for ")
    assert end.startswith("Kafka answers again after 3")
