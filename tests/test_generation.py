"""What `generate`, `stream` and `logits` promise their callers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_llama import random_llama, random_tokens

import rajax
from rajax.generation import DEFAULT_MAX_NEW_TOKENS
from rajax.session import Session, prefill

TEXT = random_tokens(0, 30)[0]


@pytest.fixture(scope="module")
def model() -> rajax.Llama:
    return random_llama(max_position_embeddings=512, eos_token_ids=(63,))


def answer(model: rajax.Llama, tokens=TEXT, **settings):
    return rajax.generate(model, tokens, **{"max_new_tokens": 6, "stop": (), "retrieval": None, **settings})


def test_greedy_is_the_argmax_of_a_fresh_prefill_at_every_step(model):
    made = answer(model, max_new_tokens=12).tokens[0]
    text = list(TEXT)
    for token in made:
        assert token == rajax.logits(model, text)[0, -1].argmax()
        text.append(token)


@pytest.mark.parametrize("kind", [list, tuple, np.asarray, jnp.asarray, lambda t: np.asarray(t, np.int64)])
def test_tokens_come_in_any_integer_form(model, kind):
    wanted = answer(model).tokens
    assert answer(model, kind(TEXT)).tokens == wanted
    assert answer(model, [kind(TEXT)]).tokens == wanted


def test_a_two_dimensional_array_is_a_batch(model):
    texts = np.stack(random_tokens(1, 20, 20))
    assert answer(model, texts).tokens == [answer(model, t).tokens[0] for t in texts]


def test_stop_tokens_default_to_the_checkpoints(model):
    free = answer(model, max_new_tokens=20)
    assert free.finish_reasons == ["length"]
    assert len(free.tokens[0]) == 20
    token = free.tokens[0][3]
    first = free.tokens[0].index(token)
    stopped = answer(model, max_new_tokens=20, stop=[token])
    assert stopped.tokens[0] == free.tokens[0][: first + 1]
    assert stopped.finish_reasons == ["stop"]
    own = random_llama(max_position_embeddings=512, eos_token_ids=(token,))
    assert answer(own, max_new_tokens=20, stop=None).tokens == stopped.tokens


def test_on_token_and_stream_tell_every_token_in_order(model):
    texts, told = random_tokens(2, 10, 25), []
    result = answer(model, texts, on_token=lambda row, token: told.append((row, token)))
    assert [t for row, t in told if row == 0] == result.tokens[0]
    assert [t for row, t in told if row == 1] == result.tokens[1]
    stream = rajax.stream(model, TEXT, max_new_tokens=6, stop=(), retrieval=None)
    streamed = []
    while True:
        try:
            streamed.append(next(stream))
        except StopIteration as done:
            returned = done.value
            break
    assert returned.tokens == [streamed] == answer(model).tokens


def test_on_prefill_counts_layers(model):
    told = []
    answer(
        model, [TEXT, TEXT[:5]], max_new_tokens=1, on_prefill=lambda done, total: told.append((done, total))
    )
    assert told == [(i, 6) for i in range(1, 7)]


def test_seeds(model):
    hot = rajax.Sampling(temperature=1.5)
    first = answer(model, max_new_tokens=20, sampling=hot, key=1)
    assert answer(model, max_new_tokens=20, sampling=hot, key=1).tokens == first.tokens
    assert answer(model, max_new_tokens=20, sampling=hot, key=jax.random.key(1)).tokens == first.tokens
    assert answer(model, max_new_tokens=20, sampling=hot, key=np.int64(1)).tokens == first.tokens
    assert answer(model, max_new_tokens=20, sampling=hot, key=2).tokens != first.tokens
    assert (
        answer(model, max_new_tokens=20, sampling=hot).tokens
        != answer(model, max_new_tokens=20, sampling=hot).tokens
    )


def test_a_repetition_penalty_counts_prompt_and_answer(model):
    made = answer(model, max_new_tokens=20, sampling=rajax.Sampling(repetition_penalty=1e6)).tokens[0]
    assert len(set(made)) == 20
    assert not set(made) & set(TEXT.tolist())


def test_the_answer_may_fill_the_models_positions(model):
    text = random_tokens(3, 508)[0]
    assert len(answer(model, text, max_new_tokens=4).tokens[0]) == 4
    assert len(rajax.generate(model, text, stop=(), retrieval=None).tokens[0]) == 4
    assert DEFAULT_MAX_NEW_TOKENS > 4


@pytest.mark.parametrize(
    ("tokens", "settings", "error", "message"),
    [
        ([], {}, ValueError, "the prompt is empty"),
        ([[]], {}, ValueError, "sequence 0 is empty"),
        ([[1, 2], []], {}, ValueError, "sequence 1 is empty"),
        (np.zeros((2, 0), np.int32), {}, ValueError, "sequence 0 is empty"),
        (
            [1, 64],
            {},
            ValueError,
            "token id 64 at position 1 of sequence 0 lies outside the vocabulary of 64",
        ),
        ([[1], [2, -1]], {}, ValueError, "token id -1 at position 1 of sequence 1"),
        ([1.0, 2.0], {}, TypeError, "token ids must be integers, found float64 in sequence 0"),
        ([True, False], {}, TypeError, "token ids must be integers, found bool"),
        ("hello", {}, TypeError, "tokens must be a sequence of token ids .*, found text; encode it"),
        (["hello"], {}, TypeError, "token ids must be integers, found <U5"),
        ({0: 1}, {}, TypeError, "tokens must be a sequence of token ids"),
        ([1, [2, 3]], {}, ValueError, "sequence 0 must be one-dimensional"),
        ([[[1]]], {}, ValueError, "sequence 0 must be one-dimensional"),
        ([1] * 513, {}, ValueError, "513 tokens and 6 new ones, past the model's 512 positions"),
        ([1] * 510, {}, ValueError, "510 tokens and 6 new ones, past the model's 512 positions"),
        ([1], {"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1, found 0"),
        ([1], {"retrieval": True}, TypeError, "retrieval must be a RetrievalConfig, or None .*; found True"),
        ([1], {"sampling": None}, TypeError, "sampling must be a Sampling; found None"),
        ([1], {"max_new_tokens": "5"}, TypeError, "max_new_tokens must be an integer, found '5'"),
        ([1], {"max_new_tokens": 2.0}, TypeError, "max_new_tokens must be an integer, found 2.0"),
        ([1], {"stop": 5}, TypeError, "stop must be a sequence of token ids, found 5"),
        ([1], {"stop": "12"}, TypeError, "stop must be a sequence of token ids, found '12'"),
        ([1], {"stop": [2.5]}, TypeError, "a stop token must be an integer, found 2.5"),
        ([1], {"key": "a"}, TypeError, "key must be an integer, found 'a'"),
        ([1], {"key": -1}, ValueError, "key must be a seed from 0 to .* found -1"),
        ([1], {"key": 2**32}, ValueError, "key must be a seed from 0 to .* found 4294967296"),
        ([1], {"stop": [64]}, ValueError, "stop token 64 lies outside the vocabulary of 64"),
    ],
)
def test_bad_requests_are_refused_before_any_work(model, tokens, settings, error, message):
    with pytest.raises(error, match=message):
        answer(model, tokens, **settings)
    if len(tokens) < 513:
        with pytest.raises((ValueError, TypeError)):
            rajax.stream(model, tokens, **{"max_new_tokens": 6, **settings})


def test_params_must_be_a_model():
    for call in (rajax.generate, rajax.stream, rajax.logits):
        with pytest.raises(TypeError, match=r"params must be a model from rajax\.load, found str"):
            call("checkpoint", [1])


def test_a_full_prompt_is_refused_also_by_default(model):
    with pytest.raises(ValueError, match="512 tokens and 1 new ones, past the model's 512 positions"):
        rajax.generate(model, [1] * 512)
    with pytest.raises(ValueError, match="513 tokens, past the model's 512 positions"):
        rajax.logits(model, [1] * 513)


def test_stream_takes_one_sequence_and_known_arguments(model):
    with pytest.raises(ValueError, match="stream takes one sequence"):
        rajax.stream(model, [[1], [2]])
    with pytest.raises(TypeError, match="stream has no argument 'on_token'"):
        rajax.stream(model, [1], on_token=print)


def test_what_is_no_sequence_or_no_function_is_refused(model):
    for tokens in (5, None):
        with pytest.raises(TypeError, match="tokens must be a sequence of token ids"):
            answer(model, tokens)
    with pytest.raises(TypeError, match="on_token must be callable, found 5"):
        answer(model, on_token=5)


@pytest.mark.parametrize("retrieval", [None, rajax.RetrievalConfig(sink_tokens=2, window=4)])
def test_damaged_weights_make_no_tokens(model, retrieval):
    damaged = jax.tree.map(lambda a: a * jnp.nan, model)
    with pytest.raises(FloatingPointError, match="not finite"):
        answer(damaged, retrieval=retrieval)


def test_logits_of_a_batch_are_padded_with_zeros(model):
    texts = random_tokens(4, 7, 20)
    both = rajax.logits(model, texts)
    assert both.shape == (2, 20, 64)
    assert both.dtype == np.float32
    for row, text in enumerate(texts):
        np.testing.assert_allclose(both[row, : len(text)], rajax.logits(model, text)[0], atol=1e-5)
    assert (both[0, 7:] == 0).all()


def test_bfloat16_stays_near_float32():
    """The same weights in bfloat16: the most likely token is nearly always the same."""
    model = random_llama(5)
    low = jax.tree.map(lambda a: a.astype(jnp.bfloat16), model)
    text = random_tokens(5, 60)[0]
    full = rajax.logits(model, text)[0]
    for settings in ({}, {"retrieval": rajax.RetrievalConfig(sink_tokens=2, window=8), "decode_from": 20}):
        rounded = rajax.logits(low, text, **settings)[0]
        assert np.corrcoef(full.ravel(), rounded.ravel())[0, 1] > 0.99


def test_a_session_does_not_outgrow_its_capacity(model):
    with Session(model, [5, 3], [6, 9], None) as session:
        prefill(model, random_tokens(6, 5, 3), [session])
        session.finish_prefill()
        session.step([1, 2])
        with pytest.raises(ValueError, match="sequence 0 is at its capacity of 6 tokens"):
            session.step([1, 2])
        session.end(0)
        session.step([1, 2])
