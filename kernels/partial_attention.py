"""One decode step's attention over the keys on the device, as a `Partial`.

Letters: `B` batch, `K` key/value heads, `G` query heads per key/value head, `S` key positions, `H` head dim.

Each key carries an additive log-weight: 0 for a key that counts once, log(n) for a mean key that stands
for n, -inf for a slot that holds none. Decode has one query per head, so the work is reading keys and
values once; the kernel splits the keys over programs (Flash-Decoding) and `merge` joins the splits.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from rajax.kernels.partial import Partial, merge_stacked

BLOCK_S = 64
"""Keys per step of a program's loop."""

SPLIT_S = 512
"""Keys per program: enough programs to fill a GPU at batch 1, few enough that merging them is cheap."""

MIN_DOT = 16
"""Triton's matrix units take no operand side below this: few query heads are padded up to it."""


def partial_attention(q: jax.Array, keys: jax.Array, values: jax.Array, log_weights: jax.Array) -> Partial:
    """Attention of one query per head over the keys on the device.

    This is the one place that chooses: CUDA runs the Pallas kernel, every other platform the reference.
    The choice is made when the program is lowered, so a machine without a GPU can lower for one.

    Args:
      q: [B, K, G, H], already scaled by H**-0.5.
      keys: [B, K, S, H]. Slots with weight -inf must hold finite numbers.
      values: [B, K, S, H], likewise.
      log_weights: [B, K, S] float32, added to the scores.

    Returns:
      A `Partial` in float32. With all weights -inf it is that of no keys, never NaN.
    """
    return jax.lax.platform_dependent(
        q, keys, values, log_weights, cuda=partial_attention_pallas, default=partial_attention_reference
    )


def partial_attention_reference(
    q: jax.Array, keys: jax.Array, values: jax.Array, log_weights: jax.Array
) -> Partial:
    """`partial_attention` in plain JAX."""
    scores = jnp.einsum("bkgh,bksh->bkgs", q, keys, preferred_element_type=jnp.float32)
    scores = scores + log_weights[:, :, None, :]
    top = scores.max(-1)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0.0, top)[..., None])
    numerator = jnp.einsum(
        "bkgs,bksh->bkgh", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
    )
    return Partial(numerator, weights.sum(-1), top)


@functools.partial(jax.jit, static_argnames=("interpret",))
def partial_attention_pallas(
    q: jax.Array, keys: jax.Array, values: jax.Array, log_weights: jax.Array, *, interpret: bool = False
) -> Partial:
    """`partial_attention` as a Pallas kernel for Triton; `interpret=True` runs it anywhere, slowly.

    A head dim that is not a power of two, and a number of keys that is not a multiple of `BLOCK_S`, are
    padded first, which copies the keys: models and caches for GPUs should avoid both.
    """
    batch, kv_heads, groups, head_dim = q.shape
    slots = keys.shape[2]
    q = _pad(q, {2: max(MIN_DOT, _next_power_of_two(groups)), 3: _next_power_of_two(max(head_dim, MIN_DOT))})
    padded_slots = pl.cdiv(slots, BLOCK_S) * BLOCK_S
    keys, values = (_pad(x, {2: padded_slots, 3: q.shape[3]}) for x in (keys, values))
    log_weights = _pad(log_weights.astype(jnp.float32), {2: padded_slots}, fill=-jnp.inf)

    splits = pl.cdiv(padded_slots, SPLIT_S)
    rows, width = q.shape[2:]
    # Programs are (split, head, sequence); the splits read their own keys from the whole of a head's.
    per_head = (None, None, padded_slots, width)
    out_shape = (
        jax.ShapeDtypeStruct((splits, batch, kv_heads, rows, width), jnp.float32),
        jax.ShapeDtypeStruct((splits, batch, kv_heads, rows), jnp.float32),
        jax.ShapeDtypeStruct((splits, batch, kv_heads, rows), jnp.float32),
    )
    numerator, denominator, top = pl.pallas_call(
        functools.partial(_kernel, slots=padded_slots),
        grid=(splits, kv_heads, batch),
        in_specs=[
            pl.BlockSpec((None, None, rows, width), lambda s, k, b: (b, k, 0, 0)),
            pl.BlockSpec(per_head, lambda s, k, b: (b, k, 0, 0)),
            pl.BlockSpec(per_head, lambda s, k, b: (b, k, 0, 0)),
            pl.BlockSpec((None, None, padded_slots), lambda s, k, b: (b, k, 0)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, rows, width), lambda s, k, b: (s, b, k, 0, 0)),
            pl.BlockSpec((None, None, None, rows), lambda s, k, b: (s, b, k, 0)),
            pl.BlockSpec((None, None, None, rows), lambda s, k, b: (s, b, k, 0)),
        ],
        out_shape=out_shape,
        # The default lowering differs between JAX releases; this kernel is written for Triton.
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="partial_attention",
    )(q, keys, values, log_weights)
    whole = merge_stacked(Partial(numerator, denominator, top))
    return Partial(
        whole.numerator[:, :, :groups, :head_dim], whole.denominator[:, :, :groups], whole.max[:, :, :groups]
    )


def _kernel(q_ref, keys_ref, values_ref, log_weights_ref, numerator_ref, denominator_ref, max_ref, *, slots):
    """One split: q [G, H] against its keys, `BLOCK_S` at a time, with the running max of online softmax."""
    q = q_ref[...]
    start = pl.program_id(0) * SPLIT_S
    blocks = jnp.minimum(SPLIT_S, slots - start) // BLOCK_S

    def block(i, carry):
        numerator, denominator, top = carry
        here = pl.ds(start + i * BLOCK_S, BLOCK_S)
        scores = _dot(q, keys_ref[here, :], contract=(1, 1)) + log_weights_ref[here][None, :]
        new_top = jnp.maximum(top, scores.max(1))
        # Until a first key is seen the max is -inf; subtracting 0 instead keeps exp(-inf) = 0.
        reference = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        rescale = jnp.exp(top - reference)
        weights = jnp.exp(scores - reference[:, None])
        values = values_ref[here, :]
        added = _dot(weights.astype(values.dtype), values, contract=(1, 0))
        return numerator * rescale[:, None] + added, denominator * rescale + weights.sum(1), new_top

    rows, width = q.shape
    empty = (
        jnp.zeros((rows, width), jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.full((rows,), -jnp.inf, jnp.float32),
    )
    numerator_ref[...], denominator_ref[...], max_ref[...] = jax.lax.fori_loop(0, blocks, block, empty)


def _dot(a, b, *, contract):
    """A matrix product in float32, without TF32's rounding of float32 operands."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _pad(x: jax.Array, sizes: dict[int, int], fill: float = 0.0) -> jax.Array:
    """`x` with the named axes grown to the given sizes."""
    widths = [(0, sizes.get(axis, size) - size) for axis, size in enumerate(x.shape)]
    return x if all(after == 0 for _, after in widths) else jnp.pad(x, widths, constant_values=fill)


def _next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
