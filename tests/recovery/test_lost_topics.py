"""Tests of a deployment whose topics, or commits, were lost while it was stopped: it serves
again.

All processes run in one here, on a real broker.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from kvlane.app.runtime.process import ProcessContext, open_log
from kvlane.app.settings import Settings
from kvlane.app.standalone import StandaloneProcess
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.client import Client
from kvlane.streams.kafka import provision
from kvlane.streams.ports import Partition
from kvlane.streams.prompt import Prompt
from kvlane.streams.reading.range_reader import read_range
from kvlane.streams.topics import GROUPS, LEDGER, RESPONSES, TOPICS
from tests.harness.topic_cleanup import delete_topics

LANES = 4
WAIT_S = 120.0
BODY: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "The river rose in the night. " * 20}],
    "max_tokens": 20,
}
TOPIC_NAMES = [topic.name for topic in TOPICS]
ALL = ",".join(TOPIC_NAMES)
LOST = [LEDGER, ALL]
"""Topics that are deleted; KVLANE_TEST_LONG=1 deletes each of them."""
if os.environ.get("KVLANE_TEST_LONG"):
    LOST = [*TOPIC_NAMES, ALL]

pytestmark = pytest.mark.slow


@pytest.fixture
def settings(kafka: Broker, topic_prefix: str, tmp_path: Path) -> Settings:
    return Settings(
        bootstrap_servers=kafka.bootstrap_servers,
        topic_prefix=topic_prefix,
        lanes=LANES,
        worker_id="w",
        router_id="r",
        cache_dir=tmp_path,
        http_port=0,
        indexer_port=0,
        context_length=4096,
        engine_speedup=20,
        heartbeat_interval_s=0.2,
        results="all",
    )


@contextlib.asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[tuple[Client, str]]:
    """A running deployment, after `kvlane topics create`: a client, and the gateway's address."""
    ctx = ProcessContext("standalone", rng=random.Random(1))
    log = open_log(settings, "standalone")
    await log.start()
    await provision.create_topics(log, lanes=LANES, replication=1, min_insync=1)
    everything = StandaloneProcess(log, settings, ctx, workers=2)
    await everything.start()
    async with Client(log, ctx.clock) as client:
        yield client, everything.gateway.url
    await everything.stop()
    assert ctx.error is None
    await ctx.cancel_tasks()
    await log.close()


async def answer(client: Client, prompt: Prompt) -> str:
    """The text of the answer to a new prompt on Kafka."""
    await client.publish(prompt)
    return (await client.result(prompt.id, WAIT_S)).text


async def http_answer(url: str) -> str:
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http:
        body = (await http.post("/v1/chat/completions", json=BODY)).json()
    return str(body["choices"][0]["message"]["content"])


async def delete(settings: Settings, topics: Sequence[str]) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=settings.bootstrap_servers)
    await admin.start()
    await admin.delete_topics([settings.topic_prefix + topic for topic in topics])
    await admin.close()


async def reset_commits(settings: Settings) -> None:
    """Set every consumer group back to the beginning of its topic."""
    for group, topic in GROUPS.items():
        consumer = AIOKafkaConsumer(
            bootstrap_servers=settings.bootstrap_servers,
            group_id=settings.topic_prefix + group,
            enable_auto_commit=False,
        )
        await consumer.start()
        name = settings.topic_prefix + topic
        await consumer._client.set_topics([name])  # fetches the metadata
        lanes = [TopicPartition(name, p) for p in consumer.partitions_for_topic(name) or ()]
        assert lanes
        consumer.assign(lanes)
        await consumer.commit(dict.fromkeys(lanes, 0))
        await consumer.stop()


async def count_response_records(settings: Settings, request_id: str) -> int:
    """The number of records of a request on `responses`."""
    ctx = ProcessContext("test", rng=random.Random(2))
    log = open_log(settings, "test")
    await log.start()
    lanes = range(LANES)
    starts = {Partition(RESPONSES, lane): 0 for lane in lanes}
    found = await log.end_offsets(RESPONSES, lanes)
    ends = {Partition(RESPONSES, lane): found[lane] for lane in lanes}
    count = 0
    async with contextlib.aclosing(
        read_range(log, ctx.clock, starts, ends, timeout_s=WAIT_S)
    ) as pieces:
        async for piece in pieces:
            count += sum(record.key == request_id.encode() for record in piece.records)
    await log.close()
    return count


@pytest.mark.parametrize("lost", LOST, ids=lambda lost: "all" if lost == ALL else lost)
async def test_deployment_serves_after_loss_of_topics(settings: Settings, lost: str) -> None:
    async with serving(settings) as (client, _):
        first = Prompt(id=client.new_request_id(), body=BODY)
        expected = await answer(client, first)
    await delete(settings, lost.split(","))
    async with serving(settings) as (client, url):
        assert await answer(client, Prompt(id=client.new_request_id(), body=BODY)) == expected
        assert await http_answer(url) == expected
        if lost != ALL:  # what is left of the first one is still served
            assert (await client.result(first.id, WAIT_S)).text == expected
    await delete_topics(settings.bootstrap_servers, settings.topic_prefix)


async def test_reset_commits_repeat_no_answer(settings: Settings) -> None:
    async with serving(settings) as (client, _):
        first = Prompt(id=client.new_request_id(), body=BODY)
        expected = await answer(client, first)
    written = await count_response_records(settings, first.id)
    assert written > 0
    await reset_commits(settings)
    async with serving(settings) as (client, _):
        assert await answer(client, Prompt(id=client.new_request_id(), body=BODY)) == expected
        assert (await client.result(first.id, WAIT_S)).text == expected
    assert await count_response_records(settings, first.id) == written
    await delete_topics(settings.bootstrap_servers, settings.topic_prefix)
