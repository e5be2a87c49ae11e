"""What numba's products of few tokens promise beyond the contract."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anymla.formats.fp8_block import dequantize_fp8_weight, quantize_fp8_weight
from anymla.formats.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from anymla.ops.device import numba_problem
from anymla.ops.linear import fp8_block_linear, mxfp4_linear
from anymla.ops.linear.config import MAX_NUMBA_TOKENS
from anymla.ops.registry import BackendUnavailable
from anymla.testing.tolerance import accumulation, assert_close, ulps

pytestmark = pytest.mark.skipif(bool(numba_problem()), reason=numba_problem() or "-")

KINDS = ("fp8", "fp8 in fp32 scales", "mxfp4")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def weight_of(kind, rows, columns):
    """A stored weight, its float64 values and the operation that multiplies by it."""
    dense = torch.randn(rows, columns) * (torch.randn(rows, 1) * 3).exp2()
    if kind == "mxfp4":
        stored = quantize_mxfp4(dense)
        return stored, dequantize_mxfp4(*stored, torch.float64), mxfp4_linear
    stored = quantize_fp8_weight(dense, "ue8m0" if kind == "fp8" else "fp32")
    return stored, dequantize_fp8_weight(*stored, torch.float64), fp8_block_linear


@pytest.fixture(params=["this processor", "any processor"])
def processor(request, monkeypatch):
    """With bfloat16 products, if it has them, and as if it had none."""
    from anymla.ops import _numba_gemm

    if request.param == "any processor":
        monkeypatch.setattr(_numba_gemm, "has_bf16_dot", lambda: False)
    elif not _numba_gemm.has_bf16_dot():
        pytest.skip("this processor has no AVX512-BF16")


@given(
    seed=st.integers(0, 2**20),
    tokens=st.integers(0, 20),
    rows=st.sampled_from([1, 2, 3, 7, 128, 131, 200]),
    columns=st.sampled_from([32, 96, 128, 160, 416]),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(FLOATS),
)
def test_products(seed, tokens, rows, columns, kind, dtype):
    torch.manual_seed(seed)
    stored, values, run = weight_of(kind, rows, columns)
    x = torch.randn(tokens, columns).to(dtype)
    out = run(x, *stored, backend="numba")
    assert out.dtype == dtype
    error = accumulation(columns, torch.float32)
    rounded = ulps(dtype, 0.5) + accumulation(1, torch.float32)
    magnitude = x.double().abs() @ values.abs().T
    assert_close(out, x.double() @ values.T, atol=error, rtol=rounded, scale=magnitude)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("quantize", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(processor, kind, dtype, quantize):
    """Bit for bit, whichever tile of tokens and rows it falls into."""
    stored, _, run = weight_of(kind, 203, 416)
    x = torch.randn(23, 416).to(dtype)
    given = {"quantize_activations": quantize, "backend": "numba"}
    whole = run(x, *stored, **given)
    for tokens in range(1, 17):
        for first in (0, 23 - tokens):
            part = slice(first, first + tokens)
            assert torch.equal(run(x[part], *stored, **given), whole[part]), tokens


@pytest.mark.parametrize("kind", KINDS)
def test_results_do_not_depend_on_threads(processor, kind):
    stored, _, run = weight_of(kind, 2000, 2048)
    x = torch.randn(3, 2048).bfloat16()
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(run(x, *stored, backend="numba"))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
@pytest.mark.parametrize("byte", [0, 3, 31, 32, 127, 239, 240, 241, 245])
def test_scale_bytes(processor, kind, byte):
    """Bytes that leave bfloat16's normal numbers are multiplied in float32."""
    stored, _, run = weight_of(kind, 40, 128)
    stored[1].fill_(byte)
    decode = dequantize_mxfp4 if kind == "mxfp4" else dequantize_fp8_weight
    want = decode(*stored, torch.float64).T
    out = run(torch.eye(128).bfloat16(), *stored, backend="numba")
    normal = want.abs() >= 2.0**-126
    assert torch.equal(out[normal], want.bfloat16()[normal])
    assert (out[~normal].abs() <= 2.0**-126).all()


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_scales_that_are_no_number(processor, kind):
    stored, _, run = weight_of(kind, 256, 160)
    stored[1][1, -1] = 255
    out = run(torch.ones(3, 160).bfloat16(), *stored, backend="numba")
    hit = slice(128, 256) if kind == "fp8" else slice(1, 2)
    missed = torch.ones(256, dtype=torch.bool)
    missed[hit] = False
    assert out[:, hit].isnan().all()
    assert out[:, missed].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_every_code(processor, kind):
    """All 256 bytes, at every place of a group of channels and behind the last whole block."""
    stored, _, run = weight_of(kind, 256, 160)
    places = torch.arange(stored[0].shape[1])
    stored[0].copy_((torch.arange(256).unsqueeze(1) + places).to(torch.uint8))
    if kind != "mxfp4":
        stored[0][(stored[0] & 0x7F) == 0x7F] = 0x7E
    decode = dequantize_mxfp4 if kind == "mxfp4" else dequantize_fp8_weight
    want = decode(*stored, torch.float32).T
    for dtype in (torch.bfloat16, torch.float32):
        out = run(torch.eye(160).to(dtype), *stored, backend="numba")
        assert torch.equal(out, want.to(dtype))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("column", [0, 127, 159])
def test_codes_that_are_no_number(processor, code, column):
    stored, _, run = weight_of("fp8", 140, 160)
    stored[0][131, column] = code
    for tokens in (1, 2, 4, 8):
        out = run(torch.randn(tokens, 160).bfloat16(), *stored, backend="numba")
        assert out[:, 131].isnan().all()
        assert out[:, torch.arange(140) != 131].isfinite().all()


def test_weights_wherever_they_lie(processor):
    # Parts of a file's buffer may begin at an odd byte.
    for kind in KINDS:
        stored, _, run = weight_of(kind, 130, 160)
        x = torch.randn(5, 160).bfloat16()
        buffer = torch.zeros(stored[0].numel() + 5, dtype=torch.uint8)
        moved = buffer[5:].view(stored[0].shape).copy_(stored[0])
        out = run(x, moved, stored[1], backend="numba")
        assert torch.equal(out, run(x, *stored, backend="numba"))


def test_what_is_refused():
    stored, _, run = weight_of("fp8", 128, 130)
    with pytest.raises(BackendUnavailable, match="K a multiple of 32, got 130"):
        run(torch.randn(2, 130), *stored, backend="numba")
    stored, _, run = weight_of("fp8", 128, 128)
    with pytest.raises(BackendUnavailable, match="float64"):
        run(torch.randn(2, 128).double(), *stored, backend="numba")


def test_it_is_chosen_for_few_tokens():
    stored, _, run = weight_of("fp8", 128, 128)
    assert run.explain(torch.randn(1, 128), *stored)[0] == "numba"
    assert run.explain(torch.randn(MAX_NUMBA_TOKENS + 1, 128), *stored)[0] == "torch"
    assert run.resolve(torch.randn(1, 128), *stored).name == "numba"
    assert run.resolve(torch.randn(MAX_NUMBA_TOKENS + 1, 128), *stored).name == "torch"
