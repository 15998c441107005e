"""Clusters of offloaded keys in host memory: keys and values ordered by cluster, so that a cluster is one block.

NumPy only: a step reads these inside host callbacks, where JAX can deadlock.

Letters: `L` layers, `B` batch, `K` key/value heads, `G` query heads per key/value head, `S` keys, `C` clusters,
`E` held-out queries, `H` head dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from rajax.handles import Store
from rajax.head import check_keys
from rajax.kernels.host_call import CORES

MOST_OUTLIERS = 4096
"""Keys of a head that are in no cluster, at most: every step reads them, however long the text."""


def outliers_among(count: int, share: float) -> int:
    """How many of a head's `count` keys are in no cluster: the `share`, at most `MOST_OUTLIERS` unless it is all."""
    return count if share == 1 else min(int(share * count), MOST_OUTLIERS)


@dataclasses.dataclass(frozen=True)
class NewClusters:
    """Clusters that were formed of keys taken in: what ranking needs of them, arrays [K, c, ...].

    `sizes` is 0 past a head's last. `popular`, [K, c] int32, has their numbers by falling importance.
    `misjudged` [K] tells how wrong their estimates are; see `Exam`. Keys from the first of `outliers` to before the
    second, the same places for every head, are in no cluster.
    """

    means: np.ndarray
    mean_values: np.ndarray
    sizes: np.ndarray
    spreads: np.ndarray
    radii: np.ndarray
    starts: np.ndarray
    popular: np.ndarray
    misjudged: np.ndarray
    outliers: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Exam:
    """Queries of the prompt that were held out, to tell for which heads the clusters do not do.

    Attributes:
      queries: [K, G, E, H] float32, scaled, E of them per query head; all see all offloaded keys.
      log_seen: [K, G, E], the logarithm of the attention mass of what is not offloaded.
      retrieved: clusters that a step retrieves.
      corrections: [C] -> [C], what is added to the logarithm of an estimate for a spread.
    """

    queries: np.ndarray
    log_seen: np.ndarray
    retrieved: int
    corrections: Callable[[np.ndarray], np.ndarray]

    def misjudged(
        self, k: int, keys: np.ndarray, sizes: np.ndarray, means: np.ndarray, spreads: np.ndarray
    ) -> float:
        """The largest share of attention that a cluster's estimate is off by, root mean square over queries of head k.

        Many small errors cancel in a sum of values; one large one is a key that should have been copied. The clusters
        are those of keys [S, H], in order.
        """
        groups, number, width = self.queries[k].shape
        queries = self.queries[k].reshape(-1, width)
        scores = queries @ keys.T
        estimates = queries @ means.T + np.log(sizes) + self.corrections(spreads)
        top = np.maximum(np.maximum(scores.max(1), estimates.max(1)), self.log_seen[k].ravel())[:, None]
        mass = np.add.reduceat(np.exp(scores - top), np.cumsum(sizes) - sizes, axis=1)
        estimates = np.exp(estimates - top)
        seen = np.exp(self.log_seen[k].ravel() - top[:, 0])
        rank = (estimates / (seen + estimates.sum(1))[:, None]).reshape(groups, number, -1).sum(0) * spreads
        if self.retrieved < rank.shape[1]:
            first_left = rank.shape[1] - self.retrieved - 1
            limit = np.partition(rank, first_left, axis=1)[:, first_left : first_left + 1]
            left = np.tile(rank <= limit, (groups, 1))
        else:
            left = np.zeros(estimates.shape, bool)
        wrong = (np.abs(mass - estimates) * left).max(1) / (seen + mass.sum(1))
        return float(np.sqrt((wrong**2).mean()))


class Blocks:
    """The offloaded keys and values of one layer and sequence, all heads, ordered by cluster."""

    def __init__(self, kv_heads: int, capacity: int, head_dim: int, dtype: np.dtype, block_keys: int):
        # A block is read as so many rows from its start on, which may reach past the last key. Zeros cost no memory
        # before they are written to.
        self.keys = np.zeros((kv_heads, capacity + block_keys, head_dim), dtype)
        self.values = np.zeros_like(self.keys)
        self.key_windows, self.value_windows = (_windows(a, block_keys) for a in (self.keys, self.values))
        """[K, row, block_keys, H]: the rows from each row on."""
        self.block_keys = block_keys
        self.count = 0

    def add(
        self,
        keys: np.ndarray,
        values: np.ndarray,
        labels: np.ndarray,
        root: np.ndarray,
        importance: np.ndarray | None,
        exam: Exam | None,
        outliers: float,
    ) -> NewClusters:
        """Takes keys and values [K, S, H] in, and cuts their clusters into blocks.

        A key far from its cluster's mean has a score that the mean does not tell, and it draws the mean away from the
        others. It is left out, and put behind the clusters.

        Args:
          keys: in the order of their positions.
          values: likewise.
          labels: [K, S] integers.
          root: [K, H, H], the coordinates in which `spreads`, and what is far, are measured.
          importance: [K, S], what `popular` goes by; None for the order of the clusters.
          exam: what `misjudged` goes by; None leaves it at 0.
          outliers: the share of every head's keys that are in no cluster, as `outliers_among` takes it.

        Raises:
          FloatingPointError: keys that no search can order.
        """
        heads, count, width = keys.shape
        for head in keys:
            check_keys(np.asarray(head, np.float32))
        kept = count - outliers_among(count, outliers)
        layouts = [
            _without_outliers(keys[k], labels[k], root[k], kept, self.block_keys) for k in range(heads)
        ]
        most = max(len(sizes) for _, sizes in layouts)
        new = NewClusters(
            means=np.zeros((heads, most, width), np.float32),
            mean_values=np.zeros((heads, most, width), np.float32),
            sizes=np.zeros((heads, most), np.int32),
            spreads=np.zeros((heads, most), np.float32),
            radii=np.zeros((heads, most), np.float32),
            starts=np.zeros((heads, most), np.int32),
            popular=np.tile(np.arange(most, dtype=np.int32), (heads, 1)),
            misjudged=np.zeros(heads, np.float32),
            outliers=(self.count + kept, self.count + count),
        )
        for k, (order, sizes) in enumerate(layouts):
            n, starts = len(sizes), np.cumsum(sizes) - sizes
            here = slice(self.count, self.count + count)
            ordered, ordered_values = (np.asarray(a[k][order], np.float32) for a in (keys, values))
            self.keys[k, here], self.values[k, here] = ordered, ordered_values
            order, ordered, ordered_values = order[:kept], ordered[:kept], ordered_values[:kept]
            new.sizes[k, :n], new.starts[k, :n] = sizes, self.count + starts
            new.means[k, :n] = np.add.reduceat(ordered, starts) / sizes[:, None]
            new.mean_values[k, :n] = np.add.reduceat(ordered_values, starts) / sizes[:, None]
            apart = ordered - np.repeat(new.means[k, :n], sizes, axis=0)
            new.radii[k, :n] = np.sqrt(np.maximum.reduceat(_squares(apart), starts))
            new.spreads[k, :n] = np.sqrt(np.add.reduceat(_squares(apart @ root[k]), starts) / sizes)
            if exam is not None:
                new.misjudged[k] = exam.misjudged(k, ordered, sizes, new.means[k, :n], new.spreads[k, :n])
            if importance is not None:
                shares = np.zeros(most, np.float32)
                shares[:n] = np.add.reduceat(importance[k][order], starts)
                new.popular[k] = np.argsort(-shares, kind="stable")
        self.count += count
        return new


def _windows(a: np.ndarray, length: int) -> np.ndarray:
    """A view [K, n, length, H] of [K, S, H] whose row i has the rows i, i + 1, ..."""
    shape = a.shape[0], a.shape[1] - length + 1, length, a.shape[2]
    strides = a.strides[0], a.strides[1], a.strides[1], a.strides[2]
    return np.lib.stride_tricks.as_strided(a, shape, strides, writeable=False)


def _layout(labels: np.ndarray, block_keys: int) -> tuple[np.ndarray, np.ndarray]:
    """How keys with `labels` [S] are ordered, [S], and the sizes of the clusters that this order is cut into."""
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels)
    counts = counts[counts > 0]
    pieces = -(-counts // block_keys)
    # Pieces of as equal a size as can be: the first `longer` have one key more than the others.
    shortest, longer = counts // pieces, counts % pieces
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return order, np.repeat(shortest, pieces) + (number < np.repeat(longer, pieces))


def _without_outliers(
    keys: np.ndarray, labels: np.ndarray, root: np.ndarray, kept: int, block_keys: int
) -> tuple[np.ndarray, np.ndarray]:
    """The `_layout` of all but the keys [S, H] that are furthest from the means of their `labels`.

    Those follow, in the order of their positions. Distances are measured after a product with `root`.
    """
    count = len(keys)
    if kept == count:
        return _layout(labels, block_keys)
    if not kept:
        return np.arange(count), np.zeros(0, np.int64)
    order = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels)
    sizes = sizes[sizes > 0]
    ordered = np.asarray(keys[order], np.float32)
    means = np.add.reduceat(ordered, np.cumsum(sizes) - sizes) / sizes[:, None].astype(np.float32)
    distances = _squares((ordered - np.repeat(means, sizes, axis=0)) @ root)
    nearest = np.zeros(count, bool)
    nearest[order[np.argpartition(distances, kept - 1)[:kept]]] = True
    inside, outside = np.flatnonzero(nearest), np.flatnonzero(~nearest)
    order, sizes = _layout(labels[inside], block_keys)
    return np.concatenate([inside[order], outside]), sizes


def _squares(rows: np.ndarray) -> np.ndarray:
    return np.einsum("sh,sh->s", rows, rows)


class ClusterStore(Store):
    """The host memory of one request whose offloaded keys are in clusters.

    Args:
      layers, kv_heads, head_dim: the model's.
      dtype: of keys and values here.
      capacities: per sequence, the most keys that it will ever offload.
      block_keys: keys of a block.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: np.dtype,
        capacities: Sequence[int],
        block_keys: int,
    ):
        self.blocks = [
            [Blocks(kv_heads, capacity, head_dim, dtype, block_keys) for capacity in capacities]
            for _ in range(layers)
        ]
        """By layer and sequence."""
        self.kv_heads = kv_heads
        self._key_bytes = 2 * kv_heads * head_dim * dtype.itemsize
        self._builders = ThreadPoolExecutor(CORES, thread_name_prefix="rajax-build")
        super().__init__()

    def put(self, layer: int, sequence: int, *arguments: Any) -> Future[NewClusters]:
        """Has a background thread take keys in; the arguments are those of `Blocks.add`."""
        return self._builders.submit(self.blocks[layer][sequence].add, *arguments)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values held now."""
        return sum(self._key_bytes * blocks.count for layer in self.blocks for blocks in layer)

    def close(self) -> None:
        """Ends the threads and forgets the keys. No step may be running."""
        super().close()
        self._builders.shutdown(cancel_futures=True)
        self.blocks = []
