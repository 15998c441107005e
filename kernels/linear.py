"""The products of linear layers, where they may be rounded: a CPU's matrix unit instead of XLA.

Letters: `R` rows, `I` inputs, `O` outputs.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rajax.kernels import tiles, vectors
from rajax.kernels.host_call import filled_by_host, share_out

ROWS = 256
"""Rows of the left side that stay in a core's cache while all of the right side passes."""


def product(x: jax.Array, kernel: jax.Array, dimensions: Any, **settings: Any) -> jax.Array:
    """`jax.lax.dot_general`, for `flax.nnx.Linear`: x [..., I] and kernel [I, O] to [..., O].

    Within `jax.default_matmul_precision("BF16_BF16_F32")` the operands are rounded to bfloat16 and sums are float32,
    unless there are so few rows that reading the kernel takes all the time. On a CPU with AMX that is `tile_product`;
    anywhere else XLA.
    """
    few = x.size // x.shape[-1] < tiles.LANES
    if few or not tiles.rounded() or x.dtype != jnp.float32:
        return jax.lax.dot_general(x, kernel, dimensions, **settings)
    if not tiles.chosen():
        # XLA's CPU takes no notice of the precision, so the operands are rounded here.
        x, kernel = x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)
        return jax.lax.dot_general(x, kernel, dimensions, preferred_element_type=jnp.float32)
    assert dimensions == (((x.ndim - 1,), (0,)), ((), ())), "a linear layer's product"
    return tile_product(x.reshape(-1, x.shape[-1]), kernel).reshape(*x.shape[:-1], kernel.shape[1])


def tile_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [R, I] times kernel [I, O], both rounded to bfloat16, as float32 [R, O]."""
    rows, outputs = len(x), kernel.shape[1]
    x, kernel = tiles.padded(x), tiles.padded(kernel)
    result = jax.ShapeDtypeStruct((len(x), kernel.shape[1]), jnp.float32)
    # Right tiles one after the other: [O / 16, I / 2, 16, 2].
    pairs = kernel.reshape(len(kernel) // 2, 2, -1, 16).transpose(2, 0, 3, 1)
    (out,) = filled_by_host(_fill, (result,), x, pairs)
    return out[:rows, :outputs]


def _fill(x: np.ndarray, pairs: np.ndarray, out: np.ndarray) -> None:
    multiply = _compiled()
    x, pairs = x.view(np.uint16), pairs.view(np.uint16)

    def some(first: int, last: int) -> None:
        multiply(tiles.CONFIGURATION, x, pairs, first * tiles.LANES, last * tiles.LANES, out)

    share_out(some, len(x) // tiles.LANES)


@functools.cache
def _compiled() -> Any:
    return vectors.compiled(_multiply)


def _multiply(configuration, x, pairs, first, last, out):
    """Rows first .. last - 1 of x [R, I], times pairs [O / 16, I / 2, 16, 2], to out [R, O]."""
    tiles.configure(configuration.ctypes.data)  # type: ignore[call-arg]
    inputs, outputs = x.shape[1], out.shape[1]
    width = 64 * (inputs // 2)  # bytes of 16 outputs
    for some in range(first, last, ROWS):
        for o in range(0, outputs, 32):
            right = pairs.ctypes.data + o // 16 * width
            for r in range(some, min(some + ROWS, last), 32):
                left, to = x.ctypes.data + 2 * r * inputs, out.ctypes.data + 4 * (r * outputs + o)
                tiles.clear_block()
                for i in range(0, inputs, 32):
                    tiles.multiply_block(left + 2 * i, 2 * inputs, right + 32 * i, width, 64)
                tiles.store_block(to, 4 * outputs)
    tiles.release()
