"""Tests of the FastStream broker over the log in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from faststream import BaseMiddleware
from faststream.kafka.prometheus import KafkaPrometheusMiddleware
from prometheus_client import CollectorRegistry, generate_latest

from kvlane.streams.asyncapi import PromptPayload
from kvlane.streams.errors import AccessDenied
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.ports import Entry, Member
from kvlane.streams.reading.log_broker import LogBroker
from kvlane.streams.topics import BATCH, REQUESTS
from tests.harness.memory_world import MemoryWorld, scenario_test

Handler = Callable[[PromptPayload], Any]


class Owner:
    """Opens members that read all that they own."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log

    def open(self) -> Member:
        self._member = self._log.member(BATCH, "g", self)
        return self._member

    def assigned(self, starts: Mapping[int, int]) -> None:
        for partition in starts:
            self._member.resume(partition)

    def revoked(self, partitions: frozenset[int]) -> None:
        pass


def subscribed(log: MemoryLog, handle: Handler, open_member: Callable[[], Member]) -> LogBroker:
    broker = LogBroker(log, "mine.")
    broker.subscribe(BATCH, "g", handle, open_member, max_records=100, description="of a test")
    return broker


@scenario_test
async def test_handler_gets_records_as_they_are(world: MemoryWorld) -> None:
    log, got = await world.connect(), []

    async def handle(records: PromptPayload) -> None:
        got.extend(records)

    broker = subscribed(log, handle, Owner(log).open)
    task = world.spawn(broker.run())
    entries = [
        Entry(b"a", b"1", (("odd", b"\xff"), ("none", None), ("reply_to", b"elsewhere"))),
        Entry(b"b", None),
    ]
    for entry in entries:
        await log.append(BATCH, entry, 3)
    await world.wait_until(lambda: len(got) == 2)
    assert [Entry(r.key, r.value, tuple(r.headers)) for r in got] == entries
    assert [(r.topic, r.partition, r.offset) for r in got] == [("mine.batch", 3, n) for n in (0, 1)]
    assert not world.broker.group(BATCH, "g").committed
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await log.append(BATCH, entries[0], 3)
    await world.sleep(5)
    assert len(got) == 2
    assert not world.broker.group(BATCH, "g").members


@scenario_test
async def test_error_of_a_handler_ends_the_broker_and_nothing_more_is_read(
    world: MemoryWorld,
) -> None:
    log, calls = await world.connect(), []

    async def handle(records: PromptPayload) -> None:
        calls.append(records)
        raise ZeroDivisionError

    broker = subscribed(log, handle, Owner(log).open)
    task = world.spawn(broker.run())
    await log.append(BATCH, Entry(b"a", b"1"))
    await world.wait_until(task.done)
    with pytest.raises(ZeroDivisionError):
        await task
    await log.append(BATCH, Entry(b"b", b"1"))
    await world.sleep(5)
    assert len(calls) == 1


@scenario_test
async def test_refusal_of_the_broker_ends_it(world: MemoryWorld) -> None:
    owner = Owner(log := await world.connect())

    async def refused(*_: object) -> None:
        raise AccessDenied("no rights")

    def open_member() -> Member:
        member = owner.open()
        member.poll = refused  # type: ignore[method-assign,assignment]
        return member

    broker = subscribed(log, refused, open_member)
    with pytest.raises(AccessDenied):
        await broker.run()


@scenario_test
async def test_middlewares_see_what_is_read_and_appended(world: MemoryWorld) -> None:
    log, registry = await world.connect(), CollectorRegistry()

    async def handle(records: PromptPayload) -> None:
        entries = [Entry(r.key, r.value) for r in records]
        appended = await broker.append_batch(REQUESTS, 1, entries)
        assert (appended.partition, appended.offset) == (1, 0)
        await broker.append(REQUESTS, entries[0], 0)

    broker = subscribed(log, handle, Owner(log).open)
    broker.add_middleware(KafkaPrometheusMiddleware(registry=registry, app_name="test"))
    for key in (b"a", b"b", b"c"):
        await log.append(BATCH, Entry(key, b"1"), 0)
    world.spawn(broker.run())
    await world.wait_until(lambda: len(world.all_records(REQUESTS)) == 4)
    page = generate_latest(registry).decode()
    labels = 'app_name="test",broker="kafka"'
    assert f'received_messages_total{{{labels},handler="mine.batch"}} 3.0' in page
    assert (
        f'published_messages_total{{{labels},destination="mine.requests",status="success"}} 4.0'
        in page
    )
    assert all(not r.headers for r in world.all_records(REQUESTS))


@scenario_test
async def test_error_of_a_middleware_ends_the_broker(world: MemoryWorld) -> None:
    log, calls = await world.connect(), []

    async def handle(records: PromptPayload) -> None:
        calls.append(records)

    class Broken(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            raise ZeroDivisionError

    broker = subscribed(log, handle, Owner(log).open)
    broker.add_middleware(Broken)
    await log.append(BATCH, Entry(b"a", b"1"))
    with pytest.raises(RuntimeError, match="dropped records"):
        await broker.run()
    assert not calls


@scenario_test
async def test_message_of_the_command_line_is_appended_by_its_id(world: MemoryWorld) -> None:
    """`faststream publish` connects by itself, and has a JSON value instead of an entry."""
    broker = LogBroker(MemoryLog(world.broker, "command"), "kvlane.")
    async with broker:
        await broker.publish({"id": "a", "kind": "cancel"}, "kvlane.batch")
        await broker.publish("text", "batch", key=b"b")
    records = {r.key: r.value for r in world.all_records("batch")}
    assert json.loads(records[b"a"] or b"") == {"id": "a", "kind": "cancel"}
    assert records[b"b"] == b"text"
