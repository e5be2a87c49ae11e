"""Which pages a program of Hopper's scores walks: one run of them a request."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PAGE = 64
_P = gl.constexpr(PAGE)


@gluon.jit
def _bounds(lengths, starts, owners, row, first_row, rows, per_request, requests, covered, k):
    """Request and entries [start, end) of a row that is scored; (0, 0) of any other."""
    live = row < rows
    if owners is None:
        request = (first_row + row) // per_request
    else:
        request = gl.load(owners + row, mask=live, other=-1)
    end = gl.minimum(gl.load(lengths + row, mask=live, other=0), covered)
    start = 0
    if starts is not None:
        start = gl.maximum(gl.load(starts + row, mask=live, other=0), 0)
    scored = live & (request >= 0) & (request < requests) & (end - start > k)
    return request, gl.where(scored, start, 0), gl.where(scored, end, 0)


@gluon.jit
def walk(
    lengths, starts, owners, first_row, rows, per_request, requests, covered, k, span,
    ROWS: gl.constexpr,
):  # fmt: skip
    """The tiles of this program: two runs of pages, and the rows that see them.

    Returns (request, first entry, tiles) of both runs, (start, end) of both rows, and whether the
    rows share the first run; the second is then empty.
    """
    row = gl.program_id(0) * ROWS
    q0, s0, e0 = _bounds(
        lengths, starts, owners, row, first_row, rows, per_request, requests, covered, k
    )
    q1, s1, e1, shared = q0, s0, e0, e0 > 0
    if ROWS > 1:
        q1, s1, e1 = _bounds(
            lengths, starts, owners, row + 1, first_row, rows, per_request, requests, covered, k
        )
        shared = (q0 == q1) & (e0 > 0) & (e1 > 0)
    low0 = gl.where(shared, gl.minimum(s0, s1), s0)
    high0 = gl.where(shared, gl.maximum(e0, e1), e0)
    high1 = gl.where(shared, 0, e1)
    if ROWS == 1:
        high1 = gl.where(shared, 0, 0)
    first = gl.program_id(1) * span
    low0 = gl.maximum(low0 // _P * _P, first)
    low1 = gl.maximum(s1 // _P * _P, first)
    tiles0 = gl.maximum(gl.minimum(high0, first + span) - low0 + _P - 1, 0) // _P
    tiles1 = gl.maximum(gl.minimum(high1, first + span) - low1 + _P - 1, 0) // _P
    return q0, low0, tiles0, q1, low1, tiles1, s0, e0, s1, e1, shared


@gluon.jit
def page_of(table, table_row_stride, table_column_stride, q0, low0, tiles0, q1, low1, tile, tiles):
    """Page id of a tile, -1 past the last, and its first entry; pages in order without a table."""
    second = tile >= tiles0
    request = gl.where(second, q1, q0)
    at = gl.where(second, low1 + (tile - tiles0) * _P, low0 + tile * _P)
    if table is None:
        page = gl.where(tile < tiles, at // _P, -1)
    else:
        cell = request.to(gl.int64) * table_row_stride
        cell += (at // _P).to(gl.int64) * table_column_stride
        page = gl.load(table + cell, mask=tile < tiles, other=-1)
    return page, at
