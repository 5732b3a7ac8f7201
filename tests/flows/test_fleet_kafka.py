"""Test of the commands about a fleet on a real Kafka: a worker is killed."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvlane.app.cli import app
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker_factory import Broker
from tests.harness.kafka_processes import app_process, provisioned, set_environment

WAIT_S = 120.0


async def status_with(exit_code: int, worker_state: str) -> Any:
    """The first status with this exit code, and a worker in this state."""
    until = asyncio.get_running_loop().time() + WAIT_S
    while True:
        found = await asyncio.to_thread(CliRunner().invoke, app, ("status", "--json", "-"))
        status = json.loads(found.stdout)
        if found.exit_code == exit_code and worker_state in status["workers"]:
            return status
        assert asyncio.get_running_loop().time() < until, found.output


async def test_status_fails_with_the_name_of_a_killed_worker(
    kafka: Broker, topic_prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_environment(
        monkeypatch, kafka, topic_prefix, lanes=2, worker_id="w-killed", worker_timeout_s=2,
        heartbeat_interval_s=0.5, cache_dir=tmp_path / "cache",
    )  # fmt: skip
    settings = Settings(router_id="r1", status_port=None)
    ctx = ProcessContext("r1", rng=random.Random(1))
    async with provisioned(settings) as log:
        router = Router(log, settings, ctx)
        await router.start()
        with app_process("worker", tmp_path / "worker.log") as worker:
            await status_with(0, "ready")
            worker.kill()
            found = await status_with(1, "lost")
        assert ("worker", "w-killed") in {(a["kind"], a["name"]) for a in found["alarms"]}
        await router.stop()
        await ctx.cancel_tasks()
