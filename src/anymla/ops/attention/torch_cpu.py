"""Sparse attention on a CPU: share decoded rows between tokens where that pays, else gather.

A tile of consecutive tokens either attends densely to the union of its rows, with a count of how
often each token lists each row, or every token gathers its own rows. The union wins in prefill
(windows of neighbours overlap, and so do ratio-128 entries), gathering in decode.

One token, a decode step of one request, is computed in as few calls as possible: a call costs more
here than most of the arithmetic (0.27 ms against 0.38 ms through the general path, 8 heads and 228
rows on one core), so there is no tile, no mask and no second dtype.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from anymla.ops.attention.torch_rows import ListedRows, RowSource, read_side_by_side

_TILE_TOKENS = 64
_SMALLEST_TILE = 8
_GATHER_ROWS = 4096  # 4 MB of bfloat16 rows: stays in a shared cache
_DENSE_SCORES = 1 << 22  # 16 MB of float32 scores a tile

# Costs in units of one (head, row) pair of the two matrix products, measured on an AVX512-BF16
# core: decoding a row takes as long as 13 pairs, and products with fewer than 16 heads as long as
# with 16, since they are bound by reading the rows.
_DECODE_COST = 13
_MIN_HEADS_COST = 16
# Below this many (head, row) pairs, two float32 products take no longer than the three in bfloat16
# of ``attend_rows`` (measured on an AVX512-BF16 core).
FLOAT32_PAIRS = 5120
_MANY_QUERIES = 16  # measured on an AVX512-BF16 core


@dataclasses.dataclass(frozen=True)
class ValidRows:
    """Rows, and the slots that each token lists, all of which exist.

    Attributes:
        rows: rows that the slots number.
        slots: integers [T, width]; an unused column holds some slot that a token does list.
        valid: mask [T, width] bool of the used columns; None for all.
        widths: one past the last used column of each token, [T] int64; None if valid is.
    """

    rows: RowSource
    slots: Tensor
    valid: Tensor | None = None
    widths: Tensor | None = None

    def listed(self, start: int, end: int) -> int:
        """Return the number of columns that tokens start..end use, gaps included."""
        if self.widths is None:
            return (end - start) * self.slots.shape[1]
        return int(self.widths[start:end].sum())


def attend_cpu(
    q: Tensor,
    listed: list[ListedRows],
    sink: Tensor | None,
    scale: float,
    out: Tensor,
    peaks: Tensor | None,
) -> Tensor:
    """Attend as ``interface.sparse_attention`` does, into a contiguous ``out``, and return lse.

    ``peaks`` [T, H], unless None, takes the largest scores.
    """
    tokens = len(q)
    if tokens == 1:
        single = attend_single(q, listed, sink, scale, out, peaks)
        if single is not None:
            return single
    scopes = [scope for each in listed if (scope := _valid_rows(*each)) is not None]
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = torch.empty(q.shape[:2], dtype=wide)
    if not scopes or not q.numel():
        out.zero_()
        if peaks is not None:
            peaks.fill_(-torch.inf)
        return lse.fill_(-torch.inf)
    # bfloat16 products leave 2^-17 of a score, which whoever asks for scores would see.
    dtype = _compute_dtype(q, scopes) if peaks is None else wide
    work = _Work(q, scopes, sink, scale, out, lse, peaks, dtype)
    for start in range(0, tokens, _TILE_TOKENS):
        work.tile(start, min(start + _TILE_TOKENS, tokens))
    return lse


@dataclasses.dataclass(frozen=True)
class _Work:
    q: Tensor
    scopes: list[ValidRows]
    sink: Tensor | None
    scale: float
    out: Tensor
    lse: Tensor
    peaks: Tensor | None
    dtype: torch.dtype

    def tile(self, start: int, end: int) -> None:
        """Attend tokens start..end, splitting the tile while halves may share rows better."""
        tokens = end - start
        if tokens < _SMALLEST_TILE:
            self.gather(start, end)
            return
        distinct = [
            torch.unique(scope.slots[start:end], return_inverse=True) for scope in self.scopes
        ]
        union = sum(len(slots) for slots, _ in distinct)
        listed = sum(scope.listed(start, end) for scope in self.scopes)
        heads = self.q.shape[1]
        dense_cost = union * (_DECODE_COST + tokens * heads)
        gather_cost = listed * (_DECODE_COST + max(heads, _MIN_HEADS_COST))
        wasteful = union * tokens > 1.25 * listed and tokens > 2 * _SMALLEST_TILE
        fits = union * tokens * heads <= _DENSE_SCORES or tokens < 2 * _SMALLEST_TILE
        if fits and not wasteful and dense_cost < gather_cost:
            if not self.dense(start, end, distinct):
                self.gather(start, end)
        elif tokens > _SMALLEST_TILE and union * 4 < listed:
            middle = start + tokens // 2
            self.tile(start, middle)
            self.tile(middle, end)
        else:
            self.gather(start, end)

    def dense(self, start: int, end: int, distinct: list[tuple[Tensor, Tensor]]) -> bool:
        """Attend all tokens to the union of their rows, or return False.

        ``distinct`` holds the slots [U] of each source, and the place in them of each column,
        [tokens, n].

        A row that is not finite would reach tokens that do not list it, as 0 * NaN; and the count
        of a row that is listed twice would be part of the largest score.
        """
        unions = [
            _union(scope, start, end, *each)
            for scope, each in zip(self.scopes, distinct, strict=True)
        ]
        counts = torch.cat([counts for _, counts in unions], 1)
        if self.peaks is not None and (counts > 1).any():
            return False
        rows = self._read([slots.unsqueeze(0) for slots, _ in unions], end - start)
        if not torch.isfinite(rows.sum()):
            return False
        gaps = any(scope.valid is not None for scope in self.scopes)
        empty = counts.sum(1) == 0 if gaps else None
        self.lse[start:end] = attend_rows(
            self.q[start:end].to(rows.dtype),
            rows,
            bias=counts.to(self.lse.dtype).log(),
            empty=empty,
            sink=self.sink,
            scale=self.scale,
            out=self.out[start:end],
            peaks=None if self.peaks is None else self.peaks[start:end],
        )
        return True

    def gather(self, start: int, end: int) -> None:
        """Attend every token to its own rows, tokens of similar width together."""
        uniform = sum(scope.slots.shape[1] for scope in self.scopes)
        ragged = [scope.widths for scope in self.scopes if scope.widths is not None]
        if not ragged or end - start == 1:
            step = max(1, _GATHER_ROWS // uniform)
            for first in range(start, end, step):
                tokens = slice(first, min(first + step, end))
                self._gather_rows(tokens, self.out[tokens])
            return
        uniform = sum(scope.slots.shape[1] for scope in self.scopes if scope.widths is None)
        widths = torch.stack(ragged).sum(0)[start:end] + uniform
        order = widths.argsort(descending=True)
        first = 0
        while first < len(order):
            step = max(1, _GATHER_ROWS // max(int(widths[order[first]]), 1))
            members = order[first : first + step] + start
            result = torch.empty_like(self.out[: len(members)])
            self._gather_rows(members, result)
            self.out[members] = result
            first += step

    def _gather_rows(self, tokens: slice | Tensor, out: Tensor) -> None:
        slots, valid = [], []
        for scope in self.scopes:
            width = scope.slots.shape[1]
            if scope.widths is not None:
                width = int(scope.widths[tokens].max())
            slots.append(scope.slots[tokens, :width])
            used = None if scope.valid is None else scope.valid[tokens, :width]
            valid.append(None if used is None or bool(used.all()) else used)
        if not any(each.shape[1] for each in slots):
            out.zero_()
            self.lse[tokens] = -torch.inf
            if self.peaks is not None:
                self.peaks[tokens] = -torch.inf
            return
        rows = self._read(slots, 1)
        bias = empty = None
        if any(used is not None for used in valid):
            masks = [
                torch.ones_like(here, dtype=torch.bool) if used is None else used
                for here, used in zip(slots, valid, strict=True)
            ]
            mask = torch.cat(masks, 1)
            rows.view(-1, rows.shape[2]).index_fill_(0, (~mask).flatten().nonzero()[:, 0], 0)
            bias = torch.where(mask, 0.0, -torch.inf).to(self.lse.dtype)
            empty = ~mask.any(1)
        peaks = None if self.peaks is None else torch.empty_like(self.peaks[tokens])
        self.lse[tokens] = attend_rows(
            self.q[tokens].to(rows.dtype),
            rows,
            bias=bias,
            empty=empty,
            sink=self.sink,
            scale=self.scale,
            out=out,
            peaks=peaks,
        )
        if self.peaks is not None and peaks is not None:
            self.peaks[tokens] = peaks

    def _read(self, slots: list[Tensor], tokens_per_group: int) -> Tensor:
        """Read rows [groups, n, D] at slots [groups, n] of each source, side by side."""
        count = sum(each.shape[1] for each in slots)
        shape = (len(slots[0]), count, self.q.shape[2])
        sources = [(scope.rows, at) for scope, at in zip(self.scopes, slots, strict=True)]
        pairs = shape[0] * count * tokens_per_group * self.q.shape[1]
        if self.dtype == torch.bfloat16 and pairs > FLOAT32_PAIRS:
            rows = torch.empty(shape, dtype=torch.bfloat16)
            if read_side_by_side(sources, rows):
                return rows
        rows = torch.empty(shape, dtype=torch.promote_types(self.dtype, torch.float32))
        read_side_by_side(sources, rows)
        return rows


def _valid_rows(rows: RowSource, index: Tensor, lengths: Tensor | None) -> ValidRows | None:
    """Validate the slots that tokens list of one source; None if no token lists any."""
    tokens, columns = index.shape
    size = rows.size
    if not index.numel() or not size:
        return None
    shortest = columns
    if lengths is not None:
        if tokens == 1:
            shortest = columns = min(max(int(lengths), 0), columns)
        else:
            low, high = torch.aminmax(lengths)
            shortest, columns = min(max(int(low), 0), columns), min(int(high), columns)
        if columns <= 0:
            return None
        index = index[:, :columns]
    low, high = torch.aminmax(index)
    if shortest == columns and int(low) >= 0 and int(high) < size:
        return ValidRows(rows, index)
    column = torch.arange(columns)
    valid = (index >= 0) & (index < size)
    if lengths is not None:
        valid &= column < lengths.unsqueeze(1)
    widths = (valid * (column + 1)).amax(1)
    columns = int(widths.max())
    if not columns:
        return None
    valid, index = valid[:, :columns], index[:, :columns]
    # The first, and not the largest, which would depend on where the rows lie.
    some_listed_slot = index[valid][0]
    return ValidRows(rows, torch.where(valid, index, some_listed_slot), valid, widths)


def _union(
    scope: ValidRows, start: int, end: int, slots: Tensor, place: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a tile's distinct slots [U] and each token's count of each of them, [tokens, U].

    They come in the order in which the tile lists them first, so that sums do not depend on where
    the rows lie.
    """
    counts = torch.zeros(end - start, len(slots), dtype=torch.float32)
    used = counts.new_ones(()) if scope.valid is None else scope.valid[start:end].float()
    counts.scatter_add_(1, place, used.expand(place.shape))
    first = place.new_full(slots.shape, place.numel())
    first.scatter_reduce_(0, place.view(-1), torch.arange(place.numel()), "amin")
    order = first.argsort()
    return slots[order], counts[:, order]


@functools.cache
def _bfloat16_products_are_fast() -> bool:
    """Return True if this CPU multiplies bfloat16 matrices faster than float32 ones."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(hasattr(torch.cpu, probe) and getattr(torch.cpu, probe)() for probe in probes)


def _compute_dtype(q: Tensor, scopes: list[ValidRows]) -> torch.dtype:
    """Choose the dtype of the matrix products' operands."""
    if q.dtype == torch.bfloat16 and _bfloat16_products_are_fast():
        narrow = all(scope.rows.dtype == torch.bfloat16 for scope in scopes)
        return torch.bfloat16 if narrow else torch.float32
    return torch.promote_types(q.dtype, torch.float32)


def attend_single(
    q: Tensor,
    listed: list[ListedRows],
    sink: Tensor | None,
    scale: float,
    out: Tensor,
    peaks: Tensor | None,
) -> Tensor | None:
    """Attend one token to rows that all exist; arguments as for ``attend_rows``.

    Returns:
        lse [1, H] in float32 (float64 for float64 q); None, with nothing written, if the call is
        too large or lists nothing, or something that is not there.
    """
    sources = []
    total = 0
    for rows, index, lengths in listed:
        count = index.shape[1]
        if lengths is not None:
            count = min(count, int(lengths))
        if count <= 0:
            continue
        slots = index[:, :count]
        low, high = torch.aminmax(slots)
        if int(low) < 0 or int(high) >= rows.size:
            return None
        sources.append((rows, slots))
        total += count
    if not 0 < total * q.shape[1] <= FLOAT32_PAIRS:
        return None
    wide = torch.promote_types(q.dtype, torch.float32)
    rows_read = torch.empty((1, total, q.shape[2]), dtype=wide)
    read_side_by_side(sources, rows_read)
    matrix = rows_read[0]
    scores = torch.mm(q[0].to(wide), matrix.T).mul_(scale)
    weights = torch.softmax(scores, -1)
    # The largest weight is exp(0) / sum, which gives the sum back.
    largest = scores.amax(-1)
    if peaks is not None:
        peaks[0] = largest
    lse = largest.sub_(weights.amax(-1).log_())
    if sink is not None:
        weights.mul_(torch.sigmoid(lse - sink).unsqueeze(-1))
    out[0] = torch.mm(weights, matrix[:, : out.shape[2]])
    return lse.unsqueeze(0)


def attend_rows(
    q: Tensor,
    rows: Tensor,
    *,
    bias: Tensor | None,
    empty: Tensor | None,
    sink: Tensor | None,
    scale: float,
    out: Tensor,
    peaks: Tensor | None,
) -> Tensor:
    """Attend tokens in groups that share their rows.

    Args:
        q: [T, H, D] in the dtype of ``rows``. T = groups * tokens per group.
        rows: [groups, n, D], finite or listed by every token of the group; n >= 1.
        bias: added to the scores, [T, n] float32 or wider: log of how often the token lists the
            row, -inf where it does not. None for zeros.
        empty: [T] bool, tokens without rows (their bias is -inf throughout), or None.
        sink: one logit per head without a value, [H], or None.
        scale: factor of the scores.
        out: [T, H, value dim] contiguous, any float dtype; written.
        peaks: [T, H] to write the largest scores into, or None; a bias is part of them.

    Returns:
        lse [T, H] in the dtype of the scores.
    """
    tokens, heads, dim = q.shape
    groups, count, _ = rows.shape
    # bfloat16 products of many queries run faster as rows times queries, all others the other way
    # round: scores are [groups, n, tokens of the group, H] or [groups, tokens of the group, H, n].
    by_group = q.reshape(groups, -1, dim)
    rows_first = rows.dtype == torch.bfloat16 and by_group.shape[1] >= _MANY_QUERIES
    axis = 1 if rows_first else 3
    if rows_first:
        scores = _scores(rows, by_group.transpose(1, 2), scale).view(groups, count, -1, heads)
    else:
        scores = _scores(by_group, rows.transpose(1, 2), scale).view(groups, -1, heads, count)
    if bias is not None:
        bias = bias.view(groups, -1, count)
        scores += bias.transpose(1, 2).unsqueeze(3) if rows_first else bias.unsqueeze(2)
    if empty is not None:
        empty = empty.view(groups, -1, 1)
        scores.masked_fill_(empty.unsqueeze(axis), 0)
    # torch's fused softmax takes half the time of exp, sum and divide; its largest value is
    # exp(0) / sum, which gives the sum back.
    weights = torch.softmax(scores, axis)
    largest = scores.amax(axis)
    if peaks is not None:
        kept = largest if empty is None else largest.masked_fill(empty, -torch.inf)
        peaks.copy_(kept.view(peaks.shape))
    lse = largest.sub_(weights.amax(axis).log_())
    keep = None if sink is None else torch.sigmoid(lse - sink)
    if empty is not None:
        lse.masked_fill_(empty, -torch.inf)
        weights.masked_fill_(empty.unsqueeze(axis), 0)
    if keep is not None:
        rounded = torch.empty(weights.shape, dtype=rows.dtype, device=rows.device)
        weights = torch.mul(weights, keep.unsqueeze(axis), out=rounded)
    weights = weights.to(rows.dtype)
    weights = (
        weights.view(groups, count, -1).transpose(1, 2)
        if rows_first
        else weights.view(groups, -1, count)
    )
    values = rows[..., : out.shape[-1]]
    if out.dtype == rows.dtype:
        torch.bmm(weights, values, out=out.view(groups, -1, out.shape[-1]))
    else:
        out.copy_(torch.bmm(weights, values).view(out.shape))
    return lse.view(tokens, heads)


def _scores(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Scaled matrix products in float32 (float64 for float64 operands).

    A bfloat16 product is accumulated in float32 and then rounded to bfloat16, which scores do not
    survive. Computing it again minus the rounded result leaves the part that was lost; the sum of
    both is good to 2^-17, and two bfloat16 products cost less than one in float32. The scale comes
    last: oneDNN's products of factor 0 leave their result as it was allocated.
    """
    if left.dtype != torch.bfloat16:
        return torch.bmm(left, right).mul_(scale)
    high = torch.bmm(left, right)
    low = torch.baddbmm(high, left, right, beta=-1)
    return high.float().add_(low).mul_(scale)
