"""Which pages a program of Hopper's scores walks: one run of them a request."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate  # public from 3.9 on

PAGE = 64
_P = gl.constexpr(PAGE)


@aggregate
class Rows:
    """The rows of a call and the pages that they see; ``None`` where there is no such argument.

    Attributes:
        table: int32 [R, pages]; without it pages are in order.
        row_stride: of the table.
        column_stride: of the table.
        lengths: int32 [rows], one past the last entry.
        starts: int32 [rows], first entry; without it 0.
        owners: int32 [rows], request of each; without it ``per_request`` rows of each.
        first_row: number of the first row in the whole call.
        rows: how many.
        per_request: see above.
        requests: rows of the table.
        pages: of the cache.
        covered: entries that there are to see.
        k: rows of at most so many entries are not scored.
        span: entries of a program.
    """

    table: object
    row_stride: object
    column_stride: object
    lengths: object
    starts: object
    owners: object
    first_row: object
    rows: object
    per_request: object
    requests: object
    pages: object
    covered: object
    k: object
    span: object

    @gluon.constexpr_function
    def __init__(
        self, table, row_stride, column_stride, lengths, starts, owners, first_row, rows,
        per_request, requests, pages, covered, k, span,
    ):  # fmt: skip
        self.table = field(table)
        self.row_stride = field(row_stride)
        self.column_stride = field(column_stride)
        self.lengths = field(lengths)
        self.starts = field(starts)
        self.owners = field(owners)
        self.first_row = field(first_row)
        self.rows = field(rows)
        self.per_request = field(per_request)
        self.requests = field(requests)
        self.pages = field(pages)
        self.covered = field(covered)
        self.k = field(k)
        self.span = field(span)


@gluon.constexpr_function
def field(x):
    """Of an aggregate: a value, or what is known when the kernel is built, as None is."""
    return x if hasattr(x, "type") else gl.constexpr(x)


@aggregate
class Walk:
    """The tiles of a program: two runs of pages, and the rows that see them.

    Attributes:
        q0: request of the first run.
        low0: its first entry.
        tiles0: its tiles.
        q1: request of the second run, which is empty where rows share the first.
        low1: its first entry.
        tiles1: its tiles.
        s0: first entry of the first row.
        e0: one past its last.
        s1: first entry of the second row.
        e1: one past its last.
        shared: the rows share the first run.
    """

    q0: object
    low0: object
    tiles0: object
    q1: object
    low1: object
    tiles1: object
    s0: object
    e0: object
    s1: object
    e1: object
    shared: object

    @gluon.constexpr_function
    def __init__(self, q0, low0, tiles0, q1, low1, tiles1, s0, e0, s1, e1, shared):
        self.q0, self.low0, self.tiles0 = q0, low0, tiles0
        self.q1, self.low1, self.tiles1 = q1, low1, tiles1
        self.s0, self.e0, self.s1, self.e1 = s0, e0, s1, e1
        self.shared = shared


@gluon.jit
def _bounds(rows, row):
    """Request and entries [start, end) of a row that is scored; (0, 0) of any other."""
    live = row < rows.rows
    if rows.owners is None:
        request = (rows.first_row + row) // rows.per_request
    else:
        request = gl.load(rows.owners + row, mask=live, other=-1)
    end = gl.minimum(gl.load(rows.lengths + row, mask=live, other=0), rows.covered)
    start = 0
    if rows.starts is not None:
        start = gl.maximum(gl.load(rows.starts + row, mask=live, other=0), 0)
    scored = live & (request >= 0) & (request < rows.requests) & (end - start > rows.k)
    return request, gl.where(scored, start, 0), gl.where(scored, end, 0)


@gluon.jit
def walk(rows, item, ROWS: gl.constexpr):
    """The tiles of this program for the ``item``-th row, or pair of rows."""
    row = item * ROWS
    q0, s0, e0 = _bounds(rows, row)
    q1, s1, e1, shared = q0, s0, e0, e0 > 0
    if ROWS > 1:
        q1, s1, e1 = _bounds(rows, row + 1)
        shared = (q0 == q1) & (e0 > 0) & (e1 > 0)
    low0 = gl.where(shared, gl.minimum(s0, s1), s0)
    high0 = gl.where(shared, gl.maximum(e0, e1), e0)
    high1 = gl.where(shared, 0, e1)
    if ROWS == 1:
        high1 = gl.where(shared, 0, 0)
    first = gl.program_id(1) * rows.span
    low0 = gl.maximum(low0 // _P * _P, first)
    low1 = gl.maximum(s1 // _P * _P, first)
    tiles0 = gl.maximum(gl.minimum(high0, first + rows.span) - low0 + _P - 1, 0) // _P
    tiles1 = gl.maximum(gl.minimum(high1, first + rows.span) - low1 + _P - 1, 0) // _P
    return Walk(q0, low0, tiles0, q1, low1, tiles1, s0, e0, s1, e1, shared)


@gluon.jit
def page_of(rows, way, tile):
    """Page id of a tile, -1 past the last, and its first entry."""
    tiles = way.tiles0 + way.tiles1
    second = tile >= way.tiles0
    request = gl.where(second, way.q1, way.q0)
    at = gl.where(second, way.low1 + (tile - way.tiles0) * _P, way.low0 + tile * _P)
    if rows.table is None:
        page = gl.where(tile < tiles, at // _P, -1)
    else:
        cell = request.to(gl.int64) * rows.row_stride
        cell += (at // _P).to(gl.int64) * rows.column_stride
        page = gl.load(rows.table + cell, mask=tile < tiles, other=-1)
    return page, at


@gluon.jit
def first_page_of(rows, way, item, tile, ROWS: gl.constexpr):
    """Page id of one of a program's first tiles, asked for before lengths are known if it can be.

    Where rows begin at 0 and requests have as many each, that says where it is listed.
    """
    if (rows.table is not None) and (rows.owners is None) and (rows.starts is None):
        at = gl.program_id(1) * rows.span + tile * _P
        request = (rows.first_row + item * ROWS) // rows.per_request
        cell = request.to(gl.int64) * rows.row_stride + (at // _P).to(gl.int64) * rows.column_stride
        page = gl.load(rows.table + cell, mask=at < rows.covered, other=-1)
        other, _at = page_of(rows, way, gl.where(tile < way.tiles0, way.tiles0 + way.tiles1, tile))
        page = gl.where(tile < way.tiles0, page, other)
    else:
        page, _at = page_of(rows, way, tile)
    return page
