"""A pair of partitions that hands memory over by mbarriers: what racecheck makes of it.

Four numbers a thread, or Triton moves them by matrix loads and stores, which the tool does not see.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ROUNDS = 12
SIZE = gl.constexpr(512)


@gluon.jit
def _give(rounds, memory, ready, free):
    L: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    for k in range(0, rounds):
        b = k % 2
        mbarrier.wait(free.index(b), ((k // 2) & 1) ^ 1)
        memory.index(b).store(gl.arange(0, SIZE, layout=L) + k * SIZE)
        mbarrier.arrive(ready.index(b), count=1)


@gluon.jit
def _take(to, rounds, memory, ready, free, PDL: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    wrong = gl.arange(0, SIZE, layout=L) * 0
    for k in range(0, rounds):
        b = k % 2
        if PDL:
            taken = memory.index(b).load(L)
            mbarrier.wait(ready.index(b), (k // 2) & 1)
        else:
            mbarrier.wait(ready.index(b), (k // 2) & 1)
            taken = memory.index(b).load(L)
        wrong += (taken != gl.arange(0, SIZE, layout=L) + k * SIZE).to(gl.int32)
        mbarrier.arrive(free.index(b), count=1)
    gl.store(to + gl.arange(0, SIZE, layout=L), wrong)


@gluon.jit
def pair_kernel(to, rounds, PDL: gl.constexpr):
    """One gives and one takes; PDL: the second reads before it has waited."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    B: gl.constexpr = mbarrier.MBarrierLayout()
    memory = gl.allocate_shared_memory(gl.int32, [2, SIZE], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], B)
    free = gl.allocate_shared_memory(gl.int64, [2, 1], B)
    for b in gl.static_range(2):
        mbarrier.init(ready.index(b), count=1)
        mbarrier.init(free.index(b), count=1)
    gl.warp_specialize(
        [
            (_take, (to, rounds, memory, ready, free, PDL)),
            (_give, (rounds, memory, ready, free)),
        ],
        [4],
        [72],
    )


def run(what):
    to = torch.zeros(SIZE.value, dtype=torch.int32, device="cuda")
    pair_kernel[(1,)](to, ROUNDS, PDL=what == "early", num_warps=4)
    return what == "early" or not to.any()
