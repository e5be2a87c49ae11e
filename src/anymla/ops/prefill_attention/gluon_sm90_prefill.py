"""Launch the Hopper kernel of attention during prefill."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.ops._build import Build
from anymla.ops.device import Target, target_of
from anymla.ops.prefill_attention.gluon_sm90_prefill_kernel import prefill_kernel

_LOG2E = 1.4426950408889634
HEADS = 64
# Registers of a thread: the producer gets what is left of 168 * 3, 88. Other splits spill.
LEFT_REGISTERS = 240
RIGHT_REGISTERS = 176
# In bfloat16 the rounding of a largest weight that is not 1 would show.
LATE = {torch.float16: True, torch.bfloat16: False}
COPIED = True


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
    given = out
    if out is None or not out.is_contiguous() or out.element_size() != 2:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    _launch(q, rows, runs, lists, window, entries, sink, scale, out, lse, None)
    return (out if given is None or given is out else given.copy_(out)), lse


def prefill_attention_fp8_quant(
    q: Tensor,
    rows: Tensor,
    runs: Tensor,
    lists: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    n_groups: int,
    window: int,
    entries: int = 0,
    sink: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    tokens, heads, channels = q.shape
    shape = (tokens, n_groups, heads // n_groups * channels)
    codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device=q.device)
    shape = (tokens, n_groups, shape[2] // FP8_BLOCK)
    scales = torch.empty(shape, dtype=torch.float32, device=q.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    turned = Turned(scales, positions.contiguous(), cos_sin_cache.contiguous())
    pairs = codes.view(torch.int16)
    _launch(q, rows, runs, lists, window, entries, sink, scale, pairs, lse, turned)
    return codes, scales


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
    """See ``sparse_attention.interface``: queries without windows, whose entries are all rows."""
    tokens, heads, _ = q.shape
    lists = indices.flatten(1)
    if lengths is None:
        lengths = torch.full((tokens,), lists.shape[1], dtype=torch.int32, device=q.device)
    given = out
    if out is None or not out.is_contiguous():
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    peaks = max_logits
    if peaks is not None and not peaks.is_contiguous():
        peaks = torch.empty_like(lse)
    empty = -torch.inf if empty_lse is None else empty_lse
    _launch(q, kv.flatten(1), lengths, lists, 0, 0, sink, scale, out, lse, None, peaks, empty)
    if max_logits is not None and peaks is not max_logits:
        max_logits.copy_(peaks)
    return (out if given is None or given is out else given.copy_(out)), lse


@dataclasses.dataclass(frozen=True)
class Turned:
    """What the kernel needs to rotate heads back and quantise them.

    Attributes:
        scales: float32, written.
        positions: int64 [T].
        table: float32 [L, channels that turn], cosines then sines.
    """

    scales: Tensor
    positions: Tensor
    table: Tensor


def _launch(
    q: Tensor,
    rows: Tensor,
    runs: Tensor,
    lists: Tensor | None,
    window: int,
    entries: int,
    sink: Tensor | None,
    scale: float | None,
    out: Tensor,
    lse: Tensor,
    turned: Turned | None,
    peaks: Tensor | None = None,
    empty: float = -torch.inf,
) -> None:
    """``runs`` [T, 4], or the lengths [T] of lists that are all there is."""
    tokens, heads, channels = q.shape
    blocks = -(-heads // HEADS)
    tasks = tokens * blocks
    if not tasks:
        return
    q, rows, runs = q.contiguous(), rows.contiguous(), runs.contiguous()
    if lists is not None and lists.stride(1) != 1:
        lists = lists.contiguous()
    listed = runs if lists is None else lists
    sink = None if sink is None else sink.float().contiguous()
    scale = channels**-0.5 if scale is None else scale
    tile = NVMMASharedLayout(128, 16, rank=2)
    box = [HEADS, channels // 2]
    queries = TensorDescriptor.from_tensor(q.view(tokens * heads, channels), box, tile)
    copied = COPIED and turned is None and heads % HEADS == 0 and out.dtype == rows.dtype
    outputs = out.view(tokens * heads, channels) if copied else out
    prefill_kernel[(min(tasks, target_of(q.device).sm_count),)](
        q, queries, TensorDescriptor.from_tensor(rows, box, tile),
        TensorDescriptor.from_tensor(outputs, box, tile) if copied else queries,
        rows, runs, listed, lse if sink is None else sink, out,
        *((lse, runs, lse, 0) if turned is None else _of(turned)),
        lse, lse if peaks is None else peaks,
        scale * _LOG2E, empty, listed.stride(0), window,
        entries if lists is None else lists.shape[1], len(rows), tasks, heads,
        HEAD_BLOCKS=blocks, LISTED=lists is not None, BARE=runs.dim() == 1, SINK=sink is not None,
        WHOLE=heads % HEADS == 0, QUANTISED=turned is not None,
        TURNED=0 if turned is None else turned.table.shape[1],
        COPIED=copied, LATE=LATE[rows.dtype], PEAKS=peaks is not None,
        LEFT_REGISTERS=LEFT_REGISTERS, RIGHT_REGISTERS=RIGHT_REGISTERS,
        num_warps=4,
    )  # fmt: skip


def _of(turned: Turned) -> tuple[Tensor, Tensor, Tensor, int]:
    return turned.scales, turned.positions, turned.table, len(turned.table)


def builds(target: Target) -> Iterator[Build]:
    """Runs and lists, whole and partial blocks of heads, both outputs, both types."""
    if target.name != "sm_90":
        return
    for label, dtype, constants in (
        ("runs", "bf16", {}),
        ("lists", "bf16", {"LISTED": True}),
        ("lists, fp16", "fp16", {"LISTED": True}),
        ("lists alone, largest scores", "bf16", {"LISTED": True, "BARE": True, "PEAKS": True}),
        ("runs, 100 heads, no sink", "bf16", {"HEAD_BLOCKS": 2, "WHOLE": False, "SINK": False}),
        ("runs, quantised", "bf16", {"QUANTISED": True, "TURNED": 64}),
        ("lists, quantised", "bf16", {"LISTED": True, "QUANTISED": True, "TURNED": 64}),
    ):
        tile = f"tensordesc<{dtype}[64, 256],{NVMMASharedLayout(128, 16, rank=2)!r}>"
        integers = ("length", "stride", "window", "width", "rows", "tasks", "heads")
        quantised = "QUANTISED" in constants
        yield Build(
            label,
            prefill_kernel,
            {
                "qdesc": tile,
                "kdesc": tile,
                "odesc": tile,
                **dict.fromkeys(("q", "kv"), f"*{dtype}"),
                "out": "*i16" if quantised else f"*{dtype}",
                "positions": "*i64" if quantised else "*i32",
                **dict.fromkeys(("scale", "empty"), "fp32"),
                **dict.fromkeys(("runs", "lists"), "*i32"),
                **dict.fromkeys(("sink", "scales", "table", "lse", "peaks"), "*fp32"),
                **dict.fromkeys(integers, "i32"),
            },
            {
                "HEAD_BLOCKS": 1,
                "LISTED": False,
                "BARE": False,
                "SINK": True,
                "WHOLE": True,
                "QUANTISED": False,
                "TURNED": 0,
                "COPIED": COPIED and not quantised and constants.get("WHOLE", True),
                "LATE": dtype == "fp16",
                "PEAKS": False,
                "LEFT_REGISTERS": LEFT_REGISTERS,
                "RIGHT_REGISTERS": RIGHT_REGISTERS,
                **constants,
            },
            matrix=True,
            # What is kept from query to query; of it one a block with Triton 3.6, three with 3.9.
            spills=140,
        )
