"""What a task is, and how its prompt is made to fit a length."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from rajax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A question about a long text.

    Attributes:
      text: what the user says.
      prefix: the beginning of the answer, which the model goes on with; it starts with the space or line break
        that separates it from a plain `text`.
      references: what the score compares an answer with.
      depth: where in the text the one needle is, from 0 to 1; None where there are several or none.
    """

    text: str
    prefix: str
    references: list[Any]
    depth: float | None = None


Build = Callable[[random.Random, int, int, int], Prompt]
"""Makes a prompt from (random numbers, size, length, index): `size` counts what the task makes long, such as lines of
noise; `length` is the sample's length in tokens; `index` the sample's number."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A task of a benchmark.

    Attributes:
      name: as published.
      build: makes a prompt.
      score: from an answer and the references to a score from 0 to 1.
      max_new_tokens: tokens to generate, as published; never more than half of a sample.
      least, most: bounds of the size.
      samples: how many there are at most; None where there is no end.
    """

    name: str
    build: Build
    score: Callable[[str, list[Any]], float]
    max_new_tokens: int
    least: int = 1
    most: int | None = None
    samples: int | None = None

    def new_tokens(self, length: int) -> int:
        """Tokens to generate in a sample of `length` tokens."""
        return min(self.max_new_tokens, length // 2)


@dataclasses.dataclass(frozen=True)
class Sample:
    """A prompt of a task, in tokens.

    Attributes:
      task: whose it is.
      length: tokens of prompt and answer together, at most.
      index: its number among those of its task and length.
      prompt: as text.
      tokens: the prompt with everything around it.
    """

    task: Task
    length: int
    index: int
    prompt: Prompt
    tokens: list[int]

    @property
    def max_new_tokens(self) -> int:
        return self.task.new_tokens(self.length)


def make(task: Task, length: int, index: int, *, seed: int, tokenizer: Tokenizer, chat: bool) -> Sample:
    """The sample with a number: the longest prompt that leaves room for the answer.

    The length counts everything, template, prompt and tokens to generate, as RULER's does. Seed, task, length and
    number fix the sample.

    Args:
      task: a task.
      length: tokens of prompt and answer together.
      index: the sample's number.
      seed: other seeds make other samples.
      tokenizer: the model's.
      chat: whether the prompt stands in the model's chat template.

    Raises:
      ValueError: the length is too short for the task.
    """
    limit = length - task.new_tokens(length)

    def attempt(size: int) -> tuple[Prompt, list[int]]:
        draw = random.Random(f"{seed} {task.name} {length} {index}")
        prompt = task.build(draw, size, length, index)
        return prompt, encode(prompt, tokenizer, chat=chat)

    low, fitting = task.least, attempt(task.least)
    if len(fitting[1]) > limit:
        raise ValueError(
            f"{task.name} needs at least {len(fitting[1]) + task.new_tokens(length)} tokens, "
            f"found a length of {length}"
        )
    too_large: int | None = None
    while (task.most is None or low < task.most) and (too_large is None or too_large - low > 1):
        size = min(2 * low, task.most or 2 * low) if too_large is None else (low + too_large) // 2
        tried = attempt(size)
        if len(tried[1]) > limit:
            too_large = size
        else:
            low, fitting = size, tried
    return Sample(task, length, index, *fitting)


def encode(prompt: Prompt, tokenizer: Tokenizer, *, chat: bool) -> list[int]:
    """The tokens of a prompt and of the beginning of its answer."""
    if not chat:
        return tokenizer.encode(prompt.text + prompt.prefix)
    turn = tokenizer.render_chat([{"role": "user", "content": prompt.text}])
    return tokenizer.encode(turn + prompt.prefix.lstrip(), add_special_tokens=False)
