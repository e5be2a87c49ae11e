"""Settings of the documentation (`make docs`)."""

import pathlib
import re

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

html_theme = "furo"
html_title = f"anymla {release}"
html_copy_source = False
