"""A kernel's digest follows its statements and those of all that it names, and nothing else."""

import importlib.util
import itertools
import sys
from pathlib import Path

import pytest

from anymla.ops.device import has_triton

if not has_triton():
    pytest.skip("triton is an extra", allow_module_level=True)

from lab.kernel_digest import kernel_digest

TEXT = '''
from typing import NamedTuple

import triton
import triton.language as tl

UNIT = tl.constexpr(2.0)
WIDTH = 4
word = "a global that the kernel's own name hides"


class Rows(NamedTuple):
    x: int


@triton.jit
def scaled(x):
    """Return twice x."""
    return x * UNIT


@triton.jit
def kernel(x, BLOCK: tl.constexpr):
    word = tl.arange(0, BLOCK)  # elements
    rows = Rows(x)
    tl.store(rows.x + word, scaled(tl.load(rows.x + word)))
'''
numbers = itertools.count()


@pytest.fixture
def digest_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Digest of ``kernel`` in a module with a text, which has one name for all texts."""

    def digest(text: str) -> str:
        # Each text has a file of its own, as Python remembers lines by names of files.
        file = tmp_path / f"text{next(numbers)}.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location("anymla.kernel_of_this_test", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return kernel_digest(module.kernel.fn)

    return digest


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("import triton\n", "import triton\n\n\n"),
        ("Return twice x.", "Return x and x."),
        ("  # elements", ""),
        ("WIDTH = 4", "WIDTH = 5"),
        ("hides", "does not see"),
    ],
)
def test_what_no_code_follows_from_leaves_it(digest_of, old, new):
    assert TEXT.count(old)
    assert digest_of(TEXT.replace(old, new, 1)) == digest_of(TEXT)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("word, scaled", "word + 1, scaled"),
        ("x * UNIT", "UNIT + x"),
        ("constexpr(2.0)", "constexpr(3.0)"),
        ("x: int", "x: int\n    y: int = 0"),
        ("@triton.jit\ndef scaled", "@triton.jit(noinline=True)\ndef scaled"),
    ],
)
def test_every_statement_and_constant_changes_it(digest_of, old, new):
    assert TEXT.count(old)
    assert digest_of(TEXT.replace(old, new, 1)) != digest_of(TEXT)
