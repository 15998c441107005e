"""From logits to the next token.

Letters: `B` batch, `V` vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Names, meanings and order of application are Hugging Face's.

    Attributes:
      temperature: divides the logits; 0, the default, takes the most likely token (greedy).
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the fewest tokens that hold this much probability; 1 keeps all.
      min_p: keep tokens of at least this share of the most likely one's probability; 0 keeps all.
      repetition_penalty: divides positive and multiplies negative logits of tokens that prompt or answer
        already have (arXiv 1909.05858, section 4.1); 1 changes nothing.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        def check(name: str, low: float, high: float, words: str, kind: type = numbers.Real) -> None:
            value = getattr(self, name)
            number = isinstance(value, kind) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or not low <= value <= high:
                raise ValueError(f"{name} must be {words}, found {value!r}")

        tiny = float(np.finfo(np.float32).tiny)
        check("temperature", 0, math.inf, "a number of at least 0")
        check("top_k", 0, math.inf, "an integer of at least 0", numbers.Integral)
        check("top_p", tiny, 1, "above 0 and at most 1")
        check("min_p", 0, 1, "from 0 to 1")
        check("repetition_penalty", tiny, math.inf, "above 0")


NOT_FINITE = -1
"""In place of a token where the logits are NaN or infinite."""


@functools.partial(jax.jit, static_argnames=("sampling",))
def sample(
    logits: jax.Array, seen: jax.Array, key: jax.Array, step: jax.Array, *, sampling: Sampling
) -> tuple[jax.Array, jax.Array]:
    """Chooses a token per sequence.

    Args:
      logits: [B, V] float32.
      seen: [B, V] bool, the tokens of prompt and answer so far; [B, 0] where there is no penalty.
      key: a JAX key. Each (step, sequence) draws from its own fold of it.
      step: int32 scalar.
      sampling: the settings.

    Returns:
      Tokens [B] int32, `NOT_FINITE` where there is none to choose, and `seen` with them.
    """
    rows = jnp.arange(logits.shape[0])
    finite = jnp.isfinite(logits).all(-1)
    if sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        # Relative to the best, and by no less than float32 can divide by: nothing overflows to +inf or NaN.
        temperature = max(sampling.temperature, float(np.finfo(np.float32).tiny))
        logits = restrict((logits - logits.max(-1, keepdims=True)) / temperature, sampling)
        step_key = jax.random.fold_in(key, step)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(step_key, rows)
        tokens = jax.vmap(jax.random.categorical)(keys, logits)
    tokens = tokens.astype(jnp.int32)
    if sampling.repetition_penalty != 1:
        seen = seen.at[rows, tokens].set(True)
    return jnp.where(finite, tokens, NOT_FINITE), seen


def restrict(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits [B, V] with those of excluded tokens at -inf; the most likely token always stays."""
    vocabulary = logits.shape[-1]
    if 0 < sampling.top_k < vocabulary:
        least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p < 1:
        order = jnp.argsort(logits, axis=-1, descending=True)
        ranked = jnp.take_along_axis(logits, order, axis=-1)
        probabilities = jax.nn.softmax(ranked, axis=-1)
        # A token stays where those before it do not yet hold top_p.
        kept = jnp.cumsum(probabilities, axis=-1) - probabilities < sampling.top_p
        kept = jnp.zeros_like(kept).at[jnp.arange(len(logits))[:, None], order].set(kept)
        logits = jnp.where(kept, logits, -jnp.inf)
    if sampling.min_p > 0:
        least = logits.max(-1, keepdims=True) + math.log(sampling.min_p)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits
