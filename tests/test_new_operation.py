"""docs/new-operation.md, executed: its files make a family of operations in a copy of the tree."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "new-operation.md").read_text(encoding="utf-8")
FILE = re.compile(r"^```\w+ file=(\S+)(?: after=([^\n]+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILES = FILE.findall(PAGE)
COPIED = [
    "pyproject.toml",
    "CHANGELOG.md",
    "src",
    "lab",
    "tests/conftest.py",
    "tests/ops",
    "docs/conf.py",
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> pathlib.Path:
    """A copy of what operations and their tests need, with the page's files in it."""
    root = tmp_path_factory.mktemp("tree")
    for name in COPIED:
        source, target = ROOT / name, root / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    for name, after, text in FILES:
        path = root / name
        if after:
            before, mark, rest = path.read_text(encoding="utf-8").partition(f"{after}\n")
            assert mark, f"{name} has no line {after}"
            path.write_text(before + mark + text + rest, encoding="utf-8")
        else:
            assert not path.exists(), name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return root


def run(tree: pathlib.Path, *words: str, interpret: bool = False) -> str:
    """Run Python on the copy; what it prints."""
    environment = dict(os.environ) | {"PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
    if not interpret:
        environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_operation_is_added_by_eight_files() -> None:
    names = [name for name, _, _ in FILES]
    assert len({*names}) == len(names) <= 8
    assert len(re.findall(r"^## \d\.", PAGE, re.MULTILINE)) == len(names)


def test_its_tests_and_those_of_all_operations_pass(tree) -> None:
    tests = ["row_scale", "test_contracts.py", "test_call_forms.py", "test_families.py"]
    words = ["-q", "-p", "no:cacheprovider", "-k", "row_scale", *(f"tests/ops/{t}" for t in tests)]
    said = run(tree, "-m", "pytest", *words, interpret=True)
    passed = re.search(r"(\d+) passed", said)
    assert passed, said
    assert int(passed[1]) > 25, said
    assert "skipped" not in said
    assert "failed" not in said


def test_its_kernel_is_built(tree) -> None:
    words = ["build-matrix", "--first", "kernel", "--module", "row_scale.", "--target", "sm_90"]
    assert "1 builds, 1 as they should be, 0 not" in run(tree, "-m", "lab", *words)


def test_it_is_documented(tree) -> None:
    code = "import runpy; print(runpy.run_path('docs/conf.py')['family_page']('row_scale'))"
    assert ".. autofunction:: anymla.ops.row_scale.scale_rows" in run(tree, "-c", code)
