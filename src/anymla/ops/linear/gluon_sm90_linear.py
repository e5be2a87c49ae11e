"""Launches of Hopper's products for up to 128 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.formats.quantized_rows import ROW_STEP
from anymla.ops._build import Build
from anymla.ops.device import Target, target_of
from anymla.ops.linear.gluon_sm90_rows import rows_kernel
from anymla.ops.linear.gluon_sm90_runs import runs_kernel
from anymla.ops.linear.gluon_sm90_tens import tens_kernel
from anymla.ops.linear.hopper_forms import Form, form, plain_form
from anymla.ops.linear.hopper_support import PLAIN_RUN
from anymla.ops.linear.triton_quantize import quantize_rows_by_run
from anymla.ops.pdl import pdl_launch, target_has_pdl


def fp8_block_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    quantize_activations: bool = False,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
) -> Tensor:
    """See ``interface.fp8_block_linear``."""
    assert quantize_activations
    rows = x.reshape(-1, x.shape[-1])
    tokens = len(rows)
    if codes is None or code_scales is None:
        codes, code_scales = quantize_rows_by_run(rows.contiguous(), ROW_STEP)
    out = product(
        codes[:tokens].unsqueeze(1),
        code_scales[:tokens].unsqueeze(1),
        weight.unsqueeze(0),
        scale.unsqueeze(0),
        x.dtype,
    )
    return out.view(*x.shape[:-1], len(weight))


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """See ``interface.linear_float32``."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = multiply_plain(rows, weight, plain_form(len(rows)), target_of(x.device).sm_count)
    return out.view(*x.shape[:-1], len(weight))


def product(
    x: Tensor, x_scales: Tensor, w: Tensor, scales: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """``multiply`` in the form for so many tokens."""
    (tokens, groups, width), n = x.shape, w.shape[1]
    processors = target_of(x.device).sm_count
    chosen = form(tokens, groups, n, width // FP8_BLOCK, processors)
    return multiply(x, x_scales, w, scales, out_dtype, chosen, processors)


def multiply(
    x: Tensor,
    x_scales: Tensor,
    w: Tensor,
    scales: Tensor,
    out_dtype: torch.dtype,
    chosen: Form,
    processors: int,
    early: bool = True,
) -> Tensor:
    """Multiply every group's activations by its weight.

    Args:
        x: uint8 [T, G, K], contiguous e4m3 codes.
        x_scales: float32 [T, G, K / 128]; groups lie as if they were runs. Where tokens are next to
            each other, there is memory for as many as ``QuantizedRows`` has.
        w: uint8 [G, N, K], contiguous codes.
        scales: contiguous [G, ceil(N / 128), K / 128].
        out_dtype: of the result.
        chosen: how.
        processors: of the device.
        early: launch before what is launched already has ended.

    Returns:
        [T, G, N].
    """
    tokens, groups, width = x.shape
    n, runs = w.shape[1], width // FP8_BLOCK
    assert groups == 1 or x_scales.stride(1) == runs * x_scales.stride(2)
    out = torch.empty((tokens, groups, n), dtype=out_dtype, device=x.device)
    tiles = groups * n // chosen.rows
    numbers = (tokens, n, runs, tiles, groups, x_scales.stride(0), x_scales.stride(2))
    constants = {"ROWS": chosen.rows, "STAGES": chosen.stages, **_options(chosen, x, early)}
    grid = (min(tiles, chosen.programs * processors),)
    given = (_placed(x), tokens, groups * runs, chosen.columns)
    weight = (w, groups * n, runs, chosen.rows)
    if chosen.kernel == "tens":
        tens_kernel[grid](
            _lines(*given, torch.float8_e4m3fn), x_scales, _lines(*weight, torch.float8_e4m3fn),
            scales, out, *numbers, TOKENS=chosen.columns, AT_ONCE=chosen.at_once, **constants,
        )  # fmt: skip
        return out
    constants |= {"COLUMNS": chosen.columns, "WARPS": chosen.warps}
    constants["BY_RUN"] = x_scales.stride(0) == 1
    if chosen.kernel == "rows":
        rows_kernel[grid](
            _lines(*given, torch.int32), x_scales, _lines(*weight, torch.int32), scales, out,
            *numbers, **constants,
        )  # fmt: skip
    else:
        runs_kernel[grid](
            _boxes(*given, chosen.warps), x_scales, _boxes(*weight, chosen.warps), scales, out,
            *numbers, PLAIN=False, **constants,
        )  # fmt: skip
    return out


def multiply_plain(
    x: Tensor, w: Tensor, chosen: Form, processors: int, early: bool = True
) -> Tensor:
    """Multiply contiguous bfloat16 x [T, K] by contiguous bfloat16 w [N, K] to float32 [T, N]."""
    (tokens, width), n = x.shape, len(w)
    runs, tiles = width // PLAIN_RUN, n // chosen.rows
    out = torch.empty((tokens, n), dtype=torch.float32, device=x.device)
    runs_kernel[(min(tiles, chosen.programs * processors),)](
        _boxes(_placed(x), tokens, runs, chosen.columns, chosen.warps), None,
        _boxes(w, n, runs, chosen.rows, chosen.warps), None, out, tokens, n, runs, tiles, 1, 0, 0,
        ROWS=chosen.rows, COLUMNS=chosen.columns, WARPS=chosen.warps, STAGES=chosen.stages,
        BY_RUN=False, PLAIN=True, **_options(chosen, x, early),
    )  # fmt: skip
    return out


def _options(chosen: Form, x: Tensor, early: bool) -> dict[str, Any]:
    launch = pdl_launch(x.device) if early else {"PDL": False}
    return {"num_warps": chosen.warps, "maxnreg": chosen.registers, **launch}


def _placed(x: Tensor) -> Tensor:
    """X, where the copy engine can read it."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _boxes(x: Tensor, lines: int, runs: int, box: int, warps: int) -> TensorDescriptor:
    """Words of ``runs`` runs of ``lines`` lines one after the other; a box has a run a warp."""
    return TensorDescriptor(
        x.view(-1).view(torch.int32), [runs, lines, 32], [32, runs * 32, 1], [warps, box, 32],
        NVMMASharedLayout(128, 32, rank=3),
    )  # fmt: skip


def _lines(x: Tensor, lines: int, runs: int, box: int, kind: torch.dtype) -> TensorDescriptor:
    """Lines of ``kind``, of which a box has a run of 128 bytes."""
    layout = NVMMASharedLayout(128, 8 * kind.itemsize, rank=2)
    of_run = FP8_BLOCK // kind.itemsize
    shape = [lines, runs * of_run]
    return TensorDescriptor(x.view(-1).view(kind), shape, [shape[1], 1], [box, of_run], layout)


# Rows and runs of Flash's and Pro's weights, as far as forms differ.
_SIZES = (
    (1536, 32), (4096, 32), (8192, 32), (32768, 8), (4096, 64), (6144, 56), (7168, 128), (65536, 12)
)  # fmt: skip


def builds(target: Target) -> Iterator[Build]:
    """Every form, both formats of scales, and products of bfloat16."""
    if target.name != "sm_90":
        return
    seen = set()
    for tokens in (1, 16, 32, 64, 128):
        for rows, runs in _SIZES:
            chosen = form(tokens, 1, rows, runs, 132)
            if chosen not in seen:
                seen.add(chosen)
                yield _build(target, chosen, "*u8" if rows == 4096 else "*fp32")
    for tokens in (1, 32):
        yield _build(target, plain_form(tokens), None)


def _build(target: Target, chosen: Form, scales: str | None) -> Build:
    types = {"scales": scales, "x_scales": "*fp32"} if scales else {}
    types["out"] = "*bf16" if scales else "*fp32"
    integers = ("tokens", "n", "runs", "tiles", "groups", "x_scale_token", "x_scale_run")
    constants: dict[str, Any] = {
        "ROWS": chosen.rows,
        "STAGES": chosen.stages,
        "PDL": target_has_pdl(target),
    }
    runs, tens = chosen.kernel == "runs", chosen.kernel == "tens"
    layout = NVMMASharedLayout(128, 8 if tens else 32, rank=3 if runs else 2)
    for name, lines in (("x_desc", chosen.columns), ("w_desc", chosen.rows)):
        box = [chosen.warps, lines, 32] if runs else [lines, 128 if tens else 32]
        types[name] = f"tensordesc<{'fp8e4nv' if tens else 'i32'}{box},{layout!r}>"
    if tens:
        constants |= {"TOKENS": chosen.columns, "AT_ONCE": chosen.at_once}
    else:
        constants |= {"COLUMNS": chosen.columns, "WARPS": chosen.warps, "BY_RUN": bool(scales)}
    if runs:
        constants["PLAIN"] = scales is None
    if scales is None:
        constants |= {"scales": None, "x_scales": None}
    kernels = {"runs": runs_kernel, "rows": rows_kernel, "tens": tens_kernel}
    return Build(
        f"{chosen.rows} rows, {chosen.columns} tokens, {scales or 'bfloat16'}",
        kernels[chosen.kernel],
        types | dict.fromkeys(integers, "i32"),
        constants,
        num_warps=chosen.warps,
        divisible=("n",),
        matrix="e4m3" if tens else "fp16" if scales else "bf16",
        registers=chosen.registers,
    )
