"""What is said about kernels that numba compiles, and when."""

import io
import subprocess
import sys

import pytest

from anymla.ops.compile_notice import Notice
from anymla.ops.device import has_numba


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def said(monkeypatch, stream, *seconds: float, kept: str = "/cache") -> list[str]:
    monkeypatch.setattr(sys, "stderr", stream)
    notice = Notice()
    for each in seconds:
        notice.begin(kept)
        notice.add(each)
    notice.close()
    notice.close()
    return stream.getvalue().splitlines()


def test_at_a_terminal_every_compilation_is_told(monkeypatch) -> None:
    first, last = said(monkeypatch, Terminal(), 0.1, 0.2)
    assert first.startswith("anymla: compiling kernels for this CPU")
    assert "half a minute" in first
    assert "kept in /cache" in first
    assert last == "anymla: 2 kernels compiled in 0.3 s"


@pytest.mark.parametrize(
    ("seconds", "lines"), [((), 0), ((2.0, 0.9), 0), ((4.0,), 1), ((2.0, 2.0, 2.0), 2)]
)
def test_elsewhere_only_those_that_take_long(monkeypatch, seconds, lines) -> None:
    told = said(monkeypatch, io.StringIO(), *seconds)
    assert len(told) == lines
    if told:
        assert told[-1].endswith(f"{len(seconds)} kernels compiled in {sum(seconds):.1f} s")


def test_what_is_not_kept_is_said(monkeypatch) -> None:
    assert "by every process" in said(monkeypatch, Terminal(), 0.1, kept="")[0]


KERNELS = """
from numba import njit
from anymla.ops._numba_cache import CACHE
from anymla.ops.compile_notice import NOTICE

@njit(cache=CACHE)
def half(x):
    return x / 2

@njit(cache=CACHE)
def quarter(x):
    return half(half(x))

assert quarter(2.0) == 0.5
print(NOTICE.kernels, NOTICE.seconds > 0)
"""


@pytest.mark.skipif(not has_numba(), reason="numba is not installed")
def test_kernels_that_no_cache_has_are_counted_once(tmp_path, monkeypatch) -> None:
    """With those that they call; the next process compiles nothing."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "kernels.py"
    file.write_text(KERNELS)
    for expected in ("1 True\n", "0 False\n"):
        done = subprocess.run([sys.executable, file], capture_output=True, text=True, check=True)
        assert done.stdout == expected
