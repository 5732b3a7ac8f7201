"""What forked engine cores need on CPUs.

vLLM looks through the attributes of all modules for kernels to replace. `lib` of llvmlite, which
the index brings into this process, pretends to have whatever it is asked for, `__dict__` too.
"""

from __future__ import annotations


def make_forkable() -> None:
    """Let llvmlite deny what it does not have. Idempotent; harmless to all else."""
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
