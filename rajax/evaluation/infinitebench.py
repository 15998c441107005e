"""∞-Bench (arXiv 2402.13718): its synthetic tasks from generators, the others from its files.

The definitions are those of section 3 and of OpenBMB/InfiniteBench's scripts: digits, depths of calls, ranges of
numbers, tokens to generate. The prompts are those with the beginning of an answer, which the benchmark has for models
that are not behind an API. What differs: a synthetic text is as long as is asked for; a list of numbers has an odd
length, so that its median is one of them; the values of an expression start with its first number, as the prompt's
examples do. A text from a file that is too long loses its middle, as published.
"""

from __future__ import annotations

import functools
import json
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rajax.evaluation import score
from rajax.evaluation.ruler import NOISE
from rajax.evaluation.sample import Prompt, Task
from rajax.tokenizer import Tokenizer


def tasks(tokenizer: Tokenizer, directory: Path | None = None) -> tuple[dict[str, Task], dict[str, str]]:
    """The tasks by name, and per task that cannot run the reason.

    Args:
      tokenizer: the model's, to shorten texts from files.
      directory: with the benchmark's files; None runs the synthetic tasks alone.

    Raises:
      ValueError: a file is something else.
    """
    found = [
        Task("passkey", pass_key, score.first_number, 6),
        Task("number_string", number_string, score.first_number, 12),
        Task("kv_retrieval", key_value, score.contains_word, 50),
        Task("code_run", code_run, score.last_integer, 5, least=max(CALLS)),
        Task("math_find", math_find, score.first_value, 3, least=20),
        Task("math_calc", math_calc, score.leading_values, 30_000, least=2),
    ]
    not_run = {}
    for name, (ask, metric, new_tokens) in FROM_FILES.items():
        if directory is None:
            not_run[name] = "needs --infinitebench DIR"
        elif not (file := directory / f"{name}.jsonl").exists():
            not_run[name] = f"needs {file}"
        else:
            found.append(_from_file(name, file, ask, metric, new_tokens, tokenizer))
    return {task.name: task for task in found}, not_run


# --- synthetic


def pass_key(draw: random.Random, size: int, length: int, index: int) -> Prompt:
    """Five digits in `size` lines of noise."""
    key = "".join(draw.choices("0123456789", k=5))
    said = f"The pass key is {key}. Remember it. {key} is the pass key."
    context, depth = _hidden(draw, size, said)
    task = "Find it and memorize them. I will quiz you about the important information there."
    text = (
        f"There is an important info hidden inside a lot of irrelevant text. {task}\n\n{context}\n\n"
        "What is the pass key?"
    )
    return Prompt(text, "\n\nThe pass key is", [key], depth)


def number_string(draw: random.Random, size: int, length: int, index: int) -> Prompt:
    """Ten digits, half of them repetitions of the digit before, in `size` lines of noise."""
    digits = draw.choices("0123456789", k=5)
    for _ in range(5):
        place = draw.randrange(len(digits))
        digits.insert(place, digits[place])
    key = "".join(digits)
    said = f"The sequence of digits is {key}. Remember it. {key} is the sequence of digits."
    context, depth = _hidden(draw, size, said)
    task = "Find it. I will quiz you about the important information there."
    text = (
        f"There is an important info hidden inside a lot of irrelevant text. {task}\n\n{context}\n\n"
        "What is the sequence of digits?"
    )
    return Prompt(text, "\n\nThe sequence of digits is", [key], depth)


def _hidden(draw: random.Random, size: int, said: str) -> tuple[str, float]:
    depth = draw.random()
    before = round(depth * size)
    return "\n".join([NOISE] * before + [said] + [NOISE] * (size - before)), before / size


def key_value(draw: random.Random, size: int, length: int, index: int) -> Prompt:
    """A JSON object of `size` pairs of uuids (Liu et al., arXiv 2307.03172)."""
    depth = draw.random()
    pairs = {_uuid(draw): _uuid(draw) for _ in range(size)}
    place = int(depth * size)
    key, value = list(pairs.items())[place]
    text = (
        "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
        f'{json.dumps(pairs)}\n\nKey: "{key}"'
    )
    return Prompt(
        text, "\nThe value associated with the specified key is:", [value], place / max(1, size - 1)
    )


def _uuid(draw: random.Random) -> str:
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


CALLS = (2, 4, 6, 8, 10)
"""Functions that a call of the one asked for runs."""


def code_run(draw: random.Random, size: int, length: int, index: int) -> Prompt:
    """`size` functions, each of which calls at most one other and adds or subtracts a number."""
    calls, argument = draw.choice(CALLS), draw.randint(-10, 10)
    width = size // calls
    numbers = draw.sample(range(1, 2 * size + 1), size)
    layers = [numbers[i * width : (i + 1) * width] for i in range(calls - 1)]
    layers.append(numbers[(calls - 1) * width :])
    called: dict[int, int] = {}
    added: dict[int, int] = {}
    for layer, next_layer in zip(layers, [*layers[1:], []], strict=True):
        for number in layer:
            added[number] = draw.randint(-12, 17)
            if next_layer:
                called[number] = draw.choice(next_layer)
    lines = []
    for number in sorted(numbers):
        what = f"func_{called[number]}(x)" if number in called else "x"
        if added[number]:
            what += f" {'+' if added[number] > 0 else '-'} {abs(added[number])}"
        lines.append(f"def func_{number}(x):\n    return {what}\n")
    asked = layers[0][0]
    value, at = argument, asked
    while True:
        value += added[at]
        if at not in called:
            break
        at = called[at]
    call = f"func_{asked}({argument})"
    context = "\n".join(lines)
    text = (
        f"There is a function called func_{asked} in the following Python code.\n\n{context}\n\n"
        f"Please compute the exact value of {call}."
    )
    return Prompt(text, f" The value of {call} is", [value])


ASKED = (
    "largest",
    "second largest",
    "third largest",
    "smallest",
    "second smallest",
    "third smallest",
    "median",
)


def math_find(draw: random.Random, size: int, length: int, index: int) -> Prompt:
    """A list of about `size` numbers from 0 to 99, one of whose seven key numbers is asked for."""
    asked = draw.choice(ASKED)
    least, most = 0, 99
    if asked.endswith("largest") or (asked == "median" and draw.random() < 0.5):
        most = draw.randint(79, 99)
    else:
        least = draw.randint(0, 19)
    numbers = [draw.randint(least, most) for _ in range(size | 1)]
    if asked == "median":
        answer = sorted(numbers)[len(numbers) // 2]
    else:
        ranked = sorted(set(numbers), reverse=asked.endswith("largest"))
        answer = ranked[{"second": 1, "third": 2}.get(asked.split()[0], 0)]
    task = "Calculate" if asked == "median" else "Find"
    text = (
        f"{task} the {asked} number from the list below:\n\n{numbers}\n\n"
        "You should answer with only one number, no other words."
    )
    return Prompt(text, f" The {asked} number of the list is:", [answer])


def math_calc(draw: random.Random, size: int, length: int, index: int) -> Prompt:
    """An expression of `size` numbers, added and subtracted, whose value stays from 0 to 99."""
    value = draw.randint(0, 99)
    expression, values = [str(value)], [value]
    for _ in range(size - 1):
        number = draw.randint(0, 99)
        if draw.random() < 0.5:
            number = number if value + number <= 99 else draw.randint(0, 99 - value)
            expression.append(f"+ {number}")
            value += number
        else:
            number = number if number <= value else draw.randint(0, value)
            expression.append(f"- {number}")
            value -= number
        values.append(value)
    text = (
        "Let us calculate the intermediate values of an expression.\n\n"
        "Expression: 1 + 3 + 4\nValues: [1, 4, 8]\n\nExpression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\n"
        f"Expression: {' '.join(expression)}"
    )
    return Prompt(text, "\nValues:", values)


# --- from files

Row = dict[str, Any]
Ask = Callable[[str, Row], tuple[str, str]]
"""From a text and its row to the prompt's text and prefix."""


def _book_question(context: str, row: Row) -> tuple[str, str]:
    task = "Read the book and answer the question. Be very concise in your answer."
    return f"{task}\n\n{context}\n\nQuestion: {row['input']}", "\nAnswer:"


def _book_choice(context: str, row: Row) -> tuple[str, str]:
    task = "Read the book and answer the question."
    return (
        f"{task}\n\n{context}\n\nQuestion: {row['input']}\n{_options(row)}",
        "\n\nThe letter of the correct answer is",
    )


def _book_summary(context: str, row: Row) -> tuple[str, str]:
    return f"Summarize the book below.\n\n{context}", "\n\nSummary:"


def _chinese_book_question(context: str, row: Row) -> tuple[str, str]:
    return f"阅读以下书籍然后回答问题。\n\n{context}\n\n问题：{row['input']}", "\n答案："


def _dialogue(context: str, row: Row) -> tuple[str, str]:
    task = (
        'Below is a dialogue script where one random occurrence of a character name is replaced with "$$MASK$$", '
        "and you should try to guess who that character is."
    )
    return f"{task}\n\n{context}", "\n\nThe name that has been replaced with $$MASK$$ is likely"


def _debug(context: str, row: Row) -> tuple[str, str]:
    task = (
        "Following is a Python code where exactly one of the functions/methods has a deliberate error that makes it "
        "crash."
    )
    return f"{task}\n\n{context}\n\nOptions:\n{_options(row)}", "\n\nThe correct option is:"


def _options(row: Row) -> str:
    return "\n".join(f"{letter}. {option}" for letter, option in zip("ABCD", row["options"], strict=True))


FROM_FILES: dict[str, tuple[Ask, Callable[[str, list[Any]], float], int]] = {
    "longbook_sum_eng": (_book_summary, score.rouge_l_sum, 1200),
    "longbook_qa_eng": (_book_question, score.f1, 40),
    "longbook_choice_eng": (_book_choice, score.choice, 40),
    "longbook_qa_chn": (_chinese_book_question, score.f1_characters, 40),
    "longdialogue_qa_eng": (_dialogue, score.names_someone, 40),
    "code_debug": (_debug, score.faulty_function, 5),
}
"""Per task how its rows are asked, its metric and its tokens to generate."""


def _from_file(
    name: str,
    file: Path,
    ask: Ask,
    metric: Callable[[str, list[Any]], float],
    new_tokens: int,
    tokenizer: Tokenizer,
) -> Task:
    rows = read_rows(file)

    @functools.lru_cache(maxsize=1)
    def encoded(index: int) -> list[int]:
        return tokenizer.encode(rows[index]["context"], add_special_tokens=False)

    def build(draw: random.Random, size: int, length: int, index: int) -> Prompt:
        row, tokens = rows[index], encoded(index)
        context = row["context"]
        if size < len(tokens):
            half = size // 2
            context = tokenizer.decode(tokens[:half]) + tokenizer.decode(
                tokens[len(tokens) - (size - half) :]
            )
        text, prefix = ask(context, row)
        return Prompt(text, prefix, row["references"])

    longest = max(len(row["context"]) for row in rows)
    return Task(name, build, metric, new_tokens, least=2, most=max(2, longest), samples=len(rows))


def read_rows(file: Path) -> list[Row]:
    """The rows of one of the benchmark's files: JSON lines with context, input, answer and options.

    Returns:
      The rows, each with "references": the answers; for a choice the right option's text and letter.

    Raises:
      ValueError: a line is something else; the message names it.
    """
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            row = {name: row[name] for name in ("context", "input", "answer")} | {
                "options": row.get("options") or []
            }
            if not isinstance(row["context"], str) or not isinstance(row["input"], str):
                raise TypeError("context and input must be text")
            answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
            if not answers:
                raise ValueError("answer is empty")
            answers = [str(answer) for answer in answers]
            if row["options"]:
                if len(row["options"]) != 4:
                    raise ValueError(f"options must be four, found {len(row['options'])}")
                if answers[0] not in row["options"]:
                    raise ValueError(f"answer {answers[0]!r} is none of the options")
                answers = [answers[0], "ABCD"[row["options"].index(answers[0])]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file}, line {number} is no row of ∞-Bench: {type(error).__name__}: {error}"
            ) from error
        rows.append({**row, "references": answers})
    if not rows:
        raise ValueError(f"{file} has no rows")
    return rows
