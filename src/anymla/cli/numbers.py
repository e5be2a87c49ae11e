"""Number types of the command line."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click


def count(*names: str, least: int = 1, **settings: Any) -> Callable[[Any], Any]:
    """Make an option for an integer that is at least ``least``; its help shows a single default."""
    settings.setdefault("show_default", not settings.get("multiple"))
    return click.option(*names, type=click.IntRange(min=least), **settings)


class Finite(click.FloatRange):
    """A number in a range that is never NaN, which no comparison would refuse."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check and return the number."""
        number = super().convert(value, param, ctx)
        if math.isnan(number) or (math.isinf(number) and self.max is None):
            self.fail(f"must be finite, got {number}.", param, ctx)
        return number
