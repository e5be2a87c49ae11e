"""Which Triton the kernels are given to: asked of the installation, in one place."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec

import pytest
import torch

from anymla.ops import device as device_facts
from anymla.ops.norm_rope import rms_norm
from anymla.ops.registry import BackendUnavailable


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Give this process a triton of another version, or none."""

    def install(text: str | None) -> None:
        file = tmp_path / "__init__.py"
        spec = None
        if text is not None:
            file.write_text(text)
            spec = ModuleSpec("triton", None, origin=str(file))
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *rest: spec if name == "triton" else find(name, *rest),
        )
        _forget()

    yield install
    _forget()


def _forget() -> None:
    device_facts.triton_problem.cache_clear()
    device_facts._support.cache_clear()
    rms_norm.forget()


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.10.0+git1234", "4.0.0.post21"])
def test_newer_ones_are_taken(installed, version):
    installed(f'"""isort:skip_file"""\n__version__ = {version!r}\n')
    assert device_facts.triton_version() == version
    assert device_facts.has_triton()


@pytest.mark.parametrize("version", ["2.3.1", "3.5.1"])
def test_an_older_one_is_refused_with_its_version(installed, version):
    installed(f"__version__ = {version!r}\n")
    assert not device_facts.has_triton()
    x, weight = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(BackendUnavailable, match=rf"triton {version} .*3\.6 or newer"):
        rms_norm(x, weight, 1e-6, backend="triton")
    assert rms_norm.explain(x, weight, 1e-6)[0] == "torch"


def test_one_that_does_not_say_which_it_is(installed):
    installed("")
    assert not device_facts.has_triton()
    assert "no known version" in device_facts.triton_problem()


@pytest.mark.parametrize(
    ("system", "words"),
    [("linux", "triton is not installed"), ("darwin", "wheels for Linux only")],
)
def test_without_triton(installed, monkeypatch, system, words):
    monkeypatch.setattr(sys, "platform", system)
    installed(None)
    assert device_facts.triton_version() is None
    assert device_facts.triton_problem().endswith(words)
