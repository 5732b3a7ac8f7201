"""A broker that asks who we are: wrong credentials and missing rights are no outage."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest

from streams.brokers.choice import LOOPBACK, free_ports
from streams.brokers.local import java_tool, obtain
from streams.clock import SystemClock
from streams.connection import Connection
from streams.errors import BrokerUnavailable, Denied
from streams.follow import Follower
from streams.kafka.log import KafkaLog
from streams.outbox import Outbox
from streams.ports import Entry, Partition
from streams.provision import create, describe
from streams.records import Fencing
from streams.topics import LEDGER, PROMPTS, REGISTRY, REQUESTS
from tests.tally import Tally

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


class Guarded(NamedTuple):
    """One broker: through `servers` anybody may do anything, through `guarded` a guest may
    see the topics and write prompts, no more."""

    servers: str
    guarded: str


@pytest.fixture(scope="module")
def broker() -> Iterator[Guarded]:
    try:
        broker = obtain("jvm", report=lambda _: None)
    except BrokerUnavailable as reason:
        pytest.fail(f"no broker: {reason}", pytrace=False)
    with broker:
        node = broker.node(1)
        node.kill()
        guarded = f"{LOOPBACK}:{free_ports(1)[0]}"
        had = node._settings
        node._settings = had | {
            "listeners": f"{had['listeners']},GUARDED://{guarded}",
            "advertised.listeners": f"{had['advertised.listeners']},GUARDED://{guarded}",
            "listener.security.protocol.map": f"{had['listener.security.protocol.map']}"
            ",GUARDED:SASL_PLAINTEXT",
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.guarded.plain.sasl.jaas.config": "org.apache.kafka.common.security."
            'plain.PlainLoginModule required user_guest="known";',
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
        }
        node.start()
        asyncio.run(_make_topics(broker.bootstrap_servers))
        for right in (("Describe", "*"), ("Write", "kvlane.prompts")):
            _allow_guest(broker.bootstrap_servers, *right)
        yield Guarded(broker.bootstrap_servers, guarded)


def _allow_guest(servers: str, operation: str, topic: str) -> None:
    tool = java_tool(
        "org.apache.kafka.tools.AclCommand", "--bootstrap-server", servers,
        "--add", "--allow-principal", "User:guest", "--operation", operation, "--topic", topic,
    )  # fmt: skip
    subprocess.run(tool, check=True, capture_output=True, timeout=60)


async def _make_topics(servers: str) -> None:
    log = KafkaLog(Connection(servers, "operator"))
    await log.start()
    await create(log, lanes=2, replication=1, min_insync=1)
    await log.close()


def as_guest(broker: Guarded, password: str = "known") -> KafkaLog:
    return KafkaLog(
        Connection(
            broker.guarded,
            "guest",
            security_protocol="SASL_PLAINTEXT",
            sasl_mechanism="PLAIN",
            sasl_username="guest",
            sasl_password=password,
            request_timeout_ms=2000,
            session_timeout_ms=3000,
        )
    )


@asynccontextmanager
async def guest(broker: Guarded) -> AsyncIterator[KafkaLog]:
    log = as_guest(broker)
    await log.start()
    try:
        yield log
    finally:
        await log.close()


async def test_wrong_password_is_named(broker: Guarded) -> None:
    with pytest.raises(Denied, match=r"(?i)authentication failed"):
        await as_guest(broker, "wrong").start()


async def test_mechanism_that_the_broker_does_not_take_is_named(broker: Guarded) -> None:
    connection = Connection(
        broker.guarded, "guest", security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="SCRAM-SHA-256", sasl_username="guest", sasl_password="known",
    )  # fmt: skip
    with pytest.raises(Denied, match="UnsupportedSaslMechanism"):
        await KafkaLog(connection).start()


async def append(log: KafkaLog) -> None:
    await log.append(LEDGER, Entry(b"key", b"value"), 0)


async def append_batch(log: KafkaLog) -> None:
    await log.append_batch(LEDGER, 0, [Entry(b"key", b"value")])


async def persist(log: KafkaLog) -> None:
    await Outbox(log, SystemClock()).persist(LEDGER, "a", Fencing(id="a", attempt=1))


async def read(log: KafkaLog) -> None:
    reader = log.reader()
    reader.assign({Partition(REGISTRY, 0): 0})
    while True:
        await reader.poll(1.0)


async def follow(log: KafkaLog) -> None:
    await Follower(log, Tally(), [REGISTRY], SystemClock()).run()


class _Owner:
    def assigned(self, starts: object) -> None:
        raise AssertionError("a guest is given nothing")

    revoked = assigned


async def join(log: KafkaLog) -> None:
    member = log.member(REQUESTS, "router", _Owner())
    while True:
        await member.poll(1.0)


async def create_topics(log: KafkaLog) -> None:
    await create(log, lanes=2, replication=1, min_insync=1)


async def describe_topics(log: KafkaLog) -> None:
    await describe(log, lanes=2, replication=1, min_insync=1)


@pytest.mark.parametrize(
    "deed", [append, append_batch, persist, read, follow, join, create_topics, describe_topics]
)
async def test_what_a_guest_may_not_do_is_denied_and_not_repeated(
    broker: Guarded, deed: Callable[[KafkaLog], Awaitable[None]]
) -> None:
    async with guest(broker) as log, asyncio.timeout(10):
        with pytest.raises(Denied):
            await deed(log)


async def test_what_a_guest_may_do_works(broker: Guarded) -> None:
    async with guest(broker) as log:
        assert await log.end_offsets(LEDGER, [0]) == {0: 0}
        assert await log.append(PROMPTS, Entry(b"key", b"value"), 0)
