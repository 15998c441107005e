"""Scores of keys from four-bit codes, in a CPU's vector registers, and their exponentials; from Numba.

A key is `M` codes, each of which names one of 16 centroids (product quantization, Jégou et al. 2011). For a query a
small table tells what each centroid adds to the score; a register holds two such tables, and one instruction looks up
two codes of 16 keys in them (André et al., arXiv 1704.07355, which ScaNN's and Faiss' scans do as well).

Letters: `G` query heads, `M` codes of a key, `N` blocks of `BLOCK` keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from rajax.kernels.row_products import TOGETHER, place_of, totals_of
from rajax.kernels.vectors import call, has, load, splat, store

CENTROIDS = 16
"""What four bits can name."""

BLOCK = 16
"""Keys whose codes lie together: 32 bytes of each four of the M codes."""

CODES = 8
"""M is a multiple of this."""

HIGHEST = 63
"""The largest number in a table: four of them still fit into a byte."""

HEADS = 4
"""Query heads whose sums fit into the registers."""

LINEAR = 0.5 / np.log(2) ** 2
"""How many times 2**x the weight of a sum is, on average: between powers of two it is a straight line."""

LOOKED_UP = has("avx2")
"""Whether this CPU looks codes up in registers."""

_LONG, _INT, _SHORT, _BYTE = (ir.IntType(bits) for bits in (64, 32, 16, 8))
_BYTES, _WORDS = ir.VectorType(_BYTE, 32), ir.VectorType(_SHORT, BLOCK)

_ONE = 127 << 7
"""1 in the first 16 bits of a float32."""

_LEAST = 1 << 7
"""The smallest normal number in them."""


@njit(inline="always")
def place_in_block(m, j):
    """Where code m of key j of a block is, [M / 4, 32], and whether in the high half of the byte.

    A byte holds codes m and m + 2. Each half of a register has its own table: the first half's bytes are of an even m,
    the second's of an odd one. Sums are 16 bits wide: those of even bytes come out together, and so do those of odd.
    """
    return m // 4, m % 2 * 16 + j % 8 * 2 + j // 8, m % 4 >= 2


def sum_codes_reference(tables: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """sums [G, 16 N] uint16 of what tables [G, M, 16] uint8 have for the packed codes [N, M / 4, 32]."""
    sums = np.zeros((len(tables), len(codes), BLOCK), np.uint16)
    for m in range(tables.shape[1]):
        for j in range(BLOCK):
            four, place, high = place_in_block(m, j)
            sums[:, :, j] += tables[:, m, codes[:, four, place] >> 4 if high else codes[:, four, place] & 15]
    return sums.reshape(len(tables), -1)


# What follows builds LLVM's code.


def _words(x: int) -> Any:
    return ir.Constant(_WORDS, [x] * BLOCK)


def _summed(heads: int) -> Any:
    """`sum_codes` for so many query heads."""

    @intrinsic
    def summed(context, tables, first_head, codes, block, size, sums, at):
        def generate(context, builder, signature, arguments):
            _, first_head, _, block, size, _, at = arguments
            call_of = context, builder, signature, arguments
            zero = _LONG(0)
            fours = cgutils.unpack_tuple(
                builder, context.make_array(signature.args[2])(context, builder, arguments[2]).shape
            )[1]
            at_codes = place_of(*call_of, 2, block, zero, zero)
            at_tables = [
                place_of(*call_of, 0, builder.add(first_head, _LONG(i)), zero, zero) for i in range(heads)
            ]
            # Sums of both bytes of a word, and of its high one.
            totals = [[cgutils.alloca_once_value(builder, _words(0)) for _ in range(2)] for _ in range(heads)]
            low_bits = ir.Constant(_BYTES, [15] * 32)
            with cgutils.for_range(builder, builder.udiv(fours, _LONG(2))) as loop:
                place = builder.add(at_codes, builder.mul(loop.index, _LONG(64)))
                halves = []
                for which in range(2):
                    both = load(builder, builder.add(place, _LONG(32 * which)), _BYTES, align=1)
                    high = builder.bitcast(builder.lshr(builder.bitcast(both, _WORDS), _words(4)), _BYTES)
                    halves += [builder.and_(both, low_bits), builder.and_(high, low_bits)]
                for at_table, (both, odd) in zip(at_tables, totals, strict=True):
                    place = builder.add(at_table, builder.mul(loop.index, _LONG(CODES * CENTROIDS)))
                    found = None
                    for which, half in enumerate(halves):
                        table = load(builder, builder.add(place, _LONG(32 * which)), _BYTES, align=1)
                        one = call(builder, "llvm.x86.avx2.pshuf.b", [table, half], _BYTES)
                        found = builder.add(found, one) if found else one
                    words = builder.bitcast(found, _WORDS)
                    builder.store(builder.add(builder.load(both), words), both)
                    builder.store(builder.add(builder.load(odd), builder.lshr(words, _words(8))), odd)

            def folded(words: Any) -> Any:
                lower, upper = (
                    builder.shuffle_vector(
                        words, words, ir.Constant(ir.VectorType(_INT, 8), list(range(first, first + 8)))
                    )
                    for first in (0, 8)
                )
                return builder.add(lower, upper)

            whole = ir.Constant(ir.VectorType(_INT, BLOCK), list(range(BLOCK)))
            size = splat(builder, builder.trunc(size, _SHORT), _WORDS)
            inside = builder.icmp_signed("<", ir.Constant(_WORDS, list(range(BLOCK))), size)
            for i, (both, odd) in enumerate(totals):
                odd = builder.load(odd)
                even = builder.sub(builder.load(both), builder.shl(odd, _words(8)))
                words = builder.shuffle_vector(folded(even), folded(odd), whole)
                words = builder.select(inside, words, _words(0))
                to = place_of(*call_of, 5, builder.add(first_head, _LONG(i)), at)
                store(builder, words, to, align=2)
            return context.get_dummy_value()

        whole = types.intp
        return types.void(tables, whole, codes, whole, whole, sums, whole), generate

    return summed


_sum_1, _sum_2, _sum_3, _sum_4 = (_summed(heads) for heads in (1, 2, 3, 4))


@intrinsic
def weigh_sums(context, sums, top, shift, factor, weights):
    """Writes the sums of `weight_of` of each of `TOGETHER` blocks of `BLOCK` numbers, from the address `sums` on, to
    the address `weights`, as float32."""
    floats = ir.VectorType(ir.FloatType(), BLOCK // 2)
    ints = ir.VectorType(_INT, BLOCK // 2)

    def generate(context, builder, signature, arguments):
        sums, top, shift, factor, weights = arguments
        room = builder.lshr(_SHORT(65535), shift)
        top, shift, factor, room = (splat(builder, x, _WORDS) for x in (top, shift, factor, room))
        wide = ir.VectorType(_INT, BLOCK)
        parts = []
        for i in range(TOGETHER):
            words = load(builder, builder.add(sums, _LONG(2 * BLOCK * i)), _WORDS, align=2)
            below = call(builder, "llvm.usub.sat.v16i16", [top, words], _WORDS)
            below = builder.select(builder.icmp_unsigned("<", below, room), below, room)
            product = builder.mul(builder.zext(builder.shl(below, shift), wide), builder.zext(factor, wide))
            product = builder.trunc(builder.lshr(product, ir.Constant(wide, [16] * BLOCK)), _WORDS)
            bits = call(builder, "llvm.usub.sat.v16i16", [_words(_ONE - _LEAST), product], _WORDS)
            bits = builder.add(bits, _words(_LEAST))
            bits = builder.select(builder.icmp_unsigned("==", words, _words(0)), _words(0), bits)
            pairs = builder.bitcast(bits, ints)
            low = builder.shl(pairs, ir.Constant(ints, [16] * (BLOCK // 2)))
            high = builder.and_(pairs, ir.Constant(ints, [0xFFFF0000] * (BLOCK // 2)))
            parts.append(builder.fadd(builder.bitcast(low, floats), builder.bitcast(high, floats)))
        store(builder, totals_of(builder, parts), weights)
        return context.get_dummy_value()

    return types.void(types.intp, types.uint16, types.uint16, types.uint16, types.intp), generate


@intrinsic
def reaching(context, sums, limit):
    """Which of 64 uint16 at the address `sums` are no less than `limit`, uint16: bit i tells of number i."""
    kind = ir.VectorType(_SHORT, 64)

    def generate(context, builder, signature, arguments):
        sums, limit = arguments
        limit = splat(builder, limit, kind)
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
def fixed_point(scale):
    """What `weight_of` multiplies by: 128 scale, in base 2, as shift and factor, factor * 2**(shift - 16)."""
    steps = scale * np.float32(128 / np.log(2))
    shift = np.int64(0)
    while shift < 15 and steps > np.float32(65535.0 / 65536.0) * np.float32(1 << shift):
        shift += 1
    factor = min(steps * np.float32(1 << (16 - shift)), np.float32(65535))
    return np.uint16(shift), np.uint16(factor)


@njit(inline="always")
def weight_of(sum_, top, shift, factor):
    """exp(scale * (sum_ - top)), times `LINEAR` on average and to 4 % of that; 0 for a sum of 0, which is no key.

    All are uint16; what is above `top` counts as `top`. A float32's bits, read as a whole number, are its logarithm
    but for what lies between powers of two (Schraudolph 1999).
    """
    if sum_ == 0:
        return np.float32(0)
    below: Any = min(max(np.int64(top) - np.int64(sum_), 0), 65535 >> np.int64(shift))
    product = ((below << np.int64(shift)) * np.int64(factor)) >> 16
    bits = max(_ONE - _LEAST - product, 0) + _LEAST
    return np.uint32(bits << 16).view(np.float32)


@njit(inline="always")
def _sum_plainly(tables, codes, block, size, sums, at):
    for g in range(len(tables)):
        for j in range(BLOCK):
            total = np.uint16(0)
            for m in range(tables.shape[1] if j < size else 0):
                four, place, high = place_in_block(m, j)
                code = np.int64(codes[block, four, place])
                total += tables[g, m, code >> 4 if high else code & 15]
            sums[g, at + j] = total


@njit(inline="always")
def sum_codes(tables, codes, block, size, sums, at):
    """sums[g, at + j] = the sum over m of tables[g, m, code m of key j of the block] for j < size; 0 up to `BLOCK`.

    sums: [G, *] uint16.
    tables: [G, M, 16] uint8, at most `HIGHEST`; M a multiple of `CODES`, at most 1024.
    codes: [N, M / 4, 32] uint8, packed.
    """
    if not LOOKED_UP:
        _sum_plainly(tables, codes, block, size, sums, at)
        return
    for head in range(0, len(tables), HEADS):
        number = min(HEADS, len(tables) - head)
        if number == 4:
            _sum_4(tables, head, codes, block, size, sums, at)
        elif number == 3:
            _sum_3(tables, head, codes, block, size, sums, at)
        elif number == 2:
            _sum_2(tables, head, codes, block, size, sums, at)
        else:
            _sum_1(tables, head, codes, block, size, sums, at)
