"""A benchmark on a checkpoint, from options to report: what `rajax eval` does."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rajax.checkpoint import CHECKSUMS, load, read_config
from rajax.evaluation import infinitebench, report, ruler
from rajax.evaluation.run import Record, evaluate, failed, open_run
from rajax.evaluation.sample import Task, make
from rajax.haystack import prose
from rajax.report import write
from rajax.retrieval import parse_attentions
from rajax.tokenizer import Tokenizer, load_tokenizer

SUITES = "ruler", "infinitebench"
SUMMARY, PAGE = "summary.json", "report.html"


@dataclasses.dataclass(frozen=True)
class Options:
    """What `rajax eval` takes; `rajax eval --help` explains each."""

    suite: str = "ruler"
    lengths: str = "4096"
    samples: int = 10
    attention: str = "dense,scann,wave"
    tasks: str | None = None
    haystack: Path | None = None
    squad: Path | None = None
    hotpotqa: Path | None = None
    infinitebench: Path | None = None
    seed: int = 0
    chat: bool = True
    rope_scaling: dict[str, Any] | None = None
    dtype: str | None = None
    prefill_precision: str = "float32"


@dataclasses.dataclass(frozen=True)
class Result:
    """A run that has ended.

    Attributes:
      records: of all samples.
      rows: summary.json.
      attentions: names.
    """

    records: list[Record]
    rows: list[report.Row]
    attentions: list[str]

    @property
    def failed(self) -> int:
        """Samples that have no answer from one of the attentions."""
        return sum(failed(record) for record in self.records)


def run(checkpoint: Path, options: Options, out: Path, on_sample: Callable[[int, int, str], None]) -> Result:
    """Runs a benchmark, or goes on with it, and writes its report.

    Args:
      checkpoint: from `rajax convert`.
      options: what to run.
      out: the run's folder.
      on_sample: told of (samples done, samples in all, a line about the last one).

    Raises:
      ValueError: an option is out of range, a file is something else, or `out` holds another run.
    """
    attentions = parse_attentions(options.attention)
    lengths = _lengths(options.lengths)
    config = read_config(checkpoint)
    if options.rope_scaling is not None:
        config = config.with_rope_scaling(options.rope_scaling)
    if lengths[-1] > config.max_positions:
        raise ValueError(
            f"--lengths {lengths[-1]} is more than the model's {config.max_positions} positions; "
            '--rope-scaling \'{"rope_type": "yarn", "factor": ...}\' lets it read on'
        )
    tokenizer = load_tokenizer(checkpoint)
    chat = options.chat and tokenizer.chat_template is not None
    haystack = _prose(options.haystack) if options.haystack else prose()
    tasks, not_run = _tasks(options, haystack, tokenizer)
    for task in tasks:
        for length in lengths:
            # The shortest prompt of the task: refused here and now if it does not fit.
            make(
                dataclasses.replace(task, most=task.least), length, 0, seed=0, tokenizer=tokenizer, chat=chat
            )

    settings = {
        "checkpoint": _digest(*(checkpoint / name for name in ("config.json", CHECKSUMS, "tokenizer.json"))),
        "rajax": importlib.metadata.version("rajax"),
        "--suite": options.suite,
        "--tasks": [task.name for task in tasks],
        "--lengths": lengths,
        "--samples": options.samples,
        "--attention": {name: repr(retrieval) for name, retrieval in attentions.items()},
        "--haystack": hashlib.sha256(haystack.encode()).hexdigest(),
        "--squad": _digest(options.squad),
        "--hotpotqa": _digest(options.hotpotqa),
        "--infinitebench": _digest(*_benchmark_files(options)),
        "--seed": options.seed,
        "--chat": chat,
        "--rope-scaling": options.rope_scaling,
        "--dtype": options.dtype,
        "--prefill-precision": options.prefill_precision,
    }
    with open_run(out, settings) as done:
        model = load(
            checkpoint,
            dtype=options.dtype,
            rope_scaling=options.rope_scaling,
            prefill_precision=options.prefill_precision,
        )
        records = evaluate(
            model,
            tokenizer,
            tasks,
            lengths,
            options.samples,
            attentions,
            out,
            done,
            seed=options.seed,
            chat=chat,
            on_sample=on_sample,
        )
        rows = report.summarize(options.suite, records, list(attentions), not_run)
        write(out / SUMMARY, json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
        title = f"{options.suite} on {checkpoint.resolve().name}"
        write(out / PAGE, report.page(title, settings, records, rows, list(attentions)))
    return Result(records, rows, list(attentions))


def _prose(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--haystack {file} is not UTF-8 text: {error}") from error
    if not text.split():
        raise ValueError(f"--haystack {file} has no words")
    return text


def _lengths(text: str) -> list[int]:
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"--lengths takes numbers of tokens, comma between; found {text!r}") from None
    if lengths[0] < 1:
        raise ValueError(f"--lengths must be at least 1, found {lengths[0]}")
    return lengths


def _tasks(options: Options, haystack: str, tokenizer: Tokenizer) -> tuple[list[Task], dict[str, str]]:
    """The tasks that are wanted and can run, and the reasons why others cannot."""
    if options.suite == "ruler":
        squad = ruler.read_squad(options.squad) if options.squad else None
        hotpotqa = ruler.read_hotpotqa(options.hotpotqa) if options.hotpotqa else None
        found, not_run = ruler.tasks(haystack, squad, hotpotqa)
    elif options.suite == "infinitebench":
        if options.infinitebench is not None and not options.infinitebench.is_dir():
            raise ValueError(f"--infinitebench {options.infinitebench} is not a folder")
        found, not_run = infinitebench.tasks(tokenizer, options.infinitebench)
    else:
        raise ValueError(f"--suite must be one of {', '.join(SUITES)}; found {options.suite!r}")
    if options.tasks is None:
        return list(found.values()), not_run
    wanted = list(dict.fromkeys(name.strip() for name in options.tasks.split(",")))
    for name in wanted:
        if name in not_run:
            raise ValueError(f"--tasks {name} {not_run[name]}")
        if name not in found:
            raise ValueError(f"--tasks: {options.suite} has {', '.join([*found, *not_run])}; found {name!r}")
    return [found[name] for name in wanted], {}


def _benchmark_files(options: Options) -> Sequence[Path]:
    if options.suite != "infinitebench" or options.infinitebench is None:
        return ()
    files = (options.infinitebench / f"{name}.jsonl" for name in infinitebench.FROM_FILES)
    return [file for file in files if file.exists()]


def _digest(*files: Path | None) -> str | None:
    """One checksum of files; None for none."""
    there = [file for file in files if file is not None]
    if not there:
        return None
    whole = hashlib.sha256()
    for file in there:
        whole.update(file.read_bytes())
    return whole.hexdigest()
