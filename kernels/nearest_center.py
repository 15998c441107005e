"""The step of k-means that costs: each point's nearest center, and what each center's points add up to.

Letters: `S` points, `C` centers, `H` numbers of a point.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import njit

from rajax.kernels import tiles, vectors
from rajax.kernels.host_call import filled_by_host, share_out

CHUNK = 512
"""Points that are compared with all centers at a time by XLA: the scores then stay in a CPU's cache."""

LANES = tiles.LANES


def nearest_center(
    points: jax.Array, weights: jax.Array, centers: jax.Array, offsets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Assigns points to the centers of the highest point . center + offset.

    With offsets of -|center|^2 / 2 those are the nearest. A CPU's matrix unit rounds points and centers to bfloat16 in
    that comparison: points should lie around 0. Its vector registers, where there is no such unit, and XLA compute in
    float32.

    Args:
      points: [S, H] float32; S is a multiple of `CHUNK`.
      weights: [S] float32, not negative.
      centers: [C, H] float32.
      offsets: [C] float32; -inf for what is no center.

    Returns:
      The center [S] int32 of each point, and per center [C, H + 1] float32 the weighted sum of its points and, last, of
      their weights.
    """
    if tiles.usable() or vectors.usable():
        return _by_host(points, weights, centers, offsets)
    return nearest_center_reference(points, weights, centers, offsets)


def nearest_center_reference(
    points: jax.Array, weights: jax.Array, centers: jax.Array, offsets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`nearest_center` in plain JAX. A point as near to two centers counts for both in the sums."""

    def some(sums: jax.Array, args: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        points, weights = args
        scores = points @ centers.T + offsets
        nearest = (scores == scores.max(1, keepdims=True)).astype(jnp.float32)
        weighted = jnp.concatenate([points * weights[:, None], weights[:, None]], axis=1)
        return sums + nearest.T @ weighted, scores.argmax(1).astype(jnp.int32)

    empty = jnp.zeros((len(centers), points.shape[1] + 1))
    chunks = points.reshape(-1, CHUNK, points.shape[1]), weights.reshape(-1, CHUNK)
    sums, labels = jax.lax.scan(some, empty, chunks)
    return labels.reshape(-1), sums


def _by_host(
    points: jax.Array, weights: jax.Array, centers: jax.Array, offsets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    number, width = centers.shape
    offsets = jnp.pad(offsets, (0, -number % LANES), constant_values=-jnp.inf)
    shapes = (
        jax.ShapeDtypeStruct(weights.shape, jnp.int32),
        jax.ShapeDtypeStruct((number, width + 1), jnp.float32),
    )
    if tiles.usable():
        compared = tiles.padded(points), tiles.padded(centers)
    else:
        compared = points, jnp.pad(centers, ((0, -number % LANES), (0, 0)))
    labels, sums = filled_by_host(_fill, shapes, points, weights, *compared, offsets)
    return labels, sums


def _fill(
    points: np.ndarray,
    weights: np.ndarray,
    compared: np.ndarray,
    centers: np.ndarray,
    offsets: np.ndarray,
    labels: np.ndarray,
    sums: np.ndarray,
) -> None:
    assign, add = _compiled(rounded=centers.dtype != np.float32)
    if centers.dtype != np.float32:
        compared, centers = compared.view(np.uint16), centers.view(np.uint16)

    def some(first: int, last: int) -> None:
        assign(tiles.CONFIGURATION, compared, centers, offsets, first, last, labels)

    share_out(some, len(points) // LANES)
    sums[:] = 0
    add(points, weights, labels, sums)


@functools.cache
def _compiled(*, rounded: bool) -> tuple[Any, Any]:
    return vectors.compiled(_assign_rounded if rounded else _assign), vectors.compiled(_add)


@njit(inline="always")
def _take_better(scores, offsets, first, best, index):
    """Compares the scores [LANES, LANES] of centers `first`, `first + 1`, ... with each point's best so far."""
    for j in range(LANES):
        for i in range(LANES):
            score = scores[j, i] + offsets[first + j]
            better = score > best[i]
            best[i] = score if better else best[i]
            index[i] = first + j if better else index[i]


def _assign_rounded(configuration, points, centers, offsets, first, last, labels):
    """Labels of the points first .. last - 1, counted in `LANES` of them; points and centers are bfloat16's bits."""
    width = points.shape[1]
    pairs = np.empty((2, width // 2, LANES // 2), np.uint32)
    scores = np.empty((LANES, LANES), np.float32)
    best, index = np.empty(LANES, np.float32), np.empty(LANES, np.int32)
    tiles.configure(configuration.ctypes.data)  # type: ignore[call-arg]
    for chunk in range(first, last):
        tiles.interleave(points[chunk * LANES : (chunk + 1) * LANES], pairs)
        best[:] = -np.inf
        index[:] = 0
        for c in range(0, len(centers), LANES):
            left = centers.ctypes.data + 2 * c * width
            right, to = pairs.ctypes.data, scores.ctypes.data
            tiles.clear_block()
            for h in range(0, width, 32):
                tiles.multiply_block(left + 2 * h, 2 * width, right + 32 * h, 32 * width, 64)
            tiles.store_block(to, 4 * LANES)
            _take_better(scores, offsets, c, best, index)
        for j in range(LANES):
            labels[chunk * LANES + j] = index[j]
    tiles.release()


def _assign(_, points, centers, offsets, first, last, labels):
    """`_assign_rounded` of float32, which is not rounded."""
    width = points.shape[1]
    turned = np.empty((width, LANES), np.float32)
    scores = np.empty((LANES, LANES), np.float32)
    best, index = np.empty(LANES, np.float32), np.empty(LANES, np.int32)
    for chunk in range(first, last):
        for j in range(LANES):
            for h in range(width):
                turned[h, j] = points[chunk * LANES + j, h]
        best[:] = -np.inf
        index[:] = 0
        for c in range(0, len(centers), LANES):
            left, right, to = centers.ctypes.data + 4 * c * width, turned.ctypes.data, scores.ctypes.data
            vectors.multiply(left, 4 * width, 4, LANES, right, 4 * LANES, LANES, width, to, 4 * LANES)
            _take_better(scores, offsets, c, best, index)
        for j in range(LANES):
            labels[chunk * LANES + j] = index[j]


def _add(points, weights, labels, sums):
    width = points.shape[1]
    for s in range(len(points)):
        weight, c = weights[s], labels[s]
        if weight > 0:
            for h in range(width):
                sums[c, h] += weight * points[s, h]
            sums[c, width] += weight
