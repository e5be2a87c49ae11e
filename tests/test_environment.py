"""docs/environment.md names every environment variable that the code reads, and no other."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "environment.md"
OURS = re.compile(r"\bANYMLA_[A-Z0-9_]*[A-Z0-9]\b")
READ = {"get", "pop", "setdefault", "getenv"}
FOLDERS = ("src", "lab", "tests", "benchmarks", "examples", "docs", ".ci")
SUFFIXES = {".py", ".md", ".sh", ".toml", ""}


def _documented() -> set[str]:
    """Names in the first column of the page's tables."""
    rows = re.findall(r"^\| (`[^|]*) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def _files() -> list[pathlib.Path]:
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [path for path in found if path.suffix in SUFFIXES and path.name != ".git"]


def _mentioned() -> dict[str, pathlib.Path]:
    found = {}
    for path in _files():
        if path not in (PAGE, pathlib.Path(__file__)):
            for name in OURS.findall(path.read_text(encoding="utf-8", errors="ignore")):
                found[name] = path.relative_to(ROOT)
    return found


def _read(tree: ast.Module) -> set[str]:
    """Variables that a file asks ``os.environ`` for, by a string or a constant of the file."""
    constants = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    found = set()
    for node in ast.walk(tree):
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("os.environ"):
            key = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            owner = ast.unparse(node.func.value)
            if node.func.attr in READ and (owner == "os.environ" or node.func.attr == "getenv"):
                key = node.args[0]
        if isinstance(key, ast.Constant):
            found.add(key.value)
        elif isinstance(key, ast.Name):
            found.add(constants[key.id])
    return found


def test_every_variable_of_ours_is_in_the_table() -> None:
    mentioned = _mentioned()
    page = PAGE.read_text(encoding="utf-8")
    no_variables = set(OURS.findall(page.partition("## Names that look alike")[2]))
    ours = {name for name in _documented() if OURS.fullmatch(name)}
    assert not ours & no_variables
    missing = mentioned.keys() - ours - no_variables
    assert not missing, {name: str(mentioned[name]) for name in missing}
    assert ours | no_variables <= mentioned.keys(), "the page names what is gone"


def test_every_variable_that_the_package_reads_is_in_the_table() -> None:
    read = set()
    for folder in ("src", "lab"):
        for path in (ROOT / folder).rglob("*.py"):
            read |= _read(ast.parse(path.read_text(encoding="utf-8")))
    assert {"ANYMLA_VLLM", "RANK", "PYTHONSAFEPATH"} <= read
    assert read <= _documented(), read - _documented()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('os.environ.get("A")', {"A"}),
        ('X = "A"\nos.environ[X]', {"A"}),
        ('os.environ.setdefault("A", "1"); os.getenv("B")', {"A", "B"}),
        ('environment.get("A")', set()),
    ],
)
def test_how_reads_are_found(text: str, names: set[str]) -> None:
    assert _read(ast.parse(text)) == names
