"""Attention over clusters on the host, compiled: rank them, attend to the best exactly, estimate all others.

The same as `models.wave.select`, `attend_blocks` and `attend_whole`, which are its reference, but in one pass over
memory that the host has anyway: nothing is gathered, and what weighs next to nothing is not read. Numba compiles it
at its first call for a head dim and keeps the result on disk. It runs without Python's lock, so that threads can take
heads each.

There are two levels. Clusters like one another are in groups, and of each group the mean, the mean value and the size
are known. Groups are ranked first; only the clusters of the best are looked at, and all others are estimated as wholes.

Letters: `K` key/value heads, each in `HALVES`, `G` query heads per key/value head, `S` keys, `C` clusters and `N`
groups of a half, `R` clusters retrieved at most, `H` head dim.
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
    largest,
    padded,
    score,
    sum_of,
    top_of,
    touch_rows,
    wait,
)
from rajax.kernels.row_products import TOGETHER, add_rows, score_rows

LIGHT = np.float32(1e-4)
"""The mean value of a cluster with a share of the estimate below this is not read: its group's stands for it."""

AHEAD = 2
"""A cluster's keys are asked for so many clusters before they are needed."""

CHUNK = 64
"""Ranks whose highest is looked at before they are."""


@njit(fastmath={*FAST, "nnan"})
def _raised(row, masses, count):
    """Adds masses[:count] to row[:count]; returns the largest sum, none of which is NaN."""
    top = np.float32(-np.inf)
    for c in range(count):
        row[c] += masses[c]
        top = row[c] if row[c] > top else top
    return top


@njit
def _choose(ranks, held, everything, share, top_p, least, most, ids):
    """Writes the clusters of the highest ranks [C] into ids [R], of the `held` that have one; returns how many.

    everything: the sum of those ranks.
    """
    allowed = min(most, held)
    if share >= 0:
        allowed = min(allowed, int(np.ceil(share * held)))
    if allowed == 0:
        return 0
    # As many ranks as there are chunks with so high a rank are no lower than it: most chunks need no second look.
    chunks = (len(ranks) + CHUNK - 1) // CHUNK
    highest = np.empty(chunks, np.float32)
    for i in range(chunks):
        highest[i] = top_of(ranks[i * CHUNK :], min(CHUNK, len(ranks) - i * CHUNK), np.float32(-1))
    limit = np.float32(-1)
    if allowed < chunks:
        limit = np.partition(highest, chunks - allowed)[chunks - allowed]
    high, count = np.empty(len(ranks), np.int32), 0
    for i in range(chunks):
        if highest[i] >= limit:
            for c in range(i * CHUNK, min(i * CHUNK + CHUNK, len(ranks))):
                if ranks[c] >= limit:
                    high[count] = c
                    count += 1
    high = high[:count]
    limit = np.float32(-1)
    if allowed < count:
        limit = np.partition(ranks[high], count - allowed)[count - allowed]
    n = 0
    for which in high:
        if ranks[which] > limit:
            ids[n] = which
            n += 1
    for which in high:  # those at the limit itself take the places that are left
        if n == allowed:
            break
        if ranks[which] == limit:
            ids[n] = which
            n += 1
    if share >= 0:
        return n
    order = np.argsort(-ranks[ids[:n]])
    ids[:n] = ids[:n][order]
    left = everything
    for i in range(n):
        if i >= least and left <= (1 - top_p) * everything:
            return i
        left -= ranks[ids[i]]
    return n


@njit(fastmath=FAST, inline="always")
def _rank(weights, count, masses, importances, ranks, heaviest, tops):
    """Turns scores [G, count] into the masses that they estimate, exp(score + mass - top).

    Writes what ranks them, importance times the share of the mass, summed over the query heads, to ranks [count], the
    largest of the shares to heaviest [count], and the largest exponents to tops [G]. Returns how many have any mass,
    and the sum of their ranks; the others' rank is -1.
    """
    ranks[:] = 0
    heaviest[:] = 0
    for g in range(len(tops)):
        row = weights[g]
        top = _raised(row, masses, count)
        tops[g] = top
        reference = top if top > -np.inf else np.float32(0)
        total = np.float32(0)
        for c in range(count):
            row[c] = exp(row[c] - reference)
            total += row[c]
        scale = 1 / total if total > 0 else np.float32(0)
        for c in range(count):
            weight = row[c] * scale
            ranks[c] += weight
            heaviest[c] = max(heaviest[c], weight)
    held, everything = 0, np.float32(0)
    for c in range(count):
        here = masses[c] > -np.inf
        rank = ranks[c] * importances[c] if here else np.float32(0)
        everything += rank
        ranks[c] = rank if here else np.float32(-1)
        held += here
    return held, everything


@njit(fastmath=FAST, inline="always")
def _weigh(weights, count, totals):
    """Writes the sums of weights [G, count] to totals [G]; returns the largest share of each column, and zeros."""
    heaviest = np.zeros(count + TOGETHER, np.float32)
    for g in range(len(totals)):
        total = np.float32(0)
        for c in range(count):
            total += weights[g, c]
        totals[g] = total
        scale = 1 / max(total, np.float32(1))
        for c in range(count):
            heaviest[c] = max(heaviest[c], weights[g, c] * scale)
    return heaviest


@njit(fastmath=FAST, inline="always")
def _estimate(weights, count, values, width, sums, totals):
    """Adds values [count, H], weighted by weights [G, count], to sums [G, H]; writes the sums of weights to totals [G].

    Values that weigh next to nothing are not read.
    """
    shares = _weigh(weights, count, totals)
    for c in range(0, count, TOGETHER):
        if largest(shares, c) * count > NEGLIGIBLE:
            add_rows(weights, c, values, c, width, sums)


@njit(fastmath=FAST, inline="always")
def _estimate_near(weights, shares, opened, ends, values, width, sums, totals, light):
    """`_estimate` of the clusters of the groups `opened`, whose values are rows ends[i] .. ends[i + 1] - 1 of group i.

    shares: the largest share of each, among all of them. The weights of those that weigh little are left for their
    groups' values: they are added to light [G, N].
    """
    totals[:] = 0
    first = 0
    for i in opened:
        stop = first + padded(ends[i + 1] - ends[i])
        all_light = top_of(shares[first:stop], stop - first, np.float32(0)) <= LIGHT
        for g in range(len(totals)):
            total = sum_of(weights[g, first:stop])
            totals[g] += total
            light[g, i] = total if all_light else np.float32(0)
        if not all_light:
            for at in range(first, stop, TOGETHER):
                if largest(shares, at) > LIGHT:
                    add_rows(weights, at, values, ends[i] + at - first, width, sums)
                else:
                    for g in range(len(totals)):
                        light[g, i] += sum_of(weights[g, at : at + TOGETHER])
        first = stop


@functools.cache
def compiled(width: int) -> Callable[..., None]:
    """`_attend` for a head dim, which is compiled in: loops of a known length fill vectors."""

    def _attend(
        turns,
        queries,
        means,
        mean_values,
        log_masses,
        importances,
        starts,
        sizes,
        group_means,
        group_values,
        group_log_masses,
        group_importances,
        group_ends,
        keys,
        values,
        apart,
        groups,
        open_p,
        least_open,
        most_open,
        share,
        top_p,
        least,
        most,
        longest,
        counts,
        out,
    ):
        """The partials of all half heads that no other thread takes, over all their clusters.

        All arrays are contiguous: with an unknown stride nothing fills a vector.

        Args:
          turns: [2] int64, half heads that were begun and that are done, shared by the threads that work on them.
          queries: [K, G, H] float32, scaled.
          means, mean_values: [2 K, C, H], float32 or the bits of bfloat16.
          log_masses: [2 K, C] float32, what a cluster's score is raised by: the logarithm of its number of keys, and
            the spread's second order; -inf for an empty cluster.
          importances: [2 K, C] float32, what a cluster's estimated share is multiplied by to rank it.
          starts, sizes: [2 K, C] int32, the keys of each cluster.
          group_means, group_values, group_log_masses, group_importances: likewise of groups of clusters, [2 K, N, ...].
          group_ends: [2 K, N + 1] int32; the clusters of group i lie from place i of it to before place i + 1.
          keys, values: [K, S, H], ordered by cluster, like the means.
          apart: [2 K, n, 2] int64, keys from one to before another that are attended to without being in clusters.
          groups: how many of the N there are so far.
          open_p, least_open, most_open: `top_p`, `least` and `most` of the groups whose clusters are looked at; all
            others are estimated as wholes.
          share, top_p, least, most: `SelectionRule`'s; `share` negative where `top_p` rules.
          longest: keys of a cluster at most.
          counts: [2 K, 5] int64, where to write the clusters retrieved, the keys attended to exactly, the means looked
            at, and the cycles that ranking and attending took.
          out: [2 K, G, H + 2] float32, where to write numerator, denominator and max of the query heads.
        """
        heads = out.shape[1]
        room = max(SPAN, most * padded(longest))
        scores, quads = np.empty((heads, room), np.float32), np.empty(room // TOGETHER, np.int64)
        while True:
            k: Any = add_to(turns.ctypes.data, 1)  # type: ignore[call-arg]
            if k >= len(out):
                break
            began: Any = cycles()
            these = queries[k // HALVES]
            far = np.zeros((heads, groups + TOGETHER), np.float32)
            score_rows(these, group_means[k], 0, groups, width, far, 0)
            ranks, shares = np.empty(groups, np.float32), np.empty(groups, np.float32)
            far_tops = np.zeros(heads, np.float32)
            held, sum_ = _rank(
                far, groups, group_log_masses[k], group_importances[k], ranks, shares, far_tops
            )
            opened = np.empty(min(groups, most_open), np.int32)
            n = _choose(ranks, held, sum_, np.float32(-1), open_p, least_open, most_open, opened)
            places = 0
            for i in range(n):
                places += padded(group_ends[k, opened[i] + 1] - group_ends[k, opened[i]])
            # Of the clusters of the groups that are opened; each group's begin at a multiple of `TOGETHER`.
            weights = np.empty((heads, places + TOGETHER), np.float32)
            masses, near_importances = np.full(places, -np.inf, np.float32), np.zeros(places, np.float32)
            firsts = np.empty(n, np.int64)
            at = 0
            for i in range(n):
                start, stop = group_ends[k, opened[i]], group_ends[k, opened[i] + 1]
                if i + 1 < n:
                    later = opened[i + 1]
                    touch_rows(means[k], group_ends[k, later], group_ends[k, later + 1], width)
                score_rows(these, means[k], start, stop, width, weights, at)
                masses[at : at + stop - start] = log_masses[k, start:stop]
                near_importances[at : at + stop - start] = importances[k, start:stop]
                firsts[i] = at
                at += padded(stop - start)
                for g in range(heads):
                    far[g, opened[i]] = 0
            ranks, shares = np.empty(places, np.float32), np.empty(places, np.float32)
            tops = np.zeros(heads, np.float32)
            held, sum_ = _rank(weights, places, masses, near_importances, ranks, shares, tops)
            ids = np.empty(most, np.int32)
            chosen = _choose(ranks, held, sum_, share, top_p, least, most, ids)
            attended = 0
            for i in range(apart.shape[1]):
                attended += apart[k, i, 1] - apart[k, i, 0]
            for i in range(chosen):
                for g in range(heads):
                    weights[g, ids[i]] = 0
                group = np.searchsorted(firsts, ids[i], side="right") - 1
                ids[i] += group_ends[k, opened[group]] - firsts[group]
                attended += sizes[k, ids[i]]
            ranked = cycles()

            sums, totals = np.zeros((heads, width), np.float32), np.zeros(heads, np.float32)
            light = np.zeros((heads, groups + TOGETHER), np.float32)
            _estimate_near(
                weights, shares, opened[:n], group_ends[k], mean_values[k], width, sums, totals, light
            )
            far_sums, far_totals = np.zeros((heads, width), np.float32), np.zeros(heads, np.float32)
            _estimate(light, groups, group_values[k], width, sums, far_totals)
            _estimate(far, groups, group_values[k], width, far_sums, far_totals)

            exact, exact_totals = np.zeros((heads, width), np.float32), np.zeros(heads, np.float32)
            exact_tops = np.full(heads, -np.inf, np.float32)
            least_read = NEGLIGIBLE / max(attended, 1)
            at = 0
            for i in range(chosen):
                start = starts[k, ids[i]]
                if i + AHEAD < chosen:
                    later = starts[k, ids[i + AHEAD]]
                    touch_rows(keys[k // HALVES], later, later + sizes[k, ids[i + AHEAD]], width)
                stop = start + sizes[k, ids[i]]
                score(these, keys[k // HALVES], start, stop, width, scores, quads, at)
                at += padded(stop - start)
            state = exact, exact_totals, exact_tops
            attend_to(scores, quads, at, values[k // HALVES], width, least_read, *state)
            # The keys that are in no cluster.
            for i in range(apart.shape[1]):
                for start in range(apart[k, i, 0], apart[k, i, 1], SPAN):
                    stop = min(start + SPAN, apart[k, i, 1])
                    score(these, keys[k // HALVES], start, stop, width, scores, quads, 0)
                    at = padded(stop - start)
                    attend_to(scores, quads, at, values[k // HALVES], width, least_read, *state)
            for g in range(heads):
                top = max(max(tops[g], far_tops[g]), exact_tops[g])
                reference = top if top > -np.inf else np.float32(0)
                far_, near = exp(far_tops[g] - reference), exp(tops[g] - reference)
                here = exp(exact_tops[g] - reference)
                for h in range(width):
                    out[k, g, h] = far_ * far_sums[g, h] + near * sums[g, h] + here * exact[g, h]
                out[k, g, width] = far_ * far_totals[g] + near * totals[g] + here * exact_totals[g]
                out[k, g, width + 1] = top
            counts[k, 0], counts[k, 1], counts[k, 2] = chosen, attended, groups + places
            counts[k, 3], counts[k, 4] = ranked - began, cycles() - ranked
            add_to(turns[1:].ctypes.data, 1)

    function = njit(fastmath=FAST, nogil=True)(_attend)
    # Where there is no place to write, every process compiles anew.
    with contextlib.suppress(RuntimeError):
        function.enable_caching()
    return function


def warm_up(width: int, dtype: np.dtype) -> None:
    """Compiles `_attend` for a head dim and the keys' dtype, by a call for no heads."""
    rows, keys = np.zeros((0, 0), np.float32), np.zeros((0, 0, width), dtype)
    queries, numbers = np.zeros((0, 0, width), np.float32), np.zeros((0, 0), np.int32)
    counts, apart = np.zeros((0, 0), np.int64), np.zeros((0, 0, 2), np.int64)
    out = np.zeros((0, 0, 0), np.float32)
    tables = rows, rows, numbers, numbers
    groups = keys, keys, rows, rows, numbers
    settings = 0, 0.0, 0, 0, -1.0, 0.0, 0, 0, 0
    turns = np.zeros(2, np.int64)
    wait(turns, 0)
    compiled(width)(turns, queries, keys, keys, *tables, *groups, keys, keys, apart, *settings, counts, out)
