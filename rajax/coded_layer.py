"""The keys of one layer and sequence on the host, each with its four-bit codes: what `code_attention` reads.

Letters: `K` key/value heads, `C` clusters, `N` blocks of codes, `M` codes of a key, `W` coordinates, `H` head dim.
"""

from __future__ import annotations

import numpy as np

from rajax import key_codes
from rajax.clusters import Blocks, NewClusters
from rajax.code_attention import compiled
from rajax.exact_attention import HALVES
from rajax.host_layer import HostLayer, bits
from rajax.kernels.code_sums import BLOCK, CENTROIDS
from rajax.kernels.row_products import TOGETHER


class CodedLayer(HostLayer):
    """The coded keys of one layer and sequence.

    Args:
      blocks: the keys and values.
      places: the most clusters that there will be to a head.
    """

    def __init__(self, blocks: Blocks, places: int):
        heads, rows, width = blocks.keys.shape
        shape = heads, places + TOGETHER  # compiled code may read, though not use, as many more
        self._blocks = blocks
        self._mean_values = np.zeros((*shape, width), blocks.keys.dtype)
        self._starts, self._sizes = (np.zeros(shape, np.int32) for _ in range(2))
        wide = key_codes.coordinates(width)
        self._codes = np.zeros((heads, -(-rows // BLOCK), wide // key_codes.WIDTH, BLOCK // 2), np.uint8)
        self._books: list[key_codes.Codebook | None] = [None] * heads
        self._of_queries = np.zeros((heads, width, wide), np.float32)
        self._centroids = np.zeros((heads, wide // key_codes.WIDTH, CENTROIDS, key_codes.WIDTH), np.float32)
        self._errors = np.zeros((heads, wide, wide), np.float32)
        self._spans = np.zeros((HALVES * heads, 0, 4), np.int64)
        self._apart = np.zeros((HALVES * heads, 0, 2), np.int64)
        self._used = 0
        """Places of clusters taken so far."""
        self._learned_from = 0
        """Keys that there were when the codebooks were learned."""
        self.compiled = compiled(width)
        self._set_arguments()

    def adopt(self, new: NewClusters, whole: np.ndarray, root: np.ndarray) -> None:
        heads, number = new.sizes.shape
        outliers, end = new.outliers
        here = slice(self._used, self._used + number)
        # Compiled code checks no bounds.
        assert here.stop + TOGETHER <= self._sizes.shape[1], "more clusters than there is room for"
        self._mean_values[:, here] = new.mean_values
        self._starts[:, here], self._sizes[:, here] = new.starts, new.sizes
        # What few keys taught is learned anew, and by all of them, when there are twice as many.
        anew = end >= 2 * self._learned_from
        spans, apart = np.zeros((heads, HALVES, 4), np.int64), np.zeros((heads, HALVES, 2), np.int64)
        for k in range(heads):
            first = outliers - int(new.sizes[k].sum())
            if whole[k]:
                apart[k] = _cut(first, end)
                continue
            apart[k] = _cut(outliers, end)
            clusters = _cut(0, int(np.count_nonzero(new.sizes[k])))
            starts = np.append(new.starts[k, : clusters[-1, 1]], outliers)
            spans[k] = np.concatenate([self._used + clusters, starts[clusters]], axis=1)
            self._encode(k, 0 if anew else first, outliers, root[k], anew=anew)
        if anew:
            self._learned_from = end
        self._spans = np.concatenate([self._spans, spans.reshape(-1, 1, 4)], axis=1)
        self._apart = np.concatenate([self._apart, apart.reshape(-1, 1, 2)], axis=1)
        self._used = here.stop
        self.held += int(new.sizes.sum()) + heads * (end - outliers)
        self._set_arguments()

    def _encode(self, k: int, first: int, last: int, root: np.ndarray, *, anew: bool) -> None:
        """Codes keys first .. last - 1 of head k, by a codebook that they teach if `anew`."""
        if first == last:
            return
        keys = np.asarray(self._blocks.keys[k, first:last], np.float32)
        book = self._books[k]
        if anew or book is None:
            book = self._books[k] = key_codes.learn(keys, root)
            self._of_queries[k], self._centroids[k], self._errors[k] = (
                book.of_queries,
                book.centroids,
                book.errors,
            )
        key_codes.encode(book, keys, first, self._codes[k])

    def _set_arguments(self) -> None:
        tables = self._of_queries, self._centroids, self._errors, self._codes, bits(self._mean_values)
        places = self._starts, self._sizes, self._spans
        self.arguments = (*tables, *places, bits(self._blocks.keys), bits(self._blocks.values), self._apart)
        apart, coded = (int(np.diff(a).sum()) for a in (self._apart, self._spans[..., 2:]))
        width = self._mean_values.shape[-1]
        self.size = width * apart + width // key_codes.WIDTH * coded

    @property
    def index_bytes(self) -> int:
        tables = self._codes, self._mean_values, self._of_queries, self._centroids, self._errors
        return sum(a.nbytes for a in (*tables, self._starts, self._sizes, self._spans, self._apart))


def _cut(first: int, last: int) -> np.ndarray:
    """From where to where each half of first .. last - 1 reaches, [HALVES, 2]."""
    cuts = first + (last - first) * np.arange(HALVES + 1) // HALVES
    return np.stack([cuts[:-1], cuts[1:]], axis=1)
