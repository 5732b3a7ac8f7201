"""The two that the index bench compares: what it asks of either, and the Rust crate as one of them.

Both live in this process, are given the same arrays, and take their own time inside, in ticks of
the processor and in CPU time of the thread, so that no dispatch from Python is in any figure. Ours
is in `index_timing.py`.
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

from app.bench.ground import Said
from app.bench.index_work import MATCH, OPERATION, Batch, Column

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "peers" / "build.sh"
LIBRARY = ROOT / "build" / "peers" / "libpeers.so"
CRATE = "dynamo-kv-router 1.6.1"

Tokens = NDArray[np.uint32]
Answer = dict[int, int]
"""Leading blocks of a prompt by worker, for those that hold any."""


class NoPeer(Exception):
    """The peer cannot be built or loaded here; the message says what is missing."""


class Side(Protocol):
    """An index under measurement. One thread uses it."""

    name: str

    def run(self, batch: Batch) -> int:
        """Do stores and removals; the CPU time of that in ns."""

    def match(self, queries: Column) -> Column:
        """Look up each row; the ticks of each."""

    def replay(self, batch: Batch) -> tuple[int, Column]:
        """Do operations of all kinds; CPU time in ns, ticks of those that are matches (else 0)."""

    def match_tokens(self, prompts: Tokens, block_size: int) -> Column:
        """Hash and look up each row; the ticks of each."""

    def answers(self, queries: Column) -> list[Answer]:
        """What it finds, for comparison."""

    def close(self) -> None:
        """Give back its memory."""


class Structure(IntEnum):
    """What the crate has to offer; numbers as the shim knows them."""

    TREE = 0
    """`RadixTree`: one thread."""
    CONCURRENT = 1
    """`ConcurrentRadixTreeCompressed`: what its routers use."""
    POSITIONAL = 2
    """`PositionalIndexer`, jumps of 32 blocks."""


class Crate:
    """The shim around the crate, loaded."""

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

    def chained(self, local: Column) -> Column:
        """Chain hashes of rows of local ones."""
        local = np.ascontiguousarray(local)
        chain = np.empty_like(local)
        self.call.peer_chain(_at(local), *local.shape, _at(chain))
        return chain

    def local_hashes(self, tokens: Tokens, block_size: int) -> Column:
        """Of one prompt."""
        local = np.empty(len(tokens) // block_size, np.uint64)
        count = self.call.peer_local_hashes(_at(tokens), len(tokens), block_size, _at(local))
        assert count == len(local)
        return local


class Peer:
    """One structure of the crate, as a `Side`."""

    def __init__(self, crate: Crate, structure: Structure, workers: int) -> None:
        self.name = structure.name.lower()
        self._call = crate.call
        self._index = self._call.peer_new(structure)
        self._workers = workers

    def run(self, batch: Batch) -> int:
        """See `Side`."""
        return self._run(batch, None, None, 0)

    def match(self, queries: Column) -> Column:
        """See `Side`."""
        ticks = np.zeros(len(queries), np.uint64)
        self._run(_asked(queries), ticks, None, 0)
        return ticks

    def replay(self, batch: Batch) -> tuple[int, Column]:
        """See `Side`."""
        ticks = np.zeros(len(batch.rows), np.uint64)
        return self._run(batch, ticks, None, 0), ticks

    def match_tokens(self, prompts: Tokens, block_size: int) -> Column:
        """See `Side`."""
        ticks = np.zeros(len(prompts), np.uint64)
        count, length = prompts.shape
        self._call.peer_run_tokens(self._index, _at(prompts), length, count, block_size, _at(ticks))
        return ticks

    def answers(self, queries: Column) -> list[Answer]:
        """See `Side`."""
        answers = np.zeros((len(queries), self._workers + 1), np.uint64)
        self._run(_asked(queries), None, answers, self._workers + 1)
        return [
            {word >> 32: word & 0xFFFFFFFF for word in row[1 : 1 + int(row[0])].tolist()}
            for row in answers
        ]

    def close(self) -> None:
        """See `Side`."""
        self._call.peer_free(self._index)

    def _run(self, batch: Batch, ticks: Column | None, answers: Column | None, stride: int) -> int:
        took: int = self._call.peer_run(
            self._index, _at(batch.rows), len(batch.rows), _at(batch.local), _at(batch.chain),
            ticks if ticks is None else _at(ticks), answers if answers is None else _at(answers),
            stride,
        )  # fmt: skip
        return took


def load(said: Said, *, build: bool = True) -> Crate:
    """The shim, built where it is missing or older than its sources. Raises NoPeer.

    Building takes some minutes: the crate has a hundred dependencies.
    """
    sources = [*SCRIPT.parent.glob("Cargo.*"), SCRIPT.parent / "src" / "lib.rs"]
    if not SCRIPT.exists():
        raise NoPeer("tests/peers is missing: run it from a checkout of the sources")
    if LIBRARY.exists() and LIBRARY.stat().st_mtime >= max(f.stat().st_mtime for f in sources):
        return Crate(LIBRARY)
    if not build:
        raise NoPeer("not built; tests/peers/build.sh library does it")
    if shutil.which("cargo") is None:
        raise NoPeer("cargo is missing, which builds it (https://rustup.rs)")
    said(f"building {CRATE}, once: some minutes")
    built = subprocess.run(  # noqa: S603 - a script of this repository
        [str(SCRIPT), "library"],
        env={"JOBS": str(os.cpu_count() or 1), **os.environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        raise NoPeer("its build failed: " + " / ".join(built.stderr.splitlines()[-3:]))
    return Crate(LIBRARY)


def _asked(queries: Column) -> Batch:
    """Matches of the rows."""
    assert queries.flags.c_contiguous
    count, depth = queries.shape
    rows = np.zeros(count, OPERATION)
    rows["kind"], rows["blocks"] = MATCH, depth
    rows["start"] = np.arange(count) * depth
    flat = queries.reshape(-1)
    return Batch(rows, flat, flat, flat)


def _at(array: NDArray[Any]) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data
