"""The demo environment: a connection, topics, and a deployment on this machine.

Sets them up and removes them at the end.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from pydantic import SecretStr

from kvlane.app.local.deployment import (
    DeploymentPart,
    InProcessDeployment,
    LocalDeployment,
    ProcessDeployment,
    ProcessFactory,
)
from kvlane.app.runtime.process import ProcessContext, open_log
from kvlane.app.settings import Settings, variable_name
from kvlane.streams.brokers.broker import free_ports
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.brokers.watchdog import ProcessGuard
from kvlane.streams.clock import SystemClock
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.kafka.provision import create_topics
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.ports import Log

STATUS_KINDS = ("router", "preprocessor")
"""Processes that are asked whether they are ready. The demo finds workers in their topics, and the
gateway by its models."""


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
    builds: Mapping[str, ProcessFactory],
) -> AsyncIterator[DemoEnvironment]:
    """Set up an environment on a running broker; removes everything but the broker at the end.

    `changes`: to the settings, also of the processes. `builds`: for InProcessDeployment only.
    Raises BrokerUnavailable, TopicMismatch.
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
            deployment = InProcessDeployment(parts, builds, settings, memory, random.Random())
            log = MemoryLog(memory, "stage")
        else:
            guard = ProcessGuard()
            cleanup.callback(guard.close)
            environment = {variable_name(name): _text(value) for name, value in changes.items()}
            names = [p.name for p in parts if p.kind in STATUS_KINDS]
            ports = dict(zip(names, free_ports(len(names)), strict=True))
            deployment = ProcessDeployment(
                parts,
                environment,
                guard,
                clock,
                own={n: {variable_name("status_port"): str(port)} for n, port in ports.items()},
                status_urls={n: f"http://{settings.http_host}:{p}" for n, p in ports.items()},
            )
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


def _text(value: object) -> str:
    """A setting as the value of an environment variable."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return json.dumps(value) if isinstance(value, dict) else str(value)
