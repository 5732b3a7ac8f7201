"""Connections of the command line to the Kafka of a deployment."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlane.app.settings import Settings
    from kvlane.streams.client import Client
    from kvlane.streams.kafka.kafka_log import KafkaLog


@asynccontextmanager
async def connect_kafka(settings: Settings, name: str) -> AsyncIterator[KafkaLog]:
    """A connection for one command. Raises BrokerUnavailable, and SettingsError without servers."""
    from kvlane.app.runtime.process import open_log

    settings.require_bootstrap_servers()
    log = open_log(settings, name)
    try:
        await log.start()
        yield log
    finally:
        await log.close()


@asynccontextmanager
async def connect_client(settings: Settings) -> AsyncIterator[Client]:
    """A client of the deployment. Raises BrokerUnavailable, TopicMismatch."""
    from kvlane.streams.client import Client
    from kvlane.streams.clock import SystemClock

    async with connect_kafka(settings, "kvlane-cli") as log, Client(log, SystemClock()) as opened:
        yield opened
