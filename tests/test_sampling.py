"""Sampling against its definition in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rajax import Sampling
from rajax.sampling import NOT_FINITE, restrict, sample


def logits(seed: int, batch: int = 3, vocabulary: int = 50) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((batch, vocabulary)) * 3).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def draw(x: np.ndarray, sampling: Sampling, key: int = 0, step: int = 0, seen: np.ndarray | None = None):
    seen = np.zeros((len(x), 0), bool) if seen is None else seen
    return sample(jnp.asarray(x), jnp.asarray(seen), jax.random.key(key), np.int32(step), sampling=sampling)


def kept(x: np.ndarray, sampling: Sampling) -> np.ndarray:
    return np.isfinite(np.asarray(restrict(jnp.asarray(x), sampling)))


def test_greedy_takes_the_most_likely():
    x = logits(0)
    np.testing.assert_array_equal(draw(x, Sampling())[0], x.argmax(-1))


@pytest.mark.parametrize("k", [1, 7, 50, 1000])
def test_top_k_keeps_the_k_largest(k):
    x = logits(1)
    wanted = x >= np.sort(x)[:, -min(k, 50)][:, None]
    np.testing.assert_array_equal(kept(x, Sampling(temperature=1, top_k=k)), wanted)


@pytest.mark.parametrize("p", [1e-9, 0.3, 0.9, 0.999, 1.0])
def test_top_p_keeps_the_fewest_that_hold_p(p):
    x = logits(2)
    for row, mask in zip(softmax(x), kept(x, Sampling(temperature=1, top_p=p)), strict=True):
        order = np.argsort(-row)
        count = 50 if p == 1 else int(np.searchsorted(np.cumsum(row[order]), p)) + 1
        assert set(np.flatnonzero(mask)) == set(order[:count])


@pytest.mark.parametrize("p", [0.0, 0.01, 0.5, 1.0])
def test_min_p_keeps_what_is_near_the_best(p):
    x = logits(3)
    probabilities = softmax(x)
    wanted = probabilities >= p * probabilities.max(-1, keepdims=True) * (1 - 1e-5)
    np.testing.assert_array_equal(kept(x, Sampling(temperature=1, min_p=p)), wanted)


def test_filters_follow_one_another():
    """top-k, then top-p over what it left, then min-p: Hugging Face's order."""
    x = np.log(np.array([[0.4, 0.3, 0.2, 0.06, 0.04]], np.float32))
    mask = kept(x, Sampling(temperature=1, top_k=3, top_p=0.7, min_p=0.0))
    # Of the three left, 4/9 + 3/9 = 0.78 reach 0.7; over all five, 0.4 + 0.3 would just do so as well,
    # but with top_p 0.75 only the renormalized ones do.
    np.testing.assert_array_equal(mask, [[True, True, False, False, False]])
    np.testing.assert_array_equal(
        kept(x, Sampling(temperature=1, top_k=3, top_p=0.75)), [[True, True, False, False, False]]
    )
    np.testing.assert_array_equal(
        kept(x, Sampling(temperature=1, top_p=0.75)), [[True, True, True, False, False]]
    )


def test_samples_follow_the_distribution():
    x = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32)).repeat(4000, 0)
    tokens = np.asarray(draw(x, Sampling(temperature=1))[0])
    # Four standard errors of a share of one half.
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 4000, [0.5, 0.3, 0.15, 0.05], atol=0.032)
    cold = np.asarray(draw(x, Sampling(temperature=0.5))[0])
    p = np.array([0.5, 0.3, 0.15, 0.05]) ** 2
    np.testing.assert_allclose(np.bincount(cold, minlength=4) / 4000, p / p.sum(), atol=0.032)


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-9])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_smallest_temperature_is_greedy(temperature, top_p):
    x = logits(4)
    np.testing.assert_array_equal(draw(x, Sampling(temperature=temperature, top_p=top_p))[0], x.argmax(-1))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_give_no_token(bad):
    x = logits(5)
    x[1, 3] = bad
    for sampling in (Sampling(), Sampling(temperature=1, top_p=0.9)):
        tokens = np.asarray(draw(x, sampling)[0])
        assert tokens[1] == NOT_FINITE
        assert (tokens[[0, 2]] >= 0).all()


def test_seeds_repeat_and_steps_and_rows_differ():
    x = np.zeros((64, 50), np.float32)
    first = np.asarray(draw(x, Sampling(temperature=1), key=5)[0])
    np.testing.assert_array_equal(first, draw(x, Sampling(temperature=1), key=5)[0])
    for other in (draw(x, Sampling(temperature=1), key=6), draw(x, Sampling(temperature=1), key=5, step=1)):
        assert (first != np.asarray(other[0])).mean() > 0.8
    assert len(set(first.tolist())) > 20


def test_the_repetition_penalty_pulls_seen_tokens_down():
    x = np.array([[2.0, 1.5, -1.0], [-0.5, -0.6, -9.0]], np.float32)
    seen = np.array([[True, False, False], [True, False, True]])
    tokens, after = draw(x, Sampling(repetition_penalty=2.0), seen=seen)
    np.testing.assert_array_equal(tokens, [1, 1])
    np.testing.assert_array_equal(after, [[True, True, False], [True, True, True]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature must be a number of at least 0, found -1"),
        ({"temperature": float("nan")}, "temperature must be a number of at least 0, found nan"),
        ({"temperature": "1"}, "temperature must be a number of at least 0, found '1'"),
        ({"temperature": True}, "temperature must be a number of at least 0, found True"),
        ({"top_k": -1}, "top_k must be an integer of at least 0, found -1"),
        ({"top_k": 1.5}, "top_k must be an integer of at least 0, found 1.5"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, found 0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1, found 1.1"),
        ({"min_p": -0.1}, "min_p must be from 0 to 1, found -0.1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0, found 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)
