"""Attention over coded keys on the host, compiled: ever finer looks at ever fewer keys, and an estimate of all others.

Every key has codes, and so has every cluster's mean. What a small table has for a mean's codes (`kernels.code_sums`)
is the score of the mean, up to rounding. How far the scores of a cluster's keys are from it depends on the query, and
is known from how the keys vary. Where one of them might be worth it, all are weighed by their own codes, and those that
are `WORTH` it are attended to exactly. The values of all others stand by the mean of their cluster: none is dropped.

Letters: `K` key/value heads, each in `HALVES`, `G` query heads per key/value head, `S` keys, `P` clusters of half a
head, `M` codes of a key, `W = 2 M` coordinates, `H` head dim.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from rajax.exact_attention import FAST, HALVES, add_to, cycles, exp, padded, sum_of, top_of, touch_rows, wait
from rajax.kernels.code_sums import (
    BLOCK,
    CENTROIDS,
    HIGHEST,
    LINEAR,
    first_bit,
    fixed_point,
    reaching,
    sum_codes,
    weigh_sums,
    weight_of,
)
from rajax.kernels.row_products import TOGETHER, add_picked, add_rows, score_picked

WORTH = np.float32(5e-4)
"""Keys with a larger share of the attention to their half of the offloaded keys are attended to exactly."""

MOST = 2048
"""Of half a head, fewer than this: where more are worth it, what a key must be worth is raised."""

REACH = np.float32(2)
"""A cluster's keys are looked at where one that is so many standard deviations from their mean would be worth it."""

MOST_OPENED = 2048
"""Clusters of half a head whose keys are, at most: of more, those with the most to spare."""

LIGHT = np.float32(0.05)
"""The mean values of four clusters are not read where they weigh less than this of what four weigh on average."""

NOTHING = np.float32(1e-6)
"""What is left of the estimate when those that were picked are taken out, where it is but rounding."""

# Divided by zero, a number is infinite, as NumPy has it; to raise instead, a loop would have to look at each.
_quick = functools.partial(njit, error_model="numpy")

AHEAD = 8
"""The codes of a cluster's keys are asked for so many clusters before they are needed."""

AT_ONCE = 64
"""Keys that are picked from together."""


@_quick(fastmath=FAST)
def _tabulate(queries, of_queries, centroids, errors, variances, tables, scales, biases, deviations):
    """Tables [G, M, 16] of queries [G, H]: a key's score is scale [G] times what the tables have for its codes, plus
    bias [G], which makes good as well what rounding takes from the mean of exponentials. No key has a sum of 0.

    Writes the standard deviations of scores in a cluster to deviations [G].
    """
    width = of_queries.shape[1]
    turned, products = np.empty(width, np.float32), np.empty((len(centroids), CENTROIDS), np.float32)
    for g in range(len(queries)):
        turned[:] = 0
        for h in range(queries.shape[1]):
            for w in range(width):
                turned[w] += queries[g, h] * of_queries[h, w]
        bias, widest = np.float32(0), np.float32(0)
        for m in range(len(centroids)):
            low, high = np.float32(np.inf), np.float32(-np.inf)
            for c in range(CENTROIDS):
                product = turned[2 * m] * centroids[m, c, 0] + turned[2 * m + 1] * centroids[m, c, 1]
                products[m, c] = product
                low, high = min(low, product), max(high, product)
            bias += low
            widest = max(widest, high - low)
            for c in range(CENTROIDS):
                products[m, c] -= low
        scale = max(widest / np.float32(HIGHEST - 1), np.float32(1e-20))
        inverse = np.float32(1) / scale
        for m in range(len(centroids)):
            least = np.float32(1.5) if m == 0 else np.float32(0.5)
            for c in range(CENTROIDS):
                tables[g, m, c] = np.uint8(np.int32(products[m, c] * inverse + least))
        # As `models.wave.second_order`: the mean of exponentials exceeds that of their mean.
        variance, apart = scale * scale * np.float32(len(centroids) / 12), np.float32(0)
        for w in range(width):
            variance += turned[w] * turned[w] * errors[w]
            apart += turned[w] * turned[w] * variances[w]
        deviations[g] = np.sqrt(apart)
        scales[g] = scale
        biases[g] = bias - scale + np.float32(0.5) * variance / (1 + variance / 4)


@_quick(fastmath={*FAST, "nnan"})
def _weigh_means(tables, scales, biases, deviations, codes, log_counts, spreads, weights, tops, hopes):
    """Estimates of clusters' masses from their means' codes [P / 16, M / 4, 32], relative to tops [G]: weights [G, P].

    log_counts, spreads: [P], of how many keys, -inf of none; and how many times deviations [G] their scores differ.
    Writes to hopes [P] the logarithm of how many times `WORTH` a key of each might be, to the best of the query heads.
    """
    heads, number = weights.shape
    sums, reaches = np.empty((heads, number), np.uint16), np.empty(number, np.float32)
    for block in range(len(codes)):
        sum_codes(tables, codes, block, BLOCK, sums, BLOCK * block)
    hopes[:] = -np.inf
    one, two, quarter = np.float32(1), np.float32(2), np.float32(0.25)  # whole numbers would make it float64
    for g in range(heads):
        row = weights[g]
        top = np.float32(-np.inf)
        for c in range(number):
            mean = scales[g] * np.float32(sums[g, c]) + biases[g]
            deviation = deviations[g] * spreads[c]
            # `models.wave.second_order`.
            damped = two / (one + quarter * deviation * deviation)
            row[c] = mean + log_counts[c] + two - damped
            reaches[c] = mean + REACH * deviation
            top = row[c] if row[c] > top else top
        tops[g] = top
        total = np.float32(0)
        for c in range(number):
            row[c] = exp(row[c] - top)
            total += row[c]
        worth = top + np.log(WORTH * total)
        for c in range(number):
            hope = reaches[c] - worth
            hopes[c] = hope if hope > hopes[c] else hopes[c]


@njit
def _open(hopes, log_counts, opened):
    """Writes the clusters with any hope to opened, at most `MOST_OPENED`; returns how many."""
    limit, count = np.float32(0), MOST_OPENED + 1
    while count > MOST_OPENED:
        count = 0
        for c in range(len(hopes)):
            opened[count] = c
            count += hopes[c] > limit and log_counts[c] > -np.inf
        limit += np.float32(0.5) + limit / 4
    return count


@njit
def _pick(sums, limits, count, picked):
    """Writes the numbers of those of `count` keys of which a sum [G, *] reaches its limit [G] to picked.

    Returns how many there are, at most as many as there is room for.
    """
    number = 0
    for first in range(0, count, AT_ONCE):
        bits: Any = np.uint64(0)
        for g in range(len(limits)):
            bits |= reaching(sums[g, first:].ctypes.data, limits[g])  # type: ignore[call-arg]
        while bits:
            if number == len(picked):
                return number
            picked[number] = first + first_bit(bits)  # type: ignore[call-arg]
            bits &= bits - np.uint64(1)
            number += 1
    return number


@_quick(fastmath=FAST)
def _look(tables, scales, biases, codes, opened, sizes, tops, weights, picked):
    """Weighs the keys of clusters number opened [n] by their codes [P, M / 4, 32], and picks those that are worth it.

    weights: [G, P], the clusters' estimates, relative to tops [G]; those of the clusters that are opened become what
      their keys have, without the keys that are picked. All become relative to new tops.
    picked: [2, *] int64, where to write clusters and numbers within them.

    Returns how many are picked.
    """
    heads, number = len(tables), len(opened)
    room = (number + TOGETHER - 1) // TOGETHER * TOGETHER
    sums = np.zeros((heads, BLOCK * room), np.uint16)
    lines = codes.reshape(len(codes), -1)
    for i in range(number):
        if i + AHEAD < number:
            touch_rows(lines, opened[i + AHEAD], opened[i + AHEAD] + 1, lines.shape[1])
        sum_codes(tables, codes, opened[i], sizes[opened[i]], sums, BLOCK * i)
    near, limits = np.empty(room, np.float32), np.empty(heads, np.uint16)
    highest, shifts, factors = np.empty((3, heads), np.uint16)
    units = np.empty(heads, np.float32)
    for g in range(heads):
        highest[g] = top_of(sums[g], BLOCK * number, np.uint16(0))
        shifts[g], factors[g] = fixed_point(scales[g])
        for i in range(0, room, TOGETHER):
            at, to = sums[g, BLOCK * i :].ctypes.data, near[i:].ctypes.data
            weigh_sums(at, highest[g], shifts[g], factors[g], to)  # type: ignore[call-arg]
        row = weights[g]
        there = scales[g] * np.float32(highest[g]) + biases[g]
        if there > tops[g]:
            less = exp(tops[g] - there)
            for c in range(len(row)):
                row[c] *= less
            tops[g] = there
        above = there - tops[g]
        units[g] = exp(above) / np.float32(LINEAR)
        for i in range(number):
            row[opened[i]] = units[g] * near[i]
        # The sum from which on a key is worth it.
        limit = np.float32(highest[g]) + (np.log(WORTH * sum_of(row)) - above) / scales[g]
        limits[g] = np.uint16(min(max(np.ceil(limit), np.float32(1)), np.float32(65535)))
    count = _pick(sums, limits, BLOCK * number, picked[0])
    while count == picked.shape[1]:
        for g in range(heads):
            more = min(1 + np.float32(0.5) / scales[g], np.float32(65535))
            limits[g] = min(limits[g] + np.int64(more), 65535)
        count = _pick(sums, limits, BLOCK * number, picked[0])
    for i in range(count):
        which = picked[0, i]
        cluster = opened[which // BLOCK]
        picked[0, i], picked[1, i] = cluster, which % BLOCK
        for g in range(heads):
            taken = units[g] * weight_of(sums[g, which], highest[g], shifts[g], factors[g])
            weights[g, cluster] = max(weights[g, cluster] - taken, np.float32(0))
    return count


@_quick(fastmath=FAST, inline="always")
def _estimate(weights, mean_values, width, sums, totals):
    """Adds mean values [P, H], weighted by weights [G, P], to sums [G, H]; writes the sums of weights to totals [G]."""
    number = weights.shape[1]
    for g in range(len(totals)):
        totals[g] = sum_of(weights[g])
    for c in range(0, number, TOGETHER):
        heavy = False
        for g in range(len(totals)):
            row = weights[g]
            four = row[c] + row[c + 1] + row[c + 2] + row[c + 3]
            heavy |= four * np.float32(number) > np.float32(TOGETHER) * LIGHT * totals[g]
        if heavy:
            add_rows(weights, c, mean_values, c, width, sums)


@_quick(fastmath=FAST)
def _attend_to_picked(queries, keys, values, picked, count, width, scores, sums, totals, tops):
    """Attends to keys [S, H] number picked[:count]: adds to sums [G, H], writes totals [G] relative to tops [G].

    picked: [n] int64, n a multiple of `TOGETHER`; those past `count` are of no weight.
    """
    # Some at a time of what lies far apart in memory: the processor fetches many lines at once, if it is told.
    for i in range(count):
        touch_rows(keys, picked[i], picked[i] + 1, width)
    score_picked(queries, keys, picked, width, scores)
    for i in range(count):
        touch_rows(values, picked[i], picked[i] + 1, width)
    for g in range(len(sums)):
        row = scores[g]
        tops[g] = top_of(row, count, np.float32(-np.inf))
        total = np.float32(0)
        for j in range(count):
            row[j] = exp(row[j] - tops[g])
            total += row[j]
        row[count : len(picked)] = 0
        totals[g] = total
    add_picked(scores, values, picked, width, sums)


@functools.cache
def compiled(width: int) -> Callable[..., None]:
    """`_attend` for a head dim, which is compiled in: loops of a known length fill vectors."""

    def _attend(
        turns,
        queries,
        of_queries,
        centroids,
        errors,
        variances,
        mean_codes,
        log_counts,
        spreads,
        codes,
        mean_values,
        starts,
        sizes,
        blocks,
        keys,
        values,
        counts,
        out,
    ):
        """The partials of all half heads that no other thread takes, over all their keys.

        All arrays are contiguous: with an unknown stride nothing fills a vector.

        Args:
          turns: [2] int64, half heads that were begun and that are done, shared by the threads that work on them.
          queries: [K, G, H] float32, scaled.
          of_queries, centroids, errors: each head's `key_codes.Codebook`, [K, H, W], [K, M, 16, 2], [K, W].
          variances: [K, W], of the coordinates of a cluster's keys.
          mean_codes: [2 K, P / 16, M / 4, 32] uint8, of the clusters' means.
          log_counts: [2 K, P] float32, the logarithms of numbers of keys; -inf for no cluster.
          spreads: [2 K, P] float32, how many times as far as usual the keys of a cluster are from their mean.
          codes: [2 K, P, M / 4, 32] uint8, of each cluster's keys.
          mean_values: [2 K, P, H], float32 or the bits of bfloat16.
          starts, sizes: [2 K, P] int32, the place of each cluster's first key, and how many there are, at most 16.
          blocks: how many of the P / 16 there are so far.
          keys, values: [K, S, H], ordered by cluster, like the mean values.
          counts: [2 K, 5] int64, where to write the clusters that were opened, the keys attended to exactly, the codes
            looked at, and the cycles that looking and attending took.
          out: [2 K, G, H + 2] float32, where to write numerator, denominator and max of the query heads.
        """
        heads, number = out.shape[1], BLOCK * blocks
        scores = np.empty((heads, MOST), np.float32)
        tables = np.empty((heads, centroids.shape[1], CENTROIDS), np.uint8)
        scales, biases, deviations = np.empty((3, heads), np.float32)
        weights, hopes = np.empty((heads, number), np.float32), np.empty(number, np.float32)
        opened, picked = np.empty(number, np.int64), np.empty((2, MOST), np.int64)
        while True:
            half: Any = add_to(turns.ctypes.data, 1)  # type: ignore[call-arg]
            if half >= len(out):
                break
            began: Any = cycles()
            k = half // HALVES
            estimated, totals, tops = _nothing(heads, width)
            exact = _nothing(heads, width)
            n, count, looked = 0, 0, began
            if sizes[half, :number].any():
                book = of_queries[k], centroids[k], errors[k], variances[k]
                _tabulate(queries[k], *book, tables, scales, biases, deviations)
                here = mean_codes[half, :blocks], log_counts[half], spreads[half]
                _weigh_means(tables, scales, biases, deviations, *here, weights, tops, hopes)
                n = _open(hopes, log_counts[half], opened)
                if n:
                    these = codes[half], opened[:n], sizes[half]
                    count = _look(tables, scales, biases, *these, tops, weights, picked)
                looked = cycles()
                _estimate(weights, mean_values[half], width, estimated, totals)
                for g in range(heads):
                    tops[g] = tops[g] if totals[g] > NOTHING else -np.inf
            if count:
                rows = picked[0, : padded(count)]
                for i in range(count):
                    rows[i] = starts[half, rows[i]] + picked[1, i]
                rows[count:] = rows[0]
                _attend_to_picked(queries[k], keys[k], values[k], rows, count, width, scores, *exact)
            exactly, exact_totals, exact_tops = exact
            for g in range(heads):
                top = max(tops[g], exact_tops[g])
                reference = top if top > -np.inf else np.float32(0)
                by_code, other = exp(tops[g] - reference), exp(exact_tops[g] - reference)
                for h in range(width):
                    out[half, g, h] = by_code * estimated[g, h] + other * exactly[g, h]
                out[half, g, width] = by_code * totals[g] + other * exact_totals[g]
                out[half, g, width + 1] = top
            counts[half, 0], counts[half, 1], counts[half, 2] = n, count, number + BLOCK * n
            counts[half, 3], counts[half, 4] = looked - began, cycles() - looked
            add_to(turns[1:].ctypes.data, 1)

    function = _quick(fastmath=FAST, nogil=True)(_attend)
    # Where there is no place to write, every process compiles anew.
    with contextlib.suppress(RuntimeError):
        function.enable_caching()
    return function


@njit(inline="always")
def _nothing(heads, width):
    """The partial of no keys: sums [G, H], totals [G] and tops [G]."""
    sums, totals = np.zeros((heads, width), np.float32), np.zeros(heads, np.float32)
    return sums, totals, np.full(heads, -np.inf, np.float32)


def warm_up(width: int, dtype: np.dtype) -> None:
    """Compiles `_attend` for a head dim and the keys' dtype, by a call for no heads."""
    floats, rows = np.zeros((0, 0, 0), np.float32), np.zeros((0, 0, width), dtype)
    numbers, table = np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)
    book = floats, np.zeros((0, 0, CENTROIDS, 2), np.float32), table, table
    codes = np.zeros((0, 0, 0, 32), np.uint8)
    clusters = codes, table, table, codes, rows, numbers, numbers, 0
    turns, counts = np.zeros(2, np.int64), np.zeros((0, 0), np.int64)
    wait(turns, 0)
    compiled(width)(turns, floats, *book, *clusters, rows, rows, counts, floats)
