"""Tests of random records on every topic: processes go on and requests are answered."""

from __future__ import annotations

import json
import os
import random
from functools import partial
from typing import Any

import pytest

from kvlane.app.collector import Collector
from kvlane.app.engine.echo import EchoEngine
from kvlane.app.indexer import Indexer
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.preprocessor import Preprocessor
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.worker import Worker
from kvlane.streams.codecs import decode
from kvlane.streams.errors import RecordError
from kvlane.streams.memory.partition_log import MemoryRecord
from kvlane.streams.ports import Entry, Unreadable
from kvlane.streams.records import Chunk, Result
from kvlane.streams.topics import PROMPTS, REQUESTS, RESPONSES, RESULTS, TOPICS, partition_of
from tests.harness.gateway_harness import CONTEXT, STEP_S, GatewayHarness, memory_settings
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.malformed_records import MalformedRecords

RECORDS = int(os.environ.get("KVLANE_TEST_ODD_RECORDS", "600"))
SEEDS = int(os.environ.get("KVLANE_TEST_ODD_SEEDS", "3"))
ROUNDS = 6


class Place:
    """One process of each kind, twice, in a world where strangers publish."""

    def __init__(self, world: MemoryWorld, seed: int) -> None:
        self.world = world
        self.contexts: list[ProcessContext] = []
        self._odd = MalformedRecords(seed)

    def scatter(self, count: int) -> None:
        """Publish odd records, some as the log hands out what it cannot read."""
        broker = self.world.broker
        for _ in range(count):
            topic, partition, entry = self._odd.draw()
            if partition % 29 == 0:
                entry = entry._replace(value=Unreadable(b"the batch cannot be read"))
            self.world.append_raw(topic, partition % broker.partitions[topic], entry)

    async def begin(self, name: str) -> None:
        """Start one process of each kind, but for the gateway."""
        await Router(*await self._own(f"router-{name}")).start()
        await Preprocessor(*await self._own(f"preprocessor-{name}"), InlinePool()).start()
        await Indexer(*await self._own(f"indexer-{name}"), InlinePool()).open()
        await Collector(*await self._own(f"collector-{name}"), InlinePool()).start()
        engine = EchoEngine(self.world.clock, STEP_S, model="demo", context_length=CONTEXT)
        worker = f"worker-{name}"
        await Worker(*await self._own(worker), engine, worker_id=worker).start()

    async def _own(self, name: str) -> tuple[Any, Any, ProcessContext]:
        self.contexts.append(ProcessContext(name, self.world.clock, random.Random(name)))
        return await self.world.connect(name), memory_settings(), self.contexts[-1]

    def answered(self) -> set[str]:
        """Ids of requests that have run to their end."""
        got = [whole(record) for record in self.world.all_records(RESPONSES)]
        return {chunk.id for chunk in got if chunk is not None}

    def results(self) -> set[str]:
        """Ids of requests that have a whole result."""
        got = [readable(record) for record in self.world.all_records(RESULTS)]
        return {r.id for r in got if isinstance(r, Result) and r.status == "completed"}

    def behind(self, topic: str, group: str) -> dict[int, tuple[int, int]]:
        """Partitions that are not committed to their end: committed, end."""
        broker = self.world.broker
        committed = broker.group(topic, group).committed
        ends = {p: broker.log(topic, p).end for p in range(broker.partitions[topic])}
        return {p: (committed.get(p, 0), e) for p, e in ends.items() if committed.get(p, 0) < e}


def send(world: MemoryWorld, name: str, **body: str) -> None:
    body = {"prompt": f"hello {name}"} | body
    prompt = {"id": name, "kind": "completion", "body": body, "result": True}
    partition = partition_of(name.encode(), world.broker.partitions[PROMPTS])
    world.append_raw(PROMPTS, partition, Entry(name.encode(), json.dumps(prompt).encode()))


def readable(record: MemoryRecord) -> object:
    """The record, or None."""
    try:
        return decode(record)
    except RecordError:
        return None


def whole(record: MemoryRecord) -> Chunk | None:
    """The last Chunk of an answer."""
    got = readable(record)
    return got if isinstance(got, Chunk) and got.finish_reason == "stop" else None


@pytest.mark.parametrize("seed", range(SEEDS))
@partial(scenario_test, lanes=4)
async def test_odd_records_on_every_topic_stop_no_process(world: MemoryWorld, seed: int) -> None:
    place = Place(world, seed)
    place.scatter(RECORDS // ROUNDS)
    await place.begin("1")
    harness = await GatewayHarness.open(world)
    await world.wait_until(lambda: "demo" in harness.models())
    for number in range(ROUNDS - 1):
        sent = [harness.complete(f"hello {n}", max_tokens=5) for n in range(5)]
        prompts = {f"job-{number}-{n}" for n in range(5)}
        for name in prompts:
            send(world, name, model="demo")
        place.scatter(RECORDS // ROUNDS)
        await world.wait_until(lambda due=prompts: due <= place.answered())
        await world.wait_until(lambda due=prompts: due <= place.results())
        for exchange in sent:
            answer = await exchange.wait_done()
            assert answer.status == 200, answer.content
        await world.sleep(10)
        if number == ROUNDS // 2:
            await place.begin("2")  # these read all of it again
    await world.sleep(60)
    for group in ("collector", "router"):  # a request may wait for a worker up to its deadline
        await world.wait_until(lambda due=group: not place.behind(REQUESTS, due), 1200)
    contexts = (*place.contexts, harness.ctx)
    assert {ctx.name: ctx.error for ctx in contexts if ctx.error is not None} == {}
    assert not place.behind(PROMPTS, "preprocessor")


def test_odd_records_are_of_every_topic_and_the_same_for_a_seed() -> None:
    drawn, again = ([MalformedRecords(1).draw() for _ in range(3)] for _ in range(2))
    assert drawn == again
    odd = MalformedRecords(1)
    assert {odd.draw().topic for _ in range(300)} == {t.name for t in TOPICS}
