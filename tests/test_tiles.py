"""Rounded products in a CPU's matrix unit where there is one, else in XLA; against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_llama import random_llama, random_tokens
from threads import at_once

import rajax
from rajax.kernels import host_call, nearest_center, product, tiles, vectors
from rajax.kernels.host_call import share_out
from rajax.kernels.linear import _fill as fill

needs_tiles = pytest.mark.skipif(not tiles.available(), reason="this CPU has no AMX, or Linux gives no leave")


@pytest.fixture(params=["tiles", "XLA"])
def rounded(request, monkeypatch):
    """Within it products are rounded, by either of the two that compute them."""
    if request.param == "XLA":
        monkeypatch.setattr(tiles, "available", lambda: False)
    elif not tiles.available():
        pytest.skip("this CPU has no AMX, or Linux gives no leave")
    with jax.default_matmul_precision(tiles.ROUNDED):
        assert tiles.chosen() == (request.param == "tiles")
        yield


def bfloat16(a):
    return np.asarray(jnp.asarray(a, jnp.bfloat16).astype(jnp.float32), np.float64)


def linear(x, kernel):
    return jax.jit(lambda x, w: product(x, w, (((x.ndim - 1,), (0,)), ((), ()))))(x, kernel)


@pytest.mark.parametrize(
    ("shape", "outputs"),
    [((32, 32), 32), ((33, 70), 40), ((2, 25, 576), 192), ((300, 33), 1), ((512, 64), 96)],
)
def test_product_is_that_of_rounded_operands(rounded, shape, outputs):
    draw = np.random.default_rng(len(shape))
    x = draw.standard_normal(shape).astype(np.float32)
    kernel = draw.standard_normal((shape[-1], outputs)).astype(np.float32)
    got = linear(x, kernel)
    assert got.dtype == jnp.float32
    wanted = bfloat16(x) @ bfloat16(kernel)
    np.testing.assert_allclose(got, wanted, atol=1e-5 * np.sqrt(shape[-1]))
    assert np.abs(wanted - x.astype(np.float64) @ kernel).max() > 1e-3, "rounding shows"


def test_products_are_not_rounded_unless_asked():
    draw = np.random.default_rng(0)
    x, kernel = (draw.standard_normal((64, 64)).astype(np.float32) for _ in range(2))
    assert not tiles.chosen()
    np.testing.assert_allclose(linear(x, kernel), x.astype(np.float64) @ kernel, atol=1e-4)


def test_few_rows_are_not_rounded(rounded):
    draw = np.random.default_rng(0)
    x, kernel = draw.standard_normal((31, 64)).astype(np.float32), draw.standard_normal((64, 64))
    kernel = kernel.astype(np.float32)
    np.testing.assert_allclose(linear(x, kernel), x.astype(np.float64) @ kernel, atol=1e-4)


@pytest.mark.parametrize("where", ["tiles", "vectors", "XLA"])
@pytest.mark.parametrize(("count", "number", "width"), [(512, 1, 16), (1024, 77, 80), (2048, 341, 64)])
def test_each_point_goes_to_its_nearest_center(where, count, number, width, monkeypatch):
    if not {"tiles": tiles.available, "vectors": vectors.available, "XLA": lambda: True}[where]():
        pytest.skip("not on this CPU")
    if where != "tiles":
        monkeypatch.setattr(tiles, "available", lambda: False)
    if where == "XLA":
        monkeypatch.setattr(vectors, "available", lambda: False)
    draw = np.random.default_rng(number)
    points = draw.standard_normal((count, width)).astype(np.float32)
    centers = draw.standard_normal((number, width)).astype(np.float32)
    weights = (draw.random(count) * (draw.random(count) < 0.8)).astype(np.float32)
    allowed = np.arange(number) < max(1, number - 5)
    offsets = np.where(allowed, -(centers**2).sum(1) / 2, -np.inf).astype(np.float32)
    labels, sums = map(np.asarray, jax.jit(lambda *a: nearest_center(*a))(points, weights, centers, offsets))
    scores = points.astype(np.float64) @ centers.T + offsets
    taken = np.take_along_axis(scores, labels[:, None], axis=1)[:, 0]
    assert allowed[labels].all()
    # Rounding may choose another only where two are about as near.
    assert (scores.max(1) - taken).max() <= (0.02 * width if where == "tiles" else 1e-4)
    assert (scores.argmax(1) != labels).mean() < 0.02
    wanted = np.zeros((number, width + 1))
    np.add.at(wanted, labels, weights[:, None] * np.concatenate([points, np.ones((count, 1))], axis=1))
    np.testing.assert_allclose(sums, wanted, atol=1e-3)


@needs_tiles
def test_all_of_the_output_is_written():
    draw = np.random.default_rng(0)
    x, kernel = (draw.standard_normal((64, 64)).astype(jnp.bfloat16) for _ in range(2))
    out = np.full((64, 64), np.nan, np.float32)
    fill(x, kernel.reshape(32, 2, 4, 16).transpose(2, 0, 3, 1).copy(), out)
    np.testing.assert_allclose(out, x.astype(np.float64) @ kernel.astype(np.float64), atol=1e-4)


@needs_tiles
def test_several_threads_may_multiply_at_once():
    draw = np.random.default_rng(0)
    x, kernel = (draw.standard_normal((512, 512)).astype(np.float32) for _ in range(2))
    wanted, failures = bfloat16(x) @ bfloat16(kernel), []
    with jax.default_matmul_precision(tiles.ROUNDED):
        f = jax.jit(lambda x, w: product(x, w, (((1,), (0,)), ((), ()))))
        f(x, kernel)

    def work():
        with jax.default_matmul_precision(tiles.ROUNDED):
            for _ in range(20):
                if np.abs(np.asarray(f(x, kernel)) - wanted).max() > 1e-3:
                    failures.append(1)

    at_once(work)
    assert not failures


def test_spans_cover_all_pieces(monkeypatch):
    monkeypatch.setattr(host_call, "CORES", 3)
    for pieces in (0, 1, 2, 3, 17):
        spans = []
        share_out(lambda *span: spans.append(span), pieces)  # noqa: B023
        assert sorted(i for span in spans for i in range(*span)) == list(range(pieces))


@pytest.mark.parametrize("head_dim", [16, 64])
def test_a_model_with_rounded_prefill(head_dim):
    """Near float32, but not it; and with retrieval of every key what dense attention says."""
    model = random_llama(head_dim=head_dim)
    (text,) = random_tokens(3, 300)
    exact = rajax.logits(model, text)
    model.prefill_precision = "bfloat16"
    got = rajax.logits(model, text)
    error = np.abs(got - exact).max() / np.abs(exact).max()
    assert 1e-5 < error < 0.15
    everything = rajax.RetrievalConfig(index="exact", top_k=300, sink_tokens=4, window=32)
    dense = rajax.generate(model, text, max_new_tokens=8, retrieval=None, stop=())
    assert rajax.generate(model, text, max_new_tokens=8, retrieval=everything, stop=()).tokens == dense.tokens
