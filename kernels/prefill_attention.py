"""Causal attention of one block of prompt positions over all keys before it: in plain JAX, or in a CPU's own units.

Letters: `B` batch, `T` query positions of the block, `S` key positions, `K` key/value heads, `G` query heads
per key/value head, `H` head dim.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from rajax.kernels import tiles, vectors
from rajax.kernels.tile_attention import tile_attention
from rajax.kernels.vector_attention import vector_attention


def prefill_attention(
    q: jax.Array, keys: jax.Array, values: jax.Array, start: jax.Array, *, block: int
) -> jax.Array:
    """Attention of positions start .. start+T-1 over positions 0 .. start+T-1, causally masked.

    Keys are read `block` at a time with a running max (online softmax), so the largest array is
    [B, K, G, T, block], whatever the length of the prompt. Products are in the operands' dtype with float32
    sums; the softmax is in float32. A CPU computes all of it in its matrix unit, where products may be rounded and
    it has one (`tiles.chosen`), else in its vector registers (`vectors.usable`).

    Args:
      q: [B, K, G, T, H], already scaled by H**-0.5.
      keys: [B, K, S, H]; S is a multiple of `block`.
      values: [B, K, S, H].
      start: int32 scalar, the position of the block's first query.
      block: key positions per step.

    Returns:
      [B, K, G, T, H] float32.
    """
    if keys.shape[2] % block:
        raise ValueError(f"{keys.shape[2]} key positions are not a multiple of the block of {block}")
    length = q.shape[3]
    if not any(size % vectors.LANES for size in (length, *keys.shape[2:])):
        if tiles.chosen():
            return tile_attention(q, keys, values, start)
        if vectors.usable() and not tiles.rounded():
            return vector_attention(q, keys, values, start)
    if tiles.rounded():
        q, keys, values = (a.astype(jnp.bfloat16) for a in (q, keys, values))
    rows = start + jnp.arange(length)

    def step(i, carry, *, masked: bool):
        numerator, denominator, top = carry
        k = jax.lax.dynamic_slice_in_dim(keys, i * block, block, axis=2)
        v = jax.lax.dynamic_slice_in_dim(values, i * block, block, axis=2)
        scores = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32)
        if masked:
            columns = i * block + jnp.arange(block)
            scores = jnp.where(columns[None, :] <= rows[:, None], scores, -jnp.inf)
        # Every row sees key 0, which is in the first step, so `top` is finite from there on.
        new_top = jnp.maximum(top, scores.max(-1))
        rescale = jnp.exp(top - new_top)
        weights = jnp.exp(scores - new_top[..., None])
        added = jnp.einsum(
            "bkgts,bksh->bkgth", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        return numerator * rescale[..., None] + added, denominator * rescale + weights.sum(-1), new_top

    carry = (
        jnp.zeros(q.shape, jnp.float32),
        jnp.zeros(q.shape[:-1], jnp.float32),
        jnp.full(q.shape[:-1], -jnp.inf, jnp.float32),
    )
    # Blocks that end before `start` need no mask, and a mask costs a pass over the scores.
    seen_by_all = start // block
    blocks = (start + length + block - 1) // block
    carry = jax.lax.fori_loop(0, seen_by_all, functools.partial(step, masked=False), carry)
    numerator, denominator, _ = jax.lax.fori_loop(
        seen_by_all, blocks, functools.partial(step, masked=True), carry
    )
    return numerator / denominator[..., None]
