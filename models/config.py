"""What a Llama is, as one frozen dataclass, read from Hugging Face's config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rajax.models.rope import LARGEST, RopeConfig, is_number

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
"""Hugging Face's names of the MLP activations that `models/llama.py` has."""

MOST_LAYERS = 1024
"""Building a model takes time per layer, which a damaged config.json could ask for without end."""


class ConfigError(ValueError):
    """A model setting that is missing, contradictory or not supported; the message names it."""


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The static part of a Llama. Names and meanings are those of Hugging Face's LlamaConfig.

    Attributes:
      eos_token_ids: the tokens that end a text, from generation_config.json where there is one.
      rope: the rotary embedding and its scaling.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: RopeConfig
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()

    @property
    def groups(self) -> int:
        """Query heads per key/value head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def max_positions(self) -> int:
        """The number of positions that the model can tell apart, scaling of the rotary embedding included."""
        return max(self.max_position_embeddings, self.rope.max_positions())

    def __post_init__(self):
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            check_size(name, getattr(self, name), MOST_LAYERS if name == "num_hidden_layers" else LARGEST)
        if not is_number(self.rms_norm_eps) or not 0 < self.rms_norm_eps <= 1:
            raise ConfigError(
                f"rms_norm_eps must be a number above 0 and at most 1, found {self.rms_norm_eps!r}"
            )
        for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, found {getattr(self, name)!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embeddings, found {self.head_dim}")
        if self.hidden_act not in ACTIVATIONS:
            raise ConfigError(
                f"hidden_act {self.hidden_act!r} is not supported; known: {', '.join(ACTIVATIONS)}"
            )
        for token in self.eos_token_ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                raise ConfigError(
                    "eos_token_id (that of generation_config.json, where it has one) must lie in the "
                    f"vocabulary, from 0 to {self.vocab_size - 1}; found {token!r}"
                )
        try:
            self.rope.check(self.head_dim)
        except ValueError as error:
            raise ConfigError(f"rope_scaling: {error}") from error

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> LlamaConfig:
        """Reads the contents of config.json, in the form of transformers 4 or 5.

        Args:
          config: the parsed config.json.
          generation_config: the parsed generation_config.json; its stop tokens win.

        Raises:
          ConfigError: not a Llama, or a setting that is missing or not supported.
        """
        model_type = config.get("model_type")
        if model_type != "llama":
            raise ConfigError(f'model_type must be "llama", found {model_type!r}')
        for name in ("quantization_config", "compression_config"):
            if config.get(name):
                raise ConfigError(
                    f"{name}: quantized weights are not supported; convert from f32, f16 or bf16"
                )

        def required(name: str) -> Any:
            if config.get(name) is None:
                raise ConfigError(f"{name} is missing")
            return config[name]

        heads = required("num_attention_heads")
        hidden = required("hidden_size")
        positions = config.get("max_position_embeddings", 2048)
        for name, value in (
            ("num_attention_heads", heads),
            ("hidden_size", hidden),
            ("max_position_embeddings", positions),
        ):
            check_size(name, value)
        head_dim = config.get("head_dim")
        if head_dim is None:
            if hidden % heads:
                raise ConfigError(
                    f"hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads}) "
                    "where head_dim is not given"
                )
            head_dim = hidden // heads
        try:
            rope = RopeConfig.from_hf(config)
        except ValueError as error:
            raise ConfigError(f"rope_scaling: {error}") from error
        eos = (generation_config or {}).get("eos_token_id", config.get("eos_token_id"))
        kv_heads = config.get("num_key_value_heads")
        return cls(
            vocab_size=required("vocab_size"),
            hidden_size=hidden,
            intermediate_size=required("intermediate_size"),
            num_hidden_layers=required("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            max_position_embeddings=positions,
            rope=rope,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            hidden_act=config.get("hidden_act", "silu"),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            attention_bias=config.get("attention_bias", False),
            mlp_bias=config.get("mlp_bias", False),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,),
        )

    def with_rope_scaling(self, rope_scaling: Mapping[str, Any]) -> LlamaConfig:
        """This config with another `rope_scaling`, in Hugging Face's form.

        For YaRN over four times a model's context: {"rope_type": "yarn", "factor": 4.0}. Without
        "original_max_position_embeddings" the config's max_position_embeddings are the original ones, and
        without "rope_theta" the model's stays.

        Raises:
          ConfigError: a type or parameter that is not known, or one that is missing.
        """
        try:
            if isinstance(rope_scaling, Mapping):
                rope_scaling = {"rope_theta": self.rope.rope_theta, **rope_scaling}
            rope = RopeConfig.from_hf(
                {"rope_scaling": rope_scaling, "max_position_embeddings": self.max_position_embeddings}
            )
        except ValueError as error:
            raise ConfigError(f"rope_scaling: {error}") from error
        return dataclasses.replace(self, rope=rope)


def check_size(name: str, value: Any, largest: int = LARGEST) -> None:
    """Raises ConfigError unless a setting is an integer from 1 to `largest`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a positive integer, found {value!r}")
    if value > largest:
        raise ConfigError(f"{name} must be at most {largest}, found {value}")
