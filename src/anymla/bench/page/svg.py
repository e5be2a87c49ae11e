"""A figure as inline SVG: text stays text, and colours come from the page's style sheet."""

from __future__ import annotations

import dataclasses
from html import escape

from anymla.bench.page.figure import Axis, Figure, Point, Series, axis, short

COLOURS = 8


@dataclasses.dataclass(frozen=True)
class Size:
    """Of the drawing, in its own units, which are pixels where it is not shrunk."""

    width: int
    height: int
    x_ticks: int
    y_ticks: int
    left: int = 58
    right: int = 14
    top: int = 12
    bottom: int = 46


WIDE = Size(760, 400, 10, 8)
NARROW = Size(350, 330, 5, 6, right=10)


def svg(figure: Figure, size: Size, css: str) -> str:
    """The drawing.

    Args:
        figure: what to show.
        size: of the drawing.
        css: class of the outermost element.
    """
    points = [point for series in figure.series for point in series.points]
    ys = [value for p in points for value in (p.y, p.low, p.high) if value is not None]
    x = axis([p.x for p in points], log=figure.log_x, from_zero=False, most=size.x_ticks)
    y = axis(ys, log=figure.log_y, from_zero=figure.from_zero, most=size.y_ticks)
    plot = _Plot(size, x, y)
    parts = [
        f'<svg class="{css}" viewBox="0 0 {size.width} {size.height}" role="img" '
        f'aria-label="{escape(figure.title)}">',
        *plot.grid(figure.x_label, figure.y_label),
    ]
    number = 0
    for series in figure.series:
        css_class = "limit" if series.limit else f"s{number % COLOURS}"
        number += not series.limit
        parts += plot.series(series, css_class)
    return "\n".join([*parts, "</svg>"])


def legend(figure: Figure) -> str:
    """Names of the series, as HTML."""
    items, number = [], 0
    for series in figure.series:
        css_class = "limit" if series.limit else f"s{number % COLOURS}"
        number += not series.limit
        items.append(f'<li class="{css_class}">{escape(series.name)}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


class _Plot:
    def __init__(self, size: Size, x: Axis, y: Axis) -> None:
        self.size, self.x, self.y = size, x, y

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a point lies in the drawing."""
        size = self.size
        across = size.left + self.x.place(x) * (size.width - size.left - size.right)
        down = size.height - size.bottom
        return round(across, 1), round(down - self.y.place(y) * (down - size.top), 1)

    def grid(self, x_label: str, y_label: str) -> list[str]:
        """Ticks, their lines and the axes' labels."""
        size = self.size
        base, left = size.height - size.bottom, size.left
        parts = []
        for tick in self.x.ticks:
            across, _ = self.at(tick, self.y.low)
            parts.append(f'<path class="grid" d="M{across} {size.top}V{base}"/>')
            last = across > size.width - size.right - 20
            css = "tick last" if last else "tick"
            place = size.width - 2 if last else across
            parts.append(f'<text class="{css}" x="{place}" y="{base + 16}">{short(tick)}</text>')
        for tick in self.y.ticks:
            _, up = self.at(self.x.low, tick)
            parts.append(f'<path class="grid" d="M{left} {up}H{size.width - size.right}"/>')
            parts.append(f'<text class="tick y" x="{left - 6}" y="{up + 4}">{short(tick)}</text>')
        middle = (left + size.width - size.right) / 2
        parts.append(
            f'<text class="axis" x="{middle}" y="{size.height - 8}">{escape(x_label)}</text>'
        )
        half = (size.top + base) / 2
        parts.append(
            f'<text class="axis" transform="translate(12 {half}) rotate(-90)">'
            f"{escape(y_label)}</text>"
        )
        return parts

    def series(self, series: Series, css: str) -> list[str]:
        """A line and its points; each point says on request what it is."""
        parts = [f'<g class="{css}">']
        if series.joined and len(series.points) > 1:
            line = " ".join("{},{}".format(*self.at(p.x, p.y)) for p in series.points)
            parts.append(f'<polyline points="{line}"/>')
        if not series.limit:
            parts += [self._point(point) for point in series.points]
        return [*parts, "</g>"]

    def _point(self, point: Point) -> str:
        across, up = self.at(point.x, point.y)
        spread = ""
        if point.low is not None and point.high is not None:
            _, low = self.at(point.x, point.low)
            _, high = self.at(point.x, point.high)
            spread = f'<path d="M{across} {low}V{high}"/>'
        title = f"<title>{escape(point.label)}</title>"
        return f'{spread}<circle cx="{across}" cy="{up}" r="3.5">{title}</circle>'
