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
      top_k: offloaded keys that each query head attends to exactly. RetrievalAttention (arXiv 2409.10516, section
        4.1) takes 100. On SmolLM2 at 32,768 tokens an exact top 256 diverges from dense attention by a KL of
        0.020 where an exact top 100 does by 0.032, and the search costs more than the keys it adds.
      target_error: instead of one top_k for all heads, the relative error of the attention output that is allowed,
        root mean square over queries: each head then takes as few keys, and as short a search, as reach it on
        queries of the prompt that were held out. None keeps top_k, and so does a prompt that offloads nothing to
        learn from.
      sink_tokens: first tokens that stay on the device; 128 as in RetrievalAttention, section 4.1.
      window: newest tokens that stay on the device; 512 as in RetrievalAttention, section 4.1.
      leaves_searched: share of ScaNN's partitions that a query searches, at most 1; 0 does without ScaNN, which
        needs routes. None, the default, lets each head choose on held-out queries, and searches all where there
        are fewer than 8,192 keys.
      routes: the known queries nearest to a query whose keys are looked at as well; 0 does without. None, the
        default, lets each head choose, likewise.
      projection: whether ScaNN may index the keys in coordinates that the prompt's queries shape, where a head
        finds more that way.
      summary: whether the device keeps mean keys that stand for the offloaded ones, 2.8 % of their bytes at a head
        dim of 64. On SmolLM2 that halves the error of the attention output.
      exact_below: fewer keys than this are scanned exactly, which is as fast there as ScaNN
        (`benchmarks/search.py`).
      recall_steps: the first this many decode steps are compared with an exact search after the answer is
        complete, off the clock; 0 measures nothing.
    """

    index: str = "scann"
    top_k: int = 256
    target_error: float | None = None
    sink_tokens: int = 128
    window: int = 512
    leaves_searched: float | None = None
    routes: int | None = None
    projection: bool = True
    summary: bool = True
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
            ("routes", 0),
        ):
            value = getattr(self, name)
            if name == "routes" and value is None:
                continue
            if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, found {value!r}")
        for name, allowed in (("leaves_searched", "from 0 to 1"), ("target_error", "above 0 and below 1")):
            value = getattr(self, name)
            if value is None:
                continue
            number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not number or not 0 <= value <= 1 or (name == "target_error" and value in (0, 1)):
                raise ValueError(f"{name} must be {allowed}, or None; found {value!r}")
        for name in ("projection", "summary"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, found {getattr(self, name)!r}")
        if self.leaves_searched == 0 and self.index == "exact":
            raise ValueError("leaves_searched=0 does without the index: it cannot go with index='exact'")
        if self.leaves_searched == 0 and not self.routes:
            raise ValueError("leaves_searched=0 does without the index and needs routes of at least 1")
