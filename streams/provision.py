"""Topics: making them as the table says, and telling what differs.

Owns the Deployment record in the registry, which says what all processes of a deployment must
agree on. Creates, never changes and never deletes: the number of partitions decides where a key
lives, so a topic that has records keeps it; settings are the operator's to change. Prints nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, NamedTuple

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, TopicAlreadyExistsError, for_code

from streams.clock import Clock, SystemClock
from streams.codecs import decode, encode
from streams.errors import BrokerUnavailable, PositionLost, RecordError, TopicsDiffer
from streams.kafka.client import REFUSALS, RETRY_S, denied
from streams.kafka.log import KafkaLog
from streams.ports import Log, Partition
from streams.records import Deployment
from streams.stretch import stretch
from streams.topics import BY_NAME, LANES, REGISTRY, TOPICS, Topic

logger = logging.getLogger(__name__)

DEPLOYMENT = "deployment"
"""Key of the Deployment record."""

REPLICATION = "replication.factor"
"""Name under which `TopicState.differing_configs` reports another number of replicas."""

LOOK_S = 10.0
"""How often a process looks whether its topics are still there."""
_DEADLINE_S = 30.0


class TopicState(NamedTuple):
    """One topic of the table as the broker has it. Names are short; `partitions` 0: missing."""

    name: str
    exists: bool
    partitions: int
    expected_partitions: int
    differing_configs: Mapping[str, tuple[str, str]]  # name: (is, should)

    @property
    def as_it_should_be(self) -> bool:
        """Whether nothing differs."""
        return self.partitions == self.expected_partitions and not self.differing_configs


async def create(
    log: KafkaLog, *, lanes: int, replication: int, min_insync: int
) -> list[TopicState]:
    """Create the topics that are missing; returns the state of all of them afterwards. Idempotent.

    What exists stays as it is; settings that differ are reported. Then the Deployment record is
    written, once. Raises BrokerUnavailable, Denied, and TopicsDiffer when a topic cannot be
    created, or one exists with other partitions: then nothing is created.
    """
    expected = expected_partitions(lanes)
    async with _admin(log) as admin:
        existing = await _partitions(admin, log.prefix)
        for name, replicas in existing.items():
            _check_count(name, len(replicas), expected.get(name, len(replicas)))
        missing = [t for t in TOPICS if t.name not in existing]
        if missing:
            await _create(admin, log.prefix, missing, expected, replication, min_insync)
            await _wait_until_led(admin, log.prefix)
    await check_partitions(log, lanes)
    if await deployment(log) is None:
        record = Deployment(lanes=lanes, partitions=expected)
        await log.append(REGISTRY, encode(record, DEPLOYMENT), 0)
    return await describe(log, lanes=lanes, replication=replication, min_insync=min_insync)


async def describe(
    log: KafkaLog, *, lanes: int, replication: int, min_insync: int
) -> list[TopicState]:
    """Compare every topic of the table with what the broker has.

    Raises BrokerUnavailable, Denied.
    """
    expected = expected_partitions(lanes)
    async with _admin(log) as admin:
        existing = await _partitions(admin, log.prefix)
        names = [t.name for t in TOPICS if t.name in existing]
        settings = await _settings(admin, log.prefix, names)
    states = []
    for topic in TOPICS:
        replicas = existing.get(topic.name, [])
        differing: dict[str, tuple[str, str]] = {}
        if replicas:
            for name, should in topic.config(min_insync).items():
                value = settings[topic.name].get(name, "")
                if value != should:
                    differing[name] = (value, should)
            if min(replicas) != replication:
                differing[REPLICATION] = (str(min(replicas)), str(replication))
        states.append(
            TopicState(topic.name, bool(replicas), len(replicas), expected[topic.name], differing)
        )
    return states


async def check_partitions(log: Log, lanes: int) -> None:
    """Make sure that this process and the deployment mean the same topics; asked at every start.

    The Deployment record counts where there is one, else the table. Raises TopicsDiffer, which
    says what to do, and BrokerUnavailable.
    """
    expected = expected_partitions(lanes)
    found = {name: await log.partitions(name) for name in expected}
    if (made := await deployment(log)) is not None:
        if made.lanes != lanes:
            raise TopicsDiffer(
                f"this deployment was created with {made.lanes} lanes, this process expects "
                f"{lanes}: set KVLANE_LANES={made.lanes}"
            )
        for name, count in made.partitions.items():
            if found.get(name, count) != count:
                raise TopicsDiffer(
                    f"topic {name} has {found[name]} partitions and was created with {count}: keys "
                    "lie elsewhere now, so its records are not found. Delete the topics and create "
                    "them anew, or use another prefix (KVLANE_TOPIC_PREFIX)"
                )
        expected |= made.partitions
    for name, count in found.items():
        _check_count(name, count, expected[name])


async def watch(log: KafkaLog, clock: Clock, every_s: float = LOOK_S) -> None:
    """Look again and again whether the topics are still there, until cancelled.

    Nothing else says so: to a reader, a topic that was deleted is one where nothing comes. Raises
    TopicsDiffer when one was missing, or had other partitions, twice in a row: a broker that has
    just come back may not have heard of all of them.
    """
    before: dict[str, int] = {}
    differed: dict[str, int] = {}
    while True:
        try:
            found = {t: n for t, n in (await log.look_again()).items() if t in BY_NAME}
        except BrokerUnavailable as e:
            logger.warning("cannot ask which topics there are: %s", e)
        else:
            before = before or found
            differ = {n: found.get(n, 0) for n, count in before.items() if found.get(n, 0) != count}
            for name in sorted(differ.keys() & differed.keys()):
                raise TopicsDiffer(
                    f"topic {log.prefix}{name} had {before[name]} partitions and has "
                    f"{differ[name]} now: what was in it is lost. `kvlane topics create` makes "
                    "what is missing, and then processes can start"
                )
            differed = differ
        await clock.sleep(every_s)


async def deployment(log: Log) -> Deployment | None:
    """The Deployment record, None before there is one. Raises BrokerUnavailable."""
    registry = Partition(REGISTRY, 0)
    ends = {registry: (await log.end_offsets(REGISTRY, [0]))[0]}
    starts = {registry: (await log.start_offsets(REGISTRY, [0]))[0]}
    pieces = stretch(log, SystemClock(), starts, ends, timeout_s=_DEADLINE_S)
    found = None
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                for record in piece.records:
                    if record.key == DEPLOYMENT.encode():
                        decoded = decode(record)
                        found = decoded if isinstance(decoded, Deployment) else None
    except (TimeoutError, PositionLost) as e:
        raise BrokerUnavailable(f"the registry cannot be read: {e!r}") from e
    except RecordError as e:
        raise TopicsDiffer(f"the deployment was made by another version: {e}") from e
    return found


def expected_partitions(lanes: int) -> dict[str, int]:
    """Partitions by topic, in the order of the table."""
    return {t.name: lanes if t.partitions == LANES else t.partitions for t in TOPICS}


def _check_count(name: str, found: int, expected: int) -> None:
    if found == expected:
        return
    if any(t.name == name and t.partitions == LANES for t in TOPICS):
        remedy = f"set KVLANE_LANES={found}, or create a deployment of its own under another prefix"
    else:
        remedy = "delete it and run `kvlane topics create`, or use another prefix"
    raise TopicsDiffer(
        f"topic {name} has {found} partitions, this process expects {expected}: {remedy} "
        "(KVLANE_TOPIC_PREFIX)"
    )


async def lagging(log: KafkaLog) -> int:
    """How many partitions of this deployment have a copy that is not in sync.

    Raises Denied, BrokerUnavailable.
    """
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
        if isinstance(e, REFUSALS):
            raise denied(e, "administering topics") from e
        raise BrokerUnavailable(f"topics cannot be administered: {e!r}") from e
    finally:
        await admin.close()


async def _partitions(admin: AIOKafkaAdminClient, prefix: str) -> dict[str, list[int]]:
    """Numbers of replicas, partition by partition, of every topic of this deployment."""
    # All topics are asked for: a broker may create one that is asked for by its name.
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
                prefix + t.name,
                partitions[t.name],
                replication,
                topic_configs=t.config(min_insync),
            )
            for t in topics
        ]
    )
    for name, code, message, *_ in answer.topic_errors:
        error = for_code(code)
        if issubclass(error, REFUSALS):
            raise denied(error(message), f"creating topic {name}")
        if code and error is not TopicAlreadyExistsError:  # somebody else was quicker
            raise TopicsDiffer(f"topic {name} cannot be created: {message or error.__name__}")


async def _wait_for_controller(admin: AIOKafkaAdminClient) -> None:
    """Wait until one is elected; the client knows no error for there being none."""
    while True:
        if (await admin.describe_cluster())["controller_id"] >= 0:
            return
        await asyncio.sleep(RETRY_S)


async def _wait_until_led(admin: AIOKafkaAdminClient, prefix: str) -> None:
    """Wait until every partition has a leader, so that the next append finds one."""
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
            if issubclass(error := for_code(code), REFUSALS):
                raise denied(error(message), f"settings of {name}")
            if code:
                raise BrokerUnavailable(f"settings of {name}: {message or error.__name__}")
            settings[name.removeprefix(prefix)] = {entry[0]: entry[1] for entry in entries}
    return settings
