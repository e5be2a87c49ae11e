"""Intel's compiled code on a CPU, as its page says to use it."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from crossrun import intel

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "crossrun" / "intel.md"


def test_interpreted_kernels_are_not_compiled(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert intel.missing() == "TRITON_INTERPRET=1 interprets kernels"
    with pytest.raises(RuntimeError, match="interprets kernels"):
        intel.install.__wrapped__()


def test_the_page_runs_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    if intel.missing():
        pytest.skip(intel.missing())
    blocks = re.findall(r"^```python( file=\S+)?\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    (named, kernel), (_, program) = blocks
    (tmp_path / named.removeprefix(" file=")).write_text(kernel)
    (tmp_path / "program.py").write_text(f"{program}\nassert not intel.missing()\n")
    # A process of its own, because a process has one driver; the cache lies in its home.
    subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
        check=True,
    )
    assert [*(tmp_path / ".cache" / "crossrun" / "intel").iterdir()]
