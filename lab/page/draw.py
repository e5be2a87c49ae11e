"""Draw plots as SVG with matplotlib: text stays text, colours follow the reader's scheme."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from lab.page.colours import DARK, LIGHT, variables
from lab.page.figure import Plot, Ranges, Stacks

_WIDE = 600
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_UNITS = 72  # matplotlib's SVG units in an inch
HATCHES = ("", "////", "||||", "\\\\\\\\", "xxxx", "----")
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


def svg_file(plot: Plot) -> str:
    """Return the text of an SVG file that follows the reader's colour scheme.

    Raises:
        ImportError: matplotlib is not installed.
    """
    root = _cleaned(_drawn(plot), plot)
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


def _drawn(plot: Plot) -> str:
    """Draw a plot with matplotlib and return the SVG text that it writes."""
    import matplotlib
    from matplotlib.figure import Figure as Sheet

    options = {**_RC, "svg.hashsalt": f"{plot.key} {_WIDE}"}
    with matplotlib.rc_context(options):
        sheet = Sheet(figsize=(_WIDE / _UNITS, 5.2), layout="constrained")
        axes = sheet.add_subplot()
        if isinstance(plot, Stacks):
            _stacks(axes, plot)
        elif isinstance(plot, Ranges):
            _ranges(axes, plot)
        axes.set_xlabel(plot.x_label)
        file = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        sheet.savefig(file, format="svg", transparent=True, metadata=nothing)
    return file.getvalue()


def _listing(axes: Any, names: Sequence[str], texts: Sequence[str]) -> None:
    """Write a row for each name: the name left, its numbers right, its drawing below."""
    axes.figure.set_figheight((len(names) * 32 + 44) / _UNITS)
    for place, (name, text) in enumerate(zip(names, texts, strict=True)):
        common = {"transform": axes.get_yaxis_transform(), "va": "bottom", "fontsize": 11}
        fits = int((axes.figure.get_figwidth() * _UNITS - 40) / 6.3) - len(text)
        axes.text(0, place - 0.2, textwrap.shorten(name, fits, placeholder=" …"), **common)
        axes.text(1, place - 0.2, text, ha="right", color=LIGHT["soft"], **common)
    axes.set_ylim(len(names) - 0.6, -0.75)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def _stacks(axes: Any, plot: Stacks) -> None:
    """Draw a bar for each whole, all equally long, cut into the shares of its parts."""
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
    _listing(axes, [s.name for s in plot.stacks], [s.text for s in plot.stacks])
    axes.figure.legend(
        loc="outside upper left", ncols=6, frameon=False, fontsize=11,
        handlelength=1.6, columnspacing=1.2,
    )  # fmt: skip


def _ranges(axes: Any, plot: Ranges) -> None:
    """Draw a line from the least to the greatest of each range, and a dot at its middle."""
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    places = range(len(plot.ranges))
    lows, highs = [r.low for r in plot.ranges], [r.high for r in plot.ranges]
    axes.vlines(
        [plot.even] * len(lows), [place - 0.5 for place in places],
        [place + 0.5 for place in places], color=LIGHT["ink"], linewidth=1.5,
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


def _cleaned(text: str, plot: Plot) -> ElementTree.Element:
    """Parse matplotlib's SVG; drop fixed sizes, fonts, unused ids and digits after the first.

    Colours become CSS variables, and the plot's title becomes the accessible label.
    """
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
    root.attrib |= {"stroke-linejoin": "round"}
    return root


_NAMES = {colour: name for name, colour in LIGHT.items()}
_COLOUR = re.compile("|".join(_NAMES))


def _rounded(found: re.Match[str]) -> str:
    return f"{float(found[0]):.1f}".removesuffix(".0")


def _label_points(root: ElementTree.Element, plot: Plot) -> None:
    """Give each dot a title, which a browser shows when the pointer is over it."""
    labels: dict[str, list[str]] = {}
    if isinstance(plot, Ranges):
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
