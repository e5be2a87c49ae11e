"""Settings of the documentation (`make docs`)."""

import pathlib
import re

_INIT = pathlib.Path(__file__).parents[1] / "src" / "anymla" / "__init__.py"

project = "anymla"
author = "the anymla authors"
copyright = author
release = re.search(r'__version__ = "(.+?)"', _INIT.read_text(encoding="utf-8"))[1]

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3
nitpicky = True

html_theme = "furo"
html_title = f"anymla {release}"
html_copy_source = False
