"""The command line: `rajax demo | convert | generate | info | bench | eval | perplexity`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from rajax.cache import keep_compiled_programs
from rajax.interrupt import interrupt

if TYPE_CHECKING:
    from rajax.generation import Statistics

# JAX and what depends on it are imported inside the commands, so that --help answers at once.

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Llama over long contexts: most of the KV cache in host memory, found again by a vector index.",
)
messages = Console(stderr=True)
"""Everything but the answer goes to stderr, so that the answer can be piped."""

# Arguments and options that several commands have.
Checkpoint = Annotated[Path, typer.Argument(help="A checkpoint that `rajax convert` made.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")]
PrefillPrecision = Annotated[
    str,
    typer.Option(help="Products over a prompt: float32, or bfloat16, many times faster on a CPU with AMX."),
]
RopeScaling = Annotated[
    str | None,
    typer.Option(help='Hugging Face\'s rope_scaling as JSON, e.g. \'{"rope_type": "yarn", "factor": 4}\'.'),
]

INTERRUPTED = 130  # the shell's exit code for Ctrl-C


def _version(wanted: bool) -> None:
    if wanted:
        print(f"rajax {importlib.metadata.version('rajax')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def convert(
    hf_dir: Annotated[Path, typer.Argument(help="A Hugging Face Llama directory with safetensors.")],
    out_dir: Annotated[Path, typer.Argument(help="The checkpoint to make; must not exist or be empty.")],
) -> None:
    """Convert a Hugging Face Llama to a RAJAX checkpoint."""
    with _errors():
        with interrupt.held():
            from rajax import convert as converter
        with _progress("converting", "tensors") as advance:
            config = converter.convert(hf_dir, out_dir, on_tensor=lambda _, done, total: advance(done, total))
        _say(f"{out_dir}: {config.num_hidden_layers} layers, {_parameters(config):,} parameters")
        if not (out_dir / "tokenizer.json").exists():
            _say(f"note: {hf_dir} has no tokenizer.json, so the checkpoint takes token ids only", "yellow")


@app.command()
def info(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a Hugging Face Llama directory.")],
    context: Annotated[int, typer.Option(help="Tokens of context to size the KV cache for.", min=1)] = 131072,
) -> None:
    """Show what a model is, and where its KV cache would live."""
    with _errors():
        with interrupt.held():
            from rajax.checkpoint import read_config
            from rajax.models.summary import CLUSTERS, UNIT
            from rajax.retrieval import RetrievalConfig

        c = read_config(checkpoint)
        retrieval = RetrievalConfig()
        per_token = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
        static = min(context, retrieval.zone_size)
        offloaded = context - static
        rope = c.rope.rope_type + (f", factor {c.rope.factor:g}" if c.rope.factor else "")
        rows = {
            "parameters": f"{_parameters(c):,}",
            "layers": c.num_hidden_layers,
            "hidden size": f"{c.hidden_size}, MLP {c.intermediate_size}",
            "query heads": f"{c.num_attention_heads} of {c.head_dim}",
            "KV heads": c.num_key_value_heads,
            "vocabulary": c.vocab_size,
            "positions": f"{c.max_positions:,} ({rope} RoPE, theta {c.rope.rope_theta:g})",
            "stop tokens": ", ".join(map(str, c.eos_token_ids)) or "none",
            f"KV at {context:,} tokens": f"{format_bytes(4 * per_token * context)} in float32",
            "  on the device": f"{format_bytes(4 * per_token * static)} ({static} tokens)",
            "  their summary": f"{format_bytes(4 * per_token * offloaded * CLUSTERS // UNIT)} for the others",
            "  on the host": f"{format_bytes(4 * per_token * offloaded)}",
            "  ScaNN's index": f"about {format_bytes(4 * per_token * offloaded * 18 // 32)}",
        }
        for name, value in rows.items():
            print(f"{name:<24}{value}", flush=True)


@app.command()
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", "-f", help="A text file with the prompt; - is stdin.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the checkpoint's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="The system message, with --chat.")] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", "-n", help="Tokens to make at most. [default: 256]", min=1),
    ] = None,
    dense: Annotated[
        bool, typer.Option("--dense", help="Dense attention: all keys stay on the device.")
    ] = False,
    index: Annotated[
        str, typer.Option(help="The index over offloaded keys: scann, exact or wave.")
    ] = "scann",
    retrieve: Annotated[int, typer.Option(help="Offloaded keys that each query attends to.", min=1)] = 256,
    target_error: Annotated[
        float | None,
        typer.Option(help="Instead of --retrieve: the relative error of the attention output to stay below."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 is all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the tokens that hold this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the best one's.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 changes nothing.")] = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="Makes sampling repeatable. [default: random]", min=0, max=2**32 - 1)
    ] = None,
    rope_scaling: RopeScaling = None,
    dtype: Dtype = None,
    prefill_precision: PrefillPrecision = "float32",
) -> None:
    """Continue a prompt from --prompt, --prompt-file or stdin; the answer streams to stdout."""
    with _errors():
        if system is not None and not chat:
            raise ValueError("--system needs --chat")
        text = _prompt_text(prompt, prompt_file)
        scaling = _parse_rope_scaling(rope_scaling)
        with interrupt.held():
            import rajax.generation
            import rajax.tokenizer

        retrieval = None
        if not dense:
            retrieval = rajax.RetrievalConfig(index=index, top_k=retrieve, target_error=target_error)
        sampling = rajax.Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        # What may be wrong with the prompt shows before the model is loaded.
        tokenizer = rajax.load_tokenizer(checkpoint)
        if chat:
            turns = [{"role": "system", "content": system}] if system is not None else []
            tokens = tokenizer.apply_chat_template([*turns, {"role": "user", "content": text}])
        else:
            tokens = tokenizer.encode(text)
        params = rajax.load(
            checkpoint, dtype=dtype, rope_scaling=scaling, prefill_precision=prefill_precision
        )
        answer = stream_answer(
            params,
            tokenizer,
            tokens,
            max_new_tokens=max_new_tokens,
            retrieval=retrieval,
            sampling=sampling,
            key=seed,
        )
    if answer is None:
        raise typer.Exit(INTERRUPTED)
    _say(summary(answer[1], len(tokens)))


@app.command("eval")
def evaluate(
    checkpoint: Checkpoint,
    suite: Annotated[str, typer.Option(help="ruler or infinitebench.")] = "ruler",
    lengths: Annotated[
        str, typer.Option(help="Tokens of a sample, answer included; several with commas.")
    ] = "4096",
    samples: Annotated[int, typer.Option(help="Samples of each task and length.", min=1)] = 10,
    attention: Annotated[
        str,
        typer.Option(
            help="What to compare: dense, scann, exact, wave; settings follow with colons, as in scann:top_k=64."
        ),
    ] = "dense,scann,wave",
    tasks: Annotated[str | None, typer.Option(help="Tasks, with commas. [default: all that can run]")] = None,
    haystack: Annotated[
        Path | None,
        typer.Option(help="A text to hide needles in. [default: prose that comes with Python]"),
    ] = None,
    squad: Annotated[Path | None, typer.Option(help="A file in SQuAD's format, for RULER's qa_1.")] = None,
    hotpotqa: Annotated[
        Path | None, typer.Option(help="A file in HotpotQA's format, for RULER's qa_2.")
    ] = None,
    infinitebench: Annotated[
        Path | None, typer.Option(help="A folder with ∞-Bench's files, for the tasks that are not synthetic.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the samples.", min=0)] = 0,
    chat: Annotated[
        bool, typer.Option(help="Put prompts into the checkpoint's chat template, where it has one.")
    ] = True,
    rope_scaling: RopeScaling = None,
    dtype: Dtype = None,
    prefill_precision: PrefillPrecision = "float32",
    out: Annotated[
        Path | None,
        typer.Option(help="The run's folder; a run that was interrupted goes on. [default: eval-CHECKPOINT]"),
    ] = None,
) -> None:
    """Score a checkpoint on RULER or ∞-Bench, dense attention beside retrieval."""
    with _errors():
        scaling = _parse_rope_scaling(rope_scaling)
        with interrupt.held():
            from rajax.evaluation import report
            from rajax.evaluation import suite as benchmark
        options = benchmark.Options(
            suite=suite,
            lengths=lengths,
            samples=samples,
            attention=attention,
            tasks=tasks,
            haystack=haystack,
            squad=squad,
            hotpotqa=hotpotqa,
            infinitebench=infinitebench,
            seed=seed,
            chat=chat,
            rope_scaling=scaling,
            dtype=dtype,
            prefill_precision=prefill_precision,
        )
        folder = out or Path(f"eval-{checkpoint.resolve().name}")
        with _progress("evaluating", "samples") as advance:

            def on_sample(done: int, total: int, line: str) -> None:
                advance(done, total)
                _say(f"{done}/{total}: {line}")

            result = benchmark.run(checkpoint, options, folder, on_sample)
        answer = Console(highlight=False)
        for table in report.tables(result.records, result.rows, result.attentions):
            # Lines that a narrow terminal breaks are better than broken cells.
            answer.width = max(answer.width, answer.measure(table).maximum)
            answer.print(table)
        for row in result.rows:
            if "not_run" in row:
                _say(f"not run: {row['task']} {row['not_run']}")
        _say(f"{folder / benchmark.PAGE}, {folder / benchmark.SUMMARY}")
        if result.failed:
            _fail(
                f"{result.failed} samples failed; {folder / benchmark.PAGE} lists them, and a new run tries them again"
            )


@app.command()
def perplexity(
    checkpoint: Checkpoint,
    file: Annotated[Path, typer.Argument(help="A text file; - is stdin.")],
    attention: Annotated[
        str, typer.Option(help="What to compare, as for `rajax eval`.")
    ] = "dense,scann,wave",
    length: Annotated[
        int | None,
        typer.Option(help="Tokens of the text to take. [default: as many as there are positions for]", min=2),
    ] = None,
    prompt: Annotated[
        int, typer.Option(help="Tokens that are prefilled; the others are decoded and count.", min=1)
    ] = 640,
    bucket: Annotated[int, typer.Option(help="Positions of a row.", min=1)] = 1024,
    rope_scaling: RopeScaling = None,
    dtype: Dtype = None,
    prefill_precision: PrefillPrecision = "float32",
    json_file: Annotated[Path | None, typer.Option("--json", help="A file for the rows.")] = None,
) -> None:
    """Perplexity of a text by context position, dense attention beside retrieval."""
    with _errors():
        scaling = _parse_rope_scaling(rope_scaling)
        text = _prompt_text(None, file)
        with interrupt.held():
            import rajax.checkpoint
            import rajax.tokenizer
            from rajax.evaluation import perplexity as measure
            from rajax.report import write
            from rajax.retrieval import parse_attentions
        attentions = parse_attentions(attention)
        tokens = rajax.load_tokenizer(checkpoint).encode(text)
        if length is not None and length > len(tokens):
            raise ValueError(f"--length {length} is more than the {len(tokens)} tokens of {file}")
        params = rajax.load(
            checkpoint, dtype=dtype, rope_scaling=scaling, prefill_precision=prefill_precision
        )
        tokens = tokens[: length or params.config.max_positions]
        with _progress("decoding", "tokens") as advance:
            rows = measure.perplexity(
                params, tokens, attentions, prompt=prompt, bucket=bucket, on_step=advance
            )
        if json_file is not None:
            write(json_file, json.dumps(rows, indent=2) + "\n")
        Console(highlight=False).print(measure.table(rows))


@app.command()
def demo(
    length: Annotated[int, typer.Option(help="Tokens of the text with the needle.", min=1024)] = 7600,
    depth: Annotated[
        float, typer.Option(help="Where the needle is: 0 beginning, 1 end.", min=0, max=1)
    ] = 0.4,
) -> None:
    """Ask a real model about a long text, with retrieval and with dense attention."""
    with _errors():
        with interrupt.held():
            from rajax import demo as demonstration
        code = demonstration.run(length, depth)
    raise typer.Exit(code)


@app.command()
def bench(
    checkpoint: Checkpoint,
    depth: Annotated[
        str, typer.Option("--depth", "-d", help="Tokens of context, separated by commas.")
    ] = "2048,8192",
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="Further lengths, of which only the prefill is measured.")
    ] = "",
    attention: Annotated[
        str,
        typer.Option(
            help="What to compare: dense, scann, exact, wave; settings follow with colons, as in wave:key_codes=true."
        ),
    ] = "dense,scann,wave",
    steps: Annotated[int, typer.Option(help="Decode steps, of which the median is taken.", min=1)] = 64,
    text: Annotated[
        Path | None,
        typer.Option(
            help="A text file to read. [default: the manual that comes with Python, some 140,000 tokens]"
        ),
    ] = None,
    rope_scaling: Annotated[
        str | None,
        typer.Option(help="Hugging Face's rope_scaling as JSON. [default: YaRN where a depth needs it]"),
    ] = None,
    dtype: Dtype = None,
    prefill_precision: PrefillPrecision = "float32",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write the rows here.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a table in Markdown here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time against context here, a PNG.")] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also llama.cpp and transformers, where they are installed.")
    ] = False,
    gguf: Annotated[
        Path | None, typer.Option(help="The model for llama.cpp. [default: the demo model's own]")
    ] = None,
) -> None:
    """Time prefill and decode at several depths, and how far from dense attention they are.

    The attentions read the same text and take turns, a few steps each. A table goes to stdout, and files are written
    after every depth, so that Ctrl-C loses one depth at most.
    """
    with _errors():
        depths, prompts = _numbers("--depth", depth), _numbers("--prompt", prompt)
        scaling = _parse_rope_scaling(rope_scaling)
        with interrupt.held():
            import rajax.bench as benchmark
            from rajax.retrieval import parse_attentions

        request = benchmark.Request(
            checkpoint=checkpoint,
            depths=depths,
            prompts=prompts,
            attentions=parse_attentions(attention),
            steps=steps,
            text=text,
            rope_scaling=scaling,
            dtype=dtype,
            prefill_precision=prefill_precision,
            peers=peers,
            gguf=gguf,
        )
        benchmark.check_outputs(json_file, csv_file, markdown, plot=plot)
        rows: list[dict[str, Any]] = []
        try:
            for more in benchmark.run(request, _say, _progress):
                rows += more
                benchmark.write(rows, json_file, csv_file, markdown, plot)
        finally:
            if rows:
                # Where no terminal says how wide it is, nothing is cut off.
                out = Console(width=None if sys.stdout.isatty() else 120)
                for table in benchmark.tables(rows):
                    out.print(table)


def _numbers(option: str, text: str) -> list[int]:
    """Whole numbers separated by commas; none in an empty text."""
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise ValueError(f"{option} must be whole numbers separated by commas, found {text!r}") from None


def stream_answer(
    params: Any, tokenizer: Any, tokens: list[int], **settings: Any
) -> tuple[str, Statistics] | None:
    """Prints an answer as it is made; its text and statistics, or None where Ctrl-C ended it."""
    text, printed = tokenizer.decode_stream(), ""
    try:
        from rajax.generation import stream

        with _progress("prefill", "layers") as advance:
            answer = stream(params, tokens, on_prefill=advance, **settings)
            token = next(answer)
        while True:
            piece = text(token)
            print(piece, end="", flush=True)
            printed += piece
            with interrupt.held():
                token = next(answer)
    except StopIteration as done:
        whole = tokenizer.decode(done.value.tokens[0])
        # The bytes of a character that the last token left incomplete.
        print(whole[len(printed) :] if whole.startswith(printed) else "")
        return whole, done.value.statistics
    except KeyboardInterrupt:
        print()
        return None


def summary(statistics: Statistics, prompt: int) -> str:
    """One line of what a generation took."""
    s = statistics
    parts = [f"{prompt} prompt tokens in {s.prefill_s:.1f} s"]
    if s.steps_per_s is not None:
        parts.append(f"{s.decode_steps + 1} new at {s.steps_per_s:.1f} tokens/s after {s.first_step_s:.1f} s")
    parts.append(
        f"KV: {format_bytes(s.device_kv_bytes)} on the device, {format_bytes(s.host_kv_bytes)} on the host"
    )
    if s.keys_offloaded:
        parts.append(
            f"{100 * s.keys_scored / s.keys_offloaded:.1f} % of offloaded keys scored, "
            f"{100 * s.keys_retrieved / s.keys_offloaded:.1f} % retrieved"
        )
    if s.cache_hit_ratio is not None:
        per_token = format_bytes(round((s.bytes_moved or 0) / max(1, s.decode_steps)))
        parts.append(f"{100 * s.cache_hit_ratio:.0f} % of clusters in the cache, {per_token} moved per token")
    return " | ".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """The `rajax` command, with the process's arguments by default."""
    keep_compiled_programs()
    # Orbax and JAX tell of things that no user of a command can act on.
    logging.getLogger("absl").setLevel(logging.ERROR)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that lacks a character is no reason to stop.
        sys.stdout.reconfigure(errors="replace")
    sys.unraisablehook = _unraisable
    try:
        app(arguments, prog_name="rajax")
    except SystemExit as end:
        if end.code == INTERRUPTED:
            # Said here: before `_errors` begins Typer itself ends with this code, without a word.
            _say("interrupted", "yellow")
            # What XLA still computes would crash in the middle of Python's own end.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise


def _unraisable(lost: sys.UnraisableHookArgs) -> None:
    # Ctrl-C in a destructor; `interrupt` knows that it came.
    if not isinstance(lost.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(lost)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Expected failures end the command with their message alone."""
    try:
        with interrupt.caught():
            yield
    except (KeyboardInterrupt, Exception) as error:
        if interrupt.came or isinstance(error, KeyboardInterrupt):
            raise typer.Exit(INTERRUPTED) from None
        if isinstance(error, BrokenPipeError):
            raise  # whoever reads the answer has enough; Typer ends the command without a word
        if isinstance(error, (ValueError, TypeError, OSError, RuntimeError, MemoryError)):
            _fail(f"{error}" or type(error).__name__)
        raise


def _fail(message: str) -> NoReturn:
    messages.print(Text.assemble(("error: ", "bold red"), _plain(message)), soft_wrap=True)
    raise typer.Exit(1)


def _say(message: str, style: str = "") -> None:
    messages.print(Text(_plain(message), style), soft_wrap=True)


def _plain(text: str) -> str:
    """Text without control characters, which a name in a file may hold and a terminal would obey."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


@contextlib.contextmanager
def _progress(what: str, unit: str) -> Iterator[Any]:
    """A progress bar on stderr, gone when it is done; yields a function of (done, total)."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=messages, transient=True, disable=not messages.is_terminal) as progress:
        task = progress.add_task(what, total=None)

        def advance(done: int, total: int) -> None:
            interrupt.check()
            progress.update(task, completed=done, total=total)

        yield advance


def _prompt_text(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise ValueError("give either --prompt or --prompt-file, not both")
    if prompt is not None:
        text = prompt
    elif prompt_file is not None and str(prompt_file) != "-":
        text = _utf8(prompt_file.read_bytes(), str(prompt_file))
    elif sys.stdin is None or (prompt_file is None and sys.stdin.isatty()):
        raise ValueError("no prompt: give --prompt, --prompt-file, or text on stdin")
    else:
        text = _utf8(sys.stdin.buffer.read(), "stdin")
    if not text:
        raise ValueError("the prompt is empty")
    return text


def _utf8(content: bytes, source: str) -> str:
    """Text in UTF-8, whatever the locale, without Windows' byte order mark and line ends."""
    try:
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text: {error}") from error


def _parse_rope_scaling(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--rope-scaling is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"--rope-scaling must be a JSON object, found {text}")
    return value


def _parameters(config: Any) -> int:
    import math

    from rajax.checkpoint import parameter_shapes

    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def format_bytes(count: int) -> str:
    """A number of bytes for people."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


if __name__ == "__main__":
    main()
