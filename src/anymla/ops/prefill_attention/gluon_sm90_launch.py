"""Launcher of the Hopper prefill kernel: dense ranges, lists, and FP8 heads."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anymla.ops._build import Build
from anymla.ops._epilogue import QuantizedOut, epilogue_pointers
from anymla.ops.device import Target, target_of
from anymla.ops.prefill_attention.config import HEADS, ROPE_DIM, PrefillConfig, choose_config
from anymla.ops.prefill_attention.gluon_sm90_prefill import prefill_kernel

_LOG2E = 1.4426950408889634


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
    to = QuantizedOut.allocate(q, positions, cos_sin_cache, native=True)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    pairs = to.codes.view(torch.int16)
    _launch(q, rows, runs, lists, window, entries, sink, scale, pairs, lse, to)
    return to.results(n_groups)


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
    runs: Tensor,
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
    """``runs`` [T, 4], or the lengths [T] of lists that are all there is."""
    tokens, heads, channels = q.shape
    if not q.numel():
        return
    config = choose_config(
        tokens,
        heads,
        rows.dtype,
        target_of(q.device),
        out_dtype=out.dtype,
        quantized=to is not None,
    )
    q, rows, runs = q.contiguous(), rows.contiguous(), runs.contiguous()
    if lists is not None and lists.stride(1) != 1:
        lists = lists.contiguous()
    listed = runs if lists is None else lists
    sink = None if sink is None else sink.float().contiguous()
    scale = channels**-0.5 if scale is None else scale
    tile = NVMMASharedLayout(128, 16, rank=2)
    box = [HEADS, channels // 2]
    queries = TensorDescriptor.from_tensor(q.view(tokens * heads, channels), box, tile)
    outputs = queries
    if config.tma_store:
        outputs = TensorDescriptor.from_tensor(out.view(tokens * heads, channels), box, tile)
    blocks = -(-heads // HEADS)
    prefill_kernel[(config.ctas,)](
        q, queries, TensorDescriptor.from_tensor(rows, box, tile), outputs,
        rows, runs, listed, lse if sink is None else sink, out,
        *(epilogue_pointers(to, lse) if to is not None else (lse, runs, lse, 0)),
        lse, lse if max_logits is None else max_logits,
        scale * _LOG2E, empty, listed.stride(0), window,
        entries if lists is None else lists.shape[1], len(rows), tokens * blocks, heads,
        HEAD_BLOCKS=blocks, LISTED=lists is not None, LISTS_ONLY=runs.dim() == 1,
        SINK=sink is not None, WHOLE=heads % HEADS == 0, QUANTIZED=to is not None,
        ROPE_DIM=0 if to is None else to.rope.dim, MAX_LOGITS=max_logits is not None,
        **_constants(config),
        num_warps=4,
    )  # fmt: skip


def _constants(config: PrefillConfig) -> dict[str, bool | int]:
    return {
        "TMA_STORE": config.tma_store,
        "LAZY_RESCALE": config.lazy_rescale,
        "CONSUMER0_REGISTERS": config.consumer0_registers,
        "CONSUMER1_REGISTERS": config.consumer1_registers,
    }


def builds(target: Target) -> Iterator[Build]:
    """Ranges and lists, whole and partial blocks of heads, both outputs, both types."""
    if target.name != "sm_90":
        return
    for label, dtype, constants in (
        ("runs", "bf16", {}),
        ("lists", "bf16", {"LISTED": True}),
        ("lists, fp16", "fp16", {"LISTED": True}),
        (
            "lists alone, largest scores",
            "bf16",
            {"LISTED": True, "LISTS_ONLY": True, "MAX_LOGITS": True},
        ),
        ("runs, 100 heads, no sink", "bf16", {"HEAD_BLOCKS": 2, "WHOLE": False, "SINK": False}),
        ("runs, quantised", "bf16", {"QUANTIZED": True, "ROPE_DIM": ROPE_DIM}),
        ("lists, quantised", "bf16", {"LISTED": True, "QUANTIZED": True, "ROPE_DIM": ROPE_DIM}),
    ):
        tile = f"tensordesc<{dtype}[64, 256],{NVMMASharedLayout(128, 16, rank=2)!r}>"
        integers = ("length", "stride", "window", "width", "rows", "tiles", "heads")
        quantized = "QUANTIZED" in constants
        config = choose_config(
            1024,
            64 if constants.get("WHOLE", True) else 100,
            {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype],
            target,
            quantized=quantized,
        )
        yield Build(
            label,
            prefill_kernel,
            {
                "qdesc": tile,
                "kdesc": tile,
                "odesc": tile,
                **dict.fromkeys(("q", "kv"), f"*{dtype}"),
                "out": "*i16" if quantized else f"*{dtype}",
                "positions": "*i64" if quantized else "*i32",
                **dict.fromkeys(("scale", "empty"), "fp32"),
                **dict.fromkeys(("runs", "lists"), "*i32"),
                **dict.fromkeys(("sink", "scales", "table", "lse", "max_logits"), "*fp32"),
                **dict.fromkeys(integers, "i32"),
            },
            {
                "HEAD_BLOCKS": 1,
                "LISTED": False,
                "LISTS_ONLY": False,
                "SINK": True,
                "WHOLE": True,
                "QUANTIZED": False,
                "ROPE_DIM": 0,
                "MAX_LOGITS": False,
                **_constants(config),
                **constants,
            },
            matrix=True,
            # What is kept from query to query; of it one a block with Triton 3.6, three with 3.9.
            spills=140,
        )
