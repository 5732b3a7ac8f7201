"""Checks of brokers, topics, rights and clocks: facts in, findings out. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from kvlane.app.audit.diagnosis.facts import Facts, FleetSample, Unread
from kvlane.app.audit.diagnosis.findings import Finding, finding
from kvlane.streams.kafka.broker_state import BrokerState
from kvlane.streams.kafka.provision import DEFAULT_REPLICATION, REPLICATION, TopicState
from kvlane.streams.ports import Partition
from kvlane.streams.records import Deployment

MAX_AHEAD_MS = 5_000
"""Difference of clocks that is shown: deadlines and ages in displays are wrong by as much."""
_NO_LOSS = frozenset({
    "cleanup.policy", "message.timestamp.type", "unclean.leader.election.enable", "retention.bytes",
})  # fmt: skip
"""Settings of topics whose change loses records, or falsifies their times."""
MIN_INSYNC = "min.insync.replicas"
_AT_LEAST = frozenset({"retention.ms", "max.message.bytes", MIN_INSYNC})
"""Settings that may be larger."""


def check_connection(facts: Facts) -> Iterator[Finding]:
    brokers = facts.brokers
    if not isinstance(brokers, Unread):
        return
    name = "broker-refuses" if brokers.error == "AccessDenied" else "broker-unreachable"
    if brokers.error == "WrongPort":
        name = "broker-connection"
    yield finding("broker", name, facts.servers, brokers.reason, brokers.action)


def check_brokers(facts: Facts) -> Iterator[Finding]:
    brokers = facts.brokers
    assert isinstance(brokers, BrokerState)
    if not brokers.is_kafka_4:
        yield finding(
            "replicas", "broker-version", facts.servers,
            "a broker is older than Kafka 4.0; kvlane is tested with Kafka 4.2",
        )  # fmt: skip
    for source in _some(s for s, leader in brokers.leaders.items() if leader < 0):
        yield finding(
            "replicas", "partition-without-leader", source, "no client can read or write it"
        )
    for source in _some(brokers.lagging):
        yield finding("replicas", "replica-behind", source, "a replica is not in sync")


def _some(sources: Iterable[Partition]) -> list[str]:
    """Partitions by topic, as text: `requests[0, 3]`."""
    by_topic: dict[str, list[int]] = defaultdict(list)
    for source in sources:
        by_topic[source.topic].append(source.partition)
    return [f"{topic}{sorted(numbers)}" for topic, numbers in sorted(by_topic.items())]


def check_rights(facts: Facts) -> Iterator[Finding]:
    assert not isinstance(facts.denied, Unread)
    for right in facts.denied:
        yield finding(
            "rights", "right-missing", f"{right.resource} {right.name}",
            f"the role {right.role} needs the right {right.operation}, which these credentials "
            "lack",
        )  # fmt: skip


def check_topics(facts: Facts) -> Iterator[Finding]:
    assert not isinstance(facts.topics, Unread)
    deployment = facts.deployment
    made = deployment.partitions if isinstance(deployment, Deployment) else {}
    for topic in facts.topics:
        if not topic.exists:
            yield finding("topics", "topic-missing", topic.name, "does not exist")
            continue
        expected = made.get(topic.name, topic.expected_partitions)
        if topic.partitions != expected:
            yield finding(
                "topics", "topic-partitions", topic.name,
                f"has {topic.partitions} partitions and should have {expected}: keys map to other "
                "partitions",
            )  # fmt: skip
        yield from _settings_of(topic)


def _settings_of(topic: TopicState) -> Iterator[Finding]:
    for name, (value, should) in topic.differing_configs.items():
        about, words = topic.name, f"{name} is {value or 'unknown'}, should be {should}"
        if name == REPLICATION:
            if int(value) < int(should):
                yield finding("topics", "topic-replicas", about, words)
            continue
        is_number = value.lstrip("-").isdecimal()
        if name in _AT_LEAST and is_number:
            if int(value) == -1 or int(value) >= int(should):
                continue
            yield finding("topics", "topic-loses-records", about, words)
        else:
            kind = "topic-loses-records" if name in _NO_LOSS else "topic-setting"
            yield finding("topics", kind, about, words)


def check_copies(facts: Facts) -> Iterator[Finding]:
    """The number of replicas that have to acknowledge a record."""
    assert not isinstance(facts.topics, Unread)
    existing = [topic for topic in facts.topics if topic.exists]
    if not existing:
        yield Finding("skipped", "copies", "copies", message="no topic exists")
    for topic in existing:
        if topic.min_insync > topic.replicas:
            yield finding(
                "copies", "topic-unwritable", topic.name,
                f"{MIN_INSYNC} is {topic.min_insync} and a partition has {topic.replicas} "
                "replicas, so no record is acknowledged",
            )  # fmt: skip
        elif topic.min_insync == 1 and topic.replicas >= DEFAULT_REPLICATION:
            yield finding(
                "copies", "acknowledged-once", topic.name,
                f"{MIN_INSYNC} is 1, so a record can be lost with one broker",
            )  # fmt: skip


def check_deployment(facts: Facts) -> Iterator[Finding]:
    deployment = facts.deployment
    if deployment is None:
        yield finding(
            "deployment", "deployment-missing", "registry",
            "has no record of the deployment, so processes cannot compare their settings with it",
        )  # fmt: skip
        return
    assert isinstance(deployment, Deployment)
    if deployment.lanes != facts.lanes:
        yield finding(
            "deployment", "lanes-differ", "KVLANE_LANES",
            f"is {facts.lanes} here, and the deployment was created with {deployment.lanes} lanes",
            f"Set KVLANE_LANES={deployment.lanes} in all processes.",
        )  # fmt: skip


def check_clocks(facts: Facts) -> Iterator[Finding]:
    sample, brokers = facts.fleet, facts.brokers
    assert isinstance(sample, FleetSample)
    if not sample.ahead_ms:
        yield Finding("skipped", "clocks", "clocks", message="no record arrived in this time")
        return
    ahead: dict[str, int] = {}
    for source, ms in sample.ahead_ms.items():
        name = _leader_of(brokers, source)
        ahead[name] = max(ms, ahead.get(name, ms))
    for name, ms in sorted(ahead.items()):
        if abs(ms) > MAX_AHEAD_MS:
            way = "ahead of" if ms > 0 else "behind"
            yield finding(
                "clocks", "broker-clock", name,
                f"is {abs(ms) / 1000:.1f} s {way} this machine",
            )  # fmt: skip


def _leader_of(brokers: BrokerState | Unread, source: Partition) -> str:
    if isinstance(brokers, Unread):
        return "the broker"
    node = brokers.leaders.get(source, -1)
    return f"broker {node} ({brokers.brokers[node]})" if node in brokers.brokers else "the broker"


def check_records(facts: Facts) -> Iterator[Finding]:
    sample = facts.fleet
    if isinstance(sample, Unread):
        if sample.error == "NewerRecord":
            yield finding("records", "newer-record", "the log", sample.reason)
        else:
            yield Finding("skipped", "records", "records", message=sample.reason)
    elif sample.malformed:
        yield finding(
            "records", "malformed-records", "the log",
            f"{sample.malformed} records since --since cannot be decoded",
        )  # fmt: skip
