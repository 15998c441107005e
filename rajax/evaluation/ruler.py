"""RULER's 13 tasks (arXiv 2404.06654, section 3 and appendix B; NVIDIA/RULER's synthetic.yaml), generated.

Counts, hops, answer formats and tokens to generate are the published ones. What differs: keys and words come from
lists of our own, prose from a file or from Python's documentation instead of essays, and a prompt's size is found by
bisection, where RULER steps by tens of lines. In a key's haystack no needle has the key that is asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import random
import re
import string
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from rajax.evaluation.sample import Build, Prompt, Task
from rajax.evaluation.score import string_match_all, string_match_part
from rajax.evaluation.words import compounds, plain

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
DEPTHS = 40
"""Evenly spaced depths at which a needle may be in prose."""


@dataclasses.dataclass(frozen=True)
class Documents:
    """Questions about documents.

    Attributes:
      texts: all documents.
      questions: per question (question, answers, its documents, further documents on the same subject), documents by
        their number.
    """

    texts: list[str]
    questions: list[tuple[str, list[str], list[int], list[int]]]


def tasks(
    haystack: str, squad: Documents | None = None, hotpotqa: Documents | None = None
) -> tuple[dict[str, Task], dict[str, str]]:
    """The tasks by name, and per task that cannot run the reason.

    Args:
      haystack: prose to hide needles in, a word at least; repeated where it is too short.
      squad, hotpotqa: from `read_squad` and `read_hotpotqa`, for the two question answering tasks.
    """
    prose = functools.partial(_in_prose, haystack.split())
    needles: dict[str, Build] = {
        "niah_single_1": niah(_in_noise),
        "niah_single_2": niah(prose),
        "niah_single_3": niah(prose, values="uuids"),
        "niah_multikey_1": niah(prose, number_of_keys=4),
        "niah_multikey_2": niah(_among_needles),
        "niah_multikey_3": niah(_among_needles, keys="uuids", values="uuids"),
        "niah_multivalue": niah(prose, number_of_values=4),
        "niah_multiquery": niah(prose, number_of_keys=4, number_of_queries=4),
    }
    found = [Task(name, build, string_match_all, 128) for name, build in needles.items()]
    found.append(Task("vt", variable_tracking, string_match_all, 30, least=5))
    found.append(
        Task("cwe", common_words, string_match_all, 120, least=20, most=len(plain()) + len(compounds()))
    )
    found.append(Task("fwe", frequent_words, string_match_all, 50, least=100))
    not_run = {}
    for name, option, documents in (("qa_1", "--squad", squad), ("qa_2", "--hotpotqa", hotpotqa)):
        if documents is None:
            not_run[name] = f"needs {option} FILE"
        else:
            least = max(len(own) for _, _, own, _ in documents.questions)
            build = functools.partial(question, documents)
            found.append(
                Task(name, build, string_match_part, 32, least=least, most=max(least, len(documents.texts)))
            )
    return {task.name: task for task in found}, not_run


# --- needles in haystacks

Needle = tuple[str, str]
"""A key and its value."""
Hide = Callable[[random.Random, int, list[Needle], str, str], tuple[str, list[str]]]
"""Hides needles; takes (random numbers, size, needles, kind of keys, kind of values), returns the text and the
needles' sentences."""


def niah(
    hide: Hide,
    *,
    keys: str = "words",
    values: str = "numbers",
    number_of_keys: int = 1,
    number_of_values: int = 1,
    number_of_queries: int = 1,
) -> Build:
    """A task that asks for what special numbers, words or uuids were said to be."""

    def build(draw: random.Random, size: int, length: int, index: int) -> Prompt:
        names = _distinct(draw, keys, number_of_keys)
        drawn = _distinct(draw, values, number_of_keys * number_of_values)
        of_key = {
            name: drawn[i * number_of_values : (i + 1) * number_of_values] for i, name in enumerate(names)
        }
        asked = draw.sample(names, number_of_queries)
        needles = [(name, value) for name, its in of_key.items() for value in its]
        draw.shuffle(needles)
        context, sentences = hide(draw, size, needles, keys, values)
        references = [value for name in asked for value in of_key[name]]
        one = len(references) == 1
        kind = values[:-1] if one else values
        query = asked[0] if len(asked) == 1 else ", ".join(asked[:-1]) + f", and {asked[-1]}"
        hidden = f"A special magic {kind} is" if one else f"Some special magic {kind} are"
        text = (
            f"{hidden} hidden within the following text. Make sure to memorize it. I will quiz you about the {kind} "
            f"afterwards.\n{context}\nWhat {'is' if one else 'are all'} the special magic {kind} for {query} mentioned "
            "in the provided text?"
        )
        prefix = (
            f" The special magic {kind} for {query} mentioned in the provided text {'is' if one else 'are'}"
        )
        depth = None
        if one:
            needle = sentences[needles.index((asked[0], references[0]))]
            depth = context.index(needle) / max(1, len(context) - len(needle))
        return Prompt(text, prefix, references, depth)

    return build


def _in_prose(
    words: Sequence[str], draw: random.Random, size: int, needles: list[Needle], keys: str, values: str
) -> tuple[str, list[str]]:
    """Between the sentences of the first `size` words of the prose."""
    depths = sorted(draw.sample(range(DEPTHS), len(needles)))
    taken = " ".join(words[i % len(words)] for i in range(size))
    sentences = re.split(r"(?<=[.!?])\s", taken)
    said = [NEEDLE.format(kind=values, key=key, value=value) for key, value in needles]
    for depth, needle in reversed(list(zip(depths, said, strict=True))):
        sentences.insert(int(len(sentences) * depth / (DEPTHS - 1)), needle)
    return " ".join(sentences), said


def _in_noise(
    draw: random.Random, size: int, needles: list[Needle], keys: str, values: str
) -> tuple[str, list[str]]:
    """Between `size` lines that say nothing."""
    return _between([NOISE] * size, draw, needles, values)


def _among_needles(
    draw: random.Random, size: int, needles: list[Needle], keys: str, values: str
) -> tuple[str, list[str]]:
    """Between `size` needles of other keys."""
    places = random.Random(draw.random())
    asked = {key for key, _ in needles}
    others: list[str] = []
    while len(others) < size:
        key, value = _one(draw, keys), _one(draw, values)
        if key not in asked:
            others.append(NEEDLE.format(kind=values, key=key, value=value))
    return _between(others, places, needles, values)


def _between(
    lines: list[str], draw: random.Random, needles: list[Needle], values: str
) -> tuple[str, list[str]]:
    said = [NEEDLE.format(kind=values, key=key, value=value) for key, value in needles]
    places = sorted(draw.random() for _ in said)
    for place, needle in reversed(list(zip(places, said, strict=True))):
        lines.insert(int(place * (len(lines) + 1)), needle)
    return "\n".join(lines), said


def _one(draw: random.Random, kind: str) -> str:
    if kind == "numbers":
        return str(draw.randrange(1_000_000, 10_000_000))
    if kind == "uuids":
        return str(uuid.UUID(int=draw.getrandbits(128), version=4))
    return draw.choice(compounds())


def _distinct(draw: random.Random, kind: str, count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[_one(draw, kind)] = None
    return list(found)


# --- variable tracking

HOPS = 4
EXAMPLE_LINES = 15
"""Lines of noise in the example, which has about 500 tokens with its answer."""


def variable_tracking(draw: random.Random, size: int, length: int, index: int) -> Prompt:
    """One chain of four hops in `size` lines of noise, after an example with shorter names."""
    example, names = _chain(draw, EXAMPLE_LINES, letters=3)
    asked, references = _chain(draw, size, letters=5)
    text = f"{example.text}{example.prefix} {' '.join(names)}\n\n{asked.text}"
    return Prompt(text, asked.prefix, references)


def _chain(draw: random.Random, lines: int, letters: int) -> tuple[Prompt, list[str]]:
    names: dict[str, None] = {}
    while len(names) <= HOPS:
        names["".join(draw.choices(string.ascii_uppercase, k=letters))] = None
    chain, value = list(names), str(draw.randrange(10_000, 100_000))
    assigned = [f"VAR {chain[0]} = {value}"]
    assigned += [f"VAR {name} = VAR {before}" for before, name in itertools.pairwise(chain)]
    places = sorted(draw.random() for _ in assigned)
    parts = [f"{NOISE}\n"] * lines
    for place, assignment in reversed(list(zip(places, assigned, strict=True))):
        parts.insert(int(place * (lines + 1)), f"{assignment} ")
    text = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"{''.join(parts)}\nQuestion: Find all variables that are assigned the value {value} in the text above."
    )
    prefix = (
        " Answer: According to the chain(s) of variable assignment in the text above, "
        f"{len(chain)} variables are assigned the value {value}, they are:"
    )
    return Prompt(text, prefix, chain), chain


# --- words to count

COMMON = 10
SHORT = 4096
"""Samples of fewer tokens repeat words less often."""


def common_words(draw: random.Random, size: int, length: int, index: int) -> Prompt:
    """A list of `size` words, ten of which are ten times as frequent as the others, after an example."""
    if length < SHORT:
        example, found = _counted(draw, 20, common=3, others=1)
        asked, references = _counted(draw, size, common=6, others=1)
    else:
        example, found = _counted(draw, 40, common=10, others=3)
        asked, references = _counted(draw, size, common=30, others=3)
    prefix = " Answer: The top 10 words that appear most often in the list are:"
    return Prompt(f"{example}{prefix} {_numbered(found)}\n{asked}", prefix, references)


def _counted(draw: random.Random, size: int, *, common: int, others: int) -> tuple[str, list[str]]:
    order = random.Random(draw.random())
    # Compound words where the others do not suffice.
    words = draw.sample(plain(), len(plain()))
    if size > len(words):
        words += draw.sample(compounds(), size - len(words))
    entries = words[:COMMON] * common + words[COMMON:size] * others
    order.shuffle(entries)
    text = (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        f"appear most often.\n{_numbered(entries)}\nQuestion: What are the 10 most common words in the above list?"
    )
    return text, words[:COMMON]


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


ZETA = math.pi**2 / 6
"""ζ(2): the frequency of the word of rank k is 1 / (ζ(2) k²)."""


def frequent_words(draw: random.Random, size: int, length: int, index: int) -> Prompt:
    """About `size` coded words whose frequencies fall with the square of their rank; the first rank is dots."""
    coded: dict[str, None] = {}
    while len(coded) < max(4, length // 50):
        coded["".join(draw.choices(string.ascii_lowercase, k=6))] = None
    words = ["...", *coded][: len(coded)]
    entries = [word for rank, word in enumerate(words, 1) for _ in range(int(size / (ZETA * rank**2)))]
    draw.shuffle(entries)
    text = (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        f"appeared coded words. {' '.join(entries)}\nQuestion: Do not provide any explanation. Please ignore the dots "
        "'....'. What are the three most frequently appeared words in the above coded text?"
    )
    prefix = " Answer: According to the coded text above, the three most frequently appeared words are:"
    return Prompt(text, prefix, words[1:4])


# --- questions about documents


def question(documents: Documents, draw: random.Random, size: int, length: int, index: int) -> Prompt:
    """A question and `size` documents, its own among them."""
    asked, answers, own, related = documents.questions[draw.randrange(len(documents.questions))]
    # Those on the same subject come first.
    taken = {*own, *related}
    others = [i for i in range(len(documents.texts)) if i not in taken]
    order = random.Random(draw.random())
    chosen = own + (draw.sample(related, len(related)) + draw.sample(others, len(others)))[: size - len(own)]
    order.shuffle(chosen)
    context = "\n\n".join(f"Document {i}:\n{documents.texts[number]}" for i, number in enumerate(chosen, 1))
    task = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other "
        "words."
    )
    text = f"{task}\n\nThe following are given documents.\n\n{context}\n\n{task}\n\nQuestion: {asked}"
    return Prompt(text, " Answer:", answers)


def read_squad(path: Path) -> Documents:
    """Questions in SQuAD's format (2.0's dev set is RULER's qa_1); those without an answer are left out.

    Raises:
      ValueError: the file is something else.
    """
    try:
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        numbers: dict[str, int] = {}
        for article in articles:
            for paragraph in article["paragraphs"]:
                numbers.setdefault(paragraph["context"], len(numbers))
        questions = []
        for article in articles:
            every = [numbers[paragraph["context"]] for paragraph in article["paragraphs"]]
            for paragraph in article["paragraphs"]:
                own = numbers[paragraph["context"]]
                related = [number for number in dict.fromkeys(every) if number != own]
                questions += [
                    (q["question"], [a["text"] for a in q["answers"]], [own], related)
                    for q in paragraph["qas"]
                    if q["answers"] and not q.get("is_impossible")
                ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not in SQuAD's format: {type(error).__name__}: {error}") from error
    return _checked(path, Documents(list(numbers), questions))


def read_hotpotqa(path: Path) -> Documents:
    """Questions in HotpotQA's format (its distractor dev set is RULER's qa_2).

    Raises:
      ValueError: the file is something else.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        numbers: dict[str, int] = {}
        questions: list[tuple[str, list[str], list[int], list[int]]] = []
        for row in rows:
            texts = [f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]]
            own = [numbers.setdefault(text, len(numbers)) for text in texts]
            questions.append((row["question"], [row["answer"]], list(dict.fromkeys(own)), []))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not in HotpotQA's format: {type(error).__name__}: {error}") from error
    return _checked(path, Documents(list(numbers), questions))


def _checked(path: Path, documents: Documents) -> Documents:
    if not documents.questions:
        raise ValueError(f"{path} has no question with an answer")
    return documents
