"""The support table says what the recorded evidence says, and no more."""

import json

from lab.page.intel import intel_table
from lab.page.newest import newest
from lab.page.rows import load_rows
from lab.page.support import support_table


def test_the_last_run_counts_and_failures_are_counted(tmp_path):
    builds = [("kv_cache.triton_x", True), ("kv_cache.triton_x", False), ("moe.triton_x", True)]
    builds += [("_triton_x", True)]
    (tmp_path / "build_matrix.jsonl").write_text(
        "\n".join(
            json.dumps(
                {
                    "module": f"anymla.ops.{module}",
                    "target": "sm_90",
                    "label": f"kernel {number}",
                    "ok": ok,
                }
            )
            for number, (module, ok) in enumerate(builds)
        )
    )
    (tmp_path / "gpu_tests.jsonl").write_text(
        "\n".join(
            json.dumps(
                {"family": family, "target": "sm_90", "passed": 3, "failed": failed, "device": "x"}
            )
            for family, failed in (("kv_cache", 2), ("moe", 0), ("kv_cache", 0), ("moe", 1))
        )
    )
    table = "\n".join(support_table(newest(load_rows(tmp_path))))
    assert "**run**, built 1 of 2" in table
    assert "| run, 1 of 4 failed, built 1 |" in table
    assert "| shared | built 1 |" in table
    assert table.startswith("| operations | sm_90 |")


def test_what_stood_in_for_a_target_is_executed(tmp_path):
    builds = [
        {"module": f"anymla.ops.{family}.triton_x", "target": target, "label": "k", "ok": True}
        for family in ("moe", "kv_cache") for target in ("sm_80", "sm_86")
    ]  # fmt: skip
    (tmp_path / "build_matrix.jsonl").write_text("\n".join(map(json.dumps, builds)))
    runs = [
        {"family": "all", "target": "sm_80", "passed": 3, "failed": 0},
        {"family": "moe", "target": "sm_80", "passed": 2, "failed": 1},
    ]
    runs = [row | {"device": "NVIDIA H200 as sm_80"} for row in runs]
    (tmp_path / "gpu_tests.jsonl").write_text("\n".join(map(json.dumps, runs)))
    lines = support_table(newest(load_rows(tmp_path)))
    assert "| kv_cache | **executed**, built 1 | built 1 |" in lines
    assert "| moe | executed, 1 of 3 failed, built 1 | built 1 |" in lines


def build(target, label, *, built=True, **facts):
    row = {"module": "anymla.ops.moe.triton_x", "target": target, "label": label, "ok": built}
    row |= {"built": built, "triton": "3.3.0b1", "ocloc": "26.27"}
    numbers = {"spills": 0, "code_bytes": 2048, "private_bytes": 0, "products": 0, **facts}
    return row | numbers if built else row


def test_intels_builds_are_told_by_their_worst():
    assert intel_table([build("sm_90", "route_kernel one")]) == []
    table = intel_table(
        [
            build("xpu_pvc", "route_kernel one"),
            build("xpu_pvc", "route_kernel two", spills=7, products=48, private_bytes=512),
            build("xpu_pvc", "down_kernel one", built=False),
            build("xpu_bmg", "route_kernel one", code_bytes=73344),
        ]
    )
    assert table == [
        "| kernel | xpu_pvc | xpu_bmg |",
        "|---|---|---|",
        "| moe: down_kernel | not built: 0 of 1 | - |",
        "| moe: route_kernel | 7 spilled, 2 KiB, 48 DPAS, 0.5 KiB private, of 2 "
        "| no spill, 72 KiB, of 1 |",
        "",
        "(triton-xpu 3.3.0b1, ocloc 26.27)",
    ]
