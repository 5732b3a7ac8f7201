"""Tests of sizes of fleets: enough for the load by the measured figures, which the documentation
has."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvlane.app.cli import app
from kvlane.app.commands.simulation import size_command as fleet_size
from kvlane.app.commands.simulation.size_command import (
    FleetLoad,
    SizeError,
    router_cores,
    routers_needed,
    size_of,
)
from kvlane.streams.topics import PER_LANE, TOPICS
from tests.unit.app.routing.test_ledger_size import bytes_of

DOCS = Path(__file__).resolve().parents[4] / "docs"


def test_figures_are_those_of_machine_a_in_the_benchmarks() -> None:
    text = (DOCS / "benchmarks.md").read_text()
    tokens = fleet_size.TOKEN_US
    for row in (
        f"| requests/s that one router carries, 256 in flight | {fleet_size.ROUTER_REQUESTS_S} |",
        (
            f"| idle router beside {fleet_size.IDLE_WORKERS} workers | "
            f"{100 * fleet_size.IDLE_CORES:g} % of a core |"
        ),
        f"writer: 1 a step; 8 a step | {tokens[1]:g}; {tokens[8]:g} µs |",
        f"one gateway, 100 tokens, 64 connections | {fleet_size.GATEWAY_REQUESTS_S} |",
    ):
        assert row in text
    _, found, parts = text.partition("µs a request, on A:")
    assert found
    parts = parts.partition("on B:")[0]
    times = {name: int(us) for name, us in re.findall(r"(\w+) (\d+)", parts)}
    assert times["views"] + times["decode"] == fleet_size.RECORD_US
    assert bytes_of("predictive", 64) <= fleet_size.DECISION_BYTES


@given(
    st.floats(1, 20_000), st.integers(1, 2000), st.floats(1, 1e6), st.floats(0.2, 0.9),
    st.sampled_from([1, 4, 8, 30]),
)  # fmt: skip
def test_no_part_takes_more_of_its_core_than_it_may(
    requests_s: float, workers: int, tokens_s: float, use: float, step: int
) -> None:
    load = FleetLoad(requests_s, workers, tokens_s, step_tokens=step, use=use)
    try:
        size = size_of(load)
    except SizeError:
        assert routers_needed(load, workers) is None
        return
    assert router_cores(load, size.deployments, size.routers) <= use + 1e-9
    assert size.gateway_cores / size.gateways <= use
    assert size.lanes >= size.routers
    assert size.lanes == 2 ** round(math.log2(size.lanes))
    assert size.written_bytes_s <= size.brokers * load.broker_bytes_s
    rows = [size.lanes if t.partitions == PER_LANE else t.partitions for t in TOPICS]
    assert size.partitions == 3 * sum(rows)
    if size.routers > 2:
        assert router_cores(load, size.deployments, size.routers - 1) > use - 1e-9


def test_load_beyond_all_deployments_is_refused() -> None:
    with pytest.raises(SizeError):
        size_of(FleetLoad(requests_s=100_000, workers=2, tokens_s=1))


def test_command_shows_the_arithmetic_and_the_page_its_output() -> None:
    command = ["size", "--requests", "10000/s", "--workers", "1000", "--tokens", "100000/s"]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "100"})
    assert done.exit_code == 0
    page = (DOCS / "sizing.md").read_text()
    assert f"$ kvlane {' '.join(command)}\n{done.stdout}" in page
    for part in ("deployments", "routers", "lanes", "gateways", "brokers", "partitions"):
        assert f"\n{part} " in f"\n{done.stdout}"


@pytest.mark.parametrize("value", ["many", "-3/s", "0", "10/m"])
def test_invalid_rate_is_refused(value: str) -> None:
    done = CliRunner().invoke(app, ["size", "--requests", value])
    assert done.exit_code == 2
    assert "10000/s" in done.output
