"""Clusters attended to on the host in compiled code, against the device's plain JAX, and a request of it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from random_llama import random_llama, random_tokens

import rajax
from rajax import host_layer, wave_host
from rajax.clusters import Blocks, NewClusters
from rajax.exact_attention import HALVES
from rajax.kernels import Partial, finish, merge
from rajax.models.wave import BLOCK_KEYS, Clusters, SelectionRule, attend_blocks, second_order, select
from rajax.session import Session, prefill
from rajax.wave_host import HostWave, HostWaveStore, LayerClusters, join_halves


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def identity(heads: int, width: int) -> np.ndarray:
    return np.broadcast_to(np.eye(width, dtype=np.float32), (heads, width, width))


def layer(
    seed: int, heads: int, count: int, width: int, dtype: Any, rule: SelectionRule, outliers: float = 0.0
) -> tuple[Blocks, NewClusters, LayerClusters]:
    """A layer's keys in random clusters, twice: as the host's blocks, and as compiled code reads them."""
    labels = np.random.default_rng(seed).integers(0, -(-count // 12), (heads, count))
    blocks = Blocks(heads, count, width, np.dtype(dtype), BLOCK_KEYS)
    root = identity(heads, width)
    arrays = draw(seed, heads, count, width), draw(seed + 1, heads, count, width), labels, root
    new = blocks.add(*arrays, None, None, outliers)
    clusters = LayerClusters(blocks, -(-new.sizes.shape[1] // HALVES), rule)
    return blocks, new, clusters


def attend(clusters: LayerClusters, queries: np.ndarray) -> tuple[Partial, np.ndarray]:
    """The partial of queries [K, G, H], and the counts of the halves."""
    heads, groups, width = queries.shape
    out = np.full((HALVES * heads, groups, width + 2), np.nan, np.float32)
    counts = clusters.attend(queries, out)
    return join_halves(jnp.asarray(out)), counts


def reference(
    blocks: Blocks, new: NewClusters, queries: np.ndarray, rule: SelectionRule, half: int
) -> tuple[Partial, list[set[int]]]:
    """The same of one half of the clusters by `models.wave`, and the clusters chosen per head."""
    rows = slice(half, None, HALVES)
    with np.errstate(divide="ignore"):
        log_counts = np.log(new.sizes[:, rows].astype(np.float32))
    arrays = (
        new.means[:, rows],
        new.mean_values[:, rows],
        log_counts,
        new.spreads[:, rows],
        new.radii[:, rows],
    )
    device = Clusters(*(jnp.asarray(a)[None] for a in arrays), cached=jnp.zeros((1, *log_counts.shape), bool))
    got = select(queries[None], device, jnp.ones(1, bool), rule)
    ids, parts = np.asarray(got.ids)[0], [got.estimated]
    for k, row in enumerate(ids):
        for c in row[row >= 0]:
            start, size = new.starts[k, rows][c], new.sizes[k, rows][c]
            key, value = (np.zeros((1, BLOCK_KEYS, queries.shape[2]), np.float32) for _ in range(2))
            key[0, :size], value[0, :size] = (
                blocks.keys[k, start : start + size],
                blocks.values[k, start : start + size],
            )
            owner = np.array([k], np.int32)
            parts.append(attend_blocks(queries[None], key, value, owner, np.array([size], np.int32)))
    return merge(*parts), [set(row[row >= 0].tolist()) for row in ids]


def rule(**settings: Any) -> SelectionRule:
    return SelectionRule(
        **{"rank_by": "spread", "share": None, "top_p": 0.9, "least": 2, "most": 12, **settings}
    )


@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 3, 16), (3, 4, 10), (2, 5, 64)], ids=str)
@pytest.mark.parametrize(
    "changes",
    [{}, {"rank_by": "estimate"}, {"share": 0.1, "most": 40}, {"top_p": 0.0}, {"top_p": 1.0}, {"most": 400}],
    ids=str,
)
def test_compiled_attention_equals_plain_jax(shape, changes):
    heads, groups, width = shape
    chosen = rule(**changes)
    blocks, new, clusters = layer(0, heads, 700, width, np.float32, chosen)
    clusters.adopt(new, np.zeros(heads, bool), identity(heads, width))
    queries = 0.7 * draw(3, heads, groups, width)
    got, counts = attend(clusters, queries)
    # `LayerClusters` shares the bounds out to the halves.
    half_rule = SelectionRule(
        chosen.rank_by, chosen.share, chosen.top_p, -(-chosen.least // HALVES), -(-chosen.most // HALVES)
    )
    if chosen.most == 400:  # more than there are: `select` wants one more than it retrieves
        half_rule = SelectionRule(
            chosen.rank_by, None, chosen.top_p, half_rule.least, new.sizes.shape[1] // 2 - 1
        )
    parts = []
    for half in range(HALVES):
        part, ids = reference(blocks, new, queries, half_rule, half)
        parts.append(part)
        if chosen.most != 400:
            assert counts[half::HALVES, 0].tolist() == [len(row) for row in ids]
            sizes = new.sizes[:, half::HALVES]
            wanted = [int(sizes[k, sorted(row)].sum()) for k, row in enumerate(ids)]
            assert counts[half::HALVES, 1].tolist() == wanted
    wanted = merge(*parts)
    np.testing.assert_allclose(finish(got), finish(wanted)[0], atol=5e-4)
    if chosen.most == 400:
        return
    np.testing.assert_allclose(
        np.log(np.asarray(got.denominator)) + got.max,
        np.log(wanted.denominator[0]) + wanted.max[0],
        atol=1e-4,
    )


def softmax_parts(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums of exp(scores [G, n]) values [n, H], and of exp(scores)."""
    weights = np.exp(scores.astype(np.float64))
    return weights @ values, weights.sum(1)


@pytest.mark.parametrize("least_open", [1, 3])
@pytest.mark.parametrize("open_p", [0.0, 0.5, 0.9])
def test_groups_that_are_not_opened_are_estimated(open_p, least_open, monkeypatch):
    """Against the definition, written out."""
    monkeypatch.setattr(wave_host, "OPEN_P", open_p)
    monkeypatch.setattr(wave_host, "LEAST_OPEN", least_open)
    heads, groups, width, chosen = 2, 3, 16, rule(least=6, most=6)
    blocks, new, clusters = layer(20, heads, 5000, width, np.float32, chosen)
    clusters.adopt(new, np.zeros(heads, bool), identity(heads, width))
    table = clusters.groups[-1]
    queries = draw(21, heads, groups, width)
    got, counts = attend(clusters, queries)
    numerator, denominator = np.zeros((heads, groups, width)), np.zeros((heads, groups))
    for row in range(HALVES * heads):
        k = row // HALVES
        far = queries[k] @ table.means[row].T + table.log_masses[row]
        shares = np.exp(far - far.max(1, keepdims=True))
        ranks = (shares / shares.sum(1, keepdims=True)).sum(0) * table.importances[row]
        order, left = np.argsort(-ranks), ranks.sum()
        opened = []
        for group in order:
            if len(opened) >= least_open and left <= (1 - open_p) * ranks.sum():
                break
            opened.append(group)
            left -= ranks[group]
        assert len(opened) < len(ranks), "some stay closed"
        starts = np.concatenate([[0], table.ends[row]])
        near = np.concatenate([np.arange(starts[g], starts[g + 1]) for g in opened])
        scores = queries[k] @ clusters.means[row, near].T + clusters.log_masses[row, near]
        shares = np.exp(scores - scores.max(1, keepdims=True))
        ranks = (shares / shares.sum(1, keepdims=True)).sum(0) * clusters.importances[row, near]
        retrieved = np.argsort(-ranks)[:3]
        closed = np.setdiff1d(np.arange(len(order)), opened)
        rest = np.setdiff1d(np.arange(len(near)), retrieved)
        keys = np.concatenate(
            [clusters.starts[row, c] + np.arange(clusters.sizes[row, c]) for c in near[retrieved]]
        )
        parts = [
            (far[:, closed], table.mean_values[row, closed]),
            (scores[:, rest], clusters.mean_values[row, near[rest]]),
            (queries[k] @ blocks.keys[k, keys].T, blocks.values[k, keys]),
        ]
        for part in parts:
            sums, total = softmax_parts(*part)
            numerator[k] += sums
            denominator[k] += total
        assert counts[row, :2].tolist() == [3, len(keys)]
        assert len(near) + len(order) <= counts[row, 2] <= len(near) + len(order) + 3 * len(opened)
    np.testing.assert_allclose(finish(got), numerator / denominator[..., None], atol=2e-3)
    np.testing.assert_allclose(np.log(np.asarray(got.denominator)) + got.max, np.log(denominator), atol=2e-3)


def test_groups_hold_all_keys_once():
    """After a prompt and two updates, one of them of an odd number of clusters."""
    heads, width = 3, 16
    labels = np.random.default_rng(0).integers(0, 400, (heads, 5000))
    blocks = Blocks(heads, 6000, width, np.dtype(np.float32), BLOCK_KEYS)
    root, arrays = identity(heads, width), (draw(1, heads, 5000, width), draw(2, heads, 5000, width))
    clusters = LayerClusters(blocks, 400, rule())
    for first, last in ((0, 4600), (4600, 4741), (4741, 5000)):
        here = slice(first, last)
        taken = (a[:, here] for a in (*arrays, labels))
        clusters.adopt(blocks.add(*taken, root, None, None, 0.0), np.zeros(heads, bool), root)
    ends = np.concatenate([g.ends for g in clusters.groups], axis=1)
    assert (np.diff(ends, axis=1) >= 0).all()
    assert (ends[:, -1] == clusters.used).all()
    counts = np.exp(np.concatenate([g.log_masses for g in clusters.groups], axis=1))
    spreads = np.concatenate([g.importances for g in clusters.groups], axis=1)
    keys = (counts / np.exp(second_order(spreads))).reshape(heads, -1).sum(1)
    np.testing.assert_allclose(keys, 5000, rtol=1e-4)
    assert clusters.sizes.reshape(heads, -1).sum(1).tolist() == [5000] * heads


@pytest.mark.parametrize("outliers", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_whole_head_and_all_clusters_retrieved_are_dense_attention(dtype, outliers):
    heads, count, width = 2, 500, 16
    everything = rule(share=1.0, most=1000)
    blocks, new, clusters = layer(5, heads, count, width, dtype, everything, outliers)
    clusters.adopt(new, np.array([True, False]), identity(heads, width))
    queries = draw(7, heads, 3, width)
    got, counts = attend(clusters, queries)
    assert counts[:, 1].sum() == heads * count
    keys, values = (np.asarray(a, np.float32)[:, :count] for a in (blocks.keys, blocks.values))
    scores = np.einsum("kgh,ksh->kgs", queries, keys)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.einsum("kgs,ksh->kgh", weights, values) / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(finish(got), wanted, atol=5e-4)


def test_a_key_unlike_its_cluster_is_found():
    """A query's one match is in a cluster whose mean the query turns away from."""
    width = 16
    centers, noise = 4 * draw(30, 40, width), 0.3 * draw(31, 800, width)
    labels = np.repeat(np.arange(40), 20)
    keys, values = (centers[labels] + noise)[None], draw(32, 1, 800, width)
    query = 2 * centers[7] / np.linalg.norm(centers[7])
    keys[0, 500] -= centers[labels[500]] * 0.5
    keys[0, 500] += 2 * centers[7]
    errors = []
    for outliers in (0.0, 0.01):
        blocks = Blocks(1, 800, width, np.dtype(np.float32), BLOCK_KEYS)
        new = blocks.add(keys, values, labels[None], identity(1, width), None, None, outliers)
        clusters = LayerClusters(blocks, 100, rule(least=1, most=2))
        clusters.adopt(new, np.zeros(1, bool), identity(1, width))
        got = finish(attend(clusters, query[None, None])[0])
        scores = keys[0] @ query
        weights = np.exp(scores - scores.max())
        wanted = weights @ values[0] / weights.sum()
        errors.append(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
    assert errors[0] > 0.5
    assert errors[1] < 0.05


def test_large_scores_overflow_nothing():
    _, new, clusters = layer(8, 1, 300, 8, np.float32, rule())
    clusters.adopt(new, np.zeros(1, bool), identity(1, 8))
    got, _ = attend(clusters, 1e3 * draw(9, 1, 2, 8))
    assert np.isfinite(np.asarray(finish(got))).all()
    assert (np.asarray(got.denominator) > 0).all()


def test_no_clusters_are_no_keys():
    _, _, clusters = layer(10, 2, 300, 8, np.float32, rule())
    got, counts = attend(clusters, draw(11, 2, 3, 8))
    assert (np.asarray(got.max) == -np.inf).all()
    np.testing.assert_array_equal(finish(got), 0)
    assert counts[:, :2].sum() == 0


def test_threads_change_nothing(monkeypatch):
    _, new, clusters = layer(12, 3, 900, 16, np.float32, rule())
    clusters.adopt(new, np.zeros(3, bool), identity(3, 16))
    queries = draw(13, 3, 3, 16)
    alone, _ = attend(clusters, queries)
    monkeypatch.setattr(host_layer, "WORTH_A_THREAD", 0)
    monkeypatch.setattr(host_layer, "CORES", 4)
    shared, _ = attend(clusters, queries)
    np.testing.assert_array_equal(finish(shared), finish(alone))


def test_more_heads_are_whole_in_short_texts():
    wave = object.__new__(HostWave)
    shares = [wave.whole_share(keys) for keys in (0, 1000, 8192, 32768, 1 << 20)]
    np.testing.assert_allclose(shares, [1, 1, 0.5, 0.125, 0.03])


def settings(**changes: Any) -> rajax.RetrievalConfig:
    usual = {"wave_buffer": False, "sink_tokens": 3, "window": 9, "update_every": 20, "host_dtype": "float32"}
    usual["whole_heads"] = 0.0
    return rajax.RetrievalConfig(index="wave", **{**usual, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"projection": False},
        {"whole_heads": 0.5},
        {"whole_heads": 1.0},
        {"outliers": 0.2},
        {"outliers": 1.0},
        {"outliers": 0.9, "whole_heads": 0.5},
        {"update_every": 1},
    ],
    ids=str,
)
def test_everything_retrieved_equals_dense(changes):
    """Through 90 tokens of growth."""
    model, (text,) = random_llama(20), random_tokens(20, 490)
    got = rajax.logits(model, text, settings(retrieved_share=1.0, **changes), decode_from=400)
    np.testing.assert_allclose(got, rajax.logits(model, text), atol=1e-4)


def test_host_and_device_choose_alike():
    """With as many clusters as there are for the best, the two ways differ by the halves' choice alone."""
    model, (text,) = random_llama(21), random_tokens(21, 490)
    dense = rajax.logits(model, text)
    errors = []
    for buffer in (True, False):
        config = settings(
            wave_buffer=buffer, max_clusters=12, min_clusters=12, block_cache=0.0, whole_heads=0.0
        )
        errors.append(np.abs(rajax.logits(model, text, config, decode_from=400) - dense).mean())
    assert errors[1] == pytest.approx(errors[0], rel=0.2)


def test_the_device_keeps_the_static_zone_alone():
    model, (text,) = random_llama(22), random_tokens(22, 600)
    with Session(model, [580], [600], settings()) as session:
        prefill(model, [text[:580]], [session])
        session.finish_prefill()
        session.step([text[580]])
        config = model.config
        per_slot = 2 * 4 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
        assert session.device_bytes == session.zone.size * per_slot
        assert session.store.seconds["host_search"] > 0
        used = session.store.statistics()
        assert 0 < used["keys_retrieved"] < used["keys_offloaded"]


def test_a_failure_reaches_the_caller_as_it_is(monkeypatch):
    model, (text,) = random_llama(23), random_tokens(23, 200)

    def failing(self, *arguments):
        raise ZeroDivisionError("no such cluster")

    with monkeypatch.context() as patch:
        patch.setattr(HostWaveStore, "attend", failing)
        with pytest.raises(ZeroDivisionError, match=r"^no such cluster$"):
            rajax.generate(model, text, max_new_tokens=5, retrieval=settings(), stop=())
    assert len(rajax.generate(model, text, max_new_tokens=5, retrieval=settings(), stop=()).tokens[0]) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outliers": 1.1}, "outliers must be from 0 to 1; found 1.1"),
        ({"host_dtype": "int4"}, "host_dtype must be one of bfloat16, float32; found 'int4'"),
        ({"wave_buffer": 1}, "wave_buffer must be true, false or None, found 1"),
        ({"rank_by": "bound"}, "rank_by='bound' needs the device's buffer: set wave_buffer=True"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        settings(**changes)
