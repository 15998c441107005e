"""RetroInfer's index and buffer: clusters, bounds, what is retrieved, and who is in the cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda import lower_for_cuda
from random_llama import random_llama, random_tokens

import rajax
from rajax.clusters import Blocks, outliers_among
from rajax.kernels import finish, merge, partial_attention_reference
from rajax.models.wave import (
    BLOCK_KEYS,
    SEGMENT,
    BlockCache,
    Clusters,
    SelectionRule,
    WholeHead,
    attend_blocks,
    attend_cache,
    attend_whole,
    importance,
    log_mass_bounds,
    second_order,
    segments,
    select,
    shaped_labels,
    spherical_labels,
)
from rajax.session import Session, prefill
from rajax.wave_buffer import BufferedWave
from rajax.wave_path import transfer_sizes
from rajax.wave_store import WaveStore

FLOAT = np.dtype(np.float32)


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def grouped(seed: int, count: int, groups: int, width: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Keys [1, count, width] in well separated groups, in random order, and the group of each."""
    draw_ = np.random.default_rng(seed)
    which = draw_.integers(0, groups, count)
    centers = 20 * draw_.standard_normal((groups, width))
    return (centers[which] + draw_.standard_normal((count, width))).astype(np.float32)[None], which


def plain_clusters(keys: np.ndarray, values: np.ndarray, labels: np.ndarray) -> tuple[Clusters, Blocks]:
    """The device's view of keys [K, S, H] with labels, and the host's; one sequence."""
    heads, count, width = keys.shape
    blocks = Blocks(heads, count, width, FLOAT, BLOCK_KEYS)
    root = np.broadcast_to(np.eye(width, dtype=np.float32), (heads, width, width))
    new = blocks.add(keys, values, labels, root, None, None, 0.0)
    with np.errstate(divide="ignore"):
        log_counts = np.log(new.sizes.astype(np.float32))
    return Clusters(
        *(jnp.asarray(a)[None] for a in (new.means, new.mean_values, log_counts, new.spreads, new.radii)),
        cached=jnp.zeros((1, *new.sizes.shape), bool),
    ), blocks


# --- clustering


@pytest.mark.parametrize("spherical", [False, True])
@pytest.mark.parametrize("count", [1, 15, 700, 1024])
def test_every_key_has_a_cluster_and_two_runs_agree_bit_for_bit(count, spherical):
    keys = draw(0, 2, 1024, 16)
    root = jnp.broadcast_to(jnp.eye(16), (2, 16, 16))

    def label():
        if spherical:
            return np.asarray(spherical_labels(keys, jnp.int32(count)))
        return np.asarray(shaped_labels(keys, jnp.int32(count), root, jnp.ones((2, 1024))))

    labels = label()
    np.testing.assert_array_equal(labels, label())
    assert (labels[:, :count] >= 0).all()
    centers = -(-count // (BLOCK_KEYS if spherical else 24))
    assert len(np.unique(labels[0, :count])) <= centers
    assert len(np.unique(labels[0, :count])) > centers / 2


def test_what_lies_past_the_count_changes_nothing():
    keys, other = draw(1, 1, 1024, 16), draw(2, 1, 1024, 16)
    other[:, :600] = keys[:, :600]
    other[:, 600:] *= 1e6
    root, shares = jnp.eye(16)[None], jnp.ones((1, 1024))
    for label in (lambda k: spherical_labels(k, 600), lambda k: shaped_labels(k, 600, root, shares)):
        np.testing.assert_array_equal(label(keys)[:, :600], label(other)[:, :600])


def test_groups_are_found():
    keys, which = grouped(3, 960, 20)
    labels = np.asarray(shaped_labels(keys, 960, jnp.eye(16)[None], jnp.ones((1, 960))))[0]
    mixed = [c for c in np.unique(labels) if len(np.unique(which[labels == c])) > 1]
    assert np.isin(labels, mixed).mean() < 0.3


def test_clusters_are_finer_where_queries_look():
    keys = draw(4, 1, 4096, 16)
    keys[..., 0] *= 5
    wanted = keys[0, :, 0] > 5
    shares = np.where(wanted, 100, 1).astype(np.float32)[None]

    def distance(shares: np.ndarray) -> float:
        labels = np.asarray(shaped_labels(keys, 4096, jnp.eye(16)[None], shares))[0]
        means = np.stack(
            [keys[0, labels == c].mean(0) if (labels == c).any() else keys[0, 0] for c in range(171)]
        )
        return float(((keys[0] - means[labels]) ** 2)[wanted].sum(1).mean())

    assert distance(shares) < 0.9 * distance(np.ones_like(shares))


def test_clusters_do_not_cross_segments():
    keys = np.tile(draw(5, 1, 1, 8), (1, SEGMENT + 512, 1))
    number, size = segments(keys.shape[1])
    assert number == 2
    labels = np.asarray(spherical_labels(keys, keys.shape[1]))[0]
    assert not set(labels[:size]) & set(labels[size:])


@pytest.mark.parametrize("count", [1, 512, 513, 8192, 8193, 30000, 131072])
def test_segments_are_few_and_equal(count):
    number, size = segments(count)
    assert number * size >= count
    assert size <= SEGMENT
    assert number * size - count < 512 * number


def test_importance_is_the_mean_attention_of_queries_that_see_a_key():
    queries, keys = draw(6, 2, 70, 8), draw(7, 2, 50, 8)
    limits = np.random.default_rng(8).integers(0, 51, 70).astype(np.int32)
    got = np.asarray(importance(queries, keys, limits))
    for head in range(2):
        wanted = np.zeros(50)
        for query, limit in zip(queries[head], limits, strict=True):
            if limit:
                scores = keys[head, :limit] @ query
                weights = np.exp(scores - scores.max())
                wanted[:limit] += weights / weights.sum()
        np.testing.assert_allclose(got[head], wanted / (limits > 0).sum(), atol=1e-5)


# --- blocks


@pytest.mark.parametrize("counts", [[1], [16], [17], [40, 1, 16], [100, 3, 33]])
def test_a_cluster_is_one_block_with_the_right_means(counts):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))[None]
    keys, values = draw(9, 1, labels.size, 8), draw(10, 1, labels.size, 8)
    clusters, blocks = plain_clusters(keys, values, labels)
    sizes = np.round(np.exp(np.asarray(clusters.log_counts)[0, 0])).astype(int)
    assert sizes.sum() == labels.size
    assert sizes.max() <= BLOCK_KEYS
    # No finer than it must be, and of as equal sizes as can be.
    assert len(sizes) == sum(-(-c // BLOCK_KEYS) for c in counts)
    start = 0
    for c, size in enumerate(sizes):
        rows = blocks.keys[0, start : start + size]
        np.testing.assert_allclose(clusters.means[0, 0, c], rows.mean(0), atol=1e-6)
        np.testing.assert_allclose(
            clusters.mean_values[0, 0, c], blocks.values[0, start : start + size].mean(0), atol=1e-6
        )
        apart = np.linalg.norm(rows - rows.mean(0), axis=1)
        np.testing.assert_allclose(clusters.radii[0, 0, c], apart.max(), atol=1e-5)
        np.testing.assert_allclose(clusters.spreads[0, 0, c], np.sqrt((apart**2).mean()), atol=1e-5)
        start += size
    order = np.argsort(labels[0], kind="stable")
    np.testing.assert_array_equal(blocks.keys[0, : labels.size], keys[0, order])


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e19])
def test_keys_that_cannot_be_ordered_are_refused(bad):
    keys = np.full((1, 20, 8), bad, np.float32)
    with pytest.raises(FloatingPointError, match="keys are not finite or too large for float32"):
        plain_clusters(keys, keys, np.zeros((1, 20), int))


# --- bounds and selection


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_the_bounds_hold(scale):
    """For every query and cluster: the estimate lies below the mass, the bound with the radius above."""
    keys, values = draw(11, 2, 600, 16), draw(12, 2, 600, 16)
    labels = np.asarray(spherical_labels(keys, 600))
    clusters, blocks = plain_clusters(keys, values, labels)
    queries = scale * draw(13, 1, 2, 3, 16)
    lower, upper = (np.asarray(a, np.float64) for a in log_mass_bounds(queries, clusters))
    sizes = np.round(np.exp(np.asarray(clusters.log_counts)[0])).astype(int)
    for head in range(2):
        starts = np.cumsum(sizes[head]) - sizes[head]
        real = sizes[head] > 0
        scores = queries[0, head].astype(np.float64) @ blocks.keys[head, :600].T.astype(np.float64)
        mass = np.log(np.add.reduceat(np.exp(scores), starts[real], axis=1))
        assert (lower[0, head][:, real] <= mass + 1e-4).all()
        assert (mass <= upper[0, head][:, real] + 1e-4).all()
        assert np.isneginf(lower[0, head][:, ~real]).all()
        # Neither is empty of content.
        assert (mass - lower[0, head][:, real]).max() > 0.01 * scale
        single = real & (sizes[head] == 1)
        np.testing.assert_allclose(upper[0, head][:, single], mass[:, single[real]], atol=1e-4)


def rule(**settings: Any) -> SelectionRule:
    return SelectionRule(
        **{"rank_by": "estimate", "share": None, "top_p": 0.9, "least": 1, "most": 20, **settings}
    )


@pytest.fixture(scope="module")
def world() -> tuple[Clusters, Blocks, np.ndarray]:
    """Clusters of one sequence and two heads, in no cache, and queries."""
    keys, values = draw(14, 2, 900, 16), draw(15, 2, 900, 16)
    labels = np.asarray(
        shaped_labels(keys, 900, jnp.broadcast_to(jnp.eye(16), (2, 16, 16)), jnp.ones((2, 900)))
    )
    return *plain_clusters(keys, values, labels), draw(16, 1, 2, 3, 16)


ACTIVE = jnp.ones(1, bool)


@pytest.mark.parametrize("rank_by", ["estimate", "spread", "bound"])
def test_the_most_wanted_are_retrieved_and_all_others_estimated(world, rank_by):
    clusters, _, queries = world
    got = select(queries, clusters, ACTIVE, rule(rank_by=rank_by, least=20))
    lower, upper = (np.asarray(a)[0] for a in log_mass_bounds(queries, clusters))
    estimates = lower + (np.asarray(second_order(clusters.spreads))[0][:, None] if rank_by == "spread" else 0)
    mass = np.exp(upper if rank_by == "bound" else estimates)
    rank = (mass / mass.sum(2, keepdims=True)).sum(1)
    if rank_by == "spread":
        rank *= np.asarray(clusters.spreads)[0]
    for head in range(2):
        best = np.argsort(-rank[head])[:20]
        np.testing.assert_array_equal(got.ids[0, head], best)
        rest = np.setdiff1d(np.arange(rank.shape[1]), best)
        weights = np.exp(estimates[head][:, rest])
        wanted = weights @ np.asarray(clusters.mean_values)[0, head, rest] / weights.sum(1, keepdims=True)
        np.testing.assert_allclose(finish(got.estimated)[0, head], wanted, atol=1e-5)
    assert int(got.missing) == 40


def test_top_p_takes_as_few_as_leave_its_share(world):
    clusters, _, queries = world
    lower, _ = log_mass_bounds(queries, clusters)
    mass = np.exp(np.asarray(lower)[0])
    rank = (mass / mass.sum(2, keepdims=True)).sum(1)
    for top_p in (0.05, 0.2, 0.4):
        ids = np.asarray(select(queries, clusters, ACTIVE, rule(top_p=top_p, most=60)).ids)[0]
        for head in range(2):
            n = (ids[head] >= 0).sum()
            best = np.sort(rank[head])[::-1]
            left = 1 - np.cumsum(best) / best.sum()
            assert left[n - 1] <= 1 - top_p < (left[n - 2] if n > 1 else 1)
    for bounds, wanted in (
        ({"least": 7, "most": 9, "top_p": 0.0}, 7),
        ({"least": 1, "most": 9, "top_p": 1.0}, 9),
    ):
        assert (np.asarray(select(queries, clusters, ACTIVE, rule(**bounds)).ids) >= 0).sum(2).tolist() == [
            [wanted] * 2
        ]


def test_a_fixed_share_is_of_the_clusters_that_there_are(world):
    clusters, _, queries = world
    ids = select(queries, clusters, ACTIVE, rule(share=0.1)).ids
    there = (np.asarray(clusters.log_counts) > -np.inf).sum(2)
    np.testing.assert_array_equal((np.asarray(ids) >= 0).sum(2), np.ceil(0.1 * there))


def test_clusters_as_good_as_each_other_are_retrieved_together_or_not_at_all():
    """Where the last that would be retrieved ties with the first that would not, none may be lost between them."""
    keys = np.tile(draw(17, 1, 1, 16), (1, 30 * BLOCK_KEYS, 1))
    labels = np.repeat(np.arange(30), BLOCK_KEYS)[None]
    clusters, _ = plain_clusters(keys, keys, labels)
    got = select(draw(18, 1, 1, 2, 16), clusters, ACTIVE, rule(least=5, most=5))
    assert (np.asarray(got.ids) == -1).all()
    np.testing.assert_allclose(finish(got.estimated)[0, 0], np.tile(keys[0, 0], (2, 1)), atol=1e-4)


def test_sequences_without_clusters_and_ended_ones_want_nothing(world):
    clusters, _, queries = world
    nothing = jax.tree.map(jnp.zeros_like, clusters)
    nothing = dataclasses.replace(nothing, log_counts=jnp.full_like(clusters.log_counts, -jnp.inf))
    for case, active in ((nothing, ACTIVE), (clusters, jnp.zeros(1, bool))):
        for rank_by in ("estimate", "spread", "bound"):
            got = select(queries, case, active, rule(rank_by=rank_by))
            assert (np.asarray(got.ids) == -1).all()
            assert int(got.missing) == 0
    output = finish(select(queries, nothing, ACTIVE, rule()).estimated)
    np.testing.assert_array_equal(output, np.zeros_like(output))


# --- attention over blocks


def test_attention_over_blocks_of_any_heads_equals_attention_over_their_keys():
    queries = draw(19, 2, 2, 3, 16)
    keys, values = draw(20, 9, BLOCK_KEYS, 16), draw(21, 9, BLOCK_KEYS, 16)
    owners = np.array([0, 3, 3, 1, 0, 3, 0, 0, 0], np.int32)
    counts = np.array([16, 1, 7, 16, 3, 16, 0, 0, 0], np.int32)
    # What is past a block's keys must not matter.
    keys[np.arange(BLOCK_KEYS)[None] >= counts[:, None]] = 1e5
    part = attend_blocks(queries, keys, values, owners, counts)
    for row in range(4):
        mine = [(b, c) for b, c in enumerate(counts) if owners[b] == row and c]
        got = np.asarray(finish(part)).reshape(4, 3, 16)[row]
        if not mine:
            np.testing.assert_array_equal(got, 0)
            assert np.isneginf(np.asarray(part.max).reshape(4, 3)[row]).all()
            continue
        k = np.concatenate([keys[b, :c] for b, c in mine])[None, None]
        v = np.concatenate([values[b, :c] for b, c in mine])[None, None]
        q = queries.reshape(4, 1, 1, 3, 16)[row]
        wanted = finish(partial_attention_reference(q, k, v, np.zeros(k.shape[:3])))[0, 0]
        np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_the_cache_and_a_whole_head_join_with_other_parts():
    queries, poison = draw(22, 2, 2, 3, 16), 1e5
    keys, values = draw(23, 2, 2, 5, BLOCK_KEYS, 16), draw(24, 2, 2, 5, BLOCK_KEYS, 16)
    counts = np.random.default_rng(25).integers(0, BLOCK_KEYS + 1, (2, 2, 5)).astype(np.int32)
    inside = np.arange(BLOCK_KEYS) < counts[..., None]
    keys[~inside] = poison
    whole_keys, whole_values = draw(26, 2, 40, 16), draw(27, 2, 40, 16)
    whole_keys[1, 30:] = poison
    whole = WholeHead(
        jnp.int32(0), np.array([1, 0], np.int32), whole_keys, whole_values, np.array([40, 30], np.int32)
    )
    got = finish(merge(attend_cache(queries, BlockCache(keys, values, counts)), attend_whole(queries, whole)))
    for b, k in np.ndindex(2, 2):
        all_keys, all_values = [keys[b, k][inside[b, k]]], [values[b, k][inside[b, k]]]
        if whole.heads[b] == k:
            all_keys.append(whole_keys[b, : whole.counts[b]])
            all_values.append(whole_values[b, : whole.counts[b]])
        scores = queries[b, k] @ np.concatenate(all_keys).T
        weights = np.exp(scores - scores.max(1, keepdims=True))
        wanted = weights @ np.concatenate(all_values) / weights.sum(1, keepdims=True)
        np.testing.assert_allclose(got[b, k], wanted, atol=1e-4)


# --- outliers


def test_keys_far_from_all_others_are_in_no_cluster():
    keys, labels = grouped(40, 600, 30)
    far = [3, 77, 410, 599]
    values = draw(41, 1, 600, 16)
    strange = keys.copy()
    strange[0, far] += 12 * draw(42, 4, 16)
    root = np.eye(16, dtype=np.float32)[None]
    blocks = Blocks(1, 1200, 16, FLOAT, BLOCK_KEYS)
    blocks.add(keys, values, labels[None], root, None, None, 0.0)
    new = blocks.add(strange, values, labels[None], root, None, None, 4 / 600)
    assert new.outliers == (1196, 1200)
    np.testing.assert_array_equal(blocks.keys[0, 1196:1200], strange[0, far])
    np.testing.assert_array_equal(blocks.values[0, 1196:1200], values[0, far])
    assert new.sizes.sum() == 596
    assert new.starts[new.sizes > 0].min() == 600
    assert new.radii.max() < 10
    ordinary = np.delete(np.arange(600), far)
    in_order = np.sort(blocks.keys[0, 600:1196], axis=0)
    np.testing.assert_array_equal(in_order, np.sort(keys[0, ordinary], axis=0))


def test_a_step_does_not_read_more_outliers_the_longer_the_text():
    counts = 40, 32768, 204800, 204850, 1 << 20
    assert [outliers_among(count, 0.02) for count in counts] == [0, 655, 4096, 4096, 4096]
    assert outliers_among(1 << 20, 1) == 1 << 20
    assert outliers_among(1000, 0.0) == 0


# --- the cache's table


def store_of(clusters: int, slots: int) -> tuple[WaveStore, np.ndarray]:
    """One layer, sequence and head with clusters of two keys each, and an empty cache; and the keys."""
    store = WaveStore(
        layers=1,
        kv_heads=1,
        groups=2,
        head_dim=4,
        dtype=FLOAT,
        device_dtype=FLOAT,
        capacities=[2 * clusters],
        block_keys=BLOCK_KEYS,
        cache_blocks=slots,
        outlier_blocks=0,
        transfers=(2, 4),
    )
    keys = draw(28, 1, 2 * clusters, 4)
    labels = np.repeat(np.arange(clusters), 2)[None]
    new = store.put(0, 0, keys, -keys, labels, np.eye(4, dtype=np.float32)[None], None, None, 0.0).result()
    store.make_room(clusters)
    store.adopt(0, 0, 0, new)
    return store, keys


def step(store: WaveStore, *wanted: int) -> list[tuple[int, int, int]]:
    """One step that wants these clusters; (place, comes, leaves) of each exchange."""
    ids = np.full((1, 1, 1, 8), -1, np.int32)
    ids[0, 0, 0, : len(wanted)] = wanted
    to, come, go = store.after_step(ids)
    slots, clusters = store.held.shape[2], store.place.shape[2]
    return [
        (int(t), int(c), int(g) if g < clusters else -1)
        for t, c, g in zip(to[0], come[0], go[0], strict=True)
        if t < slots
    ]


def test_the_least_recently_wanted_cluster_leaves():
    store, _ = store_of(10, 3)
    assert step(store, 4, 5, 6) == [(0, 4, -1), (1, 5, -1), (2, 6, -1)]
    assert step(store, 5) == []
    assert step(store, 7, 4) == [(2, 7, 6)]
    assert step(store, 8) == [(1, 8, 5)]
    # What this very step wants does not leave: there is room for one of the two.
    assert step(store, 4, 7, 1, 2) == [(1, 1, 8)]
    assert sorted(store.held[0, 0].tolist()) == [1, 4, 7]
    c = store.counters
    assert (c.wanted, c.hits, c.evictions) == (3 + 1 + 2 + 1 + 4, 0 + 1 + 1 + 0 + 2, 3)
    # Three blocks cross as four, then none, one as two, one as two, two as two.
    assert (c.transfers, c.bytes_moved // store.block_bytes) == (4, 4 + 2 + 2 + 2)
    assert c.bytes_wanted == 11 * store.block_bytes
    store.close()


def test_what_is_in_the_cache_does_not_cross_and_the_rest_comes_in_rounds():
    store, keys = store_of(10, 2)
    step(store, 3, 4)
    ids = np.array([[9, 3, 0, 1, 2, 4, 5, -1]], np.int32)
    brought = []
    for first in (0, 4):
        out = np.full((4, BLOCK_KEYS, 4), np.nan, np.float32), np.full((4, BLOCK_KEYS, 4), np.nan, np.float32)
        rows, sizes = np.full(4, 77, np.int32), np.full(4, 77, np.int32)
        store.fetch(0, first, ids, *out, rows, sizes)
        assert np.isfinite(out[0]).all()
        assert np.isfinite(out[1]).all()
        n = (sizes > 0).sum()
        assert (rows == 0).all()
        for block in range(n):
            c = int(np.flatnonzero((keys[0, ::2] == out[0][block, 0]).all(1))[0])
            np.testing.assert_array_equal(out[0][block, : sizes[block]], keys[0, 2 * c : 2 * c + 2])
            np.testing.assert_array_equal(out[1][block, : sizes[block]], -keys[0, 2 * c : 2 * c + 2])
            brought.append(c)
    assert brought == [9, 0, 1, 2, 5]
    store.close()


def test_a_cache_without_room_moves_everything():
    store, _ = store_of(10, 0)
    assert step(store, 1, 2) == step(store, 1, 2) == []
    assert store.counters.hits == 0
    assert store.counters.wanted == 4
    store.close()


# --- the whole


def settings(**changes: Any) -> rajax.RetrievalConfig:
    return rajax.RetrievalConfig(
        **{
            "index": "wave",
            "wave_buffer": True,
            "sink_tokens": 3,
            "window": 9,
            "update_every": 20,
            "block_cache": 0.2,
            "host_dtype": "float32",
            **changes,
        }
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"rank_by": "spread"},
        {"rank_by": "bound"},
        {"projection": False},
        {"block_cache": 0.0},
        {"block_cache": 1.0},
        {"whole_heads": 0.0},
        {"whole_heads": 0.5},
        {"whole_heads": 1.0},
        {"outliers": 0.0},
        {"outliers": 0.2},
        {"outliers": 1.0},
        {"outliers": 0.9, "whole_heads": 0.5, "block_cache": 0.0},
        {"update_every": 1},
    ],
    ids=str,
)
def test_everything_retrieved_equals_dense_however_it_is_ranked_and_cached(changes):
    """Through hundreds of blocks in many rounds a step, and through 90 tokens of growth."""
    model, (text,) = random_llama(20), random_tokens(20, 490)
    config = settings(retrieved_share=1.0, **changes)
    got = rajax.logits(model, text, config, decode_from=400)
    np.testing.assert_allclose(got, rajax.logits(model, text), atol=1e-4)


@pytest.mark.parametrize(
    "overrides",
    [
        {"head_dim": 10},
        {"head_dim": 24, "num_key_value_heads": 1},
        {"num_key_value_heads": 4},
        {"attention_bias": True},
    ],
    ids=str,
)
def test_other_shapes(overrides):
    model, (text,) = random_llama(21, **overrides), random_tokens(21, 200)
    got = rajax.logits(model, text, settings(retrieved_share=1.0), decode_from=155)
    np.testing.assert_allclose(got, rajax.logits(model, text), atol=1e-4)


@pytest.mark.parametrize("wave_buffer", [True, False])
def test_the_host_keeps_keys_in_bfloat16(wave_buffer):
    model, (text,) = random_llama(22), random_tokens(22, 300)
    config = settings(update_every=64, wave_buffer=wave_buffer, host_dtype="bfloat16")
    with Session(model, [280], [300], config) as session:
        prefill(model, [text[:280]], [session])
        session.finish_prefill()
        assert session.store.blocks[0][0].keys.dtype == jnp.bfloat16
        for token in text[280:]:
            logits = np.asarray(session.step([token]))
        assert np.isfinite(logits).all()
        per_key = (
            2 * 2 * model.config.num_hidden_layers * model.config.num_key_value_heads * model.config.head_dim
        )
        assert session.store.kv_bytes == per_key * (280 - 12)


def test_two_runs_give_the_same_tokens_bit_for_bit():
    """Through several updates of the index, whose background work must not decide what a step sees."""
    model, texts = random_llama(23), random_tokens(23, 300, 120)
    config = settings(max_clusters=8, min_clusters=2, update_every=30)
    run = {
        "max_new_tokens": 150,
        "retrieval": config,
        "stop": (),
        "key": 5,
        "sampling": rajax.Sampling(temperature=0.8),
    }
    first, second = (rajax.generate(model, texts, **run) for _ in range(2))
    assert first.tokens == second.tokens
    counted = [
        (s.cache_hit_ratio, s.bytes_moved, s.evictions, s.keys_retrieved)
        for s in (first.statistics, second.statistics)
    ]
    assert counted[0] == counted[1]
    assert 0 < counted[0][0] < 1
    assert counted[0][1] > 0
    assert counted[0][2] > 0


def test_an_update_stops_no_step_for_all_layers_and_keeps_every_key():
    """Layer by layer the window's oldest keys become clusters; until all have, they stay where they are."""
    model, (text,) = random_llama(24), random_tokens(24, 400)
    with Session(model, [100], [400], settings(update_every=40, outliers=0.1)) as session:
        prefill(model, [text[:100]], [session])
        session.finish_prefill()
        wave = session.offload
        assert isinstance(wave, BufferedWave)
        starts = []
        for position in range(100, 400):
            session.step([text[position]])
            clustered = int(wave.store.sizes[0, 0].sum() + wave.store.whole[0, 0] + wave.store.outliers[0, 0])
            start = int(wave.starts[0])
            assert clustered == start - 3
            assert int(session._cache.starts[0]) == start
            # Nothing is lost between the clusters and the window, nor overwritten in it.
            assert position + 1 - start <= wave.zone.window
            starts.append(start)
        moves = np.flatnonzero(np.diff(starts))
        assert np.diff(starts)[moves].tolist() == [40] * len(moves)
        assert len(moves) >= 6


def test_the_cache_starts_with_what_the_prompt_wanted_most():
    model, (text,) = random_llama(25), random_tokens(25, 600)
    with Session(model, [580], [600], settings(whole_heads=0.0)) as session:
        prefill(model, [text[:580]], [session])
        session.finish_prefill()
        held = session.store.held
        assert (held >= 0).all()
        cached = np.asarray(session.offload.state.clusters[0].cached)[0]
        for head in range(2):
            assert sorted(np.flatnonzero(cached[head])) == sorted(held[0, head])
        for token in text[580:]:
            session.step([token])
        for layer, clusters in enumerate(session.offload.state.clusters):
            for head in range(2):
                mine = np.flatnonzero(np.asarray(clusters.cached)[0, head])
                assert sorted(mine) == sorted(session.store.held[layer, head])


def test_heads_that_clusters_misjudge_stay_whole():
    """The whole heads are attended to exactly, so that the others have less to answer for."""
    model, (text,) = random_llama(26), random_tokens(26, 500)
    dense = rajax.logits(model, text)
    errors = [
        np.abs(
            rajax.logits(
                model, text, settings(max_clusters=4, min_clusters=1, whole_heads=w), decode_from=480
            )
            - dense
        )[0, 480:].mean()
        for w in (0.0, 0.5)
    ]
    assert errors[1] < 0.8 * errors[0]


def test_a_failure_while_fetching_reaches_the_caller_as_it_is(monkeypatch):
    model, (text,) = random_llama(27), random_tokens(27, 200)

    def failing(self, *arguments):
        raise ZeroDivisionError("no such block")

    with monkeypatch.context() as patch:
        patch.setattr(WaveStore, "fetch", failing)
        with pytest.raises(ZeroDivisionError, match=r"^no such block$"):
            rajax.generate(model, text, max_new_tokens=5, retrieval=settings(), stop=())
    assert len(rajax.generate(model, text, max_new_tokens=5, retrieval=settings(), stop=()).tokens[0]) == 5


def test_ranking_and_attention_lower_for_cuda():
    """All but the transfer itself, since JAX lowers callbacks only where the platform's client runs."""
    clusters, blocks = (
        Clusters(
            jnp.zeros((1, 2, 64, 16)),
            jnp.zeros((1, 2, 64, 16)),
            *(jnp.zeros((1, 2, 64)) for _ in range(3)),
            jnp.zeros((1, 2, 64), bool),
        ),
        jnp.zeros((8, BLOCK_KEYS, 16)),
    )

    def attend(queries, clusters, cache, blocks, owners):
        chosen = select(queries, clusters, jnp.ones(1, bool), rule(rank_by="spread"))
        parts = attend_cache(queries, cache), attend_blocks(queries, blocks, blocks, owners, owners)
        return merge(chosen.estimated, *parts), chosen.ids

    cache = BlockCache(
        jnp.zeros((1, 2, 4, BLOCK_KEYS, 16)),
        jnp.zeros((1, 2, 4, BLOCK_KEYS, 16)),
        jnp.zeros((1, 2, 4), jnp.int32),
    )
    program = lower_for_cuda(
        attend, jnp.zeros((1, 2, 3, 16)), clusters, cache, blocks, jnp.zeros(8, jnp.int32)
    )
    assert program.count("call @partial_attention_pallas") == 2
    assert "triton" in program


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_transfers_grow_with_the_heads(rows):
    sizes = transfer_sizes(rows)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] >= rows
