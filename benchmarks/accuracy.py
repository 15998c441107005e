"""How near retrieval comes to dense attention, on real text: a table, JSON, and the frontier as a picture.

    python benchmarks/accuracy.py CKPT --text FILE --contexts 32768 --json OUT --plot OUT.png

The first tokens of the text are the prompt. It is prefilled once; then dense attention and every setting of
retrieval are stepped through the tokens that follow, the same for all (teacher forcing). The settings are ScaNN over
the keys as they are (RetrievalAttention without its learned part), an exact search (the upper limit), routes alone,
and the whole, each without and with the summary; and clusters retrieved whole: RetroInfer's setting, fixed shares of
ours without a cache and without whole heads, ranked in three ways, and our default.

Letters: `B` batch, `K` key/value heads, `G` query heads per key/value head, `S` keys, `H` head dim, `V` vocabulary,
`L` layers.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

import rajax
from rajax import report
from rajax.bench import Recording, load
from rajax.index import select_top
from rajax.models import Llama
from rajax.retrieval import RetrievalConfig
from rajax.session import Session, prefill
from rajax.store import HostStore, Sample

EVERY = 8
"""One step in so many is compared with exact attention, head by head."""

WANTED = 256
"""Missed mass is counted against that of so many best keys."""


def settings() -> dict[str, RetrievalConfig]:
    """The settings by name; a name that ends in "+ summary" differs from the one without only in that."""
    searched: dict[str, Any] = {"exact_below": 0}
    raw = {**searched, "projection": False, "routes": 0}
    plain = {
        "scann 12 %": RetrievalConfig(leaves_searched=0.12, **raw),
        "scann 25 %": RetrievalConfig(leaves_searched=0.25, **raw),
        "scann 50 %": RetrievalConfig(leaves_searched=0.5, **raw),
        "exact 100": RetrievalConfig(index="exact", top_k=100),
        "exact 256": RetrievalConfig(index="exact"),
        "routes": RetrievalConfig(leaves_searched=0, routes=16, **searched),
        "whole": RetrievalConfig(**searched),
        "whole, error 2 %": RetrievalConfig(target_error=0.02, **searched),
    }
    both = {}
    for name, config in plain.items():
        both[name] = dataclasses.replace(config, summary=False)
        both[f"{name} + summary"] = config
    bare: dict[str, Any] = {
        "index": "wave",
        "wave_buffer": True,
        "block_cache": 0.0,
        "outliers": 0.0,
        "whole_heads": 0.0,
    }
    published: dict[str, Any] = {"rank_by": "estimate", "projection": False, "sink_tokens": 4, "window": 64}
    return both | {
        "wave, RetroInfer's": RetrievalConfig(**bare, **published, retrieved_share=0.018),
        "wave, 1.8 %": RetrievalConfig(**bare, retrieved_share=0.018),
        # Of the clusters; the most wanted are the smaller ones, and hold 4.0 % of the keys.
        "wave, 4.2 %": RetrievalConfig(**bare, retrieved_share=0.042),
        "wave, 4.2 % by estimate": RetrievalConfig(**bare, retrieved_share=0.042, rank_by="estimate"),
        "wave, 4.2 % by bound": RetrievalConfig(**bare, retrieved_share=0.042, rank_by="bound"),
        "wave, 4.2 %, whole heads": RetrievalConfig(
            index="wave", wave_buffer=True, block_cache=0.0, retrieved_share=0.042
        ),
        "wave, buffer": RetrievalConfig(index="wave", wave_buffer=True),
        "wave, host": RetrievalConfig(index="wave", wave_buffer=False),
    }


@dataclasses.dataclass
class Fidelity:
    """Sums of what `compare` finds, one number per query."""

    recall: list[float] = dataclasses.field(default_factory=list)
    missed: list[float] = dataclasses.field(default_factory=list)
    errors: dict[int, list[float]] = dataclasses.field(default_factory=dict)


def compare(session: Session, samples: list[Sample], into: Fidelity) -> None:
    """Compares the searches of the step just made with exact attention over the same keys."""
    cache, zone, store = session._cache, session.zone, session.store
    assert cache is not None
    assert store is not None
    for layer in range(len(cache.keys)):
        keys, values, counts = (np.asarray(a[layer])[0] for a in (cache.keys, cache.values, cache.log_counts))
        for sample in (s for s in samples if s.layer == layer):
            k, q = sample.kv_head, sample.queries
            head = store.heads[layer][0][k]
            if head.sealed != sample.sealed:
                continue  # the step ended with the tail sealed: what it saw is no longer there
            scores = q @ head.keys[: sample.count].T
            static = q @ keys[k, : zone.size].T
            summary = q @ keys[k, zone.size :].T + counts[k]
            part_numerator, part_denominator, part_top = head.attend(q, sample.found)
            top = np.maximum(np.maximum(scores.max(1), static.max(1)), part_top)[:, None]
            weights, static_weights, summary_weights = (np.exp(s - top) for s in (scores, static, summary))
            seen = static_weights @ values[k, : zone.size]
            exact = (seen + weights @ head.values[: sample.count]) / (static_weights.sum(1) + weights.sum(1))[
                :, None
            ]
            rescale = np.exp(part_top[:, None] - top)
            numerator = seen + summary_weights @ values[k, zone.size :] + rescale * part_numerator
            denominator = static_weights.sum(1) + summary_weights.sum(1) + rescale[:, 0] * part_denominator
            errors = np.linalg.norm(numerator / denominator[:, None] - exact, axis=1) / np.linalg.norm(
                exact, axis=1
            )
            into.errors.setdefault(layer, []).extend(errors.tolist())

            tail = np.arange(sample.sealed, sample.count)
            wanted = select_top(scores, WANTED)[0]
            for row, best in enumerate(wanted):
                best = best[np.argsort(-scores[row, best])]
                found = np.isin(best, np.concatenate([sample.found.scored_ids[row], tail]))
                mass = weights[row, best]
                into.recall.append(float(found[:100].mean()))
                into.missed.append(float(mass[~found].sum() / max(mass.sum(), np.finfo(np.float32).tiny)))


def search_seconds(session: Session, samples: list[Sample]) -> float:
    """Seconds of the searches of one step, all layers, one head after the other as in a decode step."""
    assert session.store is not None
    heads = session.store.heads
    start = time.perf_counter()
    for sample in samples:
        heads[sample.layer][0][sample.kv_head].search(sample.queries)
    return time.perf_counter() - start


def steps(session: Session, tokens: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Steps through the tokens; yields the log-probabilities [V] after each."""
    for i, token in enumerate(tokens):
        yield i, np.asarray(jax.nn.log_softmax(session.step([token])[0]))


def measure(
    model: Llama,
    recording: Recording,
    config: RetrievalConfig,
    context: int,
    tokens: np.ndarray,
    dense: np.ndarray,
) -> dict[str, Any]:
    """One row: a setting stepped through the tokens."""
    with Session(model, [context], [context + len(tokens)], config) as session:
        build_s = recording.play(session)
        store = session.store
        assert store is not None
        searched = isinstance(store, HostStore)
        fidelity, searches, divergence, agreement = Fidelity(), [], [], []
        if searched:
            store.keep_samples = len(store.heads)
        for i, got in steps(session, tokens):
            divergence.append(float((np.exp(dense[i]) * (dense[i] - got)).sum()))
            agreement.append(dense[i].argmax() == got.argmax())
            if not searched:
                continue
            samples, store.samples = store.samples, []
            if samples:
                compare(session, samples, fidelity)
                searches.append(min(search_seconds(session, samples) for _ in range(3)))
            if (i + 1) % EVERY == 0:
                store.keep_samples = len(store.heads)
        used = store.statistics()
        row: dict[str, Any] = {
            "leaves_pct": None,
            "routes": None,
            "scored_pct": 100 * used["keys_scored"] / used["keys_offloaded"],
            "retrieved_pct": 100 * used["keys_retrieved"] / used["keys_offloaded"],
            **dict.fromkeys(("recall_at_100", "missed_mass", "missed_mass_p99", "rel_error", "search_ms")),
            "rel_error_per_layer": None,
            "cache_hit_ratio": used.get("cache_hit_ratio"),
            "kl": float(np.mean(divergence)),
            "agreement": float(np.mean(agreement)),
            "build_s": build_s,
            "device_kv_bytes": session.device_bytes,
        }
        if not searched:
            return row
        per_layer = [float(np.mean(fidelity.errors[layer])) for layer in sorted(fidelity.errors)]
        exact = config.index == "exact"
        return row | {
            "leaves_pct": 100 * used["leaves_searched"],
            "routes": used["routes"],
            "scored_pct": 100.0 if exact else row["scored_pct"],
            "recall_at_100": float(np.mean(fidelity.recall)),
            "missed_mass": float(np.mean(fidelity.missed)),
            "missed_mass_p99": float(np.percentile(fidelity.missed, 99)),
            "rel_error": float(np.mean(per_layer)),
            "rel_error_per_layer": per_layer,
            "search_ms": 1e3 * float(np.median(searches)),
        }


def run(
    model: Llama, tokens: np.ndarray, context: int, new: int, names: list[str], console: Console
) -> Iterator[dict[str, Any]]:
    """The rows of one context, as they are measured."""
    prompt, forced = tokens[:context], tokens[context : context + new]
    with Session(model, [context], [context + new], None) as session:
        recording = Recording(session)
        start = time.perf_counter()
        prefill(model, [prompt], [session, recording]).block_until_ready()  # type: ignore[list-item]
        prefill_s = time.perf_counter() - start
        session.finish_prefill()
        start = time.perf_counter()
        dense = np.stack([got for _, got in steps(session, forced)])
        console.print(
            f"{context} tokens: prefill {prefill_s:.0f} s, dense step {(time.perf_counter() - start) / new:.3f} s"
        )
    del session
    one = recording.layers[0][0]
    full = 2 * len(recording.layers) * one.nbytes // one.shape[2] * (context + new)
    for name in names:
        row = measure(model, recording, settings()[name], context, forced, dense)
        console.print(f"{name}: KL {row['kl']:.4f}, scored {row['scored_pct']:.2f} %")
        yield {"setting": name, "context": context, **row, "prefill_s": prefill_s, "full_kv_bytes": full}


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Prints the rows as a table."""
    columns = {
        "setting": ("setting", "{}"),
        "leaves %": ("leaves_pct", "{:.0f}"),
        "routes": ("routes", "{:.1f}"),
        "scored %": ("scored_pct", "{:.2f}"),
        "retr. %": ("retrieved_pct", "{:.2f}"),
        "recall@100": ("recall_at_100", "{:.3f}"),
        "missed": ("missed_mass", "{:.4f}"),
        "p99": ("missed_mass_p99", "{:.3f}"),
        "error": ("rel_error", "{:.4f}"),
        "KL": ("kl", "{:.4f}"),
        "agree": ("agreement", "{:.3f}"),
        "search ms": ("search_ms", "{:.1f}"),
        "build s": ("build_s", "{:.0f}"),
        "device KV": ("device_kv_bytes", "{:.2e}"),
    }
    console.print(report.table(rows, columns))


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws KL against the share of keys scored exactly."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    contexts = sorted({row["context"] for row in rows})
    figure, axes = plt.subplots(1, len(contexts), figsize=(7 * len(contexts), 5), squeeze=False)
    for axis, context in zip(axes[0], contexts, strict=True):
        here = [row for row in rows if row["context"] == context]
        families = list(dict.fromkeys(row["setting"].split()[0].rstrip(",") for row in here))
        for color, family in enumerate(families):
            for summary in (False, True):
                points = sorted(
                    (row["scored_pct"], row["kl"])
                    for row in here
                    if row["setting"].split()[0].rstrip(",") == family
                    and ("summary" in row["setting"]) == summary
                )
                if points:
                    axis.plot(
                        *zip(*points, strict=True),
                        marker="o" if summary else "x",
                        linestyle="-" if summary else "--",
                        color=f"C{color}",
                        label=f"{family} + summary" if summary else family,
                    )
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="keys scored exactly, % of the offloaded",
            ylabel="KL(dense ‖ retrieval) of the next token",
            title=f"{context:,} tokens",
        )
        axis.grid(visible=True, which="both", alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument(
        "--text", type=Path, required=True, help="a text file of at least the longest context"
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[32768], help="tokens of the prompts")
    parser.add_argument("--steps", type=int, default=128, help="teacher-forced steps after each")
    parser.add_argument("--settings", nargs="+", choices=list(settings()), help="by default all")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--plot", type=Path, help="where to draw the frontier, a PNG")
    args = parser.parse_args()

    tokens = np.asarray(rajax.load_tokenizer(args.checkpoint).encode(args.text.read_text("utf-8")), np.int32)
    if len(tokens) < max(args.contexts) + args.steps:
        parser.error(
            f"{args.text} has {len(tokens)} tokens; --contexts {max(args.contexts)} and --steps {args.steps} need "
            f"{max(args.contexts) + args.steps}"
        )
    console = Console(width=160)
    rows: list[dict[str, Any]] = []
    for context in args.contexts:
        # The few steps after the prompt do not count: the factor is the context's.
        model = load(args.checkpoint, context)
        for row in run(model, tokens, context, args.steps, args.settings or list(settings()), console):
            rows.append(row)
            if args.json:
                report.write(args.json, report.json_text(rows))
    show(rows, console)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
