"""What a plot shows, apart from how it is drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

# More lines than these in one plot cannot be told apart.
MOST_SERIES = 6


@dataclasses.dataclass(frozen=True)
class Point:
    """One measurement.

    Attributes:
        x: horizontal.
        y: vertical.
        label: what it is, with its numbers.
        low: lower end of its spread, or None.
        high: upper end of its spread, or None.
    """

    x: float
    y: float
    label: str
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True)
class Series:
    """Points that belong together.

    Attributes:
        name: written beside it.
        points: ordered by x.
        joined: whether a line joins them.
        limit: it is a ceiling or a goal, not a measurement of this package: drawn thin.
    """

    name: str
    points: tuple[Point, ...]
    joined: bool = True
    limit: bool = False


@dataclasses.dataclass(frozen=True)
class Plot:
    """What all plots have.

    Attributes:
        key: short name, for file names and links.
        title: what it says.
        x_label: with the unit.
        source: device, date, versions, commit and command of its rows.
        note: what to know when reading it.
    """

    key: str
    title: str
    x_label: str
    source: str
    note: str


@dataclasses.dataclass(frozen=True)
class Figure(Plot):
    """A plot with two axes.

    Attributes:
        y_label: with the unit.
        series: at least one, at most ``MOST_SERIES`` and a limit.
        log_x: logarithmic.
        log_y: logarithmic.
    """

    y_label: str
    series: tuple[Series, ...]
    log_x: bool = True
    log_y: bool = True

    def __post_init__(self) -> None:
        drawn = [series for series in self.series if not series.limit]
        assert 1 <= len(drawn) <= MOST_SERIES, f"{self.key}: {len(drawn)} series"


@dataclasses.dataclass(frozen=True)
class Bar:
    """One measurement among many.

    Attributes:
        name: what was measured.
        value: its length.
        text: its numbers.
        bad: it falls short of the goal.
    """

    name: str
    value: float
    text: str
    bad: bool = False


@dataclasses.dataclass(frozen=True)
class Bars(Plot):
    """Measurements below each other, as bars.

    Attributes:
        bars: in this order.
        most: value of a bar of full length.
        goal: what was asked, or None.
    """

    bars: tuple[Bar, ...]
    most: float
    goal: float | None


@dataclasses.dataclass(frozen=True)
class Stack:
    """A whole and its parts.

    Attributes:
        name: what was measured.
        parts: a number for each of ``Stacks.parts``.
        text: the whole, with its numbers.
    """

    name: str
    parts: tuple[float, ...]
    text: str


@dataclasses.dataclass(frozen=True)
class Stacks(Plot):
    """Wholes below each other, each as long as the others, cut into the shares of their parts.

    Attributes:
        parts: their names, in order; at most ``MOST_SERIES``.
        stacks: in this order.
    """

    parts: tuple[str, ...]
    stacks: tuple[Stack, ...]

    def __post_init__(self) -> None:
        assert len(self.parts) <= MOST_SERIES, self.key


@dataclasses.dataclass(frozen=True)
class Range:
    """What many shapes have between them.

    Attributes:
        name: what was measured.
        low: the least.
        middle: the geometric mean.
        high: the greatest.
        text: the numbers.
    """

    name: str
    low: float
    middle: float
    high: float
    text: str


@dataclasses.dataclass(frozen=True)
class Ranges(Plot):
    """Ranges below each other, on one logarithmic axis with a line at ``even``.

    Attributes:
        ranges: in this order.
        even: where neither side is better.
    """

    ranges: tuple[Range, ...]
    even: float


def short(value: float) -> str:
    """A number for a tick: 4096 as 4k, 10000 as 10k, 0.25 as 0.25."""
    for size, letter in ((2**20, "M"), (2**10, "k")):
        if value >= size and value % size == 0:
            return f"{value / size:g}{letter}"
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    if value >= 1e4 and value % 1e3 == 0:
        return f"{value / 1e3:g}k"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def line(name: str, points: Iterable[Point]) -> Series:
    """Points joined from left to right."""
    return Series(name, tuple(sorted(points, key=lambda point: point.x)))


def scatter(name: str, points: Iterable[Point]) -> Series:
    """Points by themselves."""
    return Series(name, tuple(sorted(points, key=lambda point: point.x)), joined=False)
