"""A RAJAX checkpoint as a model of lm-evaluation-harness (the extra `lm-eval`, which does without torch).

    python -m rajax.evaluation.lm_eval --model rajax --model_args pretrained=CKPT,attention=scann --tasks ...

or, in a program, `lm_eval.simple_evaluate(RajaxLM("CKPT", attention="wave"), tasks=[...])`. Prompts are prefilled,
whose attention is exact; answers and the continuations whose likelihood is asked for are decoded, and there retrieval
counts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from rajax.checkpoint import load
from rajax.generation import stream
from rajax.models import Llama
from rajax.retrieval import RetrievalConfig, parse_attentions
from rajax.session import Session, prefill
from rajax.tokenizer import load_tokenizer

MAX_GEN_TOKS = 256
"""Where a task says nothing; lm-evaluation-harness's own default."""


@register_model("rajax")
class RajaxLM(TemplateLM):
    """A checkpoint with one attention.

    Args:
      pretrained: a checkpoint from `rajax convert`.
      attention: "dense", or an index with settings, as `rajax eval --attention` has it.
      rope_scaling: Hugging Face's, as an object or as JSON.
      dtype: "float32", "bfloat16" or "float16".
      prefill_precision: "float32" or "bfloat16".
      batch_size, max_batch_size, device: the harness's own; prompts run one at a time on JAX's device.
    """

    def __init__(
        self,
        pretrained: str,
        attention: str = "scann",
        rope_scaling: Mapping[str, Any] | str | None = None,
        dtype: str | None = None,
        prefill_precision: str = "float32",
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
    ):
        super().__init__()
        attentions = list(parse_attentions(attention).values())
        if len(attentions) != 1:
            raise ValueError(f"attention must be one, found {attention!r}")
        (self.retrieval,) = attentions
        scaling = json.loads(rope_scaling) if isinstance(rope_scaling, str) else rope_scaling
        self.text = load_tokenizer(pretrained)
        self.params = load(pretrained, dtype=dtype, rope_scaling=scaling, prefill_precision=prefill_precision)
        self.name = f"{Path(pretrained).resolve().name}, {attention}"

    @property
    def tokenizer_name(self) -> str:
        return self.name

    @property
    def eot_token_id(self) -> int:
        config = self.params.config
        return config.eos_token_ids[0] if config.eos_token_ids else 0

    @property
    def prefix_token_id(self) -> int:
        """What a text without a context starts from: the beginning of text where the model has it."""
        token = self.text.backend.token_to_id(self.text.special_tokens.get("bos_token", ""))
        return self.eot_token_id if token is None else token

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:
            # A chat template has written them.
            beginning = self.text.special_tokens.get("bos_token")
            add_special_tokens = beginning is None or not string.startswith(beginning)
        return self.text.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        if add_generation_prompt:
            return self.text.render_chat(chat_history)
        # The last turn is the beginning of the answer.
        *turns, begun = chat_history
        return self.text.render_chat(turns) + begun["content"]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, settings: Mapping[str, Any]) -> str:
        if settings.get("do_sample") and settings.get("temperature", 1) > 0:
            raise ValueError("rajax answers greedily here; set do_sample to false")
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else [text for text in until if text]
        answer, tokens = "", []
        piece = self.text.decode_stream()
        steps = stream(
            self.params,
            self.tok_encode(context),
            max_new_tokens=int(settings.get("max_gen_toks", MAX_GEN_TOKS)),
            retrieval=self.retrieval,
        )
        with contextlib.closing(steps):
            for token in steps:
                tokens.append(token)
                answer += piece(token)
                if any(stop in answer for stop in stops):
                    break
            else:
                answer = self.text.decode(tokens)
        ends = [answer.index(stop) for stop in stops if stop in answer]
        return answer[: min(ends)] if ends else answer

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        # The continuations of one context, such as the options of a question, share its prefill.
        of_context: dict[tuple[int, ...], list[int]] = {}
        for number, request in enumerate(requests):
            of_context.setdefault(tuple(request[1]), []).append(number)
        found: dict[int, tuple[float, bool]] = {}
        for context, numbers in of_context.items():
            continuations = [requests[number][2] for number in numbers]
            scored = log_likelihoods(self.params, list(context), continuations, self.retrieval)
            found.update(zip(numbers, scored, strict=True))
        return [found[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        sums = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.params.config.max_positions,
                context_len=1,
            )
            pairs = [make_disjoint_window(window) for window in windows]
            scored = self._loglikelihood_tokens([(("", ""), *pair) for pair in pairs])
            sums.append(sum(log_likelihood for log_likelihood, _ in scored))
        return sums


def log_likelihoods(
    model: Llama,
    context: Sequence[int],
    continuations: Sequence[Sequence[int]],
    retrieval: RetrievalConfig | None,
) -> list[tuple[float, bool]]:
    """Of each continuation of a context the log-likelihood, in nats, and whether greedy decoding would give it.

    Args:
      model: the model.
      context: tokens, at least one; prefilled once.
      continuations: tokens each; decoded.
      retrieval: None is dense attention.

    Raises:
      ValueError: context and continuation have more tokens than the model has positions.
    """
    limit = model.config.max_positions
    # The last token of a continuation is compared, not read.
    if (longest := len(context) + max(map(len, continuations)) - 1) > limit:
        raise ValueError(
            f"{longest} tokens of context and continuation are more than the model's {limit} positions; rope_scaling "
            "lets it read on"
        )
    prompt = np.asarray(context, np.int32)
    with contextlib.ExitStack() as stack:
        sessions = [
            stack.enter_context(Session(model, [len(prompt)], [longest], retrieval)) for _ in continuations
        ]
        first = prefill(model, [prompt], sessions)
        found = []
        for session, continuation in zip(sessions, continuations, strict=True):
            session.finish_prefill()
            total, greedy, logits = 0.0, True, first
            for i, token in enumerate(continuation):
                total += float(jax.nn.log_softmax(logits[0].astype(jnp.float32))[token])
                greedy &= int(logits[0].argmax()) == token
                if i + 1 < len(continuation):
                    logits = session.step([token])
            found.append((total, greedy))
    return found


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
