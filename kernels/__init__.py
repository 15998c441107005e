"""Floor 0: kernels, each with a plain-JAX reference: attention, and what a CPU's matrix unit does for prompts."""

from rajax.kernels.linear import product
from rajax.kernels.nearest_center import nearest_center
from rajax.kernels.partial import Partial, finish, merge, no_keys
from rajax.kernels.partial_attention import partial_attention, partial_attention_reference
from rajax.kernels.prefill_attention import prefill_attention

__all__ = [
    "Partial",
    "finish",
    "merge",
    "nearest_center",
    "no_keys",
    "partial_attention",
    "partial_attention_reference",
    "prefill_attention",
    "product",
]
