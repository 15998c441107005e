"""Rows of a measurement as a table, as files that are whole or not there, and as a picture."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

Row = Mapping[str, Any]
"""What was measured; None for what was not."""

Columns = Mapping[str, tuple[str, str]]
"""By heading, the key in a row and how its value is formatted."""


def table(rows: Iterable[Row], columns: Columns) -> Table:
    """The rows for a terminal."""
    out = Table(padding=(0, 0))
    for i, name in enumerate(columns):
        out.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        out.add_row(*_cells(row, columns))
    return out


def markdown(rows: Iterable[Row], columns: Columns) -> str:
    """The rows as a table in Markdown."""
    lines = [list(columns), ["---" if i == 0 else "---:" for i in range(len(columns))]]
    lines += [_cells(row, columns) for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cells(row: Row, columns: Columns) -> list[str]:
    return ["–" if row[key] is None else form.format(row[key]) for key, form in columns.values()]


def csv_text(rows: Sequence[Row]) -> str:
    """The rows, which have the same keys, as CSV; None is an empty field."""
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def json_text(rows: Sequence[Row]) -> str:
    """The rows as a JSON array."""
    return json.dumps(rows, indent=2) + "\n"


def write(path: Path, content: str | bytes) -> None:
    """Writes a file under another name first, so that an interruption leaves the old one or the new one."""
    temporary = path.with_name(f"{path.name}.partial")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    temporary.replace(path)


def lines_png(
    lines: Mapping[str, Sequence[tuple[float, float]]], xlabel: str, ylabel: str, title: str
) -> bytes:
    """A picture of lines through points (x, y), by name, with a logarithmic x axis; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure, axis = plt.subplots(figsize=(7, 5))
    for name, points in lines.items():
        axis.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axis.set(xscale="log", xlabel=xlabel, ylabel=ylabel, title=title)
    axis.set_xticks(sorted({x for points in lines.values() for x, _ in points}))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_ylim(bottom=0)
    axis.grid(visible=True, alpha=0.3)
    axis.legend()
    figure.tight_layout()
    out = io.BytesIO()
    figure.savefig(out, dpi=130, format="png")
    plt.close(figure)
    return out.getvalue()
