"""Reference of the mixture of experts, in float32 (float64 for float64 activations)."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.fp8_block import (
    FP8_BLOCK,
    dequantize_fp8_rows,
    dequantize_fp8_weight,
    quantize_fp8_rows,
)
from anymla.formats.mxfp4 import dequantize_mxfp4
from anymla.formats.nvfp4 import dequantize_nvfp4
from anymla.ops._check import wide_dtype
from anymla.ops._quantized import fill_codes
from anymla.ops.streams import flush_stream_wait

# Makes the weights 0 instead of 0 / 0 for a token whose every score underflows.
SUM_FLOOR = 1e-20


def _scores(x: Tensor, gate: Tensor) -> Tensor:
    logits = x.to(wide_dtype(x.dtype)) @ gate.to(wide_dtype(x.dtype)).T
    return torch.logaddexp(logits, torch.zeros_like(logits)).sqrt()


def _weights(scores: Tensor, ids: Tensor, scale: float) -> Tensor:
    chosen = scores.gather(1, ids)
    return chosen / (chosen.sum(-1, keepdim=True) + SUM_FLOOR) * scale


def route_hash(
    x: Tensor, gate: Tensor, token_ids: Tensor, tid2eid: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Reference of ``interface.route_hash``; see its contract."""
    known = (token_ids >= 0) & (token_ids < tid2eid.shape[0])
    ids = tid2eid[torch.where(known, token_ids, 0)]
    weights = _weights(_scores(x, gate), ids, scale)
    ids = torch.where(known[:, None], ids, -1)
    return ids.int(), torch.where(known[:, None], weights, 0.0)


def route_biased(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    *,
    k: int,
    scale: float,
    is_valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Reference of ``interface.route_biased``; see its contract."""
    scores = _scores(x, gate)
    ranked = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices
    ids = ranked[:, :k]
    weights = _weights(scores, ids, scale)
    if is_valid is None:
        return ids.int(), weights
    known = is_valid.unsqueeze(1)
    return torch.where(known, ids, -1).int(), torch.where(known, weights, 0.0)


def swiglu(
    gate: Tensor,
    up: Tensor,
    limit: float,
    *,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
) -> Tensor:
    """Reference of ``interface.swiglu``; see its contract."""
    g = gate.to(wide_dtype(gate.dtype)).clamp(max=limit)
    u = up.to(wide_dtype(up.dtype)).clamp(-limit, limit)
    out = (g * torch.sigmoid(g) * u).to(gate.dtype)
    fill_codes(out, codes, code_scales)
    return out


def experts(
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
    """Reference of ``interface.experts``; see its contract."""
    flush_stream_wait()
    dtype = wide_dtype(x.dtype)
    quantized = quantize_activations and weight_format in ("fp8", "mxfp4")

    def product(
        rows: Tensor, matrices: list[Tensor] | Tensor, scales: list[Tensor] | Tensor, e: int, n: int
    ) -> Tensor:
        given = rows.to(x.dtype)
        if quantized:
            given = dequantize_fp8_rows(*quantize_fp8_rows(given, quant_block), dtype, quant_block)
        if weight_format == "fp8":
            matrix = dequantize_fp8_weight(matrices[e], scales[e], dtype, quant_block)
        elif weight_format == "mxfp4":
            matrix = dequantize_mxfp4(matrices[e], scales[e], dtype)
        elif global_scales is not None:
            matrix = dequantize_nvfp4(matrices[e], scales[e], global_scales[e, n], dtype)
        else:
            matrix = matrices[e].to(dtype)
        return (given.to(dtype) @ matrix.T).to(x.dtype).to(dtype)

    total = torch.zeros_like(x, dtype=dtype)
    for e in range(len(w1)):
        for column in range(ids.shape[1]):
            rows = (ids[:, column] == e + expert_offset).nonzero()[:, 0]
            gate, up = product(x[rows], w1, s1, e, 0), product(x[rows], w3, s3, e, 1)
            inner = weights[rows, column, None] * swiglu(gate, up, swiglu_limit)
            total[rows] = total[rows] + product(inner, w2, s2, e, 2)
    if shared is not None:
        total = total + shared
    return total.to(x.dtype)
