"""Perplexity of a text by context position, dense attention beside retrieval.

The beginning of the text is a prompt, prefilled once for all attentions; the rest is decoded a token at a time, as if
it had been generated. So there are never more logits than of one position.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from rajax.evaluation.run import Attentions
from rajax.interrupt import interrupt
from rajax.models import Llama
from rajax.session import Session, prefill


def perplexity(
    model: Llama,
    tokens: Sequence[int],
    attentions: Attentions,
    *,
    prompt: int,
    bucket: int,
    on_step: Callable[[int, int], None] = lambda *_: None,
) -> list[dict[str, Any]]:
    """The perplexity of every bucket of positions.

    Args:
      model: the model.
      tokens: the text.
      attentions: to compare.
      prompt: tokens of the prompt; those after it are decoded and count.
      bucket: positions of a bucket; the last one may have fewer.
      on_step: told of (tokens done, tokens in all).

    Returns:
      A row per bucket and attention: `start` and `end` (positions, from 0), `attention`, `tokens`, `nll` (nats per
      token) and `perplexity`.

    Raises:
      ValueError: a text without a token after the prompt, or with more than the model has positions.
    """
    text = np.asarray(tokens, np.int32)
    if not 1 <= prompt < len(text):
        raise ValueError(f"a prompt of {prompt} tokens leaves nothing of a text of {len(text)} to be decoded")
    if bucket < 1:
        raise ValueError(f"bucket must be at least 1, found {bucket}")
    if len(text) > model.config.max_positions:
        raise ValueError(
            f"{len(text)} tokens are more than the model's {model.config.max_positions} positions"
        )
    losses = {name: np.zeros(len(text) - prompt) for name in attentions}
    with contextlib.ExitStack() as stack:
        sessions = {
            name: stack.enter_context(Session(model, [prompt], [len(text)], retrieval))
            for name, retrieval in attentions.items()
        }
        first = prefill(model, [text[:prompt]], list(sessions.values()), lambda *_: interrupt.check())
        for session in sessions.values():
            session.finish_prefill()
        logits = dict.fromkeys(sessions, first)
        for i, token in enumerate(text[prompt:]):
            for name, session in sessions.items():
                losses[name][i] = _loss(logits[name], token)
                if prompt + i + 1 < len(text):
                    with interrupt.held():
                        logits[name] = session.step([token])
            on_step(i + 1, len(text) - prompt)
    rows = []
    for start in range(0, len(text) - prompt, bucket):
        for name, loss in losses.items():
            part = loss[start : start + bucket]
            rows.append(
                {
                    "start": prompt + start,
                    "end": prompt + start + len(part),
                    "attention": name,
                    "tokens": len(part),
                    "nll": float(part.mean()),
                    "perplexity": math.exp(part.mean()),
                }
            )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """A line per bucket, and one of all of them; a column per attention."""
    attentions = list(dict.fromkeys(row["attention"] for row in rows))
    shown = Table()
    for name in ("positions", *attentions):
        shown.add_column(name, justify="right")
    for start in dict.fromkeys(row["start"] for row in rows):
        here = [row for row in rows if row["start"] == start]
        shown.add_row(f"{start} to {here[0]['end']}", *(f"{row['perplexity']:.3f}" for row in here))
    shown.add_section()
    whole = []
    for name in attentions:
        own = [row for row in rows if row["attention"] == name]
        nll = np.average([row["nll"] for row in own], weights=[row["tokens"] for row in own])
        whole.append(f"{math.exp(nll):.3f}")
    shown.add_row("all", *whole)
    return shown


@jax.jit
def _loss(logits: jax.Array, token: jax.Array) -> jax.Array:
    """The negative log-likelihood of a token from logits [1, V], in nats."""
    return -jax.nn.log_softmax(logits[0].astype(jnp.float32))[token]
