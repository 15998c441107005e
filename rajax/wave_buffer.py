"""RetroInfer's wave buffer (arXiv 2505.02922, section 4.3): the device ranks clusters and keeps the hot ones.

`rajax.wave_store` has the cache's mapping table; `rajax.wave_path` is what a step does. Here is what the device holds,
and the exchange of blocks after a step.

Letters: `L` layers, `B` batch, `K` key/value heads, `S` key positions, `C` clusters, `M` blocks of the cache,
`P` blocks of a transfer, `H` head dim.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rajax.clusters import NewClusters, outliers_among
from rajax.models import DeviceCache
from rajax.models.wave import BLOCK_KEYS, BlockCache, Clusters, SelectionRule, WholeHead
from rajax.shapes import bucket
from rajax.wave import Wave, log_counts, rounded
from rajax.wave_path import WavePath, WaveState, transfer_sizes
from rajax.wave_store import WaveStore


class BufferedWave(Wave):
    """One request's clusters, their means and the hot ones on the device; see `offload.Offload`."""

    path: Any = WavePath
    max_clusters = 40
    top_p = 0.9

    def make_store(self, capacity: Sequence[int]) -> WaveStore:
        return WaveStore(
            groups=self.groups,
            device_dtype=self.dtype,
            cache_blocks=-(-round(self.retrieval.block_cache * bucket(max(capacity))) // BLOCK_KEYS),
            outlier_blocks=self._outlier_blocks(bucket(max(1, int(self.starts.max()))))
            + self.units * self._outlier_blocks(self.unit),
            transfers=transfer_sizes(len(capacity) * self.kv_heads),
            **self.store_settings(capacity),
        )

    def _outlier_blocks(self, keys: int) -> int:
        """Blocks for the outliers of so many keys."""
        return -(-outliers_among(keys, self.retrieval.outliers) // BLOCK_KEYS)

    def begin(self, formed: dict[tuple[int, int], NewClusters], in_prompts: int, rule: SelectionRule) -> None:
        clusters = rounded(max(in_prompts + self.units * self.unit_clusters, rule.most + 1))
        self.store.make_room(clusters)
        whole = self._keep_whole(formed)
        layers = [self._layer(layer, formed, clusters) for layer in range(self.layers)]
        self._outliers_at = [self._outlier_blocks(int(start) - self.zone.sinks) for start in self.starts]
        """Where each sequence's next outliers go."""
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
        batch, pinned = len(self.starts), self.store.outlier_blocks
        blocks = pinned + self.store.held.shape[2]
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
            outliers = self.store.adopt_outliers(layer, sequence, new, 0)
            cached_arrays = cached_keys[sequence], cached_values[sequence], counts[sequence]
            for a, apart, hot in zip(
                cached_arrays, outliers, self.store.fill_cache(layer, sequence, new), strict=True
            ):
                a[:, : apart.shape[1]], a[:, pinned:] = apart, hot
        cached = self.store.place[layer].reshape(*heads, clusters) >= 0
        return (
            Clusters(
                means=jnp.asarray(means, self.dtype),
                mean_values=jnp.asarray(mean_values, self.dtype),
                log_counts=jnp.asarray(log_counts(sizes)),
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
        fetched, ids = outcome
        where = self.store.after_step(np.asarray(ids))
        if self.store.held.shape[2]:
            cached = tuple(clusters.cached for clusters in self.state.clusters)
            cached, blocks = _exchange(cached, self.state.cache, fetched, *where)
            clusters = tuple(
                dataclasses.replace(c, cached=new) for c, new in zip(self.state.clusters, cached, strict=True)
            )
            self.state = dataclasses.replace(self.state, clusters=clusters, cache=blocks)
        return super().after_step(cache, outcome, active, lengths)

    def add(self, sequence: int, first: int, formed: Sequence[NewClusters]) -> None:
        outliers = []
        for layer, new in enumerate(formed):
            self.store.adopt(layer, sequence, first, new)
            outliers.append(self.store.adopt_outliers(layer, sequence, new, first))
        stacked = jax.tree.map(
            lambda *arrays: np.stack(arrays), *(_padded(new, self.unit_clusters) for new in formed)
        )
        self.state = _add_clusters(self.state, stacked, sequence, first)
        if blocks := outliers[0][0].shape[1]:
            place, self._outliers_at[sequence] = (
                self._outliers_at[sequence],
                self._outliers_at[sequence] + blocks,
            )
            arrays = (np.stack(a) for a in zip(*outliers, strict=True))
            self.state = _add_outliers(self.state, *arrays, sequence, place)


def _padded(new: NewClusters, clusters: int) -> tuple[np.ndarray, ...]:
    """Means, mean values, log counts, spreads and radii [K, clusters, ...] of new clusters, the last of them empty."""

    def pad(a: np.ndarray) -> np.ndarray:
        return np.pad(a, ((0, 0), (0, clusters - a.shape[1]), *((0, 0),) * (a.ndim - 2)))

    return pad(new.means), pad(new.mean_values), log_counts(pad(new.sizes)), pad(new.spreads), pad(new.radii)


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


@functools.partial(jax.jit, donate_argnames=("state",))
def _add_outliers(state, keys, values, counts, sequence, first):
    """The state with a sequence's blocks `first`, ... of the cache replaced in every layer; arrays [L, K, n, ...]."""
    layers = []
    for i, layer in enumerate(state.cache):

        def put(a, n, i=i):
            return jax.lax.dynamic_update_slice(
                a, n[i][None].astype(a.dtype), (sequence, 0, first, *(0,) * (a.ndim - 3))
            )

        layers.append(BlockCache(put(layer.keys, keys), put(layer.values, values), put(layer.counts, counts)))
    return dataclasses.replace(state, cache=tuple(layers))
