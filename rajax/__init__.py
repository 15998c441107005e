"""RAJAX: Llama over contexts that do not fit the accelerator.

Almost all of the KV cache lives in host memory; a vector index finds the few keys that each query needs,
and the device merges what it computed with what the host found.

    params = rajax.load("checkpoint")
    tokenizer = rajax.load_tokenizer("checkpoint")
    result = rajax.generate(params, tokenizer.encode("Once upon a time"))
    print(tokenizer.decode(result.tokens[0]))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rajax.checkpoint import CheckpointError, load
    from rajax.generation import Generation, Statistics, generate, logits, stream
    from rajax.models import ConfigError, Llama, LlamaConfig
    from rajax.retrieval import RetrievalConfig
    from rajax.sampling import Sampling
    from rajax.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Generation",
    "Llama",
    "LlamaConfig",
    "RetrievalConfig",
    "Sampling",
    "Statistics",
    "Tokenizer",
    "generate",
    "load",
    "load_tokenizer",
    "logits",
    "stream",
]

_HOMES = {
    "checkpoint": ("CheckpointError", "load"),
    "generation": ("Generation", "Statistics", "generate", "logits", "stream"),
    "models": ("ConfigError", "Llama", "LlamaConfig"),
    "retrieval": ("RetrievalConfig",),
    "sampling": ("Sampling",),
    "tokenizer": ("Tokenizer", "load_tokenizer"),
}


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used: JAX takes seconds, and `rajax --help` does without it."""
    for module, names in _HOMES.items():
        if name in names:
            return globals().setdefault(name, getattr(importlib.import_module(f"rajax.{module}"), name))
    raise AttributeError(f"module 'rajax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
