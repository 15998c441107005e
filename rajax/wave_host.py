"""Clusters ranked and attended to on the host, where they lie: no copy, no transfer, and no cache.

Where the device is a CPU, its memory is the host's, and RetroInfer's buffer (`rajax.wave_buffer`) would only copy. The
device keeps the static zone; one callback per layer has `rajax.cluster_attention` do all the rest, or
`rajax.code_attention`.

Letters: `B` batch, `K` key/value heads, `G` query heads per key/value head, `C` clusters, `R` clusters retrieved at
most, `H` head dim.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rajax import cluster_attention, code_attention, key_codes
from rajax.cluster_attention import compiled
from rajax.clusters import Blocks, ClusterStore, NewClusters
from rajax.coded_layer import CodedLayer
from rajax.exact_attention import HALVES
from rajax.handles import by_handle
from rajax.host_layer import HostLayer, bits
from rajax.kernels import Partial, merge
from rajax.kernels.host_call import filled_by_host
from rajax.kernels.nearest_center import CHUNK
from rajax.kernels.row_products import TOGETHER
from rajax.models.wave import CLUSTERS_PER_GROUP, SelectionRule, corrections, group_labels
from rajax.wave import Wave, log_counts

OPEN_P = 0.9
"""The clusters of as few groups are looked at as leave a share of 1 - OPEN_P of the groups' ranks to the others."""

LEAST_OPEN = 24
"""Groups of half a head whose clusters are looked at in any case."""

MOST_OPEN = 768
"""And at most, however long the text."""

WHOLE_KEYS = 4096
"""Keys per head, on average over all heads, that whole heads may have where the settings leave their number open."""

_group_labels = jax.jit(group_labels)


class Groups(NamedTuple):
    """Groups of clusters like one another, [2 K, n, ...]: what `cluster_attention` reads in place of them."""

    means: np.ndarray
    mean_values: np.ndarray
    log_masses: np.ndarray
    importances: np.ndarray
    ends: np.ndarray


class LayerClusters(HostLayer):
    """The clusters of one layer and sequence: what `cluster_attention` reads.

    Args:
      blocks: the keys and values.
      places: the most clusters that there will be to half a head.
      rule: how many a step retrieves, and by what order.
    """

    def __init__(self, blocks: Blocks, places: int, rule: SelectionRule):
        heads, _, width = blocks.keys.shape
        self.rule = rule
        # Compiled code may read, though not use, as many more as it reads together.
        shape = HALVES * heads, places + TOGETHER
        self.means = np.zeros((*shape, width), blocks.keys.dtype)
        self.mean_values = np.zeros_like(self.means)
        self.log_masses = np.full(shape, -np.inf, np.float32)
        self.importances = np.ones(shape, np.float32)
        self.starts, self.sizes = (np.zeros(shape, np.int32) for _ in range(2))
        self.apart = np.zeros((shape[0], 0, 2), np.int64)
        """From where to where each half attends to keys that are in no cluster, for each call of `adopt`."""
        rows = np.zeros((shape[0], 0), np.float32)
        none = np.zeros((shape[0], 0, width), np.float32)
        self.groups = [Groups(none, none, rows, rows, np.zeros((shape[0], 0), np.int64))]
        """Of each call of `adopt`, after none at all."""
        self.compiled = compiled(width)
        share = -1.0 if rule.share is None else rule.share
        least_open, most_open = (LEAST_OPEN, MOST_OPEN) if rule.share is None else (places, places)
        self._settings = (
            OPEN_P,
            least_open,
            most_open,
            share,
            rule.top_p,
            -(-rule.least // HALVES),
            -(-rule.most // HALVES),
            blocks.block_keys,
        )
        self._blocks = blocks
        self._set_arrays()
        self.used = 0
        """Places taken so far in each half."""
        self._dealt = 0

    def adopt(self, new: NewClusters, whole: np.ndarray, root: np.ndarray) -> None:
        new, ends = _grouped(new, root)
        # The next half's turn: neither may get more than the other.
        first, number = self._dealt % HALVES, new.sizes.shape[1]
        self._dealt += number
        here = slice(self.used, self.used + -(-(first + number) // HALVES))
        # Compiled code checks no bounds.
        assert here.stop + TOGETHER <= self.sizes.shape[1], "more clusters than there is room for"
        in_clusters = np.where(whole[:, None], 0, new.sizes)
        arrays = new.means, new.mean_values, in_clusters, new.spreads
        means, mean_values, sizes, spreads = (_halves(a, first) for a in arrays)
        self.means[:, here], self.mean_values[:, here] = means, mean_values
        self.log_masses[:, here] = log_counts(sizes) + corrections(self.rule.rank_by, spreads)
        if self.rule.rank_by == "spread":
            self.importances[:, here] = spreads
        self.starts[:, here], self.sizes[:, here] = _halves(new.starts, first), _halves(new.sizes, first)
        first_apart, end = new.outliers
        firsts = np.where(whole, first_apart - new.sizes.sum(axis=1), first_apart)
        cuts = firsts[:, None] + (end - firsts)[:, None] * np.arange(HALVES + 1) // HALVES
        apart = np.stack([cuts[:, :-1], cuts[:, 1:]], axis=-1).reshape(-1, 1, 2)
        self.apart = np.concatenate([self.apart, apart], axis=1)
        # Half h has those of the clusters 0, 1, ... whose number is h - first, give or take a multiple of `HALVES`.
        half = np.tile(np.arange(HALVES), len(whole))[:, None]
        edges = self.used + (first - half + HALVES - 1 + np.repeat(ends, HALVES, axis=0)) // HALVES
        edges[:, 0], edges[:, -1] = self.used, here.stop
        roots = np.repeat(root, HALVES, axis=0)
        self.groups.append(self._describe(edges, means, mean_values, sizes, spreads, roots))
        self.used = here.stop
        self.held += int(new.sizes.sum()) + len(whole) * (end - first_apart)
        self._set_arrays()

    def _describe(
        self,
        edges: np.ndarray,
        means: np.ndarray,
        mean_values: np.ndarray,
        sizes: np.ndarray,
        spreads: np.ndarray,
        root: np.ndarray,
    ) -> Groups:
        """The groups between edges [2 K, n + 1] of clusters [2 K, c, ...], of which the first is at the first edge."""
        rows, number, width = len(edges), edges.shape[1] - 1, means.shape[2]
        group_means, group_values = np.zeros((2, rows, number, width), np.float32)
        counts, group_spreads = np.zeros((2, rows, number), np.float32)
        for k in range(rows):
            lengths = np.diff(edges[k])
            filled = np.flatnonzero(lengths)
            starts, lengths = edges[k][filled] - edges[k, 0], lengths[filled]
            weights = sizes[k].astype(np.float32)
            total = np.add.reduceat(weights, starts)
            share = (weights / np.repeat(np.maximum(total, 1), lengths))[:, None]
            counts[k, filled] = total
            group_means[k, filled] = np.add.reduceat(share * means[k], starts)
            group_values[k, filled] = np.add.reduceat(share * mean_values[k], starts)
            apart = (means[k] - np.repeat(group_means[k, filled], lengths, axis=0)) @ root[k]
            variances = spreads[k] ** 2 + (apart**2).sum(1)
            group_spreads[k, filled] = np.sqrt(np.add.reduceat(share[:, 0] * variances, starts))
        return Groups(
            group_means,
            group_values,
            log_counts(counts) + corrections(self.rule.rank_by, group_spreads),
            group_spreads if self.rule.rank_by == "spread" else np.ones_like(group_spreads),
            edges[:, 1:],
        )

    def _set_arrays(self) -> None:
        """What compiled code is called with, besides queries, settings and places for the answer."""
        means, mean_values, masses, importances, ends = (
            np.concatenate(parts, axis=1) for parts in zip(*self.groups, strict=True)
        )
        group_count = ends.shape[1]
        # As many more as are read together.
        means, mean_values = (
            np.pad(a, ((0, 0), (0, TOGETHER), (0, 0))).astype(self.means.dtype) for a in (means, mean_values)
        )
        ends = np.pad(ends, ((0, 0), (1, 0))).astype(np.int32)
        tables = self.log_masses, self.importances, self.starts, self.sizes
        groups = means, mean_values, masses, importances, ends
        arrays = self.means, self.mean_values, *tables, *groups, self._blocks.keys, self._blocks.values
        self.arguments = *map(bits, arrays), self.apart, group_count, *self._settings
        self.size = self.means.size + int(np.diff(self.apart).sum()) * self.means.shape[2]

    @property
    def index_bytes(self) -> int:
        tables = self.log_masses, self.importances, self.starts, self.sizes, self.apart
        return sum(a.nbytes for a in (self.means, self.mean_values, *tables))


def _grouped(new: NewClusters, root: np.ndarray) -> tuple[NewClusters, np.ndarray]:
    """The clusters ordered by group, and [K, n + 1] where in that order each group of a head begins and the last ends.

    A few clusters are one group.
    """
    heads, count = new.sizes.shape
    if count <= 4 * CLUSTERS_PER_GROUP:
        return new, np.tile([0, count], (heads, 1))
    missing = -count % CHUNK  # for fewer compilations
    means = np.pad(new.means, ((0, 0), (0, missing), (0, 0)))
    labels = np.asarray(_group_labels(means, np.pad(new.sizes, ((0, 0), (0, missing))), root))[:, :count]
    number = int(labels.max()) + 1
    order = np.argsort(labels, axis=1, kind="stable")
    names = "means", "mean_values", "sizes", "spreads", "radii", "starts"

    def ordered(a: np.ndarray) -> np.ndarray:
        return np.take_along_axis(a, order.reshape(*order.shape, *(1,) * (a.ndim - 2)), axis=1)

    changed: dict[str, Any] = {name: ordered(getattr(new, name)) for name in names}
    new = dataclasses.replace(new, **changed)
    ends = np.cumsum([np.bincount(row, minlength=number) for row in labels], axis=1)
    return new, np.pad(ends, ((0, 0), (1, 0)))


def _halves(a: np.ndarray, first: int) -> np.ndarray:
    """Clusters [K, c, ...] dealt out to the halves of their heads, [2 K, c / 2, ...], half `first` first; 0 pads."""
    missing = -(a.shape[1] + first) % HALVES
    a = np.pad(a, ((0, 0), (first, missing), *((0, 0),) * (a.ndim - 2)))
    each = a.shape[1] // HALVES
    dealt = a.reshape(len(a), each, HALVES, *a.shape[2:]).swapaxes(1, 2)
    return dealt.reshape(HALVES * len(a), each, *a.shape[2:])


@dataclasses.dataclass
class HostWaveCounters:
    """Sums over decode steps, layers and heads.

    Attributes:
      offloaded: offloaded keys in clusters, per query head.
      ranked: means of clusters and groups, or codes, that were looked at, per query head.
      attended: keys attended to exactly, per query head.
    """

    offloaded: int = 0
    ranked: int = 0
    attended: int = 0


class HostWaveStore(ClusterStore):
    """The host memory of one request, and attention over it.

    Args:
      groups: query heads per key/value head.
      coded: whether every key is looked at by its codes.
      store: the arguments of `ClusterStore`.
    """

    def __init__(self, *, groups: int, coded: bool, **store: Any):
        self.groups, self.coded = groups, coded
        self.layers: list[list[HostLayer]] = []
        """By layer and sequence."""
        self.counters = HostWaveCounters()
        super().__init__(**store)
        # While the prompt is prefilled: it takes seconds where it was never done before.
        dtype = bits(np.zeros(0, store["dtype"])).dtype
        attention = code_attention if coded else cluster_attention
        self._builders.submit(attention.warm_up, store["head_dim"], dtype)
        if coded:
            self._builders.submit(key_codes.warm_up, store["head_dim"])

    def make_room(self, places: int, rule: SelectionRule) -> None:
        """Makes room for so many clusters per layer, sequence and half head."""

        def layer_of(blocks: Blocks) -> HostLayer:
            return CodedLayer(blocks, HALVES * places) if self.coded else LayerClusters(blocks, places, rule)

        self.layers = [[layer_of(blocks) for blocks in layer] for layer in self.blocks]

    def adopt_all(
        self,
        sequence: int,
        layers: Sequence[int],
        formed: Sequence[NewClusters],
        whole: np.ndarray,
        roots: Sequence[np.ndarray],
    ) -> None:
        """Has `layers` of a sequence take clusters over, as `HostLayer.adopt`."""
        adopt = [self.layers[layer][sequence].adopt for layer in layers]
        # Codes are learned and written without Python's lock. Groups are formed by JAX, which has threads of its own.
        in_turn = self._builders.map if self.coded else map
        for _ in in_turn(lambda take, *arguments: take(*arguments), adopt, formed, whole, roots):
            pass

    def attend(self, layer: int, active: np.ndarray, queries: np.ndarray, out: np.ndarray) -> None:
        """Writes the partials of queries [B, K, G, H] to out [B, 2 K, G, H + 2]; of no keys where not `active`."""
        for sequence, clusters in enumerate(self.layers[layer]):
            if not active[sequence] or not clusters.held:
                no_clusters(out[sequence])
                continue
            start = time.perf_counter()
            counts = clusters.attend(queries[sequence], out[sequence])
            seconds = time.perf_counter() - start
            _, attended, ranked, ranking, attending = counts.sum(axis=0).tolist()
            share = ranking / max(1, ranking + attending)
            self.seconds["host_search"] += share * seconds
            self.seconds["host_attention"] += (1 - share) * seconds
            c = self.counters
            c.offloaded += self.groups * clusters.held
            c.ranked += self.groups * ranked
            c.attended += self.groups * attended

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
        return sum(c.index_bytes for layer in self.layers for c in layer)

    def close(self) -> None:
        super().close()
        self.layers = []


def join_halves(out: jax.Array) -> Partial:
    """The partial of whole heads from what `HostLayer.attend` wrote of their halves, [..., 2 K, G, H + 2]."""
    halves = (out[..., i::HALVES, :, :] for i in range(HALVES))
    return merge(*(Partial(half[..., :-2], half[..., -2], half[..., -1]) for half in halves))


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
        request, _ = jax.lax.optimization_barrier((request, after))
        batch, heads, groups, width = queries.shape
        result = jax.ShapeDtypeStruct((batch, HALVES * heads, groups, width + 2), jnp.float32)
        with jax.named_scope("host_attention"):
            (out,) = filled_by_host(functools.partial(_answer, queries.shape), (result,), request)
        return join_halves(out)

    def outcome(self) -> tuple[()]:
        """What the session has to act on after the step."""
        return ()


def _answer(shape: tuple[int, ...], request: np.ndarray, out: np.ndarray) -> None:
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


class HostWave(Wave):
    """One request's clusters, all on the host; see `offload.Offload`."""

    path: Any = HostWavePath
    max_clusters = 96
    top_p = 0.95

    def whole_share(self, keys: int) -> float:
        return min(1.0, max(WHOLE_KEYS / max(1, keys), super().whole_share(keys)))

    def make_store(self, capacity: Sequence[int]) -> HostWaveStore:
        if self.retrieval.rank_by == "bound":
            raise ValueError("rank_by='bound' is for the device's buffer only: set wave_buffer=True")
        return HostWaveStore(
            groups=self.groups, coded=self.retrieval.key_codes, **self.store_settings(capacity)
        )

    def begin(self, formed: dict[tuple[int, int], NewClusters], in_prompts: int, rule: SelectionRule) -> None:
        # Each time that clusters are taken over, a half may be left with an empty place.
        places = -(-in_prompts // HALVES) + self.units * (1 + self.unit_clusters // HALVES)
        self.store.make_room(places, rule)
        self.state = ()
        batch = len(self.starts)
        misjudged = np.zeros((batch, self.layers, self.kv_heads))
        for (layer, sequence), new in formed.items():
            misjudged[sequence, layer] = new.misjudged
        for sequence in range(batch):
            worst = np.argsort(-misjudged[sequence], axis=None, kind="stable")[: self.whole_heads]
            whole = (misjudged[sequence] > 0) & np.isin(
                np.arange(misjudged[sequence].size).reshape(self.layers, -1), worst
            )
            layers = [layer for layer in range(self.layers) if (layer, sequence) in formed]
            roots = [np.asarray(self._roots[layer][sequence]) for layer in layers]
            self.store.adopt_all(
                sequence, layers, [formed[i, sequence] for i in layers], whole[layers], roots
            )

    def add(self, sequence: int, first: int, formed: Sequence[NewClusters]) -> None:
        roots = [np.asarray(layer[sequence]) for layer in self._roots]
        none = np.zeros((self.layers, self.kv_heads), bool)
        self.store.adopt_all(sequence, range(self.layers), formed, none, roots)
