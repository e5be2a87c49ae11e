from __future__ import annotations

import dataclasses

import pytest
import torch
from paged import ALL_BACKENDS, use_backend
from prefill_cases import prefill

from anymla.formats.fp8_block import dequantize_fp8_rows
from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops.attention import (
    CacheRows,
    InverseRopeQuant,
    prefill_attention,
    sparse_attention,
)
from anymla.ops.linear import inverse_rope_fp8_quant
from anymla.testing.tolerance import relative_l2

POSITIONS = 40


@pytest.fixture(params=ALL_BACKENDS)
def backend(request, monkeypatch):
    return use_backend(request.param, monkeypatch)


def turning(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.randn(POSITIONS, 32)
    table = torch.cat((angles.cos(), angles.sin()), 1)
    return torch.randint(0, POSITIONS, (tokens,)), table


def check(got, out, positions, table, groups):
    """Against the float64 output, rotated and quantised by the reference."""
    want = inverse_rope_fp8_quant(
        out.float(), positions, table, n_groups=groups, backend="reference"
    )
    assert got[0].shape == want[0].shape
    assert got[0].dtype == torch.float8_e4m3fn
    assert got[1].shape == want[1].shape
    values, expected = (
        dequantize_fp8_rows(codes.view(torch.uint8), scales, torch.float32)
        for codes, scales in (got, want)
    )
    # A code holds 4 bits; a bfloat16 rounding before it moves some by one.
    assert relative_l2(values, expected) < 2.5e-2
    exact = float((values - out.float().reshape(values.shape)).norm() / expected.norm())
    assert exact > 0.01, "nothing has been rotated"


@pytest.mark.parametrize("listed", [False, True], ids=["ranges", "lists"])
def test_prefill(backend, listed):
    tokens = 2 if backend == "triton" else 12
    case = prefill(
        4, tokens=tokens, heads=4, dtype=torch.bfloat16, listed=listed, entries=40, window=64
    )
    positions, table = turning(tokens)
    got = case.run(backend, epilogue=InverseRopeQuant(positions, table, 2))
    check(got, case.expected()[0], positions, table, 2)


def test_decode(backend):
    tokens = 2 if backend == "triton" else 7
    q = torch.randn(tokens, 4, 512).bfloat16()
    layout = get_layout(MAIN_FP8)
    cache = layout.allocate(3, 64)
    layout.write(cache, torch.arange(192), torch.randn(192, 512))
    indices = torch.randint(0, 192, (tokens, 33)).int()
    positions, table = turning(tokens)
    sink = torch.randn(4)
    got = sparse_attention(
        q,
        [CacheRows(cache, MAIN_FP8, indices)],
        sink=sink,
        backend=backend,
        epilogue=InverseRopeQuant(positions, table, 1),
    )
    out, _ = sparse_attention(
        q.double(), [CacheRows(cache, MAIN_FP8, indices)], sink=sink, backend="reference"
    )
    check(got, out, positions, table, 1)


@pytest.mark.parametrize(
    ("dtype", "merged"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, True)],
)
def test_the_combine_stores_the_bytes_of_separate_calls(dtype, merged):
    pytest.importorskip("triton")
    q = torch.randn(2, 3, 512).to(dtype)
    layout = get_layout(MAIN_FP8)
    cache = layout.allocate(2, 64)
    layout.write(cache, torch.arange(128), torch.randn(128, 512))
    indices = torch.randint(0, 128, (2, 70)).int()
    lengths = torch.tensor([0, 70]).int()
    positions, table = turning(2)
    keywords = {"sink": torch.randn(3), "batch_invariant": merged, "backend": "triton"}
    got = sparse_attention(
        q,
        [CacheRows(cache, MAIN_FP8, indices, lengths)],
        epilogue=InverseRopeQuant(positions, table, 3),
        **keywords,
    )
    out, _ = sparse_attention(q, [CacheRows(cache, MAIN_FP8, indices, lengths)], **keywords)
    want = inverse_rope_fp8_quant(out, positions, table, n_groups=3, backend="triton")
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(got[1], want[1])


def test_arguments_are_checked():
    case = prefill(4, tokens=2, heads=4, dtype=torch.bfloat16, listed=False, entries=8)
    positions, table = turning(2)
    with pytest.raises(ValueError, match="multiple of 3 groups"):
        prefill_attention(
            case.q,
            case.rows,
            case.ranges,
            None,
            window=8,
            epilogue=InverseRopeQuant(positions, table, 3),
        )
    wrong = dataclasses.replace(case, ranges=case.ranges.long())
    with pytest.raises(TypeError, match="ranges must be int32"):
        prefill_attention(
            case.q,
            case.rows,
            wrong.ranges,
            None,
            window=8,
            epilogue=InverseRopeQuant(positions, table, 2),
        )
