"""The documents' links lead somewhere."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in LINK.findall(text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, heading = target.partition("#")
        found = (document.parent / path).resolve() if path else document
        assert found.exists(), f"{document.name}: {target}"
        if heading:
            assert heading in headings(found), f"{document.name}: {target}"


def headings(document: pathlib.Path) -> set[str]:
    """Anchors of a document's headings, as GitHub and Sphinx make them."""
    lines = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def test_the_documents_are_in_the_table_of_contents() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    entries = set(re.search(r"```\{toctree\}\n(?::.*\n)*\n(.*?)```", text, re.DOTALL)[1].split())
    for document in (ROOT / "docs").glob("*.md"):
        name = document.stem
        assert name in entries or name in ("index", "performance")
    assert "performance**" in entries
