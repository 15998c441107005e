"""RetroInfer's wave index, as the device sees it (arXiv 2505.02922, section 4.2).

Letters: `B` batch, `K` key/value heads, `G` query heads per key/value head, `S` keys, `Q` sampled queries, `C`
clusters, `R` clusters retrieved at most, `M` blocks of the cache, `H` head dim.

The offloaded keys of a head are in clusters of at most `BLOCK_KEYS`. The device has each cluster's mean key, mean value
and size; the host has the keys and values, ordered by cluster, so that a cluster is one block. At every step the
clusters are ranked by the share of attention that their means promise. **Retrieved** clusters, the first of that
order, are attended to exactly, and so is everything in the block cache; **all** others are estimated from their
means. None is dropped.

exp is convex, so n * exp(q.C) is a lower bound of the sum of exp(q.k) over a cluster of n keys with mean C. With r the
largest distance of a key from the mean, n * exp(q.C + |q| r) is an upper one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rajax.kernels import Partial, nearest_center, partial_attention
from rajax.kernels.nearest_center import CHUNK

BLOCK_KEYS = 16
"""Keys of a cluster at most: what a block holds."""

SEGMENT = 8192
"""Keys that are clustered together, at most (RetroInfer, section 4.2)."""

ITERATIONS = 5
"""Rounds of k-means in the coordinates of the queries; ten change nothing that attention shows."""

SPHERICAL_ITERATIONS = 10
"""Rounds of spherical k-means: RetroInfer's number."""

CLUSTERS_PER_GROUP = 32
"""Clusters of a group, on average."""

KEYS_PER_CENTER = 24
"""Keys to a center, on average. What a center holds is cut into blocks, which leaves 12 keys to a cluster."""

IMPORTANCE_FLOOR = 0.1
"""A key that no sampled query wanted counts this much in k-means, beside 1 for the square root of the mean
importance."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Clusters:
    """The clusters of one layer, as the device holds them.

    Attributes:
      means: [B, K, C, H], mean keys; zero for an empty cluster.
      mean_values: [B, K, C, H], likewise.
      log_counts: [B, K, C] float32, log of the number of keys; -inf for an empty cluster.
      spreads: [B, K, C] float32, the root mean square by which the scores of the cluster's keys differ from that
        of their mean, for queries like the prompt's.
      radii: [B, K, C] float32, the largest distance of a key from the mean.
      cached: [B, K, C] bool, whether the cluster is in the block cache.
    """

    means: jax.Array
    mean_values: jax.Array
    log_counts: jax.Array
    spreads: jax.Array
    radii: jax.Array
    cached: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockCache:
    """The blocks of one layer's hot clusters, on the device.

    Attributes:
      keys: [B, K, M, BLOCK_KEYS, H].
      values: [B, K, M, BLOCK_KEYS, H].
      counts: [B, K, M] int32, keys of each block; what follows them in the block is of no meaning, but finite.
    """

    keys: jax.Array
    values: jax.Array
    counts: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WholeHead:
    """A key/value head that no clusters can stand for: all its offloaded keys and values, on the device.

    Attributes:
      layer: int32 scalar, whose layer's.
      heads: [B] int32, which head of each sequence.
      keys: [B, S, H], in no order.
      values: [B, S, H].
      counts: [B] int32, keys of each sequence; 0 for one that has none whole here.
    """

    layer: jax.Array
    heads: jax.Array
    keys: jax.Array
    values: jax.Array
    counts: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Selection:
    """What one step wants of one layer.

    Attributes:
      ids: [B, K, R] int32, the clusters to retrieve, most wanted first; -1 past the last.
      missing: int32 scalar, how many of them, of all heads together, are not in the cache.
      estimated: the partial of all clusters that are neither retrieved nor in the cache.
    """

    ids: jax.Array
    missing: jax.Array
    estimated: Partial


@dataclasses.dataclass(frozen=True)
class SelectionRule:
    """How many clusters a step retrieves, and by what order.

    Attributes:
      rank_by: "spread" ranks by the estimated share of attention times the cluster's spread, which is how far
        the estimate may be off, and estimates with `second_order`; "estimate" ranks by the share alone,
        RetroInfer's rule with the sizes counted; "bound" by the upper bound.
      share: of a head's clusters, retrieved by every step (RetroInfer: 0.018). None: as `top_p` tells.
      top_p: as few clusters as leave a share of 1 - top_p of the rank's sum to the others.
      least, most: bounds on the number of clusters of a head and step.
    """

    rank_by: str
    share: float | None
    top_p: float
    least: int
    most: int


def log_mass_bounds(queries: jax.Array, clusters: Clusters) -> tuple[jax.Array, jax.Array]:
    """Bounds [B, K, G, C] on log(sum of exp(q.k) over a cluster's keys), for queries [B, K, G, H].

    The lower one is Jensen's inequality, the upper one Cauchy's and Schwarz's; -inf for an empty cluster.
    """
    scores = jnp.einsum("bkgh,bkch->bkgc", queries, clusters.means, preferred_element_type=jnp.float32)
    lower = scores + clusters.log_counts[:, :, None]
    lengths = jnp.linalg.norm(queries.astype(jnp.float32), axis=-1)
    return lower, lower + lengths[..., None] * clusters.radii[:, :, None]


def second_order(spreads: Any) -> Any:
    """What spreads [...] add to the logarithm of a cluster's estimated mass.

    Were the scores of a cluster's keys normally distributed, the logarithm of the mean of their exponentials
    would exceed their mean by half their variance. Real clusters with a large variance have a few keys apart, so
    it is damped there: on SmolLM2 this takes a quarter off the error of the attention output, and without
    damping it multiplies it.
    """
    variance = spreads**2
    return 0.5 * variance / (1 + variance / 4)


def corrections(rank_by: str, spreads: Any) -> Any:
    """What a ranking by `rank_by` adds to the logarithm of an estimate, for spreads [...]."""
    return second_order(spreads) if rank_by == "spread" else 0 * spreads


def select(queries: jax.Array, clusters: Clusters, active: jax.Array, rule: SelectionRule) -> Selection:
    """Ranks the clusters for queries [B, K, G, H] and estimates those that are not retrieved.

    Sequences that are not `active`, [B] bool, retrieve nothing, and what is estimated for them is of no meaning.
    A cluster serves all query heads of its key/value head, whose shares are summed.
    """
    barrier = jax.lax.optimization_barrier  # without, XLA on CPU computes the exponentials anew for every use
    lower, upper = log_mass_bounds(queries, clusters)
    by_spread = rule.rank_by == "spread"
    estimates = lower + second_order(clusters.spreads)[:, :, None] if by_spread else lower
    weights, top = _exponentials(estimates)
    weights = barrier(weights)
    mass = weights if rule.rank_by != "bound" else barrier(_exponentials(upper)[0])
    total = jnp.maximum(mass.sum(-1), jnp.finfo(jnp.float32).tiny)
    rank = jnp.einsum("bkg,bkgc->bkc", 1 / total, mass, precision="highest")
    if by_spread:
        rank = rank * clusters.spreads
    rank = barrier(rank)

    # One more than are retrieved: the first that is not tells where the retrieved end, ties aside.
    best, ids = barrier(jax.lax.top_k(rank, rule.most + 1))
    places = jnp.arange(rule.most + 1)
    if rule.share is None:
        # Not cumsum, which is slow on CPU.
        up_to = jnp.dot(best, (places[:, None] <= places).astype(jnp.float32), precision="highest")
        everything = rank.sum(-1, keepdims=True)
        wanted = (everything - up_to + best > (1 - rule.top_p) * everything).sum(-1)
        wanted = jnp.clip(wanted, rule.least, rule.most)
    else:
        held = (clusters.log_counts > -jnp.inf).sum(-1)
        wanted = jnp.minimum(jnp.ceil(rule.share * held).astype(jnp.int32), rule.most)
    limit = jnp.where(places == wanted[..., None], best, 0).sum(-1, keepdims=True)
    retrieved = rank > limit
    active = active[:, None, None]
    ids = jnp.where((best > limit) & active, ids, -1)[..., : rule.most]
    missing = (retrieved & ~clusters.cached & active).sum()

    weights = barrier(jnp.where((retrieved | clusters.cached)[:, :, None], 0, weights))
    numerator = jnp.einsum(
        "bkgc,bkch->bkgh",
        weights.astype(clusters.mean_values.dtype),
        clusters.mean_values,
        preferred_element_type=jnp.float32,
    )
    return Selection(ids, missing.astype(jnp.int32), Partial(numerator, weights.sum(-1), top))


def _exponentials(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """exp(scores - top) along the last axis, and top; zeros where all scores are -inf."""
    top = scores.max(-1)
    return jnp.exp(scores - jnp.where(jnp.isneginf(top), 0.0, top)[..., None]), top


def attend_blocks(
    queries: jax.Array, keys: jax.Array, values: jax.Array, owners: jax.Array, counts: jax.Array
) -> Partial:
    """The partial of queries [B, K, G, H] over blocks that belong to any of the heads.

    Args:
      queries: scaled.
      keys: [P, BLOCK_KEYS, H], of P blocks.
      values: [P, BLOCK_KEYS, H].
      owners: [P] int32, sequence * K + key/value head of each block.
      counts: [P] int32, keys of each block; 0 for no block.
    """
    batch, heads, groups, width = queries.shape
    per_block = queries.astype(keys.dtype).reshape(batch * heads, 1, groups, width)[owners]
    inside = jnp.arange(BLOCK_KEYS) < counts[:, None]
    part = partial_attention(
        per_block, keys[:, None], values[:, None], jnp.where(inside, 0.0, -jnp.inf)[:, None]
    )
    numerator, denominator, top = (jnp.asarray(a)[:, 0] for a in (part.numerator, part.denominator, part.max))
    owned = (owners[:, None] == jnp.arange(batch * heads)) & (counts > 0)[:, None]
    whole = jnp.where(owned[:, :, None], top[:, None], -jnp.inf).max(0)
    reference = jnp.where(jnp.isneginf(whole), 0.0, whole)[owners]
    scale = jnp.where((counts > 0)[:, None], jnp.exp(top - reference), 0)
    share = owned.astype(jnp.float32)
    numerator = jnp.einsum("pr,pgh->rgh", share, scale[..., None] * numerator, precision="highest")
    denominator = jnp.einsum("pr,pg->rg", share, scale * denominator, precision="highest")
    shape = batch, heads, groups
    return Partial(numerator.reshape(*shape, width), denominator.reshape(shape), whole.reshape(shape))


def attend_cache(queries: jax.Array, cache: BlockCache) -> Partial:
    """The partial of queries [B, K, G, H] over all blocks of the cache."""
    batch, heads, blocks, _, width = cache.keys.shape
    inside = jnp.arange(BLOCK_KEYS) < cache.counts[..., None]
    flat = batch, heads, blocks * BLOCK_KEYS
    return partial_attention(
        queries.astype(cache.keys.dtype),
        cache.keys.reshape(*flat, width),
        cache.values.reshape(*flat, width),
        jnp.where(inside, 0.0, -jnp.inf).reshape(flat),
    )


def attend_whole(queries: jax.Array, whole: WholeHead) -> Partial:
    """The partial of queries [B, K, G, H] over a head that is kept whole; no keys for the other heads."""
    mine = whole.heads[:, None] == jnp.arange(queries.shape[1])
    chosen = jnp.einsum("bk,bkgh->bgh", mine.astype(queries.dtype), queries, precision="highest")
    inside = jnp.arange(whole.keys.shape[1]) < whole.counts[:, None]
    part = partial_attention(
        chosen[:, None].astype(whole.keys.dtype),
        whole.keys[:, None],
        whole.values[:, None],
        jnp.where(inside, 0.0, -jnp.inf)[:, None],
    )
    numerator, denominator, top = map(jnp.asarray, (part.numerator, part.denominator, part.max))
    return Partial(
        jnp.where(mine[..., None, None], numerator, 0),
        jnp.where(mine[..., None], denominator, 0),
        jnp.where(mine[..., None], top, -jnp.inf),
    )


# --- clustering


def importance(queries: jax.Array, keys: jax.Array, limits: jax.Array) -> jax.Array:
    """The mean share [K, S] of their attention that queries [K, Q, H] give to each of keys [K, S, H].

    `limits` [Q] int32: a query sees only the keys before its limit. The queries are scaled.
    """
    chunk = 64
    padded = -(-queries.shape[1] // chunk) * chunk
    queries = jnp.pad(queries, ((0, 0), (0, padded - queries.shape[1]), (0, 0)))
    limits = jnp.pad(limits, (0, padded - len(limits)))
    count = jnp.maximum((limits > 0).sum(), 1)

    def head(args):
        queries, keys = args

        def add(total, args):
            queries, limits = args
            scores = jnp.dot(queries, keys.T, preferred_element_type=jnp.float32)
            scores = jnp.where(jnp.arange(len(keys)) < limits[:, None], scores, -jnp.inf)
            weights, _ = _exponentials(scores)
            scale = 1 / jnp.maximum(weights.sum(-1), jnp.finfo(jnp.float32).tiny)
            return total + jnp.dot(scale, weights), None

        chunks = queries.reshape(-1, chunk, queries.shape[-1]), limits.reshape(-1, chunk)
        return jax.lax.scan(add, jnp.zeros(len(keys)), chunks)[0] / count

    return jax.lax.map(head, (queries, keys))


def shaped_labels(keys: jax.Array, count: jax.Array, root: jax.Array, importance: jax.Array) -> jax.Array:
    """The cluster [K, S] int32 of each of the first `count` keys, by k-means as the prompt's queries see the keys.

    Distances are measured after a product with `root` [K, H, H], the square root of the queries' second moment:
    then they are differences of scores (see `models.summary`). A key weighs as the square root of its
    `importance` [K, S] tells, so that clusters are fine where attention is. What is called a cluster here is
    still to be cut into blocks, by the host.

    Args:
      keys: [K, S, H]. Past `count` they may hold anything finite.
      count: int32 scalar.
      root: as above.
      importance: as above.
    """
    points = jnp.einsum("ksh,khj->ksj", keys.astype(jnp.float32), root)
    valid = jnp.arange(keys.shape[1]) < count
    importance = jnp.where(valid, importance, 0)
    mean = importance.sum(1, keepdims=True) / jnp.maximum(count, 1)
    weights = jnp.sqrt(importance / jnp.maximum(mean, jnp.finfo(jnp.float32).tiny)) + IMPORTANCE_FLOOR
    return _labels(points, jnp.where(valid, weights, 0), KEYS_PER_CENTER, ITERATIONS, spherical=False)


def spherical_labels(keys: jax.Array, count: jax.Array) -> jax.Array:
    """The same by RetroInfer's clustering: spherical k-means of mean-centred keys, 16 keys to a center."""
    keys = keys.astype(jnp.float32)
    valid = jnp.arange(keys.shape[1]) < count
    mean = jnp.where(valid[:, None], keys, 0).sum(1, keepdims=True) / jnp.maximum(count, 1)
    weights = jnp.broadcast_to(valid.astype(jnp.float32), keys.shape[:2])
    return _labels(_unit_length(keys - mean), weights, BLOCK_KEYS, SPHERICAL_ITERATIONS, spherical=True)


def group_labels(means: jax.Array, sizes: jax.Array, root: jax.Array) -> jax.Array:
    """The group [K, C] int32 of each cluster, by k-means of their means [K, C, H] as the prompt's queries see them.

    A cluster weighs as much as it has keys, `sizes` [K, C]; an empty one may come out anywhere. `root` is as above.
    """
    points = jnp.einsum("kch,khj->kcj", means, root)
    return _labels(points, sizes.astype(jnp.float32), CLUSTERS_PER_GROUP, ITERATIONS, spherical=False)


def segments(count: int) -> tuple[int, int]:
    """How `count` keys are divided: a number of segments, and the keys of each, a multiple of `CHUNK`."""
    number = max(1, -(-count // SEGMENT))
    return number, max(1, -(-count // (number * CHUNK))) * CHUNK


def _labels(
    points: jax.Array, weights: jax.Array, keys_per_center: int, iterations: int, *, spherical: bool
) -> jax.Array:
    """k-means of points [K, S, H] with weights [K, S], zero for what is no key, segment by segment."""
    heads, length, width = points.shape
    number, size = segments(length)
    points = jnp.pad(points, ((0, 0), (0, number * size - length), (0, 0))).reshape(-1, size, width)
    weights = jnp.pad(weights, ((0, 0), (0, number * size - length))).reshape(-1, size)
    centers = -(-size // keys_per_center)
    labels = jax.lax.map(
        lambda a: _k_means(a[0], a[1], centers, keys_per_center, iterations, spherical), (points, weights)
    )
    labels = labels.reshape(heads, number, size) + centers * jnp.arange(number)[:, None]
    return labels.reshape(heads, -1)[:, :length]


def _k_means(points, weights, most_centers, keys_per_center, iterations, spherical):
    """The center [S] int32 of each point [S, H]."""
    held = (weights > 0).sum()
    allowed = jnp.arange(most_centers) < -(-held // keys_per_center)
    # The first centers are points at equal distances of accumulated weight, none of them so heavy that it is
    # taken twice.
    limit = jnp.maximum(weights.sum() / jnp.maximum(allowed.sum(), 1), jnp.finfo(jnp.float32).tiny)
    reached = jnp.cumsum(jnp.minimum(weights, limit))
    targets = (jnp.arange(most_centers) + 0.5) * reached[-1] / jnp.maximum(allowed.sum(), 1)
    if not spherical:
        # Distances stay what they are, and rounding does not hurt.
        points = points - (points * weights[:, None]).sum(0) / jnp.maximum(weights.sum(), limit)
    centers = points[jnp.clip(jnp.searchsorted(reached, targets), 0, len(points) - 1)]

    def assign(centers):
        offsets = jnp.zeros(most_centers) if spherical else -0.5 * (centers**2).sum(1)
        return nearest_center(points, weights, centers, jnp.where(allowed, offsets, -jnp.inf))

    def round_(_, centers):
        _, sums = assign(centers)
        total = sums[:, -1:]
        means = sums[:, :-1] / jnp.where(total > 0, total, 1)
        return jnp.where(total > 0, _unit_length(means) if spherical else means, centers)

    return assign(jax.lax.fori_loop(0, iterations, round_, centers))[0]


def _unit_length(a: jax.Array) -> jax.Array:
    return a / jnp.maximum(jnp.linalg.norm(a, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
