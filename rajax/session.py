"""A batch of texts in progress: its keys on the device and on the host, and the two ways to extend it.

`prefill` runs a prompt layer by layer, so that the device holds one layer's keys at a time and no array is
as long as the prompt squared. `Session.step` runs one token of every sequence through the jitted model.

Letters: `B` batch, `T` tokens, `S` prompt length rounded up, `K` key/value heads, `H` head dim, `D` model dim,
`V` vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rajax.models import DeviceCache, Llama, Rope, Zone
from rajax.models.lesson import sample_positions
from rajax.models.llama import PREFILL_PRECISIONS
from rajax.models.summary import no_clusters
from rajax.offload import Offload, offload
from rajax.retrieval import RetrievalConfig
from rajax.shapes import BLOCK, bucket

OnPrefill = Callable[[int, int], None]
"""Called with (layers done, layers in all) as the prompts of a batch go through the model."""


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
        self._step: Any = None
        frequencies = [config.rope.frequencies(config.head_dim, length) for length in capacity]
        self.rope = Rope(
            jnp.asarray(np.stack([f for f, _ in frequencies])),
            jnp.asarray([f for _, f in frequencies], jnp.float32),
        )
        dtype = model.layers[0].self_attn.qkv_proj.kernel[...].dtype
        self.offload: Offload | None = None
        # Every slot is read at every step, so few may be left over.
        self.zone = Zone(sinks=0, window=bucket(max(capacity), parts=128))
        if retrieval is not None:
            self.offload = offload(retrieval, config, dtype, lengths, capacity)
        if self.offload is not None:
            self.zone = self.offload.zone

    @property
    def store(self) -> Any:
        """The host's part of the request; None where nothing leaves the device."""
        return self.offload and self.offload.store

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
        if self.offload is not None:
            whole = self.offload.take(layer, sequence, keys, values, queries, positions)
        else:
            whole = no_clusters(keys.shape[1], keys.shape[3], keys.dtype)
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
        starts = np.zeros(len(self.lengths), np.int32) if self.offload is None else self.offload.starts
        lengths = jnp.asarray(self.lengths, jnp.int32)
        cache = DeviceCache(keys, values, log_counts, lengths, jnp.asarray(starts, jnp.int32))
        # As a step returns it: an array that is not bound to its device would compile the step twice.
        (device,) = self._leaves[0].devices()
        self._cache = jax.device_put(cache, device)
        start = time.perf_counter()
        if self.offload is not None:
            self.offload.finish_prefill()
            self.offload.state = jax.device_put(self.offload.state, device)
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
        keys = self.offload
        path: Any = None
        handle, state = np.int32(0), ()
        if keys is not None:
            path, handle, state = keys.path, np.int32(keys.store.handle), keys.state
        if self._step is None:
            self._step = _decode_step(self._static, self.zone, path)
        logits, new, outcome = self._step(
            self._leaves, self._cache, jnp.asarray(tokens, jnp.int32), active, self.rope, handle, state
        )
        self._cache = _append(self._cache, new, active, zone=self.zone)
        if keys is not None:
            logits.block_until_ready()
            keys.store.raise_failure()
            self._cache = keys.after_step(self._cache, outcome, active, self._seen)
        return logits

    @property
    def device_bytes(self) -> int:
        """Bytes of keys and values on the device, and of what stands there for the offloaded ones."""
        assert self._cache is not None
        cache = self._cache
        held = sum(a.nbytes for a in (*cache.keys, *cache.values, *cache.log_counts))
        return held + (self.offload.state_bytes if self.offload is not None else 0)

    def wait(self) -> None:
        """Waits for what the last step left running."""
        jax.block_until_ready((self._cache, self.offload and self.offload.state))

    def close(self) -> None:
        """Frees the host's memory and threads, after any step that still runs."""
        self.wait()
        if self.offload is not None:
            self.offload.store.close()


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
    for sequence, hidden in enumerate(
        _hidden_states(model, prompts, sessions, on_prefill, all_of_them=False)
    ):
        last = len(prompts[sequence]) - 1
        rows.append(_logits(*split, hidden[:, last]))
    return jnp.concatenate(rows)


def prefill_logits(
    model: Llama, prompts: Sequence[np.ndarray], sessions: Sequence[Session]
) -> Iterable[np.ndarray]:
    """`prefill`, with the logits [T, V] after every position of each prompt, one prompt at a time."""
    split = _split(model)
    for prompt, hidden in zip(prompts, _hidden_states(model, prompts, sessions), strict=True):
        blocks = range(0, len(prompt), BLOCK)
        logits = [np.asarray(_logits(*split, hidden[0, start : start + BLOCK])) for start in blocks]
        yield np.concatenate(logits)[: len(prompt)]


def _hidden_states(
    model: Llama,
    prompts: Sequence[np.ndarray],
    sessions: Sequence[Session],
    on_prefill: OnPrefill | None = None,
    *,
    all_of_them: bool = True,
) -> Iterable[jax.Array]:
    """The last layer's output [1, S, D] of each prompt in turn; at the last token alone unless `all_of_them`."""
    layers = [_split(layer) for layer in model.layers]
    window = min(session.zone.window for session in sessions)
    precision = PREFILL_PRECISIONS[model.prefill_precision]
    for sequence, prompt in enumerate(prompts):
        length = bucket(len(prompt))
        block = min(BLOCK, length)
        last = (len(prompt) - 1) // block
        tokens = np.zeros((1, length), np.int32)
        tokens[0, : len(prompt)] = prompt
        rope = jax.tree.map(lambda a, i=sequence: a[i : i + 1], sessions[0].rope)
        positions = sample_positions(len(prompt), window)
        x = model.embed(jnp.asarray(tokens))
        for i, (static, leaves) in enumerate(layers):
            # Blocks of padding are left out, and of the last layer's all but one.
            wanted = last if i == len(layers) - 1 and not all_of_them else 0, last + 1
            x, keys, values, queries = _prefill_layer(
                static, leaves, x, rope, positions, wanted, block=block, precision=precision
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


@functools.partial(jax.jit, static_argnames=("static", "block", "precision"), donate_argnames=("x",))
def _prefill_layer(static, leaves, x, rope, sampled, wanted, *, block, precision):
    # None leaves what the user set for JAX.
    with jax.default_matmul_precision(precision) if precision else contextlib.nullcontext():
        return _join(static, leaves).prefill(x, rope, sampled, wanted, block=block)


@functools.partial(jax.jit, static_argnames=("static",))
def _logits(static, leaves, x):
    return _join(static, leaves).logits(x)


@functools.cache
def _decode_step(static, zone, path):
    """The jitted step of a module; static arguments of `jax.jit` would be hashed at every step, which takes
    milliseconds.

    The step returns logits, the new token's keys and values, and what the host path has for the session to act on.
    """

    @jax.jit
    def step(leaves, cache, tokens, active, rope, handle, state):
        host = None if path is None else path(handle, state)
        logits, new = _join(static, leaves).decode(tokens, cache, active, rope, zone=zone, host=host)
        return logits, new, () if host is None else host.outcome()

    return step


@functools.partial(jax.jit, static_argnames=("zone",), donate_argnames=("cache",))
def _append(cache, new, active, *, zone):
    return cache.append(zone, new, active)


@functools.partial(jax.jit, static_argnames=("zone",))
def _static_part(keys: jax.Array, length: jax.Array, *, zone: Zone) -> jax.Array:
    """The static zone's slots [1, K, zone.size, H] after a prompt of `length` tokens."""
    positions = jnp.clip(zone.positions(length), 0, keys.shape[2] - 1)
    return keys[:, :, positions]
