"""How the Hopper kernels share out the work of a call, as a function of shapes and the machine.

Lengths lie on the device and are not known here, so this decides by the widths of the lists; the
kernels then cut every token's own blocks. The ways:

    whole     every program takes whole tasks in turn and writes their results
    aligned   every task is cut into the same number of pieces, which are merged
    mixed     whole tasks as long as there is one for every program, the rest cut as above
    stream    the blocks of all tasks are cut into one range for every program, which knows the
              lengths and cuts only where that pays
    widths    aligned, pieces are those of full lists, and the kernel need not wait for lengths
    single    likewise, a block each
    planned   a stream that was cut up before, once for all layers of a step; see ``plan``

Whole and mixed can be ordered: programs take the longest tokens first, and in every second round in
the opposite order, so that who had a long one gets a short one.
"""

from __future__ import annotations

import dataclasses
import enum

KEYS = 64  # listed rows of a block
FEW_HEADS = 32  # up to here keys are the rows of matrices, above it heads
# 17 to 32 heads are half a tile of 64 from so many tokens on: these tiles take less time a block,
# and more until the first is done.
_FEW_TOKENS = 3
# Pieces of so few blocks may be those of full lists: a token with short ones takes no longer than
# one with full ones.
_FEW_BLOCKS = 3
# Lists of so few blocks, windows alone, take less than a task's start and end. Those are shorter
# for tiles of 16 heads, if there is a multiprocessor for each.
_SHORT, _NARROW = 2, 16
# Time of starting and ending a task, or a piece of one, in blocks: the slope and the offset of
# times measured on an H200.
TASK_COST = 4
# Time of merging a piece a program, likewise.
_MERGE_COST = 1.5
# Lists of so many blocks that have lengths may differ in length from token to token by more than
# a stream costs; with 18 blocks it was slower on an H200 even where lengths were random.
_LONG = 32
MOST_STREAM_TOKENS = 2048
_FEWEST_STREAM_TOKENS = 4
# Programs compare each token with each to order them.
MOST_ORDERED_TOKENS = 512
# Blocks of a piece in a batch-invariant call, and the most pieces.
_INVARIANT_BLOCKS = 4
_MOST_INVARIANT = 8


class Stream(enum.IntEnum):
    """How a kernel finds its pieces: by number, by a range of all blocks, or mixed; their order."""

    NO = 0
    YES = 1
    MIXED = 2
    PLANNED = 3
    ORDERED = 4
    MIXED_ORDERED = 5
    SINGLE = 6
    ORDERED_BEFORE = 7
    MIXED_ORDERED_BEFORE = 8
    WIDTHS = 9


_ORDERED = (Stream.ORDERED, Stream.ORDERED_BEFORE)
_MIXED_ORDERED = (Stream.MIXED_ORDERED, Stream.MIXED_ORDERED_BEFORE)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a call is launched.

    Attributes:
        heads: heads of a tile: 16 or 32 (keys are rows), or 64.
        tiles: tiles of heads.
        programs: of the launch.
        splits: pieces of a task that is cut by numbers; 1 for none.
        stream: see ``Stream``.
        invariant: results must not depend on the other tokens of the call.
    """

    heads: int
    tiles: int
    programs: int
    splits: int = 1
    stream: Stream = Stream.NO
    invariant: bool = False

    @property
    def cut(self) -> bool:
        """Whether tasks may be cut, so that a merge has to follow."""
        return self.stream not in (Stream.NO, *_ORDERED) or self.splits > 1

    @property
    def aligned(self) -> bool:
        """Whether all tasks are cut into as many pieces, or none is."""
        return self.stream in (Stream.NO, *_ORDERED, Stream.SINGLE, Stream.WIDTHS)

    @property
    def ranged(self) -> bool:
        """Whether programs have ranges of all blocks."""
        return self.stream in (Stream.YES, Stream.PLANNED)

    @property
    def mixed(self) -> bool:
        """Whether only tasks that do not fill a round of programs are cut."""
        return self.stream in (Stream.MIXED, *_MIXED_ORDERED)

    @property
    def ordered(self) -> bool:
        """Whether programs take the longest tokens first."""
        return self.stream in (*_ORDERED, *_MIXED_ORDERED)

    @property
    def planned(self) -> bool:
        """Whether ranges or order are worked out before."""
        before = (Stream.PLANNED, Stream.ORDERED_BEFORE, Stream.MIXED_ORDERED_BEFORE)
        return self.stream in before

    def first_cut(self, tokens: int) -> int:
        """Tasks before this one are whole."""
        return tokens * self.tiles // self.programs * self.programs if self.mixed else 0

    def pieces(self, tokens: int) -> int:
        """How many pieces have a number, so many tokens at a time."""
        tasks, whole = tokens * self.tiles, self.first_cut(tokens)
        if self.ranged:
            return tasks + self.programs
        return whole + (tasks - whole) * self.splits

    def slots(self, tokens: int) -> int:
        """How many pieces have room for their sums, so many tokens at a time."""
        if not self.cut:
            return 1
        if self.ranged:
            return 2 * self.programs
        return self.pieces(tokens) - self.first_cut(tokens)


def tile_heads(heads: int) -> int:
    """Heads of a tile where tokens are few."""
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
    planned: bool = False,
    wide: bool = False,
) -> Schedule:
    """The schedule of a call.

    Args:
        tokens: T, at least 1.
        heads: query heads H, at least 1.
        widths: columns of the lists.
        processors: multiprocessors of the device.
        lengths: the lists have lengths of their own.
        batch_invariant: cut a token the same way in any batch.
        planned: ranges of a stream, or the order, are or can be worked out before; see ``plan``.
        wide: rows are those of V3.2, which have tiles of 64 heads alone.
    """
    tile = tile_heads(heads)
    if tile == FEW_HEADS and tokens >= _FEW_TOKENS and not batch_invariant:
        tile = 64
    blocks = blocks_of(widths)
    narrow = tokens * -(-heads // _NARROW) <= processors and not (batch_invariant or wide)
    if tile > FEW_HEADS and blocks <= _SHORT and narrow:
        tile = _NARROW
    tiles = -(-heads // tile)
    tasks = tokens * tiles
    if batch_invariant:
        splits = min(_MOST_INVARIANT, -(-blocks // _INVARIANT_BLOCKS))
        return Schedule(tile, tiles, min(tasks * splits, processors), splits, invariant=True)
    if lengths and blocks >= _LONG and _FEWEST_STREAM_TOKENS <= tokens <= MOST_STREAM_TOKENS:
        even = tasks * (blocks + TASK_COST) / processors
        if even >= 2 * TASK_COST:
            stream = Stream.PLANNED if planned else Stream.YES
            return Schedule(tile, tiles, processors, stream=stream)
    chosen = _by_numbers(tile, tiles, tasks, blocks, processors)
    if lengths and tasks > processors and tokens <= MOST_ORDERED_TOKENS:
        kinds = _MIXED_ORDERED if chosen.stream == Stream.MIXED else _ORDERED
        return dataclasses.replace(chosen, stream=kinds[planned])
    if chosen.stream == Stream.NO and chosen.splits > 1:
        if chosen.splits == blocks:
            return dataclasses.replace(chosen, stream=Stream.SINGLE)
        if -(-blocks // chosen.splits) <= _FEW_BLOCKS:
            return dataclasses.replace(chosen, stream=Stream.WIDTHS)
    return chosen


def seen_tokens(schedule: Schedule, tokens: int) -> int:
    """Tokens that programs look at, at least; few sizes, because each is compiled."""
    if schedule.stream in (Stream.ORDERED, Stream.MIXED_ORDERED):
        return 256 if tokens <= 256 else MOST_ORDERED_TOKENS
    if schedule.stream == Stream.YES:
        return stream_size(tokens)
    return 128


def stream_size(tokens: int) -> int:
    """Tokens that a stream's programs look at."""
    return 512 if tokens <= 512 else MOST_STREAM_TOKENS


def _by_numbers(tile: int, tiles: int, tasks: int, blocks: int, processors: int) -> Schedule:
    """Whole, aligned or mixed, whichever ends first if all lists are full."""
    rounds, rest = divmod(tasks, processors)
    whole = (rounds + (rest > 0)) * (blocks + TASK_COST)
    plain = Schedule(tile, tiles, min(tasks, processors))
    room = min(processors // rest, blocks) if rest else 1
    if room == 1:
        return plain
    share = -(-blocks // room)
    splits = -(-blocks // share)
    if rounds * (blocks + TASK_COST) + share + TASK_COST + _MERGE_COST >= whole:
        return plain
    if rounds:
        return Schedule(tile, tiles, processors, splits, Stream.MIXED)
    return Schedule(tile, tiles, tasks * splits, splits)
