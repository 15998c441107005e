"""RetroInfer's wave buffer on real text: hit ratio, bytes moved and time per token, against the size of the cache.

    python benchmarks/buffer.py CKPT --text FILE --context 32768 --steps 256 --json OUT

The prompt is prefilled once. Then every size of the block cache is stepped through the tokens that follow, with a dense
step in between now and then, so that both times are of the same minutes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import rajax
from rajax import report
from rajax.bench import Recording, load
from rajax.models import Llama
from rajax.retrieval import RetrievalConfig
from rajax.session import Session, prefill

DENSE_EVERY = 4
"""One dense step after so many of retrieval."""


def measure(
    model: Llama, recording: Recording, dense: Session, share: float, context: int, tokens: np.ndarray
) -> dict[str, Any]:
    """One row: a size of the cache stepped through the tokens; `dense` has as many steps to go as there are tokens."""
    config = RetrievalConfig(index="wave", wave_buffer=True, block_cache=share)
    with Session(model, [context], [context + len(tokens)], config) as session:
        build_s = recording.play(session)
        seconds, dense_seconds = [], []
        for i, token in enumerate(tokens):
            # What follows a step, the exchange of blocks, counts as well.
            seconds.append(_timed(session, token))
            if i % DENSE_EVERY == 0:
                dense_seconds.append(_timed(dense, token))
        c, used = session.store.counters, session.store.statistics()
        # The first steps compile.
        step, dense_step = np.median(seconds[8:]), np.median(dense_seconds[2:])
        return {
            "block_cache": share,
            "hit_ratio": used["cache_hit_ratio"],
            "bytes_per_token": c.bytes_moved / len(tokens),
            "bytes_against_no_cache": c.bytes_moved / c.bytes_wanted,
            "evictions_per_token": c.evictions / len(tokens),
            "transfers_per_layer": c.transfers / len(tokens) / model.config.num_hidden_layers,
            "attended_pct": 100 * c.attended / c.offloaded,
            "step_ms": 1e3 * float(step),
            "dense_step_ms": 1e3 * float(dense_step),
            "time_against_dense": float(step / dense_step),
            "build_s": build_s,
            "device_kv_bytes": session.device_bytes,
        }


def _timed(session: Session, token: int) -> float:
    start = time.perf_counter()
    session.step([token])
    session.wait()
    return time.perf_counter() - start


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Prints the rows as a table."""
    columns = {
        "cache": ("block_cache", "{:.1%}"),
        "hit ratio": ("hit_ratio", "{:.3f}"),
        "KiB/token": ("bytes_per_token", "{:.0f}"),
        "of no cache": ("bytes_against_no_cache", "{:.3f}"),
        "evictions/token": ("evictions_per_token", "{:.0f}"),
        "transfers/layer": ("transfers_per_layer", "{:.2f}"),
        "exact keys %": ("attended_pct", "{:.1f}"),
        "step ms": ("step_ms", "{:.0f}"),
        "dense ms": ("dense_step_ms", "{:.0f}"),
        "of dense": ("time_against_dense", "{:.2f}"),
        "build s": ("build_s", "{:.0f}"),
        "device MiB": ("device_kv_bytes", "{:.0f}"),
    }
    units = {"bytes_per_token": 2**10, "device_kv_bytes": 2**20}
    shown = ({key: value / units.get(key, 1) for key, value in row.items()} for row in rows)
    console.print(report.table(shown, columns))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument(
        "--text", type=Path, required=True, help="a text file of at least context + steps tokens"
    )
    parser.add_argument("--context", type=int, default=32768, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=256, help="tokens after it, fed one by one")
    parser.add_argument(
        "--caches", type=float, nargs="+", default=[0.01, 0.025, 0.05, 0.1], help="sizes, as shares of the KV"
    )
    parser.add_argument("--json", type=Path, help="where to write the rows")
    args = parser.parse_args()

    tokens = np.asarray(rajax.load_tokenizer(args.checkpoint).encode(args.text.read_text("utf-8")), np.int32)
    total = args.context + args.steps
    if len(tokens) < total:
        parser.error(f"{args.text} has {len(tokens)} tokens; {total} are needed")
    console = Console(width=150)
    model = load(args.checkpoint, args.context)
    rows = []
    # Every size has dense steps of its own.
    capacity = args.context + len(args.caches) * args.steps
    with Session(model, [args.context], [capacity], None) as dense:
        recording = Recording(dense)
        start = time.perf_counter()
        prefill(model, [tokens[: args.context]], [dense, recording]).block_until_ready()  # type: ignore[list-item]
        console.print(f"{args.context} tokens: prefill {time.perf_counter() - start:.0f} s")
        dense.finish_prefill()
        for share in args.caches:
            rows.append(measure(model, recording, dense, share, args.context, tokens[args.context : total]))
            if args.json:
                report.write(args.json, report.json_text(rows))
    show(rows, console)


if __name__ == "__main__":
    main()
