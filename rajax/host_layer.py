"""One layer and sequence's keys on the host, and threads that share its heads."""

from __future__ import annotations

import abc
from typing import Any

import ml_dtypes
import numpy as np

from rajax.clusters import NewClusters
from rajax.exact_attention import wait
from rajax.kernels.host_call import CORES, workers

WORTH_A_THREAD = 1 << 18
"""Numbers that a step reads of a layer in any case, from which on its heads are shared out to threads."""


def bits(a: np.ndarray) -> np.ndarray:
    """An array as compiled code reads it: bfloat16 as its bits, float32 as it is."""
    return a.view(np.uint16) if a.dtype == ml_dtypes.bfloat16 else a


class HostLayer(abc.ABC):
    """What compiled attention over one layer and sequence reads.

    Attributes:
      held: keys, of all heads together.
      compiled: writes the partials of half heads; called with turns, queries, `arguments`, counts and out.
      arguments: the arrays and numbers that are the same for every step until keys are taken over.
      size: numbers that a step reads in any case.
    """

    held = 0
    compiled: Any
    arguments: tuple[Any, ...]
    size = 0

    @abc.abstractmethod
    def adopt(self, new: NewClusters, whole: np.ndarray, root: np.ndarray) -> None:
        """Takes clusters over; heads that are `whole` [K] attend to all their keys instead.

        `root` [K, H, H] are the coordinates in which distances are differences of scores.
        """

    @property
    @abc.abstractmethod
    def index_bytes(self) -> int:
        """Bytes of what there is besides keys and values."""

    def attend(self, queries: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Writes the partials of queries [K, G, H] over all keys to out [2 K, G, H + 2]: numerators, denominators,
        maxima.

        Returns [2 K, 5] integers: what was chosen, the keys attended to exactly, what was looked at to choose, and the
        cycles of looking and of attending.
        """
        counts = np.empty((len(out), 5), np.int64)
        turns, failures = np.zeros(2, np.int64), []

        def work() -> None:
            try:
                self.compiled(turns, queries, *self.arguments, counts, out)
            except BaseException as failure:
                failures.append(failure)
                turns[:] += len(out)  # nobody shall wait for this one, nor begin another

        threads = min(CORES, len(out)) - 1 if self.size >= WORTH_A_THREAD else 0
        others = [workers().submit(work) for _ in range(threads)]
        work()
        wait(turns, len(out))
        if failures:
            for other in others:  # they may be writing yet
                other.result()
            raise failures[0]
        return counts
