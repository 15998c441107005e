"""What a run found: tables, summary.json and a page with pictures."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from rajax.evaluation.run import Record
from rajax.evaluation.score import interval
from rajax.retrieval import DENSE

Row = dict[str, Any]
"""`suite`, `task`, `length`, `attention`, `samples`, `score` (0 to 100), `failed` and, where there is a dense answer
beside it, `difference` to dense with the interval `low` to `high`. A task that did not run has a row whose score is
None, with `not_run`, the reason."""

DEPTH_BINS = 10


def summarize(
    suite: str, records: Sequence[Record], attentions: Sequence[str], not_run: Mapping[str, str]
) -> list[Row]:
    """A row per task, length and attention; records in the order of lengths and tasks."""
    rows = []
    for length in dict.fromkeys(record["length"] for record in records):
        for task in dict.fromkeys(record["task"] for record in records):
            here = [r["attentions"] for r in records if (r["task"], r["length"]) == (task, length)]
            for attention in attentions:
                scores = [o[attention]["score"] for o in here if "score" in o[attention]]
                row: Row = {"suite": suite, "task": task, "length": length, "attention": attention}
                row |= {
                    "samples": len(scores),
                    "score": 100 * float(np.mean(scores)) if scores else None,
                    "failed": len(here) - len(scores),
                }
                if paired := differences(here, attention):
                    low, high = interval([paired])
                    row |= {"difference": float(np.mean(paired)), "low": low, "high": high}
                rows.append(row)
    for task, reason in not_run.items():
        rows.append({"suite": suite, "task": task, "samples": 0, "score": None, "not_run": reason})
    return rows


def differences(outcomes: Sequence[dict[str, Any]], attention: str) -> list[float]:
    """Per sample that both answered, the attention's score less dense attention's, in points of 100."""
    if attention == DENSE:
        return []
    return [
        100 * (o[attention]["score"] - o[DENSE]["score"])
        for o in outcomes
        if "score" in o[attention] and "score" in o.get(DENSE, {})
    ]


def mean_row(records: Sequence[Record], rows: Sequence[Row], length: int, attention: str) -> Row:
    """The mean over the tasks of a length; each counts as much."""
    here = [row for row in rows if (row.get("length"), row.get("attention")) == (length, attention)]
    scores = [row["score"] for row in here if row["score"] is not None]
    mean: Row = {"task": "mean", "length": length, "attention": attention}
    mean |= {"samples": sum(row["samples"] for row in here), "failed": sum(row["failed"] for row in here)}
    mean["score"] = float(np.mean(scores)) if scores else None
    per_task = [
        differences(
            [r["attentions"] for r in records if (r["task"], r["length"]) == (task, length)], attention
        )
        for task in dict.fromkeys(record["task"] for record in records)
    ]
    if per_task := [paired for paired in per_task if paired]:
        low, high = interval(per_task)
        mean |= {
            "difference": float(np.mean([np.mean(paired) for paired in per_task])),
            "low": low,
            "high": high,
        }
    return mean


def _cells(
    records: Sequence[Record], rows: Sequence[Row], attentions: Sequence[str], length: int
) -> list[list[str]]:
    """The table of a length: a line per task and one of the means."""
    tasks = list(dict.fromkeys(row["task"] for row in rows if row.get("length") == length))
    lines = [["task", "samples", *attentions]]
    means = [mean_row(records, rows, length, attention) for attention in attentions]
    for task in [*tasks, "mean"]:
        here = {r["attention"]: r for r in [*rows, *means] if (r["task"], r.get("length")) == (task, length)}
        samples = min(row["samples"] for row in here.values())
        lines.append([task, str(samples), *(_cell(here[attention]) for attention in attentions)])
    return lines


def _cell(row: Row) -> str:
    text = "–" if row["score"] is None else f"{row['score']:.1f}"
    if "difference" in row:
        text += f" ({row['difference']:+.1f}; {row['low']:+.1f} to {row['high']:+.1f})"
    if row["failed"]:
        text += f", {row['failed']} failed"
    return text


def tables(records: Sequence[Record], rows: Sequence[Row], attentions: Sequence[str]) -> list[Table]:
    """A table per length: score, and in brackets the difference to dense with its 95 % interval."""
    made = []
    for length in dict.fromkeys(record["length"] for record in records):
        head, *lines = _cells(records, rows, attentions, length)
        table = Table(title=f"{length:,} tokens", title_justify="left")
        for name in head:
            table.add_column(name, justify="left" if name == "task" else "right")
        for line in lines:
            if line[0] == "mean":
                table.add_section()
            table.add_row(*line)
        made.append(table)
    return made


# --- the page


def page(
    title: str,
    settings: Mapping[str, Any],
    records: Sequence[Record],
    rows: Sequence[Row],
    attentions: Sequence[str],
) -> str:
    """An HTML page that needs nothing besides: tables, pictures and settings.

    Pictures need matplotlib, from the extra `bench`; without it the page says so.
    """
    parts = [f"<h1>{html.escape(title)}</h1>"]
    parts.append(
        "<p>Scores from 0 to 100; in brackets the difference to dense attention on the same samples, and its 95 % "
        "bootstrap interval.</p>"
    )
    for length in dict.fromkeys(record["length"] for record in records):
        head, *lines = _cells(records, rows, attentions, length)
        parts.append(f'<h2>{length:,} tokens</h2><table class="scores">{_html_row("th", head)}')
        parts += [_html_row("td", line) for line in lines]
        parts.append("</table>")
    idle = [row for row in rows if "not_run" in row]
    if idle:
        reasons = "; ".join(f"{row['task']}: {row['not_run']}" for row in idle)
        parts.append(f"<p>Not run: {html.escape(reasons)}.</p>")
    errors = [
        f"{r['task']}, {r['length']} tokens, sample {r['index'] + 1}, {name}: {outcome['error']}"
        for r in records
        for name, outcome in r["attentions"].items()
        if "error" in outcome
    ]
    if errors:
        parts.append("<h2>Failed</h2><ul>" + "".join(f"<li>{html.escape(e)}</li>" for e in errors) + "</ul>")
    try:
        for name, picture in pictures(records, rows, attentions).items():
            encoded = base64.b64encode(picture).decode()
            parts.append(f'<h2>{name}</h2><img alt="{name}" src="data:image/png;base64,{encoded}">')
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        parts.append("<p>No pictures: matplotlib is missing; it comes with the extra <code>bench</code>.</p>")
    listed = "".join(
        f"<tr><td>{html.escape(str(name))}</td><td>{html.escape(str(value))}</td></tr>"
        for name, value in settings.items()
    )
    parts.append(f"<h2>Settings</h2><table>{listed}</table>")
    style = (
        "body{font-family:sans-serif;margin:2em;max-width:75em}table{border-collapse:collapse}"
        "td,th{border:1px solid #ccc;padding:.2em .6em;text-align:right}"
        "td:first-child,th:first-child{text-align:left}.scores tr:last-child{font-weight:bold}img{max-width:100%}"
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{style}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _html_row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def pictures(records: Sequence[Record], rows: Sequence[Row], attentions: Sequence[str]) -> dict[str, bytes]:
    """PNGs by title: needle depth × length, score against length, score against keys scanned."""
    import matplotlib

    matplotlib.use("Agg")
    if all(row["score"] is None for row in rows):
        return {}
    drawn = {"Needle depth × length": _heat_maps(records, attentions)}
    drawn["Score against length"] = _by_length(records, rows, attentions)
    drawn["Score against keys scanned"] = _by_keys(records, rows, attentions)
    return {title: picture for title, picture in drawn.items() if picture is not None}


def _heat_maps(records: Sequence[Record], attentions: Sequence[str]) -> bytes | None:
    """A map per attention: the mean score of the samples with one needle."""
    import matplotlib.pyplot as plt

    needles = [r for r in records if r.get("depth") is not None]
    if not needles:
        return None
    lengths = sorted({r["length"] for r in needles})
    figure, axes = plt.subplots(
        1, len(attentions), figsize=(1.5 + 3.2 * len(attentions), 4), squeeze=False, layout="constrained"
    )
    for axis, attention in zip(axes[0], attentions, strict=True):
        cells: list[list[list[float]]] = [[[] for _ in lengths] for _ in range(DEPTH_BINS)]
        for r in needles:
            if "score" in r["attentions"][attention]:
                place = min(DEPTH_BINS - 1, int(r["depth"] * DEPTH_BINS))
                cells[place][lengths.index(r["length"])].append(r["attentions"][attention]["score"])
        means = np.array([[np.mean(cell) if cell else np.nan for cell in line] for line in cells])
        image = axis.imshow(100 * means, aspect="auto", vmin=0, vmax=100, cmap="RdYlGn")
        axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axis.set_yticks(range(DEPTH_BINS), [f"{100 * i // DEPTH_BINS} %" for i in range(DEPTH_BINS)])
        axis.set(title=attention, xlabel="tokens", ylabel="depth of the needle")
    figure.colorbar(image, ax=axes[0].tolist(), label="score")
    return _png(figure)


def _by_length(records: Sequence[Record], rows: Sequence[Row], attentions: Sequence[str]) -> bytes:
    import matplotlib.pyplot as plt

    lengths = sorted({r["length"] for r in records})
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for attention in attentions:
        means = [mean_row(records, rows, length, attention)["score"] for length in lengths]
        axis.plot(lengths, [np.nan if mean is None else mean for mean in means], marker="o", label=attention)
    axis.set(xlabel="tokens", ylabel="mean score of the tasks", ylim=(0, 102))
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axis.grid(visible=True, alpha=0.3)
    axis.legend()
    return _png(figure)


def _by_keys(records: Sequence[Record], rows: Sequence[Row], attentions: Sequence[str]) -> bytes | None:
    """A point per attention and length; dense attention scans all keys."""
    import matplotlib.pyplot as plt

    lengths = sorted({r["length"] for r in records})
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for attention in attentions:
        points = []
        for length in lengths:
            used = [
                outcome["statistics"]
                for r in records
                if r["length"] == length and "score" in (outcome := r["attentions"][attention])
            ]
            offloaded = sum(statistics["keys_offloaded"] for statistics in used)
            score = mean_row(records, rows, length, attention)["score"]
            scanned = sum(statistics["keys_scanned"] for statistics in used)
            if score is not None and (scanned or attention == DENSE):
                points.append((100 * scanned / offloaded if offloaded else 100.0, score, length))
        if points:
            axis.plot([p[0] for p in points], [p[1] for p in points], marker="o", label=attention)
            for share, score, length in points:
                axis.annotate(
                    f"{length:,}", (share, score), fontsize=7, xytext=(3, 3), textcoords="offset points"
                )
    axis.set(
        xscale="log",
        xlabel="keys scanned (wave: clusters ranked), % of the offloaded",
        ylabel="mean score of the tasks",
        ylim=(0, 102),
    )
    axis.grid(visible=True, alpha=0.3)
    axis.legend()
    return _png(figure)


def _png(figure: Any) -> bytes:
    import matplotlib.pyplot as plt

    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    plt.close(figure)
    return file.getvalue()
