"""What programs would work out of the lists' lengths, once for all layers of a step.

Of an ordered launch that is the order of tokens, int32 [T], and whether the tasks of the last round
are better not cut. Of a stream it is
    int32 [tasks + programs, 2]    what ``merge_stream_kernel`` reads: first and last program of
                                   every task that is cut; for every program the task that its
                                   range begins in the middle of, or -1
    int32 [programs, 4]            first task, pieces, first block of the first piece, end block
                                   of the last piece or 0

Grid: the programs of the attention kernel; one for the order.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.ops._build import Build
from anymla.ops.device import Target
from anymla.ops.sparse_attention.gluon_sm90_lists import Lists
from anymla.ops.sparse_attention.gluon_sm90_order import order_tokens
from anymla.ops.sparse_attention.gluon_sm90_shares import SHARE, stream_share
from anymla.ops.sparse_attention.schedule import TASK_COST, Schedule, stream_size


@gluon.jit(do_not_specialize=("T", "width0", "width1", "splits", "programs"))
def plan_kernel(
    length0_ptr, length1_ptr, plan_ptr, T, width0, width1, splits, programs,
    TILES: gl.constexpr, COST: gl.constexpr, SIZE: gl.constexpr, TWO: gl.constexpr,
    LENGTH0: gl.constexpr, LENGTH1: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """See the file. The arguments are those of ``tiles_kernel``."""
    lists = Lists(
        length0_ptr, length1_ptr, length0_ptr, length1_ptr, length0_ptr, length1_ptr,
        width0, width1, width0, width1, width0, width1, TWO, LENGTH0, LENGTH1, 1, 1, 0, 0,
    )  # fmt: skip
    if ORDERED:
        order_tokens(lists, plan_ptr, T, splits, programs, TILES, COST, SIZE, True)
    else:
        _cut_stream(lists, plan_ptr, T, TILES, COST, SIZE)


@gluon.jit
def _cut_stream(lists, plan_ptr, T, TILES: gl.constexpr, COST: gl.constexpr, SIZE: gl.constexpr):
    share = stream_share(lists, T, TILES, COST, SIZE)
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    inside = (share.begin > 0) & (share.count > 0)
    gl.store(plan_ptr + (share.tasks + program) * 2, gl.where(inside, share.first, -1))
    # The last piece starts its task and does not end it; the first ends its task, having begun
    # elsewhere.
    starts = (share.end > 0) & ((share.count > 1) | (share.begin == 0)) & (share.count > 0)
    ends = inside & ((share.count > 1) | (share.end == 0))
    gl.store(plan_ptr + (share.first + share.count - 1) * 2, program, mask=starts)
    gl.store(plan_ptr + share.first * 2 + 1, program, mask=ends)
    at = plan_ptr + (share.tasks + programs) * 2 + program * SHARE
    gl.store(at, share.first)
    gl.store(at + 1, share.count)
    gl.store(at + 2, share.begin)
    gl.store(at + 3, share.end)


def plan_numbers(schedule: Schedule, tokens: int) -> int:
    """How many numbers a plan has."""
    if schedule.ordered:
        return tokens + 1
    return (tokens * schedule.tiles + schedule.programs) * 2 + schedule.programs * SHARE.value


def make_plan(
    schedule: Schedule,
    tokens: int,
    lengths: Tensor | None,
    extra_lengths: Tensor | None,
    widths: tuple[int, ...],
) -> Tensor:
    """Launch; at least one of the lengths [T] is given."""
    some = lengths if lengths is not None else extra_lengths
    assert some is not None
    plan = torch.empty(plan_numbers(schedule, tokens), dtype=torch.int32, device=some.device)
    ordered = schedule.ordered
    plan_kernel[(1 if ordered else schedule.programs,)](
        some if lengths is None else lengths.contiguous(),
        some if extra_lengths is None else extra_lengths.contiguous(),
        plan, tokens, widths[0], widths[-1], schedule.splits, schedule.programs,
        TILES=schedule.tiles, COST=TASK_COST, SIZE=stream_size(tokens), TWO=len(widths) > 1,
        LENGTH0=lengths is not None, LENGTH1=extra_lengths is not None, ORDERED=ordered,
        num_warps=4,
    )  # fmt: skip
    return plan


def builds(target: Target) -> Iterator[Build]:
    """Both sizes of a stream, and the order."""
    if target.name != "sm_90":
        return
    types = dict.fromkeys(("length0_ptr", "length1_ptr", "plan_ptr"), "*i32")
    types |= dict.fromkeys(("T", "width0", "width1", "splits", "programs"), "i32")
    for size in (512, 2048):
        yield Build(
            f"{size} tokens",
            plan_kernel,
            types,
            {"TILES": 2, "COST": TASK_COST, "SIZE": size, "TWO": True, "LENGTH0": True,
             "LENGTH1": True, "ORDERED": False},
        )  # fmt: skip
    yield Build(
        "order of 512 tokens",
        plan_kernel,
        types,
        {"TILES": 1, "COST": TASK_COST, "SIZE": 512, "TWO": True, "LENGTH0": True,
         "LENGTH1": True, "ORDERED": True},
    )  # fmt: skip
