"""A little pipeline on Hopper: one partition brings tiles by TMA, the other multiplies them.

``docs/crossrun/hopper.md`` shows it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# [example-begin]
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _produce(a_desc, b_desc, tiles, a, b, full, empty):
    for i in range(tiles):
        s = i % 2
        mbarrier.wait(empty.index(s), ((i // 2) & 1) ^ 1)
        mbarrier.expect(full.index(s), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        _load(a_desc, [0, i * 64], full.index(s), a.index(s))
        _load(b_desc, [i * 64, 0], full.index(s), b.index(s))


@gluon.jit
def _multiply(out, tiles, a, b, full, empty):
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    acc = gl.zeros([64, 64], gl.float32, ACC)
    for i in range(tiles):
        s = i % 2
        mbarrier.wait(full.index(s), (i // 2) & 1)
        acc = warpgroup_mma(a.index(s), b.index(s), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(s), count=1)
    row = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, ACC)), 1)
    column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, ACC)), 0)
    gl.store(out + row * 64 + column, acc)


@gluon.jit
def matmul_kernel(a_desc, b_desc, out, tiles):
    """out [64, 64] = A [64, 64 * tiles] times B."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    a = gl.allocate_shared_memory(gl.float16, [2, 64, 64], TILE)
    b = gl.allocate_shared_memory(gl.float16, [2, 64, 64], TILE)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(2):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    gl.warp_specialize(
        [
            (_multiply, (out, tiles, a, b, full, empty)),
            (_produce, (a_desc, b_desc, tiles, a, b, full, empty)),
        ],
        [4],
        [24],
    )


# [example-end]
