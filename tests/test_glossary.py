"""The glossary's rows are complete, and the files they name say what they define."""

from __future__ import annotations

import re
from pathlib import Path

import anymla

ROOT = Path(__file__).parent.parent
PACKAGE = Path(anymla.__file__).parent
COLUMNS = ["name", "symbol", "shape", "unit", "meaning", "defined in"]


def tables() -> list[list[list[str]]]:
    found: list[list[list[str]]] = []
    for line in (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            found.append([])
        elif not set(line) <= set("|- "):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
    return [table for table in found if table]


def test_every_file_exists_and_mentions_the_term() -> None:
    terms = [row for table in tables() if table[0] == COLUMNS for row in table[1:]]
    assert len(terms) > 50
    for row in terms:
        assert len(row) == len(COLUMNS), row
        name, symbol, _, _, meaning, where = row
        assert meaning, name
        path = PACKAGE / where.strip("`")
        assert path.is_file(), f"{name}: {where} does not exist"
        text = path.read_text(encoding="utf-8").lower().replace("\n", " ")
        words = [word for word in re.split(r"[\s,-]+", name.lower()) if len(word) > 2]
        stems = [word.removesuffix("s").removesuffix("e") for word in words]
        mentioned = any(stem in text for stem in stems) or (symbol and symbol.lower() in text)
        assert mentioned, f"{where} mentions neither {name!r} nor {symbol!r}"


def test_names_are_unique() -> None:
    names = [row[0] for table in tables() if table[0] == COLUMNS for row in table[1:]]
    assert len(names) == len(set(names))
