"""Kernel compilation with numba, and the cache of the machine code.

Kernels take arrays and numbers, return numbers or nothing, run without the interpreter's lock, and
never raise: the classes around them validate. `kernel` and `inlined` are the only decorators that
compile functions of this project.

The machine code is cached in the first usable of `KVLANE_KERNEL_CACHE_DIR`, the virtual environment
and `~/.cache/kvlane/kernels`, in a subfolder for each combination of sources, Python, numba and
processor (numba would miss a change of a function that was inlined from another file). With a
read-only cache a process works on a private copy; without a folder it compiles.
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
KERNEL_MODULES = (
    "kvlane.indexer.native.xxh3_kernels",
    "kvlane.indexer.index",
    "kvlane.app.routing.selection.cost_kernels",
    "kvlane.app.routing.state.step_kernels",
    "kvlane.app.engine.simulated.fast_forward",
)
"""Modules that contain or import all kernels; by name, since the index does not import the
application. A module whose kernels have no signatures defines `warm_up()`, which calls each."""
CACHE_VARIABLE = "KVLANE_KERNEL_CACHE_DIR"
COMPLETE_MARKER = "complete"
"""Marker file of a folder that has the code of all kernels."""
_IMPORTED = re.compile(r"^from (kvlane\.indexer[.\w]*) import (\([^)]*\)|.+)", re.MULTILINE)


def kernel_sources() -> list[Path]:
    """Files with kernels, and all files of the index that they import."""
    folder = Path(__file__).parents[2]
    found: set[Path] = set()
    unread = {_file(folder, name) for name in ("kvlane.indexer.kernels", *KERNEL_MODULES)}
    while unread:
        found |= unread
        imported = {line for path in unread for line in _IMPORTED.findall(path.read_text())}
        unread = {path for line in imported for path in _files(folder, *line)} - found
    return sorted(found)


def _files(folder: Path, module: str, names: str) -> list[Path]:
    """The files of an import: the module itself, or the modules imported from a package."""
    file = _file(folder, module)
    if file.is_file():
        return [file]
    return [_file(folder, f"{module}.{name}") for name in re.findall(r"\w+", names)]


def _file(folder: Path, module: str) -> Path:
    return folder.joinpath(*module.split(".")).with_suffix(".py")


def dependency_hash() -> str:
    """Hash of everything the machine code depends on: sixteen hex digits."""
    parts = [
        sys.implementation.cache_tag or "",
        platform.machine(),
        numba.__version__,
        *target_processor(),
        *(path.read_text() for path in kernel_sources()),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def target_processor() -> tuple[str, str]:
    """Name and features of the processor to compile for, as LLVM writes them. NUMBA_CPU_NAME and
    NUMBA_CPU_FEATURES name another one than this machine's, as images do."""
    name, features = numba.config.CPU_NAME, numba.config.CPU_FEATURES
    return (
        binding.get_host_cpu_name() if name is None else name,
        binding.get_host_cpu_features().flatten() if features is None else features,
    )


def is_cache_name(name: str) -> bool:
    """Whether a folder name is such a hash."""
    return re.fullmatch("[0-9a-f]{16}", name) is not None


def cache_roots() -> list[Path]:
    """Folders that may hold the cache, in order of preference."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return [Path(chosen)]
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    home = Path(caches, "kvlane", "kernels")
    in_environment = sys.prefix != sys.base_prefix
    return [Path(sys.prefix, "var", "kvlane-kernels"), home] if in_environment else [home]


def choose_cache_folder(candidates: list[Path]) -> Path | None:
    """The first folder that is complete or writable; None if there is none. Numba needs to write
    where it reads, so a complete read-only folder is copied."""
    for folder in candidates:
        if is_writable(folder):
            return folder
        if (folder / COMPLETE_MARKER).is_file():
            copy = _temporary_folder()
            return copy and Path(shutil.copytree(folder, copy, dirs_exist_ok=True))
    log.warning(
        "cannot cache compiled kernels in %s, so they are compiled at every start: set %s to a "
        "writable folder",
        ", ".join(map(str, candidates)),
        CACHE_VARIABLE,
    )
    return _temporary_folder()


def is_writable(folder: Path) -> bool:
    """Whether files can be created in a folder, which is created if missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def _temporary_folder() -> Path | None:
    """A temporary folder of this process; None if it cannot be created."""
    try:
        folder = tempfile.mkdtemp(prefix="kvlane-kernels-")
    except OSError:
        return None
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


CACHE_FOLDER = choose_cache_folder([root / dependency_hash() for root in cache_roots()])
if CACHE_FOLDER is not None:
    numba.config.CACHE_DIR = str(CACHE_FOLDER)


def is_complete() -> bool:
    """Whether the cache has the machine code of all kernels."""
    return CACHE_FOLDER is not None and (CACHE_FOLDER / COMPLETE_MARKER).is_file()


def mark_complete() -> None:
    if CACHE_FOLDER is not None:
        CACHE_FOLDER.mkdir(parents=True, exist_ok=True)
        (CACHE_FOLDER / COMPLETE_MARKER).touch()


class CompileNotifier(event.Listener):  # type: ignore[misc]
    """Logs once that kernels are being compiled, since this delays the process by seconds."""

    has_logged = False

    def on_start(self, begun: Any) -> None:
        """Log the first compilation of a kernel of this project."""
        is_kernel = begun.data["dispatcher"].py_func.__module__.startswith("kvlane.")
        if is_kernel and not self.has_logged:
            self.has_logged = True
            log.warning(
                "compiling the kernels for this processor: up to 15 s, once "
                "(`make setup`, or `python -m kvlane.indexer.precompile`)"
            )

    def on_end(self, ended: Any) -> None:
        """Ignored."""


event.register("numba:compile", CompileNotifier())


def kernel(*signatures: Any, allocates: bool = False) -> Callable[[F], F]:
    """Compile for these numba signatures, and no others, where the function is defined. Without
    signatures: at each call, for its argument types. Read-only arrays have a different type from
    writable ones, unless a signature accepts both.

    Only a kernel that `allocates` counts references, two locked instructions for each array. A
    kernel without must create no arrays (no np.empty, no assignment to a slice; views are fine),
    and a kernel with must not use array results of one without.
    """
    given = list(signatures) or None
    options = {"nogil": True, "cache": CACHE_FOLDER is not None, "_nrt": allocates}
    return lambda function: _compiled(function, given, **options)


def inlined(function: F) -> F:
    """Compile a scalar function that is always inlined into its callers."""
    return _compiled(function, None, forceinline=True, _nrt=False)


def _compiled(function: F, signatures: list[Any] | None, **options: bool) -> F:
    """Numba's decorator without unneeded work, a sixth of the compile time. No wrapper for calls
    from C, and one version for all integers, not one for every constant."""
    dispatcher = numba.njit(signatures, error_model="numpy", no_cfunc_wrapper=True, **options)(
        function
    )
    compile_for = dispatcher.compile

    def compile_once(types_of_arguments: Any) -> Any:
        if isinstance(types_of_arguments, tuple):
            types_of_arguments = tuple(map(types.unliteral, types_of_arguments))
        return compile_for(types_of_arguments)

    dispatcher.compile = compile_once
    return cast("F", dispatcher)
