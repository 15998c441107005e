"""A Llama in Flax NNX, run in two ways: a layer at a time over a prompt, and whole for one token.

Letters: `B` batch, `T` positions of a block, `S` positions of the prompt, `Q` sampled positions, `K` key/value
heads, `G` query heads per key/value head, `H` head dim, `D` model dim, `F` MLP dim, `V` vocabulary, `L` layers.

Parameters have the names of Hugging Face's Llama, but for `PACKED` ones; kernels are [in, out], as Flax has them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from rajax.kernels import product
from rajax.kernels.tiles import ROUNDED
from rajax.models.attention import Attention, DeviceCache, HostPath, NewToken, Rope, Zone
from rajax.models.config import LlamaConfig

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Linear layers that are several of Hugging Face's side by side, as in vLLM: one long kernel is read faster."""

PREFILL_PRECISIONS = {"float32": None, "bfloat16": ROUNDED}
"""By the name that users know, JAX's name: products of what the parameters are, or rounded with float32 sums."""


class RMSNorm(nnx.Module):
    """x / rms(x) * scale, with the mean square in float32 (arXiv 1910.07467)."""

    def __init__(self, features: int, epsilon: float):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones((features,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        return y.astype(x.dtype) * self.scale[...]


class MLP(nnx.Module):
    """The gated MLP: down(act(gate(x)) * up(x)). `gate_up_proj` are gate_proj and up_proj side by side."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        def linear(features_in: int, features_out: int) -> nnx.Linear:
            return nnx.Linear(
                features_in, features_out, use_bias=config.mlp_bias, dot_general=product, rngs=rngs
            )

        self.activation = config.hidden_act
        self.gate_up_proj = linear(config.hidden_size, 2 * config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(ACTIVATIONS[self.activation](gate) * up)


def packed_widths(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """How many columns of each of the `PACKED` every part has."""
    kv_heads = config.num_key_value_heads * config.head_dim
    return {
        "qkv_proj": (config.num_attention_heads * config.head_dim, kv_heads, kv_heads),
        "gate_up_proj": (config.intermediate_size, config.intermediate_size),
    }


class Layer(nnx.Module):
    """One decoder layer."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, rngs=rngs)

    def prefill(
        self, x: jax.Array, rope: Rope, sampled: jax.Array, wanted: tuple[jax.Array, jax.Array], *, block: int
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """The layer over a whole prompt, `block` positions at a time.

        Args:
          x: [B, S, D]; S is a multiple of `block`. Positions past a prompt's end may hold anything finite:
            nothing before them attends to them.
          rope: the rotary embedding.
          sampled: [Q] int32, the positions whose queries are wanted.
          wanted: int32 scalars, the first block whose output is wanted and the one after the last; rows of
            others stay x's.
          block: positions per step. Besides x, keys and values every array has this many rows.

        Returns:
          The output [B, S, D], keys and values [B, K, S, H], and the sampled queries [B, K, G, Q, H].
        """
        batch, length, width = x.shape
        positions = jnp.broadcast_to(sampled, (batch, len(sampled)))
        queries = self.self_attn.queries(self.input_layernorm(x[:, sampled]), positions, rope)
        starts = jnp.arange(0, length, block)
        blocks = x.reshape(batch, length // block, block, width).swapaxes(0, 1)

        def keys_values(args):
            start, x = args
            positions = jnp.broadcast_to(start + jnp.arange(block), (batch, block))
            return self.self_attn.keys_values(self.input_layernorm(x), positions, rope)

        keys, values = (
            a.transpose(1, 2, 0, 3, 4).reshape(batch, a.shape[2], length, a.shape[4])
            for a in jax.lax.map(keys_values, (starts, blocks))
        )

        def rest(i, x):
            start = i * block
            here = jax.lax.dynamic_slice_in_dim(x, start, block, axis=1)
            here = here + self.self_attn.prefill(
                self.input_layernorm(here), start, keys, values, rope, block=block
            )
            here = here + self.mlp(self.post_attention_layernorm(here))
            return jax.lax.dynamic_update_slice_in_dim(x, here, start, axis=1)

        return jax.lax.fori_loop(*wanted, rest, x), keys, values, queries

    def decode(self, x: jax.Array, *args, **kwargs) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The layer over one token per sequence; arguments and results are those of `Attention.decode`."""
        attended, key, value = self.self_attn.decode(self.input_layernorm(x), *args, **kwargs)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), key, value


class Llama(nnx.Module):
    """The model: a pytree of parameters that carries its config (`.config`).

    Attributes:
      prefill_precision: of the products over a prompt, a key of `PREFILL_PRECISIONS`.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.prefill_precision = "float32"
        self.embed_tokens = nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs=rngs) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Linear(config.hidden_size, config.vocab_size, use_bias=False, rngs=rngs)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """tokens [B, T] int32 -> [B, T, D]."""
        # nnx.Embed itself would return the dtype that it was made with, whatever the parameters are now.
        return self.embed_tokens.embedding[...][tokens]

    def logits(self, x: jax.Array) -> jax.Array:
        """Hidden states [..., D] -> logits [..., V] in float32."""
        x = self.norm(x)
        if self.config.tie_word_embeddings:
            embedding = self.embed_tokens.embedding[...]
            return jnp.einsum("...d,vd->...v", x, embedding, preferred_element_type=jnp.float32)
        return jnp.einsum("...d,dv->...v", x, self.lm_head.kernel[...], preferred_element_type=jnp.float32)

    def decode(
        self,
        tokens: jax.Array,
        cache: DeviceCache,
        active: jax.Array,
        rope: Rope,
        *,
        zone: Zone,
        host: HostPath | None,
    ) -> tuple[jax.Array, NewToken]:
        """One token per sequence.

        Args:
          tokens: [B] int32.
          cache: the keys and values on the device.
          active: [B] bool; what comes out for a sequence that has ended is garbage.
          rope: the rotary embedding.
          zone: the static zone's layout.
          host: attention over the offloaded keys, or None where nothing leaves the device.

        Returns:
          Logits [B, V] in float32 for the token after, and what `DeviceCache.append` needs.
        """
        x = self.embed(tokens[:, None])
        keys, values = [], []
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{i}"):
                x, key, value = layer.decode(
                    x,
                    cache.keys[i],
                    cache.values[i],
                    cache.log_counts[i],
                    cache.lengths,
                    cache.starts,
                    active,
                    rope,
                    zone=zone,
                    layer=i,
                    host=host,
                )
            keys.append(key)
            values.append(value)
        return self.logits(x[:, 0]), NewToken(tuple(keys), tuple(values))
