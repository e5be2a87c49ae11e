"""Launch decode attention over coded rows on Hopper: the kernel, the combine of what was cut."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anymla.formats.page_layout import MAIN_FP8, V32_FP8, get_layout
from anymla.formats.triton_rows import RowCodec, row_codec
from anymla.ops._epilogue import InverseRopeQuant, QuantizedOut, epilogue_pointers
from anymla.ops._triton_epilogue import inverse_rope_quantize
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch
from anymla.ops.attention.cache_rows import CacheRows
from anymla.ops.attention.decode_config import (
    CONSUMER1_REGISTERS,
    M64,
    M64_PRODUCER_REGISTERS,
    SWAP_AB_BUFFERS,
    SWAP_AB_PRODUCER_REGISTERS,
    TILE_COST,
    Cut,
    Schedule,
    choose_schedule,
    stream_k_size,
)
from anymla.ops.attention.gluon_sm90_decode_epilogue import SUMS
from anymla.ops.attention.gluon_sm90_decode_m64 import decode_m64_kernel
from anymla.ops.attention.gluon_sm90_decode_swap_ab import decode_swap_ab_kernel
from anymla.ops.attention.gluon_sm90_tile_scheduler import RANGE, plan_work_kernel
from anymla.ops.attention.triton_decode_combine import AttentionOut, Partials, combine
from anymla.ops.device import target_of
from anymla.ops.pdl import pdl_launch
from anymla.ops.registry import require
from anymla.ops.streams import scratch

_LARGEST_INT32 = 2**31 - 1
# Partials of a batch-invariant launch; more tokens take several launches.
_WORKSPACE_BYTES = 256 << 20
_LAYOUT = get_layout(MAIN_FP8)
_V32 = get_layout(V32_FP8)
_CHANNELS = _LAYOUT.channels  # of values, in V3.2's rows as well
# Half a row of a tile, and what of it lies side by side in shared memory.
_HALF, _CHUNK = _CHANNELS // 2, 64
_TILE, _TOKEN_TILE = (NVMMASharedLayout(128, 16, rank=rank) for rank in (2, 3))
_ROPE_DIM = 64  # channels that the kernels' own epilogue rotates


@dataclasses.dataclass(frozen=True)
class Call:
    """Inputs of one attention, in the form that the kernels read, and its schedule.

    Attributes:
        q: queries [T, H, D], whose heads can be moved 16 bytes at a time.
        rows: rows of one cache or two, as ``CacheRows.dense`` returns them.
        sink: one logit per head that carries no value, [H] float32, or None.
        scale: factor of the scores.
        schedule: cut of the work, from ``choose_schedule``.
        plan: plan of a planned schedule, or None.
    """

    q: Tensor
    rows: list[CacheRows]
    sink: Tensor | None
    scale: float
    schedule: Schedule
    plan: Tensor | None = None

    @classmethod
    def of(
        cls,
        q: Tensor,
        rows: Sequence[CacheRows],
        sink: Tensor | None,
        scale: float | None,
        batch_invariant: bool,
        plan: Tensor | None,
    ) -> Call:
        """Prepare the operation's arguments and choose a schedule."""
        plan = None if batch_invariant else plan
        tokens, heads, channels = q.shape
        schedule = choose_schedule(
            tokens,
            heads,
            tuple(each.width for each in rows),
            target_of(q.device).sm_count,
            lengths=any(each.lengths is not None for each in rows) or plan is not None,
            batch_invariant=batch_invariant,
            planned=plan is not None,
            v32=channels == _V32.channels,
        )
        if plan is not None:
            numbers = plan_numbers(schedule, tokens) if schedule.planned else 0
            require(len(plan) == numbers, "sparse_attention", "plan", f"[{numbers}]", len(plan))
        return cls(
            q if _aligned(q) else q.clone(memory_format=torch.contiguous_format),
            [_with_lengths(each.dense()) for each in rows],
            None if sink is None else sink.float().contiguous(),
            channels**-0.5 if scale is None else scale,
            schedule,
            None if plan is None else plan.contiguous(),
        )

    def part(self, tokens: slice) -> Call:
        """Return the inputs of a slice of the tokens, with the same schedule."""
        rows = [each.part(tokens) for each in self.rows]
        return dataclasses.replace(self, q=self.q[tokens], rows=rows)


def sparse_attention(
    q: Tensor,
    rows: Sequence[CacheRows],
    *,
    sink: Tensor | None = None,
    scale: float | None = None,
    value_dim: int | None = None,
    empty_lse: float | None = None,
    batch_invariant: bool = False,
    plan: Tensor | None = None,
    epilogue: InverseRopeQuant | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    if epilogue is not None:
        call = Call.of(q, rows, sink, scale, batch_invariant, plan) if q.numel() else None
        return _quantised(q, call, epilogue)
    tokens, heads, channels = q.shape
    assert (channels if value_dim is None else value_dim) == _CHANNELS
    given = out
    if out is None or not _aligned(out):
        out = torch.empty((tokens, heads, _CHANNELS), dtype=q.dtype, device=q.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    if tokens and heads:
        call = Call.of(q, rows, sink, scale, batch_invariant, plan)
        empty = float("-inf") if empty_lse is None else empty_lse
        attend(call, AttentionOut(out, lse, empty))
    return (out if given is None or given is out else given.copy_(out)), lse


def _quantised(q: Tensor, call: Call | None, epilogue: InverseRopeQuant) -> tuple[Tensor, Tensor]:
    """Attend, round to q's dtype as separate calls do, rotate back and quantise.

    ``call`` is None if there are no queries.
    """
    to = QuantizedOut.allocate(q, epilogue, native=True)
    if call is not None:
        lse = scratch(tuple(q.shape[:2]), torch.float32, q.device)
        # The combine rotates any channels, the kernels' epilogue those of V4.
        if to.rope.dim == _ROPE_DIM or call.schedule.combined:
            attend(call, AttentionOut(call.q, lse, quantized=to))
        else:
            out = scratch(tuple(q.shape), q.dtype, q.device)
            attend(call, AttentionOut(out, lse))
            inverse_rope_quantize(out, to)
    return to.results(epilogue.n_groups)


_endless: dict[torch.device, Tensor] = {}


def _with_lengths(rows: CacheRows) -> CacheRows:
    """Give full lists lengths that the kernels cut to the lists' width.

    With 128 heads on an H200 the kernels without lengths take an eighth longer than those with.
    """
    tokens, device = len(rows.indices), rows.indices.device
    if rows.lengths is not None:
        return rows
    found = _endless.get(device)
    if found is None or len(found) < tokens:
        if torch.cuda.is_current_stream_capturing():
            return rows  # what a graph writes is not there before it runs
        found = torch.full((max(4096, 2 * tokens),), _LARGEST_INT32, dtype=torch.int32).to(device)
        torch.cuda.synchronize(device)
        _endless[device] = found
    return rows._replace(lengths=found[:tokens])


def _aligned(x: Tensor) -> bool:
    """Return True if rows of heads can be moved 16 bytes at a time."""
    step = 16 // x.element_size()
    return (
        x.stride(2) == 1
        and x.stride(1) % step == 0
        and x.stride(0) % step == 0
        and x.data_ptr() % 16 == 0
    )


def attend(call: Call, to: AttentionOut) -> None:
    """Launch by the schedule, in as many parts as fit the workspace of partials."""
    tokens, schedule = len(call.q), call.schedule
    step = tokens
    if schedule.cut == Cut.EVERY:
        row_bytes = 2 * _CHANNELS * schedule.heads
        step = max(1, _WORKSPACE_BYTES // (schedule.slots(1) * row_bytes))
    for start in range(0, tokens, step):
        some = slice(start, min(start + step, tokens))
        _launch(call.part(some) if step < tokens else call, to.of(some) if step < tokens else to)


def _launch(call: Call, to: AttentionOut) -> None:
    q, schedule, sink, lse = call.q, call.schedule, call.sink, to.lse
    tokens, heads, _ = q.shape
    slots, rows = schedule.slots(tokens), schedule.heads
    cut = schedule.cut != Cut.NONE
    sums = scratch((slots, rows, SUMS.value), torch.float32, q.device)
    part = sums
    if cut:
        part = scratch((slots, rows, _CHANNELS), torch.float16, q.device)
    spans = call.plan
    if spans is None:
        size = tokens * schedule.head_tiles + schedule.ctas
        spans = scratch((size, 2), torch.int32, q.device)
    flags = scratch((schedule.split_count(tokens), rows), torch.float32, q.device)
    first, second = call.rows[0], call.rows[-1]
    # Where all work tiles are cut, their combine alone writes heads.
    quantized = None if schedule.combined else to.quantized
    out = to.out if quantized is None else quantized.codes.view(torch.int16)
    own_out = None if schedule.combined or quantized is not None else to.out
    lists = (
        len(call.rows) > 1, first.lengths is not None, second.lengths is not None,
        first.cache.shape[1], second.cache.shape[1], first.cache.stride(0), second.cache.stride(0),
    )  # fmt: skip
    strides = q.stride(1) // 2, to.out.stride(1)
    codecs = _codec(first.layout), _codec(second.layout)
    rope_dim = 0 if quantized is None else quantized.rope.dim
    descriptors = _descriptors(schedule, q, own_out, part if cut else None)
    launch = _decoding(
        schedule, tokens, lists, codecs, strides, rope_dim, sink is not None, q.device
    )
    launch(
        q, first.cache, second.cache, first.indices, second.indices,
        _or(first.lengths, first.indices), _or(second.lengths, second.indices), _or(sink, lse),
        out, lse, part, sums, spans, flags,
        tokens, heads, first.width, second.width, first.limit, second.limit,
        first.indices.stride(0), second.indices.stride(0), schedule.splits,
        q.stride(0) // 2, to.out.stride(0), call.scale, to.empty_lse,
        *epilogue_pointers(quantized, lse), *descriptors,
    )  # fmt: skip
    if cut:
        lifted = _LAYOUT.nope if first.layout == MAIN_FP8 else _CHANNELS
        combine(schedule, Partials(part, sums, spans, lifted), sink, to)


def _codec(layout: str) -> RowCodec | None:
    """Return the codec of a layout's rows for ``Lists``; None for V3.2's."""
    return None if layout == V32_FP8 else row_codec(layout)


@functools.lru_cache(LAUNCHES)
def _decoding(
    schedule: Schedule,
    tokens: int,
    lists: tuple[bool, bool, bool, int, int, int, int],
    codecs: tuple[RowCodec | None, RowCodec | None],
    strides: tuple[int, int],
    rope_dim: int,
    sink: bool,
    device: torch.device,
) -> PreparedLaunch:
    """Prepare the launch of the kernel that the schedule names.

    ``lists`` tells if there are two caches, if each one's list has lengths, and the page size and
    page stride of each.
    """
    two, length0, length1, page0, page1, step0, step1 = lists
    constants = schedule_constants(schedule, tokens) | {
        "TWO": two, "LENGTH0": length0, "LENGTH1": length1, "PAGE0": page0, "PAGE1": page1,
        "STEP0": step0, "STEP1": step1, "SINK": sink, "Q_HEAD": strides[0],
        "OUT_HEAD": strides[1], "ROPE_DIM": rope_dim, "CODEC0": codecs[0], "CODEC1": codecs[1],
    }  # fmt: skip
    if schedule.heads == M64:
        kernel = decode_m64_kernel
        constants |= {
            "CONSUMER1_REGISTERS": CONSUMER1_REGISTERS,
            "PRODUCER_REGISTERS": M64_PRODUCER_REGISTERS,
            "V32": codecs[0] is None,
        }
    else:
        kernel = decode_swap_ab_kernel
        constants |= {
            "HEADS": schedule.heads,
            "BUFFERS": SWAP_AB_BUFFERS[schedule.heads],
            "PRODUCER_REGISTERS": SWAP_AB_PRODUCER_REGISTERS,
        }
    pdl = pdl_launch(device)["PDL"]
    return PreparedLaunch(kernel, (schedule.ctas,), num_warps=4, launch_pdl=pdl, **constants)


def _or(given: Tensor | None, other: Tensor) -> Tensor:
    return other if given is None else given


def schedule_constants(schedule: Schedule, tokens: int) -> dict[str, Any]:
    """Return the constants of both kernels that say how work is cut."""
    return {
        "HEAD_TILES": schedule.head_tiles,
        "CUT": int(schedule.cut),
        "LONGEST_FIRST": schedule.longest_first,
        "PLANNED": schedule.planned,
        "BY_WIDTH": schedule.by_width,
        "ONE_BLOCK": schedule.one_block,
        "COST": TILE_COST,
        "SIZE": schedule.seen_tokens(tokens),
    }


def _descriptors(
    schedule: Schedule, q: Tensor, out: Tensor | None, part: Tensor | None
) -> tuple[TensorDescriptor | None, ...]:
    """Return descriptors of what m64's kernel moves by TMA: heads, partials, queries.

    The other kernel has none.

    Args:
        schedule: cut of the work.
        q: queries of all heads, [T, H, D].
        out: heads [T, H, 512] that the kernel writes; None if it writes none.
        part: partials [slots, heads of a tile, 512] that it stores; None if it stores none.
    """
    if schedule.heads != M64:
        return ()
    heads, v32 = q.shape[1], q.shape[2] != _CHANNELS
    return (
        None if out is None else _descriptor(out, heads),
        None if part is None else _descriptor(part, heads),
        _descriptor(q, heads) if schedule.query_by_tma(v32) else None,
    )


def _descriptor(rows: Tensor, heads: int) -> TensorDescriptor | None:
    """Describe rows [., heads, 512] to TMA; None if threads have to move them.

    Where a tile has no heads of another token, boxes are of two dimensions: heads of all tokens,
    channels; else of three, which end where a token's heads do. Partials have memory for a tile
    each.
    """
    if not rows.is_contiguous():
        return None
    box = heads if heads == M64 // 2 else M64
    if rows.shape[1] % box:
        return TensorDescriptor.from_tensor(rows, [1, M64, _HALF], _TOKEN_TILE)
    width = _HALF if box == M64 else _CHUNK
    return TensorDescriptor.from_tensor(rows.view(-1, _CHANNELS), [box, width], _TILE)


# Plans -------------------------------------------------------------------------------------------


def plan_numbers(schedule: Schedule, tokens: int) -> int:
    """Return the number of int32 in a plan."""
    if schedule.longest_first:
        return tokens + 1
    spans = tokens * schedule.head_tiles
    if schedule.cut == Cut.STREAM_K:
        spans += schedule.ctas
    return spans * 2 + schedule.ctas * RANGE.value


def make_plan(
    schedule: Schedule,
    tokens: int,
    lengths: Tensor | None,
    extra_lengths: Tensor | None,
    widths: tuple[int, ...],
) -> Tensor:
    """Launch ``plan_work_kernel``; at least one of the lengths [T] is given."""
    some = lengths if lengths is not None else extra_lengths
    assert some is not None
    plan = torch.empty(plan_numbers(schedule, tokens), dtype=torch.int32, device=some.device)
    order = schedule.longest_first
    plan_work_kernel[(1 if order else schedule.ctas,)](
        some if lengths is None else lengths.contiguous(),
        some if extra_lengths is None else extra_lengths.contiguous(),
        plan, tokens, widths[0], widths[-1], schedule.splits, schedule.ctas,
        HEAD_TILES=schedule.head_tiles, COST=TILE_COST, SIZE=stream_k_size(tokens),
        TWO=len(widths) > 1, LENGTH0=lengths is not None, LENGTH1=extra_lengths is not None,
        LONGEST_FIRST=order, BY_BLOCKS=schedule.cut == Cut.BY_BLOCKS, num_warps=4,
    )  # fmt: skip
    return plan
