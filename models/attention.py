"""The attention of a Llama layer: over a prompt, and over one token with most keys elsewhere.

Letters: `B` batch, `T` query positions, `S` key positions or slots, `N` query heads, `K` key/value heads,
`G = N/K` query heads per key/value head, `H` head dim, `D` model dim, `L` layers, `C` clusters of the summary.

While decoding, a layer's keys are in two zones. The **static zone** is on the device: the first tokens of
the text (sink tokens) and a sliding window of the newest. Everything between is offloaded to the host,
which answers through a `HostPath`; of it the device keeps a `Summary`, mean keys that stand for many. The two
partial results are merged into softmax attention (RetrievalAttention, arXiv 2409.10516, section 3.4): that of
the device over static zone and summary, and that of the host over what it retrieved. The host takes out of the
summary what it puts in exactly: with q scaled, a retrieved key j of cluster c(j) adds exp(q.k_j) - exp(q.C_c(j)).
So with every offloaded key retrieved the result is exact, and with none it is the summary's estimate. Dense
attention is the same code with a window that nothing leaves and no host path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from rajax.kernels import Partial, finish, merge, partial_attention, prefill_attention, product
from rajax.models.config import LlamaConfig
from rajax.models.rope import rotate
from rajax.models.summary import Summary


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

    def log_weights(self, lengths: jax.Array, starts: jax.Array) -> jax.Array:
        """[B, S] float32: 0 where a slot holds a key that the next token sees, -inf where it does not.

        After lengths [B] tokens that is every slot filled so far, except the one that the token will take, since
        the key in it leaves the zone, and except those, sinks aside, whose position lies before starts [B].
        """
        slots = jnp.arange(self.size)
        seen = (slots < lengths[:, None]) & (slots != self.slot(lengths)[:, None])
        here = (slots < self.sinks) | (jax.vmap(self.positions)(lengths) >= starts[:, None])
        return jnp.where(seen & here, 0.0, -jnp.inf)

    def offloaded(self, length: int) -> int:
        """How many of the first `length` positions have left the zone; they begin at position `sinks`."""
        return max(0, length - self.size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeviceCache:
    """The keys and values on the device: the static zone's, and after them the summary's.

    Attributes:
      keys: per layer [B, K, S + C, H], rotated; from slot S on the mean keys of clusters.
      values: per layer [B, K, S + C, H].
      log_counts: per layer [B, K, C] float32, log of the number of keys of each cluster; -inf for none.
      lengths: [B] int32, tokens seen so far, which is the next token's position.
      starts: [B] int32, the first position of the window that still counts: a host path may take keys over before
        their slots are needed.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    log_counts: tuple[jax.Array, ...]
    lengths: jax.Array
    starts: jax.Array

    def append(self, zone: Zone, new: NewToken, active: jax.Array) -> DeviceCache:
        """The zone with one more token of each active sequence in it.

        It is a program of its own: XLA copies a whole cache that one program both reads and writes, but
        writes a donated one in place.
        """
        # An ended sequence writes to a slot past the last, which JAX drops.
        slot = jnp.where(active, zone.slot(self.lengths), self.keys[0].shape[2])
        rows = jnp.arange(len(slot))

        def put(cache: tuple[jax.Array, ...], token: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            return tuple(
                a.at[rows, :, slot].set(t.astype(a.dtype), mode="drop")
                for a, t in zip(cache, token, strict=True)
            )

        lengths = self.lengths + active.astype(jnp.int32)
        return dataclasses.replace(
            self, keys=put(self.keys, new.keys), values=put(self.values, new.values), lengths=lengths
        )

    def add_clusters(
        self, zone: Zone, summaries: Sequence[Summary], sequence: jax.Array, start: jax.Array
    ) -> DeviceCache:
        """The cache with one sequence's clusters `start`, `start + 1`, ... replaced in every layer.

        Args:
          zone: the static zone's layout.
          summaries: per layer, arrays [K, c, ...].
          sequence: int32 scalar.
          start: int32 scalar.
        """

        def put(
            cache: tuple[jax.Array, ...], new: list[jax.Array], start: jax.Array
        ) -> tuple[jax.Array, ...]:
            return tuple(
                jax.lax.dynamic_update_slice(
                    a, n[None].astype(a.dtype), (sequence, 0, start, *([0] * (a.ndim - 3)))
                )
                for a, n in zip(cache, new, strict=True)
            )

        return dataclasses.replace(
            self,
            keys=put(self.keys, [s.keys for s in summaries], zone.size + start),
            values=put(self.values, [s.values for s in summaries], zone.size + start),
            log_counts=put(self.log_counts, [s.log_counts for s in summaries], start),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NewToken:
    """The keys and values that one token per sequence adds, per layer [B, K, H]."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


class HostPath(Protocol):
    """Attention over the offloaded keys, as seen from inside a jitted step.

    `submit` hands a layer's queries over and returns at once; `collect` waits for the answer. Between the
    two the device computes the partial of its own keys.
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
    """Grouped-query attention with rotary positions.

    `qkv_proj` are Hugging Face's q_proj, k_proj and v_proj side by side: one long kernel is read faster than three.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        def linear(features_in: int, features_out: int) -> nnx.Linear:
            return nnx.Linear(
                features_in, features_out, use_bias=config.attention_bias, dot_general=product, rngs=rngs
            )

        self.config = config
        self._heads = config.num_attention_heads * config.head_dim
        """Columns of `qkv_proj` that make queries."""
        kv_heads = config.num_key_value_heads * config.head_dim
        self.qkv_proj = linear(config.hidden_size, self._heads + 2 * kv_heads)
        self.o_proj = linear(self._heads, config.hidden_size)

    def queries(self, x: jax.Array, positions: jax.Array, rope: Rope) -> jax.Array:
        """x [B, T, D] -> rotated queries [B, K, G, T, H], scaled by H**-0.5."""
        return self._rotated_queries(self._projected(x, slice(self._heads)), positions, rope)

    def keys_values(self, x: jax.Array, positions: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array]:
        """x [B, T, D] -> rotated keys and values, each [B, K, T, H]."""
        return self._rotated_keys_values(self._projected(x, slice(self._heads, None)), positions, rope)

    def _projected(self, x: jax.Array, columns: slice) -> jax.Array:
        """Some columns of what `qkv_proj` makes of x [B, T, D]. It copies them: for many positions."""
        kernel, bias = self.qkv_proj.kernel[...], self.qkv_proj.bias
        out = product(x, kernel[:, columns], (((x.ndim - 1,), (0,)), ((), ())))
        return out if bias is None else out + bias[...][columns]

    def _rotated_queries(self, q: jax.Array, positions: jax.Array, rope: Rope) -> jax.Array:
        c = self.config
        q = q.reshape(*q.shape[:2], c.num_key_value_heads, c.groups, c.head_dim)
        q = rotate(q, positions, rope.inverse_frequencies, rope.factor) * c.head_dim**-0.5
        return q.transpose(0, 2, 3, 1, 4)

    def _rotated_keys_values(
        self, kv: jax.Array, positions: jax.Array, rope: Rope
    ) -> tuple[jax.Array, jax.Array]:
        c = self.config
        kv = kv.reshape(*kv.shape[:2], 2, c.num_key_value_heads, c.head_dim)
        k = rotate(kv[:, :, 0], positions, rope.inverse_frequencies, rope.factor)
        return k.transpose(0, 2, 1, 3), kv[:, :, 1].transpose(0, 2, 1, 3)

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
        log_counts: jax.Array,
        lengths: jax.Array,
        starts: jax.Array,
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
          keys: [B, K, S + C, H], the static zone's keys, without the new token's, and the summary's.
          values: [B, K, S + C, H].
          log_counts: [B, K, C] float32, the summary's.
          lengths: [B] int32, tokens before this one.
          starts: [B] int32, as in `DeviceCache`.
          active: [B] bool; a sequence that has ended computes garbage.
          rope: the rotary embedding.
          zone: the static zone's layout.
          layer: the layer's number, for the host path.
          host: attention over the offloaded keys, or None where nothing leaves the device.

        Returns:
          The output [B, 1, D], and the new token's key and value, each [B, K, H].
        """
        positions = lengths[:, None]
        q, kv = jnp.split(self.qkv_proj(x), [self._heads], axis=-1)
        q = self._rotated_queries(q, positions, rope)[:, :, :, 0]
        new_key, new_value = (a[:, :, 0] for a in self._rotated_keys_values(kv, positions, rope))
        ticket = None
        if host is not None:
            rows, leaving = jnp.arange(len(lengths)), zone.slot(lengths)
            ticket = host.submit(
                layer,
                q.astype(jnp.float32),
                keys[rows, :, leaving],
                values[rows, :, leaving],
                jnp.where(active, lengths, -1),
            )
            # The kernel needs the ticket, so that the host starts before it does.
            q, ticket = jax.lax.optimization_barrier((q, ticket))

        with jax.named_scope("device_keys"):
            weights = zone.log_weights(lengths, starts)[:, None]
            weights = jnp.broadcast_to(weights, (*log_counts.shape[:2], zone.size))
            weights = jnp.concatenate([weights, log_counts], axis=2)
            device = partial_attention(q, keys, values, weights)
        parts = [device, _own(q, new_key, new_value)]
        if host is not None:
            assert ticket is not None
            parts.append(host.collect(layer, ticket, after=jnp.asarray(device.max)))
        out = finish(merge(*parts)).reshape(len(x), 1, -1).astype(x.dtype)
        return self.o_proj(out), new_key, new_value


def _own(q: jax.Array, key: jax.Array, value: jax.Array) -> Partial:
    """The partial of a token's queries [B, K, G, H] over its own key and value [B, K, H]."""
    score = jnp.einsum("bkgh,bkh->bkg", q, key, preferred_element_type=jnp.float32)
    numerator = jnp.broadcast_to(value[:, :, None].astype(jnp.float32), q.shape)
    return Partial(numerator, jnp.ones_like(score), score)
