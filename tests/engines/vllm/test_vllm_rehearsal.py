"""A rehearsal on a Hopper GPU compiles everything before it runs anything."""

from pathlib import Path

from servers import look_up, needs_vllm

pytestmark = needs_vllm


def test_everything_is_compiled_before_anything_runs(tmp_path: Path) -> None:
    """By one layer of each kind: ratios 0, 4 and 128, with and without choice by token id."""
    found = look_up("rehearsed_builds.py", tmp_path, "force")
    compiled, ran = found["passes"]
    assert len(compiled["builds"]) > 80
    assert not compiled["launches"]
    assert not ran["builds"]
    assert ran["launches"] > 3_000
    assert compiled["layers"] == ran["layers"] == 5
    assert found["layers"] == [0, 8, 8]
