"""Tests of waits for offsets: each is woken once, by the move that reaches it, and leaves
nothing behind."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.streams.ports import Partition
from kvlane.streams.views.follower import OffsetWaiters

A, B = Partition("ledger", 0), Partition("ledger", 1)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_wait_ends_when_its_offset_is_reached_not_before() -> None:
    barriers = OffsetWaiters()
    waiting = asyncio.ensure_future(barriers.wait(A, 10))
    await settle()
    barriers.advance(A, 9)
    await settle()
    assert not waiting.done()
    barriers.advance(A, 10)
    await waiting


async def test_other_partition_wakes_no_waiter() -> None:
    barriers = OffsetWaiters()
    waiting = asyncio.ensure_future(barriers.wait(A, 10))
    await settle()
    barriers.advance(B, 100)
    await settle()
    assert not waiting.done()
    assert list(barriers.pending_partitions) == [A]
    waiting.cancel()


async def test_cancelled_wait_leaves_nothing_behind() -> None:
    barriers = OffsetWaiters()
    waits = [asyncio.ensure_future(barriers.wait(A, 10)) for _ in range(3)]
    await settle()
    waits[1].cancel()
    await settle()
    assert sum(map(len, barriers._heaps.values())) == 2
    for wait in waits:
        wait.cancel()
    await settle()
    assert barriers._heaps == {}


async def test_ended_wait_leaves_no_state() -> None:
    barriers = OffsetWaiters()
    waiting = asyncio.ensure_future(barriers.wait(A, 1))
    await settle()
    barriers.advance(A, 1)
    await waiting
    assert barriers._heaps == {}


async def test_failure_ends_all_waits_and_later_ones() -> None:
    barriers = OffsetWaiters()
    waits = [asyncio.ensure_future(barriers.wait(source, 1)) for source in (A, B, None)]
    await settle()
    barriers.fail(ZeroDivisionError())
    for wait in waits:
        with pytest.raises(ZeroDivisionError):
            await wait
    with pytest.raises(ZeroDivisionError):
        await barriers.wait(A, 1)


@given(st.lists(st.integers(0, 20), max_size=30), st.lists(st.integers(0, 25), max_size=10))
def test_exactly_the_reached_waits_are_woken(offsets: list[int], moves: list[int]) -> None:
    async def scenario() -> None:
        barriers = OffsetWaiters()
        waits = [(o, asyncio.ensure_future(barriers.wait(A, o))) for o in offsets]
        await settle()
        reached = -1
        for position in moves:
            barriers.advance(A, position)
            reached = max(reached, position)
            await settle()
            assert [w.done() for _, w in waits] == [o <= reached for o, _ in waits]
        for _, wait in waits:
            wait.cancel()

    asyncio.run(scenario())
