"""Runs that were done and are not done again, so that a long benchmark can stop and go on.

A file of JSON lines, one a run, appended as each ends. A run counts only for the code that did it:
a line says what the sources were, and those of others are left alone and not read.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from app.bench.ground import BenchFailed
from app.bench.scenes import Done, Play
from app.simulation.figures import Figures

_ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("app/engine", "app/routing", "app/simulation", "app/trace.py", "indexer")
"""All that figures depend on."""


class Kept:
    """The runs of one file; without a file nothing is kept."""

    def __init__(self, file: Path | None) -> None:
        """Raises BenchFailed for a file that holds something else."""
        self._file = file
        self._lines: dict[str, tuple[Figures, float]] = {}
        if file is None or not file.exists():
            return
        try:
            lines = [msgspec.json.decode(line) for line in file.read_bytes().splitlines()]
            for line in lines:
                if line["code"] == code():
                    self._lines[line["play"]] = Figures(*line["figures"]), line["wall_s"]
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise BenchFailed(
                f"{file} holds something else than runs that were kept: name another file ({e})"
            ) from e

    def get(self, play: Play) -> Done | None:
        """A run that was done."""
        known = self._lines.get(repr(play))
        return None if known is None else Done(play, *known)

    def put(self, done: Done) -> None:
        """Keep a run."""
        if self._file is None:
            return
        line: dict[str, Any] = {
            "play": repr(done.play), "code": code(),
            "figures": list(done.found), "wall_s": done.wall_s,
        }  # fmt: skip
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


@lru_cache(maxsize=1)
def code() -> str:
    """What the sources are, in hex."""
    digest = hashlib.blake2b(digest_size=8)
    for name in SOURCES:
        path = _ROOT / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()
