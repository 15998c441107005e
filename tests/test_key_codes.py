"""Codes of keys: their sums in registers, what they lose, and attention by them, against the definition written out."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numba import njit
from random_llama import random_llama, random_tokens

import rajax
from rajax import code_attention, host_layer, key_codes
from rajax.clusters import Blocks
from rajax.code_attention import MOST, WORTH
from rajax.coded_layer import CodedLayer
from rajax.exact_attention import HALVES
from rajax.kernels import Partial, code_sums, finish
from rajax.kernels.code_sums import BLOCK, CENTROIDS, HIGHEST
from rajax.models.wave import BLOCK_KEYS
from rajax.wave_host import join_halves


@njit
def summed(tables, codes, first, stop, sums, at):
    code_sums.sum_codes(tables, codes, first, stop, sums, at)


@njit
def summed_plainly(tables, codes, first, stop, sums, at):
    for block in range(first, stop):
        code_sums._sum_plainly(tables, codes, block, sums, at + BLOCK * (block - first))


@pytest.mark.parametrize("number", [2, 10, 32, 64])
@pytest.mark.parametrize("heads", [1, 2, 3, 5])
@pytest.mark.parametrize("compiled", [summed, summed_plainly])
def test_sums_of_codes(compiled, heads, number):
    draw = np.random.default_rng(heads * number)
    codes = draw.integers(0, 256, (5, number, BLOCK // 2)).astype(np.uint8)
    tables = draw.integers(0, HIGHEST + 1, (heads, number, CENTROIDS)).astype(np.uint8)
    tables[0] = HIGHEST  # the largest sum that there can be
    sums = np.full((heads, 4 * BLOCK), 7, np.uint16)
    compiled(tables, codes, 2, 5, sums, BLOCK // 2)
    wanted = code_sums.sum_codes_reference(tables, codes)
    np.testing.assert_array_equal(sums[:, BLOCK // 2 : 7 * BLOCK // 2], wanted[:, 2 * BLOCK :])
    assert (sums[:, : BLOCK // 2] == 7).all()
    assert (sums[:, 7 * BLOCK // 2 :] == 7).all()
    assert wanted[0, 0] == number * HIGHEST


def rounded(book: key_codes.Codebook, codes: np.ndarray) -> np.ndarray:
    """The coordinates [64 N, W] that codes [N, M, 32] stand for: what a table of each coordinate finds."""
    number = codes.shape[1]
    columns = []
    for m in range(number):
        for w in range(key_codes.WIDTH):
            # A centroid's number, found by a table that counts from 0, tells its coordinate.
            table = np.zeros((1, number, CENTROIDS), np.uint8)
            table[0, m] = np.arange(CENTROIDS)
            columns.append(book.centroids[m, code_sums.sum_codes_reference(table, codes)[0], w])
    return np.stack(columns, axis=1)


@pytest.mark.parametrize("width", [3, 8, 10, 64])
def test_codes_name_the_nearest_centroids(width):
    draw = np.random.default_rng(width)
    keys = draw.standard_normal((300, width)).astype(np.float32) * np.linspace(
        0.1, 3, width, dtype=np.float32
    )
    root = np.linalg.qr(draw.standard_normal((width, width)))[0] * np.linspace(1, 2, width)
    root = (root @ root.T).astype(np.float32)
    book = key_codes.learn(keys, root)
    codes = np.full((6, len(book.centroids), BLOCK // 2), 0xA5, np.uint8)
    key_codes.encode(book, keys[:100], 7, codes)
    key_codes.encode(book, keys[100:], 107, codes)
    got, points = rounded(book, codes), keys @ book.to_coordinates
    pairs = points.reshape(len(keys), -1, 1, key_codes.WIDTH)
    nearest = ((pairs - book.centroids) ** 2).sum(-1).min(-1).sum(-1)
    np.testing.assert_allclose(((got[7:307] - points) ** 2).sum(1), nearest, rtol=1e-3, atol=1e-5)
    # What was there before and behind is there still.
    before = rounded(book, np.full_like(codes, 0xA5))
    np.testing.assert_array_equal(np.delete(got, np.s_[7:307], 0), np.delete(before, np.s_[7:307], 0))
    queries = draw.standard_normal((9, width)).astype(np.float32)
    np.testing.assert_allclose((queries @ book.of_queries) @ points.T, queries @ keys.T, rtol=1e-3, atol=1e-3)
    apart = points - got[7:307]
    np.testing.assert_allclose(book.errors, apart.T @ apart / len(keys), atol=1e-3)
    assert np.trace(book.errors) < 0.2 * (points**2).mean(0).sum()


def test_codes_of_keys_that_are_all_alike():
    keys = np.ones((40, 8), np.float32)
    book = key_codes.learn(keys, np.eye(8, dtype=np.float32))
    assert np.isfinite(book.centroids).all()
    np.testing.assert_allclose(book.errors, 0, atol=1e-10)


def test_weights_of_clusters_and_keys_picked():
    """Of keys that do not begin where their sums do."""
    draw = np.random.default_rng(0)
    sizes = draw.integers(1, 17, 50).astype(np.int32)
    starts = (1000 + np.cumsum(sizes) - sizes).astype(np.int32)
    count, offset = int(sizes.sum()), 40 - 1000
    sums = np.full((2, 40 + count + BLOCK), 65535, np.uint16)  # what is beside them must not count
    sums[:, 40 : 40 + count] = draw.integers(500, 1500, (2, count))
    weights = np.full(50, np.nan, np.float32)
    total = code_attention._weigh_clusters(sums[0], starts, sizes, offset, np.float32(0.02), 1500.0, weights)
    wanted = np.exp(0.02 * (sums[0, 40 : 40 + count] - 1500.0))
    np.testing.assert_allclose(weights, np.add.reduceat(wanted, starts - 1000), rtol=3e-4)
    np.testing.assert_allclose(total, wanted.sum(), rtol=3e-4)

    limits = np.array([1400, 1450], np.uint16)
    wanted = np.flatnonzero((sums[:, 40 : 40 + count] >= limits[:, None]).any(0))
    for room in (500, 20):
        chosen = np.zeros((3, room), np.int64)
        number = code_attention._pick(sums, limits, 1000, 1000 + count, offset, starts, sizes, 5, chosen, 0)
        assert number == min(room, len(wanted))
        places, owners, at = chosen[:, :number]
        np.testing.assert_array_equal(places, 1000 + wanted[:number])
        np.testing.assert_array_equal(at, 40 + wanted[:number])
        np.testing.assert_array_equal(owners, 5 + np.searchsorted(starts, places, side="right") - 1)


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


def coded(
    *arrays: np.ndarray, whole: Any = False, dtype: Any = np.float32, outliers: float = 0.0, cuts: Any = ()
) -> tuple[Blocks, CodedLayer]:
    """A layer that takes keys, values and labels in, from each of the cuts to the next."""
    heads, count, width = arrays[0].shape
    blocks = Blocks(heads, count, width, np.dtype(dtype), BLOCK_KEYS)
    layer = CodedLayer(blocks, 2 * count // 12 + count // 16 + 40)
    for first, last in zip((0, *cuts), (*cuts, count), strict=True):
        here = (a[:, first:last] for a in arrays)
        new = blocks.add(*here, roots(heads, width), None, None, outliers)
        layer.adopt(new, np.broadcast_to(whole, heads), roots(heads, width))
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
    blocks, layer = coded(keys, values, labels, cuts=cuts)
    got, counts = attend(layer, queries)
    numerator, denominator = np.zeros(queries.shape), np.zeros(queries.shape[:2])
    assert counts[:, 2].reshape(2, HALVES).sum(1).tolist() == [3001, 3001]
    picks = 0
    for k in range(2):
        book = layer._books[k]
        points = rounded(book, layer._codes[k])
        turned = queries[k] @ book.of_queries
        variance = np.einsum("gw,wv,gv->g", turned, book.errors, turned)
        estimates = turned @ points.T + (0.5 * variance / (1 + variance / 4))[:, None]
        for spans in layer._spans[HALVES * k : HALVES * k + HALVES]:
            rows = np.concatenate([np.arange(start, stop) for _, _, start, stop in spans])
            clusters = np.concatenate([np.arange(first, last) for first, last, _, _ in spans])
            weights = np.exp(estimates[:, rows])
            exact = (weights > WORTH * weights.sum(1, keepdims=True)).any(0)
            picks += exact.sum()
            owners = np.repeat(clusters, layer._sizes[k, clusters])
            left = np.where(exact, 0, weights)
            scores = np.exp(queries[k] @ blocks.keys[k, rows[exact]].T)
            numerator[k] += left @ layer._mean_values[k, owners] + scores @ blocks.values[k, rows[exact]]
            denominator[k] += left.sum(1) + scores.sum(1)
    assert counts[:, 0].sum() == pytest.approx(picks, rel=0.1)
    assert 100 < picks < 3000
    np.testing.assert_allclose(finish(got), numerator / denominator[..., None], atol=0.02)
    np.testing.assert_allclose(np.log(np.asarray(got.denominator)) + got.max, np.log(denominator), atol=0.02)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("outliers", [0.0, 0.05])
def test_codes_are_near_dense(dtype, outliers):
    keys, values, labels, queries = keys_in_groups(1, 3, 4000, 32)
    wanted = dense(queries, keys, values)
    _, layer = coded(keys, values, labels, dtype=dtype, outliers=outliers, cuts=(3500, 3517))
    got, counts = attend(layer, queries)
    assert error(got, wanted) < 0.03
    assert counts[:, 1].sum() < 0.5 * 3 * 4000
    assert layer.held == 3 * 4000


@pytest.mark.parametrize("cuts", [(), (300, 420)], ids=str)
def test_a_whole_head_is_dense_attention(cuts):
    keys, values, labels, queries = keys_in_groups(2, 2, 500, 16)
    _, layer = coded(keys, values, labels, whole=[True, False], cuts=cuts)
    got, counts = attend(layer, queries)
    wanted = dense(queries, keys, values)
    np.testing.assert_allclose(finish(got)[0], wanted[0], atol=1e-4)
    assert counts[:HALVES, 1].sum() == 500
    assert counts[HALVES:, 1].sum() < 500


def test_every_key_has_one_place():
    """After a prompt and two updates, with outliers."""
    keys, values, labels, _ = keys_in_groups(3, 2, 1000, 8)
    _, layer = coded(keys, values, labels, outliers=0.1, cuts=(800, 817))
    for k in range(2):
        rows = [
            np.arange(a, b) for row in layer._spans[HALVES * k : HALVES * k + HALVES] for _, _, a, b in row
        ]
        rows += [np.arange(a, b) for row in layer._apart[HALVES * k : HALVES * k + HALVES] for a, b in row]
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
    assert counts[:, 0].max() <= MOST
    assert np.abs(finish(got) - dense(queries, keys, values)).max() < 0.05


def test_large_scores_overflow_nothing():
    keys, values, labels, queries = keys_in_groups(6, 1, 300, 8)
    got, _ = attend(coded(keys, values, labels)[1], 1e3 * queries)
    assert np.isfinite(np.asarray(finish(got))).all()
    assert (np.asarray(got.denominator) > 0).all()


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
    _, layer = coded(keys, values, labels, outliers=0.02)
    alone, _ = attend(layer, queries)
    monkeypatch.setattr(host_layer, "WORTH_A_THREAD", 0)
    monkeypatch.setattr(host_layer, "CORES", 4)
    shared, _ = attend(layer, queries)
    np.testing.assert_array_equal(finish(shared), finish(alone))


# --- a request


def settings(**changes: Any) -> rajax.RetrievalConfig:
    usual = {"sink_tokens": 3, "window": 9, "update_every": 20, "host_dtype": "float32", "whole_heads": 0.0}
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


@pytest.mark.parametrize("changes", [{"whole_heads": 1.0}, {"outliers": 1.0}], ids=str)
def test_everything_attended_to_equals_dense(changes):
    model, (text,) = random_llama(21), random_tokens(21, 300)
    # What is clustered later is in no whole head: all of it stays in the window.
    got = rajax.logits(model, text, settings(update_every=100, **changes), decode_from=250)
    np.testing.assert_allclose(got, rajax.logits(model, text), atol=1e-4)


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
