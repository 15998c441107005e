"""The offloaded keys and values of one request, in host memory, and attention over them.

One `HostStore` belongs to one request. The prefill fills it a layer at a time and its indexes are built on
background threads while the next layers run; decode appends the tokens that leave the window and asks for
the partial attention of its queries. Nothing here may touch JAX: it runs inside host callbacks, where that
can deadlock.

Letters: `B` batch, `K` key/value heads, `G` query heads per key/value head, `S` offloaded keys, `H` head dim.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from rajax.index import INDEXES, ExactIndex, Index, select_top
from rajax.kernels.partial import Partial, no_keys
from rajax.retrieval import RetrievalConfig


class Head:
    """The offloaded keys and values of one (sequence, layer, key/value head).

    The first `indexed` keys are in the index; the others, which came while decoding, are the tail and are
    searched exactly, so a key can be found from the moment it is appended.
    """

    def __init__(self, capacity: int, head_dim: int):
        self.keys = np.empty((capacity, head_dim), np.float32)
        self.values = np.empty((capacity, head_dim), np.float32)
        self.count = 0
        self.indexed = 0
        self.index: Index | None = None

    def append(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Takes keys and values [n, H] in."""
        end = self.count + len(keys)
        self.keys[self.count : end] = keys
        self.values[self.count : end] = values
        self.count = end

    def build(self, config: RetrievalConfig) -> None:
        """Indexes all keys so far.

        Raises:
          FloatingPointError: keys that no search can order. ScaNN would end the process.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            lengths = np.einsum("sh,sh->s", self.keys[: self.count], self.keys[: self.count])
        if not np.isfinite(lengths).all():
            raise FloatingPointError(
                "the model's keys are not finite or too large for float32: the weights are damaged, or overflow "
                "in this dtype; try dtype='float32'"
            )
        self.index = INDEXES[config.index](self.keys[: self.count], config)
        self.indexed = self.count

    def search(self, queries: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray, int]:
        """The best `top_k` of indexed keys and tail: ids [G, R], exact scores [G, R], keys scanned per query."""
        ids = np.empty((len(queries), 0), np.int64)
        scores = np.empty((len(queries), 0), np.float32)
        scanned = 0
        if self.index is not None and self.indexed:
            found = self.index.search(queries, top_k)
            ids, scores, scanned = found.ids, found.scores, found.scanned
        if self.count > self.indexed:
            tail = np.arange(self.indexed, self.count)
            tail_scores = queries @ self.keys[self.indexed : self.count].T
            all_ids = np.concatenate([ids, np.broadcast_to(tail, tail_scores.shape)], axis=1)
            columns, scores = select_top(np.concatenate([scores, tail_scores], axis=1), top_k)
            ids = np.take_along_axis(all_ids, columns, axis=1)
            scanned += len(tail)
        return ids, scores, scanned

    def attend(self, ids: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Numerator [G, H], denominator [G] and max [G] of the attention over the found keys."""
        top = scores.max(axis=1)
        weights = np.exp(scores - np.where(np.isneginf(top), np.float32(0), top)[:, None])
        numerator = np.matmul(weights[:, None, :], self.values[ids])[:, 0]
        return numerator, weights.sum(axis=1), top


@dataclasses.dataclass
class Counters:
    """Sums over decode steps, layers and query heads."""

    offloaded: int = 0
    scanned: int = 0
    retrieved: int = 0


@dataclasses.dataclass(frozen=True)
class Sample:
    """One search, kept to be compared with an exact one."""

    head: Head
    count: int
    queries: np.ndarray
    ids: np.ndarray


class HostStore:
    """The host memory of one request.

    Args:
      config: the retrieval settings.
      layers, kv_heads, head_dim: the model's.
      capacities: per sequence, the most keys that it will ever offload.
    """

    def __init__(
        self, config: RetrievalConfig, *, layers: int, kv_heads: int, head_dim: int, capacities: Sequence[int]
    ):
        self.config = config
        self.heads = [
            [[Head(capacity, head_dim) for _ in range(kv_heads)] for capacity in capacities]
            for _ in range(layers)
        ]
        """The heads, by layer, sequence and key/value head."""
        self.counters = Counters()
        self._builders = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="rajax-build")
        self._searchers = ThreadPoolExecutor(1, thread_name_prefix="rajax-search")
        self._builds: list[Future[None]] = []
        self._searches: dict[int, Future[Partial]] = {}
        self._tickets = itertools.count()
        self._failure: BaseException | None = None
        self.samples: list[Sample] = []
        """The searches of the first `recall_steps` decode steps."""
        self._samples_wanted = config.recall_steps * layers
        self.handle = _register(self)

    # --- prefill

    def put(self, layer: int, sequence: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Takes a prompt's offloaded keys and values [K, S, H], and starts to index them."""
        for head, k, v in zip(self.heads[layer][sequence], keys, values, strict=True):
            head.append(k, v)
            if head.count:
                self._builds.append(self._builders.submit(head.build, self.config))

    def wait_built(self) -> None:
        """Waits for all indexes; raises what a build raised."""
        builds, self._builds = self._builds, []
        for build in builds:
            build.result()

    # --- decode, called from inside a jitted step

    def submit(
        self, layer: int, queries: np.ndarray, keys: np.ndarray, values: np.ndarray, lengths: np.ndarray
    ) -> int:
        """Appends what leaves the window and starts the search; see `models.attention.HostPath.submit`."""
        for sequence in np.flatnonzero(lengths >= self.config.zone_size):
            heads = self.heads[layer][sequence]
            for head, k, v in zip(heads, keys[sequence], values[sequence], strict=True):
                head.append(k[None], v[None])
        ticket = next(self._tickets)
        self._searches[ticket] = self._searchers.submit(self.attend, layer, queries, lengths)
        return ticket

    def collect(self, ticket: int) -> Partial:
        """The answer to `ticket`."""
        return self._searches.pop(ticket).result()

    def attend(self, layer: int, queries: np.ndarray, lengths: np.ndarray) -> Partial:
        """The partial attention of queries [B, K, G, H] over the offloaded keys; none where lengths is -1."""
        out = no_keys(*queries.shape)
        for sequence, heads in enumerate(self.heads[layer]):
            if lengths[sequence] < 0 or heads[0].count == 0:
                continue
            for k, head in enumerate(heads):
                q = queries[sequence, k]
                ids, scores, scanned = head.search(q, self.config.top_k)
                (
                    out.numerator[sequence, k],
                    out.denominator[sequence, k],
                    out.max[sequence, k],
                ) = head.attend(ids, scores)
                self.counters.offloaded += len(q) * head.count
                self.counters.scanned += len(q) * scanned
                self.counters.retrieved += int(np.isfinite(scores).sum())
                if self._samples_wanted > 0:
                    self.samples.append(
                        Sample(head, head.count, q.copy(), np.where(scores > -np.inf, ids, -1))
                    )
        self._samples_wanted -= 1
        return out

    def fail(self, failure: BaseException) -> None:
        """Keeps the first exception of a step: thrown through XLA it would lose its type."""
        self._failure = self._failure or failure

    def raise_failure(self) -> None:
        """Raises what `fail` kept, as it was."""
        if self._failure is not None:
            raise self._failure

    # --- afterwards

    def recall(self) -> float | None:
        """Mean recall@k of the sampled searches against exact ones, k = top_k; None without samples."""
        shares = []
        for sample in self.samples:
            exact = ExactIndex(sample.head.keys[: sample.count]).search(sample.queries, self.config.top_k)
            shares += [np.isin(wanted, got).mean() for wanted, got in zip(exact.ids, sample.ids, strict=True)]
        return float(np.mean(shares)) if shares else None

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values held now."""
        return sum(8 * h.count * h.keys.shape[1] for layer in self.heads for row in layer for h in row)

    @property
    def index_bytes(self) -> int:
        """Bytes that the indexes hold besides."""
        return sum(h.index.bytes for layer in self.heads for row in layer for h in row if h.index)

    def close(self) -> None:
        """Ends the threads and forgets the keys. No step may be running."""
        _unregister(self)
        for build in self._builds:
            build.cancel()
        self._builders.shutdown()
        self._searchers.shutdown()
        self.heads, self.samples = [], []


# A jitted step knows its request by a small integer, so that one compiled step serves every request.
_stores: dict[int, HostStore] = {}
_handles = itertools.count(1)
_lock = threading.Lock()


def _register(store: HostStore) -> int:
    with _lock:
        handle = next(_handles)
        _stores[handle] = store
    return handle


def _unregister(store: HostStore) -> None:
    with _lock:
        _stores.pop(store.handle, None)


def by_handle(handle: int) -> HostStore | None:
    """The store of a request, or None where the request has ended, as an interrupted one may before its step."""
    with _lock:
        return _stores.get(handle)
