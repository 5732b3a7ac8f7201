"""Tests of a release: its files follow from the commit, and lack what belongs to developers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kvlane.app.cli import app

ROOT = Path(__file__).parents[3]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
RELEASE = ROOT / "build" / "release"

is_checkout = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout of git")


def release(*options: str) -> subprocess.CompletedProcess[str]:
    command = [ROOT / "deploy" / "release.sh", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout


@is_checkout
@pytest.mark.skipif("KVLANE_TEST_LONG" not in os.environ, reason="half a minute on a busy machine")
def test_files_of_a_release_are_the_same_again() -> None:
    assert release("--try").returncode == 0
    sums = (RELEASE / "SHA256SUMS").read_text()
    assert release("--try").returncode == 0
    assert (RELEASE / "SHA256SUMS").read_text() == sums
    with tarfile.open(RELEASE / f"kvlane-{VERSION}.tar.gz") as sdist:
        folders = {Path(name).parts[1] for name in sdist.getnames() if "/" in name}
    assert not folders & {"tests", "workbench", "build", ".venv"}
    with tarfile.open(RELEASE / f"kvlane-chart-{VERSION}.tgz") as chart:
        assert {"kvlane/Chart.yaml", "kvlane/values.schema.json"} <= set(chart.getnames())
    bill = json.loads((RELEASE / f"kvlane-{VERSION}.cdx.json").read_text("utf-8"))
    assert {"aiokafka", "numba"} <= {component["name"] for component in bill["components"]}


@is_checkout
def test_release_of_a_commit_without_its_tag_is_refused() -> None:
    refused = release("--no-image")
    assert refused.returncode == 1
    assert "the checkout has changes" in refused.stderr or "git tag -a" in refused.stderr


@is_checkout
def test_version_names_the_commit_of_an_archive(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Wheel and sdist are built from one; a checkout may have changes, so it names none."""
    commit = git("rev-parse", "HEAD").decode().strip()
    with tarfile.open(fileobj=BytesIO(git("archive", "HEAD", "app/data/commit.txt"))) as archive:
        archive.extractall(tmp_path, filter="data")
    assert CliRunner().invoke(app, ["--version"]).stdout == f"kvlane {version('kvlane')}\n"
    monkeypatch.setattr("kvlane.app.cli.COMMIT_FILE", tmp_path / "app/data/commit.txt")
    shown = CliRunner().invoke(app, ["--version"]).stdout
    assert shown == f"kvlane {version('kvlane')} (commit {commit[:12]})\n"


def test_unknown_option_is_refused() -> None:
    assert "usage: release.sh" in release("--now").stderr


def test_packages_of_the_system_are_components_of_the_bill(tmp_path: Path) -> None:
    path = tmp_path / "sbom.cdx.json"
    path.write_text('{"bomFormat": "CycloneDX", "components": [{"name": "aiokafka"}]}')
    command = [sys.executable, ROOT / "deploy" / "image" / "add_os_packages.py", path]
    subprocess.run(command, input="libc6 2.36-9+deb12u9 amd64\n", text=True, check=True)
    python, debian = json.loads(path.read_text("utf-8"))["components"]
    assert (python["name"], debian["name"], debian["version"]) == (
        "aiokafka",
        "libc6",
        "2.36-9+deb12u9",
    )
    assert debian["purl"] == "pkg:deb/debian/libc6@2.36-9%2Bdeb12u9?arch=amd64"


def steps_of(workflow: str, job: str) -> list[dict[str, Any]]:
    text = (ROOT / ".github" / "workflows" / f"{workflow}.yaml").read_text("utf-8")
    found: list[dict[str, Any]] = yaml.safe_load(text)["jobs"][job]["steps"]
    return found


@pytest.mark.parametrize(
    ("workflow", "job", "command"),
    [
        ("ci", "test", ".ci/run"),
        ("ci", "chart", "make chart"),
        ("release", "release", "make release"),
    ],
)
def test_workflow_runs_the_command_of_the_repository(workflow: str, job: str, command: str) -> None:
    assert command in [step.get("run") for step in steps_of(workflow, job)]


def test_chart_is_rendered_in_ci_by_the_helm_that_make_chart_builds() -> None:
    uses = {step.get("uses", "").partition("@")[0]: step for step in steps_of("ci", "chart")}
    version = uses["azure/setup-helm"]["with"]["version"]
    assert f"\nHELM_VERSION={version}\n" in (ROOT / "deploy/chart/render.sh").read_text("utf-8")
