"""How kernels are compiled, and where their machine code is kept.

Kernels take arrays and numbers, return numbers or nothing, run without the interpreter's lock,
and never raise: the classes around them check what goes in. `kernel` and `inlined` are the only
decorators under which numba takes functions of ours. Importing this module imports numba, so
processes without kernels do not (0.3 s).

The machine code is kept in the first of these folders that can be used: `KVLANE_KERNEL_CACHE`, the
virtual environment, `~/.cache/kvlane/kernels`. In it is a folder for each state of what the code
depends on: sources, Python, numba, processor. (Numba itself would notice neither a change of what
was inlined from another file nor a file whose time was restored.) `indexer/warm.py` fills it
beforehand. A process that finds it read-only works on a copy of its own; one that finds no folder
compiles.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite import binding
from numba import types
from numba.core import event

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
MODULES = ("indexer.hash_kernels", "indexer.index", "app.routing.kernels", "app.engine.quiet")
"""All modules with kernels, or that lead to them; by name, since nothing here imports `app`. Those
whose kernels have no signatures give a `warm_up()` that calls each of them as it will be called."""
VARIABLE = "KVLANE_KERNEL_CACHE"
COMPLETE = "complete"
"""A file that stands in a folder when all kernels do."""
_IMPORTED = re.compile(r"^from indexer(?:\.(\w+))? import (.+)", re.MULTILINE)


def sources() -> list[Path]:
    """The files with kernels, and all files of the index that these import."""
    folder = Path(__file__).parents[1]
    found: set[str] = set()
    missing = {"indexer.kernels", *MODULES}
    while missing:
        found |= missing
        texts = [_file(folder, name).read_text() for name in missing]
        imported = [line for text in texts for line in _IMPORTED.findall(text)]
        words = [word for a, b in imported for word in re.findall(r"\w+", a or b)]
        missing = {f"indexer.{word}" for word in words} - found
    return [_file(folder, name) for name in sorted(found)]


def _file(folder: Path, module: str) -> Path:
    return folder.joinpath(*module.split(".")).with_suffix(".py")


def dependencies() -> str:
    """Sixteen hex digits that change with whatever the machine code depends on."""
    parts = [
        sys.implementation.cache_tag or "", platform.machine(), numba.__version__,
        binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten(),
        *(path.read_text() for path in sources()),
    ]  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def is_name(name: str) -> bool:
    """Whether a folder of this name is one of ours."""
    return re.fullmatch("[0-9a-f]{16}", name) is not None


def roots() -> list[Path]:
    """Where machine code may be kept, best first."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return [Path(chosen)]
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    home = Path(caches, "kvlane", "kernels")
    in_environment = sys.prefix != sys.base_prefix
    return [Path(sys.prefix, "var", "kvlane-kernels"), home] if in_environment else [home]


def settle(candidates: list[Path]) -> Path | None:
    """The first folder that is complete or can be written; None if none can.

    Numba wants to write where it reads, so what is complete and read-only is copied.
    """
    for folder in candidates:
        if is_writable(folder):
            return folder
        if (folder / COMPLETE).is_file():
            copy = _private()
            return copy and Path(shutil.copytree(folder, copy, dirs_exist_ok=True))
    log.warning(
        "no folder for machine code can be written: not %s; so the kernels are compiled at every "
        "start. %s names another folder", ", ".join(map(str, candidates)), VARIABLE,
    )  # fmt: skip
    return _private()


def is_writable(folder: Path) -> bool:
    """Whether files can be made in a folder, which is made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def _private() -> Path | None:
    """A folder that ends with this process; None where not even that can be made."""
    try:
        folder = tempfile.mkdtemp(prefix="kvlane-kernels-")
    except OSError:
        return None
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


FOLDER = settle([root / dependencies() for root in roots()])
if FOLDER is not None:
    numba.config.CACHE_DIR = str(FOLDER)


def is_complete() -> bool:
    """Whether all kernels are there in machine code."""
    return FOLDER is not None and (FOLDER / COMPLETE).is_file()


def set_complete() -> None:
    """Tell later processes that nothing is left to compile."""
    if FOLDER is not None:
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / COMPLETE).touch()


class Announcer(event.Listener):  # type: ignore[misc]
    """Says that compiling begins, once: this process will do little else for a while."""

    said = False

    def on_start(self, begun: Any) -> None:
        """Numba begins to compile something, which may not be ours."""
        ours = begun.data["dispatcher"].py_func.__module__.startswith(("indexer.", "app."))
        if ours and not self.said:
            self.said = True
            log.warning(
                "compiling the kernels for this processor: up to 15 s, once "
                "(`make setup`, or `python -m indexer.warm`)"
            )

    def on_end(self, ended: Any) -> None:
        """Nothing to say."""


event.register("numba:compile", Announcer())


def kernel(*signatures: Any, allocates: bool = False) -> Callable[[F], F]:
    """Compile for these numba signatures, and no others, where the function is defined.

    Without any: for whatever it is called with, when it is called. Read-only arrays are another
    type than others, unless a signature takes both.

    Only what `allocates` counts references, two locked instructions for each array of each call: a
    match of 64 blocks took 2.1 us with them and takes 0.7 without. What does not must make no
    arrays (no np.empty, no assignment to a slice; views are fine), and what does must not get
    arrays as results from what does not.
    """
    given = list(signatures) or None
    options = {"nogil": True, "cache": FOLDER is not None, "_nrt": allocates}
    return lambda function: _compiled(function, given, **options)


def inlined(function: F) -> F:
    """A scalar function that disappears in the kernels which use it."""
    return _compiled(function, None, forceinline=True, _nrt=False)


def _compiled(function: F, signatures: list[Any] | None, **options: bool) -> F:
    """Numba's decorator, less what takes time for nothing: a sixth of it.

    No code for being called from C. And once for all integers: numba would compile a function anew
    for every constant that it is called with.
    """
    dispatcher = numba.njit(
        signatures, error_model="numpy", no_cfunc_wrapper=True, **options
    )(function)  # fmt: skip
    compile_for = dispatcher.compile

    def compile_once(types_of_arguments: Any) -> Any:
        if isinstance(types_of_arguments, tuple):
            types_of_arguments = tuple(map(types.unliteral, types_of_arguments))
        return compile_for(types_of_arguments)

    dispatcher.compile = compile_once
    return cast("F", dispatcher)
