"""Which targets the installed Triton compiles for, and how it is told of them."""

import importlib.util
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest

from crossrun.targets import backend_problem, triton_target, xpu_properties


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A triton with a back end for Intel's GPUs alone."""
    folder = tmp_path / "backends" / "intel"
    folder.mkdir(parents=True)
    (folder / "compiler.py").touch()
    spec = ModuleSpec("triton", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    backend_problem.cache_clear()
    yield
    backend_problem.cache_clear()


def test_a_back_end_is_a_folder_of_tritons(installed):
    assert backend_problem("xpu") == ""
    assert backend_problem("hip") == "the installed Triton has no back end for amd"


def test_no_triton_compiles_for_nothing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert backend_problem.__wrapped__("cuda") == "triton is not installed"


def test_targets_have_tritons_names():
    pytest.importorskip("triton")
    for name, backend, warp_size, architecture in (
        ("sm_90", "cuda", 32, 90),
        ("sm_121", "cuda", 32, 121),
        ("gfx942", "hip", 64, "gfx942"),
    ):
        target = SimpleNamespace(name=name, backend=backend, warp_size=warp_size, sm_count=1)
        with triton_target(target) as device:
            assert (device.backend, device.arch) == (backend, architecture)
            assert device.warp_size == warp_size


def test_intels_gpus_differ_in_what_they_multiply():
    arc_a, arc_b = xpu_properties("xpu_dg2", 32), xpu_properties("xpu_bmg", 20)
    assert (arc_a["sub_group_sizes"], arc_b["sub_group_sizes"]) == ([8, 16, 32], [16, 32])
    assert arc_a["gpu_subslice_count"] == 32
    assert not arc_a["has_subgroup_2d_block_io"]
    assert arc_b["has_subgroup_2d_block_io"]
