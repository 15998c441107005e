"""The benchmarks: samples say what their answers are, a run can be interrupted, the report holds what was found."""

from __future__ import annotations

import collections
import json
import re
from pathlib import Path
from typing import Any

import byte_llama
import numpy as np
import pytest
from typer.testing import CliRunner, Result

import rajax
from rajax import cli
from rajax.convert import convert
from rajax.evaluation import infinitebench, perplexity, report, ruler, score, suite
from rajax.evaluation import run as loop
from rajax.evaluation.sample import Sample, Task, make
from rajax.haystack import prose
from rajax.retrieval import parse_attentions

RETRIEVAL = "scann:sink_tokens=2:window=8", "wave:sink_tokens=2:window=8"
ATTENTION = ",".join(("dense", *RETRIEVAL))
SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": f"{city} has {count} bridges. " + "It rains. " * 10,
                    "qas": [
                        {
                            "question": f"How many bridges has {city}?",
                            "answers": [{"text": str(count)}, {"text": f"{count} bridges"}],
                            "is_impossible": False,
                        },
                        {"question": f"Who built {city}?", "answers": [], "is_impossible": True},
                    ],
                }
                for city, count in cities
            ]
        }
        for cities in (
            [("Arl", 14), ("Belm", 25), ("Corv", 36)],
            [(f"Dorn{i}", 1000 + i) for i in range(90)],
        )
    ]
}
HOTPOTQA = [
    {
        "question": f"Which river flows through {city}?",
        "answer": f"the {city}aa",
        "context": [
            [city, [f"The {city}aa flows through it.", " It is old."]],
            ["Hills", ["They are high."]],
        ],
    }
    for city in (f"Esk{i}" for i in range(250))
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny model whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("evaluation")
    convert(byte_llama.save(folder / "hf", max_position_embeddings=8192), folder / "checkpoint")
    return folder / "checkpoint"


@pytest.fixture(scope="module")
def tokenizer(checkpoint) -> rajax.Tokenizer:
    return rajax.load_tokenizer(checkpoint)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Question answering data of our own."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "squad.json").write_text(json.dumps(SQUAD), encoding="utf-8")
    (folder / "hotpotqa.json").write_text(json.dumps(HOTPOTQA), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tasks(tokenizer, files) -> dict[str, Task]:
    squad, hotpotqa = ruler.read_squad(files / "squad.json"), ruler.read_hotpotqa(files / "hotpotqa.json")
    found, not_run = ruler.tasks(prose(), squad, hotpotqa)
    assert not not_run
    return found | infinitebench.tasks(tokenizer)[0]


# --- samples: a solver that reads the prompt finds the answer


def solve_needles(text: str) -> str:
    said = collections.defaultdict(list)
    for key, value in re.findall(r"special magic \w+ for (\S+) is: (\S+)\.", text):
        said[key].append(value)
    asked = re.search(r"\nWhat (?:is|are all) the special magic \w+ for (.+) mentioned", text)
    assert asked is not None
    return " ".join(value for key in re.split(r", and |, ", asked[1]) for value in said[key])


def solve_variables(text: str) -> str:
    text = text.split("Memorize and track")[-1]
    value = text.split("assigned the value ")[1].split()[0]
    values: dict[str, str] = {}
    for name, of in re.findall(r"VAR (\w+) = (VAR \w+|\d+)", text):
        values[name] = values[of[4:]] if of.startswith("VAR") else of
    return " ".join(name for name, found in values.items() if found == value)


def solve_common(text: str) -> str:
    words = re.findall(r"\d+\. (\S+)", text.split("Below is a numbered list")[-1].split("Question")[0])
    return " ".join(word for word, _ in collections.Counter(words).most_common(10))


def solve_frequent(text: str) -> str:
    words = text.split("coded words. ")[1].split("\nQuestion")[0].split()
    (dots, _), *best = collections.Counter(words).most_common(4)
    assert dots == "..."
    return " ".join(word for word, _ in best)


def solve_question(text: str) -> str:
    city = text.split("Question: ")[-1].strip("?").split()[-1]
    bridges = re.search(rf"{city} has (\d+) bridges", text)
    if bridges is not None:
        return bridges[1]
    assert f"The {city}aa flows through it. It is old." in text
    return f"The {city}aa."


def solve_digits(text: str) -> str:
    return re.findall(r"(?:pass key|sequence of digits) is (\d+)", text)[0]


def solve_json(text: str) -> str:
    data = json.loads(text.split("JSON data:\n")[1].split("\n\nKey")[0])
    return f'"{data[text.split(chr(34))[-2]]}".'


def solve_code(text: str) -> str:
    call = text.split("exact value of ")[1].rstrip(".")
    functions: dict[str, Any] = {}
    exec(text.split("Python code.\n\n")[1].split("\n\nPlease")[0], functions)
    return f" {eval(call, functions)}."


def solve_list(text: str) -> str:
    numbers = json.loads(re.findall(r"\[.*\]", text)[-1])
    asked = re.search(r"the (.+) number from", text)[1]
    if asked == "median":
        return str(int(np.median(numbers)))
    ranked = sorted(set(numbers), reverse="largest" in asked)
    return str(ranked[{"second": 1, "third": 2}.get(asked.split()[0], 0)])


def solve_expression(text: str) -> str:
    words = text.split("Expression: ")[-1].split()
    values = [int(words[0])]
    for sign, number in zip(words[1::2], words[2::2], strict=True):
        values.append(values[-1] + (int(number) if sign == "+" else -int(number)))
    return str(values)


SOLVERS = {
    **dict.fromkeys(
        [f"niah_{name}_{number}" for name in ("single", "multikey") for number in (1, 2, 3)], solve_needles
    ),
    "niah_multivalue": solve_needles,
    "niah_multiquery": solve_needles,
    "vt": solve_variables,
    "cwe": solve_common,
    "fwe": solve_frequent,
    "qa_1": solve_question,
    "qa_2": solve_question,
    "passkey": solve_digits,
    "number_string": solve_digits,
    "kv_retrieval": solve_json,
    "code_run": solve_code,
    "math_find": solve_list,
    "math_calc": solve_expression,
}


@pytest.mark.parametrize("length", [3500, 12000])
@pytest.mark.parametrize("name", SOLVERS)
def test_the_answer_follows_from_the_prompt(name, length, tasks, tokenizer):
    task = tasks[name]
    samples = [
        make(task, length, index, seed=7, tokenizer=tokenizer, chat=length == 3500) for index in range(3)
    ]
    for sample in samples:
        text = tokenizer.decode(sample.tokens)
        assert text.startswith("[user]") == (length == 3500)
        assert text.endswith(sample.prompt.prefix.lstrip())
        answer = SOLVERS[name](sample.prompt.text)
        assert task.score(answer, sample.prompt.references) == 1
        assert task.score("It is not said.", sample.prompt.references) == 0
        assert len(sample.tokens) + sample.max_new_tokens <= length
        # The next larger prompt has another needle, line, word, function or document more.
        assert len(sample.tokens) + sample.max_new_tokens > 0.93 * length
        if sample.prompt.depth is not None:
            assert 0 <= sample.prompt.depth <= 1
    assert len({tuple(sample.tokens) for sample in samples}) == 3
    again = make(task, length, 2, seed=7, tokenizer=tokenizer, chat=length == 3500)
    assert again.tokens == samples[2].tokens
    other = make(task, length, 2, seed=8, tokenizer=tokenizer, chat=length == 3500)
    assert other.tokens != samples[2].tokens


def prompt(tasks, tokenizer, name: str, length: int = 12000) -> Sample:
    return make(tasks[name], length, 0, seed=0, tokenizer=tokenizer, chat=False)


def test_ruler_has_the_published_counts(tasks, tokenizer):
    """RULER's synthetic.yaml: needles, their kinds, and the tokens to generate."""
    uuid = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}"
    word, number = r"[a-z]+-[a-z]+", r"\d{7}"
    for name, key, value, needles, references in (
        ("niah_single_1", word, number, 1, 1),
        ("niah_single_2", word, number, 1, 1),
        ("niah_single_3", word, uuid, 1, 1),
        ("niah_multikey_1", word, number, 4, 1),
        ("niah_multikey_2", word, number, None, 1),
        ("niah_multikey_3", uuid, uuid, None, 1),
        ("niah_multivalue", word, number, 4, 4),
        ("niah_multiquery", word, number, 4, 4),
    ):
        sample = prompt(tasks, tokenizer, name)
        found = re.findall(rf"magic (\w+) for ({key}) is: ({value})\.", sample.prompt.text)
        assert len(found) == (needles or len(found))
        assert len(found) > 50 or needles
        assert {kind for kind, _, _ in found} == {"uuids" if value == uuid else "numbers"}
        assert len(sample.prompt.references) == references
        assert sample.max_new_tokens == 128
    keys = {key for _, key, _ in found}
    assert len(keys) == 4
    assert (ruler.NOISE in prompt(tasks, tokenizer, "niah_single_1").prompt.text) is True
    chain = prompt(tasks, tokenizer, "vt")
    assert (len(chain.prompt.references), chain.max_new_tokens) == (5, 30)
    assert "5 variables are assigned the value" in chain.prompt.prefix
    for name, new_tokens in (("cwe", 120), ("fwe", 50), ("qa_1", 32), ("qa_2", 32)):
        assert prompt(tasks, tokenizer, name).max_new_tokens == new_tokens


@pytest.mark.parametrize(("length", "counts"), [(4000, {6, 1}), (12000, {30, 3})])
def test_common_words_are_as_frequent_as_published(length, counts, tasks, tokenizer):
    text = prompt(tasks, tokenizer, "cwe", length).prompt.text
    words = re.findall(r"\d+\. (\S+)", text.split("Below is a numbered list")[-1])
    assert set(collections.Counter(words).values()) == counts


def test_frequencies_fall_with_the_square_of_the_rank(tasks, tokenizer):
    words = (
        prompt(tasks, tokenizer, "fwe").prompt.text.split("coded words. ")[1].split("\nQuestion")[0].split()
    )
    counts = [count for _, count in collections.Counter(words).most_common(8)]
    for rank, count in enumerate(counts, 1):
        assert count == pytest.approx(counts[0] / rank**2, abs=1.1)


def test_needles_are_at_all_depths(tasks, tokenizer):
    for name in ("niah_single_1", "niah_single_2", "niah_multikey_2", "passkey", "kv_retrieval"):
        depths = [
            make(tasks[name], 3500, index, seed=0, tokenizer=tokenizer, chat=False).prompt.depth
            for index in range(40)
        ]
        assert min(depths) < 0.15
        assert max(depths) > 0.85


def test_a_length_too_short_is_refused(tasks, tokenizer):
    with pytest.raises(ValueError, match=r"vt needs at least \d+ tokens, found a length of 500"):
        make(tasks["vt"], 500, 0, seed=0, tokenizer=tokenizer, chat=False)


def test_a_haystack_that_is_too_short_is_repeated(tokenizer):
    found, _ = ruler.tasks("Never mind. All is well.")
    text = make(found["niah_single_2"], 2000, 0, seed=0, tokenizer=tokenizer, chat=False).prompt.text
    assert text.count("All is well.") > 40


# --- files


def test_infinitebench_files_are_read_and_shortened_in_the_middle(tokenizer, tmp_path):
    rows = [
        {"id": 0, "context": "begin " + "x" * 9000 + " end", "input": "Who?", "answer": ["Ann", "Anna"]},
        {"id": 1, "context": "short", "input": "When?", "answer": "now", "options": []},
    ]
    file = tmp_path / "longbook_qa_eng.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    options = {"context": "def f(", "input": "Which?", "answer": "g", "options": ["f", "g", "h", "i"]}
    (tmp_path / "code_debug.jsonl").write_text(json.dumps(options), encoding="utf-8")
    found, not_run = infinitebench.tasks(tokenizer, tmp_path)
    assert len(found) == 8
    assert not_run["longbook_qa_chn"] == f"needs {tmp_path / 'longbook_qa_chn.jsonl'}"
    task = found["longbook_qa_eng"]
    assert task.samples == 2
    long, short = (make(task, 3000, i, seed=0, tokenizer=tokenizer, chat=False) for i in range(2))
    assert 2990 < len(long.tokens) + 40 <= 3000
    assert "begin xxx" in long.prompt.text
    assert "xxx end\n\nQuestion: Who?" in long.prompt.text
    assert "\n\nshort\n\nQuestion: When?" in short.prompt.text
    assert task.score("It was Anna.", long.prompt.references) == pytest.approx(0.5)
    debug = make(found["code_debug"], 3000, 0, seed=0, tokenizer=tokenizer, chat=False)
    assert "Options:\nA. f\nB. g\nC. h\nD. i" in debug.prompt.text
    assert debug.prompt.references == ["g", "B"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is no row"),
        ('{"context": "a", "input": "b"}', "KeyError: 'answer'"),
        ('{"context": 5, "input": "b", "answer": "c"}', "context and input must be text"),
        ('{"context": "a", "input": "b", "answer": []}', "answer is empty"),
        ('{"context": "a", "input": "b", "answer": "c", "options": ["d"]}', "options must be four, found 1"),
        (
            '{"context": "a", "input": "b", "answer": "x", "options": ["c", "d", "e", "f"]}',
            "none of the options",
        ),
        ("", "has no rows"),
    ],
)
def test_a_damaged_infinitebench_file_is_refused_by_line(line, message, tmp_path):
    file = tmp_path / "code_debug.jsonl"
    file.write_text(line, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        infinitebench.read_rows(file)


@pytest.mark.parametrize("read", [ruler.read_squad, ruler.read_hotpotqa])
@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"data": 5}'])
def test_question_files_of_another_format_are_refused(read, content, tmp_path):
    (tmp_path / "file").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"file (is not in|has no question)"):
        read(tmp_path / "file")


# --- metrics


def test_metrics_on_cases_made_by_hand():
    assert score.string_match_all("It is SEVEN\x01and eight.", ["seven", "eight", "nine", "ten"]) == 0.5
    assert score.string_match_part("It is SEVEN.", ["eight", "seven"]) == 1
    assert score.string_match_part("It is SEVEN.", ["eight", "nine"]) == 0
    assert score.first_number(" 12345. 6", ["12345"]) == 1
    assert score.first_number("123456", ["12345"]) == score.first_number("none", ["1"]) == 0
    assert score.contains_word('"ab-cd"}', ["ab-cd"]) == 1
    assert score.contains_word("ab-cde", ["ab-cd"]) == 0
    assert score.names_someone("I think it's bob.", ["BOB"]) == 1
    assert score.last_integer("It is 5, no, it is:-3.", [-3]) == 1
    assert score.last_integer("-3 it is", [-3]) == score.last_integer("", [-3]) == 0
    assert score.first_value("49.5 or 3", [49.5]) == score.first_value("7", [7]) == 1
    assert score.first_value("17", [7]) == 0
    assert score.leading_values("[1, 4, 9, 7]", [1, 4, 8, 7]) == 0.5
    assert (
        score.choice("B. the dog", ["the dog", "B"])
        == score.choice("So, answer is: B", ["the dog", "B"])
        == 1
    )
    assert score.choice("Well, the answer is the dog", ["the dog", "B"]) == 1
    assert score.choice("It must be C", ["the dog", "B"]) == score.choice("", ["the dog", "B"]) == 0
    assert (
        score.faulty_function(" B. g", ["g", "B"])
        == score.faulty_function("The answer is: g", ["g", "B"])
        == 1
    )
    assert (
        score.faulty_function("The answer is: f", ["g", "B"]) == score.faulty_function("g", ["g", "B"]) == 0
    )
    assert score.f1("The red, red house", ["a red house", "no"]) == pytest.approx(0.8)
    assert score.f1_characters("红色。", ["红"]) == pytest.approx(2 / 3)


def test_rouge_l_sum_counts_what_the_lines_cover():
    assert score.rouge_l_sum("the cat sat\non the mat", ["the cat sat\non the mat"]) == 1
    assert score.rouge_l_sum("", ["the cat"]) == score.rouge_l_sum("dog", ["the cat"]) == 0
    # "police ... the gunman" of one line and "police killed" of the other cover all four words.
    assert score.rouge_l_sum("police saw the gunman\npolice killed him", ["police killed the gunman"]) == (
        pytest.approx(2 * 4 / (4 + 7))
    )


def test_the_interval_is_that_of_the_mean():
    draw = np.random.default_rng(0)
    differences = draw.normal(1, 2, 400).tolist()
    low, high = score.interval([differences])
    assert (low, high) == score.interval([differences])
    error = np.std(differences) / 20
    assert low == pytest.approx(np.mean(differences) - 1.96 * error, abs=0.1 * error)
    assert high == pytest.approx(np.mean(differences) + 1.96 * error, abs=0.1 * error)
    assert score.interval([[0.0] * 5, [2.0] * 50]) == (1, 1)


# --- runs


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


def refused(result: Result, *words: object) -> None:
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ")
    for word in words:
        assert str(word) in result.stderr
    assert "Traceback" not in result.stderr


SMALL = (
    "--tasks",
    "niah_single_1,niah_multivalue",
    "--lengths",
    "1100",
    "--samples",
    2,
    "--attention",
    ATTENTION,
)


@pytest.fixture(scope="module")
def finished(checkpoint, tmp_path_factory) -> Path:
    """A run that nothing interrupted."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    result = run("eval", checkpoint, *SMALL, "--out", out)
    assert result.exit_code == 0, result.output
    assert "1,100 tokens" in result.stdout
    assert "4/4: niah_multivalue, 1100 tokens, sample 2: dense 0.00" in result.stderr
    assert "none left" in result.stderr
    return out


def outcomes(out: Path) -> list[dict[str, Any]]:
    """The samples without times."""
    records = [json.loads(line) for line in (out / loop.SAMPLES).read_text().splitlines()]
    for record in records:
        for outcome in record["attentions"].values():
            outcome.pop("seconds", None)
            for name in [name for name in outcome.get("statistics", {}) if name.endswith("_s")]:
                del outcome["statistics"][name]
    return records


def test_a_run_writes_what_it_found(finished, tasks, tokenizer):
    rows = json.loads((finished / suite.SUMMARY).read_text())
    assert [(r["task"], r["attention"]) for r in rows] == [
        (task, name) for task in ("niah_single_1", "niah_multivalue") for name in ("dense", *RETRIEVAL)
    ]
    for row in rows:
        assert (row["suite"], row["length"], row["samples"], row["failed"]) == ("ruler", 1100, 2, 0)
        assert ("difference" in row) == (row["attention"] != "dense")
    records = outcomes(finished)
    assert [(r["task"], r["index"]) for r in records] == [(r["task"], i) for r in rows[::3] for i in range(2)]
    for record in records:
        sample = make(tasks[record["task"]], 1100, record["index"], seed=0, tokenizer=tokenizer, chat=True)
        assert record["prompt_tokens"] == len(sample.tokens)
        assert record["references"] == sample.prompt.references
        for name, outcome in record["attentions"].items():
            statistics = outcome["statistics"]
            assert outcome["score"] == sample.task.score(outcome["answer"], sample.prompt.references)
            assert (statistics["keys_offloaded"] > 0) == (name != "dense")
            assert statistics["keys_retrieved"] <= statistics["keys_offloaded"]
    page = (finished / suite.PAGE).read_text()
    assert page.count("data:image/png;base64,iVBOR") == 3
    for word in ("niah_multivalue", RETRIEVAL[1], "1,100 tokens", "--seed", "Needle depth"):
        assert word in page
    assert not list(finished.glob("*.tmp"))


def test_answers_are_those_of_generate(finished, checkpoint, tasks, tokenizer):
    """All attentions from one prefill say what each says by itself."""
    params = rajax.load(checkpoint)
    recorded = outcomes(finished)[0]["attentions"]
    tokens = make(tasks["niah_single_1"], 1100, 0, seed=0, tokenizer=tokenizer, chat=True).tokens
    attentions = parse_attentions(ATTENTION)
    alone = {
        name: rajax.generate(params, tokens, max_new_tokens=128, retrieval=retrieval).tokens[0]
        for name, retrieval in attentions.items()
    }
    for name in ("dense", RETRIEVAL[0]):
        assert tokenizer.decode(alone[name]) == recorded[name]["answer"]
    # Beside another index, "wave" learns from a slightly different sample of queries.
    pair = {name: attentions[name] for name in ("dense", RETRIEVAL[1])}
    for name, answer, _ in loop.answers(params, tokens, 128, pair):
        assert answer.tokens[0] == alone[name]


def test_an_interrupted_run_resumed_finds_the_same(finished, checkpoint, tmp_path, monkeypatch):
    out = tmp_path / "run"
    options = suite.Options(
        lengths="1100", samples=2, attention=ATTENTION, tasks="niah_single_1,niah_multivalue"
    )

    def interrupt(done: int, total: int, line: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        suite.run(checkpoint, options, out, interrupt)
    assert len(outcomes(out)) == 2
    assert not (out / suite.SUMMARY).exists()
    # In the middle of a line.
    with (out / loop.SAMPLES).open("a") as file:
        file.write('{"task": "niah_multivalue", "length": 1100, "ind')
    prefills = []
    monkeypatch.setattr(loop, "prefill", lambda *a, real=loop.prefill: prefills.append(0) or real(*a))
    assert run("eval", checkpoint, *SMALL, "--out", out).exit_code == 0
    assert len(prefills) == 2  # one for each sample that was left
    assert (out / suite.SUMMARY).read_bytes() == (finished / suite.SUMMARY).read_bytes()
    assert outcomes(out) == outcomes(finished)
    assert run("eval", checkpoint, *SMALL, "--out", out).exit_code == 0
    assert len(prefills) == 2


def test_a_sample_that_fails_is_reported_and_tried_again(finished, checkpoint, tmp_path, monkeypatch):
    out, real, calls = tmp_path / "run", loop._answer, []

    def answer(*arguments):
        calls.append(0)
        return RuntimeError("no <memory> left") if len(calls) == 2 else real(*arguments)

    monkeypatch.setattr(loop, "_answer", answer)
    result = run("eval", checkpoint, *SMALL, "--out", out)
    assert result.exit_code == 1
    assert "error: 1 samples failed" in result.stderr
    assert "1 failed" in result.stdout
    assert outcomes(out)[0]["attentions"][RETRIEVAL[0]] == {"error": "RuntimeError: no <memory> left"}
    assert "no &lt;memory&gt; left" in (out / suite.PAGE).read_text()
    rows = json.loads((out / suite.SUMMARY).read_text())
    assert [(r["samples"], r["failed"]) for r in rows[:3]] == [(2, 0), (1, 1), (2, 0)]
    monkeypatch.undo()
    assert run("eval", checkpoint, *SMALL, "--out", out).exit_code == 0
    assert (out / suite.SUMMARY).read_bytes() == (finished / suite.SUMMARY).read_bytes()


def test_a_prefill_that_fails_fails_all_attentions(checkpoint, tmp_path, monkeypatch):
    def fails(*_):
        raise MemoryError("too long")

    monkeypatch.setattr(loop, "prefill", fails)
    result = run(
        "eval", checkpoint, "--tasks", "fwe", "--lengths", 1200, "--samples", 1, "--out", tmp_path / "run"
    )
    assert result.exit_code == 1
    assert result.stdout.count("1 failed") == 2 * 3  # the task's line and the mean's
    (record,) = outcomes(tmp_path / "run")
    assert set(map(json.dumps, record["attentions"].values())) == {'{"error": "MemoryError: too long"}'}


def test_a_run_with_other_settings_is_refused_by_name(finished, checkpoint, tmp_path):
    before = (finished / loop.SAMPLES).read_bytes()
    changed = list(SMALL)
    changed[5] = 3
    refused(run("eval", checkpoint, *changed, "--out", finished), "--samples was 2, now 3", finished)
    refused(run("eval", checkpoint, *SMALL, "--seed", 1, "--out", finished), "--seed was 0, now 1")
    refused(run("eval", checkpoint, *SMALL, "--no-chat", "--out", finished), "--chat was true, now false")
    assert (finished / loop.SAMPLES).read_bytes() == before
    (tmp_path / "note").write_text("mine")
    refused(run("eval", checkpoint, *SMALL, "--out", tmp_path), "is no folder of a run")
    refused(run("eval", checkpoint, *SMALL, "--out", tmp_path / "note"), "is not a folder")


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    with loop.open_run(tmp_path / "run", {"--seed": 0}) as done:
        assert done == []
    good = json.dumps({"task": "a", "attentions": {}})
    (tmp_path / "run" / loop.SAMPLES).write_text(f"{good}\n{{\n{good}\n")
    with pytest.raises(ValueError, match=r"samples\.jsonl, line 2 is damaged"):
        enter(loop.open_run(tmp_path / "run", {"--seed": 0}))
    (tmp_path / "run" / loop.SETTINGS).write_text("{")
    with pytest.raises(ValueError, match=r"settings\.json is damaged"):
        enter(loop.open_run(tmp_path / "run", {"--seed": 0}))


def enter(run):
    with run as done:
        return done


def test_one_process_at_a_time_works_in_a_run(tmp_path):
    settings = {"--seed": 0}
    with (
        loop.open_run(tmp_path / "run", settings),
        pytest.raises(ValueError, match="another `rajax eval` is at work in"),
    ):
        enter(loop.open_run(tmp_path / "run", settings))
    assert enter(loop.open_run(tmp_path / "run", settings)) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--suite", "glue"], ["--suite must be one of ruler, infinitebench; found 'glue'"]),
        (["--tasks", "niah"], ["--tasks: ruler has niah_single_1", "found 'niah'"]),
        (["--tasks", "qa_1"], ["--tasks qa_1 needs --squad FILE"]),
        (["--lengths", "4k"], ["--lengths takes numbers of tokens", "'4k'"]),
        (["--lengths", "0"], ["--lengths must be at least 1"]),
        (["--lengths", "9000"], ["--lengths 9000 is more than the model's 8192 positions", "--rope-scaling"]),
        (["--lengths", "300"], ["niah_single_1 needs at least", "a length of 300"]),
        (["--attention", "sparse"], ["--attention takes dense, exact, scann, wave", "'sparse'"]),
        (["--attention", "dense,dense"], ["names 'dense' twice"]),
        (["--attention", "dense:top_k=4"], ["dense attention has no settings"]),
        (["--attention", "scann:keys=4"], ["'keys' is no setting; there are top_k"]),
        (["--attention", "scann:top_k=0"], ["top_k must be an integer of at least 1, found 0"]),
        (["--rope-scaling", "yarn"], ["--rope-scaling is not JSON"]),
        (["--haystack", "missing.txt"], ["missing.txt"]),
        (
            ["--suite", "infinitebench", "--infinitebench", "missing"],
            ["--infinitebench missing is not a folder"],
        ),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(options, words, checkpoint, tmp_path):
    refused(run("eval", checkpoint, *options, "--out", tmp_path / "run"), *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("content", "message"), [(b" \n", "has no words"), (b"\xff", "is not UTF-8 text")])
def test_a_haystack_without_words_is_refused(content, message, checkpoint, tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    refused(
        run("eval", checkpoint, "--haystack", file, "--out", tmp_path / "run"), f"--haystack {file}", message
    )


def test_tasks_that_cannot_run_are_told(checkpoint):
    _, not_run = ruler.tasks("Some words.")
    assert not_run == {"qa_1": "needs --squad FILE", "qa_2": "needs --hotpotqa FILE"}
    rows = report.summarize("ruler", [], ["dense"], not_run)
    assert [(r["task"], r["samples"], r["score"]) for r in rows] == [("qa_1", 0, None), ("qa_2", 0, None)]
    assert "Not run: qa_1: needs --squad FILE" in report.page("title", {}, [], rows, ["dense"])


def record(task: str, index: int, dense: float, scann: float, length: int = 4096) -> dict[str, Any]:
    statistics = {"keys_offloaded": 100, "keys_scanned": 10}
    return {
        "task": task, "length": length, "index": index, "depth": index / 10,
        "attentions": {
            "dense": {"score": dense, "statistics": {"keys_offloaded": 0, "keys_scanned": 0}},
            "scann": {"score": scann, "statistics": statistics},
        },
    }  # fmt: skip


def test_the_table_on_a_case_made_by_hand():
    records = [record("a", i, 1.0, float(i > 1)) for i in range(8)] + [
        record("b", i, 0.5, 0.5) for i in range(4)
    ]
    rows = report.summarize("ruler", records, ["dense", "scann"], {})
    assert [row["score"] for row in rows] == [100, 75, 50, 50]
    assert rows[1]["difference"] == -25
    assert -70 < rows[1]["low"] < -25 < rows[1]["high"] <= 0
    assert (rows[3]["low"], rows[3]["high"]) == (0, 0)
    mean = report.mean_row(records, rows, 4096, "scann")
    assert (mean["score"], mean["difference"], mean["samples"]) == (62.5, -12.5, 12)
    assert mean["low"] == pytest.approx(rows[1]["low"] / 2, abs=3)
    drawn = report.pictures(records, rows, ["dense", "scann"])
    assert list(drawn) == ["Needle depth × length", "Score against length", "Score against keys scanned"]
    assert all(picture.startswith(b"\x89PNG") for picture in drawn.values())


# --- perplexity


def test_perplexity_is_that_of_the_logits(checkpoint, tmp_path):
    params = rajax.load(checkpoint)
    tokens = np.random.RandomState(0).randint(0, 256, 90)
    logits = rajax.logits(params, tokens)[0]
    shifted = logits - logits.max(1, keepdims=True)
    loss = (np.log(np.exp(shifted).sum(1)) - shifted[np.arange(90), np.roll(tokens, -1)])[:-1]
    attentions = parse_attentions("dense,exact:sink_tokens=2:window=8:top_k=512")
    rows = perplexity.perplexity(params, tokens, attentions, prompt=20, bucket=40)
    assert [(r["start"], r["end"], r["tokens"]) for r in rows[::2]] == [(20, 60, 40), (60, 90, 30)]
    for row in rows:
        assert row["nll"] == pytest.approx(loss[row["start"] - 1 : row["end"] - 1].mean(), abs=1e-4)
        assert row["perplexity"] == pytest.approx(np.exp(row["nll"]))


def test_perplexity_as_a_command(checkpoint, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(prose()[:400], encoding="utf-8")
    settings = ("--attention", f"dense,{RETRIEVAL[0]}", "--prompt", 100, "--bucket", 64)
    result = run("perplexity", checkpoint, text, *settings, "--length", 200, "--json", tmp_path / "rows.json")
    assert result.exit_code == 0, result.output
    assert "100 to 164" in result.stdout
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [r["end"] for r in rows] == [164, 164, 200, 200]
    refused(run("perplexity", checkpoint, text, "--length", 500), "--length 500 is more than the 400 tokens")
    refused(run("perplexity", checkpoint, text, "--prompt", 400), "a prompt of 400 tokens leaves nothing")


# --- the real model


@pytest.mark.slow
def test_retrieval_answers_as_dense_attention_does(smollm2_path, tmp_path):
    out = tmp_path / "run"
    result = run(
        "eval", smollm2_path, "--tasks", "niah_single_1", "--lengths", 2048, "--samples", 3, "--out", out
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    scores = [row["score"] for row in json.loads((out / suite.SUMMARY).read_text())]
    assert scores == [100, 100, 100]
