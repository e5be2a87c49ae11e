from __future__ import annotations

import pytest
import torch

from anymla.bench.prefill import CASES, LONG_CASES, Call, PrefillCase, flash_mla_peer
from anymla.bench.prefill_pipeline import GatherThenAttend, ours
from anymla.formats.fp8_block import dequantize_fp8_rows
from anymla.ops.sparse_attention import sparse_attention_rows

SMALL = (
    PrefillCase("window", 9, 3, 300),
    PrefillCase("selected", 12, 2, 600, 64),
    PrefillCase("scattered", 12, 2, 600, 64),
    PrefillCase("selected", 30, 2, 30, 16),
    PrefillCase("all", 12, 70, 800),
    PrefillCase("all", 40, 2, 40),
)


class FlashMla:
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


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.label)
def test_both_sides_do_the_same(case):
    call = Call(case, device="cpu")
    ours = call.ours("torch").clone()
    theirs = call.peer(flash_mla_peer(FlashMla))()
    assert call.error(ours) < 3e-3
    assert call.error(theirs) < 3e-3
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    "case", [PrefillCase(c.kind, c.tokens, 64, c.context, c.topk) for c in SMALL[:5:2]]
)
def test_gather_then_attend_does_the_same(case):
    call = Call(case, device="cpu")
    other = GatherThenAttend(call, flash_mla_peer(FlashMla))
    assert call.error(other.attend()) < 3e-3
    codes, scales = other.quantised()
    mine, factors = ours(call, "torch", "fp8")()
    # Both round bfloat16 heads to e4m3, where neighbouring codes are up to an eighth apart.
    torch.testing.assert_close(
        dequantize_fp8_rows(codes.view(torch.uint8), scales, torch.float32),
        dequantize_fp8_rows(mine.view(torch.uint8), factors, torch.float32),
        atol=0.05,
        rtol=0.125,
    )


def test_a_roofline_is_of_bytes_or_of_operations():
    call = Call(SMALL[1], device="cpu")
    keys = sum(
        min(position + 1, 128) + min((position + 1) // 4, 64) for position in range(588, 600)
    )
    assert call.roofline_us(1e30, 1e12) == pytest.approx(4 * 2 * 512 * keys * 1e-6)
    moved = 2 * 2 * 12 * 2 * 512 + 2 * 512 * (139 + 150) + 12 * 4 * (4 + 64)
    assert call.roofline_us(1e12, 1e30) == pytest.approx(moved * 1e-6)


def test_the_cases_are_those_of_the_table():
    every = CASES + LONG_CASES
    assert len(set(every)) == len(every)
    assert {case.tokens for case in every} == {1024, 4096, 32768}
    assert {case.heads for case in every} == {16, 64, 128}
    assert {case.kind for case in every} == {"window", "selected", "scattered", "all"}
