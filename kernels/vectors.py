"""Float32 in a CPU's vector registers, from Numba: products of blocks, and what a softmax needs of them.

XLA's own products of float32 reach three quarters of what these cores can do, but attention's passes over scores go
through memory. Here a block of scores stays in a core's first cache from its product to its use. All is written for
LLVM's vectors of any width, which it spreads over the registers that there are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 32
"""Columns of a block, which are queries: the vectors of a softmax are as long."""

_BYTE, _LONG, _FLOAT = ir.IntType(8), ir.IntType(64), ir.FloatType()
FLOATS = ir.VectorType(_FLOAT, LANES)


def usable() -> bool:
    """Whether the device is a CPU that multiplies and adds vectors in one instruction."""
    return jax.default_backend() == "cpu" and available()


@functools.cache
def has(feature: str) -> bool:
    """Whether this CPU has what LLVM calls so."""
    return bool(binding.get_host_cpu_features().get(feature))


def available() -> bool:
    """Whether this CPU multiplies and adds vectors in one instruction."""
    return has("fma") or has("neon")


def compiled(function: Callable[..., None]) -> Any:
    """Numba's compilation of a function, kept on disk where that is possible."""
    result = njit(nogil=True, error_model="numpy")(function)
    with contextlib.suppress(RuntimeError):
        result.enable_caching()
    return result


# What follows builds LLVM's code.


def call(builder: Any, name: str, arguments: list[Any], result: Any = None) -> Any:
    """A call of one of LLVM's own functions."""
    function = ir.FunctionType(result or ir.VoidType(), [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), arguments)


def pointer(builder: Any, address: Any, kind: Any = _BYTE) -> Any:
    """A pointer to `kind` from an address."""
    return builder.inttoptr(address, kind.as_pointer())


def floats(x: float, lanes: int = LANES) -> Any:
    """A vector of one number."""
    return ir.Constant(ir.VectorType(_FLOAT, lanes), [float(np.float32(x))] * lanes)


def ints(x: int, lanes: int = LANES) -> Any:
    """A vector of one whole number."""
    return ir.Constant(ir.VectorType(ir.IntType(32), lanes), [x] * lanes)


def splat(builder: Any, x: Any, kind: Any) -> Any:
    """A vector of the type `kind` whose numbers are all x."""
    empty = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(empty, x, ir.IntType(32)(0))
    return builder.shuffle_vector(one, empty, ints(0, kind.count))


def load(builder: Any, address: Any, kind: Any = FLOATS, align: int = 4) -> Any:
    """What an address holds."""
    return builder.load(pointer(builder, address, kind), align=align)


def store(builder: Any, value: Any, address: Any, align: int = 4) -> None:
    """Writes a vector to an address."""
    builder.store(value, pointer(builder, address, value.type), align=align)


def maximum(builder: Any, x: Any, y: Any) -> Any:
    """The larger of each pair; y where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def fused(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x y + z, rounded once."""
    return call(builder, f"llvm.fma.v{x.type.count}f32", [x, y, z], x.type)


@functools.cache
def _polynomial(degree: int) -> list[float]:
    """2**x from -1/2 to 1/2, lowest power first: to 7e-6 of it with degree 4, 5e-9 with 6; exact at 0."""
    x = np.cos(np.pi * (np.arange(64) + 0.5) / 64) / 2
    series = np.polynomial.chebyshev.chebfit(2 * x, (2.0**x - 1) / x, degree - 1)
    return [1.0, *np.polynomial.chebyshev.cheb2poly(series) * 2.0 ** np.arange(degree)]


def power_of_two(builder: Any, x: Any, degree: int) -> Any:
    """The bits of 2**x for x <= 0; 0 from -126 down, where float32 loses digits."""
    lanes = x.type.count
    lowest = floats(-126, lanes)
    some = builder.fcmp_ordered(">", x, lowest)
    x = maximum(builder, x, lowest)
    whole = call(builder, f"llvm.rint.v{lanes}f32", [x], x.type)
    rest = builder.fsub(x, whole)
    highest, *others = _polynomial(degree)[::-1]
    power = floats(highest, lanes)
    for factor in others:
        power = fused(builder, power, rest, floats(factor, lanes))
    zero = ints(0, lanes)
    exponent = builder.shl(builder.fptosi(whole, zero.type), ints(23, lanes))
    return builder.select(some, builder.add(builder.bitcast(power, zero.type), exponent), zero)


# What follows is for compiled code. Addresses are integers, in bytes.


@intrinsic
def raise_tops(context, scores, rows, tops):
    """tops [LANES] = the larger of itself and each of scores [rows, LANES], float32."""

    def generate(context, builder, signature, arguments):
        scores, rows, tops = arguments
        top = cgutils.alloca_once_value(builder, load(builder, tops))
        with cgutils.for_range(builder, rows) as loop:
            score = load(builder, builder.add(scores, builder.mul(loop.index, _LONG(4 * LANES))))
            builder.store(maximum(builder, builder.load(top), score), top)
        store(builder, builder.load(top), tops)
        return context.get_dummy_value()

    return types.void(types.uintp, types.intp, types.uintp), generate


@intrinsic
def weigh(context, scores, rows, tops, totals):
    """scores [rows, LANES] = 2**(scores - tops [LANES]); adds them to totals [LANES]. All are float32.

    tops: no less than any score of their column.
    """

    def generate(context, builder, signature, arguments):
        scores, rows, tops, totals = arguments
        top = load(builder, tops)
        total = cgutils.alloca_once_value(builder, load(builder, totals))
        with cgutils.for_range(builder, rows) as loop:
            at = builder.add(scores, builder.mul(loop.index, _LONG(4 * LANES)))
            weights = power_of_two(builder, builder.fsub(load(builder, at), top), degree=6)
            weights = builder.bitcast(weights, FLOATS)
            store(builder, weights, at)
            builder.store(builder.fadd(builder.load(total), weights), total)
        store(builder, builder.load(total), totals)
        return context.get_dummy_value()

    return types.void(types.uintp, types.intp, types.uintp, types.uintp), generate


WIDTH = 32 if has("avx512f") else 16
"""Columns that are summed at once: two registers of AVX-512 or AVX2, four of NEON."""


def _multiplied(rows: int, *, adding: bool) -> Any:
    """The product of `rows` rows and `WIDTH` columns, all of whose sums are in registers."""

    @intrinsic
    def multiplied(context, left, stride, step, right, right_stride, count, out, out_stride):
        vector = ir.VectorType(_FLOAT, WIDTH)

        def generate(context, builder, signature, arguments):
            left, stride, step, right, right_stride, count, out, out_stride = arguments

            def row(base: Any, stride: Any, r: int) -> Any:
                return builder.add(base, builder.mul(stride, _LONG(r)))

            zero = ir.Constant(vector, [0.0] * WIDTH)
            before = [load(builder, row(out, out_stride, r), vector) if adding else zero for r in range(rows)]
            sums = [cgutils.alloca_once_value(builder, value) for value in before]
            with cgutils.for_range(builder, count) as loop:
                column = builder.add(left, builder.mul(loop.index, step))
                others = load(builder, builder.add(right, builder.mul(loop.index, right_stride)), vector)
                for r in range(rows):
                    one = splat(builder, load(builder, row(column, stride, r), _FLOAT), vector)
                    builder.store(fused(builder, one, others, builder.load(sums[r])), sums[r])
            for r in range(rows):
                store(builder, builder.load(sums[r]), row(out, out_stride, r))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8), generate

    return multiplied


_set_6, _set_4 = (_multiplied(rows, adding=False) for rows in (6, 4))
_add_6, _add_4 = (_multiplied(rows, adding=True) for rows in (6, 4))


@njit(inline="always")
def _sixes(rows):
    """How many of an even number of rows, at least 4, to take by six; the others are four or eight."""
    return rows // 6 * 6 - (6 if rows % 6 == 2 else 0)


@njit(inline="always")
def multiply(left, stride, step, rows, right, right_stride, columns, count, out, out_stride):
    """out [rows, columns] = left [rows, count] x right [count, columns], float32.

    left: the address of its first number, the bytes from a row to the next, and from a column to the next.
    rows: even, at least 4; columns: a multiple of `LANES`.
    right, out: the address of the first row, and the bytes from a row to the next.
    """
    sixes = _sixes(rows)
    for r in range(0, sixes, 6):
        for column in range(0, 4 * columns, 4 * WIDTH):
            at, to = left + r * stride, out + r * out_stride + column
            _set_6(at, stride, step, right + column, right_stride, count, to, out_stride)
    for r in range(sixes, rows, 4):
        for column in range(0, 4 * columns, 4 * WIDTH):
            at, to = left + r * stride, out + r * out_stride + column
            _set_4(at, stride, step, right + column, right_stride, count, to, out_stride)


@njit(inline="always")
def multiply_add(left, stride, step, rows, right, right_stride, columns, count, out, out_stride):
    """out += left x right, as in `multiply`."""
    sixes = _sixes(rows)
    for column in range(0, 4 * columns, 4 * WIDTH):
        for r in range(0, sixes, 6):
            at, to = left + r * stride, out + r * out_stride + column
            _add_6(at, stride, step, right + column, right_stride, count, to, out_stride)
        for r in range(sixes, rows, 4):
            at, to = left + r * stride, out + r * out_stride + column
            _add_4(at, stride, step, right + column, right_stride, count, to, out_stride)
