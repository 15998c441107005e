"""Causal attention of a block of a prompt in a CPU's vector registers: `prefill_attention` in float32.

As in `tile_attention` all is transposed: scores [keys, queries] and sums [H, queries], so that a vector's lanes are
queries and no sum runs across lanes. Keys and values are read as they lie.

Letters: `B` batch, `K` key/value heads, `G` query heads per key/value head, `N = K G`, `T` query positions, `S` key
positions, `H` head dim.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rajax.kernels import vectors
from rajax.kernels.host_call import attention_by_host, share_out

LANES = vectors.LANES

STEP = 128
"""Keys whose scores are computed before they are weighed: they stay in a core's first cache."""

TO_BASE_2 = np.float32(np.log2(np.e))
"""What scores are scaled by, so that their exponentials are powers of two."""

QUERIES = 256
"""Query positions that share a reading of `STEP` keys: those stay in its second."""


def vector_attention(q: jax.Array, keys: jax.Array, values: jax.Array, start: jax.Array) -> jax.Array:
    """Attention of positions start .. start+T-1 over positions 0 .. start+T-1, causally masked, in float32.

    Args:
      q: [B, K, G, T, H], already scaled by H**-0.5.
      keys: [B, K, S, H].
      values: [B, K, S, H].
      start: int32 scalar, a multiple of `LANES` like T, S and H.

    Returns:
      [B, K, G, T, H] float32.
    """
    q, keys, values = (a.astype(jnp.float32) for a in (q, keys, values))
    return attention_by_host(_fill, q, keys, values, start)


def _fill(q: np.ndarray, keys: np.ndarray, values: np.ndarray, start: np.ndarray, out: np.ndarray) -> None:
    batch, length, *_, width = q.shape
    q, out = q.reshape(batch, length, -1, width), out.reshape(batch, length, -1, width)
    keys, values = keys.reshape(-1, *keys.shape[2:]), values.reshape(-1, *values.shape[2:])
    attend = _compiled()

    def some(first: int, last: int) -> None:
        attend(q, keys, values, int(start[0]), first, last, out)

    share_out(some, batch * q.shape[2] * -(-length // QUERIES))


@functools.cache
def _compiled() -> Any:
    return vectors.compiled(_attend)


def _attend(q, keys, values, start, first, last, out):
    """Pieces first .. last - 1 of q [B, T, N, H], each one head and at most `QUERIES` positions, over keys and values
    [B K, S, H]; out is like q."""
    batch, length, heads, width = q.shape
    pieces = (length + QUERIES - 1) // QUERIES
    row_bytes, lane_bytes = 4 * width, 4 * LANES
    scores = np.empty((STEP, LANES), np.float32)
    # Of each `LANES` queries:
    queries = np.empty((QUERIES // LANES, width, LANES), np.float32)
    sums = np.empty((QUERIES // LANES, LANES, width), np.float32)
    totals = np.empty((QUERIES // LANES, LANES), np.float32)
    tops = np.empty((QUERIES // LANES, LANES), np.float32)
    shrunk, unused = np.empty(LANES, np.float32), np.zeros(LANES, np.float32)
    for piece in range(first, last):
        head, row = piece // pieces, piece % pieces * QUERIES
        k = head // (batch * heads // len(keys))
        b, n = head // heads, head % heads
        chunks = min(QUERIES, length - row) // LANES
        for c in range(chunks):
            for i in range(LANES):
                for h in range(width):
                    queries[c, h, i] = q[b, row + c * LANES + i, n, h] * TO_BASE_2
            sums[c] = 0
            totals[c] = 0
            tops[c] = -np.inf
        for s in range(0, start + row + chunks * LANES, STEP):
            at = row_bytes * (k * keys.shape[1] + s)
            at_keys, at_values = keys.ctypes.data + at, values.ctypes.data + at
            for c in range(chunks):
                position = start + row + c * LANES
                if s >= position + LANES:
                    continue  # all of these keys are later
                number = min(STEP, position + LANES - s)
                # Taken anew in the loop: Numba frees an array after its last use.
                at_scores, at_sums = scores.ctypes.data, sums.ctypes.data + c * width * lane_bytes
                at_queries = queries.ctypes.data + c * width * lane_bytes
                at_tops, at_totals = tops.ctypes.data + c * lane_bytes, totals.ctypes.data + c * lane_bytes
                vectors.multiply(
                    at_keys, row_bytes, 4, number, at_queries, lane_bytes, LANES, width, at_scores, lane_bytes
                )
                for j in range(max(0, position - s), number):
                    for i in range(s + j - position):
                        scores[j, i] = -np.inf
                # Every query sees key 0, which is in the first step, so tops are finite from there on.
                shrunk[:] = tops[c]
                vectors.raise_tops(at_scores, number, at_tops)  # type: ignore[call-arg]
                higher = False
                for i in range(LANES):
                    higher |= tops[c, i] > shrunk[i]
                if higher:
                    vectors.weigh(shrunk.ctypes.data, 1, at_tops, unused.ctypes.data)
                    for i in range(LANES):
                        totals[c, i] *= shrunk[i]
                        for h in range(width):
                            sums[c, i, h] *= shrunk[i]
                vectors.weigh(at_scores, number, at_tops, at_totals)
                vectors.multiply_add(
                    at_scores, 4, lane_bytes, LANES, at_values, row_bytes, width, number, at_sums, row_bytes
                )
        for c in range(chunks):
            for i in range(LANES):
                scale = 1 / totals[c, i]
                for h in range(width):
                    out[b, row + c * LANES + i, n, h] = sums[c, i, h] * scale
