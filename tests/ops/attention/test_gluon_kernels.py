"""The text of the Hopper kernels, run on a CPU against float64: see ``crossrun.hopper``."""

import pytest
import torch

pytest.importorskip("triton")


from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.formats.triton_rows import row_codec
from anymla.ops._epilogue import InverseRopeQuant, QuantizedOut, epilogue_pointers
from anymla.ops.attention import decode_config as config
from anymla.ops.attention.decode_config import TILE_COST, Cut, Schedule, tile_heads
from anymla.ops.attention.gluon_sm90_decode_launch import plan_numbers, schedule_constants
from anymla.ops.attention.gluon_sm90_decode_m64 import decode_m64_kernel
from anymla.ops.attention.gluon_sm90_decode_swap_ab import decode_swap_ab_kernel
from anymla.ops.attention.gluon_sm90_tile_scheduler import plan_work_kernel
from anymla.ops.attention.triton_decode_combine import AttentionOut, Partials, combine
from anymla.ops.linear import inverse_rope_fp8_quant
from anymla.testing.conformance.expected import attend
from anymla.testing.conformance.scene import Scene, scope
from anymla.testing.tolerance import accumulation, assert_close
from crossrun.hopper import Descriptor
from crossrun.hopper import run as run_kernel

CHANNELS = 512
LIFTED = get_layout(MAIN_FP8).nope


def schedule_of(heads, tokens, way, ctas):
    tile = 16 if way == "narrow" else tile_heads(heads)
    tiles = -(-heads // tile)
    if way == "every":
        return Schedule(tile, tiles, min(ctas, tokens * tiles * 3), 3, Cut.EVERY)
    if way == "one block":
        every = min(ctas, tokens * tiles * 7)
        return Schedule(tile, tiles, every, 7, Cut.EVERY, by_width=True, one_block=True)
    if way == "by width":
        every = min(ctas, tokens * tiles * 3)
        return Schedule(tile, tiles, every, 3, Cut.EVERY, by_width=True)
    if way.startswith("tail"):
        return Schedule(tile, tiles, ctas, 2, Cut.TAIL, longest_first="longest first" in way)
    if way == "longest first":
        return Schedule(tile, tiles, min(ctas, tokens * tiles), longest_first=True)
    if way.startswith("by blocks"):
        planned = way.endswith("planned")
        return Schedule(tile, tiles, ctas, ctas, cut=Cut.BY_BLOCKS, planned=planned)
    if way in ("stream-K", "planned"):
        return Schedule(tile, tiles, ctas, cut=Cut.STREAM_K, planned=way == "planned")
    return Schedule(tile, tiles, min(ctas, tokens * tiles))


def described(rows, heads):
    """For TMA: whole tiles, half a tile by 64 channels at a time, or what there is of a token's."""
    box = 32 if heads == 32 else 64
    if rows.shape[1] % box:
        return Descriptor(rows, [1, 64, 256])
    return Descriptor(rows.view(-1, CHANNELS), [box, 256 if box == 64 else 64])


def run(made, schedule, scale=CHANNELS**-0.5, empty=-torch.inf, to=None, seed=0, tma=True):
    """The kernel, and its partials combined; to ``to`` if it is given."""
    q = made.q
    tokens, heads, _ = q.shape
    scopes = [made.main] if made.extra is None else [made.main, made.extra]
    first, second = scopes[0], scopes[-1]
    rows = schedule.heads
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    lse = torch.full(q.shape[:2], torch.nan)
    part = torch.full((schedule.slots(tokens), rows, CHANNELS), torch.nan, dtype=torch.float16)
    sums = torch.full((schedule.slots(tokens), rows, 4), torch.nan)
    spans = torch.full((tokens * schedule.head_tiles + schedule.ctas, 2), -9, dtype=torch.int32)
    if schedule.planned:
        spans = plan_of(schedule, first)
    flags = torch.full((schedule.split_count(tokens), rows), torch.nan)
    sink = torch.zeros(heads) if made.sink is None else made.sink.float()
    tiled = rows == 64
    form = {"HEADS": rows, "BUFFERS": 2 + heads % 2}
    if tiled:
        form = {
            "CONSUMER1_REGISTERS": 0,
            "V32": False,
            "q_desc": described(q, heads) if tma else None,
            "out_desc": described(out, heads) if tma and to is None else None,
            "part_desc": described(part, heads) if schedule.cut else None,
        }
    run_kernel(
        decode_m64_kernel if tiled else decode_swap_ab_kernel, schedule.ctas,
        q, first.cache, second.cache, first.indices, second.indices, first.lengths,
        second.lengths, sink, out if to is None else to.codes.view(torch.int16), lse, part, sums,
        spans, flags,
        tokens, heads, first.indices.shape[1], second.indices.shape[1],
        *(len(each.cache) * each.cache.shape[1] for each in (first, second)),
        first.indices.stride(0), second.indices.stride(0), schedule.splits,
        q.stride(0) // 2, out.stride(0), torch.tensor(scale, dtype=torch.float32).item(), empty,
        *epilogue_pointers(to, lse), ROPE_DIM=0 if to is None else to.rope.dim,
        **schedule_constants(schedule, tokens) | {"SIZE": 128},
        TWO=len(scopes) > 1, LENGTH0=True, LENGTH1=True,
        PAGE0=first.cache.shape[1], PAGE1=second.cache.shape[1],
        STEP0=first.cache.stride(0), STEP1=second.cache.stride(0), SINK=made.sink is not None,
        Q_HEAD=q.stride(1) // 2, OUT_HEAD=out.stride(1), PRODUCER_REGISTERS=0,
        CODEC0=row_codec(first.layout), CODEC1=row_codec(second.layout), **form, seed=seed,
    )  # fmt: skip
    if schedule.cut:
        sink = sink if made.sink is not None else None
        lifted = LIFTED if first.layout == MAIN_FP8 else CHANNELS
        combined(schedule, part, sums, spans, sink, out, lse, empty, to, lifted)
    return out, lse


def plan_of(schedule, lists):
    """What the plan's kernel makes of one list a token, of which the first are forgotten."""
    plan = torch.full((plan_numbers(schedule, len(lists.lengths)),), -9, dtype=torch.int32)
    lengths = lists.lengths * (torch.arange(len(lists.lengths)) > 0).int()
    run_kernel(
        plan_work_kernel, schedule.ctas, lengths, lengths, plan, len(lengths),
        lists.indices.shape[1], 0, schedule.splits, schedule.ctas,
        HEAD_TILES=schedule.head_tiles, COST=TILE_COST, SIZE=128, TWO=False, LENGTH0=True,
        LENGTH1=False, LONGEST_FIRST=False, BY_BLOCKS=schedule.cut == Cut.BY_BLOCKS,
    )  # fmt: skip
    return plan


def combined(schedule, part, sums, spans, sink, out, lse, empty, to=None, lifted=LIFTED):
    """By Triton's interpreter."""
    results = AttentionOut(out, lse, empty, quantized=to)
    combine(schedule, Partials(part, sums, spans, lifted), sink, results, pdl=False)


@pytest.mark.parametrize(
    "way", ["longest first", "one block", "by width", "tail, longest first", "stream-K"]
)
@pytest.mark.parametrize(("heads", "tokens"), [(3, 4), (20, 4), (36, 4), (66, 2), (64, 2)])
def test_any_lists(heads, tokens, way):
    made = Scene(
        torch.randn(tokens, heads, CHANNELS).bfloat16(),
        scope(tokens, 130, lengths=[130, 0, 7, 64][:tokens]),
        scope(tokens, 200, lengths=[200, 0, 0, 129][:tokens], page=2, poison_behind=True),
        torch.tensor([0.0, torch.inf, -torch.inf, 2.0, -1.0])[torch.arange(heads) % 5],
    )
    made.expected().check(run(made, schedule_of(heads, tokens, way, 3)))


@pytest.mark.parametrize(
    "cut",
    [{}, {"splits": 2, "cut": Cut.EVERY},
     {"splits": 4, "cut": Cut.EVERY, "by_width": True, "one_block": True},
     {"splits": 2, "cut": Cut.EVERY, "by_width": True}, {"cut": Cut.STREAM_K},
     {"splits": 2, "cut": Cut.TAIL}, {"splits": 2, "cut": Cut.TAIL, "longest_first": True}],
)  # fmt: skip
@pytest.mark.parametrize(("heads", "tma"), [(32, True), (24, True), (24, False)])
def test_half_a_tile(heads, tma, cut):
    lists = scope(4, 200, lengths=[200, 0, 7, 64])
    made = Scene(torch.randn(4, heads, CHANNELS).bfloat16(), lists)
    made.expected().check(run(made, Schedule(64, 1, 3, **cut), tma=tma))


@pytest.mark.parametrize(
    "cut",
    [{"splits": 3, "cut": Cut.EVERY}, {"splits": 2, "cut": Cut.EVERY, "by_width": True},
     {"cut": Cut.STREAM_K}, {"splits": 2, "cut": Cut.TAIL}],
)  # fmt: skip
@pytest.mark.parametrize(("heads", "tile"), [(40, 16), (70, 32)])
def test_tiles_of_few_heads_are_cut(heads, tile, cut):
    lists = scope(2, 200, lengths=[200, 130])
    made = Scene(torch.randn(2, heads, CHANNELS).bfloat16(), lists, sink=torch.randn(heads))
    made.expected().check(run(made, Schedule(tile, -(-heads // tile), 2, **cut)))


@pytest.mark.parametrize("way", ["every", "stream-K", "many heads"])
def test_the_combine_stores_the_fp8_that_a_second_kernel_would(way, monkeypatch):
    if way == "many heads":
        monkeypatch.setattr(config, "_COMBINE_CTAS", 1)
        way = "every"
    tokens, heads = 2, 20
    schedule = schedule_of(heads, tokens, way, 3)
    part = torch.randn(schedule.slots(tokens), 32, CHANNELS).half()
    sums = torch.rand(schedule.slots(tokens), 32, 4)
    sums[0, 3:5, :2] = torch.tensor([-1e30, 0.0])
    # CTAs 0 and 1 share the first work tile, the second is whole.
    spans = torch.tensor([[0, 1], [2, 2], [-1, 0], [0, 0], [-1, 0]], dtype=torch.int32)
    numbers = schedule, part, sums, spans, torch.randn(heads)
    out, lse = torch.zeros(tokens, heads, CHANNELS).bfloat16(), torch.zeros(tokens, heads)
    combined(*numbers, out, lse, -torch.inf)
    assert out.any(-1)[0].all()
    table, positions = torch.randn(9, 64), torch.tensor([8, 3])
    to = QuantizedOut.allocate(out, InverseRopeQuant(positions, table, 1), native=False)
    to.codes[:], to.scales[:] = 0, 1
    combined(*numbers, out, torch.empty_like(lse), -torch.inf, to)
    want = inverse_rope_fp8_quant(out, positions, table, n_groups=4, backend="triton")
    got, merged = to.results(4), slice(0, 1 if way == "stream-K" else tokens)
    assert torch.equal(got[0][merged].view(torch.uint8), want[0][merged].view(torch.uint8))
    assert torch.equal(got[1][merged], want[1][merged])
    assert not got[0][merged.stop :].view(torch.uint8).any()


def partials_of(count, rows, slots):
    """Random partials at ``slots``; results in float64, what they are sums of, and their lse."""
    part = torch.full((max(slots) + 1, rows, CHANNELS), torch.nan).half()
    sums = torch.full((max(slots) + 1, rows, 4), torch.nan)
    part[slots] = torch.randn(count, rows, CHANNELS).half()
    # Exponents close to each other: no partial is too small to be missed.
    sums[slots] = torch.rand(count, rows, 4) + 0.5
    top, total, factor, _ = sums[slots].double().unbind(-1)
    weight = total * top.exp2()
    terms = part[slots].double() * (factor * weight / weight.sum(0)).unsqueeze(-1)
    return part, sums, (terms.sum(0), terms.abs().sum(0), weight.sum(0).log())


# As many as are read at once, and one, or some, behind them: every way in which the last are few.
@pytest.mark.parametrize("count", [2, 3, 7, 8, 9, 10, 16, 17, 19])
@pytest.mark.parametrize("way", ["stream-K", "stream-K, all at once", "every", "by blocks"])
def test_every_partial_is_combined(count, way, monkeypatch):
    rows = 16
    if way == "by blocks":  # several heads of a program, in pairs of partials
        monkeypatch.setattr(config, "_COMBINE_CTAS", 1)
        schedule = Schedule(rows, 1, 24, 24, cut=Cut.BY_BLOCKS)
        slots, spans = list(range(count)), torch.tensor([[0, count]], dtype=torch.int32)
    elif way.startswith("stream-K"):
        # Up to 8 CTAs, partials are read at once; the first CTA's own, then those of the others.
        ctas = count if way.endswith("once") else 24
        schedule = Schedule(rows, 1, ctas, cut=Cut.STREAM_K)
        slots = [0, *range(ctas + 1, ctas + count)]
        spans = torch.full((1 + ctas, 2), -1, dtype=torch.int32)
        spans[0] = torch.tensor([0, count - 1])
        spans[2 : 1 + count, 0] = 0
    else:
        schedule = Schedule(rows, 1, count, count, Cut.EVERY)
        slots, spans = list(range(count)), torch.zeros(1, dtype=torch.int32)
    part, sums, (want, size, want_lse) = partials_of(count, rows, slots)
    out, lse = torch.full((1, rows, CHANNELS), torch.nan), torch.full((1, rows), torch.nan)
    combined(schedule, part, sums, spans, None, out, lse, -torch.inf, lifted=0)
    bound = accumulation(count, torch.float32, 4)
    assert_close(out[0], want, atol=bound, scale=size)
    assert_close(lse[0], want_lse, atol=bound, rtol=bound)


def test_a_batch_invariant_combine_does_not_see_the_batch(monkeypatch):
    monkeypatch.setattr(config, "_COMBINE_CTAS", 20)
    schedule = Schedule(16, 1, 3, 3, Cut.EVERY, invariant=True)
    part, sums = torch.randn(9, 16, CHANNELS).half(), torch.rand(9, 16, 4) * 9
    results = []
    for tokens in (slice(0, 3), slice(1, 2)):
        pieces = slice(3 * tokens.start, 3 * tokens.stop)
        out = torch.zeros(tokens.stop - tokens.start, 16, CHANNELS)
        lse = torch.zeros(out.shape[:2])
        nothing = torch.zeros(1, dtype=torch.int32)
        combined(schedule, part[pieces], sums[pieces], nothing, None, out, lse, -torch.inf)
        results.append((out, lse))
    assert torch.equal(results[0][0][1], results[1][0][0])
    assert torch.equal(results[0][1][1], results[1][1][0])


@pytest.mark.parametrize(
    ("heads", "way", "what"),
    [
        (3, "whole", ""), (20, "tail", "large scale"), (36, "stream-K", ""),
        (36, "whole", "large scale"), (36, "narrow", "large scale"),
    ],
)  # fmt: skip
def test_heads_leave_as_the_fp8_that_a_second_kernel_would_make_of_them(heads, way, what):
    main = scope(4, 130, lengths=[130, 0, 7, 64])
    if what:
        page, offset = divmod(int(main.indices[0, 17]), main.cache.shape[1])
        get_layout(MAIN_FP8).planes(main.cache)[1][page, offset, 3] = 137
    made = Scene(torch.randn(4, heads, CHANNELS).bfloat16(), main, sink=torch.zeros(heads))
    schedule = schedule_of(heads, 4, way, 3)
    table, positions = torch.randn(9, 64), torch.tensor([8, 3, 0, 5])
    out, _ = run(made, schedule)
    to = QuantizedOut.allocate(made.q, InverseRopeQuant(positions, table, 1), native=False)
    run(made, schedule, to=to)
    want = inverse_rope_fp8_quant(out, positions, table, n_groups=1, backend="triton")
    got = to.results(1)
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize(
    ("heads", "way"),
    [(3, "stream-K"), (3, "planned"), (36, "planned"), (66, "stream-K"), (3, "by blocks"),
     (3, "by blocks, planned"), (36, "by blocks, planned"), (40, "by blocks")],
)  # fmt: skip
def test_a_stream_that_cuts_a_task_into_many(heads, way, monkeypatch):
    if heads == 40:  # whose partials several heads of a program combine
        monkeypatch.setattr(config, "_COMBINE_CTAS", 1)
    made = Scene(
        torch.randn(3, heads, CHANNELS).bfloat16(),
        scope(3, 1900, lengths=[40, 1900, 0]),
        sink=torch.randn(heads),
    )
    out, lse = run(made, schedule_of(heads, 3, way, 5))
    assert out.isfinite().all()
    made.expected().check((out, lse))


@pytest.mark.parametrize("heads", [3, 4, 34])
def test_partitions_overtake_each_other(heads):
    """Short pieces: a producer that runs ahead must not take a buffer that is still read."""
    made = Scene(
        torch.randn(12, heads, CHANNELS).bfloat16(),
        scope(12, 200, lengths=[0, 64, 1, 200, 130, 0, 65, 5, 128, 190, 3, 70]),
    )
    for seed in (1, 2):
        made.expected().check(run(made, schedule_of(heads, 12, "whole", 1), seed=seed))


@pytest.mark.parametrize(("heads", "way"), [(5, "every"), (34, "tail"), (34, "stream-K")])
@pytest.mark.parametrize("what", ["large scale", "small scale", "large q", "tail", "NaN"])
def test_what_float16_cannot_hold(heads, way, what):
    q = torch.randn(2, heads, CHANNELS).bfloat16()
    made = Scene(q, scope(2, 70, lengths=[70, 66]), sink=torch.zeros(heads))
    data, scales = get_layout(MAIN_FP8).planes(made.main.cache)
    bad = int(made.main.indices[0, 17])
    page, offset = divmod(bad, made.main.cache.shape[1])
    scale = CHANNELS**-0.5
    if what == "large scale":
        scales[page, offset, 3] = 140
        scale = 2.0**-24
    elif what == "small scale":
        scales[page, offset, 5] = 60
    elif what == "large q":
        q[0] *= 2.0**30
        q[1] *= 2.0**-8
        scale = 2.0**-34
    elif what == "tail":
        data[page, offset, 448:] = torch.full((64,), 3e5).bfloat16().view(torch.uint8)
        scale = 2.0**-22
    else:
        data[page, offset, 100] = 0x7F
    out, lse = run(made, schedule_of(heads, 2, way, 3), scale)
    if what == "NaN":
        lists = torch.tensor([bad in made.main.indices[t, :n] for t, n in enumerate((70, 66))])
        assert out[lists].isnan().any(-1).all()
        assert lse[lists].isnan().all()
        assert out[~lists].isfinite().all()
        assert lse[~lists].isfinite().all()
        return
    rows = [made.main.rows(token) for token in range(2)]
    attend(q, rows, made.sink, scale).check((out, lse))


def test_a_tile_that_is_computed_again_leaves_the_others_alone():
    lists, q = scope(2, 70), torch.randn(2, 40, CHANNELS).bfloat16()
    results = []
    for value in (1.0, 3e38):
        q[0, 17, 3] = value
        made = Scene(q.clone(), lists, sink=torch.zeros(40))
        results.append(run(made, schedule_of(40, 2, "narrow", 3))[0])
    same = (results[0] == results[1]).all(-1)
    assert same[1].all()
    assert same[0, :16].all()
    assert same[0, 32:].all()
    assert not same[0, 17]


def test_the_lse_of_a_token_without_rows_is_what_was_asked_for():
    made = Scene(torch.randn(2, 3, CHANNELS).bfloat16(), scope(2, 9, lengths=[0, 9]))
    out, lse = run(made, schedule_of(3, 2, "whole", 2), empty=torch.inf)
    assert (lse[0] == torch.inf).all()
    assert not out[0].any()
    assert lse[1].isfinite().all()


def test_float16_queries():
    made = Scene(torch.randn(2, 3, CHANNELS).half(), scope(2, 40))
    out, lse = run(made, schedule_of(3, 2, "whole", 2))
    want = made.expected()
    assert torch.allclose(lse.double(), want.lse, atol=1e-4)
    assert torch.allclose(out.double(), want.out, atol=2e-3)
