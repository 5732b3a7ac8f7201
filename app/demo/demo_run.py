"""The run of `kvlane demo`: a broker and every process of a deployment on this machine."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import SecretStr
from rich.console import Console

from kvlane.app.demo.demo_session import demo_environment
from kvlane.app.demo.scenario import DemoScenario
from kvlane.app.local.deployment import deployment_parts
from kvlane.app.local.processes import DeploymentFailed, free_port
from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker_factory import Broker, BrokerChoice, obtain_broker

DEMO_WORKERS = 4
CONTEXT_LENGTH = 16_384
"""The trace has prompts of up to 12 000 tokens."""
PREFILL_LOAD_SCALE = 4.0
"""Weight of prompts in a worker's load. Answers are short here, so pending prefill predicts load
better than open requests."""
HEARTBEAT_S = 0.5
"""A stopping worker waits for two heartbeats, so that routers notice."""
DRAIN_GRACE_S = 2.0
"""Short, since no client waits for an answer when the demo ends."""


def run_vllm_demo(
    settings: Settings, console: Console, kind: BrokerChoice = "auto", *, prefill_workers: int = 0
) -> bool:
    """Run the demo with vLLM; True when all checks pass. Arguments and errors: see `run_demo`."""
    from kvlane.app.demo import tiny_model, vllm_scenario
    from kvlane.app.engine.interface import EngineError
    from kvlane.app.engine.vllm.async_llm import START_METHOD_VARIABLE
    from kvlane.app.engine.vllm.versions import check_plugin, installed_version

    os.environ.update(tiny_model.environment())
    try:
        installed_version()
        check_plugin()
    except EngineError as e:
        raise DeploymentFailed(str(e)) from e
    with (
        _broker(settings, console, kind) as broker,
        TemporaryDirectory(prefix="kvlane-demo-") as folder,
    ):
        if broker.kind == "memory":  # several engines in this process: a forked child would keep
            os.environ[START_METHOD_VARIABLE] = "spawn"  # the resources of the others
        parts = deployment_parts(vllm_scenario.VLLM_WORKERS, prefill_workers)
        changes = _changes(settings, broker) | vllm_scenario.vllm_settings(
            Path(folder, "model"), hands_over=prefill_workers > 0
        )

        async def play() -> bool:
            async with demo_environment(settings, broker, parts=parts, changes=changes) as on:
                return await vllm_scenario.VllmScenario(on, console).run()

        return asyncio.run(play())


def run_demo(
    settings: Settings,
    prompts: Sequence[str],
    console: Console,
    kind: BrokerChoice = "auto",
    *,
    prefill_workers: int = 0,
) -> bool:
    """Run the demo and clean up; True when every text is correct. `prefill_workers`: of its
    workers; the others decode then. Raises BrokerUnavailable, TopicMismatch, DeploymentFailed."""
    with _broker(settings, console, kind) as broker:
        parts = deployment_parts(DEMO_WORKERS, prefill_workers)
        changes = _changes(settings, broker) | {"context_length": CONTEXT_LENGTH}

        async def play() -> bool:
            async with demo_environment(settings, broker, parts=parts, changes=changes) as on:
                return await DemoScenario(on, console).run(prompts)

        return asyncio.run(play())


def _broker(settings: Settings, console: Console, kind: BrokerChoice) -> Broker:
    broker = obtain_broker(
        settings.broker if kind == "auto" else kind,
        bootstrap_servers=settings.bootstrap_servers,
        report=lambda line: console.print(line, style="dim", markup=False),
    )
    console.print(f"broker: {broker.description}", style="dim", markup=False)
    return broker


def _changes(settings: Settings, broker: Broker) -> dict[str, Any]:
    changes: dict[str, Any] = {
        "http_port": free_port(),
        "indexer_port": free_port(),
        "prefill_load_scale": PREFILL_LOAD_SCALE,
        "heartbeat_interval_s": HEARTBEAT_S,
        "drain_grace_s": DRAIN_GRACE_S,
    }
    if not settings.hash_secret.get_secret_value():  # a broker in Docker may have another address
        changes["hash_secret"] = SecretStr(secrets.token_hex())
    if broker.kind == "env":  # an existing cluster: keep away from its topics
        changes["topic_prefix"] = f"{settings.topic_prefix}demo."
    return changes
