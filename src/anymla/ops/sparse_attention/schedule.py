"""How the Hopper kernels share out the work of a call, as a function of shapes and the machine.

Lengths lie on the device and are not known here, so this decides by the widths of the lists; the
kernels then cut every token's own blocks. Three ways:

    whole     every program takes whole tasks in turn and writes their results
    aligned   every task is cut into the same number of pieces, which are merged
    stream    the blocks of all tasks are cut into one range for every program: no program waits,
              whatever the lengths and the number of tasks, and about one task a program is merged
"""

from __future__ import annotations

import dataclasses

KEYS = 64  # listed rows of a block
FEW_HEADS = 32  # up to here keys are the rows of matrices, above it heads
# Time of starting and ending a task, or a piece of one, in blocks: the slope and the offset of
# times measured on an H200.
TASK_COST = 4
# Time of merging, likewise.
_MERGE_COST = 1.0
# The stream's programs look at all lengths first.
_LOOK_COST = 0.5
MOST_STREAM_TOKENS = 2048
# Lists so long, in blocks, are taken to differ much in length from token to token.
_LONG = 24
_FEWEST_STREAM_TOKENS = 4
# Blocks of a piece in a batch-invariant call, and the most pieces.
_INVARIANT_BLOCKS = 4
_MOST_INVARIANT = 8


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a call is launched.

    Attributes:
        heads: heads of a tile: 16 or 32 (keys are rows), or 64.
        tiles: tiles of heads.
        programs: of the launch.
        splits: pieces of every task; 1 for whole tasks, and for the stream.
        stream: see the file.
    """

    heads: int
    tiles: int
    programs: int
    splits: int
    stream: bool

    @property
    def cut(self) -> bool:
        """Whether tasks may be cut, so that a merge has to follow."""
        return self.stream or self.splits > 1

    def pieces(self, tokens: int) -> int:
        """How many pieces have a number, so many tokens at a time."""
        tasks = tokens * self.tiles
        return tasks + self.programs if self.stream else tasks * self.splits

    def slots(self, tokens: int) -> int:
        """How many pieces have room for their sums, so many tokens at a time."""
        if not self.cut:
            return 1
        return 2 * self.programs if self.stream else tokens * self.tiles * self.splits

    @property
    def most_pieces(self) -> int:
        """The most pieces that a task is cut into."""
        return self.programs if self.stream else self.splits


def tile_heads(heads: int) -> int:
    """Heads of a tile."""
    if heads > FEW_HEADS:
        return 64
    return 16 if heads <= 16 else 32


def blocks_of(widths: tuple[int, ...]) -> int:
    """Blocks of a token whose lists are full; at least one."""
    return max(1, sum(-(-width // KEYS) for width in widths))


def choose(
    tokens: int,
    heads: int,
    widths: tuple[int, ...],
    processors: int,
    *,
    lengths: bool = False,
    batch_invariant: bool = False,
) -> Schedule:
    """The schedule of a call.

    Args:
        tokens: T, at least 1.
        heads: query heads H, at least 1.
        widths: columns of the lists.
        processors: multiprocessors of the device.
        lengths: the lists have lengths of their own.
        batch_invariant: cut a token the same way in any batch.
    """
    tile = tile_heads(heads)
    tiles = -(-heads // tile)
    tasks = tokens * tiles
    blocks = blocks_of(widths)
    if batch_invariant:
        splits = min(_MOST_INVARIANT, -(-blocks // _INVARIANT_BLOCKS))
        return Schedule(tile, tiles, min(tasks * splits, processors), splits, False)
    best = Schedule(tile, tiles, min(tasks, processors), 1, False)
    least = -(-tasks // processors) * (blocks + TASK_COST) * 1.0
    room = min(processors // tasks, blocks)
    if room > 1:
        share = -(-blocks // room)
        splits = -(-blocks // share)
        cost = share + TASK_COST + _MERGE_COST
        if cost < least:
            best, least = Schedule(tile, tiles, tasks * splits, splits, False), cost
    if not _FEWEST_STREAM_TOKENS <= tokens <= MOST_STREAM_TOKENS:
        return best
    even = tasks * (blocks + TASK_COST) / processors
    cost = even + TASK_COST + _MERGE_COST + _LOOK_COST
    uneven = lengths and blocks >= _LONG and cost < 2 * least
    if even >= TASK_COST and (cost < least or uneven):
        best = Schedule(tile, tiles, processors, 1, True)
    return best
