"""Tests of the image: its user, its writable folders, its compiled kernels, its list of
packages."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
IMAGE = f"kvlane:{VERSION}"
AS_DEPLOYED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--network", "none")
"""As the chart and compose run it."""
WRITABLE = {"/tmp", "/var/tmp", "/run/lock"}
COMPILED = """
import sys
from kvlane.indexer import kernels
from kvlane.indexer.precompile import compile_all
assert kernels.is_complete()
compile_all()
kept = [
    each for name, module in list(sys.modules.items()) if name.startswith("kvlane.")
    for each in vars(module).values()
    if hasattr(each, "stats") and each.targetoptions.get("nogil")
]
print(sum(sum(each.stats.cache_misses.values()) for each in kept))
print(sum(sum(each.stats.cache_hits.values()) for each in kept))
"""


def run(*command: str, options: tuple[str, ...] = AS_DEPLOYED) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["docker", "run", "--rm", *options, IMAGE, *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_command_line_is_installed() -> None:
    done = run("kvlane", "--version")
    assert (done.stdout, done.stderr) == (f"kvlane {VERSION}\n", "")


def test_user_is_not_root_and_writes_below_tmp_only() -> None:
    # On a file system that can be written, so that the rights of the files decide.
    skipped = " ".join(f"-not -path '/{name}/*'" for name in ("proc", "dev", "sys"))
    search = f"id -u; find / -writable -not -type l {skipped} 2>/dev/null"
    done = run("sh", "-c", search, options=("--network", "none"))
    user, *paths = done.stdout.split()
    assert user == "10001"
    assert "/tmp" in paths
    assert {path for path in paths if path not in WRITABLE} == set()


@pytest.mark.parametrize("options", [(), ("--env", "KVLANE_LOG_LEVEL=INFO")])
def test_kernels_come_with_the_image(options: tuple[str, ...]) -> None:
    done = run("python", "-c", COMPILED, options=(*AS_DEPLOYED, *options))
    misses, hits = done.stdout.split()
    assert (misses, done.stderr) == ("0", "")
    assert int(hits) > 0


@pytest.mark.parametrize(
    "process", ["gateway", "preprocessor", "router", "worker", "collector", "indexer"]
)
def test_every_process_starts_as_far_as_possible_without_a_broker(process: str) -> None:
    done = run("kvlane", "run", process)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{process} cannot start: ")
    assert "KVLANE_BOOTSTRAP_SERVERS" in done.stderr


def test_list_of_packages_has_the_pinned_versions() -> None:
    bill = json.loads(run("cat", "/opt/kvlane/sbom.cdx.json").stdout)
    listed = {
        part["name"].lower().replace("_", "-"): part["version"] for part in bill["components"]
    }
    lock = (ROOT / "deploy" / "requirements" / "image.txt").read_text().splitlines()
    pins = dict(line.split(" ")[0].split("==") for line in lock if "==" in line)
    assert listed.pop("kvlane") == VERSION
    assert listed
    assert listed.items() <= pins.items()
