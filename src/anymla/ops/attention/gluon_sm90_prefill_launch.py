"""Launcher of the Hopper prefill kernel: dense ranges, lists, and FP8 heads."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anymla.ops._epilogue import InverseRopeQuant, QuantizedOut, epilogue_pointers
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch
from anymla.ops.attention.gluon_sm90_prefill import prefill_kernel
from anymla.ops.attention.prefill_config import (
    HEADS,
    PrefillConfig,
    choose_config,
    stores_by_tma,
)
from anymla.ops.device import target_of

_LOG2E = 1.4426950408889634
_TILE = NVMMASharedLayout(128, 16, rank=2)


def prefill_attention(
    q: Tensor,
    rows: Tensor,
    ranges: Tensor,
    lists: Tensor | None = None,
    *,
    window: int,
    entries: int = 0,
    sink: Tensor | None = None,
    scale: float | None = None,
    value_dim: int | None = None,
    epilogue: InverseRopeQuant | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if epilogue is not None:
        to = QuantizedOut.allocate(q, epilogue, native=True)
        pairs = to.codes.view(torch.int16)
        _launch(q, rows, ranges, lists, window, entries, sink, scale, pairs, lse, to)
        return to.results(epilogue.n_groups)
    given = out
    if out is None or not out.is_contiguous() or out.element_size() != 2:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(q, rows, ranges, lists, window, entries, sink, scale, out, lse, None)
    return (out if given is None or given is out else given.copy_(out)), lse


def sparse_attention_rows(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lengths: Tensor | None = None,
    *,
    sink: Tensor | None = None,
    scale: float | None = None,
    value_dim: int = 512,
    empty_lse: float | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    max_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the contract's call as prefill of queries without windows, whose entries are all rows."""
    tokens, heads, _ = q.shape
    lists = indices.flatten(1)
    if lengths is None:
        lengths = torch.full((tokens,), lists.shape[1], dtype=torch.int32, device=q.device)
    given = out
    if out is None or not out.is_contiguous():
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    maxima = max_logits
    if maxima is not None and not maxima.is_contiguous():
        maxima = torch.empty_like(lse)
    empty = -torch.inf if empty_lse is None else empty_lse
    _launch(q, kv.flatten(1), lengths, lists, 0, 0, sink, scale, out, lse, None, maxima, empty)
    if max_logits is not None and maxima is not max_logits:
        max_logits.copy_(maxima)
    return (out if given is None or given is out else given.copy_(out)), lse


def _launch(
    q: Tensor,
    rows: Tensor,
    ranges: Tensor,
    lists: Tensor | None,
    window: int,
    entries: int,
    sink: Tensor | None,
    scale: float | None,
    out: Tensor,
    lse: Tensor,
    to: QuantizedOut | None,
    max_logits: Tensor | None = None,
    empty: float = -torch.inf,
) -> None:
    """Launch the kernel; ``ranges`` are [T, 4], or lengths [T] of lists without windows."""
    tokens, heads, channels = q.shape
    if not q.numel():
        return
    q, rows, ranges = q.contiguous(), rows.contiguous(), ranges.contiguous()
    if lists is not None and lists.stride(1) != 1:
        lists = lists.contiguous()
    listed = ranges if lists is None else lists
    sink = None if sink is None else sink.float().contiguous()
    scale = channels**-0.5 if scale is None else scale
    box = [HEADS, channels // 2]
    queries = TensorDescriptor.from_tensor(q.view(tokens * heads, channels), box, _TILE)
    outputs = queries
    if stores_by_tma(heads, rows.dtype, out.dtype, to is not None):
        outputs = TensorDescriptor.from_tensor(out.view(tokens * heads, channels), box, _TILE)
    width = entries if lists is None else lists.shape[1]
    sizes = tokens, heads, window, width, rows.shape[0], listed.stride(0)
    given = lists is not None, ranges.dim() == 1, sink is not None, max_logits is not None
    quantized = None if to is None else to.rope.dim
    dtypes = rows.dtype, out.dtype
    launch = _attention(sizes, given, quantized, dtypes, (scale * _LOG2E, empty), q.device)
    launch(
        q, queries, TensorDescriptor.from_tensor(rows, box, _TILE), outputs,
        rows, ranges, listed, lse if sink is None else sink, out,
        *(epilogue_pointers(to, lse) if to is not None else (lse, ranges, lse, 0)),
        lse, lse if max_logits is None else max_logits,
    )  # fmt: skip


@functools.lru_cache(LAUNCHES)
def _attention(
    sizes: tuple[int, int, int, int, int, int],
    given: tuple[bool, bool, bool, bool],
    rope_dim: int | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    factors: tuple[float, float],
    device: torch.device,
) -> PreparedLaunch:
    """Prepare a launch.

    Args:
        sizes: numbers of tokens, heads, window rows, list columns and rows; stride of the lists.
        given: True each for lists, lists alone (no windows), a sink, and wanted maxima.
        rope_dim: number of rotating channels of the epilogue; None without one.
        dtypes: dtypes of the rows and of the output.
        factors: scale of the scores times log2(e), and lse of a token without rows.
        device: device of the launch.
    """
    tokens, heads, window, width, rows, stride = sizes
    listed, lists_only, sink, max_logits = given
    quantized, (dtype, out_dtype) = rope_dim is not None, dtypes
    config = choose_config(
        tokens, heads, dtype, target_of(device), out_dtype=out_dtype, quantized=quantized
    )
    blocks = -(-heads // HEADS)
    return PreparedLaunch(
        prefill_kernel,
        (config.ctas,),
        *factors,
        stride,
        window,
        width,
        rows,
        tokens * blocks,
        heads,
        HEAD_BLOCKS=blocks,
        LISTED=listed,
        LISTS_ONLY=lists_only,
        SINK=sink,
        WHOLE=heads % HEADS == 0,
        QUANTIZED=quantized,
        ROPE_DIM=rope_dim or 0,
        MAX_LOGITS=max_logits,
        **_constants(config),
        num_warps=4,
    )


def _constants(config: PrefillConfig) -> dict[str, bool | int]:
    return {
        "TMA_STORE": config.tma_store,
        "LAZY_RESCALE": config.lazy_rescale,
        "CONSUMER0_REGISTERS": config.consumer0_registers,
        "CONSUMER1_REGISTERS": config.consumer1_registers,
    }
