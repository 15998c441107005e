"""The offloaded keys and values of one request, in host memory, and attention over them.

One `HostStore` belongs to one request. The prefill fills it a layer at a time and its heads are prepared on
background threads while the next layers run; decode appends the tokens that leave the window and asks for
the partial attention of its queries. Nothing here may touch JAX: it runs inside host callbacks, where that
can deadlock.

Letters: `B` batch, `K` key/value heads, `G` query heads per key/value head, `S` offloaded keys, `H` head dim,
`C` clusters.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from rajax.budget import Exam, choose_budget, choose_projection
from rajax.handles import Store
from rajax.head import Head, Search, Segment, check_keys
from rajax.index import ExactIndex
from rajax.kernels.host_call import CORES
from rajax.kernels.partial import Partial, no_keys
from rajax.retrieval import RetrievalConfig
from rajax.routes import Routes


@dataclasses.dataclass(frozen=True)
class Learned:
    """What a layer's keys/value heads get from the prompt: `models.lesson.Lesson` as NumPy arrays.

    Attributes:
      sealed: the first offloaded keys that the summary stands for; all others are tail.
      clusters: [K, sealed] int32.
      root: [K, H, H].
      queries, routes: [K, Q, H] and [K, Q, R].
      exams: per head.
    """

    sealed: int
    clusters: np.ndarray
    root: np.ndarray
    queries: np.ndarray
    routes: np.ndarray
    exams: list[Exam]


@dataclasses.dataclass
class Counters:
    """Sums over decode steps, layers and query heads."""

    offloaded: int = 0
    scanned: int = 0
    scored: int = 0
    retrieved: int = 0


@dataclasses.dataclass(frozen=True)
class Sample:
    """One search, kept to be compared with an exact one over the keys that were sealed then.

    Attributes:
      layer, sequence, kv_head: whose search it was.
      sealed, count: keys sealed and keys in all.
      queries: [G, H].
      found: what was found.
    """

    layer: int
    sequence: int
    kv_head: int
    sealed: int
    count: int
    queries: np.ndarray
    found: Search


class HostStore(Store):
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
            [[Head(capacity, head_dim, config) for _ in range(kv_heads)] for capacity in capacities]
            for _ in range(layers)
        ]
        """The heads, by layer, sequence and key/value head."""
        self.counters = Counters()
        self._builders = ThreadPoolExecutor(CORES, thread_name_prefix="rajax-build")
        self._searcher = ThreadPoolExecutor(1, thread_name_prefix="rajax-search")
        self._preparing: list[Future[None]] = []
        self._sealing: dict[int, list[list[Future[Segment]]]] = {}
        self._searches: dict[int, Future[Partial]] = {}
        self._tickets = itertools.count()
        self.samples: list[Sample] = []
        """The searches that were kept."""
        self.keep_samples = config.recall_steps * layers
        """How many of the next layers' searches are kept."""
        super().__init__()

    # --- prefill

    def put(self, layer: int, sequence: int, keys: np.ndarray, values: np.ndarray, learned: Learned) -> None:
        """Takes a prompt's offloaded keys and values [K, S, H], and starts to prepare their search."""
        for k, head in enumerate(self.heads[layer][sequence]):
            head.append(keys[k], values[k])
            self._preparing.append(self._builders.submit(_prepare, head, learned, k))

    def wait_built(self) -> None:
        """Waits until all heads are prepared; raises what went wrong."""
        preparing, self._preparing = self._preparing, []
        for head in preparing:
            head.result()

    # --- growth, called between steps

    def tail(self, sequence: int) -> int:
        """How many of a sequence's keys are not sealed."""
        head = self.heads[0][sequence][0]
        return head.count - head.sealed

    def start_sealing(self, sequence: int, count: int) -> None:
        """Starts to index the first `count` keys of a sequence's tail, unless some are being indexed."""
        if sequence not in self._sealing:
            self._sealing[sequence] = [
                [self._builders.submit(_seal, head, head.sealed + count) for head in layer[sequence]]
                for layer in self.heads
            ]

    def ready_to_adopt(self, sequence: int) -> bool:
        """Whether the keys that `start_sealing` began with are indexed."""
        sealing = self._sealing.get(sequence)
        return sealing is not None and all(build.done() for layer in sealing for build in layer)

    def sealing(self, sequence: int) -> Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Per layer, the keys and values [K, n, H] that are being sealed, and the moment [K, H, H] of the queries
        since the last were."""
        for layer, builds in zip(self.heads, self._sealing[sequence], strict=True):
            heads = layer[sequence]
            new = slice(heads[0].sealed, builds[0].result().end)
            yield (
                np.stack([head.keys[new] for head in heads]),
                np.stack([head.values[new] for head in heads]),
                np.stack([head.moment for head in heads]),
            )

    def adopt(self, sequence: int, clusters: np.ndarray | None, means: np.ndarray | None, start: int) -> None:
        """From now on the keys that `start_sealing` began with are searched by their index.

        Args:
          sequence: whose.
          clusters: [L, K, n] int32, the clusters of its keys; None without a summary.
          means: [L, K, c, H], the mean keys of those clusters as the device has them.
          start: the device's number of the first of them.
        """
        for layer, builds in enumerate(self._sealing.pop(sequence)):
            for k, build in enumerate(builds):
                head = self.heads[layer][sequence][k]
                numbers = None
                if clusters is not None and means is not None:
                    head.means = np.concatenate([head.means[:start], means[layer, k]])
                    numbers = clusters[layer, k] + start
                head.adopt(build.result(), numbers)

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
        self._searches[ticket] = self._searcher.submit(self.attend, layer, queries, lengths)
        return ticket

    def collect(self, ticket: int) -> Partial:
        """The answer to `ticket`."""
        return self._searches.pop(ticket).result()

    def attend(self, layer: int, queries: np.ndarray, lengths: np.ndarray) -> Partial:
        """The partial attention of queries [B, K, G, H] over the offloaded keys; none where lengths is -1.

        One Python thread does it all: ScaNN has its own, and handing Python's lock over takes as long as a search.
        """
        out = no_keys(*queries.shape)
        for sequence, heads in enumerate(self.heads[layer]):
            if lengths[sequence] < 0 or heads[0].count == 0:
                continue
            for k, head in enumerate(heads):
                q = queries[sequence, k]
                start = time.perf_counter()
                found = head.search(q)
                searched = time.perf_counter()
                part = head.attend(q, found)
                out.numerator[sequence, k], out.denominator[sequence, k], out.max[sequence, k] = part
                head.learn(q, found)
                self.seconds["host_search"] += searched - start
                self.seconds["host_attention"] += time.perf_counter() - searched
                tail = len(q) * (head.count - head.sealed)
                self.counters.offloaded += len(q) * head.count
                self.counters.scanned += len(q) * found.scanned
                self.counters.scored += found.scored + tail
                self.counters.retrieved += int((found.scores > -np.inf).sum()) + tail
                if self.keep_samples > 0:
                    self.samples.append(Sample(layer, sequence, k, head.sealed, head.count, q.copy(), found))
        self.keep_samples -= 1
        return out

    # --- afterwards

    def recall(self) -> float | None:
        """Mean recall@k of the kept searches among the keys they scored; k is the head's `top_k`.

        None without a search that was kept, and where no key had been sealed.
        """
        shares = []
        for sample in self.samples:
            head = self.heads[sample.layer][sample.sequence][sample.kv_head]
            if sample.sealed:
                exact = ExactIndex(head.keys[: sample.sealed]).search(sample.queries, head.budget.top_k)
                shares += [
                    np.isin(wanted, got).mean()
                    for wanted, got in zip(exact.ids, sample.found.scored_ids, strict=True)
                ]
        return float(np.mean(shares)) if shares else None

    def mean_budget(self) -> dict[str, float]:
        """The heads' mean `top_k`, `leaves_searched` and `routes`."""
        budgets = [head.budget for layer in self.heads for row in layer for head in row]
        return {
            "top_k": float(np.mean([b.top_k for b in budgets])),
            "leaves_searched": float(np.mean([b.leaves for b in budgets])),
            "routes": float(np.mean([b.routes for b in budgets])),
        }

    def statistics(self) -> dict[str, float | None]:
        """The fields of `generation.Statistics` that the host knows."""
        return {
            "host_kv_bytes": self.kv_bytes,
            "index_bytes": self.index_bytes,
            "keys_offloaded": self.counters.offloaded,
            "keys_scanned": self.counters.scanned,
            "keys_scored": self.counters.scored,
            "keys_retrieved": self.counters.retrieved,
            **self.mean_budget(),
            "recall": self.recall(),
        }

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values held now."""
        return sum(8 * h.count * h.keys.shape[1] for layer in self.heads for row in layer for h in row)

    @property
    def index_bytes(self) -> int:
        """Bytes that the indexes hold besides."""
        return sum(h.index_bytes for layer in self.heads for row in layer for h in row)

    def close(self) -> None:
        """Ends the threads and forgets the keys. No step may be running."""
        super().close()
        self._builders.shutdown(cancel_futures=True)
        self._searcher.shutdown()
        self.heads, self.samples = [], []


def _seal(head: Head, end: int) -> Segment:
    return head.build(head.segment_start(end), end)


def _prepare(head: Head, learned: Learned, k: int) -> None:
    """Indexes a prompt's keys with what its queries taught, and sets the head's budget."""
    check_keys(head.keys[: head.count])
    if not learned.sealed:
        return
    exam, config = learned.exams[k], head.config
    head.means = exam.means
    indexed = config.index == "scann" and learned.sealed >= config.exact_below and config.leaves_searched != 0
    if config.projection and indexed:
        head.root = choose_projection(head.keys[: learned.sealed], learned.root[k], exam.queries)
    head.adopt(head.build(0, learned.sealed), learned.clusters[k])
    head.routes = Routes(learned.queries[k], learned.routes[k])
    head.budget = choose_budget(head, exam)
    head.forget_exam()
