"""Which selector takes a call, and how many tokens are scored at a time: a pure function of sizes.

Four forms, all exact and with the same result:

- "all": no row has more than k entries; nothing is scored.
- "whole": a row is short enough to be held and searched as it is. One program a row.
- "groups": the score kernel also writes the largest score of every 16 entries. The k-th largest of
  these bounds the k-th score from below, so only the k best groups are read. One program a row.
- "samples": 2,048 samples of a row give a threshold that a few more than k scores pass; they are
  collected and selected from. One program a row, or several for few long rows.

docs/performance/indexer.md has the measurements behind the limits.
"""

from __future__ import annotations

import dataclasses

# Entries that share a maximum.
GROUP = 16
# The group selector holds all maxima of a row and all scores of k groups in registers.
MOST_GROUPS = 16_384
MOST_GROUP_K = 1024
# Rows that are held whole: where there are no more groups than are kept, maxima tell nothing. Many
# rows of more than a few thousand entries are better sampled.
MOST_WHOLE, _WHOLE_OF_MANY = 16_384, 4096
# Maxima cost prefill scores a tenth, and are worth it where rows are long.
_MANY_ROWS, _SHORT_ROW = 256, 16_384
# Few long rows: programs of the sample selector that share a row.
_FEW_ROWS, _LONG_ROW, _PARTS = 4, 131_072, 32
# Parts of a context in one launch, and tiles that take as long as starting a program.
_MOST_PARTS, _TILES_TO_START = 132, 8
# A round is a whole number of waves of two rows a multiprocessor, if it is as large as that.
_ROWS_OF_A_WAVE = 2


@dataclasses.dataclass(frozen=True)
class SelectionPlan:
    """How a call selects.

    Attributes:
        form: "all", "whole", "groups" or "samples".
        rows: tokens that are scored at a time.
        kept: k, rounded up to a power of two.
        elements: "whole": entries of a row, rounded up to a power of two.
        groups: "groups": maxima of a row, rounded up to a power of two.
        parts: "samples": programs that share a row.
        capacity: "samples": candidates of a part that there is room for.
    """

    form: str
    rows: int
    kept: int
    elements: int = 0
    groups: int = 0
    parts: int = 1
    capacity: int = 0

    def row_bytes(self, entries: int) -> int:
        """Scratch that a token of a round takes."""
        if self.form == "all":
            return 0
        scores = 4 * padded_entries(entries)
        if self.form == "whole":
            return scores
        if self.form == "groups":
            return scores + 4 * padded_entries(entries) // GROUP + 4 * self.kept
        return scores + self.parts * (8 * self.capacity + 4)


def padded_entries(entries: int) -> int:
    """Columns of the scores of ``entries`` entries: whole groups of maxima, lines of 64 bytes."""
    return -(-entries // (GROUP * GROUP)) * GROUP * GROUP


def plan_selection(
    rows: int,
    entries: int,
    k: int,
    *,
    multiprocessors: int,
    scratch_bytes: int,
    histograms: bool = False,
) -> SelectionPlan:
    """The plan of a call.

    Args:
        rows: tokens.
        entries: entries that a token may see.
        k: entries that it keeps.
        multiprocessors: of the device.
        scratch_bytes: bound of what ``rows`` rows of the plan take.
        histograms: the device selects by histograms in shared memory, for which neither few rows
            nor many are worth sampling.

    Raises:
        ValueError: one token takes more than ``scratch_bytes``.
    """
    kept = _power_of_two(max(k, 16))
    if entries <= k:
        return SelectionPlan("all", rows, kept)
    held = histograms or rows <= _MANY_ROWS
    most_whole = min(GROUP * k, MOST_WHOLE if held else _WHOLE_OF_MANY)
    few = rows <= _FEW_ROWS and entries >= _LONG_ROW and not histograms
    short = not held and entries <= _SHORT_ROW
    groups = _power_of_two(-(-entries // GROUP))
    if entries <= most_whole:
        plan = SelectionPlan("whole", rows, kept, elements=_power_of_two(max(entries, 64)))
    elif few or short or k > MOST_GROUP_K or groups > MOST_GROUPS:
        parts = _PARTS if few else 1
        # Room for three standard deviations of sampling and then some.
        capacity = 4096 if k <= 1024 else 8192
        plan = SelectionPlan("samples", rows, kept, parts=parts, capacity=capacity)
    else:
        plan = SelectionPlan("groups", rows, kept, groups=max(groups, 64))
    most = scratch_bytes // plan.row_bytes(entries)
    if most < 1:
        raise ValueError(
            f"select_topk: scratch_bytes must be >= {plan.row_bytes(entries)} for rows of "
            f"{entries} entries, got {scratch_bytes}"
        )
    wave = _ROWS_OF_A_WAVE * multiprocessors
    if most < rows and most >= wave:
        most = most // wave * wave
    elif most < rows and most > 1:
        most = most // 2 * 2
    return dataclasses.replace(plan, rows=min(rows, most))


def prefill_parts(pairs: int, tiles: int, multiprocessors: int) -> int:
    """Parts of the context for a kernel of which a multiprocessor holds one program.

    The number that leaves the fewest multiprocessors idle in the last wave, counting what a program
    spends before its first tile.

    Args:
        pairs: programs side by side, each over all tiles.
        tiles: tiles of the context.
        multiprocessors: of the device.
    """

    def cost(parts: int) -> int:
        waves = -(-pairs * parts // multiprocessors)
        return waves * (-(-tiles // parts) + _TILES_TO_START)

    return min(range(1, max(1, min(_MOST_PARTS, tiles)) + 1), key=cost)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
