"""The kernel on the GPU at hand: right against its reference, and how long decode attention takes there.

    python benchmarks/device.py --json OUT

Shapes are those of one layer of Llama 3 8B: 32 query heads, 8 KV heads of 128, in bfloat16. First the Pallas kernel is
compared with its reference in plain JAX, over shapes that pad and shapes that do not, in float32 and bfloat16. Then one
decode step's attention is timed at 32K, 128K and 1M keys: dense attention in plain XLA and in the kernel, over all
keys; and what remains on the device with retrieval: the static zone with the summary (`index="scann"`), and the static
zone with the hot clusters of the cache and what was fetched in the kernel, and all other clusters ranked and estimated
in XLA (`index="wave"`). What crosses from the host is not in it.

Each is one jitted program that runs the same attention `REPEATS` times, each run waiting for the one before, so that
launching it does not count. No network, no checkpoint; some minutes, mostly of compilation. The exit code is 1 where a
comparison fails, and 0 where it does not, and also where there is no GPU: then nothing is measured, and it says so.

Letters: `B` batch, `K` key/value heads, `G` query heads per key/value head, `S` keys, `C` clusters, `H` head dim.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from rajax import report
from rajax.kernels import Partial, finish, merge, partial_attention_reference
from rajax.kernels.partial_attention import BLOCK_S, partial_attention_pallas
from rajax.models.summary import CLUSTERS, UNIT
from rajax.models.wave import BLOCK_KEYS
from rajax.retrieval import RetrievalConfig
from rajax.wave_buffer import BufferedWave

KV_HEADS, GROUPS, HEAD_DIM = 8, 4, 128
REPEATS = 16
RUNS = 7
TINY = 1e-30
"""What one run's result adds to the next one's query: XLA cannot know that it is nothing, and must keep their order."""

CLUSTER_KEYS = 12
"""Keys of a cluster of the wave index on average."""

COLUMNS = {
    "attention": ("attention", "{}"),
    "keys": ("keys", "{:,}"),
    "read": ("keys_read", "{:,}"),
    "µs": ("median_us", "{:.0f}"),
    "±": ("spread_us", "{:.1f}"),
    "GB/s": ("gb_per_s", "{:.0f}"),
    "of dense": ("of_dense", "{:.3f}"),
}


def inputs(seed: int, batch: int, heads: int, groups: int, slots: int, width: int, dtype: Any):
    """Scaled q [B, K, G, H], keys and values [B, K, S, H], and log-weights [B, K, S], a third of them -inf."""
    ones = jax.random.split(jax.random.key(seed), 5)
    q = jax.random.normal(ones[0], (batch, heads, groups, width)) * width**-0.5 * 4
    keys, values = (jax.random.normal(k, (batch, heads, slots, width), dtype) for k in ones[1:3])
    counts = jnp.log(1.0 + jax.random.randint(ones[3], (batch, heads, slots), 0, 40))
    held = jax.random.uniform(ones[4], (batch, heads, slots)) < 2 / 3
    return q.astype(dtype), keys, values, jnp.where(held, counts, -jnp.inf)


def errors(kernel: Callable[..., Partial], sizes: list[int]) -> Iterator[dict[str, Any]]:
    """Per shape and dtype, the kernel's largest difference from the reference in float32, relative to its scale."""
    shapes = [(1, KV_HEADS, GROUPS, slots, HEAD_DIM) for slots in sizes]
    shapes += [(2, 3, 3, 700, 64), (1, 1, 1, 65, 80), (3, 2, 8, 1, 128), (1, 2, 12, 1024, 256)]
    for shape in shapes:
        for dtype, tolerance in ((jnp.float32, 1e-4), (jnp.bfloat16, 2e-2)):
            q, keys, values, weights = inputs(sum(shape), *shape, dtype)
            part = jax.jit(kernel)(q, keys, values, weights)
            with jax.default_matmul_precision("highest"):
                wide = (a.astype(jnp.float32) for a in (q, keys, values))
                expected = jax.jit(partial_attention_reference)(*wide, weights)
            got, wanted = (np.asarray(finish(p)) for p in (part, expected))
            worst = float(np.abs(got - wanted).max() / np.abs(wanted).max())
            # Equal where there were no keys, both -inf; else off by the rounding of a score of a few units.
            tops = np.allclose(part.max, expected.max, atol=10 * tolerance)
            right = bool(worst < tolerance and tops)
            yield {"shape": shape, "dtype": jnp.dtype(dtype).name, "error": worst, "right": right}


def median_us(attend: Callable[..., jax.Array], q: jax.Array, *arrays: jax.Array) -> tuple[float, float]:
    """Median and half the interquartile range, in µs, of one run of `attend`(q, *arrays) -> [B, K, G, H]."""

    @jax.jit
    def repeated(q, *arrays):
        return jax.lax.fori_loop(0, REPEATS, lambda _, q: q + (TINY * attend(q, *arrays)).astype(q.dtype), q)

    seconds = []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        repeated(q, *arrays).block_until_ready()
        seconds.append(time.perf_counter() - start)
    low, middle, high = np.percentile(np.array(seconds[1:]) / REPEATS * 1e6, [25, 50, 75])
    return float(middle), float(high - low) / 2


def timings(kernel: Callable[..., Partial], keys: int, dtype: Any) -> Iterator[dict[str, Any]]:
    """The rows of one context, dense XLA first."""
    settings = RetrievalConfig()
    static = settings.zone_size
    offloaded = keys - static
    fetched = round(settings.block_cache * keys) + BufferedWave.max_clusters * BLOCK_KEYS

    def dense(attention):
        return lambda q, *zone: finish(attention(q, *zone))

    def ranked(q, near_keys, near_values, near_weights, means, mean_values, log_counts):
        scores = jnp.einsum("bkgh,bkch->bkgc", q, means, preferred_element_type=jnp.float32)
        scores = scores + log_counts[:, :, None]
        top = scores.max(-1)
        mass = jnp.exp(scores - top[..., None])
        rank = mass.sum(2)
        limit = jax.lax.top_k(rank, BufferedWave.max_clusters + 1)[0][..., -1:]
        # The best are attended to exactly, and count here no more.
        mass = jnp.where((rank > limit)[:, :, None], 0, mass)
        numerator = jnp.einsum(
            "bkgc,bkch->bkgh", mass.astype(means.dtype), mean_values, preferred_element_type=jnp.float32
        )
        near = kernel(q, near_keys, near_values, near_weights)
        return finish(merge(near, Partial(numerator, mass.sum(-1), top)))

    cases: dict[str, tuple[Callable[..., jax.Array], tuple[int, ...]]] = {
        "dense, XLA": (dense(partial_attention_reference), (keys,)),
        "dense, kernel": (dense(kernel), (keys,)),
        "static zone, kernel": (dense(kernel), (static,)),
        "static zone + summary, kernel": (dense(kernel), (static + offloaded * CLUSTERS // UNIT,)),
        "static zone + wave": (ranked, (static + fetched, offloaded // CLUSTER_KEYS)),
    }
    first = None
    for name, (attend, zones) in cases.items():
        # Whole blocks of the kernel, as a cache for a GPU has them: others would be copied.
        slots = [-(-n // BLOCK_S) * BLOCK_S for n in zones]
        q = inputs(0, 1, KV_HEADS, GROUPS, 1, HEAD_DIM, dtype)[0]
        arrays = [a for n in slots for a in inputs(0, 1, KV_HEADS, GROUPS, n, HEAD_DIM, dtype)[1:]]
        middle, spread = median_us(attend, q, *arrays)
        first = first or middle
        yield {
            "attention": name,
            "keys": keys,
            "keys_read": sum(slots),
            "median_us": middle,
            "spread_us": spread,
            "gb_per_s": sum(a.nbytes for a in arrays) / middle / 1e3,
            "of_dense": middle / first,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, nargs="+", default=[32768, 131072, 1048576], help="contexts")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--json", type=Path, help="where to write comparisons and times")
    args = parser.parse_args()

    console = Console(width=120)
    if jax.default_backend() != "gpu":
        console.print(f"no GPU: JAX runs on {jax.devices()[0].device_kind}; nothing is measured")
        return
    result: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "errors": [],
        "rows": [],
    }

    def save() -> None:
        if args.json:
            report.write(args.json, report.json_text(result))

    for error in errors(partial_attention_pallas, [640, 4096, 32768]):
        result["errors"].append(error)
        console.print(
            f"{error['shape']} {error['dtype']}: error {error['error']:.1e}{'' if error['right'] else ' WRONG'}",
            markup=False,
        )
        save()
    for keys in args.keys:
        result["rows"] += timings(partial_attention_pallas, keys, jnp.dtype(args.dtype))
        save()
    console.print(f"one layer's attention of one token on {result['device']}, {args.dtype}")
    console.print(report.table(result["rows"], COLUMNS))
    if not all(error["right"] for error in result["errors"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
