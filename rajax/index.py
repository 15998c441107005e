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
from typing import Any, Protocol

import numpy as np


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
      ids: [G, R] integers, positions among the indexed keys, best first, without duplicates where scores are finite.
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

    def search(self, queries: np.ndarray, scored: int, leaves: float) -> Found:
        """The keys with the largest inner products with each query.

        Args:
          queries: [G, H] float32.
          scored: keys to find per query, their scores exact; where there are fewer, all are found.
          leaves: the share of the index to look at, above 0 and at most 1. An exact index looks at all.
        """
        ...


class ExactIndex:
    """A full scan: right by construction, and the fastest for few keys."""

    bytes = 0

    def __init__(self, keys: np.ndarray):
        self.keys = keys

    def search(self, queries: np.ndarray, scored: int, leaves: float = 1.0) -> Found:
        ids, scores = select_top(queries @ self.keys.T, scored)
        order = np.argsort(-scores, axis=1)
        ids, scores = (np.take_along_axis(a, order, axis=1) for a in (ids, scores))
        return Found(ids, scores, scanned=len(self.keys))


class ScannIndex:
    """ScaNN: a partition tree, a quantized scan, and exact rescoring (arXiv 1908.10396).

    Args:
      keys: [S, H] float32.
      root: [H, H] or None. The keys are indexed as k @ root and searched for with q @ inverse(root), which leaves
        every score as it is, and measures what partitioning and quantization lose as the queries feel it.
      quantized: whether the keys in the searched leaves are scanned by four-bit codes first. Without, all of them
        are scored exactly; that is slower to search and much faster to build.
    """

    # Measured on real queries and keys by benchmarks/search.py. ScaNN's guide proposes anisotropic
    # quantization for inner products; attention's keys are found better without, and built faster. A code per
    # dimension instead of one per two makes the scan half slower and lets it rescore half as many keys.
    FEWEST_KEYS = 16  # its codebooks have 16 entries, and ScaNN refuses to learn them from fewer keys
    TRAINING_ITERATIONS = 5
    CODEBOOK_SAMPLE = 1000
    CODEBOOK_ITERATIONS = 3
    DIMENSIONS_PER_BLOCK = 1

    def __init__(self, keys: np.ndarray, root: np.ndarray | None = None, *, quantized: bool = True):
        count, head_dim = keys.shape
        self.count = count
        self.leaves = max(1, min(count, 2 * math.isqrt(count)))
        self.queries_root = None if root is None else np.linalg.inv(root).T.astype(np.float32)
        # A float32 copy of the keys for rescoring, four bits per block of dimensions, and the centroids.
        self.bytes = 4 * count * head_dim + count * head_dim // (2 * self.DIMENSIONS_PER_BLOCK)
        self.bytes += 4 * self.leaves * head_dim
        builder = (
            _scann()
            .builder(keys if root is None else keys @ root, 1, "dot_product")
            .tree(
                num_leaves=self.leaves,
                num_leaves_to_search=1,
                training_iterations=self.TRAINING_ITERATIONS,
                quantize_centroids=False,
            )
        )
        if quantized:
            builder = builder.score_ah(
                self.DIMENSIONS_PER_BLOCK,
                training_sample_size=self.CODEBOOK_SAMPLE,
                training_iterations=self.CODEBOOK_ITERATIONS,
            ).reorder(1)
        else:
            builder = builder.score_brute_force()
        self._searcher: Any = builder.build()

    def search(self, queries: np.ndarray, scored: int, leaves: float = 1.0) -> Found:
        scored = min(scored, self.count)
        searched = self.leaves if scored == self.count else max(1, round(self.leaves * leaves))
        if self.queries_root is not None:
            queries = queries @ self.queries_root
        ids, scores = self._searcher.search_batched_parallel(
            queries,
            final_num_neighbors=scored,
            pre_reorder_num_neighbors=scored,
            leaves_to_search=searched,
            batch_size=1,
        )
        # Where the leaves held too few keys ScaNN fills up with id 0 and score NaN.
        scores = np.where(np.isnan(scores), np.float32(-np.inf), scores)
        return Found(ids, scores, scanned=self.count * searched // self.leaves)


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


def _scann_or_exact(keys: np.ndarray, exact_below: int, root: np.ndarray | None) -> Index:
    if len(keys) < max(exact_below, ScannIndex.FEWEST_KEYS):
        return ExactIndex(keys)
    return ScannIndex(keys, root)


Build = Callable[[np.ndarray, int, np.ndarray | None], Index]
"""Builds an index of keys [S, H] float32. The other arguments are the number of keys below which a kind may scan
them all, and the root of the queries' second moment [H, H], or None, for kinds that can use it."""

INDEXES: dict[str, Build | None] = {
    "exact": lambda keys, exact_below, root: ExactIndex(keys),
    "scann": _scann_or_exact,
    "wave": None,
}
"""The one registry of index kinds: name -> what builds one over a head's keys on the host, which is then searched
(`rajax.searched`); None where clusters are ranked and retrieved whole (`rajax.wave`)."""
