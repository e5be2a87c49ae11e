"""Which pieces of work a program takes.

A *task* is one tile of heads of one token, a *piece* a range of a task's blocks, which
``gluon_sm90_lists`` defines. A launch hands out pieces in one of these ways:

    aligned   every task is cut into the same number of pieces (or none), each task by its own
              length; piece v belongs to program v mod programs.
    mixed     whole tasks as long as there is one for every program; the rest is cut as above.
    stream    all blocks of all tasks, in order, plus a fixed cost for each task, are cut into one
              range for every program. A program's first and last piece may be parts of a task;
              but where cutting costs more than it saves, cuts move to the nearest end of a task.
    widths    aligned, but a piece is a range of the blocks of full lists, so that nothing waits for
              lengths before it reads the list.
    single    likewise, with as many pieces as there are blocks.
    ordered   aligned without cuts, or mixed, but the longest tokens come first; in every second
              round programs take them in the opposite order.
    planned   a stream whose ranges are read. Lists may be shorter or longer than those that it was
              made for: a task's last piece ends where the task does.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.ops._gluon import aggregate
from anymla.ops.sparse_attention.gluon_sm90_lists import KEYS, counts, length_of
from anymla.ops.sparse_attention.gluon_sm90_order import order_tokens, place_of
from anymla.ops.sparse_attention.gluon_sm90_softmax import predecessors_done
from anymla.ops.sparse_attention.schedule import Stream

# Units of work, which are blocks and fixed costs, that a program of a stream has at least; fewer
# programs work if there are not enough.
_LEAST = gl.constexpr(4)
# What merging costs a program, in units.
_MERGE = gl.constexpr(6)
# A cut so close to a task's end moves to the end: pieces of a block or less cost more than they
# save.
_SNAP = gl.constexpr(2)
_YES = gl.constexpr(int(Stream.YES))
_MIXED = gl.constexpr(int(Stream.MIXED))
_ORDERED = gl.constexpr(int(Stream.ORDERED))
_MIXED_ORDERED = gl.constexpr(int(Stream.MIXED_ORDERED))
_ORDERED_BEFORE = gl.constexpr(int(Stream.ORDERED_BEFORE))
_MIXED_ORDERED_BEFORE = gl.constexpr(int(Stream.MIXED_ORDERED_BEFORE))
_SINGLE = gl.constexpr(int(Stream.SINGLE))
_WIDTHS = gl.constexpr(int(Stream.WIDTHS))
_PLANNED = gl.constexpr(int(Stream.PLANNED))
SHARE = gl.constexpr(4)  # numbers of a program in a plan


@aggregate
class Share:
    """The pieces of one program.

    Attributes:
        first: number of the first piece (aligned) or task (stream).
        count: how many pieces.
        begin: first block of the first piece (stream).
        end: end block of the last piece, 0 for all of it (stream).
        tasks: tokens x tiles of heads.
        splits: pieces of a task (aligned, mixed); mixed: 0 if none is cut.
        TILES: tiles of heads.
        SPLIT: tasks may be cut.
        STREAM: whether a piece is a whole task is known at run time.
        MIXED: see the file.
        PLANNED: likewise.
        ORDERED: likewise.
        WIDTHS: likewise.
        SINGLE: likewise.
        order: int32 [T], tokens in the order in which they are taken, if ORDERED.
    """

    first: gl.tensor
    count: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    tasks: gl.tensor
    splits: gl.tensor
    TILES: gl.constexpr
    SPLIT: gl.constexpr
    STREAM: gl.constexpr
    MIXED: gl.constexpr
    PLANNED: gl.constexpr
    ORDERED: gl.constexpr
    order: gl.tensor
    WIDTHS: gl.constexpr
    SINGLE: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, first, count, begin, end, tasks, splits, TILES, SPLIT, STREAM, MIXED, PLANNED,
        ORDERED, order, WIDTHS=False, SINGLE=False,
    ):  # fmt: skip
        self.first = first
        self.count = count
        self.begin = begin
        self.end = end
        self.tasks = tasks
        self.splits = splits
        self.TILES = gl.constexpr(TILES)
        self.SPLIT = gl.constexpr(SPLIT)
        self.STREAM = gl.constexpr(STREAM)
        self.MIXED = gl.constexpr(MIXED)
        self.PLANNED = gl.constexpr(PLANNED)
        self.ORDERED = gl.constexpr(ORDERED)
        self.order = order
        self.WIDTHS = gl.constexpr(WIDTHS)
        self.SINGLE = gl.constexpr(SINGLE)


@gluon.jit
def _count(total, program, programs, ORDERED: gl.constexpr):
    """How many of all pieces a program takes."""
    if ORDERED:
        rounds = total // programs
        last = place_of(rounds, program, programs) < total - rounds * programs
        return rounds + last.to(gl.int32)
    else:
        return (total - program + programs - 1) // programs


@gluon.jit
def aligned_share(
    tasks, splits, order, TILES: gl.constexpr, SPLIT: gl.constexpr, ORDERED: gl.constexpr,
    WIDTHS: gl.constexpr, SINGLE: gl.constexpr,
):  # fmt: skip
    """This program's share of an aligned launch."""
    total = tasks * splits
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    count = _count(total, program, programs, ORDERED)
    zero = program * 0
    return Share(
        program, count, zero, zero, tasks, splits, TILES, SPLIT, False, False, False, ORDERED,
        order, WIDTHS, SINGLE,
    )  # fmt: skip


@gluon.jit
def mixed_share(tasks, splits, uncut, order, TILES: gl.constexpr, ORDERED: gl.constexpr):
    """This program's share of a mixed launch; uncut: cut nothing after all."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    whole = tasks // programs * programs
    if ORDERED:
        splits = gl.where(uncut != 0, 0, splits)
    total = whole + (tasks - whole) * gl.maximum(splits, 1)
    count = _count(total, program, programs, ORDERED)
    zero = program * 0
    return Share(
        program, count, zero, zero, tasks, splits, TILES, True, True, True, False, ORDERED, order
    )


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _cut(place, tokens, ends, cost, blocks, T, uncut, COST: gl.constexpr, TILES: gl.constexpr):
    """The task and block that a range starting at ``place`` starts with."""
    passed = (ends <= place) & (tokens < T)
    token = gl.sum(passed.to(gl.int32), 0)
    start = gl.max(gl.where(passed, ends, 0), 0)
    here = tokens == token
    units = gl.maximum(gl.sum(gl.where(here, cost, 0), 0), 1)
    most = gl.maximum(gl.sum(gl.where(here, blocks, 0), 0), 1)
    tile = (place - start) // units
    done = place - start - tile * units
    block = gl.minimum(gl.maximum(done - COST, 0), most)
    block = gl.where(block < _SNAP, 0, gl.where(most - block < _SNAP, most, block))
    block = gl.where(uncut, gl.where(done * 2 < units, 0, most), block)
    task = token * TILES + tile
    whole = block >= most
    return gl.where(whole, task + 1, task), gl.where(whole, 0, block)


@gluon.jit
def stream_share(lists, T, TILES: gl.constexpr, COST: gl.constexpr, SIZE: gl.constexpr):
    """This program's share of a stream; SIZE is a power of two of at least max(T, 128)."""
    L: gl.constexpr = gl.BlockedLayout([SIZE // 128], [32], [4], [0])
    tokens = gl.arange(0, SIZE, layout=L)
    there = tokens < T
    n0 = length_of(lists.length0, tokens, there, lists.width0, lists.LENGTH0)
    blocks = tokens * 0 + (n0 + KEYS - 1) // KEYS
    if lists.TWO:
        n1 = length_of(lists.length1, tokens, there, lists.width1, lists.LENGTH1)
        blocks = blocks + (n1 + KEYS - 1) // KEYS
    blocks = gl.maximum(blocks, 1)
    cost = gl.where(there, blocks + COST, 0)
    ends = gl.associative_scan(cost * TILES, 0, _add)
    total = gl.max(ends, 0).to(gl.int64)
    # The longest range, if tasks stay whole and if they are cut.
    programs = gl.num_programs(0)
    longest = gl.max(cost, 0).to(gl.int64)
    even = total // programs
    rounds = (T * TILES + programs - 1) // programs
    whole = gl.where(longest * (T * TILES) == total, rounds * longest, even + longest // 2)
    uncut = whole <= even + (COST + _MERGE)
    program = gl.program_id(0)
    working = gl.minimum(programs, gl.maximum(total // _LEAST, 1))
    low = gl.minimum(program * total // working, total).to(gl.int32)
    high = gl.minimum((program + 1) * total // working, total).to(gl.int32)
    first, begin = _cut(low, tokens, ends, cost, blocks, T, uncut, COST, TILES)
    last, end = _cut(high, tokens, ends, cost, blocks, T, uncut, COST, TILES)
    count = last - first + gl.where(end > 0, 1, 0)
    count = gl.where((first == last) & (begin >= end), 0, count)
    first = gl.where(count > 0, first, 0)
    return Share(
        first, count, begin, end, T * TILES, T * 0 + 1, TILES, True, True, False, False, False,
        lists.list0,
    )  # fmt: skip


@gluon.jit
def planned_share(plan, T, TILES: gl.constexpr):
    """This program's share of a plan; see ``gluon_sm90_plan``."""
    tasks = T * TILES
    at = plan + (tasks + gl.num_programs(0)) * 2 + gl.program_id(0) * SHARE
    return Share(
        gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), tasks, T * 0 + 1, TILES,
        True, True, False, True, False, plan,
    )  # fmt: skip


@gluon.jit
def share_of(
    lists, T, splits, plan, TILES: gl.constexpr, SPLIT: gl.constexpr, STREAM: gl.constexpr,
    COST: gl.constexpr, SIZE: gl.constexpr,
):  # fmt: skip
    """This program's share; SPLIT and STREAM are those of ``schedule.Schedule``.

    plan: int32; of a planned launch, or room for the order of tokens.
    """
    NOW: gl.constexpr = (STREAM == _ORDERED) | (STREAM == _MIXED_ORDERED)
    BEFORE: gl.constexpr = (STREAM == _ORDERED_BEFORE) | (STREAM == _MIXED_ORDERED_BEFORE)
    MIXED: gl.constexpr = (STREAM == _MIXED_ORDERED) | (STREAM == _MIXED_ORDERED_BEFORE)
    ORDERED: gl.constexpr = NOW | BEFORE
    WIDTHS: gl.constexpr = (STREAM == _WIDTHS) | (STREAM == _SINGLE)
    # Every partition waits for itself, before it reads anything.
    if NOW | (STREAM == _PLANNED) | (STREAM == _YES):
        predecessors_done()
    uncut = T * 0
    if NOW:
        uncut = order_tokens(lists, plan, T, splits, gl.num_programs(0), TILES, COST, SIZE, MIXED)
    if STREAM == _PLANNED:
        return planned_share(plan, T, TILES)
    elif (STREAM == _MIXED) | MIXED:
        if BEFORE:
            predecessors_done()
            uncut = gl.load(plan + T)
        return mixed_share(T * TILES, splits, uncut, plan, TILES, ORDERED)
    elif STREAM and not ORDERED and not WIDTHS:
        return stream_share(lists, T, TILES, COST, SIZE)
    else:
        return aligned_share(
            T * TILES, splits, plan, TILES, SPLIT, ORDERED, WIDTHS, STREAM == _SINGLE
        )


@gluon.jit
def piece(k, share, lists):
    """Piece k of the program: its token, tile of heads, columns, blocks, and where it leaves sums.

    Returns:
        token, tile, n0, n1, blocks0, first, last, direct, slot, mark: the piece is blocks
        first .. last - 1. ``direct``: it is the whole task, whose result it writes. Otherwise it
        leaves its sums in ``slot``. ``mark`` numbers the piece among all of the launch.
    """
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    if share.MIXED:
        mark = share.first + k * programs
        if share.ORDERED:
            mark = k * programs + place_of(k, program, programs)
        whole = share.tasks // programs * programs
        direct = mark < whole
        slot = mark - whole
        if share.ORDERED:
            direct = direct | (share.splits == 0)
        splits = gl.maximum(share.splits, 1)
        task = gl.where(direct, mark, whole + slot // splits)
        token = task // share.TILES
        if share.ORDERED:
            token = gl.load(share.order + token)
        n0, n1, blocks0, blocks = counts(lists, token)
        each = gl.where(direct, blocks, (blocks + splits - 1) // splits)
        first = gl.where(direct, 0, (slot - (task - whole) * splits) * each)
        last = gl.maximum(gl.minimum(blocks, first + each), first + 1)
    elif share.STREAM:
        task = share.first + k
        token = task // share.TILES
        n0, n1, blocks0, blocks = counts(lists, token)
        first = gl.where(k == 0, share.begin, 0)
        cut = (k + 1 == share.count) & (share.end > 0)
        last = gl.where(cut, share.end, blocks)
        if share.PLANNED:
            last = gl.maximum(gl.minimum(last, blocks), first + 1)
        direct = (first == 0) & ~cut
        slot = gl.where(first > 0, programs + program, program)
        mark = gl.where(first > 0, share.tasks + program, task)
    elif share.SPLIT:
        slot = share.first + k * programs
        task = slot // share.splits
        token = task // share.TILES
        n0, n1, blocks0, blocks = counts(lists, token)
        first = slot - task * share.splits
        # A piece without blocks still takes one, whose columns are past the end of the lists.
        if share.WIDTHS:
            wide0 = blocks0 * 0 + (lists.width0 + KEYS - 1) // KEYS
            end = gl.where(n1 > 0, wide0 + (n1 + KEYS - 1) // KEYS, blocks0)
            blocks0 = wide0
            if share.SINGLE:
                last = first + 1
            else:
                wide = wide0
                if lists.TWO:
                    wide = wide + (lists.width1 + KEYS - 1) // KEYS
                each = (gl.maximum(wide, 1) + share.splits - 1) // share.splits
                first = first * each
                last = gl.maximum(gl.minimum(end, first + each), first + 1)
        else:
            each = (blocks + share.splits - 1) // share.splits
            first = first * each
            last = gl.maximum(gl.minimum(blocks, first + each), first + 1)
        direct = False
        mark = slot
    else:
        slot = share.first + k * programs
        if share.ORDERED:
            slot = k * programs + place_of(k, program, programs)
        task = slot
        token = task // share.TILES
        if share.ORDERED:
            token = gl.load(share.order + token)
        n0, n1, blocks0, blocks = counts(lists, token)
        first = slot * 0
        last = blocks
        direct = True
        mark = slot
    return token, task % share.TILES, n0, n1, blocks0, first, last, direct, slot, mark
