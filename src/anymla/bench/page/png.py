"""Figures as PNG, for the README; needs matplotlib (the extra "report")."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from anymla.bench.page.figure import Bars, Figure, Stacks, short

_COLOURS = ("#0067b1", "#c2410c", "#137a4a", "#8a2d8f", "#8a6d00", "#c0216b", "#00757f", "#5f6b7a")
_MARKS = "osD^vPX*"


def write_png(figure: Figure | Bars | Stacks, path: Path) -> None:
    """Draw a figure; 1600 pixels wide.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    height = 5.2
    if isinstance(figure, Bars):
        height = 0.22 * len(figure.bars) + 1.2
    elif isinstance(figure, Stacks):
        height = 0.2 * len(figure.stacks) + 1.5
    drawing, axes = pyplot.subplots(figsize=(8, height), dpi=200, layout="constrained")
    if isinstance(figure, Bars):
        _bars(axes, figure)
    elif isinstance(figure, Stacks):
        _stacks(axes, figure)
    else:
        _series(axes, figure)
        axes.set_ylabel(figure.y_label)
    axes.set_xlabel(figure.x_label)
    drawing.suptitle(figure.title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    source = textwrap.fill(figure.source.replace("`", ""), 150)
    drawing.supxlabel(source, fontsize=6, color="#5a6675", x=0.01, ha="left")
    drawing.savefig(path, facecolor="white", metadata={"Software": "anymla bench report"})
    pyplot.close(drawing)


def _bars(axes: Any, figure: Bars) -> None:
    """Bars below each other, the first on top, with their numbers."""
    places = range(len(figure.bars), 0, -1)
    values = [bar.value for bar in figure.bars]
    colours = ["#b3261e" if bar.bad else "#0067b1" for bar in figure.bars]
    axes.barh(list(places), values, color=colours, height=0.6)
    axes.set_yticks(list(places), [bar.name for bar in figure.bars], fontsize=6.5)
    for place, bar in zip(places, figure.bars, strict=True):
        axes.text(bar.value + 1, place, bar.text, va="center", fontsize=6, color="#5a6675")
    axes.set_xlim(0, figure.most * 1.4)
    if figure.goal is not None:
        axes.axvline(figure.goal, color="#1b2430", linewidth=1)


def _stacks(axes: Any, figure: Stacks) -> None:
    """Bars of equal length below each other, cut into shares, with their numbers behind."""
    places = list(range(len(figure.stacks), 0, -1))
    wholes = [sum(stack.parts) or 1.0 for stack in figure.stacks]
    left = [0.0] * len(places)
    for number, part in enumerate(figure.parts):
        shares = [
            100 * stack.parts[number] / whole
            for stack, whole in zip(figure.stacks, wholes, strict=True)
        ]
        colour = _COLOURS[number % len(_COLOURS)]
        axes.barh(places, shares, left=left, color=colour, height=0.7, label=part)
        left = [begin + share for begin, share in zip(left, shares, strict=True)]
    axes.set_yticks(places, [stack.name for stack in figure.stacks], fontsize=6.5)
    for place, stack in zip(places, figure.stacks, strict=True):
        axes.text(101, place, stack.text, va="center", fontsize=6, color="#5a6675")
    axes.set_xlim(0, 125)
    axes.set_xticks(range(0, 101, 20))
    axes.legend(
        fontsize=6.5, frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), borderpad=0
    )


def _series(axes: Any, figure: Figure) -> None:
    """Lines and points on two axes."""
    from matplotlib.ticker import FuncFormatter

    number = 0
    for series in figure.series:
        xs, ys = [point.x for point in series.points], [point.y for point in series.points]
        if series.limit:
            axes.plot(xs, ys, color="#5a6675", linestyle="--", linewidth=1.2, label=series.name)
            continue
        style: dict[str, Any] = {
            "color": _COLOURS[number % len(_COLOURS)],
            "marker": _MARKS[number // len(_COLOURS) % len(_MARKS)],
            "markersize": 4,
            "linewidth": 1.4 if series.joined else 0,
            "label": textwrap.fill(series.name, 60),
        }
        number += 1
        axes.plot(xs, ys, **style)
        for point in series.points:
            if point.low is not None and point.high is not None:
                axes.vlines(point.x, point.low, point.high, color=style["color"], linewidth=1)
    plain = FuncFormatter(lambda value, _: short(value))
    if figure.log_x:
        axes.set_xscale("log", base=2 if _powers_of_two(figure) else 10)
    axes.xaxis.set_major_formatter(plain)
    if figure.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(plain)
    elif figure.from_zero:
        axes.set_ylim(bottom=0)
    axes.grid(visible=True, color="#dfe3e8", linewidth=0.7)
    axes.legend(fontsize=6.5, frameon=False, ncols=2 if number > 6 else 1)


def _powers_of_two(figure: Figure) -> bool:
    xs = {point.x for series in figure.series if not series.limit for point in series.points}
    return all(x >= 1 and (int(x) & (int(x) - 1)) == 0 and x == int(x) for x in xs)
