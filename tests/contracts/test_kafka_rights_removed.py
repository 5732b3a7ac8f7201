"""Tests of TLS, SCRAM and the rights that `kvlane topics acls` prints: enough together, each one
needed.

One broker, a user for each role with exactly its rights. Each right is taken away once, and what it
is for is done as the client of the role does it: the error must name what is missing. Then a whole
deployment answers, every process as its own user, and what it leaves in topics and output is
searched for secrets and for the text of prompts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import shlex
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.admin import CreateAclsRequest, DeleteAclsRequest

from kvlane.app.collector import Collector
from kvlane.app.commands.topic_commands import _command
from kvlane.app.gateway import Gateway
from kvlane.app.indexer import Indexer
from kvlane.app.preprocessor import Preprocessor
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.app.worker import build as build_worker
from kvlane.streams.brokers.broker import LOOPBACK, free_ports
from kvlane.streams.brokers.broker_factory import JvmBroker, java_tool
from kvlane.streams.client import Client
from kvlane.streams.clock import SystemClock
from kvlane.streams.errors import AccessDenied, BrokerUnavailable, StreamError, TopicMismatch
from kvlane.streams.kafka.connection_options import SaslMechanism
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.kafka.provision import check_partitions, create_topics
from kvlane.streams.ports import Entry, Partition
from kvlane.streams.prompt import Prompt
from kvlane.streams.topics import GROUPS, TOPICS, AclRule, required_acls
from tests.contracts.test_kafka_rights import Owner
from tests.flows.test_access_sockets import certificate

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]

LANES = 2
RIGHTS = required_acls()
ROLES = sorted({right.role for right in RIGHTS})
TRIED = (
    RIGHTS
    if "KVLANE_TEST_LONG" in os.environ
    else [*{(right.role, right.operation, right.resource): right for right in RIGHTS}.values()]
)
"""Each takes about two seconds; `make test-docker` tries all."""
PASSWORD = "pw-c6a1f0e2-%s"
HASH_SECRET, STREAM_SECRET = "hash-secret-9f7e5d3c1b", "stream-secret-8e6c4a2b0d"
TEXT = "Zanzibar marmalade"
"""In every prompt."""
WAIT_S = 300.0
IMPLIED = ("transactional-id", "Describe")
RESOURCES = {"topic": 2, "group": 3, "transactional-id": 5}
PATTERNS = {"literal": 3, "prefixed": 4}
OPERATIONS = {"All": 2, "Read": 3, "Write": 4, "Describe": 8}
ALLOW = 3


class Secured(NamedTuple):
    """`open_servers`: for anybody, with all rights. `servers`: TLS and SCRAM, with rights."""

    open_servers: str
    servers: str
    ca: Path

    def settings(self, role: str, **more: Any) -> Settings:
        """Those of a process in this role."""
        return Settings(
            bootstrap_servers=self.servers, security_protocol="SASL_SSL", ssl_cafile=self.ca,
            sasl_mechanism=mechanism(role), sasl_username=role, sasl_password=PASSWORD % role,
            lanes=LANES, hash_secret=HASH_SECRET, stream_secret=STREAM_SECRET,
            request_timeout_ms=3000, **more,
        )  # fmt: skip


def mechanism(role: str) -> SaslMechanism:
    """SCRAM for one role: each user of it needs a run of a Java program."""
    return "SCRAM-SHA-512" if role == "client" else "PLAIN"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("tls")
    tls = certificate(folder)
    store = folder / "broker.pem"
    store.write_text(tls.key.read_text() + tls.certificate.read_text())
    try:
        broker = JvmBroker(report=lambda _: None).start()
    except BrokerUnavailable as reason:
        pytest.fail(f"no broker: {reason}", pytrace=False)
    with broker:
        node = broker.node(1)
        node.kill()
        secured = f"{LOOPBACK}:{free_ports(1)[0]}"
        had = node._settings
        modules = "org.apache.kafka.common.security"
        users = " ".join(f'user_{role}="{PASSWORD % role}"' for role in ROLES)
        plain = f"{modules}.plain.PlainLoginModule required {users};"
        scram = f"{modules}.scram.ScramLoginModule required;"
        node._settings = had | {
            "listeners": f"{had['listeners']},SECURED://{secured}",
            "advertised.listeners": f"{had['advertised.listeners']},SECURED://{secured}",
            "listener.security.protocol.map": f"{had['listener.security.protocol.map']}"
            ",SECURED:SASL_SSL",
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
            "listener.name.secured.plain.sasl.jaas.config": plain,
            "listener.name.secured.scram-sha-512.sasl.jaas.config": scram,
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(store),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
        }
        node.start()
        add_user(broker.bootstrap_servers, "client")
        asyncio.run(prepare(broker.bootstrap_servers))
        yield Secured(broker.bootstrap_servers, secured, tls.certificate)


def add_user(servers: str, role: str) -> None:
    tool = java_tool(
        "kafka.admin.ConfigCommand", "--bootstrap-server", servers, "--alter",
        "--entity-type", "users", "--entity-name", role,
        "--add-config", f"SCRAM-SHA-512=[iterations=4096,password={PASSWORD % role}]",
    )  # fmt: skip
    subprocess.run(tool, check=True, capture_output=True, timeout=200)


async def prepare(servers: str) -> None:
    log = KafkaLog(Settings(bootstrap_servers=servers).kafka_connection("operator"))
    await log.start()
    await create_topics(log, lanes=LANES, replication=1, min_insync=1)
    await log.close()
    async with administrator(servers) as admin:
        for right in RIGHTS:
            await grant(admin, right)


@asynccontextmanager
async def administrator(servers: str) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


def printed(right: AclRule) -> tuple[int, str, int, str, str, int, int]:
    """What the printed command for `kafka-acls.sh` asks of the broker."""
    words = shlex.split(" ".join(_command(right, "HOST:PORT", "kvlane.")))
    options = dict(zip(words[4::2], words[5::2], strict=True))
    [(resource, name)] = [(r, options[f"--{r}"]) for r in RESOURCES if f"--{r}" in options]
    return (
        RESOURCES[resource], name, PATTERNS[options["--resource-pattern-type"]],
        options["--allow-principal"], "*", OPERATIONS[options["--operation"]], ALLOW,
    )  # fmt: skip


async def grant(admin: AIOKafkaAdminClient, right: AclRule) -> None:
    answer = await admin._send_to_controller(CreateAclsRequest(*printed(right)))
    assert [code for code, _ in answer.creation_responses] == [0]


async def revoke(admin: AIOKafkaAdminClient, right: AclRule) -> None:
    answer = await admin._send_to_controller(DeleteAclsRequest(*printed(right)))
    [(code, message, matching)] = answer.filter_responses
    assert (code, len(matching)) == (0, 1), message


@asynccontextmanager
async def without(broker: Secured, right: AclRule) -> AsyncIterator[None]:
    async with administrator(broker.open_servers) as admin:
        await revoke(admin, right)
        try:
            yield
        finally:
            await grant(admin, right)


async def use(log: KafkaLog, right: AclRule) -> None:
    """What a process of the role does with a right."""
    if right.role == "operator" and right.resource == "topic":
        await create_topics(log, lanes=LANES, replication=1, min_insync=1)
    elif right.resource == "group":
        await join(log, right.name or "router")
    elif right.resource == "transactional-id":
        await log.transactional_writer(f"{right.name}0").open()
    elif right.operation == "Describe":
        await check_partitions(log, LANES)
    elif right.operation == "Write":
        await log.append(right.name, Entry(b"key", None), 0)
    else:
        reader = log.reader()
        reader.assign({Partition(right.name, 0): 0})
        try:
            for _ in range(3):
                await reader.poll(0.1)
        finally:
            await reader.close()


async def join(log: KafkaLog, group: str) -> None:
    owner = Owner()
    member = log.member(GROUPS[group], group, owner)
    try:
        while not owner.owned:
            await member.poll(0.2)
    finally:
        await member.close()


@asynccontextmanager
async def opened(broker: Secured, role: str) -> AsyncIterator[KafkaLog]:
    log = KafkaLog(broker.settings(role).kafka_connection(role))
    await log.start()
    try:
        yield log
    finally:
        await log.close()


def title(right: AclRule) -> str:
    return f"{right.role}-{right.operation}-{right.resource}-{right.name or 'any'}"


async def test_each_right_is_needed_and_its_absence_is_named(broker: Secured) -> None:
    """Roles share no right, so they are tried at once."""
    async with asyncio.TaskGroup() as group:
        for role in ROLES:
            group.create_task(miss_each_right(broker, role))


async def miss_each_right(broker: Secured, role: str) -> None:
    for right in TRIED:
        # Kafka implies Describe of a transactional id by Write.
        if right.role != role or (right.resource, right.operation) == IMPLIED:
            continue
        try:
            await miss(broker, right)
        except Exception as e:
            e.add_note(title(right))
            raise


async def miss(broker: Secured, right: AclRule) -> None:
    async with asyncio.timeout(WAIT_S):
        async with without(broker, right):
            while (error := await refusal(broker, right)) is None:
                pass  # the broker applies a change after it has acknowledged it
        assert right.name in str(error)
        while await refusal(broker, right) is not None:
            pass


async def refusal(broker: Secured, right: AclRule) -> StreamError | None:
    """The error of using a right; a topic without any right is not visible either."""
    try:
        async with opened(broker, right.role) as log:
            await use(log, right)
    except (AccessDenied, TopicMismatch) as e:
        return e
    return None


async def test_client_reads_and_writes_no_other_topic(broker: Secured) -> None:
    allowed = {(right.operation, right.name) for right in RIGHTS if right.role == "client"}
    denied = [
        AclRule("client", operation, "topic", topic.name)
        for topic in TOPICS
        for operation in ("Read", "Write")
        if (operation, topic.name) not in allowed
    ]

    async def wait_refused(right: AclRule) -> None:
        while await refusal(broker, right) is None:
            pass  # a refused fetch may come after the last poll

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        for right in denied:
            group.create_task(wait_refused(right))


async def test_whole_deployment_works_by_its_rights_and_leaks_nothing(
    broker: Secured, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "kvlane")
    builds: dict[str, Any] = {
        "worker": build_worker, "router": Router, "preprocessor": Preprocessor,
        "collector": Collector, "indexer": Indexer, "gateway": Gateway,
    }  # fmt: skip
    running: list[tuple[KafkaLog, ProcessContext, Any]] = []
    try:
        for role, build in builds.items():
            settings = broker.settings(
                role, http_port=0, indexer_port=0, worker_id="w", router_id="r",
                cache_dir=tmp_path, engine_speedup=20, snapshot_interval_s=0.5,
            )  # fmt: skip
            log = KafkaLog(settings.kafka_connection(role))
            ctx = ProcessContext(role, rng=random.Random(1))
            await log.start()
            await check_partitions(log, LANES)
            process = build(log, settings, ctx)
            running.append((log, ctx, process))
            await process.start()
        await ask(broker, running[-1][2].url)
        assert [ctx.error for _, ctx, _ in running] == [None] * len(running)
    finally:
        for log, ctx, process in reversed(running):
            if ctx.error is None:
                await process.stop()
            await ctx.cancel_tasks()
            await log.close()
    secrets = [HASH_SECRET, STREAM_SECRET, *(PASSWORD % role for role in ROLES)]
    for topic in TOPICS:
        content = await content_of(broker, f"kvlane.{topic.name}")
        found = [secret for secret in secrets if secret.encode() in content]
        assert not found, f"{topic.name} has {found}"
        if topic.name in {"prompts", "batch"}:  # what clients write
            assert TEXT.encode() in content, f"{topic.name} has no prompt: the search finds nothing"
        else:
            assert TEXT.encode() not in content, f"{topic.name} has the text of a prompt"
    output = caplog.text
    assert "caught up" in output, "nothing was logged: the search finds nothing"
    assert not [secret for secret in (*secrets, TEXT) if secret in output]


async def ask(broker: Secured, gateway: str) -> None:
    """A chat over HTTP, prompts of both classes on Kafka with results, and a broken one."""
    body = {"model": "demo", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 3}
    async with httpx.AsyncClient(base_url=gateway, timeout=WAIT_S) as http:
        (await http.post("/v1/chat/completions", json=body)).raise_for_status()
    async with opened(broker, "client") as log, Client(log, SystemClock()) as client:
        broken = b'{"kind": "chat", "body": {"messages": "%s"' % TEXT.encode()
        await log.append("prompts", Entry(None, broken), 0)
        for service_class in ("interactive", "batch"):
            prompt = Prompt(
                id=client.new_request_id(), body=body, result=True, service_class=service_class
            )
            await client.publish(prompt)
            assert (await client.result(prompt.id, WAIT_S)) is not None


async def content_of(broker: Secured, topic: str) -> bytes:
    """Keys and values of a topic."""
    consumer = AIOKafkaConsumer(  # not by a seek: the first reset to the end can come after it
        topic,
        bootstrap_servers=broker.open_servers,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
    )
    await consumer.start()
    try:
        ends = await consumer.end_offsets(consumer.assignment())
        content = b""
        async with asyncio.timeout(WAIT_S):
            while any([await consumer.position(p) < end for p, end in ends.items()]):
                for records in (await consumer.getmany(timeout_ms=200)).values():
                    content += b"".join((r.key or b"") + (r.value or b"") for r in records)
        return content
    finally:
        await consumer.stop()
