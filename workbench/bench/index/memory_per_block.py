"""Memory of an index per block of each cache, from the growth of a process.

`python -m workbench.bench.index.memory_per_block SIDE BLOCKS WORKERS PAIRS` fills one index and
prints bytes. Each side has a process of its own, since one would reuse memory that the other has
freed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from workbench.bench.index.comparison import (
    OUR_INDEX,
    IndexFigure,
    RatioTarget,
    SampleSummary,
    compare_sides,
)
from workbench.bench.index.index_workload import IndexSetup, make_sequences
from workbench.bench.index.kernel_timing import KernelIndex, compile_kernels
from workbench.bench.index.peers import CrateIndex, MeasuredIndex, PeerStructure, load_crate

BATCH_BLOCKS = 200_000
"""Blocks per batch of events: their own memory is small, and freed."""
FILL_TIMEOUT_S = 600.0


def bytes_per_pair(setup: IndexSetup, structures: Iterable[PeerStructure]) -> IndexFigure:
    """Memory of both sides, in bytes per (worker, block) pair."""
    names = [OUR_INDEX, *(structure.name.lower() for structure in structures)]
    samples = {name: SampleSummary(*[_measure(name, setup)] * 2) for name in names}
    return compare_sides("memory", setup, "B", samples, RatioTarget())


def _measure(name: str, where: IndexSetup) -> float:
    numbers = [str(number) for number in where]
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-m", "workbench.bench.index.memory_per_block", name, *numbers],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=FILL_TIMEOUT_S,
    )
    return float(done.stdout)


def _measured(name: str, where: IndexSetup) -> float:
    crate = None if name == OUR_INDEX else load_crate(lambda _: None, build=False)
    cached = make_sequences(where, crate.chain_hashes if crate else None)
    if crate is None:
        compile_kernels()
    before = _resident()
    side: MeasuredIndex
    if crate is None:
        side = KernelIndex(where.workers)
    else:
        side = CrateIndex(crate, PeerStructure[name.upper()], where.workers)
    for part in np.array_split(
        np.arange(cached.sequence_count), max(where.pairs // BATCH_BLOCKS, 1)
    ):
        side.apply(cached.store_batch(part))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return (_resident() - before) / cached.pairs


def _resident() -> int:
    """Resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Fill an index and print its bytes per pair."""
    name, *numbers = sys.argv[1:]
    sys.stdout.write(f"{_measured(name, IndexSetup(*map(int, numbers)))}\n")


if __name__ == "__main__":
    main()
