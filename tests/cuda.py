"""Lowering for CUDA on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh


def lower_for_cuda(function: Callable[..., Any], *arguments: Any) -> str:
    """The program of `function` for CUDA, as text. Only the arguments' shapes and dtypes count."""
    # Arrays would bind the program to this machine's CPU.
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments)
    # JAX 0.12 asks which GPU Triton compiles for, and must not look for one here.
    device = AbstractDevice(device_kind="NVIDIA A100", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=device)):
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
