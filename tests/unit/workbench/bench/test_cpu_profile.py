"""Tests of parts of the CPU time, and the sampler inside a process."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import aiokafka
import msgspec
import pytest

from kvlane.indexer import index
from kvlane.streams import codecs
from workbench.bench.cpu_profile import SAMPLE_S, CpuSampler, part_of


@pytest.mark.parametrize(
    ("file", "function", "part"),
    [
        (aiokafka.__file__, "send", "client"),
        (codecs.__file__, "decode", "decode"),
        (codecs.__file__, "encode", "encode"),
        (index.__file__, "match_depths", "match"),
        (asyncio.__file__, "run", "loop"),
        (time.__name__, "sleep", None),
    ],
)
def test_function_belongs_to_the_part_of_its_file(
    file: str, function: str, part: str | None
) -> None:
    assert part_of(file, function) == part


def test_samples_are_written_when_the_sampling_ends(tmp_path: Path) -> None:
    before = [(n, signal.getsignal(n)) for n in (signal.SIGPROF, signal.SIGUSR1)]
    file = tmp_path / "samples"
    try:
        CpuSampler(file).install()
        signal.raise_signal(signal.SIGUSR1)
        until = time.process_time() + 20 * SAMPLE_S
        while time.process_time() < until:
            sum(range(1000))
        signal.raise_signal(signal.SIGUSR1)
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    samples = msgspec.json.decode(file.read_bytes(), type=dict[str, int])
    assert sum(samples.values()) >= 3
