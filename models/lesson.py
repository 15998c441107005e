"""What a prompt's own queries teach about a layer's keys, computed on the device while the keys are there.

Letters: `K` key/value heads, `G` query heads per key/value head, `S` key positions, `O` offloaded keys, `H` head dim,
`Q` sampled query positions, `E` of them held out, `R` keys per route, `C` clusters.

Queries and keys have different distributions, so an index over keys alone must look at far more of them than an
index that knows what is asked (RetrievalAttention, arXiv 2409.10516, section 3.2). From a sample of the prompt's
newest queries each key/value head learns in which directions queries tell keys apart (`root`), which keys they
wanted (`routes`), and, from other queries that were held out (the exam), how far a search has to look.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from rajax.kernels import Partial
from rajax.models.routes import top_keys
from rajax.models.summary import UNIT, Summary, root_of, second_moment, summarize

SAMPLED = 256
"""Query positions that are learned from, spread over the newest quarter of the prompt. Few are enough: with 2,048
instead of 512 a search missed a tenth less."""

HELD_OUT = 24
"""Query positions that are held out, among the newest: what a decode query will be like."""

HELD_OUT_SPAN = 256
"""Positions over which they are spread."""

ROUTE_KEYS = 64
"""Keys kept per sampled query."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lesson:
    """What one layer of one prompt taught.

    Attributes:
      summary: the clusters, arrays [K, C, ...].
      clusters: [K, O] int32, the cluster of each offloaded key, -1 for none; O is rounded up to whole units.
      root: [K, H, H] float32, the square root of the queries' second moment.
      queries: [K, G * Q, H] float32, the sampled queries.
      routes: [K, G * Q, R] int32, the offloaded keys that each wanted most, best first; -1 past the last.
      exam: [K, G * E, H] float32, the queries held out.
      seen: what those see of the keys that are not offloaded, arrays [1, K, G * E, ...].
    """

    summary: Summary
    clusters: jax.Array
    root: jax.Array
    queries: jax.Array
    routes: jax.Array
    exam: jax.Array
    seen: Partial


def sample_positions(length: int, window: int) -> np.ndarray:
    """The positions [SAMPLED + HELD_OUT] int32 whose queries a prompt of `length` tokens learns from.

    The held-out ones come last. They lie in the window, so that they see every offloaded key.
    """
    held_out = np.linspace(length - min(HELD_OUT_SPAN, window, length), length - 1, HELD_OUT)
    end = max(0, int(held_out[0]) - 1)
    sampled = np.linspace(end * 3 // 4, end, SAMPLED)
    return np.concatenate([sampled, held_out]).astype(np.int32)


def learn(
    keys: jax.Array,
    values: jax.Array,
    queries: jax.Array,
    positions: jax.Array,
    length: jax.Array,
    *,
    sinks: int,
    window: int,
) -> Lesson:
    """Learns from one layer of one prompt that is longer than sinks and window.

    Args:
      keys: [K, S, H]; past `length` they may hold anything finite.
      values: [K, S, H].
      queries: [K, G, Q + E, H], scaled, at `positions` of `sample_positions`.
      positions: [Q + E] int32.
      length: int32 scalar, tokens of the prompt.
      sinks: the first keys, which stay on the device.
      window: the newest keys, which stay on the device.
    """
    heads, groups, _, width = queries.shape
    count = length - sinks - window
    room = -(-max(keys.shape[1] - sinks, 1) // UNIT) * UNIT

    def offloaded(a: jax.Array) -> jax.Array:
        return jnp.pad(a[:, sinks:], ((0, 0), (0, room - (a.shape[1] - sinks)), (0, 0)))

    def flat(a: jax.Array) -> jax.Array:
        return a.astype(jnp.float32).reshape(heads, -1, width)

    sampled, exam = flat(queries[:, :, :-HELD_OUT]), flat(queries[:, :, -HELD_OUT:])
    root = root_of(second_moment(sampled))
    summary, clusters = summarize(offloaded(keys), offloaded(values), count, root)
    limits = jnp.tile(jnp.clip(positions[:-HELD_OUT] + 1 - sinks, 0, count), groups)
    routes = top_keys(sampled, offloaded(keys).astype(jnp.float32), limits, ROUTE_KEYS)

    def static(a: jax.Array) -> jax.Array:
        newest = jax.lax.dynamic_slice_in_dim(a, sinks + count, window, axis=1)
        return jnp.concatenate([a[:, :sinks], newest], axis=1).astype(jnp.float32)

    at = jnp.concatenate([jnp.arange(sinks), sinks + count + jnp.arange(window)])
    visible = jnp.tile(at <= positions[-HELD_OUT:, None], (groups, 1))
    scores = jnp.einsum("kqh,ksh->kqs", exam, static(keys), precision="highest")
    scores = jnp.where(visible, scores, -jnp.inf)
    top = scores.max(2)
    weights = jnp.exp(scores - top[..., None])
    numerator = jnp.einsum("kqs,ksh->kqh", weights, static(values), precision="highest")
    seen = Partial(numerator[None], weights.sum(2)[None], top[None])
    return Lesson(summary, clusters, root, sampled, routes, exam, seen)
