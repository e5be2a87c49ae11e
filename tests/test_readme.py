"""The README's Python examples run as printed."""

import pathlib
import re

import pytest

from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

README = pathlib.Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_readme_has_examples():
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize("code", EXAMPLES, ids=["names", "model", "operation"])
def test_example_runs(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if 'load_model("tiny")' in code:
        write_tiny_checkpoint("tiny", TinyOptions(experts=8, ratios=(0, 4)))
    exec(compile(code, "README.md", "exec"), {})
    if "print(" in code:
        assert re.search(r"\(\d+(, \d+){7}\)", capsys.readouterr().out)
