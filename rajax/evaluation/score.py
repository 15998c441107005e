"""Metrics as the benchmarks define them, and the interval of a difference."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000
"""Of the bootstrap."""


# --- RULER (arXiv 2404.06654, section 4)


def string_match_all(answer: str, references: Sequence[str]) -> float:
    """The share of the references that the answer contains, case ignored."""
    answer = _printable(answer)
    return sum(reference.lower() in answer for reference in references) / len(references)


def string_match_part(answer: str, references: Sequence[str]) -> float:
    """1 where the answer contains one of the references, case ignored."""
    answer = _printable(answer)
    return float(any(reference.lower() in answer for reference in references))


def _printable(answer: str) -> str:
    return re.sub(r"[\x00-\x1f]", "\n", answer).strip().lower()


# --- ∞-Bench (arXiv 2402.13718, section 4, and its compute_scores.py)


def first_number(answer: str, references: Sequence[str]) -> float:
    """1 where the first run of digits is the reference."""
    found = re.search(r"[0-9]+", answer)
    return float(found is not None and found.group() == references[0])


def contains_word(answer: str, references: Sequence[str]) -> float:
    """1 where the reference is a word of the answer."""
    return float(references[0] in _words(answer, "\n:\"'.,?!{}"))


def names_someone(answer: str, references: Sequence[str]) -> float:
    """`contains_word`, in capitals: the name of a character in a script."""
    return float(references[0].upper() in _words(answer.upper(), "\n:\"'.,?!{}"))


def last_integer(answer: str, references: Sequence[int]) -> float:
    """1 where the last word is the reference."""
    words = _words(answer, "\n.`'\":")
    return float(bool(words) and words[-1] == str(references[0]))


def first_value(answer: str, references: Sequence[float]) -> float:
    """1 where the first number, whole or decimal, is the reference."""
    found = re.search(r"\d+\.\d+|\d+", answer)
    return float(found is not None and float(found.group()) == references[0])


def leading_values(answer: str, references: Sequence[int]) -> float:
    """The share of the values that are right before the first wrong one."""
    values = [int(digits) for digits in re.findall(r"[0-9]+", answer)]
    right = 0
    for value, reference in zip(values, references, strict=False):
        if value != reference:
            break
        right += 1
    return right / len(references)


def choice(answer: str, references: Sequence[str]) -> float:
    """1 where the answer chooses the right option.

    That is its first letter, what follows "answer is" and the like, or the first single letter from A to D.

    Args:
      answer: what the model said.
      references: the right option's text and its letter.
    """
    letter = references[-1]
    stripped = answer.strip()
    if stripped[:1] in tuple("ABCD"):
        return float(stripped[0] == letter)
    plain = " ".join(_words(answer, "\n\"'.,?!{}"))
    for opening in ("answer is:", "answer:", "answer is", "option is"):
        _, found, rest = plain.partition(opening)
        if found:
            return float(any(rest.strip().startswith(reference) for reference in references))
    letters = [word for word in plain.split() if word in ("A", "B", "C", "D")]
    return float(bool(letters) and letters[0] == letter)


def faulty_function(answer: str, references: Sequence[str]) -> float:
    """1 where the answer names the faulty function or its letter, first or after "answer:" and the like.

    Args:
      answer: what the model said.
      references: the function's name and its letter.
    """
    name, letter = references
    if answer.strip()[:2] in (f"{letter}.", f"{letter}:") or answer.strip() == letter:
        return 1.0
    plain = " ".join(_words(re.sub("[Oo]ption", " ", answer), "\n`'\"-*"))
    for opening in ("answer is:", "is:", "answer:"):
        _, found, rest = plain.partition(opening)
        if found:
            return float(rest.strip().startswith((letter, name)))
    return 0.0


def f1(answer: str, references: Sequence[str]) -> float:
    """The best F1 over the words of a reference, without punctuation and articles."""

    def words(text: str) -> list[str]:
        kept = "".join(c for c in text.lower() if c not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", kept).split()

    return max(_f1(words(answer), words(reference)) for reference in references)


def f1_characters(answer: str, references: Sequence[str]) -> float:
    """The best F1 over the characters of a reference, without punctuation; for Chinese."""

    def characters(text: str) -> list[str]:
        return [c for c in text.lower() if c.isalnum()]

    return max(_f1(characters(answer), characters(reference)) for reference in references)


def rouge_l_sum(answer: str, references: Sequence[str]) -> float:
    """ROUGE-L-Sum (Lin 2004): F1 of the words that each line's longest common subsequences cover, lines united."""
    wanted, found = (_lines(text) for text in (references[0], answer))
    left_wanted = Counter(word for line in wanted for word in line)
    left_found = Counter(word for line in found for word in line)
    total_wanted, total_found = left_wanted.total(), left_found.total()
    hits = 0
    for line in wanted:
        covered = sorted(set().union(*(_common(line, other) for other in found))) if found else []
        for position in covered:
            word = line[position]
            if left_wanted[word] and left_found[word]:
                left_wanted[word] -= 1
                left_found[word] -= 1
                hits += 1
    return 2 * hits / (total_wanted + total_found) if hits else 0.0


def _lines(text: str) -> list[list[str]]:
    return [words for line in text.lower().split("\n") if (words := re.findall(r"[a-z0-9]+", line))]


def _common(line: list[str], other: list[str]) -> set[int]:
    """The positions in `line` of a longest common subsequence with `other`."""
    lengths = [[0] * (len(other) + 1)]
    for word in line:
        above, row = lengths[-1], [0]
        for j, second in enumerate(other):
            row.append(above[j] + 1 if word == second else max(above[j + 1], row[j]))
        lengths.append(row)
    i, j, positions = len(line), len(other), set()
    while i and j:
        if line[i - 1] == other[j - 1]:
            positions.add(i - 1)
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] >= lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return positions


def _f1(found: list[str], wanted: list[str]) -> float:
    same = (Counter(found) & Counter(wanted)).total()
    return 2 * same / (len(found) + len(wanted)) if same else 0.0


def _words(text: str, separators: str) -> list[str]:
    return text.translate(dict.fromkeys(map(ord, separators), " ")).split()


# --- intervals


def interval(tasks: Sequence[Sequence[float]], *, seed: int = 0, level: float = 0.95) -> tuple[float, float]:
    """The bootstrap interval of a mean over tasks, each with as much weight.

    Samples are drawn again with replacement within each task (Efron's percentile interval). Paired differences in,
    the interval of the mean difference out.

    Args:
      tasks: per task, a number for each of its samples.
      seed: of the drawing.
      level: of the interval.
    """
    draw = np.random.default_rng(seed)
    means = np.zeros(RESAMPLES)
    for task in tasks:
        values = np.asarray(task, float)
        means += values[draw.integers(0, len(values), (RESAMPLES, len(values)))].mean(1)
    low, high = np.quantile(means / len(tasks), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
