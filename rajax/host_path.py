"""The host path as a jitted step sees it: two callbacks around the kernel.

Inside the callbacks there is no JAX: arguments become NumPy arrays first, and NumPy arrays go back.

Letters: `B` batch, `K` key/value heads, `G` query heads per key/value head, `H` head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from rajax.handles import by_handle
from rajax.kernels import Partial, no_keys


class CallbackHostPath:
    """A `models.attention.HostPath` to the `HostStore` whose handle is an array of the step.

    `io_callback` and not `pure_callback`: a search must happen once, since it also takes a key in. Its order
    is kept by data: `collect` needs the ticket that `submit` made.
    """

    def __init__(self, handle: jax.Array, state: tuple[()]):
        del state  # what this path needs of the device is in the `DeviceCache`
        self.handle = handle
        self.shapes: dict[int, tuple[int, ...]] = {}

    def submit(
        self, layer: int, queries: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        self.shapes[layer] = queries.shape
        ticket = jax.ShapeDtypeStruct((), jnp.int32)
        with jax.named_scope("host_submit"):
            return io_callback(_submit, ticket, self.handle, np.int32(layer), queries, keys, values, lengths)

    def collect(self, layer: int, ticket: jax.Array, after: jax.Array) -> Partial:
        *heads, head_dim = self.shapes[layer]
        shapes = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*heads, head_dim), heads, heads))
        with jax.named_scope("host_collect"):
            return Partial(*io_callback(_collect, shapes, self.handle, ticket, after, np.int32(head_dim)))

    def outcome(self) -> tuple[()]:
        """What the session has to act on after the step."""
        return ()


# A callback hands its failure to the store and goes on with nothing, until the step is over and the session
# raises it. Where the store is gone the request has ended, and nobody reads the answer.


def _submit(handle, layer, queries, keys, values, lengths) -> np.ndarray:
    store = by_handle(int(np.asarray(handle)))
    ticket = -1
    if store is not None:
        try:
            # XLA may reuse the buffers when this returns, and the search goes on: what it reads is copied.
            queries, lengths = np.array(queries, np.float32), np.array(lengths)
            keys, values = (np.asarray(a).astype(np.float32) for a in (keys, values))
            ticket = store.submit(int(np.asarray(layer)), queries, keys, values, lengths)
        except BaseException as failure:
            store.fail(failure)
    return np.asarray(ticket, np.int32)


def _collect(handle, ticket, after, head_dim) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    store, ticket = by_handle(int(np.asarray(handle))), int(np.asarray(ticket))
    batch, kv_heads, groups = np.asarray(after).shape
    part = no_keys(batch, kv_heads, groups, int(np.asarray(head_dim)))
    if store is not None and ticket >= 0:
        try:
            part = store.collect(ticket)
        except BaseException as failure:
            store.fail(failure)
    return np.asarray(part.numerator), np.asarray(part.denominator), np.asarray(part.max)
