"""Rotary position embeddings in every variant that transformers' Llama accepts.

A variant is only a choice of frequencies and of one factor on cosine and sine; both are computed here in
NumPy, once per request, and rotate queries and keys in the model.

Two variants, `dynamic` and `longrope`, depend on the length of the text. A request fixes them by the length
that it plans for, prompt and answer together, as vLLM does. transformers changes them as the text grows and
leaves the cached keys as they were, so that queries and keys no longer agree.

Letters: `B` batch, `T` positions, `H` head dim.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LARGEST = 2**31 - 1
"""The largest size or position: they are int32 on the device."""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Hugging Face's `rope_scaling` (transformers 4) or `rope_parameters` (5), under the same names."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048
    original_max_position_embeddings: int = 2048
    factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    partial_rotary_factor: float | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Reads the rotary settings of a parsed config.json.

        Raises:
          ValueError: an unknown type or parameter, or a parameter of the wrong kind.
        """
        given = [config.get(name) for name in ("rope_scaling", "rope_parameters")]
        scaling: Any = next((value for value in given if value is not None and value != {}), {})
        if not isinstance(scaling, Mapping):
            raise ValueError(
                f'expected an object such as {{"rope_type": "yarn", "factor": 4.0}}, found {scaling!r}'
            )
        positions = config.get("max_position_embeddings", 2048)
        values = {k: v for k, v in scaling.items() if k not in ("type", "rope_type") and v is not None}
        values["rope_type"] = scaling.get("rope_type", scaling.get("type", "default"))
        if config.get("rope_theta") is not None:
            values.setdefault("rope_theta", config["rope_theta"])
        if config.get("partial_rotary_factor") is not None:
            values.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
        # Phi-3 style configs keep it beside rope_scaling, and there it wins.
        if config.get("original_max_position_embeddings") is not None:
            values["original_max_position_embeddings"] = config["original_max_position_embeddings"]
        values.setdefault("original_max_position_embeddings", positions)
        values["max_position_embeddings"] = positions

        known = {field.name for field in dataclasses.fields(cls)} - {"max_position_embeddings"}
        if unknown := sorted(set(scaling) - known - {"type"}, key=str):
            raise ValueError(f"unknown parameter {unknown[0]!r}; known: {', '.join(sorted(known))}")
        for name in ("short_factor", "long_factor"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        return cls(**values)

    def check(self, head_dim: int) -> None:
        """Raises ValueError for a parameter that is missing, of the wrong kind or out of range."""
        if not isinstance(self.rope_type, str) or self.rope_type not in VARIANTS:
            raise ValueError(f"rope_type {self.rope_type!r} is not known; known: {', '.join(VARIANTS)}")
        self._check_kinds()
        for name in VARIANTS[self.rope_type].needs:
            if getattr(self, name) is None:
                raise ValueError(f"rope_type {self.rope_type!r} needs {name}")
        room_given = self.original_max_position_embeddings < self.max_position_embeddings
        if self.rope_type == "yarn" and self.factor is None and not room_given:
            raise ValueError("rope_type 'yarn' needs factor")
        if self.rope_type == "default" and self.factor not in (None, 1):
            raise ValueError(
                f"rope_type 'default' takes no factor, found {self.factor}; choose another rope_type: "
                + ", ".join(VARIANTS)
            )
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and not least < most:
                raise ValueError(f"{low} ({least}) must be below {high} ({most})")
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if factors is not None and len(factors) != head_dim // 2:
                raise ValueError(
                    f"{name} must have head_dim / 2 = {head_dim // 2} numbers, found {len(factors)}"
                )
        if self.partial_rotary_factor not in (None, 1.0) and self.rope_type not in (
            "default",
            "proportional",
        ):
            raise ValueError(
                f"partial_rotary_factor {self.partial_rotary_factor} is not supported by rope_type {self.rope_type!r}"
            )
        self._check_frequencies(head_dim)

    def _check_kinds(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if value is None or name == "rope_type":
                continue
            if name == "truncate":
                if not isinstance(value, bool):
                    raise ValueError(f"{name} must be true or false, found {value!r}")
            elif name in ("short_factor", "long_factor"):
                if not isinstance(value, tuple) or not all(is_number(v) and v > 0 for v in value):
                    raise ValueError(f"{name} must be a list of positive numbers, found {value!r}")
            elif name.endswith("max_position_embeddings"):
                if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= LARGEST:
                    raise ValueError(f"{name} must be an integer from 1 to {LARGEST}, found {value!r}")
            elif not is_number(value):
                raise ValueError(f"{name} must be a number, found {value!r}")
            elif name in ("rope_theta", "factor", "attention_factor") and value <= 0:
                raise ValueError(f"{name} must be positive, found {value!r}")
            elif name == "partial_rotary_factor" and not 0 < value <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, found {value!r}")

    def _check_frequencies(self, head_dim: int) -> None:
        """What no rule above foresees would be NaN in every logit."""
        for length in (1, self.max_position_embeddings, self.max_positions()):
            try:
                with np.errstate(over="raise", divide="raise", invalid="raise"):
                    inverse, factor = self.frequencies(head_dim, length)
                usable = np.all(np.isfinite(inverse)) and np.all(inverse >= 0) and is_number(factor)
            except (ArithmeticError, ValueError):  # math.log of zero or less
                usable = False
            if not usable or factor <= 0:
                given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
                raise ValueError(
                    "these parameters together give no finite positive frequencies: "
                    + ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)
                )

    def max_positions(self) -> int:
        """The positions that the scaling makes room for: factor times the original ones."""
        return int(self.original_max_position_embeddings * (self.factor or 1.0))

    def frequencies(self, head_dim: int, length: int) -> tuple[np.ndarray, float]:
        """The inverse frequencies [H/2] in float32, and the factor on cosine and sine.

        Args:
          head_dim: H.
          length: positions of the whole text, which `dynamic` and `longrope` depend on.
        """
        inverse, factor = VARIANTS[self.rope_type].frequencies(self, head_dim, length)
        return inverse.astype(np.float32), float(factor)


def rotate(
    x: jax.Array, positions: jax.Array, inverse_frequencies: jax.Array, factor: jax.Array
) -> jax.Array:
    """Rotates x by its positions, in the half-split layout of Hugging Face's Llama.

    Args:
      x: [B, T, ..., H].
      positions: [B, T] int32.
      inverse_frequencies: [B, H/2] float32.
      factor: [B] float32.

    Returns:
      An array like x; the angles, sines and products are in float32.
    """
    angles = positions[:, :, None].astype(jnp.float32) * inverse_frequencies[:, None, :]
    shape = angles.shape[:2] + (1,) * (x.ndim - 3) + angles.shape[2:]
    scale = factor[:, None, None]
    cos, sin = (jnp.reshape(f(angles) * scale, shape) for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def is_number(value: Any) -> bool:
    """A number that float32 holds; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 3e38


def _powers(theta: float, dim: int) -> np.ndarray:
    """theta ** (2i / dim) for i < dim/2; in float32 as in transformers, whose rounding the parity tests meet."""
    return np.float32(theta) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))


def _default(rope: RopeConfig, dim: int, length: int) -> tuple[np.ndarray, float]:
    return 1.0 / _powers(rope.rope_theta, dim), 1.0


def _linear(rope: RopeConfig, dim: int, length: int) -> tuple[np.ndarray, float]:
    """Position interpolation, arXiv 2306.15595."""
    assert rope.factor is not None
    return 1.0 / _powers(rope.rope_theta, dim) / rope.factor, 1.0


def _proportional(rope: RopeConfig, dim: int, length: int) -> tuple[np.ndarray, float]:
    """The first share of the pairs rotates, at the frequencies of the whole head dim; the others stand still."""
    share = 1.0 if rope.partial_rotary_factor is None else rope.partial_rotary_factor
    inverse = 1.0 / _powers(rope.rope_theta, dim)
    inverse[int(share * dim // 2) :] = 0.0
    return inverse / (rope.factor or 1.0), 1.0


def _dynamic(rope: RopeConfig, dim: int, length: int) -> tuple[np.ndarray, float]:
    """NTK-aware scaling that grows with the text, as in transformers."""
    assert rope.factor is not None
    longest = rope.max_position_embeddings
    stretch = rope.factor * max(length, longest) / longest - (rope.factor - 1)
    return 1.0 / _powers(rope.rope_theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _yarn(rope: RopeConfig, dim: int, length: int) -> tuple[np.ndarray, float]:
    """YaRN, arXiv 2309.00071, section 3: high frequencies stay, low ones are interpolated, with a ramp between."""
    factor = rope.factor or rope.max_position_embeddings / rope.original_max_position_embeddings

    def mscale(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = rope.attention_factor
    if attention_factor is None:
        if rope.mscale and rope.mscale_all_dim:
            attention_factor = mscale(rope.mscale) / mscale(rope.mscale_all_dim)
        else:
            attention_factor = mscale()

    def pair_that_turns(rotations: float) -> float:
        """The (fractional) pair that makes this many rotations over the original context."""
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.rope_theta))

    low, high = pair_that_turns(rope.beta_fast or 32), pair_that_turns(rope.beta_slow or 1)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    interpolated = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    powers = _powers(rope.rope_theta, dim)
    return interpolated / (factor * powers) + (1 - interpolated) / powers, attention_factor


def _longrope(rope: RopeConfig, dim: int, length: int) -> tuple[np.ndarray, float]:
    """LongRoPE, arXiv 2402.13753: one searched factor per pair, another set for long texts."""
    original = rope.original_max_position_embeddings
    factor = rope.factor or rope.max_position_embeddings / original
    attention_factor = rope.attention_factor
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = np.asarray(rope.long_factor if length > original else rope.short_factor, np.float32)
    return 1.0 / (factors * _powers(rope.rope_theta, dim)), attention_factor


def _llama3(rope: RopeConfig, dim: int, length: int) -> tuple[np.ndarray, float]:
    """Llama 3.1: long wavelengths are interpolated, short ones stay, with a ramp between."""
    assert rope.factor is not None
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    inverse = 1.0 / _powers(rope.rope_theta, dim)
    turns = rope.original_max_position_embeddings * inverse / np.float32(2 * math.pi)
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(ramp, 0, 1)
    return (1 - kept) * inverse / rope.factor + kept * inverse, 1.0


@dataclasses.dataclass(frozen=True)
class _Variant:
    frequencies: Callable[[RopeConfig, int, int], tuple[np.ndarray, float]]
    needs: tuple[str, ...] = ()


VARIANTS = {
    "default": _Variant(_default),
    "linear": _Variant(_linear, ("factor",)),
    "dynamic": _Variant(_dynamic, ("factor",)),
    "yarn": _Variant(_yarn),
    "longrope": _Variant(_longrope, ("short_factor", "long_factor")),
    "llama3": _Variant(_llama3, ("factor", "low_freq_factor", "high_freq_factor")),
    "proportional": _Variant(_proportional),
}
"""The one registry of rotary variants, by Hugging Face's `rope_type`."""
