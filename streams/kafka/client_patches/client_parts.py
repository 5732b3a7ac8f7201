"""The one door to this folder: the choice between aiokafka's own parts and their replacements.

The replacements use private names, so they are for tested versions only; any other version is used
by public names alone, and logged once (docs/kafka-client.md).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import aiokafka
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from kvlane.streams.kafka.client_patches.plain_client import PlainClient
from kvlane.streams.kafka.client_patches.producer_queue import ProducerQueue, TranslateError

log = logging.getLogger(__name__)

TESTED_VERSIONS = frozenset({"0.14.0"})


_COORDINATOR_TASKS = (
    "_coordination_task",
    "_heartbeat_task",
    "_commit_refresh_task",
    "_reset_committed_task",
)


class ClientParts(Protocol):
    """The parts of aiokafka that a process uses."""

    def new_queue(
        self,
        translate: TranslateError,
        on_broken: Callable[[BaseException], None],
        leader_timeout_s: float,
    ) -> ProducerQueue:
        """The queue of a producer; `on_broken` is called if an append failed that was sent. One
        whose partition has no leader for `leader_timeout_s` fails."""

    def prepare(self, consumer: AIOKafkaConsumer) -> None:
        """Change a consumer before its start."""

    def fetch_in_sessions(self, consumer: AIOKafkaConsumer) -> None:
        """Change a started consumer, before it has an assignment."""

    def set_gather_s(self, consumer: AIOKafkaConsumer, gather_s: float) -> None:
        """Change the time for which a consumer gathers records, from the next request on."""

    def observe_answers(
        self, consumer: AIOKafkaConsumer, on_answer: Callable[[str, float], None]
    ) -> bool:
        """Report each answer of the coordinator that extends the membership: the kind of its
        request ("heartbeat" or "sync"), and when that was sent. False if none will be reported."""

    def position(self, consumer: AIOKafkaConsumer, tp: TopicPartition) -> int | None:
        """The position of a consumer, None if it has none or is unknown; never waits."""

    def committed(
        self, consumer: AIOKafkaConsumer, tps: Sequence[TopicPartition]
    ) -> Awaitable[Mapping[TopicPartition, int]]:
        """The committed offsets of a consumer's group; without partitions that have none."""

    def transaction_error(self, producer: AIOKafkaProducer) -> BaseException | None:
        """The error that ended the transaction of a producer, if it is known."""


@cache
def client_parts() -> ClientParts:
    """The parts for this process; the first call replaces parts of aiokafka, for good."""
    if aiokafka.__version__ in TESTED_VERSIONS:
        from kvlane.streams.kafka.client_patches.patched_client import PatchedClient

        return PatchedClient()
    log.warning(
        "aiokafka %s is used as it is, since the replacements of its parts are not tested with it: "
        "more CPU time, and weaker promises when brokers fail. Install aiokafka %s "
        "(docs/kafka-client.md).",
        aiokafka.__version__,
        " or ".join(sorted(TESTED_VERSIONS)),
    )
    return PlainClient()


def tasks_of(client: AIOKafkaConsumer | AIOKafkaProducer) -> set[Any]:
    """The background tasks of a consumer or producer that does not stop, as far as found."""
    fetcher, coordinator, sender = (
        getattr(client, name, None) for name in ("_fetcher", "_coordinator", "_sender")
    )
    found = set(getattr(fetcher, "_pending_tasks", ()))
    found.add(getattr(fetcher, "_fetch_task", None))
    found.add(getattr(sender, "sender_task", None))
    found.update(getattr(coordinator, name, None) for name in _COORDINATOR_TASKS)
    return found - {None}


async def close_connections(client: AIOKafkaConsumer | AIOKafkaProducer) -> None:
    """Close the connections of a consumer or producer whose `stop` has not ended."""
    client._closed = True  # else its destructor complains
    connections = getattr(client, "client", None) or getattr(client, "_client", None)
    if connections is not None:
        await connections.close()
