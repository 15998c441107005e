"""Four-bit codes of keys, for a look at every single one: product quantization as the prompt's queries see the keys.

Keys are turned into coordinates in which an error is an error of scores, and so that pairs of coordinates vary alike.
Each pair is rounded to the nearest of 16 centroids: a key of 64 numbers is 32 codes in 16 bytes.

NumPy and Numba only: threads of the host do this while JAX runs.

Letters: `S` keys, `H` head dim, `W` coordinates, `M = W / 2` codes of a key, `N` blocks of `code_sums.BLOCK` keys.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from numba import njit

from rajax.kernels import vectors
from rajax.kernels.code_sums import CENTROIDS, CODES, place_in_block

WIDTH = 2
"""Coordinates of a code."""

SAMPLE = 4096
"""Keys that centroids are learned from, at most."""

ITERATIONS = 10
"""Rounds of k-means."""

TOGETHER = 64
"""Keys whose codes are found together."""


@dataclasses.dataclass(frozen=True)
class Codebook:
    """How one head's keys are coded.

    Attributes:
      to_coordinates: [H, W] float32; a key's coordinates are its product with this.
      of_queries: [H, W] float32; a score is the product of the query's coordinates with the key's.
      centroids: [M, 16, 2] float32.
      errors: [W] float32, the second moments of what rounding takes from the coordinates.
    """

    to_coordinates: np.ndarray
    of_queries: np.ndarray
    centroids: np.ndarray
    errors: np.ndarray


def coordinates(head_dim: int) -> int:
    """W: as many as make a multiple of `CODES` codes."""
    return -(-head_dim // (CODES * WIDTH)) * CODES * WIDTH


def learn(keys: np.ndarray, root: np.ndarray) -> Codebook:
    """A codebook for keys [S, H] float32, of which there is at least one; `root` [H, H] as in `models.summary`."""
    width = keys.shape[1]
    sample = keys[:: -(-len(keys) // SAMPLE)]
    points = sample @ root
    _, axes = np.linalg.eigh(np.cov(points, rowvar=False, bias=True).reshape(width, width))
    # The first with the last, the second with the last but one: so the products of a pair's variances are about alike.
    last = width - 1 - np.arange(width // 2)
    order = np.stack([last, np.arange(width // 2)], axis=1).ravel()
    order = np.concatenate([order, np.setdiff1d(np.arange(width), order)])
    axes = np.pad(axes[:, order], ((0, 0), (0, coordinates(width) - width))).astype(np.float32)
    to_coordinates = root @ axes
    of_queries = np.linalg.solve(root.T.astype(np.float64), axes.astype(np.float64)).astype(np.float32)
    here = np.ascontiguousarray((sample @ to_coordinates).T)
    centroids = np.empty((len(here) // WIDTH, CENTROIDS, WIDTH), np.float32)
    rounded = np.empty_like(here)
    _compiled(_learn)(here, centroids, rounded)
    return Codebook(to_coordinates, of_queries, centroids, ((here - rounded) ** 2).mean(1))


def encode(
    book: Codebook, keys: np.ndarray, blocks: np.ndarray, places: np.ndarray, codes: np.ndarray
) -> None:
    """Writes the codes of keys [S, H] float32, each at its place [S] of its block [S], to codes [N, M / 4, 32]; see
    `code_sums`."""
    points = np.ascontiguousarray((keys @ book.to_coordinates).T)
    _compiled(_encode)(points, book.centroids, blocks.astype(np.int64), places.astype(np.int64), codes)


@functools.cache
def _compiled(function: Any) -> Any:
    return vectors.compiled(function)


@njit(inline="always")
def _nearest(points, m, start, number, centroids, best, which):
    """The centroid nearest to each of `number` points [W, S], from `start` on, in pair m, to which[:number]."""
    best[:number] = np.inf
    for c in range(CENTROIDS):
        x, y = centroids[m, c, 0], centroids[m, c, 1]
        for i in range(number):
            u, v = points[WIDTH * m, start + i] - x, points[WIDTH * m + 1, start + i] - y
            distance = u * u + v * v
            nearer = distance < best[i]
            best[i] = distance if nearer else best[i]
            which[i] = np.int32(c) if nearer else which[i]


def _learn(points, centroids, rounded):
    """k-means of each pair of points [W, S]: centroids [M, 16, 2], and what each point is rounded to, [W, S]."""
    count = points.shape[1]
    best, which = np.empty(count, np.float32), np.zeros(count, np.int32)
    sums, counts = np.empty((CENTROIDS, WIDTH), np.float64), np.empty(CENTROIDS, np.int64)
    for m in range(len(centroids)):
        # The first centroids: points at equal steps along the coordinate that varies more.
        order = np.argsort(points[WIDTH * m])
        for c in range(CENTROIDS):
            which_one = order[(2 * c + 1) * count // (2 * CENTROIDS)]
            for w in range(WIDTH):
                centroids[m, c, w] = points[WIDTH * m + w, which_one]
        for iteration in range(ITERATIONS + 1):
            _nearest(points, m, 0, count, centroids, best, which)
            if iteration == ITERATIONS:
                break
            sums[:] = 0
            counts[:] = 0
            for i in range(count):
                counts[which[i]] += 1
                for w in range(WIDTH):
                    sums[which[i], w] += points[WIDTH * m + w, i]
            for c in range(CENTROIDS):
                for w in range(WIDTH):
                    if counts[c]:
                        centroids[m, c, w] = sums[c, w] / counts[c]
        for i in range(count):
            for w in range(WIDTH):
                rounded[WIDTH * m + w, i] = centroids[m, which[i], w]


def _encode(points, centroids, blocks, places, codes):
    best, which = np.empty(TOGETHER, np.float32), np.zeros(TOGETHER, np.int32)
    for start in range(0, points.shape[1], TOGETHER):
        number = min(TOGETHER, points.shape[1] - start)
        for m in range(len(centroids)):
            _nearest(points, m, start, number, centroids, best, which)
            for i in range(number):
                four, place, high = place_in_block(m, places[start + i])
                block = blocks[start + i]
                old = codes[block, four, place]
                codes[block, four, place] = old & 15 | which[i] << 4 if high else old & 240 | which[i]


def warm_up(width: int) -> None:
    """Compiles what learns and writes codes, by some of a head dim."""
    keys = np.random.default_rng(0).standard_normal((CENTROIDS, width), np.float32)
    book = learn(keys, np.eye(width, dtype=np.float32))
    places = np.arange(CENTROIDS)
    encode(book, keys, 0 * places, places, np.zeros((1, len(book.centroids) // 4, 32), np.uint8))
