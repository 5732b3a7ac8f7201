"""Tests of shared reads of the log: many queries in one pass, and none that delays another."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from kvlane.app.lanes.shared_reads import SharedScanner
from kvlane.streams.errors import Malformed, PositionLost
from kvlane.streams.ports import Partition
from kvlane.streams.records import Cancel, Chunk, Fence, RequestOffset
from kvlane.streams.request import Request
from kvlane.streams.topics import REQUESTS, RESPONSES
from tests.harness.memory_world import MemoryWorld, scenario_test


def chunk(name: str, index: int, *tokens: int, attempt: int = 0) -> Chunk:
    return Chunk(id=name, attempt=attempt, run="1", seq=index, index=index, token_ids=tokens)


async def scanning(world: MemoryWorld) -> SharedScanner:
    scanner = SharedScanner(await world.connect("router"))
    world.spawn(scanner.run())
    return scanner


def origin(offset: int, lane: int = 0) -> RequestOffset:
    return RequestOffset(topic=REQUESTS, partition=lane, offset=offset)


def count_assigns(scanner: SharedScanner) -> list[Mapping[Partition, int]]:
    seen = []
    assign = scanner._reader.assign

    def counted(positions: Mapping[Partition, int]) -> None:
        seen.append(positions)
        assign(positions)

    scanner._reader.assign = counted  # type: ignore[method-assign]
    return seen


@scenario_test
async def test_tokens_shown_before_a_fence_are_found(world: MemoryWorld) -> None:
    for record in (chunk("a", 0, 7), Fence(id="a", attempt=1), chunk("a", 1, 8)):
        stop = world.append(RESPONSES, 0, record, key="a") + 1
    scanner = await scanning(world)
    shown = await scanner.visible_before(0, "a", 1, 0, stop)
    assert shown.tokens == [7]


@scenario_test
async def test_concurrent_queries_share_a_pass(world: MemoryWorld) -> None:
    requests = [Request(id=f"r{n}") for n in range(50)]
    for n, request in enumerate(requests):
        world.append(REQUESTS, 0, request, key=request.id)
        world.append(RESPONSES, 0, chunk(request.id, 0, n), key=request.id)
    world.append(RESPONSES, 0, Fence(id="x", attempt=1), key="x")
    scanner = await scanning(world)
    assigns = count_assigns(scanner)
    fetched = asyncio.gather(*(scanner.fetch_request(origin(n)) for n in range(50)))
    shown = asyncio.gather(*(scanner.visible_before(0, r.id, 1, 0, 51) for r in requests))
    assert await fetched == requests
    assert [s.tokens for s in await shown] == [[n] for n in range(50)]
    assert assigns[0].keys() == {Partition(REQUESTS, 0), Partition(RESPONSES, 0)}
    assert len(assigns) <= 3


@scenario_test
async def test_unreadable_partition_does_not_block_other_queries(world: MemoryWorld) -> None:
    world.append(REQUESTS, 1, Request(id="a"), key="a")
    scanner = await scanning(world)
    endless = world.spawn(scanner.visible_before(0, "b", 1, 0, 100))
    await world.sleep(1)
    async with asyncio.timeout(1):
        assert (await scanner.fetch_request(origin(0, lane=1))).id == "a"
    assert not endless.done()


@scenario_test
async def test_cancelled_query_is_dropped(world: MemoryWorld) -> None:
    scanner = await scanning(world)
    endless = [world.spawn(scanner.visible_before(0, "b", 1, 0, 100)) for _ in range(2)]
    await world.sleep(1)
    endless.append(world.spawn(scanner.visible_before(0, "c", 1, 0, 200)))
    await world.sleep(1)
    for question in endless:
        question.cancel()
    await world.sleep(1)
    assert not scanner._scans
    assert not scanner._queued


@scenario_test
async def test_queries_during_a_pass_are_answered_after_it(world: MemoryWorld) -> None:
    scanner = await scanning(world)
    first = world.spawn(scanner.visible_before(0, "a", 1, 0, 2))
    await world.sleep(1)
    second = world.spawn(scanner.visible_before(0, "b", 1, 0, 2))
    await world.sleep(1)
    world.append(RESPONSES, 0, chunk("a", 0, 7), chunk("b", 0, 8), key="a")
    assert (await first).tokens == [7]
    world.append(RESPONSES, 0, chunk("b", 0, 8), key="b")
    async with asyncio.timeout(2):
        assert (await second).tokens == []  # its own Chunk came under another key


@scenario_test
async def test_only_queries_for_deleted_records_fail(world: MemoryWorld) -> None:
    for n in range(10):
        world.append(REQUESTS, 0, Request(id=f"r{n}"), key=f"r{n}")
    world.broker.delete_records(REQUESTS, 0, 5)
    scanner = await scanning(world)
    answers = await asyncio.gather(
        *(scanner.fetch_request(origin(n)) for n in (4, 5, 9)), return_exceptions=True
    )
    assert isinstance(answers[0], PositionLost)
    assert [a.id for a in answers[1:] if isinstance(a, Request)] == ["r5", "r9"]


@scenario_test
async def test_origin_without_a_request_is_malformed(world: MemoryWorld) -> None:
    world.append(REQUESTS, 0, Cancel(id="a"), key="a")
    scanner = await scanning(world)
    with pytest.raises(Malformed):
        await scanner.fetch_request(origin(0))
