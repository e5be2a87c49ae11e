"""Kernels around the peers of the experts, and triton_kernels' layouts where it is installed."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is an extra")
import triton.language as tl  # noqa: E402

from anymla.ops.device import INTERPRETED  # noqa: E402
from anymla.ops.moe import swiglu  # noqa: E402
from lab.peers._triton_experts import (  # noqa: E402
    chosen_bits,
    interleaved_swiglu,
    weighted_sum,
)
from lab.peers.triton_kernels import TritonKernels  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
runs_kernels = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU or TRITON_INTERPRET=1"
)


@runs_kernels
@pytest.mark.parametrize("experts", [32, 48, 256])
def test_a_bit_for_every_chosen_expert(experts):
    ids = torch.rand(70, experts).argsort(1)[:, :6].int()
    ids[3], ids[69, 2] = torch.tensor([31, 0, 5, 1, 30, 2]), -1
    weights = torch.rand(70, 6)
    bits, wide_ids, wide_weights = chosen_bits(ids.to(DEVICE), weights.to(DEVICE), experts)
    assert bits.shape == (70, -(-experts // 32))
    words = bits.cpu().long() & 0xFFFFFFFF
    expert = torch.arange(experts)
    found = (words[:, expert // 32] >> expert % 32 & 1).bool()
    assert torch.equal(found, (ids[..., None] == expert).any(1))
    assert torch.equal(wide_ids.cpu()[:, :6], ids.short())
    assert torch.equal(wide_weights.cpu()[:, :6], weights)
    assert (wide_ids[:, 6:] == -1).all()
    assert (wide_weights[:, 6:] == -1).all()


@runs_kernels
def test_the_weighted_sum_of_a_tokens_rows():
    rows, weights = torch.randn(12, 1500).bfloat16(), torch.rand(2, 6)
    got = weighted_sum(rows.to(DEVICE), weights.to(DEVICE)).cpu()
    want = (rows.view(2, 6, -1).double() * weights[..., None].double()).sum(1)
    assert ((got.double() - want).abs() <= 2**-8 * want.abs() + 1e-6).all()


@triton.jit
def _activation(rows, out, limit, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    half = tl.arange(0, WIDTH // 2)
    given = tl.load(rows + row[:, None] * WIDTH + column[None, :])
    got = interleaved_swiglu(given, limit)
    tl.store(out + row[:, None] * (WIDTH // 2) + half[None, :], got)


@runs_kernels
def test_the_fused_activation_is_this_packages():
    gate, up = 8 * torch.randn(2, 4, 16)
    rows = torch.stack((gate, up), -1).flatten(1).to(DEVICE)
    out = torch.empty(4, 16, device=DEVICE)
    _activation[(1,)](rows, out, 10.0, 4, 32)
    torch.testing.assert_close(out.cpu(), swiglu(gate, up, 10.0, backend="reference"))


def test_weights_come_back_from_triton_kernels_layouts():
    pytest.importorskip("triton_kernels.matmul_ogs", reason="vLLM ships it")
    codes = torch.randint(0, 256, (20, 512, 128), dtype=torch.uint8)
    scales = torch.randint(110, 120, (20, 512, 8), dtype=torch.uint8)
    for packed, given in zip(TritonKernels().layouts(codes, scales), (codes, scales), strict=True):
        assert packed.data.stride(1) == 1
        assert torch.equal(packed.storage.layout.unswizzle_data(packed.data).mT, given)
