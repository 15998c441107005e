"""Scores of keys from four-bit codes, in a CPU's vector registers; from Numba.

A key is `M` codes, each of which names one of 16 centroids (product quantization, Jégou et al. 2011). For a query a
small table tells what each centroid adds to the score; a register holds such a table, and one instruction looks 32
codes up in it (André et al., arXiv 1704.07355, which ScaNN's and Faiss' scans do as well).

Letters: `G` query heads, `M` codes of a key, `N` blocks of `BLOCK` keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from rajax.kernels.row_products import place_of
from rajax.kernels.vectors import call, has, ints, load, power_of_two, store

CENTROIDS = 16
"""What four bits can name."""

BLOCK = 64
"""Keys whose codes lie together: of each of the M, 32 bytes."""

HIGHEST = 127
"""The largest number in a table: two of them still fit into a byte."""

HEADS = 2
"""Query heads whose sums fit into the registers."""

LOOKED_UP = has("avx2")
"""Whether this CPU looks codes up in registers."""

_LONG, _INT = ir.IntType(64), ir.IntType(32)
_TABLE = ir.VectorType(ir.IntType(8), CENTROIDS)
_BYTES, _WORDS = ir.VectorType(ir.IntType(8), 32), ir.VectorType(ir.IntType(16), 16)


@njit(inline="always")
def place_in_block(j):
    """In which of a code's 32 bytes the key j of a block is, and whether in the high half of it.

    Sums are 16 bits wide: those of a register's even bytes come out together, and so do those of its odd ones.
    """
    return j % 16 * 2 + j % 32 // 16, j >= 32


_PLACES = np.array([place_in_block(j)[0] for j in range(BLOCK // 2)])


def sum_codes_reference(tables: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """sums [G, 64 N] uint16 of what tables [G, M, 16] uint8 have for the packed codes [N, M, 32]."""
    keys = np.stack([codes & 15, codes >> 4], axis=1)[..., _PLACES].swapaxes(2, 3).reshape(-1, codes.shape[1])
    return tables[:, np.arange(codes.shape[1]), keys].sum(-1, dtype=np.uint16)


# What follows builds LLVM's code.


def _words(x: int) -> Any:
    return ir.Constant(_WORDS, [x] * 16)


def _summed(heads: int) -> Any:
    """`sum_codes` of a block for so many query heads; M is even."""

    @intrinsic
    def summed(context, tables, first_head, codes, block, sums, at):
        def generate(context, builder, signature, arguments):
            _, first_head, _, block, _, at = arguments
            call_of = context, builder, signature, arguments
            zero = _LONG(0)
            count = cgutils.unpack_tuple(
                builder, context.make_array(signature.args[2])(context, builder, arguments[2]).shape
            )[1]

            def head(i: int) -> Any:
                return builder.add(first_head, _LONG(i))

            at_codes = place_of(*call_of, 2, block, zero, zero)
            at_tables = [place_of(*call_of, 0, head(i), zero, zero) for i in range(heads)]
            # Of the low and the high halves: sums of both bytes of a word, and of its high one.
            totals = [
                [[cgutils.alloca_once_value(builder, _words(0)) for _ in range(2)] for _ in range(2)]
                for _ in range(heads)
            ]
            low_bits = ir.Constant(_BYTES, [15] * 32)
            twice = ir.Constant(ir.VectorType(_INT, 32), list(range(CENTROIDS)) * 2)
            with cgutils.for_range(builder, builder.udiv(count, _LONG(2))) as loop:
                halves = []
                for which in range(2):
                    m = builder.add(builder.mul(loop.index, _LONG(2)), _LONG(which))
                    both = load(builder, builder.add(at_codes, builder.mul(m, _LONG(32))), _BYTES, align=1)
                    high = builder.bitcast(builder.lshr(builder.bitcast(both, _WORDS), _words(4)), _BYTES)
                    halves.append((builder.and_(both, low_bits), builder.and_(high, low_bits)))
                for i in range(heads):
                    found: list[Any] = [None, None]
                    for which in range(2):
                        m = builder.add(builder.mul(loop.index, _LONG(2)), _LONG(which))
                        place = builder.add(at_tables[i], builder.mul(m, _LONG(CENTROIDS)))
                        table = load(builder, place, _TABLE, align=1)
                        table = builder.shuffle_vector(table, table, twice)
                        for half in range(2):
                            one = call(builder, "llvm.x86.avx2.pshuf.b", [table, halves[which][half]], _BYTES)
                            found[half] = builder.add(found[half], one) if which else one
                    for half in range(2):
                        words = builder.bitcast(found[half], _WORDS)
                        odd = builder.lshr(words, _words(8))
                        for total, more in zip(totals[i][half], (words, odd), strict=True):
                            builder.store(builder.add(builder.load(total), more), total)
            for i in range(heads):
                for half in range(2):
                    both, odd = (builder.load(total) for total in totals[i][half])
                    even = builder.sub(both, builder.shl(odd, _words(8)))
                    for j, words in enumerate((even, odd)):
                        column = builder.add(at, _LONG(32 * half + 16 * j))
                        store(builder, words, place_of(*call_of, 4, head(i), column), align=2)
            return context.get_dummy_value()

        whole = types.intp
        return types.void(tables, whole, codes, whole, sums, whole), generate

    return summed


_sum_1, _sum_2 = (_summed(heads) for heads in (1, 2))


@intrinsic
def weigh_sums(context, sums, size, scale, top):
    """The sum of 2**(scale (sum - top)) over `size`, at most 16, sums; to 2e-4 of it.

    sums: the address of 16 uint16, none of which is more than `top` among the first `size`; scale and top are float32.
    """
    lanes = 16
    floats_ = ir.VectorType(ir.FloatType(), lanes)

    def spread(builder: Any, x: Any, kind: Any) -> Any:
        empty = ir.Constant(kind, ir.Undefined)
        one = builder.insert_element(empty, x, _INT(0))
        return builder.shuffle_vector(one, empty, ir.Constant(ir.VectorType(_INT, lanes), [0] * lanes))

    def generate(context, builder, signature, arguments):
        sums, size, scale, top = arguments
        words = load(builder, sums, _WORDS, align=2)
        x = builder.uitofp(builder.zext(words, ir.VectorType(_INT, lanes)), floats_)
        x = builder.fmul(builder.fsub(x, spread(builder, top, floats_)), spread(builder, scale, floats_))
        numbers = ir.VectorType(_INT, lanes)
        inside = builder.icmp_signed(
            "<",
            ir.Constant(numbers, list(range(lanes))),
            spread(builder, builder.trunc(size, _INT), numbers),
        )
        bits = builder.select(inside, power_of_two(builder, x, degree=3), ints(0, lanes))
        reduce_ = ir.FunctionType(ir.FloatType(), [ir.FloatType(), floats_])
        function = cgutils.get_or_insert_function(builder.module, reduce_, "llvm.vector.reduce.fadd.v16f32")
        zero = ir.Constant(ir.FloatType(), 0.0)
        return builder.call(function, [zero, builder.bitcast(bits, floats_)], fastmath=["reassoc"])

    return types.float32(types.intp, types.intp, types.float32, types.float32), generate


@intrinsic
def reaching(context, sums, limit):
    """Which of `BLOCK` uint16 at the address `sums` are no less than `limit`, uint16: bit i tells of number i."""
    kind = ir.VectorType(ir.IntType(16), BLOCK)

    def generate(context, builder, signature, arguments):
        sums, limit = arguments
        empty = ir.Constant(kind, ir.Undefined)
        same = ir.Constant(ir.VectorType(_INT, BLOCK), [0] * BLOCK)
        limit = builder.shuffle_vector(builder.insert_element(empty, limit, _INT(0)), empty, same)
        reached = builder.icmp_unsigned(">=", load(builder, sums, kind, align=2), limit)
        return builder.bitcast(reached, _LONG)

    return types.uint64(types.intp, types.uint16), generate


@intrinsic
def first_bit(context, bits):
    """The number of the lowest bit that is set of uint64 `bits`, of which one is."""

    def generate(context, builder, signature, arguments):
        return call(builder, "llvm.cttz.i64", [arguments[0], ir.Constant(ir.IntType(1), 1)], _LONG)

    return types.int64(types.uint64), generate


# What follows is for compiled code.


@njit(inline="always")
def _sum_plainly(tables, codes, block, sums, at):
    for g in range(len(tables)):
        for i in range(BLOCK // 2):
            low, high = np.uint16(0), np.uint16(0)
            place, _ = place_in_block(i)
            for m in range(codes.shape[1]):
                low += tables[g, m, codes[block, m, place] & 15]
                high += tables[g, m, codes[block, m, place] >> 4]
            sums[g, at + i], sums[g, at + BLOCK // 2 + i] = low, high


@njit(inline="always")
def sum_codes(tables, codes, first, stop, sums, at):
    """sums[g, at + j] = the sum over m of tables[g, m, code m of key j], for the keys of blocks first .. stop - 1.

    sums: [G, *] uint16.
    tables: [G, M, 16] uint8, at most `HIGHEST`; M even, at most 512.
    codes: [N, M, 32] uint8, packed.
    """
    for block in range(first, stop):
        to = at + BLOCK * (block - first)
        if not LOOKED_UP:
            _sum_plainly(tables, codes, block, sums, to)
        else:
            for head in range(0, len(tables), HEADS):
                number = min(HEADS, len(tables) - head)
                if number == 2:
                    _sum_2(tables, head, codes, block, sums, to)
                else:
                    _sum_1(tables, head, codes, block, sums, to)
