"""The adapter for lm-evaluation-harness, with tasks from local files."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

import byte_llama
import numpy as np
import pytest

import rajax
from rajax.convert import convert
from rajax.evaluation import run as loop
from rajax.evaluation.sample import Prompt, Task, make
from rajax.evaluation.score import string_match_all
from rajax.retrieval import parse_attentions

lm_eval = pytest.importorskip("lm_eval")
from rajax.evaluation import lm_eval as adapter  # noqa: E402 - only where lm_eval is there

RETRIEVAL = "scann:sink_tokens=2:window=8", "wave:sink_tokens=2:window=8"
ALL_KEYS = "exact:sink_tokens=2:window=8:top_k=512"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny model whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("lm_eval")
    convert(byte_llama.save(folder / "hf"), folder / "checkpoint")
    return folder / "checkpoint"


def results(model: adapter.RajaxLM, rows: list[dict[str, Any]], folder: Path, **task: Any) -> dict[str, Any]:
    """What lm_eval finds on a task of its own, whose documents are `rows`."""
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        **task,
    }
    return lm_eval.simple_evaluate(model, tasks=[config], bootstrap_iters=0)


def request(*arguments: Any) -> Any:
    return lm_eval.api.instance.Instance("generate_until", {}, arguments, 0)


@pytest.mark.parametrize("attention", ["dense", *RETRIEVAL])
def test_a_local_task_has_the_same_numbers_as_rajax_eval(attention, checkpoint, tmp_path):
    def letters(draw: random.Random, size: int, length: int, index: int) -> Prompt:
        text = "".join(draw.choices(string.ascii_letters, k=size))
        return Prompt(text, " Answer:", draw.sample(string.ascii_letters + string.digits, 12))

    task = Task("letters", letters, string_match_all, 24)
    model = adapter.RajaxLM(str(checkpoint), attention)
    records = loop.evaluate(
        model.params,
        model.text,
        [task],
        [200],
        4,
        parse_attentions(attention),
        tmp_path,
        [],
        seed=0,
        chat=False,
        on_sample=lambda *_: None,
    )
    samples = [make(task, 200, i, seed=0, tokenizer=model.text, chat=False) for i in range(4)]
    rows = [{"prompt": s.prompt.text + s.prompt.prefix, "references": s.prompt.references} for s in samples]
    found = results(
        model,
        rows,
        tmp_path,
        output_type="generate_until",
        doc_to_text="{{prompt}}",
        doc_to_target="{{references}}",
        generation_kwargs={"until": [], "max_gen_toks": 24, "do_sample": False},
        process_results=lambda doc, answers: {"match": string_match_all(answers[0], doc["references"])},
        metric_list=[{"metric": "match", "aggregation": "mean", "higher_is_better": True}],
    )
    scores = [record["attentions"][attention]["score"] for record in records]
    assert 0 < np.mean(scores) < 1
    assert found["results"]["local"]["match,none"] == pytest.approx(np.mean(scores), abs=1e-12)
    said = [sample["resps"][0][0] for sample in found["samples"]["local"]]
    assert said == [record["attentions"][attention]["answer"] for record in records]


@pytest.mark.parametrize("attention", ["dense", ALL_KEYS])
def test_likelihoods_are_those_of_the_logits(attention, checkpoint, tmp_path, monkeypatch):
    model = adapter.RajaxLM(str(checkpoint), attention)
    rows = [{"prompt": f"{i} " * 30, "options": ["alpha beta", "be"], "right": i % 2} for i in range(3)]
    prefills = []
    real = adapter.prefill
    monkeypatch.setattr(adapter, "prefill", lambda *a: prefills.append(0) or real(*a))
    found = results(
        model,
        rows,
        tmp_path,
        output_type="multiple_choice",
        doc_to_text="{{prompt}}",
        doc_to_choice="{{options}}",
        doc_to_target="{{right}}",
        target_delimiter="",
        metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    )
    assert len(prefills) == 3  # the options of a question share one
    right = 0
    for row, sample in zip(rows, found["samples"]["local"], strict=True):
        expected = [likelihood(model, row["prompt"].rstrip(), " " + option) for option in row["options"]]
        assert [resp[0][0] for resp in sample["resps"]] == pytest.approx(expected, abs=1e-3)
        right += int(np.argmax(expected) == row["right"])
    assert found["results"]["local"]["acc,none"] == pytest.approx(right / 3)


def likelihood(model: adapter.RajaxLM, context: str, continuation: str) -> float:
    tokens = model.tok_encode(context + continuation)
    count = len(model.tok_encode(continuation))
    return sum_of(rajax.logits(model.params, tokens)[0], tokens, count)


def sum_of(logits: np.ndarray, tokens: list[int], count: int) -> float:
    """The log-likelihood of the last `count` tokens."""
    shifted = logits - logits.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    places = range(len(tokens) - count, len(tokens))
    return float(sum(logs[place - 1, tokens[place]] for place in places))


def test_a_text_without_context_starts_from_the_prefix(checkpoint):
    model = adapter.RajaxLM(str(checkpoint), ALL_KEYS)
    text = "some words to read " * 4
    tokens = [model.prefix_token_id, *model.tok_encode(text)]
    expected = sum_of(rajax.logits(model.params, tokens)[0], tokens, len(tokens) - 1)
    assert model.loglikelihood_rolling([request(text)]) == pytest.approx([expected], abs=2e-3)


def test_greedy_continuations_are_known(checkpoint):
    model = adapter.RajaxLM(str(checkpoint), "dense")
    context = list(b"abc")
    answer = rajax.generate(model.params, context, max_new_tokens=4, retrieval=None, stop=()).tokens[0]
    other = [*answer[:3], (answer[3] + 1) % 256]
    found = adapter.log_likelihoods(model.params, context, [answer, other], None)
    assert [greedy for _, greedy in found] == [True, False]
    with pytest.raises(ValueError, match=r"2049 tokens of context and continuation .* 2048 positions"):
        adapter.log_likelihoods(model.params, [1] * 2000, [[1] * 50], None)


def test_an_answer_ends_before_what_it_must_not_say(checkpoint):
    model = adapter.RajaxLM(str(checkpoint), RETRIEVAL[0])
    (whole,) = model.generate_until([request("abc", {"max_gen_toks": 30})])
    stop = whole[7:9]
    assert model.generate_until([request("abc", {"max_gen_toks": 30, "until": ["never said", stop]})]) == [
        whole[: whole.index(stop)]
    ]
    with pytest.raises(ValueError, match="set do_sample to false"):
        model.generate_until([request("abc", {"do_sample": True, "temperature": 0.5})])


def test_chat_templates(checkpoint):
    model = adapter.RajaxLM(str(checkpoint), "dense")
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
    assert model.apply_chat_template(turns[:1]) == "[user]Hi"
    assert model.apply_chat_template(turns, add_generation_prompt=False) == "[user]HiWell,"


def test_bad_arguments_are_refused(checkpoint):
    with pytest.raises(ValueError, match="attention must be one, found 'dense,scann'"):
        adapter.RajaxLM(str(checkpoint), "dense,scann")
    with pytest.raises(ValueError, match="dense, exact, scann, wave"):
        adapter.RajaxLM(str(checkpoint), "sparse")


def test_lm_eval_knows_the_model_by_name(checkpoint):
    model = lm_eval.api.registry.get_model("rajax")
    made = model.create_from_arg_string(f"pretrained={checkpoint},attention=dense", {"batch_size": 1})
    assert isinstance(made, adapter.RajaxLM)
    assert made.retrieval is None
    scaling = '{"rope_type": "yarn", "factor": 2.0}'
    longer = adapter.RajaxLM(str(checkpoint), rope_scaling=scaling)
    assert longer.params.config.max_positions == 4096
