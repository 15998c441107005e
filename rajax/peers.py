"""What a user would run instead, for `rajax bench --peers`: llama.cpp and transformers on the same weights.

Both run on the CPU with as many threads as there are cores, and are fed the same tokens as RAJAX.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rajax import smollm2
from rajax.checkpoint import parameters, read_json
from rajax.convert import rajax_name
from rajax.kernels.host_call import CORES
from rajax.models import Llama


class Peer(Protocol):
    """Another library's model with a context of its own.

    Attributes:
      kv_bytes: bytes of its keys and values; llama.cpp's with the room that it has for more.
    """

    @property
    def kv_bytes(self) -> int: ...

    def prefill(self, tokens: np.ndarray) -> None:
        """Evaluates a prompt [T] int32 in one go."""
        ...

    def step(self, token: int) -> np.ndarray:
        """Appends a token; returns the logits [V] for the next."""
        ...

    def close(self) -> None:
        """Frees it."""
        ...


PeerMaker = Callable[[Llama, int, Mapping[str, Any] | None], Peer]
"""Makes a peer from the model, the tokens of prompt and answer together, and `rope_scaling`."""

PEERS = {
    "llama.cpp": (("llama_cpp",), "pip install llama-cpp-python"),
    "transformers": (("torch", "transformers"), "pip install torch 'transformers>=5'"),
}
"""By name, the packages that it needs and how they are installed."""


def peer_makers(checkpoint: Path, gguf: Path | None, say: Callable[[str], None]) -> dict[str, PeerMaker]:
    """What can be run of `PEERS`; what cannot is told.

    Args:
      checkpoint: the model's; transformers gets its config from there.
      gguf: the model's file for llama.cpp; None takes that of the demo model, if it is this one.
      say: told why a peer does not run.

    Raises:
      ValueError: `gguf` is no file.
      RuntimeError: the demo model's GGUF cannot be had.
    """
    if gguf is not None and not gguf.is_file():
        raise ValueError(f"--gguf {gguf} is not a file")
    makers: dict[str, PeerMaker] = {}
    for name, (packages, install) in PEERS.items():
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing:
            say(f"{name}: not run, {missing[0]} is not installed: {install}")
        elif name == "transformers":
            makers[name] = functools.partial(Transformers, read_json(checkpoint / "config.json"))
        elif gguf is None and not smollm2.is_demo_model(checkpoint):
            say(f"{name}: not run, it needs the model as a GGUF file: give --gguf FILE")
        else:
            makers[name] = functools.partial(LlamaCpp, gguf or smollm2.gguf_file(say))
    return makers


class LlamaCpp:
    """llama.cpp through llama-cpp-python: the GGUF's own weights, f16 keys and values, flash attention."""

    def __init__(self, file: Path, model: Llama, capacity: int, scaling: Mapping[str, Any] | None):
        import llama_cpp

        rope: dict[str, Any] = {}
        kind = (scaling or {}).get("rope_type", "default")
        if kind == "yarn":
            original = model.config.max_position_embeddings
            rope = {
                "rope_scaling_type": llama_cpp.LLAMA_ROPE_SCALING_TYPE_YARN,
                "yarn_orig_ctx": (scaling or {}).get("original_max_position_embeddings", original),
            }
        elif kind == "linear":
            rope = {"rope_scaling_type": llama_cpp.LLAMA_ROPE_SCALING_TYPE_LINEAR}
        elif kind != "default":
            raise ValueError(f"llama.cpp cannot be told {kind} RoPE; leave out --peers, or --rope-scaling")
        if rope:
            rope["rope_freq_scale"] = 1 / float((scaling or {})["factor"])

        self.llama = llama_cpp.Llama(
            str(file),
            n_ctx=capacity,
            n_threads=CORES,
            n_threads_batch=CORES,
            flash_attn=True,
            verbose=False,
            **rope,
        )
        self.logits = llama_cpp.llama_get_logits
        c = model.config
        self.vocabulary = c.vocab_size
        self.kv_bytes = 4 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * self.llama.n_ctx()

    def prefill(self, tokens: np.ndarray) -> None:
        self.llama.eval(tokens.tolist())

    def step(self, token: int) -> np.ndarray:
        self.llama.eval([token])
        pointer = ctypes.cast(self.logits(self.llama.ctx), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(pointer, (self.vocabulary,)).copy()

    def close(self) -> None:
        self.llama.close()


class Transformers:
    """transformers with PyTorch's scaled dot product attention, in float32, with RAJAX's own parameters."""

    def __init__(
        self, config: Mapping[str, Any], model: Llama, capacity: int, scaling: Mapping[str, Any] | None
    ):
        del capacity  # its cache grows with the text
        import torch
        import transformers

        torch.set_num_threads(CORES)
        c = model.config
        hf_config = transformers.LlamaConfig(**config)
        if scaling is not None:
            rope = {"rope_theta": c.rope.rope_theta, **scaling}
            rope.setdefault("original_max_position_embeddings", c.max_position_embeddings)
            hf_config.rope_parameters = rope
        hf_config._attn_implementation = "sdpa"
        self.torch = torch
        self.model = transformers.LlamaForCausalLM(hf_config).to(torch.float32).eval()
        ours = parameters(model)
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                path, transposed = rajax_name(name) or ("", False)
                if path == "lm_head.kernel" and c.tie_word_embeddings:
                    continue
                array = np.asarray(ours[path], np.float32)
                tensor.copy_(torch.from_numpy(np.array(array.T if transposed else array)))
        self.cache = transformers.DynamicCache(config=hf_config)

    def _run(self, tokens: list[int]) -> Any:
        with self.torch.inference_mode():
            ids = self.torch.tensor([tokens])
            # By position: the cache's name differs between versions.
            out = self.model(ids, None, None, self.cache, use_cache=True, logits_to_keep=1)
            return out.logits[0, -1]

    def prefill(self, tokens: np.ndarray) -> None:
        self._run(tokens.tolist())

    def step(self, token: int) -> np.ndarray:
        return self._run([token]).numpy()

    @property
    def kv_bytes(self) -> int:
        return sum(a.nbytes for layer in self.cache.layers for a in (layer.keys, layer.values))

    def close(self) -> None:
        del self.model, self.cache
