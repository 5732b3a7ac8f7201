"""Tests of ids of refused prompts that are published again, on a real broker."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.app.standalone import StandaloneProcess
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.client import Client
from kvlane.streams.clock import SystemClock
from kvlane.streams.ports import Partition
from kvlane.streams.prompt import Prompt
from kvlane.streams.topics import RESPONSES, lane_of
from tests.harness.kafka_processes import WAIT_S, provisioned

LANES = 2

pytestmark = [pytest.mark.slow, pytest.mark.kafka]


async def test_refused_prompt_is_run_under_another_id_only(
    kafka: Broker, topic_prefix: str, tmp_path: Path
) -> None:
    settings = Settings(
        bootstrap_servers=kafka.bootstrap_servers, topic_prefix=topic_prefix, lanes=LANES,
        worker_id="w", router_id="r", cache_dir=tmp_path, http_port=0, indexer_port=0,
    )  # fmt: skip
    ctx = ProcessContext("standalone", rng=random.Random(1))
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    async with provisioned(settings) as log:
        everything = StandaloneProcess(log, settings, ctx)
        await everything.start()
        async with Client(log, SystemClock()) as client:
            refused = client.new_request_id()
            await client.publish(Prompt(id=refused, body=body | {"model": "unknown"}))
            first = await client.result(refused, WAIT_S)
            other = client.new_request_id()
            while lane_of(other, LANES) != lane_of(refused, LANES):
                other = client.new_request_id()
            for name in (refused, other):
                await client.publish(Prompt(id=name, body=body), subscribe=False)
            assert (await client.result(other, WAIT_S)).finish_reason == "length"
            assert await client.result(refused, WAIT_S) == first
            assert first.code
            assert first.text == ""
        reader = log.reader()
        lane = Partition(RESPONSES, lane_of(refused, LANES))
        reader.assign({lane: 0}, {refused.encode()})
        end = (await log.end_offsets(RESPONSES, [lane.partition]))[lane.partition]
        found = 0
        while reader.position(lane) < end:
            found += sum(map(len, (await reader.poll(0.5)).values()))
        await reader.close()
        assert found == 1
        await everything.stop()
        assert ctx.error is None
        await ctx.cancel_tasks()
