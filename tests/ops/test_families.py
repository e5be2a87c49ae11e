"""Families of operations stand alone; the imports themselves are judged by ``lint-imports``."""

import pkgutil
import re
from pathlib import Path

import pytest

import anymla.ops

ROOT = Path(anymla.ops.__path__[0])
FAMILIES = sorted(module.name for module in pkgutil.iter_modules([str(ROOT)]) if module.ispkg)
NAMED = re.compile(rf"anymla\.ops\.({'|'.join(FAMILIES)})\b")


def named_by(path: Path, own: str) -> set[str]:
    """Families that a file names, in an import or in a string, besides its own."""
    return set(NAMED.findall(path.read_text(encoding="utf-8"))) - {own}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_names_no_other(family: str) -> None:
    found = {
        f"{family}/{path.name}": others
        for path in sorted((ROOT / family).glob("*.py"))
        if (others := named_by(path, family))
    }
    assert found == {}


def test_what_families_share_names_none() -> None:
    assert {path.name: found for path in ROOT.glob("*.py") if (found := named_by(path, ""))} == {}


def test_every_family_is_under_the_import_contract() -> None:
    import tomllib

    project = Path(__file__).parents[2] / "pyproject.toml"
    contracts = tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["importlinter"]
    (contract,) = (
        each
        for each in contracts["contracts"]
        if each["name"] == "Families of operations do not import each other"
    )
    assert contract["modules"] == [f"anymla.ops.{family}" for family in FAMILIES]
