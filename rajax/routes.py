"""Query routes: which keys were wanted by queries like this one.

RetrievalAttention (arXiv 2409.10516, section 3.2) connects the prompt's queries with their exact nearest keys and
searches the keys by way of the queries. Here the two halves are two look-ups: the nearest known queries, a search
within one distribution, and then the keys that those wanted. Decode's own queries join the known ones.

Letters: `G` query heads per key/value head, `Q` known queries, `R` keys per route, `H` head dim.
"""

from __future__ import annotations

import numpy as np

from rajax.index import ExactIndex, Index, ScannIndex, select_top

EXACT_BELOW = 8192
"""Fewer prompt queries than this are compared one by one, which takes less time than to ask ScaNN."""

RECENT = 768
"""Decode queries that are remembered; a new one takes the place of the oldest."""


class Routes:
    """The routes of one key/value head.

    Args:
      queries: [Q, H] float32, the prompt's sampled queries.
      routes: [Q, R] int32, the ids of the keys that each wanted most, best first; -1 past the last.
    """

    def __init__(self, queries: np.ndarray, routes: np.ndarray):
        normalized = _normalize(queries)
        self.index: Index = (
            ExactIndex(normalized) if len(normalized) < EXACT_BELOW else ScannIndex(normalized, None)
        )
        self.routes = routes
        self.recent = np.zeros((RECENT, queries.shape[1]), np.float32)
        self.recent_routes = np.full((RECENT, routes.shape[1]), -1, np.int32)
        self.width = routes.shape[1]
        """Keys per route, R."""
        self.learned = 0

    @property
    def bytes(self) -> int:
        """Memory that the routes hold."""
        known = 4 * len(self.routes) * self.recent.shape[1] + self.routes.nbytes
        return known + self.index.bytes + self.recent.nbytes + self.recent_routes.nbytes

    def find(self, queries: np.ndarray, nearest: int) -> np.ndarray:
        """The keys that the `nearest` known queries wanted: ids [G, nearest * R] with duplicates, -1 for none."""
        found = self.index.search(queries, nearest, 0.1)
        ids, scores = found.ids, found.scores
        routes = self.routes
        if self.learned:
            length = min(self.learned, RECENT)
            recent_scores = queries @ self.recent[:length].T
            columns, recent_scores = select_top(recent_scores, nearest)
            both = np.concatenate([scores, recent_scores], axis=1)
            nearest = min(nearest, both.shape[1])
            which = np.argpartition(-both, nearest - 1, axis=1)[:, :nearest]
            lists = np.concatenate([routes[ids], self.recent_routes[columns]], axis=1)
            return np.take_along_axis(lists, which[:, :, None], axis=1).reshape(len(queries), -1)
        return routes[ids].reshape(len(queries), -1)

    def learn(self, queries: np.ndarray, wanted: np.ndarray) -> None:
        """Remembers queries [G, H] of the decode and the ids [G, R or fewer] of the keys that they wanted."""
        rows = (self.learned + np.arange(len(queries))) % RECENT
        self.recent[rows] = _normalize(queries)
        self.recent_routes[rows] = -1
        self.recent_routes[rows[:, None], np.arange(wanted.shape[1])] = wanted
        self.learned += len(queries)


def _normalize(queries: np.ndarray) -> np.ndarray:
    return queries / np.maximum(np.linalg.norm(queries, axis=1, keepdims=True), np.float32(1e-30))
