"""What counts as the same code, and what does not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("triton")

from anymla.bench.report import read_lines
from lab import build_matrix, same_code
from lab.same_code import compare, normalised

PTX = """
.version 8.7
.func (.param .b32 retval0) gather_kernel_helper(
    .param .b32 gather_kernel_helper_param_0
)
.visible .entry gather_kernel(
    .param .u64 .ptr .global gather_kernel_param_0, // a comment
    .param .u32 gather_kernel_param_1
)
{
    .loc 1 20 3
    ld.param.b64 %rd1, [gather_kernel_param_0];
    call.uni (retval0), gather_kernel_helper, (param0);
    ret;
}
    .section .debug_str
"""


def test_names_lines_and_comments_do_not_count():
    renamed = PTX.replace("gather_kernel", "load_rows").replace(".loc 1 20 3", ".loc 7 1 1")
    assert normalised(PTX) == normalised(renamed)
    assert "gather_kernel(" not in normalised(PTX)
    assert normalised(PTX.replace(".debug_str", ".debug_loc")) == normalised(PTX)
    assert normalised(PTX.replace("    ret;", "$L__tmp4:\n    ret;\n.Ltmp7:")) == normalised(PTX)


def test_names_in_symbols_of_amd_assembly_do_not_count():
    code = "\t.type gather_kernel,@function\n\t.set .Lgather_kernel.num_vgpr, 12\n"
    assert normalised(code) == normalised(code.replace("gather_kernel", "load_rows"))
    assert normalised(code) != normalised(code.replace("12", "13"))


@pytest.mark.parametrize(
    ("old", "new"),
    [("param_0]", "param_1]"), ("ld.param.b64", "ld.param.b32"), ("ret;", "trap;")],
)
def test_instructions_and_operands_count(old, new):
    assert normalised(PTX) != normalised(PTX.replace(old, new))


def test_builds_are_paired_by_code_alone():
    def row(module, label, code):
        return {"module": module, "target": "sm_90", "label": label, "code": code}

    before = [row("a", "x", "1"), row("a", "y", "1"), row("a", "z", "2")]
    found = compare(before, [row("b", "x", "1"), row("b", "renamed", "2"), row("b", "new", "3")])
    assert (found.same, found.only_before, found.only_after) == (2, ["sm_90 a y"], ["sm_90 b new"])


def test_a_kernel_is_compiled_and_remembered(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

    def recorded(name):
        words = ["bench", "same-code", "record", name, "--target", "gfx942", "--cache", "cache"]
        words += ["--module", "norm_rope.triton_rope"]
        subprocess.run(
            [sys.executable, "-m", "anymla", *words], check=True, cwd=tmp_path, env=environment
        )
        return read_lines(tmp_path / name)

    first = recorded("first")
    assert first
    assert all(len(row["code"]) == 20 for row in first), first
    kept = sorted(path.read_text() for path in (tmp_path / "cache").iterdir())
    assert kept == sorted(row["code"] for row in first)
    assert recorded("again") == first


def test_codes_of_builds_that_are_compiled_together_are_kept_apart(tmp_path, monkeypatch):
    both_wrote, replace = threading.Barrier(2), Path.replace

    def late(path, to):
        both_wrote.wait(10)
        return replace(path, to)

    monkeypatch.setattr(Path, "replace", late)
    monkeypatch.setattr(build_matrix, "apart", lambda job, _: {"code": job.digest})
    jobs = [build_matrix.Job("m", "sm_90", i, "", f"digest{i}", None) for i in range(2)]
    assert [row["code"] for row in same_code.record(jobs, 2, tmp_path)] == ["digest0", "digest1"]
    kept = {path.name.split("-")[-1]: path.read_text() for path in tmp_path.iterdir()}
    assert kept == {"digest0": "digest0", "digest1": "digest1"}
