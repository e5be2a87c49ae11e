"""What the stream of experts needs: pairs by expert, and the tokens' operands.

Grid: experts; then blocks of RUNS runs of 128 channels.

    expert   pairs of every expert -> where mine begin;  my pairs -> order, in blocks of ROWS
    runs     as ``linear.triton_operands``: e4m3 codes in the order of decoded e2m1, and scales

Blocks follow each other without gaps, unlike those of ``triton_plan``, so that they can be shared
out evenly. Both in one launch, because each is short.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.fp8_block import ACTIVATION_AMAX_FLOOR, FP8_BLOCK
from anymla.formats.triton_words import channel_at
from anymla.ops._build import Build
from anymla.ops._triton_quantize import quantize_blocks
from anymla.ops.device import Target
from anymla.ops.moe.triton_stack import Call
from anymla.ops.pdl import pdl_launch, target_has_pdl
from anymla.ops.streams import scratch


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Pairs by expert.

    Attributes:
        order: int32 [P], the pairs of each expert in a row, ascending.
        table: int32 [3 * most + 1]: experts of the blocks, their first places in order, their end
            places; then how many blocks there are, at most ``most``.
        most: see ``table``.
    """

    order: Tensor
    table: Tensor
    most: int


@triton.jit
def _quantise(
    x, operands, scales, first, rows, width, per_row, FLOOR: tl.constexpr, RUNS: tl.constexpr
):
    """Operands and scales of runs ``first`` .. ``first`` + RUNS - 1."""
    run = tl.cast(first, tl.int64) + tl.arange(0, RUNS)
    row = run // per_row
    place = tl.arange(0, 128)
    start = (row * width + (run - row * per_row) * 128)[:, None]
    inside = (row < rows)[:, None]
    value = tl.load(x + start + channel_at(place, 1)[None, :], inside, other=0.0)
    codes, scale = quantize_blocks(value.to(tl.float32), FLOOR, True)
    tl.store(scales + run, scale, row < rows)
    tl.store(operands + start + place[None, :], codes, inside)


@triton.jit
def _plan(
    me, ids, order, table, pairs, experts, offset, most,
    ROWS: tl.constexpr, AT_ONCE: tl.constexpr, EXPERTS: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """The pairs and blocks of expert ``me``."""
    each = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), tl.int32)
    # With many experts there are many rounds, which are summed up together.
    found = tl.zeros((EXPERTS, AT_ONCE if EXPERTS > 64 else 1), tl.int32)
    for start in range(0, pairs, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        # Whoever is not here is compared with nobody.
        local = tl.load(ids + at, at < pairs, other=-1) - offset
        local = tl.where((at < pairs) & (local >= 0) & (local < experts), local, -1)
        equal = (each[:, None] == local[None, :]).to(tl.int32)
        if EXPERTS > 64:
            found += equal
        else:
            counts += tl.sum(equal, 1)
    counts += tl.sum(found, 1)
    needed = (counts + (ROWS - 1)) // ROWS
    begin = tl.sum(tl.where(each < me, counts, 0), 0)
    first = tl.sum(tl.where(each < me, needed, 0), 0)
    end = begin
    for start in range(0, pairs, PLACED):
        at = start + tl.arange(0, PLACED)
        local = tl.load(ids + at, at < pairs, other=-1) - offset
        mine = ((at < pairs) & (local == me)).to(tl.int32)
        place = end + tl.cumsum(mine, 0) - mine
        tl.store(order + place, at, mine != 0)
        end += tl.sum(mine, 0)
    after = first + (end - begin + (ROWS - 1)) // ROWS
    for block in range(first, after):
        start = begin + (block - first) * ROWS
        tl.store(table + block, me)
        tl.store(table + most + block, start)
        tl.store(table + 2 * most + block, tl.minimum(start + ROWS, end))
    if me == experts - 1:
        tl.store(table + 3 * most, after)


@triton.jit(do_not_specialize=["rows", "pairs", "offset", "most"])
def prepare_kernel(
    x,
    operands,
    scales,
    ids,
    order,
    table,
    rows,
    width,
    per_row,
    pairs,
    experts,
    offset,
    most,
    FLOOR: tl.constexpr,
    RUNS: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EXPERTS: tl.constexpr,
    PLACED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One expert's pairs, or RUNS runs."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    me = tl.program_id(0)
    if me < experts:
        _plan(me, ids, order, table, pairs, experts, offset, most, ROWS, AT_ONCE, EXPERTS, PLACED)
    else:
        first = (me - experts) * RUNS
        _quantise(x, operands, scales, first, rows, width, per_row, FLOOR, RUNS)


def prepare(call: Call, columns: int) -> tuple[Tensor, Tensor, Blocks]:
    """Operands e4m3 [T, D] of x, their scales [T, D / 128], and pairs by expert in blocks."""
    x, ids, (experts, _, width) = call.x, call.ids, call.sizes
    rows, pairs = len(x), call.pairs
    per_row = width // FP8_BLOCK
    operands = scratch((rows, width), torch.uint8, x.device)
    scales = scratch((rows, per_row), torch.float32, x.device)
    most = pairs // columns + min(pairs, experts)
    order = scratch((pairs,), torch.int32, x.device)
    plan = Blocks(order, scratch((3 * most + 1,), torch.int32, x.device), most)
    runs = _warps(experts)
    prepare_kernel[(experts + triton.cdiv(rows * per_row, runs),)](
        x,
        operands,
        scales,
        ids,
        plan.order,
        plan.table,
        rows,
        width,
        per_row,
        pairs,
        experts,
        call.expert_offset,
        most,
        FLOOR=ACTIVATION_AMAX_FLOOR,
        RUNS=runs,
        ROWS=columns,
        AT_ONCE=_at_once(pairs, experts),
        EXPERTS=triton.next_power_of_2(experts),
        PLACED=_placed(pairs),
        num_warps=_warps(experts),
        **pdl_launch(x.device),
    )
    return operands, scales, plan


def _warps(experts: int) -> int:
    return 8 if experts <= 64 else 16


def _placed(pairs: int) -> int:
    """Pairs that an expert goes through at once to find its own."""
    return max(16, min(triton.next_power_of_2(pairs), 1024))


def _at_once(pairs: int, experts: int) -> int:
    """Pairs that are compared with all experts at once: what registers hold of the comparisons."""
    most = (1 << 15 if experts <= 64 else 1 << 14) // triton.next_power_of_2(experts)
    return max(16, min(triton.next_power_of_2(pairs), most))


def builds(target: Target) -> Iterator[Build]:
    """Every dtype, where experts are streamed."""
    if target.name != "sm_90":
        return
    tensors = {"operands": "*u8", "scales": "*fp32"}
    sizes = {"FLOOR": ACTIVATION_AMAX_FLOOR, "PDL": target_has_pdl(target)}
    for dtype in ("bf16", "fp16", "fp32"):
        types = {"x": f"*{dtype}", **tensors, **dict.fromkeys(("rows", "width", "per_row"), "i32")}
        types |= dict.fromkeys(("ids", "order", "table"), "*i32")
        types |= dict.fromkeys(("pairs", "experts", "offset", "most"), "i32")
        compared = {"ROWS": 16, "AT_ONCE": _at_once(768, 256), "EXPERTS": 256}
        compared["PLACED"] = _placed(768)
        yield Build(
            dtype,
            prepare_kernel,
            types,
            {**sizes, **compared, "RUNS": _warps(256)},
            num_warps=_warps(256),
            divisible=("width",),
        )
