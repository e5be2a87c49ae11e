"""Sums of rows that were timed beside peers, on rows that are made up."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from lab.cases import sparse_attention
from lab.ratios import _RANDOM, decode_lines, group, lines, main


def drawn(heads, ours, theirs, newest, draw=3, number=0, lengths=True):
    return {
        "part": _RANDOM, "case": f"h{heads} b1 s_q1 128", "heads": heads, "draw": draw,
        "number": number, "lengths": lengths, "error": 1e-3, "microseconds": ours,
        "flash_mla_microseconds": theirs, "sgl_flash_mla_microseconds": newest,
        "ratio": min(theirs, newest) / ours,
    }  # fmt: skip


def test_the_part_is_that_of_the_cases():
    assert _RANDOM == sparse_attention.RANDOM
    groups = {heads: group(heads) for heads in sparse_attention.RANDOM_HEADS}
    assert {heads for heads, name in groups.items() if name == "up to 40 heads"} == {
        8, 16, 24, 32, 40,
    }  # fmt: skip
    assert {heads for heads, name in groups.items() if name == "64 and 128 heads"} == {64, 128}


def test_decode_is_by_group_and_draw_and_the_slowest_come_first():
    rows = [
        drawn(64, 10.0, 20.0, 16.0),
        drawn(128, 10.0, 9.0, 12.0, draw=4, number=7, lengths=False),
        drawn(16, 10.0, 40.0, 30.0),
    ]
    whole, few, first, second = decode_lines(rows, slowest=2)
    assert whole == (
        "64 and 128 heads: 2 shapes, 1.200 (by draw 1.600, 0.900; FlashMLA 1.342, sgl 1.386), "
        "least 0.900, 1 below 1, error 1.00e-03"
    )
    assert few.startswith("up to 40 heads: 1 shapes, 3.000 ")
    said = "h128 b1 s_q1 128, no lengths (seed 4, 7): 10.0 us, FlashMLA 9.0, sgl 12.0"
    assert first == f"  0.900  {said}"
    assert second.startswith("  1.600  h64 ")


def test_a_peer_that_was_not_timed_is_not_named():
    row = drawn(64, 10.0, 20.0, 16.0)
    del row["sgl_flash_mla_microseconds"]
    (said, slowest) = decode_lines([row])
    assert "FlashMLA 2.000)" in said
    assert "sgl" not in said + slowest


def test_prefill_has_rates_and_experts_reasons(tmp_path):
    prefill = {
        "part": "flash_mla_sparse_fwd", "case": "h64", "us": 100.0, "teraflops": 600.0,
        "peer_us": 120.0, "sgl_flash_mla_us": 110.0, "ratio": 1.1,
    }  # fmt: skip
    experts = {
        "part": "experts", "case": "pro", "us": 100.0, "humming_us": 90.0,
        "humming_token_absent": "no compiler",
    }  # fmt: skip
    found = list(lines([experts, prefill]))
    assert found == [
        "prefill attention",
        "  1.100  h64: 100 us (600 TFLOP/s), FlashMLA 120 (500), sgl 110 (545)",
        "experts",
        "  pro: 100 us, Humming 90 (0.900), a scale a token: no compiler",
    ]
    files = []
    for number, row in enumerate([experts, prefill]):
        files.append(tmp_path / f"{number}.jsonl")
        files[-1].write_text(json.dumps(row) + "\n", encoding="utf-8")
    done = CliRunner().invoke(main, [str(file) for file in files])
    assert done.output.splitlines() == found


@pytest.mark.parametrize("row", [{"part": "device", "tflops": 1.0}, {"part": _RANDOM}])
def test_rows_beside_no_peer_say_nothing(row):
    assert not list(lines([row]))
