"""RetroInfer's wave buffer, as the host sees it (arXiv 2505.02922, section 4.3): clusters in blocks, and who is cached.

One `WaveStore` belongs to one request. It has all offloaded keys and values, ordered by cluster, and the mapping
table of the device's block cache. Nothing here may touch JAX: `fetch` runs inside host callbacks, where that can
deadlock.

Letters: `L` layers, `B` batch, `K` key/value heads, `G` query heads per key/value head, `S` keys, `C` clusters,
`R` clusters wanted at most, `M` blocks of the cache, `P` blocks of a transfer, `H` head dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from rajax.clusters import ClusterStore, NewClusters


@dataclasses.dataclass
class WaveCounters:
    """Sums over decode steps, layers and heads.

    Attributes:
      offloaded: offloaded keys in clusters, per query head.
      ranked: clusters that were ranked, per query head.
      attended: keys attended to exactly, in the cache, fetched, outlying or kept whole, per query head.
      wanted: clusters retrieved, per key/value head.
      hits: those of them that were in the block cache.
      evictions: clusters that had to leave the cache.
      transfers: transfers of fetched blocks to the device; at most one per layer and step, unless more are missing than
        one holds.
      bytes_moved: bytes of those transfers, unused places included.
      bytes_wanted: bytes of the blocks of all clusters retrieved: what would have moved without a cache.
    """

    offloaded: int = 0
    ranked: int = 0
    attended: int = 0
    wanted: int = 0
    hits: int = 0
    evictions: int = 0
    transfers: int = 0
    bytes_moved: int = 0
    bytes_wanted: int = 0


class WaveStore(ClusterStore):
    """The host memory of one request, with the tables of the device's cache.

    Args:
      groups: query heads per key/value head.
      device_dtype: of keys and values that cross.
      cache_blocks: M, blocks of the device's cache per head.
      outlier_blocks: blocks before those, per head, that hold outliers and never change places.
      transfers: P, the blocks of the transfers that a step may ask for, the largest last.
      store: the arguments of `ClusterStore`.
    """

    def __init__(
        self,
        *,
        groups: int,
        device_dtype: np.dtype,
        cache_blocks: int,
        outlier_blocks: int,
        transfers: Sequence[int],
        **store: Any,
    ):
        layers, rows = store["layers"], len(store["capacities"]) * store["kv_heads"]
        self.groups, self.block_keys, self.outlier_blocks = groups, store["block_keys"], outlier_blocks
        self.block_bytes = 2 * self.block_keys * store["head_dim"] * device_dtype.itemsize
        self.counters = WaveCounters()
        # The rows of these are sequences and heads: row = sequence * K + head.
        self.held = np.full((layers, rows, cache_blocks), -1, np.int32)
        """The cluster in each block of the cache, [L, B * K, M]; -1 for none."""
        self.used = np.full((layers, rows, cache_blocks), -1, np.int64)
        """The step in which it was last wanted."""
        self.place = np.zeros((layers, rows, 0), np.int32)
        """The mapping table: the block of the cache that each cluster is in, [L, B * K, C]; -1 for none."""
        self.whole = np.zeros((layers, rows), np.int32)
        """Keys of each head that the device keeps whole; 0 for the others."""
        self.outliers = np.zeros((layers, rows), np.int32)
        """Keys of each head that are in no cluster, and on the device therefore."""
        self.sizes = np.zeros((layers, rows, 0), np.int32)
        self.starts = np.zeros((layers, rows, 0), np.int32)
        self.transfers = transfers
        self._step = 0
        super().__init__(**store)

    # --- taking keys in

    def make_room(self, clusters: int) -> None:
        """Gives the mapping table its size C, with no cluster in it."""
        shape = *self.held.shape[:2], clusters
        self.place = np.full(shape, -1, np.int32)
        self.sizes, self.starts = np.zeros(shape, np.int32), np.zeros(shape, np.int32)

    def adopt(self, layer: int, sequence: int, first: int, new: NewClusters) -> None:
        """From now on `new` are the clusters `first`, `first + 1`, ... of a layer and sequence.

        A prompt's, which begin at 0, do not count for heads that are kept whole.
        """
        rows, columns = self._rows(sequence), slice(first, first + new.sizes.shape[1])
        kept = self.whole[layer, rows, None] > 0 if first == 0 else False
        self.sizes[layer, rows, columns] = np.where(kept, 0, new.sizes)
        self.starts[layer, rows, columns] = new.starts

    def adopt_outliers(
        self, layer: int, sequence: int, new: NewClusters, first: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The outliers of `new`, which the device has from now on; those of a prompt, `first` 0, for no whole heads.

        Returns:
          Blocks [K, n, block_keys, H] of keys and of values, and the keys in each [K, n].
        """
        start, stop = new.outliers
        starts = np.arange(start, stop, self.block_keys)
        rows, blocks = self._rows(sequence), self.blocks[layer][sequence]
        kept = (self.whole[layer, rows] > 0) & (first == 0)
        sizes = np.where(kept[:, None], 0, np.minimum(self.block_keys, stop - starts)).astype(np.int32)
        self.outliers[layer, rows] += sizes.sum(axis=1)
        return blocks.key_windows[:, starts], blocks.value_windows[:, starts], sizes

    def fill_cache(
        self, layer: int, sequence: int, new: NewClusters
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Puts the most popular of a prompt's clusters into the cache.

        Returns:
          The blocks' keys and values [K, M, block_keys, H], and their sizes [K, M].
        """
        blocks, rows = self.blocks[layer][sequence], self._rows(sequence)
        slots = self.held.shape[2]
        shape = self.kv_heads, slots, self.block_keys, blocks.keys.shape[2]
        keys, values = np.zeros(shape, blocks.keys.dtype), np.zeros(shape, blocks.keys.dtype)
        sizes = np.zeros((self.kv_heads, slots), np.int32)
        for k, row in enumerate(range(rows.start, rows.stop)):
            if self.whole[layer, row]:
                continue
            real = new.popular[k][new.sizes[k][new.popular[k]] > 0][:slots]
            n = len(real)
            keys[k, :n] = blocks.key_windows[k][new.starts[k][real]]
            values[k, :n] = blocks.value_windows[k][new.starts[k][real]]
            sizes[k, :n] = new.sizes[k][real]
            self.held[layer, row, :n] = real
            # The least popular leaves first.
            self.used[layer, row, :n] = -1 - np.arange(n)
            self.place[layer, row, real] = np.arange(n)
        return keys, values, sizes

    def _rows(self, sequence: int) -> slice:
        return slice(sequence * self.kv_heads, (sequence + 1) * self.kv_heads)

    # --- decode, called from inside a jitted step

    def fetch(
        self,
        layer: int,
        first: int,
        ids: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        rows: np.ndarray,
        sizes: np.ndarray,
    ) -> None:
        """Reads the blocks of wanted clusters that are not in the cache, all heads together.

        Args:
          layer: the layer.
          first: how many of the missing ones earlier transfers of this step had.
          ids: [B * K, R] int32, the clusters wanted; -1 for none.
          keys: [P, block_keys, H], where to write; what comes after the last block is zero.
          values: likewise.
          rows: [P] int32, where to write each block's row (sequence * K + head).
          sizes: [P] int32, where to write its size, 0 for no block.
        """
        places = self.place[layer][np.arange(len(ids))[:, None], ids]
        # Every row's most wanted come first.
        column, row = np.nonzero(((ids >= 0) & (places < 0)).T)
        row, column = row[first : first + len(sizes)], column[first : first + len(sizes)]
        cluster = ids[row, column]
        n, starts = len(row), self.starts[layer][row, cluster]
        sequences, heads = row // self.kv_heads, row % self.kv_heads
        for sequence, blocks in enumerate(self.blocks[layer]):
            here = np.flatnonzero(sequences == sequence)
            if len(here):
                keys[here] = blocks.key_windows[heads[here], starts[here]]
                values[here] = blocks.value_windows[heads[here], starts[here]]
        rows[:n], sizes[:n] = row, self.sizes[layer][row, cluster]
        for a in (keys, values, rows, sizes):
            a[n:] = 0

    # --- after a step

    def after_step(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Counts the step, and decides which of the fetched clusters take whose place in the cache (LRU).

        Args:
          ids: [L, B, K, R] int32, the clusters that the step wanted; -1 for none.

        Returns:
          Three arrays [L, P] int32, one entry per block of the step's first transfer of each layer: the block of
          the cache that it goes to, counted through all rows; the cluster that comes, likewise; the one that
          leaves. What lies past the last one means none.
        """
        layers, rows, slots = self.held.shape
        ids = ids.reshape(layers, rows, -1)
        now, self._step = self._step, self._step + 1
        wanted = ids >= 0
        each = np.arange(layers)[:, None, None], np.arange(rows)[None, :, None]
        places = np.where(wanted, self.place[*each, ids], -1)
        self._count(ids, wanted, places)
        layer, row, column = np.nonzero(places >= 0)
        self.used[layer, row, places[layer, row, column]] = now

        clusters, most = self.place.shape[2], self.transfers[-1]
        places_each = self.outlier_blocks + slots
        to = np.full((layers, most), rows * places_each, np.int32)
        come, go = (np.full((layers, most), rows * clusters, np.int32) for _ in range(2))
        layer, column, row = np.nonzero((wanted & (places < 0)).transpose(0, 2, 1))
        cluster = ids[layer, row, column]
        missing = np.bincount(layer, minlength=layers)
        self._count_transfers(missing)
        # What the first transfer of a layer brought is still there.
        number = np.arange(len(layer)) - (np.cumsum(missing) - missing)[layer]
        layer, row, cluster, number = (a[number < most] for a in (layer, row, cluster, number))
        if not slots or not len(row):
            return to, come, go
        # The n-th that comes to a row takes the n-th oldest place there, unless this very step wants that one.
        head = layer * rows + row
        order = np.argsort(head, kind="stable")
        ordered = head[order]
        nth = np.empty(len(head), np.int64)
        nth[order] = np.arange(len(head)) - np.searchsorted(ordered, ordered)
        oldest = np.argsort(self.used, axis=2, kind="stable")
        place = oldest[layer, row, np.minimum(nth, slots - 1)]
        fits = (nth < slots) & (self.used[layer, row, place] < now)
        layer, row, number, cluster, place = (a[fits] for a in (layer, row, number, cluster, place))
        leaving = self.held[layer, row, place]
        to[layer, number] = row * places_each + self.outlier_blocks + place
        come[layer, number] = row * clusters + cluster
        left = leaving >= 0
        go[layer[left], number[left]] = (row * clusters + leaving)[left]
        self.place[layer[left], row[left], leaving[left]] = -1
        self.held[layer, row, place], self.used[layer, row, place] = cluster, now
        self.place[layer, row, cluster] = place
        self.counters.evictions += int(left.sum())
        return to, come, go

    def _count_transfers(self, missing: np.ndarray) -> None:
        """Counts how `missing` [L] blocks of each layer crossed."""
        sizes = np.array(self.transfers)
        blocks = sizes[np.minimum(np.searchsorted(sizes, missing), len(sizes) - 1)]
        rounds = -(-missing // blocks)
        self.counters.transfers += int(rounds.sum())
        self.counters.bytes_moved += int((rounds * blocks).sum()) * self.block_bytes

    def _count(self, ids: np.ndarray, wanted: np.ndarray, places: np.ndarray) -> None:
        """Counts a step that wanted `ids` [L, B * K, R], which were at `places` in the cache."""
        c = self.counters
        active = np.repeat(wanted.any(axis=(0, 2)).reshape(-1, self.kv_heads).any(1), self.kv_heads)
        layer, row, column = np.nonzero(wanted & (places < 0))
        fetched = int(self.sizes[layer, row, ids[layer, row, column]].sum())
        layer, row, slot = np.nonzero((self.held >= 0) & active[:, None])
        cached = int(self.sizes[layer, row, self.held[layer, row, slot]].sum())
        apart = int(self.whole[:, active].sum() + self.outliers[:, active].sum())
        c.offloaded += self.groups * (int(self.sizes[:, active].sum()) + apart)
        c.ranked += self.groups * int((self.sizes[:, active] > 0).sum())
        c.attended += self.groups * (cached + fetched + apart)
        c.wanted += int(wanted.sum())
        c.hits += int((places >= 0).sum())
        c.bytes_wanted += int(wanted.sum()) * self.block_bytes

    # --- afterwards

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
            "cache_hit_ratio": c.hits / c.wanted if c.wanted else None,
            "bytes_moved": c.bytes_moved,
            "evictions": c.evictions,
        }

    @property
    def index_bytes(self) -> int:
        """Bytes of the tables besides."""
        return sum(a.nbytes for a in (self.held, self.used, self.place, self.sizes, self.starts))
