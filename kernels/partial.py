"""Attention over a part of the keys, and how parts become a whole.

Letters: `B` batch, `K` key/value heads, `G` query heads per key/value head, `H` head dim.

Softmax attention over a set of keys is a fraction: sum(exp(s_j) v_j) over sum(exp(s_j)). Both sums split
over any partition of the keys, so each part reports its two sums, relative to its own largest score, and
`merge` brings them to one scale and adds them (FlashAttention, arXiv 2205.14135, section 3.1;
RetrievalAttention, arXiv 2409.10516, equation 4). Everything here is float32: these sums are what the
accuracy of the answer hangs on.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Partial:
    """The attention of queries over some of the keys, before the division.

    A part that corrects another one has a difference of two such sums, which may be negative.

    Attributes:
      numerator: [B, K, G, H] float32, sum over the keys of exp(score - max) * value.
      denominator: [B, K, G] float32, sum over the keys of exp(score - max).
      max: [B, K, G] float32, the largest score, that of corrected keys included; -inf where there were no keys.
    """

    numerator: jax.Array | np.ndarray
    denominator: jax.Array | np.ndarray
    max: jax.Array | np.ndarray


def no_keys(batch: int, kv_heads: int, groups: int, head_dim: int) -> Partial:
    """The partial over no keys, as NumPy arrays: what `merge` leaves unchanged."""
    return Partial(
        numerator=np.zeros((batch, kv_heads, groups, head_dim), np.float32),
        denominator=np.zeros((batch, kv_heads, groups), np.float32),
        max=np.full((batch, kv_heads, groups), -np.inf, np.float32),
    )


def merge(*parts: Partial) -> Partial:
    """The partial over the union of the parts' keys, which must be disjoint, or one part correct another."""
    return merge_stacked(jax.tree.map(lambda *arrays: jnp.stack(arrays), *parts))


def merge_stacked(parts: Partial) -> Partial:
    """`merge` of parts that are stacked along a leading axis."""
    top = jnp.asarray(parts.max).max(0)
    # Where no part has a key, top is -inf, and -inf - -inf would be NaN.
    scale = jnp.exp(parts.max - jnp.where(jnp.isneginf(top), 0.0, top))
    return Partial((scale[..., None] * parts.numerator).sum(0), (scale * parts.denominator).sum(0), top)


def finish(part: Partial) -> jax.Array:
    """The attention output [B, K, G, H] in float32; zeros where there were no keys.

    A part that corrects another may have a negative denominator, but the denominator of the whole is positive in
    exact arithmetic. Where rounding leaves nothing of it, the output is zeros as well.
    """
    # Not "unless positive": what is not a number must stay that, to be noticed.
    nothing = jnp.asarray(part.denominator) <= 0
    output = jnp.asarray(part.numerator) / jnp.where(nothing, 1.0, part.denominator)[..., None]
    return jnp.where(nothing[..., None], 0.0, output)
