"""Which keys the prompt's own queries wanted.

Letters: `K` key/value heads, `Q` queries, `S` keys, `H` head dim, `R` keys per query.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

BLOCK_Q = 128
"""Queries per matrix product: the scores of a block are the largest array here, [BLOCK_Q, S]."""

GROUP = 16
"""Keys that are compared by their largest score first."""


def top_keys(queries: jax.Array, keys: jax.Array, limits: jax.Array, top_k: int) -> jax.Array:
    """The keys with the largest inner products with each query, exactly.

    The largest scores of groups of keys are ranked first: the `top_k` best keys lie in the `top_k` best groups.
    Ranking is what costs here, not the product, and this ranks an eighth of the numbers.

    Args:
      queries: [K, Q, H].
      keys: [K, S, H].
      limits: [Q] int32; a query sees only the keys before its limit.
      top_k: keys per query.

    Returns:
      [K, Q, top_k] int32, best first; -1 where a query sees fewer keys.
    """
    heads, count, width = queries.shape
    length = keys.shape[1]
    padded_keys = -(-max(length, top_k * GROUP) // GROUP) * GROUP
    padded_queries = -(-count // BLOCK_Q) * BLOCK_Q
    keys = jnp.pad(keys, ((0, 0), (0, padded_keys - length), (0, 0)))
    queries = jnp.pad(queries, ((0, 0), (0, padded_queries - count), (0, 0)))
    limits = jnp.pad(limits, (0, padded_queries - count))
    blocks = queries.reshape(heads, -1, BLOCK_Q, width), limits.reshape(-1, BLOCK_Q)

    def block(keys, queries, limits):
        scores = jnp.dot(queries, keys.T, preferred_element_type=jnp.float32)
        scores = jnp.where(jnp.arange(padded_keys) < limits[:, None], scores, -jnp.inf)
        grouped = scores.reshape(BLOCK_Q, -1, GROUP)
        _, groups = jax.lax.top_k(grouped.max(2), top_k)
        candidates = jnp.take_along_axis(grouped, groups[:, :, None], axis=1).reshape(BLOCK_Q, -1)
        best, columns = jax.lax.top_k(candidates, top_k)
        ids = jnp.take_along_axis(groups, columns // GROUP, axis=1) * GROUP + columns % GROUP
        return jnp.where(jnp.isneginf(best), -1, ids)

    def head(args):
        keys, queries = args
        return jax.lax.map(lambda b: block(keys, *b), (queries, blocks[1]))

    ids = jax.lax.map(head, (keys, blocks[0]))
    return ids.reshape(heads, padded_queries, top_k)[:, :count]
