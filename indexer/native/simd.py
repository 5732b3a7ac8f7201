"""SIMD intrinsics for numba: a vector of eight u64, and 128-bit products.

Owns a type and its few operations, each one instruction or nearly so; no hash.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model
from numba.np.arrayobj import make_array

SIMD_WIDTH = 8
_I32, _I64, _I128 = ir.IntType(32), ir.IntType(64), ir.IntType(128)
_VECTOR = ir.VectorType(_I64, SIMD_WIDTH)


class SimdType(types.Type):  # type: ignore[misc]
    """Numba type of eight u64: one register of AVX-512, several registers elsewhere."""

    def __init__(self) -> None:
        super().__init__("lanes")


@register_model(SimdType)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


simd = SimdType()


def _constant(value: int) -> Any:
    return ir.Constant(_VECTOR, [_I64(value)] * SIMD_WIDTH)


def _shuffle_mask(*numbers: int) -> Any:
    """Shuffle mask over the lanes of two values; those of the second start at 8."""
    return ir.Constant(ir.VectorType(_I32, SIMD_WIDTH), [_I32(number) for number in numbers])


_FIRSTS = _shuffle_mask(0, 0, 0, 0, 0, 0, 0, 0)
_SWAPPED = _shuffle_mask(1, 0, 3, 2, 5, 4, 7, 6)
_LEFT, _RIGHT = _shuffle_mask(0, 8, 2, 10, 4, 12, 6, 14), _shuffle_mask(1, 9, 3, 11, 5, 13, 7, 15)
_PAIRS, _NEXT_PAIRS = (
    _shuffle_mask(0, 1, 4, 5, 8, 9, 12, 13),
    _shuffle_mask(2, 3, 6, 7, 10, 11, 14, 15),
)


def _folded(builder: Any, a: Any, b: Any) -> Any:
    product = builder.mul(builder.zext(a, _I128), builder.zext(b, _I128))
    high = builder.trunc(builder.lshr(product, _I128(64)), _I64)
    return builder.xor(builder.trunc(product, _I64), high)


@intrinsic  # type: ignore[untyped-decorator]
def mul_fold(_typing: Any, _a: Any, _b: Any) -> Any:
    """Xor of both halves of the 128-bit product of two u64. One factor passes through an empty line
    of assembler, or LLVM would vectorise the surrounding loop, to code of half the speed."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        a = builder.asm(ir.FunctionType(_I64, [_I64]), "", "=r,0", [args[0]], side_effect=False)
        return _folded(builder, a, args[1])

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def load_simd(_typing: Any, array: Any, _index: Any) -> Any:
    """Load 64 bytes of an array, u32 or u64, from an element on; unchecked."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = make_array(signature.args[0])(context, builder, args[0]).data
        place = cgutils.gep_inbounds(builder, data, args[1])
        loaded = builder.load(builder.bitcast(place, _VECTOR.as_pointer()))
        loaded.align = array.dtype.bitwidth // 8
        return loaded

    return simd(array, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def store_simd(_typing: Any, array: Any, _index: Any, _a: Any) -> Any:
    """Store 64 bytes to an array of u64, from an element on; unchecked."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = make_array(signature.args[0])(context, builder, args[0]).data
        place = cgutils.gep_inbounds(builder, data, args[1])
        builder.store(args[2], builder.bitcast(place, _VECTOR.as_pointer()), align=8)
        return context.get_dummy_value()

    return types.void(array, types.uint64, simd), generate


@intrinsic  # type: ignore[untyped-decorator]
def broadcast(_typing: Any, _a: Any) -> Any:
    """Broadcast a u64 to all lanes."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), args[0], _I32(0))
        return builder.shuffle_vector(first, first, _FIRSTS)

    return simd(types.uint64), generate


def _by_lane(instruction: str) -> Any:
    """Intrinsic: one instruction of LLVM, lane by lane."""

    def by_lane(_typing: Any, _a: Any, _b: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return getattr(builder, instruction)(*args)

        return simd(simd, simd), generate

    return intrinsic(by_lane)


add_lanes, mul_lanes, xor_lanes, shift_right = map(_by_lane, ("add", "mul", "xor", "lshr"))


@intrinsic  # type: ignore[untyped-decorator]
def swap_neighbours(_typing: Any, _a: Any) -> Any:
    """Swap neighbouring lanes: 1, 0, 3, 2, 5, 4, 7, 6."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.shuffle_vector(args[0], args[0], _SWAPPED)

    return simd(simd), generate


@intrinsic  # type: ignore[untyped-decorator]
def mul_halves(_typing: Any, _a: Any) -> Any:
    """Multiply the lower half of each lane by its upper half."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        low = builder.and_(args[0], _constant((1 << 32) - 1))
        return builder.mul(low, builder.lshr(args[0], _constant(32)))

    return simd(simd), generate


@intrinsic  # type: ignore[untyped-decorator]
def fold_pairs(_typing: Any, _a: Any) -> Any:
    """Sum of `mul_fold` over lanes 0 and 1, 2 and 3, ..."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        total = _I64(0)
        for i in range(0, SIMD_WIDTH, 2):
            pair = [builder.extract_element(args[0], _I32(i + half)) for half in (0, 1)]
            total = builder.add(total, _folded(builder, *pair))
        return total

    return types.uint64(simd), generate


@intrinsic  # type: ignore[untyped-decorator]
def fold_neighbours(_typing: Any, _a: Any, _b: Any) -> Any:
    """`mul_fold` of neighbours: lanes 0 and 1 of the first value, then of the second, then 2 and 3
    of the first, and so on; high halves from products of 32-bit halves."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        a, b = builder.shuffle_vector(*args, _LEFT), builder.shuffle_vector(*args, _RIGHT)
        mask, half = _constant((1 << 32) - 1), _constant(32)
        a_low, a_high = builder.and_(a, mask), builder.lshr(a, half)
        b_low, b_high = builder.and_(b, mask), builder.lshr(b, half)
        cross = builder.mul(a_high, b_low)
        middle = builder.add(builder.mul(a_low, b_high), builder.and_(cross, mask))
        middle = builder.add(middle, builder.lshr(builder.mul(a_low, b_low), half))
        high = builder.add(builder.mul(a_high, b_high), builder.lshr(cross, half))
        high = builder.add(high, builder.lshr(middle, half))
        return builder.xor(high, builder.mul(a, b))

    return simd(simd, simd), generate


@intrinsic  # type: ignore[untyped-decorator]
def add_pairs(_typing: Any, _a: Any, _b: Any) -> Any:
    """Add pairs to the next pairs: lanes 0 and 2, 1 and 3, 4 and 6, 5 and 7, of both values."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pairs = builder.shuffle_vector(*args, _PAIRS)
        return builder.add(pairs, builder.shuffle_vector(*args, _NEXT_PAIRS))

    return simd(simd, simd), generate
