"""Tests of the command `kvlane simulate`: its traces, its plots, and its refusals."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvlane.app.cli import app
from workbench.bench.report import Report, Threshold


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments], terminal_width=200)


GENERATED = ("--trace", "gen:multi-turn", "--requests", "20", "--workers", "2")


def test_generated_trace_is_played_under_each_policy_and_seed(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = simulate(
        *GENERATED, "--policy", "predictive,dynamo:16", "--seeds", "2", "--json", f"{file}",
        "--routers", "2", "--ledger-lag-ms", "5", "--no-stagger", "--dispatch-delay-ms", "1",
        "--event-delay-ms", "20", "--learn-performance",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    rows = json.loads(file.read_bytes())["rows"]
    assert [(row["policy"], row["seed"]) for row in rows] == [
        ("predictive", 0), ("predictive", 1), ("dynamo:16", 0), ("dynamo:16", 1),
    ]  # fmt: skip
    assert rows[0]["conditions"] == (
        "2 routers, lag 5 ms, not staggered, hop 1 ms, notices 20 ms, curves unknown"
    )
    assert rows[0]["conditions"] in done.output
    assert rows[0].keys() >= {"requests", "reuse", "ttft_ms", "itl_ms", "e2e_ms", "wall_s"}


def test_engines_of_another_profile_have_its_step_times(tmp_path: Path) -> None:
    ttft_ms = []
    for more in ([], ["--profile", "h100"]):
        file = tmp_path / "found.json"
        done = simulate(*GENERATED, "--policy", "predictive", *more, "--json", f"{file}")
        assert done.exit_code == 0, done.output
        ttft_ms.append(json.loads(file.read_bytes())["rows"][0]["ttft_ms"]["p50"])
    assert ttft_ms[1] > ttft_ms[0] + 55 - 16.6, "the constant parts of both"


@pytest.mark.parametrize(
    ("name", "begins"), [("it.html", b"<!doctype html>"), ("it.png", b"\x89PNG")]
)
def test_result_is_drawn(tmp_path: Path, name: str, begins: bytes) -> None:
    file = tmp_path / name
    done = simulate(*GENERATED, "--plot", f"{file}")
    assert done.exit_code == 0, done.output
    content = file.read_bytes()
    assert content.startswith(begins)
    if file.suffix == ".html":  # it has its texts in comments
        texts = " ".join(re.findall("<!-- (.*?) -->", content.decode(), re.DOTALL))
        assert "Routing policies on gen:multi-turn" in texts
        assert f"kvlane {version('kvlane')}, {datetime.now(UTC).year}-" in texts
        assert re.search(r"\d ms\b", texts)


def test_without_matplotlib_the_package_is_named_before_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kvlane.app.commands.simulation.simulate_command.find_spec", lambda _: None)
    done = simulate("--plot", f"{tmp_path / 'it.png'}")
    assert done.exit_code == 2
    assert "pip install -e '.[plot]'" in done.output
    assert "wall_s" not in done.output


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--trace", "gen:nonsense"], "gen:shared-prefixes"),
        (["--rate", "3"], "are for --trace gen:KIND"),
        (["--plot", "it.gif"], "must end in one of"),
        (["--policy", "nonsense"], "one of predictive"),
    ],
)
def test_impossible_option_is_refused_by_name(arguments: list[str], fault: str) -> None:
    done = simulate(*arguments)
    assert done.exit_code == 2
    assert fault in " ".join(done.output.replace("│", " ").split())


def test_benchmark_has_a_plot_for_each_fleet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = simulate(*GENERATED, "--policy", "round_robin,random", "--json", "-")
    rows = [
        row | {"trace": "gen:multi-turn", "profile": "mock"}
        for row in json.loads(done.stdout)["rows"]
    ]
    fleets = [row | {"workers": workers} for workers in (2, 4) for row in rows]

    async def found(*_: Any) -> Report:
        return Report("simulate", fleets, [])

    monkeypatch.setattr("workbench.bench.routing.policy_simulation.bench_policies", found)
    file = tmp_path / "it.html"
    done = CliRunner().invoke(app, ["bench", "simulate", "--plot", f"{file}"])
    assert done.exit_code == 0, done.output
    texts = re.findall("<!-- (.*?) -->", file.read_text("utf-8"), re.DOTALL)
    assert sum("2 workers" in text for text in texts) == 1
    assert sum("4 workers" in text for text in texts) == 1
    assert texts.count("round_robin") == 2 * 5, "of five figures"


@pytest.mark.parametrize("passed", [True, False])
def test_benchmark_ends_with_1_if_a_threshold_is_missed(
    monkeypatch: pytest.MonkeyPatch, passed: bool
) -> None:
    sent: list[Any] = []

    async def found(*arguments: Any) -> Report:
        sent.extend(arguments)
        return Report("simulate", [], [Threshold("8x1: ours", 1.2, "x", "<= 1", passed)])

    monkeypatch.setattr("workbench.bench.routing.policy_simulation.bench_policies", found)
    done = CliRunner().invoke(app, ["bench", "simulate", "--jobs", "3"])
    assert done.exit_code == (0 if passed else 1), done.output
    assert f"1.2 x (<= 1) {'passed' if passed else 'failed'}" in done.output
    assert sent[-1] == 3
