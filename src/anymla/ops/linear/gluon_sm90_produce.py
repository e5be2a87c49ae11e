"""The warp that brings the operands of Hopper's products, for all of their kernels.

A step is RUNS runs of 128 bytes of ROWS rows of the weight, and the same runs of the activations,
into the next of STAGES slots. The weight's first steps are asked for as soon as the program starts,
activations when they have been made.

Boxes of several runs are [RUNS, lines, ..], of one [lines, ..].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from anymla.ops.pdl import gdc_wait

# The name changed after triton 3.6.
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _ask(desc, line, run, barrier, to, WIDTH: gl.constexpr, pred=True):
    """Copy the box of some lines at a run; WIDTH values are one, or 0 for boxes of several."""
    if WIDTH == 0:
        _copy(desc, [run, line, 0], barrier, to, pred=pred)
    else:
        _copy(desc, [line, run * WIDTH], barrier, to, pred=pred)


@gluon.jit
def produce(
    x_desc, w_desc, ring, x_ring, full, empty, n, runs, tiles,
    ROWS: gl.constexpr, BYTES: gl.constexpr, RUNS: gl.constexpr, WIDTH: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Every tile of a program, a slot after the other.

    Args:
        x_desc: activations of all groups; the kernels say how.
        w_desc: the weight of all groups.
        ring: slots of the weight.
        x_ring: slots of the activations.
        full: barriers of slots that have been filled.
        empty: barriers of slots that have been given back.
        n: rows of a group.
        runs: of a tile.
        tiles: of all programs.
        ROWS: of a tile.
        BYTES: of a step.
        RUNS: of a step.
        WIDTH: see ``_ask``.
        STAGES: of the ring.
        PDL: see ``pdl_launch``.
    """
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    steps = ((tiles - first + programs - 1) // programs) * ((runs + RUNS - 1) // RUNS)
    tile = first
    run = 0
    for i in gl.static_range(STAGES):
        there = i < steps
        mbarrier.expect(full.index(i), BYTES, pred=there)
        _ask(w_desc, tile * ROWS, run, full.index(i), ring.index(i), WIDTH, there)
        run += RUNS
        if run >= runs:
            run = 0
            tile += programs
    if PDL:
        gdc_wait()
    tile = first
    run = 0
    for i in gl.static_range(STAGES):
        at = tile * ROWS // n * runs + run
        _ask(x_desc, 0, at, full.index(i), x_ring.index(i), WIDTH, i < steps)
        run += RUNS
        if run >= runs:
            run = 0
            tile += programs
    group = tile * ROWS // n
    for step in range(STAGES, steps):
        slot = step % STAGES
        mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(slot), BYTES)
        _ask(w_desc, tile * ROWS, run, full.index(slot), ring.index(slot), WIDTH)
        _ask(x_desc, 0, group * runs + run, full.index(slot), x_ring.index(slot), WIDTH)
        run += RUNS
        if run >= runs:
            run = 0
            tile += programs
            group = tile * ROWS // n
