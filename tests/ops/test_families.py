"""Families of operations stand alone: none imports another, nor names it in a string.

The list of families is the list of packages in ``anymla/ops``. An import contract needs it written
down, so that these tests read the files instead.
"""

import ast
import pkgutil
import re
from pathlib import Path

import pytest

import anymla.ops

ROOT = Path(anymla.ops.__path__[0])
FAMILIES = sorted(module.name for module in pkgutil.iter_modules([str(ROOT)]) if module.ispkg)
NAMED = re.compile(rf"anymla\.ops\.({'|'.join(FAMILIES)})\b")


def named_by(text: str, own: str) -> set[str]:
    """Families other than its own that a file's text names, in an import or in a string."""
    found = set(NAMED.findall(text))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            if node.module == "anymla.ops":
                found |= {alias.name for alias in node.names} & {*FAMILIES}
    return found - {own}


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_names_no_other(family: str) -> None:
    found = {
        f"{family}/{path.name}": others
        for path in sorted((ROOT / family).glob("*.py"))
        if (others := named_by(read(path), family))
    }
    assert found == {}


def test_what_families_share_names_none() -> None:
    found = {path.name: named_by(read(path), "") for path in ROOT.glob("*.py")}
    assert {name: families for name, families in found.items() if families} == {}


@pytest.mark.parametrize(
    "line",
    [
        "from anymla.ops.moe import experts",
        "from anymla.ops import device, moe",
        "import anymla.ops.moe.config as config",
        "module = importlib.import_module('anymla.ops.moe')",
    ],
)
def test_every_way_to_name_a_family_is_seen(line: str) -> None:
    assert named_by(line, "linear") == {"moe"}
    assert named_by(line, "moe") == set()
    with pytest.raises(AssertionError, match="a relative import"):
        named_by("from ..moe import experts", "linear")
