"""Offloaded keys that an index on the host searches: what a session does for them on the device.

The host's part is `rajax.store`. The device learns from the prompt (`models.lesson`) and keeps a summary of what is
offloaded (`models.summary`), which grows with the answer.

Letters: `L` layers, `K` key/value heads, `S` key positions, `C` clusters of the summary, `H` head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rajax.budget import Exam
from rajax.host_path import CallbackHostPath
from rajax.kernels.partial_attention import BLOCK_S
from rajax.models import DeviceCache, LlamaConfig, Zone
from rajax.models.lesson import Lesson, learn
from rajax.models.summary import CLUSTERS, UNIT, Summary, no_clusters, root_of, sealed_count, slots, summarize
from rajax.retrieval import RetrievalConfig
from rajax.shapes import bucket
from rajax.store import HostStore, Learned


class Searched:
    """One request's offloaded keys, found by an index over them; see `offload.Offload`."""

    path: Any = CallbackHostPath
    state: Any = ()
    state_bytes = 0

    def __init__(
        self,
        retrieval: RetrievalConfig,
        config: LlamaConfig,
        dtype: Any,
        lengths: Sequence[int],
        capacity: Sequence[int],
    ):
        self.zone = Zone(retrieval.sink_tokens, retrieval.window)
        self.starts = np.zeros(len(lengths), np.int32)
        offloaded = [self.zone.offloaded(c) for c in capacity]
        self.store = HostStore(
            retrieval,
            layers=config.num_hidden_layers,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            capacities=offloaded,
        )
        self._lengths = lengths
        self._clusters = 0
        """Clusters of the summary on the device, C, room for the answer's included."""
        if retrieval.summary:
            # A prompt's last unit may be short, and the GPU's kernel takes keys in blocks.
            device_slots = self.zone.size + slots(bucket(max(offloaded)) + UNIT)
            self._clusters = -(-device_slots // BLOCK_S) * BLOCK_S - self.zone.size
        self._clustered = [0] * len(lengths)
        """The clusters of each sequence so far."""

    def take(
        self,
        layer: int,
        sequence: int,
        keys: jax.Array,
        values: jax.Array,
        queries: jax.Array,
        positions: np.ndarray,
    ) -> Summary:
        length = self._lengths[sequence]
        summary = None
        if count := self.zone.offloaded(length):
            first, window = self.zone.sinks, self.zone.window
            lesson = _learn(keys, values, queries, positions, length, sinks=first, window=window)
            sealed = count
            if self._clusters:
                sealed, summary = sealed_count(count), _stored(lesson.summary, keys.dtype)
                self._clustered[sequence] = slots(sealed)
            k, v = (np.asarray(a)[0, :, first : first + count] for a in (keys, values))
            self.store.put(layer, sequence, k, v, _learned(lesson, summary, sealed))
        return _room_for(summary, self._clusters, keys)

    def finish_prefill(self) -> None:
        self.store.wait_built()

    def after_step(
        self, cache: DeviceCache, outcome: Any, active: np.ndarray, lengths: np.ndarray
    ) -> DeviceCache:
        for sequence in np.flatnonzero(active).tolist():
            cache = self._grow(cache, sequence)
        return cache

    def _grow(self, cache: DeviceCache, sequence: int) -> DeviceCache:
        """Has the host index a tail that is long enough, and adopts it when that is done."""
        if self.store.tail(sequence) >= UNIT:
            self.store.start_sealing(sequence, UNIT)
        if not self.store.ready_to_adopt(sequence):
            return cache
        clusters = means = None
        start = self._clustered[sequence]
        if self._clusters:
            # One program for all layers, [L, K, ...].
            new = (np.stack(arrays) for arrays in zip(*self.store.sealing(sequence), strict=True))
            cache, clusters, means = _seal(cache, *new, sequence, start, zone=self.zone)
            clusters, means = np.asarray(clusters), np.asarray(means.astype(jnp.float32))
            self._clustered[sequence] += CLUSTERS
        self.store.adopt(sequence, clusters, means, start)
        return cache


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
        summary = no_clusters(heads, width, keys.dtype)
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
