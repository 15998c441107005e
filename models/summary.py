"""What the device keeps of the offloaded keys: clusters, each a mean key that stands for many.

Letters: `K` key/value heads, `U` units, `S` keys, `C` clusters, `H` head dim, `G` query heads per key/value head,
`Q` sampled query positions.

A cluster c of n_c keys, with mean key C_c and mean value M_c, enters attention as n_c * exp(q.C_c) * M_c, which is
what its keys would give if all were alike (RetroInfer's estimation zone, arXiv 2505.02922, section 4.2). Keys are
clustered in **units** of consecutive positions, which costs little, loses little, since neighbours in a text are
alike, and lets a growing text add a unit without touching the others.

Clusters need not be good where no query looks. With q from a distribution of second moment M, the expected squared
error of a score, (q.(k - C))^2, is the squared distance of k and C after both are multiplied by M^(1/2): k-means in
those coordinates minimizes what attention will see.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

UNIT = 512
"""Keys of a unit."""

CLUSTERS = 14
"""Clusters of a full unit: with their counts 2.8 % of the bytes of its keys and values at a head dim of 64."""

ITERATIONS = 4
"""Rounds of k-means: twelve change nothing that attention shows."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Summary:
    """Clusters of keys.

    Attributes:
      keys: [..., C, H] float32, mean keys; zero for an empty cluster.
      values: [..., C, H] float32, mean values, likewise.
      log_counts: [..., C] float32, log of the number of keys; -inf for an empty cluster.
    """

    keys: jax.Array
    values: jax.Array
    log_counts: jax.Array


def no_clusters(kv_heads: int, head_dim: int, dtype: jax.typing.DTypeLike) -> Summary:
    """The summary of nothing, arrays [K, 0, ...]."""
    nothing = jnp.zeros((kv_heads, 0, head_dim), dtype)
    return Summary(nothing, nothing, jnp.zeros((kv_heads, 0)))


def second_moment(queries: jax.Array) -> jax.Array:
    """queries [..., n, H] -> [..., H, H], the sum of their outer products."""
    return jnp.einsum("...nh,...nj->...hj", queries, queries, precision="highest")


def root_of(moment: jax.Array) -> jax.Array:
    """The square root of second moments [..., H, H], scaled to a mean eigenvalue of 1.

    Directions in which no query points keep a thousandth of the largest eigenvalue of the moment, so that the root
    is well invertible. No queries at all give the identity.
    """
    values, vectors = jnp.linalg.eigh(moment)
    largest = values[..., -1:]
    values = jnp.where(largest > 0, values / jnp.where(largest > 0, largest, 1.0), 1.0)
    values = jnp.sqrt(jnp.maximum(values, 1e-3))
    values = values / values.mean(-1, keepdims=True)
    return jnp.einsum("...he,...e,...je->...hj", vectors, values, vectors, precision="highest")


def summarize(
    keys: jax.Array, values: jax.Array, count: jax.Array, root: jax.Array
) -> tuple[Summary, jax.Array]:
    """Clusters of the first `count` keys, unit by unit.

    Args:
      keys: [K, S, H]; S is a multiple of `UNIT`. Past `count` they may hold anything finite.
      values: [K, S, H], likewise.
      count: int32 scalar.
      root: [K, H, H], the coordinates in which keys are near, as from `root_of`.

    Returns:
      The summary with S / UNIT * CLUSTERS clusters, and the cluster of each key, [K, S] int32. A unit of fewer
      keys gets fewer clusters, in proportion; one of less than UNIT / CLUSTERS keys gets none, and its keys have
      the cluster -1, as have those past `count`.
    """
    heads, length, width = keys.shape
    units = length // UNIT
    keys, values = (a.astype(jnp.float32).reshape(heads, units, UNIT, width) for a in (keys, values))
    here = jnp.clip(count - UNIT * jnp.arange(units), 0, UNIT)
    valid = jnp.arange(UNIT) < here[:, None]
    allowed = jnp.arange(CLUSTERS) < (here * CLUSTERS // UNIT)[:, None]
    summary, clusters = jax.vmap(
        jax.vmap(_k_means, in_axes=(0, 0, 0, 0, None)), in_axes=(0, 0, None, None, 0)
    )(keys, values, valid, allowed, root)
    offsets = CLUSTERS * jnp.arange(units)[:, None]
    clusters = jnp.where(clusters < 0, -1, clusters + offsets).reshape(heads, length)
    return jax.tree.map(lambda a: a.reshape(heads, units * CLUSTERS, *a.shape[3:]), summary), clusters


def _k_means(keys, values, valid, allowed, root) -> tuple[Summary, jax.Array]:
    """One unit of one head: keys and values [n, H], valid [n], allowed [CLUSTERS]."""
    points = jnp.dot(keys, root, precision="highest")
    # Evenly spaced keys to begin with.
    first = jnp.arange(CLUSTERS) * valid.sum() // jnp.maximum(allowed.sum(), 1)
    centers = points[jnp.clip(first, 0, len(keys) - 1)]

    def members(centers):
        closeness = points @ centers.T - 0.5 * (centers**2).sum(1)
        nearest = jnp.where(allowed, closeness, -jnp.inf).argmax(1)
        return (nearest[:, None] == jnp.arange(CLUSTERS)) & valid[:, None] & allowed

    def mean(members, of):
        total = jnp.dot(members.astype(jnp.float32).T, of, precision="highest")
        return total / jnp.maximum(members.sum(0), 1)[:, None]

    def round_(_, centers):
        inside = members(centers)
        return jnp.where(inside.any(0)[:, None], mean(inside, points), centers)

    inside = members(jax.lax.fori_loop(0, ITERATIONS, round_, centers))
    summary = Summary(mean(inside, keys), mean(inside, values), jnp.log(inside.sum(0).astype(jnp.float32)))
    return summary, jnp.where(inside.any(1), inside.argmax(1), -1)


def sealed_count(count: int) -> int:
    """How many of `count` keys `summarize` puts into clusters: all, or all but those of a last unit too short."""
    rest = count % UNIT
    return count if rest * CLUSTERS >= UNIT else count - rest


def slots(count: int) -> int:
    """Clusters that `count` keys take at most."""
    return -(-count // UNIT) * CLUSTERS
