"""How much memory an index needs for each block of each cache, by what its process grows.

`python -m app.bench.index_memory SIDE BLOCKS WORKERS PAIRS` fills one index and prints bytes; each
side gets a process of its own, since what one frees the other would use.
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

from app.bench.index_figures import OURS, Aim, Figure, Samples, figure
from app.bench.index_sides import Peer, Side, Structure, load
from app.bench.index_timing import Kernels, warm_up
from app.bench.index_work import Where, sequences

PART_BLOCKS = 200_000
"""Blocks whose events are made at a time: what they need beside the index is small, and freed."""
TIMEOUT_S = 600.0


def bytes_a_pair(where: Where, structures: Iterable[Structure]) -> Figure:
    """Of both sides, in bytes for each (worker, block) pair."""
    names = [OURS, *(structure.name.lower() for structure in structures)]
    samples = {name: Samples(*[_asked(name, where)] * 2) for name in names}
    return figure("memory", where, "B", samples, Aim())


def _asked(name: str, where: Where) -> float:
    numbers = [str(number) for number in where]
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-m", "app.bench.index_memory", name, *numbers],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    return float(done.stdout)


def _measured(name: str, where: Where) -> float:
    crate = None if name == OURS else load(lambda _: None, build=False)
    cached = sequences(where, crate.chained if crate else None)
    if crate is None:
        warm_up()
    before = _resident()
    side: Side
    if crate is None:
        side = Kernels(where.workers)
    else:
        side = Peer(crate, Structure[name.upper()], where.workers)
    for part in np.array_split(np.arange(cached.count), max(where.pairs // PART_BLOCKS, 1)):
        side.run(cached.stores(part))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return (_resident() - before) / cached.pairs


def _resident() -> int:
    """Bytes that this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """See the module."""
    name, *numbers = sys.argv[1:]
    sys.stdout.write(f"{_measured(name, Where(*map(int, numbers)))}\n")


if __name__ == "__main__":
    main()
