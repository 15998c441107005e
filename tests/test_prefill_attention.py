"""Causal attention over a prompt: in vectors, tiles or XLA, exact or rounded; against float64."""

import contextlib
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from threads import at_once

from rajax.kernels import prefill_attention, tiles, vectors
from rajax.kernels.vector_attention import _fill as fill


def exact(a):
    return np.asarray(a, np.float64)


def bfloat16(a):
    return np.asarray(jnp.asarray(a, jnp.bfloat16).astype(jnp.float32), np.float64)


SEEN = {"vectors": exact, "XLA": exact, "tiles": bfloat16, "XLA, rounded": bfloat16}
"""What each makes of its operands."""


@pytest.fixture(params=SEEN)
def where(request, monkeypatch):
    """Within it a prompt's attention is computed in one place."""
    if request.param == "tiles" and not tiles.available():
        pytest.skip("this CPU has no AMX, or Linux gives no leave")
    if request.param == "vectors" and not vectors.available():
        pytest.skip("this CPU does not multiply and add in one instruction")
    if request.param.startswith("XLA"):
        monkeypatch.setattr(tiles, "available", lambda: False)
        monkeypatch.setattr(vectors, "available", lambda: False)
    precision = jax.default_matmul_precision(tiles.ROUNDED)
    with precision if SEEN[request.param] is bfloat16 else contextlib.nullcontext():
        yield request.param


@pytest.mark.skipif(not vectors.available(), reason="this CPU does not multiply and add in one instruction")
def test_a_cpu_computes_in_vectors_what_it_may_not_round(monkeypatch):
    calls = []
    module = importlib.import_module("rajax.kernels.prefill_attention")
    monkeypatch.setattr(module, "vector_attention", lambda q, *_: calls.append(q.shape) or q)
    for shape in ATTENTIONS:
        attend(*prompt(shape))
    assert [shape[-1] for shape in calls] == [32, 64, 128, 96], "80 is no multiple of the vectors' width"


def attention64(q, k, v, start):
    scores = np.einsum("bkgth,bksh->bkgts", q, k).astype(np.float64)
    rows, columns = start + np.arange(q.shape[3]), np.arange(k.shape[2])
    scores = np.where(columns <= rows[:, None], scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bkgts,bksh->bkgth", p / p.sum(-1, keepdims=True), v)


ATTENTIONS = [
    # batch, KV heads, groups, T, S, H, start
    (1, 1, 1, 32, 32, 32, 0),
    (2, 3, 3, 96, 1088, 64, 992),
    (1, 2, 4, 288, 576, 128, 288),
    (1, 1, 2, 512, 1024, 96, 512),
    (1, 2, 1, 64, 320, 80, 256),
]


def prompt(shape):
    batch, heads, groups, length, positions, width, start = shape
    draw = np.random.default_rng(positions)
    q = draw.standard_normal((batch, heads, groups, length, width)).astype(np.float32) * 2 / np.sqrt(width)
    k, v = (draw.standard_normal((2, batch, heads, positions, width)) * 2).astype(np.float32)
    return q, k, v, start


def attend(q, k, v, start):
    return np.asarray(jax.jit(functools.partial(prefill_attention, block=32))(q, k, v, jnp.int32(start)))


@pytest.mark.parametrize("shape", ATTENTIONS)
def test_prefill_attention_is_causal_attention(where, shape):
    q, k, v, start = prompt(shape)
    got = attend(q, k, v, start)
    assert got.dtype == np.float32
    wanted = attention64(*map(SEEN[where], (q, k, v)), start)
    # Where operands are rounded, weights are too.
    some, most = (0.006, 0.02) if SEEN[where] is bfloat16 else (3e-6, 1e-5)
    assert np.linalg.norm(got - wanted) < some * np.linalg.norm(wanted)
    assert np.abs(got - wanted).max() < most * np.abs(v).max()


@pytest.mark.parametrize("shape", ATTENTIONS)
def test_later_keys_do_not_matter(where, shape):
    q, k, v, start = prompt(shape)
    for position in (start, start + q.shape[3] - 2):
        other_k, other_v = k.copy(), v.copy()
        other_k[:, :, position + 1 :], other_v[:, :, position + 1 :] = 30, -1e30
        got = attend(q, other_k, other_v, start)[:, :, :, : position - start + 1]
        np.testing.assert_array_equal(got, attend(q, k, v, start)[:, :, :, : position - start + 1])


def test_scores_far_apart_and_equal_ones(where):
    """One key takes all; all keys take the same; nothing overflows, nothing is NaN."""
    q, k, v, start = prompt(ATTENTIONS[1])
    far = attend(q * 200, k, v, start)
    best = np.einsum("bkgth,bksh->bkgts", SEEN[where](q * 200), SEEN[where](k))[..., -1, :].argmax(-1)
    values = np.take_along_axis(v[:, :, None], best[..., None, None], axis=3)[:, :, :, 0]
    assert np.isfinite(far).all()
    np.testing.assert_allclose(far[:, :, :, -1], values, rtol=0.02, atol=0.02)
    same = attend(q * 0, k, v, start)
    for i in (0, q.shape[3] - 1):
        mean = v[:, :, None, : start + i + 1].mean(3)
        np.testing.assert_allclose(same[:, :, :, i], np.broadcast_to(mean, same[:, :, :, i].shape), atol=0.01)


@pytest.mark.skipif(not vectors.available(), reason="this CPU does not multiply and add in one instruction")
def test_vectors_write_all_of_the_output_and_nothing_beside_it():
    q, k, v, start = prompt((1, 2, 3, 96, 320, 64, 192))
    turned = np.ascontiguousarray(q.transpose(0, 3, 1, 2, 4))
    out = np.full((3, *turned.shape[1:]), np.nan, np.float32)
    fill(turned, k, v, np.array([start], np.int32), out[1:2])
    np.testing.assert_allclose(out[1].transpose(1, 2, 0, 3), attention64(q, k, v, start)[0], atol=1e-4)
    assert np.isnan(out[[0, 2]]).all()


def test_several_threads_may_attend_at_once():
    q, k, v, start = prompt(ATTENTIONS[1])
    wanted, failures = attend(q, k, v, start), []

    def work():
        for _ in range(10):
            if (attend(q, k, v, start) != wanted).any():
                failures.append(1)

    at_once(work)
    assert not failures
