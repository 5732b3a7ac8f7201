"""The connection of a process to Kafka as its readers and members see it, and their key filter."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, Protocol

from aiokafka import TopicPartition

from kvlane.streams.kafka.connection_options import ConnectionOptions
from kvlane.streams.ports import Partition


class KeyFilter:
    """The keys whose records a consumer returns; None: all. As the consumer's key deserializer it
    reaches the consumer's `PartitionRecords`."""

    def __init__(self) -> None:
        self.keys: Container[bytes | None] | None = None

    def __call__(self, key: bytes | None) -> bytes | None:
        """The key, unchanged."""
        return key


class KafkaSession(Protocol):
    """Implemented by `KafkaLog` (`streams/kafka/kafka_log.py`)."""

    @property
    def connection(self) -> ConnectionOptions:
        """Addresses and time-outs."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of every aiokafka client of this connection."""

    @property
    def prefix(self) -> str:
        """Before the names of the deployment's topics and groups."""

    @property
    def request_timeout_s(self) -> float:
        """After it a request has failed."""

    async def partitions(self, topic: str) -> int:
        """As `Log.partitions`."""

    async def start_offsets(self, topic: str, partitions: Sequence[int]) -> dict[int, int]:
        """As `Log.start_offsets`."""

    async def end_offsets(self, topic: str, partitions: Sequence[int]) -> dict[int, int]:
        """As `Log.end_offsets`."""

    def full_name(self, partition: Partition) -> TopicPartition:
        """A partition by its full name."""

    def forget(self, user: Any) -> None:
        """A reader or member has closed itself."""
