"""Index scores on Hopper: 64 heads of FP8 against pages of 64 FP8 keys.

Grid: (tokens, or pairs of neighbours, parts of the context). A program keeps its tokens' queries in
shared memory, [ROWS x 64 heads, 128], and walks the pages that they see; tokens of two requests
take their pages one request after the other.

    4 producers  every fourth tile each: pages -> ring of BUFFERS tiles, keys [64, 128] and 64
                 scales; a warp and 24 registers
    4 consumers  the same tiles: keys . queries, relu, weights, sums; 4 warps and 112 registers

One consumer works on its sums while others use the tensor cores. Barriers: full[b] producer ->
consumer, and in shared words of the kernel's own consumer -> producer.
"""

from collections.abc import Iterator

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from anymla.ops._triton import Build, Target
from anymla.ops.early import launches_early
from anymla.ops.gluon_early import let_dependents_start, wait_for_predecessors
from anymla.ops.indexer.gluon_sm90_sums import CONSUMERS, HEADS, consume, view
from anymla.ops.indexer.gluon_sm90_walk import PAGE, page_of, walk
from anymla.ops.indexer.gluon_sm90_words import begin, reserve, wait

WIDTH = 128
BUFFERS = 8
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 112, 24
_H = gl.constexpr(HEADS)
_D = gl.constexpr(WIDTH)
_P = gl.constexpr(PAGE)
_CONSUMERS = gl.constexpr(CONSUMERS)
# The name changed after triton 3.6.
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _produce(
    keys_desc, scales_desc, table, table_row_stride, table_column_stride, lengths, starts, owners,
    first_row, rows, per_request, requests, pages, covered, k, span, keys, scales, full, words,
    BUFFERS: gl.constexpr, ROWS: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """The tiles of one consumer, page ids a tile ahead."""
    q0, low0, tiles0, q1, low1, tiles1, _s0, _e0, _s1, _e1, _shared = walk(
        lengths, starts, owners, first_row, rows, per_request, requests, covered, k, span, ROWS
    )
    L3: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=3)
    # Of a page, behind its codes.
    SCALES: gl.constexpr = 0 if table is None else _P * _D // 4
    tiles = tiles0 + tiles1
    page, _at = page_of(
        table, table_row_stride, table_column_stride, q0, low0, tiles0, q1, low1, WHO, tiles
    )
    for i in range(WHO, tiles, _CONSUMERS):
        ahead, _at = page_of(
            table, table_row_stride, table_column_stride, q0, low0, tiles0, q1, low1,
            i + _CONSUMERS, tiles,
        )  # fmt: skip
        b = i % BUFFERS
        wait(words, b, ((i // BUFFERS) & 1) ^ 1)
        mbarrier.expect(full.index(b), _P * _D + _P * 4)
        # Any page will do where there is none; its scores are not used.
        there = (page >= 0) & (page < pages)
        source = gl.where(there, page, 0)
        tile = view(keys.index(b), gl.float8e4nv, [1, _P, _D], L3)
        _copy(keys_desc, [source, 0, 0], full.index(b), tile)
        _copy(scales_desc, [source, SCALES], full.index(b), scales.index(b))
        page = ahead


@gluon.jit(
    do_not_specialize=[
        "first_row", "rows", "per_request", "requests", "pages", "covered", "k", "span", "context"
    ]
)  # fmt: skip
def page_scores_kernel(
    q,
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
    ROWS: gl.constexpr,
    BUFFERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    FILL: gl.constexpr,
    EARLY: gl.constexpr,
):
    """ROWS tokens and ``span`` entries; arguments as of ``select_scores_kernel``.

    FILL: entries that a token does not see are -inf, up to ``context``. EARLY: see
    ``early_launch``.
    """
    # A consumer meets the same buffers again, so it never waits for a fill two turns ahead, which
    # a barrier's parity could not tell from the last.
    gl.static_assert(BUFFERS % _CONSUMERS == 0)
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=2)
    queries = gl.allocate_shared_memory(gl.float8e4nv, [ROWS * _H, _D], CODES)
    keys = gl.allocate_shared_memory(gl.float8e4nv, [BUFFERS, _P, _D], CODES)
    scales = gl.allocate_shared_memory(gl.float32, [BUFFERS, 1, _P], WORDS)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], BARRIER)
    words = reserve()
    begin(words, BUFFERS)
    for i in gl.static_range(BUFFERS):
        mbarrier.init(full.index(i), count=1)
    if EARLY:
        # Partitions begin behind this.
        wait_for_predecessors()
        let_dependents_start()
    LOAD: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    line = gl.arange(0, ROWS * _H, layout=gl.SliceLayout(1, LOAD))
    channel = gl.arange(0, _D, layout=gl.SliceLayout(0, LOAD))
    first = gl.program_id(0).to(gl.int64) * (ROWS * _H)
    codes = gl.load(
        q + (first + gl.expand_dims(line, 1)) * _D + gl.expand_dims(channel, 0),
        mask=gl.expand_dims(first + line < rows.to(gl.int64) * _H, 1),
        other=0,
    )
    queries.store(codes.to(gl.float8e4nv, bitcast=True))
    fence_async_shared()
    # Spelled out for each: constexprs would not survive in a variable.
    gl.warp_specialize(
        [
            (consume, (
                table, table_row_stride, table_column_stride, lengths, starts, owners, weights,
                weights_stride, scores, scores_stride, maxima, maxima_stride, first_row, rows,
                per_request, requests, pages, covered, k, span, context, queries, keys, scales,
                full, words, BUFFERS, ROWS, FILL, 0,
            )),
            (consume, (
                table, table_row_stride, table_column_stride, lengths, starts, owners, weights,
                weights_stride, scores, scores_stride, maxima, maxima_stride, first_row, rows,
                per_request, requests, pages, covered, k, span, context, queries, keys, scales,
                full, words, BUFFERS, ROWS, FILL, 1,
            )),
            (consume, (
                table, table_row_stride, table_column_stride, lengths, starts, owners, weights,
                weights_stride, scores, scores_stride, maxima, maxima_stride, first_row, rows,
                per_request, requests, pages, covered, k, span, context, queries, keys, scales,
                full, words, BUFFERS, ROWS, FILL, 2,
            )),
            (consume, (
                table, table_row_stride, table_column_stride, lengths, starts, owners, weights,
                weights_stride, scores, scores_stride, maxima, maxima_stride, first_row, rows,
                per_request, requests, pages, covered, k, span, context, queries, keys, scales,
                full, words, BUFFERS, ROWS, FILL, 3,
            )),
            (_produce, (
                keys_desc, scales_desc, table, table_row_stride, table_column_stride, lengths,
                starts, owners, first_row, rows, per_request, requests, pages, covered, k, span,
                keys, scales, full, words, BUFFERS, ROWS, 0,
            )),
            (_produce, (
                keys_desc, scales_desc, table, table_row_stride, table_column_stride, lengths,
                starts, owners, first_row, rows, per_request, requests, pages, covered, k, span,
                keys, scales, full, words, BUFFERS, ROWS, 1,
            )),
            (_produce, (
                keys_desc, scales_desc, table, table_row_stride, table_column_stride, lengths,
                starts, owners, first_row, rows, per_request, requests, pages, covered, k, span,
                keys, scales, full, words, BUFFERS, ROWS, 2,
            )),
            (_produce, (
                keys_desc, scales_desc, table, table_row_stride, table_column_stride, lengths,
                starts, owners, first_row, rows, per_request, requests, pages, covered, k, span,
                keys, scales, full, words, BUFFERS, ROWS, 3,
            )),
        ],
        [4, 4, 4, 1, 1, 1, 1],
        [
            CONSUMER_REGISTERS, CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS,
            PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS,
        ],
    )  # fmt: skip


def builds(target: Target) -> Iterator[Build]:
    """A token and two, with maxima and without; pages and keys in one list."""
    if target.name != "sm_90":
        return
    numbers = (
        "table_row_stride", "table_column_stride", "weights_stride", "scores_stride",
        "maxima_stride", "first_row", "rows", "per_request", "requests", "pages", "covered", "k",
        "span", "context",
    )  # fmt: skip
    keys, scales = gl.NVMMASharedLayout(128, 8, rank=3), gl.NVMMASharedLayout(0, 32, rank=2)
    types = {
        "q": "*u8",
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
    for rows in (1, 2):
        for given in choices:
            optional = ("table", "maxima", "owners", "starts")
            yield Build(
                ", ".join((f"{rows} rows", *given)),
                page_scores_kernel,
                types | dict.fromkeys(given, "*i32"),
                {
                    **{name: None for name in optional if name not in given},
                    "ROWS": rows,
                    "BUFFERS": BUFFERS,
                    "CONSUMER_REGISTERS": CONSUMER_REGISTERS,
                    "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
                    "FILL": "maxima" not in given,
                    "EARLY": launches_early(target),
                },
                divisible=("weights_stride", "scores_stride"),
                matrix="e4m3",
                # Addresses that consumers need for tiles at the ends of rows.
                spills=100 if rows > 1 else 16,
            )
