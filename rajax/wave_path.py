"""The wave index's host path as a jitted step sees it: rank on the device, fetch what is not there, attend.

Letters: `L` layers, `B` batch, `K` key/value heads, `G` query heads per key/value head, `R` clusters wanted at most,
`P` blocks of a transfer, `H` head dim.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rajax.handles import by_handle
from rajax.kernels import Partial, merge, no_keys
from rajax.kernels.host_call import filled_by_host
from rajax.models.wave import (
    BLOCK_KEYS,
    BlockCache,
    Clusters,
    Selection,
    SelectionRule,
    WholeHead,
    attend_blocks,
    attend_cache,
    attend_whole,
    select,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WaveState:
    """What the device holds of the wave index, per layer, a few heads whole, and the rule by which a step retrieves."""

    clusters: tuple[Clusters, ...]
    cache: tuple[BlockCache, ...]
    whole: tuple[WholeHead, ...]
    rule: SelectionRule = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fetched:
    """What one layer's first transfer of a step brought.

    Attributes:
      keys: [P, BLOCK_KEYS, H].
      values: [P, BLOCK_KEYS, H].
      counts: [P] int32, keys of each block; 0 for none.
    """

    keys: jax.Array
    values: jax.Array
    counts: jax.Array


def transfer_sizes(rows: int) -> tuple[int, ...]:
    """Blocks of the transfers that a step of `rows` heads chooses from: the smallest that holds what is missing.

    A shape is compiled in, and all of it moves. More than the largest holds takes several rounds.
    """
    return 2 * rows, 4 * rows, 8 * rows


class WavePath:
    """A `models.attention.HostPath` to the `WaveStore` whose handle is an array of the step.

    The static zone is not its business. Keys that leave the window stay on the device until they are clustered, so what
    `submit` is told of them goes unused.
    """

    def __init__(self, handle: jax.Array, state: WaveState):
        self.handle, self.state = handle, state
        self.wanted: list[tuple[jax.Array, Selection]] = []
        self.fetched: list[Fetched] = []

    def submit(
        self, layer: int, queries: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        with jax.named_scope("rank"):
            selection = select(queries, self.state.clusters[layer], lengths >= 0, self.state.rule)
        self.wanted.append((queries, selection))
        return selection.missing

    def collect(self, layer: int, ticket: jax.Array, after: jax.Array) -> Partial:
        queries, selection = self.wanted[layer]
        cache = self.state.cache[layer]
        rows, head_dim, dtype = queries.shape[0] * queries.shape[1], queries.shape[-1], cache.keys.dtype
        sizes = transfer_sizes(rows)
        largest = sizes[-1]

        def transfer(most: int, first: jax.Array) -> tuple[Partial, Fetched]:
            head = jnp.stack([self.handle, jnp.int32(layer), first])
            with jax.named_scope("fetch"):
                # One argument: each costs as much as a small search.
                moved = _fetch(
                    jnp.concatenate([head, selection.ids.reshape(-1)]), most, rows, head_dim, dtype
                )
            with jax.named_scope("attend_fetched"):
                part = attend_blocks(queries, *moved)
            keys, values, _, counts = moved
            return part, Fetched(keys, values, counts)

        def in_one(most: int) -> tuple[Partial, Fetched]:
            part, moved = transfer(most, jnp.int32(0))
            # All branches of a switch return the same shapes.
            return part, jax.tree.map(
                lambda a: jnp.pad(a, ((0, largest - most), *((0, 0),) * (a.ndim - 1))), moved
            )

        def in_several() -> tuple[Partial, Fetched]:
            part, moved = transfer(largest, jnp.int32(0))

            def more(state: tuple[jax.Array, Partial]) -> tuple[jax.Array, Partial]:
                first, part = state
                return first + largest, merge(part, transfer(largest, first)[0])

            state = jnp.int32(largest), part
            return jax.lax.while_loop(lambda s: s[0] < selection.missing, more, state)[1], moved

        def not_at_all() -> tuple[Partial, Fetched]:
            blocks = jnp.zeros((largest, BLOCK_KEYS, head_dim), dtype)
            return no_keys(*queries.shape), Fetched(blocks, blocks, jnp.zeros(largest, jnp.int32))

        which = sum((selection.missing > limit).astype(jnp.int32) for limit in (0, *sizes))
        transfers: list[Any] = [not_at_all, *(functools.partial(in_one, most) for most in sizes), in_several]
        part, moved = jax.lax.switch(which, transfers)
        self.fetched.append(moved)
        parts = [selection.estimated, part]
        if cache.keys.shape[2]:
            with jax.named_scope("attend_cache"):
                parts.append(attend_cache(queries, cache))
        if self.state.whole:
            # Which layers have such a head differs from prompt to prompt, and must not be compiled in.
            here = sum((w.layer == layer) * (i + 1) for i, w in enumerate(self.state.whole))
            branches = [functools.partial(no_keys, *queries.shape)]
            branches += [functools.partial(attend_whole, queries, w) for w in self.state.whole]
            with jax.named_scope("attend_whole"):
                parts.append(jax.lax.switch(jnp.asarray(here, jnp.int32), branches))
        return merge(*parts)

    def outcome(self) -> tuple[Sequence[Fetched], jax.Array]:
        """What every layer fetched, and the clusters wanted, those in the cache included: [L, B, K, R] int32,
        -1 for none."""
        return self.fetched, jnp.stack([selection.ids for _, selection in self.wanted])


def _fetch(request: jax.Array, most: int, rows: int, head_dim: int, dtype: Any) -> tuple[jax.Array, ...]:
    """The blocks that `WaveStore.fetch` finds: keys and values [P, BLOCK_KEYS, H], their rows [P] and sizes [P]."""
    block = jax.ShapeDtypeStruct((most, BLOCK_KEYS, head_dim), dtype)
    numbers = jax.ShapeDtypeStruct((most,), jnp.int32)
    return filled_by_host(functools.partial(_fill, rows), (block, block, numbers, numbers), request)


def _fill(rows: int, request: np.ndarray, *out: np.ndarray) -> None:
    # As in `host_path`: a failure is kept for the session to raise when the step is over.
    handle, layer, first = request[:3].tolist()
    store = by_handle(handle)
    if store is not None:
        try:
            return store.fetch(layer, first, request[3:].reshape(rows, -1), *out)
        except BaseException as failure:
            store.fail(failure)
    for a in out:
        a[...] = 0
    return None
