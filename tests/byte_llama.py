"""A tiny Hugging Face Llama on disk whose tokens are bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

CONFIG = {
    "model_type": "llama",
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "eos_token_id": 257,
    "tie_word_embeddings": True,
}
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def save(path: Path, **settings: Any) -> Path:
    """Writes the directory, with CONFIG and what `settings` change in it."""
    path.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|begin|>", "<|end|>"])
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (path / "config.json").write_text(json.dumps(CONFIG | settings))
    draw = np.random.RandomState(0)
    tensors = {"model.embed_tokens.weight": draw.standard_normal((258, 32)), "model.norm.weight": np.ones(32)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", 32, 32),
            ("self_attn.k_proj", 16, 32),
            ("self_attn.v_proj", 16, 32),
            ("self_attn.o_proj", 32, 32),
            ("mlp.gate_proj", 48, 32),
            ("mlp.up_proj", 48, 32),
            ("mlp.down_proj", 32, 48),
        ):
            tensors[f"{at}.{name}.weight"] = draw.standard_normal((rows, columns)) * 0.3
        for name in ("input", "post_attention"):
            tensors[f"{at}.{name}_layernorm.weight"] = np.ones(32)
    save_file({n: t.astype(np.float32) for n, t in tensors.items()}, path / "model.safetensors")
    return path
