"""Tests of a deployment inside one process: a killed part and its successor."""

from __future__ import annotations

import random
from typing import Any

from kvlane.app.local.deployment import DeploymentPart, InProcessDeployment
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.streams.ports import Log
from tests.harness.memory_world import MemoryWorld, scenario_test


class Part:
    """A process that holds a connection and does nothing."""

    def __init__(self, log: Log, settings: Settings) -> None:
        self.log = log
        self.settings = settings

    async def start(self) -> None:
        await self.log.partitions("ledger")

    async def stop(self) -> None:
        """Nothing to stop."""


@scenario_test
async def test_killed_part_starts_again_with_its_role(world: MemoryWorld) -> None:
    started: list[Part] = []

    def build(log: Log, settings: Settings, ctx: ProcessContext) -> Any:
        started.append(Part(log, settings))
        return started[-1]

    part = DeploymentPart("d", "worker", {"worker_role": "decode"})
    deployment = InProcessDeployment(
        [part], {"worker": build}, Settings(_env_file=None), world.broker, random.Random(1)
    )
    await deployment.start()
    await deployment.kill("d")
    await deployment.start("d")
    killed, successor = started
    assert successor.settings == killed.settings
    assert successor.settings.worker_role == "decode"
    await successor.log.partitions("ledger")
    await deployment.stop()
