"""Causal attention of a block of a prompt in a CPU's matrix unit: `prefill_attention` with rounded products.

All is transposed: scores [keys, queries] and sums [H, queries], so that a vector's lanes are queries, no sum runs
across lanes, and the weights are laid out as the next product wants them.

Letters: `B` batch, `K` key/value heads, `G` query heads per key/value head, `T` query positions, `S` key positions,
`H` head dim.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rajax.kernels import tiles, vectors
from rajax.kernels.host_call import attention_by_host, share_out

LANES = tiles.LANES

STEP = 256
"""Keys whose scores are computed before they are weighed: they stay in a core's first cache."""

QUERIES = 256
"""Query positions that share a reading of `STEP` keys: those stay in its second."""


def tile_attention(q: jax.Array, keys: jax.Array, values: jax.Array, start: jax.Array) -> jax.Array:
    """Attention of positions start .. start+T-1 over positions 0 .. start+T-1, causally masked.

    Queries, keys, values and weights are rounded to bfloat16; scores, sums and the softmax are float32.

    Args:
      q: [B, K, G, T, H], already scaled by H**-0.5.
      keys: [B, K, S, H].
      values: [B, K, S, H].
      start: int32 scalar, a multiple of `LANES` like T, S and H.

    Returns:
      [B, K, G, T, H] float32.
    """
    batch, heads, positions, width = keys.shape
    # Values as left tiles, one after the other: their 32 columns are keys.
    turned = (
        values.astype(jnp.bfloat16).reshape(batch, heads, positions // LANES, LANES, width).swapaxes(3, 4)
    )
    return attention_by_host(_fill, q.astype(jnp.bfloat16), keys.astype(jnp.bfloat16), turned, start)


def _fill(q: np.ndarray, keys: np.ndarray, values: np.ndarray, start: np.ndarray, out: np.ndarray) -> None:
    batch, length, *_, width = q.shape
    q, out = q.view(np.uint16).reshape(batch, length, -1, width), out.reshape(batch, length, -1, width)
    keys = keys.view(np.uint16).reshape(-1, *keys.shape[2:])
    values = values.view(np.uint16).reshape(-1, *values.shape[2:])
    attend = _compiled(width)

    def some(first: int, last: int) -> None:
        attend(tiles.CONFIGURATION, q, keys, values, int(start[0]), first, last, out)

    share_out(some, batch * q.shape[2] * -(-length // QUERIES))


@functools.cache
def _compiled(width: int) -> Any:
    """`_attend` for a head dim, which is compiled in."""

    def _attend(configuration, q, keys, values, start, first, last, out):
        """Pieces first .. last - 1 of q [B, T, N, H], each one head and at most `QUERIES` positions, over keys
        [B K, S, H] and values [B K, S / 32, H, 32]; out is like q."""
        batch, length, heads, _ = q.shape
        pieces = (length + QUERIES - 1) // QUERIES
        scores = np.empty((STEP, LANES), np.float32)
        weights = np.empty((STEP // 2, LANES), np.uint32)
        # Of each 32 queries, in two right tiles' columns: pairs of numbers, by half, pair and query.
        pairs = np.empty((QUERIES // LANES, 2, width // 2, LANES // 2), np.uint32)
        sums = np.empty((QUERIES // LANES, width, LANES), np.float32)
        totals = np.empty((QUERIES // LANES, LANES), np.float32)
        tops = np.empty((QUERIES // LANES, LANES), np.float32)
        before = np.empty(LANES, np.float32)
        tiles.configure(configuration.ctypes.data)  # type: ignore[call-arg]
        for piece in range(first, last):
            head, row = piece // pieces, piece % pieces * QUERIES
            k = head // (batch * heads // len(keys))
            b, n = head // heads, head % heads
            chunks = min(QUERIES, length - row) // LANES
            for c in range(chunks):
                at = row + c * LANES
                tiles.interleave(q[b, at : at + LANES, n], pairs[c])
                sums[c] = 0
                totals[c] = 0
                tops[c] = -np.inf
            end = start + row + chunks * LANES
            for s in range(0, end, STEP):
                number = min(STEP, end - s)
                at_keys = keys.ctypes.data + 2 * width * (k * keys.shape[1] + s)
                at_values = values.ctypes.data + 2 * width * (k * keys.shape[1] + s)
                for c in range(chunks):
                    position = start + row + c * LANES
                    if s >= position + LANES:
                        continue  # all of these keys are later
                    # Taken anew in the loop: Numba frees an array after its last use.
                    at_scores, at_weights = scores.ctypes.data, weights.ctypes.data
                    at_pairs = pairs.ctypes.data + 4 * LANES * (width // 2) * c
                    for j in range(0, number, 32):
                        tiles.clear_block()
                        for h in range(0, width, 32):
                            left = at_keys + 2 * (j * width + h)
                            tiles.multiply_block(left, 2 * width, at_pairs + 32 * h, 32 * width, 64)
                        to = at_scores + 4 * LANES * j
                        tiles.store_block(to, 4 * LANES)
                    if s + number - 1 > position:
                        for j in range(number):
                            for i in range(LANES):
                                if s + j > position + i:
                                    scores[j, i] = -np.inf
                    # Every query sees key 0, which is in the first step, so tops are finite from there on.
                    before[:] = tops[c]
                    raise_ = tops.ctypes.data + 4 * LANES * c
                    vectors.raise_tops(at_scores, number, raise_)
                    higher = False
                    for i in range(LANES):
                        higher |= tops[c, i] > before[i]
                    if higher:
                        for i in range(LANES):
                            before[i] = np.exp(before[i] - tops[c, i])
                            totals[c, i] *= before[i]
                        for h in range(width):
                            for i in range(LANES):
                                sums[c, h, i] *= before[i]
                    tiles.weigh(
                        at_scores, number // 2, raise_, at_weights, totals.ctypes.data + 4 * LANES * c
                    )
                    for h in range(0, width, 32):
                        to = sums.ctypes.data + 4 * LANES * (c * width + h)
                        tiles.load_block(to, 4 * LANES)
                        for j in range(0, number, 32):
                            left = at_values + 2 * (j * width + h * LANES)
                            right = at_weights + 4 * LANES * (j // 2)
                            tiles.multiply_block(left, 64, right, 64, 4 * LANES)
                        tiles.store_block(to, 4 * LANES)
            for c in range(chunks):
                for i in range(LANES):
                    scale = 1 / totals[c, i]
                    for h in range(width):
                        out[b, row + c * LANES + i, n, h] = sums[c, h, i] * scale
        tiles.release()

    return vectors.compiled(_attend)
