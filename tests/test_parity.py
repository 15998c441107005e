"""RAJAX computes what transformers computes.

The logits of transformers are stored in tests/data, which `make_expected.py` writes. The tests marked
`parity` compare with transformers as it runs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny

import rajax
from rajax.convert import convert

DATA = Path(__file__).parent / "data"
TINY, SMOLLM2 = 1e-4, 1e-3
"""Absolute tolerances of logits whose standard deviation is two to four."""

DECODED = (
    "separate_head",
    "tied_head",
    "mqa",
    "wide_heads",
    "all_biases",
    "yarn_4",
    "dynamic_long_4",
    "longrope_long_5",
)
"""Models that also go through decode token by token: one for each thing that differs there."""

GENERATED = ("separate_head", "tied_head", "mqa", "attention_bias", "llama3_4", "yarn_5")

SAVED = (
    ("separate_head", "float32", "1GB"),
    ("separate_head", "bfloat16", "40KB"),
    ("tied_head", "float32", "40KB"),
    ("tied_head", "float16", "1GB"),
    ("all_biases", "float32", "1GB"),
    ("yarn_betas_4", "float32", "1GB"),
)
"""Models that transformers saves: name, dtype, shard size. The models are of some 150 KB."""

LONG = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 16.0, "original_max_position_embeddings": 8192},
    "longrope": {
        "original_max_position_embeddings": 8192,
        "short_factor": np.linspace(1, 2, 64).tolist(),
        "long_factor": np.linspace(1, 30, 64).tolist(),
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "proportional": {"partial_rotary_factor": 0.3},
}
"""Every rotary variant with the parameters of a real model of 128,000 positions."""


@pytest.fixture(autouse=True)
def _full_precision() -> Iterator[None]:
    """Accelerators round float32 matrix products unless told not to."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="session")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Hugging Face directory of a tiny model."""

    @functools.cache
    def write(name: str) -> Path:
        path = tmp_path_factory.mktemp("hf") / name
        tiny.write_hf_directory(name, path)
        return path

    return write


@pytest.fixture(scope="session")
def model(hf_dir: Callable[[str], Path]) -> Callable[[str], rajax.Llama]:
    """A tiny model, converted and loaded."""

    @functools.cache
    def load(name: str) -> rajax.Llama:
        return converted(hf_dir(name))

    return load


@pytest.fixture(scope="session")
def logits(model: Callable[[str], rajax.Llama]) -> Callable[[str], np.ndarray]:
    """RAJAX's logits [T, V] of a tiny model over its text."""

    @functools.cache
    def compute(name: str) -> np.ndarray:
        return rajax.logits(model(name), tiny.text(name))[0]

    return compute


@pytest.fixture(scope="session")
def stored() -> dict[str, np.ndarray]:
    """transformers' logits of the tiny models."""
    with np.load(DATA / "tiny_logits.npz") as file:
        return dict(file)


@pytest.fixture(scope="session")
def stored_smollm2() -> dict[str, np.ndarray]:
    """What `make_expected.sample` kept of transformers' logits of the demo model."""
    with np.load(DATA / "smollm2_logits.npz") as file:
        return dict(file)


@pytest.fixture(scope="session")
def smollm2_logits(
    smollm2: tuple[rajax.Llama, rajax.Tokenizer], stored_smollm2: dict[str, np.ndarray]
) -> np.ndarray:
    """RAJAX's logits [T, V] of the demo model."""
    with jax.default_matmul_precision("highest"):
        return rajax.logits(smollm2[0], stored_smollm2["tokens"])[0]


@pytest.fixture(scope="session")
def reference() -> Any:
    """The module that runs transformers."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import make_expected

    return make_expected


def converted(hf_dir: Path) -> rajax.Llama:
    """A Hugging Face directory through `rajax.convert` and `rajax.load`."""
    checkpoint = hf_dir.with_name(f"{hf_dir.name}-converted")
    convert(hf_dir, checkpoint)
    return rajax.load(checkpoint, dtype="float32")


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance, strict=True)


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_tiny(name: str, logits: Callable[[str], np.ndarray], stored: dict[str, np.ndarray]):
    assert_close(logits(name), stored[name], TINY)


@pytest.mark.parametrize("name", DECODED)
def test_tiny_decoded(name: str, model: Callable[[str], rajax.Llama], stored: dict[str, np.ndarray]):
    # From the second token on, so that almost all rows come from decode steps.
    assert_close(rajax.logits(model(name), tiny.text(name), decode_from=1)[0], stored[name], TINY)


def test_stored_logits_show_errors(stored: dict[str, np.ndarray]):
    """Flat or constant logits would agree with much that is wrong."""
    assert set(stored) == set(tiny.CONFIGS)
    for name, expected in stored.items():
        assert expected.dtype == np.float32, name
        assert expected.shape == (tiny.CONFIGS[name].length, tiny.CONFIGS[name].config["vocab_size"]), name
        assert 1.5 < expected.std() < 4, name
        assert expected.std(0).min() > 0.5, name


def test_smollm2(smollm2_logits: np.ndarray, stored_smollm2: dict[str, np.ndarray]):
    s, actual = stored_smollm2, smollm2_logits
    assert_close(actual[np.ix_(s["positions"], s["columns"])], s["logits"], SMOLLM2)
    top = actual.max(-1)
    assert_close(top, s["top"], SMOLLM2)
    assert_close(np.take_along_axis(actual, s["argmax"][:, None], -1)[:, 0], s["top"], SMOLLM2)
    sums = np.exp(actual.astype(np.float64) - top[:, None]).sum(-1)
    assert_close((top + np.log(sums)).astype(np.float32), s["logsumexp"], SMOLLM2)
    # Where the two best logits are further apart than both errors, the best token is the same.
    clear = np.diff(np.partition(actual, -2)[:, -2:])[:, 0] > 2 * SMOLLM2
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(actual.argmax(-1)[clear], s["argmax"][clear])


@pytest.mark.parity
@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_tiny_live(
    name: str, reference: Any, hf_dir: Callable[[str], Path], logits: Callable[[str], np.ndarray]
):
    assert_close(logits(name), reference.logits(reference.load(hf_dir(name)), tiny.text(name)), TINY)


@pytest.mark.parity
def test_smollm2_live(
    reference: Any, smollm2_logits: np.ndarray, stored_smollm2: dict[str, np.ndarray], tmp_path: Path
):
    theirs = reference.load(reference.write_smollm2_hf_directory(tmp_path))
    assert_close(smollm2_logits, reference.logits(theirs, stored_smollm2["tokens"]), SMOLLM2)


@pytest.mark.parity
@pytest.mark.parametrize(("name", "dtype", "shard_size"), SAVED)
def test_saved_by_transformers(
    name: str, dtype: str, shard_size: str, reference: Any, hf_dir: Callable[[str], Path], tmp_path: Path
):
    saved = tmp_path / "saved"
    original = reference.load(hf_dir(name)).to(getattr(reference.torch, dtype))
    original.save_pretrained(saved, max_shard_size=shard_size)
    assert len(list(saved.glob("*.safetensors"))) == 1 or shard_size == "40KB"
    # Loaded again, since only what was saved counts: the weights are rounded to the dtype.
    expected = reference.logits(reference.load(saved), tiny.text(name))
    assert_close(rajax.logits(converted(saved), tiny.text(name))[0], expected, TINY)


@pytest.mark.parity
@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_config_saved_by_transformers(
    name: str, reference: Any, hf_dir: Callable[[str], Path], tmp_path: Path
):
    """transformers writes a config.json that means the same as the one it read."""
    reference.transformers.LlamaConfig.from_pretrained(hf_dir(name)).save_pretrained(tmp_path)
    read, saved = (
        rajax.LlamaConfig.from_hf(json.loads((path / "config.json").read_text(encoding="utf-8")))
        for path in (hf_dir(name), tmp_path)
    )
    for length in (1, 30, 60):
        for mine, theirs in zip(
            *(c.rope.frequencies(c.head_dim, length) for c in (read, saved)), strict=True
        ):
            np.testing.assert_array_equal(mine, theirs)
    for field in ("hidden_size", "head_dim", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(read, field) == getattr(saved, field), field


@pytest.mark.parity
@pytest.mark.parametrize("name", GENERATED)
def test_greedy(
    name: str, reference: Any, hf_dir: Callable[[str], Path], model: Callable[[str], rajax.Llama]
):
    prompt = tiny.text(name)[:16]
    tokens = reference.torch.from_numpy(prompt[None].astype(np.int64))
    theirs = reference.load(hf_dir(name)).generate(
        tokens,
        attention_mask=reference.torch.ones_like(tokens),
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
    )
    expected = theirs[0, len(prompt) :].tolist()
    assert len(expected) == 12
    ours = rajax.generate(model(name), prompt, max_new_tokens=12, retrieval=None, stop=())
    assert ours.tokens == [expected]


@pytest.mark.parity
@pytest.mark.parametrize("spelling", [4, 5])
@pytest.mark.parametrize("rope_type", LONG)
def test_frequencies(rope_type: str, spelling: int, reference: Any, tmp_path: Path):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    positions = 8192 if rope_type == "dynamic" else 131072
    rope = {"rope_type": rope_type, **LONG[rope_type]}
    config = {
        **tiny.BASE,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "max_position_embeddings": positions,
        "rope_theta": 500000.0,
        "rope_scaling": rope,
    }
    if spelling == 5:
        del config["rope_scaling"]
        config["rope_parameters"] = {**rope, "rope_theta": config.pop("rope_theta")}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    theirs = reference.transformers.LlamaConfig.from_pretrained(tmp_path)
    ours = rajax.LlamaConfig.from_hf(config)
    compute = ROPE_INIT_FUNCTIONS.get(rope_type, LlamaRotaryEmbedding.compute_default_rope_parameters)
    original = ours.rope.original_max_position_embeddings
    for length in (1, original - 1, original, original + 1, 4 * original):
        expected, expected_factor = compute(theirs, seq_len=length)
        actual, factor = ours.rope.frequencies(ours.head_dim, length)
        assert factor == pytest.approx(expected_factor, rel=1e-12)
        # A few units in the last place: float32 powers differ between NumPy and torch.
        np.testing.assert_allclose(actual, expected.numpy(), rtol=5e-7, atol=0, strict=True)


@pytest.mark.parity
def test_every_rope_type_is_compared(reference: Any):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert set(LONG) == {"default", *ROPE_INIT_FUNCTIONS}
