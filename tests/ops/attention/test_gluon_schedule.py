"""Who computes what on Hopper: the choice by shapes, and the kernels' tile scheduler."""

import functools

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

pytest.importorskip("triton")

from anymla.ops.attention.decode_config import (
    TILE_COST,
    Cut,
    Schedule,
    blocks_of,
    choose_schedule,
    least_blocks,
    predicted_us,
    schedules,
)
from anymla.ops.attention.gluon_sm90_decode_launch import plan_numbers, schedule_constants
from anymla.ops.attention.gluon_sm90_tile_scheduler import (
    Lists,
    plan_work_kernel,
    split_at,
    work_range,
)
from crossrun.hopper import Machine

MACHINE = Machine(seed=None)
LISTS, WORK_RANGE, SPLIT_AT = (MACHINE.function(each) for each in (Lists, work_range, split_at))
NO_PLAN = torch.zeros(0, dtype=torch.int32)


def lists_of(lengths0, lengths1, widths):
    """Lists of tokens with these lengths, as a kernel has them."""
    memory = [torch.tensor([*(each or []), 0], dtype=torch.int32) for each in (lengths0, lengths1)]
    empty = (NO_PLAN, NO_PLAN)
    pairs = (empty, empty, memory, widths, (1 << 30, 1 << 30), (0, 0))
    given_ = (lengths0 is not None, lengths1 is not None)
    return LISTS(*map(MACHINE.argument, pairs), widths[1] > 0, *given_, 64, 64, 37440, 37440)


def plan_of(schedule, lengths, widths):
    """What the plan's kernel makes of the lengths."""
    tokens = len(lengths[0])
    plan = torch.full((plan_numbers(schedule, tokens),), -9, dtype=torch.int32)
    MACHINE.launch(
        plan_work_kernel, 1 if schedule.longest_first else schedule.ctas,
        *(torch.tensor([*each, 0], dtype=torch.int32) for each in lengths), plan,
        tokens, *widths, schedule.splits, schedule.ctas, HEAD_TILES=schedule.head_tiles,
        COST=TILE_COST, SIZE=128, TWO=widths[1] > 0, LENGTH0=True, LENGTH1=True,
        LONGEST_FIRST=schedule.longest_first, BY_BLOCKS=schedule.cut == Cut.BY_BLOCKS,
    )  # fmt: skip
    return plan


def pieces_of(schedule, tokens, lists, plan=NO_PLAN, programs=None):
    """All splits of all CTAs, or some: (CTA, work tile, first, last, whole, slot, number)."""
    plan = MACHINE.argument(plan)
    MACHINE.grid = (schedule.ctas, 1, 1)
    for program in range(schedule.ctas) if programs is None else programs:
        MACHINE.begin((program, 0, 0), "work_range")
        size = max(128, 1 << (tokens - 1).bit_length(), schedule.seen_tokens(tokens))
        constants = schedule_constants(schedule, tokens) | {"SIZE": size}
        work = WORK_RANGE(
            lists, *map(MACHINE.argument, (tokens, schedule.splits)), plan, **constants
        )
        for k in map(MACHINE.argument, range(int(work.count))):
            split = SPLIT_AT(k, work, lists)
            task = int(split.token) * schedule.head_tiles + int(split.tile)
            blocks = int(split.first), int(split.last)
            yield program, task, *blocks, bool(split.whole), int(split.slot), int(split.number)


def blocks_by_task(tiles, lengths0, lengths1):
    counts = [-(-a // 64) + -(-b // 64) for a, b in zip(lengths0, lengths1, strict=True)]
    return [max(1, count) for count in counts for _ in range(tiles)]


@st.composite
def calls(draw):
    tokens = draw(st.integers(1, 40))
    heads = draw(st.sampled_from([1, 16, 17, 33, 64, 65, 128, 200]))
    widths = draw(st.tuples(st.sampled_from([0, 1, 64, 128]), st.sampled_from([0, 60, 512, 2048])))
    full = draw(st.booleans())
    lengths = [
        [width if full else draw(st.integers(0, width)) for _ in range(tokens)] for width in widths
    ]
    return tokens, heads, widths, lengths


WAYS = {
    "chosen": None,
    "invariant": None,
    "stream-K": {"cut": Cut.STREAM_K},
    "planned": {"cut": Cut.STREAM_K, "planned": True},
    "planned for others": {"cut": Cut.STREAM_K, "planned": True},
    "by blocks": {"cut": Cut.BY_BLOCKS},
    "by blocks, planned": {"cut": Cut.BY_BLOCKS, "planned": True},
    "by blocks, planned for others": {"cut": Cut.BY_BLOCKS, "planned": True},
    "tail": {"cut": Cut.TAIL, "splits": 3},
    "every": {"cut": Cut.EVERY, "splits": 4},
    "by width": {"cut": Cut.EVERY, "by_width": True, "splits": 4},
    "longest first": {"longest_first": True},
    "tail, longest first": {"cut": Cut.TAIL, "longest_first": True, "splits": 3},
    "longest first, planned": {"longest_first": True, "planned": True},
    "tail, longest first, planned": {
        "cut": Cut.TAIL,
        "longest_first": True,
        "planned": True,
        "splits": 3,
    },
}


def uneven(tokens, heads, widths):
    """A call whose tokens' lengths go from nothing to full lists, one by one."""
    lengths = [[(7 * t * t + t) % (width + 1) for t in range(tokens)] for width in widths]
    return tokens, heads, widths, lengths


SINGLE = uneven(1, 64, (128, 512))


def every_way(test):
    """Examples that are always run: every way to cut, where there are splits.

    Twenty drawn ones need not contain each: those of a kernel that nobody has drawn go untested.
    """
    test = example(SINGLE, 132, "chosen")(test)
    for way in WAYS:
        for call, processors in (
            (uneven(3, 64, (128, 512)), 20),  # fewer work tiles than CTAs
            (uneven(7, 128, (64, 300)), 4),  # more, in several waves; two tiles of heads
        ):
            test = example(call, processors, way)(test)
    return test


@every_way
@given(calls(), st.sampled_from([1, 3, 20, 78, 114, 132, 144]), st.sampled_from(sorted(WAYS)))
def test_every_block_has_one_program(call, processors, way):
    tokens, heads, widths, lengths = call
    invariant = way == "invariant"
    schedule = choose_schedule(
        tokens, heads, widths, processors, lengths=True, batch_invariant=invariant
    )
    if WAYS[way]:
        schedule = Schedule(schedule.heads, schedule.head_tiles, processors, **WAYS[way])
    if schedule.cut == Cut.BY_BLOCKS:
        assume(tokens * schedule.head_tiles <= schedule.ctas)
    lists = lists_of(*lengths, widths)
    want = blocks_by_task(schedule.head_tiles, *lengths)
    seen, whole = ([[] for _ in want] for _ in range(2))
    slots, marks = set(), set()
    plan = torch.full((tokens + 1,), -9, dtype=torch.int32)
    if schedule.planned:
        others = [[width - n for n in each] for each, width in zip(lengths, widths, strict=True)]
        plan = plan_of(schedule, others if way.endswith("for others") else lengths, widths)
    idle = []
    if schedule.cut == Cut.BY_BLOCKS and schedule.planned:
        ranges = plan[2 * len(want) :].view(-1, 4)
        idle = (ranges[:, 1] == 0).nonzero()[:, 0].tolist()
    for program, task, first, last, direct, slot, mark in pieces_of(schedule, tokens, lists, plan):
        assert first < last
        if program in idle:
            assert (slot, direct) == (program, False)  # where nobody looks
            continue
        assert mark not in marks
        assert 0 <= mark < schedule.split_count(tokens)
        marks.add(mark)
        seen[task].append((first, min(last, want[task]), program, slot, direct))
        whole[task].append((first, last))
        if not direct:
            assert schedule.cut != Cut.NONE
            assert slot not in slots
            assert 0 <= slot < schedule.slots(tokens)
            slots.add(slot)
    stream_k = schedule.cut == Cut.STREAM_K
    by_blocks = schedule.cut == Cut.BY_BLOCKS
    planned = stream_k and schedule.planned
    spans = plan[: 2 * (len(want) + schedule.ctas)].view(-1, 2).tolist() if planned else []
    began_elsewhere = {}
    numbers = list(range(len(want)))
    if schedule.longest_first:
        blocks = want[:: schedule.head_tiles]
        order = sorted(range(tokens), key=lambda token: (-blocks[token], token))
        assert plan[:-1].tolist() == order
        numbers = [
            order.index(n // schedule.head_tiles) * schedule.head_tiles + n % schedule.head_tiles
            for n in numbers
        ]
    for number, blocks, task in zip(numbers, want, seen, strict=True):
        task.sort()
        cut = schedule.cut != Cut.NONE and number >= schedule.first_cut(tokens) and plan[-1] != 1
        if stream_k:
            # What the merge reads: the first program's slot, then those of the programs after it.
            start, end = task[0][2], task[-1][2]
            assert [each[2] for each in task] == list(range(start, end + 1))
            if len(task) > 1:
                after = [schedule.ctas + each for each in range(start + 1, end + 1)]
                assert [each[3] for each in task] == [start, *after]
                if planned:
                    assert spans[number] == [start, end]
                began_elsewhere |= dict.fromkeys(range(start + 1, end + 1), number)
            cut = len(task) > 1
            task = [each for each in task if each[0] < blocks]
        elif by_blocks:
            # What the combine reads: the first program of a task, and how many there are.
            assert [each[2] for each in task] == list(range(task[0][2], task[0][2] + len(task)))
            assert all(each[3] == each[2] and not each[4] for each in task)
            if schedule.planned:
                assert plan[2 * number : 2 * number + 2].tolist() == [task[0][2], len(task)]
            task = [each for each in task if each[0] < blocks]
            edges = [0, *(each[1] for each in task)]
            assert [each[0] for each in task] == edges[:-1]
            assert edges[-1] == blocks
            continue
        elif schedule.by_width:
            # Blocks are those of full lists: the used ones are each in one piece.
            token = number // schedule.head_tiles
            first, second = (-(-each[token] // 64) for each in lengths)
            wide = -(-widths[0] // 64)
            each_ = -(-blocks_of(widths) // schedule.splits)
            assert all(not piece[4] for piece in task)
            assert [piece[0] for piece in task] == [n * each_ for n in range(schedule.splits)]
            taken = [b for piece in whole[number] for b in range(*piece)]
            assert len(taken) == len(set(taken))
            assert {*range(first), *range(wide, wide + second)} <= set(taken)
            continue
        elif cut:
            at = (number - schedule.first_cut(tokens)) * schedule.splits
            assert sorted(each[3] for each in task) == list(range(at, at + schedule.splits))
            task = [each for each in task if each[0] < blocks]
        assert all(each[4] != cut for each in task)
        edges = [0, *(each[1] for each in task)]
        assert [each[0] for each in task] == edges[:-1]
        assert edges[-1] == blocks
    if planned:
        elsewhere = [each[0] for each in spans[len(want) :]]
        assert elsewhere == [began_elsewhere.get(n, -1) for n in range(schedule.ctas)]


@pytest.mark.parametrize(("tokens", "tiles"), [(148, 1), (74, 2), (256, 1), (128, 2), (500, 1)])
def test_ordered_tasks_are_balanced(tokens, tiles):
    """Random lengths: hardly more than an even share, or than the longest task."""
    torch.manual_seed(tokens)
    lengths = [[128] * tokens, torch.randint(0, 1025, (tokens,)).tolist()]
    schedule = choose_schedule(tokens, 64 * tiles, (128, 1024), 132, lengths=True)
    assert schedule.longest_first
    work = [0] * 132
    lists = lists_of(*lengths, (128, 1024))
    room = torch.zeros(tokens + 1, dtype=torch.int32)
    some = range(0, 132, 5)
    for program, _, first, last, *_ in pieces_of(schedule, tokens, lists, room, some):
        work[program] += last - first + TILE_COST
    units = [blocks + TILE_COST for blocks in blocks_by_task(tiles, *lengths)]
    assert max(work) <= 1.12 * max(max(units), sum(units) / 132) + TILE_COST


@given(calls(), st.sampled_from([20, 78, 132]))
def test_a_stream_is_balanced_whatever_the_lengths(call, processors):
    tokens, heads, widths, lengths = call
    shape = choose_schedule(tokens, heads, widths, processors)
    schedule = Schedule(shape.heads, shape.head_tiles, processors, cut=Cut.STREAM_K)
    work = [0] * processors
    for program, _, first, last, *_ in pieces_of(schedule, tokens, lists_of(*lengths, widths)):
        work[program] += last - first
    units = sum(blocks + TILE_COST for blocks in blocks_by_task(shape.head_tiles, *lengths))
    working = min(processors, max(units // 4, 1))
    # A range, rounded up; its ends have moved by up to a block, or as far as cutting would cost.
    tasks = blocks_by_task(shape.head_tiles, *lengths)
    moved = 2 if max(tasks) > 40 else TILE_COST + max(tasks)
    assert max(work) <= -(-units // working) + moved


@pytest.mark.parametrize(
    ("tokens", "uneven", "cuts"),
    [(148, 0, True), (132, 0, False), (264, 0, False), (300, 1, False), (60, 2, True)],
)
def test_a_stream_cuts_where_that_pays(tokens, uneven, cuts):
    """Equal tasks that do not fill the last round, and very long ones among short ones."""
    widths = (128, 4096)
    second = [1024] * tokens
    if uneven:
        second = [(17 * t * t) % 600 for t in range(tokens)]
    if uneven == 2:
        second[::9] = [4096] * len(second[::9])
    schedule = Schedule(64, 1, 132, cut=Cut.STREAM_K)
    lists = lists_of([128] * tokens, second, widths)
    assert any(not piece[4] for piece in pieces_of(schedule, tokens, lists)) == cuts


@given(calls(), st.sampled_from([40, 78, 132]))
def test_splits_by_blocks_are_as_short_as_the_ctas_let_them_be(call, processors):
    tokens, heads, widths, lengths = call
    tiles = -(-heads // 64)
    assume(tokens * tiles <= processors)
    schedule = Schedule(64, tiles, processors, cut=Cut.BY_BLOCKS)
    pieces = list(pieces_of(schedule, tokens, lists_of(*lengths, widths)))
    tasks = blocks_by_task(tiles, *lengths)
    longest = max(last - first for _, _, first, last, *_ in pieces)
    assert len({piece[0] for piece in pieces}) == len(pieces) <= processors
    least = least_blocks(max(tasks))
    assert longest >= least
    assert sum(-(-blocks // longest) for blocks in tasks) <= processors
    shorter = max(longest - 1, least)
    assert shorter >= longest or sum(-(-blocks // shorter) for blocks in tasks) > processors


@pytest.mark.parametrize("width", [512, 1024, 4096, 16384])
def test_what_combines_splits_by_blocks_knows_how_many_there_may_be(width):
    """Of one token, whose list may be of any length."""
    most = [
        each.splits
        for each in schedules(1, 64, blocks_of((128, width)), 132, lengths=True)
        if each.cut == Cut.BY_BLOCKS and each.heads == 64
    ]
    for length in (0, 60, 500, 900, 1000, 2000, 4000, width):
        lists = lists_of([128], [min(length, width)], (128, width))
        schedule = Schedule(64, 1, 132, cut=Cut.BY_BLOCKS)
        assert len(list(pieces_of(schedule, 1, lists))) <= most[0]


@pytest.mark.parametrize("heads", [64, 128])
def test_full_lists_are_cut_where_whole_waves_take_longer(heads):
    """With lengths that are all alike, the last wave is cut, as without."""
    tokens = 148 * 64 // heads
    lengths = [[128] * tokens, [512] * tokens]
    for lists, cut in (
        (lengths, True),
        ([lengths[0], [40 * t % 500 for t in range(tokens)]], False),
    ):
        schedule = Schedule(64, heads // 64, 132, 5, Cut.TAIL, longest_first=True)
        room = torch.zeros(tokens + 1, dtype=torch.int32)
        pieces = pieces_of(schedule, tokens, lists_of(*lists, (128, 512)), room, range(0, 132, 20))
        assert any(not piece[4] for piece in pieces) == cut


@pytest.mark.parametrize("processors", [20, 78, 114, 132])
@pytest.mark.parametrize("heads", [8, 16, 32, 33, 64, 128])
def test_programs_fit_the_machine(heads, processors):
    for tokens in (1, 2, 7, 8, 20, 64, 74, 128, 148, 256, 3000):
        for widths in ((128,), (128, 512), (128, 16384), (0,)):
            chosen = choose_schedule(tokens, heads, widths, processors, lengths=True)
            assert 1 <= chosen.ctas <= processors
            assert chosen.head_tiles * chosen.heads >= heads
            assert chosen.splits <= blocks_of(widths)
            assert chosen.slots(tokens) >= 1


def test_every_kind_of_schedule_is_an_example():
    tokens, heads, widths, _ = SINGLE
    chosen = choose_schedule(tokens, heads, widths, 132, lengths=True)
    assert chosen.one_block
    ways = [chosen, *(Schedule(64, 1, 132, **(each or {})) for each in WAYS.values())]
    kinds = {(each.cut, each.longest_first, each.planned, each.by_width) for each in ways}
    assert kinds == {
        *((cut, False, False, False) for cut in Cut),
        *((cut, True, planned, False) for cut in (Cut.NONE, Cut.TAIL) for planned in (False, True)),
        (Cut.STREAM_K, False, True, False),
        (Cut.BY_BLOCKS, False, True, False),
        (Cut.EVERY, False, False, True),
    }


def test_schedules_of_known_shapes():
    """What was measured to be the fastest, or within some percent of it."""

    def chosen(tokens, heads, *widths, **given):
        each = choose_schedule(tokens, heads, widths, 132, **given)
        return each.heads, each.cut, each.splits

    # One request takes a CTA for every block and every 16 heads, if there are so many.
    for heads in (8, 32, 64):
        assert chosen(1, heads, 128, 512) == (16, Cut.EVERY, 10)
        assert choose_schedule(1, heads, (128, 512), 132).one_block
    assert chosen(4, 64, 128, 512) == (64, Cut.EVERY, 10)
    # Full lists: whole where that fills waves, cut where it does not.
    for tokens in (128, 132, 264):
        assert chosen(tokens, 64, 128, 512) == (64, Cut.NONE, 1)
    assert chosen(64, 64, 128, 512) == (64, Cut.EVERY, 2)
    assert chosen(148, 64, 128, 512)[:2] == (64, Cut.TAIL)
    assert chosen(148, 64, 128, 512)[2] * (148 - 132) <= 132
    assert chosen(32, 128, 128, 1024) == (64, Cut.EVERY, 2)
    # Windows alone: narrow tiles as long as each has an SM.
    assert [chosen(n, 64, 128)[0] for n in (1, 16, 33, 128)] == [16, 16, 16, 64]
    assert chosen(1, 64, 128, v32=True)[0] == 64
    assert chosen(128, 32, 128, 512, batch_invariant=True)[0] == 32


def test_lists_with_lengths_are_shared_out_by_their_sum():
    choose = functools.partial(choose_schedule, widths=(128, 1472), sm_count=132, lengths=True)
    few = choose(24, 128, planned=True)
    assert (few.cut, few.planned, few.ctas) == (Cut.BY_BLOCKS, True, 132)
    many = choose(148, 128, planned=True)
    assert (many.longest_first, many.planned) == (True, True)
    # Whole windows have the same length.
    assert not choose_schedule(148, 64, (128,), 132, lengths=True).longest_first
    # Without a plan it must gain more than it takes.
    assert choose(64, 64, widths=(128, 512)).cut == Cut.EVERY
    # Longer lists than there are SMs for: splits that are no longer than has to be.
    assert choose(16, 64, widths=(128, 16384), planned=True).cut == Cut.BY_BLOCKS


@pytest.mark.parametrize("sms", [78, 132])
@pytest.mark.parametrize("heads", [8, 24, 40, 64, 96, 128])
def test_what_is_chosen_should_take_the_least_time(heads, sms):
    """Of whole work tiles and all other ways; more work never takes less."""
    before = 0.0
    for tokens in (1, 2, 5, 17, 40, 66, 100, 132, 150, 600):
        blocks = blocks_of((128, 1024))
        chosen = choose_schedule(tokens, heads, (128, 1024), sms)
        us = predicted_us(chosen, tokens, heads, blocks, (blocks,))
        for tile in (16, 32, 64):
            tiles = -(-heads // tile)
            whole = Schedule(tile, tiles, min(tokens * tiles, sms))
            if tile == 64 or tokens * tiles <= sms:
                assert us <= predicted_us(whole, tokens, heads, blocks, (blocks,))
        assert us >= before
        before = us


@given(calls())
def test_invariant_calls_cut_a_token_alike_in_any_batch(call):
    tokens, heads, widths, _ = call
    alone = choose_schedule(1, heads, widths, 132, batch_invariant=True)
    batch = choose_schedule(tokens, heads, widths, 78, batch_invariant=True)
    assert (alone.heads, alone.splits, alone.cut) == (batch.heads, batch.splits, batch.cut)
