"""Random traffic, a little of it."""

import pytest
import torch

from lab import traffic


def test_traffic_says_what_it_held_and_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(traffic, "_PROMPTS", (1, 20))
    monkeypatch.setattr(traffic, "_OUTPUTS", (1, 3))
    monkeypatch.setattr(traffic, "_LONGEST", 40)
    (result,) = traffic.run(tmp_path, torch.device("cpu"), steps=8)
    assert result.values["steps"] >= 8
    assert result.values["tokens"] >= result.values["requests"] >= 6
    assert result.met


def test_a_compilation_is_noted():
    knobs = pytest.importorskip("triton").knobs
    with traffic._compilations() as compiled:
        assert not knobs.runtime.jit_cache_hook(fn=type("", (), {"name": "late_kernel"}))
    assert compiled == ["late_kernel"]
