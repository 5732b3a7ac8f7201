"""Tests of the ways of getting a broker that this machine has: records go in and come out again."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from kvlane.streams.brokers.broker import ExternalBroker
from kvlane.streams.brokers.broker_factory import Broker, JvmBroker, Kind, java_tool, obtain_broker
from kvlane.streams.brokers.port_probe import query_metadata
from kvlane.streams.errors import BrokerUnavailable
from tests.brokers import BrokerUsage, requested_kind

CONSOLE_CONSUMER = "org.apache.kafka.tools.consumer.ConsoleConsumer"


async def make_topic(broker: Broker, name: str, replication: int = 1) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    await admin.start()
    try:
        answer = await admin.create_topics([NewTopic(name, 1, replication)])
        assert [error for _, error, *_ in answer.topic_errors] == [0]
    finally:
        await admin.close()


async def send(broker: Broker, topic: str, count: int) -> None:
    async with AIOKafkaProducer(
        bootstrap_servers=broker.bootstrap_servers, enable_idempotence=True
    ) as producer:
        for number in range(count):
            value = f"value-{number}".encode()
            header = ("kind", b"Chunk")
            await producer.send_and_wait(topic, value, key=b"key", headers=[header])


async def read(broker: Broker, topic: str, count: int) -> list[bytes]:
    async with AIOKafkaConsumer(
        topic, bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest"
    ) as consumer:
        values: list[bytes] = []
        async with asyncio.timeout(20):
            while len(values) < count:
                for records in (await consumer.getmany(timeout_ms=500)).values():
                    values += [record.value for record in records]
    return values


@pytest.fixture(params=["env", "docker", "jvm"])
def each_broker(request: pytest.FixtureRequest, broker_ledger: BrokerUsage) -> Iterator[Broker]:
    """Every kind that this machine has; one that was asked for by name must be there."""
    kind: Kind = request.param
    servers = os.environ.get("KVLANE_BOOTSTRAP_SERVERS", "")
    try:
        broker = obtain_broker(kind, bootstrap_servers=servers, report=lambda _: None)
    except BrokerUnavailable as reason:
        sent = requested_kind() == kind or (kind == "env" and servers)
        if sent:
            raise
        broker_ledger.missing[kind] = str(reason)
        pytest.skip(str(reason))
    with broker:
        broker_ledger.count_test(broker)
        yield broker


@pytest.mark.kafka
async def test_records_come_out_as_they_went_in(each_broker: Broker, topic_prefix: str) -> None:
    topic = f"{topic_prefix}records"
    await make_topic(each_broker, topic)
    await send(each_broker, topic, 20)
    assert await read(each_broker, topic, 20) == [f"value-{n}".encode() for n in range(20)]


async def test_topics_are_not_made_by_accident(kafka: Broker, topic_prefix: str) -> None:
    topic = f"{topic_prefix}nobody-made-this"
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
    await admin.start()
    try:
        await admin.describe_topics([topic])
        assert topic not in await admin.list_topics()
    finally:
        await admin.close()


async def test_java_console_consumer_reads_keys_and_headers(
    kafka: Broker, topic_prefix: str
) -> None:
    topic = f"{topic_prefix}console"
    await make_topic(kafka, topic)
    await send(kafka, topic, 2)
    command = java_tool(
        CONSOLE_CONSUMER,
        *("--bootstrap-server", kafka.bootstrap_servers, "--topic", topic),
        *("--from-beginning", "--max-messages", "2", "--timeout-ms", "20000"),
        *("--formatter-property", "print.key=true", "--formatter-property", "print.headers=true"),
    )
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=40, check=False
    )
    assert done.stdout.splitlines() == ["kind:Chunk\tkey\tvalue-0", "kind:Chunk\tkey\tvalue-1"], (
        done.stderr
    )


async def test_cluster_keeps_records_when_a_node_is_killed(
    kafka_cluster: JvmBroker, topic_prefix: str
) -> None:
    topic = f"{topic_prefix}kept"
    await make_topic(kafka_cluster, topic, replication=3)
    await send(kafka_cluster, topic, 5)
    victim = kafka_cluster.node(2)
    await asyncio.to_thread(victim.kill)
    try:
        assert len(await read(kafka_cluster, topic, 5)) == 5
    finally:
        await asyncio.to_thread(victim.start)
    await asyncio.to_thread(victim.wait_ready, brokers=3)


async def test_paused_node_is_silent_until_it_is_resumed(kafka_cluster: JvmBroker) -> None:
    victim = kafka_cluster.node(3)
    victim.pause()
    try:
        assert query_metadata("127.0.0.1", victim.port, timeout_s=0.5) is None
        assert victim.is_alive
    finally:
        victim.resume()
    await asyncio.to_thread(victim.wait_ready, brokers=3)


def test_given_servers_that_do_not_answer_are_an_error() -> None:
    with pytest.raises(BrokerUnavailable, match="none of the given servers answers"):
        ExternalBroker("127.0.0.1:1", deadline_s=0.1).start()


def test_hanging_docker_daemon_times_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "docker.sock"))
        silent.listen()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path / 'docker.sock'}")
        with pytest.raises(BrokerUnavailable, match="no Docker daemon answers"):
            obtain_broker("docker", report=lambda _: None)


def test_missing_docker_and_java_selects_the_memory_log_with_a_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path / 'docker.sock'}")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    output: list[str] = []
    with obtain_broker("auto", report=output.append) as broker:
        assert broker.kind == "memory"
    assert [line.partition(":")[0] for line in output] == [
        "not docker",
        "not jvm",
        "no Kafka can be had here",
    ]


def test_docker_cannot_start_a_cluster() -> None:
    with pytest.raises(BrokerUnavailable, match="JVMs only"):
        obtain_broker("docker", brokers=3, report=lambda _: None)


def test_missing_java_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(BrokerUnavailable, match="apt-get install openjdk-17-jre-headless"):
        obtain_broker("jvm", report=lambda _: None)
