"""Settings of the documentation (`make docs`)."""

from __future__ import annotations

import importlib
import inspect
import itertools
import pathlib
import pkgutil
import re
from typing import TYPE_CHECKING

import anymla.ops

if TYPE_CHECKING:  # a test of these settings runs without Sphinx
    from sphinx.application import Sphinx

_INIT = pathlib.Path(__file__).parents[1] / "src" / "anymla" / "__init__.py"

project = "anymla"
author = "the anymla authors"
copyright = author
release = re.search(r'__version__ = "(.+?)"', _INIT.read_text(encoding="utf-8"))[1]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types of torch and of typing have no page here
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "separated"
napoleon_use_ivar = True
napoleon_custom_sections = [("Results", "params_style")]

html_theme = "furo"
html_title = f"anymla {release}"
html_copy_source = False


def family_page(family: str) -> str:
    """The page of an operation family: its package's docstring and everything in ``__all__``."""
    module = importlib.import_module(f"anymla.ops.{family}")
    lines = [f"# {family}", "", "```{eval-rst}", f".. automodule:: {module.__name__}"]
    for name in module.__all__:
        kind = "autoclass" if inspect.isclass(getattr(module, name)) else "autofunction"
        lines += ["", f".. {kind}:: {module.__name__}.{name}"]
    return "\n".join([*lines, "```", ""])


def write_family_pages(folder: pathlib.Path) -> None:
    """Write a page for each package of ``anymla.ops`` into ``folder``; other pages there go."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {
        f"{each.name}.md": family_page(each.name)
        for each in pkgutil.iter_modules(anymla.ops.__path__)
        if each.ispkg
    }
    for path in folder.glob("*.md"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def name_results(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Rename the section of several named results; Napoleon would read them as one paragraph."""
    if "Returns:" not in lines:
        return
    at = lines.index("Returns:")
    section = itertools.takewhile(lambda line: line.startswith("    "), lines[at + 1 :])
    if sum(bool(re.match(r" {4}\w+: ", line)) for line in section) > 1:
        lines[at] = "Results:"


def setup(app: Sphinx) -> None:
    """Called by Sphinx before it reads a page."""
    app.connect("autodoc-process-docstring", name_results, priority=400)  # before Napoleon
    write_family_pages(pathlib.Path(__file__).parent / "api" / "operations")
