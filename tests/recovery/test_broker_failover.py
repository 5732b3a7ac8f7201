"""Three brokers, one of which is killed under load: nothing acknowledged is lost or doubled."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from streams.brokers.broker_factory import JvmBroker
from streams.kafka.connection_options import ConnectionOptions
from streams.kafka.kafka_log import KafkaLog
from streams.ports import Entry, Partition
from streams.topics import LEDGER, TOPICS
from tests.harness.record_traffic import RecordTraffic

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

LANES = 6  # every broker leads some
REQUEST_TIMEOUT_S = 6.0
"""More than a cluster takes to leave a broker that hangs (2 s here), a quarter of it is less."""
_ELECTED = re.compile(
    r"^\[(?P<at>[^]]+)\].*(Becoming the active controller|transition to Leader)", re.MULTILINE
)


@pytest.fixture
async def admin(kafka_cluster: JvmBroker) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=kafka_cluster.bootstrap_servers)
    await client.start()
    yield client
    await client.close()


@pytest.fixture
async def log(
    kafka_cluster: JvmBroker, admin: AIOKafkaAdminClient, topic_prefix: str
) -> AsyncIterator[KafkaLog]:
    config = next(t for t in TOPICS if t.name == LEDGER).config(min_insync=2)
    ledger = NewTopic(topic_prefix + LEDGER, LANES, 3, topic_configs=config)
    await admin.create_topics([ledger])
    connection = ConnectionOptions(
        kafka_cluster.bootstrap_servers, "test", request_timeout_ms=int(1000 * REQUEST_TIMEOUT_S)
    )
    log = KafkaLog(connection, topic_prefix)
    await log.start()
    await log.partitions(LEDGER)
    yield log
    await log.close()
    await until_whole(admin, topic_prefix)


async def leaders(admin: AIOKafkaAdminClient, prefix: str) -> dict[int, int]:
    """Broker ids by lane. A broker that was away hears of a new topic a little later."""
    async with asyncio.timeout(30):
        while True:
            topics = [t for t in await admin.describe_topics() if t["topic"] == prefix + LEDGER]
            if topics:
                return {p["partition"]: p["leader"] for p in topics[0]["partitions"]}
            await asyncio.sleep(0.1)


async def until_whole(admin: AIOKafkaAdminClient, prefix: str) -> None:
    """Wait until every copy is in sync again, so that the next test may kill a broker."""
    async with asyncio.timeout(30):
        while True:
            topics = [t for t in await admin.describe_topics() if t["topic"].startswith(prefix)]
            if all(len(p["isr"]) == 3 for t in topics for p in t["partitions"]):
                return
            await asyncio.sleep(0.2)


def active_controller(cluster: JvmBroker) -> int:
    """The broker that was elected last; clients are not told which one it is."""
    assert cluster.directory is not None
    elections = []
    for node in cluster.nodes:
        text = (cluster.directory / f"node{node.number}" / "logs" / "server.log").read_text()
        elections += [(found[1], node.number) for found in _ELECTED.finditer(text)]
    return max(elections)[1]


async def kill_under_load(log: KafkaLog, cluster: JvmBroker, victim: int) -> RecordTraffic:
    """Load before, while the broker is away, and through its return."""
    async with RecordTraffic(log, LEDGER, LANES) as traffic:
        await traffic.wait_acknowledged(20)
        await asyncio.to_thread(cluster.node(victim).kill)
        await traffic.wait_acknowledged(30)
        await asyncio.to_thread(cluster.node(victim).start)
        await traffic.wait_acknowledged(30)
        await traffic.settle()
    return traffic


def check(traffic: RecordTraffic) -> None:
    assert traffic.lost == []
    assert traffic.duplicated == []
    assert traffic.reordered == []
    assert traffic.out_of_order == 0
    assert traffic.given_twice == 0 or traffic.revocations, "given twice without a rebalance"


async def test_killed_leader_loses_and_doubles_nothing(
    log: KafkaLog, kafka_cluster: JvmBroker, admin: AIOKafkaAdminClient
) -> None:
    controller = active_controller(kafka_cluster)
    led = await leaders(admin, log.prefix)
    victim = next(leader for leader in led.values() if leader != controller)
    traffic = await kill_under_load(log, kafka_cluster, victim)
    assert traffic.failed == {}, "an append took longer than its patience"
    check(traffic)


async def test_killed_controller_loses_and_doubles_nothing(
    log: KafkaLog, kafka_cluster: JvmBroker
) -> None:
    traffic = await kill_under_load(log, kafka_cluster, active_controller(kafka_cluster))
    assert traffic.failed == {}, "an append took longer than its patience"
    check(traffic)


async def test_hung_leader_is_abandoned_before_requests_time_out(
    log: KafkaLog, kafka_cluster: JvmBroker, admin: AIOKafkaAdminClient
) -> None:
    """Its connections stay open; another broker tells that it is no member any more."""
    victim = kafka_cluster.node((await leaders(admin, log.prefix))[0])
    async with RecordTraffic(log, LEDGER, LANES) as traffic:
        await traffic.wait_acknowledged(20)
        victim.pause()
        try:
            await traffic.wait_acknowledged(30)
        finally:
            victim.resume()
        await traffic.wait_acknowledged(30)
        await traffic.settle()
    assert 1 < traffic.longest_stall_s < REQUEST_TIMEOUT_S
    check(traffic)


async def test_hung_leader_is_abandoned_by_a_reader_whose_lanes_come_and_go(
    log: KafkaLog, kafka_cluster: JvmBroker, admin: AIOKafkaAdminClient
) -> None:
    """Every change ends the requests under way, and with them the client's own time-out."""
    lane, other = Partition(LEDGER, 0), Partition(LEDGER, 1)
    victim = kafka_cluster.node((await leaders(admin, log.prefix))[0])
    first = await log.append(LEDGER, Entry(None, b"before", ()), 0)
    async with contextlib.AsyncExitStack() as cleanup:
        reader = log.reader()
        cleanup.push_async_callback(reader.close)
        reader.assign({lane: first.offset})
        async with asyncio.timeout(10):
            while reader.position(lane) == first.offset:
                await reader.poll(0.1)
        victim.pause()
        try:
            got = asyncio.create_task(log.append(LEDGER, Entry(None, b"meanwhile", ()), 0))
            both = False
            async with asyncio.timeout(2 * REQUEST_TIMEOUT_S):
                while reader.position(lane) == first.offset + 1:
                    both = not both
                    reader.assign({lane: first.offset + 1} | ({other: 0} if both else {}))
                    await reader.poll(0.1)
            assert (await got).offset == first.offset + 1
        finally:
            victim.resume()


async def test_leader_whose_disk_is_full_is_abandoned(
    log: KafkaLog, kafka_cluster: JvmBroker, admin: AIOKafkaAdminClient
) -> None:
    """It ends itself at its next write, in the middle of whatever it was asked to keep."""
    victim = kafka_cluster.node((await leaders(admin, log.prefix))[0])
    async with RecordTraffic(log, LEDGER, LANES) as traffic:
        await traffic.wait_acknowledged(20)
        victim.fill_disk()
        await asyncio.to_thread(victim.wait_ended)
        await traffic.wait_acknowledged(30)
        await asyncio.to_thread(victim.start)
        await traffic.wait_acknowledged(30)
        await traffic.settle()
    assert traffic.failed == {}, "an append took longer than its patience"
    check(traffic)
