"""RetroInfer: clusters retrieved whole, through a cache of hot ones on the device (arXiv 2505.02922).

`models.wave` clusters, ranks and estimates; `rajax.wave_store` has keys and values in the host's memory and the cache's
mapping table; `rajax.wave_path` is what a step does. Here is the rest of a request: its prefill, the exchange of blocks
after a step, and how a growing text's keys become clusters.

The window is longer here than the settings say: its oldest keys stay, exact, until `update_every` of them can be
clustered at once (RetroInfer, section 4.2).

Letters: `L` layers, `B` batch, `K` key/value heads, `S` key positions, `C` clusters, `M` blocks of the cache,
`P` blocks of a transfer, `H` head dim.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rajax.models import DeviceCache, LlamaConfig, Zone
from rajax.models.lesson import HELD_OUT
from rajax.models.summary import Summary, no_clusters, root_of, second_moment
from rajax.models.wave import (
    BLOCK_KEYS,
    KEYS_PER_CENTER,
    BlockCache,
    Clusters,
    SelectionRule,
    WholeHead,
    importance,
    second_order,
    shaped_labels,
    spherical_labels,
)
from rajax.retrieval import RetrievalConfig
from rajax.shapes import bucket
from rajax.wave_path import WavePath, WaveState, transfer_sizes
from rajax.wave_store import Exam, NewClusters, WaveStore

GRANULE = 64
"""Numbers of clusters, and of slots of the window, are rounded up to a multiple of this, for fewer compilations."""


class Wave:
    """One request's offloaded keys, in clusters; see `offload.Offload`."""

    path: Any = WavePath

    def __init__(
        self,
        retrieval: RetrievalConfig,
        config: LlamaConfig,
        dtype: Any,
        lengths: Sequence[int],
        capacity: Sequence[int],
    ):
        self.retrieval, self.dtype = retrieval, np.dtype(dtype)
        self.layers, self.kv_heads, self.head_dim = (
            config.num_hidden_layers,
            config.num_key_value_heads,
            config.head_dim,
        )
        # A layer a step is clustered, and meanwhile the text grows by a token: it must not outrun the clustering.
        self.unit = max(retrieval.update_every, self.layers + 2)
        room = self.unit + self.layers + 2
        new_tokens = max(c - n for n, c in zip(lengths, capacity, strict=True))
        self.zone = Zone(retrieval.sink_tokens, retrieval.window + min(_rounded(new_tokens), _rounded(room)))
        self.starts = np.array([max(self.zone.sinks, n - retrieval.window) for n in lengths], np.int32)
        offloaded = [max(0, c - retrieval.zone_size) for c in capacity]
        units = max((c - n) // self.unit for n, c in zip(lengths, capacity, strict=True))
        cache_blocks = -(-round(retrieval.block_cache * bucket(max(capacity))) // BLOCK_KEYS)
        rows = len(lengths) * self.kv_heads
        self.store = WaveStore(
            layers=self.layers,
            kv_heads=self.kv_heads,
            groups=config.groups,
            head_dim=self.head_dim,
            dtype=self.dtype,
            capacities=offloaded,
            block_keys=BLOCK_KEYS,
            cache_blocks=cache_blocks,
            transfers=transfer_sizes(rows),
        )
        self.whole_heads = min(self.layers, round(retrieval.whole_heads * self.layers * self.kv_heads))
        """Places for heads that are kept whole."""
        self._unit_clusters = _most_clusters(self.unit)
        self._grown_clusters = units * self._unit_clusters
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

    @property
    def state_bytes(self) -> int:
        return sum(a.nbytes for a in jax.tree.leaves(self.state))

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
        if count:
            labels, root, shares, exam, log_seen = _learn(
                keys, queries, positions, count, sinks=first, shaped=self.retrieval.projection
            )
            self._roots[layer][sequence] = root
            k, v = (np.asarray(a)[0, :, first : first + count] for a in (keys, values))
            labels, shares = (np.asarray(a)[:, :count] for a in (labels, shares))
            self._forming[layer, sequence] = self.store.put(
                layer, sequence, k, v, labels, np.asarray(root), shares, self._exam(exam, log_seen)
            )
        return no_clusters(self.kv_heads, self.head_dim, keys.dtype)

    def _exam(self, queries: jax.Array, log_seen: jax.Array) -> Exam | None:
        if not self.whole_heads:
            return None
        return Exam(np.asarray(queries), np.asarray(log_seen), self.retrieval.max_clusters, self._corrections)

    def _corrections(self, spreads: np.ndarray) -> np.ndarray:
        return second_order(spreads) if self.retrieval.rank_by == "spread" else np.zeros_like(spreads)

    def finish_prefill(self) -> None:
        formed = {which: future.result() for which, future in self._forming.items()}
        self._forming = {}
        in_prompts = max((new.sizes.shape[1] for new in formed.values()), default=0)
        most = self.retrieval.max_clusters
        if self.retrieval.retrieved_share is not None:
            most = math.ceil(self.retrieval.retrieved_share * (in_prompts + self._grown_clusters)) or 1
        clusters = _rounded(max(in_prompts + self._grown_clusters, most + 1))
        self.store.make_room(clusters)
        rule = SelectionRule(
            rank_by=self.retrieval.rank_by,
            share=self.retrieval.retrieved_share,
            top_p=self.retrieval.top_p,
            least=min(self.retrieval.min_clusters, most),
            most=most,
        )
        whole = self._keep_whole(formed)
        layers = [self._layer(layer, formed, clusters) for layer in range(self.layers)]
        self._columns = [in_prompts] * len(self._columns)
        self.state = WaveState(tuple(c for c, _ in layers), tuple(b for _, b in layers), whole, rule)

    def _keep_whole(self, formed: dict[tuple[int, int], NewClusters]) -> tuple[WholeHead, ...]:
        """Puts the heads whose clusters misjudge the most on the device, one of a layer and sequence at most."""
        batch = len(self.starts)
        worst = np.zeros(self.layers)
        for (layer, _), clusters in formed.items():
            worst[layer] += clusters.misjudged.max() ** 2
        length = bucket(max(1, int(self.starts.max()) - self.zone.sinks))
        places = []
        for layer in np.argsort(-worst, kind="stable")[: self.whole_heads].tolist():
            heads, counts = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
            keys, values = (np.zeros((batch, length, self.head_dim), self.dtype) for _ in range(2))
            for sequence in range(batch):
                if (new := formed.get((layer, sequence))) is None or not worst[layer]:
                    continue
                blocks, k = self.store.blocks[layer][sequence], int(new.misjudged.argmax())
                n = blocks.count
                heads[sequence], counts[sequence] = k, n
                keys[sequence, :n], values[sequence, :n] = blocks.keys[k, :n], blocks.values[k, :n]
                self.store.whole[layer, sequence * self.kv_heads + k] = n
            places.append(
                WholeHead(
                    jnp.int32(layer),
                    jnp.asarray(heads),
                    jnp.asarray(keys),
                    jnp.asarray(values),
                    jnp.asarray(counts),
                )
            )
        return tuple(places)

    def _layer(
        self, layer: int, formed: dict[tuple[int, int], NewClusters], clusters: int
    ) -> tuple[Clusters, BlockCache]:
        """A layer's state on the device, with the prompts' clusters and the most popular of them in the cache."""
        batch, blocks = len(self.starts), self.store.held.shape[2]
        heads = batch, self.kv_heads
        means, mean_values = (np.zeros((*heads, clusters, self.head_dim), np.float32) for _ in range(2))
        sizes, spreads, radii = (np.zeros((*heads, clusters), np.float32) for _ in range(3))
        cached_keys = np.zeros((*heads, blocks, BLOCK_KEYS, self.head_dim), self.dtype)
        cached_values, counts = np.zeros_like(cached_keys), np.zeros((*heads, blocks), np.int32)
        for sequence in range(batch):
            if (new := formed.get((layer, sequence))) is None:
                continue
            self.store.adopt(layer, sequence, 0, new)
            n = new.sizes.shape[1]
            means[sequence, :, :n], mean_values[sequence, :, :n] = new.means, new.mean_values
            radii[sequence, :, :n] = new.radii
            sizes[sequence] = self.store.sizes[layer].reshape(*heads, clusters)[sequence]
            spreads[sequence, :, :n] = new.spreads
            cached_keys[sequence], cached_values[sequence], counts[sequence] = self.store.fill_cache(
                layer, sequence, new
            )
        cached = self.store.place[layer].reshape(*heads, clusters) >= 0
        return (
            Clusters(
                means=jnp.asarray(means, self.dtype),
                mean_values=jnp.asarray(mean_values, self.dtype),
                log_counts=jnp.asarray(_log(sizes)),
                spreads=jnp.asarray(spreads),
                radii=jnp.asarray(radii),
                cached=jnp.asarray(cached),
            ),
            BlockCache(jnp.asarray(cached_keys), jnp.asarray(cached_values), jnp.asarray(counts)),
        )

    # --- decode

    def after_step(
        self, cache: DeviceCache, outcome: Any, active: np.ndarray, lengths: np.ndarray
    ) -> DeviceCache:
        assert self.state is not None
        fetched, ids = outcome
        where = self.store.after_step(np.asarray(ids))
        if self.store.held.shape[2]:
            cached = tuple(clusters.cached for clusters in self.state.clusters)
            cached, blocks = _exchange(cached, self.state.cache, fetched, *where)
            clusters = tuple(
                dataclasses.replace(c, cached=new) for c, new in zip(self.state.clusters, cached, strict=True)
            )
            self.state = dataclasses.replace(self.state, clusters=clusters, cache=blocks)
        for sequence in np.flatnonzero(active).tolist():
            cache = self._grow(cache, sequence, int(lengths[sequence]))
        return cache

    def _grow(self, cache: DeviceCache, sequence: int, length: int) -> DeviceCache:
        """Clusters the window's oldest keys when there are enough, a layer a step, and adopts them all at once.

        Which step does what depends on the text's length alone, so that two runs do the same.
        """
        assert self.state is not None
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
            )
            arrays = (np.asarray(a) for a in (keys, values, labels, root))
            updates.append(self.store.put(layer, sequence, *arrays, None, None))
            return cache
        del self._updates[sequence]
        first = self._columns[sequence]
        new = []
        for layer, future in enumerate(updates):
            formed = future.result()
            self.store.adopt(layer, sequence, first, formed)
            new.append(_padded(formed, self._unit_clusters))
        self._columns[sequence] += self._unit_clusters
        stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *new)
        self.state = _add_clusters(self.state, stacked, sequence, first)
        self.starts[sequence] = start + self.unit
        return dataclasses.replace(cache, starts=cache.starts.at[sequence].set(start + self.unit))


def _rounded(number: int) -> int:
    return -(-number // GRANULE) * GRANULE


def _most_clusters(keys: int) -> int:
    """Clusters that so many keys may make: each center's last block may be short."""
    return -(-keys // min(KEYS_PER_CENTER, BLOCK_KEYS)) + keys // BLOCK_KEYS


def _padded(new: NewClusters, clusters: int) -> tuple[np.ndarray, ...]:
    """Means, mean values, log counts, spreads and radii [K, clusters, ...] of new clusters, the last of them empty."""

    def pad(a: np.ndarray) -> np.ndarray:
        return np.pad(a, ((0, 0), (0, clusters - a.shape[1]), *((0, 0),) * (a.ndim - 2)))

    return pad(new.means), pad(new.mean_values), _log(pad(new.sizes)), pad(new.spreads), pad(new.radii)


def _log(sizes: np.ndarray) -> np.ndarray:
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
    root = root * jnp.sqrt(scale)[:, None, None]
    labels = shaped_labels(keys, count, root, shares) if shaped else spherical_labels(keys, count)
    return labels, root, shares, exam, log_seen


@functools.partial(jax.jit, static_argnames=("zone", "unit", "shaped"))
def _cluster_window(keys, values, root, sequence, start, *, zone, unit, shaped):
    """The `unit` keys and values [K, unit, H] from position `start` on, out of the window, and their labels [K,
    unit]."""
    slots = zone.slot(start + jnp.arange(unit))
    keys, values = (a[sequence][:, slots] for a in (keys, values))
    if shaped:
        return keys, values, shaped_labels(keys, jnp.int32(unit), root, jnp.zeros(keys.shape[:2]))
    return keys, values, spherical_labels(keys, jnp.int32(unit))


@functools.partial(jax.jit, donate_argnames=("cached", "cache"))
def _exchange(cached, cache, fetched, to, come, go):
    """Puts the blocks that each layer fetched into their places in the cache; see `WaveStore.after_step`.

    Returns which clusters are cached, and the cache, both per layer.
    """
    marks, blocks = [], []
    for i, (mark, old, new) in enumerate(zip(cached, cache, fetched, strict=True)):

        def put(a, new, i=i):
            return a.reshape(-1, *a.shape[3:]).at[to[i]].set(new, mode="drop").reshape(a.shape)

        blocks.append(
            BlockCache(put(old.keys, new.keys), put(old.values, new.values), put(old.counts, new.counts))
        )
        flat = mark.reshape(-1).at[go[i]].set(False, mode="drop").at[come[i]].set(True, mode="drop")
        marks.append(flat.reshape(mark.shape))
    return tuple(marks), tuple(blocks)


@functools.partial(jax.jit, donate_argnames=("state",))
def _add_clusters(state, new, sequence, first):
    """The state with clusters `first`, ... of a sequence replaced in every layer; arrays [L, K, c, ...]."""

    def put(a, n):
        return jax.lax.dynamic_update_slice(
            a, n[None].astype(a.dtype), (sequence, 0, first, *(0,) * (a.ndim - 3))
        )

    layers = []
    for i, layer in enumerate(state.clusters):
        means, mean_values, log_counts, spreads, radii = (a[i] for a in new)
        layers.append(
            dataclasses.replace(
                layer,
                means=put(layer.means, means),
                mean_values=put(layer.mean_values, mean_values),
                log_counts=put(layer.log_counts, log_counts),
                spreads=put(layer.spreads, spreads),
                radii=put(layer.radii, radii),
            )
        )
    return dataclasses.replace(state, clusters=tuple(layers))
