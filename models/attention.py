"""The attention of a Llama layer: over a prompt, and over one token with most keys elsewhere.

Letters: `B` batch, `T` query positions, `S` key positions or slots, `N` query heads, `K` key/value heads,
`G = N/K` query heads per key/value head, `H` head dim, `D` model dim, `L` layers.

While decoding, a layer's keys are in two zones. The **static zone** is on the device: the first tokens of
the text (sink tokens) and a sliding window of the newest. Everything between is offloaded to the host,
which answers through a `HostPath`. The two partial results are merged into exact softmax attention over
what either has seen (RetrievalAttention, arXiv 2409.10516, section 3.4). Dense attention is the same code
with a window that nothing leaves and no host path.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from rajax.kernels import Partial, finish, merge, partial_attention, prefill_attention
from rajax.models.config import LlamaConfig
from rajax.models.rope import rotate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotary embedding of a batch: inverse frequencies [B, H/2] and the factor on cos and sin [B]."""

    inverse_frequencies: jax.Array
    factor: jax.Array


@dataclasses.dataclass(frozen=True)
class Zone:
    """Which positions stay on the device, and in which slot.

    The first `sinks` positions keep the slot of their number; the others take turns in `window` slots, so
    that a new token overwrites the one that is `window` older.
    """

    sinks: int
    window: int

    @property
    def size(self) -> int:
        """Slots of the zone, S."""
        return self.sinks + self.window

    def slot(self, position: jax.Array) -> jax.Array:
        """The slot of each position."""
        return jnp.where(position < self.sinks, position, self.sinks + (position - self.sinks) % self.window)

    def positions(self, length: jax.Array) -> jax.Array:
        """The position [S] that each slot holds after `length` tokens; garbage from slot `length` on."""
        slots = jnp.arange(self.size)
        newest = length - 1 - (length - 1 - slots) % self.window
        return jnp.where(slots < self.sinks, slots, newest)

    def log_weights(self, lengths: jax.Array) -> jax.Array:
        """[B, S] float32 after lengths [B] tokens: 0 where a slot holds a key, -inf where it does not."""
        return jnp.where(jnp.arange(self.size) < lengths[:, None], 0.0, -jnp.inf)

    def offloaded(self, length: int) -> int:
        """How many of the first `length` positions have left the zone; they begin at position `sinks`."""
        return max(0, length - self.size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StaticZone:
    """The keys and values on the device.

    Attributes:
      keys: per layer [B, K, S, H], rotated.
      values: per layer [B, K, S, H].
      lengths: [B] int32, tokens seen so far, which is the next token's position.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    lengths: jax.Array


class HostPath(Protocol):
    """Attention over the offloaded keys, as seen from inside a jitted step.

    `submit` hands a layer's queries over and returns at once; `collect` waits for the answer. Between the
    two the device computes the static zone's partial.
    """

    def submit(
        self, layer: int, queries: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        """Starts a search.

        Args:
          layer: the layer's number.
          queries: [B, K, G, H] float32, scaled.
          keys: [B, K, H], the keys that leave the static zone with this token. They belong to the host from
            now on and are part of this search.
          values: [B, K, H], likewise.
          lengths: [B] int32, tokens of each sequence before this one; -1 for a sequence that has ended,
            which neither searches nor gives up a key.

        Returns:
          A ticket, int32 scalar.
        """
        ...

    def collect(self, layer: int, ticket: jax.Array, after: jax.Array) -> Partial:
        """Waits for the search of `ticket`; `after` is any array that must have been computed before."""
        ...


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions. Its parameters have Hugging Face's names."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        def linear(features_in: int, features_out: int) -> nnx.Linear:
            return nnx.Linear(features_in, features_out, use_bias=config.attention_bias, rngs=rngs)

        heads = config.num_attention_heads * config.head_dim
        kv_heads = config.num_key_value_heads * config.head_dim
        self.config = config
        self.q_proj = linear(config.hidden_size, heads)
        self.k_proj = linear(config.hidden_size, kv_heads)
        self.v_proj = linear(config.hidden_size, kv_heads)
        self.o_proj = linear(heads, config.hidden_size)

    def queries(self, x: jax.Array, positions: jax.Array, rope: Rope) -> jax.Array:
        """x [B, T, D] -> rotated queries [B, K, G, T, H], scaled by H**-0.5."""
        c = self.config
        q = self.q_proj(x).reshape(*x.shape[:2], c.num_key_value_heads, c.groups, c.head_dim)
        q = rotate(q, positions, rope.inverse_frequencies, rope.factor) * c.head_dim**-0.5
        return q.transpose(0, 2, 3, 1, 4)

    def keys_values(self, x: jax.Array, positions: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array]:
        """x [B, T, D] -> rotated keys and values, each [B, K, T, H]."""
        c = self.config
        k, v = (p(x).reshape(*x.shape[:2], c.num_key_value_heads, c.head_dim) for p in (self.k_proj, self.v_proj))
        k = rotate(k, positions, rope.inverse_frequencies, rope.factor)
        return k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)

    def prefill(
        self, x: jax.Array, start: jax.Array, keys: jax.Array, values: jax.Array, rope: Rope, *, block: int
    ) -> jax.Array:
        """Attention of the block of positions from `start` on over all keys before and in it.

        Args:
          x: [B, T, D], normalized.
          start: int32 scalar, the position of x[:, 0].
          keys: [B, K, S, H] of the whole prompt.
          values: [B, K, S, H].
          rope: the rotary embedding.
          block: key positions per step.

        Returns:
          [B, T, D].
        """
        positions = jnp.broadcast_to(start + jnp.arange(x.shape[1]), x.shape[:2])
        q = self.queries(x, positions, rope)
        out = prefill_attention(q, keys, values, start, block=block)
        return self.o_proj(out.transpose(0, 3, 1, 2, 4).reshape(*x.shape[:2], -1).astype(x.dtype))

    def decode(
        self,
        x: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        lengths: jax.Array,
        active: jax.Array,
        rope: Rope,
        *,
        zone: Zone,
        layer: int,
        host: HostPath | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Attention of one new token per sequence over everything before it.

        Args:
          x: [B, 1, D], normalized.
          keys: [B, K, S, H], the static zone's keys.
          values: [B, K, S, H].
          lengths: [B] int32, tokens before this one.
          active: [B] bool; a sequence that has ended computes garbage and changes nothing.
          rope: the rotary embedding.
          zone: the static zone's layout.
          layer: the layer's number, for the host path.
          host: attention over the offloaded keys, or None where nothing leaves the device.

        Returns:
          The output [B, 1, D], and the static zone's keys and values with the new token in them.
        """
        positions = lengths[:, None]
        q = self.queries(x, positions, rope)[:, :, :, 0]
        new_key, new_value = (a[:, :, 0] for a in self.keys_values(x, positions, rope))

        # An ended sequence writes to a slot past the last, which JAX drops.
        slot = jnp.where(active, zone.slot(lengths), zone.size)
        rows = jnp.arange(x.shape[0])
        ticket = None
        if host is not None:
            here = jnp.minimum(slot, zone.size - 1)
            ticket = host.submit(
                layer,
                q.astype(jnp.float32),
                keys[rows, :, here],
                values[rows, :, here],
                jnp.where(active, lengths, -1),
            )
            # The kernel and the write below need the ticket, so that the host starts before they do.
            q, keys, values, ticket = jax.lax.optimization_barrier((q, keys, values, ticket))
        keys = keys.at[rows, :, slot].set(new_key, mode="drop")
        values = values.at[rows, :, slot].set(new_value, mode="drop")

        with jax.named_scope("static_zone"):
            weights = zone.log_weights(lengths + 1)
            weights = jnp.broadcast_to(weights[:, None], keys.shape[:3])
            part = partial_attention(q, keys, values, weights)
        if host is not None:
            assert ticket is not None
            part = merge(part, host.collect(layer, ticket, after=part.max))
        out = finish(part).reshape(x.shape[0], 1, -1).astype(x.dtype)
        return self.o_proj(out), keys, values
