"""Test of a preemption and a long wait on a real Kafka: both requests get exactly their tokens."""

from __future__ import annotations

import asyncio

import pytest

from kvlane.app.engine.echo import EchoEngine, echo_answer
from kvlane.app.preprocessor import Preprocessor
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.app.worker import Worker
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.client import Client
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import decode
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.ports import Partition
from kvlane.streams.prompt import Prompt
from kvlane.streams.records import Fencing
from kvlane.streams.topics import LEDGER, RESPONSES
from tests.harness.kafka_processes import provisioned

LANES = 2
BATCH_TOKENS, TOKENS = 60, 30
STEP_S = 0.1
LIFETIME_S = 4.0
"""The preempted request waits for longer than half of it, so its record is appended again."""
WAIT_S = 120.0

pytestmark = pytest.mark.slow


async def has_replies(log: KafkaLog) -> bool:
    """Whether a worker has answered anything."""
    return sum((await log.end_offsets(RESPONSES, range(LANES))).values()) > 0


async def fencings(log: KafkaLog, request_id: str) -> list[str]:
    """The reasons of the attempts of a request, by the ledger."""
    ends = await log.end_offsets(LEDGER, range(LANES))
    reader = log.reader()
    reader.assign({Partition(LEDGER, lane): 0 for lane in ends})
    found: list[str] = []
    while any(reader.position(Partition(LEDGER, lane)) < end for lane, end in ends.items()):
        for records in (await reader.poll(1.0)).values():
            decoded = [decode(record) for record in records]
            found += [f.reason for f in decoded if isinstance(f, Fencing) and f.id == request_id]
    await reader.close()
    return found


async def test_preempted_batch_run_is_renewed_and_both_get_their_tokens(
    kafka: Broker, topic_prefix: str
) -> None:
    settings = Settings(
        bootstrap_servers=kafka.bootstrap_servers, topic_prefix=topic_prefix, lanes=LANES,
        worker_id="w", router_id="r", status_port=None, max_num_seqs=1, max_attempts=1,
        hash_secret="tests",  # the broker may be remote
        max_lifetime_s=LIFETIME_S, deadline_s=LIFETIME_S,
    )  # fmt: skip
    client_clock = SystemClock()
    async with provisioned(settings) as log, Client(log, client_clock) as client:
        running: list[tuple[KafkaLog, ProcessContext, Worker | Router | Preprocessor]] = []
        for kind in (Worker, Router, Preprocessor):
            own = KafkaLog(settings.kafka_connection(kind.__name__), prefix=topic_prefix)
            ctx = ProcessContext(kind.__name__)
            await own.start()
            engine = EchoEngine(ctx.clock, STEP_S, model="demo", max_num_seqs=1)
            part = (
                Worker(own, settings, ctx, engine)
                if kind is Worker
                else (Router if kind is Router else Preprocessor)(own, settings, ctx)
            )
            await part.start()
            running.append((own, ctx, part))
        prompt = [97, 98, 99, 258]
        body = {"token_ids": prompt, "max_tokens": BATCH_TOKENS}
        batch = Prompt(id=client.new_request_id(), kind="tokens", body=body, service_class="batch")
        await client.publish(batch)
        async with asyncio.timeout(WAIT_S):
            while not await has_replies(log):
                await client_clock.sleep(0.1)
        urgent = Prompt(
            id=client.new_request_id(), kind="tokens", body=body | {"max_tokens": TOKENS}
        )
        await client.publish(urgent)
        later = asyncio.ensure_future(client.result(batch.id, WAIT_S))
        first = await client.result(urgent.id, WAIT_S)
        assert not later.done()
        assert list(first.tokens) == echo_answer(prompt, TOKENS)
        assert list((await later).tokens) == echo_answer(prompt, BATCH_TOKENS)
        assert await fencings(log, batch.id) == ["preempted", "renewed"]
        for own, ctx, part in reversed(running):
            assert ctx.error is None
            if not isinstance(part, Worker):
                await part.stop()
            await ctx.cancel_tasks()
            await own.close()
