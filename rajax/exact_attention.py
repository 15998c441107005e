"""What attention on the host is made of, compiled: exact attention to stored keys, and how threads share the heads.

Both ways of `rajax.wave_host` are built on it. Numba compiles it into them.

Letters: `G` query heads, `S` keys, `H` head dim.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from rajax.kernels.row_products import TOGETHER, add_rows, place_of, score_rows
from rajax.kernels.vectors import call, pointer

HALVES = 2
"""A head's clusters are ranked and attended to in halves, so that cores can share a head. Half i of head k is number
`HALVES` * k + i."""

NEGLIGIBLE = np.float32(3e-4)
"""Keys, and groups, each with a share of the attention below this divided by their number, add nothing to the
numerator, and their values are not read; all of them together are below it. The denominator has them."""

SPAN = 2048
"""Keys whose scores are computed before the running maximum is looked at again."""

VALUES_AHEAD = 8
"""Four values are asked for so many fours before they are needed."""

CACHE_LINE = 64
"""Bytes that a processor reads from memory at a time."""

# Sums may be reordered, so that they fill a vector; infinities and NaN keep their meaning.
FAST: Any = {"nsz", "arcp", "contract", "afn", "reassoc"}


@njit(inline="always")
def exp(x):
    """exp of a float32 that is at most 0, with a relative error of 2e-7: 2**n times a polynomial.

    Unlike the library's, it fills a vector.
    """
    y = max(x, np.float32(-87)) * np.float32(1.44269504)
    n = np.floor(y)
    f = y - n
    p = np.float32(1.8775767e-3)
    p = p * f + np.float32(8.9893397e-3)
    p = p * f + np.float32(5.5826318e-2)
    p = p * f + np.float32(2.4015361e-1)
    p = p * f + np.float32(6.9315308e-1)
    p = p * f + np.float32(9.9999994e-1)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return p * power if x > np.float32(-87) else np.float32(0)


# Without NaN among them, a vector's maxima may be taken in any order.
@njit(fastmath={*FAST, "nnan"})
def top_of(row, count, top):
    """The largest of `top` and row[:count], none of which is NaN."""
    for c in range(count):
        top = row[c] if row[c] > top else top
    return top


@njit(inline="always")
def padded(n):
    return (n + TOGETHER - 1) // TOGETHER * TOGETHER


@njit(fastmath=FAST)
def sum_of(row):
    total = np.float32(0)
    for weight in row:
        total += weight
    return total


@njit(inline="always")
def largest(shares, first):
    """The largest of shares first .. first + 3."""
    return max(max(shares[first], shares[first + 1]), max(shares[first + 2], shares[first + 3]))


@njit(inline="always")
def score(queries, keys, start, stop, width, scores, quads, at):
    """Writes the scores of keys start .. stop of [S, H], in fours, to scores [G, *] and their places to quads, from
    score number `at` on. What a four lacks has the score -inf."""
    score_rows(queries, keys, start, stop, width, scores, at)
    for g in range(len(queries)):
        for j in range(at + stop - start, at + padded(stop - start)):
            scores[g, j] = -np.inf
    for j in range(0, stop - start, TOGETHER):
        quads[(at + j) // TOGETHER] = start + j


@njit(fastmath=FAST)
def attend_to(scores, quads, count, values, width, least, sums, totals, tops):
    """Adds keys with scores [G, count], and their values, to sums [G, H] and totals [G] relative to tops [G].

    quads: where the values of each four scores are; those of a four with shares of at most `least` are not read.
    """
    if not count:
        return
    heaviest = np.zeros(count, np.float32)
    for g in range(len(sums)):
        row = scores[g]
        top = top_of(row, count, tops[g])
        if top > tops[g]:
            scale = exp(tops[g] - top)
            totals[g] *= scale
            for h in range(width):
                sums[g, h] *= scale
            tops[g] = top
        added = np.float32(0)
        for j in range(count):
            row[j] = exp(row[j] - top)
            added += row[j]
        totals[g] += added
        scale = 1 / totals[g]
        for j in range(count):
            heaviest[j] = max(heaviest[j], row[j] * scale)
    # Those that are read come first.
    heavy = 0
    for i in range(count // TOGETHER):
        if largest(heaviest, TOGETHER * i) > least:
            for g in range(len(sums)):
                for j in range(TOGETHER):
                    scores[g, TOGETHER * heavy + j] = scores[g, TOGETHER * i + j]
            quads[heavy] = quads[i]
            heavy += 1
    for i in range(heavy):
        if i + VALUES_AHEAD < heavy:
            later = quads[i + VALUES_AHEAD]
            touch_rows(values, later, later + TOGETHER, width)
        add_rows(scores, TOGETHER * i, values, quads[i], width, sums)


@intrinsic
def _touch(context, a, row, column):
    """Asks the processor to have the cache line of a[row, column] ready soon."""

    def generate(context, builder, signature, arguments):
        place = pointer(builder, place_of(context, builder, signature, arguments, 0, *arguments[1:]))
        number = ir.IntType(32)
        # To read, to be kept in all caches, data.
        call(builder, "llvm.prefetch.p0i8", [place, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(a, types.intp, types.intp), generate


@njit(inline="always")
def touch_rows(a, start, stop, width):
    for row in range(start, stop):
        for column in range(0, width, CACHE_LINE // a.itemsize):
            _touch(a, row, column)  # type: ignore[call-arg]


@intrinsic
def cycles(context):
    """The processor's cycle counter."""

    def generate(context, builder, signature, arguments):
        function = ir.FunctionType(ir.IntType(64), [])
        counter = cgutils.get_or_insert_function(builder.module, function, "llvm.readcyclecounter")
        return builder.call(counter, [])

    return types.int64(), generate


@intrinsic
def add_to(context, address, number):
    """Adds to an int64 that several threads change, and returns what it was."""

    def generate(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "seq_cst")

    return types.int64(types.uintp, types.int64), generate


@njit(nogil=True)
def wait(turns, number):
    """Until `number` turns are over. It does not sleep: to be woken takes longer than what is waited for."""
    while add_to(turns[1:].ctypes.data, 0) < number:  # type: ignore[call-arg]
        pass
