"""Tests of a broker with authentication: wrong credentials and missing rights are no outage."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.admin import CreateAclsRequest

from kvlane.app.commands.topic_commands import _command
from kvlane.streams.brokers.broker import LOOPBACK, free_ports
from kvlane.streams.brokers.broker_factory import JvmBroker, java_tool
from kvlane.streams.clock import SystemClock
from kvlane.streams.errors import AccessDenied, BrokerUnavailable
from kvlane.streams.kafka.broker_state import missing_rights
from kvlane.streams.kafka.connection_options import ConnectionOptions, SecurityProtocol
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.kafka.provision import create_topics, describe_topics
from kvlane.streams.ports import Entry, Partition
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Fencing
from kvlane.streams.topics import LEDGER, PROMPTS, REGISTRY, REQUESTS, AclRule, required_acls
from kvlane.streams.views.follower import Follower
from tests.harness.recording_view import RecordingView

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]


STORE_PASSWORD = "a-password"
TOPIC, LITERAL, WRITE, DESCRIBE, ALLOW = 2, 3, 4, 8, 3
"""Kafka's numbers for a kind of resource, a pattern, operations and a permission."""


class Guarded(NamedTuple):
    """One broker: through `servers` anybody may do anything, through `guarded` a guest may
    see the topics and write prompts, no more. `encrypted` requires TLS, and `hidden` advertises an
    address at which nothing listens."""

    servers: str
    guarded: str
    encrypted: str
    hidden: str


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    try:
        broker = JvmBroker(report=lambda _: None).start()
    except BrokerUnavailable as reason:
        pytest.fail(f"no broker: {reason}", pytrace=False)
    with broker:
        node = broker.node(1)
        node.kill()
        ports = free_ports(3)
        guarded, encrypted, hidden = (f"{LOOPBACK}:{port}" for port in ports)
        had = node._settings
        node._settings = had | {
            "listeners": f"{had['listeners']},GUARDED://{guarded},ENCRYPTED://{encrypted},"
            f"HIDDEN://{hidden}",
            "advertised.listeners": f"{had['advertised.listeners']},GUARDED://{guarded},"
            f"ENCRYPTED://{encrypted},HIDDEN://{LOOPBACK}:1",
            "listener.security.protocol.map": f"{had['listener.security.protocol.map']}"
            ",GUARDED:SASL_PLAINTEXT,ENCRYPTED:SSL,HIDDEN:PLAINTEXT",
            "listener.name.encrypted.ssl.keystore.type": "PKCS12",
            "listener.name.encrypted.ssl.keystore.location": str(
                _key_store(tmp_path_factory.mktemp("tls"))
            ),
            "listener.name.encrypted.ssl.keystore.password": STORE_PASSWORD,
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.guarded.plain.sasl.jaas.config": "org.apache.kafka.common.security."
            'plain.PlainLoginModule required user_guest="known" user_preprocessor="known";',
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
        }
        node.start()
        asyncio.run(_prepare(broker.bootstrap_servers))
        yield Guarded(broker.bootstrap_servers, guarded, encrypted, hidden)


def _key_store(folder: Path) -> Path:
    """A key with a certificate that it signed itself."""
    store = folder / "keys.p12"
    command = [
        "keytool", "-genkeypair", "-alias", "broker", "-keyalg", "EC", "-dname", "CN=broker",
        "-storetype", "PKCS12", "-keystore", str(store), "-storepass", STORE_PASSWORD,
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    return store


async def _prepare(servers: str) -> None:
    log = KafkaLog(ConnectionOptions(servers, "operator"))
    await log.start()
    await create_topics(log, lanes=2, replication=1, min_insync=1)
    await log.close()
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    for operation, topic in ((DESCRIBE, "*"), (WRITE, "kvlane.prompts")):
        right = CreateAclsRequest(TOPIC, topic, LITERAL, "User:guest", "*", operation, ALLOW)
        answer = await admin._send_to_controller(right)
        assert [code for code, _ in answer.creation_responses] == [0]
    await admin.close()


def opened_by(broker: Guarded, name: str, password: str = "known") -> KafkaLog:
    return KafkaLog(
        ConnectionOptions(
            broker.guarded,
            name,
            security_protocol="SASL_PLAINTEXT",
            sasl_mechanism="PLAIN",
            sasl_username=name,
            sasl_password=password,
            request_timeout_ms=2000,
            session_timeout_ms=3000,
        )
    )


@asynccontextmanager
async def opened(broker: Guarded, name: str) -> AsyncIterator[KafkaLog]:
    log = opened_by(broker, name)
    await log.start()
    try:
        yield log
    finally:
        await log.close()


async def test_wrong_password_is_named(broker: Guarded) -> None:
    with pytest.raises(AccessDenied, match=r"(?i)authentication failed") as raised:
        await opened_by(broker, "guest", "wrong").start()
    assert "KVLANE_SASL_PASSWORD" in raised.value.correction


async def test_unsupported_mechanism_is_named(broker: Guarded) -> None:
    connection = ConnectionOptions(
        broker.guarded, "guest", security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="SCRAM-SHA-256", sasl_username="guest", sasl_password="known",
    )  # fmt: skip
    with pytest.raises(AccessDenied, match="UnsupportedSaslMechanism"):
        await KafkaLog(connection).start()


@pytest.mark.parametrize(
    ("port", "protocol", "remedy"),
    [
        ("encrypted", "PLAINTEXT", "set KVLANE_SECURITY_PROTOCOL to SSL or SASL_SSL"),
        ("servers", "SSL", "set KVLANE_SECURITY_PROTOCOL to PLAINTEXT or SASL_PLAINTEXT"),
        ("encrypted", "SSL", "Set KVLANE_SSL_CAFILE to the authority"),
        ("guarded", "PLAINTEXT", "set KVLANE_SECURITY_PROTOCOL to SASL_PLAINTEXT"),
        ("hidden", "PLAINTEXT", "correct the broker's advertised.listeners"),
    ],
)
async def test_error_names_the_setting_that_differs_from_the_port(
    broker: Guarded, port: str, protocol: SecurityProtocol, remedy: str
) -> None:
    servers = getattr(broker, port)
    connection = ConnectionOptions(servers, "guest", protocol, request_timeout_ms=1000)
    with pytest.raises(BrokerUnavailable) as raised:
        await KafkaLog(connection).start()
    assert remedy in raised.value.correction
    assert servers in raised.value.correction


async def append(log: KafkaLog) -> None:
    await log.append(LEDGER, Entry(b"key", b"value"), 0)


async def append_batch(log: KafkaLog) -> None:
    await log.append_batch(LEDGER, 0, [Entry(b"key", b"value")])


async def append_many(log: KafkaLog) -> None:
    await log.append_many(LEDGER, {0: [Entry(b"key", b"value")]})[0]


async def persist(log: KafkaLog) -> None:
    await RecordPublisher(log, SystemClock()).publish(LEDGER, "a", Fencing(id="a", attempt=1))


async def read(log: KafkaLog) -> None:
    reader = log.reader()
    reader.assign({Partition(REGISTRY, 0): 0})
    while True:
        await reader.poll(1.0)


async def follow(log: KafkaLog) -> None:
    await Follower(log, RecordingView(), [REGISTRY], SystemClock()).run()


class Owner:
    """Resumes nothing; writes down what it is given."""

    def __init__(self) -> None:
        self.owned: set[int] = set()

    def assigned(self, starts: Mapping[int, int]) -> None:
        self.owned |= starts.keys()

    def revoked(self, partitions: frozenset[int]) -> None:
        self.owned -= partitions


async def join(log: KafkaLog) -> None:
    member = log.member(REQUESTS, "router", Owner())
    while True:
        await member.poll(1.0)


async def make_topics(log: KafkaLog) -> None:
    await create_topics(log, lanes=2, replication=1, min_insync=1)


async def list_topics(log: KafkaLog) -> None:
    await describe_topics(log, lanes=2, replication=1, min_insync=1)


@pytest.mark.parametrize(
    "deed",
    [append, append_batch, append_many, persist, read, follow, join, make_topics, list_topics],
)
async def test_forbidden_operations_of_a_role_are_denied_without_retry(
    broker: Guarded, deed: Callable[[KafkaLog], Awaitable[None]]
) -> None:
    async with opened(broker, "guest") as log, asyncio.timeout(200):
        with pytest.raises(AccessDenied):
            await deed(log)


def test_printed_commands_grant_rights_to_each_kind_of_resource(broker: Guarded) -> None:
    for right in {right.resource: right for right in required_acls()}.values():
        command = _command(right, broker.servers, "kvlane.")[1:]
        tool = java_tool("org.apache.kafka.tools.AclCommand", *command)
        done = subprocess.run(tool, check=True, capture_output=True, text=True, timeout=200)
        assert "Adding ACLs" in done.stdout
        assert right.name in done.stdout


async def test_permitted_operations_of_a_role_succeed(broker: Guarded) -> None:
    async with opened(broker, "guest") as log:
        assert await log.end_offsets(LEDGER, [0]) == {0: 0}
        assert await log.append(PROMPTS, Entry(b"key", b"value"), 0)


async def test_missing_rights_are_found_without_the_use_of_any(broker: Guarded) -> None:
    had = [
        AclRule("guest", "Describe", "topic", ""), AclRule("guest", "Write", "topic", PROMPTS),
    ]  # fmt: skip
    lacks = [
        AclRule("guest", "Read", "topic", PROMPTS), AclRule("guest", "Write", "topic", LEDGER),
        AclRule("guest", "Read", "group", "indexer"),
        AclRule("guest", "Write", "transactional-id", "collector-", is_prefix=True),
    ]  # fmt: skip
    async with opened(broker, "guest") as log:
        before = await log.end_offsets(PROMPTS, [0])
        assert await missing_rights(log, [*had, *lacks], [PROMPTS, LEDGER]) == lacks
        assert await log.end_offsets(PROMPTS, [0]) == before
        operator = AclRule("operator", "All", "topic", "")
        missing = await missing_rights(log, [operator], [LEDGER])
        assert [rule.operation for rule in missing] == ["Read", "Write"]
