"""Eight u64 in one value, and products of 128 bits: what arithmetic of hashes needs beyond numba's.

Owns a type and its few operations, all of them single instructions or nearly so; knows no hash.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model
from numba.np.arrayobj import make_array

LANES = 8
_I32, _I64, _I128 = ir.IntType(32), ir.IntType(64), ir.IntType(128)
_VECTOR = ir.VectorType(_I64, LANES)


class Lanes(types.Type):  # type: ignore[misc]
    """The numba type of eight u64: one register of AVX-512, more registers elsewhere."""

    def __init__(self) -> None:
        super().__init__("lanes")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


lanes = Lanes()


def _constant(value: int) -> Any:
    return ir.Constant(_VECTOR, [_I64(value)] * LANES)


def _order(*numbers: int) -> Any:
    """Which lanes a shuffle takes, of two values; the second's begin at 8."""
    return ir.Constant(ir.VectorType(_I32, LANES), [_I32(number) for number in numbers])


_FIRSTS = _order(0, 0, 0, 0, 0, 0, 0, 0)
_SWAPPED = _order(1, 0, 3, 2, 5, 4, 7, 6)
_LEFT, _RIGHT = _order(0, 8, 2, 10, 4, 12, 6, 14), _order(1, 9, 3, 11, 5, 13, 7, 15)
_PAIRS, _NEXT_PAIRS = _order(0, 1, 4, 5, 8, 9, 12, 13), _order(2, 3, 6, 7, 10, 11, 14, 15)


def _folded(builder: Any, a: Any, b: Any) -> Any:
    product = builder.mul(builder.zext(a, _I128), builder.zext(b, _I128))
    high = builder.trunc(builder.lshr(product, _I128(64)), _I64)
    return builder.xor(builder.trunc(product, _I64), high)


@intrinsic  # type: ignore[untyped-decorator]
def folded(_typing: Any, _a: Any, _b: Any) -> Any:
    """Both halves of the 128-bit product of two u64, xored.

    One factor goes through an empty line of assembler: LLVM would else vectorise the loop around,
    although no vector unit has this product, and take twice as long (6.5 instead of 3.2 ns for 16
    tokens).
    """

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        a = builder.asm(ir.FunctionType(_I64, [_I64]), "", "=r,0", [args[0]], side_effect=False)
        return _folded(builder, a, args[1])

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def load_lanes(_typing: Any, array: Any, _index: Any) -> Any:
    """64 bytes of an array, u32 or u64, from an element on; unchecked, as C would."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = make_array(signature.args[0])(context, builder, args[0]).data
        place = cgutils.gep_inbounds(builder, data, args[1])
        loaded = builder.load(builder.bitcast(place, _VECTOR.as_pointer()))
        loaded.align = array.dtype.bitwidth // 8
        return loaded

    return lanes(array, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def store_lanes(_typing: Any, array: Any, _index: Any, _a: Any) -> Any:
    """Write 64 bytes of an array of u64, from an element on; unchecked, too."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = make_array(signature.args[0])(context, builder, args[0]).data
        place = cgutils.gep_inbounds(builder, data, args[1])
        builder.store(args[2], builder.bitcast(place, _VECTOR.as_pointer()), align=8)
        return context.get_dummy_value()

    return types.void(array, types.uint64, lanes), generate


@intrinsic  # type: ignore[untyped-decorator]
def everywhere(_typing: Any, _a: Any) -> Any:
    """A u64 in every lane."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), args[0], _I32(0))
        return builder.shuffle_vector(first, first, _FIRSTS)

    return lanes(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def added(_typing: Any, _a: Any, _b: Any) -> Any:
    """Sums, lane by lane."""
    return lanes(lanes, lanes), lambda _context, builder, _signature, args: builder.add(*args)


@intrinsic  # type: ignore[untyped-decorator]
def multiplied(_typing: Any, _a: Any, _b: Any) -> Any:
    """Products, lane by lane."""
    return lanes(lanes, lanes), lambda _context, builder, _signature, args: builder.mul(*args)


@intrinsic  # type: ignore[untyped-decorator]
def xored(_typing: Any, _a: Any, _b: Any) -> Any:
    """Exclusive ors, lane by lane."""
    return lanes(lanes, lanes), lambda _context, builder, _signature, args: builder.xor(*args)


@intrinsic  # type: ignore[untyped-decorator]
def shifted_right(_typing: Any, _a: Any, _bits: Any) -> Any:
    """Each lane shifted to the right, by what its lane of the second says."""
    return lanes(lanes, lanes), lambda _context, builder, _signature, args: builder.lshr(*args)


@intrinsic  # type: ignore[untyped-decorator]
def swapped(_typing: Any, _a: Any) -> Any:
    """Neighbours in each other's places: 1, 0, 3, 2, 5, 4, 7, 6."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.shuffle_vector(args[0], args[0], _SWAPPED)

    return lanes(lanes), generate


@intrinsic  # type: ignore[untyped-decorator]
def halves_multiplied(_typing: Any, _a: Any) -> Any:
    """The lower half of each lane times its upper half."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        low = builder.and_(args[0], _constant((1 << 32) - 1))
        return builder.mul(low, builder.lshr(args[0], _constant(32)))

    return lanes(lanes), generate


@intrinsic  # type: ignore[untyped-decorator]
def pairs_folded(_typing: Any, _a: Any) -> Any:
    """The sum over lanes 0 and 1, 2 and 3, ... of `folded`."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        total = _I64(0)
        for i in range(0, LANES, 2):
            pair = [builder.extract_element(args[0], _I32(i + half)) for half in (0, 1)]
            total = builder.add(total, _folded(builder, *pair))
        return total

    return types.uint64(lanes), generate


@intrinsic  # type: ignore[untyped-decorator]
def neighbours_folded(_typing: Any, _a: Any, _b: Any) -> Any:
    """`folded` of neighbours: the first's lanes 0 and 1, the second's, the first's 2 and 3, ...

    High halves of products are made of products of 32-bit halves, which vector units do have.
    """

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

    return lanes(lanes, lanes), generate


@intrinsic  # type: ignore[untyped-decorator]
def pairs_added(_typing: Any, _a: Any, _b: Any) -> Any:
    """Pairs and their next pairs: sums of lanes 0 and 2, 1 and 3, 4 and 6, 5 and 7; of both."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pairs = builder.shuffle_vector(*args, _PAIRS)
        return builder.add(pairs, builder.shuffle_vector(*args, _NEXT_PAIRS))

    return lanes(lanes, lanes), generate
