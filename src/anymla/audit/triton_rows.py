"""Copies of rows of several tensors in one launch, if a flag on the device asks for it."""

from __future__ import annotations

import triton
import triton.language as tl

from anymla.ops.pdl import gdc_launch_dependents, gdc_wait

# Fields in a row of the table; the last pads it to 16 bytes, so that no launch differs in
# alignment.
FIELDS = tl.constexpr(6)


@triton.jit(do_not_specialize=["section"])
def copy_rows_kernel(
    table,  # int64 [entries, FIELDS]: source, row stride, row length, target, mark
    control,  # int64 [1 + ROWS + sections]: step, rows, flag of each section
    arena,  # int32
    marks,  # int64
    section,  # whose flag counts
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy row ``control[1 + row]`` of the entry's tensor to ``target + row * length``.

    The grid is (entries, rows). Addresses are in bytes, all else in words of four bytes. The step
    is stored at the entry's mark.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if tl.load(control + 1 + ROWS + section) != 0:
        entry = table + tl.program_id(0) * FIELDS
        row = tl.program_id(1)
        stride, length = tl.load(entry + 1), tl.load(entry + 2)
        source = tl.load(entry).to(tl.pointer_type(tl.int32)) + tl.load(control + 1 + row) * stride
        target = arena + tl.load(entry + 3) + row * length
        for start in range(0, length, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(target + at, tl.load(source + at, mask=at < length), mask=at < length)
        if row == 0:
            tl.store(marks + tl.load(entry + 4), tl.load(control))
