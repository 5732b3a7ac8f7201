"""State of the brokers, and the rights of these credentials, by requests that change nothing.

A right to write or read a topic is tested with a partition that no topic has: brokers check the
right first. So is that of a group with an unknown member, and that of a transactional id with an
unknown producer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaError
from aiokafka.protocol.admin import ApiVersionRequest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.group import HeartbeatRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import EndTxnRequest

from kvlane.streams.errors import BrokerUnavailable
from kvlane.streams.kafka.aiokafka_client import REFUSAL_ERRORS, to_access_denied
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.ports import Partition
from kvlane.streams.topics import GROUPS, AclRule

_DEADLINE_S = 5.0
_REFUSED = frozenset({29, 30, 53})
"""Error codes: no right to a topic, a group, a transactional id."""
_UNKNOWN = 2**31 - 1
"""Number of a partition that no topic has."""
_FETCH = 1
_KAFKA_4_FETCH = 4
"""Oldest version of a fetch that Kafka 4 answers; earlier releases answer 0, too."""


class BrokerState(NamedTuple):
    """The brokers by id as host:port, and the partitions of the deployment. `is_kafka_4`: every
    broker is Kafka 4.0 or newer. `leaders`: by partition, -1 without one; `lagging`: those with a
    replica that is not in sync."""

    brokers: dict[int, str]
    is_kafka_4: bool
    leaders: dict[Partition, int]
    lagging: frozenset[Partition]


async def read_broker_state(log: KafkaLog) -> BrokerState:
    """Raises BrokerUnavailable, AccessDenied."""
    async with _client(log, "the state of brokers") as client:
        metadata = await client.send(client.get_random_node(), MetadataRequest(topics=None))
        brokers = {node: f"{host}:{port}" for node, host, port, *_ in metadata.brokers}
        answers = await asyncio.gather(
            *(client.send(node, ApiVersionRequest()) for node in brokers)
        )
    oldest = [low for answer in answers for api, low, _ in answer.api_versions if api == _FETCH]
    leaders, lagging = {}, set()
    for _, name, _, partitions in metadata.topics:
        if not name.startswith(log.prefix):
            continue
        for _, number, leader, replicas, in_sync, *_ in partitions:
            source = Partition(name.removeprefix(log.prefix), number)
            leaders[source] = leader
            if len(in_sync) < len(replicas):
                lagging.add(source)
    is_kafka_4 = min(oldest, default=0) >= _KAFKA_4_FETCH
    return BrokerState(brokers, is_kafka_4, leaders, frozenset(lagging))


async def missing_rights(
    log: KafkaLog, rules: Sequence[AclRule], existing: Collection[str]
) -> list[AclRule]:
    """Those of the rules that these credentials lack, "All" and "" replaced by single rights, of
    topics by those that exist. Foreign topics are not tested. Raises BrokerUnavailable,
    AccessDenied."""
    single = [each for rule in rules for each in _single(rule, existing)]
    async with _client(log, "rights") as client:
        node = client.get_random_node()
        codes = await asyncio.gather(*(_code(client, node, log.prefix, each) for each in single))
    return [rule for rule, code in zip(single, codes, strict=True) if code in _REFUSED]


def _single(rule: AclRule, existing: Collection[str]) -> Iterator[AclRule]:
    if rule.is_foreign:
        return
    if rule.resource == "topic":
        for name in [rule.name] if rule.name else existing:
            if name in existing and rule.operation != "All":
                yield rule._replace(name=name)
            elif name in existing:
                yield rule._replace(name=name, operation="Read")
                yield rule._replace(name=name, operation="Write")
    elif rule.resource == "group":
        for name in [rule.name] if rule.name else GROUPS:
            yield rule._replace(name=name, operation="Read")
    elif rule.operation != "Describe":  # who may write may describe
        yield rule


async def _code(client: AIOKafkaClient, node: int, prefix: str, rule: AclRule) -> int:
    """The error code by which a broker answers a request that needs this right."""
    name = prefix + rule.name
    if rule.resource == "group":
        return int((await client.send(node, HeartbeatRequest(name, 0, "none"))).error_code)
    if rule.resource == "transactional-id":
        request = EndTxnRequest(name + "none", -1, -1, False)
        return int((await client.send(node, request)).error_code)
    if rule.operation == "Write":
        topics = [(name, [(_UNKNOWN, b"")])]
        answer = await client.send(node, ProduceRequest(None, 1, 1000, topics))
        return int(answer.topics[0][1][0][1])
    if rule.operation == "Read":
        wanted = [(name, [(_UNKNOWN, 0, 1)])]
        answer = await client.send(node, FetchRequest(0, 0, 1, 0, wanted))
        return int(answer.topics[0][1][0][1])
    topic = MetadataRequest(topics=[name], allow_auto_topic_creation=False)
    return int((await client.send(node, topic)).topics[0][0])


@asynccontextmanager
async def _client(log: KafkaLog, what: str) -> AsyncIterator[AIOKafkaClient]:
    client = AIOKafkaClient(**log.options)
    try:
        async with asyncio.timeout(_DEADLINE_S):
            await client.bootstrap()
            yield client
    except (KafkaError, TimeoutError) as e:
        if isinstance(e, REFUSAL_ERRORS):
            raise to_access_denied(e, what) from e
        raise BrokerUnavailable(f"no answer about {what}: {e!r}") from e
    finally:
        await client.close()
