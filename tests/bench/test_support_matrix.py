"""The support table says what the recorded evidence says, and no more."""

import json

from anymla.bench.page.newest import newest
from anymla.bench.page.rows import load_rows
from anymla.bench.support_matrix import support_table


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
            json.dumps({"family": family, "target": "sm_90", "passed": 3, "failed": failed})
            for family, failed in (("kv_cache", 2), ("moe", 0), ("kv_cache", 0), ("moe", 1))
        )
    )
    table = "\n".join(support_table(newest(load_rows(tmp_path))))
    assert "**run**, built 1 of 2" in table
    assert "| run, 1 of 4 failed, built 1 |" in table
    assert "| shared | - | - | - | built 1 |" in table
