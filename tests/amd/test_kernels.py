"""Parts of Triton's language, compiled for AMD and interpreted, beside torch."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is an extra")
import triton.language as tl  # noqa: E402


@triton.jit
def divide_kernel(x, y, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) / tl.load(y + at))


@triton.jit
def dot_kernel(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N), tl.arange(0, K)
    left, right = tl.load(a + m * K + k[None, :]), tl.load(b + k[:, None] * N + n[None, :])
    tl.store(out + m * N + n[None, :], tl.dot(left, right, input_precision="ieee"))


@triton.jit
def lanes_kernel(x, sums, running, ordered, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = rows[:, None] * COLUMNS + columns[None, :]
    values = tl.load(x + at)
    tl.store(sums + columns, tl.sum(values, 0))
    tl.store(running + at, tl.cumsum(values, 1))
    tl.store(ordered + at, tl.sort(values, 1))


@triton.jit
def count_kernel(x, counts, ends, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at)
    tl.atomic_add(counts + values, 1)
    tl.atomic_max(ends + values, at)


@triton.jit
def beyond_kernel(x, out, distance, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + distance.to(tl.int64) * BLOCK + at))


def test_division_is_that_of_ieee_754(device):
    """Of all magnitudes, subnormal numbers, infinities and NaN: the bits of torch's."""
    torch.manual_seed(0)
    x, y = (torch.randint(-(2**31), 2**31 - 1, (2048,)).int().view(torch.float32) for _ in range(2))
    special = torch.tensor([0.0, -0.0, 1.0, 3e38, 1e-45, 2e-38, torch.inf, torch.nan])
    x[:64], y[:64] = special.repeat_interleave(8), special.repeat(8)
    out = torch.empty(2048)
    divide_kernel[(4,)](x, y, out, BLOCK=512)
    want = x / y
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("m", "n", "k", "warps"), [(16, 32, 64, 1), (64, 64, 32, 4)])
def test_products_of_matrices(device, kind, m, n, k, warps):
    torch.manual_seed(0)
    a, b, out = torch.randn(m, k).to(kind), torch.randn(k, n).to(kind), torch.empty(m, n)
    dot_kernel[(1,)](a, b, out, m, n, k, num_warps=warps)
    torch.testing.assert_close(out, (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-5)


def test_lanes_and_waves_exchange_values(device):
    torch.manual_seed(0)
    x = torch.randint(-1000, 1000, (16, 128)).int()
    sums, running, ordered = torch.empty(128).int(), torch.empty_like(x), torch.empty_like(x)
    lanes_kernel[(1,)](x, sums, running, ordered, 16, 128)
    assert torch.equal(sums, x.sum(0).int())
    assert torch.equal(running, x.cumsum(1).int())
    assert torch.equal(ordered, x.sort(1).values)


def test_atomics(device):
    torch.manual_seed(0)
    x = torch.randint(0, 8, (1024,)).int()
    counts, ends = torch.zeros(8).int(), torch.full((8,), -1).int()
    count_kernel[(4,)](x, counts, ends, BLOCK=256)
    assert torch.equal(counts, x.long().bincount(minlength=8).int())
    assert ends.tolist() == [int((x == value).nonzero().max()) for value in range(8)]


def test_addresses_outside_of_tensors_are_faults(device):
    from crossrun.amd import Fault

    x, out = torch.randn(256), torch.empty(256)
    beyond_kernel[(1,)](x, out, 0, BLOCK=256)
    assert torch.equal(x, out)
    with pytest.raises(
        Fault, match=r"beyond_kernel, test_kernels.py:\d+:.*outside of every tensor"
    ):
        beyond_kernel[(1,)](x, out, 1 << 20, BLOCK=256)
