"""What a plot shows, apart from how it is drawn."""

from __future__ import annotations

import dataclasses

# More lines than these in one plot cannot be told apart.
MOST_SERIES = 6


@dataclasses.dataclass(frozen=True)
class Plot:
    """What all plots have.

    Attributes:
        key: short name, for file names and links.
        title: what it says.
        x_label: with the unit.
    """

    key: str
    title: str
    x_label: str


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
