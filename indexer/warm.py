"""Machine code for all kernels, before anybody waits for it.

`python -m indexer.warm` is the last step of `make setup`. Processes that use kernels call
`compile_all` when they start: it takes 0.3 s where the set-up has been run, and what it has to
compile elsewhere, no request waits for.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from functools import cache

from indexer import kernels

FOLDERS_KEPT = 4
"""Under each root: for other checkouts and processors that share it."""


@cache
def compile_all() -> None:
    """Load every kernel, or compile it. Does nothing the second time."""
    for name in kernels.MODULES:
        module = importlib.import_module(name)
        warm_up = getattr(module, "warm_up", None)
        if warm_up is not None:
            warm_up()
    kernels.set_complete()


def drop_old() -> None:
    """Keep only the newest folders beside ours, and what others have put there."""
    if kernels.FOLDER is not None and kernels.FOLDER.is_dir():
        beside = [path for path in kernels.FOLDER.parent.iterdir() if kernels.is_name(path.name)]
        beside.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in beside[FOLDERS_KEPT:]:
            shutil.rmtree(path, ignore_errors=True)


def main() -> None:
    """Fill the cache, and say what was done."""
    if kernels.is_complete():
        return
    compile_all()
    drop_old()
    sys.stdout.write(f"compiled into {kernels.FOLDER}\n")


if __name__ == "__main__":
    main()
