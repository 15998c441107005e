"""Indexes over one key/value head's offloaded keys. NumPy and ScaNN only: nothing here may touch JAX.

Letters: `G` query heads per key/value head, `S` keys, `H` head dim, `R` keys found per query.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from rajax.retrieval import RetrievalConfig


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
      ids: [G, R] integers, positions among the indexed keys, without duplicates in a row.
      scores: [G, R] float32, the exact inner products; -inf where fewer than R keys were found.
      scanned: keys whose score was looked at in any form, per query.
    """

    ids: np.ndarray
    scores: np.ndarray
    scanned: int


class Index(Protocol):
    """The index contract: built once over keys, then searched from any thread."""

    @property
    def bytes(self) -> int:
        """Memory that the index holds besides the keys it was given."""
        ...

    def search(self, queries: np.ndarray, top_k: int) -> Found:
        """The keys with the largest inner products with each query.

        Args:
          queries: [G, H] float32.
          top_k: keys to find per query; where there are fewer, all are found.
        """
        ...


class ExactIndex:
    """A full scan: right by construction, and the fastest for few keys."""

    bytes = 0

    def __init__(self, keys: np.ndarray):
        self.keys = keys

    def search(self, queries: np.ndarray, top_k: int) -> Found:
        scores = queries @ self.keys.T
        return Found(*select_top(scores, top_k), scanned=len(self.keys))


class ScannIndex:
    """ScaNN: a partition tree, an anisotropically quantized scan, and exact rescoring (arXiv 1908.10396)."""

    # Measured on real queries and keys by benchmarks/search.py. ScaNN's guide proposes anisotropic
    # quantization for inner products; attention's keys are found better without, and built faster.
    FEWEST_KEYS = 16  # its codebooks have 16 entries, and ScaNN refuses to learn them from fewer keys
    TRAINING_ITERATIONS = 8
    TRAINING_SAMPLE = 2000
    DIMENSIONS_PER_BLOCK = 2
    REORDER_FACTOR = 4  # quantized candidates rescored exactly, per key wanted

    def __init__(self, keys: np.ndarray, leaves_searched: float):
        count, head_dim = keys.shape
        leaves = max(1, min(count, 2 * math.isqrt(count)))
        self.count = count
        self.leaves_to_search = max(1, round(leaves * leaves_searched))
        self.leaves = leaves
        # A float32 copy of the keys for rescoring, four bits per block of dimensions, and the centroids.
        self.bytes = 4 * count * head_dim + count * head_dim // (2 * self.DIMENSIONS_PER_BLOCK)
        self.bytes += 4 * leaves * head_dim
        self._searcher: Any = (
            _scann()
            .builder(keys, 1, "dot_product")
            .tree(
                num_leaves=leaves,
                num_leaves_to_search=self.leaves_to_search,
                training_iterations=self.TRAINING_ITERATIONS,
                quantize_centroids=False,
            )
            .score_ah(self.DIMENSIONS_PER_BLOCK, training_sample_size=self.TRAINING_SAMPLE)
            .reorder(self.REORDER_FACTOR)
            .build()
        )

    def search(self, queries: np.ndarray, top_k: int) -> Found:
        top_k = min(top_k, self.count)
        leaves = self.leaves if top_k == self.count else self.leaves_to_search
        ids, scores = self._searcher.search_batched(
            queries,
            final_num_neighbors=top_k,
            pre_reorder_num_neighbors=min(self.count, top_k * self.REORDER_FACTOR),
            leaves_to_search=leaves,
        )
        # Where the leaves held too few keys ScaNN fills up with id 0 and score NaN.
        scores = np.where(np.isnan(scores), np.float32(-np.inf), scores)
        return Found(ids, scores, scanned=self.count * leaves // self.leaves)


@functools.cache
def _scann() -> Any:
    """ScaNN's builder module, imported late: it takes a second, and exact search does without it.

    ScaNN reports every build on stderr and has no setting for that. Its own copy of Abseil has: errors only.
    """
    from scann import scann_ops_pybind

    library = sys.modules["scann_pybind"].__file__ or ""
    setter = re.search(rb"_ZN4absl\w*?14SetMinLogLevelENS0_18LogSeverityAtLeastE", Path(library).read_bytes())
    if setter:
        errors_only = 2
        getattr(ctypes.CDLL(library), setter.group().decode())(errors_only)
    return scann_ops_pybind


def select_top(scores: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """The columns of the `top_k` largest scores in each row of [G, S], in no order, and their scores."""
    if top_k >= scores.shape[1]:
        return np.broadcast_to(np.arange(scores.shape[1]), scores.shape), scores
    ids = np.argpartition(scores, scores.shape[1] - top_k, axis=1)[:, -top_k:]
    return ids, np.take_along_axis(scores, ids, axis=1)


def _scann_or_exact(keys: np.ndarray, config: RetrievalConfig) -> Index:
    if len(keys) < max(config.exact_below, ScannIndex.FEWEST_KEYS):
        return ExactIndex(keys)
    return ScannIndex(keys, config.leaves_searched)


INDEXES: dict[str, Callable[[np.ndarray, RetrievalConfig], Index]] = {
    "exact": lambda keys, config: ExactIndex(keys),
    "scann": _scann_or_exact,
}
"""The one registry of index kinds: name -> what builds one over keys [S, H] float32."""
