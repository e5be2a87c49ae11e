"""Evidence counts a test for the family that it is about."""

from lab.gpu_record import rows

REPORT = """<testsuites><testsuite>
<testcase classname="tests.ops.test_kv_cache" name="test_a[triton]"/>
<testcase classname="tests.ops.test_device_steps" name="test_replayed[3-kv_cache insert]"/>
<testcase classname="tests.ops.test_device_steps" name="test_replayed[3-moe]"><failure/></testcase>
<testcase classname="tests.ops.test_sparse_attention" name="test_b"><skipped/></testcase>
<testcase classname="tests.test_conformance" name="test_case[L1-triton]"/>
</testsuite></testsuites>"""


def test_rows_by_family(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    found = {row.pop("family"): row for row in rows(report, {"commit": "c"})}
    assert found == {
        "kv_cache": {"passed": 2, "failed": 0, "skipped": 0, "commit": "c"},
        "moe": {"passed": 0, "failed": 1, "skipped": 0, "commit": "c"},
        "sparse_attention": {"passed": 0, "failed": 0, "skipped": 1, "commit": "c"},
        "conformance": {"passed": 1, "failed": 0, "skipped": 0, "commit": "c"},
    }
