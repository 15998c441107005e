"""The command line: what it takes, what it prints where, and how it ends."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from byte_llama import CONFIG, save
from typer.testing import CliRunner, Result

import rajax
from rajax import cli
from rajax.checkpoint import parameter_shapes
from rajax.convert import convert

LONG = "".join(np.random.RandomState(0).choice(list("abc d"), 1000))
"""A prompt that outgrows the static zone."""


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    """A tiny Hugging Face directory whose tokens are bytes."""
    return save(tmp_path_factory.mktemp("cli") / "hf")


@pytest.fixture(scope="module")
def checkpoint(hf) -> Path:
    convert(hf, hf.parent / "checkpoint")
    return hf.parent / "checkpoint"


def run(*arguments: object, stdin: str | bytes = "") -> Result:
    return CliRunner().invoke(cli.app, [str(a) for a in arguments], input=stdin)


def failed(result: Result, *words: object) -> None:
    """Ends with 1, nothing on stdout, and one error on stderr that has all the words."""
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    for word in words:
        assert str(word) in result.stderr
    assert "Traceback" not in result.stderr


def answer(checkpoint: Path, prompt: str, count: int) -> str:
    """What the library says."""
    params, tokenizer = rajax.load(checkpoint), rajax.load_tokenizer(checkpoint)
    result = rajax.generate(params, tokenizer.encode(prompt), max_new_tokens=count)
    return tokenizer.decode(result.tokens[0])


# --- help, convert, info


@pytest.mark.parametrize(
    "command",
    [[], ["convert"], ["info"], ["generate"], ["bench"], ["eval"], ["perplexity"], ["demo"]],
)
def test_every_command_has_help(command):
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout
    assert result.stderr == ""


def test_help_answers_at_once():
    code = "import sys, rajax.cli; print({'jax', 'flax', 'scann', 'tokenizers'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_every_public_name_can_be_imported():
    for name in rajax.__all__:
        assert getattr(rajax, name) is not None
        assert name in dir(rajax)
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        _ = rajax.lod


def test_convert_as_a_module_and_as_a_command(hf, checkpoint, tmp_path):
    module = subprocess.run(
        [sys.executable, "-m", "rajax.convert", hf, tmp_path / "a[/b]"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (module.returncode, module.stdout) == (0, "")
    # Nothing but this: no warnings of Orbax and JAX, and brackets are no markup.
    assert module.stderr == f"{tmp_path / 'a[/b]'}: 2 layers, 23,776 parameters\n"
    command = run("convert", hf, tmp_path / "out")
    assert (command.exit_code, command.stdout) == (0, "")
    assert "2 layers, 23,776 parameters" in command.stderr
    failed(run("convert", hf, tmp_path / "out"), tmp_path / "out", "not an empty directory")
    failed(run("convert", "someone/model", tmp_path / "new"), "hf download someone/model")
    assert not (tmp_path / "new").exists()


def test_convert_tells_of_a_missing_tokenizer(hf, tmp_path):
    bare = shutil.copytree(hf, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    result = run("convert", bare, tmp_path / "out")
    assert result.exit_code == 0
    assert "no tokenizer.json" in result.stderr
    failed(run("generate", tmp_path / "out", "-p", "a"), "tokenizer.json is missing")


def test_info_on_a_checkpoint_and_a_hugging_face_directory(hf, checkpoint):
    config = rajax.LlamaConfig.from_hf(CONFIG)
    count = sum(np.prod(shape) for shape in parameter_shapes(config).values())
    for path in (hf, checkpoint):
        result = run("info", path)
        assert result.exit_code == 0
        assert result.stderr == ""
        assert re.search(rf"^parameters +{count:,}$", result.stdout, re.M)
        assert re.search(r"^positions +2,048 \(default RoPE, theta 10000\)$", result.stdout, re.M)
        assert re.search(r"^stop tokens +257$", result.stdout, re.M)
    failed(run("info", hf.parent / "nowhere"), "nowhere is not a directory")


def test_control_characters_in_an_error_are_spelled_out():
    failed(run("info", "no\x1b[31m[bold]where"), r"no\x1b[31m[bold]where is not a directory")


# --- generate


def test_the_answer_is_on_stdout_and_the_rest_on_stderr(checkpoint):
    result = run("generate", checkpoint, "-p", "hello", "-n", 12)
    assert result.exit_code == 0
    assert result.stdout == answer(checkpoint, "hello", 12) + "\n"
    assert "5 prompt tokens in" in result.stderr
    assert "12 new at" in result.stderr


def test_the_prompt_from_everywhere(checkpoint, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\r\n")  # as Windows writes it
    wanted = answer(checkpoint, "café\n", 8) + "\n"
    for arguments, stdin in (
        (["--prompt", "café\n"], "no"),
        (["--prompt-file", file], "no"),
        (["-f", "-"], "café\n"),
        ([], "café\n"),
        ([], file.read_bytes()),
    ):
        result = run("generate", checkpoint, "-n", 8, *arguments, stdin=stdin)
        assert (result.exit_code, result.stdout) == (0, wanted)


def test_chat_uses_the_template(checkpoint):
    for arguments, prompt in (
        (["--chat"], "[user]hi"),
        (["--chat", "--system", "be brief"], "[system]be brief[user]hi"),
        (["--chat", "--system", ""], "[system][user]hi"),
    ):
        result = run("generate", checkpoint, "-p", "hi", "-n", 6, *arguments)
        assert result.stdout == answer(checkpoint, prompt, 6) + "\n"


def test_settings_reach_the_model(checkpoint):
    def said(*arguments: object) -> str:
        result = run("generate", checkpoint, "-n", 8, *arguments)
        assert result.exit_code == 0
        return result.stdout

    dense = said("-p", LONG, "--dense")
    assert said("-p", LONG, "--index", "exact", "--retrieve", 1000) == dense
    assert said("-p", LONG, "--dense", "--rope-scaling", '{"rope_type": "yarn", "factor": 4}') != dense
    hot = ["-p", "a", "--temperature", 3, "--seed"]
    assert said(*hot, 1) == said(*hot, 1) != said(*hot, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "a", "--prompt-file", "b"], ["not both"]),
        (["--prompt", ""], ["prompt is empty"]),
        ([], ["prompt is empty"]),
        (["-f", "nowhere.txt"], ["No such file", "nowhere.txt"]),
        (["-f", "."], ["directory"]),
        (["-p", "a\udcff"], ["not valid Unicode"]),
        (["-p", "a", "--system", "b"], ["--system needs --chat"]),
        (["-p", "a", "--rope-scaling", "{"], ["--rope-scaling is not JSON"]),
        (["-p", "a", "--rope-scaling", "[" * 100_000], ["--rope-scaling is not JSON"]),
        (["-p", "a", "--rope-scaling", "[]"], ["--rope-scaling must be a JSON object"]),
        (["-p", "a", "--rope-scaling", '{"factor": 4}'], ["rope_scaling", "takes no factor"]),
        (["-p", "a", "--index", "hnsw"], ["index must be one of exact, scann", "'hnsw'"]),
        (["-p", "a", "--target-error", "2"], ["target_error must be above 0 and below 1", "2.0"]),
        (["-p", "a", "--temperature", "-1"], ["temperature must be a number of at least 0"]),
        (["-p", "a", "--temperature", "nan"], ["temperature must be a number of at least 0"]),
        (["-p", "a", "--top-p", "0"], ["top_p must be above 0"]),
        (["-p", "a", "--dtype", "int8"], ["dtype must be one of float32, bfloat16, float16", "int8"]),
        (["-p", "a", "--dtype", "nonsense"], ["dtype must be one of", "nonsense"]),
        (
            ["-p", "a", "--prefill-precision", "int8"],
            ["prefill_precision must be one of float32, bfloat16", "int8"],
        ),
        (["-p", "a", "-n", "3000"], ["past the model's 2048 positions"]),
    ],
)
def test_mistakes_are_named(checkpoint, arguments, words):
    failed(run("generate", checkpoint, *arguments), *words)


@pytest.mark.parametrize(
    "arguments", [["-n", "0"], ["--seed", "-1"], ["--seed", str(2**64)], ["--retrieve", "0"], ["--nope"]]
)
def test_numbers_out_of_range_are_errors_of_usage(checkpoint, arguments):
    result = run("generate", checkpoint, "-p", "a", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")


def test_text_that_is_not_utf8_is_named(checkpoint, tmp_path):
    (tmp_path / "latin").write_bytes("café".encode("latin-1"))
    failed(run("generate", checkpoint, "-f", tmp_path / "latin"), tmp_path / "latin", "not UTF-8")
    failed(run("generate", checkpoint, stdin=b"caf\xe9"), "stdin is not UTF-8")


def test_a_checkpoint_that_is_none_is_named(hf, tmp_path):
    failed(run("generate", tmp_path / "nowhere", "-p", "a"), "nowhere is not a directory")
    failed(run("generate", hf, "-p", "a"), "convert it first: rajax convert")


def test_bytes_that_end_in_the_middle_of_a_character_are_shown(checkpoint, capsys):
    """The stream holds them back, and the end has to let them go."""
    params, tokenizer = rajax.load(checkpoint), rajax.load_tokenizer(checkpoint)
    for prompt in "abcdefgh":
        text, _ = cli.stream_answer(params, tokenizer, tokenizer.encode(prompt), max_new_tokens=9)
        assert capsys.readouterr().out == text + "\n"


# --- how it ends


def start(*arguments: object, before: str = "") -> subprocess.Popen[bytes]:
    """The command in a process of its own, with a line of code before it."""
    code = f"import sys\n{before}\nfrom rajax.cli import main\nmain()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


INTERRUPT = """
import os, signal
from rajax.session import Session
real = Session.{method}
def interrupted(self, *args):
    global calls
    calls += 1
    if calls == {call}:
        os.kill(os.getpid(), signal.SIGINT)
    return real(self, *args)
calls = 0
Session.{method} = interrupted
"""


@pytest.mark.parametrize(("method", "call", "shown"), [("take", 1, 0), ("step", 4, 4)])
def test_ctrl_c_ends_with_130_and_what_was_printed(checkpoint, method, call, shown):
    before = INTERRUPT.format(method=method, call=call)
    process = start("generate", checkpoint, "-p", LONG, "-n", 500, before=before)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert errors == b"interrupted\n"
    whole = run("generate", checkpoint, "-p", LONG, "-n", shown or 1).stdout
    assert out.decode().strip("\n") == (whole.strip("\n\ufffd") if shown else "")


@pytest.mark.parametrize("index", ["exact", "scann", "wave"])
def test_ctrl_c_inside_a_callback_of_the_host_path(index, checkpoint):
    """It would come out of XLA as an error of JAX's."""
    before = (
        "import os, signal, rajax.host_path, rajax.wave_host\n"
        "real = rajax.host_path.by_handle\n"
        "def by_handle(handle):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(handle)\n"
        "rajax.host_path.by_handle = rajax.wave_host.by_handle = by_handle\n"
    )
    process = start("generate", checkpoint, "-p", LONG, "-n", 500, "--index", index, before=before)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (130, b"interrupted\n")


def test_ctrl_c_while_jax_is_imported(checkpoint):
    before = (
        "import os, signal\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'jax._src.core':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    process = start("generate", checkpoint, "-p", "a", before=before)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (130, b"interrupted\n")


def test_ctrl_c_before_a_command_begins(checkpoint):
    before = "import os, signal, typer\nreal = typer.core.TyperGroup.invoke\n"
    before += "typer.core.TyperGroup.invoke = lambda *a: os.kill(os.getpid(), signal.SIGINT) or real(*a)\n"
    process = start("generate", checkpoint, "-p", "a", before=before)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (130, b"interrupted\n")


def test_a_reader_that_has_enough_ends_it_quietly(checkpoint):
    process = start("generate", checkpoint, "-p", "a", "-n", 1000, "--temperature", 3, "--seed", 0)
    assert process.stdout is not None
    assert process.stderr is not None
    assert len(process.stdout.read(5)) == 5
    process.stdout.close()
    assert process.wait(timeout=120) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_full_disk_is_named(checkpoint):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            [sys.executable, "-m", "rajax", "info", checkpoint],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert process.returncode == 1
    assert process.stderr.startswith(b"error: ")
    assert b"No space left" in process.stderr
    assert b"Traceback" not in process.stderr


@pytest.mark.parametrize("code", [0, 1, 130])
def test_demo_ends_with_its_own_code(monkeypatch, code):
    import rajax.demo

    monkeypatch.setattr(rajax.demo, "run", lambda length, depth: code)
    result = run("demo")
    assert (result.exit_code, result.stderr) == (code, "")
