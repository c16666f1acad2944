"""Pictures of a benchmark: rows, what ours is of the peer and the bar; curves of what it costs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from bench.report import Row

_ROW_INCHES = 0.3
_GOOD, _BAD, _PLAIN = "#2a7f62", "#b5483a", "#8a8f98"


def draw(title: str, rows: Sequence[Row], path: Path) -> None:
    """Draw a bar a row that has a peer: ours / peer on a logarithmic scale, its target a tick."""
    rows = [row for row in rows if row.ratio > 0]
    figure = Figure(figsize=(9, 1.2 + _ROW_INCHES * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for at, row in enumerate(reversed(rows)):
        colour = _PLAIN if row.target == 0 else _GOOD if row.met else _BAD
        axes.barh(at, row.ratio, color=colour, height=0.7)
        axes.text(row.ratio, at, f" {row.ratio:.2f}", va="center", fontsize=7)
        if row.target:
            axes.plot([row.target] * 2, [at - 0.45, at + 0.45], color="black", linewidth=1.5)
    names = [
        f"{', '.join(filter(None, (row.case, row.vectors)))}; {row.metric} / {row.peer_name}"
        for row in reversed(rows)
    ]
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    # Bars begin at the left edge, which lies so low that one near 1 has a length.
    shown = [0.625, 1.6, *(row.ratio for row in rows), *(row.target for row in rows if row.target)]
    axes.set_xscale("log", subs=[2, 5])
    axes.set_xlim(min(shown) / 1.25, max(shown) * 1.25)
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_formatter(plain)
    axes.xaxis.set_minor_formatter(plain)
    axes.axvline(1, color="black", linewidth=0.6)
    axes.set_xlabel("ours / peer; a black tick is the bar to reach")
    axes.set_title(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def curves(
    title: str,
    labels: tuple[str, str],
    lines: Mapping[str, Sequence[tuple[float, float, float]]],
    path: Path,
    *,
    in_time: bool = False,
    coincide: bool = False,
) -> None:
    """Draw lines through points (x, y, error of y); labels are (x, y).

    x is logarithmic, or, with many points `in_time`, linear and the points are not marked. Such
    lines may `coincide`.
    """
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    for n, (name, points) in enumerate(lines.items()):
        x, y, error = zip(*sorted(points), strict=True)
        if in_time:
            # Each thinner than what it lies on: lines that coincide are all seen.
            width = 1.2 + 4 * (len(lines) - 1 - n) / len(lines) if coincide else 1.2
            axes.plot(x, y, linewidth=width, label=name)
            continue
        # There are ten colours; what comes after them is dashed.
        style = "o-" if n < 10 else "s--"
        axes.errorbar(x, y, error, fmt=style, markersize=4, linewidth=1.2, capsize=2, label=name)
    if not in_time:
        axes.set_xscale("log")
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_title(title)
    axes.grid(visible=True, which="both", linewidth=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def scatter(
    title: str, labels: tuple[str, str], points: Sequence[tuple[float, float]], path: Path
) -> None:
    """Draw points (x, y) and the line on which they are equal."""
    figure = Figure(figsize=(5.5, 5.5), layout="constrained")
    axes = figure.add_subplot()
    x, y = np.array(points, np.float64).T
    span = [min(0.0, x.min(), y.min()), max(x.max(), y.max()) * 1.05]
    axes.plot(span, span, color=_PLAIN, linewidth=1)
    axes.plot(x, y, "o", color=_GOOD, markersize=5)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_title(title)
    axes.grid(visible=True, linewidth=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def histograms(title: str, unit: str, series: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw a histogram a series, one above the other, over one axis that is logarithmic."""
    figure = Figure(figsize=(9, 0.6 + 1.1 * len(series)), layout="constrained")
    every = figure.subplots(len(series), sharex=True, squeeze=False)[:, 0]
    values = [value for each in series.values() for value in each if value > 0]
    edges = np.geomspace(min(values), max(values) * 1.001, 60)
    for axes, (name, each) in zip(every, series.items(), strict=True):
        finite = [value for value in each if value > 0]
        axes.hist(finite, bins=edges, color=_GOOD)
        if finite:
            p50, p99 = np.percentile(finite, [50, 99])
            name += f": p50 {p50:.3f}, p99 {p99:.3f} {unit}"
            axes.axvline(p99, color=_BAD, linewidth=1)
        axes.set_title(name, fontsize=8, loc="left")
        axes.set_xscale("log")
    every[-1].set_xlabel(f"{unit}; the line is the p99")
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
