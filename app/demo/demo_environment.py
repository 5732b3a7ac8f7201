"""The demo environment: a connection, topics, and a deployment on this machine.

Sets them up and removes them at the end.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from kvlane.app.local.deployment import (
    PORT_FIELDS,
    STATUS_PORT_FIELD,
    DeploymentPart,
    InProcessDeployment,
    LocalDeployment,
    ProcessDeployment,
)
from kvlane.app.runtime.process import ProcessContext, open_log
from kvlane.app.settings import Settings
from kvlane.app.standalone import PROCESS_FACTORIES
from kvlane.streams.brokers.broker import free_ports
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.brokers.watchdog import ProcessGuard
from kvlane.streams.clock import SystemClock
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.kafka.provision import create_topics
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.ports import Log


class DemoEnvironment(NamedTuple):
    """A started connection to a log with topics, and processes that are not started yet."""

    log: Log
    deployment: LocalDeployment
    settings: Settings
    context: ProcessContext
    parts: Sequence[DeploymentPart]


@asynccontextmanager
async def demo_environment(
    settings: Settings,
    broker: Broker,
    *,
    parts: Sequence[DeploymentPart],
    changes: Mapping[str, Any],
) -> AsyncIterator[DemoEnvironment]:
    """Set up an environment on a running broker; removes everything but the broker at the end.

    `changes`: to the settings, also of the processes. Raises BrokerUnavailable,
    TopicMismatch.
    """
    changes = {**changes, "bootstrap_servers": broker.bootstrap_servers}
    settings = settings.model_copy(update=changes)
    context = ProcessContext("demo", SystemClock())
    clock = context.clock
    log: Log
    deployment: LocalDeployment
    with contextlib.ExitStack() as cleanup:
        if broker.kind == "memory":
            memory = MemoryBroker(clock, lanes=settings.lanes, partitions=settings.partitions)
            deployment = InProcessDeployment(
                parts, PROCESS_FACTORIES, settings, memory, random.Random()
            )
            log = MemoryLog(memory, "stage")
        else:
            guard = ProcessGuard()
            cleanup.callback(guard.close)
            ports = {"gateway-1": settings.http_port, "indexer-1": settings.indexer_port}
            others = [part.name for part in parts if part.name not in ports]
            ports |= zip(others, free_ports(len(others)), strict=True)
            fields = {p.name: PORT_FIELDS.get(p.kind, STATUS_PORT_FIELD) for p in parts}
            listening = [
                p._replace(settings={**p.settings, fields[p.name]: ports[p.name]}) for p in parts
            ]
            urls = {name: f"http://{settings.http_host}:{port}" for name, port in ports.items()}
            deployment = ProcessDeployment(listening, changes, guard, clock, status_urls=urls)
            log = open_log(settings, "stage")
        try:
            await log.start()
            if isinstance(log, KafkaLog):
                await create_topics(log, **settings.topic_options())
            yield DemoEnvironment(log, deployment, settings, context, parts)
        finally:
            await context.cancel_tasks()
            await deployment.stop()
            await log.close()
