"""CPU time of a process by part: a sampling profiler inside the process.

    python -m workbench.bench.cpu_profile FILE MODULE ARGUMENTS...: runs a module like `python -m`

SIGUSR1 starts the sampling; another one ends it and writes the samples of each part to FILE as
JSON. A sample is taken after each SAMPLE_S of CPU time, of all threads and of the kernel; it counts
for the innermost Python function that belongs to a part, so compiled code counts for its caller.
Without sampling it costs nothing.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import msgspec

from kvlane.app.local.processes import ManagedProcess
from kvlane.streams.clock import Clock

SAMPLE_S = 0.005
"""A sample takes about 20 us: less than half a percent."""
WRITE_TIMEOUT_S = 10.0
_ROOT = f"{Path(__file__).parents[2]}{os.sep}"


class CpuPart(NamedTuple):
    """A part: beginnings of paths from the project or an installed package, and of functions."""

    name: str
    paths: tuple[str, ...]
    functions: tuple[str, ...] = ("",)


PARTS = (
    CpuPart("client", ("aiokafka/", "streams/kafka/", "async_timeout/")),
    CpuPart("decode", ("streams/codecs.py",), ("decode", "type_of", "unpack", "token_count")),
    CpuPart("encode", ("streams/codecs.py", "streams/record_publisher.py")),
    CpuPart("hash", (
        "indexer/hash", "indexer/block_keys", "app/routing/selection/prompt_hashes",
        "streams/topics.py", "indexer/kernels",
    )),
    CpuPart("match", ("indexer/", "app/routing/state/kv_index")),
    CpuPart("plan", ("app/routing/selection/", "app/routing/queueing/")),
    CpuPart("views", ("app/routing/", "streams/views/", "streams/reading/", "streams/")),
    CpuPart("lanes", ("app/lanes/", "app/router.py")),
    CpuPart("metrics", ("app/metrics/", "app/http/", "prometheus_client/", "uvicorn/")),
    CpuPart("loop", ("asyncio/", "uvloop/", "faststream/", "workbench/bench/", "anyio/")),
)  # fmt: skip
"""In the order in which a function is compared with them; "other" is the rest."""
OTHER = "other"


def part_of(path: str, function: str) -> str | None:
    """The part of a function in a file; None for one that counts for its caller."""
    name = path.removeprefix(_ROOT).removeprefix("kvlane/")
    for border in ("site-packages/", f"python3.{sys.version_info.minor}/"):
        name = name.rpartition(border)[2]
    for part in PARTS:
        if name.startswith(part.paths) and function.startswith(part.functions):
            return part.name
    return None


class CpuSampler:
    """Counter of samples by part; its handlers must run in the main thread."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._samples = Counter[str]()
        self._is_running = False
        self._parts: dict[object, str | None] = {}

    def install(self) -> None:
        """Listen for SIGUSR1."""
        signal.signal(signal.SIGPROF, self._sample)
        signal.signal(signal.SIGUSR1, self._toggle)

    def _toggle(self, _signal: int, _frame: FrameType | None) -> None:
        self._is_running = not self._is_running
        every_s = SAMPLE_S if self._is_running else 0.0
        signal.setitimer(signal.ITIMER_PROF, every_s, every_s)
        if not self._is_running:
            written = self._file.with_suffix(".new")
            written.write_bytes(msgspec.json.encode(self._samples))
            written.rename(self._file)
            self._samples.clear()

    def _sample(self, _signal: int, frame: FrameType | None) -> None:
        parts = self._parts
        while frame is not None:
            code = frame.f_code
            if code not in parts:
                parts[code] = part_of(code.co_filename, code.co_name)
            if (part := parts[code]) is not None:
                self._samples[part] += 1
                return
            frame = frame.f_back
        self._samples[OTHER] += 1


class ProfiledProcess:
    """A process that runs under the profiler, seen from the benchmark."""

    def __init__(self, process: ManagedProcess, file: Path, clock: Clock) -> None:
        self._process = process
        self._file = file
        self._clock = clock

    @staticmethod
    def command(file: Path, *module: str) -> tuple[str, ...]:
        """Arguments of `BenchEnvironment.launch` for a module and its arguments."""
        return ("workbench.bench.cpu_profile", str(file), *module)

    def start(self) -> None:
        self._file.unlink(missing_ok=True)
        os.kill(self._process.pid, signal.SIGUSR1)

    async def end(self) -> dict[str, float]:
        """End sampling; the share of each part, largest first. Raises TimeoutError."""
        os.kill(self._process.pid, signal.SIGUSR1)
        deadline = self._clock.now() + WRITE_TIMEOUT_S
        while not self._file.exists():
            self._process.check()
            if self._clock.now() > deadline:
                raise TimeoutError(f"{self._process.name} wrote no samples")
            await self._clock.sleep(0.05)
        samples = msgspec.json.decode(self._file.read_bytes(), type=dict[str, int])
        total = sum(samples.values()) or 1
        ranked = sorted(samples.items(), key=lambda item: -item[1])
        return {part: count / total for part, count in ranked}


if __name__ == "__main__":
    target, name = sys.argv[1:3]
    CpuSampler(Path(target)).install()
    sys.argv = sys.argv[2:]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
