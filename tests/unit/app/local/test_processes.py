"""Tests of child processes: output, signals, and the error of one that ends by itself."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlane.app.local.processes import DeploymentFailed, ManagedProcess, launch
from kvlane.streams.brokers.watchdog import ProcessGuard
from kvlane.streams.clock import SystemClock
from workbench.bench.cpu_limit import limit_cpu
from workbench.bench.process_usage import cpu_time_s, resident_bytes

WAIT_S = 30.0


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[ProcessGuard]:
    guard = ProcessGuard(parent=tmp_path)
    yield guard
    guard.close()


def wait_ended(process: ManagedProcess) -> None:
    deadline = time.monotonic() + WAIT_S
    while process.status is None and time.monotonic() < deadline:
        time.sleep(0.01)


def test_process_that_ended_fails_its_check_with_its_status_and_last_lines(
    guard: ProcessGuard,
) -> None:
    arguments = ["timeit", "-n", "x"]
    process = launch(guard, "p", arguments, {}, guard.directory / "p.log")
    wait_ended(process)
    with pytest.raises(DeploymentFailed, match=r"p ended with status 1:\n(.|\n)*invalid literal"):
        process.check()


def test_process_that_runs_passes_its_check_until_it_is_killed(guard: ProcessGuard) -> None:
    process = launch(guard, "p", ["http.server", "0"], {}, guard.directory / "p.log")
    process.check()
    assert process.status is None
    assert resident_bytes(process) > 0
    process.kill()
    assert process.status == -9


def test_paused_process_stops_in_order(guard: ProcessGuard) -> None:
    process = launch(guard, "p", ["http.server", "0"], {}, guard.directory / "p.log")
    process.pause()
    process.stop(WAIT_S)
    assert process.status == -15


async def test_limited_process_uses_its_share_of_a_core_and_runs_on_afterwards(
    guard: ProcessGuard,
) -> None:
    busy = ["timeit", "-n", "1", "-r", "1", "while True: pass"]
    process = launch(guard, "p", busy, {}, guard.directory / "p.log")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(limit_cpu(process, 0.1, SystemClock()), 3.0)
    assert cpu_time_s(process) == pytest.approx(0.3, abs=0.15)
    limited_s, deadline = cpu_time_s(process), time.monotonic() + WAIT_S
    while cpu_time_s(process) < limited_s + 0.2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert cpu_time_s(process) >= limited_s + 0.2
    process.kill()
