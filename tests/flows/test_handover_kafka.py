"""Prefill and decode workers on a real Kafka: every answer is that of one engine, in two runs."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from app.engine.echo import echo_answer
from app.engine.simulated.batch import EngineLimits
from app.engine.simulated.engine import SimulatedEngine
from app.preprocessor import Preprocessor
from app.router import Router
from app.runtime.process import ProcessContext
from app.settings import Settings
from app.worker import Worker
from streams.brokers.broker_factory import Broker
from streams.client import Client
from streams.clock import SystemClock
from streams.codecs import decode
from streams.kafka.kafka_log import KafkaLog
from streams.ports import Partition
from streams.prompt import Prompt
from streams.records import Assigned, Chunk, LogRecord, Started
from streams.topics import LEDGER, RESPONSES
from tests.harness.kafka_processes import provisioned

LANES = 2
REQUESTS, MAX_TOKENS = 60, 12
BLOCK = 16
WAIT_S = 60.0
ROLES = {"p1": "prefill", "d1": "decode", "d2": "decode"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


@asynccontextmanager
async def deployment(settings: Settings) -> AsyncIterator[None]:
    """A worker of each name in ROLES, a router and a preprocessor."""
    running: list[tuple[KafkaLog, ProcessContext, Worker | Router | Preprocessor]] = []
    for name in (*ROLES, "router", "preprocessor"):
        log = KafkaLog(settings.kafka_connection(name), prefix=settings.topic_prefix)
        ctx = ProcessContext(name)
        await log.start()
        part: Worker | Router | Preprocessor
        if name in ROLES:
            limits = EngineLimits(block_size=BLOCK, cache_blocks=4096)
            engine = SimulatedEngine(
                ctx.clock, limits, model="demo", context_length=8192, speedup=20
            )
            own = settings.model_copy(update={"worker_role": ROLES[name], "worker_id": name})
            part = Worker(log, own, ctx, engine)
        else:
            part = (Router if name == "router" else Preprocessor)(log, settings, ctx)
        await part.start()
        running.append((log, ctx, part))
    try:
        yield
    finally:
        for log, ctx, part in reversed(running):
            if not isinstance(part, Worker):
                await part.stop()
            await ctx.cancel_tasks()
            await log.close()
    assert [ctx.error for _, ctx, _ in running] == [None] * len(running)


async def all_records(log: KafkaLog, topic: str) -> list[LogRecord]:
    ends = await log.end_offsets(topic, range(LANES))
    reader = log.reader()
    reader.assign({Partition(topic, lane): 0 for lane in ends})
    found: list[LogRecord] = []
    while any(reader.position(Partition(topic, lane)) < end for lane, end in ends.items()):
        for records in (await reader.poll(1.0)).values():
            found += [LogRecord(r.offset, r.timestamp, decode(r)) for r in records]
    await reader.close()
    return found


async def test_answers_of_two_engines_equal_those_of_one(kafka: Broker, topic_prefix: str) -> None:
    settings = Settings(
        bootstrap_servers=kafka.bootstrap_servers, topic_prefix=topic_prefix, lanes=LANES,
        worker_id="-", router_id="r", status_port=None, hash_secret="tests",
    )  # fmt: skip
    rng = random.Random(1)
    lengths = [*range(1, BLOCK + 2), *(rng.randint(1, 4000) for _ in range(REQUESTS))][:REQUESTS]
    prompts = [[rng.randrange(97, 123) for _ in range(length)] + [258] for length in lengths]
    async with provisioned(settings) as log, Client(log, SystemClock()) as client:
        async with deployment(settings):
            ids = []
            for prompt in prompts:
                ids.append(client.new_request_id())
                body = {"token_ids": prompt, "max_tokens": MAX_TOKENS}
                await client.publish(Prompt(id=ids[-1], kind="tokens", body=body))
            async with asyncio.timeout(WAIT_S):
                answers = [await client.result(name, WAIT_S) for name in ids]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert list(answer.tokens) == echo_answer(prompt, MAX_TOKENS)
        ledger, responses = await all_records(log, LEDGER), await all_records(log, RESPONSES)
    phases = defaultdict(list)
    for fact in ledger:
        if isinstance(fact.record, Assigned):
            phases[fact.record.id].append((fact.record.phase, fact.record.worker))
    assert [[phase for phase, _ in phases[name]] for name in ids] == [["prefill", "decode"]] * len(
        ids
    )
    assert {worker for each in phases.values() for _, worker in each} == set(ROLES)
    prefills = {str(f.record.run) for f in ledger if is_phase(f, Started, "prefill")}
    assert len(prefills) == REQUESTS
    assert not prefills & {f.record.run for f in responses if isinstance(f.record, Chunk)}


def is_phase(fact: LogRecord, kind: type, phase: str) -> bool:
    return isinstance(fact.record, kind) and fact.record.phase == phase
