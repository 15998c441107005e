"""The demo: a real model answers a question about a long text, with and without retrieval."""

from __future__ import annotations

import dataclasses

from rich.console import Console
from rich.table import Table

from rajax import smollm2
from rajax.checkpoint import load
from rajax.cli import format_bytes, stream_answer
from rajax.generation import Statistics
from rajax.haystack import haystack
from rajax.retrieval import RetrievalConfig
from rajax.tokenizer import load_tokenizer

MAX_NEW_TOKENS = 48
RECALL_STEPS = 8


@dataclasses.dataclass(frozen=True)
class _Run:
    """One answer."""

    name: str
    answer: str
    statistics: Statistics


def run(length: int, depth: float) -> int:
    """Runs the demo; the exit code is 0 where both attentions found the needle."""
    out = Console(highlight=False)
    path = smollm2.checkpoint(lambda line: out.print(line, markup=False, soft_wrap=True))
    params, tokenizer = load(path), load_tokenizer(path)
    text = haystack(tokenizer, length, depth=depth)
    out.print(f"text:  {len(text.tokens):,} tokens, with a number hidden at {depth:.0%} of it")
    out.print(f"asked: {text.question}\n")

    # A text so short would be attended to whole.
    attentions = {"retrieval": RetrievalConfig(exact_below=0, recall_steps=RECALL_STEPS), "dense": None}
    runs = []
    for name, retrieval in attentions.items():
        out.print(f"[bold]{name}[/]")
        answer = stream_answer(
            params, tokenizer, text.tokens, max_new_tokens=MAX_NEW_TOKENS, retrieval=retrieval
        )
        if answer is None:
            return 130
        runs.append(_Run(name, *answer))
    out.print()
    out.print(_table(runs, text.answer))
    return 0 if all(text.answer in r.answer for r in runs) else 1


def _table(runs: list[_Run], right: str) -> Table:
    table = Table(title=f"the hidden number is {right}", title_justify="left")
    table.add_column("", no_wrap=True)
    for r in runs:
        table.add_column(r.name, justify="right", max_width=32)

    def row(name: str, cells: list[str]) -> None:
        table.add_row(name, *cells)

    statistics = [r.statistics for r in runs]
    row("answer", [r.answer.strip().split("\n")[0] for r in runs])
    row("needle found", ["yes" if right in r.answer else "[red]no[/]" for r in runs])
    row("prefill, s", [f"{s.prefill_s:.1f}" for s in statistics])
    row("decode, tokens/s", ["" if s.steps_per_s is None else f"{s.steps_per_s:.1f}" for s in statistics])
    row("KV on the device", [format_bytes(s.device_kv_bytes) for s in statistics])
    row("KV on the host", [format_bytes(s.host_kv_bytes) for s in statistics])
    row("index on the host", [format_bytes(s.index_bytes) for s in statistics])
    row(
        "offloaded keys retrieved",
        [f"{s.keys_retrieved / s.keys_offloaded:.1%}" if s.keys_offloaded else "" for s in statistics],
    )
    top_k = RetrievalConfig().top_k
    row(f"recall@{top_k}", ["" if s.recall is None else f"{s.recall:.3f}" for s in statistics])
    return table
