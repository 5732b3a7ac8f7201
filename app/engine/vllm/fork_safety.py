"""Fork safety of this process for vLLM's engine cores on CPUs.

vLLM searches the attributes of all modules for kernels to replace. `lib` of llvmlite, which the
index loads into this process, returns a value for every attribute, `__dict__` included.
"""

from __future__ import annotations


def make_fork_safe() -> None:
    """Make llvmlite raise AttributeError for dunder attributes. Idempotent; no other effect."""
    from llvmlite.binding import ffi

    kind = ffi._lib_wrapper  # noqa: SLF001 - it has no other name
    plain = kind.__getattr__
    if getattr(plain, "is_honest", False):
        return

    def honest(self: object, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return plain(self, name)

    honest.is_honest = True  # type: ignore[attr-defined]
    kind.__getattr__ = honest
