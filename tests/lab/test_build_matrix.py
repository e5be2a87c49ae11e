"""What a build must be to pass, and which recorded rows still hold."""

import dataclasses
import json

import pytest
from click.testing import CliRunner

from anymla.ops.device import TARGETS, has_triton
from lab import build_matrix
from lab.__main__ import main as command
from lab.build import Build, Judgement
from lab.build_matrix import judge

BUILT = {"built": True, "shared_bytes": 1024, "instructions": 10, "spills": 0, "matrix": []}
PLAIN = Build("plain", kernel=None, types={}, constants={})


def problem(target="sm_90", build=None, **changes):
    declared = dataclasses.replace(PLAIN, judgement=Judgement(**(build or {})))
    row = judge({**BUILT, **changes}, declared, TARGETS[target])
    assert row["ok"] == ("problem" not in row)
    return row.get("problem", "")


def test_a_build_fits_and_spills_no_more_than_declared():
    assert not problem()
    assert problem("sm_86", shared_bytes=100 * 1024) == "102400 bytes of shared memory, 101376 fit"
    assert not problem("sm_90", shared_bytes=100 * 1024)
    assert problem(spills=3) == "3 spills, 0 accepted"
    assert not problem(spills=3, build={"spills": 3})
    assert "no instruction" in problem(instructions=0)
    assert problem(built=False, error="CompilationError: no") == "CompilationError: no"


def test_intels_gpus_spill_nothing_and_arc_a_a_few_registers():
    assert problem("xpu_bmg", spills=1, build={"spills": 8}) == "1 spills, 0 accepted"
    assert not problem("xpu_dg2", spills=64)
    assert problem("xpu_dg2", spills=65, build={"spills": 100}) == "65 spills, 64 accepted"


def test_a_refusal_that_is_expected_must_be_that_refusal():
    refused = {"built": False, "error": "ValueError: type fp8e4nv not supported"}
    asked = {"build": {"fails": "fp8e4nv"}}
    assert not problem(**refused, **asked)
    assert problem(**asked) == "expected to fail: fp8e4nv"
    assert problem(built=False, error="TypeError: another", **asked) == "expected to fail: fp8e4nv"


@pytest.mark.parametrize(
    ("operands", "instruction", "others"),
    [
        ("bf16", "HMMA.16816.F32.BF16", ["HMMA.16816.F32", "QGMMA.64x64x32.F32.E4M3.E4M3"]),
        ("bf16", "HGMMA.64x64x16.F32.BF16", ["HGMMA.64x64x16.F32"]),
        ("bf16", "v_mfma_f32_16x16x16_bf16", ["v_mfma_f32_32x32x8_f16"]),
        ("bf16", "v_wmma_f32_16x16x16_bf16", ["v_wmma_f32_16x16x16_f16"]),
        ("bf16", "dpas.8x8:bf", ["dpas.8x8:hf", "dpas.8x8:tf32"]),
        ("fp16", "dpas.8x8:hf", ["dpas.8x8:bf"]),
        ("fp16", "HGMMA.64x64x16.F32", ["HGMMA.64x64x16.F32.BF16"]),
        ("fp16", "v_wmma_f32_16x16x16_f16", ["v_wmma_f32_16x16x16_bf16"]),
        ("e4m3", "QGMMA.64x64x32.F32.E4M3.E4M3", ["HGMMA.64x64x16.F32"]),
        ("e4m3", "v_mfma_f32_16x16x32_fp8_fp8", ["v_mfma_f32_16x16x16_bf16"]),
    ],
)
def test_operands_are_told_apart(operands, instruction, others):
    asked = {"build": {"matrix": operands}}
    assert not problem(matrix=[*others, instruction], **asked)
    assert problem(matrix=others, **asked) == f"no matrix-multiply instruction of {operands}"
    assert not problem(matrix=others, build={"matrix": True})


def test_shared_memory_is_synchronised_as_it_must_be():
    assert problem(unmet_arrivals=1) == "1 arrivals at barriers for warps that have not met"
    unread = "memory released to TMA 2 times while it is read"
    assert problem(unfenced_reads=2) == unread
    taken = "1 barriers whose memory the compiler gives to others"
    assert problem(idle_barriers=1) == taken
    assert not problem(unmet_arrivals=0, unfenced_reads=0, idle_barriers=0)


def test_products_of_warpgroups_run_several_at_a_time_unless_asked_otherwise():
    waited = "each of 104 products is waited for before the next, unasked"
    assert problem(products=104, product_waits=104, asked_waits=11) == waited
    assert not problem(products=104, product_waits=11, asked_waits=11)
    assert not problem(products=8, product_waits=8, asked_waits=8)
    assert not problem(products=1, product_waits=1, asked_waits=0)
    assert not problem(products=40)


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
def test_only_rows_that_passed_with_this_triton_hold():
    import triton

    from lab.build_matrix import recorded

    row = {"module": "m", "target": "sm_90", "digest": "d", "ok": True}
    row["triton"] = triton.__version__
    stale = [{**row, "ok": False}, {**row, "triton": "2.0"}]
    without = {name: value for name, value in row.items() if name != "digest"}
    assert not recorded([*stale, without])
    assert recorded([json.loads(json.dumps(row))]) == {("m", "sm_90", "d"): row}


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
@pytest.mark.parametrize("part", [(), ("--module", "m")])
def test_a_target_whose_kernels_are_all_built_loses_its_other_rows(monkeypatch, tmp_path, part):
    import triton

    def job(digest, label):
        return build_matrix.Job("m", "sm_90", 0, label, digest, PLAIN)

    def row(target, digest):
        known = {"module": "m", "target": target, "number": 0, "label": "old", "digest": digest}
        return {**known, "triton": triton.__version__, "ok": True}

    file = tmp_path / "rows.jsonl"
    others = [row("sm_80", "stale"), row("sm_90", "stale")]
    file.write_text("".join(json.dumps(each) + "\n" for each in [*others, row("sm_90", "same")]))
    monkeypatch.setattr(build_matrix, "jobs", lambda *_, **__: [job("same", "a"), job("new", "b")])
    monkeypatch.setattr(
        build_matrix,
        "run",
        lambda jobs, _: ({**each.row, "triton": triton.__version__, "ok": True} for each in jobs),
    )
    asked = ["build-matrix", "--target", "sm_90", "--json", str(file), *part]
    done = CliRunner().invoke(command, asked)
    assert not done.exception, done.output
    left = {
        (each["target"], each["digest"]): each
        for each in map(json.loads, file.read_text().splitlines())
    }
    stale = {("sm_90", "stale")} if part else set()
    assert {*left} == {("sm_80", "stale"), ("sm_90", "same"), ("sm_90", "new"), *stale}
    assert left["sm_90", "new"]["label"] == "b"
    assert "commit" in left["sm_90", "new"]
    assert left["sm_90", "same"]["label"] == ("old" if part else "a")
