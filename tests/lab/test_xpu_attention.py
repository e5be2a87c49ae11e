"""vLLM's path for XPU from a folder, and the table of what Intel's compilers made of both."""

import pytest

from lab.page.intel import PEER_PART, intel_peer_table
from lab.peers.vllm import UnpackedVllmXpu

PATH = "vllm/models/deepseek_v4/xpu/xpu_sparse_decode_fp8.py"


@pytest.mark.usefixtures("no_vllm")
def test_kernels_are_read_without_what_their_package_needs(tmp_path):
    pytest.importorskip("triton")
    file = tmp_path / PATH
    file.parent.mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").write_text("import what_is_not_there\n")
    file.write_text(
        "from vllm.triton_utils import LOG2E, LOGE2, tl, triton\nproduct = LOG2E * LOGE2\n"
    )
    details = tmp_path / "vllm-0.0.1.dist-info"
    details.mkdir()
    (details / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.0.1\n")
    peer = UnpackedVllmXpu(tmp_path)
    assert peer.available()
    assert peer.module.product == pytest.approx(1.0)
    assert peer.version() == "0.0.1"


def test_a_folder_without_it_is_named(tmp_path):
    pytest.importorskip("triton")
    support = UnpackedVllmXpu(tmp_path).available()
    assert not support
    assert f"{tmp_path} has no folder vllm" in support.reason


def row(library, kernel, target, each, whole, **more):
    return {
        "part": PEER_PART, "library": library, "kernel": kernel, "target_name": target,
        "spills": 1234, "code_bytes": 2048, "products": 16, "instructions_per_key": each,
        "library_instructions_per_key": whole, "sink": library == "anymla", "triton": "3.3",
        "ocloc": "26", "vllm": "0.0.1", **more,
    }  # fmt: skip


def test_both_libraries_stand_beside_each_other():
    lines = intel_peer_table(
        [
            row("vllm_xpu", "gather", "xpu_bmg", 2000, 5000),
            row("anymla", "decode_kernel", "xpu_pvc", 1500, 1500, spills=0),
            {"part": "another"},
        ]
    )
    assert lines[2:] == [
        "| xpu_pvc | anymla: decode_kernel | 0 | 2 | 16 | 1,500 | yes |",
        "| xpu_bmg | vllm_xpu: gather | 1,234 | 2 | 16 | 2,000 of 5,000 | left out |",
        "",
        "(triton-xpu 3.3, ocloc 26, vLLM 0.0.1)",
    ]
    assert intel_peer_table([]) == []
