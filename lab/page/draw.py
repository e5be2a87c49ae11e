"""Plots as SVG by matplotlib: text stays text, colours are variables of the page around them."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from lab.page.colours import DARK, LIGHT, variables
from lab.page.figure import Bars, Figure, Plot, Ranges, Stacks, short

WIDE, NARROW = 600, 360
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_UNITS = 72  # of an SVG by matplotlib, in an inch
# Each line has its own marker and its own dashes, so that colour is never needed to tell it.
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES: tuple[Any, ...] = (
    "-", (0, (6, 2)), (0, (2, 1.5)), (0, (8, 2, 1.5, 2)), (0, (1, 1)), (0, (4, 1, 1, 1, 1, 1)),
)  # fmt: skip
HATCHES = ("", "////", "||||", "\\\\\\\\", "xxxx", "----")
# Round numbers of a logarithmic axis, by how many times its end is its beginning.
_TICKS = {
    1.5: (1, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 2, 3, 4, 5, 6, 7, 8, 8.5, 9, 9.5),
    12: (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8),
    float("inf"): (1, 2, 5),
}
_RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": LIGHT["rule"],
    "axes.labelcolor": LIGHT["ink"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT["rule"],
    "grid.linewidth": 1.0,
    "xtick.color": LIGHT["rule"],
    "ytick.color": LIGHT["rule"],
    "xtick.labelcolor": LIGHT["soft"],
    "ytick.labelcolor": LIGHT["soft"],
    "text.color": LIGHT["ink"],
    "hatch.linewidth": 0.8,
    "lines.markersize": 6,
    "lines.linewidth": 2,
}


def svg(plot: Plot, width: int, css: str = "") -> str:
    """The drawing, to stand in a page that defines the colours.

    Args:
        plot: what to show.
        width: in pixels where it is not scaled; at most ``NARROW`` it is made for a phone.
        css: class of the outermost element.

    Raises:
        ImportError: matplotlib is not installed.
    """
    root = _cleaned(_drawn(plot, width), plot, css)
    return _text(root)


def svg_file(plot: Plot, width: int = WIDE) -> str:
    """The drawing as a file of its own, which follows the reader's colour scheme.

    Raises:
        ImportError: matplotlib is not installed.
    """
    root = _cleaned(_drawn(plot, width), plot, "")
    style = ElementTree.Element("style")
    style.text = (
        f"svg {{ {variables(LIGHT)} font-family: system-ui, 'DejaVu Sans', sans-serif; }} "
        f"@media (prefers-color-scheme: dark) {{ svg {{ {variables(DARK)} }} }}"
    )
    _, _, wide, high = root.attrib["viewBox"].split()
    paper = ElementTree.Element("rect", width=wide, height=high, style="fill: var(--card)")
    root.insert(0, style)
    root.insert(1, paper)
    root.attrib["xmlns"] = _SVG
    return _text(root) + "\n"


def _drawn(plot: Plot, width: int) -> str:
    """What matplotlib writes."""
    import matplotlib
    from matplotlib.figure import Figure as Sheet

    options = {**_RC, "svg.hashsalt": f"{plot.key} {width}"}
    with matplotlib.rc_context(options):
        sheet = Sheet(figsize=(width / _UNITS, 5.2), layout="constrained")
        axes = sheet.add_subplot()
        if isinstance(plot, Figure):
            sheet.set_figheight((340 if width > NARROW else 330) / _UNITS)
            _series(axes, plot, narrow=width <= NARROW)
        elif isinstance(plot, Bars):
            _bars(axes, plot)
        elif isinstance(plot, Stacks):
            _stacks(axes, plot, narrow=width <= NARROW)
        elif isinstance(plot, Ranges):
            _ranges(axes, plot, narrow=width <= NARROW)
        axes.set_xlabel(plot.x_label)
        if isinstance(plot, Figure):
            _names(axes, plot, narrow=width <= NARROW)
        file = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        sheet.savefig(file, format="svg", transparent=True, metadata=nothing)
    return file.getvalue()


def _series(axes: Any, figure: Figure, *, narrow: bool) -> None:
    """Lines and points on two axes."""
    from matplotlib.ticker import (
        FixedLocator,
        FuncFormatter,
        LogLocator,
        NullFormatter,
        NullLocator,
    )

    number = 0
    for series in figure.series:
        xs, ys = [point.x for point in series.points], [point.y for point in series.points]
        if series.limit:
            axes.plot(xs, ys, color=LIGHT["soft"], linestyle=(0, (4, 3)), linewidth=1.5)
            continue
        colour = LIGHT[f"c{number}"]
        drawn = axes.plot(
            xs,
            ys,
            color=colour,
            marker=MARKERS[number],
            markeredgecolor=LIGHT["card"],
            linestyle=DASHES[number] if series.joined else "",
            label=series.name,
            clip_on=False,
        )[0]
        drawn.set_gid(f"series-{figure.series.index(series)}")
        number += 1
        for point in series.points:
            if point.low is not None and point.high is not None:
                axes.vlines(point.x, point.low, point.high, color=colour, linewidth=1.5)
    plain = FuncFormatter(lambda value, _: short(value))
    for log, axis, scale in (
        (figure.log_x, axes.xaxis, axes.set_xscale),
        (figure.log_y, axes.yaxis, axes.set_yscale),
    ):
        if log:
            scale("log", base=10)
            low, high = axis.get_view_interval()
            subs = next(subs for span, subs in _TICKS.items() if high / low < span)
            axis.set_major_locator(LogLocator(base=10, subs=subs, numticks=12))
            axis.set_minor_formatter(NullFormatter())
            axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(plain)
    xs = sorted({p.x for series in figure.series if not series.limit for p in series.points})
    if figure.log_x and len(xs) <= 12 and any(series.joined for series in figure.series):
        shown = _apart(xs, 5 if narrow else 9)
        axes.xaxis.set_major_locator(FixedLocator(shown))
    if not figure.log_y:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(figure.y_label)


def _apart(values: Sequence[float], most: int) -> list[float]:
    """Of sorted positive values those that lie far enough apart on a logarithmic axis."""
    import math

    shown = [values[0]]
    least = math.log(values[-1] / values[0]) / most if len(values) > 1 else 0.0
    for value in values[1:]:
        if math.log(value / shown[-1]) >= least * 0.999:
            shown.append(value)
    return shown


def _names(axes: Any, figure: Figure, *, narrow: bool) -> None:
    """Each series' name at its last point, none on another; scattered points have a legend."""
    sheet = axes.figure
    pixel = sheet.dpi / _UNITS
    size = 10 if narrow else 11
    if not all(series.joined for series in figure.series):
        sheet.legend(
            loc="outside lower left", ncols=2 if narrow else 3, frameon=False, fontsize=size,
            handletextpad=0.2, columnspacing=1.0,
        )  # fmt: skip
    sheet.draw_without_rendering()
    texts = []
    number = 0
    for series in figure.series:
        colour = LIGHT["soft"] if series.limit else LIGHT[f"c{number}"]
        number += not series.limit
        if not series.joined:
            continue
        point = series.points[-1]
        name = textwrap.fill(series.name, 14 if narrow else 26)
        _, up = axes.transData.transform((point.x, point.y))
        texts.append((float(up), (name.count("\n") + 1) * size * 1.25 * pixel, point, name, colour))
    texts.sort(key=lambda text: text[0])
    bottom = float(axes.get_window_extent().y0)  # below it stand the axis' own numbers
    centres = _spread([text[0] for text in texts], [text[1] for text in texts], bottom)
    for (up, _, point, name, colour), centre in zip(texts, centres, strict=True):
        axes.annotate(
            name, (point.x, point.y), xytext=(9, (centre - up) / pixel), color=colour,
            textcoords="offset points", va="center", fontsize=size, annotation_clip=False,
        )  # fmt: skip


def _spread(centres: Sequence[float], heights: Sequence[float], bottom: float) -> list[float]:
    """Centres of labels, from low to high, moved so that none covers another or is below."""
    placed: list[list[int]] = []  # runs of labels that touch

    def run(members: list[int]) -> tuple[float, float]:
        """Lower end and height of a run around the mean of where its labels want to be."""
        height = sum(heights[i] for i in members)
        middle = sum(centres[i] for i in members) / len(members)
        return max(middle - height / 2, bottom), height

    for i in range(len(centres)):
        placed.append([i])
        while len(placed) > 1:
            low, height = run(placed[-2])
            if low + height <= run(placed[-1])[0]:
                break
            placed[-2:] = [placed[-2] + placed[-1]]
    moved = [0.0] * len(centres)
    for members in placed:
        at, _ = run(members)
        for i in members:
            moved[i] = at + heights[i] / 2
            at += heights[i]
    return moved


def _listing(axes: Any, names: Sequence[str], texts: Sequence[str], bad: Sequence[bool]) -> None:
    """Rows below each other: a name on the left, its numbers on the right, its drawing below."""
    axes.figure.set_figheight((len(names) * 32 + 44) / _UNITS)
    for place, (name, text, short_of) in enumerate(zip(names, texts, bad, strict=True)):
        common = {"transform": axes.get_yaxis_transform(), "va": "bottom", "fontsize": 11}
        fits = int((axes.figure.get_figwidth() * _UNITS - 40) / 6.3) - len(text)
        axes.text(0, place - 0.2, textwrap.shorten(name, fits, placeholder=" …"), **common)
        colour = LIGHT["bad" if short_of else "soft"]
        weight = "bold" if short_of else "normal"
        axes.text(1, place - 0.2, text, ha="right", color=colour, weight=weight, **common)
    axes.set_ylim(len(names) - 0.6, -0.75)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def _bars(axes: Any, plot: Bars) -> None:
    places = range(len(plot.bars))
    values = [min(bar.value, plot.most) for bar in plot.bars]
    colours = [LIGHT["bad" if bar.bad else "c0"] for bar in plot.bars]
    axes.barh(places, [plot.most] * len(values), color=LIGHT["rule"], height=0.26)
    axes.barh(places, values, color=colours, height=0.26)
    axes.grid(visible=False)
    if plot.goal is not None:
        axes.vlines([plot.goal] * len(values), [p - 0.2 for p in places], [p + 0.2 for p in places],
                    color=LIGHT["ink"], linewidth=2)  # fmt: skip
    axes.set_xlim(0, plot.most)
    _listing(
        axes,
        [bar.name for bar in plot.bars],
        [bar.text for bar in plot.bars],
        [bar.bad for bar in plot.bars],
    )


def _stacks(axes: Any, plot: Stacks, *, narrow: bool) -> None:
    """Bars of equal length below each other, cut into shares that say how much they are."""
    wholes = [sum(stack.parts) or 1.0 for stack in plot.stacks]
    places = list(range(len(wholes)))
    left = [0.0] * len(wholes)
    for number, part in enumerate(plot.parts):
        shares = [
            100 * stack.parts[number] / whole
            for stack, whole in zip(plot.stacks, wholes, strict=True)
        ]
        axes.barh(
            places, shares, left=left, height=0.4, label=part, facecolor=LIGHT[f"c{number}"],
            edgecolor=LIGHT["card"], hatch=HATCHES[number], linewidth=0.8,
        )  # fmt: skip
        left = [begin + share for begin, share in zip(left, shares, strict=True)]
    axes.set_xlim(0, 100)
    axes.grid(visible=False)
    names, texts = [s.name for s in plot.stacks], [s.text for s in plot.stacks]
    _listing(axes, names, texts, [False] * len(names))
    axes.figure.legend(
        loc="outside upper left", ncols=2 if narrow else 6, frameon=False, fontsize=11,
        handlelength=1.6, columnspacing=1.2,
    )  # fmt: skip


def _ranges(axes: Any, plot: Ranges, *, narrow: bool) -> None:
    """A line from least to greatest and a dot at the middle."""
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    places = range(len(plot.ranges))
    lows, highs = [r.low for r in plot.ranges], [r.high for r in plot.ranges]
    above, below = (0.1, 0.3) if narrow else (0.5, 0.5)  # names stand above each drawing if narrow
    axes.vlines(
        [plot.even] * len(lows), [place - above for place in places],
        [place + below for place in places], color=LIGHT["ink"], linewidth=1.5,
    )  # fmt: skip
    axes.hlines(places, lows, highs, color=LIGHT["c0"], linewidth=5)
    for place, each in zip(places, plot.ranges, strict=True):
        if each.low < plot.even:
            axes.hlines(place, each.low, min(plot.even, each.high), color=LIGHT["bad"], linewidth=5)
    middles = [each.middle for each in plot.ranges]
    dots = axes.plot(
        middles, places, linestyle="", marker="o", markersize=11, color=LIGHT["c0"],
        markeredgecolor=LIGHT["card"], markeredgewidth=2,
    )[0]  # fmt: skip
    dots.set_gid("ranges")
    axes.set_xscale("log", base=2)
    low, high = min([*lows, plot.even]) * 0.95, max(highs) * 1.05
    axes.set_xlim(low, high)
    ticks = [tick for tick in (0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4, 6, 10) if low <= tick <= high]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(visible=False, axis="y")
    names, texts = [r.name for r in plot.ranges], [r.text for r in plot.ranges]
    if narrow:
        _listing(axes, names, texts, [False] * len(names))
        return
    axes.figure.set_figheight((len(names) * 30 + 50) / _UNITS)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(places, names, color=LIGHT["ink"])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    for place, text in zip(places, texts, strict=True):
        axes.text(
            1.02, place, text, transform=axes.get_yaxis_transform(), va="center", fontsize=11,
            color=LIGHT["soft"],
        )  # fmt: skip


def _cleaned(text: str, plot: Plot, css: str) -> ElementTree.Element:
    """Without what a page does not need: fixed sizes, fonts, unused names, false precision."""
    root = ElementTree.fromstring(text)
    for element in root.iter():
        element.tag = element.tag.removeprefix(f"{{{_SVG}}}")
        if (link := element.attrib.pop(f"{{{_XLINK}}}href", None)) is not None:
            element.attrib["href"] = link
    _label_points(root, plot)
    for element in root.iter():
        painted = [f"{key}: {element.attrib.pop(key)}" for key in ("fill", "stroke")
                   if _COLOUR.match(element.attrib.get(key, ""))]  # fmt: skip
        if painted:
            element.attrib["style"] = "; ".join([*painted, element.attrib.get("style", "")])
        for name, value in element.attrib.items():
            if name == "style":
                value = re.sub(r"font-family:[^;]*;?|stroke-dashoffset: 0;?", "", value).strip()
                value = _COLOUR.sub(lambda found: f"var(--{_NAMES[found[0]]})", value)
            element.attrib[name] = re.sub(r"-?\d+\.\d{2,}", _rounded, value).replace("\n", "")
    used = set(re.findall(r"#(\w+)", ElementTree.tostring(root, encoding="unicode")))
    for element in root.iter():
        if element.attrib.get("id") not in used:
            element.attrib.pop("id", None)
    if root[0].find("style") is not None:
        root.remove(root[0])
    box = root.attrib["viewBox"]
    root.attrib.clear()
    root.attrib |= {"viewBox": box, "role": "img", "aria-label": plot.title}
    root.attrib |= {"stroke-linejoin": "round"} | ({"class": css} if css else {})
    return root


_NAMES = {colour: name for name, colour in LIGHT.items()}
_COLOUR = re.compile("|".join(_NAMES))


def _rounded(found: re.Match[str]) -> str:
    return f"{float(found[0]):.1f}".removesuffix(".0")


def _label_points(root: ElementTree.Element, plot: Plot) -> None:
    """A point that is pointed at says what it is."""
    labels: dict[str, list[str]] = {}
    if isinstance(plot, Figure):
        for number, series in enumerate(plot.series):
            labels[f"series-{number}"] = [point.label for point in series.points]
    elif isinstance(plot, Ranges):
        labels["ranges"] = [f"{each.name}: {each.text}" for each in plot.ranges]
    for group in root.iter("g"):
        texts = labels.get(group.attrib.get("id", ""))
        for use, text in zip(group.iter("use"), texts or (), strict=False):
            ElementTree.SubElement(use, "title").text = text


def _text(root: ElementTree.Element) -> str:
    for element in root.iter():
        if element.tag not in ("text", "tspan", "title", "style"):
            element.text = None
        element.tail = "\n" if element.tag in ("g", "text") else None
    return ElementTree.tostring(root, encoding="unicode").strip()
