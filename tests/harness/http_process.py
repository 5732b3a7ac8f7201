"""A whole deployment as a process of its own, with the log in memory, for clients of raw sockets.

    python -m tests.harness.http_process SOFT:HARD_FILE_LIMIT NAME=VALUE …

It prints its HTTP ports as JSON once it answers, and runs until it is killed. As a process it has
the event loop of a deployment, a memory of its own to measure, and its own limit of open files.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from kvlane.app.indexer import Indexer
from kvlane.app.runtime.process import ProcessContext, tune_interpreter
from kvlane.app.settings import Settings
from kvlane.app.standalone import StandaloneProcess
from kvlane.app.worker import Worker
from kvlane.streams.clock import SystemClock
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.memory_log import MemoryLog
from tests.harness.http_harness import until

LANES = 4


class HttpProcess(NamedTuple):
    """A running deployment."""

    pid: int
    gateway: int
    """Ports."""
    worker: int
    indexer: int
    errors: Path
    """Its log."""

    @property
    def memory_mb(self) -> float:
        """Its resident memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 1e6

    @property
    def peak_memory_mb(self) -> float:
        """The most that was resident since `forget_peak_memory`, or since the start."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e6

    def forget_peak_memory(self) -> None:
        """Begin anew to measure the peak."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    @property
    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))


@contextmanager
def http_process(
    errors: Path, *, soft_file_limit: int = 1024, hard_file_limit: int = 0, **settings: Any
) -> Iterator[HttpProcess]:
    """A deployment with these settings. `errors`: the file for its log."""
    over = [f"{name}={value}" for name, value in settings.items()]
    limits = f"{soft_file_limit}:{hard_file_limit}"
    with errors.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.http_process", limits, *over],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, errors.read_text()
        yield HttpProcess(process.pid, *json.loads(line), errors)
    finally:
        process.kill()
        process.communicate()


async def _run(settings: Settings) -> None:
    broker = MemoryBroker(SystemClock(), lanes=LANES)
    log = MemoryLog(broker, "all")
    await log.start()
    ctx = ProcessContext("all")
    deployment = StandaloneProcess(log, settings, ctx)
    await deployment.start()
    (worker,) = (part for part in deployment._parts if isinstance(part, Worker))
    (indexer,) = (part for part in deployment._parts if isinstance(part, Indexer))
    served = deployment.gateway.parts.served_models
    await until(lambda: bool(served.models()))
    tune_interpreter()
    urls = (deployment.gateway.url, worker.url, indexer.url)
    sys.stdout.write(json.dumps([int(url.rpartition(":")[2]) for url in urls]) + "\n")
    sys.stdout.flush()
    await ctx.wait_for_failure()


def main(limits: str, *over: str) -> None:
    soft, _, hard = limits.partition(":")
    most = int(hard) or resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(soft), most))
    given: dict[str, Any] = {
        "http_port": 0, "status_port": 0, "indexer_port": 0, "lanes": LANES, "engine": "echo",
        "model": "demo", "drain_grace_s": 0.1, "cache_dir": Path("build/http-process"),
    }  # fmt: skip
    settings = Settings(**given | dict(each.split("=", 1) for each in over))
    uvloop.run(_run(settings))


if __name__ == "__main__":
    import logging

    logging.basicConfig(level=logging.INFO)
    main(*sys.argv[1:])
