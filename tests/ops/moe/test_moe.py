"""The mixture of experts against the formulas written out token by token, in float64."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paged import a_device, skip_float64, without_waiting
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from anymla.formats.fp8_block import (
    dequantize_fp8_rows,
    dequantize_fp8_weight,
    quantize_fp8_rows,
    quantize_fp8_weight,
)
from anymla.formats.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from anymla.formats.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from anymla.formats.quantized_rows import QuantizedRows
from anymla.ops import _check, registry
from anymla.ops.device import TARGETS, XPU, has_triton, numba_problem, target_of
from anymla.ops.moe import config, experts, route_biased, route_hash, swiglu, torch_experts
from anymla.ops.moe.config import (
    choose_config,
    choose_sm90_config,
    choose_w4a8_config,
    takes_w4a8,
)
from anymla.ops.moe.inputs import ExpertTensors, expected_alignment
from anymla.ops.moe.shapes import ExpertFormats, ExpertsShape, flash, pro
from anymla.ops.registry import Support
from anymla.testing.tolerance import accumulation, assert_close, assert_identical, relative_l2, ulps

no_triton = pytest.mark.skipif(not has_triton(), reason="triton is not installed")
BACKENDS = ["reference", "torch", pytest.param("triton", marks=no_triton)]
no_numba = pytest.mark.skipif(bool(numba_problem()), reason=numba_problem() or "-")
EXPERT_BACKENDS = [*BACKENDS, pytest.param("numba", marks=no_numba)]
D, INNER = 160, 96  # 160: a quant block of 128 channels and a shorter one


def scores_of(x: Tensor, gate: Tensor) -> Tensor:
    """sqrt(softplus(x @ gate^T)) in float64."""
    rows = (x.double() @ gate.double().T).tolist()
    return torch.tensor(
        [[math.sqrt(max(z, 0) + math.log1p(math.exp(-abs(z)))) for z in row] for row in rows],
        dtype=torch.float64,
    ).view(len(rows), len(gate))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 30])
@pytest.mark.parametrize("backend", BACKENDS)
def test_biased_router(backend: str, tokens: int, dtype: torch.dtype) -> None:
    skip_float64(backend, dtype)
    x, gate = torch.randn(tokens, D).to(dtype), torch.randn(24, D) / math.sqrt(D)
    bias = 0.5 * torch.randn(24)
    ids, weights = route_biased(x, gate, bias, k=6, scale=2.5, backend=backend)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert (ids.dtype, weights.dtype) == (torch.int32, wide)
    scores = scores_of(x, gate)
    ranked = scores + bias.double()
    chosen = ranked.gather(1, ids.long())
    # Judged by score: each chosen expert beats or equals the 6th best up to rounding.
    slack = ulps(wide, 16)
    if tokens:
        best = ranked.sort(1, descending=True).values[:, :6]
        assert_close(chosen, best, atol=slack, name="chosen scores")
    want = scores.gather(1, ids.long())
    want = want / want.sum(1, keepdim=True) * 2.5
    assert_close(weights, want, atol=slack, name="weights")
    if tokens > 1:  # bias must choose only, and must choose
        assert not torch.equal(ids, route_biased(x, gate, 0 * bias, k=6, scale=2.5)[0])
    valid = torch.arange(tokens) % 3 != 1
    some, theirs = route_biased(x, gate, bias, k=6, scale=2.5, is_valid=valid, backend=backend)
    assert torch.equal(some, torch.where(valid[:, None], ids, -1))
    assert torch.equal(theirs, torch.where(valid[:, None], weights, 0.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_scores_take_the_lowest_expert(backend: str) -> None:
    x, gate, bias = torch.randn(9, D), torch.zeros(300, D), torch.zeros(300)
    bias[[7, 250]] = 1.0
    ids, weights = route_biased(x, gate, bias, k=5, scale=1.0, backend=backend)
    assert ids.tolist() == [[7, 250, 0, 1, 2]] * 9
    assert_close(weights, torch.full((9, 5), 0.2), rtol=ulps(torch.float32, 2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_that_underflow_give_zero_weights(backend: str) -> None:
    x, gate = torch.ones(2, D), torch.full((8, D), -10.0)
    _, weights = route_biased(x, gate, torch.zeros(8), k=3, scale=1.5, backend=backend)
    assert weights.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_hash_router(backend: str, dtype: torch.dtype) -> None:
    skip_float64(backend, dtype)
    x, gate = torch.randn(12, D).to(dtype), torch.randn(16, D) / math.sqrt(D)
    table = torch.rand(50, 16).argsort(1)[:, :3]
    token_ids = torch.randint(0, 50, (12,))
    token_ids[3], token_ids[5] = -1, 50
    before = table.clone()
    ids, weights = route_hash(x, gate, token_ids, table, scale=1.5, backend=backend)
    assert_identical(table, before)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert (ids.dtype, weights.dtype) == (torch.int32, wide)
    known = [t for t in range(12) if t not in (3, 5)]
    assert_identical(ids[known], table[token_ids[known]].int())
    want = scores_of(x, gate)[known].gather(1, table[token_ids[known]])
    assert_close(weights[known], want / want.sum(1, keepdim=True) * 1.5, atol=ulps(wide, 16))
    assert ids[[3, 5]].tolist() == [[-1] * 3] * 2
    assert weights[[3, 5]].tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_swiglu_clamps_the_gate_from_above_only(backend: str, dtype: torch.dtype) -> None:
    skip_float64(backend, dtype)
    gate = torch.tensor([[-30.0, -2.0, 0.5, 9.0, 11.0, 300.0]]).to(dtype)
    up = torch.tensor([[3.0, -12.0, 12.0, -0.25, -300.0, 1.0]]).to(dtype)
    want = []
    for g, u in zip(gate[0].tolist(), up[0].tolist(), strict=True):
        g = min(g, 10.0)
        want.append(g / (1 + math.exp(-g)) * max(-10.0, min(10.0, u)))
    got = swiglu(gate, up, 10.0, backend=backend)
    assert got.dtype == dtype
    halves = torch.cat((gate, up), 1).repeat(3, 1).chunk(2, dim=1)
    assert torch.equal(swiglu(*halves, 10.0, backend=backend), got.repeat(3, 1))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    want64 = torch.tensor([want], dtype=torch.float64)
    # A GPU's exp(x) is 2^(x log2 e): rounding that argument, up to 30 log2 e here, costs as many
    # units as it is large.
    exponential = ulps(wide, 30 * math.log2(math.e)) if backend == "triton" else 0.0
    assert_close(got, want64, rtol=ulps(dtype, 0.5) + ulps(wide, 4) + exponential)
    quantised = QuantizedRows.empty(1, 6, gate.device)
    coded = {"codes": quantised.codes, "code_scales": quantised.scales}
    free = swiglu(gate, up, math.inf, **coded, backend=backend)
    for each, expected in zip(coded.values(), quantize_fp8_rows(free), strict=True):
        assert torch.equal(each[:1], expected)
    unclamped = gate.double() * gate.double().sigmoid() * up.double()
    assert_close(free, unclamped, rtol=ulps(dtype, 4) + exponential)


def skip_large(backend: str, weight_format: str, tokens: int) -> None:
    if backend == "triton" and tokens > 5 and weight_format != "plain":
        pytest.skip("interpreted kernels are slow; plain experts cover grouped tokens")
    skip_plain(backend, weight_format)


def skip_plain(backend: str, weight_format: str) -> None:
    if backend == "numba" and weight_format in ("plain", "nvfp4"):
        pytest.skip("numba multiplies FP8 and MXFP4 weights")


class Bank:
    """Random experts in one of the formats, and their exact values in float64."""

    def __init__(
        self,
        weight_format: str,
        count: int,
        dtype: torch.dtype = torch.float32,
        d: int = D,
        inner: int = INNER,
    ) -> None:
        self.weight_format = weight_format
        self.global_scales: Tensor | None = None
        wholes: list[Tensor] = []
        self.exact: list[list[Tensor]] = []
        self.given: list[list[Tensor]] = []
        for rows, columns in ((inner, d), (inner, d), (d, inner)):
            weights = [torch.randn(rows, columns) / math.sqrt(columns) for _ in range(count)]
            if weight_format == "plain":
                stored = [w.to(dtype) for w in weights]
                scales: list[Tensor] = []
                exact = [w.double() for w in stored]
            elif weight_format == "mxfp4":
                pairs = [quantize_mxfp4(w) for w in weights]
                exact = [dequantize_mxfp4(*pair, torch.float64) for pair in pairs]
                stored, scales = [p[0] for p in pairs], [p[1] for p in pairs]
            elif weight_format == "nvfp4":
                triples = [quantize_nvfp4(w) for w in weights]
                exact = [dequantize_nvfp4(*triple, torch.float64) for triple in triples]
                stored, scales = [t[0] for t in triples], [t[1] for t in triples]
                wholes.append(torch.cat([triple[2] for triple in triples]))
            else:
                pairs = [
                    quantize_fp8_weight(w, weight_format.removeprefix("fp8-")) for w in weights
                ]
                exact = [dequantize_fp8_weight(*pair, torch.float64) for pair in pairs]
                stored, scales = [p[0] for p in pairs], [p[1] for p in pairs]
            self.exact.append(exact)
            self.given.append(stored)
            self.given.append(scales)
        if wholes:
            self.global_scales = torch.stack(wholes, 1)

    def arguments(self) -> dict[str, Any]:
        w1, s1, w3, s3, w2, s2 = self.given
        kind = self.weight_format.split("-")[0]
        return {
            "w1": w1, "w3": w3, "w2": w2, "s1": s1, "s3": s3, "s2": s2, "weight_format": kind,
            "swiglu_limit": 2.0,
            **({} if self.global_scales is None else {"global_scales": self.global_scales}),
        }  # fmt: skip

    def expected(self, x: Tensor, ids: Tensor, weights: Tensor, offset: int = 0) -> Tensor:
        """The sum over experts in float64, nothing rounded."""
        w1, w3, w2 = self.exact
        total = torch.zeros(x.shape, dtype=torch.float64)
        for t, row in enumerate(ids.tolist()):
            for j, e in enumerate(row):
                if not offset <= e < offset + len(w1):
                    continue
                given = x[t].double()
                gate = (w1[e - offset] @ given).clamp(max=2.0)
                up = (w3[e - offset] @ given).clamp(-2.0, 2.0)
                total[t] += w2[e - offset] @ (weights[t, j].double() * gate * gate.sigmoid() * up)
        return total


def routing(tokens: int, k: int, count: int) -> tuple[Tensor, Tensor]:
    ids = torch.rand(tokens, count).argsort(1)[:, :k].int()
    return ids, torch.rand(tokens, k)


FORMATS = ["plain", "fp8-ue8m0", "fp8-fp32", "mxfp4", "nvfp4"]


@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("backend", EXPERT_BACKENDS)
def test_experts_in_float32(backend: str, weight_format: str, tokens: int) -> None:
    skip_large(backend, weight_format, tokens)
    bank, (ids, weights) = Bank(weight_format, 9), routing(tokens, 3, 9)
    x = torch.randn(tokens, D)
    got = experts(x, ids, weights, **bank.arguments(), quantize_activations=False, backend=backend)
    assert got.dtype == torch.float32
    # Two products in a row, of 160 and 96 terms, summed over three experts; magnitudes near 1.
    bound = accumulation(D, torch.float32, 4) + accumulation(INNER, torch.float32, 4)
    assert_close(got, bank.expected(x, ids, weights), atol=bound)


@pytest.mark.parametrize("backend", EXPERT_BACKENDS)
def test_experts_wherever_they_lie(backend: str) -> None:
    # Tensors of one expert that begin at an odd byte, as parts of a file's buffer may.
    bank, (ids, weights) = Bank("mxfp4", 3), routing(2, 2, 3)
    x, arguments = torch.randn(2, D), bank.arguments()
    want = experts(x, ids, weights, **arguments, quantize_activations=False, backend=backend)
    for name in ("w1", "w2", "s3"):
        tensor = arguments[name][1]
        buffer = torch.zeros(tensor.numel() + 5, dtype=torch.uint8)
        arguments[name] = list(arguments[name])
        arguments[name][1] = buffer[5:].view(tensor.shape).copy_(tensor)
    got = experts(x, ids, weights, **arguments, quantize_activations=False, backend=backend)
    assert_identical(got, want)


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("backend", EXPERT_BACKENDS)
def test_experts_of_one_tensor(backend: str, weight_format: str, contiguous: bool) -> None:
    skip_plain(backend, weight_format)
    bank, (ids, weights) = Bank(weight_format, 3), routing(2, 2, 3)
    x, arguments = torch.randn(2, D), bank.arguments()
    listed = dict(arguments)
    for name in ("w1", "w3", "w2", "s1", "s3", "s2"):
        if arguments[name]:
            # Parts of a larger tensor, as w1 and w3 of vLLM's are; or each of them transposed.
            stack = torch.stack(arguments[name])
            inside = torch.cat((torch.zeros_like(stack), stack), 1)[:, stack.shape[1] :]
            arguments[name] = inside if contiguous else stack.mT.contiguous().mT
            listed[name] = list(arguments[name])
    want = experts(x, ids, weights, **listed, quantize_activations=False, backend=backend)
    got = experts(x, ids, weights, **arguments, quantize_activations=False, backend=backend)
    assert_identical(got, want)


@pytest.mark.parametrize("weight_format", ["plain", "mxfp4", "nvfp4"])
def test_experts_in_float64_stay_there(weight_format: str) -> None:
    bank, (ids, weights) = Bank(weight_format, 5, torch.float64), routing(7, 2, 5)
    x = torch.randn(7, D, dtype=torch.float64)
    got = experts(
        x, ids, weights.double(), **bank.arguments(), quantize_activations=False,
        backend="reference",
    )  # fmt: skip
    assert got.dtype == torch.float64
    assert_close(got, bank.expected(x, ids, weights), atol=accumulation(D, torch.float64, 8))


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("backend", EXPERT_BACKENDS[1:])
def test_experts_in_bfloat16(backend: str, weight_format: str, tokens: int, quantize: bool) -> None:
    skip_large(backend, weight_format, tokens)
    bank, (ids, weights) = Bank(weight_format, 9, torch.bfloat16), routing(tokens, 3, 9)
    x = torch.randn(tokens, D).bfloat16()
    arguments = {**bank.arguments(), "quantize_activations": quantize}
    got, want = (
        experts(x, ids, weights, **arguments, backend=name) for name in (backend, "reference")
    )
    assert got.dtype == torch.bfloat16
    # Both round at the same places; a product that falls on another side of a rounding boundary
    # moves an e4m3 code of w2's input by 1/8 of one of 96 terms, or a bf16 by one ulp.
    assert_close(got, want, atol=ulps(torch.bfloat16, 4), name=f"{backend} against reference")
    exact = bank.expected(x, ids, weights)
    # One rounding to a number of precision eps has a relative rms error below eps / 2 / sqrt(3),
    # which passes through products unchanged. Gate, up, the input of w2 and what is rounded
    # after it add three of them in quadrature: eps / 2, and twice that since the values are few.
    quantized = quantize and weight_format not in ("plain", "nvfp4")
    bound = 2.0**-3 if quantized else ulps(torch.bfloat16, 1)
    error = relative_l2(got, exact)
    print(f"against float64: relative rms error {error:.3g}, allowed {bound:.3g}")
    assert error <= bound


def test_activation_quantiser_sees_the_routing_weight() -> None:
    # The weight is multiplied in before w2's input is quantised, not after.
    bank, ids = Bank("fp8-ue8m0", 1), torch.zeros(6, 1, dtype=torch.int32)
    x, weights = torch.randn(6, D), torch.rand(6, 1)
    got = experts(x, ids, weights, **bank.arguments(), quantize_activations=True)

    def rounded(rows: Tensor) -> Tensor:
        return dequantize_fp8_rows(*quantize_fp8_rows(rows), torch.float64)

    w1, w3, w2 = (matrices[0] for matrices in bank.exact)
    gate, up = (rounded(x) @ w.T for w in (w1, w3))
    inner = swiglu(gate.float(), up.float(), 2.0)
    before = rounded(weights * inner) @ w2.T
    after = weights.double() * (rounded(inner) @ w2.T)
    error = (got - before).abs().max()
    # float32 sums may move a value across one e4m3 boundary (1/8 of a term), never all of them.
    assert error < 0.25 * (got - after).abs().max()
    assert (got - after).abs().max() > 1e-3


@pytest.mark.parametrize("tokens", [1, 4, 30])
@pytest.mark.parametrize("backend", BACKENDS)
def test_foreign_ids_are_skipped_with_their_weights(backend: str, tokens: int) -> None:
    bank = Bank("plain", 4)
    ids, weights = routing(tokens, 3, 4)
    arguments = {**bank.arguments(), "quantize_activations": False, "backend": backend}
    x = torch.randn(tokens, D)
    ids += 10
    shifted = experts(x, ids, weights, **arguments, expert_offset=10)
    assert_close(
        shifted, bank.expected(x, ids, weights, 10), atol=accumulation(D, torch.float32, 8)
    )
    hostile = torch.tensor([-1, 9, 14, 2**31 - 1, -(2**31)], dtype=torch.int32)
    if backend == "triton":
        hostile = hostile[-2:]  # interpreted kernels are slow
    for bad in hostile:
        ids_bad, weights_bad = ids.clone(), weights.clone()
        ids_bad[:, 1], weights_bad[:, 1] = bad, torch.nan
        got = experts(x, ids_bad, weights_bad, **arguments, expert_offset=10)
        want = bank.expected(x, ids_bad, weights_bad, 10)
        assert_close(got, want, atol=accumulation(D, torch.float32, 8))
    none = experts(x, torch.full_like(ids, -1), weights, **arguments)
    assert_identical(none, torch.zeros_like(x))


def moved_to(device: torch.device, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [tensor.to(device) for tensor in value]
        if isinstance(value, list)
        else (value.to(device) if isinstance(value, Tensor) else value)
        for name, value in arguments.items()
    }


def assert_one_token_is_a_row_of_two(
    bank: Bank, x: Tensor, absent: int, backend: str, quantize: bool
) -> None:
    """Each of two tokens alone, with an expert that is not in the lists, and both together."""
    ids, weights = torch.tensor([[13, 10, 11], [12, 13, 10]], dtype=torch.int32), torch.rand(2, 3)
    weights[:, absent] += 3  # no other expert may take its weight
    ids[:, absent] = torch.tensor([9, 14])
    ids, weights = ids.to(x.device), weights.to(x.device)
    arguments: dict[str, Any] = moved_to(x.device, bank.arguments())
    arguments |= {"quantize_activations": quantize, "expert_offset": 10, "backend": backend}
    together = experts(x, ids, weights, **arguments)
    alone = [
        experts(x[t : t + 1], ids[t : t + 1], weights[t : t + 1], **arguments) for t in range(2)
    ]
    # Products add in other orders and are then rounded: each by a unit at most. Of a quantised
    # input of w2, a value that falls on the other side of a boundary is an eighth of one term.
    width = x.shape[1]
    error = accumulation(width, torch.float32, 8) + ulps(x.dtype, 2)
    error += ulps(torch.bfloat16, 4) if quantize else 0.0
    assert_close(torch.cat(alone), together, atol=error)
    exact = bank.expected(x.cpu(), ids.cpu(), weights.cpu(), 10)
    # Two quantisations and three roundings: see ``test_experts_in_bfloat16``.
    allowed = 2.0**-3 if quantize and bank.weight_format != "plain" else error
    assert relative_l2(together.cpu(), exact) <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("weight_format", ["plain", "fp8-ue8m0", "fp8-fp32", "mxfp4"])
@pytest.mark.parametrize("absent", [0, 1, 2])
@pytest.mark.parametrize("backend", ["reference", "torch", pytest.param("numba", marks=no_numba)])
def test_one_token_is_a_row_of_two(
    backend: str, weight_format: str, dtype: torch.dtype, absent: int, quantize: bool
) -> None:
    skip_plain(backend, weight_format)
    bank = Bank(weight_format, 4, dtype)
    assert_one_token_is_a_row_of_two(bank, torch.randn(2, D).to(dtype), absent, backend, quantize)


@no_triton
@pytest.mark.parametrize("absent", [0, 2])
@pytest.mark.parametrize(("d", "inner"), [(D, INNER), (128, 128)])
@pytest.mark.parametrize(
    ("weight_format", "dtype", "quantize"),
    [
        ("plain", torch.bfloat16, False),
        ("plain", torch.float32, False),
        ("fp8-ue8m0", torch.bfloat16, True),
        ("fp8-fp32", torch.bfloat16, False),
        ("mxfp4", torch.bfloat16, True),
        ("mxfp4", torch.bfloat16, False),
        ("nvfp4", torch.bfloat16, False),
    ],
)
def test_one_token_is_a_row_of_two_in_kernels(
    weight_format: str, dtype: torch.dtype, quantize: bool, d: int, inner: int, absent: int
) -> None:
    # Whole quant blocks are multiplied with operands swapped, others not.
    bank, x = Bank(weight_format, 4, dtype, d, inner), torch.randn(2, d).to(dtype)
    assert_one_token_is_a_row_of_two(bank, x, absent, "triton", quantize)


@pytest.mark.gpu
@pytest.mark.parametrize("absent", [0, 1, 2])
@pytest.mark.parametrize(
    ("backend", "weight_format", "quantize"),
    [
        ("triton", "plain", False),
        ("triton", "fp8-ue8m0", True),
        ("triton", "fp8-fp32", False),
        ("triton", "mxfp4", True),
        ("triton", "mxfp4", False),
        ("triton", "nvfp4", False),
        ("gluon_sm90", "mxfp4", True),
    ],
)
def test_a_device_has_one_token_as_a_row_of_two(
    backend: str, weight_format: str, quantize: bool, absent: int
) -> None:
    bank = Bank(weight_format, 4, torch.bfloat16, 1024, 1024)
    x = torch.randn(2, 1024).bfloat16().to(a_device())
    support = experts.explain(
        x, torch.zeros(2, 3, dtype=torch.int32, device=x.device), torch.ones(2, 3, device=x.device),
        **moved_to(x.device, bank.arguments()), quantize_activations=quantize,
    )[1][backend]  # fmt: skip
    if not support:
        pytest.skip(support.reason)
    assert_one_token_is_a_row_of_two(bank, x, absent, backend, quantize)


@pytest.mark.parametrize("tokens", [1, 30])
def test_shards_add_up(tokens: int) -> None:
    bank, (ids, weights) = Bank("plain", 8), routing(tokens, 4, 8)
    x, arguments = torch.randn(tokens, D), bank.arguments()
    whole = experts(x, ids, weights, **arguments, quantize_activations=False)
    parts = torch.zeros_like(x)
    for start, stop in ((0, 3), (3, 3), (3, 8)):
        shard = {
            name: value[start:stop] if isinstance(value, list) else value
            for name, value in arguments.items()
        }
        parts += experts(x, ids, weights, **shard, quantize_activations=False, expert_offset=start)
    assert_close(parts, whole, atol=ulps(torch.float32, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 30])
@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_expert_is_added_before_the_rounding(
    backend: str, tokens: int, dtype: torch.dtype
) -> None:
    bank, (ids, weights) = Bank("plain", 4, torch.float32), routing(tokens, 2, 4)
    x = torch.randn(tokens, D)
    arguments = {**bank.arguments(), "quantize_activations": False, "backend": backend}
    shared = torch.randn(tokens, D)
    alone = experts(x, ids, weights, **arguments)
    got = experts(x, ids, weights, **arguments, shared=shared)
    assert_close(got, alone.double() + shared, rtol=ulps(torch.float32, 1), atol=1e-7)
    if dtype == torch.bfloat16:
        bank = Bank("plain", 4, torch.bfloat16)
        arguments = {**bank.arguments(), "quantize_activations": False, "backend": backend}
        empty = torch.full_like(ids, -1)
        got = experts(x.bfloat16(), empty, weights, **arguments, shared=shared.bfloat16())
        assert_identical(got, shared.bfloat16())


@given(
    tokens=st.integers(0, 90),
    k=st.integers(1, 4),
    count=st.integers(0, 6),
    offset=st.integers(-2, 3),
    seed=st.integers(0, 2**31),
)
def test_any_routing(tokens: int, k: int, count: int, offset: int, seed: int) -> None:
    # Ids repeat within a row, point outside, or leave experts without tokens.
    torch.manual_seed(seed)
    bank = Bank("plain", count)
    ids = torch.randint(-3, 8, (tokens, k), dtype=torch.int32)
    x, weights = torch.randn(tokens, D), torch.rand(tokens, k)
    got = experts(
        x, ids, weights, **bank.arguments(), quantize_activations=False, expert_offset=offset
    )
    want = bank.expected(x, ids, weights, offset)
    assert_close(got, want, atol=accumulation(D, torch.float32, 8))


OPERANDS = {
    "e4m3": torch.float8_e4m3fn,
    "wide loads": torch.float8_e4m3fn,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "warps share K": torch.float16,
    "warps share K, adjacent": torch.float16,
}


def of_one_tensor(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, each list of them being slices of one tensor."""
    return {
        name: list(torch.stack(value)) if isinstance(value, list) and value else value
        for name, value in arguments.items()
    }


def with_swap_ab(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    arguments: dict[str, Any],
    operand: str,
    strided: bool,
) -> Tensor:
    """Experts by a config of another target or size, which the machine's would not be."""
    from anymla.ops.moe import triton_grouped_gemm, triton_launch

    wide, grouped = operand == "wide loads", len(x) > 1
    forced = config.GemmConfig(True, grouped, 16, 64, 128, OPERANDS[operand], 4, 2, wide)
    if operand.startswith("warps share K"):
        of_row = x.shape[1] // 128, arguments["w1"][0].shape[0] // 128
        down = config.GemmConfig(
            True, grouped, 8, 16, 128, torch.float16, of_row[1], 2, k_warps=of_row[1]
        )
        forced = dataclasses.replace(
            down, block_n=32, k_warps=of_row[0], adjacent=operand.endswith("adjacent"), down=down
        )
    machine = a_device() if torch.cuda.is_available() else torch.device("cpu")
    unknown = machine.type == "cuda" and not target_of(machine).dot_e4m3
    if OPERANDS[operand] == torch.float8_e4m3fn and unknown:
        pytest.skip("this GPU has no products of e4m3")
    arguments = moved_to(machine, arguments)
    if strided:
        arguments = of_one_tensor(arguments)
    gemms = triton_launch.Gemms(
        lambda inputs, results: triton_grouped_gemm.grouped_gemm(inputs, results, forced)
    )
    return triton_launch.run_experts(
        lambda *_: gemms, x.to(machine), ids.to(machine), weights.to(machine), **arguments
    ).cpu()  # fmt: skip


@no_triton
@pytest.mark.parametrize(("tokens", "strided"), [(2, False), (24, True)])
@pytest.mark.parametrize(
    ("weight_format", "dtype", "swap_ab"),
    [
        ("plain", torch.bfloat16, ""),
        ("nvfp4", torch.bfloat16, ""),
        ("nvfp4", torch.float16, ""),
        ("mxfp4", torch.float16, ""),
        ("mxfp4", torch.float16, "float16"),
        ("mxfp4", torch.float32, "e4m3"),
        ("mxfp4", torch.bfloat16, "bfloat16"),
        ("mxfp4", torch.bfloat16, "wide loads"),
        ("mxfp4", torch.bfloat16, "warps share K"),
        ("mxfp4", torch.float32, "warps share K, adjacent"),
        ("fp8-fp32", torch.bfloat16, "float16"),
        ("fp8-ue8m0", torch.float16, "float16"),
    ],
)
def test_kernels_take_tables_and_strides(
    weight_format: str,
    dtype: torch.dtype,
    swap_ab: str,
    tokens: int,
    strided: bool,
) -> None:
    # One tensor cut into experts is found by a stride, tensors anywhere by a table. Ids repeat
    # within a row and point outside; one expert has all of some tokens, another none.
    d, inner = (256, 128) if swap_ab else (D, INNER)
    bank = Bank(weight_format, 5, dtype, d, inner)
    arguments = {**bank.arguments(), "quantize_activations": weight_format != "plain"}
    if strided:
        arguments = of_one_tensor(arguments)
    ids = torch.randint(-1, 7, (tokens, 3), dtype=torch.int32)
    ids[ids == 3] = 2
    ids[0], ids[1] = 4, torch.tensor([-(2**31), 2**31 - 1, 9], dtype=torch.int32)
    x, weights = torch.randn(tokens, d).to(dtype), torch.rand(tokens, 3)
    arguments["expert_offset"] = 1
    assert experts.supports(x, ids, weights, **arguments, backend="triton")
    if swap_ab:
        got = with_swap_ab(x, ids, weights, arguments, swap_ab, strided)
    else:
        got = experts(x, ids, weights, **arguments, backend="triton")
    want = experts(x, ids, weights, **arguments, backend="reference")
    assert_close(got, want, atol=ulps(torch.bfloat16, 6))


@pytest.mark.parametrize(
    ("weight_format", "quantized"), [("mxfp4", True), ("mxfp4", False), ("fp8", True)]
)
def test_swap_ab_tiles_divide_what_they_cover(weight_format: str, quantized: bool) -> None:
    # Rows and channels are not masked: a tile's rows and a step's quant blocks must be whole.
    formats = ExpertFormats(torch.bfloat16, weight_format, torch.uint8, quantized)
    for target in (*TARGETS.values(), XPU):
        for tokens in (1, 2, 8, 133, 500, 5000):
            for shape in (flash(tokens), pro(tokens), ExpertsShape(tokens, 6, 8, 128, 640)):
                tile = choose_config(shape, formats, target)
                swap_ab = weight_format == "mxfp4" or not target.narrow
                assert tile.swap_ab == (swap_ab and not target.arc_a)
                if tile.swap_ab:
                    assert shape.inner % (tile.block_n // 2) == shape.d % tile.block_n == 0
                    assert shape.inner % tile.block_k == shape.d % tile.block_k == 0
                    assert not tile.wide_loads or tile.block_k in (128, 256, 512)


def test_sm90_configs_fit_shared_memory() -> None:
    for tokens in (4, 8, 67, 128, 500, 5000):
        small = (ExpertsShape(tokens, 6, *sizes) for sizes in ((9, 1024, 1024), (8, 128, 640)))
        for shape in (flash(tokens), pro(tokens, experts=48), *small):
            for tile in choose_sm90_config(shape) or ():
                assert shape.d % tile.block_n == 2 * shape.inner % tile.block_n == 0
                assert shape.d % tile.block_k == shape.inner % tile.block_k == 0
                assert tile.stages >= 2
    assert choose_sm90_config(flash(8, experts=32)) is not None
    assert choose_sm90_config(ExpertsShape(8, 6, 32, 128, 640)) is None


@no_triton
@pytest.mark.parametrize("tokens", [1, 9])
def test_mxfp4_experts_of_activations_as_they_are(tokens: int) -> None:
    bank, (ids, weights) = Bank("mxfp4", 3, d=128, inner=128), routing(tokens, 2, 3)
    arguments = {**bank.arguments(), "quantize_activations": False}
    x = torch.randn(tokens, 128).bfloat16()
    got, want = (experts(x, ids, weights, **arguments, backend=b) for b in ("triton", "reference"))
    assert_close(got, want, atol=ulps(torch.bfloat16, 4))


@no_triton
def test_kernels_refuse_float64() -> None:
    bank, (ids, weights) = Bank("plain", 2, torch.float64), routing(1, 1, 2)
    support = experts.supports(
        torch.zeros(1, D), ids, weights, **bank.arguments(), quantize_activations=False,
        backend="triton",
    )  # fmt: skip
    assert "float64" in support.reason


def test_few_and_many_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    bank, (ids, weights) = Bank("mxfp4", 6), routing(11, 3, 6)
    x, arguments = torch.randn(11, D), {**bank.arguments(), "quantize_activations": True}
    few = experts(x, ids, weights, **arguments)
    monkeypatch.setattr(torch_experts, "_FEW_PAIRS", 0)
    many = experts(x, ids, weights, **arguments)
    assert_close(many, few, atol=ulps(torch.float32, 8))


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_format", ["fp8-ue8m0", "fp8-fp32", "mxfp4"])
def test_experts_decoded_together(
    monkeypatch: pytest.MonkeyPatch, weight_format: str, dtype: torch.dtype, quantize: bool
) -> None:
    bank = Bank(weight_format, 6, d=256, inner=128)
    ids = torch.tensor([[3, 0, 5, 3, 7, -1]], dtype=torch.int32)  # twice, and outside
    x, weights = torch.randn(1, 256).to(dtype), torch.rand(1, 6)
    arguments = {**bank.arguments(), "quantize_activations": quantize, "backend": "torch"}
    stacked: list[int] = []
    original = torch_experts.ExpertMlps.down_batched

    def watched(self: Any, rows: Tensor, chosen: list[int]) -> Tensor:
        stacked.extend(chosen)
        return original(self, rows, chosen)

    monkeypatch.setattr(torch_experts.ExpertMlps, "down_batched", watched)
    together = experts(x, ids, weights, **arguments)
    assert stacked == [0, 3, 3, 5]
    monkeypatch.setattr(torch_experts, "_DECODED_ELEMENTS", 0)
    apart = experts(x, ids, weights, **arguments)
    assert len(stacked) == 4
    # The same products in another order of summation, after which a value may round the other way:
    # a bf16 of the result, or an e4m3 of w2's input, which moves the result by less than 2^-7.
    order = accumulation(256, torch.float32, 4)
    slack = order + ulps(torch.bfloat16, 1) if quantize else order
    assert_close(together, apart, atol=slack, rtol=ulps(dtype, 1))


class Methods(TorchFunctionMode):
    """Count calls of tensors' methods by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_support_of_many_experts_is_a_few_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in (("triton_support", Support(True)), ("runs_gluon", True)):
        monkeypatch.setattr(config, name, lambda *_, answer=answer: answer)
    matrices = [list(torch.zeros(256, 1024, 512, dtype=torch.uint8)) for _ in range(3)]
    scales = [list(torch.zeros(256, 1024, 32, dtype=torch.uint8)) for _ in range(3)]
    x, ids, weights = torch.zeros(1, 1024).bfloat16(), torch.zeros(1, 6).int(), torch.zeros(1, 6)
    how: dict[str, Any] = {"weight_format": "mxfp4", "swiglu_limit": 1.0}
    with Methods() as methods:
        for _ in range(2):
            methods.counts.clear()
            assert config.gluon_support(
                x, ids, weights, *matrices, *scales, **how, quantize_activations=True
            )
    print(dict(methods.counts))
    assert methods.counts.total() <= 40


def test_a_call_reads_every_address_once() -> None:
    tensors = list(torch.zeros(256, 8, 16, dtype=torch.uint8))
    ExpertTensors(tensors)
    with Methods() as methods:
        ExpertTensors(tensors)
    assert methods.counts["data_ptr"] == 256
    assert methods.counts["is_contiguous"] == 256
    assert methods.counts.total() <= 2 * 256 + 5


def test_a_tensor_of_experts_is_looked_at_once() -> None:
    stack = torch.zeros(256, 8, 16, dtype=torch.uint8)
    tensors = ExpertTensors(stack)
    with Methods() as methods:
        tensors = ExpertTensors(stack)
    assert tensors.count == 256
    assert methods.counts.total() <= 10
    first, stride, table = tensors.pointers()
    assert first is not None
    assert (first.data_ptr(), stride, table) == (stack.data_ptr(), 8 * 16, None)
    with Methods() as methods:
        assert expected_alignment(stack) == 16
    assert methods.counts.total() <= 10


def test_tensors_that_moved_are_found() -> None:
    # The same list, the same first tensor: nothing of what was remembered may be used.
    stack = torch.arange(4 * 32, dtype=torch.uint8).view(4, 4, 8)
    tensors = list(stack)
    first, stride, table = ExpertTensors(tensors).pointers()
    assert (first is tensors[0], stride, table) == (True, 32, None)
    buffer = torch.zeros(64, dtype=torch.uint8)
    tensors[2] = buffer[5:37].view(4, 8).copy_(tensors[2])
    moved = ExpertTensors(tensors)
    _, stride, table = moved.pointers()
    assert table is not None
    assert (stride, moved.unit) == (0, 1)
    distances = [tensor.data_ptr() - tensors[0].data_ptr() for tensor in tensors]
    assert table.tolist() == distances
    tensors[3].data = stack[0].clone()
    _, _, table = ExpertTensors(tensors).pointers()
    assert table is not None
    assert table[3] == tensors[3].data_ptr() - tensors[0].data_ptr()


@pytest.mark.parametrize("place", [0, 2])
def test_tensors_that_do_not_suit_are_copied(place: int) -> None:
    tensors = list(torch.randint(0, 256, (4, 8, 8), dtype=torch.uint8))
    assert ExpertTensors(tensors, alignment=16).alignment == 16
    buffer = torch.zeros(69, dtype=torch.uint8)
    for unfit in (buffer[5:].view(8, 8).copy_(tensors[place]), tensors[place].t()):
        some = [*tensors[:place], unfit, *tensors[place + 1 :]]
        for _ in range(2):
            made = ExpertTensors(some, alignment=16)
            first, stride, table = made.pointers()
            assert first is not None
            assert made.alignment == 16
            assert table is not None
            assert stride == 0
            for number, distance in enumerate(table.tolist()):
                # Read as a kernel does, from where the first one lies.
                address = first.data_ptr() + distance
                rows = (ctypes.c_uint8 * 64).from_address(address)
                assert list(rows) == some[number].flatten().tolist()


class Calls(TorchDispatchMode):
    """Count the kernels that a block of code calls."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_decode_step_is_few_calls() -> None:
    bank, (ids, weights) = Bank("plain", 8), routing(1, 6, 8)
    x = torch.randn(1, D)
    with Calls() as calls:
        experts(x, ids, weights, **bank.arguments(), quantize_activations=False)
    print("experts:", calls.count)
    assert calls.count <= 3 * 6 * 2 + 25  # the 18 products (each with a transposed view), and fixed
    with Calls() as calls:
        route_biased(x, torch.randn(8, D), torch.zeros(8), k=6, scale=1.0)
    print("route_biased:", calls.count)
    assert calls.count <= 16


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_a_device_routes_the_same_without_waiting(tokens: int, dtype: torch.dtype) -> None:
    device = a_device()
    x, gate, bias = torch.randn(tokens, D).to(dtype), torch.randn(16, D) / D**0.5, torch.zeros(16)
    table, token_ids = torch.randint(0, 16, (30, 3)), torch.randint(-2, 33, (tokens,))
    want = (
        route_biased(x, gate, bias, k=4, scale=1.5),
        route_hash(x, gate, token_ids, table, scale=1.5),
    )
    x, gate, bias, table, token_ids = (t.to(device) for t in (x, gate, bias, table, token_ids))
    with without_waiting(device):
        got = (
            route_biased(x, gate, bias, k=4, scale=1.5),
            route_hash(x, gate, token_ids, table, scale=1.5),
        )
    for (ids, weights), (want_ids, want_weights) in zip(got, want, strict=True):
        assert_identical(ids.cpu(), want_ids)
        assert_close(weights.cpu(), want_weights, atol=ulps(torch.float32, 32))


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 40, 300, 900])
@pytest.mark.parametrize("weight_format", FORMATS[1:])
def test_a_device_runs_swap_ab_experts(weight_format: str, tokens: int, quantize: bool) -> None:
    # Whole quant blocks of 128 channels: decoded as packed int32, with few pairs and many.
    device = a_device()
    bank, (ids, weights) = Bank(weight_format, 9, d=512, inner=384), routing(tokens, 3, 9)
    ids[0, 1] = -1
    x = torch.randn(tokens, 512).bfloat16()
    arguments = {**bank.arguments(), "quantize_activations": quantize}
    want = experts(x, ids, weights, **arguments)
    given = moved_to(device, arguments)
    got, again = (
        experts(x.to(device), ids.to(device), weights.to(device), **given) for _ in range(2)
    )
    assert_identical(got, again)
    # Both round at the same places, where a value may fall on the other side of a boundary.
    assert_close(got.cpu(), want, atol=ulps(torch.bfloat16, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("tokens", "block_m"), [(1, 8), (8, 8), (20, 16), (48, 16)])
def test_a_hopper_runs_its_grouped_gemm(
    tokens: int, block_m: int, strided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = a_device()
    bank, (ids, weights) = Bank("mxfp4", 9, d=1024, inner=1024), routing(tokens, 3, 9)
    ids[0, 1] = -1
    chosen = choose_sm90_config(ExpertsShape(tokens, 3, 9, 1024, 1024))
    assert chosen is not None
    assert chosen[0].block_m == block_m
    x = torch.randn(tokens, 1024).bfloat16()
    arguments = {**bank.arguments(), "quantize_activations": True}
    want = experts(x, ids, weights, **arguments)
    given = moved_to(device, arguments)
    if strided:
        stacks = {name: torch.stack(v) for name, v in given.items() if isinstance(v, list)}
        given |= {name: list(stack) for name, stack in stacks.items()}
    moved = x.to(device), ids.to(device), weights.to(device)
    picked, answers = experts.explain(*moved, **given)
    backend = "gluon_sm90" if answers["gluon_sm90"] else None
    if backend:
        assert picked == backend
        projections = [given[name] for name in ("w1", "w3", "w2", "s1", "s3", "s2")]
        many = tokens > 12 and strided
        assert takes_w4a8(ExpertsShape(tokens, 3, 9, 1024, 1024), 128, projections) == many
    # Persistent CTAs, also with 7 and 16 pairs an expert at even distances, which W4A8 would take.
    monkeypatch.setattr(config, "_W4A8_PAIRS_AN_EXPERT", float("inf"))
    got, again = (experts(*moved, **given, backend=backend) for _ in range(2))
    assert_identical(got, again)
    assert_close(got.cpu(), want, atol=ulps(torch.bfloat16, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("windows", [1, 4])
@pytest.mark.parametrize(
    ("tokens", "block_m"), [(1, 16), (39, 16), (70, 32), (130, 64), (900, 128)]
)
def test_a_hopper_runs_w4a8(
    tokens: int, block_m: int, windows: int, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, count = a_device(), 9
    bank, (ids, weights) = Bank("mxfp4", count, d=1024, inner=512), routing(tokens, 3, count)
    ids[0, 1] = -1
    # Some tiles are multiplied once for each window that their scales take.
    for scales in bank.given[1::2]:
        for window, expert in itertools.product(range(1, windows), scales):
            expert[window::384, window::windows] -= 12 * window
    chosen = choose_w4a8_config(ExpertsShape(tokens, 3, count, 1024, 512))
    assert chosen is not None
    assert chosen.block_m == block_m
    x = torch.randn(tokens, 1024).bfloat16()
    arguments = {**bank.arguments(), "quantize_activations": True, "expert_offset": offset}
    want = experts(x, ids, weights, **arguments)
    given = moved_to(device, arguments)
    # Experts at even distances, as checkpoints are loaded.
    stacks = {name: torch.stack(v) for name, v in given.items() if isinstance(v, list)}
    given |= {name: list(stack) for name, stack in stacks.items()}
    moved = x.to(device), ids.to(device), weights.to(device)
    # Few pairs an expert as well, which persistent CTAs would take.
    monkeypatch.setattr(config, "_W4A8_PAIRS_AN_EXPERT", 0)
    support = experts.explain(*moved, **given)[1]["gluon_sm90"]
    if not support:
        pytest.skip(support.reason)
    shape = ExpertsShape(tokens, 3, count, 1024, 512)
    projections = [given[name] for name in ("w1", "w3", "w2", "s1", "s3", "s2")]
    assert takes_w4a8(shape, 128, projections)
    got, again = (experts(*moved, **given, backend="gluon_sm90") for _ in range(2))
    assert_identical(got, again)
    # Sums of 128 channels keep 13 bits, so a value of w2's input moves by 2^-11 of itself, and by
    # four times that where terms cancel. Neighbours in e4m3 are 2^-4 apart or more: up to one in 32
    # rounds otherwise, by 2^-3 at most.
    noise = 2.0**-3 / 32**0.5 * want.float().square().mean().sqrt().item()
    assert_close(got.cpu(), want, atol=ulps(torch.bfloat16, 4) + 6 * noise)
    assert (got.cpu().float() - want.float()).square().mean().sqrt() <= noise
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = experts(*moved, **given, backend="gluon_sm90")
    graph.replay()
    assert_identical(recorded, got)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_device_runs_the_same_experts(
    weight_format: str, tokens: int, dtype: torch.dtype
) -> None:
    device = a_device()
    bank, (ids, weights) = Bank(weight_format, 9, dtype), routing(tokens, 3, 9)
    ids[0, 1] = -1
    x = torch.randn(tokens, D).to(dtype)
    arguments = bank.arguments()
    moved = moved_to(device, arguments)
    want = experts(x, ids, weights, **arguments, quantize_activations=False)
    got, again = (
        experts(
            x.to(device), ids.to(device), weights.to(device), **moved, quantize_activations=False
        )
        for _ in range(2)
    )
    assert_identical(got, again)
    bound = accumulation(D, torch.float32, 4) + accumulation(INNER, torch.float32, 4)
    slack = bound + ulps(torch.bfloat16, 4) if dtype == torch.bfloat16 else bound
    assert_close(got.cpu(), want, atol=slack)


@pytest.mark.compiles
def test_traced_through() -> None:
    bank = Bank("mxfp4", 6)
    gate, bias, table = torch.randn(6, D), torch.zeros(6), torch.randint(0, 6, (9, 2))
    arguments = {**bank.arguments(), "quantize_activations": True}
    graphs = 0

    def layer(x: Tensor, token_ids: Tensor) -> Tensor:
        ids, weights = route_biased(x, gate, bias, k=2, scale=1.5)
        hashed, hash_weights = route_hash(x, gate, token_ids, table, scale=1.5)
        out = experts(x, ids, weights, **arguments)
        return swiglu(out, experts(x, hashed, hash_weights, **arguments), 3.0)

    def count(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    compiled = torch.compile(layer, backend=count, dynamic=True, fullgraph=True)
    for tokens in (7, 11, 40):  # unlike any other size, which tracing would take for the same
        x, token_ids = torch.randn(tokens, D), torch.randint(0, 9, (tokens,))
        assert_identical(compiled(x, token_ids), layer(x, token_ids))
    assert graphs == 1


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, "experts: weight_format must be one of", {"weight_format": "int8"}),
        (ValueError, "experts: swiglu_limit must be positive, got 0", {"swiglu_limit": 0}),
        (TypeError, "experts: ids must be int32", {"ids": torch.zeros(2, 2, dtype=torch.int64)}),
        (ValueError, "experts: weights must be", {"weights": torch.zeros(2, 3)}),
        (
            ValueError,
            "experts: w3 must be a list of 4 tensors, got 3",
            {"w3": [torch.zeros(1)] * 3},
        ),
        (ValueError, "experts: s1 must be a list of 0 tensors", {"s1": [torch.zeros(1)]}),
        (ValueError, "experts: w2 must be", {"w2": [torch.zeros(INNER, D)] * 4}),
        (TypeError, "experts: w1 must be", {"w1": [torch.zeros(INNER, D).byte()] * 4}),
        (TypeError, "experts: shared must be float32", {"shared": torch.zeros(2, D).double()}),
    ],
)
def test_experts_errors(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    bank, (ids, weights) = Bank("plain", 4), routing(2, 2, 4)
    arguments = {"x": torch.zeros(2, D), "ids": ids, "weights": weights, **bank.arguments()}
    with pytest.raises(error, match=message):
        experts(**{**arguments, "quantize_activations": False, **changes})


@pytest.mark.parametrize(
    ("weight_format", "name", "wrong"),
    [
        ("fp8-ue8m0", "s1", torch.zeros(1, 1, dtype=torch.uint8)),
        ("fp8-ue8m0", "s2", torch.zeros(1, 2, dtype=torch.uint8)),
        ("mxfp4", "s3", torch.zeros(INNER, 4, dtype=torch.uint8)),
        ("mxfp4", "w1", torch.zeros(INNER, D, dtype=torch.uint8)),
        ("nvfp4", "s3", torch.zeros(INNER, D // 32, dtype=torch.uint8)),
        ("nvfp4", "w2", torch.zeros(D, INNER, dtype=torch.uint8)),
    ],
)
def test_shapes_of_quantised_experts(weight_format: str, name: str, wrong: Tensor) -> None:
    bank, (ids, weights) = Bank(weight_format, 3), routing(2, 2, 3)
    arguments = {**bank.arguments(), name: [wrong] * 3}
    with pytest.raises(ValueError, match=f"experts: {name} must be"):
        experts(torch.zeros(2, D), ids, weights, **arguments, quantize_activations=True)


@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("name", ["w1", "w3", "w2", "s1", "s3", "s2"])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_every_expert_is_checked(weight_format: str, name: str, place: int) -> None:
    bank, (ids, weights) = Bank(weight_format, 3), routing(2, 2, 3)
    given = {"x": torch.randn(2, D), "ids": ids, "weights": weights, **bank.arguments()}
    given["quantize_activations"] = True
    right = given[name]
    if not right:
        return
    want = experts(**given)
    tensor = right[place]
    wrong = {
        "shorter": tensor[:-1],
        "narrower": tensor[:, :-1],
        "longer": torch.cat((tensor, tensor)),
        "a vector": tensor.flatten(),
        "another dtype": torch.zeros_like(tensor, dtype=torch.float64),
        "elsewhere": tensor.to("meta"),
        "no tensor": tensor.tolist(),
    }
    for what, one in wrong.items():
        mixed = [*right]
        mixed[place] = one
        for backend in (None, "reference", "torch"):
            error = TypeError if what in ("another dtype", "no tensor") else ValueError
            with pytest.raises(error, match=rf"experts: {name}\[{place}\] must be"):
                experts(**{**given, name: mixed}, backend=backend)
    # The list of a call that was right, changed in place.
    right[place] = wrong["shorter"]
    with pytest.raises(ValueError, match=rf"experts: {name}\[{place}\] must be"):
        experts(**given)
    right[place] = tensor
    assert_identical(experts(**given), want)


@pytest.mark.parametrize(("name", "like"), [("w3", "w1"), ("w2", "w1"), ("s3", "s1"), ("s2", "s1")])
def test_projections_are_stored_alike(name: str, like: str) -> None:
    bank, (ids, weights) = Bank("plain" if name[0] == "w" else "fp8-ue8m0", 3), routing(2, 2, 3)
    given = {"x": torch.randn(2, D), "ids": ids, "weights": weights, **bank.arguments()}
    given[name] = [
        each.float().double() if name[0] == "w" else each.float() for each in given[name]
    ]
    dtype = str(given[like][0].dtype).removeprefix("torch.")
    with pytest.raises(TypeError, match=rf"experts: {name} must be {dtype} "):
        experts(**given, quantize_activations=True)


def test_what_was_found_alike_is_forgotten_with_its_tensors() -> None:
    known = len(_check._alike)
    tensors = [torch.zeros(2, 3) for _ in range(4)]
    assert _check.first_unlike(tensors) is None
    assert _check.first_unlike(list(tensors)) is None  # another list of the same
    assert len(_check._alike) == known + 1
    tensors[2] = torch.zeros(3, 2)
    assert _check.first_unlike(tensors) == 2
    del tensors
    assert len(_check._alike) == known


def test_a_step_that_skips_checks_does_not_look_at_every_expert(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bank, (ids, weights) = Bank("plain", 4), routing(2, 2, 4)
    given = {"x": torch.randn(2, D), "ids": ids, "weights": weights, **bank.arguments()}
    known = (None, "torch")  # by its kind, and not at all, as where backends see the lists
    with registry.skip_checks():
        want = [experts(**given, quantize_activations=False, backend=backend) for backend in known]

    def refuse(*anything: object) -> None:
        raise AssertionError

    monkeypatch.setattr(registry, "first_unlike", refuse)
    monkeypatch.setattr(_check, "first_unlike", refuse)
    with registry.skip_checks():
        got = [experts(**given, quantize_activations=False, backend=backend) for backend in known]
    for each, wanted in zip(got, want, strict=True):
        assert_identical(each, wanted)


def test_factors_of_whole_experts_come_with_nvfp4_alone() -> None:
    ids, weights = routing(2, 2, 3)
    for weight_format, wrong in (
        ("nvfp4", {"global_scales": None}),
        ("nvfp4", {"global_scales": torch.ones(2, 3)}),
        ("mxfp4", {"global_scales": torch.ones(3, 3)}),
    ):
        arguments = Bank(weight_format, 3).arguments() | wrong | {"quantize_activations": False}
        with pytest.raises(ValueError, match=r"experts: global_scales must be float32 \[E, 3\] "):
            experts(torch.zeros(2, D), ids, weights, **arguments)
    arguments = Bank("nvfp4", 3).arguments() | {"global_scales": torch.ones(3, 3).double()}
    with pytest.raises(TypeError, match="experts: global_scales must be float32"):
        experts(torch.zeros(2, D), ids, weights, **arguments, quantize_activations=False)


def test_router_errors() -> None:
    x, gate = torch.zeros(2, D), torch.zeros(5, D)
    with pytest.raises(ValueError, match=r"route_biased: k must be within 1\.\.5, got 6"):
        route_biased(x, gate, torch.zeros(5), k=6, scale=1.0)
    with pytest.raises(ValueError, match=r"route_biased: bias must be .* \[E=5\]"):
        route_biased(x, gate, torch.zeros(4), k=2, scale=1.0)
    with pytest.raises(TypeError, match="route_hash: token_ids must be int64"):
        route_hash(x, gate, torch.zeros(2).int(), torch.zeros(9, 2).long(), scale=1.0)
    with pytest.raises(ValueError, match="swiglu: limit must be positive"):
        swiglu(x, x, 0.0)
    with pytest.raises(TypeError, match="swiglu: up must be float32"):
        swiglu(x, x.double(), 1.0)
