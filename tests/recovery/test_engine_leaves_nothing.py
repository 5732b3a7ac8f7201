"""Tests of the end of a worker: the processes of its engine end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="processes are found in /proc, which is Linux's"
)

WORKER = r"""
import asyncio, os, subprocess, sys, random, time

from kvlane.app.engine.interface import Engine, EngineOutput
from kvlane.app.engine.echo import EchoEngine
from kvlane.app.engine.process_reaper import ProcessReaper
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.app.worker import Worker
from kvlane.streams.clock import SystemClock
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.memory_log import MemoryLog

SLEEP = "import time; time.sleep(600)"


class Forking(EchoEngine):
    # As engines do: one process that it forks, one that it starts in a session of its own with
    # nothing of its owner's but the environment, and one that is started by that one.
    async def start(self, worker_id):
        self.leash = ProcessReaper()
        known, told = os.pipe()
        pids = [os.fork()]
        if not pids[0]:
            os.setsid()
            if not (grandchild := os.fork()):
                time.sleep(600)
                os._exit(0)
            os.write(told, str(grandchild).encode())
            time.sleep(600)
            os._exit(0)
        pids.append(int(os.read(known, 20)))
        os.close(known)
        os.close(told)
        nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"
        for code in (SLEEP, nested):
            child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
            pids.append(child.pid)
        os.write(1, (" ".join(map(str, pids)) + "\n").encode())
        return await super().start(worker_id)

    async def cleanup(self):
        if "tidy" in sys.argv:
            self.leash.release()


async def main():
    clock = SystemClock()
    log = MemoryLog(MemoryBroker(clock, lanes=1), "w")
    await log.start()
    settings = Settings(_env_file=None, worker_id="w", router_id="-")
    life = ProcessContext("w", clock, random.Random(1))
    worker = Worker(log, settings, life, Forking(clock, 0.1))
    await worker.start()
    print("ready", flush=True)
    if "tidy" in sys.argv:
        await worker.stop()
        await life.cancel_tasks()
    else:
        await asyncio.sleep(600)


asyncio.run(main())
"""


@pytest.fixture
def bystander() -> Iterator[int]:
    """A process that no worker has started."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield other.pid
    other.kill()
    other.wait()


def begin(*arguments: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A worker that is ready, and the processes of its engine."""
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert worker.stdout is not None
    output: list[str] = []
    with worker.stdout as lines:
        while "ready" not in output:
            line = lines.readline()
            assert line, "the worker ended before it was ready"
            output += line.split()
    return worker, [int(word) for word in output if word.isdecimal()]


def living(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.append(pid)
    return found


def wait_for_the_end_of(pids: list[int]) -> None:
    until = time.monotonic() + 15
    while living(pids) and time.monotonic() < until:
        time.sleep(0.05)
    left = living(pids)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGABRT, signal.SIGTERM])
def test_worker_that_is_killed_leaves_no_process_of_its_engine(
    how: signal.Signals, bystander: int
) -> None:
    worker, pids = begin()
    assert sorted(living(pids)) == sorted(pids)
    worker.send_signal(how)
    worker.wait(20)
    wait_for_the_end_of(pids)
    assert living([bystander])


def test_worker_that_ends_in_order_leaves_no_process_of_its_engine_either(bystander: int) -> None:
    worker, pids = begin("tidy")
    wait_for_the_end_of(pids)
    assert worker.wait(20) == 0
    assert living([bystander])


def test_processes_of_another_worker_are_untouched() -> None:
    one, of_one = begin()
    two, of_two = begin()
    one.kill()
    one.wait(20)
    wait_for_the_end_of(of_one)
    assert sorted(living(of_two)) == sorted(of_two)
    two.kill()
    two.wait(20)
    wait_for_the_end_of(of_two)
