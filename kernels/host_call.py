"""A jitted step's call of a host function that fills arrays.

Nothing here may touch JAX while the call runs: it can deadlock on CPU.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""Cores that this process may use."""


def filled_by_host(
    fill: Callable[..., None], shapes: Sequence[jax.ShapeDtypeStruct], *requests: jax.Array
) -> tuple[jax.Array, ...]:
    """The arrays of `shapes` as `fill(*requests, *arrays)` leaves them; it gets NumPy arrays and writes all of each.

    It changes nothing else that a repetition would change again: it may be repeated. On CPU, where the host's memory is
    the device's, it writes into XLA's buffers, which takes a third of the time of a callback that returns arrays.
    """
    shapes = tuple(shapes)

    def in_place(_: Any, out: Any, *requests: Any) -> None:
        fill(*(np.asarray(a) for a in (*requests, *out)))

    def returned(*requests: Any) -> tuple[np.ndarray, ...]:
        out = tuple(np.empty(s.shape, s.dtype) for s in shapes)
        fill(*(np.asarray(a) for a in requests), *out)
        return out

    return jax.lax.platform_dependent(
        *requests,
        cpu=buffer_callback(in_place, shapes),
        default=lambda *requests: jax.pure_callback(returned, shapes, *requests, vmap_method="sequential"),
    )


def attention_by_host(
    fill: Callable[..., None], q: jax.Array, keys: jax.Array, values: jax.Array, start: jax.Array
) -> jax.Array:
    """The attention [B, K, G, T, H] float32 that `fill` computes of q [B, K, G, T, H].

    It gets q [B, T, K, G, H], keys, values, start [1] and the answer's place, which is like q: as the queries were
    computed and the answer is wanted, so that XLA leaves out both transpositions.
    """
    turned = q.transpose(0, 3, 1, 2, 4)
    result = jax.ShapeDtypeStruct(turned.shape, np.float32)
    (out,) = filled_by_host(fill, (result,), turned, keys, values, start.reshape(1))
    return out.transpose(0, 2, 3, 1, 4)


@functools.cache
def workers() -> ThreadPoolExecutor:
    """Threads for what host functions share out, one for each core."""
    return ThreadPoolExecutor(CORES, thread_name_prefix="rajax-cores")


def share_out(some: Callable[[int, int], None], pieces: int) -> None:
    """Calls some(first, last) for spans of range(pieces) that cover it, in a thread for each core, the caller's too.

    To wake another thread takes 0.1 ms.
    """
    threads = max(1, min(pieces, CORES))
    ends = [pieces * i // threads for i in range(threads + 1)]
    mine, *spans = itertools.pairwise(ends)
    others = [workers().submit(some, *span) for span in spans]
    some(*mine)
    for other in others:
        other.result()
