"""`generate`, `stream` and `logits`: what users call.

Letters: `B` batch, `T` tokens, `V` vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import secrets
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rajax.models import Llama
from rajax.retrieval import RetrievalConfig
from rajax.sampling import NOT_FINITE, Sampling, sample
from rajax.session import OnPrefill, Session, prefill, prefill_logits

DEFAULT_MAX_NEW_TOKENS = 256

Tokens = Sequence[int] | Sequence[Sequence[int]] | np.ndarray | jax.Array
"""One sequence of token ids, or a batch of sequences of any lengths."""


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What a generation took.

    Attributes:
      prefill_s: seconds from the call to the logits of the first token, compilation included.
      index_s: seconds of those in which only the index build was left to wait for.
      ttft_s: time to first token: seconds from the call to the first token.
      decode_s: seconds of all decode steps after the first token.
      first_step_s: seconds of the first decode step, which compiles when the shapes are new.
      decode_steps: decode steps.
      device_kv_bytes: keys and values on the device.
      host_kv_bytes: keys and values in host memory, at the end.
      index_bytes: what the indexes hold in host memory besides, at the end.
      keys_offloaded: offloaded keys, summed over steps, layers and query heads.
      keys_scanned: those of them that a search looked at (for ScaNN: the share of leaves searched); for
        index="wave" the clusters that were ranked.
      keys_scored: those of them whose score was computed exactly.
      keys_retrieved: those of them that attention used.
      top_k, leaves_searched, routes: what the heads searched with, mean over layers and key/value heads; where the
        configuration leaves it open, each chose for itself. None for dense attention.
      cache_hit_ratio: with the wave buffer, the share of the clusters retrieved that were in the device's cache.
      bytes_moved: with the wave buffer, bytes of the keys and values that decode moved from host to device.
      evictions: with the wave buffer, clusters that had to leave the cache.
      recall: mean recall@k against an exact search over the first `RetrievalConfig.recall_steps` steps.
    """

    prefill_s: float
    index_s: float
    ttft_s: float
    decode_s: float
    first_step_s: float
    decode_steps: int
    device_kv_bytes: int
    host_kv_bytes: int = 0
    index_bytes: int = 0
    keys_offloaded: int = 0
    keys_scanned: int = 0
    keys_scored: int = 0
    keys_retrieved: int = 0
    top_k: float | None = None
    leaves_searched: float | None = None
    routes: float | None = None
    cache_hit_ratio: float | None = None
    bytes_moved: int | None = None
    evictions: int | None = None
    recall: float | None = None

    @property
    def steps_per_s(self) -> float | None:
        """Decode steps per second without the first one; times the batch size, tokens per second."""
        if self.decode_steps < 2:
            return None
        return (self.decode_steps - 1) / (self.decode_s - self.first_step_s)


@dataclasses.dataclass(frozen=True)
class Generation:
    """The answers to a batch of prompts.

    Attributes:
      tokens: per sequence, the new tokens, a stop token included.
      finish_reasons: per sequence "stop" (a stop token came) or "length" (max_new_tokens were made).
      statistics: times, bytes and keys.
    """

    tokens: list[list[int]]
    finish_reasons: list[str]
    statistics: Statistics


def generate(
    params: Llama,
    tokens: Tokens,
    *,
    max_new_tokens: int | None = None,
    retrieval: RetrievalConfig | None = RetrievalConfig(),  # noqa: B008 - frozen
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    stop: Sequence[int] | None = None,
    key: int | jax.Array | None = None,
    on_token: Callable[[int, int], None] | None = None,
    on_prefill: OnPrefill | None = None,
) -> Generation:
    """Continues one or several token sequences.

    Args:
      params: a model from `rajax.load`.
      tokens: one sequence of token ids or a batch of them, of any lengths.
      max_new_tokens: tokens to make per sequence at most. By default 256, or fewer where the model's
        positions end. With `dynamic` and `longrope` RoPE the frequencies are those of prompt and answer
        together, so there this number matters to the answer.
      retrieval: how offloaded keys are found. None is dense attention: all keys stay on the device.
      sampling: how a token is chosen; greedy by default.
      stop: token ids that end a sequence; by default the checkpoint's. () never stops.
      key: a JAX random key or an integer seed; by default a fresh one. Unused by greedy sampling.
      on_token: called with (sequence, token) for each token as it is made.
      on_prefill: called with (layers done, layers in all) during the prefill.

    Returns:
      A `Generation`.

    Raises:
      ValueError: an empty prompt, a token id outside the vocabulary, more positions than the model has, or
        a setting out of range.
      TypeError: an argument of the wrong kind.
      FloatingPointError: the model's logits are not finite.
      Whatever the host path raises, as it was; the next call works.
    """
    if on_token is not None and not callable(on_token):
        raise TypeError(f"on_token must be callable, found {on_token!r}")
    run = _run(params, tokens, max_new_tokens, retrieval, sampling, stop, key, on_prefill)
    # Closed here and now: the traceback of an exception in on_token would keep the request alive.
    with contextlib.closing(run):
        while True:
            try:
                sequence, token = next(run)
            except StopIteration as done:
                return done.value
            if on_token is not None:
                on_token(sequence, token)


def stream(params: Llama, tokens: Tokens, **settings: Any) -> Generator[int, None, Generation]:
    """`generate` for one sequence, as an iterator over its tokens.

    Takes the keyword arguments of `generate` except `on_token`. The generator's return value is the
    `Generation`; closing it early ends the request.

    Raises:
      ValueError: as `generate`, at the call; also for a batch of more than one sequence.
    """
    prompts = check_tokens(tokens, params)
    if len(prompts) != 1:
        raise ValueError("stream takes one sequence; for a batch use generate with on_token")
    names = ("max_new_tokens", "retrieval", "sampling", "stop", "key", "on_prefill")
    if unknown := sorted(set(settings) - set(names)):
        raise TypeError(f"stream has no argument {unknown[0]!r}; it has {', '.join(names)}")
    settings = {"retrieval": RetrievalConfig(), "sampling": Sampling(), **settings}
    run = _run(params, prompts, *(settings.get(name) for name in names))  # type: ignore[arg-type]

    def only_tokens() -> Generator[int, None, Generation]:
        try:
            while True:
                try:
                    _, token = next(run)
                except StopIteration as done:
                    return done.value
                yield token
        finally:
            run.close()

    return only_tokens()


def logits(
    params: Llama,
    tokens: Tokens,
    retrieval: RetrievalConfig | None = None,
    *,
    decode_from: int | None = None,
) -> np.ndarray:
    """The logits after every token of a text, for parity tests and perplexity.

    Args:
      params: a model from `rajax.load`.
      tokens: one sequence or a batch of them.
      retrieval: None computes dense attention.
      decode_from: positions before this one are run as a prompt, whose attention is exact; the others
        through decode, one token at a time, as if they had been generated. By default a text without
        retrieval is all prompt, and one with retrieval is decoded from the end of the static zone on, the
        first position at which retrieval can matter. That takes a decode step per token.

    Returns:
      [B, T, V] float32; T is the longest sequence, and rows past a sequence's end are zero.

    Raises:
      ValueError: as `generate`.
    """
    prompts = check_tokens(tokens, params)
    _check_retrieval(retrieval)
    _check_positions(prompts, 0, params)
    longest = max(len(p) for p in prompts)
    if decode_from is None:
        decode_from = longest if retrieval is None else retrieval.zone_size
    if decode_from < 1:
        raise ValueError(f"decode_from must be at least 1, found {decode_from}")
    out = np.zeros((len(prompts), longest, params.config.vocab_size), np.float32)
    starts = [p[:decode_from] for p in prompts]
    with Session(params, [len(s) for s in starts], [len(p) for p in prompts], retrieval) as session:
        for row, rows in enumerate(prefill_logits(params, starts, [session])):
            out[row, : len(rows)] = rows
        session.finish_prefill()
        for position in range(decode_from, longest):
            for row, prompt in enumerate(prompts):
                if len(prompt) <= position:
                    session.end(row)
            step = np.asarray(session.step([p[min(position, len(p) - 1)] for p in prompts]))
            for row, prompt in enumerate(prompts):
                if position < len(prompt):
                    out[row, position] = step[row]
    return out


def check_tokens(tokens: Tokens, params: Llama) -> list[np.ndarray]:
    """The prompts as int32 arrays.

    Raises:
      ValueError: no prompt, an empty one, or a token id outside the vocabulary.
      TypeError: something other than integers, or `params` that are no model.
    """
    if not isinstance(params, Llama):
        raise TypeError(f"params must be a model from rajax.load, found {type(params).__name__}")
    if isinstance(tokens, str) or not hasattr(tokens, "__len__") or isinstance(tokens, dict):
        what = (
            "text; encode it with rajax.load_tokenizer(path).encode"
            if isinstance(tokens, str)
            else repr(tokens)
        )
        raise TypeError(f"tokens must be a sequence of token ids or a batch of them, found {what}")
    if len(tokens) == 0:
        raise ValueError("the prompt is empty: give at least one token")
    sequences = tokens if hasattr(tokens[0], "__len__") and np.ndim(tokens[0]) else [tokens]
    prompts = []
    for i, sequence in enumerate(sequences):
        try:
            prompt = np.asarray(sequence)
        except ValueError as error:
            raise ValueError(f"sequence {i} must be one-dimensional: {error}") from error
        if prompt.ndim != 1:
            raise ValueError(f"sequence {i} must be one-dimensional, found shape {prompt.shape}")
        if prompt.size == 0:
            raise ValueError(f"sequence {i} is empty: give at least one token")
        if not np.issubdtype(prompt.dtype, np.integer):
            raise TypeError(f"token ids must be integers, found {prompt.dtype} in sequence {i}")
        vocabulary = params.config.vocab_size
        outside = np.flatnonzero((prompt < 0) | (prompt >= vocabulary))
        if outside.size:
            raise ValueError(
                f"token id {prompt[outside[0]]} at position {outside[0]} of sequence {i} lies outside the "
                f"vocabulary of {vocabulary}"
            )
        prompts.append(prompt.astype(np.int32))
    return prompts


def _stop_tokens(params: Llama, stop: Sequence[int] | None) -> frozenset[int]:
    if stop is None:
        return frozenset(params.config.eos_token_ids)
    if isinstance(stop, str) or not hasattr(stop, "__len__"):
        raise TypeError(f"stop must be a sequence of token ids, found {stop!r}")
    stops = frozenset(_integer("a stop token", token) for token in stop)
    for token in stops:
        if not 0 <= token < params.config.vocab_size:
            raise ValueError(f"stop token {token} lies outside the vocabulary of {params.config.vocab_size}")
    return stops


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, found {value!r}") from None


def _check_retrieval(retrieval: object) -> None:
    if not isinstance(retrieval, RetrievalConfig | None):
        raise TypeError(
            f"retrieval must be a RetrievalConfig, or None for dense attention; found {retrieval!r}"
        )


def _check_positions(prompts: Sequence[np.ndarray], new_tokens: int, params: Llama) -> None:
    limit = params.config.max_positions
    for i, prompt in enumerate(prompts):
        if len(prompt) + new_tokens > limit:
            needed = f"{len(prompt)} tokens" + (f" and {new_tokens} new ones" if new_tokens else "")
            raise ValueError(
                f"sequence {i} has {needed}, past the model's {limit} positions. Shorten it, or load the model "
                'with rope_scaling={"rope_type": "yarn", "factor": ...}'
            )


def _run(
    params: Llama,
    tokens: Tokens,
    max_new_tokens: int | None,
    retrieval: RetrievalConfig | None,
    sampling: Sampling,
    stop: Sequence[int] | None,
    key: int | jax.Array | None,
    on_prefill: OnPrefill | None,
) -> Generator[tuple[int, int], None, Generation]:
    """Checks the arguments at once; the generator it returns yields (sequence, token)."""
    prompts = check_tokens(tokens, params)
    _check_retrieval(retrieval)
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling must be a Sampling; found {sampling!r}")
    if max_new_tokens is None:
        room = params.config.max_positions - max(len(p) for p in prompts)
        max_new_tokens = max(1, min(DEFAULT_MAX_NEW_TOKENS, room))
    max_new_tokens = _integer("max_new_tokens", max_new_tokens)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, found {max_new_tokens}")
    _check_positions(prompts, max_new_tokens, params)
    stops = _stop_tokens(params, stop)
    if key is None:
        key = secrets.randbits(32)
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        seed = _integer("key", key)
        if not 0 <= seed < 2**32:
            raise ValueError(f"key must be a seed from 0 to 2**32 - 1 or a JAX key, found {seed}")
        key = jax.random.key(np.uint32(seed))
    return _decode(params, prompts, max_new_tokens, retrieval, sampling, stops, key, on_prefill)


def _decode(
    params: Llama,
    prompts: Sequence[np.ndarray],
    max_new_tokens: int,
    retrieval: RetrievalConfig | None,
    sampling: Sampling,
    stops: frozenset[int],
    key: jax.Array,
    on_prefill: OnPrefill | None,
) -> Generator[tuple[int, int], None, Generation]:
    """A request from its prompts to its answers."""
    start = time.perf_counter()
    lengths = [len(p) for p in prompts]
    with Session(params, lengths, [n + max_new_tokens for n in lengths], retrieval) as session:
        first = prefill(params, prompts, [session], on_prefill).block_until_ready()
        index_s = session.finish_prefill()
        prefill_s = time.perf_counter() - start
        return (
            yield from decode(
                session,
                prompts,
                first,
                max_new_tokens,
                sampling=sampling,
                stops=stops,
                key=key,
                prefill_s=prefill_s,
                index_s=index_s,
            )
        )


def decode(
    session: Session,
    prompts: Sequence[np.ndarray],
    next_logits: jax.Array,
    max_new_tokens: int,
    *,
    sampling: Sampling,
    stops: frozenset[int],
    key: jax.Array,
    prefill_s: float,
    index_s: float,
) -> Generator[tuple[int, int], None, Generation]:
    """The loop over tokens: the answers of a session that has finished its prefill.

    Args:
      session: of the prompts.
      prompts: B arrays [T].
      next_logits: [B, V], those after the prompts.
      max_new_tokens: tokens to make per sequence at most.
      sampling: how a token is chosen.
      stops: tokens that end a sequence.
      key: a JAX random key.
      prefill_s, index_s: for the statistics.

    Yields:
      (sequence, token); the generator's return value is the `Generation`.

    Raises:
      As `generate`.
    """
    batch = len(prompts)
    answers: list[list[int]] = [[] for _ in prompts]
    reasons: list[str | None] = [None] * batch
    seen = _seen(prompts, session.config.vocab_size if sampling.repetition_penalty != 1 else 0)
    # Of the first token, which takes no step, and of each step.
    seconds: list[float] = []
    chosen = np.zeros(batch, np.int32)
    for step in range(max_new_tokens):
        begin = time.perf_counter()
        if step:
            next_logits = session.step(chosen)
        device_tokens, seen = sample(next_logits, seen, key, np.int32(step), sampling=sampling)
        chosen = np.asarray(device_tokens)
        for row in range(batch):
            if chosen[row] == NOT_FINITE and reasons[row] is None:
                raise FloatingPointError(
                    f"the logits of sequence {row} are not finite after {len(answers[row])} new tokens: the "
                    "weights are damaged, or overflow in this dtype; try dtype='float32'"
                )
        seconds.append(time.perf_counter() - begin)
        fresh = [row for row in range(batch) if reasons[row] is None]
        for row in fresh:
            token = int(chosen[row])
            answers[row].append(token)
            if token in stops:
                reasons[row] = "stop"
                session.end(row)
        for row in fresh:
            yield row, int(chosen[row])
        if all(reasons):
            break
    store = session.store
    statistics = Statistics(
        prefill_s=prefill_s,
        index_s=index_s,
        ttft_s=prefill_s + seconds[0],
        decode_s=sum(seconds[1:]),
        first_step_s=seconds[1] if len(seconds) > 1 else 0.0,
        decode_steps=len(seconds) - 1,
        device_kv_bytes=session.device_bytes,
        **(store.statistics() if store else {}),
    )
    return Generation(answers, [reason or "length" for reason in reasons], statistics)


def _seen(prompts: Sequence[np.ndarray], vocabulary: int) -> jax.Array:
    """[B, V] bool: the tokens of each prompt; [B, 0] for a vocabulary of 0."""
    seen = np.zeros((len(prompts), vocabulary), bool)
    if vocabulary:
        for row, prompt in zip(seen, prompts, strict=True):
            row[prompt] = True
    return jnp.asarray(seen)
