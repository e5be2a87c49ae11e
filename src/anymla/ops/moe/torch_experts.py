"""Routed experts on any torch device: tokens are grouped by expert, and each expert runs once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from anymla.formats.fp8_block import FP8_BLOCK, dequantize_fp8_weight
from anymla.formats.mxfp4 import dequantize_mxfp4
from anymla.ops._check import wide_dtype
from anymla.ops._gemm import (
    fp8_gemm,
    gemm,
    gemv_each,
    is_host_row,
    mxfp4_gemm,
    nvfp4_gemm,
    rounded_to_fp8,
)
from anymla.ops._quantized import fill_codes
from anymla.ops.streams import flush_stream_wait

# Largest number of pairs for which the work between GEMMs is done for all experts at once, in few
# calls; with more, it is done expert by expert, so that only one expert's rows are kept.
_FEW_PAIRS = 64

# Largest number of elements for which one token's experts are multiplied as a batch, since call
# overhead dominates on small matrices: decoded elements if quantised (16 MiB of float32), copied
# ones if plain.
_DECODED_ELEMENTS = 1 << 22
_COPIED_ELEMENTS = 1 << 20


def swiglu(
    gate: Tensor,
    up: Tensor,
    limit: float,
    *,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
) -> Tensor:
    """Backend of ``interface.swiglu`` in torch; see its contract."""
    out = _swiglu(gate, up, limit).to(gate.dtype)
    fill_codes(out, codes, code_scales)
    return out


def _swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    dtype = wide_dtype(gate.dtype)
    activated = functional.silu(gate.to(dtype).clamp(max=limit), inplace=True)
    return activated.mul_(up.to(dtype).clamp(-limit, limit))


@dataclasses.dataclass(frozen=True)
class ExpertMlps:
    """Experts of one call, for rows [n, D] or [n, I] that are quantised if the call quantises."""

    w1: list[Tensor] | Tensor
    w3: list[Tensor] | Tensor
    w2: list[Tensor] | Tensor
    s1: list[Tensor] | Tensor
    s3: list[Tensor] | Tensor
    s2: list[Tensor] | Tensor
    weight_format: str
    limit: float
    quantized: bool
    block: int
    global_scales: Tensor | None = None

    def operand(self, rows: Tensor) -> Tensor:
        """Return rows as GEMMs take them, quantised once for w1 and w3, which share their input."""
        return rounded_to_fp8(rows, rows.dtype, self.block) if self.quantized else rows

    def gate(self, rows: Tensor, e: int) -> Tensor:
        """Multiply rows by w1 of expert e."""
        return self._product(rows, self.w1, self.s1, e, 0)

    def up(self, rows: Tensor, e: int) -> Tensor:
        """Multiply rows by w3 of expert e."""
        return self._product(rows, self.w3, self.s3, e, 1)

    def down(self, rows: Tensor, e: int) -> Tensor:
        """Multiply rows by w2 of expert e."""
        return self._product(rows, self.w2, self.s2, e, 2)

    def gates_and_ups(self, parts: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        """Return gates and ups [n, I] of parts, each of which is rows and their expert."""
        gate = torch.cat([self.gate(rows, e) for rows, e in parts])
        return gate, torch.cat([self.up(rows, e) for rows, e in parts])

    def downs(self, parts: list[tuple[Tensor, int]]) -> Tensor:
        """Multiply each part's rows by w2 of its expert: [n, D]."""
        return torch.cat([self.down(rows, e) for rows, e in parts])

    def inner(self, gate: Tensor, up: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Return w2's input [n, I], which includes the routing weights [n]."""
        return self.operand(_swiglu(gate, up, self.limit).mul_(weights.unsqueeze(1)).to(dtype))

    def _product(
        self,
        rows: Tensor,
        matrices: list[Tensor] | Tensor,
        scales: list[Tensor] | Tensor,
        e: int,
        number: int,
    ) -> Tensor:
        matrix = matrices[e]
        if self.global_scales is not None:
            return nvfp4_gemm(rows, matrix, scales[e], self.global_scales[e, number].view(1))
        if self.weight_format == "fp8":
            return fp8_gemm(rows, matrix, scales[e], block=self.block)
        if self.weight_format == "mxfp4":
            return mxfp4_gemm(rows, matrix, scales[e])
        if rows.dtype == matrix.dtype:
            return gemm(rows, matrix)
        dtype = torch.promote_types(rows.dtype, matrix.dtype)
        return functional.linear(rows.to(dtype), matrix.to(dtype)).to(rows.dtype)

    def fits_batched(self, rows: Tensor, count: int) -> bool:
        """Return True if ``count`` experts are small enough to multiply a row as one batch."""
        if self.global_scales is not None:
            return False
        inner, d = self.w1[0].shape[0], rows.shape[1]
        if self.weight_format == "plain":
            return 2 * count * inner * d <= _COPIED_ELEMENTS
        # Square blocks of scales only stay with their rows if every matrix has whole blocks.
        whole = self.weight_format == "mxfp4" or (inner % self.block == 0 and d % self.block == 0)
        small = 2 * count * inner * d <= _DECODED_ELEMENTS
        return whole and small

    def gate_up_batched(self, rows: Tensor, chosen: list[int]) -> Tensor:
        """Return gates and then ups of the chosen experts for one row [1, D]: [2, n, I]."""
        weights = [self.w1[e] for e in chosen] + [self.w3[e] for e in chosen]
        if self.weight_format == "plain":
            matrix = torch.cat(weights)
            dtype = torch.promote_types(rows.dtype, matrix.dtype)
            out = functional.linear(rows.to(dtype), matrix.to(dtype)).to(rows.dtype)
            return out.view(2, len(chosen), -1)
        multiply = fp8_gemm if self.weight_format == "fp8" else mxfp4_gemm
        scales = [self.s1[e] for e in chosen] + [self.s3[e] for e in chosen]
        out = multiply(rows, torch.cat(weights), torch.cat(scales), block=self.block)
        return out.view(2, len(chosen), -1)

    def down_batched(self, rows: Tensor, chosen: list[int]) -> Tensor:
        """Multiply row i of [n, I] by w2 of the i-th chosen expert: [n, D]."""
        if self.weight_format == "plain":
            batch = torch.stack([self.w2[e] for e in chosen])
            dtype = torch.promote_types(rows.dtype, batch.dtype)
            inputs = rows.to(dtype).unsqueeze(1)
            return torch.bmm(inputs, batch.to(dtype).transpose(1, 2)).squeeze(1).to(rows.dtype)
        codes = torch.cat([self.w2[e] for e in chosen])
        scales, dtype = torch.cat([self.s2[e] for e in chosen]), wide_dtype(rows.dtype)
        if self.weight_format == "fp8":
            matrices = dequantize_fp8_weight(codes, scales, dtype, self.block)
        else:
            matrices = dequantize_mxfp4(codes, scales, dtype)
        matrices = matrices.view(len(chosen), -1, rows.shape[1])
        # Rows times matrices: with columns, the same products take seven times as long on a CPU.
        out = torch.bmm(rows.to(matrices.dtype).unsqueeze(1), matrices.transpose(1, 2))
        return out.squeeze(1).to(rows.dtype)


def run_experts(
    mlps_of: type[ExpertMlps],
    total_of: Callable[[Tensor, Tensor, Tensor, ExpertMlps, int], Tensor],
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: list[Tensor] | Tensor,
    w3: list[Tensor] | Tensor,
    w2: list[Tensor] | Tensor,
    s1: list[Tensor] | Tensor,
    s3: list[Tensor] | Tensor,
    s2: list[Tensor] | Tensor,
    *,
    weight_format: str,
    swiglu_limit: float,
    quantize_activations: bool,
    expert_offset: int = 0,
    shared: Tensor | None = None,
    quant_block: int = FP8_BLOCK,
    global_scales: Tensor | None = None,
) -> Tensor:
    """Run ``interface.experts`` with products by ``mlps_of``.

    ``total_of`` sums over a token's experts, before the shared expert is added and the result is
    rounded.
    """
    flush_stream_wait()
    quantized = quantize_activations and weight_format in ("fp8", "mxfp4")
    mlps = mlps_of(
        w1, w3, w2, s1, s3, s2, weight_format, swiglu_limit, quantized, quant_block, global_scales
    )
    total = total_of(x, ids, weights, mlps, expert_offset)
    if shared is not None:
        total.add_(shared)
    return total.to(x.dtype)


def _total(x: Tensor, ids: Tensor, weights: Tensor, mlps: ExpertMlps, offset: int) -> Tensor:
    plain, count = mlps.weight_format == "plain", len(mlps.w1)
    if plain and count and mlps.w1[0].dtype == x.dtype and is_host_row(x):
        return _total_of_row(x, ids, weights, mlps, offset)
    total_of = total_of_few if ids.numel() <= _FEW_PAIRS else _total_of_many
    return total_of(x, ids, weights, mlps, offset)


experts = functools.partial(run_experts, ExpertMlps, _total)


def _total_of_row(x: Tensor, ids: Tensor, weights: Tensor, mlps: ExpertMlps, offset: int) -> Tensor:
    """Run one token through plain experts in its own dtype, with a few batched calls."""
    dtype, count = wide_dtype(x.dtype), len(mlps.w1)
    chosen = [e - offset for e in ids[0].tolist()]
    weight = weights[0]
    known = [0 <= e < count for e in chosen]
    if not all(known):
        chosen = [e for e, here in zip(chosen, known, strict=True) if here]
        weight = weight[torch.tensor(known)]
    if not chosen:
        return x.new_zeros(x.shape, dtype=dtype)
    matrices = [mlps.w1[e] for e in chosen] + [mlps.w3[e] for e in chosen]
    both = torch.cat(gemv_each([(x, matrix) for matrix in matrices]))
    gate, up = both.split(len(chosen))
    inner = mlps.inner(gate, up, weight, x.dtype)
    down = [(row, mlps.w2[e]) for row, e in zip(inner.split(1), chosen, strict=True)]
    return torch.cat(gemv_each(down)).sum(0, keepdim=True, dtype=dtype)


def total_of_few(x: Tensor, ids: Tensor, weights: Tensor, mlps: ExpertMlps, offset: int) -> Tensor:
    """Sum over every token's experts before rounding, computing all pairs together."""
    tokens, k = ids.shape
    dtype = wide_dtype(x.dtype)
    segments, order = _segments([e - offset for e in ids.flatten().tolist()], len(mlps.w1))
    if not order:
        return x.new_zeros(x.shape, dtype=dtype)
    index = torch.tensor(order, device=x.device)
    weight = weights.flatten().index_select(0, index)
    rows = mlps.operand(x)
    if tokens == 1 and mlps.fits_batched(rows, len(order)):
        chosen = [e for e, start, stop in segments for _ in range(start, stop)]
        gate, up = mlps.gate_up_batched(rows, chosen)
        out = mlps.down_batched(mlps.inner(gate, up, weight, x.dtype), chosen)
        return out.sum(0, keepdim=True, dtype=dtype)
    if tokens > 1:
        rows = rows.index_select(0, index // k)
        parts = [rows[start:stop] for _, start, stop in segments]
    else:
        parts = [
            rows if stop - start == 1 else rows.expand(stop - start, -1)
            for _, start, stop in segments
        ]
    ids_of_parts = [e for e, _, _ in segments]
    gate, up = mlps.gates_and_ups(list(zip(parts, ids_of_parts, strict=True)))
    inner = mlps.inner(gate, up, weight, x.dtype)
    out = mlps.downs([(inner[start:stop], e) for e, start, stop in segments])
    if tokens == 1:
        return out.sum(0, keepdim=True, dtype=dtype)
    # Each pair has its own row, so the order of the sum is that of the columns on any device.
    placed = out.new_zeros((tokens * k, x.shape[1])).index_copy_(0, index, out)
    return placed.view(tokens, k, -1).sum(1, dtype=dtype)


def _segments(chosen: list[int], count: int) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Sort ``chosen``: return (value, start, stop) of each value, and the sorted positions."""
    places: dict[int, list[int]] = {}
    for place, e in enumerate(chosen):
        if 0 <= e < count:
            places.setdefault(e, []).append(place)
    segments: list[tuple[int, int, int]] = []
    order: list[int] = []
    for e in sorted(places):
        segments.append((e, len(order), len(order) + len(places[e])))
        order += places[e]
    return segments, order


def _total_of_many(
    x: Tensor, ids: Tensor, weights: Tensor, mlps: ExpertMlps, offset: int
) -> Tensor:
    dtype = wide_dtype(x.dtype)
    count = len(mlps.w1)
    flat = ids.flatten().long() - offset
    local = torch.where((flat >= 0) & (flat < count), flat, count)
    order = torch.argsort(local, stable=True)
    token = order // ids.shape[1]
    weight = weights.flatten().index_select(0, order)
    given = mlps.operand(x)
    total = x.new_zeros(x.shape, dtype=dtype)
    stop = 0
    for e, size in enumerate(torch.bincount(local, minlength=count + 1)[:count].tolist()):
        start, stop = stop, stop + size
        if not size:
            continue
        at = token[start:stop]
        rows = given.index_select(0, at)
        inner = mlps.inner(mlps.gate(rows, e), mlps.up(rows, e), weight[start:stop], x.dtype)
        # A token occurs once among an expert's rows, so the order of its sum is fixed.
        total.index_add_(0, at, mlps.down(inner, e).to(dtype))
    return total
