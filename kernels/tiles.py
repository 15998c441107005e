"""Intel's AMX from Numba: products of bfloat16 tiles, of a CPU's own matrix unit.

A core has eight tiles of 16 rows of 64 bytes. One instruction adds a product of two tiles to a third: [16, 32] x
[32, 16] bfloat16 to [16, 16] float32, at ten times the speed of the vector units. XLA does not use it.

The left tile's rows are memory's. The right tile has two rows of the matrix in each of its own, interleaved: its row i
holds [2 i, 0], [2 i + 1, 0], [2 i, 1], [2 i + 1, 1], ... Vectors here are `LANES` wide, as a pair of tiles is.

Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18; Linux's
Documentation/arch/x86/xstate.rst.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from rajax.kernels import vectors
from rajax.kernels.vectors import call, pointer

LANES = vectors.LANES
"""Columns of two tiles side by side, and rows of a right tile's matrix."""

ROUNDED = "BF16_BF16_F32"
"""JAX's name (`jax.default_matmul_precision`) for products of bfloat16 with float32 sums."""


def rounded() -> bool:
    """Whether the products traced now may round their operands."""
    return jax.config.jax_default_matmul_precision == ROUNDED  # type: ignore[attr-defined]


def chosen() -> bool:
    """Whether the products traced now are for tiles: they may be rounded, and the device is a CPU that has them.

    With `usable`, this is the one place that chooses.
    """
    return rounded() and usable()


def usable() -> bool:
    """Whether the device is a CPU that has tiles."""
    return jax.default_backend() == "cpu" and available()


@functools.cache
def available() -> bool:
    """Whether this process may use AMX with bfloat16: the CPU has it, and Linux gives leave."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    features = binding.get_host_cpu_features()
    if not (features.get("amx-bf16") and features.get("avx512f")):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def _configuration() -> np.ndarray:
    """What `configure` loads: all eight tiles have 16 rows of 64 bytes."""
    table = np.zeros(64, np.uint8)
    table[0] = 1  # the palette
    table[16:32].view(np.uint16)[:] = 64
    table[48:56] = 16
    return table


CONFIGURATION = _configuration()


def padded(a: jax.Array) -> jax.Array:
    """A matrix rounded to bfloat16, with zeros behind it to a multiple of `LANES` on each side."""
    return jnp.pad(a.astype(jnp.bfloat16), [(0, -n % LANES) for n in a.shape])


# What follows is for compiled code. Addresses are integers, in bytes.

_BYTE, _LONG = ir.IntType(8), ir.IntType(64)


def _numbers(*tiles: Any) -> list[Any] | None:
    """The tiles of an instruction, which are part of it; None asks Numba for literals."""
    if not all(isinstance(tile, types.IntegerLiteral) for tile in tiles):
        return None
    return [_BYTE(tile.literal_value) for tile in tiles]


@intrinsic
def configure(context, table):
    """Before the first use of tiles in a thread."""

    def generate(context, builder, signature, arguments):
        call(builder, "llvm.x86.ldtilecfg", [pointer(builder, arguments[0])])
        return context.get_dummy_value()

    return types.void(types.uintp), generate


@intrinsic
def release(context):
    """After the last use: the operating system need not keep them any more."""

    def generate(context, builder, signature, arguments):
        call(builder, "llvm.x86.tilerelease", [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic(prefer_literal=True)
def clear(context, tile):
    """tile = 0"""
    numbers = _numbers(tile)
    if numbers is None:
        return None

    def generate(context, builder, signature, arguments):
        call(builder, "llvm.x86.tilezero", numbers)
        return context.get_dummy_value()

    return types.void(tile), generate


def _move(name: str) -> Any:
    @intrinsic(prefer_literal=True)
    def move(context, tile, address, stride):
        numbers = _numbers(tile)
        if numbers is None:
            return None

        def generate(context, builder, signature, arguments):
            call(builder, name, [*numbers, pointer(builder, arguments[1]), arguments[2]])
            return context.get_dummy_value()

        return types.void(tile, types.uintp, types.intp), generate

    return move


load = _move("llvm.x86.tileloadd64")
"""load(tile, address, stride): rows of 64 bytes, `stride` bytes apart."""

store = _move("llvm.x86.tilestored64")
"""store(tile, address, stride)"""


@intrinsic(prefer_literal=True)
def multiply_add(context, out, left, right):
    """out += left x right"""
    numbers = _numbers(out, left, right)
    if numbers is None:
        return None

    def generate(context, builder, signature, arguments):
        call(builder, "llvm.x86.tdpbf16ps", numbers)
        return context.get_dummy_value()

    return types.void(out, left, right), generate


@intrinsic
def weigh(context, scores, pairs, tops, weights, totals):
    """weights = exp(scores - tops) as a right tile wants them; adds them to totals [LANES].

    scores: [2 pairs, LANES] float32; tops: [LANES] float32, above all scores of their column.
    weights: [pairs, LANES, 2] bfloat16, rounded to the nearest. What is added up is what was rounded.
    """

    def generate(context, builder, signature, arguments):
        scores, pairs, tops, weights, totals = arguments
        to_base_2 = vectors.floats(np.log2(np.e))
        top = builder.fmul(vectors.load(builder, tops), vectors.floats(-np.log2(np.e)))
        total = cgutils.alloca_once_value(builder, vectors.load(builder, totals))
        with cgutils.for_range(builder, pairs) as loop:
            offset = builder.mul(loop.index, _LONG(4 * LANES))
            first = builder.add(scores, builder.shl(offset, _LONG(1)))
            rounded = []
            for row in (first, builder.add(first, _LONG(4 * LANES))):
                score = vectors.fused(builder, vectors.load(builder, row), to_base_2, top)
                power = vectors.power_of_two(builder, score, degree=4)
                power = builder.add(power, vectors.ints(0x8000))
                rounded.append(builder.and_(power, vectors.ints(0xFFFF0000)))
            both = builder.fadd(*(builder.bitcast(r, vectors.FLOATS) for r in rounded))
            builder.store(builder.fadd(builder.load(total), both), total)
            pair = builder.or_(builder.lshr(rounded[0], vectors.ints(16)), rounded[1])
            vectors.store(builder, pair, builder.add(weights, offset))
        vectors.store(builder, builder.load(total), totals)
        return context.get_dummy_value()

    signature = types.void(types.uintp, types.intp, types.uintp, types.uintp, types.uintp)
    return signature, generate


# Two left tiles, one above the other, times two right ones side by side: four sums, in tiles 0 to 3. All products are
# made of such blocks.


@njit(inline="always")
def clear_block():
    """The four sums = 0"""
    clear(0)  # type: ignore[call-arg]
    clear(1)
    clear(2)
    clear(3)


@njit(inline="always")
def load_block(address, stride):
    """The four sums = [32, 32] float32"""
    load(0, address, stride)
    load(1, address + 64, stride)
    load(2, address + 16 * stride, stride)
    load(3, address + 16 * stride + 64, stride)


@njit(inline="always")
def store_block(address, stride):
    """[32, 32] float32 = the four sums"""
    store(0, address, stride)
    store(1, address + 64, stride)
    store(2, address + 16 * stride, stride)
    store(3, address + 16 * stride + 64, stride)


@njit(inline="always")
def multiply_block(left, left_stride, right, apart, right_stride):
    """The four sums += left [32, 32] x right [32, 32], whose second tile begins `apart` bytes after the first."""
    load(4, left, left_stride)
    load(5, left + 16 * left_stride, left_stride)
    load(6, right, right_stride)
    load(7, right + apart, right_stride)
    multiply_add(0, 4, 6)  # type: ignore[call-arg]
    multiply_add(1, 4, 7)
    multiply_add(2, 5, 6)
    multiply_add(3, 5, 7)


@njit(inline="always")
def interleave(rows, pairs):
    """Writes the transpose of rows [LANES, H], the bits of bfloat16, to pairs [2, H / 2, 16] uint32.

    The two halves are right tiles side by side, 16 pairs each.
    """
    half = LANES // 2
    for i in range(pairs.shape[1]):
        for j in range(LANES):
            x, y = np.uint32(rows[j, 2 * i]), np.uint32(rows[j, 2 * i + 1])
            pairs[j // half, i, j % half] = x | (y << np.uint32(16))
