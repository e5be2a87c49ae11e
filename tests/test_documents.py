"""The documents' examples run as printed, and their links lead somewhere."""

import contextlib
import io
import pathlib
import re
import shlex
import sys

import pytest
from click.testing import CliRunner

from anymla.cli.main import main

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
EXECUTED = ("tutorial.md", "new-backend.md")


@pytest.mark.parametrize("name", EXECUTED)
def test_examples_run(name, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    names: dict[str, object] = {}
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    executed = 0
    for language, file, code in FENCE.findall(text):
        if file:
            pathlib.Path(file).write_text(code, encoding="utf-8")
        elif language == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(code, name, "exec"), names)
        elif language == "console":
            for line in code.splitlines():
                run(line)
        executed += 1
    assert executed >= 8


def run(line: str) -> None:
    """Run a line of a console: "$ anymla ...", which "# fails" after it expects to end with 1."""
    command, _, remark = line.removeprefix("$ ").partition("#")
    words = shlex.split(command)
    assert words[0] == "anymla"
    if words[1] == "conformance":
        words += ["--jobs", "0"]  # in this process, which has paid for its imports
    result = CliRunner().invoke(main, words[1:])
    assert result.exit_code == (1 if remark.strip() == "fails" else 0), result.output
    if remark.strip() == "fails":
        assert "FAIL A1" in result.output
        assert "ok   A4" in result.output


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
