"""The keys of one layer and sequence on the host, with their four-bit codes: what `code_attention` reads.

Letters: `K` key/value heads, `P` places for clusters in half a head, `M` codes of a key, `W` coordinates, `H` head dim.
"""

from __future__ import annotations

import numpy as np

from rajax import key_codes
from rajax.clusters import Blocks, NewClusters
from rajax.code_attention import compiled
from rajax.exact_attention import HALVES
from rajax.host_layer import HostLayer, bits
from rajax.kernels.code_sums import BLOCK, CENTROIDS
from rajax.wave import log_counts


class CodedLayer(HostLayer):
    """The coded keys of one layer and sequence.

    A head's clusters go to its halves in turn, `BLOCK` at a time.

    Args:
      blocks: the keys and values.
      places: the most clusters that there will be to a head.
    """

    def __init__(self, blocks: Blocks, places: int):
        heads, _, width = blocks.keys.shape
        in_half = -(-places // (HALVES * BLOCK))
        shape = HALVES * heads, in_half * BLOCK
        self._blocks = blocks
        self._log_counts = np.full(shape, -np.inf, np.float32)
        self._spreads = np.zeros(shape, np.float32)
        self._starts, self._sizes = (np.zeros(shape, np.int32) for _ in range(2))
        self._mean_values = np.zeros((*shape, width), blocks.keys.dtype)
        wide = key_codes.coordinates(width)
        number = wide // key_codes.WIDTH
        self._codes = np.zeros((*shape, number // 4, 32), np.uint8)
        self._mean_codes = np.zeros((HALVES * heads, in_half, number // 4, 32), np.uint8)
        self._books: list[key_codes.Codebook | None] = [None] * heads
        self._of_queries = np.zeros((heads, width, wide), np.float32)
        self._centroids = np.zeros((heads, number, CENTROIDS, key_codes.WIDTH), np.float32)
        self._errors, self._variances = (np.zeros((heads, wide), np.float32) for _ in range(2))
        self._used = 0
        """Clusters of a head so far."""
        self._learned_from = 0
        """Keys that there were when the codebooks were learned."""
        self.compiled = compiled(width)
        self._set_arguments()

    def adopt(self, new: NewClusters, whole: np.ndarray, root: np.ndarray) -> None:
        heads, number = new.sizes.shape
        first, end = new.outliers
        assert first == end, "outliers"
        assert not whole.any(), "whole heads"
        half, place = self._place_of(self._used + np.arange(number))
        # Compiled code checks no bounds.
        assert place.max(initial=0) < self._sizes.shape[1], "more clusters than there is room for"
        assert new.sizes.max(initial=0) <= BLOCK, "a cluster of more keys than have their codes together"
        here, by_half = np.s_[:, half, place], (heads, HALVES, self._sizes.shape[1])
        self._log_counts.reshape(by_half)[here] = log_counts(new.sizes)
        self._starts.reshape(by_half)[here], self._sizes.reshape(by_half)[here] = new.starts, new.sizes
        self._mean_values.reshape(*by_half, -1)[here] = new.mean_values
        # What few keys taught is learned anew, and by all of them, when there are twice as many.
        anew = end >= 2 * self._learned_from
        first = 0 if anew else self._used
        self._used += number
        for k in range(heads):
            self._encode(k, np.arange(first, self._used), root[k], anew=anew)
        if anew:
            self._learned_from = end
        self.held += int(new.sizes.sum())
        self._set_arguments()

    @staticmethod
    def _place_of(clusters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """In which half a head's clusters number `clusters` are, and at which place."""
        block = clusters // BLOCK
        return block % HALVES, block // HALVES * BLOCK + clusters % BLOCK

    def _encode(self, k: int, clusters: np.ndarray, root: np.ndarray, *, anew: bool) -> None:
        """Codes the keys, and the means, of clusters of head k, by a codebook that they teach if `anew`."""
        half, place = self._place_of(clusters)
        half += HALVES * k
        there = self._sizes[half, place] > 0
        half, place = half[there], place[there]
        starts, sizes = self._starts[half, place], self._sizes[half, place]
        firsts = np.cumsum(sizes) - sizes
        in_cluster = np.arange(sizes.sum()) - np.repeat(firsts, sizes)
        keys = np.asarray(self._blocks.keys[k, np.repeat(starts, sizes) + in_cluster], np.float32)
        means = np.add.reduceat(keys, firsts) / sizes[:, None].astype(np.float32)
        book = self._books[k]
        if book is None or anew:
            book = self._books[k] = key_codes.learn(keys, root)
            self._of_queries[k], self._centroids[k] = book.of_queries, book.centroids
            self._errors[k] = book.errors
        apart = ((keys - np.repeat(means, sizes, axis=0)) @ book.to_coordinates) ** 2
        if anew:
            self._variances[k] = apart.mean(0)
        usual = np.sqrt(self._variances[k].sum() * sizes)
        self._spreads[half, place] = np.sqrt(np.add.reduceat(apart.sum(1), firsts)) / np.maximum(usual, 1e-20)
        in_half, in_block = self._codes.shape[1], self._codes.shape[2:]
        owners = np.repeat(half * in_half + place, sizes)
        key_codes.encode(book, keys, owners, in_cluster, self._codes.reshape(-1, *in_block))
        owners = half * (in_half // BLOCK) + place // BLOCK
        key_codes.encode(book, means, owners, place % BLOCK, self._mean_codes.reshape(-1, *in_block))

    def _set_arguments(self) -> None:
        blocks = -(-self._used // (HALVES * BLOCK))
        keys = bits(self._blocks.keys), bits(self._blocks.values)
        self.arguments = (
            *(self._of_queries, self._centroids, self._errors, self._variances),
            *(self._mean_codes, self._log_counts, self._spreads),
            *(self._codes, bits(self._mean_values), self._starts, self._sizes),
            *(blocks, *keys),
        )
        self.size = len(self._sizes) * BLOCK * blocks * self._mean_values.shape[-1]

    @property
    def index_bytes(self) -> int:
        books = self._of_queries, self._centroids, self._errors, self._variances
        tables = self._codes, self._mean_codes, self._mean_values, self._log_counts, self._spreads
        return sum(a.nbytes for a in (*books, *tables, self._starts, self._sizes))
