"""One attention layer of Llama-3-8B's shape over a million keys: dense attention in XLA beside clusters on the host.

    python benchmarks/layer.py --keys 32768 131072 1048576 --json OUT [--key-codes]

No model has so many keys at hand, so they come from a generator that imitates real ones: keys lie in groups of unequal
size around centers, close to their neighbours in the text, and queries look at one group more than at the others. The
groups are not the clusters: those are found by k-means, as in a prefill.

Letters: `K` key/value heads, `G` query heads per key/value head, `S` keys, `H` head dim.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from rich.console import Console

from rajax import RetrievalConfig, report
from rajax.clusters import Blocks
from rajax.coded_layer import CodedLayer
from rajax.exact_attention import HALVES
from rajax.host_layer import HostLayer
from rajax.kernels import finish, partial_attention
from rajax.models.wave import BLOCK_KEYS, SelectionRule, spherical_labels
from rajax.wave_host import LayerClusters, join_halves

KV_HEADS, GROUPS, HEAD_DIM = 8, 4, 128
RUNS = 15
QUERIES = 8
"""Steps whose error is measured."""


def head(k: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys and values [S, H] and scaled queries [QUERIES, G, H] of head k, float32."""
    draw = np.random.default_rng((seed, k))
    groups = max(8, count // 256)
    # A text stays with a subject for a while: runs of keys from one group, and some groups come often.
    runs = draw.zipf(1.3, size=count // 16 + 1) % groups
    which = np.repeat(draw.permutation(groups)[runs], 16)[:count]
    centers, value_centers = draw.standard_normal((2, groups, HEAD_DIM), np.float32)
    keys, values = draw.standard_normal((2, count, HEAD_DIM), np.float32)
    keys, values = (0.5 * a + c[which] for a, c in ((keys, centers), (values, value_centers)))
    wanted = centers[draw.integers(0, groups, (QUERIES, GROUPS))]
    noise = draw.standard_normal((QUERIES, GROUPS, HEAD_DIM), np.float32)
    # Scores of the group that is looked at are some ten above the others'.
    return keys, values, (wanted + noise) * np.float32(10 / HEAD_DIM)


def cluster(count: int, seed: int, key_codes: bool) -> HostLayer:
    """The layer as the host holds it: bfloat16, in clusters."""
    keys, values = (np.empty((KV_HEADS, count, HEAD_DIM), np.float32) for _ in range(2))
    for k in range(KV_HEADS):
        keys[k], values[k], _ = head(k, count, seed)
    blocks = Blocks(KV_HEADS, count, HEAD_DIM, np.dtype(ml_dtypes.bfloat16), BLOCK_KEYS)
    label = jax.jit(spherical_labels)
    labels = np.stack([np.asarray(label(keys[k : k + 1], jnp.int32(count)))[0] for k in range(KV_HEADS)])
    root = np.broadcast_to(
        np.eye(HEAD_DIM, dtype=np.float32) / np.sqrt(HEAD_DIM), (KV_HEADS, HEAD_DIM, HEAD_DIM)
    )
    outliers = 0.0 if key_codes else RetrievalConfig().outliers
    new = blocks.add(keys, values, labels, root, None, None, outliers)
    places = new.sizes.shape[1]
    clusters: HostLayer
    if key_codes:
        clusters = CodedLayer(blocks, places)
    else:
        clusters = LayerClusters(blocks, -(-places // HALVES), SelectionRule("spread", None, 0.9, 8, 96))
    clusters.adopt(new, np.zeros(KV_HEADS, bool), root)
    return clusters


def measure(count: int, seed: int, key_codes: bool) -> dict[str, Any]:
    """One row."""
    start = time.perf_counter()
    clusters = cluster(count, seed, key_codes)
    build_s = time.perf_counter() - start
    # Head by head, and drawn anew: all keys are in memory only once as float32.
    heads, drawn = [], []
    for k in range(KV_HEADS):
        keys, values, wanted = head(k, count, seed)
        heads.append((jnp.asarray(keys[None, None]), jnp.asarray(values[None, None])))
        drawn.append(wanted)
    del keys, values
    queries = np.ascontiguousarray(np.stack(drawn, axis=1))
    weights = jnp.zeros((1, 1, count))

    @jax.jit
    def dense(q, heads):
        parts = [finish(partial_attention(q[:, k : k + 1], *kv, weights)) for k, kv in enumerate(heads)]
        return jnp.concatenate(parts, axis=1)

    def exact(i: int) -> np.ndarray:
        return np.asarray(dense(queries[i][None], heads))[0]

    out = np.empty((HALVES * KV_HEADS, GROUPS, HEAD_DIM + 2), np.float32)

    def ours(i: int) -> np.ndarray:
        return clusters.attend(queries[i], out)

    errors, ours_s, dense_s, attended = [], [], [], []
    for run in range(RUNS):
        i = run % QUERIES
        start = time.perf_counter()
        counts = ours(i)
        ours_s.append(time.perf_counter() - start)
        got = np.asarray(finish(join_halves(jnp.asarray(out))))
        start = time.perf_counter()
        wanted = exact(i)
        dense_s.append(time.perf_counter() - start)
        errors.append(np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1))
        attended.append(counts[:, 1].sum() / (KV_HEADS * count))
    # The first runs compile.
    step, dense_step = np.median(ours_s[2:]), np.median(dense_s[2:])
    return {
        "keys": count,
        "ours_ms": 1e3 * float(step),
        "dense_ms": 1e3 * float(dense_step),
        "times_as_fast": float(dense_step / step),
        "relative_error": float(np.mean(errors)),
        "relative_error_p99": float(np.quantile(errors, 0.99)),
        "attended_pct": 100 * float(np.mean(attended)),
        "draw_and_build_s": build_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, nargs="+", default=[32768, 131072, 1048576])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--key-codes", action="store_true", help="as RetrievalConfig.key_codes")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    args = parser.parse_args()
    rows = []
    for count in args.keys:
        rows.append(measure(count, args.seed, args.key_codes))
        if args.json:
            report.write(args.json, report.json_text(rows))
    columns = {
        "keys": ("keys", "{}"),
        "ms": ("ours_ms", "{:.1f}"),
        "dense ms": ("dense_ms", "{:.1f}"),
        "times as fast": ("times_as_fast", "{:.1f}"),
        "error": ("relative_error", "{:.4f}"),
        "p99": ("relative_error_p99", "{:.4f}"),
        "exact keys %": ("attended_pct", "{:.2f}"),
        "draw, build s": ("draw_and_build_s", "{:.0f}"),
    }
    Console(width=150).print(report.table(rows, columns))


if __name__ == "__main__":
    main()
