"""In which order programs take the tokens of a call, and whether its last round is cut.

The longest come first, and in every second round the other way round. What is left for the last
round are the shortest, which are cut where that ends sooner: if all are about as long, it does.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.ops._gluon import view
from anymla.ops.sparse_attention.gluon_sm90_lists import KEYS, length_of
from anymla.ops.sparse_attention.schedule import MOST_ORDERED_TOKENS

# Of keys that tokens are ordered by.
_TOKENS = gl.constexpr(MOST_ORDERED_TOKENS)
_MOST_BLOCKS = gl.constexpr((1 << 30) // MOST_ORDERED_TOKENS)
# What cutting the last round costs besides, in units: blocks and fixed costs of tasks.
_CUTTING = gl.constexpr(5)


@gluon.jit
def place_of(k, program, programs):
    """Which piece of its round k a program takes, in an ordered launch."""
    return gl.where(k % 2 == 1, programs - 1 - program, program)


@gluon.jit
def _rank_keys(lists, tokens, T):
    """Numbers that are the larger, the earlier a token is taken: by blocks, then by number."""
    there = tokens < T
    n0 = length_of(lists.length0, tokens, there, lists.width0, lists.LENGTH0)
    blocks = tokens * 0 + (n0 + KEYS - 1) // KEYS
    if lists.TWO:
        n1 = length_of(lists.length1, tokens, there, lists.width1, lists.LENGTH1)
        blocks = blocks + (n1 + KEYS - 1) // KEYS
    keys = gl.minimum(gl.maximum(blocks, 1), _MOST_BLOCKS) * _TOKENS + (_TOKENS - 1 - tokens)
    return gl.where(there, keys, -1).to(gl.int32)


@gluon.jit
def _better_whole(units, rank, T, splits, programs, TILES: gl.constexpr, COST: gl.constexpr):
    """Whether the tasks of the last round had better not be cut, as 0 or 1.

    Args:
        units: of work in each token's tasks.
        rank: the tokens' places in the order.
        T: tokens.
        splits: pieces of a task that is cut.
        programs: of the launch.
        TILES: tiles of heads.
        COST: of a task or piece besides its blocks.
    """
    tasks = T * TILES
    late = rank >= tasks // programs * programs // TILES
    total = gl.sum(units, 0) * TILES // programs
    rest = gl.sum(gl.where(late, units, 0), 0) * TILES // programs
    longest = gl.max(units, 0)
    largest = gl.max(gl.where(late, units, 0), 0)
    whole = gl.maximum(longest, total + largest // 2)
    piece = (gl.maximum(largest - COST, 0) + splits - 1) // splits + COST
    return (whole <= gl.maximum(longest, total - rest) + piece + _CUTTING).to(gl.int32)


@gluon.jit
def order_tokens(
    lists, order, T, splits, programs, TILES: gl.constexpr, COST: gl.constexpr,
    SIZE: gl.constexpr, MIXED: gl.constexpr,
):  # fmt: skip
    """Write down in which order tokens are taken; every program does, and all write the same.

    SIZE: a power of two of at least T, 128 and at most 512. If MIXED, returns, and writes behind
    the order, whether the tasks of the last round are better not cut.
    """
    K: gl.constexpr = gl.BlockedLayout([SIZE // 128], [32], [4], [0])
    L: gl.constexpr = gl.BlockedLayout([SIZE // 128, 32], [32, 1], [4, 1], [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    keys = gl.allocate_shared_memory(gl.int32, [SIZE], FLAT)
    keys.store(_rank_keys(lists, gl.arange(0, SIZE, layout=K), T))
    chunks = view(keys, gl.int32, [SIZE // 32, 32], FLAT)
    tokens = gl.arange(0, SIZE, layout=gl.SliceLayout(1, L))
    key = _rank_keys(lists, tokens, T)
    own = gl.expand_dims(key, 1)
    rank = tokens * 0
    for chunk in range(0, (T + 31) // 32):
        others = gl.expand_dims(chunks.index(chunk).load(gl.SliceLayout(0, L)), 0)
        rank += gl.sum((others > own).to(gl.int32), 1)
    gl.store(order + rank, tokens, mask=tokens < T)
    if MIXED:
        units = gl.where(key >= 0, key // _TOKENS + COST, 0)
        uncut = _better_whole(units, rank, T, splits, programs, TILES, COST)
        gl.store(order + T, uncut)
        return uncut
    else:
        return T * 0
