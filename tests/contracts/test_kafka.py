"""Tests of properties of a real broker: broker time, sizes, topics, groups that lose members."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.consumer import fetcher
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.record.default_records import DefaultRecordBatch

from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.clock import SystemClock
from kvlane.streams.errors import PositionLost, RecordTooLarge, StreamError, TopicMismatch
from kvlane.streams.kafka import provision
from kvlane.streams.kafka.client_patches.fetch_session import (
    REQUESTS_WITHOUT_SESSION,
    FetchSession,
    SessionRequest,
)
from kvlane.streams.kafka.connection_options import ConnectionOptions
from kvlane.streams.kafka.group_member import KafkaMember
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.kafka.kafka_reader import KafkaReader
from kvlane.streams.kafka.provision import (
    REPLICATION,
    TopicState,
    check_partitions,
    create_topics,
    describe_topics,
    read_deployment,
    watch_topics,
)
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.ports import Entry, Partition, Record
from kvlane.streams.topics import (
    ASSIGNMENTS,
    KV_EVENTS,
    MAX_RECORD_BYTES,
    PROMPTS,
    REGISTRY,
    REQUESTS,
    RESPONSES,
    TOPICS,
)
from kvlane.streams.topics import PER_LANE as ANY_LANES

LANES = 2
SHAPE: dict[str, Any] = {"lanes": LANES, "replication": 1, "min_insync": 1}
WAIT_S = 120.0


def connection(kafka: Broker, **changes: Any) -> ConnectionOptions:
    return ConnectionOptions(kafka.bootstrap_servers, "test", **changes)


@pytest.fixture
async def admin(kafka: Broker) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
    await client.start()
    yield client
    await client.close()


@pytest.fixture
async def empty(
    kafka: Broker, topic_prefix: str, admin: AIOKafkaAdminClient
) -> AsyncIterator[KafkaLog]:
    """A log without topics; what a test makes is deleted, or the broker drowns in partitions."""
    log = KafkaLog(connection(kafka), topic_prefix)
    await log.start()
    yield log
    await log.close()
    made = [topic for topic in await admin.list_topics() if topic.startswith(topic_prefix)]
    if made:
        await admin.delete_topics(made)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table with one partition a topic, besides the lanes: many tests share the broker."""
    narrow = tuple(t if t.partitions == ANY_LANES else t._replace(partitions=1) for t in TOPICS)
    monkeypatch.setattr(provision, "TOPICS", narrow)


@pytest.fixture
async def full(narrow: None, empty: KafkaLog) -> KafkaLog:
    """A log with all topics of the table."""
    await create_topics(empty, **SHAPE)
    return empty


@pytest.fixture
async def log(empty: KafkaLog, admin: AIOKafkaAdminClient) -> KafkaLog:
    """A log with two topics that lead already."""
    await make_topics(admin, empty.prefix)
    for topic, partitions in ((REQUESTS, LANES), (REGISTRY, 1)):
        await empty.end_offsets(topic, range(partitions))
    return empty


async def make_topics(admin: AIOKafkaAdminClient, prefix: str) -> None:
    table = {t.name: t for t in TOPICS}
    await admin.create_topics(
        [
            NewTopic(prefix + name, partitions, 1, topic_configs=table[name].config(1))
            for name, partitions in ((REQUESTS, LANES), (REGISTRY, 1))
        ]
    )


async def read(log: KafkaLog, topic: str, partition: int, n: int) -> list[Record]:
    """The first `n` records of a partition."""
    reader, source = log.reader(), Partition(topic, partition)
    reader.assign({source: 0})
    got: list[Record] = []
    async with asyncio.timeout(WAIT_S):
        while len(got) < n:
            got += (await reader.poll(0.5)).get(source, ())
    await reader.close()
    return got


async def until_described(
    log: KafkaLog, so: Callable[[dict[str, TopicState]], bool]
) -> dict[str, TopicState]:
    """Describe until a change has gone round; brokers hear of it one after the other."""
    async with asyncio.timeout(WAIT_S):
        while not so(states := {s.name: s for s in await describe_topics(log, **SHAPE)}):
            await SystemClock().sleep(0.05)
    return states


class Owner:
    """Resumes what it is given."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.member: KafkaMember | None = None
        self.owned: dict[int, int] = {}
        self.revocations = 0
        self._fails = fails

    def assigned(self, starts: Mapping[int, int]) -> None:
        assert self.member is not None
        self.owned = dict(starts)
        for partition in starts:
            self.member.resume(partition)

    def revoked(self, partitions: frozenset[int]) -> None:
        self.owned = {}
        self.revocations += 1
        if self._fails is not None:
            raise self._fails


def joined(log: KafkaLog, fails: Exception | None = None) -> tuple[KafkaMember, Owner]:
    owner = Owner(fails)
    owner.member = log.member(REQUESTS, "routers", owner)
    return owner.member, owner


async def poll_until_owned(*members: tuple[KafkaMember, Owner], n: int) -> None:
    """Poll all members until each owns `n` lanes."""
    async with asyncio.timeout(WAIT_S):
        while any(len(owner.owned) != n for _, owner in members):
            await asyncio.gather(*(member.poll(0.1) for member, _ in members))


async def poll_for_ever(*pollers: KafkaReader | KafkaMember) -> None:
    """Poll until an error ends it, or the test's time is over."""
    async with asyncio.timeout(WAIT_S):
        while True:
            await asyncio.gather(*(poller.poll(0.1) for poller in pollers))


class TestTopics:
    async def test_create_makes_the_whole_table(self, empty: KafkaLog) -> None:
        states = await create_topics(empty, **SHAPE)
        assert [s.name for s in states] == [t.name for t in TOPICS]
        assert all(s.exists and s.is_as_expected for s in states)

    async def test_creating_again_changes_nothing(self, narrow: None, empty: KafkaLog) -> None:
        first = await create_topics(empty, **SHAPE)
        assert await create_topics(empty, **SHAPE) == first
        assert await empty.end_offsets(REGISTRY, [0]) == {0: 1}

    async def test_create_adds_missing_topics(
        self, narrow: None, empty: KafkaLog, admin: AIOKafkaAdminClient
    ) -> None:
        await create_topics(empty, **SHAPE)
        await admin.delete_topics([empty.prefix + RESPONSES])
        await until_described(empty, lambda states: not states[RESPONSES].exists)
        assert all(s.is_as_expected for s in await create_topics(empty, **SHAPE))

    async def test_missing_topics_are_described(self, empty: KafkaLog) -> None:
        states = await describe_topics(empty, **SHAPE)
        assert {s.name: (s.exists, s.partitions) for s in states} == {
            t.name: (False, 0) for t in TOPICS
        }

    async def test_topic_deleted_between_two_answers_is_described_as_missing(
        self, empty: KafkaLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def before_the_deletion(*_: Any) -> dict[str, list[int]]:
            return {RESPONSES: [1]}

        monkeypatch.setattr(provision, "_partitions", before_the_deletion)
        states = {s.name: s for s in await describe_topics(empty, **SHAPE)}
        assert (states[RESPONSES].exists, states[RESPONSES].partitions) == (False, 0)

    async def test_differing_setting_is_described(
        self, full: KafkaLog, admin: AIOKafkaAdminClient
    ) -> None:
        topic = ConfigResource(
            ConfigResourceType.TOPIC, full.prefix + REQUESTS, {"retention.ms": "1000"}
        )
        await admin.alter_configs([topic])
        states = await until_described(full, lambda states: not states[REQUESTS].is_as_expected)
        differing = states[REQUESTS].differing_configs
        assert differing["retention.ms"] == ("1000", "3600000")
        assert differing["message.timestamp.type"] == ("CreateTime", "LogAppendTime")

    async def test_other_replication_is_described(self, full: KafkaLog) -> None:
        states = await describe_topics(full, lanes=LANES, replication=3, min_insync=1)
        assert {s.differing_configs[REPLICATION] for s in states} == {("1", "3")}

    async def test_other_partitions_are_described(self, full: KafkaLog) -> None:
        states = await describe_topics(full, lanes=8, replication=1, min_insync=1)
        counts = {s.name: (s.partitions, s.expected_partitions) for s in states}
        assert counts[REQUESTS] == (LANES, 8)

    async def test_lane_mismatch_error_has_the_number_in_the_broker(self, full: KafkaLog) -> None:
        with pytest.raises(TopicMismatch, match=f"set KVLANE_LANES={LANES}"):
            await check_partitions(full, 8)

    async def test_create_refuses_topics_with_another_number_of_lanes(
        self, empty: KafkaLog, admin: AIOKafkaAdminClient
    ) -> None:
        await admin.create_topics([NewTopic(empty.prefix + REQUESTS, LANES, 1)])
        await until_described(empty, lambda states: states[REQUESTS].exists)
        with pytest.raises(TopicMismatch, match=f"KVLANE_LANES={LANES}"):
            await create_topics(empty, lanes=8, replication=1, min_insync=1)
        assert [s.name for s in await describe_topics(empty, **SHAPE) if s.exists] == [REQUESTS]

    async def test_missing_topics_error_names_the_command_that_creates_them(
        self, empty: KafkaLog
    ) -> None:
        with pytest.raises(TopicMismatch, match="kvlane topics create"):
            await check_partitions(empty, LANES)

    async def test_too_many_replicas_are_refused_with_the_brokers_message(
        self, empty: KafkaLog
    ) -> None:
        with pytest.raises(TopicMismatch, match=r"cannot be.* KVLANE_REPLICATION_FACTOR to 1"):
            await create_topics(empty, lanes=LANES, replication=99, min_insync=1)

    async def test_topics_have_as_many_replicas_as_there_are_brokers(
        self, narrow: None, empty: KafkaLog
    ) -> None:
        with pytest.raises(TopicMismatch, match="KVLANE_MIN_INSYNC_REPLICAS=2 exceeds"):
            await create_topics(empty, lanes=LANES, replication=None, min_insync=2)
        states = await create_topics(empty, lanes=LANES, replication=None, min_insync=1)
        assert all(s.is_as_expected for s in states)

    async def test_created_deployment_passes_the_check(self, full: KafkaLog) -> None:
        await check_partitions(full, LANES)

    async def test_added_partitions_are_reported(
        self, full: KafkaLog, admin: AIOKafkaAdminClient
    ) -> None:
        await admin.create_partitions({full.prefix + REQUESTS: NewPartitions(LANES + 1)})
        await until_described(full, lambda states: states[REQUESTS].partitions == LANES + 1)
        later = KafkaLog(full.connection, full.prefix)
        await later.start()
        try:
            with pytest.raises(TopicMismatch, match="was created with"):
                await check_partitions(later, LANES)
        finally:
            await later.close()

    async def test_deleted_topic_is_detected_and_named(
        self, full: KafkaLog, admin: AIOKafkaAdminClient
    ) -> None:
        watching = asyncio.create_task(watch_topics(full, SystemClock(), every_s=0.2))
        await asyncio.sleep(0.5)
        assert not watching.done()
        await admin.delete_topics([full.prefix + RESPONSES])
        with pytest.raises(TopicMismatch, match=f"{full.prefix}{RESPONSES} had {LANES}"):
            async with asyncio.timeout(10):
                await watching

    async def test_topics_of_an_older_table_pass_the_check(
        self, full: KafkaLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wider = tuple(t if t.name != PROMPTS else t._replace(partitions=4) for t in TOPICS)
        monkeypatch.setattr(provision, "TOPICS", wider)
        await check_partitions(full, LANES)

    async def test_deployment_keeps_the_partitions_that_it_was_created_with(
        self, narrow: None, empty: KafkaLog, admin: AIOKafkaAdminClient
    ) -> None:
        await create_topics(empty, **SHAPE, partitions={ASSIGNMENTS: 3, KV_EVENTS: 2})
        await admin.delete_topics([empty.prefix + ASSIGNMENTS])
        await until_described(empty, lambda states: not states[ASSIGNMENTS].exists)
        states = {s.name: s for s in await create_topics(empty, **SHAPE)}
        assert (states[ASSIGNMENTS].partitions, states[KV_EVENTS].partitions) == (3, 2)
        assert all(s.is_as_expected for s in states.values())
        await check_partitions(empty, LANES, {ASSIGNMENTS: 7})

    async def test_deployment_is_on_record(self, full: KafkaLog) -> None:
        made = await read_deployment(full)
        assert made is not None
        assert (made.lanes, made.partitions[REQUESTS], made.partitions[PROMPTS]) == (
            LANES,
            LANES,
            1,
        )

    async def test_log_in_memory_passes_the_check(self) -> None:
        twin = MemoryLog(MemoryBroker(SystemClock(), lanes=LANES), "test")
        await twin.start()
        await check_partitions(twin, LANES)
        with pytest.raises(TopicMismatch):
            await check_partitions(twin, 8)


class TestFetching:
    async def test_fetch_lists_no_partition_while_nothing_changes(
        self, log: KafkaLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        requests: list[SessionRequest] = []
        make = FetchSession.request

        def recorded(session: FetchSession, wanted: Mapping[TopicPartition, int]) -> SessionRequest:
            requests.append(make(session, wanted))
            return requests[-1]

        monkeypatch.setattr(FetchSession, "request", recorded)
        reader = log.reader(moving=True)
        reader.assign({Partition(REQUESTS, lane): 0 for lane in range(LANES)})
        async with asyncio.timeout(WAIT_S):
            while len(requests) < REQUESTS_WITHOUT_SESSION + 4:
                await reader.poll(0.1)
            assert len(requests[0].positions) == LANES
            assert [(r.positions, r.forgotten) for r in requests[-3:]] == [([], [])] * 3
            requests.clear()
            await log.append(REQUESTS, Entry(b"id", b"x"), 1)
            while not any(request.positions for request in requests):
                await reader.poll(0.1)
        moved = TopicPartition(log.prefix + REQUESTS, 1)
        [positions] = [request.positions for request in requests if request.positions]
        assert positions == [(moved, 1)]
        await reader.close()


class TestAppending:
    async def test_time_is_the_brokers(
        self, log: KafkaLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        responses: list[bytes] = []
        parser = fetcher.MemoryRecords
        monkeypatch.setattr(
            fetcher, "MemoryRecords", lambda data: responses.append(data) or parser(data)
        )
        appended = await log.append(REQUESTS, Entry(b"id", b"x"), 0)
        [record] = await read(log, REQUESTS, 0, 1)
        log_append_time = 1
        [fetched] = filter(None, responses)
        assert DefaultRecordBatch(fetched).timestamp_type == log_append_time
        assert record.timestamp == appended.timestamp_ms

    async def test_largest_record_goes_through(self, log: KafkaLog) -> None:
        value = bytes(MAX_RECORD_BYTES - 200)
        await log.append(REQUESTS, Entry(b"id", value), 0)
        [record] = await read(log, REQUESTS, 0, 1)
        assert record.value == value

    async def test_larger_record_is_refused_without_side_effects(self, log: KafkaLog) -> None:
        with pytest.raises(RecordTooLarge, match=r"requests\[0\]"):
            await log.append(REQUESTS, Entry(b"id", bytes(9 * 1024 * 1024)), 0)
        assert (await log.append(REQUESTS, Entry(b"id", b"x"), 0)).offset == 0

    async def test_refusal_by_the_broker_has_no_side_effects(
        self, empty: KafkaLog, admin: AIOKafkaAdminClient
    ) -> None:
        small = NewTopic(empty.prefix + "small", 1, 1, topic_configs={"max.message.bytes": "1000"})
        await admin.create_topics([small])
        await empty.append("small", Entry(b"id", b"x"), 0)
        with pytest.raises(RecordTooLarge):
            await empty.append("small", Entry(b"id", bytes(2000)), 0)
        offsets = [(await empty.append("small", Entry(b"id", b"x"), 0)).offset for _ in "ab"]
        assert offsets == [1, 2]

    async def test_single_entries_and_batches_keep_the_order_of_the_calls(
        self, log: KafkaLog
    ) -> None:
        calls = [
            log.append_batch(REQUESTS, 0, [Entry(b"id", b"%d" % i)])
            if i % 3
            else log.append(REQUESTS, Entry(b"id", b"%d" % i), 0)
            for i in range(200)
        ]
        await asyncio.gather(*calls)
        records = await read(log, REQUESTS, 0, 200)
        assert [r.value for r in records] == [b"%d" % i for i in range(200)]

    async def test_unknown_partition_differs(self, log: KafkaLog) -> None:
        with pytest.raises(TopicMismatch, match="no partition 2"):
            await log.append(REQUESTS, Entry(b"id", b"x"), LANES)


class TestReading:
    async def test_position_passes_transaction_markers(self, kafka: Broker, log: KafkaLog) -> None:
        """The end of a transaction takes an offset and is never handed out."""
        producer = AIOKafkaProducer(
            bootstrap_servers=kafka.bootstrap_servers, transactional_id=log.prefix
        )
        async with producer, producer.transaction():
            await producer.send_and_wait(log.prefix + REGISTRY, b"x", b"key", partition=0)
        registry = Partition(REGISTRY, 0)
        reader = log.reader()
        reader.assign({registry: 0})
        offsets: list[int] = []
        async with asyncio.timeout(WAIT_S):
            while reader.position(registry) < 2:
                offsets += [r.offset for r in (await reader.poll(0.1)).get(registry, ())]
        assert offsets == [0]

    async def test_position_beyond_the_end_is_lost(self, log: KafkaLog) -> None:
        """A topic that was deleted and made again."""
        reader = log.reader()
        reader.assign({Partition(REQUESTS, 0): 5})
        with pytest.raises(PositionLost) as lost:
            await poll_for_ever(reader)
        assert (lost.value.wanted, lost.value.start) == (5, 0)

    async def test_reader_of_nothing_waits(self, log: KafkaLog) -> None:
        assert await log.reader().poll(0.01) == {}


class TestGroups:
    async def test_member_of_a_client_that_did_not_know_the_topic_gets_its_lanes(
        self, kafka: Broker, log: KafkaLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A broker that has just started may not know a topic yet; its answer counts until the
        next."""
        assign = GroupCoordinator._perform_assignment
        unknown = []

        async def assign_without_topics(coordinator: Any, response: Any) -> Any:
            if not unknown:
                cluster = coordinator._client.cluster
                brokers = list(cluster.brokers())
                answer = SimpleNamespace(
                    API_VERSION=1, brokers=brokers, controller_id=brokers[0].nodeId, topics=()
                )
                cluster.update_metadata(answer)
                unknown.append(coordinator)
            return await assign(coordinator, response)

        monkeypatch.setattr(GroupCoordinator, "_perform_assignment", assign_without_topics)
        short = KafkaLog(connection(kafka, session_timeout_ms=1000), log.prefix)
        await short.start()
        member, owner = joined(short)
        await poll_until_owned((member, owner), n=LANES)
        await short.close()
        assert unknown

    async def test_error_of_the_owner_comes_out_of_the_poll(self, log: KafkaLog) -> None:
        first, owner = joined(log, fails=RuntimeError("cannot let go"))
        await poll_until_owned((first, owner), n=LANES)
        second, _ = joined(log)
        with pytest.raises(RuntimeError, match="cannot let go"):
            await poll_for_ever(first, second)

    async def test_commit_below_the_logs_start_is_an_alarm(
        self, log: KafkaLog, admin: AIOKafkaAdminClient, caplog: pytest.LogCaptureFixture
    ) -> None:
        for _ in range(5):
            await log.append(REQUESTS, Entry(b"id", b"x"), 1)
        first, owner = joined(log)
        await poll_until_owned((first, owner), n=LANES)
        await first.commit({1: 2})
        await first.close()
        lane = TopicPartition(log.prefix + REQUESTS, 1)
        await admin.delete_records({lane: RecordsToDelete(before_offset=4)})
        second, owner = joined(log)
        await poll_until_owned((second, owner), n=LANES)
        assert owner.owned == {0: 0, 1: 4}
        assert "wanted 2, the log starts at 4" in caplog.text

    async def test_records_deleted_under_a_member_are_an_alarm(
        self, log: KafkaLog, admin: AIOKafkaAdminClient, caplog: pytest.LogCaptureFixture
    ) -> None:
        for i in range(5):
            await log.append(REQUESTS, Entry(b"id", b"%d" % i), 0)
        owner = Owner()
        owner.member = member = log.member(REQUESTS, "routers", owner)
        owner.assigned = owner.owned.update  # type: ignore[method-assign]  # resumes nothing
        await poll_until_owned((member, owner), n=LANES)
        lane = TopicPartition(log.prefix + REQUESTS, 0)
        await admin.delete_records({lane: RecordsToDelete(before_offset=3)})
        member.resume(0)
        got: list[Record] = []
        async with asyncio.timeout(WAIT_S):
            while len(got) < 2:
                got += (await member.poll(0.1)).get(Partition(REQUESTS, 0), ())
        assert [r.value for r in got] == [b"3", b"4"]
        assert caplog.text.count("wanted 0, the log starts at 3") == 1

    @pytest.mark.slow
    async def test_member_that_is_not_polled_loses_its_lanes(
        self, kafka: Broker, log: KafkaLog
    ) -> None:
        stuck = KafkaLog(connection(kafka, session_timeout_ms=1000), log.prefix)
        await stuck.start()
        first, owner = joined(stuck)
        await poll_until_owned((first, owner), n=LANES)
        polling = asyncio.create_task(first.poll(10))  # its end must not count as a poll for ever
        await asyncio.sleep(0.1)
        polling.cancel()
        second, owner = joined(log)
        await poll_until_owned((second, owner), n=LANES)
        await stuck.close()

    async def test_member_of_a_stopped_process_loses_its_lanes_before_its_tasks_go_on(
        self, kafka: Broker, log: KafkaLog
    ) -> None:
        stopped = KafkaLog(connection(kafka, session_timeout_ms=1000), log.prefix)
        await stopped.start()
        try:
            member, owner = joined(stopped)
            await poll_until_owned((member, owner), n=LANES)
            waiting = asyncio.create_task(asyncio.sleep(0.1, owner.owned))
            await asyncio.sleep(0)
            time.sleep(1.2)  # as SIGSTOP does
            await waiting
            assert owner.owned == {}
            await poll_until_owned((member, owner), n=LANES)
        finally:
            await stopped.close()

    async def test_members_of_another_deployment_are_not_in_the_group(
        self, kafka: Broker, log: KafkaLog, admin: AIOKafkaAdminClient
    ) -> None:
        other = KafkaLog(connection(kafka), log.prefix + "other.")
        await other.start()
        await make_topics(admin, other.prefix)
        ours, theirs = joined(log), joined(other)
        await poll_until_owned(ours, n=LANES)
        await poll_until_owned(ours, theirs, n=LANES)
        await other.close()
        assert ours[1].revocations == 0


async def test_ordinary_operation_logs_no_warnings(
    log: KafkaLog, caplog: pytest.LogCaptureFixture
) -> None:
    for lane in range(LANES):  # the leaders of new topics take a moment to know that they lead
        await log.append(REQUESTS, Entry(b"id", b"x"), lane)
    caplog.clear()
    first, second = joined(log), joined(log)
    await poll_until_owned(first, n=LANES)
    await poll_until_owned(first, second, n=LANES // 2)
    await first[0].commit(first[1].owned)
    await first[0].close()
    await poll_until_owned(second, n=LANES)
    await log.close()
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


async def test_closing_leaves_no_task_behind(kafka: Broker, log: KafkaLog) -> None:
    before = asyncio.all_tasks()
    other = KafkaLog(connection(kafka), log.prefix)
    await other.start()
    await other.append(REQUESTS, Entry(b"id", b"x"), 0)
    await poll_until_owned(joined(other), n=LANES)
    await read(other, REQUESTS, 0, 1)
    await other.close()
    # The members of `log` are the only others that live on; it has none here.
    assert asyncio.all_tasks() <= before


async def test_broker_that_is_not_there_is_unavailable() -> None:
    log = KafkaLog(ConnectionOptions("127.0.0.1:1", "test"))
    with pytest.raises(StreamError, match=r"no Kafka at 127\.0\.0\.1:1"):
        await log.start()
