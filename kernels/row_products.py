"""Products with rows of keys and of values, stored as float32 or bfloat16, in a CPU's vector registers; from Numba.

What decoding does on the host: a few query heads share the reading of a row, which lies along its vector. So each score
is a sum across a vector; four rows' sums are folded together.

Letters: `G` query heads, `S` rows, `H` numbers of a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from rajax.kernels.vectors import call, has, load, splat, store

TOGETHER = 4
"""Rows that are read together. Past the last that matters there must be so many more, of any finite numbers."""

WIDE = has("avx512f")

LANES = 16 if WIDE else 8
"""Numbers of a vector."""

HEADS = 4 if WIDE else 2
"""Query heads whose sums fit into the registers."""

_LONG, _INT, _FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
_FLOATS = ir.VectorType(_FLOAT, LANES)


def widen(x):
    """A stored number as float32, in compiled code. uint16 are the bits of a bfloat16."""


@overload(widen, inline="always")
def _widen_compiled(x):
    if x == types.uint16:
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


# What follows builds LLVM's code.


def _wide(builder: Any, place: Any, dtype: Any) -> Any:
    """`LANES` stored numbers as float32."""
    if dtype == types.uint16:
        ints = ir.VectorType(_INT, LANES)
        bits = builder.zext(load(builder, place, ir.VectorType(ir.IntType(16), LANES), align=2), ints)
        return builder.bitcast(builder.shl(bits, ir.Constant(ints, [16] * LANES)), _FLOATS)
    return load(builder, place, _FLOATS)


def _add_product(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x y + z, in one instruction where there is one."""
    return call(builder, f"llvm.fmuladd.v{LANES}f32", [x, y, z], _FLOATS)


def _fold(builder: Any, u: Any, v: Any) -> Any:
    """Sums of neighbours: of each four lanes of u, two, and then of v's."""
    count = u.type.count

    def picked(first: int) -> Any:
        lanes = [
            which + block + lane
            for block in range(0, count, 4)
            for which in (0, count)
            for lane in (first, first + 2)
        ]
        return builder.shuffle_vector(u, v, ir.Constant(ir.VectorType(_INT, count), lanes))

    return builder.fadd(picked(0), picked(1))


def totals_of(builder: Any, sums: list[Any]) -> Any:
    """A vector of the sums of four vectors."""
    a, b, c, d = sums
    total = _fold(builder, _fold(builder, a, b), _fold(builder, c, d))
    while (count := total.type.count) > TOGETHER:
        halves = ir.VectorType(_INT, count // 2)
        low, high = (
            builder.shuffle_vector(total, total, ir.Constant(halves, list(range(first, first + count // 2))))
            for first in (0, count // 2)
        )
        total = builder.fadd(low, high)
    return total


def place_of(context: Any, builder: Any, signature: Any, arguments: Any, which: int, *indices: Any) -> Any:
    """The address of an element of the argument number `which`, an array."""
    kind = signature.args[which]
    array = context.make_array(kind)(context, builder, arguments[which])
    shape, strides = (cgutils.unpack_tuple(builder, t) for t in (array.shape, array.strides))
    pointer = cgutils.get_item_pointer2(context, builder, array.data, shape, strides, kind.layout, indices)
    return builder.ptrtoint(pointer, _LONG)


def _places(call_of: tuple[Any, ...], which: int, start: Any, count: int, column: Any) -> list[Any]:
    """The addresses in rows start, start + 1, ... of one column; `call_of` is what an intrinsic generates from."""
    _, builder, *_ = call_of
    return [place_of(*call_of, which, builder.add(start, _LONG(i)), column) for i in range(count)]


def _row_places(call_of: tuple[Any, ...], which: int, first: Any, picked: bool) -> list[Any]:
    """The addresses of `TOGETHER` rows: from `first` on, or those whose numbers are at the address `first`."""
    builder = call_of[1]
    if not picked:
        return _places(call_of, which, first, TOGETHER, _LONG(0))
    numbers = [load(builder, builder.add(first, _LONG(8 * i)), _LONG, align=8) for i in range(TOGETHER)]
    return [place_of(*call_of, which, number, _LONG(0)) for number in numbers]


def _scored(heads: int, *, picked: bool = False) -> Any:
    """`score_rows` of `TOGETHER` rows and so many query heads, of whole vectors; `score_picked` where `picked`."""

    @intrinsic
    def scored(context, queries, first_head, rows, first, width, scores, at):
        def generate(context, builder, signature, arguments):
            _, first_head, _, first, width, _, at = arguments
            zero = _LONG(0)

            call_of = context, builder, signature, arguments
            dtype = signature.args[2].dtype
            at_queries = _places(call_of, 0, first_head, heads, zero)
            at_rows = _row_places(call_of, 2, first, picked)
            none = ir.Constant(_FLOATS, [0.0] * LANES)
            sums = [[cgutils.alloca_once_value(builder, none) for _ in range(TOGETHER)] for _ in range(heads)]
            with cgutils.for_range(builder, builder.udiv(width, _LONG(LANES))) as loop:
                column = builder.mul(loop.index, _LONG(LANES))
                here = builder.mul(column, _LONG(dtype.bitwidth // 8))
                row = [_wide(builder, builder.add(place, here), dtype) for place in at_rows]
                here = builder.mul(column, _LONG(4))
                for i in range(heads):
                    query = load(builder, builder.add(at_queries[i], here), _FLOATS)
                    for j in range(TOGETHER):
                        builder.store(
                            _add_product(builder, query, row[j], builder.load(sums[i][j])), sums[i][j]
                        )
            for place, parts in zip(_places(call_of, 5, first_head, heads, at), sums, strict=True):
                store(builder, totals_of(builder, [builder.load(part) for part in parts]), place)
            return context.get_dummy_value()

        whole = types.intp
        return types.void(queries, whole, rows, whole, whole, scores, whole), generate

    return scored


def _added(heads: int, *, picked: bool = False) -> Any:
    """`add_rows` of `TOGETHER` rows and so many query heads, of whole vectors; `add_picked` where `picked`."""

    @intrinsic
    def added(context, weights, first_head, at, rows, first, width, sums):
        def generate(context, builder, signature, arguments):
            _, first_head, at, _, first, width, _ = arguments
            zero, dtype = _LONG(0), signature.args[3].dtype
            call_of = context, builder, signature, arguments
            columns = [builder.add(at, _LONG(j)) for j in range(TOGETHER)]
            at_weights = [_places(call_of, 0, first_head, heads, column) for column in columns]
            factors = [
                [splat(builder, load(builder, p, _FLOAT), _FLOATS) for p in places] for places in at_weights
            ]
            at_rows = _row_places(call_of, 3, first, picked)
            at_sums = _places(call_of, 6, first_head, heads, zero)
            with cgutils.for_range(builder, builder.udiv(width, _LONG(LANES))) as loop:
                column = builder.mul(loop.index, _LONG(LANES))
                here = builder.mul(column, _LONG(dtype.bitwidth // 8))
                row = [_wide(builder, builder.add(p, here), dtype) for p in at_rows]
                here = builder.mul(column, _LONG(4))
                for i in range(heads):
                    to = builder.add(at_sums[i], here)
                    total = load(builder, to, _FLOATS)
                    for j in range(TOGETHER):
                        total = _add_product(builder, factors[j][i], row[j], total)
                    store(builder, total, to)
            return context.get_dummy_value()

        whole = types.intp
        return types.void(weights, whole, whole, rows, whole, whole, sums), generate

    return added


_score_1, _score_2, _score_3, _score_4 = (_scored(heads) for heads in (1, 2, 3, 4))
_add_1, _add_2, _add_3, _add_4 = (_added(heads) for heads in (1, 2, 3, 4))
_picked_1, _picked_2, _picked_3, _picked_4 = (_scored(heads, picked=True) for heads in (1, 2, 3, 4))
_put_1, _put_2, _put_3, _put_4 = (_added(heads, picked=True) for heads in (1, 2, 3, 4))


# What follows is for compiled code.


@njit(inline="always")
def score_rows(queries, rows, start, stop, width, scores, at):
    """scores[:, at + i] = queries [G, H] . rows[start + i], up to row `stop`, and `TOGETHER` - 1 columns more.

    rows: [S, H], float32 or the bits of bfloat16; scores: [G, *] float32.
    """
    heads = len(queries)
    for first in range(0, heads, HEADS):
        number = min(HEADS, heads - first)
        for row in range(start, stop, TOGETHER):
            to = at + row - start
            if number == 4:
                _score_4(queries, first, rows, row, width, scores, to)
            elif number == 3:
                _score_3(queries, first, rows, row, width, scores, to)
            elif number == 2:
                _score_2(queries, first, rows, row, width, scores, to)
            else:
                _score_1(queries, first, rows, row, width, scores, to)
    for row in range(start, stop if width % LANES else start):
        for g in range(heads):
            for h in range(width // LANES * LANES, width):
                scores[g, at + row - start] += queries[g, h] * widen(rows[row, h])


@njit(inline="always")
def add_rows(weights, at, rows, first, width, sums):
    """sums [G, H] += weights[:, at : at + 4] x rows[first : first + 4] of [S, H], float32 or the bits of bfloat16."""
    heads = len(sums)
    for head in range(0, heads, HEADS):
        number = min(HEADS, heads - head)
        if number == 4:
            _add_4(weights, head, at, rows, first, width, sums)
        elif number == 3:
            _add_3(weights, head, at, rows, first, width, sums)
        elif number == 2:
            _add_2(weights, head, at, rows, first, width, sums)
        else:
            _add_1(weights, head, at, rows, first, width, sums)
    for g in range(heads if width % LANES else 0):
        for j in range(TOGETHER):
            for h in range(width // LANES * LANES, width):
                sums[g, h] += weights[g, at + j] * widen(rows[first + j, h])


@njit(inline="always")
def score_picked(queries, rows, picked, width, scores):
    """scores[:, i] = queries [G, H] . rows[picked[i]] of [S, H]; picked [n] int64, n a multiple of `TOGETHER`."""
    heads = len(queries)
    for first in range(0, heads, HEADS):
        number = min(HEADS, heads - first)
        for at in range(0, len(picked), TOGETHER):
            which = picked[at:].ctypes.data
            if number == 4:
                _picked_4(queries, first, rows, which, width, scores, at)
            elif number == 3:
                _picked_3(queries, first, rows, which, width, scores, at)
            elif number == 2:
                _picked_2(queries, first, rows, which, width, scores, at)
            else:
                _picked_1(queries, first, rows, which, width, scores, at)
    for i in range(len(picked) if width % LANES else 0):
        for g in range(heads):
            for h in range(width // LANES * LANES, width):
                scores[g, i] += queries[g, h] * widen(rows[picked[i], h])


@njit(inline="always")
def add_picked(weights, rows, picked, width, sums):
    """sums [G, H] += weights [G, n] x rows[picked]; as `score_picked`."""
    heads = len(sums)
    for head in range(0, heads, HEADS):
        number = min(HEADS, heads - head)
        for at in range(0, len(picked), TOGETHER):
            which = picked[at:].ctypes.data
            if number == 4:
                _put_4(weights, head, at, rows, which, width, sums)
            elif number == 3:
                _put_3(weights, head, at, rows, which, width, sums)
            elif number == 2:
                _put_2(weights, head, at, rows, which, width, sums)
            else:
                _put_1(weights, head, at, rows, which, width, sums)
    for g in range(heads if width % LANES else 0):
        for i in range(len(picked)):
            for h in range(width // LANES * LANES, width):
                sums[g, h] += weights[g, i] * widen(rows[picked[i], h])
