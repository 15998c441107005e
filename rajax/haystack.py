"""A question about a long text: a needle hidden in prose that comes with Python."""

from __future__ import annotations

import dataclasses
import random

from rajax.tokenizer import Tokenizer

CITIES = ("Lisbon", "Oslo", "Nairobi", "Kyoto", "Lima", "Tallinn", "Cork", "Perth")


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
    """The language reference that Python carries for help(): some 700,000 characters of technical English."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))


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
    needle = f" The special magic number for {city} is {number}. Remember it: the number for {city} is {number}. "
    question = f"What is the special magic number for {city} mentioned in the text above?"

    def chat(text: str) -> list[int]:
        return tokenizer.apply_chat_template([{"role": "user", "content": f"{text}\n\n{question}"}])

    sentences = prose().split(". ")
    start = draw.randrange(len(sentences))
    sentences = [s + ". " for s in sentences[start:] + sentences[:start]]
    room = length - len(chat(needle))
    chosen: list[str] = []
    for sentence in sentences:
        room -= len(tokenizer.encode(sentence, add_special_tokens=False))
        if room < 0:
            break
        chosen.append(sentence)
    at = round(depth * len(chosen))
    tokens = chat("".join(chosen[:at]) + needle + "".join(chosen[at:]))
    return Haystack(tokens, number, question)
