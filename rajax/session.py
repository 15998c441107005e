"""A batch of texts in progress: its keys on the device and on the host, and the two ways to extend it.

`prefill` runs a prompt layer by layer, so that the device holds one layer's keys at a time and no array is
as long as the prompt squared. `Session.step` runs one token of every sequence through the jitted model.

Letters: `B` batch, `T` tokens, `S` prompt length rounded up, `K` key/value heads, `H` head dim, `D` model dim,
`V` vocabulary.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rajax.budget import Exam
from rajax.host_path import CallbackHostPath
from rajax.kernels.partial_attention import BLOCK_S
from rajax.models import DeviceCache, Llama, Rope, Zone
from rajax.models.lesson import Lesson, learn, sample_positions
from rajax.models.summary import CLUSTERS, UNIT, Summary, root_of, sealed_count, slots, summarize
from rajax.retrieval import RetrievalConfig
from rajax.store import HostStore, Learned

OnPrefill = Callable[[int, int], None]
"""Called with (layers done, layers in all) as the prompts of a batch go through the model."""

BLOCK = 512
"""Positions per prefill step: on a CPU the fastest of 128 to 2048, and large enough to fill a GPU."""


def bucket(length: int) -> int:
    """`length` rounded up so that a few compilations serve all lengths, at most an eighth above 4,096."""
    for small in (128, 256, BLOCK):
        if length <= small:
            return small
    granule = max(BLOCK, (1 << (length - 1).bit_length()) // 16)
    return -(-length // granule) * granule


class Session:
    """The state of a batch between tokens.

    Args:
      model: the model.
      lengths: tokens of each prompt.
      capacity: per sequence, the tokens of prompt and answer together.
      retrieval: None keeps all keys on the device (dense attention).

    Use it as a context manager, or call `close`: it owns threads and host memory.
    """

    def __init__(
        self,
        model: Llama,
        lengths: Sequence[int],
        capacity: Sequence[int],
        retrieval: RetrievalConfig | None,
    ):
        config = model.config
        self.config = config
        self.lengths = list(lengths)
        self._static, self._leaves = _split(model)
        self._active = np.ones(len(lengths), bool)
        self._seen, self._capacity = np.array(lengths), np.array(capacity)
        self._parts: list[list[tuple[jax.Array, jax.Array, jax.Array]]]
        self._parts = [[] for _ in range(config.num_hidden_layers)]
        self._cache: DeviceCache | None = None
        self._clusters = 0
        """Clusters of the summary on the device, C, room for the answer's included."""

        frequencies = [config.rope.frequencies(config.head_dim, length) for length in capacity]
        self.rope = Rope(
            jnp.asarray(np.stack([f for f, _ in frequencies])),
            jnp.asarray([f for _, f in frequencies], jnp.float32),
        )
        self.store: HostStore | None = None
        self.zone = Zone(sinks=0, window=bucket(max(capacity)))
        if retrieval is not None:
            zone = Zone(retrieval.sink_tokens, retrieval.window)
            offloaded = [zone.offloaded(c) for c in capacity]
            # A batch that never outgrows the static zone pays for no host path, and its zone for no more slots
            # than the text has tokens.
            if any(offloaded):
                self.zone = zone
                self.store = HostStore(
                    retrieval,
                    layers=config.num_hidden_layers,
                    kv_heads=config.num_key_value_heads,
                    head_dim=config.head_dim,
                    capacities=offloaded,
                )
                if retrieval.summary:
                    # A prompt's last unit may be short, and the GPU's kernel takes keys in blocks.
                    device_slots = zone.size + slots(bucket(max(offloaded)) + UNIT)
                    self._clusters = -(-device_slots // BLOCK_S) * BLOCK_S - zone.size
        self._clustered = [0] * len(lengths)
        """The clusters of each sequence so far."""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(
        self,
        layer: int,
        sequence: int,
        keys: jax.Array,
        values: jax.Array,
        queries: jax.Array,
        positions: np.ndarray,
    ) -> None:
        """Takes one layer of one prompt. Layers come in order.

        Args:
          layer: its number.
          sequence: the prompt's number.
          keys: [1, K, S, H].
          values: [1, K, S, H].
          queries: [1, K, G, Q, H], those at `positions`.
          positions: [Q], from `models.lesson.sample_positions`.
        """
        length = self.lengths[sequence]
        summary = None
        if self.store is not None and (count := self.zone.offloaded(length)):
            first, window = self.zone.sinks, self.zone.window
            lesson = _learn(keys, values, queries, positions, length, sinks=first, window=window)
            sealed = count
            if self._clusters:
                sealed, summary = sealed_count(count), _stored(lesson.summary, keys.dtype)
                self._clustered[sequence] = slots(sealed)
            k, v = (np.asarray(a)[0, :, first : first + count] for a in (keys, values))
            self.store.put(layer, sequence, k, v, _learned(lesson, summary, sealed))
        whole = _room_for(summary, self._clusters, keys)
        static_keys, static_values = (_static_part(a, length, zone=self.zone)[0] for a in (keys, values))
        self._parts[layer].append(
            (
                jnp.concatenate([static_keys, whole.keys], axis=1),
                jnp.concatenate([static_values, whole.values], axis=1),
                whole.log_counts,
            )
        )

    def finish_prefill(self) -> float:
        """Makes the session ready to step; returns the seconds it waited for indexes."""
        layers = []
        for parts in self._parts:
            layers.append([jnp.stack(rows) for rows in zip(*parts, strict=True)])
            parts.clear()
        keys, values, log_counts = zip(*layers, strict=True)
        cache = DeviceCache(keys, values, log_counts, jnp.asarray(self.lengths, jnp.int32))
        # As a step returns it: an array that is not bound to its device would compile the step twice.
        (device,) = self._leaves[0].devices()
        self._cache = jax.device_put(cache, device)
        start = time.perf_counter()
        if self.store is not None:
            self.store.wait_built()
        return time.perf_counter() - start

    def end(self, sequence: int) -> None:
        """From now on this sequence is carried along unchanged."""
        self._active[sequence] = False

    def step(self, tokens: Sequence[int] | np.ndarray | jax.Array) -> jax.Array:
        """Appends one token per sequence; returns the logits [B, V] for the next.

        Raises:
          ValueError: a sequence that has not ended is at its capacity.
          Whatever the host path raised, as it was; the session is then of no further use.
        """
        assert self._cache is not None, "prefill comes before step"
        # A copy: the step may still read it when `end` changes it.
        active = self._active.copy()
        if full := np.flatnonzero(active & (self._seen >= self._capacity)).tolist():
            raise ValueError(f"sequence {full[0]} is at its capacity of {self._capacity[full[0]]} tokens")
        self._seen += active
        handle = np.int32(0 if self.store is None else self.store.handle)
        logits, new = _decode_step(
            self._static,
            self._leaves,
            self._cache,
            jnp.asarray(tokens, jnp.int32),
            active,
            self.rope,
            handle,
            zone=self.zone,
            offload=self.store is not None,
        )
        self._cache = _append(self._cache, new, active, zone=self.zone)
        if self.store is not None:
            logits.block_until_ready()
            self.store.raise_failure()
            for sequence in np.flatnonzero(active).tolist():
                self._grow(sequence)
        return logits

    def _grow(self, sequence: int) -> None:
        """Has the host index a tail that is long enough, and adopts it when that is done."""
        assert self.store is not None
        assert self._cache is not None
        if self.store.tail(sequence) >= UNIT:
            self.store.start_sealing(sequence, UNIT)
        if not self.store.ready_to_adopt(sequence):
            return
        clusters = means = None
        start = self._clustered[sequence]
        if self._clusters:
            # One program for all layers, [L, K, ...].
            new = (np.stack(arrays) for arrays in zip(*self.store.sealing(sequence), strict=True))
            self._cache, clusters, means = _seal(self._cache, *new, sequence, start, zone=self.zone)
            clusters, means = np.asarray(clusters), np.asarray(means.astype(jnp.float32))
            self._clustered[sequence] += CLUSTERS
        self.store.adopt(sequence, clusters, means, start)

    @property
    def device_bytes(self) -> int:
        """Bytes of keys and values on the device, those of the summary included."""
        assert self._cache is not None
        cache = self._cache
        return sum(a.nbytes for a in (*cache.keys, *cache.values, *cache.log_counts))

    def close(self) -> None:
        """Frees the host's memory and threads, after any step that still runs."""
        if self._cache is not None:
            jax.block_until_ready(self._cache)
        if self.store is not None:
            self.store.close()


def prefill(
    model: Llama,
    prompts: Sequence[np.ndarray],
    sessions: Sequence[Session],
    on_prefill: OnPrefill | None = None,
) -> jax.Array:
    """Runs prompts through the model once and hands their keys to every session.

    Args:
      model: the model.
      prompts: B arrays [T] of tokens.
      sessions: of the same prompts and capacity; their attentions may differ.
      on_prefill: told of the progress.

    Returns:
      The logits [B, V] of the token after each prompt.
    """
    rows, split = [], _split(model)
    for sequence, hidden in enumerate(_hidden_states(model, prompts, sessions, on_prefill)):
        last = len(prompts[sequence]) - 1
        rows.append(_logits(*split, hidden[:, last]))
    return jnp.concatenate(rows)


def prefill_logits(
    model: Llama, prompts: Sequence[np.ndarray], sessions: Sequence[Session]
) -> Iterable[np.ndarray]:
    """`prefill`, with the logits [T, V] after every position of each prompt, one prompt at a time."""
    split = _split(model)
    for prompt, hidden in zip(prompts, _hidden_states(model, prompts, sessions, None), strict=True):
        blocks = range(0, len(prompt), BLOCK)
        logits = [np.asarray(_logits(*split, hidden[0, start : start + BLOCK])) for start in blocks]
        yield np.concatenate(logits)[: len(prompt)]


def _hidden_states(
    model: Llama, prompts: Sequence[np.ndarray], sessions: Sequence[Session], on_prefill: OnPrefill | None
) -> Iterable[jax.Array]:
    """The last layer's output [1, S, D] of each prompt in turn."""
    layers = [_split(layer) for layer in model.layers]
    window = min(session.zone.window for session in sessions)
    for sequence, prompt in enumerate(prompts):
        length = bucket(len(prompt))
        tokens = np.zeros((1, length), np.int32)
        tokens[0, : len(prompt)] = prompt
        rope = jax.tree.map(lambda a, i=sequence: a[i : i + 1], sessions[0].rope)
        positions = sample_positions(len(prompt), window)
        x = model.embed(jnp.asarray(tokens))
        for i, (static, leaves) in enumerate(layers):
            x, keys, values, queries = _prefill_layer(
                static, leaves, x, rope, positions, block=min(BLOCK, length)
            )
            for session in sessions:
                session.take(i, sequence, keys, values, queries, positions)
            if on_prefill is not None:
                x.block_until_ready()
                on_prefill(sequence * len(layers) + i + 1, len(prompts) * len(layers))
        yield x


def _split(module: nnx.Module) -> tuple[Any, list[jax.Array]]:
    """A module as (what is compiled in, arrays): a flat list is cheap to hand to a jitted function."""
    graph, state = nnx.split(module)
    leaves, treedef = jax.tree.flatten(state)
    return (graph, treedef), leaves


def _join(static: Any, leaves: list[jax.Array]) -> Any:
    graph, treedef = static
    return nnx.merge(graph, jax.tree.unflatten(treedef, leaves))


@functools.partial(jax.jit, static_argnames=("static", "block"), donate_argnames=("x",))
def _prefill_layer(static, leaves, x, rope, sampled, *, block):
    return _join(static, leaves).prefill(x, rope, sampled, block=block)


@functools.partial(jax.jit, static_argnames=("static",))
def _logits(static, leaves, x):
    return _join(static, leaves).logits(x)


@functools.partial(jax.jit, static_argnames=("static", "zone", "offload"))
def _decode_step(static, leaves, cache, tokens, active, rope, handle, *, zone, offload):
    host = CallbackHostPath(handle) if offload else None
    return _join(static, leaves).decode(tokens, cache, active, rope, zone=zone, host=host)


@functools.partial(jax.jit, static_argnames=("zone",), donate_argnames=("cache",))
def _append(cache, new, active, *, zone):
    return cache.append(zone, new, active)


@functools.partial(jax.jit, static_argnames=("sinks", "window"))
def _learn(keys, values, queries, positions, length, *, sinks, window):
    return learn(keys[0], values[0], queries[0], positions, length, sinks=sinks, window=window)


@functools.partial(jax.jit, static_argnames=("zone",), donate_argnames=("cache",))
def _seal(cache, keys, values, moments, sequence, start, *, zone):
    """Adds a unit of keys [L, K, UNIT, H] to one sequence's summary: the cache, their clusters and those' means."""
    summary, clusters = jax.vmap(summarize, in_axes=(0, 0, None, 0))(
        keys, values, jnp.int32(UNIT), root_of(moments)
    )
    summary = _stored(summary, cache.keys[0].dtype)
    layers = [jax.tree.map(lambda a, i=i: a[i], summary) for i in range(len(keys))]
    return cache.add_clusters(zone, layers, sequence, start), clusters, summary.keys


def _stored(summary: Summary, dtype: Any) -> Summary:
    """A summary as the cache holds it."""
    return Summary(summary.keys.astype(dtype), summary.values.astype(dtype), summary.log_counts)


def _room_for(summary: Summary | None, clusters: int, keys: jax.Array) -> Summary:
    """A summary of `clusters` clusters, those of `summary` first and the others empty."""
    _, heads, _, width = keys.shape
    if summary is None:
        nothing = jnp.zeros((heads, 0, width), keys.dtype)
        summary = Summary(nothing, nothing, jnp.zeros((heads, 0)))
    # A lesson has room for all the slots of a prompt's bucket; those past its keys are empty.
    used = min(summary.keys.shape[1], clusters)
    free = (0, clusters - used)
    return Summary(
        jnp.pad(summary.keys[:, :used], ((0, 0), free, (0, 0))),
        jnp.pad(summary.values[:, :used], ((0, 0), free, (0, 0))),
        jnp.pad(summary.log_counts[:, :used], ((0, 0), free), constant_values=-jnp.inf),
    )


def _learned(lesson: Lesson, summary: Summary | None, sealed: int) -> Learned:
    """What the host needs of a lesson, as NumPy arrays."""
    host: Any = jax.tree.map(np.asarray, lesson)
    heads, _, width = host.exam.shape
    if summary is None:
        clusters = np.full((heads, sealed), -1, np.int32)
        means = mean_values = np.zeros((heads, 0, width), np.float32)
        log_counts = np.zeros((heads, 0), np.float32)
    else:
        clusters = host.clusters[:, :sealed]
        means, mean_values, log_counts = (
            np.asarray(a, np.float32)[:, : slots(sealed)]
            for a in (summary.keys, summary.values, summary.log_counts)
        )
    seen = host.seen
    exams = [
        Exam(host.exam[k], seen.numerator[0, k], seen.denominator[0, k], seen.max[0, k], *clusters_of_head)
        for k, clusters_of_head in enumerate(zip(means, mean_values, log_counts, strict=True))
    ]
    return Learned(sealed, clusters, host.root, host.queries, host.routes, exams)


@functools.partial(jax.jit, static_argnames=("zone",))
def _static_part(keys: jax.Array, length: jax.Array, *, zone: Zone) -> jax.Array:
    """The static zone's slots [1, K, zone.size, H] after a prompt of `length` tokens."""
    positions = jnp.clip(zone.positions(length), 0, keys.shape[2] - 1)
    return keys[:, :, positions]
