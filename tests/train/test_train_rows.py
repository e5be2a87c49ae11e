"""Rows through a cache's coding, straight through, and the operators around attention."""

import pytest
import torch
from torch.nn import functional

from anymla.formats.hadamard import hadamard_transform
from anymla.formats.page_layout import get_layout
from anymla.layers.linear import Linear, PackedWeight
from anymla.ops.kv_cache import dequant_gather_slots
from anymla.ops.linear import grouped_output_projection
from anymla.ops.norm_rope import qnorm_rope_kv_insert
from anymla.train import FrozenLinear
from anymla.train.norm_rope import rms_norm, rope
from anymla.train.projection import grouped_projection
from anymla.train.rows import heads_and_rows, round_rows

LAYOUTS = ["v4_main_fp8", "v41_main_fp8", "v41_compressed_nvfp4", "v4_index_fp8", "v4_index_mxfp4",
           "rows_bf16_512"]  # fmt: skip


@pytest.fixture(autouse=True)
def gradients(inference_rules):
    with torch.enable_grad():
        yield


def table(length, pairs, dtype=torch.float32):
    angle = torch.rand(length, pairs, dtype=dtype) * 6
    return torch.cat((angle.cos(), angle.sin()), 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [0, 1, 70])
def test_rows_are_those_of_the_format(layout, dtype, count):
    form = get_layout(layout)
    rows = torch.randn(count, form.channels) * torch.logspace(-6, 3, form.channels)
    rows = rows.to(dtype).requires_grad_()
    rounded = round_rows(rows, layout, dtype=torch.float32)
    assert torch.equal(rounded, form.decode(*form.encode(rows.detach()), torch.float32))
    pull = torch.randn_like(rounded)
    (got,) = torch.autograd.grad(rounded, rows, pull)
    assert torch.equal(got, pull.to(dtype))


def test_index_keys_are_transformed_first():
    rows = torch.randn(5, 128, requires_grad=True)
    rounded = round_rows(rows, "v4_index_mxfp4", hadamard=True)
    assert torch.equal(rounded, round_rows(hadamard_transform(rows.detach()), "v4_index_mxfp4"))
    pull = torch.randn_like(rounded)
    (got,) = torch.autograd.grad(rounded, rows, pull)
    (want,) = torch.autograd.grad(hadamard_transform(rows), rows, pull)
    torch.testing.assert_close(got, want)


def test_heads_and_rows_are_those_that_serve():
    q, kv = torch.randn(9, 3, 512), torch.randn(9, 512)
    at, angles = torch.randint(0, 50, (9,)), table(50, 32)
    cache = get_layout("v4_main_fp8").allocate(1, 64)
    heads = qnorm_rope_kv_insert(q, kv, cache, torch.arange(9), at, angles, 1e-6)
    rows = torch.empty(9, 512)
    dequant_gather_slots(rows, cache, torch.arange(9).int())
    q.requires_grad_()
    kv.requires_grad_()
    ours = heads_and_rows(q, kv, at, angles, eps=1e-6, layout="v4_main_fp8")
    assert torch.equal(ours[0], heads)
    assert torch.equal(ours[1], rows)

    # Gradients by those of the parts, in float32.
    parts = rope(rms_norm(q, torch.ones(512), 1e-6), at, angles), rope(kv[:, None], at, angles)
    pull = [torch.randn_like(x) for x in ours]
    got = torch.autograd.grad(ours, (q, kv), pull)
    want = torch.autograd.grad(parts, (q, kv), [pull[0], pull[1][:, None]])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_norm_and_rotation():
    x, weight = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 3, 8), (8,)))
    at, angles = torch.tensor([0, 5, 2, 9]), table(10, 2, torch.float64)
    want = functional.rms_norm(x, (8,), weight, 1e-6)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), want)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-6), (x, weight))
    assert torch.autograd.gradcheck(lambda x: rope(x, at, angles), x)
    assert torch.autograd.gradcheck(lambda x: rope(x, at, angles, inverse=True), x)


def test_grouped_projection():
    o = torch.randn(4, 6, 8, dtype=torch.float64, requires_grad=True)
    wo_a = torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True)
    at, angles = torch.tensor([0, 5, 2, 9]), table(10, 2, torch.float64)
    served = grouped_output_projection(o.detach(), at, angles, wo_a.detach())
    assert torch.equal(grouped_projection(o, wo_a, at, angles), served)
    assert torch.autograd.gradcheck(lambda o, w: grouped_projection(o, w, at, angles), (o, wo_a))


@pytest.mark.parametrize("quantize", [False, True])
def test_a_frozen_linear_has_the_gradient_of_its_decoded_weight(quantize):
    codes = torch.randint(0, 120, (256, 128), dtype=torch.uint8)
    packed = PackedWeight("fp8", codes, torch.tensor([[118], [121]], dtype=torch.uint8))
    x = torch.randn(2, 9, 128, requires_grad=True)
    ours = FrozenLinear(packed, quantize_activations=quantize)(x)
    assert torch.equal(ours, Linear(packed, quantize_activations=quantize)(x.detach()))
    pull = torch.randn_like(ours)
    (grad,) = torch.autograd.grad(ours, x, pull)
    torch.testing.assert_close(grad, pull @ packed.dense(torch.float32))
