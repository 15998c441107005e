"""`rajax bench`: what it measures, writes and refuses."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from byte_llama import save
from typer.testing import CliRunner, Result

import rajax
from rajax import bench, cli, peers
from rajax.convert import convert
from rajax.haystack import prose
from rajax.session import Session, prefill

KEYS = {
    "attention", "test", "depth", "median_ms", "spread_ms", "tokens_per_s", "kl", "device_bytes", "host_bytes",
    "stages", "index_s", "steps", "model", "dtype", "prefill_precision", "rope_scaling", "device", "threads",
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("bench")
    save(path / "hf")
    convert(path / "hf", path / "tiny")
    return path / "tiny"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])


def check_stages(row: dict[str, Any]) -> None:
    """They are the whole step, and only what goes to the host spends time there."""
    stages = row["stages"]
    assert tuple(stages) == bench.STAGES
    assert sum(stages.values()) == pytest.approx(row["median_ms"])
    assert stages["device_kernel"] > 0
    assert stages["merge"] > 0
    assert (stages["callback"] > 0) == (row["attention"] != "dense")
    if row["attention"] == "dense":
        assert stages["host_search"] == stages["host_attention"] == 0
    if row["attention"] == "scann":
        assert stages["host_search"] > 0
        assert stages["host_attention"] > 0


def test_a_run_and_the_files_that_it_writes(checkpoint, tmp_path):
    files = {kind: tmp_path / f"rows.{kind}" for kind in ("json", "csv", "markdown", "plot")}
    options = [part for kind, path in files.items() for part in (f"--{kind}", path)]
    result = run(checkpoint, "-d", 1000, "-p", "700", "--steps", 5, *options)
    assert result.exit_code == 0, result.stderr
    assert "1000 tokens: wave indexed in" in result.stderr
    rows = json.loads(files["json"].read_text())
    names = ["dense", "scann", "wave"]
    assert [(r["attention"], r["test"], r["depth"]) for r in rows] == [
        *((name, "pp", 700) for name in names),
        *((name, "pp", 1000) for name in names),
        *((name, "tg", 1000) for name in names),
    ]
    for row in rows:
        assert set(row) == KEYS
        assert row["median_ms"] > 0
        tokens = row["depth"] if row["test"] == "pp" else 1
        assert row["tokens_per_s"] == pytest.approx(1e3 * tokens / row["median_ms"])
        assert (row["index_s"] is None) == (row["attention"] == "dense")
        assert (row["host_bytes"] > 0) == (row["attention"] != "dense")
        assert row["device_bytes"] > 0
        assert (row["model"], row["dtype"], row["rope_scaling"]) == ("tiny", "float32", None)
    for dense, *others in (rows[:3], rows[3:6]):
        for row in (dense, *others):
            assert (row["kl"], row["spread_ms"], row["stages"]) == (None, None, {})
        for row in others:
            assert row["median_ms"] == pytest.approx(dense["median_ms"] + 1e3 * row["index_s"])
    dense, *others = rows[6:]
    assert dense["kl"] == 0
    for row in (dense, *others):
        assert row["steps"] == 5
        assert row["spread_ms"] >= 0
        check_stages(row)
    for row in others:
        # Random keys have no clusters.
        assert 0 < row["kl"] < (0.5 if row["attention"] == "wave" else 0.05)

    with files["csv"].open(newline="") as file:
        table = list(csv.DictReader(file))
    for row, line in zip(rows, table, strict=True):
        expected = {key: "" if value is None else str(value) for key, value in bench.flat(row).items()}
        assert line == expected
    head, rule, *lines = files["markdown"].read_text().splitlines()
    assert head.startswith("| attention | test | depth | ms | ± | tokens/s | KL | device | host | index s |")
    assert set(rule) <= set("| -:")
    for row, line in zip(rows, lines, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[:4] == [row["attention"], row["test"], str(row["depth"]), f"{row['median_ms']:.2f}"]
        # And on the terminal.
        assert cells[3] in result.stdout
    assert files["plot"].read_bytes().startswith(b"\x89PNG")
    assert sorted(tmp_path.iterdir()) == sorted(files.values())


def test_yarn_where_the_depth_needs_it_and_no_kl_without_dense(checkpoint, tmp_path):
    out = tmp_path / "rows.json"
    result = run(checkpoint, "-d", 4100, "--attention", "scann", "--steps", 1, "--json", out)
    assert result.exit_code == 0, result.stderr
    assert "4100 tokens are more than the model's 2048 positions: YaRN with factor 3" in result.stderr
    _, row = json.loads(out.read_text())
    assert row["kl"] is None
    assert row["rope_scaling"] == {"rope_type": "yarn", "factor": 3.0}
    assert row["spread_ms"] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--attention", "dense,sparse"], ["--attention takes dense, exact, scann, wave", "found 'sparse'"]),
        (["--attention", ""], ["found ''"]),
        (["-d", "0"], ["a depth must be at least 1 token, found 0"]),
        (["-d", "2048,many"], ["--depth must be whole numbers separated by commas", "2048,many"]),
        (["-d", ""], ["no depth to measure"]),
        (["-p", "-3"], ["a depth must be at least 1 token, found -3"]),
        (["-d", "1000000"], [r"the manual that comes with Python has \d+ tokens, and 1000068 are needed"]),
        (["-d", "100", "--rope-scaling", "yarn"], ["--rope-scaling is not JSON"]),
        (
            ["-d", "2049", "--rope-scaling", '{"rope_type": "default"}'],
            ["2049 tokens are more than the 2048 positions of --rope-scaling"],
        ),
        (["-d", "100", "--json", "/nowhere/rows.json"], ["/nowhere is not a directory"]),
        (["-d", "100", "--peers", "--gguf", "/nowhere.gguf"], ["--gguf /nowhere.gguf is not a file"]),
        (["-d", "100", "--text", "/nowhere.txt"], ["/nowhere.txt"]),
    ],
)
def test_what_cannot_be_measured_is_refused(checkpoint, options, words):
    result = run(checkpoint, *options)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    for word in words:
        assert re.search(word, result.stderr)


def test_a_text_that_is_too_short_is_refused(checkpoint, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Far too short.")
    result = run(checkpoint, "-d", 100, "--text", text)
    assert result.exit_code == 1
    assert f"{text} has 14 tokens, and 168 are needed" in result.stderr


def test_a_picture_needs_matplotlib(checkpoint, monkeypatch):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    result = run(checkpoint, "-d", 100, "--plot", "plot.png")
    assert result.exit_code == 1
    assert "--plot needs matplotlib: pip install 'rajax[bench]'" in result.stderr


def test_ctrl_c_keeps_the_rows_so_far(checkpoint, tmp_path, monkeypatch):
    def measure(model, attentions, makers, scaling, tokens, size, say, progress):
        if size == 200:
            raise KeyboardInterrupt
        return [bench._prefill_row("dense", size, 1.5)]

    monkeypatch.setattr(bench, "_measure", measure)
    out, plot = tmp_path / "rows.json", tmp_path / "plot.png"
    result = run(checkpoint, "-d", "100,200", "--json", out, "--plot", plot)
    assert result.exit_code == cli.INTERRUPTED
    (row,) = json.loads(out.read_text())
    assert (row["depth"], row["median_ms"]) == (100, 1500)
    assert "1500.00" in result.stdout
    # Nothing was decoded, so there is nothing to draw.
    assert list(tmp_path.iterdir()) == [out]


# --- peers


def test_a_peer_that_is_not_there_is_named(checkpoint, tmp_path, monkeypatch):
    missing = {name: (("no_such_package",), install) for name, (_, install) in peers.PEERS.items()}
    monkeypatch.setattr(peers, "PEERS", missing)
    out = tmp_path / "rows.json"
    result = run(checkpoint, "-p", 64, "-d", "", "--attention", "dense", "--peers", "--json", out)
    assert result.exit_code == 0, result.stderr
    for name, install in (("llama.cpp", "llama-cpp-python"), ("transformers", "torch 'transformers>=5'")):
        expected = f"{name}: not run, no_such_package is not installed: pip install {install}\n"
        assert expected in result.stderr
    assert [row["attention"] for row in json.loads(out.read_text())] == ["dense"]


def test_llama_cpp_needs_a_gguf_file(checkpoint, monkeypatch):
    monkeypatch.setattr(peers, "PEERS", {"llama.cpp": (("json",), "")})
    said: list[str] = []
    assert peers.peer_makers(checkpoint, None, said.append) == {}
    assert said == ["llama.cpp: not run, it needs the model as a GGUF file: give --gguf FILE"]


def greedy_kl(
    peer: peers.Peer, model: rajax.Llama, tokens: np.ndarray, size: int
) -> tuple[float, np.ndarray]:
    """KL from dense attention over the steps after `size` tokens, and the largest difference of the logits."""
    peer.prefill(tokens[:size])
    divergence, worst = [], []
    with Session(model, [size], [len(tokens)], None) as session:
        prefill(model, [tokens[:size]], [session])
        session.finish_prefill()
        for token in tokens[size:].tolist():
            ours, theirs = np.asarray(session.step([token])[0]), peer.step(token)
            dense, other = np.asarray(jax.nn.log_softmax(ours)), np.asarray(jax.nn.log_softmax(theirs))
            divergence.append(np.exp(dense) @ (dense - other))
            worst.append(np.abs(ours - theirs).max())
    peer.close()
    return float(np.mean(divergence)), np.array(worst)


@pytest.mark.parity
@pytest.mark.parametrize("scaling", [None, {"rope_type": "yarn", "factor": 3.0}])
def test_transformers_computes_the_same(checkpoint, scaling):
    pytest.importorskip("torch")
    model = rajax.load(checkpoint, rope_scaling=scaling)
    make = peers.peer_makers(checkpoint, None, lambda _: None)["transformers"]
    tokens = np.random.default_rng(0).integers(0, 256, 60).astype(np.int32)
    peer = make(model, len(tokens), scaling)
    _, worst = greedy_kl(peer, model, tokens, 50)
    assert worst.max() < 1e-4


# --- on the real model


@pytest.mark.slow
def test_the_real_model(smollm2_path, tmp_path):
    out = tmp_path / "rows.json"
    result = run(smollm2_path, "-d", 2048, "--attention", "dense,scann,wave", "--steps", 16, "--json", out)
    assert result.exit_code == 0, result.stderr
    rows = {row["attention"]: row for row in json.loads(out.read_text()) if row["test"] == "tg"}
    for row in rows.values():
        check_stages(row)
    assert rows["dense"]["kl"] == 0
    assert rows["scann"]["kl"] < 0.01
    assert rows["wave"]["kl"] < 0.05
    for name in ("scann", "wave"):
        assert rows[name]["device_bytes"] < 0.5 * rows["dense"]["device_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("scaling", [None, {"rope_type": "yarn", "factor": 4.0}])
def test_llama_cpp_computes_nearly_the_same(smollm2_path, scaling):
    pytest.importorskip("llama_cpp")
    model = rajax.load(smollm2_path, rope_scaling=scaling)
    tokens = np.asarray(rajax.load_tokenizer(smollm2_path).encode(prose())[:260], np.int32)
    peer = peers.peer_makers(smollm2_path, None, lambda _: None)["llama.cpp"](model, len(tokens), scaling)
    divergence, _ = greedy_kl(peer, model, tokens, 256)
    # Its activations have eight bits.
    assert 0 < divergence < 0.03
