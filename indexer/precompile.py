"""Ahead-of-time compilation of all kernels: `python -m kvlane.indexer.precompile`, in `make setup`.

Processes with kernels call `compile_all` when they start: 0.3 s after the set-up.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from functools import cache

from kvlane.indexer import kernels

CACHES_KEPT = 4
"""Caches kept in each folder, for other checkouts and processors that share it."""


@cache
def compile_all() -> None:
    """Load or compile every kernel. Does nothing when called again."""
    for name in kernels.KERNEL_MODULES:
        module = importlib.import_module(name)
        warm_up = getattr(module, "warm_up", None)
        if warm_up is not None:
            warm_up()
    kernels.mark_complete()


def drop_old_caches() -> None:
    """Delete all but the newest kernel caches; leaves other files alone."""
    if kernels.CACHE_FOLDER is not None and kernels.CACHE_FOLDER.is_dir():
        beside = [
            path
            for path in kernels.CACHE_FOLDER.parent.iterdir()
            if kernels.is_cache_name(path.name)
        ]
        beside.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in beside[CACHES_KEPT:]:
            shutil.rmtree(path, ignore_errors=True)


def main() -> None:
    if kernels.is_complete():
        return
    compile_all()
    drop_old_caches()
    sys.stdout.write(f"compiled into {kernels.CACHE_FOLDER}\n")


if __name__ == "__main__":
    main()
