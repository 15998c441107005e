"""Search on a real model's queries and keys: recall and missed attention mass against time, per setting.

    python benchmarks/search.py CKPT --context 8000

A text is prefilled, a few tokens are decoded with their real queries, and those queries are searched for
among the offloaded keys of every layer and KV head: exactly, and by ScaNN with shares of leaves. The settings of
`ScannIndex` come from this table.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import rajax
from rajax.haystack import prose
from rajax.head import SCORED
from rajax.index import ExactIndex, Index, ScannIndex
from rajax.session import Session, prefill

LEAVES = (0.1, 0.25, 0.5, 0.7, 1.0)


def collect(
    checkpoint: Path, text: str, context: int, steps: int, every: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(queries [steps * G, H], keys [S, H]) of every `every`-th head."""
    extend = {"rope_type": "yarn", "factor": 4.0}
    model = rajax.load(checkpoint)
    if context + steps > model.config.max_positions:
        model = rajax.load(checkpoint, rope_scaling=extend)
    tokens = rajax.load_tokenizer(checkpoint).encode(text)
    if len(tokens) < context + steps:
        raise SystemExit(f"the text has {len(tokens)} tokens, {context + steps} are needed; give --text FILE")
    prompt, rest = tokens[:context], tokens[context : context + steps]
    settings = rajax.RetrievalConfig(index="exact", recall_steps=steps)
    with Session(model, [context], [context + steps], settings) as session:
        prefill(model, [np.asarray(prompt, np.int32)], [session])
        session.finish_prefill()
        for token in rest:
            session.step([token])
        assert session.store is not None
        samples = session.store.samples
        names = [(layer, k) for layer, row in enumerate(session.store.heads) for k in range(len(row[0]))]
        heads = []
        for layer, k in names[::every]:
            queries = [s.queries for s in samples if (s.layer, s.kv_head) == (layer, k)]
            head = session.store.heads[layer][0][k]
            heads.append((np.concatenate(queries), head.keys[: head.sealed].copy()))
        return heads


def measure(index: Index, queries: np.ndarray, keys: np.ndarray, top_k: int, groups: int, leaves: float):
    """recall@100, recall@k, mean and 99th percentile of the missed mass, microseconds per search."""
    scores = queries @ keys.T
    order = np.argsort(-scores, axis=1)[:, :top_k]
    weights = np.exp(scores - scores.max(1, keepdims=True))
    wanted = np.take_along_axis(weights, order, axis=1).sum(1)
    scored = round(SCORED * top_k)
    starts = range(0, len(queries), groups)
    found = [index.search(queries[i : i + groups], scored, leaves) for i in starts]
    start = time.perf_counter()
    for i in starts:
        index.search(queries[i : i + groups], scored, leaves)
    micro = (time.perf_counter() - start) / len(found) * 1e6
    recall_100, recall_k, missed = [], [], []
    for row in range(len(queries)):
        hit = found[row // groups]
        ids = hit.ids[row % groups][np.isfinite(hit.scores[row % groups])]
        recall_100.append(np.isin(order[row, :100], ids).mean())
        recall_k.append(np.isin(order[row], ids).mean())
        missed.append(1 - weights[row, order[row]][np.isin(order[row], ids)].sum() / wanted[row])
    return np.mean(recall_100), np.mean(recall_k), np.mean(missed), np.percentile(missed, 99), micro


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--text", type=Path, help="a text file; by default prose that comes with Python")
    parser.add_argument("--context", type=int, default=8000, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=8, help="decode steps whose queries are searched")
    parser.add_argument("--top-k", type=int, default=256)
    parser.add_argument("--every", type=int, default=3, help="measure every n-th head")
    args = parser.parse_args()

    text = args.text.read_text(encoding="utf-8") if args.text else prose()
    heads = collect(args.checkpoint, text, args.context, args.steps, args.every)
    groups = len(heads[0][0]) // args.steps
    table = Table(title=f"{len(heads)} heads, {len(heads[0][1])} offloaded keys, {groups} queries a search")
    for column in (
        "index",
        "recall@100",
        f"recall@{args.top_k}",
        "missed mass",
        "p99",
        "µs/search",
        "build s",
    ):
        table.add_column(column, justify="right")

    def row(name: str, results: list, build: float) -> None:
        r100, rk, missed, p99, micro = np.mean(results, axis=0)
        cells = f"{r100:.3f}", f"{rk:.3f}", f"{missed:.4f}", f"{p99:.4f}", f"{micro:.0f}", f"{build:.2f}"
        table.add_row(name, *cells)

    row("exact", [measure(ExactIndex(k), q, k, args.top_k, groups, 1.0) for q, k in heads], 0.0)
    start = time.perf_counter()
    indexes = [ScannIndex(k) for _, k in heads]
    build = (time.perf_counter() - start) / len(heads)
    for share in LEAVES:
        results = [
            measure(i, q, k, args.top_k, groups, share) for i, (q, k) in zip(indexes, heads, strict=True)
        ]
        row(f"scann, {share:.0%} of leaves", results, build)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
