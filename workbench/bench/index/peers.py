"""Indexes under measurement: their common protocol, and Dynamo's Rust crate.

They run in this process, get the same arrays, and time themselves inside compiled code, in ticks of
the processor and in CPU time of the thread, so that no figure includes dispatch from Python. Our
index is in `kernel_timing.py`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workbench.bench.bench_environment import PrintLine
from workbench.bench.index.index_workload import MATCH, OPERATION, OperationBatch, U64Column

ROOT = Path(__file__).resolve().parents[3]
BUILD_SCRIPT = ROOT / "workbench" / "peers" / "build.sh"
LIBRARY = ROOT / "build" / "peers" / "libpeers.so"
CRATE_NAME = "dynamo-kv-router 1.6.1"

TokenArray = NDArray[np.uint32]
BlocksByWorker = dict[int, int]
"""Number of leading cached blocks of a prompt by worker, for workers with any."""


class PeerUnavailable(Exception):
    """The peer cannot be built or loaded; the message has the reason."""


class MeasuredIndex(Protocol):
    """An index under measurement. One thread uses it."""

    name: str

    def apply(self, batch: OperationBatch) -> int:
        """Apply stores and removals; CPU time in ns."""

    def match(self, queries: U64Column) -> U64Column:
        """Look up each row; the ticks of each."""

    def replay(self, batch: OperationBatch) -> tuple[int, U64Column]:
        """Apply operations of all kinds; CPU time in ns, and ticks of matches (0 for others)."""

    def match_tokens(self, prompts: TokenArray, block_size: int) -> U64Column:
        """Hash and look up each row; the ticks of each."""

    def matches(self, queries: U64Column) -> list[BlocksByWorker]:
        """The results of matches, for comparison."""

    def close(self) -> None:
        """Free its memory."""


class PeerStructure(IntEnum):
    """The index structures of the crate; numbers as in the shim."""

    TREE = 0
    """The radix tree: one thread."""
    CONCURRENT = 1
    """`ConcurrentRadixTreeCompressed`, which its routers use."""
    POSITIONAL = 2
    """`PositionalIndexer`, jumps of 32 blocks."""


class PeerCrate:
    """The loaded shim library of the crate."""

    def __init__(self, library: Path) -> None:
        self.call: Any = ctypes.CDLL(str(library))
        word, pointer = ctypes.c_uint64, ctypes.c_void_p
        for name, result, arguments in (
            ("peer_new", pointer, [word]),
            ("peer_free", None, [pointer]),
            ("peer_run", word, [pointer, pointer, word, *[pointer] * 4, word]),
            ("peer_run_tokens", None, [pointer, pointer, word, word, ctypes.c_uint32, pointer]),
            ("peer_local_hashes", word, [pointer, word, ctypes.c_uint32, pointer]),
            ("peer_chain", None, [pointer, word, word, pointer]),
        ):
            function = getattr(self.call, name)
            function.restype, function.argtypes = result, arguments

    def chain_hashes(self, local: U64Column) -> U64Column:
        """Chain hashes of rows of local hashes."""
        local = np.ascontiguousarray(local)
        chain = np.empty_like(local)
        self.call.peer_chain(_at(local), *local.shape, _at(chain))
        return chain

    def local_hashes(self, tokens: TokenArray, block_size: int) -> U64Column:
        local = np.empty(len(tokens) // block_size, np.uint64)
        count = self.call.peer_local_hashes(_at(tokens), len(tokens), block_size, _at(local))
        assert count == len(local)
        return local


class CrateIndex:
    """One structure of the crate, as a `MeasuredIndex`."""

    def __init__(self, crate: PeerCrate, structure: PeerStructure, workers: int) -> None:
        self.name = structure.name.lower()
        self._call = crate.call
        self._index = self._call.peer_new(structure)
        self._workers = workers

    def apply(self, batch: OperationBatch) -> int:
        return self._run(batch, None, None, 0)

    def match(self, queries: U64Column) -> U64Column:
        ticks = np.zeros(len(queries), np.uint64)
        self._run(_query_batch(queries), ticks, None, 0)
        return ticks

    def replay(self, batch: OperationBatch) -> tuple[int, U64Column]:
        ticks = np.zeros(len(batch.rows), np.uint64)
        return self._run(batch, ticks, None, 0), ticks

    def match_tokens(self, prompts: TokenArray, block_size: int) -> U64Column:
        ticks = np.zeros(len(prompts), np.uint64)
        count, length = prompts.shape
        self._call.peer_run_tokens(self._index, _at(prompts), length, count, block_size, _at(ticks))
        return ticks

    def matches(self, queries: U64Column) -> list[BlocksByWorker]:
        answers = np.zeros((len(queries), self._workers + 1), np.uint64)
        self._run(_query_batch(queries), None, answers, self._workers + 1)
        return [
            {word >> 32: word & 0xFFFFFFFF for word in row[1 : 1 + int(row[0])].tolist()}
            for row in answers
        ]

    def close(self) -> None:
        self._call.peer_free(self._index)

    def _run(
        self, batch: OperationBatch, ticks: U64Column | None, answers: U64Column | None, stride: int
    ) -> int:
        took: int = self._call.peer_run(
            self._index, _at(batch.rows), len(batch.rows), _at(batch.local), _at(batch.chain),
            ticks if ticks is None else _at(ticks), answers if answers is None else _at(answers),
            stride,
        )  # fmt: skip
        return took


def load_crate(print_line: PrintLine, *, build: bool = True) -> PeerCrate:
    """Load the shim; builds it if it is missing or older than its sources. Raises PeerUnavailable.

    Building takes some minutes: the crate has a hundred dependencies.
    """
    sources = [*BUILD_SCRIPT.parent.glob("Cargo.*"), BUILD_SCRIPT.parent / "src" / "lib.rs"]
    if not BUILD_SCRIPT.exists():
        raise PeerUnavailable("workbench/peers is missing: run it from a checkout of the sources")
    if LIBRARY.exists() and LIBRARY.stat().st_mtime >= max(f.stat().st_mtime for f in sources):
        return PeerCrate(LIBRARY)
    if not build:
        raise PeerUnavailable("not built; workbench/peers/build.sh library does it")
    if shutil.which("cargo") is None:
        raise PeerUnavailable("cargo is missing, which builds it (https://rustup.rs)")
    print_line(f"building {CRATE_NAME}, once: some minutes")
    built = subprocess.run(  # noqa: S603 - a script of this repository
        [str(BUILD_SCRIPT), "library"],
        env={"JOBS": str(os.cpu_count() or 1), **os.environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        raise PeerUnavailable("its build failed: " + " / ".join(built.stderr.splitlines()[-3:]))
    return PeerCrate(LIBRARY)


def _query_batch(queries: U64Column) -> OperationBatch:
    """A batch of matches, one per row."""
    assert queries.flags.c_contiguous
    count, depth = queries.shape
    rows = np.zeros(count, OPERATION)
    rows["kind"], rows["blocks"] = MATCH, depth
    rows["start"] = np.arange(count) * depth
    flat = queries.reshape(-1)
    return OperationBatch(rows, flat, flat, flat)


def _at(array: NDArray[Any]) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data
