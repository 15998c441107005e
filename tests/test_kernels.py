"""Kernels against their references and against attention written out."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda import lower_for_cuda
from jax.experimental import pallas as pl

from rajax.kernels import (
    Partial,
    finish,
    merge,
    no_keys,
    partial_attention,
    partial_attention_reference,
    prefill_attention,
)
from rajax.kernels.partial_attention import partial_attention_pallas


def arrays(seed, batch, kv_heads, groups, slots, head_dim, dtype=np.float32, scale=2.0):
    draw = np.random.default_rng(seed)
    q = draw.standard_normal((batch, kv_heads, groups, head_dim)) * scale / np.sqrt(head_dim)
    k, v = draw.standard_normal((2, batch, kv_heads, slots, head_dim)) * scale
    weights = np.where(
        draw.random((batch, kv_heads, slots)) < 0.2, -np.inf, draw.normal(size=(batch, kv_heads, slots))
    )
    return (
        jnp.asarray(q, dtype),
        jnp.asarray(k, dtype),
        jnp.asarray(v, dtype),
        jnp.asarray(weights, jnp.float32),
    )


def attention64(q, k, v, weights):
    """Softmax attention in float64, written out."""
    q, k, v, weights = (np.asarray(a.astype(jnp.float32), np.float64) for a in (q, k, v, weights))
    scores = np.einsum("bkgh,bksh->bkgs", q, k) + weights[:, :, None]
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bkgs,bksh->bkgh", p / p.sum(-1, keepdims=True), v)


SHAPES = [
    (1, 1, 1, 1, 64),
    (2, 3, 3, 640, 64),
    (1, 2, 4, 129, 80),
    (2, 1, 7, 1100, 96),
    (1, 8, 4, 63, 128),
    (1, 2, 17, 65, 32),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_pallas_kernel_equals_its_reference(shape, dtype):
    q, k, v, weights = arrays(0, *shape, dtype=dtype)
    weights = weights.at[:, :, 0].set(0.0)
    ours = partial_attention_pallas(q, k, v, weights, interpret=True)
    reference = partial_attention_reference(q, k, v, weights)
    # bfloat16: the weights are rounded to it relative to a running max in one and the final max in the other.
    tolerance = 2e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(finish(ours), finish(reference), atol=tolerance)
    np.testing.assert_allclose(ours.denominator, reference.denominator, rtol=tolerance)
    np.testing.assert_allclose(ours.max, reference.max, rtol=1e-5, atol=1e-5)
    assert finish(ours).dtype == jnp.float32


def test_the_reference_equals_attention_written_out():
    args = arrays(1, 2, 3, 4, 200, 64)
    np.testing.assert_allclose(finish(partial_attention_reference(*args)), attention64(*args), atol=2e-5)


@pytest.mark.parametrize(
    "attend", [partial_attention_reference, lambda *a: partial_attention_pallas(*a, interpret=True)]
)
def test_no_keys_is_zero_and_never_nan(attend):
    q, k, v, weights = arrays(2, 2, 2, 3, 130, 64)
    empty = attend(q, k, v, jnp.full_like(weights, -jnp.inf))
    assert np.all(np.asarray(empty.denominator) == 0)
    assert np.all(np.asarray(empty.numerator) == 0)
    assert np.all(np.isneginf(np.asarray(empty.max)))
    assert np.all(np.asarray(finish(merge(empty, empty))) == 0)
    full = attend(q, k, v, weights)
    np.testing.assert_array_equal(finish(merge(empty, full)), finish(full))


@pytest.mark.parametrize(
    "attend", [partial_attention_reference, lambda *a: partial_attention_pallas(*a, interpret=True)]
)
def test_a_log_weight_counts_a_key_that_often(attend):
    q, k, v, _ = arrays(3, 1, 2, 3, 40, 64)
    counts = np.random.default_rng(3).integers(1, 5, 40)
    weights = jnp.broadcast_to(jnp.log(jnp.asarray(counts, jnp.float32)), (1, 2, 40))
    repeated_k, repeated_v = (jnp.repeat(a, counts, axis=2, total_repeat_length=counts.sum()) for a in (k, v))
    wanted = attention64(q, repeated_k, repeated_v, jnp.zeros((1, 2, counts.sum())))
    np.testing.assert_allclose(finish(attend(q, k, v, weights)), wanted, atol=2e-5)


def test_the_kernel_writes_every_output(monkeypatch):
    """Outputs that start as NaN come out whole, so the kernel reads none of them."""
    real, poisoned = pl.pallas_call, []

    def poisoning(kernel, *, out_shape, in_specs, out_specs, **settings):
        count = len(in_specs)

        def call(*args):
            poison = [jnp.full(s.shape, jnp.nan, s.dtype) for s in out_shape]
            poisoned.append(len(poison))
            aliased = real(
                lambda *refs: kernel(*refs[:count], *refs[count + len(out_shape) :]),
                out_shape=out_shape,
                in_specs=[*in_specs, *out_specs],
                out_specs=out_specs,
                input_output_aliases={count + i: i for i in range(len(out_shape))},
                **settings,
            )
            return aliased(*args, *poison)

        return call

    monkeypatch.setattr(pl, "pallas_call", poisoning)
    args = arrays(4, 2, 3, 5, 700, 48)
    got = partial_attention_pallas.__wrapped__(*args, interpret=True)
    assert poisoned == [3]
    np.testing.assert_allclose(finish(got), finish(partial_attention_reference(*args)), atol=2e-5)


@pytest.mark.parametrize("cuts", [[], [1], [64], [10, 11, 150], [50, 100, 150, 199]])
def test_merging_any_split_of_the_keys_is_attention_over_all(cuts):
    q, k, v, weights = arrays(5, 2, 3, 4, 200, 64, scale=4.0)
    edges = [0, *cuts, 200]
    parts = [
        partial_attention_reference(q, k[:, :, a:b], v[:, :, a:b], weights[:, :, a:b])
        for a, b in itertools.pairwise(edges)
    ]
    for order in (parts, parts[::-1]):
        merged = finish(merge(*order))
        np.testing.assert_allclose(merged, attention64(q, k, v, weights), atol=5e-5)
    nothing = Partial(*(jnp.asarray(a) for a in vars(no_keys(2, 3, 4, 64)).values()))
    np.testing.assert_array_equal(finish(merge(*parts, nothing)), finish(merge(*parts)))


def test_merge_holds_for_scores_far_apart():
    """Scores hundreds apart: the far part vanishes, nothing overflows."""
    q, k, v, weights = arrays(6, 1, 1, 2, 64, 64)
    near = partial_attention_reference(q, k, v, weights)
    far = partial_attention_reference(q, k, v * 3, weights - 500)
    np.testing.assert_allclose(finish(merge(near, far)), finish(near), atol=1e-6)


@pytest.mark.parametrize(("length", "query_block", "block"), [(256, 64, 64), (384, 128, 64), (128, 128, 128)])
def test_prefill_attention_is_causal_attention(length, query_block, block):
    draw = np.random.default_rng(7)
    q = draw.standard_normal((2, 3, 2, length, 32)).astype(np.float32) / 3
    k, v = (draw.standard_normal((2, 2, 3, length, 32)) * 2).astype(np.float32)
    scores = np.einsum("bkgth,bksh->bkgts", q, k).astype(np.float64)
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.einsum("bkgts,bksh->bkgth", p / p.sum(-1, keepdims=True), v)
    for start in range(0, length, query_block):
        here = slice(start, start + query_block)
        got = prefill_attention(jnp.asarray(q[:, :, :, here]), k, v, jnp.int32(start), block=block)
        np.testing.assert_allclose(got, wanted[:, :, :, here], atol=2e-5)


def test_prefill_attention_refuses_a_ragged_block():
    a = jnp.ones((1, 1, 100, 32))
    with pytest.raises(ValueError, match="100 key positions are not a multiple of the block of 64"):
        prefill_attention(a[:, :, None, :4], a, a, jnp.int32(0), block=64)


def test_cuda_gets_the_pallas_kernel_and_cpu_the_reference():
    """Lowered for CUDA on whatever machine this is; no GPU is needed."""
    args = arrays(8, 2, 3, 3, 640, 64)
    cuda = lower_for_cuda(partial_attention, *args)
    assert "__gpu$xla.gpu.triton" in cuda or "triton_kernel_call" in cuda
    traced = jax.jit(partial_attention).trace(*args)
    cpu = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "triton" not in cpu
    assert "dot_general" in cpu


@pytest.mark.gpu
def test_the_kernel_on_a_gpu_equals_its_reference():
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU")
    for shape in SHAPES:
        args = arrays(9, *shape)
        with jax.default_matmul_precision("highest"):
            reference = finish(partial_attention_reference(*args))
        np.testing.assert_allclose(finish(partial_attention(*args)), reference, atol=1e-4)
