"""Tests of records with headers that Kafka allows and this project never writes: they are put
aside."""

from __future__ import annotations

from functools import partial

import pytest

from kvlane.streams.ports import Entry
from kvlane.streams.records import Assignment
from kvlane.streams.topics import DEAD_LETTERS, PROMPTS, REQUESTS
from tests.flows.test_preprocessor import begin, send, sent
from tests.harness.fake_worker import (
    PROMPT,
    FakeWorker,
    append_record,
    start_router,
    wait_for_items,
)
from tests.harness.memory_world import MemoryWorld, scenario_test

NULL_TYPE = Entry(b"junk", b"\xc1", (("t", None),))
HEADERS = [(("t", None),), (("x", None), ("t", None)), (("t", b"Shiny"), ("r", b"99")), ()]


@pytest.mark.parametrize("headers", HEADERS)
@partial(scenario_test, lanes=1)
async def test_by_a_router(
    world: MemoryWorld, headers: tuple[tuple[str, bytes | None], ...]
) -> None:
    worker = FakeWorker(world)
    router = await start_router(world, keep_prompts=True)
    world.append_raw(REQUESTS, 0, NULL_TYPE._replace(headers=headers))
    (letter,) = await wait_for_items(world, lambda: world.all_records(DEAD_LETTERS))
    assert dict(letter.headers)["origin_offset"] == b"0"
    append_record(world, REQUESTS, PROMPT)
    await wait_for_items(world, lambda: worker.received(Assignment))
    group = world.broker.group(REQUESTS, "router")
    await world.wait_until(lambda: group.committed.get(0, 0) >= 1)
    assert router._ctx.error is None


@pytest.mark.parametrize("headers", HEADERS)
@partial(scenario_test, lanes=1)
async def test_by_a_preprocessor(
    world: MemoryWorld, headers: tuple[tuple[str, bytes | None], ...]
) -> None:
    world.append_raw(PROMPTS, 0, NULL_TYPE._replace(key=None, headers=headers))
    _, ctx = await begin(world, keep_prompts=True)
    await wait_for_items(world, lambda: world.all_records(DEAD_LETTERS))
    send(world, "good")
    await world.wait_until(lambda: bool(sent(world, type(PROMPT))))
    group = world.broker.group(PROMPTS, "preprocessor")
    await world.wait_until(lambda: group.committed.get(0, 0) >= 1)
    assert ctx.error is None
