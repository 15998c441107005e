"""The settings of retrieval attention, in one place."""

from __future__ import annotations

import dataclasses
import numbers

from rajax.index import INDEXES


@dataclasses.dataclass(frozen=True)
class RetrievalConfig:
    """How decode finds the keys that matter. Each default has its source.

    Attributes:
      index: the kind of index over the offloaded keys: "scann", or "exact", a scan of all of them.
      top_k: offloaded keys that each query head attends to. RetrievalAttention (arXiv 2409.10516, section
        4.1) takes 100. On SmolLM2 at 32,768 tokens an exact top 256 diverges from dense attention by a KL of
        0.020 where an exact top 100 does by 0.032, and the search costs more than the keys it adds.
      sink_tokens: first tokens that stay on the device; 128 as in RetrievalAttention, section 4.1.
      window: newest tokens that stay on the device; 512 as in RetrievalAttention, section 4.1.
      leaves_searched: share of ScaNN's partitions that a query searches, above 0 and at most 1. The quantized
        scan is a small part of a search, so that half of them cost little more than a tenth and find 99
        of the best 100 keys where a tenth finds 76 (`benchmarks/search.py`).
      exact_below: fewer offloaded keys than this are scanned exactly, which is as fast there as ScaNN
        (`benchmarks/search.py`).
      recall_steps: the first this many decode steps are compared with an exact search after the answer is
        complete, off the clock; 0 measures nothing.
    """

    index: str = "scann"
    top_k: int = 256
    sink_tokens: int = 128
    window: int = 512
    leaves_searched: float = 0.5
    exact_below: int = 4096
    recall_steps: int = 0

    @property
    def zone_size(self) -> int:
        """Tokens that stay on the device."""
        return self.sink_tokens + self.window

    def __post_init__(self):
        if not isinstance(self.index, str) or self.index not in INDEXES:
            raise ValueError(f"index must be one of {', '.join(sorted(INDEXES))}; found {self.index!r}")
        for name, least in (
            ("top_k", 1),
            ("sink_tokens", 0),
            ("window", 1),
            ("exact_below", 0),
            ("recall_steps", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, found {value!r}")
        number = isinstance(self.leaves_searched, numbers.Real) and not isinstance(self.leaves_searched, bool)
        if not number or not 0 < self.leaves_searched <= 1:
            raise ValueError(f"leaves_searched must be above 0 and at most 1, found {self.leaves_searched!r}")
