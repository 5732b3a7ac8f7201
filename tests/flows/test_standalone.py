"""Tests of all processes in one, on the log in memory and on a real Kafka: every prompt is
answered.

In real time, since a gateway listens on a socket.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from kvlane.app.engine.engine_factory import text_generator_of
from kvlane.app.engine.simulated.text_generator import ExpectedAnswer, expected_answer
from kvlane.app.preprocess.models.model import LoadedModel, model_of_files
from kvlane.app.preprocess.models.model_folder import DEMO_MODEL_FOLDER, card_of, read_folder
from kvlane.app.preprocess.requests import openai_requests
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.app.standalone import StandaloneProcess
from kvlane.indexer.block_hashes import local_hashes, prompt_keys
from kvlane.indexer.epochs import CacheId
from kvlane.indexer.events import EventColumns
from kvlane.streams.client import Client
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import decode, unpack_tokens
from kvlane.streams.kafka import provision
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.ports import Log, Partition
from kvlane.streams.prompt import Prompt
from kvlane.streams.records import Artifact, Blocks
from kvlane.streams.request import Request
from kvlane.streams.topics import KV_EVENTS
from tests.harness.decoded import decode_events as events_of
from tests.harness.topic_cleanup import delete_topics
from workbench.reference_index import ReferenceIndex

LANES = 4
CONTEXT = 4096
WAIT_S = 120.0
FILES = read_folder(DEMO_MODEL_FOLDER)
SPEAKER = text_generator_of(FILES)
STORY = "The river rose in the night, and everybody went to look at it. " * 12
SYSTEM = {"role": "system", "content": STORY}

pytestmark = pytest.mark.slow


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [SYSTEM, {"role": "user", "content": text}]} | more


class Deployed(NamedTuple):
    """A deployment, a client of it, and the model it serves."""

    log: Log
    settings: Settings
    client: Client
    url: str
    indexer: str
    model: LoadedModel

    async def request(self, body: dict[str, Any]) -> Request:
        return (await self.model.prepare(openai_requests.read_openai("chat", body))).requests[0]

    async def due(self, body: dict[str, Any]) -> ExpectedAnswer:
        request = await self.request(body)
        return expected_answer(request, SPEAKER, self.model.text_stream(request))

    async def index(self) -> ReferenceIndex:
        """What somebody knows who reads kv-events now."""
        index = ReferenceIndex()
        count = await self.log.partitions(KV_EVENTS)
        sources = {Partition(KV_EVENTS, p): 0 for p in range(count)}
        ends = await self.log.end_offsets(KV_EVENTS, range(count))
        reader = self.log.reader()
        reader.assign(sources)
        while any(reader.position(s) < ends[s.partition] for s in sources):
            for source, records in (await reader.poll(0.2)).items():
                for record in map(decode, records):
                    if isinstance(record, Blocks):
                        got = EventColumns(
                            record.kinds, record.tiers, record.positions, record.counts, record.keys
                        )
                        holder = CacheId(record.worker, record.rank)
                        events = events_of(got)
                        index.apply_events(
                            source.partition, holder, record.epoch, record.first_event_id, events
                        )
        await reader.close()
        return index


@pytest.fixture(params=["memory", pytest.param("kafka", marks=pytest.mark.kafka)])
async def deployed(
    request: pytest.FixtureRequest, topic_prefix: str, tmp_path: Path
) -> AsyncIterator[Deployed]:
    servers = request.getfixturevalue("kafka").bootstrap_servers if request.param == "kafka" else ""
    settings = Settings(
        bootstrap_servers=servers,
        topic_prefix=topic_prefix,
        lanes=LANES,
        worker_id="w",
        router_id="r",
        cache_dir=tmp_path,
        http_port=0,
        indexer_port=0,
        context_length=CONTEXT,
        engine_speedup=20,
        heartbeat_interval_s=0.2,
        validate_engine=True,
    )
    ctx = ProcessContext("standalone", rng=random.Random(1))
    log: Log
    if servers:
        log = KafkaLog(settings.kafka_connection("standalone"), prefix=topic_prefix)
    else:
        log = MemoryLog(MemoryBroker(SystemClock(), lanes=LANES), "standalone")
    await log.start()
    if isinstance(log, KafkaLog):
        await provision.create_topics(log, lanes=LANES, replication=1, min_insync=1)
    everything = StandaloneProcess(log, settings, ctx, workers=2)
    await everything.start()
    nothing = Artifact(sha256="", size=0)
    card = card_of("demo", FILES, nothing, None, context_length=CONTEXT)
    model = await model_of_files(card, FILES, InlinePool(), ctx.clock)
    async with Client(log, ctx.clock) as client:
        yield Deployed(log, settings, client, everything.gateway.url, everything.indexer.url, model)
    await everything.stop()
    assert ctx.error is None
    await ctx.cancel_tasks()
    await log.close()
    if servers:
        await delete_topics(servers, topic_prefix)


async def test_prompt_is_answered_with_the_expected_text(deployed: Deployed) -> None:
    body = chat("What did they see?", max_tokens=60)
    prompt = Prompt(id=deployed.client.new_request_id(), body=body)
    await deployed.client.publish(prompt)
    answer = await deployed.client.result(prompt.id, WAIT_S)
    expected = await deployed.due(body)
    assert (answer.text, answer.tokens) == (expected.text, expected.token_ids)
    assert answer.finish_reason == expected.finish_reason
    assert answer.text


async def test_log_names_the_worker_that_holds_a_served_prompt(deployed: Deployed) -> None:
    body = chat("And then?", max_tokens=20)
    prompt = Prompt(id=deployed.client.new_request_id(), body=body)
    await deployed.client.publish(prompt)
    await deployed.client.result(prompt.id, WAIT_S)
    request = await deployed.request(body)
    tokens = unpack_tokens(request.token_ids)
    size = deployed.settings.block_size
    keys = prompt_keys(local_hashes(tokens, size), deployed.settings.block_key_secret())
    clock = SystemClock()
    until = clock.now() + WAIT_S
    while not (held := (await deployed.index()).match_prefix(keys.tolist())):
        assert clock.now() < until
    (overlap,) = held.values()
    assert overlap.device == len(tokens) // size > 5
    async with httpx.AsyncClient(base_url=deployed.indexer, timeout=WAIT_S) as http:
        sent = {"model": "demo", "token_ids": list(tokens)}
        while not (holders := (await http.post("/query", json=sent)).json()["holders"]):
            assert clock.now() < until  # the indexer follows the log by itself
            await asyncio.sleep(0.05)
    (got,) = holders
    assert CacheId(got["worker"], got["rank"]) in held
    assert got["device"] == overlap.device


async def test_gateway_and_the_topics_give_one_answer(deployed: Deployed) -> None:
    body = chat("Once more?", max_tokens=40, stop=["the "])
    prompt = Prompt(id=deployed.client.new_request_id(), body=body)
    await deployed.client.publish(prompt)
    answer = await deployed.client.result(prompt.id, WAIT_S)
    async with httpx.AsyncClient(base_url=deployed.url, timeout=WAIT_S) as http:
        got = (await http.post("/v1/chat/completions", json=body)).json()
    assert got["choices"][0]["message"]["content"] == answer.text
    assert got["choices"][0]["finish_reason"] == answer.finish_reason
    assert answer.usage is not None
    assert got["usage"]["prompt_tokens"] == answer.usage.prompt_tokens


async def test_wrong_prompt_is_answered_with_the_name_of_its_field(deployed: Deployed) -> None:
    for number, (body, code, named) in enumerate(
        [
            ({"messages": []}, "invalid", "body.messages"),
            (chat("x", temperature="hot"), "invalid", "body.temperature"),
            (chat("x") | {"model": "nobody"}, "model_not_found", "body.model"),
            (chat("word " * CONTEXT), "invalid", f"length is {CONTEXT}"),
        ]
    ):
        prompt = Prompt(id=f"wrong-{number}", body=body)
        await deployed.client.publish(prompt)
        answer = await deployed.client.result(prompt.id, WAIT_S)
        assert answer.code == code
        assert named in answer.message
