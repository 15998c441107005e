"""Attention over coded keys on the host, compiled: a look at every key, the best exactly, all others by their codes.

A step sums what a small table has for each key's codes (`kernels.code_sums`), which is its score up to rounding. Keys
that are promised more than `WORTH` of the attention are attended to exactly. The weights of all others are taken from
their codes, and their values stand by the mean of their cluster: none is dropped.

Letters: `K` key/value heads, each in `HALVES`, `G` query heads per key/value head, `S` keys, `C` clusters of a head,
`N` blocks of codes, `M` codes of a key, `W = 2 M` coordinates, `H` head dim.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from rajax.exact_attention import (
    FAST,
    HALVES,
    NEGLIGIBLE,
    SPAN,
    add_to,
    attend_to,
    cycles,
    exp,
    padded,
    score,
    sum_of,
    top_of,
    touch_rows,
    wait,
)
from rajax.kernels.code_sums import BLOCK, CENTROIDS, HIGHEST, first_bit, reaching, sum_codes, weigh_sums
from rajax.kernels.row_products import TOGETHER, add_picked, add_rows, score_picked

WORTH = np.float32(5e-4)
"""Keys with a larger share of the attention are attended to exactly."""

MOST = 2048
"""Of half a head, at most: where more are worth it, those that are worth the most."""

LIGHT = np.float32(1e-6)
"""The mean values of four clusters with a smaller share of the attention are not read."""

TO_BASE_2 = np.float32(np.log2(np.e))
"""What scores are scaled by, so that their exponentials are powers of two."""


@njit(fastmath=FAST)
def _tabulate(queries, of_queries, centroids, errors, tables, scales, biases):
    """Tables [G, M, 16] of queries [G, H]: a key's score is scale [G] times what the tables have for its codes, plus
    bias [G], which makes good as well what rounding takes from the mean of exponentials."""
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
        scale = max(widest / np.float32(HIGHEST), np.float32(1e-20))
        for m in range(len(centroids)):
            for c in range(CENTROIDS):
                tables[g, m, c] = np.uint8(products[m, c] / scale + np.float32(0.5))
        # As `models.wave.second_order`: the mean of exponentials exceeds that of their mean.
        variance = scale * scale * np.float32(len(centroids) / 12)
        for w in range(width):
            product = np.float32(0)
            for x in range(width):
                product += errors[w, x] * turned[x]
            variance += product * turned[w]
        scales[g] = scale
        biases[g] = bias + np.float32(0.5) * variance / (1 + variance / 4)


@njit
def _highest(sums, first, last):
    """The largest of sums[first:last]; 0 of none."""
    top = np.uint16(0)
    for i in range(first, last):
        top = max(top, sums[i])
    return top


@njit(fastmath=FAST)
def _weigh_clusters(sums, starts, sizes, offset, scale, top, weights):
    """Writes the sum of exp(scale (sum - top)) over each cluster to weights; returns the sum of those."""
    everything, at = np.float32(0), np.int64(sums.ctypes.data) + 2 * offset
    scale *= TO_BASE_2
    for c in range(len(starts)):
        weights[c] = weigh_sums(at + 2 * starts[c], sizes[c], scale, top)  # type: ignore[call-arg]
        everything += weights[c]
    return everything


@njit
def _pick(sums, limits, start, stop, offset, starts, sizes, owner, chosen, count):
    """Appends those of keys start .. stop - 1 of which a sum reaches its limit to chosen [3, *]: their places, their
    clusters' numbers, `owner` on, and where their sums are.

    Returns how many there are then; no more than there is room for.
    """
    c = 0
    for first in range(start, stop, BLOCK):
        bits: Any = np.uint64(0)
        for g in range(len(limits)):
            bits |= reaching(sums[g, offset + first :].ctypes.data, limits[g])  # type: ignore[call-arg]
        while bits and count < chosen.shape[1]:
            row = first + first_bit(bits)  # type: ignore[call-arg]
            bits &= bits - np.uint64(1)
            if row >= stop:
                break
            while starts[c] + sizes[c] <= row:
                c += 1
            chosen[0, count], chosen[1, count], chosen[2, count] = row, owner + c, offset + row
            count += 1
    return count


@njit(fastmath=FAST)
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
        codes,
        mean_values,
        starts,
        sizes,
        spans,
        keys,
        values,
        apart,
        counts,
        out,
    ):
        """The partials of all half heads that no other thread takes, over all their keys.

        All arrays are contiguous: with an unknown stride nothing fills a vector.

        Args:
          turns: [2] int64, half heads that were begun and that are done, shared by the threads that work on them.
          queries: [K, G, H] float32, scaled.
          of_queries, centroids, errors: each head's `key_codes.Codebook`, [K, H, W], [K, M, 16, 2], [K, W, W].
          codes: [K, N, M, 32] uint8, of keys in the order of their places.
          mean_values: [K, C, H], float32 or the bits of bfloat16.
          starts, sizes: [K, C] int32, the places of each cluster's keys, and how many there are.
          spans: [2 K, n, 4] int64, clusters from one to before another, and likewise their keys, which have no gaps.
          keys, values: [K, S, H], ordered by cluster, like the mean values.
          apart: [2 K, n, 2] int64, keys from one to before another that are attended to without being in clusters.
          counts: [2 K, 5] int64, where to write the keys that were chosen, all those attended to exactly, those looked
            at, and the cycles that looking and attending took.
          out: [2 K, G, H + 2] float32, where to write numerator, denominator and max of the query heads.
        """
        heads = out.shape[1]
        scores = np.empty((heads, max(SPAN, MOST)), np.float32)
        quads = np.empty(scores.shape[1] // TOGETHER, np.int64)
        chosen = np.empty((3, MOST), np.int64)
        tables = np.empty((heads, centroids.shape[1], CENTROIDS), np.uint8)
        scales, biases = np.empty(heads, np.float32), np.empty(heads, np.float32)
        limits = np.empty(heads, np.uint16)
        # Of each span: what is added to a key's place, or to a cluster's number, to find its sum and its weight.
        offsets, owners = np.empty(spans.shape[1], np.int64), np.empty(spans.shape[1], np.int64)
        while True:
            half: Any = add_to(turns.ctypes.data, 1)  # type: ignore[call-arg]
            if half >= len(out):
                break
            began: Any = cycles()
            k = half // HALVES
            number, places, looked_at = 0, 0, 0
            for i in range(spans.shape[1]):
                first, last, start, stop = spans[half, i]
                offsets[i], owners[i] = places - start // BLOCK * BLOCK, number - first
                places += (stop + BLOCK - 1) // BLOCK * BLOCK - start // BLOCK * BLOCK
                number += last - first
                looked_at += stop - start
            sums = np.empty((heads, places + BLOCK), np.uint16)
            weights = np.zeros((heads, number + TOGETHER), np.float32)
            tops, totals = np.zeros(heads, np.float32), np.zeros(heads, np.float32)
            _tabulate(queries[k], of_queries[k], centroids[k], errors[k], tables, scales, biases)
            for i in range(spans.shape[1]):
                start, stop = spans[half, i, 2], spans[half, i, 3]
                begin, end = start // BLOCK, (stop + BLOCK - 1) // BLOCK
                sum_codes(tables, codes[k], begin, end, sums, offsets[i] + begin * BLOCK)
                for g in range(heads):
                    top = _highest(sums[g], offsets[i] + start, offsets[i] + stop)
                    tops[g] = max(tops[g], np.float32(top))
            for i in range(spans.shape[1]):
                first, last = spans[half, i, 0], spans[half, i, 1]
                these, those, owner = starts[k, first:last], sizes[k, first:last], owners[i] + first
                for g in range(heads):
                    totals[g] += _weigh_clusters(
                        sums[g], these, those, offsets[i], scales[g], tops[g], weights[g, owner:]
                    )
            # Which keys are worth it.
            worth, count = WORTH, MOST if number else 0
            while count == MOST:
                for g in range(heads):
                    limit = tops[g] + np.log(worth * totals[g]) / scales[g]
                    limits[g] = np.uint16(max(np.ceil(limit), np.float32(1)))
                count = 0
                for i in range(spans.shape[1]):
                    first, last, start, stop = spans[half, i]
                    these, those, owner = starts[k, first:last], sizes[k, first:last], owners[i] + first
                    count = _pick(sums, limits, start, stop, offsets[i], these, those, owner, chosen, count)
                worth *= 2
            attended = count
            for i in range(count):
                for g in range(heads):
                    taken = exp(scales[g] * (np.float32(sums[g, chosen[2, i]]) - tops[g]))
                    weights[g, chosen[1, i]] = max(weights[g, chosen[1, i]] - taken, np.float32(0))
            for i in range(apart.shape[1]):
                attended += apart[half, i, 1] - apart[half, i, 0]
            ranked = cycles()

            # All others, by their codes and the mean values of their clusters.
            estimated, estimated_totals = np.zeros((heads, width), np.float32), np.zeros(heads, np.float32)
            for g in range(heads):
                estimated_totals[g] = sum_of(weights[g])
            for i in range(spans.shape[1]):
                first, last = spans[half, i, 0], spans[half, i, 1]
                for c in range(first, last, TOGETHER):
                    at, heavy = owners[i] + c, False
                    for g in range(heads):
                        heavy |= sum_of(weights[g, at : at + TOGETHER]) > LIGHT * totals[g]
                    if heavy and c + TOGETHER <= last:
                        add_rows(weights, at, mean_values[k], c, width, estimated)
                    elif heavy:  # what follows are the next span's
                        four = np.zeros((heads, TOGETHER), np.float32)
                        four[:, : last - c] = weights[:, at : at + last - c]
                        add_rows(four, 0, mean_values[k], c, width, estimated)

            exact, exact_totals = np.zeros((heads, width), np.float32), np.zeros(heads, np.float32)
            exact_tops = np.full(heads, -np.inf, np.float32)
            state = exact, exact_totals, exact_tops
            if count:
                picked = chosen[0, : padded(count)]
                picked[count:] = picked[0]
                _attend_to_picked(queries[k], keys[k], values[k], picked, count, width, scores, *state)
            least_read = NEGLIGIBLE / max(attended, 1)
            # The keys that are in no cluster.
            for i in range(apart.shape[1]):
                for start in range(apart[half, i, 0], apart[half, i, 1], SPAN):
                    stop = min(start + SPAN, apart[half, i, 1])
                    score(queries[k], keys[k], start, stop, width, scores, quads, 0)
                    attend_to(scores, quads, padded(stop - start), values[k], width, least_read, *state)
            for g in range(heads):
                there = biases[g] + scales[g] * tops[g] if number else np.float32(-np.inf)
                top = max(there, exact_tops[g])
                reference = top if top > -np.inf else np.float32(0)
                by_code, exactly = exp(there - reference), exp(exact_tops[g] - reference)
                for h in range(width):
                    out[half, g, h] = by_code * estimated[g, h] + exactly * exact[g, h]
                out[half, g, width] = by_code * estimated_totals[g] + exactly * exact_totals[g]
                out[half, g, width + 1] = top
            counts[half, 0], counts[half, 1], counts[half, 2] = count, attended, looked_at
            counts[half, 3], counts[half, 4] = ranked - began, cycles() - ranked
            add_to(turns[1:].ctypes.data, 1)

    function = njit(fastmath=FAST, nogil=True)(_attend)
    # Where there is no place to write, every process compiles anew.
    with contextlib.suppress(RuntimeError):
        function.enable_caching()
    return function


def warm_up(width: int, dtype: np.dtype) -> None:
    """Compiles `_attend` for a head dim and the keys' dtype, by a call for no heads."""
    floats, rows = np.zeros((0, 0, 0), np.float32), np.zeros((0, 0, width), dtype)
    numbers, places = np.zeros((0, 0), np.int32), np.zeros((0, 0, 4), np.int64)
    book = floats, np.zeros((0, 0, CENTROIDS, 2), np.float32), floats
    codes, apart = np.zeros((0, 0, 0, 32), np.uint8), np.zeros((0, 0, 2), np.int64)
    tables = codes, rows, numbers, numbers, places, rows, rows, apart
    turns, counts = np.zeros(2, np.int64), np.zeros((0, 0), np.int64)
    wait(turns, 0)
    compiled(width)(turns, floats, *book, *tables, counts, floats)
