"""Tests of three brokers, one of which is killed under load: nothing acknowledged is lost or
doubled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.client import AIOKafkaClient

from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker_factory import JvmBroker
from kvlane.streams.codecs import encode
from kvlane.streams.kafka.connection_options import ConnectionOptions
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.kafka.provision import create_topics
from kvlane.streams.ports import Entry, Partition
from kvlane.streams.records import Chunk
from kvlane.streams.request import ReplyAddress, Request, ResultOptions
from kvlane.streams.topics import LEDGER, REQUESTS, RESPONSES, RESULTS, TOPICS
from tests.harness.kafka_processes import app_process, provisioned
from tests.harness.record_traffic import RecordTraffic

pytestmark = pytest.mark.slow

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


async def test_killed_controller_loses_and_doubles_nothing(
    log: KafkaLog, kafka_cluster: JvmBroker
) -> None:
    """It leads lanes too, like every broker."""
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


async def test_member_whose_link_to_its_coordinator_is_cut_leaves_its_lanes_to_another(
    log: KafkaLog, kafka_cluster: JvmBroker, admin: AIOKafkaAdminClient
) -> None:
    """The coordinator may move meanwhile, since a broker has just come back: the link to the new
    one is cut as well."""
    other = KafkaLog(replace(log.connection, client_id="other"), log.prefix)
    await other.start()
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.push_async_callback(other.close)
        a, b = LaneOwner(log), LaneOwner(other)
        await poll_until(lambda: len(a.lanes) == len(b.lanes) == LANES // 2, a, b)
        b.rival = a
        cut = {a.member._consumer._coordinator.coordinator_id}
        cleanup.enter_context(cut_links(log.connection.client_id, cut))

        def has_all() -> bool:
            cut.update({b.member._consumer._coordinator.coordinator_id} - {None})
            return len(b.lanes) == LANES

        await poll_until(has_all, a, b)
        assert (a.lanes, b.taken_twice) == (set(), set())
        led = await leaders(admin, log.prefix)
        lane = next(lane for lane, leader in led.items() if leader not in cut)
        await log.append(LEDGER, Entry(None, b"x"), lane)  # by its other links


class LaneOwner:
    """A member of a group, and its lanes. `rival`: another one, whose lanes are compared."""

    def __init__(self, log: KafkaLog) -> None:
        self.member: Any = log.member(LEDGER, "owners", self)
        self.lanes: set[int] = set()
        self.rival: LaneOwner | None = None
        self.taken_twice: set[int] = set()

    def assigned(self, starts: Mapping[int, int]) -> None:
        self.lanes |= set(starts)
        if self.rival is not None:
            self.taken_twice |= self.lanes & self.rival.lanes

    def revoked(self, partitions: frozenset[int]) -> None:
        self.lanes -= partitions


async def poll_until(condition: Callable[[], bool], *owners: LaneOwner) -> None:
    async with asyncio.timeout(40):
        while not condition():
            await asyncio.gather(*(owner.member.poll(0.2) for owner in owners))


@contextlib.contextmanager
def cut_links(client_id: str, nodes: set[int]) -> Iterator[None]:
    """No connection of the client to these brokers carries anything, and none is opened."""
    get = AIOKafkaClient._get_conn

    async def get_others(client: AIOKafkaClient, wanted: int, **options: Any) -> Any:
        if client._client_id == client_id and wanted in nodes:
            for (number, _), connection in list(client._conns.items()):
                if number == wanted:
                    connection.close()
            return None
        return await get(client, wanted, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AIOKafkaClient, "_get_conn", get_others)
        yield


async def test_topics_have_three_replicas_without_a_setting(
    log: KafkaLog, admin: AIOKafkaAdminClient
) -> None:
    created = await create_topics(log, lanes=LANES, replication=None, min_insync=1)
    assert len(created) > 10
    topics = [t for t in await admin.describe_topics() if t["topic"].startswith(log.prefix)]
    copies = {len(p["replicas"]) for t in topics for p in t["partitions"]}
    await admin.delete_topics([t["topic"] for t in topics if t["topic"] != log.prefix + LEDGER])
    assert copies == {3}


async def test_dead_topic_of_replies_holds_neither_results_nor_other_replies(
    kafka_cluster: JvmBroker,
    admin: AIOKafkaAdminClient,
    topic_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name, value in {
        "KVLANE_CACHE_DIR": str(tmp_path),
        "KVLANE_BOOTSTRAP_SERVERS": kafka_cluster.bootstrap_servers,
        "KVLANE_TOPIC_PREFIX": topic_prefix,
        "KVLANE_LANES": "1",
    }.items():
        monkeypatch.setenv(name, value)
    victim = kafka_cluster.nodes[-1]
    dead, alive = f"dead-{topic_prefix}", f"alive-{topic_prefix}"
    await admin.create_topics(
        [NewTopic(dead, -1, -1, replica_assignments={0: [victim.number]}), NewTopic(alive, 1, 3)]
    )
    async with provisioned(Settings(), replication=3) as log:
        outside = log.outside()
        await outside.start()
        with app_process("collector", tmp_path / "collector.log", os.environ):
            await answer(log, "before", dead)
            assert await keys(outside, dead, 1) == [b"before"]
            await asyncio.to_thread(victim.kill)
            try:
                for number in range(3):
                    await answer(log, f"dead-{number}", dead)
                    await answer(log, f"alive-{number}", alive)
                assert await keys(outside, alive, 3) == [b"alive-0", b"alive-1", b"alive-2"]
                assert len(await keys(log, RESULTS, 7)) == 7
            finally:
                await asyncio.to_thread(victim.start)
            written = await keys(outside, dead, 4)
            assert written == [b"before", b"dead-0", b"dead-1", b"dead-2"]


async def answer(log: KafkaLog, name: str, topic: str) -> None:
    """A request with a copy of its result, and its answer, as other processes write them."""
    options = ResultOptions(kind="completion", reply=ReplyAddress(topic=topic))
    request = Request(id=name, model="demo", token_ids=b"\1\0\0\0", result=options)
    await log.append(REQUESTS, encode(request, name))
    chunk = Chunk(
        id=name, attempt=0, run="1", seq=0, index=0, token_ids=(1,), text="x", chars=1,
        finish_reason="stop",
    )  # fmt: skip
    await log.append(RESPONSES, encode(chunk, name))


async def keys(log: KafkaLog, topic: str, count: int) -> list[bytes | None]:
    """The keys of the first records of a partition."""
    reader, place = log.reader(), Partition(topic, 0)
    reader.assign({place: 0})
    found: list[bytes | None] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            found += [record.key for record in (await reader.poll(1.0)).get(place, ())]
    await reader.close()
    return found


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
