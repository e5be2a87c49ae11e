"""Launch the Hopper kernel of attention during prefill."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anymla.ops.prefill_attention.gluon_sm90_prefill_kernel import prefill_kernel
from anymla.ops.sparse_attention.triton_attention import multiprocessors

_LOG2E = 1.4426950408889634
HEADS = 64
# Registers of a thread: the producer gets what is left of 168 * 3, 88. Other splits spill.
LEFT_REGISTERS = 240
RIGHT_REGISTERS = 176


def prefill_attention(
    q: Tensor,
    rows: Tensor,
    runs: Tensor,
    lists: Tensor | None = None,
    *,
    window: int,
    entries: int = 0,
    sink: Tensor | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    tokens, heads, channels = q.shape
    given = out
    if out is None or not out.is_contiguous() or out.element_size() != 2:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    if tokens and heads:
        q = q.contiguous()
        rows = rows.contiguous()
        scale = channels**-0.5 if scale is None else scale
        _launch(q, rows, runs, lists, window, entries, sink, scale, out, lse)
    return (out if given is None or given is out else given.copy_(out)), lse


def _launch(
    q: Tensor,
    rows: Tensor,
    runs: Tensor,
    lists: Tensor | None,
    window: int,
    entries: int,
    sink: Tensor | None,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    tokens, heads, channels = q.shape
    blocks = -(-heads // HEADS)
    tasks = tokens * blocks
    tile = NVMMASharedLayout(128, 16, rank=2)
    box = [HEADS, channels // 2]
    runs = runs.contiguous()
    if lists is not None and lists.stride(1) != 1:
        lists = lists.contiguous()
    sink = None if sink is None else sink.float().contiguous()
    listed = runs if lists is None else lists
    prefill_kernel[(min(tasks, multiprocessors(q.device)),)](
        TensorDescriptor.from_tensor(q.view(tokens * heads, channels), box, tile),
        TensorDescriptor.from_tensor(rows, box, tile),
        rows, runs, listed, lse if sink is None else sink, out, lse,
        scale * _LOG2E, listed.stride(0), window, entries if lists is None else lists.shape[1],
        len(rows), tasks, heads,
        HEAD_BLOCKS=blocks, LISTED=lists is not None, SINK=sink is not None,
        WHOLE=heads % HEADS == 0, LEFT_REGISTERS=LEFT_REGISTERS, RIGHT_REGISTERS=RIGHT_REGISTERS,
        num_warps=4,
    )  # fmt: skip
