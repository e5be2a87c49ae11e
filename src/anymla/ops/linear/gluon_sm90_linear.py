"""FP8 products for up to 128 tokens on Hopper: which kernel, and its launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.formats.quantized_rows import ROW_STEP
from anymla.ops._triton import Build, Target
from anymla.ops.early import early_launch, launches_early
from anymla.ops.linear.gluon_sm90_many import many_kernel
from anymla.ops.linear.gluon_sm90_rows import rows_kernel
from anymla.ops.linear.gluon_sm90_runs import runs_kernel
from anymla.ops.linear.gluon_sm90_tens import tens_kernel
from anymla.ops.linear.hopper_support import PLAIN_RUN
from anymla.ops.linear.tickets import tickets
from anymla.ops.linear.triton_quantize import quantize_rows_by_run
from anymla.ops.sparse_attention.triton_attention import multiprocessors
from anymla.ops.workspace import scratch

# Of a split: what a ring holds, at least.
_FEWEST_RUNS = 4


@dataclasses.dataclass(frozen=True)
class Form:
    """A kernel and its tile.

    Attributes:
        kernel: "few", or for many "codes" (e4m3 instructions) or "exact" (float16).
        rows: of the weight.
        columns: tokens.
        warps: of a program.
        stages: of the ring.
        programs: of a multiprocessor at a time.
        splits: of K.
        registers: that a thread may have, or None.
        at_once: products under way.
    """

    kernel: str
    rows: int
    columns: int
    warps: int
    stages: int
    programs: int = 2
    splits: int = 1
    registers: int | None = None
    at_once: int = 0


def form(tokens: int, groups: int, n: int, runs: int, processors: int, exact: bool) -> Form:
    """The one for so many tokens; ``exact``: products must not be rounded."""
    columns = max(8, triton.next_power_of_2(tokens))
    if columns <= 32:
        warps, stages, registers = {8: (8, 2, 64), 16: (8, 2, 80), 32: (4, 3, 104)}[columns]
        chosen = Form("runs", 32, columns, warps, stages, 1, registers=registers)
        if groups * n // chosen.rows < processors // 2:
            chosen = dataclasses.replace(chosen, rows=16)
        return chosen
    stages = {64: 6, 128: 4}[columns] - exact
    chosen = Form("exact" if exact else "codes", 64, columns, 4, stages)
    splits = _splits(groups * n // chosen.rows, runs, chosen, processors)
    return dataclasses.replace(chosen, splits=splits)


def _splits(tiles: int, runs: int, chosen: Form, processors: int) -> int:
    """Parts of K that still are of some runs, and of which all run at once."""
    splits = 1
    while (
        tiles * splits * 2 <= processors * chosen.programs
        and runs % (splits * 2) == 0
        and runs // (splits * 2) >= _FEWEST_RUNS
    ):
        splits *= 2
    return splits


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
    rows = _placed(x.reshape(-1, x.shape[-1]).contiguous())
    if len(rows) <= 8:
        chosen = Form("runs", 16, 8, 8, 4, registers=64)
    else:
        chosen = Form("runs", 16, 32, 4, 4, registers=104)
    out = multiply_plain(rows, weight, chosen, multiprocessors(x.device))
    return out.view(*x.shape[:-1], len(weight))


def product(
    x: Tensor, x_scales: Tensor, w: Tensor, scales: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """``multiply`` in the form for so many tokens."""
    (tokens, groups, width), n = x.shape, w.shape[1]
    processors = multiprocessors(x.device)
    exact = out_dtype == torch.float32
    chosen = form(tokens, groups, n, width // FP8_BLOCK, processors, exact)
    return multiply(x, x_scales, w, scales, out_dtype, chosen, processors)


def _placed(x: Tensor) -> Tensor:
    """X, where the copy engine can read it."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _boxes(x: Tensor, lines: int, runs: int, box: int, warps: int) -> TensorDescriptor:
    """Words of ``runs`` runs of ``lines`` lines one after the other; a box has a run a warp."""
    return TensorDescriptor(
        x.view(torch.int32), [runs, lines, 32], [32, runs * 32, 1], [warps, box, 32],
        NVMMASharedLayout(128, 32, rank=3),
    )  # fmt: skip


def multiply_plain(x: Tensor, w: Tensor, form: Form, processors: int, early: bool = True) -> Tensor:
    """Multiply contiguous bfloat16 x [T, K] by contiguous bfloat16 w [N, K] to float32 [T, N]."""
    (tokens, width), n = x.shape, len(w)
    runs, tiles = width // PLAIN_RUN, n // form.rows
    out = torch.empty((tokens, n), dtype=torch.float32, device=x.device)
    options: dict[str, Any] = dict(early_launch(x.device)) if early else {"EARLY": False}
    if form.registers:
        options["maxnreg"] = form.registers
    runs_kernel[(min(tiles, form.programs * processors),)](
        _boxes(x.view(-1), tokens, runs, form.columns, form.warps), None,
        _boxes(w.view(-1), n, runs, form.rows, form.warps), None, out, tokens, n, runs, tiles, 1, 0,
        0, ROWS=form.rows, COLUMNS=form.columns, WARPS=form.warps, STAGES=form.stages,
        BY_RUN=False, PLAIN=True, num_warps=form.warps, **options,
    )  # fmt: skip
    return out


def multiply(
    x: Tensor,
    x_scales: Tensor,
    w: Tensor,
    scales: Tensor,
    out_dtype: torch.dtype,
    form: Form,
    processors: int,
    early: bool = True,
) -> Tensor:
    """Multiply every group's activations by its weight.

    Args:
        x: uint8 [T, G, K], contiguous e4m3 codes.
        x_scales: float32 [T, G, K / 128]; groups lie as if they were runs.
        w: uint8 [G, N, K], contiguous codes.
        scales: contiguous [G, ceil(N / 128), K / 128].
        out_dtype: of the result.
        form: how.
        processors: of the device.
        early: launch before what is launched already has ended.

    Returns:
        [T, G, N].
    """
    x = _placed(x)
    tokens, groups, width = x.shape
    n, runs = w.shape[1], width // FP8_BLOCK
    assert groups == 1 or x_scales.stride(1) == runs * x_scales.stride(2)
    out = torch.empty((tokens, groups, n), dtype=out_dtype, device=x.device)
    tiles = groups * n // form.rows
    options: dict[str, Any] = dict(early_launch(x.device)) if early else {"EARLY": False}
    if form.registers:
        options["maxnreg"] = form.registers
    numbers = (groups, x_scales.stride(0), x_scales.stride(2))
    by_run = x_scales.stride(0) == 1
    if form.kernel == "runs":
        grid = (min(tiles, form.programs * processors),)
        runs_kernel[grid](
            _boxes(x.view(-1), tokens, groups * runs, form.columns, form.warps), x_scales,
            _boxes(w.view(-1), groups * n, runs, form.rows, form.warps), scales, out, tokens, n,
            runs, tiles, *numbers,
            ROWS=form.rows, COLUMNS=form.columns, WARPS=form.warps, STAGES=form.stages,
            BY_RUN=by_run, PLAIN=False, num_warps=form.warps, **options,
        )  # fmt: skip
        return out
    if form.kernel == "rows":
        layout = NVMMASharedLayout(128, 32, rank=2)
        w_desc, x_desc = (
            TensorDescriptor.from_tensor(each.view(torch.int32).view(lines, -1), [box, 32], layout)
            for each, lines, box in ((w, groups * n, form.rows), (x, tokens, form.columns))
        )
        rows_kernel[(min(tiles, form.programs * processors),)](
            x_desc, x_scales, w_desc, scales, out, tokens, n, runs, tiles, *numbers,
            ROWS=form.rows, COLUMNS=form.columns, WARPS=form.warps, STAGES=form.stages,
            BY_RUN=by_run, num_warps=form.warps, **options,
        )  # fmt: skip
        return out
    if form.kernel == "tens":
        layout = NVMMASharedLayout(128, 8, rank=2)
        w_desc, x_desc = (
            TensorDescriptor.from_tensor(
                each.view(torch.float8_e4m3fn).view(lines, -1), [box, FP8_BLOCK], layout
            )
            for each, lines, box in ((w, groups * n, form.rows), (x, tokens, form.columns))
        )
        tens_kernel[(min(tiles, form.programs * processors),)](
            x_desc, x_scales, w_desc, scales, out, tokens, n, runs, tiles, *numbers,
            ROWS=form.rows, TOKENS=form.columns, STAGES=form.stages, AT_ONCE=form.at_once,
            num_warps=form.columns // 16, **options,
        )  # fmt: skip
        return out
    exact = form.kernel.endswith("exact")
    kind, channels = (torch.int32, 32) if exact else (torch.float8_e4m3fn, 128)
    layout = NVMMASharedLayout(128, 32 if exact else 8, rank=2)
    w_desc, x_desc = (
        TensorDescriptor.from_tensor(each.view(kind).view(lines, -1), [box, channels], layout)
        for each, lines, box in ((w, groups * n, form.rows), (x, tokens, form.columns))
    )
    blocks = triton.cdiv(tokens, form.columns)
    part, drawn = x_scales, x  # anything
    if form.splits > 1:
        shape = (blocks, tiles, form.splits, form.rows, form.columns)
        part, drawn = scratch(shape, torch.float32, x.device), tickets(x.device)
    programs = min(tiles * form.splits, max(1, form.programs * processors // blocks))
    many_kernel[(programs, blocks)](
        x_desc, x_scales, w_desc, scales, out, part, drawn.view(torch.int32), tokens, n, runs,
        tiles, form.splits, *numbers,
        ROWS=form.rows, COLUMNS=form.columns, STAGES=form.stages, EXACT=exact,
        num_warps=form.warps, **options,
    )  # fmt: skip
    return out


def builds(target: Target) -> Iterator[Build]:
    """Every form, both formats of scales."""
    if target.name != "sm_90":
        return
    seen = set()
    for tokens in (1, 16, 32, 64, 128):
        for rows, exact in ((1536, False), (8192, False), (8192, True)):
            chosen = form(tokens, 1, rows, 32, 132, exact)
            tile = dataclasses.replace(chosen, splits=1)
            if tile not in seen:
                seen.add(tile)
                yield _build(target, tile, "*fp32" if rows == 1536 or exact else "*u8", exact)


def _build(target: Target, chosen: Form, scales: str, exact: bool) -> Build:
    layout = NVMMASharedLayout(128, 32, rank=3)
    integers = ("tokens", "n", "runs", "tiles", "groups", "x_scale_token", "x_scale_run")
    types = {
        "x_scales": "*fp32",
        "scales": scales,
        "out": "*fp32" if exact else "*bf16",
        **dict.fromkeys(integers, "i32"),
    }
    constants: dict[str, Any] = {
        "ROWS": chosen.rows,
        "COLUMNS": chosen.columns,
        "STAGES": chosen.stages,
        "EARLY": launches_early(target),
    }
    if chosen.kernel == "runs":
        x, w = ((chosen.warps, lines, 32) for lines in (chosen.columns, chosen.rows))
        kernel, kind = runs_kernel, "i32"
        constants |= {"WARPS": chosen.warps, "BY_RUN": True, "PLAIN": False}
    else:
        kind, channels = ("i32", 32) if chosen.kernel == "exact" else ("fp8e4nv", 128)
        layout = NVMMASharedLayout(128, 32 if chosen.kernel == "exact" else 8, rank=2)
        x, w = ((lines, channels) for lines in (chosen.columns, chosen.rows))
        kernel = many_kernel
        constants["EXACT"] = chosen.kernel == "exact"
        types |= {"part": "*fp32", "tickets": "*i32", "splits": "i32"}
    types["x_desc"] = f"tensordesc<{kind}{list(x)},{layout!r}>"
    types["w_desc"] = f"tensordesc<{kind}{list(w)},{layout!r}>"
    return Build(
        f"{chosen.kernel}, {chosen.rows} rows, {chosen.columns} columns, to {types['out'][1:]}",
        kernel,
        types,
        constants,
        num_warps=chosen.warps,
        divisible=("n",),
        matrix="e4m3" if chosen.kernel == "codes" else "fp16",
    )
