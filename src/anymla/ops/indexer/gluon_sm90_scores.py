"""Index scores on Hopper: 64 heads of FP8 against pages of 64 FP8 keys.

Grid: (programs, parts of the context). Items are tokens, or pairs of neighbours; a program takes
every so-many-th. It has its item's queries in shared memory, [ROWS x 64 heads, 128], those of the
next item follow, and it walks the pages that the tokens see; tokens of two requests take their
pages one request after the other.

    2 producers  every second tile each: pages -> ring of BUFFERS tiles, keys [64, 128] and 64
                 scales; a warp and 24 registers. The first also copies queries.
    2 consumers  the same tiles: keys . queries, relu, weights, sums; 4 warps

Barriers: full[b] producer -> consumer, and in shared words of the kernel's own consumer ->
producer.
"""

from collections.abc import Iterator

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from anymla.ops._build import Build
from anymla.ops.device import Target
from anymla.ops.indexer.gluon_sm90_consume import CONSUMERS, Results, Ring, consume
from anymla.ops.indexer.gluon_sm90_sums import HEADS, view
from anymla.ops.indexer.gluon_sm90_walk import PAGE, Rows, first_page_of, page_of, walk
from anymla.ops.indexer.gluon_sm90_words import begin, reserve, wait
from anymla.ops.indexer.score_forms import AHEAD, FEW_PAIRS, SINGLE
from anymla.ops.pdl import gdc_wait, target_has_pdl

WIDTH = 128
BUFFERS = 8
PRODUCER_REGISTERS = 24
_H = gl.constexpr(HEADS)
_D = gl.constexpr(WIDTH)
_P = gl.constexpr(PAGE)
_C = gl.constexpr(CONSUMERS)
# The name changed after triton 3.6.
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _produce(
    q_desc, keys_desc, scales_desc, rows, ring, items, ROWS: gl.constexpr, BUFFERS: gl.constexpr,
    PDL: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """The tiles of one consumer, page ids a tile ahead; the first also copies queries."""
    if PDL:
        gdc_wait()
    L3: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=3)
    # Of a page, behind its codes.
    SCALES: gl.constexpr = 0 if rows.table is None else _P * _D // 4
    EACH: gl.constexpr = BUFFERS // _C
    n = 0  # tiles so far
    turn = 0
    if WHO == 0:
        _copy_queries(q_desc, ring, gl.program_id(0), 0, ROWS, BUFFERS)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        way = walk(rows, item, ROWS)
        page = first_page_of(rows, way, item, WHO, ROWS)
        for tile in range(WHO, way.tiles0 + way.tiles1, _C):
            ahead, _at = page_of(rows, way, tile + _C)
            b = n % EACH * _C + WHO
            wait(ring.words, b, ((n // EACH) & 1) ^ 1)
            n += 1
            mbarrier.expect(ring.full.index(b), _P * _D + _P * 4)
            # Any page will do where there is none; its scores are not used.
            there = (page >= 0) & (page < rows.pages)
            source = gl.where(there, page, 0)
            keys = view(ring.keys.index(b), gl.float8e4nv, [1, _P, _D], L3)
            _copy(keys_desc, [source, 0, 0], ring.full.index(b), keys)
            _copy(scales_desc, [source, SCALES], ring.full.index(b), ring.scales.index(b))
            page = ahead
        turn += 1  # noqa: SIM113 - device code has no enumerate
        if WHO == 0:
            following = item + gl.num_programs(0)
            if following < items:
                wait(ring.words, BUFFERS + turn % 2, ((turn // 2) & 1) ^ 1)
                _copy_queries(q_desc, ring, following, turn, ROWS, BUFFERS)


@gluon.jit
def _copy_queries(q_desc, ring, item, turn, ROWS: gl.constexpr, BUFFERS: gl.constexpr):
    full = ring.full.index(BUFFERS + turn % 2)
    mbarrier.expect(full, ROWS * _H * _D)
    _copy(q_desc, [item * (ROWS * _H), 0], full, ring.queries.index(turn % 2))


@gluon.jit(
    do_not_specialize=[
        "first_row", "rows", "per_request", "requests", "pages", "covered", "k", "span", "context",
        "items",
    ]
)  # fmt: skip
def page_scores_kernel(
    q_desc,
    keys_desc,
    scales_desc,
    table,
    table_row_stride,
    table_column_stride,
    lengths,
    starts,
    owners,
    weights,
    weights_stride,
    scores,
    scores_stride,
    maxima,
    maxima_stride,
    first_row,
    rows,
    per_request,
    requests,
    pages,
    covered,
    k,
    span,
    context,
    items,
    ROWS: gl.constexpr,
    BUFFERS: gl.constexpr,
    AHEAD: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    FILL: gl.constexpr,
    PDL: gl.constexpr,
):
    """Items of ROWS tokens, and ``span`` entries; arguments as of ``select_scores_kernel``.

    AHEAD: see ``gluon_sm90_consume``. FILL: entries that a token does not see are -inf, up to
    ``context``. PDL: see ``pdl_launch``.
    """
    # A consumer meets the same buffers again, so it never waits for a fill two turns ahead, which
    # a barrier's parity could not tell from the last.
    gl.static_assert(BUFFERS % _C == 0)
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=2)
    queries = gl.allocate_shared_memory(gl.float8e4nv, [2, ROWS * _H, _D], CODES)
    keys = gl.allocate_shared_memory(gl.float8e4nv, [BUFFERS, _P, _D], CODES)
    scales = gl.allocate_shared_memory(gl.float32, [BUFFERS, 1, _P], WORDS)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS + 2, 1], BARRIER)
    words = reserve()
    begin(words, 0, BUFFERS, 4)
    begin(words, BUFFERS, 2, 4 * _C)
    begin(words, BUFFERS + 2, 1, 4)
    for i in gl.static_range(BUFFERS + 2):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    seen = Rows(
        table, table_row_stride, table_column_stride, lengths, starts, owners, first_row, rows,
        per_request, requests, pages, covered, k, span,
    )  # fmt: skip
    ring = Ring(keys, scales, queries, full, words)
    to = Results(weights, weights_stride, scores, scores_stride, maxima, maxima_stride, context)
    gl.warp_specialize(
        [
            (consume, (seen, ring, to, items, ROWS, BUFFERS, AHEAD, FILL, PDL, 0)),
            (consume, (seen, ring, to, items, ROWS, BUFFERS, AHEAD, FILL, PDL, 1)),
            (_produce, (
                q_desc, keys_desc, scales_desc, seen, ring, items, ROWS, BUFFERS, PDL, 0,
            )),
            (_produce, (
                q_desc, keys_desc, scales_desc, seen, ring, items, ROWS, BUFFERS, PDL, 1,
            )),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def builds(target: Target) -> Iterator[Build]:
    """A token and two, with maxima and without, one ahead or not; pages and keys in one list."""
    if target.name != "sm_90":
        return
    numbers = (
        "table_row_stride", "table_column_stride", "weights_stride", "scores_stride",
        "maxima_stride", "first_row", "rows", "per_request", "requests", "pages", "covered", "k",
        "span", "context", "items",
    )  # fmt: skip
    queries = gl.NVMMASharedLayout(128, 8, rank=2)
    keys, scales = gl.NVMMASharedLayout(128, 8, rank=3), gl.NVMMASharedLayout(0, 32, rank=2)
    types = {
        "keys_desc": f"tensordesc<fp8e4nv[1, {PAGE}, {WIDTH}],{keys!r}>",
        "scales_desc": f"tensordesc<fp32[1, {PAGE}],{scales!r}>",
        "weights": "*fp32",
        "scores": "*fp32",
        "lengths": "*i32",
        **dict.fromkeys(numbers, "i32"),
    }
    choices = (
        ("table",),
        ("table", "maxima"),
        ("table", "maxima", "owners", "starts"),
        ("starts",),
    )
    for rows, form in ((1, SINGLE), (2, FEW_PAIRS), (2, AHEAD)):
        types["q_desc"] = f"tensordesc<fp8e4nv[{rows * HEADS}, {WIDTH}],{queries!r}>"
        for given in choices:
            optional = ("table", "maxima", "owners", "starts")
            yield Build(
                ", ".join((f"{rows} rows", *given)) + ", ahead" * form.ahead,
                page_scores_kernel,
                types | dict.fromkeys(given, "*i32"),
                {
                    **{name: None for name in optional if name not in given},
                    "ROWS": rows,
                    "BUFFERS": BUFFERS,
                    "AHEAD": form.ahead,
                    "CONSUMER_REGISTERS": form.consumer_registers,
                    "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
                    "FILL": "maxima" not in given,
                    "PDL": target_has_pdl(target),
                },
                divisible=("weights_stride", "scores_stride"),
                matrix="e4m3",
                registers=form.registers,
                # Addresses that consumers need for tiles at the ends of rows.
                spills=100 if rows > 1 else 16,
            )
