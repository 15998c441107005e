"""The settings of retrieval attention, in one place."""

from __future__ import annotations

import dataclasses
import json
import numbers
from typing import Any

from rajax.index import INDEXES

DENSE = "dense"
"""What attention without retrieval is called among the indexes."""

RANKS = ("spread", "estimate", "bound")
"""What `rank_by` may be."""

HOST_DTYPES = "bfloat16", "float32"
"""What `host_dtype` may be."""

OF_SEARCHES = "top_k", "target_error", "leaves_searched", "routes", "summary", "exact_below", "recall_steps"
"""Settings that mean nothing where clusters are retrieved whole."""

OF_RANKING = "retrieved_share", "top_p", "min_clusters", "max_clusters", "rank_by", "outliers", "whole_heads"
"""Settings that mean something only where clusters are retrieved whole."""

OF_WAVES = (
    *OF_RANKING,
    "host_dtype",
    "wave_buffer",
    "key_codes",
    "block_cache",
    "update_every",
)
"""Settings that mean something only there."""


@dataclasses.dataclass(frozen=True)
class RetrievalConfig:
    """How decode finds the keys that matter. Each default has its source.

    Attributes:
      index: the kind of index over the offloaded keys: "scann"; "exact", a scan of all of them; or "wave", RetroInfer's
        clusters, ranked and retrieved whole.
      top_k: offloaded keys that each query head attends to exactly. RetrievalAttention (arXiv 2409.10516, section
        4.1) takes 100. On SmolLM2 at 32,768 tokens an exact top 256 diverges from dense attention by a KL of
        0.020 where an exact top 100 does by 0.032, and the search costs more than the keys it adds.
      target_error: instead of one top_k for all heads, the relative error of the attention output that is allowed,
        root mean square over queries: each head then takes as few keys, and as short a search, as reach it on
        queries of the prompt that were held out. None keeps top_k, and so does a prompt that offloads nothing to
        learn from.
      retrieved_share: with "wave", the share of a head's clusters that every step retrieves; RetroInfer (arXiv
        2505.02922) takes 0.018. None, the default, lets each head and step choose by `top_p`.
      top_p: with "wave", each head and step retrieves as few clusters as leave a share of 1 - top_p of the estimated
        mass, weighed as `rank_by` says, to the others, within the bounds `min_clusters` and `max_clusters`. By default
        0.95, or 0.9 with `wave_buffer`. On SmolLM2 one number for all heads does as well as freer bounds: attention
        that is spread thin gains little by more clusters.
      min_clusters, max_clusters: those bounds, per KV head. A cluster has at most 16 keys, 12 on average. By default 96
        at most, or 40 with `wave_buffer`, where each may have to cross to the device.
      rank_by: with "wave", what makes a cluster worth retrieving: "estimate", its estimated mass, sizes counted;
        "spread", that times how far the scores of its keys differ, which finds a little more; "bound", the upper
        bound of its mass, which is too loose to be of use (`benchmarks/accuracy.py`).
      wave_buffer: with "wave", who ranks clusters and attends. True: the device, which has their means and a cache of
        hot ones, and is handed the others (RetroInfer, section 4.3). False: the host, where they lie, in compiled
        code. None, the default: the host where the device is a CPU, whose memory is the host's; elsewhere the device.
      key_codes: with "wave" on the host, whether every key, and every cluster's mean, has four-bit codes, one for two
        numbers, that tell its score up to rounding (product quantization). Clusters of which a key might be worth it
        are looked at key by key, and a key is attended to exactly where its codes promise it more than 0.0005 of the
        attention; all others are estimated. Clusters are not retrieved whole, so `retrieved_share`, `top_p`,
        `min_clusters`, `max_clusters`, `rank_by`, `outliers` and `whole_heads` mean nothing. On SmolLM2 with 32,768
        tokens and YaRN for 131,072 the KL from dense attention is an eighth, and a step takes no longer.
      host_dtype: with "wave", of keys, values and means in host memory: "bfloat16" or "float32".
      block_cache: with such a buffer, the size of the device's cache of hot clusters, as a share of the KV; 0.05 as in
        RetroInfer, section 4.3.
      outliers: with "wave", the share of every head's keys, at most 4,096 of them, that are in no cluster and always
        attended to: those furthest from their cluster's mean. Whatever a copying head looks for may be among them: a
        number in a text of other things has no keys like its own. ShadowKV (arXiv 2410.21465) keeps outlying chunks so.
        With 1 there are no clusters, and all keys are attended to.
      whole_heads: with "wave", the share of all KV heads whose keys are all attended to: those for which the
        clusters' estimates are worst on held-out queries of the prompt. Heads that copy text attend to single keys
        among many alike, and no cluster tells which; two of SmolLM2's 90 make two thirds of the divergence from dense.
        By default 0.03. With `wave_buffer` they stay on the device, one of a layer at most; without it they are as many
        more as have 4,096 keys per head on average: an eighth at 32,768 offloaded keys, all up to 4,096.
      update_every: with "wave", tokens of an answer that stay on the device beyond the window until they are clustered
        together, at least two more than the model has layers. RetroInfer takes 1,024; fewer take less device memory.
      sink_tokens: first tokens that stay on the device; 128 as in RetrievalAttention, section 4.1.
      window: newest tokens that stay on the device; 512 as in RetrievalAttention, section 4.1.
      leaves_searched: share of ScaNN's partitions that a query searches, at most 1; 0 does without ScaNN, which
        needs routes. None, the default, lets each head choose on held-out queries, and searches all where there
        are fewer than 8,192 keys.
      routes: the known queries nearest to a query whose keys are looked at as well; 0 does without. None, the
        default, lets each head choose, likewise.
      projection: whether ScaNN may index the keys in coordinates that the prompt's queries shape, where a head
        finds more that way. With "wave", whether clusters are formed in those coordinates, finer where the prompt's
        queries looked; without, by RetroInfer's spherical k-means of mean-centred keys.
      summary: whether the device keeps mean keys that stand for the offloaded ones, 2.8 % of their bytes at a head
        dim of 64. On SmolLM2 that halves the error of the attention output.
      exact_below: with "scann", a request that never offloads as many keys as this attends to all of them, in compiled
        code on the host: until then that takes less time than to search (`benchmarks/search.py`), and nothing is
        indexed. In longer texts, stretches shorter than this are scanned instead of indexed.
      recall_steps: the first this many decode steps are compared with an exact search after the answer is
        complete, off the clock; 0 measures nothing.
    """

    index: str = "scann"
    top_k: int = 256
    target_error: float | None = None
    retrieved_share: float | None = None
    top_p: float | None = None
    min_clusters: int = 8
    max_clusters: int | None = None
    rank_by: str = "spread"
    host_dtype: str = "bfloat16"
    wave_buffer: bool | None = None
    key_codes: bool = False
    block_cache: float = 0.05
    outliers: float = 0.02
    whole_heads: float | None = None
    update_every: int = 128
    sink_tokens: int = 128
    window: int = 512
    leaves_searched: float | None = None
    routes: int | None = None
    projection: bool = True
    summary: bool = True
    exact_below: int = 8192
    recall_steps: int = 0

    @property
    def zone_size(self) -> int:
        """Tokens that stay on the device."""
        return self.sink_tokens + self.window

    def __post_init__(self):
        if not isinstance(self.index, str) or self.index not in INDEXES:
            raise ValueError(f"index must be one of {', '.join(sorted(INDEXES))}; found {self.index!r}")
        _check_belongs(self)
        for name, least in (
            ("top_k", 1),
            ("min_clusters", 1),
            ("max_clusters", 1),
            ("update_every", 1),
            ("sink_tokens", 0),
            ("window", 1),
            ("exact_below", 0),
            ("recall_steps", 0),
            ("routes", 0),
        ):
            value = getattr(self, name)
            if name in ("routes", "max_clusters") and value is None:
                continue
            if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, found {value!r}")
        for name, excluded, allowed in (
            ("leaves_searched", (), "from 0 to 1, or None"),
            ("target_error", (0, 1), "above 0 and below 1, or None"),
            ("retrieved_share", (0,), "above 0 and at most 1, or None"),
            ("top_p", (), "from 0 to 1, or None"),
            ("block_cache", (), "from 0 to 1"),
            ("outliers", (), "from 0 to 1"),
            ("whole_heads", (), "from 0 to 1, or None"),
        ):
            value = getattr(self, name)
            if value is None and allowed.endswith("None"):
                continue
            number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not number or not 0 <= value <= 1 or value in excluded:
                raise ValueError(f"{name} must be {allowed}; found {value!r}")
        if self.max_clusters is not None and self.min_clusters > self.max_clusters:
            raise ValueError(
                f"min_clusters is {self.min_clusters}, more than max_clusters, {self.max_clusters}"
            )
        if self.rank_by not in RANKS:
            raise ValueError(f"rank_by must be one of {', '.join(RANKS)}; found {self.rank_by!r}")
        if self.host_dtype not in HOST_DTYPES:
            raise ValueError(f"host_dtype must be one of {', '.join(HOST_DTYPES)}; found {self.host_dtype!r}")
        if self.wave_buffer is not None and not isinstance(self.wave_buffer, bool):
            raise ValueError(f"wave_buffer must be true, false or None, found {self.wave_buffer!r}")
        if self.wave_buffer is False and self.rank_by == "bound":
            raise ValueError("rank_by='bound' needs the device's buffer: set wave_buffer=True")
        for name in ("projection", "summary", "key_codes"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, found {getattr(self, name)!r}")
        if self.key_codes:
            _check_coded(self)
        if self.leaves_searched == 0 and self.index == "exact":
            raise ValueError("leaves_searched=0 does without the index: it cannot go with index='exact'")
        if self.leaves_searched == 0 and not self.routes:
            raise ValueError("leaves_searched=0 does without the index and needs routes of at least 1")


def _check_coded(config: RetrievalConfig) -> None:
    """Raises ValueError where a setting was changed that has no use where keys are looked at one by one."""
    if config.wave_buffer:
        raise ValueError("key_codes=True is for the host only: leave wave_buffer at None, or set it to False")
    for field in dataclasses.fields(config):
        if field.name in OF_RANKING and getattr(config, field.name) != field.default:
            raise ValueError(f"{field.name} means nothing to key_codes=True: leave it at {field.default!r}")


def _check_belongs(config: RetrievalConfig) -> None:
    """Raises ValueError where a setting was changed that `config.index` has no use for."""
    others = OF_SEARCHES if INDEXES[config.index] is None else OF_WAVES
    for field in dataclasses.fields(config):
        if field.name in others and getattr(config, field.name) != field.default:
            raise ValueError(
                f"{field.name} means nothing to index={config.index!r}: leave it at {field.default!r}"
            )


def parse_attentions(text: str) -> dict[str, RetrievalConfig | None]:
    """Attentions from "dense,scann,wave:top_p=0.95:max_clusters=80": indexes, with settings of `RetrievalConfig`.

    Raises:
      ValueError: an unknown index or setting, or one named twice.
    """
    found: dict[str, RetrievalConfig | None] = {}
    for name in text.split(","):
        index, *settings = name.strip().split(":")
        if index != DENSE and index not in INDEXES:
            raise ValueError(
                f"--attention takes {', '.join([DENSE, *sorted(INDEXES)])}, comma between; found {index!r}"
            )
        if name.strip() in found:
            raise ValueError(f"--attention names {name.strip()!r} twice")
        if index == DENSE:
            if settings:
                raise ValueError(f"--attention: dense attention has no settings, found {name.strip()!r}")
            found[DENSE] = None
            continue
        chosen: dict[str, Any] = {}
        names = [field.name for field in dataclasses.fields(RetrievalConfig) if field.name != "index"]
        for setting in settings:
            key, _, value = setting.partition("=")
            if key not in names:
                raise ValueError(f"--attention: {key!r} is no setting; there are {', '.join(names)}")
            try:
                chosen[key] = json.loads(value)
            except ValueError:
                chosen[key] = value
        found[name.strip()] = RetrievalConfig(index=index, **chosen)
    return found
