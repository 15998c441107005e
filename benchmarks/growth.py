"""Whether a long answer drifts: retrieval's fidelity in the first and the last steps of many.

    python benchmarks/growth.py CKPT --text FILE --context 32768 --new 4096

The tokens after the prompt are fed one by one. Those that leave the window are appended to the host's tail, sealed
into indexed segments, and summarized with what the decode's own queries taught; the last steps' searches are
compared with exact attention as `benchmarks/accuracy.py` compares the first.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from accuracy import EVERY, Fidelity, compare
from rich.console import Console
from rich.table import Table

import rajax
from rajax.bench import load
from rajax.session import Session, prefill


def grow(session: Session, tokens: np.ndarray, at_ends: int, console: Console) -> None:
    """Steps through the tokens and prints a table of the first and the last `at_ends`."""
    store = session.store
    assert store is not None
    table = Table()
    names = "steps", "recall@100", "missed", "p99", "error", "scored %", "retrieved %", "segments", "ms/step"
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    spans = [range(at_ends), range(len(tokens) - at_ends, len(tokens))]
    for span in spans:
        fidelity, seconds, counters = Fidelity(), [], []
        first = 0 if span is spans[0] else spans[0].stop
        for i in range(first, span.stop):
            if i == span.start:
                counters.append((store.counters.offloaded, store.counters.scored, store.counters.retrieved))
            sampled = i in span and (i - span.start) % EVERY == 0
            store.keep_samples = len(store.heads) if sampled else 0
            start = time.perf_counter()
            session.step([tokens[i]])
            if i in span:
                seconds.append(time.perf_counter() - start)
            samples, store.samples = store.samples, []
            if samples:
                compare(session, samples, fidelity)
        before = counters[0]
        offloaded = store.counters.offloaded - before[0]
        table.add_row(
            f"{span.start + 1} to {span.stop}",
            f"{np.mean(fidelity.recall):.4f}",
            f"{np.mean(fidelity.missed):.4f}",
            f"{np.percentile(fidelity.missed, 99):.3f}",
            f"{np.mean([np.mean(e) for e in fidelity.errors.values()]):.4f}",
            f"{100 * (store.counters.scored - before[1]) / offloaded:.2f}",
            f"{100 * (store.counters.retrieved - before[2]) / offloaded:.2f}",
            f"{len(store.heads[0][0][0].segments)}",
            f"{1e3 * np.median(seconds):.0f}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument(
        "--text", type=Path, required=True, help="a text file of at least context + new tokens"
    )
    parser.add_argument("--context", type=int, default=32768, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=4096, help="tokens after it")
    parser.add_argument("--at-ends", type=int, default=128, help="steps that are compared at either end")
    args = parser.parse_args()

    tokens = np.asarray(rajax.load_tokenizer(args.checkpoint).encode(args.text.read_text("utf-8")), np.int32)
    if args.new < 2 * args.at_ends:
        parser.error(f"--new {args.new} has no room for --at-ends {args.at_ends} at both ends")
    total = args.context + args.new
    if len(tokens) < total:
        parser.error(f"{args.text} has {len(tokens)} tokens; {total} are needed")
    model = load(args.checkpoint, total)
    with Session(model, [args.context], [total], rajax.RetrievalConfig(exact_below=0)) as session:
        prefill(model, [tokens[: args.context]], [session])
        session.finish_prefill()
        grow(session, tokens[args.context : total], args.at_ends, Console(width=120))


if __name__ == "__main__":
    main()
