"""What a plot shows, apart from how it is drawn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence


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
        name: in the legend.
        points: ordered by x.
        joined: whether a line joins them.
        limit: it is a ceiling or a goal, not a measurement of this package: drawn thin.
    """

    name: str
    points: tuple[Point, ...]
    joined: bool = True
    limit: bool = False


@dataclasses.dataclass(frozen=True)
class Figure:
    """A plot with two axes.

    Attributes:
        key: short name, for file names and links.
        title: what it says.
        x_label: with the unit.
        y_label: with the unit.
        series: at least one.
        source: device, date, versions, commit and command of its rows.
        note: what to know when reading it.
        log_x: logarithmic.
        log_y: logarithmic.
        from_zero: a linear y axis begins at 0.
    """

    key: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    source: str
    note: str = ""
    log_x: bool = True
    log_y: bool = True
    from_zero: bool = True


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
class Bars:
    """Measurements below each other, as bars.

    Attributes:
        key: short name.
        title: what it says.
        x_label: of the bars' length, with the unit.
        bars: in this order.
        most: value of a bar of full length.
        goal: what was asked, or None.
        source: as for a figure.
        note: as for a figure.
    """

    key: str
    title: str
    x_label: str
    bars: tuple[Bar, ...]
    most: float
    goal: float | None
    source: str
    note: str = ""


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
class Stacks:
    """Wholes below each other, each as long as the others, cut into the shares of their parts.

    Attributes:
        key: short name.
        title: what it says.
        x_label: of the shares.
        parts: their names, in order.
        stacks: in this order.
        source: as for a figure.
        note: as for a figure.
    """

    key: str
    title: str
    x_label: str
    parts: tuple[str, ...]
    stacks: tuple[Stack, ...]
    source: str
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Axis:
    """A scale from values to 0..1.

    Attributes:
        low: value at 0.
        high: value at 1.
        log: logarithmic.
        ticks: values that are marked.
    """

    low: float
    high: float
    log: bool
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """Where a value lies."""
        if self.log:
            value, low, high = math.log(value), math.log(self.low), math.log(self.high)
        else:
            low, high = self.low, self.high
        return (value - low) / (high - low) if high > low else 0.5


def axis(values: Sequence[float], *, log: bool, from_zero: bool, most: int) -> Axis:
    """A scale that holds all values, with at most ``most`` round ticks."""
    low, high = min(values), max(values)
    if log:
        return _log_axis(low, high, most)
    low = min(0.0, low) if from_zero else low
    step = _round_step((high - low) / most or 1.0)
    bottom = math.floor(low / step) * step
    top = math.ceil(high / step - 1e-9) * step
    count = round((top - bottom) / step)
    return Axis(bottom, top, False, tuple(bottom + i * step for i in range(count + 1)))


def _log_axis(low: float, high: float, most: int) -> Axis:
    """From the round number below to the one above, marked by powers or by 1, 2 and 5 of them."""
    powers = all(math.log2(value).is_integer() for value in (low, high))
    if powers and 1 < high / low <= 2**20:
        first, last = round(math.log2(low)), round(math.log2(high))
        step = math.ceil((last - first) / most)
        return Axis(low, high, True, tuple(2.0**i for i in range(first, last + 1, step)))
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    round_numbers = [m * 10.0**i for i in decades for m in (1, 2, 5)]
    bottom = max(number for number in round_numbers if number <= low * (1 + 1e-9))
    top = min(number for number in round_numbers if number >= high * (1 - 1e-9))
    if top <= bottom:
        bottom, top = bottom / 2, top * 2
    inside = [n for n in round_numbers if bottom * (1 - 1e-9) <= n <= top * (1 + 1e-9)]
    if len(inside) > most:
        inside = [10.0**i for i in decades if bottom <= 10.0**i <= top]
    return Axis(bottom, top, True, tuple(inside))


def _round_step(step: float) -> float:
    unit = 10.0 ** math.floor(math.log10(step))
    return next(unit * m for m in (1, 2, 5, 10) if unit * m >= step * 0.999)


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
