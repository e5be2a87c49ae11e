"""Epilogue of a block of rows in the Hopper gradients: reductions, or a row for each column."""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.ops._gluon_ptx import (
    bar_warp_sync,
    opaque,
    red_global_add_v4_f32_if,
    st_global_v4_f32_if,
)
from anymla.ops.attention.gluon_sm90_prefill_backward_shared import CHANNELS, DIM

# Ways to handle the addends to rows: leave them out, sum them by reductions in L2, or store a row
# for each column of a query.
NOTHING = gl.constexpr(0)
REDUCTIONS = gl.constexpr(1)
COLUMNS = gl.constexpr(2)


@gluon.constexpr_function
def sectors_layout(rows, channels):
    """Layout of an accumulator [64, channels] after an exchange within quads.

    Four neighbours lie in a thread, and eight in two: 16 bytes of float32 a thread, and full
    sectors of 32 bytes of 16-bit types.
    """
    registers = [[0, 1], [0, 2], [8, 0]]
    step = 16
    while step < channels:
        registers.append([0, step])
        step *= 2
    lanes = [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, channels])


@gluon.jit
def add_to_rows(x, drows, slots, first, column, channel, ROWS: gl.constexpr):
    """Add [64, CHANNELS] to the channels from ``channel`` on of 64 rows.

    Args:
        x: addends of each row, in an accumulator's layout.
        drows: float32 rows of 512 channels.
        slots: shared memory of the row numbers; nothing is done for negative ones.
        first: number of the row of a query's first column, if columns are stored.
        column: the block's first column; nothing is stored for negative ones.
        channel: number of the first channel that is added to.
        ROWS: REDUCTIONS or COLUMNS.
    """
    x = gl.convert_layout(x, sectors_layout(64, CHANNELS))
    even, odd = gl.split(gl.reshape(x, [64, CHANNELS // 2, 2]))
    a, c = gl.split(gl.reshape(even, [64, CHANNELS // 4, 2]))
    b, d = gl.split(gl.reshape(odd, [64, CHANNELS // 4, 2]))
    L: gl.constexpr = a.type.layout
    slot = slots.load(gl.SliceLayout(1, L))
    row = slot.to(gl.int64)
    if ROWS == COLUMNS:
        # Addresses are computed in place, as registers for those of all blocks do not suffice.
        column = opaque(column)
        row = first + (gl.arange(0, 64, layout=gl.SliceLayout(1, L)) + column)
    c0 = gl.arange(0, CHANNELS // 4, layout=gl.SliceLayout(0, L)) * 4 + channel
    at = (gl.expand_dims(drows + row * DIM, 1) + gl.expand_dims(c0, 0)).to(gl.int64)
    there = slot >= 0
    if ROWS == COLUMNS:
        there = there & (column >= 0)
    there = gl.expand_dims(there, 1).to(gl.int32)
    if ROWS == COLUMNS:
        st_global_v4_f32_if(at, a, b, c, d, there)
        # The next products wait for these stores, so that they take their registers.
        bar_warp_sync()
    else:
        red_global_add_v4_f32_if(at, a, b, c, d, there)
