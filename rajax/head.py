"""The offloaded keys of one (sequence, layer, key/value head): searched, attended to, and grown.

NumPy and ScaNN only: nothing here may touch JAX, since it runs inside host callbacks.

Letters: `G` query heads per key/value head, `S` offloaded keys, `H` head dim, `R` keys found per query, `C` clusters.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rajax.index import INDEXES, Index
from rajax.retrieval import RetrievalConfig
from rajax.routes import Routes

SCORED = 1.5
"""Keys scored exactly per key retrieved: ScaNN's own scores rank well enough for so few (`benchmarks/search.py`)."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """How a head searches.

    Attributes:
      top_k: keys that each query attends to, besides the tail.
      leaves: the share of the index that a query looks at; 0 does without the index.
      routes: the nearest known queries whose keys are candidates as well; 0 does without routes.
    """

    top_k: int
    leaves: float
    routes: int

    @property
    def scored(self) -> int:
        """Keys that the index scores exactly per query."""
        return round(SCORED * self.top_k)


@dataclasses.dataclass(frozen=True)
class Segment:
    """An index over the keys from `start` to `end`."""

    start: int
    end: int
    index: Index


@dataclasses.dataclass(frozen=True)
class Search:
    """What a head's search found.

    Attributes:
      ids: [G, R] integers, the keys to attend to, without duplicates where their score is finite.
      scores: [G, R] float32, exact; -inf fills rows that found fewer.
      all_ids, all_scores: the same of all keys that were scored exactly, of which those are the best.
      scanned: keys whose score was looked at in any form, per query, the tail included.
    """

    ids: np.ndarray
    scores: np.ndarray
    all_ids: np.ndarray
    all_scores: np.ndarray
    scanned: int

    @property
    def scored(self) -> int:
        """Keys scored exactly, of all queries together, the tail aside."""
        return int((self.all_scores > -np.inf).sum())

    @property
    def scored_ids(self) -> list[np.ndarray]:
        """Those keys' ids, per query."""
        return [ids[scores > -np.inf] for ids, scores in zip(self.all_ids, self.all_scores, strict=True)]


def check_keys(keys: np.ndarray) -> None:
    """Raises FloatingPointError for keys that no search can order. ScaNN would end the process."""
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = np.einsum("sh,sh->s", keys, keys)
    if not np.isfinite(lengths).all():
        raise FloatingPointError(
            "the model's keys are not finite or too large for float32: the weights are damaged, or overflow "
            "in this dtype; try dtype='float32'"
        )


class Head:
    """The offloaded keys and values of one head.

    The first `sealed` keys are in the index and in the device's summary; the others, which came while decoding,
    are the tail. Every query attends to the whole tail, so a key counts from the moment it is appended.
    """

    def __init__(self, capacity: int, head_dim: int, config: RetrievalConfig):
        self.config = config
        self.keys = np.empty((capacity, head_dim), np.float32)
        self.values = np.zeros((capacity, head_dim), np.float32)
        self.clusters = np.full(capacity, -1, np.int32)
        """The cluster of each key; -1 for none."""
        self.means = np.zeros((0, head_dim), np.float32)
        """The clusters' mean keys as the device has them, [C, H]."""
        self.count = 0
        self.sealed = 0
        self.segments: list[Segment] = []
        self.root: np.ndarray | None = None
        self.routes: Routes | None = None
        self.moment = np.zeros((head_dim, head_dim), np.float32)
        """Second moment of the queries since the tail was last sealed."""
        self.budget = Budget(config.top_k, config.leaves_searched or 1.0, config.routes or 0)
        self._mark = np.empty(0, np.int32)

    def append(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Takes keys and values [n, H] in."""
        end = self.count + len(keys)
        self.keys[self.count : end] = keys
        self.values[self.count : end] = values
        self.count = end

    # --- sealing

    def build(self, start: int, end: int) -> Segment:
        """Indexes the keys from `start` to `end`.

        Raises:
          FloatingPointError: keys that no search can order.
        """
        keys = self.keys[start:end]
        check_keys(keys)
        # Routes alone need no index.
        kind = "exact" if self.config.leaves_searched == 0 else self.config.index
        index = INDEXES[kind]
        assert index is not None
        return Segment(start, end, index(keys, self.config.exact_below, self.root))

    def segment_start(self, end: int) -> int:
        """Where a segment that ends at `end` had best start: it takes in those before it that are no longer.

        So the number of segments grows with the logarithm of the keys, and each key is indexed as often.
        """
        start = self.sealed
        for segment in reversed(self.segments):
            if segment.end - segment.start > end - start:
                break
            start = segment.start
        return start

    def adopt(self, segment: Segment, clusters: np.ndarray | None = None) -> None:
        """From now on the keys of `segment` are searched by its index.

        Args:
          segment: from `build`.
          clusters: the clusters of the keys that were tail until now; None without a summary.
        """
        self.segments = [s for s in self.segments if s.end <= segment.start] + [segment]
        if clusters is not None:
            self.clusters[segment.end - len(clusters) : segment.end] = clusters
        self.moment[:] = 0
        self.sealed = segment.end

    # --- searching

    def search(self, queries: np.ndarray, budget: Budget | None = None) -> Search:
        """Finds sealed keys for queries [G, H]; `budget` is by default the head's own."""
        budget = budget or self.budget
        if budget.top_k >= self.sealed:
            ids = np.broadcast_to(np.arange(self.sealed), (len(queries), self.sealed))
            scores = queries @ self.keys[: self.sealed].T
            return Search(ids, scores, ids, scores, self.count)
        found = []
        if budget.leaves:
            for segment in self.segments:
                part = segment.index.search(queries, budget.scored, budget.leaves)
                found.append((part.ids.astype(np.int64) + segment.start, part.scores, part.scanned))
        if len(found) == 1:
            ids, scores, _ = found[0]
        else:
            nothing = np.empty((len(queries), 0), np.int64), np.empty((len(queries), 0), np.float32)
            ids = np.concatenate([nothing[0], *(f[0] for f in found)], axis=1)
            scores = np.concatenate([nothing[1], *(f[1] for f in found)], axis=1)
        scanned = sum(f[2] for f in found) + self.count - self.sealed
        routed = budget.routes > 0 and self.routes is not None
        if routed:
            before = ids.shape[1]
            ids, scores = self._with_routes(queries, ids, scores, budget.routes)
            scanned += round(float((scores[:, before:] > -np.inf).sum()) / len(queries))
        if len(found) == 1 and not routed:
            # An index's answer is sorted already.
            return Search(ids[:, : budget.top_k], scores[:, : budget.top_k], ids, scores, scanned)
        columns = np.argsort(-scores, axis=1)[:, : budget.top_k]
        best = np.take_along_axis(ids, columns, axis=1), np.take_along_axis(scores, columns, axis=1)
        return Search(*best, ids, scores, scanned)

    def _with_routes(
        self, queries: np.ndarray, ids: np.ndarray, scores: np.ndarray, nearest: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Adds the keys of the nearest known queries that are not among `ids` yet, with their exact scores."""
        assert self.routes is not None
        wanted = self.routes.find(queries, nearest)
        groups, width = wanted.shape
        # Which of several equal ids is kept, and which are in `ids` already, is told by a mark per key and row.
        # What is missing or in the tail marks a place past the last key.
        row_starts = np.arange(groups)[:, None] * (self.sealed + 1)
        if len(self._mark) < groups * (self.sealed + 1):
            self._mark = np.empty(groups * (self.sealed + 1), np.int32)
        real = (wanted >= 0) & (wanted < self.sealed)
        places = np.where(real, wanted, self.sealed) + row_starts
        numbers = np.arange(groups * width).reshape(groups, width)
        self._mark[places] = numbers
        self._mark[(ids + row_starts)[scores > -np.inf]] = -1
        rows, columns = np.nonzero(real & (self._mark[places] == numbers))
        added = np.full((groups, width), -np.inf, np.float32)
        added[rows, columns] = np.einsum("nh,nh->n", self.keys[wanted[rows, columns]], queries[rows])
        return np.concatenate([ids, wanted], axis=1), np.concatenate([scores, added], axis=1)

    def attend(self, queries: np.ndarray, found: Search) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The part of attention that the device does not know: found keys and tail, less the found keys' summary.

        Returns:
          Numerator [G, H], denominator [G] and max [G] of the sum over found keys j of
          (exp(q.k_j) - exp(q.C_c(j))) v_j, and over the tail's keys of exp(q.k_j) v_j.
        """
        tail = slice(self.sealed, self.count)
        groups, width = found.scores.shape
        parts = [found.scores, queries @ self.keys[tail].T]
        if len(self.means) and width:
            # What was not found, and has the score -inf, must not be taken out either.
            parts.append(np.where(found.scores > -np.inf, self.estimates(queries, found.ids), -np.inf))
        scores = np.concatenate(parts, axis=1)
        top = scores.max(axis=1, initial=-np.inf)
        weights = np.exp(scores - np.where(top > -np.inf, top, np.float32(0))[:, None])
        found_weights, tail_weights, taken_out = np.split(
            weights, [width, width + self.count - self.sealed], 1
        )
        if taken_out.shape[1]:
            found_weights = found_weights - taken_out
        values = self.values.take(found.ids.ravel(), axis=0).reshape(groups, width, self.values.shape[1])
        numerator = np.matmul(found_weights[:, None], values)[:, 0] + tail_weights @ self.values[tail]
        return numerator, found_weights.sum(axis=1) + tail_weights.sum(axis=1), top

    def estimates(self, queries: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """The scores [G, R] that the summary gives to the sealed keys `ids` [G, R]; -inf without a summary."""
        if not len(self.means):
            return np.full(ids.shape, -np.inf, np.float32)
        per_cluster = queries @ self.means.T
        rows = np.arange(len(ids))[:, None] * len(self.means)
        return per_cluster.ravel().take(self.clusters.take(ids) + rows)

    def learn(self, queries: np.ndarray, found: Search) -> None:
        """Remembers a decode step's queries [G, H] and what they wanted, for the tail's summary and for routes."""
        if self.config.summary:
            self.moment += queries.T @ queries
        if self.budget.routes and self.routes is not None:
            # The tail as well: when it is sealed, routes are one way to it, and may be the only one.
            tail = np.broadcast_to(
                np.arange(self.sealed, self.count), (len(queries), self.count - self.sealed)
            )
            ids = np.concatenate([found.ids, tail], axis=1)
            tail_scores = queries @ self.keys[self.sealed : self.count].T
            scores = np.concatenate([found.scores, tail_scores], axis=1)
            columns = np.argsort(-scores, axis=1)[:, : self.routes.width]
            best = np.take_along_axis(scores, columns, axis=1) > -np.inf
            self.routes.learn(queries, np.where(best, np.take_along_axis(ids, columns, axis=1), -1))

    def forget_exam(self) -> None:
        """Frees what only finding the budget needed."""
        self._mark = np.empty(0, np.int32)
        if not self.budget.routes:
            self.routes = None

    @property
    def index_bytes(self) -> int:
        """Bytes held besides keys and values."""
        held = sum(segment.index.bytes for segment in self.segments)
        held += self.clusters.nbytes + self.means.nbytes + self._mark.nbytes
        return held + (self.routes.bytes if self.routes else 0)
