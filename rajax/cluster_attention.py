"""Attention over clusters on the host, compiled: rank them, attend to the best exactly, estimate all others.

The same as `models.wave.select`, `attend_blocks` and `attend_whole`, which are its reference, but in one pass over
memory that the host has anyway: nothing is gathered, and what weighs next to nothing is not read. Numba compiles it
at its first call for a head dim and keeps the result on disk. Key/value heads are shared out among the cores where
that is worth waking them for.

Letters: `K` key/value heads, `G` query heads per key/value head, rounded up to a multiple of `TOGETHER`, `S` keys,
`C` clusters, `R` clusters retrieved at most, `H` head dim.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

TOGETHER = 4
"""Query heads that share a reading of a key, and values that share one of the sums. They are written out below."""

NEGLIGIBLE = np.float32(1e-3)
"""Clusters whose estimated shares are below this, divided by their number, add nothing to the numerator; all of them
together are below it. The denominator has them."""

TILE = 16
"""Keys whose scores are computed before the running maximum is looked at again."""

WORTH_WAKING = 1 << 21
"""Numbers in a layer's means from which on other cores are woken, which takes about 0.1 ms."""

AHEAD = 2
"""A cluster's keys are asked for so many clusters before they are needed."""

CACHE_LINE = 64
"""Bytes that a processor reads from memory at a time."""

# Sums may be reordered, so that they fill a vector; infinities and NaN keep their meaning.
FAST: Any = {"nsz", "arcp", "contract", "afn", "reassoc"}

_one_at_a_time = threading.Lock()
"""Numba's simplest threading layer ends the process where two threads enter it."""


def rank(queries: np.ndarray, means: np.ndarray, *arguments: Any) -> None:
    """Ranks clusters and chooses those to retrieve; see `_rank_heads`."""
    _run(_compiled(queries.shape[2])[0], queries, means, *arguments)


def attend(queries: np.ndarray, mean_values: np.ndarray, *arguments: Any) -> None:
    """Attends to the clusters chosen and estimates the others; see `_attend_heads`."""
    _run(_compiled(queries.shape[2])[1], queries, mean_values, *arguments)


def _run(function: Callable[..., None], queries: np.ndarray, means: np.ndarray, *arguments: Any) -> None:
    with _one_at_a_time:
        numba.set_num_threads(numba.config.NUMBA_NUM_THREADS if means.size >= WORTH_WAKING else 1)
        function(queries, means, *arguments)


def _widen(x):
    """A stored number as float32. uint16 are the bits of a bfloat16."""


@overload(_widen, inline="always")
def _widen_compiled(x):
    if x == types.uint16:
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


@njit(inline="always")
def _exp(x):
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


@njit
def _choose(ranks, held, share, top_p, least, most, ids):
    """Writes the clusters of the highest ranks [C] into ids [R]; returns how many."""
    allowed = min(most, held)
    if share >= 0:
        allowed = min(allowed, int(np.ceil(share * held)))
    if allowed == 0:
        return 0
    limit = np.float32(-1)
    if allowed < len(ranks):
        limit = np.partition(ranks, len(ranks) - allowed)[len(ranks) - allowed]
    n = 0
    for c in range(len(ranks)):
        if ranks[c] > limit:
            ids[n] = c
            n += 1
    for c in range(len(ranks)):  # those at the limit itself take the places that are left
        if n == allowed:
            break
        if ranks[c] == limit:
            ids[n] = c
            n += 1
    if share >= 0:
        return n
    order = np.argsort(-ranks[ids[:n]])
    ids[:n] = ids[:n][order]
    everything = ranks.sum()
    left = everything
    for i in range(n):
        if i >= least and left <= (1 - top_p) * everything:
            return i
        left -= ranks[ids[i]]
    return n


@njit(fastmath=FAST, inline="always")
def _scores(queries, g, keys, start, stop, scores, shift, width):
    """Writes the scores of keys start .. stop of [S, H] with query heads g .. g + 3 to scores [G, *] from `shift` on."""
    for j in range(start, stop):
        s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for h in range(width):
            x = _widen(keys[j, h])
            s0 += queries[g, h] * x
            s1 += queries[g + 1, h] * x
            s2 += queries[g + 2, h] * x
            s3 += queries[g + 3, h] * x
        scores[g, shift + j - start] = s0
        scores[g + 1, shift + j - start] = s1
        scores[g + 2, shift + j - start] = s2
        scores[g + 3, shift + j - start] = s3

@njit(fastmath=FAST, inline="always")
def _add(sums, weights, first, values, row, width):
    """Adds values row .. row + 3 of [S, H], weighted by weights [G, first .. first + 3], to sums [G, H]."""
    for g in range(len(sums)):
        w0, w1, w2, w3 = weights[g, first], weights[g, first + 1], weights[g, first + 2], weights[g, first + 3]
        for h in range(width):
            sums[g, h] += (
                w0 * _widen(values[row, h])
                + w1 * _widen(values[row + 1, h])
                + w2 * _widen(values[row + 2, h])
                + w3 * _widen(values[row + 3, h])
            )


@intrinsic
def _touch(context, a, row, column):
    """Asks the processor to have the cache line of a[row, column] ready soon."""

    def generate(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        shape, strides = (cgutils.unpack_tuple(builder, t) for t in (array.shape, array.strides))
        place = cgutils.get_item_pointer2(
            context, builder, array.data, shape, strides, signature.args[0].layout, arguments[1:]
        )
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0i8")
        # To read, to be kept in all caches, data.
        builder.call(prefetch, [builder.bitcast(place, byte), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(a, types.intp, types.intp), generate


@njit(inline="always")
def _touch_rows(a, start, stop, width):
    for row in range(start, stop):
        for column in range(0, width, CACHE_LINE // a.itemsize):
            _touch(a, row, column)


@functools.cache
def _compiled(width: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """`rank` and `attend` for a head dim, which is compiled in: loops of a known length fill vectors."""

    @njit(fastmath=FAST, nogil=True, parallel=True, cache=True)
    def _rank_heads(
        queries,
        means,
        log_masses,
        importances,
        sizes,
        clusters,
        whole,
        share,
        top_p,
        least,
        most,
        weights,
        tops,
        ids,
        chosen,
        attended,
    ):
        """Estimates each cluster's mass, ranks, and chooses.

        All arrays are contiguous: with an unknown stride nothing fills a vector.

        Args:
          queries: [K, G, H] float32, scaled. Those that only fill up the last `TOGETHER` are zero.
          means: [K, C, H] mean keys, float32 or the bits of bfloat16.
          log_masses: [K, C] float32, what a cluster's score is raised by: the logarithm of its number of keys, and
            the spread's second order; -inf for an empty cluster.
          importances: [K, C] float32, what a cluster's estimated share is multiplied by to rank it.
          sizes: [K, C] int32, keys of each cluster.
          clusters: how many of the C there are so far.
          whole: [K] int64, the first keys of a head that are attended to without being in clusters; mostly 0.
          share, top_p, least, most: `SelectionRule`'s; `share` negative where `top_p` rules.
          weights: [K, G, C] float32, where to write exp(estimate - top): 0 for what is retrieved.
          tops: [K, G] float32, where to write the largest estimate; -inf where there is no cluster.
          ids: [K, R] int32, where to write the clusters chosen, in no order.
          chosen: [K] int64, where to write how many.
          attended: [K] int64, where to write the keys that are attended to exactly.
        """
        heads, groups = tops.shape
        real = queries.shape[1]
        for k in prange(heads):
            for g in range(0, real, TOGETHER):
                _scores(queries[k], g, means[k], 0, clusters, weights[k], 0, width)
            ranks = np.zeros(clusters, np.float32)
            for g in range(groups):
                row = weights[k, g]
                top = np.float32(-np.inf)
                for c in range(clusters):
                    row[c] += log_masses[k, c]
                    top = max(top, row[c])
                tops[k, g] = top
                reference = top if top > -np.inf else np.float32(0)
                total = np.float32(0)
                for c in range(clusters):
                    row[c] = _exp(row[c] - reference)
                    total += row[c]
                scale = 1 / total if total > 0 else np.float32(0)
                for c in range(clusters):
                    ranks[c] += row[c] * scale
            held = 0
            for c in range(clusters):
                ranks[c] *= importances[k, c]
                held += log_masses[k, c] > -np.inf
            chosen[k] = _choose(ranks, held, share, top_p, least, most, ids[k])
            attended[k] = whole[k]
            for i in range(chosen[k]):
                attended[k] += sizes[k, ids[k, i]]
                for g in range(real):
                    weights[k, g, ids[k, i]] = 0
            for g in range(real):  # `_attend_heads` reads them `TOGETHER`
                for c in range(clusters, min(clusters + TOGETHER, weights.shape[2])):
                    weights[k, g, c] = 0

    @njit(fastmath=FAST, nogil=True, parallel=True, cache=True)
    def _attend_heads(
        queries,
        mean_values,
        keys,
        values,
        starts,
        sizes,
        clusters,
        whole,
        weights,
        tops,
        ids,
        chosen,
        out,
    ):
        """The partial over all clusters: those retrieved exactly, the others as estimated.

        Args:
          queries: [K, G, H], as for `_rank_heads`.
          mean_values: [K, C, H], like the means.
          keys, values: [K, S, H], ordered by cluster; float32 or the bits of bfloat16.
          starts, sizes: [K, C] int32, the keys of each cluster.
          clusters, whole: as for `_rank_heads`.
          weights, tops, ids, chosen: what `_rank_heads` wrote.
          out: [K, G, H + 2] float32, where to write numerator, denominator and max of the real query heads.
        """
        heads, groups = tops.shape
        real = queries.shape[1]
        for k in prange(heads):
            sums, totals = np.zeros((groups, width), np.float32), np.zeros(groups, np.float32)
            exact, exact_totals = np.zeros((groups, width), np.float32), np.zeros(groups, np.float32)
            exact_tops = np.full(groups, -np.inf, np.float32)
            scores = np.zeros((real, TILE), np.float32)
            heaviest = np.zeros(weights.shape[2], np.float32)
            for g in range(groups):
                total = np.float32(0)
                for c in range(clusters):
                    total += weights[k, g, c]
                    heaviest[c] = max(heaviest[c], weights[k, g, c])
                totals[g] = total
            # A query head's largest weight is 1 before what is retrieved is taken out.
            for c in range(0, clusters, TOGETHER):
                if heaviest[c : c + TOGETHER].max() * clusters > NEGLIGIBLE:
                    _add(sums, weights[k], c, mean_values[k], c, width)
            # The chosen clusters, and after them the keys of a head that is whole.
            for i in range(chosen[k] + 1):
                start, stop = 0, whole[k]
                if i < chosen[k]:
                    start = starts[k, ids[k, i]]
                    stop = start + sizes[k, ids[k, i]]
                if i + AHEAD < chosen[k]:
                    later = ids[k, i + AHEAD]
                    _touch_rows(keys[k], starts[k, later], starts[k, later] + sizes[k, later], width)
                    _touch_rows(values[k], starts[k, later], starts[k, later] + sizes[k, later], width)
                for tile in range(start, stop, TILE):
                    n = min(TILE, stop - tile)
                    for g in range(0, real, TOGETHER):
                        _scores(queries[k], g, keys[k], tile, tile + n, scores, 0, width)
                    for g in range(groups):
                        top = exact_tops[g]
                        for j in range(n):
                            top = max(top, scores[g, j])
                        if top > exact_tops[g]:
                            scale = _exp(exact_tops[g] - top)
                            exact_totals[g] *= scale
                            for h in range(width):
                                exact[g, h] *= scale
                            exact_tops[g] = top
                        for j in range(n):
                            scores[g, j] = _exp(scores[g, j] - top)
                            exact_totals[g] += scores[g, j]
                        for j in range(n, TILE):
                            scores[g, j] = 0
                    # Past the last there are always rows to read, if only of the next cluster.
                    for j in range(0, n, TOGETHER):
                        _add(exact, scores, j, values[k], tile + j, width)
            for g in range(groups):
                top = max(tops[k, g], exact_tops[g])
                reference = top if top > -np.inf else np.float32(0)
                estimate, scale = _exp(tops[k, g] - reference), _exp(exact_tops[g] - reference)
                for h in range(width):
                    out[k, g, h] = estimate * sums[g, h] + scale * exact[g, h]
                out[k, g, width] = estimate * totals[g] + scale * exact_totals[g]
                out[k, g, width + 1] = top

    return _rank_heads, _attend_heads
