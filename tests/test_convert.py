"""The converter and the loader, as unlucky and as hostile users meet them."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

import rajax
from rajax.convert import convert

NAN = float("nan")
HUGE = 10**400
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
REFUSED = (rajax.CheckpointError, rajax.ConfigError, FileExistsError)


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    for name in ("separate_head", "sharded", "tied_head", "tied_head_stored_twice"):
        tiny.write_hf_directory(name, folder / name)
    convert(folder / "separate_head", folder / "checkpoint")
    return folder


@pytest.fixture
def hf(sources, tmp_path) -> Path:
    """A Hugging Face directory to spoil."""
    return shutil.copytree(sources / "separate_head", tmp_path / "hf")


@pytest.fixture
def sharded(sources, tmp_path) -> Path:
    """The same in three files."""
    return shutil.copytree(sources / "sharded", tmp_path / "hf")


@pytest.fixture
def checkpoint(sources, tmp_path) -> Path:
    """A checkpoint to spoil."""
    return shutil.copytree(sources / "checkpoint", tmp_path / "checkpoint")


def refused(hf: Path, *words: object, out: Path | None = None) -> str:
    """Conversion fails with a message that has all the words, and leaves nothing behind."""
    before = sorted(hf.parent.rglob("*"))
    with pytest.raises(REFUSED) as caught:
        convert(hf, hf.parent / "out" if out is None else out)
    message = str(caught.value)
    for word in words:
        assert str(word) in message
    assert sorted(hf.parent.rglob("*")) == before
    return message


def edit(file: Path, **settings: Any) -> None:
    """Changes settings of a JSON file; `...` takes one out."""
    config = json.loads(file.read_text()) if file.exists() else {}
    config = {k: v for k, v in {**config, **settings}.items() if v is not ...}
    file.write_text(json.dumps(config))


def edit_tensors(file: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


# --- config.json


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_must_be_positive_integers(hf, name):
    for value in (-1, 0, "48", True, 4.0, 1.5, [4], {"a": 1}):
        edit(hf / "config.json", **{name: value})
        refused(hf, "config.json", name, "must be a positive integer", repr(value))


@pytest.mark.parametrize(
    ("name", "value"), [("num_hidden_layers", 10**9), ("max_position_embeddings", 10**12)]
)
def test_absurd_sizes_are_refused_before_anything_is_made_of_them(hf, name, value):
    edit(hf / "config.json", **{name: value})
    refused(hf, "config.json", name, "must be at most", value)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_sizes_that_have_no_default_must_be_there(hf, name):
    for value in (None, ...):
        edit(hf / "config.json", **{name: value})
        refused(hf, "config.json", f"{name} is missing")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_type": "mistral"}, ["model_type", "llama", "'mistral'"]),
        ({"model_type": ...}, ["model_type", "llama", "None"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config", "f32, f16 or bf16"]),
        ({"num_attention_heads": 3, "head_dim": 12}, ["num_attention_heads (3)", "num_key_value_heads (2)"]),
        ({"num_attention_heads": 5}, ["hidden_size (48)", "multiple", "num_attention_heads (5)"]),
        ({"head_dim": 7}, ["head_dim", "even", "7"]),
        ({"hidden_act": "mish"}, ["hidden_act", "'mish'", "silu"]),
        ({"hidden_act": ["silu"]}, ["hidden_act", "['silu']"]),
        *(
            ({"rms_norm_eps": value}, ["rms_norm_eps", "above 0 and at most 1", repr(value)])
            for value in (NAN, float("inf"), -1e-5, 0, 1e5, "1e-5", True, None, [1])
        ),
        *(
            ({name: value}, [name, "true or false", repr(value)])
            for name in ("tie_word_embeddings", "attention_bias", "mlp_bias")
            for value in ("false", 0, None)
        ),
        *(
            ({"eos_token_id": value}, ["eos_token_id", "from 0 to 95", repr(found)])
            for value, found in ((96, 96), (-1, -1), (True, True), ("2", "2"), ([1, 96], 96), ([[1]], [1]))
        ),
        ({"rope_theta": 0}, ["rope_theta", "positive", "0"]),
        ({"rope_theta": NAN}, ["rope_theta", "number", "nan"]),
        ({"rope_theta": HUGE}, ["rope_theta", "number"]),
        ({"rope_theta": True}, ["rope_theta", "number", "True"]),
    ],
)
def test_bad_settings_are_named(hf, settings, words):
    edit(hf / "config.json", **settings)
    refused(hf, "config.json", *words)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        *((value, ["an object", repr(value)]) for value in ("yarn", ["yarn"], 4, True, 0, [], "")),
        ({"rope_type": "su"}, ["rope_type 'su'", "known: default, linear"]),
        ({"rope_type": ["yarn"]}, ["rope_type ['yarn']"]),
        ({"factor": 4.0}, ["'default' takes no factor", "4.0", "yarn"]),
        ({"rope_type": "linear"}, ["'linear' needs factor"]),
        ({"type": "yarn"}, ["'yarn' needs factor"]),
        ({**YARN, "scale": 2}, ["unknown parameter 'scale'", "known: attention_factor"]),
        ({**YARN, "max_position_embeddings": 64}, ["unknown parameter 'max_position_embeddings'"]),
        *(({**YARN, "factor": v}, ["factor must be a number"]) for v in ("4", NAN, True, HUGE, [4])),
        *(({**YARN, "factor": v}, ["factor must be positive", v]) for v in (0, -4)),
        *(
            ({**YARN, "original_max_position_embeddings": v}, ["must be an integer from 1", repr(v)])
            for v in (0, -5, 1.5, "8", 10**30)
        ),
        ({**YARN, "truncate": "no"}, ["truncate must be true or false", "'no'"]),
        ({**YARN, "attention_factor": 0}, ["attention_factor must be positive"]),
        ({**YARN, "beta_fast": 1, "beta_slow": 32}, ["beta_slow (32)", "beta_fast (1)"]),
        ({**YARN, "beta_fast": -1}, ["no finite positive frequencies", "beta_fast -1"]),
        ({**YARN, "mscale": -50.0, "mscale_all_dim": 1.0}, ["no finite positive frequencies", "mscale -50"]),
        ({**YARN, "rope_theta": 1.0}, ["no finite positive frequencies", "rope_theta 1.0"]),
        ({**YARN, "partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5", "'yarn'"]),
        ({**LLAMA3, "low_freq_factor": None}, ["'llama3' needs low_freq_factor"]),
        ({**LLAMA3, "high_freq_factor": 1.0}, ["low_freq_factor (1.0)", "high_freq_factor (1.0)"]),
        ({**LONG, "long_factor": None}, ["'longrope' needs long_factor"]),
        ({**LONG, "short_factor": [1.0] * 5}, ["short_factor", "head_dim / 2 = 6", "found 5"]),
        *(
            ({**LONG, "long_factor": v}, ["long_factor must be a list of positive numbers"])
            for v in ("x", 3, [1.0] * 5 + ["a"], [0.0] * 6, [-1.0] * 6, [True] * 6)
        ),
        ({**LONG, "original_max_position_embeddings": 1}, ["no finite positive frequencies"]),
        ({"rope_type": "proportional", "partial_rotary_factor": 2}, ["partial_rotary_factor", "at most 1"]),
    ],
)
def test_bad_rope_scaling_is_named(hf, scaling, words):
    edit(hf / "config.json", rope_scaling=scaling)
    refused(hf, "config.json", "rope_scaling", *words)


def test_generation_config_is_checked_as_well(hf):
    edit(hf / "generation_config.json", eos_token_id=[2, 96])
    refused(hf, "generation_config.json", "eos_token_id", "96")
    (hf / "generation_config.json").write_text("[]")
    refused(hf, "generation_config.json", "JSON object", "list")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "not readable JSON"),
        (b"{", "not readable JSON"),
        (b"\xff\xfe{}", "not readable JSON"),
        (b"[" * 100_000, "not readable JSON"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not readable JSON"),
        (b"[]", "must hold a JSON object, found list"),
        (b"null", "must hold a JSON object, found NoneType"),
    ],
)
def test_a_config_that_is_no_json_object(hf, content, word):
    (hf / "config.json").write_bytes(content)
    refused(hf, hf / "config.json", word)


def test_there_must_be_a_directory_with_a_config(hf, tmp_path):
    (hf / "config.json").unlink()
    refused(hf, hf / "config.json", "is missing")
    refused(hf / WEIGHTS, "is not a directory", out=tmp_path / "out")
    with pytest.raises(rajax.CheckpointError, match="hf download someone/model --local-dir"):
        convert("someone/model", tmp_path / "out")


# --- tensors


SCALE = np.ones(48, np.float32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), ["no tensor for layers.1.mlp.up_proj"]),
        (lambda t: t.update({"model.layers.0.foo": SCALE}), ["extra tensor model.layers.0.foo"]),
        (lambda t: t.update({"model.layers.0.x_layernorm.weight": SCALE}), ["extra", "x_layernorm"]),
        (lambda t: t.update({"model.layers.7.input_layernorm.weight": SCALE}), ["extra", "layers.7"]),
        (lambda t: t.update({"model.layers.00.input_layernorm.weight": SCALE}), ["extra", "layers.00"]),
        (lambda t: t.update({"model.layers.0.mlp.up_proj.bias": SCALE}), ["extra", "up_proj.bias"]),
        (lambda t: t.update({"model.norm.weight": SCALE[:47]}), ["model.norm.weight", "[47]", "[48]"]),
        (lambda t: t.update({"model.norm.weight": SCALE[:, None]}), ["model.norm.weight", "[48, 1]"]),
        (
            lambda t: t.update({"lm_head.weight": np.ascontiguousarray(t["lm_head.weight"].T)}),
            ["lm_head.weight has shape [48, 96]", "asks for [96, 48]"],
        ),
        *(
            (
                lambda t, dtype=dtype: t.update({"model.norm.weight": SCALE.astype(dtype)}),
                ["model.norm.weight has dtype", name, "F32, F16, BF16"],
            )
            for dtype, name in ((np.int64, "I64"), (np.float64, "F64"), (bool, "BOOL"))
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(hf, change, words):
    edit_tensors(hf / WEIGHTS, change)
    refused(hf, *words)


def _header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "spoil",
    [
        *(lambda whole, size=size: whole[:size] for size in (0, 4, 8, 100, 5000, -1)),
        lambda whole: whole + b"x",
        lambda whole: np.random.RandomState(0).bytes(len(whole)),
        lambda whole: struct.pack("<Q", 1 << 62) + b"{}",
        lambda whole: _header(b"no json!"),
        lambda whole: _header(
            b'{"model.norm.weight": {"dtype": "F32", "shape": [48], "data_offsets": [0, 1000000000000]}}'
        ),
    ],
)
def test_damaged_weights_are_named(hf, spoil):
    (hf / WEIGHTS).write_bytes(spoil((hf / WEIGHTS).read_bytes()))
    refused(hf, hf / WEIGHTS, "damaged or truncated")


def test_a_damaged_or_missing_shard_is_named(sharded):
    whole = (sharded / SHARDS[1]).read_bytes()
    (sharded / SHARDS[1]).write_bytes(whole[:-1])
    refused(sharded, sharded / SHARDS[1], "damaged or truncated")
    (sharded / SHARDS[1]).unlink()
    refused(sharded, sharded / SHARDS[1], "is missing", INDEX)


def test_a_tensor_in_two_shards_is_named(sharded):
    name, twice = next(iter(load_file(sharded / SHARDS[0]).items()))
    edit_tensors(sharded / SHARDS[1], lambda t: t.update({name: twice}))
    refused(sharded, SHARDS[0], SHARDS[1], name)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_named(sharded, content):
    (sharded / INDEX).write_text(content)
    refused(sharded, INDEX)


@pytest.mark.parametrize(
    "name", ["../sharded/" + SHARDS[0], "/etc/passwd", "..", "", "a\0b", "x" * 300, "a.bin"]
)
def test_an_index_names_only_files_beside_it(sharded, name):
    edit(sharded / INDEX, weight_map={"lm_head.weight": name})
    refused(sharded, INDEX, "may name only *.safetensors files beside it", repr(name))


def test_there_must_be_weights(hf):
    (hf / WEIGHTS).unlink()
    refused(hf, "has neither model.safetensors nor model.safetensors.index.json")


class _Trap:
    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_nothing_is_unpickled(hf, tmp_path, name):
    sprung = tmp_path / "sprung"
    (hf / name).write_bytes(pickle.dumps(_Trap(sprung)))
    (hf / WEIGHTS).rename(tmp_path / WEIGHTS)
    refused(hf, "only pickled weights", name, "safetensors")
    (tmp_path / WEIGHTS).rename(hf / WEIGHTS)
    convert(hf, tmp_path / "out")
    rajax.load(tmp_path / "out")
    assert not sprung.exists()
    assert not (tmp_path / "out" / name).exists()


def test_a_tied_head_that_differs_would_be_lost(sources, tmp_path):
    hf = shutil.copytree(sources / "tied_head_stored_twice", tmp_path / "hf")
    for change in (lambda a: a + 1, lambda a: a[:5]):
        edit_tensors(
            hf / WEIGHTS, lambda t, change=change: t.update({"lm_head.weight": change(t["lm_head.weight"])})
        )
        refused(hf, "tie_word_embeddings", "lm_head.weight", "model.embed_tokens.weight")


def test_the_rotary_buffers_of_old_checkpoints_may_have_any_dtype(hf, tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(hf / WEIGHTS, lambda t: t.update({name: np.ones(6, np.float64)}))
    convert(hf, tmp_path / "out")
    assert rajax.load(tmp_path / "out").config.num_hidden_layers == 2


# --- the other files


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_damaged_text_files_are_named(hf, name):
    (hf / name).write_bytes(b"\xff\xfe")
    refused(hf, hf / name, "not readable text")
    (hf / name).unlink()
    (hf / name).mkdir()
    refused(hf, hf / name, "not readable text")


def test_text_files_stay_as_they_are_and_others_stay_behind(hf, tmp_path):
    (hf / "chat_template.jinja").write_bytes("{{ 'é' }}\r\n".encode())
    (hf / "modeling_llama.py").write_text("raise SystemExit")
    convert(hf, tmp_path / "out")
    names = {"params", "checksums.json", "config.json", "chat_template.jinja"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == names
    for name in ("chat_template.jinja", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (hf / name).read_bytes()


# --- OUT_DIR


def test_what_is_in_the_way_stays(hf, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("mine")
    refused(hf, out, "not an empty directory")
    refused(hf, out / "mine", "not an empty directory", out=out / "mine")
    refused(hf, out / "mine", "is not a directory", out=out / "mine" / "a" / "b")
    refused(hf, hf, "not an empty directory", out=hf)
    assert (out / "mine").read_text() == "mine"


@pytest.mark.parametrize(
    "out", ["new", "new/", "a/b/c", "./new", "hf/../new", "with space/ü [x] {y} *", "é" * 125]
)
def test_any_new_path_will_do(hf, tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    for name in (out, tmp_path / "b" / Path(out).name):
        convert(hf, name)
        assert rajax.load(name).config.hidden_size == 48
        assert not list(tmp_path.rglob("*.partial*"))


def test_an_empty_directory_is_filled_and_not_replaced(hf, tmp_path, monkeypatch):
    """It may be a mount point, or where the user's shell stands."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    inode = (tmp_path / "empty").stat().st_ino
    monkeypatch.chdir(tmp_path / "empty")
    for name in (".", tmp_path / "link"):
        convert(hf, name)
        assert (tmp_path / "empty").stat().st_ino == inode
        assert {p.name for p in Path().iterdir()} == {"params", "checksums.json", "config.json"}
        rajax.load(name)
        shutil.rmtree("params")
        for file in Path().iterdir():
            file.unlink()


@pytest.mark.parametrize("name", ["a\\b", "gs://bucket/model", "c:/model"])
def test_paths_that_tensorstore_would_take_for_others_are_refused(
    hf, checkpoint, tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    part = name.split("/")[0]
    refused(hf, "local directory", repr(part), out=Path(name))
    (tmp_path / part).mkdir()
    checkpoint.rename(tmp_path / part / "x")
    with pytest.raises(rajax.CheckpointError, match="local directory"):
        rajax.load(tmp_path / part / "x")


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit, OSError])
@pytest.mark.parametrize("out", ["out", "a/b/out", "empty"])
def test_an_interruption_leaves_nothing(hf, tmp_path, failure, out):
    (tmp_path / "empty").mkdir()

    def interrupt(name: str, done: int, total: int) -> None:
        assert total == 21
        if done == 7:
            raise failure("now")

    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(failure, match="now"):
        convert(hf, tmp_path / out, on_tensor=interrupt)
    assert sorted(tmp_path.rglob("*")) == before
    convert(hf, tmp_path / out)
    rajax.load(tmp_path / out)


def test_a_killed_conversion_leaves_nothing_that_loads(hf, tmp_path):
    (tmp_path / "empty").mkdir()
    code = (
        "import os, sys, rajax.convert\n"
        "kill = lambda name, done, total: done == 15 and os.kill(os.getpid(), 9)\n"
        "for out in sys.argv[2:]:\n"
        "    if os.fork() == 0:\n"
        "        rajax.convert.convert(sys.argv[1], out, on_tensor=kill)\n"
        "    assert os.wait()[1] == 9\n"
    )
    outs = [tmp_path / "out", tmp_path / "empty"]
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, hf, *outs], check=True)
    for folder in (tmp_path, *(f for f in tmp_path.rglob("*") if f.is_dir())):
        if folder != hf:
            with pytest.raises(rajax.CheckpointError):
                rajax.load(folder)
    for out in outs:
        convert(hf, out)
        rajax.load(out)
    assert not list((tmp_path / "empty").glob("*.partial*"))


# --- rajax.load


def test_a_directory_that_is_no_checkpoint_is_named(hf, checkpoint, tmp_path):
    with pytest.raises(rajax.CheckpointError, match="nowhere is not a directory"):
        rajax.load(tmp_path / "nowhere")
    with pytest.raises(rajax.CheckpointError, match=f"{hf} is a Hugging Face directory; convert it first"):
        rajax.load(hf)
    shutil.rmtree(checkpoint / "params")
    with pytest.raises(rajax.CheckpointError, match="has no params/ directory"):
        rajax.load(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(rajax.CheckpointError, match=r"config\.json is missing"):
        rajax.load(checkpoint)


def _flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (None, "is missing"),
        (lambda content: b"", "is damaged"),
        (lambda content: content[:-1], "is damaged"),
        (lambda content: content + b"x", "is damaged"),
        (lambda content: bytes(len(content)), "is damaged"),
        (_flip, "is damaged"),
    ],
)
def test_any_damage_to_the_parameters_is_found(checkpoint, spoil, word):
    files = [file for file in (checkpoint / "params").rglob("*") if file.is_file()]
    assert len(files) > 21
    for file in files:
        content = file.read_bytes()
        if not content:
            continue
        file.unlink()
        if spoil is not None:
            file.write_bytes(spoil(content))
        with pytest.raises(rajax.CheckpointError) as caught:
            rajax.load(checkpoint)
        assert f"{file} {word}" in str(caught.value)
        file.write_bytes(content)
    rajax.load(checkpoint)


def test_damage_is_an_error_also_without_checksums(checkpoint):
    """As in a checkpoint that Orbax alone has written."""
    (checkpoint / "checksums.json").unlink()
    rajax.load(checkpoint)
    chunk = checkpoint / "params" / "norm.scale" / "0"
    for content in (b"", chunk.read_bytes()[:-5], b"x" * 100):
        chunk.write_bytes(content)
        with pytest.raises(rajax.CheckpointError, match="cannot be read; convert the model again"):
            rajax.load(checkpoint)
    chunk.unlink()
    with pytest.raises(rajax.CheckpointError, match="cannot be read; convert the model again"):
        rajax.load(checkpoint)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"num_hidden_layers": 3}, r"lacks parameter layers\.2\."),
        ({"num_hidden_layers": 1}, r"has an extra parameter layers\.1\."),
        ({"vocab_size": 100}, r"embed_tokens\.embedding has shape \(96, 48\).*\(100, 48\)"),
        ({"tie_word_embeddings": True}, r"has an extra parameter lm_head\.kernel"),
        ({"attention_bias": True}, r"lacks parameter layers\.0\.self_attn\.k_proj\.bias"),
        ({"num_key_value_heads": 4}, r"k_proj\.kernel has shape \(48, 24\).*\(48, 48\)"),
    ],
)
def test_parameters_that_do_not_fit_the_config_are_named(checkpoint, settings, word):
    edit(checkpoint / "config.json", **settings)
    with pytest.raises(rajax.CheckpointError, match=word):
        rajax.load(checkpoint)


@pytest.mark.parametrize("dtype", ["nonsense", "float64", "int8", int, "bf16", [1]])
def test_other_dtypes_are_refused(checkpoint, dtype):
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16; found"):
        rajax.load(checkpoint, dtype=dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, np.dtype("float16")])
def test_parameters_are_cast(checkpoint, dtype):
    exact, cast = rajax.load(checkpoint, dtype="float32"), rajax.load(checkpoint, dtype=dtype)
    for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(cast), strict=True):
        assert b.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(a.astype(b.dtype), b)
    wanted, got = (rajax.logits(params, tiny.text("separate_head")) for params in (exact, cast))
    assert np.abs(wanted - got).max() < 0.05 * np.abs(wanted).max()


def test_on_a_cpu_the_default_dtype_is_float32_and_elsewhere_the_stored_one(tmp_path, monkeypatch):
    tiny.write_hf_directory("bfloat16", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out")
    assert {a.dtype.name for a in jax.tree.leaves(rajax.load(tmp_path / "out"))} == {"float32"}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert {a.dtype.name for a in jax.tree.leaves(rajax.load(tmp_path / "out"))} == {"bfloat16"}


@pytest.mark.parametrize(
    ("scaling", "word"),
    [
        ({"rope_type": "unknown", "factor": 4.0}, "rope_type 'unknown' is not known"),
        ({"rope_type": "linear"}, "'linear' needs factor"),
        ({"rope_type": "yarn"}, "'yarn' needs factor"),
        ({"factor": 4.0}, "'default' takes no factor"),
        ({"rope_type": "yarn", "factor": 4.0, "typo": 1}, "unknown parameter 'typo'"),
        (["yarn"], "expected an object"),
        ("yarn", "expected an object"),
        (4, "expected an object"),
    ],
)
def test_a_bad_rope_scaling_is_refused(checkpoint, scaling, word):
    with pytest.raises(rajax.ConfigError, match=f"rope_scaling: .*{word}"):
        rajax.load(checkpoint, rope_scaling=scaling)


def test_yarn_makes_room_for_four_times_the_positions(checkpoint):
    plain = rajax.load(checkpoint)
    yarn = rajax.load(checkpoint, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert plain.config.max_positions == 128
    assert yarn.config.max_positions == 512
    assert yarn.config.rope.rope_theta == plain.config.rope.rope_theta
    text = np.arange(150) % 96
    with pytest.raises(ValueError, match="past the model's 128 positions"):
        rajax.logits(plain, text)
    assert np.isfinite(rajax.logits(yarn, text)).all()
    assert np.abs(rajax.logits(plain, text[:40]) - rajax.logits(yarn, text[:40])).max() > 0.1


def test_parameters_are_a_pytree_with_a_config(checkpoint):
    params = rajax.load(checkpoint)
    halved = jax.tree.map(lambda a: a / 2, params)
    through = jax.jit(lambda p: jax.tree.map(lambda a: a * 2, p))(halved)
    assert halved.config == through.config == params.config
    assert hash(through.config) == hash(params.config)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(through), strict=True):
        np.testing.assert_array_equal(a, b)
    text = tiny.text("separate_head")
    np.testing.assert_array_equal(rajax.logits(params, text), rajax.logits(through, text))


# --- memory


MEASURE = """
import json, sys, threading, time
import numpy as np

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

def peak(work):
    jax.numpy.zeros(1).block_until_ready()
    most = base = anonymous()
    done = threading.Event()
    def watch():
        nonlocal most
        while not done.is_set():
            most = max(most, anonymous())
            time.sleep(0.002)
    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = work()
    done.set()
    watcher.join()
    return most - base

import jax
import rajax
from rajax.convert import convert

hf, out = sys.argv[2:]
print(peak((lambda: convert(hf, out)) if sys.argv[1] == "convert" else (lambda: rajax.load(out))))
"""


def _peak(what: str, *paths: Path) -> int:
    command = [sys.executable, "-c", MEASURE, what, *map(str, paths)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures memory by /proc")
def test_a_model_is_never_in_memory_twice(tmp_path):
    hidden, mlp, layers, heads = 1024, 9216, 5, 8
    hf = tmp_path / "hf"
    hf.mkdir()
    config = dict(
        model_type="llama",
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        tie_word_embeddings=True,
    )
    (hf / "config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (256, hidden), "model.norm": (hidden,)}
    for layer in range(layers):
        path = f"model.layers.{layer}"
        shapes |= {f"{path}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{path}.self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{path}.mlp.{name}_proj": (mlp, hidden) for name in ("gate", "up")}
        shapes |= {f"{path}.mlp.down_proj": (hidden, mlp)}
    tensors = {f"{name}.weight": draw.standard_normal(s, dtype=np.float32) for name, s in shapes.items()}
    save_file(tensors, hf / WEIGHTS)
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert size > 600e6
    del tensors
    # A few tensors of 38 MB are in flight at a time.
    assert _peak("convert", hf, tmp_path / "out") < 0.4 * size
    assert size <= _peak("load", hf, tmp_path / "out") < 1.5 * size
