"""Tests of the upgrade of the Compose deployment: its order, with a recorded `docker`."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[3] / "deploy" / "compose"
KINDS = ("preprocessor", "router", "gateway", "indexer", "collector", "worker")
"""In the order of docs/operations.md."""


@pytest.mark.parametrize("command", ["upgrade", "rollback"])
def test_containers_are_replaced_one_after_the_other(command: str, tmp_path: Path) -> None:
    copy = tmp_path / "deploy" / "compose"  # the script writes secrets beside itself
    shutil.copytree(FOLDER, copy, ignore=shutil.ignore_patterns(".env"))
    shutil.copy(FOLDER.parent / "docker-here.sh", copy.parent)
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    docker.chmod(0o755)
    environment = os.environ | {"IMAGE": "kvlane:other", "COMPOSE_PROFILES": ""}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(
        [copy / "up.sh", command], env=environment, check=True, capture_output=True, timeout=60
    )
    calls = (tmp_path / "calls").read_text().splitlines()
    replaced = [line.split()[-1] for line in calls if " up " in line]
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    own = {name for name, each in services.items() if not each.get("profiles")}
    assert {name for name in own if not name.startswith(("kafka", "topics"))} == set(replaced)
    order = replaced if command == "upgrade" else replaced[::-1]
    assert order == sorted(order, key=lambda name: KINDS.index(name.split("-")[0]))
    assert any("run --rm --no-deps topics" in line for line in calls) == (command == "upgrade")
