"""Cache of simulation results, so that a long benchmark can be stopped and continued.

A file of JSON lines, one per run, appended as each ends. A line has a digest of the sources; lines
of other sources are ignored.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from kvlane.app.simulation.simulation_runs import RunMetrics
from workbench.bench.bench_environment import BenchFailed
from workbench.bench.routing.policy_scenarios import ScenarioResult, ScenarioRun

_ROOT = Path(__file__).resolve().parents[3]
SOURCE_PATHS = (
    "app/engine",
    "app/routing",
    "app/simulation",
    "app/traces/mooncake_trace.py",
    "indexer",
)
"""The sources that determine the figures."""


class ResultCache:
    """The results in one file; without a file nothing is cached."""

    def __init__(self, file: Path | None) -> None:
        """Raises BenchFailed for a file in another format."""
        self._file = file
        self._lines: dict[str, tuple[RunMetrics, float]] = {}
        if file is None or not file.exists():
            return
        try:
            lines = [msgspec.json.decode(line) for line in file.read_bytes().splitlines()]
            for line in lines:
                if line["code"] == source_digest():
                    self._lines[line["play"]] = RunMetrics(*line["figures"]), line["wall_s"]
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise BenchFailed(
                f"{file} holds something else than runs that were kept: name another file ({e})"
            ) from e

    def get(self, play: ScenarioRun) -> ScenarioResult | None:
        known = self._lines.get(repr(play))
        return None if known is None else ScenarioResult(play, *known)

    def put(self, done: ScenarioResult) -> None:
        if self._file is None:
            return
        line: dict[str, Any] = {
            "play": repr(done.scenario_run),
            "code": source_digest(),
            "figures": list(done.figures),
            "wall_s": done.wall_s,
        }
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


@lru_cache(maxsize=1)
def source_digest() -> str:
    """A digest of the sources, in hex."""
    digest = hashlib.blake2b(digest_size=8)
    for name in SOURCE_PATHS:
        path = _ROOT / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()
