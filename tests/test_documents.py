"""The documents' links lead somewhere."""

import importlib
import pathlib
import pkgutil
import re
import runpy

import pytest

import anymla
import anymla.ops

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
        # The site of `make docs` has nothing but the folder docs.
        inside = document.parent == ROOT or found.is_relative_to(ROOT / "docs")
        assert inside, f"{document.name}: {target} is outside of docs"
        if heading:
            assert heading in headings(found), f"{document.name}: {target}"


PRIVATE = re.compile(
    r"\banymla(?:\.\w+)*\.(?:_\w*|\w+\._\w*)|from anymla[\w.]* import \(?[^)\n]*\b_\w+"
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_nothing_private_is_named(document) -> None:
    """What a reader copies is public, but for files of the package itself, which a page adds."""
    text = re.sub(
        r"^```\w+ file=src/.*?^```$",
        "",
        document.read_text(encoding="utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )
    assert PRIVATE.findall(text) == []


def test_every_public_name_is_in_the_reference(tmp_path) -> None:
    """Pages of families are written by Sphinx's settings; the others are in the tree."""
    written = tmp_path / "operations"
    written.mkdir()
    (written / "gone.md").write_text("# A family that is no more")
    runpy.run_path(str(ROOT / "docs" / "conf.py"))["write_family_pages"](written)
    families = {each.name for each in pkgutil.iter_modules(anymla.ops.__path__) if each.ispkg}
    assert {page.stem for page in written.glob("*.md")} == families
    for family in families:
        module = importlib.import_module(f"anymla.ops.{family}")
        text = (written / f"{family}.md").read_text(encoding="utf-8")
        for name in module.__all__:
            assert f":: {module.__name__}.{name}\n" in text, name
    pages = [*(ROOT / "docs" / "api").glob("*.md"), *written.glob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    for name in anymla.__all__:
        assert f":: {getattr(anymla, name).__module__}.{name}\n" in text, name
    for name in re.findall(r"^\.\. auto(?:function|class):: (\S+)$", text, re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(document) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    for name in re.findall(
        r"`((?:src|ops|formats|layers|runtime|bench|tests/ops)/[\w/]+\.py)`", text
    ):
        assert any((ROOT / under / name).exists() for under in ("", "src/anymla")), name


def test_the_architecture_names_what_there_is() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+/(?:[a-z_0-9]+/)*(?:[a-z_0-9]+\.py)?)`", text))
    assert len(named) > 20
    for path in named:
        assert any((under / path).exists() for under in (ROOT / "src" / "anymla", ROOT)), path
    operations = {
        name
        for family in pkgutil.iter_modules(anymla.ops.__path__)
        if family.ispkg
        for name in importlib.import_module(f"anymla.ops.{family.name}").__all__
    }
    rows = re.findall(r"^   \| [^|]+ \| ([^|]+) \|", text, re.MULTILINE)
    steps = {name for row in rows[2:] for name in re.findall(r"`(\w+)`", row)}
    assert len(steps) > 8
    assert steps <= operations


def headings(document: pathlib.Path) -> set[str]:
    """Anchors of a document's headings, as GitHub and Sphinx make them."""
    lines = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def test_the_documents_are_in_the_table_of_contents() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    groups = re.findall(r"```\{toctree\}\n((?::[^\n]*\n)*)\n(.*?)```", text, re.DOTALL)
    assert all(":caption: " in options for options, _ in groups)
    entries = {entry for _, group in groups for entry in group.split()}
    for document in (ROOT / "docs").glob("*.md"):
        name = document.stem
        assert name in entries or name in ("index", "performance")
    assert "performance**" in entries
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert "\napi/operations/*\n" in text
    for page in (ROOT / "docs" / "api").glob("*.md"):
        assert f"\napi/{page.stem}\n" in text
