"""Memory intrinsics for numba: huge pages, prefetch, atomic loads and stores, fences.

All take an array and an index into it, unchecked. Nothing else in the project uses raw memory. A
*pair* is two neighbouring u64, aligned at 16 bytes, read and written in one instruction, which is
atomic on processors with AVX and from ARMv8.4 on, so no reader gets half a pair.
"""

from __future__ import annotations

import mmap
import platform
from contextlib import suppress
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array
from numpy.typing import NDArray

HUGE_PAGE = 2 << 20
MIN_HUGE_BYTES = 1 << 16
"""Bytes below which huge pages gain nothing, and numpy allocates the array."""

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_PAIR = ir.VectorType(_I64, 2)
_AVX = "v" if binding.get_host_cpu_features().get("avx") else ""
_LOAD = {
    "x86_64": (f"{_AVX}movdqa ($1), $0", "=x,r,~{memory}"),
    "aarch64": ("ldr ${0:q}, [$1]", "=w,r,~{memory}"),
}.get(platform.machine())
"""Assembler and constraints of one load of a pair. After AVX-512, the encoding without a v is slow
on Intel processors: it keeps the upper parts of registers."""
binding.initialize_native_asmparser()


def allocate_zeros(words: int, dtype: Any = np.uint64) -> NDArray[Any]:
    """An array of zeros, on huge pages where the system has them; its memory is not touched yet."""
    size = words * np.dtype(dtype).itemsize
    if size < MIN_HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return _aligned(np.zeros(size + 16, np.uint8), 16, size).view(dtype)
    area = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    return _aligned(np.frombuffer(area, np.uint8), HUGE_PAGE, size).view(dtype)


def _aligned(area: NDArray[np.uint8], boundary: int, size: int) -> NDArray[np.uint8]:
    start = -area.ctypes.data % boundary
    return area[start : start + size]


def _pointer(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Pointer to an element; the arguments are the array and the index."""
    array = make_array(signature.args[0])(context, builder, args[0])
    return cgutils.gep_inbounds(builder, array.data, args[1])


def _array_at(element: Any) -> Any:
    """Intrinsic: the array whose address and length are the `number`-th pair of an i64 array. The
    caller keeps its memory."""
    array = types.Array(element, 1, "C")

    def array_at(_: Any, places: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            made, word = make_array(array)(context, builder), context.get_constant(types.intp, 8)
            place = _pointer(context, builder, signature, [args[0], builder.mul(args[1], _I64(2))])
            populate_array(
                made, data=builder.inttoptr(builder.load(place), made.data.type),
                shape=[builder.load(builder.gep(place, [_I32(1)]))], strides=[word], itemsize=word,
                meminfo=None,
            )  # fmt: skip
            return made._getvalue()  # noqa: SLF001 - as numba's own intrinsics

        return array(places, types.int64), generate

    return intrinsic(array_at)


u64_array_at, i64_array_at = _array_at(types.uint64), _array_at(types.int64)


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line of an element."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.bitcast(_pointer(context, builder, signature, args), _I8.as_pointer())
        of = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        call = builder.module.declare_intrinsic("llvm.prefetch", [_I8.as_pointer()], of)
        builder.call(call, [place, _I32(0), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def load_pair(_: Any, array: Any, index: Any) -> Any:
    """Load the pair at an even index of a u64 array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.bitcast(_pointer(context, builder, signature, args), _PAIR.as_pointer())
        pair = builder.load(place)
        pair.align = 16
        halves = [builder.extract_element(pair, _I32(half)) for half in (0, 1)]
        return context.make_tuple(builder, signature.return_type, halves)

    return types.UniTuple(types.uint64, 2)(array, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def load_pair_once(_: Any, array: Any, index: Any) -> Any:
    """As `load_pair`, for readers concurrent with a writer: always one instruction. The compiler
    may split a load in two, or repeat it later; it cannot do so with assembler."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.bitcast(_pointer(context, builder, signature, args), _PAIR.as_pointer())
        if _LOAD is None:
            pair = builder.load(place)
            pair.align = 16
        else:
            of = ir.FunctionType(_PAIR, [_PAIR.as_pointer()])
            pair = builder.asm(of, *_LOAD, [place], side_effect=True)
        halves = [builder.extract_element(pair, _I32(half)) for half in (0, 1)]
        return context.make_tuple(builder, signature.return_type, halves)

    return types.UniTuple(types.uint64, 2)(array, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def store_pair(_: Any, array: Any, index: Any, first: Any, second: Any) -> Any:
    """Store a pair at an even index of a u64 array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.bitcast(_pointer(context, builder, signature, args), _PAIR.as_pointer())
        pair = ir.Constant(_PAIR, ir.Undefined)
        for half in (0, 1):
            pair = builder.insert_element(pair, args[2 + half], _I32(half))
        builder.store(pair, place).align = 16
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint64, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def load_acquire(_: Any, array: Any, index: Any) -> Any:
    """Load an element of an i64 array, before all later loads."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, signature, args), "acquire", 8)

    return types.int64(array, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def store_release(_: Any, array: Any, index: Any, value: Any) -> Any:
    """Store an element of an i64 array, after all earlier stores."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _pointer(context, builder, signature, args)
        builder.store_atomic(args[2], place, "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def fence(_: Any) -> Any:
    """Acquire and release fence: no load or store moves across it, except that an earlier store may
    become visible after a later load. A compiler barrier only on x86-64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("acq_rel")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def trailing_zeros(_: Any, word: Any) -> Any:
    """Index of the lowest set bit of a u64 that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate
