"""The page: one file, no network, light and dark, wide and narrow."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from importlib import resources

from lab.page.colours import DARK, LIGHT, variables
from lab.page.draw import NARROW, WIDE, svg
from lab.page.figure import Plot
from lab.page.table import Table


@dataclasses.dataclass(frozen=True)
class Group:
    """Sections that belong together.

    Attributes:
        title: of the group.
        parts: plots, or tables.
        tables: whether they are tables.
    """

    title: str
    parts: Sequence[Plot] | Sequence[Table]
    tables: bool


@dataclasses.dataclass(frozen=True)
class FirstScreen:
    """What is seen before anything is scrolled.

    Attributes:
        sentences: the story.
        figure: one chart.
        table: one table.
    """

    sentences: Sequence[str] = ()
    figure: Plot | None = None
    table: Table | None = None


def page(first: FirstScreen, figures: Sequence[Plot], tables: Sequence[Table], made: str) -> str:
    """The whole document.

    Args:
        first: above everything else.
        figures: drawn in this order.
        tables: below the figures, in this order.
        made: when, from which commit and by which command.

    Raises:
        ImportError: matplotlib or jinja2 is not installed.
    """
    import jinja2
    from markupsafe import Markup, escape

    def code(text: str) -> Markup:
        """Escaped text in which `code` is code."""
        return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))

    def cell(text: str) -> Markup:
        bad, shown = text.startswith("!"), text.removeprefix("!")
        number = re.fullmatch(r"[\d.,e+-]*\d", shown)
        names = " ".join(["bad"] * bad + ["number"] * bool(number))
        css = f' class="{names}"' if names else ""
        return Markup(f"<td{css}>{escape(shown)}</td>")

    def drawn(plot: Plot, width: int, css: str) -> Markup:
        return Markup(svg(plot, width, css))

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"code": code, "cell": cell, "svg": drawn}
    groups = [Group("Figures", figures, False), Group("Tables", tables, True)]
    return environment.from_string(_file("report.html.j2")).render(
        light=variables(LIGHT),
        dark=variables(DARK),
        css=Markup(_file("report.css")),
        wide=WIDE,
        narrow=NARROW,
        sentences=first.sentences,
        first_figure=first.figure,
        first_table=first.table,
        groups=[group for group in groups if group.parts],
        missed=any(each.key == "missed" for each in tables),
        made=made,
    )


@functools.cache
def _file(name: str) -> str:
    folder = resources.files("lab.page") / "templates"
    return (folder / name).read_text(encoding="utf-8")
