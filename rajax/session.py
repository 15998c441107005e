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

from rajax.host_path import CallbackHostPath
from rajax.models import Llama, Rope, StaticZone, Zone
from rajax.retrieval import RetrievalConfig
from rajax.store import HostStore

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
        self._parts: list[list[tuple[jax.Array, jax.Array]]] = [[] for _ in range(config.num_hidden_layers)]
        self._cache: StaticZone | None = None

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

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self, layer: int, sequence: int, keys: jax.Array, values: jax.Array) -> None:
        """Takes one layer's keys and values [1, K, S, H] of one prompt. Layers come in order."""
        length = self.lengths[sequence]
        self._parts[layer].append(
            (_static_part(keys, length, zone=self.zone), _static_part(values, length, zone=self.zone))
        )
        if self.store is not None:
            first, count = self.zone.sinks, self.zone.offloaded(length)
            offloaded = (np.asarray(a)[0, :, first : first + count] for a in (keys, values))
            self.store.put(layer, sequence, *offloaded)

    def finish_prefill(self) -> float:
        """Makes the session ready to step; returns the seconds it waited for indexes."""
        keys, values = [], []
        for layer in range(len(self._parts)):
            parts, self._parts[layer] = self._parts[layer], []
            keys.append(jnp.concatenate([k for k, _ in parts]))
            values.append(jnp.concatenate([v for _, v in parts]))
        cache = StaticZone(tuple(keys), tuple(values), jnp.asarray(self.lengths, jnp.int32))
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
        return logits

    @property
    def device_bytes(self) -> int:
        """Bytes of keys and values on the device."""
        assert self._cache is not None
        return sum(a.nbytes for a in (*self._cache.keys, *self._cache.values))

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
    for sequence, prompt in enumerate(prompts):
        length = bucket(len(prompt))
        tokens = np.zeros((1, length), np.int32)
        tokens[0, : len(prompt)] = prompt
        rope = jax.tree.map(lambda a, i=sequence: a[i : i + 1], sessions[0].rope)
        x = model.embed(jnp.asarray(tokens))
        for i, (static, leaves) in enumerate(layers):
            x, keys, values = _prefill_layer(static, leaves, x, rope, block=min(BLOCK, length))
            for session in sessions:
                session.take(i, sequence, keys, values)
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
def _prefill_layer(static, leaves, x, rope, *, block):
    return _join(static, leaves).prefill(x, rope, block=block)


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


@functools.partial(jax.jit, static_argnames=("zone",))
def _static_part(keys: jax.Array, length: jax.Array, *, zone: Zone) -> jax.Array:
    """The static zone's slots [1, K, zone.size, H] after a prompt of `length` tokens."""
    positions = jnp.clip(zone.positions(length), 0, keys.shape[2] - 1)
    return keys[:, :, positions]
