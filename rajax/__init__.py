"""RAJAX: Llama over contexts that do not fit the accelerator.

Almost all of the KV cache lives in host memory; a vector index finds the few keys that each query needs,
and the device merges what it computed with what the host found.

    params = rajax.load("checkpoint")
    tokenizer = rajax.load_tokenizer("checkpoint")
    result = rajax.generate(params, tokenizer.encode("Once upon a time"))
    print(tokenizer.decode(result.tokens[0]))
"""

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
