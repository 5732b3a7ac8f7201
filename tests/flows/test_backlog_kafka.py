"""Tests of a batch of prompts on a real Kafka with one slow worker: all of it is answered."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.app.standalone import StandaloneProcess
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.client import Client
from kvlane.streams.kafka import provision
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.prompt import Prompt
from kvlane.streams.topics import REQUESTS
from tests.harness.topic_cleanup import delete_topics

PROMPTS = 300
HELD = 10
WAIT_S = 120.0

pytestmark = pytest.mark.slow


async def test_three_hundred_prompts_wait_for_a_router_with_room_for_ten(
    kafka: Broker, topic_prefix: str, tmp_path: Path
) -> None:
    settings = Settings(
        bootstrap_servers=kafka.bootstrap_servers,
        topic_prefix=topic_prefix,
        lanes=4,
        worker_id="w",
        router_id="r",
        cache_dir=tmp_path,
        http_port=0,
        indexer_port=0,
        max_queued_requests=HELD,
        max_num_seqs=2,
        worker_max_waiting=0,
        engine_speedup=5,
    )
    ctx = ProcessContext("standalone", rng=random.Random(1))
    log = KafkaLog(settings.kafka_connection("standalone"), prefix=topic_prefix)
    await log.start()
    await provision.create_topics(log, lanes=4, replication=1, min_insync=1)
    everything = StandaloneProcess(log, settings, ctx, workers=1)
    await everything.start()
    async with Client(log, ctx.clock) as client:
        ids = [client.new_request_id() for _ in range(PROMPTS)]
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        await asyncio.gather(*(client.publish(Prompt(id=i, body=body)) for i in ids))
        ends = await log.end_offsets(REQUESTS, range(4))
        read_at_once = sum(ends.values())
        answers = await asyncio.gather(*(client.result(i, WAIT_S) for i in ids))
        preprocessor = everything.preprocessor
        await asyncio.sleep(2)
    assert {a.finish_reason for a in answers} == {"length"}
    assert {len(a.tokens) for a in answers} == {2}
    assert read_at_once < PROMPTS / 2
    assert not preprocessor.is_paused
    assert preprocessor.credit == HELD / 2
    assert sum((await log.end_offsets(REQUESTS, range(4))).values()) == PROMPTS
    await everything.stop()
    assert ctx.error is None
    await ctx.cancel_tasks()
    await log.close()
    await delete_topics(kafka.bootstrap_servers, topic_prefix)
