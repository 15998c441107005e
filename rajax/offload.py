"""What a session asks of the keys that leave the device, whatever finds them again.

Letters: `B` batch, `K` key/value heads, `G` query heads per key/value head, `S` key positions, `Q` sampled positions,
`C` clusters, `H` head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from rajax.index import INDEXES
from rajax.models import DeviceCache, LlamaConfig, Zone
from rajax.models.summary import Summary
from rajax.retrieval import RetrievalConfig
from rajax.searched import Searched
from rajax.wave_buffer import BufferedWave
from rajax.wave_host import HostWave


class Offload(Protocol):
    """One request's offloaded keys.

    Attributes:
      zone: the static zone.
      starts: [B] int32, `DeviceCache.starts` after the prefill.
      store: the host's part, a `handles.Store` with `statistics()`, fields of `generation.Statistics`.
      path: what makes the host path of a step from the store's handle and `state`; compiled in.
      state: what a step reads on the device besides the `DeviceCache`.
      state_bytes: bytes of it.
    """

    zone: Zone
    starts: np.ndarray
    store: Any
    path: Any
    state: Any

    @property
    def state_bytes(self) -> int: ...

    def take(
        self,
        layer: int,
        sequence: int,
        keys: jax.Array,
        values: jax.Array,
        queries: jax.Array,
        positions: np.ndarray,
    ) -> Summary:
        """Takes one layer of one prompt, as `Session.take`; returns what stands behind the static zone, [K, C, ...]."""
        ...

    def finish_prefill(self) -> None:
        """Waits until the prompts can be searched."""
        ...

    def after_step(
        self, cache: DeviceCache, outcome: Any, active: np.ndarray, lengths: np.ndarray
    ) -> DeviceCache:
        """Does what was put off until the step's logits are there.

        Args:
          cache: the cache, the step's token in it.
          outcome: what the path's `outcome` said.
          active: [B] bool, the sequences that took part.
          lengths: [B] int32, tokens of each, that of the step included.
        """
        ...


def offload(
    retrieval: RetrievalConfig,
    config: LlamaConfig,
    dtype: Any,
    lengths: Sequence[int],
    capacity: Sequence[int],
) -> Offload | None:
    """What `retrieval` asks for, or None where a batch never outgrows the static zone and needs no host path.

    Args:
      retrieval: the settings.
      config: the model's.
      dtype: of keys and values on the device.
      lengths: tokens of each prompt.
      capacity: tokens of prompt and answer together.
    """
    if max(capacity) <= retrieval.zone_size:
        return None
    if retrieval.index == "scann" and max(capacity) - retrieval.zone_size < retrieval.exact_below:
        return HostWave(_attend_to_all(retrieval), config, dtype, lengths, capacity)
    kind: type[Searched] | type[BufferedWave] | type[HostWave]
    kind = Searched if INDEXES[retrieval.index] else _wave(retrieval)
    return kind(retrieval, config, dtype, lengths, capacity)


def _attend_to_all(retrieval: RetrievalConfig) -> RetrievalConfig:
    """What attends to every offloaded key, in compiled code on the host: no clusters, no index."""
    return RetrievalConfig(
        index="wave",
        outliers=1.0,
        whole_heads=0.0,
        host_dtype="float32",
        wave_buffer=False,
        sink_tokens=retrieval.sink_tokens,
        window=retrieval.window,
    )


def _wave(retrieval: RetrievalConfig) -> type[BufferedWave] | type[HostWave]:
    """Where attention is chosen: on the device, which keeps hot clusters, or on the host, where they lie."""
    if retrieval.key_codes:
        return HostWave
    on_device = jax.default_backend() != "cpu" if retrieval.wave_buffer is None else retrieval.wave_buffer
    return BufferedWave if on_device else HostWave
