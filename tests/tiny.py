"""Tiny Llamas for the parity tests: one for every setting that changes what a Llama computes.

The weights are large, so that attention is peaked, logits have a standard deviation of a few units and an
error anywhere shows in them; larger ones would let the rounding of float32 show as well. They come from
`np.random.RandomState`, whose stream NumPy has frozen.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    # No token ends a text: generation is compared over a fixed number of tokens.
    "bos_token_id": None,
    "eos_token_id": None,
}

GAINS = {"embed_tokens": 2.5, "lm_head": 2.5}
"""Standard deviation of a projection of unit-variance inputs; 1.2 for the others."""


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A tiny model and the text it is compared over.

    Attributes:
      config: the contents of config.json.
      length: tokens of the text.
      dtype: of the stored weights.
      shards: safetensors files; more than one come with an index.
      extra: tensors that a checkpoint may hold and that say nothing new: "head" (a tied output embedding
        stored once more) and "inv_freq" (the rotary buffers of old checkpoints).
    """

    config: dict[str, Any]
    length: int = 40
    dtype: str = "float32"
    shards: int = 1
    extra: tuple[str, ...] = ()


def _tiny(
    length: int = 40, dtype: str = "float32", shards: int = 1, extra: tuple[str, ...] = (), **config
) -> Tiny:
    """BASE with other settings; a setting of `...` is left out of config.json."""
    merged = {**BASE, **config}
    return Tiny({k: v for k, v in merged.items() if v is not ...}, length, dtype, shards, extra)


def _rope_4(scaling: dict[str, Any], theta: float = 500.0, length: int = 40, **config) -> Tiny:
    """A rotary variant as transformers 4 spells it. A small theta makes all pairs turn within the text."""
    return _tiny(length, head_dim=16, rope_theta=theta, rope_scaling=scaling, **config)


def _rope_5(parameters: dict[str, Any], theta: float = 500.0, length: int = 40, **config) -> Tiny:
    """The same as transformers 5 spells it."""
    return _tiny(
        length, head_dim=16, rope_theta=..., rope_parameters={"rope_theta": theta, **parameters}, **config
    )


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LONG = {
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0],
    "long_factor": [1.1, 1.4, 1.9, 2.6, 3.3, 4.1, 5.2, 6.0],
}
_LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 32, **_LONG}

CONFIGS: dict[str, Tiny] = {
    "separate_head": _tiny(),
    "tied_head": _tiny(tie_word_embeddings=True),
    "tied_head_stored_twice": _tiny(tie_word_embeddings=True, extra=("head",)),
    "defaults_left_out": _tiny(
        **dict.fromkeys(
            (
                "num_key_value_heads",
                "max_position_embeddings",
                "rms_norm_eps",
                "hidden_act",
                "tie_word_embeddings",
                "rope_theta",
                "bos_token_id",
                "eos_token_id",
            ),
            ...,
        )
    ),
    "large_epsilon": _tiny(rms_norm_eps=0.5),
    "mha": _tiny(num_key_value_heads=4),
    "mqa": _tiny(num_key_value_heads=1),
    "wide_heads": _tiny(head_dim=20),
    "narrow_heads": _tiny(head_dim=6, num_attention_heads=6, num_key_value_heads=3),
    "attention_bias": _tiny(attention_bias=True),
    "mlp_bias": _tiny(mlp_bias=True),
    "all_biases": _tiny(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "swish": _tiny(24, hidden_act="swish"),
    "gelu": _tiny(24, hidden_act="gelu"),
    "gelu_new": _tiny(24, hidden_act="gelu_new"),
    "gelu_pytorch_tanh": _tiny(24, hidden_act="gelu_pytorch_tanh"),
    "relu": _tiny(24, hidden_act="relu"),
    # Long enough for two blocks of the prefill.
    "two_blocks": _tiny(
        600, vocab_size=32, hidden_size=32, intermediate_size=48, max_position_embeddings=1024
    ),
    "float16": _tiny(dtype="float16"),
    "bfloat16": _tiny(dtype="bfloat16"),
    "sharded": _tiny(shards=3),
    "sharded_bfloat16_tied": _tiny(shards=2, dtype="bfloat16", tie_word_embeddings=True),
    "default_5": _rope_5({"rope_type": "default"}),
    "default_theta_4": _tiny(rope_theta=500.0, extra=("inv_freq",)),
    "linear_4": _rope_4({"rope_type": "linear", "factor": 4.0}),
    "linear_type_4": _rope_4({"type": "linear", "factor": 2.5}),
    "linear_5": _rope_5({"rope_type": "linear", "factor": 4.0}),
    "dynamic_short_4": _rope_4(
        {"rope_type": "dynamic", "factor": 4.0}, length=24, max_position_embeddings=32
    ),
    "dynamic_long_4": _rope_4({"rope_type": "dynamic", "factor": 4.0}, length=72, max_position_embeddings=32),
    "dynamic_long_5": _rope_5({"rope_type": "dynamic", "factor": 3.0}, length=56, max_position_embeddings=24),
    "yarn_4": _rope_4(_YARN),
    "yarn_type_4": _rope_4({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
    "yarn_5": _rope_5(_YARN),
    "yarn_no_original_4": _rope_4(
        {"rope_type": "yarn", "factor": 4.0}, length=72, max_position_embeddings=32
    ),
    "yarn_null_factor_5": _rope_5({**_YARN, "factor": None}),
    "yarn_betas_4": _rope_4({**_YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}),
    "yarn_betas_5": _rope_5({**_YARN, "beta_fast": 3, "beta_slow": 0.6, "truncate": False}),
    "yarn_attention_factor_4": _rope_4({**_YARN, "attention_factor": 0.8}),
    "yarn_attention_factor_5": _rope_5({**_YARN, "attention_factor": 1.4}),
    "yarn_mscale_4": _rope_4({**_YARN, "mscale": 2.0, "mscale_all_dim": 0.7}),
    "yarn_mscale_5": _rope_5({**_YARN, "mscale": 0.7, "mscale_all_dim": 2.5}),
    "longrope_short_4": _rope_4(_LONGROPE, length=32),
    "longrope_long_4": _rope_4(_LONGROPE, length=60),
    "longrope_short_5": _rope_5({**_LONGROPE, "factor": 6.0}, length=24),
    "longrope_long_5": _rope_5({**_LONGROPE, "attention_factor": 1.3}, length=60),
    # Phi-3's spelling: the original length is beside rope_scaling.
    "longrope_outside_4": _rope_4(
        {"rope_type": "longrope", **_LONG}, length=40, original_max_position_embeddings=36
    ),
    "llama3_4": _rope_4(_LLAMA3),
    "llama3_5": _rope_5({**_LLAMA3, "low_freq_factor": 0.5, "high_freq_factor": 6.0}),
    "proportional_4": _rope_4({"rope_type": "proportional", "partial_rotary_factor": 0.5}),
    "proportional_outside_4": _rope_4(
        {"rope_type": "proportional", "factor": 2.0}, partial_rotary_factor=0.5
    ),
    "proportional_5": _rope_5({"rope_type": "proportional", "partial_rotary_factor": 0.5}),
}


def text(name: str) -> np.ndarray:
    """The tokens that a model is compared over, [T] int32."""
    tiny = CONFIGS[name]
    return _random(f"{name} text").randint(0, tiny.config["vocab_size"], tiny.length).astype(np.int32)


def tensors(name: str) -> dict[str, np.ndarray]:
    """A model's tensors by Hugging Face's names, in the dtype they are stored in."""
    tiny = CONFIGS[name]
    c, random = tiny.config, _random(name)
    hidden, mlp, vocabulary = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    head_dim = c.get("head_dim", hidden // c["num_attention_heads"])
    heads = head_dim * c["num_attention_heads"]
    kv_heads = head_dim * c.get("num_key_value_heads", c["num_attention_heads"])
    made: dict[str, np.ndarray] = {}

    def matrix(path: str, rows: int, columns: int, fan_in: int, bias: bool = False) -> None:
        gain = GAINS.get(path.rsplit(".", 1)[-1], 1.2)
        made[f"{path}.weight"] = random.standard_normal((rows, columns)) * (gain / np.sqrt(fan_in))
        if bias:
            made[f"{path}.bias"] = random.standard_normal(rows) * 0.7

    def norm(path: str) -> None:
        made[f"{path}.weight"] = 1 + 0.3 * random.standard_normal(hidden)

    matrix("model.embed_tokens", vocabulary, hidden, hidden)
    for layer in range(c["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        norm(f"{path}.input_layernorm")
        attention_bias, mlp_bias = c.get("attention_bias", False), c.get("mlp_bias", False)
        matrix(f"{path}.self_attn.q_proj", heads, hidden, hidden, attention_bias)
        matrix(f"{path}.self_attn.k_proj", kv_heads, hidden, hidden, attention_bias)
        matrix(f"{path}.self_attn.v_proj", kv_heads, hidden, hidden, attention_bias)
        matrix(f"{path}.self_attn.o_proj", hidden, heads, heads, attention_bias)
        norm(f"{path}.post_attention_layernorm")
        matrix(f"{path}.mlp.gate_proj", mlp, hidden, hidden, mlp_bias)
        matrix(f"{path}.mlp.up_proj", mlp, hidden, hidden, mlp_bias)
        matrix(f"{path}.mlp.down_proj", hidden, mlp, mlp, mlp_bias)
        if "inv_freq" in tiny.extra:
            made[f"{path}.self_attn.rotary_emb.inv_freq"] = np.ones(head_dim // 2)
    norm("model.norm")
    if not c.get("tie_word_embeddings", False):
        matrix("lm_head", vocabulary, hidden, hidden)
    elif "head" in tiny.extra:
        made["lm_head.weight"] = made["model.embed_tokens.weight"]
    return {path: array.astype(DTYPES[tiny.dtype]) for path, array in made.items()}


def write_hf_directory(name: str, path: Path) -> None:
    """Writes a model's config.json and safetensors into the new directory `path`."""
    tiny = CONFIGS[name]
    path.mkdir()
    config = {**tiny.config, "dtype": tiny.dtype}
    (path / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    made = tensors(name)
    if tiny.shards == 1:
        save_file(made, path / "model.safetensors", {"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(tiny.shards):
        file = f"model-{shard + 1:05}-of-{tiny.shards:05}.safetensors"
        # Taking turns puts the parts of a layer into different files.
        names = list(made)[shard :: tiny.shards]
        save_file({n: made[n] for n in names}, path / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {
        "metadata": {"total_size": sum(array.nbytes for array in made.values())},
        "weight_map": weight_map,
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _random(seed: str) -> np.random.RandomState:
    # Not Generator: its stream may change between NumPy versions.
    return np.random.RandomState(zlib.crc32(seed.encode()))
