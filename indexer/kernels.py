"""How kernels are compiled: the two decorators under which numba takes every function of ours.

Kernels take arrays and integers, return integers or nothing, run without the interpreter's lock,
and never raise: the classes around them check what goes in. Importing this module imports numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def kernel(*signatures: Any) -> Callable[[F], F]:
    """Compile for these numba signatures where the function is defined; without any, as called."""
    compiled = njit(list(signatures) or None, nogil=True, cache=True, error_model="numpy")
    return cast("Callable[[F], F]", compiled)


def inlined(function: F) -> F:
    """A scalar function that disappears in the kernels which use it."""
    return cast("F", njit(forceinline=True, error_model="numpy")(function))
