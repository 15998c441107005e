"""Codes of keys: their sums in registers, what they lose, and attention by them, against the definition written out."""

from __future__ import annotations

import threading
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numba import njit
from random_llama import random_llama, random_tokens

import rajax
from rajax import code_attention, host_layer, key_codes, wave
from rajax.clusters import Blocks
from rajax.code_attention import AT_ONCE, MOST, MOST_OPENED, REACH, WORTH
from rajax.coded_layer import CodedLayer
from rajax.exact_attention import HALVES
from rajax.kernels import Partial, code_sums, finish
from rajax.kernels.code_sums import BLOCK, CENTROIDS, HIGHEST
from rajax.kernels.row_products import TOGETHER
from rajax.models.wave import BLOCK_KEYS
from rajax.wave_host import join_halves


@njit
def summed(tables, codes, block, size, sums, at):
    code_sums.sum_codes(tables, codes, block, size, sums, at)


@njit
def summed_plainly(tables, codes, block, size, sums, at):
    code_sums._sum_plainly(tables, codes, block, size, sums, at)


@pytest.mark.parametrize("number", [8, 40, 64])
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("compiled", [summed, summed_plainly])
def test_sums_of_codes(compiled, heads, number):
    draw = np.random.default_rng(heads * number)
    codes = draw.integers(0, 256, (5, number // 4, 32)).astype(np.uint8)
    tables = draw.integers(0, HIGHEST + 1, (heads, number, CENTROIDS)).astype(np.uint8)
    tables[0] = HIGHEST  # the largest sum that there can be
    wanted = code_sums.sum_codes_reference(tables, codes).reshape(heads, 5, BLOCK)
    for block, size in ((0, BLOCK), (3, 1), (4, 11)):
        sums = np.full((heads, 40), 7, np.uint16)
        compiled(tables, codes, block, size, sums, 12)
        np.testing.assert_array_equal(sums[:, 12 : 12 + size], wanted[:, block, :size])
        assert (sums[:, 12 + size : 12 + BLOCK] == 0).all()
        assert (np.delete(sums, np.s_[12 : 12 + BLOCK], axis=1) == 7).all()
    assert wanted[0, 0, 0] == number * HIGHEST


def places_of(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys that fill blocks one after the other."""
    return np.arange(count) // BLOCK, np.arange(count) % BLOCK


def rounded(book: key_codes.Codebook, codes: np.ndarray) -> np.ndarray:
    """The coordinates [16 N, W] that codes [N, M / 4, 32] stand for: what a table of each coordinate finds."""
    number = 4 * codes.shape[1]
    columns = []
    for m in range(number):
        # A centroid's number, found by a table that counts from 0, tells its coordinates.
        table = np.zeros((1, number, CENTROIDS), np.uint8)
        table[0, m] = np.arange(CENTROIDS)
        columns.append(book.centroids[m, code_sums.sum_codes_reference(table, codes)[0]])
    return np.concatenate(columns, axis=1)


@pytest.mark.parametrize("width", [3, 8, 10, 64])
def test_codes_name_the_nearest_centroids(width):
    draw = np.random.default_rng(width)
    keys = draw.standard_normal((300, width)).astype(np.float32) * np.linspace(
        0.1, 3, width, dtype=np.float32
    )
    root = np.linalg.qr(draw.standard_normal((width, width)))[0] * np.linspace(1, 2, width)
    root = (root @ root.T).astype(np.float32)
    book = key_codes.learn(keys, root)
    codes = np.full((20, len(book.centroids) // 4, 32), 0xA5, np.uint8)
    blocks, places = places_of(307)
    key_codes.encode(book, keys[:100], blocks[7:107], places[7:107], codes)
    key_codes.encode(book, keys[100:], blocks[107:], places[107:], codes)
    got, points = rounded(book, codes), keys @ book.to_coordinates
    pairs = points.reshape(len(keys), -1, 1, key_codes.WIDTH)
    nearest = ((pairs - book.centroids) ** 2).sum(-1).min(-1).sum(-1)
    np.testing.assert_allclose(((got[7:307] - points) ** 2).sum(1), nearest, rtol=1e-3, atol=1e-5)
    # What was there before and behind is there still.
    before = rounded(book, np.full_like(codes, 0xA5))
    np.testing.assert_array_equal(np.delete(got, np.s_[7:307], 0), np.delete(before, np.s_[7:307], 0))
    queries = draw.standard_normal((9, width)).astype(np.float32)
    np.testing.assert_allclose((queries @ book.of_queries) @ points.T, queries @ keys.T, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(book.errors, ((points - got[7:307]) ** 2).mean(0), atol=1e-3)
    assert book.errors.sum() < 0.2 * (points**2).mean(0).sum()


def test_codes_of_keys_that_are_all_alike():
    keys = np.ones((40, 8), np.float32)
    book = key_codes.learn(keys, np.eye(8, dtype=np.float32))
    assert np.isfinite(book.centroids).all()
    np.testing.assert_allclose(book.errors, 0, atol=1e-10)


@njit
def weights_of(sums, top, scale, weights):
    shift, factor = code_sums.fixed_point(scale)
    for i in range(0, len(weights), TOGETHER):
        at, to = sums[BLOCK * i :].ctypes.data, weights[i:].ctypes.data
        code_sums.weigh_sums(at, top, shift, factor, to)


@njit
def weight_of_each(sums, top, scale, weights):
    shift, factor = code_sums.fixed_point(scale)
    for i in range(len(sums)):
        weights[i] = code_sums.weight_of(sums[i], top, shift, factor)


@pytest.mark.parametrize("scale", [1e-20, 1e-5, 0.003, 0.05, 1.0, 90.0, 1e4, 1e9])
def test_weights_of_sums(scale):
    """A whole block's at once, and one by one."""
    sums = np.random.default_rng(0).integers(1, 2000, 12 * BLOCK).astype(np.uint16)
    sums[: 5 * BLOCK : 3] = 0
    sums[::5] = 2000
    weights, each = np.full(12, np.nan, np.float32), np.full(12 * BLOCK, np.nan, np.float32)
    weights_of(sums, np.uint16(2000), np.float32(scale), weights)
    weight_of_each(sums, np.uint16(2000), np.float32(scale), each)
    np.testing.assert_allclose(weights, each.reshape(12, BLOCK).sum(1), rtol=1e-6)
    wanted = np.where(sums, np.exp(scale * (sums.astype(np.float64) - 2000)), 0)
    assert (each[sums == 0] == 0).all()
    # A straight line from each power of two to the next.
    assert (each[sums > 0] >= 0.99 * wanted[sums > 0]).all()
    assert (each[sums > 0] <= 1.08 * wanted[sums > 0] + 2e-38).all()


def test_the_line_is_as_much_too_high_as_is_said():
    sums = np.arange(1, 40000).astype(np.uint16)
    each = np.zeros(len(sums), np.float32)
    weight_of_each(sums, np.uint16(40000), np.float32(1e-3), each)
    ratio = each / np.exp(1e-3 * (sums - 40000.0))
    assert ratio.mean() == pytest.approx(code_sums.LINEAR, rel=5e-3)


def test_keys_picked():
    sums = np.random.default_rng(0).integers(1, 1500, (2, 5 * AT_ONCE)).astype(np.uint16)
    count, limits = 5 * AT_ONCE - 7, np.array([1400, 1450], np.uint16)
    sums[:, count:] = 0
    wanted = np.flatnonzero((sums >= limits[:, None]).any(0))
    for room in (500, 20):
        picked = np.zeros(room, np.int64)
        number = code_attention._pick(sums, limits, count, picked)
        assert number == min(room, len(wanted))
        np.testing.assert_array_equal(picked[:number], wanted[:number])


def test_clusters_opened():
    draw = np.random.default_rng(0)
    hopes, log_counts = draw.normal(-1, 1, 20000).astype(np.float32), np.zeros(20000, np.float32)
    log_counts[5::7] = -np.inf
    opened = np.zeros(20001, np.int64)
    few = code_attention._open(hopes[:1000], log_counts[:1000], opened)
    wanted = np.flatnonzero((hopes > 0) & (log_counts == 0))
    np.testing.assert_array_equal(opened[:few], wanted[wanted < 1000])
    number = code_attention._open(hopes, log_counts, opened)
    assert MOST_OPENED / 4 < number <= MOST_OPENED < len(wanted)
    np.testing.assert_array_equal(
        opened[:number], wanted[hopes[wanted] > 0.5 * np.ceil(2 * hopes[opened[:number]].min() - 1)]
    )


# --- attention


def roots(heads: int, width: int) -> np.ndarray:
    return np.broadcast_to(np.eye(width, dtype=np.float32), (heads, width, width))


def keys_in_groups(
    seed: int, heads: int, count: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Keys and values [K, S, H], the cluster of each key [K, S], and queries [K, 3, H] that look at one of them."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, -(-count // 12), (heads, count))
    centers, middle = draw.standard_normal((2, heads, labels.max() + 1, width))
    keys, values = (
        np.take_along_axis(c, labels[..., None], 1) + 0.6 * draw.standard_normal((heads, count, width))
        for c in (centers, middle)
    )
    queries = centers[:, :3] + 0.3 * draw.standard_normal((heads, 3, width))
    queries *= 9 / width
    return keys.astype(np.float32), values.astype(np.float32), labels, queries.astype(np.float32)


def coded(*arrays: np.ndarray, dtype: Any = np.float32, cuts: Any = ()) -> tuple[Blocks, CodedLayer]:
    """A layer that takes keys, values and labels in, from each of the cuts to the next."""
    heads, count, width = arrays[0].shape
    blocks = Blocks(heads, count, width, np.dtype(dtype), BLOCK_KEYS)
    layer = CodedLayer(blocks, 2 * count // 12 + count // 16 + 40)
    for first, last in zip((0, *cuts), (*cuts, count), strict=True):
        here = (a[:, first:last] for a in arrays)
        new = blocks.add(*here, roots(heads, width), None, None, 0.0)
        layer.adopt(new, np.zeros(heads, bool), roots(heads, width))
    return blocks, layer


def attend(layer: CodedLayer, queries: np.ndarray) -> tuple[Partial, np.ndarray]:
    """The partial of queries [K, G, H], and the counts of the halves."""
    heads, groups, width = queries.shape
    out = np.full((HALVES * heads, groups, width + 2), np.nan, np.float32)
    counts = layer.attend(queries, out)
    return join_halves(jnp.asarray(out)), counts


def dense(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    scores = np.einsum("kgh,ksh->kgs", queries, np.asarray(keys, np.float64))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("kgs,ksh->kgh", weights, np.asarray(values, np.float64)) / weights.sum(-1, keepdims=True)


def error(got: Partial, wanted: np.ndarray) -> float:
    return float((np.linalg.norm(finish(got) - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)).mean())


@pytest.mark.parametrize("cuts", [(), (2100, 2400)], ids=str)
@pytest.mark.parametrize("width", [10, 64])
def test_attention_is_what_the_codes_tell(width, cuts):
    """Against the definition, written out, but for the tables' rounding."""
    keys, values, labels, queries = keys_in_groups(0, 2, 3001, width)
    queries *= 2
    blocks, layer = coded(keys, values, labels, cuts=cuts)
    got, counts = attend(layer, queries)
    numerator, denominator = np.zeros(queries.shape), np.zeros(queries.shape[:2])
    picks, looks, clusters = 0, 0, 0
    for half in range(2 * HALVES):
        k = half // HALVES
        book, there = layer._books[k], np.flatnonzero(layer._sizes[half])
        turned = queries[k] @ book.of_queries
        variance = turned**2 @ book.errors
        bias = (0.5 * variance / (1 + variance / 4))[:, None]
        means = turned @ rounded(book, layer._mean_codes[half])[there].T + bias
        sizes, starts = layer._sizes[half, there], layer._starts[half, there]
        deviations = np.sqrt(turned**2 @ layer._variances[k])[:, None] * layer._spreads[half, there]
        estimates = np.exp(means + 0.5 * deviations**2 / (1 + deviations**2 / 4)) * sizes
        worth = WORTH * estimates.sum(1, keepdims=True)
        opened = (np.exp(means + REACH * deviations) > worth).any(0)
        owners = np.repeat(np.arange(len(there)), sizes)
        within = np.arange(len(owners)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        points = rounded(book, layer._codes[half]).reshape(-1, BLOCK, turned.shape[1])
        weights = np.exp(turned @ points[there[owners], within].T + bias) * opened[owners]
        total = weights.sum(1) + (estimates * ~opened).sum(1)
        exact = (weights > WORTH * total[:, None]).any(0)
        rows = (starts[owners] + within)[exact]
        values = layer._mean_values[half, there]
        left, far = np.where(exact, 0, weights), estimates * ~opened
        scores = np.exp(queries[k] @ blocks.keys[k, rows].T)
        numerator[k] += left @ values[owners] + far @ values + scores @ blocks.values[k, rows]
        denominator[k] += left.sum(1) + far.sum(1) + scores.sum(1)
        picks, looks, clusters = picks + exact.sum(), looks + opened.sum(), clusters + len(there)
    assert counts[:, 0].sum() == pytest.approx(looks, rel=0.05)
    assert counts[:, 1].sum() == pytest.approx(picks, rel=0.1)
    assert 0.1 * clusters < looks < 0.7 * clusters
    assert 100 < picks < 3000
    np.testing.assert_allclose(finish(got), numerator / denominator[..., None], atol=0.02)
    np.testing.assert_allclose(np.log(np.asarray(got.denominator)) + got.max, np.log(denominator), atol=0.02)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_codes_are_near_dense(dtype):
    keys, values, labels, queries = keys_in_groups(1, 3, 4000, 32)
    wanted = dense(queries, keys, values)
    _, layer = coded(keys, values, labels, dtype=dtype, cuts=(3500, 3517))
    got, counts = attend(layer, queries)
    assert error(got, wanted) < 0.03
    assert counts[:, 1].sum() < 0.5 * 3 * 4000
    assert layer.held == 3 * 4000


def test_every_key_has_one_place():
    """After a prompt and two updates."""
    keys, values, labels, _ = keys_in_groups(3, 2, 1000, 8)
    _, layer = coded(keys, values, labels, cuts=(800, 817))
    for k in range(2):
        here = np.s_[HALVES * k : HALVES * k + HALVES]
        starts, sizes = layer._starts[here].ravel(), layer._sizes[here].ravel()
        rows = [np.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        np.testing.assert_array_equal(np.sort(np.concatenate(rows)), np.arange(1000))


def test_few_keys_do_not_teach_many():
    """Codes that were learned from the first keys of a text are learned anew when there are many more."""
    keys, values, labels, queries = keys_in_groups(4, 1, 2000, 16)
    keys[:, 40:] += 5
    _, layer = coded(keys, values, labels, cuts=(40, 200, 900))
    got, _ = attend(layer, queries)
    assert error(got, dense(queries, keys, values)) < 0.05


def test_more_keys_are_worth_it_than_there_is_room_for():
    """Four query heads attend to 1,500 keys each, all different, evenly."""
    draw = np.random.default_rng(5)
    keys = 0.01 * draw.standard_normal((1, 12000, 8))
    for g in range(4):
        keys[0, g::8, g] += 12
    values, queries = draw.standard_normal((1, 12000, 8)), np.eye(8)[None, :4]
    labels = np.tile(np.arange(12000) % 8 * 100, (1, 1)) + draw.integers(0, 100, (1, 12000))
    arrays = keys.astype(np.float32), values.astype(np.float32), labels
    _, layer = coded(*arrays)
    got, counts = attend(layer, queries.astype(np.float32))
    assert counts[:, 1].max() <= MOST
    assert np.abs(finish(got) - dense(queries, keys, values)).max() < 0.05


def test_large_scores_are_of_keys_that_there_are():
    """What the codes promise may be far above any score; what is left of the estimate must not stand in its place."""
    keys, values, labels, queries = keys_in_groups(6, 1, 300, 8)
    queries *= 1e3
    got, _ = attend(coded(keys, values, labels)[1], queries)
    answers, scores = np.asarray(finish(got))[0], queries[0] @ keys[0].T
    for g in range(3):
        which = np.argmin(((values[0] - answers[g]) ** 2).sum(1))
        np.testing.assert_allclose(answers[g], values[0, which], atol=1e-3)
        np.testing.assert_allclose(got.max[0, g] + np.log(got.denominator[0, g]), scores[g, which], rtol=1e-4)
        assert scores[g, which] > np.quantile(scores[g], 0.95)


def test_query_heads_that_look_at_opposite_ends():
    """To one of them, the keys that the other looks at are worth nothing at all."""
    keys = np.zeros((1, 8012, 8), np.float32)
    keys[0, 8000:, 0] = 1
    values = np.random.default_rng(0).standard_normal((1, 8012, 8)).astype(np.float32)
    labels = (np.arange(8012) >= 8000)[None].astype(np.int64)
    queries = np.zeros((1, 2, 8), np.float32)
    queries[0, :, 0] = 20, -100
    got, _ = attend(coded(keys, values, labels)[1], queries)
    np.testing.assert_allclose(finish(got), dense(queries, keys, values), atol=2e-3)


@pytest.mark.parametrize("number", [16, 16000])
def test_an_even_estimate_reads_every_value(number):
    values = np.random.default_rng(0).standard_normal((number, 8)).astype(np.float32)
    sums, totals = np.zeros((2, 8), np.float32), np.zeros(2, np.float32)
    estimate(np.ones((2, number), np.float32), values, 8, sums, totals)
    np.testing.assert_allclose(totals, number)
    np.testing.assert_allclose(sums, np.tile(values.sum(0), (2, 1)), rtol=1e-3, atol=1e-2)


@njit
def estimate(weights, mean_values, width, sums, totals):
    code_attention._estimate(weights, mean_values, width, sums, totals)


@pytest.mark.parametrize("width", [3, 80, 96])
@pytest.mark.parametrize("groups", [1, 5, 8])
def test_query_heads_and_head_dims(groups, width):
    keys, values, labels, queries = keys_in_groups(9, 2, 2000, width)
    queries = np.tile(queries, (1, 3, 1))[:, :groups]
    got, _ = attend(coded(keys, values, labels)[1], queries)
    assert error(got, dense(queries, keys, values)) < 0.08


@pytest.mark.parametrize("count", [1, 2, 25])
@pytest.mark.parametrize("alike", [False, True])
def test_few_keys(count, alike):
    keys, values, labels, _ = keys_in_groups(10, 2, count, 8)
    queries = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
    keys = np.ones_like(keys) if alike else keys
    got, _ = attend(coded(keys, values, labels)[1], queries)
    np.testing.assert_allclose(finish(got), dense(queries, keys, values), atol=1e-3)


def test_more_clusters_have_hope_than_there_is_room_for():
    """Evenly spread attention to 4,500 clusters in each half."""
    draw = np.random.default_rng(11)
    keys, values = (draw.standard_normal((1, 108000, 4)).astype(np.float32) for _ in range(2))
    queries = 3 * draw.standard_normal((1, 2, 4)).astype(np.float32)
    labels = np.argsort(np.argsort(keys[..., 0], axis=1), axis=1) // 12
    values += 3
    got, counts = attend(coded(keys, values, labels)[1], queries)
    assert 500 < counts[:, 0].max() <= MOST_OPENED
    assert error(got, dense(queries, keys, values)) < 0.02


def test_a_failure_ends_all_threads(monkeypatch):
    keys, values, labels, queries = keys_in_groups(12, 3, 300, 8)
    _, layer = coded(keys, values, labels)
    monkeypatch.setattr(host_layer, "WORTH_A_THREAD", 0)
    monkeypatch.setattr(host_layer, "CORES", 4)
    calls = []

    def failing(*arguments: Any) -> None:
        calls.append(threading.current_thread().name)
        raise ZeroDivisionError("as planned")

    right, layer.compiled = layer.compiled, failing
    with pytest.raises(ZeroDivisionError, match="as planned"):
        attend(layer, queries)
    assert len(calls) == 4
    layer.compiled = right
    assert error(attend(layer, queries)[0], dense(queries, keys, values)) < 0.05


def test_no_query_and_no_keys():
    keys, values, labels, queries = keys_in_groups(7, 2, 300, 8)
    got, _ = attend(coded(keys, values, labels)[1], 0 * queries)
    np.testing.assert_allclose(finish(got), np.repeat(values.mean(1, keepdims=True), 3, axis=1), atol=0.02)
    empty = CodedLayer(Blocks(2, 300, 8, np.dtype(np.float32), BLOCK_KEYS), 40)
    got, counts = attend(empty, queries)
    assert (np.asarray(got.max) == -np.inf).all()
    np.testing.assert_array_equal(finish(got), 0)
    assert counts[:, :3].sum() == 0


def test_threads_change_nothing(monkeypatch):
    keys, values, labels, queries = keys_in_groups(8, 3, 900, 16)
    _, layer = coded(keys, values, labels)
    alone, _ = attend(layer, queries)
    monkeypatch.setattr(host_layer, "WORTH_A_THREAD", 0)
    monkeypatch.setattr(host_layer, "CORES", 4)
    shared, _ = attend(layer, queries)
    np.testing.assert_array_equal(finish(shared), finish(alone))


# --- a request


def settings(**changes: Any) -> rajax.RetrievalConfig:
    usual = {"sink_tokens": 3, "window": 9, "update_every": 20, "host_dtype": "float32"}
    return rajax.RetrievalConfig(index="wave", key_codes=True, **{**usual, **changes})


def test_a_request_is_near_dense_and_repeats():
    """Through 90 tokens of growth."""
    model, (text,) = random_llama(20), random_tokens(20, 490)
    wanted = rajax.logits(model, text)
    got = rajax.logits(model, text, settings(), decode_from=400)
    ranked = rajax.RetrievalConfig(
        index="wave", sink_tokens=3, window=9, update_every=20, whole_heads=0.0, max_clusters=8, top_p=0.5
    )
    others = rajax.logits(model, text, ranked, decode_from=400)
    assert np.abs(got - wanted).mean() < 0.5 * np.abs(others - wanted).mean()
    np.testing.assert_array_equal(rajax.logits(model, text, settings(), decode_from=400), got)


def test_queries_that_are_all_zero_shape_nothing():
    keys = jnp.asarray(np.random.default_rng(0).standard_normal((1, 2, 90, 8)), jnp.float32)
    positions = np.arange(0, 90, 2)
    queries = jnp.zeros((1, 2, 3, len(positions), 8))
    _, root, *_ = wave._learn(keys, queries, positions, jnp.int32(90), sinks=0, shaped=True)
    np.testing.assert_allclose(root, np.broadcast_to(np.eye(8), (2, 8, 8)), atol=1e-5)
    book = key_codes.learn(np.asarray(keys[0, 0]), np.asarray(root[0]))
    assert np.isfinite(book.of_queries).all()


def test_codes_are_learned_by_threads_that_no_host_call_waits_for(monkeypatch):
    """JAX's host calls wait for those of `host_call.workers`, and what adopts the codes may wait for JAX."""
    learners, learn = set(), key_codes.learn

    def noted(*arguments: Any) -> key_codes.Codebook:
        learners.add(threading.current_thread().name)
        return learn(*arguments)

    monkeypatch.setattr(key_codes, "learn", noted)
    monkeypatch.setattr(key_codes, "warm_up", lambda width: None)  # which learns as well
    model, (text,) = random_llama(23), random_tokens(23, 200)
    rajax.generate(model, text, max_new_tokens=1, retrieval=settings())
    assert learners
    assert all(name.startswith("rajax-build") for name in learners)


def test_a_prompt_that_offloads_nothing_grows():
    model, (text,) = random_llama(22), random_tokens(22, 200)
    got = rajax.logits(model, text, settings(), decode_from=8)
    wanted = rajax.logits(model, text)
    assert np.abs(got - wanted).mean() < 0.05 * np.abs(wanted).mean()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_codes": 1}, "key_codes must be true or false, found 1"),
        (
            {"wave_buffer": True},
            "key_codes=True is for the host only: leave wave_buffer at None, or set it to False",
        ),
        ({"top_p": 0.5}, "top_p means nothing to key_codes=True: leave it at None"),
        ({"outliers": 0.1}, "outliers means nothing to key_codes=True: leave it at 0.02"),
        ({"whole_heads": 0.0}, "whole_heads means nothing to key_codes=True: leave it at None"),
        (
            {"max_clusters": 5, "min_clusters": 2},
            "min_clusters means nothing to key_codes=True: leave it at 8",
        ),
        ({"index": "scann"}, "key_codes means nothing to index='scann': leave it at False"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        rajax.RetrievalConfig(**{"index": "wave", "key_codes": True, **changes})
