"""Tests of a client through the death and the return of the only broker: it reads on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator

import pytest

from kvlane.streams.brokers.broker_factory import JvmBroker, obtain_broker
from kvlane.streams.client import Client
from kvlane.streams.clock import SystemClock
from kvlane.streams.errors import BrokerUnavailable
from kvlane.streams.kafka.connection_options import ConnectionOptions
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.kafka.provision import create_topics
from kvlane.streams.prompt import Prompt
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Chunk
from kvlane.streams.topics import RESPONSES

PREFIX = "restart."
STREAMS = 20
PARTS = 30
DEADLINE_S = 120.0

pytestmark = pytest.mark.kafka


@pytest.fixture(scope="module")
def broker() -> Iterator[JvmBroker]:
    """A broker of this module's own, since it is killed."""
    try:
        broker = obtain_broker("jvm", report=lambda _: None)
    except BrokerUnavailable as reason:
        pytest.fail(f"no broker to kill: {reason}", pytrace=False)
    with broker:
        yield broker


@pytest.fixture
async def logs(broker: JvmBroker) -> AsyncIterator[list[KafkaLog]]:
    """A connection for the client and one for the worker."""
    names = ("client", "worker")
    logs = [KafkaLog(ConnectionOptions(broker.bootstrap_servers, name), PREFIX) for name in names]
    for log in logs:
        await log.start()
    await create_topics(logs[0], lanes=4, replication=1, min_insync=1)
    yield logs
    for log in logs:
        await log.close()


def answer(request_id: str) -> list[str]:
    return [f"{request_id[-3:]}.{k} " for k in range(PARTS)]


async def write(publisher: RecordPublisher, request_id: str, pace_s: float) -> None:
    """A worker's whole reply; what was not acknowledged is sent again."""
    index = 0
    for seq, text in enumerate(answer(request_id)):
        chunk = Chunk(
            id=request_id,
            attempt=0,
            run="1",
            seq=seq,
            index=index,
            token_ids=tuple(map(ord, text)),
            text=text,
            chars=index + len(text),
            finish_reason="stop" if seq == PARTS - 1 else None,
        )
        await publisher.publish(RESPONSES, request_id, chunk)
        index += len(text)
        await asyncio.sleep(pace_s)


async def test_streams_survive_the_death_and_return_of_the_broker(
    broker: JvmBroker, logs: list[KafkaLog]
) -> None:
    clock = SystemClock()
    publisher = RecordPublisher(logs[1], clock)
    async with Client(logs[0], clock, random.Random(1)) as client:
        ids = [await client.publish(Prompt(id=client.new_request_id())) for _ in range(STREAMS)]
        listening = [asyncio.create_task(client.result(i, DEADLINE_S)) for i in ids]
        writing = [asyncio.create_task(write(publisher, i, 0.1)) for i in ids]
        await asyncio.sleep(1.0)
        await asyncio.to_thread(broker.node(1).kill)
        during = asyncio.create_task(
            client.publish(Prompt(id=client.new_request_id()), timeout_s=DEADLINE_S)
        )
        await asyncio.sleep(1.0)
        assert not any(task.done() for task in (*listening, during)), "too late to show anything"
        await asyncio.to_thread(broker.node(1).start)

        answers = await asyncio.gather(*listening)
        await asyncio.gather(*writing)
        assert [a.text for a in answers] == ["".join(answer(i)) for i in ids]

        late = await during
        await write(publisher, late, 0.0)
        assert (await client.result(late, DEADLINE_S)).text == "".join(answer(late))

    async with Client(logs[1], clock) as other:
        again = await asyncio.gather(*(other.result(i, DEADLINE_S) for i in ids))
    assert again == answers


async def test_attaching_and_publishing_on_a_real_log(logs: list[KafkaLog]) -> None:
    """Two clients, some ids without a time in them, replies that are under way or over."""
    clock = SystemClock()
    publisher = RecordPublisher(logs[1], clock)
    async with Client(logs[0], clock) as first, Client(logs[1], clock) as second:
        ids = [f"job-{n}" for n in range(STREAMS // 2)]
        ids += [first.new_request_id() for _ in range(STREAMS // 2)]
        for request_id in ids:
            await first.publish(Prompt(id=request_id))
        writing = [asyncio.create_task(write(publisher, i, 0.02)) for i in ids]
        listening = []
        for request_id in ids:
            listening.append(asyncio.create_task(first.result(request_id, DEADLINE_S)))
            listening.append(asyncio.create_task(second.result(request_id, DEADLINE_S)))
            await asyncio.sleep(0.05)
        answers = await asyncio.gather(*listening)
        await asyncio.gather(*writing)
        assert [a.text for a in answers] == ["".join(answer(i)) for i in ids for _ in range(2)]
