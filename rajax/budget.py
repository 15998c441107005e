"""How far each head must search, from queries that were held out of what it learned.

Heads differ widely: for one a few of the index's leaves hold all that matters, another misses most of its attention
there. Each head takes the cheapest search that is good enough for it.

Letters: `E` held-out queries, `S` offloaded keys, `H` head dim, `C` clusters, `R` best keys.
"""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np

from rajax.head import Budget, Head, Search
from rajax.index import ScannIndex, select_top

LEAVES = (0.03, 0.06, 0.12, 0.18, 0.25, 0.35, 0.5, 0.7, 1.0)
"""Shares of the index to choose from."""

ROUTES = (0, 8)
"""Numbers of nearest known queries to choose from."""

TOP_K = (32, 64, 128, 256, 512, 1024)
"""Numbers of retrieved keys to choose from where the user states a target error."""

SLACK = 0.1
"""With a fixed top_k a search may add this share to the error that top_k itself makes."""

MISSED = 0.004
"""With a fixed top_k a search may miss this share of the attention mass of the top_k best keys, root mean square."""

SCAN_COST, ROUTE_COST, KEY_COST = 1.0, 400.0, 20.0
"""Time of a key scanned, of a route followed, and of a key retrieved, in units of the first."""

SEARCHED_WHOLE = 8192
"""Fewer keys than this are searched whole, unless the user says otherwise: the scan is then a small part of a search,
and to find out how little would do costs more than it saves."""

COMPETITION_KEYS = 4096
"""Keys on which the projections compete."""


@dataclasses.dataclass(frozen=True)
class Exam:
    """The held-out queries of one head, and all that the device computes for them.

    Attributes:
      queries: [E, H] float32, scaled.
      numerator, denominator, top: what they see of the keys that are not offloaded, as in `Partial`.
      means, mean_values, log_counts: the summary's clusters, [C, H], [C, H] and [C]; C is 0 without a summary.
    """

    queries: np.ndarray
    numerator: np.ndarray
    denominator: np.ndarray
    top: np.ndarray
    means: np.ndarray
    mean_values: np.ndarray
    log_counts: np.ndarray


class Grader:
    """Knows the exact attention of the held-out queries, and grades searches by the error of their output."""

    def __init__(self, head: Head, exam: Exam, most: int):
        self.keys = head.sealed
        keys, values = head.keys[: head.sealed], head.values[: head.sealed]
        scores = exam.queries @ keys.T
        estimates = exam.queries @ exam.means.T + exam.log_counts
        top = np.maximum(exam.top, scores.max(axis=1))
        self.best, best_scores = select_top(scores, min(most, head.sealed))
        order = np.argsort(-best_scores, axis=1)
        self.best, best_scores = (np.take_along_axis(a, order, axis=1) for a in (self.best, best_scores))

        static = np.exp(exam.top - top)
        weights = np.exp(scores - top[:, None])
        self.output = static[:, None] * exam.numerator + weights @ values
        self.output /= (static * exam.denominator + weights.sum(axis=1))[:, None]
        clusters = np.exp(estimates - top[:, None])
        self.numerator = static[:, None] * exam.numerator + clusters @ exam.mean_values
        self.denominator = static * exam.denominator + clusters.sum(axis=1)
        self.mass = np.exp(best_scores - top[:, None])
        self.corrections = self.mass - np.exp(head.estimates(exam.queries, self.best) - top[:, None])
        self.values = values[self.best]

    def found(self, search: Search) -> np.ndarray:
        """[E, R] bool: which of the best keys a search scored."""
        marks = np.zeros(self.keys, bool)
        found = np.empty(self.best.shape, bool)
        for row, ids in enumerate(search.scored_ids):
            marks[ids] = True
            found[row] = marks[self.best[row]]
            marks[ids] = False
        return found

    def missed(self, top_k: int, found: np.ndarray) -> float:
        """Root mean square, over the queries, of the share of the `top_k` best keys' mass that was not found."""
        mass = self.mass[:, :top_k]
        # Where the offloaded keys weigh nothing beside the others there is nothing to miss.
        wanted = np.maximum(mass.sum(axis=1), np.finfo(np.float32).tiny)
        lost = np.where(found[:, :top_k], 0, mass).sum(axis=1) / wanted
        return float(np.sqrt((lost**2).mean()))

    def error(self, top_k: int, found: np.ndarray | None = None) -> float:
        """Root mean square, over the queries, of the relative error of the attention output.

        Args:
          top_k: keys that are attended to.
          found: which of the best keys were found, [E, R]; by default all.
        """
        used = np.ones(self.best.shape, bool) if found is None else found
        used = used & (np.cumsum(used, axis=1) <= top_k)
        weights = np.where(used, self.corrections, np.float32(0))
        numerator = self.numerator + np.matmul(weights[:, None], self.values)[:, 0]
        output = numerator / (self.denominator + weights.sum(axis=1))[:, None]
        lengths = np.maximum((self.output**2).sum(axis=1), np.finfo(np.float32).tiny)
        return float(np.sqrt((((output - self.output) ** 2).sum(axis=1) / lengths).mean()))


def choose_budget(head: Head, exam: Exam) -> Budget:
    """The cheapest search of `head` that reaches its configuration's target on the held-out queries.

    Where none does, it is the most thorough one.
    """
    config = head.config
    leaves = LEAVES if config.leaves_searched is None else (config.leaves_searched,)
    routes = ROUTES if config.routes is None else (config.routes,)
    small = head.sealed < SEARCHED_WHOLE or config.index == "exact"
    if small and config.leaves_searched is None:
        leaves = (1.0,)
    if small and config.routes is None:
        routes = (0,)
    sizes: tuple[int, ...] = TOP_K if config.target_error is not None else (config.top_k,)
    if min(sizes) >= head.sealed:
        # All keys are retrieved for now; what a longer text will need is not known.
        return Budget(max(sizes), leaves[-1], routes[0])
    # The first size that takes all keys is the last resort.
    sizes = tuple(k for k in sizes if k < head.sealed) + tuple(k for k in sizes if k >= head.sealed)[:1]
    if len(leaves) == len(routes) == len(sizes) == 1:
        return Budget(sizes[0], leaves[0], routes[0])
    grader = Grader(head, exam, max(sizes))

    def cost(budget: Budget) -> float:
        scanned = SCAN_COST * budget.leaves * head.sealed + ROUTE_COST * budget.routes
        return scanned + KEY_COST * budget.top_k

    exact = {k: grader.error(k) for k in sizes}

    def good_enough(budget: Budget) -> bool:
        found = grader.found(head.search(exam.queries, budget))
        error = grader.error(budget.top_k, found)
        if config.target_error is not None:
            return error <= config.target_error
        limit = (1 + SLACK) * exact[budget.top_k] + 1e-6
        return error <= limit and grader.missed(budget.top_k, found) <= MISSED

    best = Budget(max(sizes), max(leaves), max(routes))
    for k in sizes:
        if config.target_error is not None and exact[k] > config.target_error:
            continue
        for r in routes:
            # More leaves find more, so the fewest that are enough lie in a range that can be halved.
            budgets = [b for b in (Budget(k, share, r) for share in leaves) if cost(b) < cost(best)]
            first = bisect.bisect_left(budgets, True, key=good_enough)
            if first < len(budgets):
                best = budgets[first]
    return best


def choose_projection(keys: np.ndarray, root: np.ndarray, exam: np.ndarray) -> np.ndarray | None:
    """The coordinates [H, H] in which ScaNN should index the keys, or None for their own.

    Candidates compete on a sample of the keys: for each held-out query, how much of the attention mass of the best
    keys does a search of few leaves miss?

    Args:
      keys: [S, H].
      root: [H, H], the square root of the queries' second moment.
      exam: [E, H], held-out queries.
    """
    if len(keys) < max(SEARCHED_WHOLE, ScannIndex.FEWEST_KEYS):
        return None
    sample = keys[:: -(-len(keys) // COMPETITION_KEYS)]
    values, vectors = np.linalg.eigh(root)
    half = ((vectors * np.sqrt(values)) @ vectors.T).astype(np.float32)
    scores = exam @ sample.T
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    top_k = min(64, len(sample))
    best, missed = None, np.inf
    for candidate in (None, half, root):
        found = ScannIndex(sample, candidate, quantized=False).search(exam, top_k, 0.1)
        mass = np.take_along_axis(weights, found.ids.astype(np.int64), axis=1)
        lost = 1 - np.where(found.scores > -np.inf, mass, 0).sum(axis=1) / select_top(weights, top_k)[1].sum(
            axis=1
        )
        if lost.mean() < missed:
            best, missed = candidate, lost.mean()
    return best
