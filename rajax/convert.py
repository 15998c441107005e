"""Hugging Face Llama directories to RAJAX checkpoints. `python -m rajax.convert HF_DIR OUT_DIR`.

Tensors go through one at a time: the model is never whole in memory. No torch.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from rajax.checkpoint import CheckpointError, check_free, parameter_shapes, read_config, read_json, save
from rajax.models import LlamaConfig

TENSORS: tuple[tuple[str, str, bool], ...] = (
    # Hugging Face                                    RAJAX                                         transposed
    (r"model\.embed_tokens\.weight", r"embed_tokens.embedding", False),
    (r"model\.layers\.(\d+)\.(\w+_layernorm)\.weight", r"layers.\1.\2.scale", False),
    (r"model\.layers\.(\d+)\.self_attn\.([qkvo]_proj)\.weight", r"layers.\1.self_attn.\2.kernel", True),
    (r"model\.layers\.(\d+)\.self_attn\.([qkvo]_proj)\.bias", r"layers.\1.self_attn.\2.bias", False),
    (r"model\.layers\.(\d+)\.mlp\.((?:gate|up|down)_proj)\.weight", r"layers.\1.mlp.\2.kernel", True),
    (r"model\.layers\.(\d+)\.mlp\.((?:gate|up|down)_proj)\.bias", r"layers.\1.mlp.\2.bias", False),
    (r"model\.norm\.weight", r"norm.scale", False),
    (r"lm_head\.weight", r"lm_head.kernel", True),
)
"""The one table of parameters: a pattern of Hugging Face's name, RAJAX's name, whether the axes swap."""

IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Buffers that old checkpoints carry; they follow from the config."""

FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""What a checkpoint keeps of a Hugging Face directory, unchanged."""

PICKLED = (".bin", ".pt", ".pth", ".ckpt")
"""Endings of weights that are Python code as well; they are never opened."""

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


@dataclasses.dataclass(frozen=True, eq=False)
class SafeTensor:
    """A tensor in a safetensors file, read on demand; see `rajax.checkpoint.LazyTensor`."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    transposed: bool

    def read(self) -> np.ndarray:
        with safe_open(self.file, "np") as shard:
            array = shard.get_tensor(self.name)
        return np.ascontiguousarray(array.T) if self.transposed else array


def convert(
    hf_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    on_tensor: Callable[[str, int, int], None] | None = None,
) -> LlamaConfig:
    """Writes the checkpoint of a Hugging Face Llama directory.

    Args:
      hf_dir: has config.json and model.safetensors, or model.safetensors.index.json with its shards.
      out_dir: does not exist yet, or is empty.
      on_tensor: called with (name, tensors written, tensors in all).

    Returns:
      The model's config.

    Raises:
      CheckpointError: a file or tensor is missing, extra, damaged or of the wrong shape or dtype.
      ConfigError: not a Llama, or a setting that is not supported.
      FileExistsError: `out_dir` exists and is not empty.
    """
    hf_dir, out_dir = Path(hf_dir), Path(out_dir)
    if not hf_dir.is_dir():
        raise CheckpointError(
            f"{hf_dir} is not a directory; for a model on the Hugging Face hub download it first: "
            f"hf download {hf_dir} --local-dir DIR"
        )
    config = read_config(hf_dir)
    check_free(out_dir)
    tensors = find_tensors(hf_dir, config)
    files = {name: _read_file(hf_dir / name) for name in FILES if (hf_dir / name).exists()}
    done = 0

    def report(name: str) -> None:
        nonlocal done
        done += 1
        if on_tensor is not None:
            on_tensor(name, done, len(tensors))

    save(out_dir, tensors, files, report)
    return config


def find_tensors(hf_dir: Path, config: LlamaConfig) -> dict[str, SafeTensor]:
    """Every parameter of the model, by RAJAX's name, checked against the config but not read yet."""
    expected = parameter_shapes(config)
    found: dict[str, SafeTensor] = {}
    head: SafeTensor | None = None
    for shard in _shards(hf_dir):
        for tensor in _open_shard(shard):
            name = rajax_name(tensor.name)
            if name is None:
                raise CheckpointError(f"{shard}: extra tensor {tensor.name}, which no Llama has")
            path, transposed = name
            if path == "lm_head.kernel" and config.tie_word_embeddings:
                head = tensor
                continue
            if path not in expected:
                raise CheckpointError(
                    f"{shard}: extra tensor {tensor.name}, which config.json does not ask for"
                )
            if path in found:
                raise CheckpointError(f"{shard}: {tensor.name} is also in {found[path].file}")
            shape = tensor.shape[::-1] if transposed else tensor.shape
            if shape != expected[path]:
                wanted = expected[path][::-1] if transposed else expected[path]
                raise CheckpointError(
                    f"{shard}: {tensor.name} has shape {list(tensor.shape)}, config.json asks for {list(wanted)}"
                )
            found[path] = dataclasses.replace(tensor, shape=shape, transposed=transposed)
    if missing := sorted(set(expected) - set(found)):
        raise CheckpointError(f"{hf_dir}: no tensor for {missing[0]} ({len(missing)} missing in all)")
    if head is not None:
        _check_tied(head, found["embed_tokens.embedding"])
    return {path: found[path] for path in expected}


def rajax_name(hf_name: str) -> tuple[str, bool] | None:
    """RAJAX's name of a tensor and whether its axes swap; None for what no Llama has."""
    for pattern, path, transposed in TENSORS:
        if match := re.fullmatch(pattern, hf_name):
            return match.expand(path), transposed
    return None


def _read_file(path: Path) -> bytes:
    """What a checkpoint keeps unchanged; damage shows now rather than when the checkpoint is used."""
    try:
        content = path.read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not readable text: {error}") from error
    if path.suffix == ".json":
        read_json(path)
    return content


def _shards(hf_dir: Path) -> list[Path]:
    """The files with the weights; as in transformers, the single one comes first where there is also an index."""
    index, single = hf_dir / "model.safetensors.index.json", hf_dir / "model.safetensors"
    if single.exists():
        return [single]
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise CheckpointError(f"{index} has no weight_map from tensor names to files")
        names = sorted(set(weight_map.values()))
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise CheckpointError(f"{index} may name only *.safetensors files beside it, found {name!r}")
            if not os.path.isfile(hf_dir / name):
                raise CheckpointError(f"{hf_dir / name} is missing; {index.name} names it")
        return [hf_dir / name for name in names]
    if pickled := sorted(p.name for p in hf_dir.iterdir() if p.suffix in PICKLED):
        raise CheckpointError(
            f"{hf_dir} has only pickled weights ({pickled[0]}); save the model as safetensors first"
        )
    raise CheckpointError(f"{hf_dir} has neither model.safetensors nor model.safetensors.index.json")


def _open_shard(path: Path) -> list[SafeTensor]:
    tensors = []
    try:
        with safe_open(path, "np") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a dict
                if IGNORED.fullmatch(name):
                    continue
                piece: Any = shard.get_slice(name)
                dtype = DTYPES.get(piece.get_dtype())
                if dtype is None:
                    raise CheckpointError(
                        f"{path}: {name} has dtype {piece.get_dtype()}; supported: {', '.join(DTYPES)}"
                    )
                tensors.append(SafeTensor(path, name, tuple(piece.get_shape()), dtype, transposed=False))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or truncated: {error}") from error
    return tensors


def _check_tied(head: SafeTensor, embedding: SafeTensor) -> None:
    """A tied model may store its output embedding once more; another one would be lost."""
    if not np.array_equal(embedding.read(), head.read()):
        raise CheckpointError(
            f"{head.file}: tie_word_embeddings is true, but {head.name} differs from {embedding.name}"
        )


if __name__ == "__main__":
    import sys

    from rajax.cli import main

    main(["convert", *sys.argv[1:]])
