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


# Words of our own that code and documents once had, and what FlashMLA, CUTLASS, DeepGEMM, Triton
# and CUDA's documentation say.
PRIVATE_WORDS = {
    r"copy engine": "TMA",
    r"\bmultiprocessors?\b": "SM",
    r"\bk best\b": "top-k",
    r"\bvouch": "skip_checks",
    r"\brescan": "bf16 fallback",
    r"\bgive_back\(": "release",
    r"\bhand-overs?\b|\bhand_overs?\b": "producer and consumer synchronisation",
    r"\bcome by\b|\bon their way\b": "loaded, in flight",
    r"\bturned\b(?! (?:on|off|out|into|to)\b)": "rotated, or transposed",
    r"\bpieces of (?:work|a task|blocks)\b": "split",
    r"\bfurther queues\b|\banother queue\b|\bone queue\b": "CUDA stream",
    r"\banew\b": "again; opaque",
    r"\bsettled\(|\bupto\(|\bSeen\(": "flush, table_for, AttentionInputs",
    r"\bearly launch(?:es)? of kernels\b": "programmatic dependent launch",
}
# Recorded rows keep their fields' names, and the tables made of them their words.
RECORDED = re.compile(r'"multiprocessors": |<!-- (\w+): begin -->.*?<!-- \1: end -->', re.DOTALL)


def _blank(match: re.Match[str]) -> str:
    """As many lines, without words."""
    return "\n" * match[0].count("\n")


def test_the_words_are_the_fields() -> None:
    """New private words need a row in the glossary; these have a public one."""
    files = [
        path
        for path in (
            *(ROOT / "src").rglob("*.py"),
            *(ROOT / "docs").rglob("*.md"),
            *ROOT.glob("*.md"),
        )
        if path.name != "CHANGELOG.md"
    ]
    assert len(files) > 300
    found = []
    for path in files:
        text = RECORDED.sub(_blank, path.read_text(encoding="utf-8"))
        for word, say in PRIVATE_WORDS.items():
            for match in re.finditer(word, text):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{path.name}:{line}: {match[0]!r}, say {say}")
    assert not found, "\n".join(found)
