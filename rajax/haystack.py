"""A question about a long text: a needle hidden in prose that comes with Python."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import random
import re
import sysconfig
from pathlib import Path

from rajax.tokenizer import Tokenizer

CITIES = ("Lisbon", "Oslo", "Nairobi", "Kyoto", "Lima", "Tallinn", "Cork", "Perth")


NEEDLE = "The telephone number of the town hall of {city} is {number}."
QUESTION = "What is the telephone number of the town hall of {city}?"


@dataclasses.dataclass(frozen=True)
class Haystack:
    """A prompt with a needle.

    Attributes:
      tokens: the prompt, in the model's chat format.
      answer: the number that the right answer contains.
      question: what is asked at the end.
    """

    tokens: list[int]
    answer: str
    question: str


def prose() -> str:
    """Paragraphs of plain English from the language reference that Python carries for help()."""
    from pydoc_data.topics import topics

    paragraphs = []
    for name in sorted(topics):
        for block in re.split(r"\n\s*\n", topics[name]):
            paragraph = " ".join(block.split())
            # Code, grammar and lists of names are left out: they are indented or full of signs.
            signs = len(re.findall(r"[^A-Za-z ,.;'()-]", paragraph))
            if block[:1].isupper() and paragraph.endswith(".") and signs <= 0.03 * len(paragraph):
                paragraphs.append(paragraph)
    return "\n".join(dict.fromkeys(paragraphs))


def manual() -> str:
    """All that Python carries for help(), code and grammar included, and after it its modules' own docstrings.

    The longest text that comes with Python: about 140,000 of SmolLM2's tokens.
    """
    from pydoc_data.topics import topics

    parts = [topics[name].strip() for name in sorted(topics)]
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        with contextlib.suppress(SyntaxError, UnicodeDecodeError):
            parts.append(ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "")
    return "\n\n".join(part for part in parts if part)


def haystack(tokenizer: Tokenizer, length: int, *, depth: float, seed: int = 0) -> Haystack:
    """A prompt of about `length` tokens with a needle at `depth` (0 the beginning, 1 the end of the text).

    Args:
      tokenizer: of a model with a chat template.
      length: tokens of the whole prompt, matched to within a sentence.
      depth: where the needle is, from 0 to 1.
      seed: chooses the needle and the part of the prose.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth must be from 0 to 1, found {depth}")
    draw = random.Random(seed)
    city, number = draw.choice(CITIES), str(draw.randrange(1_000_000, 10_000_000))
    needle, question = NEEDLE.format(city=city, number=number), QUESTION.format(city=city)

    def chat(text: str) -> list[int]:
        return tokenizer.apply_chat_template([{"role": "user", "content": f"{text}\n\n{question}"}])

    sentences = re.split(r"(?<=\.)\s", prose())
    start = draw.randrange(len(sentences))
    room = length - len(chat(needle))
    chosen: list[str] = []
    for sentence in sentences[start:] + sentences[:start]:
        size = len(tokenizer.encode(f" {sentence}", add_special_tokens=False))
        if size <= room:
            chosen.append(sentence)
            room -= size
        if room < 8:
            break
    at = round(depth * len(chosen))
    tokens = chat(" ".join([*chosen[:at], needle, *chosen[at:]]))
    return Haystack(tokens, number, question)
