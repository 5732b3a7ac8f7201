"""Client of a deployment over Kafka: publish prompts, follow their replies."""

from __future__ import annotations

from streams.client import Client
from streams.client import ReplyResult as Reply
from streams.clock import SystemClock
from streams.errors import BrokerUnavailable, StreamError
from streams.kafka.connection_options import ConnectionOptions as KafkaConnection
from streams.kafka.kafka_log import KafkaLog
from streams.prompt import Prompt
from streams.records import Chunk, End

__all__ = [
    "BrokerUnavailable", "Chunk", "Client", "End", "KafkaConnection", "KafkaLog", "Prompt", "Reply",
    "StreamError", "SystemClock",
]  # fmt: skip
