"""A rehearsal on a Hopper GPU compiles everything before it runs anything."""

import os
from pathlib import Path

import pytest
from servers import SOURCE, look_up, needs_source, needs_vllm

pytestmark = needs_vllm


@pytest.mark.parametrize("other", [False, pytest.param(True, marks=needs_source)])
def test_everything_is_compiled_before_anything_runs(tmp_path: Path, other: bool) -> None:
    """By one layer of each kind: ratios 0, 4 and 128, with and without choice by token id."""
    source = Path(os.environ[SOURCE]) if other else None
    found = look_up("rehearsed_builds.py", tmp_path, "force", source=source)
    compiled, ran = found["passes"]
    assert len(compiled["builds"]) > 80
    assert not compiled["launches"]
    assert not ran["builds"]
    assert ran["launches"] > 3_000
    assert compiled["layers"] == ran["layers"] == 5
    assert found["layers"] == [0, 8, 8]
