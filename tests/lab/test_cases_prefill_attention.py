from __future__ import annotations

import pytest
import torch

from anymla.bench.runner import run
from anymla.formats.fp8_block import dequantize_fp8_rows
from anymla.ops.attention import sparse_attention_rows
from lab.cases import prefill_attention as family
from lab.cases.prefill_attention import (
    LONG_SHAPES,
    SHAPES,
    Call,
    GatherThenAttend,
    ListedRows,
    PrefillCase,
    pipeline,
)
from lab.peers.flash_mla import FlashMla

SMALL = (
    PrefillCase("window", 9, 3, 300),
    PrefillCase("selected", 12, 2, 600, 64),
    PrefillCase("scattered", 12, 2, 600, 64),
    PrefillCase("selected", 30, 2, 30, 16),
    PrefillCase("all", 12, 70, 800),
    PrefillCase("all", 40, 2, 40),
)


class Module:
    """What the peer's module offers."""

    @staticmethod
    def flash_mla_sparse_fwd(q, kv, listed, scale, width, sink, lengths):
        assert kv.shape[1] == listed.shape[1] == 1
        assert scale == 512**-0.5
        return by_lists(q, kv[:, 0], listed[:, 0], lengths, sink), None, None


def by_lists(q, rows, listed, lengths, sink):
    assert listed.shape[1] % 128 == 0
    assert ((listed >= 0).sum(1) == lengths).all()
    assert q.shape[1] % 64 == 0
    return sparse_attention_rows(q, rows, listed, lengths, sink=sink, backend="torch")[0]


def without_sgl(fields):
    """Return the recorded fields but those of a peer that is not among ``PEERS``."""
    return {field for field in fields if not field.startswith("sgl_flash_mla")}


PEER = FlashMla(lambda _: Module).rows
PEERS = family.prefill_peers([FlashMla(lambda _: Module)])


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.label)
def test_both_sides_do_the_same(case):
    call = Call(case, torch.device("cpu"))
    ours = call.ours("torch").clone()
    theirs = call.peer(PEER)()
    assert call.error(ours) < 3e-3
    assert call.error(theirs) < 3e-3
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    "case", [PrefillCase(c.kind, c.tokens, 64, c.context, c.topk) for c in SMALL[:5:2]]
)
def test_gather_then_attend_does_the_same(case):
    call = Call(case, torch.device("cpu"))
    other = GatherThenAttend(call, PEER)
    assert call.error(other.attend()) < 3e-3
    codes, scales = other.quantised()
    mine, factors = pipeline(call, "torch", "fp8")()
    # Both round bfloat16 heads to e4m3, where neighbouring codes are up to an eighth apart.
    torch.testing.assert_close(
        dequantize_fp8_rows(codes.view(torch.uint8), scales, torch.float32),
        dequantize_fp8_rows(mine.view(torch.uint8), factors, torch.float32),
        atol=0.05,
        rtol=0.125,
    )


def test_a_roofline_is_of_bytes_or_of_operations():
    call = Call(SMALL[1], torch.device("cpu"))
    keys = sum(
        min(position + 1, 128) + min((position + 1) // 4, 64) for position in range(588, 600)
    )
    assert call.roofline_us(1e30, 1e12) == pytest.approx(4 * 2 * 512 * keys * 1e-6)
    moved = 2 * 2 * 12 * 2 * 512 + 2 * 512 * (139 + 150) + 12 * 4 * (4 + 64)
    assert call.roofline_us(1e12, 1e30) == pytest.approx(moved * 1e-6)


def test_the_cases_are_those_of_the_table():
    every = SHAPES + LONG_SHAPES
    assert len(set(every)) == len(every)
    assert {case.tokens for case in every} == {1024, 4096, 32768}
    assert {case.heads for case in every} == {16, 64, 128}
    assert {case.kind for case in every} == {"window", "selected", "scattered", "all"}


@pytest.mark.parametrize(("ratio", "met"), [(1.05, True), (1.04, False)])
def test_a_row_says_what_it_always_said(ratio, met, scripted, recorded_fields):
    clock = scripted(10, 3, 11, 4, 10 * ratio)
    (result,) = run(family.cases(SMALL[1:2], "torch", PEERS), clock)
    assert set(result.values) == without_sgl(recorded_fields("prefill_h200", family.PART))
    assert result.values["error"] < 3e-3
    assert result.values["peer_error"] < 3e-3
    assert result.values["fp8_ratio"] == pytest.approx((10 * ratio + 4) / 11)
    assert (result.target, result.met) == ("1.05x", met)
    assert clock.seen == [(2, 12)] * 5 + ["release"]


def test_without_a_peer_nothing_is_judged(clock):
    alone = [*family.cases(SMALL[:1], "torch", {}), *family.listed_cases(LISTED, "torch", {})]
    for result in run(alone, clock):
        assert (result.target, result.met) == (None, None)
        assert "ratio" not in result.values


LISTED = (ListedRows(6, 64, 128, 500),)


def test_pipelines_and_listed_rows_say_what_they_always_said(scripted, recorded_fields):
    case = PrefillCase("selected", 12, 64, 600, 64)
    cases = [*family.pipeline_cases([case], "torch", PEERS)]
    cases += family.listed_cases(LISTED, "torch", PEERS)
    bf16, fp8, listed = run(cases, scripted(10, 12, 3, 10, 11, 3, 10, 11))
    for result in (bf16, fp8):
        assert set(result.values) == recorded_fields("prefill_h200", result.part)
    assert (bf16.met, fp8.met, listed.met) == (True, False, True)
    assert set(listed.values) == without_sgl(recorded_fields("prefill_h200", family.LISTS))
    assert listed.case == "h64 T=6 K=128 of 500 rows"
