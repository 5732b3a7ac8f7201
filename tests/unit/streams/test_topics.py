"""Tests of the table of topics: it is consistent, and keys have the partitions of the Java
client."""

from __future__ import annotations

import pytest
from aiokafka import partitioner
from hypothesis import given
from hypothesis import strategies as st

from kvlane.app import collector, indexer, router
from kvlane.app.batches import job_runner
from kvlane.streams import codecs, topics
from kvlane.streams.topics import (
    GROUPS,
    PER_LANE,
    TOPICS,
    TOPICS_BY_NAME,
    AclRule,
    Topic,
    lane_of,
    murmur2,
    partition_of,
    required_acls,
)

MAX_LIFETIME_MS = 600_000
NOT_IN_CODECS = {
    "Prompt",  # what clients publish; checked by pydantic in streams/prompt.py
    "Tombstone",  # a null value
}


def test_names_are_unique_and_short() -> None:
    assert len(TOPICS_BY_NAME) == len(TOPICS)
    for name in TOPICS_BY_NAME:
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz-"), name


def test_lane_is_the_same_partition_of_its_topics() -> None:
    lanes = {topic.name for topic in TOPICS if topic.partitions == PER_LANE}
    assert lanes == {topics.REQUESTS, topics.LEDGER, topics.RESPONSES, topics.RESULTS, topics.USAGE}
    assert {TOPICS_BY_NAME[name].key for name in lanes} == {"request id"}


def test_every_named_topic_is_in_the_table() -> None:
    named = {
        topics.PROMPTS,
        topics.BATCH,
        topics.REQUESTS,
        topics.LEDGER,
        topics.RESPONSES,
        topics.RESULTS,
        topics.USAGE,
        topics.ENDED_IDS,
        topics.ASSIGNMENTS,
        topics.KV_EVENTS,
        topics.CAPACITY,
        topics.REGISTRY,
        topics.ARTIFACTS,
        topics.BATCH_JOBS,
        topics.FILE_PARTS,
        topics.SNAPSHOTS,
        topics.DEAD_LETTERS,
    }
    assert named == set(TOPICS_BY_NAME)


@pytest.mark.parametrize("topic", TOPICS, ids=lambda t: t.name)
def test_partitions_are_a_positive_number_or_the_lanes(topic: Topic) -> None:
    assert topic.partitions > 0 or topic.partitions == PER_LANE


@pytest.mark.parametrize("topic", TOPICS, ids=lambda t: t.name)
def test_broker_sets_the_time_of_every_record(topic: Topic) -> None:
    assert topic.config(1)["message.timestamp.type"] == "LogAppendTime"


@pytest.mark.parametrize("topic", TOPICS, ids=lambda t: t.name)
def test_required_replicas_are_a_setting_of_the_deployment(topic: Topic) -> None:
    assert topic.config(2)["min.insync.replicas"] == "2"


@pytest.mark.parametrize("topic", TOPICS, ids=lambda t: t.name)
def test_defaults_of_a_cluster_lose_nothing_that_was_acknowledged(topic: Topic) -> None:
    config = topic.config(1)
    assert config["unclean.leader.election.enable"] == "false"
    assert config.get("retention.bytes", "-1") == "-1"
    assert ("retention.bytes" in config) is (topic.retention_ms is not None)


@pytest.mark.parametrize("topic", TOPICS, ids=lambda t: t.name)
def test_topic_deletes_by_age_or_compacts(topic: Topic) -> None:
    config = topic.config(1)
    compacts, deletes = topic.compacts or topic.retention_ms is None, topic.retention_ms is not None
    policies = ["compact"] * compacts + ["delete"] * deletes
    assert config["cleanup.policy"] == ",".join(policies)
    assert ("retention.ms" in config) is deletes
    assert ("min.compaction.lag.ms" in config) is compacts


@pytest.mark.parametrize("topic", TOPICS, ids=lambda t: t.name)
def test_segment_is_at_most_a_quarter_of_the_retention(topic: Topic) -> None:
    config = topic.config(1)
    for kept in {"min.compaction.lag.ms", "retention.ms"} & config.keys():
        assert int(config["segment.ms"]) * 4 <= int(config[kept])


def test_brokers_compress_topics_kept_for_a_day_and_read_by_every_router() -> None:
    compressed = {topic.name for topic in TOPICS if "compression.type" in topic.config(1)}
    assert compressed == {topics.LEDGER}


def test_tombstone_is_kept_as_long_as_the_compaction_lag() -> None:
    for topic in TOPICS:
        config = topic.config(1)
        if "compact" in config["cleanup.policy"]:
            assert int(config["delete.retention.ms"]) >= int(config["min.compaction.lag.ms"])


def test_stream_can_be_read_again_until_long_after_its_request_is_over() -> None:
    retention_ms = TOPICS_BY_NAME[topics.RESPONSES].retention_ms
    assert retention_ms is not None
    assert retention_ms / 2 > MAX_LIFETIME_MS


def test_ledger_is_kept_longer_than_its_requests() -> None:
    ledger, requests = TOPICS_BY_NAME[topics.LEDGER], TOPICS_BY_NAME[topics.REQUESTS]
    responses = TOPICS_BY_NAME[topics.RESPONSES]
    assert ledger.retention_ms is not None
    for other in (requests, responses):
        assert other.retention_ms is not None
        assert ledger.retention_ms > other.retention_ms + MAX_LIFETIME_MS


def test_every_record_type_is_on_a_topic_and_every_topic_has_known_types() -> None:
    on_topics = {name for topic in TOPICS for name in topic.records}
    in_codecs = {t.__name__ for t in (*codecs._INNER, *codecs._PUBLIC)}
    assert on_topics - NOT_IN_CODECS == in_codecs


def test_clients_get_json_where_they_write_and_read() -> None:
    public = {t.__name__ for t in codecs._PUBLIC} | {"Prompt"}
    for topic in TOPICS:
        assert (topic.format == "JSON") == bool(set(topic.records) & public), topic.name
        if topic.format == "JSON":
            assert set(topic.records) <= public
    for topic in TOPICS:
        if "client" in (*topic.writers, *topic.readers):
            assert topic.format == "JSON"


@pytest.mark.parametrize("topic", TOPICS, ids=lambda t: t.name)
def test_every_topic_has_a_writer_and_a_reader(topic: Topic) -> None:
    assert topic.writers
    assert topic.readers


# From the tests of the Java client (UtilsTest.testMurmur2), which are signed 32-bit numbers there.
JAVA_MURMUR2 = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize(("key", "java_hash"), JAVA_MURMUR2.items())
def test_hash_is_that_of_the_java_client(key: bytes, java_hash: int) -> None:
    assert murmur2(key) == java_hash % 2**32


@given(st.binary(max_size=100))
def test_hash_is_that_of_aiokafka(key: bytes) -> None:
    assert murmur2(key) == partitioner.murmur2(key)


@pytest.mark.parametrize(("key", "java_hash"), JAVA_MURMUR2.items())
def test_partition_is_that_of_the_java_client(key: bytes, java_hash: int) -> None:
    assert partition_of(key, 32) == (java_hash & 0x7FFFFFFF) % 32


@given(st.text(), st.integers(1, 64))
def test_request_is_in_the_lane_of_its_key(request_id: str, lanes: int) -> None:
    lane = lane_of(request_id, lanes)
    assert 0 <= lane < lanes
    assert lane == partition_of(request_id.encode(), lanes)


def test_rights_outside_the_table_are_for_operators_only() -> None:
    got = {(r.role, r.operation, r.name) for r in required_acls() if r.resource == "topic"}
    for topic in TOPICS:
        for role in {r.role for r in required_acls()} - {"operator"}:
            assert ((role, "Write", topic.name) in got) == (role in topic.writers)
            assert ((role, "Read", topic.name) in got) == (role in topic.readers)
    assert {r.role for r in required_acls() if r.operation == "All"} == {"operator"}


def test_client_role_has_rights_on_public_topics_only() -> None:
    assert [r for r in required_acls() if r.role == "client"] == [
        AclRule("client", "Write", "topic", topics.PROMPTS),
        AclRule("client", "Write", "topic", topics.BATCH),
        AclRule("client", "Read", "topic", topics.RESPONSES),
        AclRule("client", "Read", "topic", topics.RESULTS),
    ]


def test_groups_are_those_that_processes_join() -> None:
    assert GROUPS == {
        "preprocessor": topics.PROMPTS,
        "preprocessor-batch": topics.BATCH,
        router.GROUP: topics.REQUESTS,
        collector.GROUP: topics.REQUESTS,
        job_runner.GROUP: topics.BATCH_JOBS,
        indexer.CONSUMER_GROUP: topics.KV_EVENTS,
    }
    groups = [(r.role, r.name) for r in required_acls() if r.resource == "group" and r.name]
    assert groups == [
        ("collector", "collector"),
        ("collector", "collector-jobs"),
        ("indexer", "indexer"),
        ("preprocessor", "preprocessor"),
        ("preprocessor", "preprocessor-batch"),
        ("router", "router"),
    ]


def test_collector_may_write_in_transactions_and_to_topics_of_replies() -> None:
    own = [r for r in required_acls(["replies-"]) if r.role == "collector" and r.is_prefix]
    assert own == [
        AclRule("collector", "Describe", "transactional-id", "collector-", is_prefix=True),
        AclRule("collector", "Write", "transactional-id", "collector-", is_prefix=True),
        AclRule("collector", "Read", "topic", "replies-", is_prefix=True, is_foreign=True),
        AclRule("collector", "Write", "topic", "replies-", is_prefix=True, is_foreign=True),
    ]


def test_readers_of_transactional_topics_read_committed_records() -> None:
    written = {t.name for t in TOPICS if set(t.writers) & set(topics.TRANSACTIONAL_IDS)}
    by_other_producers = {topics.BATCH, topics.BATCH_JOBS, topics.FILE_PARTS, topics.DEAD_LETTERS}
    by_clients = {t.name for t in TOPICS if t.writers[0] == "client"}
    assert by_clients == topics.OF_CLIENTS
    assert written - by_other_producers | by_clients == topics.READ_COMMITTED
