"""Contents of plots, apart from how they are drawn."""

from __future__ import annotations

import dataclasses

# A reader cannot tell more than these parts apart in one plot.
MOST_SERIES = 6


@dataclasses.dataclass(frozen=True)
class Plot:
    """Texts that every kind of plot needs.

    Attributes:
        key: short name, which is the stem of its file's name.
        title: title of the plot, a phrase without a full stop.
        x_label: label of the horizontal axis, with its unit.
    """

    key: str
    title: str
    x_label: str


@dataclasses.dataclass(frozen=True)
class Stack:
    """A measured whole and its parts, one bar of ``Stacks``.

    Attributes:
        name: name of the measured case, for people.
        parts: a number not below 0 for each of ``Stacks.parts``, all in one unit.
        text: size of the whole in words, with its unit.
    """

    name: str
    parts: tuple[float, ...]
    text: str


@dataclasses.dataclass(frozen=True)
class Stacks(Plot):
    """Bars below each other, all equally long, cut into the shares of their parts.

    Attributes:
        parts: names of the parts from left to right, at most ``MOST_SERIES``.
        stacks: bars from top to bottom.
    """

    parts: tuple[str, ...]
    stacks: tuple[Stack, ...]

    def __post_init__(self) -> None:
        assert len(self.parts) <= MOST_SERIES, self.key


@dataclasses.dataclass(frozen=True)
class Range:
    """Least, middle and greatest ratio of many shapes, one line of ``Ranges``.

    Attributes:
        name: name of the measured family, for people.
        low: least ratio of all shapes, above 0.
        middle: geometric mean of the ratios.
        high: greatest ratio of all shapes.
        text: words beside the line, with the middle.
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
        ranges: lines from top to bottom.
        even: ratio at which neither side is faster.
    """

    ranges: tuple[Range, ...]
    even: float
