"""What a row of decode attention beside FlashMLA says; timing needs a GPU."""

import pytest

from anymla.bench.flash_mla_decode import Decode
from anymla.cli.bench_attention import as_result, end_result, v32_result


@pytest.mark.parametrize(
    ("heads", "ratio", "met"), [(64, 1.01, True), (64, 0.97, False), (16, 1.5, False)]
)
def test_a_shape_that_loses_is_said_to(heads, ratio, met) -> None:
    shape = Decode(8, 1, heads, 512)
    result = as_result(shape, {"label": shape.label, "microseconds": 10.0, "ratio": ratio})
    assert (result.case, result.met) == (f"h{heads} b8 s_q1 128+512", met)
    assert "times FlashMLA's speed" in str(result.target)


def test_without_flash_mla_nothing_is_judged() -> None:
    shape = Decode(8, 1, 64, 512)
    result = as_result(shape, {"label": shape.label, "microseconds": 10.0})
    assert (result.target, result.met) == (None, None)


def test_rows_of_other_benchmarks_say_whether_they_reach_what_was_asked():
    row = {"label": "V3.2 h128", "ratio": 0.95}
    assert v32_result(row).met
    assert v32_result({**row, "ratio": 0.89}).met is False
    assert v32_result({"label": "V3.2 h128"}).met is None
    end = {"label": "h64", "same_bytes": True, "microseconds": 2.0, "apart_microseconds": 2.0}
    assert end_result(end).met
    assert end_result({**end, "same_bytes": False}).met is False
    assert end_result({**end, "microseconds": 2.1}).met is False
