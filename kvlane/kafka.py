"""Client of a deployment over Kafka: publish prompts, follow their replies."""

from __future__ import annotations

from kvlane.streams.client import Client
from kvlane.streams.client import ReplyResult as Reply
from kvlane.streams.clock import SystemClock
from kvlane.streams.errors import BrokerUnavailable, StreamError
from kvlane.streams.kafka.connection_options import ConnectionOptions as KafkaConnection
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.prompt import Prompt
from kvlane.streams.records import Chunk, End

__all__ = [
    "BrokerUnavailable", "Chunk", "Client", "End", "KafkaConnection", "KafkaLog", "Prompt", "Reply",
    "StreamError", "SystemClock",
]  # fmt: skip
