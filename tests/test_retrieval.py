"""Retrieval attention against dense attention, and what happens when the host path fails."""

from __future__ import annotations

import functools
import re
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda import lower_for_cuda
from random_llama import random_llama, random_tokens

import rajax
from rajax import handles
from rajax.head import Head, Search, Segment
from rajax.host_path import CallbackHostPath
from rajax.index import INDEXES, ExactIndex, ScannIndex, select_top
from rajax.kernels import Partial
from rajax.models import DeviceCache, Rope, Zone
from rajax.models.lesson import sample_positions
from rajax.session import Session, _decode_step, _join, _prefill_layer, _split, prefill
from rajax.shapes import bucket
from rajax.store import HostStore

HOST_WAVE = "wave on the host"
"""The kind "wave" without the device's buffer, as `config` takes it."""

ALL = 10**6
"""More keys than any text here has: everything is retrieved."""

TOLERANCE = 1e-4
"""Absolute, of logits with a deviation of about two: float32 sums in another order."""


def config(index: str = "scann", keys: int = ALL, **settings: Any) -> rajax.RetrievalConfig:
    """A static zone so small that most of a short text is offloaded, and ScaNN even for few keys.

    `keys` are retrieved per query, or as many clusters as have about so many. The block cache is so small that
    it is never whole, and an answer's keys are clustered soon.
    """
    zone: dict[str, Any] = {"sink_tokens": 3, "window": 9}
    if "wave" in index:
        zone |= {"host_dtype": "float32", "wave_buffer": index != HOST_WAVE}
        if index == HOST_WAVE:
            zone |= {"whole_heads": 0.0}
        index = "wave"
    if INDEXES[index]:
        kind: dict[str, Any] = {"exact_below": 0, "leaves_searched": 1.0, "top_k": keys}
    else:
        kind = {"update_every": 20, "block_cache": 0.3, "rank_by": "estimate"}
        few = max(1, keys // 8)
        kind |= {"retrieved_share": 1.0} if keys == ALL else {"min_clusters": few, "max_clusters": few}
    return rajax.RetrievalConfig(index=index, **zone | kind | settings)


KINDS = [*sorted(INDEXES), HOST_WAVE]


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    yield
    assert handles._requests == {}
    # The process's own, one for each core, serve all requests.
    names = [t.name for t in threading.enumerate() if not t.name.startswith("rajax-cores")]
    assert not [name for name in names if name.startswith("rajax")]


@pytest.mark.parametrize(("exact_below", "searched"), [(78, False), (77, True)])
def test_a_request_that_stays_short_attends_to_every_key(exact_below, searched):
    """Of 80 tokens and 9 new ones, 77 are offloaded in the end."""
    model, (text,) = random_llama(30), random_tokens(30, 89)
    settings = rajax.RetrievalConfig(sink_tokens=3, window=9, top_k=2, summary=False, exact_below=exact_below)
    got = rajax.logits(model, text, settings, decode_from=80)
    error = np.abs(got - rajax.logits(model, text)).max()
    assert (error > 1e-2) == searched
    assert searched or error < TOLERANCE


@pytest.mark.parametrize("index", KINDS)
@pytest.mark.parametrize("kv_heads", [2, 4], ids=["gqa", "mha"])
def test_all_keys_retrieved_equals_dense(index, kv_heads):
    """Prefill and 64 decoded tokens, a batch of unequal lengths, one of them inside the static zone."""
    model = random_llama(num_key_value_heads=kv_heads)
    lengths, new = (150, 5, 61), 64
    texts = random_tokens(1, *(n + new for n in lengths))
    dense = [rajax.logits(model, text)[0] for text in texts]
    prompts = [text[:n] for text, n in zip(texts, lengths, strict=True)]
    with Session(model, lengths, [len(t) for t in texts], config(index=index)) as session:
        got = [np.asarray(prefill(model, prompts, [session]))]
        session.finish_prefill()
        for step in range(new):
            got.append(np.asarray(session.step([t[n + step] for t, n in zip(texts, lengths, strict=True)])))
        assert session.store is not None
        used = session.store.statistics()
        assert used["keys_retrieved"] == used["keys_offloaded"] > 0
    for row, n in enumerate(lengths):
        ours = np.stack([g[row] for g in got])
        np.testing.assert_allclose(ours, dense[row][n - 1 :], atol=TOLERANCE)
    assert np.std(dense[0]) > 1


@pytest.mark.parametrize("index", ["scann", "wave", HOST_WAVE])
@pytest.mark.parametrize("zone", [(3, 9), (0, 1), (5, 1), (0, 16), (200, 7)])
def test_one_token_at_a_time_equals_a_fresh_prefill_at_every_step(zone, index):
    """From the first token on, through the filling of the static zone and far past it."""
    model, (text,) = random_llama(2), random_tokens(2, 90)
    fresh = rajax.logits(model, text)
    sinks, window = zone
    grown = rajax.logits(model, text, config(index, sink_tokens=sinks, window=window), decode_from=1)
    np.testing.assert_allclose(grown, fresh, atol=TOLERANCE)
    np.testing.assert_allclose(rajax.logits(model, text, decode_from=1), fresh, atol=TOLERANCE)


def test_prefill_sees_only_what_came_before():
    """Each position's logits are those of a fresh prefill that ends there."""
    model, (text,) = random_llama(3), random_tokens(3, 40)
    whole = rajax.logits(model, text)[0]
    for end in (1, 2, 13, 40):
        np.testing.assert_allclose(rajax.logits(model, text[:end])[0, -1], whole[end - 1], atol=TOLERANCE)


@pytest.mark.parametrize("index", KINDS)
def test_few_retrieved_keys_differ_from_dense(index):
    """The parity tests can fail: with one key, or cluster, retrieved the logits are far off."""
    model, (text,) = random_llama(4), random_tokens(4, 120)
    near = rajax.logits(model, text, config(index, keys=1), decode_from=100)
    assert np.abs(near - rajax.logits(model, text)).max() > 100 * TOLERANCE


@pytest.mark.parametrize("index", KINDS)
def test_more_keys_come_closer_to_dense(index):
    model, (text,) = random_llama(5), random_tokens(5, 160)
    dense = rajax.logits(model, text)
    errors = [
        np.abs(rajax.logits(model, text, config(index, k), decode_from=120) - dense).mean()
        for k in ((1, 64, ALL) if "wave" in index else (1, 16, 64, ALL))
    ]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("index", ["scann", "wave", HOST_WAVE])
def test_a_batch_equals_its_sequences_alone(index):
    model, texts = random_llama(6), random_tokens(6, 70, 4, 33)
    # Two of ScaNN's indexes of the same keys may find others among the last.
    keys = ALL if index == "scann" else 8
    settings = {"max_new_tokens": 30, "retrieval": config(index, keys=keys), "stop": ()}
    together = rajax.generate(model, texts, **settings)
    for row, text in enumerate(texts):
        assert rajax.generate(model, text, **settings).tokens[0] == together.tokens[row]


@pytest.mark.parametrize("index", ["scann", "wave", HOST_WAVE])
def test_a_sequence_that_stops_leaves_the_others_alone(index):
    model, texts = random_llama(7), random_tokens(7, 40, 50)
    settings = {"max_new_tokens": 24, "retrieval": config(index)}
    free = rajax.generate(model, texts, stop=(), **settings)
    early = next(t for t in free.tokens[0] if t not in free.tokens[1])
    stopped = rajax.generate(model, texts, stop=[early], **settings)
    assert stopped.finish_reasons == ["stop", "length"]
    assert stopped.tokens[0] == free.tokens[0][: free.tokens[0].index(early) + 1]
    assert stopped.tokens[1] == free.tokens[1]


def test_a_text_inside_the_static_zone_offloads_nothing():
    model, (text,) = random_llama(8), random_tokens(8, 20)
    result = rajax.generate(model, text, max_new_tokens=5, stop=())
    assert result.statistics.host_kv_bytes == result.statistics.keys_offloaded == 0
    dense = rajax.generate(model, text, max_new_tokens=5, stop=(), retrieval=None)
    assert result.tokens == dense.tokens


def test_a_window_longer_than_the_text_takes_no_more_than_the_text():
    model, (text,) = random_llama(8), random_tokens(8, 20)
    wide = rajax.generate(model, text, max_new_tokens=5, stop=(), retrieval=config(window=2**40))
    dense = rajax.generate(model, text, max_new_tokens=5, stop=(), retrieval=None)
    assert wide.tokens == dense.tokens
    assert wide.statistics.device_kv_bytes == dense.statistics.device_kv_bytes


def test_the_device_holds_the_static_zone_and_the_host_the_rest():
    model, (text,) = random_llama(9), random_tokens(9, 300)
    result = rajax.generate(model, text, max_new_tokens=10, stop=(), retrieval=config(recall_steps=4))
    c, s = model.config, result.statistics
    per_token = 2 * 4 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
    # The static zone's 12 slots, and room for 52 clusters with their counts.
    counts = 4 * 52 * c.num_hidden_layers * c.num_key_value_heads
    assert s.device_kv_bytes == per_token * (12 + 52) + counts
    # The last token is made but never fed back.
    assert s.host_kv_bytes == per_token * (300 + 9 - 12)
    assert s.recall == 1.0
    assert s.decode_steps == 9
    assert s.keys_scanned == s.keys_retrieved == s.keys_offloaded
    assert s.ttft_s >= s.prefill_s >= s.index_s >= 0


# --- the host path


class DiskOnFireError(Exception):
    """Something that only a user's own code would raise."""


@pytest.mark.parametrize("where", ["build", "append", "search"])
def test_a_failure_on_the_host_reaches_the_caller_as_it_is(where, monkeypatch):
    model, (text,) = random_llama(10), random_tokens(10, 80)
    settings = {"max_new_tokens": 12, "retrieval": config(), "stop": ()}
    good = rajax.generate(model, text, **settings)
    real, calls = getattr(Head, where), []

    def failing(self, *args):
        calls.append(1)
        # `append` also fills the store in the prefill; let it fail while decoding.
        if len(calls) > 3 * 2 * (where == "append"):
            raise DiskOnFireError("the disk is on fire")
        return real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Head, where, failing)
        with pytest.raises(DiskOnFireError, match=r"^the disk is on fire$"):
            rajax.generate(model, text, **settings)
    assert rajax.generate(model, text, **settings).tokens == good.tokens


@pytest.mark.parametrize("index", ["scann", "wave", HOST_WAVE])
def test_a_closed_stream_ends_its_request(index):
    model, (text,) = random_llama(11), random_tokens(11, 60)
    answer = rajax.stream(model, text, max_new_tokens=40, retrieval=config(index), stop=())
    first = [next(answer), next(answer)]
    assert len(handles._requests) == 1
    answer.close()
    assert handles._requests == {}
    whole = rajax.generate(model, text, max_new_tokens=2, retrieval=config(index), stop=())
    assert whole.tokens[0] == first


@pytest.mark.parametrize("index", ["scann", "wave", HOST_WAVE])
def test_an_interrupt_while_decoding_ends_the_request(index):
    model, (text,) = random_llama(12), random_tokens(12, 60)

    def interrupt(sequence: int, token: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as kept:
        rajax.generate(model, text, max_new_tokens=40, retrieval=config(index), on_token=interrupt)
    # Even while the traceback lives, as in a debugger.
    assert handles._requests == {}
    del kept


@pytest.mark.parametrize("index", ["scann", "wave", HOST_WAVE])
def test_two_requests_at_once_do_not_meet(index):
    """One compiled step serves both; each finds its own store."""
    model, texts = random_llama(13), random_tokens(13, 60, 75)
    settings = {"max_new_tokens": 10, "retrieval": config(index, keys=8), "stop": ()}
    alone = [rajax.generate(model, t, **settings).tokens[0] for t in texts]
    streams = [rajax.stream(model, t, **settings) for t in texts]
    mixed = [[next(s) for s in streams] for _ in range(10)]
    assert [list(tokens) for tokens in zip(*mixed, strict=True)] == alone
    for stream in streams:
        stream.close()


# --- store and index


def test_a_key_is_found_from_the_moment_it_is_appended():
    draw = np.random.default_rng(0)
    keys, values = draw.standard_normal((2, 400, 16)).astype(np.float32)
    head = Head(400, 16, config(index="exact", top_k=5))
    head.append(keys[:300], values[:300])
    head.adopt(head.build(0, 300))
    for i in range(300, 400):
        head.append(keys[i : i + 1], values[i : i + 1])
        query = keys[i : i + 1] * 10
        found = head.search(query)
        exact, exact_scores = select_top(query @ keys[:300].T, 5)
        assert sorted(found.ids[0]) == sorted(exact[0])
        np.testing.assert_allclose(np.sort(found.scores), np.sort(exact_scores), rtol=1e-5)
        assert found.scanned == i + 1
        # The best of the indexed keys, and the whole tail.
        used = [*exact[0], *range(300, i + 1)]
        scores = keys[used] @ query[0]
        weights = np.exp(scores - scores.max())
        numerator, denominator, _ = head.attend(query, found)
        wanted = weights @ values[used] / weights.sum()
        np.testing.assert_allclose(numerator[0] / denominator[0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [16, 17, 100, 3000])
@pytest.mark.parametrize("leaves", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("projected", [False, True])
def test_scann_scores_are_exact_and_its_ids_distinct(count, leaves, projected):
    draw = np.random.default_rng(count)
    keys = draw.standard_normal((count, 24)).astype(np.float32)
    queries = draw.standard_normal((4, 24)).astype(np.float32)
    root = draw.standard_normal((24, 24)).astype(np.float32) + 6 * np.eye(24, dtype=np.float32)
    index = ScannIndex(keys, root if projected else None)
    for top_k in (1, 50, count, 2 * count):
        found = index.search(queries, top_k, leaves)
        assert found.ids.shape == found.scores.shape == (4, min(top_k, count))
        for row in range(4):
            real = np.isfinite(found.scores[row])
            ids = found.ids[row][real]
            assert real.any() or leaves < 1  # a leaf may be empty
            assert len(set(ids.tolist())) == len(ids)
            np.testing.assert_allclose(
                found.scores[row][real], queries[row] @ keys[ids].T, rtol=1e-4, atol=1e-4
            )
        if top_k >= count:
            assert np.isfinite(found.scores).all()


@pytest.mark.parametrize(
    "keys", [np.zeros((500, 8)), np.ones((500, 8)), np.full((500, 8), 1e4)], ids=["0", "1", "1e4"]
)
def test_keys_that_are_all_alike_are_all_found(keys):
    found = ScannIndex(keys.astype(np.float32)).search(keys[:2].astype(np.float32), 500)
    assert sorted(found.ids[0].tolist()) == list(range(500))
    np.testing.assert_allclose(found.scores, keys[0] @ keys[0], rtol=1e-5)


@pytest.mark.parametrize("bad", [3e19, np.inf, np.nan])
def test_keys_too_large_for_a_search_are_refused(bad):
    """ScaNN would end the process."""
    head = Head(100, 8, config())
    head.append(np.full((100, 8), bad, np.float32), np.ones((100, 8), np.float32))
    with pytest.raises(FloatingPointError, match="keys are not finite or too large for float32"):
        head.build(0, 100)


@pytest.mark.parametrize("count", [1, 15, 16])
def test_a_handful_of_keys_is_searched_exactly_where_scann_cannot(count):
    head = Head(count, 8, config())
    keys = np.random.default_rng(3).standard_normal((count, 8)).astype(np.float32)
    head.append(keys, keys)
    head.adopt(head.build(0, count))
    assert isinstance(head.segments[0].index, ScannIndex if count >= 16 else ExactIndex)
    assert sorted(head.search(keys[:1]).ids[0]) == list(range(count))


def test_scann_finds_nearly_all_of_clustered_keys():
    draw = np.random.default_rng(1)
    centers = draw.standard_normal((60, 32)) * 2
    keys = (centers[draw.integers(0, 60, 6000)] + draw.standard_normal((6000, 32))).astype(np.float32)
    queries = (centers[:12] + draw.standard_normal((12, 32))).astype(np.float32)
    wanted = ExactIndex(keys).search(queries, 64).ids
    got = ScannIndex(keys).search(queries, 64, 0.5).ids
    assert np.mean([np.isin(w, g).mean() for w, g in zip(wanted, got, strict=True)]) > 0.9


def test_where_leaves_hold_too_few_keys_nothing_is_made_up():
    """A part with missing keys attends to those that were found, and without any to none."""
    head = Head(4, 2, config())
    head.append(np.eye(4, 2, dtype=np.float32), np.arange(8, dtype=np.float32).reshape(4, 2))
    head.sealed = 4
    ids, scores = np.array([[2, 0], [0, 0]]), np.array([[1.0, -np.inf], [-np.inf, -np.inf]], np.float32)
    found = Search(ids, scores, ids, scores, 4)
    numerator, denominator, top = head.attend(np.zeros((2, 2), np.float32), found)
    np.testing.assert_allclose(numerator, [[4, 5], [0, 0]])
    np.testing.assert_allclose(denominator, [1, 0])
    np.testing.assert_array_equal(top, [1, -np.inf])


def test_recall_counts_what_an_exact_search_would_find():
    settings = config(index="exact", top_k=10, recall_steps=1)
    store = HostStore(settings, layers=1, kv_heads=1, head_dim=8, capacities=[100])
    draw = np.random.default_rng(2)
    keys = draw.standard_normal((100, 8)).astype(np.float32)

    class Half:
        bytes = 0

        def search(self, queries, scored, leaves):
            found = ExactIndex(keys).search(queries, 10)
            return type(found)(found.ids[:, :5], found.scores[:, :5], 100)

    head = store.heads[0][0][0]
    head.append(keys, keys)
    head.adopt(Segment(0, 100, Half()))
    queries = draw.standard_normal((1, 1, 3, 8)).astype(np.float32)
    store.attend(0, queries, np.array([112]))
    assert store.recall() == 0.5
    store.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"index": "faiss"}, "index must be one of exact, scann, wave; found 'faiss'"),
        ({"top_k": 0}, "top_k must be an integer of at least 1, found 0"),
        ({"index": ["scann"]}, "index must be one of exact, scann, wave; found"),
        ({"leaves_searched": "a"}, "leaves_searched must be from 0 to 1, or None; found 'a'"),
        ({"top_k": 2.5}, "top_k must be an integer"),
        ({"sink_tokens": -1}, "sink_tokens must be an integer of at least 0, found -1"),
        ({"window": 0}, "window must be an integer of at least 1, found 0"),
        ({"window": True}, "window must be an integer of at least 1, found True"),
        ({"leaves_searched": 0}, "leaves_searched=0 does without the index and needs routes of at least 1"),
        ({"leaves_searched": 0, "routes": 8, "index": "exact"}, "leaves_searched=0 does without the index"),
        ({"leaves_searched": 1.5}, "leaves_searched must be from 0 to 1, or None; found 1.5"),
        ({"leaves_searched": float("nan")}, "leaves_searched must be from 0 to 1, or None; found nan"),
        ({"target_error": 0}, "target_error must be above 0 and below 1, or None; found 0"),
        ({"target_error": 1}, "target_error must be above 0 and below 1, or None; found 1"),
        ({"target_error": "small"}, "target_error must be above 0 and below 1, or None; found 'small'"),
        ({"routes": -1}, "routes must be an integer of at least 0, found -1"),
        ({"summary": 1}, "summary must be true or false, found 1"),
        ({"projection": None}, "projection must be true or false, found None"),
        ({"exact_below": -1}, "exact_below must be an integer of at least 0, found -1"),
        ({"recall_steps": -1}, "recall_steps must be an integer of at least 0, found -1"),
        ({"index": "wave", "top_k": 5}, "top_k means nothing to index='wave': leave it at 256"),
        ({"index": "wave", "summary": False}, "summary means nothing to index='wave': leave it at True"),
        ({"block_cache": 0.1}, "block_cache means nothing to index='scann': leave it at 0.05"),
        ({"index": "wave", "block_cache": 1.5}, "block_cache must be from 0 to 1; found 1.5"),
        (
            {"index": "wave", "retrieved_share": 0},
            "retrieved_share must be above 0 and at most 1, or None; found 0",
        ),
        ({"index": "wave", "top_p": 2}, "top_p must be from 0 to 1, or None; found 2"),
        ({"index": "wave", "update_every": 0}, "update_every must be an integer of at least 1, found 0"),
        (
            {"index": "wave", "min_clusters": 50, "max_clusters": 40},
            "min_clusters is 50, more than max_clusters, 40",
        ),
        (
            {"index": "wave", "rank_by": "luck"},
            "rank_by must be one of spread, estimate, bound; found 'luck'",
        ),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        rajax.RetrievalConfig(**settings)


# --- compilation


class ForeignHostPath:
    """The host path as two foreign calls, since JAX lowers callbacks only where the platform's client runs."""

    def submit(self, layer, queries, keys, values, lengths):
        self.shape = queries.shape
        ticket = jax.ShapeDtypeStruct((), np.int32)
        return jax.ffi.ffi_call("submit_to_host", ticket)(queries, keys, values, lengths)

    def collect(self, layer, ticket, after):
        shapes = [jax.ShapeDtypeStruct(s, np.float32) for s in (self.shape, self.shape[:3], self.shape[:3])]
        return Partial(*jax.ffi.ffi_call("collect_from_host", shapes)(ticket, after))


def test_the_decode_step_lowers_for_cuda_with_the_kernel_between_submit_and_collect():
    """On whatever machine this is; no GPU is needed."""
    model, zone, layers, slots = random_llama(14), Zone(3, 9), 3, (2, 2, 12 + 28, 16)
    (graph, treedef), leaves = _split(model)
    zeros = (jnp.zeros(slots),) * layers
    log_counts = (jnp.zeros((2, 2, slots[2] - zone.size)),) * layers
    cache = DeviceCache(zeros, zeros, log_counts, jnp.array([60, 7], jnp.int32), jnp.zeros(2, jnp.int32))
    rope = Rope(jnp.ones((2, 8)), jnp.ones(2))

    def step(leaves, cache, tokens, active, rope):
        return _join((graph, treedef), leaves).decode(
            tokens, cache, active, rope, zone=zone, host=ForeignHostPath()
        )

    program = lower_for_cuda(step, leaves, cache, jnp.zeros(2, jnp.int32), jnp.ones(2, bool), rope)
    calls = re.findall(r"submit_to_host|collect_from_host|call @partial_attention_pallas", program)
    assert calls == ["submit_to_host", "call @partial_attention_pallas", "collect_from_host"] * layers
    assert "triton" in program


def test_a_longer_answer_does_not_compile_again():
    model, (text,) = random_llama(15), random_tokens(15, 60)
    rajax.generate(model, text, max_new_tokens=3, retrieval=config(), stop=())
    compiled = _decode_step(_split(model)[0], Zone(3, 9), CallbackHostPath)._cache_size
    before = compiled()
    rajax.generate(model, random_tokens(16, 90)[0], max_new_tokens=40, retrieval=config(keys=5), stop=())
    assert compiled() == before > 0


def test_no_array_of_the_prefill_is_as_large_as_the_prompt_squared():
    """Every array in the program of one layer at 32,768 tokens, that of Llama's own width included."""
    length = 32768
    model = random_llama(
        num_hidden_layers=1, hidden_size=64, num_attention_heads=9, num_key_value_heads=3, head_dim=64
    )
    with Session(model, [length], [length], None) as session:
        static, leaves = _split(model.layers[0])
        x = jax.ShapeDtypeStruct((1, length, 64), np.float32)
        positions = sample_positions(length, 512)
        layer = functools.partial(_prefill_layer, static, leaves, block=512, precision=None)
        jaxpr = jax.make_jaxpr(layer)(x, session.rope, positions, (0, length // 512))
    sizes = list(_sizes(jaxpr.jaxpr))
    assert len(sizes) > 50
    # The largest are one layer's keys, and one block's scores: 9 heads of 512 by 512.
    assert max(sizes) <= max(length * 3 * 64, 9 * 512 * 512) < length * length / 100


def _sizes(jaxpr):
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield int(np.prod(variable.aval.shape))
        for parameter in jax.tree.leaves(
            equation.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from _sizes(inner)


@pytest.mark.parametrize("length", [1, 128, 129, 512, 513, 4096, 4097, 8191, 8192, 8193, 32768, 100_000])
def test_buckets_are_few_and_waste_little(length):
    size = bucket(length)
    assert size >= length
    assert size % min(512, size) == 0
    assert size <= max(512, length + 512, length * 9 // 8)
    assert bucket(size) == size
