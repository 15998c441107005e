"""The loop over samples: one prefill for all attentions that are compared, resumed where it was interrupted.

A run has a folder. `settings.json` holds what its numbers depend on, `samples.jsonl` a line per sample, written as soon
as the sample is done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rajax.evaluation.sample import Task, make
from rajax.generation import Generation, decode
from rajax.interrupt import interrupt
from rajax.models import Llama
from rajax.report import write
from rajax.retrieval import RetrievalConfig
from rajax.sampling import Sampling
from rajax.session import Session, prefill
from rajax.tokenizer import Tokenizer

SETTINGS, SAMPLES = "settings.json", "samples.jsonl"

Attentions = Mapping[str, RetrievalConfig | None]
"""By name; None is dense attention."""
Record = dict[str, Any]
"""A sample's line in samples.jsonl: `task`, `length`, `index`, `depth`, `references`, `prompt_tokens`,
`prompt_sha256`, and `attentions`: by name `answer`, `score`, `seconds` and `statistics`, or `error`."""


# --- a run's folder


@contextlib.contextmanager
def open_run(out: Path, settings: Mapping[str, Any]) -> Iterator[list[Record]]:
    """Makes a run's folder, or goes on with it; gives the samples that are done, and keeps other processes out.

    A last line that an interrupt broke is dropped, and so are samples that failed: they are tried again.

    Args:
      out: the folder.
      settings: by the name of the option that they come from; whatever the numbers depend on.

    Raises:
      ValueError: the folder holds a run with other settings, or something else, or a process is at work in it.
    """
    _check(out, settings)
    folder = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another `rajax eval` is at work in {out}; wait until it is done, or choose another --out"
            ) from None
        yield _read(out / SAMPLES)
    finally:
        os.close(folder)


def _check(out: Path, settings: Mapping[str, Any]) -> None:
    """Makes a run's folder; ValueError where there is another."""
    wanted = json.loads(json.dumps(settings))
    digest = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()
    file = out / SETTINGS
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is not a folder")
    if not file.exists():
        if out.exists() and any(out.iterdir()):
            raise ValueError(f"--out {out} is not empty and has no {SETTINGS}: it is no folder of a run")
        out.mkdir(parents=True, exist_ok=True)
        write(file, json.dumps({"sha256": digest, "settings": wanted}, indent=2, ensure_ascii=False) + "\n")
        return
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        had, had_digest = dict(content["settings"]), content["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} is damaged ({type(error).__name__}: {error}); choose another --out"
        ) from error
    if had_digest != digest:
        for name in sorted({*had, *wanted}):
            if had.get(name) != wanted.get(name):
                raise ValueError(
                    f"{out} holds a run with other settings: {name} was {json.dumps(had.get(name))}, "
                    f"now {json.dumps(wanted.get(name))}. Choose another --out, or delete that folder"
                )
        raise ValueError(f"{file} was changed by hand; choose another --out, or delete that folder")


def _read(file: Path) -> list[Record]:
    """The samples that are done; the file is left with those alone."""
    if not file.exists():
        return []
    content = file.read_bytes()
    lines = content.split(b"\n")
    done = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            if number == len(lines):  # what follows the last line break: nothing, or a line cut short
                continue
            raise ValueError(
                f"{file}, line {number} is damaged; delete it to have that sample run again"
            ) from None
        if not failed(record):
            done.append(record)
    whole = "".join(_line(record) for record in done)
    if whole.encode() != content:
        write(file, whole)
    return done


def _line(record: Record) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def failed(record: Record) -> bool:
    """Whether one of the attentions has no answer."""
    return any("error" in outcome for outcome in record["attentions"].values())


# --- samples


def evaluate(
    model: Llama,
    tokenizer: Tokenizer,
    tasks: Sequence[Task],
    lengths: Sequence[int],
    samples: int,
    attentions: Attentions,
    out: Path,
    done: Sequence[Record],
    *,
    seed: int,
    chat: bool,
    on_sample: Callable[[int, int, str], None],
) -> list[Record]:
    """Runs the samples that are not done yet, and appends each to the run's file.

    Args:
      model: the model.
      tokenizer: its tokenizer.
      tasks: to run, at every length.
      lengths: in tokens, prompt and answer together.
      samples: of each task and length.
      attentions: to compare.
      out: the run's folder.
      done: from `open_run`.
      seed: of the samples.
      chat: whether prompts stand in the chat template.
      on_sample: told of (samples done, samples in all, a line about the last one).

    Returns:
      All records, in the order of lengths, tasks and numbers.

    Raises:
      KeyboardInterrupt: Ctrl-C; what is done is in the file.
    """
    plan = [
        (task, length, index)
        for length in lengths
        for task in tasks
        for index in range(min(samples, task.samples or samples))
    ]
    records = {(r["task"], r["length"], r["index"]): r for r in done}
    left = [at for at in plan if (at[0].name, at[1], at[2]) not in records]
    clock = _Clock([length for _, length, _ in left])
    with (out / SAMPLES).open("a", encoding="utf-8") as file:
        for task, length, index in left:
            start = time.perf_counter()
            record = measure(model, tokenizer, task, length, index, attentions, seed=seed, chat=chat)
            file.write(_line(record))
            file.flush()
            records[task.name, length, index] = record
            seconds = time.perf_counter() - start
            clock.add(length, seconds)
            line = f"{task.name}, {length} tokens, sample {index + 1}: {_outcome(record)} in {seconds:.0f} s"
            on_sample(len(records), len(plan), f"{line}; {clock.left()}")
    return [records[task.name, length, index] for task, length, index in plan]


class _Clock:
    """How long the samples that are left will take: as long as those of their length took, or in proportion."""

    def __init__(self, lengths: list[int]):
        self._left = lengths
        self._seconds: dict[int, list[float]] = {}

    def add(self, length: int, seconds: float) -> None:
        self._left.remove(length)
        self._seconds.setdefault(length, []).append(seconds)

    def left(self) -> str:
        seconds = 0.0
        for length in self._left:
            nearest = min((abs(measured - length), measured) for measured in self._seconds)[1]
            seconds += float(np.mean(self._seconds[nearest])) * length / nearest
        minutes = round(seconds / 60)
        return f"about {minutes // 60} h {minutes % 60} min left" if self._left else "none left"


def _outcome(record: Record) -> str:
    return ", ".join(
        f"{name} {'failed' if 'error' in outcome else format(outcome['score'], '.2f')}"
        for name, outcome in record["attentions"].items()
    )


def measure(
    model: Llama,
    tokenizer: Tokenizer,
    task: Task,
    length: int,
    index: int,
    attentions: Attentions,
    *,
    seed: int,
    chat: bool,
) -> Record:
    """The record of one sample. What fails is in it as an error."""
    record: Record = {"task": task.name, "length": length, "index": index}
    try:
        sample = make(task, length, index, seed=seed, tokenizer=tokenizer, chat=chat)
        record |= {
            "depth": sample.prompt.depth,
            "references": sample.prompt.references,
            "prompt_tokens": len(sample.tokens),
            "prompt_sha256": hashlib.sha256(np.asarray(sample.tokens, "<i4").tobytes()).hexdigest(),
        }
        outcomes = record["attentions"] = {}
        for name, answer, seconds in answers(model, sample.tokens, sample.max_new_tokens, attentions):
            if isinstance(answer, Exception):
                outcomes[name] = _error(answer)
                continue
            text = tokenizer.decode(answer.tokens[0])
            outcomes[name] = {
                "answer": text,
                "score": task.score(text, sample.prompt.references),
                "seconds": seconds,
                "statistics": dataclasses.asdict(answer.statistics),
            }
    except Exception as error:
        interrupt.check()
        record["attentions"] = dict.fromkeys(attentions, _error(error))
    return record


def _error(error: Exception) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error}"}


def answers(
    model: Llama, prompt: Sequence[int], max_new_tokens: int, attentions: Attentions
) -> Iterator[tuple[str, Generation | Exception, float]]:
    """The greedy answers to a prompt that is prefilled once.

    All attentions learn from the same sample of the prompt's queries, that of the smallest window among them. With
    index="wave", whose window is larger, clusters may so differ a little from those that it would form alone.

    Args:
      model: the model.
      prompt: tokens.
      max_new_tokens: of an answer.
      attentions: to answer with.

    Yields:
      Per attention its name, its answer or what it raised, and the seconds it took beyond the shared prefill. An
      attention's memory is freed before the next one answers.
    """
    tokens = np.asarray(prompt, np.int32)
    sessions: dict[str, Session] = {}
    try:
        start = time.perf_counter()
        for name, retrieval in attentions.items():
            sessions[name] = Session(model, [len(tokens)], [len(tokens) + max_new_tokens], retrieval)
        first = prefill(model, [tokens], list(sessions.values()), lambda *_: interrupt.check())
        prefill_s = time.perf_counter() - start
        for name in attentions:
            start = time.perf_counter()
            with sessions.pop(name) as session:
                answer = _answer(session, tokens, first, max_new_tokens, prefill_s)
                yield name, answer, time.perf_counter() - start
    finally:
        for session in sessions.values():
            session.close()


def _answer(
    session: Session, prompt: np.ndarray, first: jax.Array, max_new_tokens: int, prefill_s: float
) -> Generation | Exception:
    try:
        index_s = session.finish_prefill()
        steps = decode(
            session,
            [prompt],
            first,
            max_new_tokens,
            sampling=Sampling(),
            stops=frozenset(session.config.eos_token_ids),
            key=jax.random.key(0),
            prefill_s=prefill_s + index_s,
            index_s=index_s,
        )
        with contextlib.closing(steps):
            while True:
                try:
                    with interrupt.held():
                        next(steps)
                except StopIteration as end:
                    return end.value
    except Exception as error:
        interrupt.check()
        return error
