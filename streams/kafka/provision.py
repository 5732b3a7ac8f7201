"""Provisioning: creates the topics of the table and the Deployment record, and reports differences.
Never changes or deletes a topic: the number of partitions decides the partition of a key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import aclosing, asynccontextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    InvalidReplicationFactorError,
    KafkaError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
    for_code,
)

from kvlane.streams.clock import Clock, SystemClock
from kvlane.streams.codecs import decode, encode
from kvlane.streams.errors import (
    BrokerUnavailable,
    Malformed,
    PositionLost,
    RecordError,
    TopicMismatch,
)
from kvlane.streams.kafka.aiokafka_client import REFUSAL_ERRORS, RETRY_S, to_access_denied
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.ports import Log, Partition
from kvlane.streams.reading.range_reader import read_range
from kvlane.streams.records import Deployment
from kvlane.streams.topics import (
    LEDGER,
    PER_LANE,
    REGISTRY,
    REQUESTS,
    RESPONSES,
    TOPICS,
    TOPICS_BY_NAME,
    Topic,
)

logger = logging.getLogger(__name__)

DEPLOYMENT = "deployment"

REPLICATION = "replication.factor"
"""Name of the number of replicas in `TopicState.differing_configs`."""
DEFAULT_REPLICATION = 3
"""One broker may fail while another one is restarted."""

TOPIC_CHECK_INTERVAL_S = 10.0
_DEADLINE_S = 30.0
_OF_LANES = frozenset({REQUESTS, LEDGER, RESPONSES})
"""Topics that have as many partitions as there are lanes under all settings."""
_OF_THE_TABLE: Mapping[str, int] = MappingProxyType({})


class TopicState(NamedTuple):
    """The state of one topic of the table. Names are short; `partitions` 0: missing. `replicas`: of
    the partition with the fewest, of which `min_insync` have to acknowledge a record."""

    name: str
    exists: bool
    partitions: int
    expected_partitions: int
    differing_configs: Mapping[str, tuple[str, str]]  # name: (is, should)
    replicas: int = 0
    min_insync: int = 0

    @property
    def is_as_expected(self) -> bool:
        return self.partitions == self.expected_partitions and not self.differing_configs


async def create_topics(
    log: KafkaLog,
    *,
    lanes: int,
    replication: int | None,
    min_insync: int,
    partitions: Mapping[str, int] = _OF_THE_TABLE,
    retention_ms: Mapping[str, int] = _OF_THE_TABLE,
) -> list[TopicState]:
    """Create missing topics, then the Deployment record, once; returns the state of all topics.

    `replication`: None: `DEFAULT_REPLICATION`, or fewer where there are fewer brokers.
    `partitions`, `retention_ms`: override the table for new deployments. Raises BrokerUnavailable,
    AccessDenied, and TopicMismatch if a topic has another number of partitions: then nothing is
    created.
    """
    async with _admin(log) as admin:
        existing = await _partitions(admin, log.prefix)
        expected = expected_partitions(lanes, partitions) | await _recorded(log, existing)
        for name, replicas in existing.items():
            _check_count(name, len(replicas), expected.get(name, len(replicas)))
        missing = [t for t in _kept_for(retention_ms) if t.name not in existing]
        if missing:
            copies = replication or await _default_replication(admin)
            if min_insync > copies:
                raise TopicMismatch(
                    f"KVLANE_MIN_INSYNC_REPLICAS={min_insync} exceeds the {copies} replicas of "
                    "each partition, so nothing could be written: lower it, or add brokers"
                )
            await _create(admin, log.prefix, missing, expected, copies, min_insync)
            await _wait_until_led(admin, log.prefix)
    await check_partitions(log, lanes, partitions)
    if await read_deployment(log) is None:
        record = Deployment(lanes=lanes, partitions=expected)
        await log.append(REGISTRY, encode(record, DEPLOYMENT), 0)
    return await describe_topics(
        log, lanes=lanes, replication=replication, min_insync=min_insync, partitions=partitions,
        retention_ms=retention_ms,
    )  # fmt: skip


async def describe_topics(
    log: KafkaLog,
    *,
    lanes: int,
    replication: int | None,
    min_insync: int,
    partitions: Mapping[str, int] = _OF_THE_TABLE,
    retention_ms: Mapping[str, int] = _OF_THE_TABLE,
) -> list[TopicState]:
    """Compare every topic of the deployment with the broker's; `partitions` (of a deployment that
    does not exist yet) and `retention_ms` override the table. Raises BrokerUnavailable,
    AccessDenied."""
    async with _admin(log) as admin:
        existing = await _partitions(admin, log.prefix)
        expected = expected_partitions(lanes, partitions) | await _recorded(log, existing)
        replication = replication or await _default_replication(admin)
        names = [t.name for t in TOPICS if t.name in existing]
        settings = await _settings(admin, log.prefix, names)
    states = []
    for topic in _kept_for(retention_ms):
        # A topic can be deleted between the two answers; without settings it does not exist.
        replicas = existing.get(topic.name, []) if topic.name in settings else []
        differing: dict[str, tuple[str, str]] = {}
        if replicas:
            for name, should in topic.config(min_insync).items():
                value = settings[topic.name].get(name, "")
                if value != should:
                    differing[name] = (value, should)
            if min(replicas) != replication:
                differing[REPLICATION] = (str(min(replicas)), str(replication))
        in_sync = int(settings[topic.name].get("min.insync.replicas") or 0) if replicas else 0
        states.append(
            TopicState(
                topic.name, bool(replicas), len(replicas), expected[topic.name], differing,
                min(replicas, default=0), in_sync,
            )
        )  # fmt: skip
    return states


async def check_partitions(
    log: Log, lanes: int, partitions: Mapping[str, int] = _OF_THE_TABLE
) -> None:
    """Check at start that process and deployment agree about the topics, by the Deployment record,
    else the table with `partitions` over it. Raises TopicMismatch, BrokerUnavailable."""
    expected = expected_partitions(lanes, partitions)
    found = {name: await log.partitions(name) for name in expected}
    if (made := await read_deployment(log)) is not None:
        if made.lanes != lanes:
            raise TopicMismatch(
                f"this deployment was created with {made.lanes} lanes, this process expects "
                f"{lanes}: set KVLANE_LANES={made.lanes}"
            )
        for name, count in made.partitions.items():
            if found.get(name, count) != count:
                raise TopicMismatch(
                    f"topic {name} has {found[name]} partitions and was created with {count}: keys "
                    "map to other partitions now, so its records are not found. Delete and "
                    "recreate the topics, or use another prefix (KVLANE_TOPIC_PREFIX)"
                )
        expected |= made.partitions
    for name, count in found.items():
        _check_count(name, count, expected[name])


async def watch_topics(
    log: KafkaLog, clock: Clock, every_s: float = TOPIC_CHECK_INTERVAL_S
) -> None:
    """Check periodically that the topics still exist, until cancelled. Raises TopicMismatch for one
    missing, or with another number of partitions, twice in a row: a restarted broker may not list
    all yet."""
    before: dict[str, int] = {}
    differed: dict[str, int] = {}
    while True:
        try:
            found = {t: n for t, n in (await log.refresh_topics()).items() if t in TOPICS_BY_NAME}
        except BrokerUnavailable as e:
            logger.warning("cannot list topics: %s", e)
        else:
            before = before or found
            differ = {n: found.get(n, 0) for n, count in before.items() if found.get(n, 0) != count}
            for name in sorted(differ.keys() & differed.keys()):
                raise TopicMismatch(
                    f"topic {log.prefix}{name} had {before[name]} partitions and has "
                    f"{differ[name]} now: its records are lost. `kvlane topics create` creates "
                    "missing topics; then start the processes again"
                )
            differed = differ
        await clock.sleep(every_s)


async def read_deployment(log: Log) -> Deployment | None:
    """The Deployment record, None before there is one. Raises BrokerUnavailable."""
    registry = Partition(REGISTRY, 0)
    ends = {registry: (await log.end_offsets(REGISTRY, [0]))[0]}
    starts = {registry: (await log.start_offsets(REGISTRY, [0]))[0]}
    pieces = read_range(log, SystemClock(), starts, ends, timeout_s=_DEADLINE_S)
    found = None
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                for record in piece.records:
                    if record.key == DEPLOYMENT.encode():
                        try:
                            decoded = decode(record)
                        except Malformed as e:
                            logger.warning("malformed deployment record @%d: %s", record.offset, e)
                            continue
                        found = decoded if isinstance(decoded, Deployment) else None
    except (TimeoutError, PositionLost) as e:
        raise BrokerUnavailable(f"cannot read the registry: {e!r}") from e
    except RecordError as e:
        raise TopicMismatch(f"the deployment was made by another version: {e}") from e
    return found


def expected_partitions(
    lanes: int, partitions: Mapping[str, int] = _OF_THE_TABLE
) -> dict[str, int]:
    """Partitions by topic, in the order of the table, which `partitions` overrides."""
    return {
        t.name: partitions.get(t.name, lanes if t.partitions == PER_LANE else t.partitions)
        for t in TOPICS
    }


def _kept_for(retention_ms: Mapping[str, int]) -> list[Topic]:
    """The table, with other retentions."""
    return [t._replace(retention_ms=retention_ms.get(t.name, t.retention_ms)) for t in TOPICS]


async def _recorded(log: Log, existing: Collection[str]) -> dict[str, int]:
    """Partitions that the deployment was created with, without those of lanes; {} before that."""
    made = await read_deployment(log) if REGISTRY in existing else None
    fixed = {t.name for t in TOPICS if t.name not in _OF_LANES}
    return {} if made is None else {n: k for n, k in made.partitions.items() if n in fixed}


def _check_count(name: str, found: int, expected: int) -> None:
    if found == expected:
        return
    if name in _OF_LANES:
        remedy = f"set KVLANE_LANES={found}, or create a deployment of its own under another prefix"
    else:
        remedy = "delete it and run `kvlane topics create`, or use another prefix"
    raise TopicMismatch(
        f"topic {name} has {found} partitions, this process expects {expected}: {remedy} "
        "(KVLANE_TOPIC_PREFIX)"
    )


async def count_lagging_partitions(log: KafkaLog) -> int:
    """Number of partitions with a replica that is not in sync. Raises AccessDenied,
    BrokerUnavailable."""
    async with _admin(log) as admin:
        topics = await admin.describe_topics()
    own = (topic for topic in topics if topic["topic"].startswith(log.prefix))
    return sum(len(p["isr"]) < len(p["replicas"]) for topic in own for p in topic["partitions"])


@asynccontextmanager
async def _admin(log: KafkaLog) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(**log.options)
    try:
        async with asyncio.timeout(_DEADLINE_S):
            await admin.start()
            yield admin
    except (KafkaError, TimeoutError) as e:
        if isinstance(e, REFUSAL_ERRORS):
            raise to_access_denied(e, "administering topics") from e
        raise BrokerUnavailable(f"cannot administer topics: {e!r}") from e
    finally:
        await admin.close()


async def _partitions(admin: AIOKafkaAdminClient, prefix: str) -> dict[str, list[int]]:
    """Replica counts of the partitions of every topic of this deployment."""
    # Lists all topics: a broker may create one that is requested by name.
    topics = await admin.describe_topics()
    return {
        topic["topic"].removeprefix(prefix): [len(p["replicas"]) for p in topic["partitions"]]
        for topic in topics
        if topic["topic"].startswith(prefix) and not topic["error_code"]
    }


async def _create(
    admin: AIOKafkaAdminClient,
    prefix: str,
    topics: list[Topic],
    partitions: Mapping[str, int],
    replication: int,
    min_insync: int,
) -> None:
    await _wait_for_controller(admin)
    answer = await admin.create_topics(
        [
            NewTopic(
                prefix + t.name, partitions[t.name], replication, topic_configs=t.config(min_insync)
            )
            for t in topics
        ]
    )
    for name, code, message, *_ in answer.topic_errors:
        error = for_code(code)
        if issubclass(error, REFUSAL_ERRORS):
            raise to_access_denied(error(message), f"creating topic {name}")
        if code and error is not TopicAlreadyExistsError:  # another process created it
            reason = message or error.__name__
            if error is InvalidReplicationFactorError:
                brokers = await _count_brokers(admin)
                reason += (
                    f" Set KVLANE_REPLICATION_FACTOR to {brokers} at most, the number of brokers, "
                    "or leave it out"
                )
            raise TopicMismatch(f"topic {name} cannot be created: {reason}")


async def _count_brokers(admin: AIOKafkaAdminClient) -> int:
    return len((await admin.describe_cluster())["brokers"])


async def _default_replication(admin: AIOKafkaAdminClient) -> int:
    return min(DEFAULT_REPLICATION, await _count_brokers(admin))


async def _wait_for_controller(admin: AIOKafkaAdminClient) -> None:
    """Wait until one is elected; the client has no error for this case."""
    while True:
        if (await admin.describe_cluster())["controller_id"] >= 0:
            return
        await asyncio.sleep(RETRY_S)


async def _wait_until_led(admin: AIOKafkaAdminClient, prefix: str) -> None:
    """Wait until every partition has a leader for the next append."""
    wanted = {t.name for t in TOPICS}
    while True:
        topics = await admin.describe_topics()
        led = {
            t["topic"].removeprefix(prefix)
            for t in topics
            if t["partitions"] and all(p["leader"] >= 0 for p in t["partitions"])
        }
        if wanted <= led:
            return
        await asyncio.sleep(RETRY_S)


async def _settings(
    admin: AIOKafkaAdminClient, prefix: str, names: list[str]
) -> dict[str, dict[str, Any]]:
    if not names:
        return {}
    answers = await admin.describe_configs(
        [ConfigResource(ConfigResourceType.TOPIC, prefix + name) for name in names]
    )
    settings = {}
    for answer in answers:
        for code, message, _, name, entries in answer.resources:
            if issubclass(error := for_code(code), REFUSAL_ERRORS):
                raise to_access_denied(error(message), f"settings of {name}")
            if error is UnknownTopicOrPartitionError:
                continue
            if code:
                raise BrokerUnavailable(f"settings of {name}: {message or error.__name__}")
            settings[name.removeprefix(prefix)] = {entry[0]: entry[1] for entry in entries}
    return settings
