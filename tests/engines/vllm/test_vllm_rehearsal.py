"""A rehearsal on a Hopper GPU compiles everything before it runs anything, and before traffic."""

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
    assert len(compiled["builds"]) > 40
    assert not compiled["launches"]
    assert not ran["builds"]
    assert ran["launches"] > 3_000
    assert compiled["layers"] == ran["layers"] == 5
    assert found["layers"] == [0, 8, 8]
    # The run that measures memory comes first, without caches.
    without_caches, first, second = found["firsts"]
    assert len(without_caches["builds"]) > 80
    assert not without_caches["launches"]
    assert not first["builds"]
    assert not second["builds"]
    assert first["launches"] == second["launches"] > 100
    # What an earlier start has compiled is not looked up again, if all ranks say so.
    assert found["again"] == {"True True": 1, "True False": 2, "False True": 2, "asked": 3}
    same = {"nothing", "16 pages more", "the model's place"}
    assert found["purposes"] == {name: name not in same for name in found["purposes"]}
    assert len(found["purposes"]) == 12


@pytest.mark.parametrize("other", [False, pytest.param(True, marks=needs_source)])
def test_random_traffic_compiles_nothing(tmp_path: Path, other: bool) -> None:
    """Steps of any decodes, drafts and prefills, whose slices begin at any address."""
    source = Path(os.environ[SOURCE]) if other else None
    found = look_up("served_builds.py", tmp_path, "force", source=source)
    assert len(found["rehearsed"]) > 120
    assert found["launches"] > 10_000
    assert found["compiled"] == []


def test_random_traffic_compiles_nothing_on_a_rank_of_two(tmp_path: Path) -> None:
    """Its layers have half of the heads and channels, and other kernels."""
    found = look_up("served_builds.py", tmp_path, "force", "--two-ranks")
    assert len(found["rehearsed"]) > 120
    assert found["launches"] > 10_000
    assert found["compiled"] == []
    assert found["heads"] == 32


def test_prefills_behind_decodes_are_rehearsed_for_a_reason(tmp_path: Path) -> None:
    """Without them the same traffic finds kernels that were not compiled."""
    found = look_up("served_builds.py", tmp_path, "force", "--apart")
    kernels = {build.partition(" ")[0] for *_, build in found["compiled"]}
    assert kernels >= {"topk_kernel", "row_topk_kernel", "scores_kernel"}


def test_the_watch_begins_where_vllm_has_compiled_all(tmp_path: Path) -> None:
    """Its worker activates its monitor there."""
    found = look_up("watched.py", tmp_path, "force")
    assert found["before"] == [False, 0]
    assert found["after"] == [True, 1, 1, 1]  # what is in Triton's cache is not compiled again
    begun, named = found["lines"]
    assert begun == "anymla: kernels compiled from here on are named and counted"
    assert named == "anymla: kernel compiled in service: clear(x: *fp32, WIDTH=128)"
