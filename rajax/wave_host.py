"""Clusters ranked and attended to on the host, where they lie: no copy, no transfer, and no cache.

Where the device is a CPU, its memory is the host's, and RetroInfer's buffer (`rajax.wave_buffer`) would only copy. The
device keeps the static zone; one callback per layer has `rajax.cluster_attention` do all the rest.

Letters: `B` batch, `K` key/value heads, `G` query heads per key/value head, `C` clusters, `R` clusters retrieved at
most, `H` head dim.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

from rajax.cluster_attention import TOGETHER, attend, rank
from rajax.clusters import Blocks, ClusterStore, NewClusters
from rajax.handles import by_handle
from rajax.kernels import Partial
from rajax.models import DeviceCache, LlamaConfig
from rajax.models.wave import SelectionRule
from rajax.retrieval import RetrievalConfig
from rajax.wave import Wave, log_counts


class HostWave(Wave):
    """One request's clusters, all on the host; see `offload.Offload`."""

    def __init__(
        self,
        retrieval: RetrievalConfig,
        config: LlamaConfig,
        dtype: Any,
        lengths: Sequence[int],
        capacity: Sequence[int],
    ):
        if retrieval.rank_by == "bound":
            raise ValueError("rank_by='bound' is for the device's buffer only: set wave_buffer=True")
        super().__init__(retrieval, config, dtype, lengths, capacity)
        self.path: Any = HostWavePath
        self.store = HostWaveStore(groups=self.groups, **self.store_settings(capacity))
        self.state = ()

    def begin(self, formed: dict[tuple[int, int], NewClusters], clusters: int, rule: SelectionRule) -> None:
        self.store.make_room(clusters, rule)
        batch = len(self.starts)
        misjudged = np.zeros((batch, self.layers, self.kv_heads))
        for (layer, sequence), new in formed.items():
            misjudged[sequence, layer] = new.misjudged
        for sequence in range(batch):
            worst = np.argsort(-misjudged[sequence], axis=None, kind="stable")[: self.whole_heads]
            whole = (misjudged[sequence] > 0) & np.isin(
                np.arange(misjudged[sequence].size).reshape(self.layers, -1), worst
            )
            for layer in range(self.layers):
                if new := formed.get((layer, sequence)):
                    self._adopt(layer, sequence, 0, new, whole[layer])

    def add(self, sequence: int, first: int, formed: Sequence[NewClusters]) -> None:
        for layer, new in enumerate(formed):
            self._adopt(layer, sequence, first, new, np.zeros(self.kv_heads, bool))

    def _adopt(self, layer: int, sequence: int, first: int, new: NewClusters, whole: np.ndarray) -> None:
        held = self.store.layers[layer][sequence]
        held.adopt(first, new, self.corrections(new.spreads), whole)

    def after_step(
        self, cache: DeviceCache, outcome: Any, active: np.ndarray, lengths: np.ndarray
    ) -> DeviceCache:
        for sequence in np.flatnonzero(active).tolist():
            cache = self.grow(cache, sequence, int(lengths[sequence]))
        return cache


def bits(a: np.ndarray) -> np.ndarray:
    """An array as compiled code reads it: bfloat16 as its bits, float32 as it is."""
    return a.view(np.uint16) if a.dtype == ml_dtypes.bfloat16 else a


class LayerClusters:
    """The clusters of one layer and sequence: what `cluster_attention` reads.

    Args:
      blocks: the keys and values.
      clusters: C.
      rule: how many a step retrieves, and by what order.
      groups: G.
    """

    def __init__(self, blocks: Blocks, clusters: int, rule: SelectionRule, groups: int):
        heads, _, width = blocks.keys.shape
        self.rule = rule
        self.keys, self.values = bits(blocks.keys), bits(blocks.values)
        self._means = np.zeros((heads, clusters, width), blocks.keys.dtype)
        self._mean_values = np.zeros_like(self._means)
        self.means, self.mean_values = bits(self._means), bits(self._mean_values)
        self.log_masses = np.full((heads, clusters), -np.inf, np.float32)
        self.importances = np.ones((heads, clusters), np.float32)
        self.starts, self.sizes = (np.zeros((heads, clusters), np.int32) for _ in range(2))
        self.whole = np.zeros(heads, np.int64)
        """Keys of each head that is attended to whole; 0 for the others."""
        self._settings = (
            -1.0 if rule.share is None else rule.share,
            rule.top_p,
            rule.least,
            rule.most,
        )
        self._groups = groups
        self.used = 0
        """Clusters so far, of the C that there is room for."""
        self.held = 0
        """Keys in them, of all heads together."""

    def adopt(self, first: int, new: NewClusters, corrections: np.ndarray, whole: np.ndarray) -> None:
        """Takes clusters over as numbers `first`, ...; heads that are `whole` [K] attend to their keys instead."""
        n = new.sizes.shape[1]
        here = slice(first, first + n)
        self._means[:, here], self._mean_values[:, here] = new.means, new.mean_values
        masses = log_counts(new.sizes) + corrections
        self.log_masses[:, here] = np.where(whole[:, None], -np.inf, masses)
        if self.rule.rank_by == "spread":
            self.importances[:, here] = new.spreads
        self.starts[:, here], self.sizes[:, here] = new.starts, new.sizes
        self.whole[whole] = new.sizes[whole].sum(axis=1)
        self.used = first + n
        self.held += int(new.sizes.sum())

    def attend(self, queries: np.ndarray, out: np.ndarray, counters: HostWaveCounters) -> tuple[float, float]:
        """Writes the partial of queries [K, G, H] over all clusters to out [K, G, H + 2]: numerator, denominator, max.

        Returns the seconds that ranking and attending took.
        """
        heads, groups, width = queries.shape
        padded = np.zeros((heads, -(-groups // TOGETHER) * TOGETHER, width), np.float32)
        padded[:, :groups] = queries
        weights = np.empty((heads, padded.shape[1], self.sizes.shape[1]), np.float32)
        tops = np.empty((heads, groups), np.float32)
        ids, chosen = np.empty((heads, self.rule.most), np.int32), np.empty(heads, np.int64)
        attended = np.empty(heads, np.int64)
        found = weights, tops, ids, chosen
        clusters = self.sizes, self.used, self.whole
        start = time.perf_counter()
        rank(padded, self.means, self.log_masses, self.importances, *clusters, *self._settings, *found, attended)
        ranked = time.perf_counter()
        attend(padded, self.mean_values, self.keys, self.values, self.starts, *clusters, *found, out)
        counters.attended += groups * int(attended.sum())
        counters.chosen += int(chosen.sum())
        return ranked - start, time.perf_counter() - ranked


@dataclasses.dataclass
class HostWaveCounters:
    """Sums over decode steps, layers and heads.

    Attributes:
      offloaded: offloaded keys in clusters, per query head.
      ranked: clusters that were ranked, per query head.
      attended: keys attended to exactly, per query head.
      chosen: clusters retrieved, per key/value head.
    """

    offloaded: int = 0
    ranked: int = 0
    attended: int = 0
    chosen: int = 0


class HostWaveStore(ClusterStore):
    """The host memory of one request, and attention over it.

    Args:
      groups: query heads per key/value head.
      store: the arguments of `ClusterStore`.
    """

    def __init__(self, *, groups: int, **store: Any):
        self.groups = groups
        self.layers: list[list[LayerClusters]] = []
        """By layer and sequence."""
        self.counters = HostWaveCounters()
        super().__init__(**store)

    def make_room(self, clusters: int, rule: SelectionRule) -> None:
        """Makes room for so many clusters per layer, sequence and head."""
        self.layers = [
            [LayerClusters(blocks, clusters, rule, self.groups) for blocks in layer] for layer in self.blocks
        ]

    def attend(self, layer: int, active: np.ndarray, queries: np.ndarray, out: np.ndarray) -> None:
        """Writes the partials of queries [B, K, G, H] to out [B, K, G, H + 2]; those of no keys where not `active`."""
        for sequence, clusters in enumerate(self.layers[layer]):
            if not active[sequence] or not clusters.used:
                no_clusters(out[sequence])
                continue
            ranking, attending = clusters.attend(queries[sequence], out[sequence], self.counters)
            self.seconds["host_search"] += ranking
            self.seconds["host_attention"] += attending
            self.counters.offloaded += self.groups * clusters.held
            self.counters.ranked += self.groups * clusters.used * int((clusters.whole == 0).sum())

    def statistics(self) -> dict[str, float | None]:
        """The fields of `generation.Statistics` that the host knows."""
        c = self.counters
        return {
            "host_kv_bytes": self.kv_bytes,
            "index_bytes": self.index_bytes,
            "keys_offloaded": c.offloaded,
            "keys_scanned": c.ranked,
            "keys_scored": c.attended,
            "keys_retrieved": c.attended,
        }

    @property
    def index_bytes(self) -> int:
        """Bytes of the clusters' means and tables."""
        return sum(
            a.nbytes
            for layer in self.layers
            for c in layer
            for a in (c.means, c.mean_values, c.log_masses, c.importances, c.starts, c.sizes)
        )

    def close(self) -> None:
        super().close()
        self.layers = []


def no_clusters(out: np.ndarray) -> None:
    """Fills out [..., H + 2] with the partial of no keys."""
    out[..., :-1] = 0
    out[..., -1] = -np.inf


class HostWavePath:
    """A `models.attention.HostPath` to the `HostWaveStore` whose handle is an array of the step.

    Where host and device are the same cores nothing is gained by a second callback, so all is done in `collect`. Keys
    that leave the window stay on the device until they are clustered: what `submit` is told of them goes unused.
    """

    def __init__(self, handle: jax.Array, state: tuple[()]):
        del state  # what this path needs of the device is in the `DeviceCache`
        self.handle = handle
        self.requests: list[tuple[jax.Array, jax.Array]] = []

    def submit(
        self, layer: int, queries: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        self.requests.append((queries, lengths))
        return jnp.int32(0)

    def collect(self, layer: int, ticket: jax.Array, after: jax.Array) -> Partial:
        queries, lengths = self.requests[layer]
        # One argument: each costs as much as a small search.
        head = jnp.stack([self.handle, jnp.int32(layer)])
        numbers = jax.lax.bitcast_convert_type(queries, jnp.int32).reshape(-1)
        request = jnp.concatenate([head, lengths, numbers])
        with jax.named_scope("host_attention"):
            out = _attend(request, queries.shape)
        return Partial(out[..., :-2], out[..., -2], out[..., -1])

    def outcome(self) -> tuple[()]:
        """What the session has to act on after the step."""
        return ()


def _attend(request: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The partial [B, K, G, H + 2] of queries of `shape` [B, K, G, H].

    On CPU the callback works on XLA's own buffers, which takes a third of the time of one that returns arrays.
    """
    result = jax.ShapeDtypeStruct((*shape[:-1], shape[-1] + 2), jnp.float32)

    def in_place(_, out, request):
        _answer(np.asarray(request), shape, np.asarray(out))

    def returned(request):
        out = np.empty(result.shape, np.float32)
        _answer(np.asarray(request), shape, out)
        return out

    return jax.lax.platform_dependent(
        request,
        cpu=buffer_callback(in_place, result),
        default=lambda request: jax.pure_callback(returned, result, request, vmap_method="sequential"),
    )


def _answer(request: np.ndarray, shape: tuple[int, ...], out: np.ndarray) -> None:
    # As in `host_path`: a failure is kept for the session to raise when the step is over.
    handle, layer = request[:2].tolist()
    store = by_handle(handle)
    if store is not None:
        try:
            batch = shape[0]
            queries = request[2 + batch :].view(np.float32).reshape(shape)
            return store.attend(layer, request[2 : 2 + batch] >= 0, queries, out)
        except BaseException as failure:
            store.fail(failure)
    return no_clusters(out)
