"""Tests of retries: queries are repeated while no broker answers, and for no other reason."""

from __future__ import annotations

import pytest

from kvlane.streams.clock import retry_while_unavailable
from kvlane.streams.errors import BrokerUnavailable, TopicMismatch
from tests.harness.memory_world import MemoryWorld, scenario_test


@scenario_test
async def test_call_is_repeated_with_pauses_until_it_succeeds(world: MemoryWorld) -> None:
    log = await world.connect()
    world.faults.unanswered = {"offsets"}
    sending = world.spawn(
        retry_while_unavailable(world.clock, lambda: log.end_offsets("ledger", [0]))
    )
    await world.sleep(60.0)
    world.faults.unanswered = set()
    assert await sending == {0: 0}
    assert 10 < len(world.faults.sent) < 100, "with pauses in between"


@scenario_test
async def test_pauses_grow_and_end_with_the_time_that_is_given(world: MemoryWorld) -> None:
    sent: list[float] = []

    async def send() -> None:
        sent.append(round(world.clock.now(), 3))
        raise BrokerUnavailable("gone")

    with pytest.raises(BrokerUnavailable):
        await retry_while_unavailable(world.clock, send, until=world.clock.now() + 3.0)
    assert sent == [0.0, 0.05, 0.15, 0.35, 0.75, 1.55, 2.55, 3.0]


@scenario_test
async def test_invalid_call_is_not_repeated(world: MemoryWorld) -> None:
    log = await world.connect()
    with pytest.raises(TopicMismatch):
        await retry_while_unavailable(world.clock, lambda: log.end_offsets("ledger", [99]))


@scenario_test
async def test_caller_has_the_deadline(world: MemoryWorld) -> None:
    async def send() -> None:
        raise BrokerUnavailable("gone")

    sending = world.spawn(retry_while_unavailable(world.clock, send))
    await world.sleep(10.0)
    sending.cancel()
    await world.sleep(0.0)
    assert sending.cancelled()
