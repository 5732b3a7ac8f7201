"""Tests of a network between clients and their broker that stops, or drops all connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from kvlane.streams.brokers.broker import free_ports
from kvlane.streams.brokers.jvm import JvmBroker
from kvlane.streams.errors import BrokerUnavailable
from kvlane.streams.kafka.connection_options import ConnectionOptions
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.topics import LEDGER, TOPICS
from tests.harness.record_traffic import RecordTraffic
from tests.links import Link

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

PARTITIONS = 4
REQUEST_TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def port() -> int:
    """Where clients think that the broker is."""
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def broker(port: int) -> Iterator[JvmBroker]:
    got = {"advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}"}
    try:
        broker = JvmBroker(changes=got, report=lambda _: None).start()
    except BrokerUnavailable as reason:
        pytest.fail(f"no broker: {reason}", pytrace=False)
    with broker:
        yield broker


@pytest.fixture
async def link(broker: JvmBroker, port: int) -> AsyncIterator[Link]:
    async with Link(port, broker.node(1).port) as link:
        yield link


@pytest.fixture
async def log(link: Link, topic_prefix: str) -> AsyncIterator[KafkaLog]:
    servers = f"127.0.0.1:{link.port}"
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    config = next(t for t in TOPICS if t.name == LEDGER).config(1)
    await admin.create_topics(
        [NewTopic(topic_prefix + LEDGER, PARTITIONS, 1, topic_configs=config)]
    )
    await admin.close()
    connection = ConnectionOptions(
        servers, "test", request_timeout_ms=int(REQUEST_TIMEOUT_S * 1000), session_timeout_ms=3000
    )
    log = KafkaLog(connection, topic_prefix)
    await log.start()
    yield log
    link.flow()
    await log.close()


def check(traffic: RecordTraffic) -> None:
    assert (traffic.lost, traffic.duplicated) == ([], [])
    assert (traffic.reordered, traffic.out_of_order) == ([], 0)
    assert traffic.given_twice == 0 or traffic.revocations


@pytest.mark.parametrize("stall_s", [1.5 * REQUEST_TIMEOUT_S, 5 * REQUEST_TIMEOUT_S])
async def test_network_outage_loses_and_doubles_nothing(
    log: KafkaLog, link: Link, stall_s: float
) -> None:
    """What was sent meanwhile arrives afterwards, when its sender has given it up and sent it again
    on another connection; the longer time is past the patience of an append."""
    async with RecordTraffic(log, LEDGER, PARTITIONS) as traffic:
        await traffic.wait_acknowledged(20)
        link.stall()
        await asyncio.sleep(stall_s)
        link.flow()
        await traffic.wait_acknowledged(20)
        await traffic.settle()
    assert traffic.longest_stall_s >= stall_s - 0.5, "the network did not stop"
    check(traffic)


async def test_repeatedly_cut_connections_lose_and_double_nothing(
    log: KafkaLog, link: Link
) -> None:
    async with RecordTraffic(log, LEDGER, PARTITIONS) as traffic:
        for _ in range(5):
            await traffic.wait_acknowledged(5)
            await link.cut()
        await traffic.wait_acknowledged(10)
        await traffic.settle()
    check(traffic)
