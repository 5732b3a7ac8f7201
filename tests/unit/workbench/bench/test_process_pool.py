"""Tests of the processes that benchmarks share their work with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]

ORPHAN = """
import os
from workbench.bench.process_pool import process_pool
if __name__ == "__main__":
    pool = process_pool(1)
    print(pool.submit(os.getpid).result(), flush=True)
    os.kill(os.getpid(), 9)
"""


def test_processes_end_with_a_benchmark_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    # Its output ends when nobody is left who could write to it.
    done = subprocess.run(
        [sys.executable, script], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, check=False, timeout=50,
    )  # fmt: skip
    assert done.returncode == -9
    assert int(done.stdout) > 0
