"""The benchmarks, small: on the demo model, and what those of a GPU do without one."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest
from cuda import lower_for_cuda

from rajax.haystack import prose
from rajax.kernels import partial_attention_reference
from rajax.kernels.partial_attention import partial_attention_pallas

COMMAND = Path(__file__).parent.parent / "benchmarks" / "accuracy.py"
KEYS = {
    "setting", "context", "leaves_pct", "scored_pct", "retrieved_pct", "recall_at_100", "missed_mass",
    "missed_mass_p99", "rel_error", "kl", "agreement", "search_ms", "build_s", "prefill_s", "device_kv_bytes",
    "full_kv_bytes",
}  # fmt: skip


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(COMMAND), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.slow
def test_accuracy_writes_its_rows_and_its_picture(smollm2_path, tmp_path):
    text, rows, picture = tmp_path / "text.txt", tmp_path / "rows.json", tmp_path / "plot.png"
    text.write_text(prose(), encoding="utf-8")
    chosen = ["exact 100", "exact 100 + summary", "whole + summary", "wave, buffer"]
    done = run(
        smollm2_path, "--text", text, "--contexts", 2048, "--steps", 16, "--settings", *chosen,
        "--json", rows, "--plot", picture,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    alone, summary, whole, wave = json.loads(rows.read_text(encoding="utf-8"))
    for row, name in zip((alone, summary, whole, wave), chosen, strict=True):
        assert set(row) >= KEYS
        assert (row["setting"], row["context"]) == (name, 2048)
        assert 0 < row["kl"] < 0.2
        assert 0 < row["device_kv_bytes"] < row["full_kv_bytes"]
        if row is wave:
            assert 0 < row["cache_hit_ratio"] < 1
            continue
        assert row["rel_error"] == pytest.approx(sum(row["rel_error_per_layer"]) / 30)
    # An exact search finds all; the summary makes up for much of what is not retrieved.
    assert alone["recall_at_100"] == summary["recall_at_100"] == 1
    assert summary["kl"] < alone["kl"]
    assert summary["rel_error"] < 0.8 * alone["rel_error"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_accuracy_refuses_a_text_that_is_too_short(smollm2_path, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Far too short.", encoding="utf-8")
    done = run(smollm2_path, "--text", text, "--contexts", 2048)
    assert done.returncode == 2
    assert f"{text} has 4 tokens; --contexts 2048 and --steps 128 need 2176" in done.stderr


@pytest.mark.slow
def test_buffer_shows_what_a_cache_saves(smollm2_path, tmp_path):
    text, rows = tmp_path / "text.txt", tmp_path / "rows.json"
    text.write_text(prose(), encoding="utf-8")
    done = subprocess.run(
        [
            sys.executable, str(COMMAND.with_name("buffer.py")), str(smollm2_path), "--text", str(text),
            "--context", "1500", "--steps", "16", "--caches", "0", "0.05", "0.2", "--json", str(rows),
        ],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    none, small, large = json.loads(rows.read_text(encoding="utf-8"))
    assert none["hit_ratio"] == none["evictions_per_token"] == 0
    assert 0 < small["hit_ratio"] < large["hit_ratio"] < 1
    assert large["bytes_per_token"] < small["bytes_per_token"] < none["bytes_per_token"]
    assert small["device_kv_bytes"] < large["device_kv_bytes"]
    assert all(row["step_ms"] > 0 and row["dense_step_ms"] > 0 for row in (none, small, large))


@pytest.fixture(scope="module")
def device() -> ModuleType:
    spec = importlib.util.spec_from_file_location("device", COMMAND.with_name("device.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_device_says_where_there_is_no_gpu(device, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(sys, "argv", ["device.py", "--json", str(tmp_path / "rows.json")])
    device.main()
    assert "no GPU" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_device_compares_the_kernel_with_its_reference(device):
    kernel = functools.partial(partial_attention_pallas, interpret=True)
    assert all(error["right"] for error in device.errors(kernel, [128]))

    def wrong(q, keys, values, weights):
        return kernel(q, keys, values, weights + 0.01 * (jnp.arange(keys.shape[2]) == 0))

    assert not all(error["right"] for error in device.errors(wrong, [128]))


def test_device_times_every_attention(device):
    rows = list(device.timings(partial_attention_reference, 1024, jnp.float32))
    assert [row["attention"] for row in rows] == [
        "dense, XLA",
        "dense, kernel",
        "static zone, kernel",
        "static zone + summary, kernel",
        "static zone + wave",
    ]
    assert rows[0]["of_dense"] == 1
    assert rows[0]["keys_read"] == 1024
    for row in rows:
        assert row["median_us"] > 0
        assert row["gb_per_s"] > 0


def test_what_device_times_lowers_for_cuda(device, monkeypatch):
    programs = []

    def lowered(attend, q, *arrays):
        programs.append(lower_for_cuda(attend, q, *arrays))
        return 1.0, 0.0

    monkeypatch.setattr(device, "median_us", lowered)
    list(device.timings(partial_attention_pallas, 32768, jnp.bfloat16))
    assert ["triton" in program for program in programs] == [False, True, True, True, True]
