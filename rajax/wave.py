"""RetroInfer's index: offloaded keys in clusters, which are ranked and retrieved whole (arXiv 2505.02922).

`models.wave` clusters, `rajax.clusters` has keys and values in the host's memory, ordered by cluster. Here is the
life of a request: what its prompt teaches, and how a growing text's keys become clusters. Who ranks and attends is
the choice between two: `rajax.wave_buffer`, the device, with means and a cache of hot clusters of its own, as in the
paper; and `rajax.wave_host`, the host, where the clusters lie.

The window is longer here than the settings say: its oldest keys stay, exact, until `update_every` of them can be
clustered at once (RetroInfer, section 4.2).

Letters: `L` layers, `B` batch, `K` key/value heads, `S` key positions, `C` clusters, `H` head dim.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rajax.clusters import Exam, NewClusters
from rajax.models import DeviceCache, LlamaConfig, Zone
from rajax.models.lesson import HELD_OUT
from rajax.models.summary import Summary, no_clusters, root_of, second_moment
from rajax.models.wave import (
    BLOCK_KEYS,
    KEYS_PER_CENTER,
    SelectionRule,
    corrections,
    importance,
    shaped_labels,
    spherical_labels,
)
from rajax.retrieval import RetrievalConfig

GRANULE = 64
"""Numbers of clusters, and of slots of the window, are rounded up to a multiple of this, for fewer compilations."""


class Wave(abc.ABC):
    """One request's offloaded keys, in clusters; see `offload.Offload`."""

    path: Any
    store: Any
    # Where the settings leave them open:
    max_clusters: int
    top_p: float

    def __init__(
        self,
        retrieval: RetrievalConfig,
        config: LlamaConfig,
        dtype: Any,
        lengths: Sequence[int],
        capacity: Sequence[int],
    ):
        self.retrieval, self.dtype = retrieval, np.dtype(dtype)
        self.max_clusters = retrieval.max_clusters or max(self.max_clusters, retrieval.min_clusters)
        if retrieval.top_p is not None:
            self.top_p = retrieval.top_p
        self.layers, self.kv_heads, self.groups, self.head_dim = (
            config.num_hidden_layers,
            config.num_key_value_heads,
            config.groups,
            config.head_dim,
        )
        # A layer a step is clustered, and meanwhile the text grows by a token: it must not outrun the clustering.
        self.unit = max(retrieval.update_every, self.layers + 2)
        room = self.unit + self.layers + 2
        new_tokens = max(c - n for n, c in zip(lengths, capacity, strict=True))
        self.zone = Zone(retrieval.sink_tokens, retrieval.window + min(rounded(new_tokens), rounded(room)))
        self.starts = np.array([max(self.zone.sinks, n - retrieval.window) for n in lengths], np.int32)
        self.units = max((c - n) // self.unit for n, c in zip(lengths, capacity, strict=True))
        share = retrieval.whole_heads
        if retrieval.key_codes:
            share = 0.0
        elif share is None:
            share = self.whole_share(int(self.starts.max()) - self.zone.sinks)
        self.outliers = 0.0 if retrieval.key_codes else retrieval.outliers
        """The share of every head's keys that are in no cluster."""
        self.clustered = self.outliers < 1
        """Whether there are clusters at all."""
        self.whole_heads = round(share * self.layers * self.kv_heads)
        """Places for heads that are kept whole."""
        self.unit_clusters = _most_clusters(self.unit)
        """Clusters that an update makes at most; there will be `units` of them."""
        self._roots: list[list[jax.Array]] = [
            [jnp.broadcast_to(jnp.eye(self.head_dim), (self.kv_heads, self.head_dim, self.head_dim))]
            * len(lengths)
            for _ in range(self.layers)
        ]
        """The coordinates in which each layer and sequence is clustered, [K, H, H]."""
        self._forming: dict[tuple[int, int], Future[NewClusters]] = {}
        """The prompts' clusters, by layer and sequence."""
        self._updates: dict[int, list[Future[NewClusters]]] = {}
        """Per sequence that is being updated, the layers so far."""
        self._columns = [0] * len(lengths)
        """Where each sequence's next clusters go."""
        self.state: Any = None
        self.store = self.make_store(capacity)

    def store_settings(self, capacity: Sequence[int]) -> dict[str, Any]:
        """The arguments of the `ClusterStore` for sequences of so many tokens."""
        return {
            "layers": self.layers,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "dtype": np.dtype(jnp.dtype(self.retrieval.host_dtype)),
            "capacities": [max(0, c - self.retrieval.zone_size) for c in capacity],
            "block_keys": BLOCK_KEYS,
        }

    @property
    def state_bytes(self) -> int:
        return sum(a.nbytes for a in jax.tree.leaves(self.state))

    def whole_share(self, keys: int) -> float:
        """The share of heads that are whole where the settings leave it open, for so many offloaded keys."""
        return 0.03

    @abc.abstractmethod
    def make_store(self, capacity: Sequence[int]) -> Any:
        """A `ClusterStore` for sequences of so many tokens, prompt and answer together."""

    @abc.abstractmethod
    def begin(self, formed: dict[tuple[int, int], NewClusters], in_prompts: int, rule: SelectionRule) -> None:
        """Takes the prompts' clusters over, by layer and sequence, at most `in_prompts` to a head, and sets `state`."""

    @abc.abstractmethod
    def add(self, sequence: int, first: int, formed: Sequence[NewClusters]) -> None:
        """Takes clusters over as one sequence's numbers `first`, `first + 1`, ... in each layer."""

    # --- prefill

    def take(
        self,
        layer: int,
        sequence: int,
        keys: jax.Array,
        values: jax.Array,
        queries: jax.Array,
        positions: np.ndarray,
    ) -> Summary:
        first = self.zone.sinks
        count = int(self.starts[sequence]) - first
        if not count:
            return no_clusters(self.kv_heads, self.head_dim, keys.dtype)
        k, v = (np.asarray(a)[0, :, first : first + count] for a in (keys, values))
        lesson: tuple[Any, ...]
        if self.clustered:
            labels, root, shares, exam, log_seen = _learn(
                keys, queries, positions, count, sinks=first, shaped=self.retrieval.projection
            )
            self._roots[layer][sequence] = root
            labels, shares = (np.asarray(a)[:, :count] for a in (labels, shares))
            lesson = labels, np.asarray(root), shares, self._exam(exam, log_seen)
        else:
            labels = np.zeros(k.shape[:2], np.int32)
            lesson = labels, np.asarray(self._roots[layer][sequence]), None, None
        self._forming[layer, sequence] = self.store.put(layer, sequence, k, v, *lesson, self.outliers)
        return no_clusters(self.kv_heads, self.head_dim, keys.dtype)

    def _exam(self, queries: jax.Array, log_seen: jax.Array) -> Exam | None:
        if not self.whole_heads:
            return None
        return Exam(np.asarray(queries), np.asarray(log_seen), self.max_clusters, self.corrections)

    def corrections(self, spreads: np.ndarray) -> np.ndarray:
        """What is added to the logarithm of an estimate, for spreads [...]."""
        return corrections(self.retrieval.rank_by, spreads)

    def finish_prefill(self) -> None:
        formed = {which: future.result() for which, future in self._forming.items()}
        self._forming = {}
        in_prompts = max((new.sizes.shape[1] for new in formed.values()), default=0)
        most = self.max_clusters
        if self.retrieval.retrieved_share is not None:
            in_all = in_prompts + self.units * self.unit_clusters
            most = math.ceil(self.retrieval.retrieved_share * in_all) or 1
        rule = SelectionRule(
            rank_by=self.retrieval.rank_by,
            share=self.retrieval.retrieved_share,
            top_p=self.top_p,
            least=min(self.retrieval.min_clusters, most),
            most=most,
        )
        self.begin(formed, in_prompts, rule)
        self._columns = [in_prompts] * len(self._columns)

    # --- decode

    def after_step(
        self, cache: DeviceCache, outcome: Any, active: np.ndarray, lengths: np.ndarray
    ) -> DeviceCache:
        for sequence in np.flatnonzero(active).tolist():
            cache = self._grow(cache, sequence, int(lengths[sequence]))
        return cache

    def _grow(self, cache: DeviceCache, sequence: int, length: int) -> DeviceCache:
        """Clusters the window's oldest keys when there are enough, a layer a step, and adopts them all at once.

        Which step does what depends on the text's length alone, so that two runs do the same.
        """
        start = int(self.starts[sequence])
        updates = self._updates.get(sequence)
        if updates is None:
            if length - self.retrieval.window - start < self.unit:
                return cache
            updates = self._updates[sequence] = []
        if (layer := len(updates)) < self.layers:
            root = self._roots[layer][sequence]
            keys, values, labels = _cluster_window(
                cache.keys[layer],
                cache.values[layer],
                root,
                sequence,
                start,
                zone=self.zone,
                unit=self.unit,
                shaped=self.retrieval.projection,
                clustered=self.clustered,
            )
            arrays = (np.asarray(a) for a in (keys, values, labels, root))
            updates.append(self.store.put(layer, sequence, *arrays, None, None, self.outliers))
            return cache
        del self._updates[sequence]
        self.add(sequence, self._columns[sequence], [future.result() for future in updates])
        self._columns[sequence] += self.unit_clusters
        self.starts[sequence] = start + self.unit
        return dataclasses.replace(cache, starts=cache.starts.at[sequence].set(start + self.unit))


def rounded(number: int) -> int:
    """`number` rounded up to a multiple of `GRANULE`."""
    return -(-number // GRANULE) * GRANULE


def _most_clusters(keys: int) -> int:
    """Clusters that so many keys may make: each center's last block may be short."""
    return -(-keys // min(KEYS_PER_CENTER, BLOCK_KEYS)) + keys // BLOCK_KEYS


def log_counts(sizes: np.ndarray) -> np.ndarray:
    """The logarithm of numbers of keys, float32; -inf for none."""
    with np.errstate(divide="ignore"):
        return np.log(sizes.astype(np.float32))


@functools.partial(jax.jit, static_argnames=("sinks", "shaped"))
def _learn(keys, queries, positions, count, *, sinks, shaped):
    """What a prompt's layer teaches, of keys [1, K, S, H].

    Returns labels [K, S], root [K, H, H] and the keys' importance [K, S]; the queries held out, [K, G, E, H], and the
    logarithm of the mass that those give to the keys that are not offloaded, [K, G, E].
    """
    queries = queries[0].astype(jnp.float32)
    heads, groups, _, width = queries.shape
    exam, exam_positions = queries[:, :, -HELD_OUT:], positions[-HELD_OUT:]
    scores = jnp.einsum("kgeh,ksh->kges", exam, keys[0].astype(jnp.float32), precision="highest")
    at = jnp.arange(keys.shape[2])
    static = ((at < sinks) | (at >= sinks + count)) & (at <= exam_positions[:, None])
    log_seen = jax.nn.logsumexp(jnp.where(static, scores, -jnp.inf), axis=-1)

    keys = keys[0, :, sinks:].astype(jnp.float32)
    sampled = queries[:, :, :-HELD_OUT].reshape(heads, -1, width)
    limits = jnp.tile(jnp.clip(positions[:-HELD_OUT] + 1 - sinks, 0, count), groups)
    shares = importance(sampled, keys, limits)
    moment = second_moment(sampled) / sampled.shape[1]
    root = root_of(moment)
    # So scaled that lengths after a product with it are differences of scores.
    scale = jnp.trace(moment, axis1=1, axis2=2) / (root**2).sum((1, 2))
    root = root * jnp.sqrt(jnp.where(scale > 0, scale, 1))[:, None, None]
    labels = shaped_labels(keys, count, root, shares) if shaped else spherical_labels(keys, count)
    return labels, root, shares, exam, log_seen


@functools.partial(jax.jit, static_argnames=("zone", "unit", "shaped", "clustered"))
def _cluster_window(keys, values, root, sequence, start, *, zone, unit, shaped, clustered):
    """The `unit` keys and values [K, unit, H] from position `start` on, out of the window, and their labels [K,
    unit]."""
    slots = zone.slot(start + jnp.arange(unit))
    keys, values = (a[sequence][:, slots] for a in (keys, values))
    if not clustered:
        return keys, values, jnp.zeros(keys.shape[:2], jnp.int32)
    if shaped:
        return keys, values, shaped_labels(keys, jnp.int32(unit), root, jnp.zeros(keys.shape[:2]))
    return keys, values, spherical_labels(keys, jnp.int32(unit))
