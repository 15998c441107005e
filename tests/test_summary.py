"""The summary of the offloaded keys, what the prompt's queries teach, and how a growing text joins both."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_llama import random_llama, random_tokens

import rajax
from rajax import budget
from rajax.budget import choose_projection
from rajax.head import Budget, Head, Search
from rajax.index import ExactIndex, ScannIndex
from rajax.kernels import Partial, finish, merge, partial_attention_reference
from rajax.models.lesson import HELD_OUT, learn, sample_positions
from rajax.models.routes import top_keys
from rajax.models.summary import CLUSTERS, UNIT, root_of, sealed_count, second_moment, slots, summarize
from rajax.retrieval import RetrievalConfig
from rajax.routes import Routes
from rajax.session import Session, prefill
from rajax.store import HostStore

IDENTITY = np.broadcast_to(np.eye(16, dtype=np.float32), (2, 16, 16))


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- clusters


@pytest.mark.parametrize("count", [0, 5, 36, 37, 400, 512, 513, 600, 1500, 1536])
def test_clusters_are_means_of_their_keys_and_leave_none_out(count):
    keys, values = draw(0, 2, 1536, 16), draw(1, 2, 1536, 16)
    summary, clusters = summarize(keys, values, count, IDENTITY)
    clusters, sealed = np.asarray(clusters), sealed_count(count)
    assert 0 <= count - sealed < UNIT / CLUSTERS
    assert (clusters[:, :sealed] >= 0).all()
    assert (clusters[:, sealed:] == -1).all()
    counts = np.exp(np.asarray(summary.log_counts))
    assert summary.keys.shape == (2, 3 * CLUSTERS, 16)
    assert slots(sealed) <= 3 * CLUSTERS
    for head in range(2):
        assert round(counts[head].sum()) == sealed
        for c in range(3 * CLUSTERS):
            mine = clusters[head] == c
            assert round(counts[head, c]) == mine.sum()
            if mine.any():
                np.testing.assert_allclose(summary.keys[head, c], keys[head, mine].mean(0), atol=1e-5)
                np.testing.assert_allclose(summary.values[head, c], values[head, mine].mean(0), atol=1e-5)
    assert np.isfinite(np.asarray(summary.keys)).all()
    # In proportion to the keys, so that the device's bytes are bounded.
    assert (counts > 0).sum(1).max() <= count * CLUSTERS / UNIT


@pytest.mark.parametrize("keys", [np.zeros, np.ones], ids=["0", "1"])
def test_keys_that_are_all_alike_make_one_cluster_a_unit(keys):
    summary, clusters = summarize(keys((2, 1024, 16), np.float32), draw(2, 2, 1024, 16), 1024, IDENTITY)
    assert (np.exp(np.asarray(summary.log_counts)) > 0).sum() == 2 * 2
    assert len(np.unique(clusters)) == 2
    assert np.isfinite(np.asarray(summary.keys)).all()


def test_queries_shape_the_clusters():
    """Keys differ wildly in a direction in which no query points: only clusters that ignore it tell them apart."""
    keys = draw(3, 1, 512, 16)
    keys[..., 0] *= 30
    queries = draw(4, 1, 200, 16)
    queries[..., 0] *= 1e-3
    scores = queries[0] @ keys[0].T

    def error(root: np.ndarray) -> float:
        summary, clusters = summarize(keys, keys, 512, root)
        return float(
            ((scores - queries[0] @ np.asarray(summary.keys)[0, np.asarray(clusters)[0]].T) ** 2).mean()
        )

    assert error(root_of(second_moment(queries))) < 0.8 * error(IDENTITY[:1])


def test_the_root_of_queries_is_invertible_whatever_they_are():
    for queries in (np.zeros((1, 9, 16), np.float32), draw(5, 1, 1, 16), 1e6 * draw(6, 1, 40, 16)):
        root = np.asarray(root_of(second_moment(queries)))[0]
        np.testing.assert_allclose(root, root.T, atol=1e-5)
        values = np.linalg.eigvalsh(root)
        assert values.min() > 0.02 * values.max() / 1.01
    np.testing.assert_allclose(root_of(jnp.zeros((16, 16))), np.eye(16), atol=1e-6)


# --- routes


@pytest.mark.parametrize(
    ("queries", "keys", "top_k"), [(5, 40, 3), (130, 700, 64), (128, 64, 64), (1, 9, 12)]
)
def test_top_keys_are_exact(queries, keys, top_k):
    q, k = draw(7, 2, queries, 16), draw(8, 2, keys, 16)
    limits = np.random.default_rng(9).integers(0, keys + 1, queries)
    got = np.asarray(top_keys(q, k, limits, top_k))
    for head in range(2):
        for row, limit in enumerate(limits):
            order = np.argsort(-(k[head, :limit] @ q[head, row]))[:top_k]
            assert got[head, row, : len(order)].tolist() == order.tolist()
            assert (got[head, row, len(order) :] == -1).all()


@pytest.mark.parametrize(("length", "window"), [(13, 9), (700, 512), (40_000, 512), (40_000, 1)])
def test_sampled_positions_are_in_the_prompt_and_the_held_out_ones_in_the_window(length, window):
    positions = sample_positions(length, window)
    assert positions.min() >= 0
    assert positions.max() == length - 1
    assert (positions[-HELD_OUT:] >= length - window).all()
    if window > 256:
        assert positions[:-HELD_OUT].max() < positions[-HELD_OUT:].min()


# --- the correction


def attention(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    scores = (queries @ keys.T).astype(np.float64)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights @ values / weights.sum(1, keepdims=True)


def corrected(queries, static, offloaded, clusters, retrieved) -> np.ndarray:
    """Static zone, summary of random clusters, and the host's correction for `retrieved`, as in a decode step."""
    (keys, values), (off_keys, off_values) = static, offloaded
    count = clusters.max() + 1
    members = clusters == np.arange(count)[:, None]
    counts = members.sum(1)
    means, mean_values = (np.stack([a[m].mean(0) for m in members]) for a in (off_keys, off_values))
    device = partial_attention_reference(
        queries[None, None],
        np.concatenate([keys, means])[None, None],
        np.concatenate([values, mean_values])[None, None],
        np.concatenate([np.zeros(len(keys)), np.log(counts)]).astype(np.float32)[None, None],
    )
    head = Head(len(off_keys), 16, RetrievalConfig())
    head.append(off_keys, off_values)
    head.clusters[:], head.means, head.sealed = clusters, means, len(off_keys)
    ids = np.broadcast_to(retrieved, (len(queries), len(retrieved)))
    scores = queries @ off_keys[retrieved].T
    part = Partial(*(a[None, None] for a in head.attend(queries, Search(ids, scores, ids, scores, 0))))
    return np.asarray(finish(merge(device, part)))[0, 0]


@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
@pytest.mark.parametrize("count", [1, 2, 20, 200])
def test_with_all_keys_retrieved_the_result_is_dense_whatever_the_clusters(scale, count):
    queries = scale * draw(10, 3, 16)
    static, offloaded = (draw(11, 30, 16), draw(12, 30, 16)), (draw(13, 200, 16), draw(14, 200, 16))
    clusters = np.concatenate([np.arange(count), np.random.default_rng(15).integers(0, count, 200 - count)])
    got = corrected(queries, static, offloaded, clusters, np.random.default_rng(16).permutation(200))
    dense = attention(queries, *(np.concatenate(pair) for pair in zip(static, offloaded, strict=True)))
    np.testing.assert_allclose(got, dense, atol=2e-5)
    # And it can fail: without one of the keys that weigh most it is not dense.
    best = (queries @ offloaded[0].T).max(0).argmax()
    near = corrected(queries, static, offloaded, clusters, np.delete(np.arange(200), best))
    assert np.abs(near - dense).max() > 2e-5 or count == 200


def test_with_no_key_retrieved_the_result_is_the_summarys_estimate():
    queries, static, offloaded = (
        draw(17, 3, 16),
        (draw(18, 5, 16), draw(19, 5, 16)),
        (draw(20, 40, 16), draw(21, 40, 16)),
    )
    clusters = np.arange(40) % 4
    got = corrected(queries, static, offloaded, clusters, np.empty(0, int))
    keys = np.concatenate([static[0], *(np.tile(offloaded[0][c::4].mean(0), (10, 1)) for c in range(4))])
    values = np.concatenate([static[1], *(np.tile(offloaded[1][c::4].mean(0), (10, 1)) for c in range(4))])
    np.testing.assert_allclose(got, attention(queries, keys, values), atol=1e-5)


def test_a_denominator_that_rounding_has_eaten_gives_zeros_and_nan_stays_nan():
    part = Partial(np.ones((1, 1, 4, 4)), np.array([[[-1e-9, 0.0, 2.0, np.nan]]]), np.zeros((1, 1, 4)))
    np.testing.assert_array_equal(finish(part)[0, 0, :, 0], [0, 0, 0.5, np.nan])


# --- learning, searching and growing


def settings(**other: Any) -> RetrievalConfig:
    return RetrievalConfig(**{"sink_tokens": 3, "window": 9, "exact_below": 0, **other})


@pytest.fixture(scope="module")
def lesson():
    """Keys in clumps, queries near some of the clumps, and what is learned from them."""
    rng = np.random.default_rng(22)
    clumps = 3 * rng.standard_normal((2, 60, 16))
    which = rng.integers(0, 60, (2, 3072))
    keys = np.stack([clumps[h, which[h]] for h in range(2)]) + 0.5 * rng.standard_normal((2, 3072, 16))
    positions = sample_positions(3000, 9)
    asked = rng.integers(0, 8, (2, 3, len(positions)))
    queries = 0.12 * (
        np.stack([clumps[h, asked[h]] for h in range(2)]) + rng.standard_normal((2, 3, len(positions), 16))
    )
    keys, queries = keys.astype(np.float32), queries.astype(np.float32)
    values = draw(23, 2, 3072, 16)
    learned = jax.jit(learn, static_argnames=("sinks", "window"))(
        keys, values, queries, positions, 3000, sinks=3, window=9
    )
    return keys, values, learned, clumps


@pytest.fixture
def calibrated(monkeypatch):
    """Even a few keys are worth to calibrate."""
    monkeypatch.setattr(budget, "SEARCHED_WHOLE", 0)


def filled(lesson, config: RetrievalConfig, summarized: bool = True) -> HostStore:
    from rajax.searched import _learned

    keys, values, learned, _ = lesson
    store = HostStore(config, layers=1, kv_heads=2, head_dim=16, capacities=[4000])
    offloaded = slice(3, 3 + 3000 - 12)
    sealed = sealed_count(3000 - 12)
    store.put(
        0,
        0,
        keys[:, offloaded],
        values[:, offloaded],
        _learned(learned, learned.summary if summarized else None, sealed),
    )
    store.wait_built()
    return store


def near_clump(lesson, head: int, clump: int, seed: int) -> np.ndarray:
    return (0.12 * (lesson[3][head, clump] + draw(seed, 3, 16))).astype(np.float32)


def test_held_out_queries_see_exactly_the_keys_that_are_not_offloaded(lesson):
    keys, values, learned, _ = lesson
    positions = sample_positions(3000, 9)[-HELD_OUT:]
    exam = np.asarray(learned.exam)[1].reshape(3, HELD_OUT, 16)
    for row in (0, HELD_OUT - 1):
        at = np.r_[0:3, 2991 : positions[row] + 1]
        wanted = attention(exam[:, row], keys[1, at], values[1, at])
        seen = learned.seen
        numerator = np.asarray(seen.numerator)[0, 1].reshape(3, HELD_OUT, 16)[:, row]
        denominator = np.asarray(seen.denominator)[0, 1].reshape(3, HELD_OUT)[:, row]
        got = numerator / denominator[:, None]
        np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_a_route_finds_what_like_queries_wanted(lesson):
    store = filled(lesson, settings(leaves_searched=0, routes=8, top_k=32))
    head = store.heads[0][0][1]
    query = near_clump(lesson, 1, 5, 24)
    found = head.search(query)
    exact = np.argsort(-(query @ head.keys[: head.sealed].T), axis=1)[:, :32]
    assert np.mean([np.isin(e, f).mean() for e, f in zip(exact, found.ids, strict=True)]) > 0.8

    def recall(query: np.ndarray) -> tuple[float, np.ndarray]:
        exact = np.argsort(-(query @ head.keys[: head.sealed].T), axis=1)[:, :32]
        found = head.search(query).ids
        return float(np.mean([np.isin(e, f).mean() for e, f in zip(exact, found, strict=True)])), exact

    # Where no query has been before there is no route, until the decode's own queries make one.
    query = min((near_clump(lesson, 1, clump, 25) for clump in range(8, 60)), key=lambda q: recall(q)[0])
    before, exact = recall(query)
    scores = np.take_along_axis(query @ head.keys[: head.sealed].T, exact, axis=1)
    head.learn(query, Search(exact, scores, exact, scores, 0))
    assert before < 0.5
    assert recall(query)[0] == 1
    store.close()


def test_index_and_routes_are_joined_without_duplicates_and_scored_exactly(lesson):
    store = filled(lesson, settings(leaves_searched=0.03, routes=8, top_k=64))
    head = store.heads[0][0][0]
    for clump in (2, 30):
        query = near_clump(lesson, 0, clump, 26)
        found, alone = head.search(query), head.segments[0].index.search(query, 96, 0.03)
        for row, ids in enumerate(found.scored_ids):
            assert len(set(ids.tolist())) == len(ids)
            assert set(alone.ids[row][np.isfinite(alone.scores[row])]) <= set(ids.tolist())
            real = np.isfinite(found.scores[row])
            used = found.ids[row][real]
            assert len(set(used.tolist())) == len(used)
            np.testing.assert_allclose(
                found.scores[row][real], head.keys[used] @ query[row], rtol=1e-4, atol=1e-4
            )
            best = np.sort(head.keys[ids] @ query[row])[::-1][:64]
            np.testing.assert_allclose(np.sort(found.scores[row][real])[::-1], best, rtol=1e-4, atol=1e-4)
    store.close()


def test_routes_forget_the_oldest_decode_queries(lesson):
    store = filled(lesson, settings(leaves_searched=0.1, routes=4, top_k=16))
    head = store.heads[0][0][0]
    assert head.routes is not None
    for step in range(300):
        query = draw(step, 3, 16)
        head.learn(query, head.search(query))
    assert head.routes.learned == 900
    assert len(head.routes.recent) == 768
    newest = query / np.linalg.norm(query, axis=1, keepdims=True)
    at = (np.arange(897, 900)) % 768
    np.testing.assert_allclose(head.routes.recent[at], newest, rtol=1e-5)
    store.close()


def test_a_smaller_target_error_takes_more_keys_and_is_met(lesson, calibrated):
    """On queries that nothing was learned from."""
    kept, errors = [], []
    for target in (0.2, 0.002):
        store = filled(lesson, settings(target_error=target))
        head = store.heads[0][0][0]
        kept.append(head.budget.top_k)
        mean_error = []
        for seed in range(30):
            query = near_clump(lesson, 0, seed % 8, 100 + seed)
            dense = attention(query, head.keys[: head.count], head.values[: head.count])
            summary = lesson[2].summary
            device = partial_attention_reference(
                *(np.asarray(a, np.float32)[None, None] for a in (query, summary.keys[0], summary.values[0])),
                np.asarray(summary.log_counts)[None, :1],
            )
            part = Partial(*(a[None, None] for a in head.attend(query, head.search(query))))
            got = np.asarray(finish(merge(device, part)))[0, 0]
            mean_error.append(np.linalg.norm(got - dense) / np.linalg.norm(dense))
        errors.append(np.median(mean_error))
        store.close()
    assert kept[0] < kept[1]
    assert errors[0] < 0.2
    assert errors[1] < 0.002


def test_a_fixed_top_k_stays_as_it_is_and_its_search_is_chosen(lesson, calibrated):
    store = filled(lesson, settings(top_k=100))
    budgets = {head.budget for head in store.heads[0][0]}
    store.close()
    assert {b.top_k for b in budgets} == {100}
    # The queries that were held out ask for a few clumps only.
    assert all(0 < b.leaves < 1 for b in budgets)


def test_few_keys_are_searched_whole(lesson):
    store = filled(lesson, settings(top_k=100))
    assert {head.budget for head in store.heads[0][0]} == {Budget(100, 1.0, 0)}
    assert [head.root for head in store.heads[0][0]] == [None, None]
    store.close()


def test_the_projection_that_finds_more_is_taken(calibrated):
    """Keys vary most where no query looks: left as they are, they are partitioned by what does not matter."""
    keys = draw(30, 9000, 16) * np.r_[np.full(8, 20.0), np.ones(8)].astype(np.float32)
    queries = draw(31, 200, 16) * np.r_[np.full(8, 1e-3), np.ones(8)].astype(np.float32)
    root = np.asarray(root_of(second_moment(queries)))
    chosen = choose_projection(keys, root, queries[:50])
    assert chosen is not None

    def recall(projection: np.ndarray | None) -> float:
        found = ScannIndex(keys, projection).search(queries[50:], 64, 0.1).ids
        exact = ExactIndex(keys).search(queries[50:], 64).ids
        return float(np.mean([np.isin(e, f).mean() for e, f in zip(exact, found, strict=True)]))

    assert recall(chosen) > recall(None) + 0.2


@pytest.mark.parametrize("summary", [True, False])
def test_nothing_is_missing_while_the_tail_is_sealed(summary, monkeypatch):
    """Every step of a long answer is dense, with builds that take many steps and end at odd moments."""
    model, (text,) = random_llama(20, num_hidden_layers=2), random_tokens(20, 2300)
    dense = rajax.logits(model, text)[0]
    gate, waiting = threading.Semaphore(0), []
    real = Head.build

    def slow(self, start, end):
        # The prompt is indexed at once; the tail waits to be let through.
        if start or self.sealed:
            waiting.append(end)
            gate.acquire()
        return real(self, start, end)

    monkeypatch.setattr(Head, "build", slow)
    length, sealed = 100, []
    everything = settings(top_k=10**6, summary=summary)
    with Session(model, [length], [len(text)], everything) as session:
        prefill(model, [text[:length]], [session])
        session.finish_prefill()
        store = session.store
        assert store is not None
        for step in range(length, len(text)):
            got = np.asarray(session.step([text[step]]))[0]
            np.testing.assert_allclose(got, dense[step], atol=2e-4, err_msg=f"position {step}")
            head = store.heads[1][0][1]
            sealed.append(head.sealed)
            if step % 150 == 0:
                gate.release(4)
        counters = store.counters
        segments = [(s.start, s.end) for s in head.segments]
        assert counters.retrieved == counters.offloaded
        gate.release(100)
    steps = np.unique(np.diff(sealed))
    assert steps.tolist() == [0, UNIT]
    assert len(set(sealed)) >= 4
    assert segments[0][0] == 0
    assert all(a[1] == b[0] for a, b in itertools.pairwise(segments))
    assert len(segments) < len(set(sealed))
    if summary:
        assert (head.clusters[: head.sealed] >= 0).all()
        assert len(head.means) == CLUSTERS * len(set(sealed))


@pytest.mark.slow
def test_long_answers_do_not_drift():
    """With few keys retrieved, the error late in a long answer is that of a prompt of the same length."""
    model, (text,) = random_llama(21, num_hidden_layers=2), random_tokens(21, 3000)
    dense = rajax.logits(model, text)[0]
    few = settings(top_k=64, sink_tokens=8, window=64)
    grown = np.abs(rajax.logits(model, text, few, decode_from=700)[0, 2600:] - dense[2600:]).mean()
    fresh = np.abs(rajax.logits(model, text, few, decode_from=2600)[0, 2600:] - dense[2600:]).mean()
    assert fresh > 0
    assert grown < 1.2 * fresh


@pytest.mark.slow
def test_two_sequences_seal_each_in_its_own_time():
    model, texts = random_llama(22, num_hidden_layers=2), random_tokens(22, 1500, 900)
    dense = [rajax.logits(model, text)[0] for text in texts]
    near = rajax.logits(model, texts, settings(top_k=10**6), decode_from=60)
    for row, text in enumerate(texts):
        np.testing.assert_allclose(near[row, : len(text)], dense[row], atol=2e-4)


@pytest.mark.parametrize(
    ("length", "new", "window"),
    [(2049, 4, 512), (2175, 1, 512), (4609, 4, 512), (4225, 1, 4096), (641, 300, 512)],
)
def test_any_length_of_prompt_has_room_for_its_summary(length, new, window):
    """The prompt's bucket may be larger than that of the keys that are offloaded."""
    model = random_llama(23, num_hidden_layers=1, max_position_embeddings=8192)
    (text,) = random_tokens(23, length)
    result = rajax.generate(
        model, text, max_new_tokens=new, stop=(), retrieval=RetrievalConfig(window=window, exact_below=0)
    )
    assert len(result.tokens[0]) == new


def test_bfloat16_holds_its_keys_in_bfloat16_and_seals_them():
    model = random_llama(24, num_hidden_layers=2)
    low = jax.tree.map(lambda a: a.astype(jnp.bfloat16), model)
    (text,) = random_tokens(24, 800)
    exact = rajax.logits(model, text)[0, 200:]
    with Session(low, [200], [800], settings(top_k=10**6)) as session:
        prefill(low, [text[:200]], [session])
        session.finish_prefill()
        near = np.concatenate([np.asarray(session.step([token])) for token in text[200:]])
        assert session._cache is not None
        assert {a.dtype.name for a in (*session._cache.keys, *session._cache.values)} == {"bfloat16"}
        assert session.store is not None
        assert session.store.heads[0][0][0].sealed == 200 - 12 + UNIT
    # Rounding to bfloat16 is what is left.
    dense = rajax.logits(low, text)[0, 200:]
    assert np.abs(near - exact).mean() < 1.1 * np.abs(dense - exact).mean()


def test_by_routes_alone_a_long_answer_finds_its_own_keys(lesson):
    store = filled(lesson, settings(leaves_searched=0, routes=8, top_k=32))
    head = store.heads[0][0][0]
    rng = np.random.default_rng(33)
    place = rng.standard_normal(16).astype(np.float32) * 3
    for _ in range(UNIT):
        near = (place + 0.3 * rng.standard_normal((1, 16))).astype(np.float32)
        head.append(near, near)
        query = (0.3 * (place + rng.standard_normal((3, 16)))).astype(np.float32)
        head.learn(query, head.search(query))
    head.adopt(head.build(head.sealed, head.count), np.zeros(UNIT, np.int32))
    assert head.sealed == head.count
    query = (0.3 * (place + rng.standard_normal((3, 16)))).astype(np.float32)
    exact = np.argsort(-(query @ head.keys[: head.count].T), axis=1)[:, :16]
    found = head.search(query).ids
    assert np.mean([np.isin(e, f).mean() for e, f in zip(exact, found, strict=True)]) > 0.7
    store.close()


def test_a_target_error_with_few_keys_takes_them_all_where_it_must(lesson):
    keys, values, learned, _ = lesson
    from rajax.searched import _learned

    store = HostStore(settings(target_error=1e-6), layers=1, kv_heads=2, head_dim=16, capacities=[100])
    few = slice(3, 103)
    store.put(0, 0, keys[:, few], values[:, few], _learned(learned, learned.summary, 100))
    store.wait_built()
    assert all(head.budget.top_k >= 100 for head in store.heads[0][0])
    store.close()


def test_recall_is_none_where_nothing_was_searched():
    model, (text,) = random_llama(25), random_tokens(25, 30)
    result = rajax.generate(model, text, max_new_tokens=4, stop=(), retrieval=settings(recall_steps=2))
    assert result.statistics.keys_offloaded > 0
    assert result.statistics.recall is None


@pytest.mark.parametrize("known", [20, 9000])
def test_routes_through_few_and_many_known_queries(known):
    """Many are looked up through ScaNN; more than there are can be asked for."""
    queries = draw(34, known, 16)
    routes = Routes(queries, np.arange(known, dtype=np.int32)[:, None])
    assert isinstance(routes.index, ScannIndex if known > 8192 else ExactIndex)
    asked = queries[:5] * 3
    assert (routes.find(asked, 4) == np.arange(5)[:, None]).any(1).all()
    routes.learn(asked, np.full((5, 1), 7))
    assert (routes.find(asked, 10**4) == 7).sum(1).min() >= 5


def test_an_ended_sequence_keeps_its_clusters():
    model, texts = random_llama(26, num_hidden_layers=1), random_tokens(26, 100, 120)
    with Session(model, [100, 120], [110, 130], settings(top_k=8)) as session:
        prefill(model, texts, [session])
        session.finish_prefill()
        session.end(0)
        assert session._cache is not None
        before = np.array(session._cache.keys[0][0])
        session.step([1, 2])
        np.testing.assert_array_equal(session._cache.keys[0][0], before)
