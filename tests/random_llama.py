"""Small random Llamas that need no checkpoint, with weights large enough for an error to show."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rajax.checkpoint import from_parameters, parameter_shapes
from rajax.models import Llama, LlamaConfig, RopeConfig


def random_llama(seed: int = 0, **overrides: Any) -> Llama:
    """A model of three layers whose attention is peaked and whose logits have a deviation of about two."""
    positions = overrides.get("max_position_embeddings", 4096)
    settings: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": positions,
        "rope": RopeConfig(max_position_embeddings=positions, original_max_position_embeddings=positions),
        "rms_norm_eps": 1e-5,
    }
    config = LlamaConfig(**{**settings, **overrides})
    draw = np.random.RandomState(seed)

    def fill(shape: tuple[int, ...]) -> jax.Array:
        if len(shape) == 1:
            return jnp.asarray(1 + 0.3 * draw.standard_normal(shape), jnp.float32)
        return jnp.asarray(draw.standard_normal(shape) * 1.6 / np.sqrt(shape[0]), jnp.float32)

    def in_order(name: str) -> list[int | str]:
        return [int(part) if part.isdigit() else part for part in name.split(".")]

    shapes = parameter_shapes(config)
    return from_parameters(config, {name: fill(shapes[name]) for name in sorted(shapes, key=in_order)})


def random_tokens(seed: int, *lengths: int, vocabulary: int = 64) -> list[np.ndarray]:
    """One text of random tokens per length."""
    draw = np.random.RandomState(seed)
    return [draw.randint(0, vocabulary, n).astype(np.int32) for n in lengths]
